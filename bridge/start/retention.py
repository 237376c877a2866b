"""The retention guard: it checks that a delay topic keeps its records until they are finished.

A record is needed until its entry is finished: at most W after its timestamp (then a copy replaces it), plus the delay
of reading and delivery. The rest of the retention is the *headroom*:

    retention - largest W in force - ingest lag - oldest overdue

`largest W in force` is that of all decode epochs in the log, not of the configuration. Retention by size is converted
to a time by the present log: the age of its oldest record, times the possible growth of the log.

Kafka deletes whole segments, so records live longer than their retention; a headroom below zero is an alarm, not a
loss. An unfinished record that is deleted from Kafka is still delivered from the local index, while that exists. The
log and an alarm report it; an end of the process would make it worse. Such rows in memory are flushed at once. The
committed state records the deletion (`gone_below`), so no start goes on without an index that covers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog

from bridge.errors import BridgeError, EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.membership import Ownership
from bridge.settings.model import Settings
from bridge.settings.units import format_duration_ms
from bridge.start.first_commits import StartPlan
from bridge.start.oldest import Oldest, OldestRecords
from bridge.start.roll_window import TopicLimits, Windows, limits_of, roll_bytes_max, roll_window_ms
from bridge.stores.directory import StoreDirectory
from bridge.stores.names import SourceName, texts_of
from bridge.stores.opening import Prepared
from bridge.stores.stores import Stores
from bridge.wire.committed_state import RESET_TO_COMMITTED, CommittedState
from bridge.wire.decode_epochs import without_deleted
from timerstore.clock import Clock

REFRESH_INTERVAL_S: Final = 60.0
GONE_INTERVAL_S: Final = 10.0
"""The interval of looks while records of pending messages are gone: until they are known to be finished, no start goes
on without the index."""
UNANSWERED_MS: Final = 60_000
"""After a question without an answer, the time without another one: reading waits for it."""
DOWNTIMES_MS: Final = (0, 3_600_000, 86_400_000, 7 * 86_400_000, 30 * 86_400_000)
"""Bounds of a downtime, for a retention that was lowered."""
FULL_ENOUGH: Final = 0.01
"""The share of its largest size that a log needs for an estimate of its time."""

RESTORE: Final = (
    "Restore store.directory if it still exists somewhere, perhaps with another instance, which then needs the "
    "partition; and raise the topic's retention. "
    f"To go on with the remaining records: {RESET_TO_COMMITTED}."
)

NoteGone = Callable[[Sequence[SourceName]], object]
"""`note_gone` for some partitions, with its other arguments bound: from then on other instances keep an index that may
have these messages, and no start goes on without one."""

log = structlog.get_logger("bridge.start.retention")


def kept_ms(limits: TopicLimits, oldest: Mapping[int, Oldest], marks: Mapping[int, Watermarks], now_ms: int) -> float:
    """The time for which a topic keeps its records, in ms (may be infinite); `oldest` and `marks` by partition."""
    kept = math.inf if limits.retention_ms < 0 else float(limits.retention_ms)
    if limits.retention_bytes < 0:
        return kept
    for partition, first in oldest.items():
        records = marks[partition].end - marks[partition].start
        share = records * first.mean_bytes / max(1, limits.retention_bytes)
        if share > FULL_ENOUGH:
            kept = min(kept, (now_ms - first.timestamp_ms) * max(1.0, 1 / share))
    return kept


def must_hold_what_is_pending(
    cluster: Cluster,
    offsets: Mapping[SourceName, int],
    marks: Mapping[SourceName, Watermarks],
    spare_ms: Mapping[SourceName, int],
    widest_ms: Mapping[SourceName, int],
    now_ms: int,
    note_gone: NoteGone = lambda _: None,
) -> None:
    """Refuse a start without an index if pending messages may have been deleted from the topic.

    `offsets` are the committed O of partitions with a deleted beginning and without an index; see `StartPlan` for
    `spare_ms` and `widest_ms`. `note_gone` is called with these partitions first. Raises StateError.

        spare time    messages may be gone
        > 0           after a longer downtime, as the first unread record tells; without unread records the downtime is
                      unknown
        <= 0          unless the oldest record that is left is older than W and the downtime together: the deleted ones
                      are older than that one
    """
    gone = []
    for name in sorted(offsets.keys() & spare_ms.keys()):
        reach = partial(_reaches, cluster, name, offsets[name], marks[name].end, now_ms)
        spare = spare_ms[name]
        is_held = (
            reach(spare)
            if spare > 0
            else any(
                reach(down) and _begins_before(cluster, name, now_ms - widest_ms[name] - down) for down in DOWNTIMES_MS
            )
        )
        gone += [] if is_held else [name]
    if not gone:
        return
    note_gone(gone)
    first = gone[0]
    if spare_ms[first] > 0:
        raise _gone(first, marks[first], down_for_more_than=format_duration_ms(spare_ms[first]))
    raise _gone(first, marks[first], window_of_deleted=format_duration_ms(widest_ms[first]))


def _reaches(cluster: Cluster, name: SourceName, offset: int, end: int, now_ms: int, down_ms: int) -> bool:
    """Whether all records below an offset were read, and no older one than `down_ms` is unread."""
    recent = cluster.first_after([name], max(0, now_ms - down_ms))[name] if offset < end else None
    return offset >= (end if recent is None else recent)


def _begins_before(cluster: Cluster, name: SourceName, time_ms: int) -> bool:
    """Whether a log has a record from before this time."""
    return cluster.first_after([name], 0) != cluster.first_after([name], max(0, time_ms))


def must_hold_what_is_gone(
    states: Mapping[SourceName, CommittedState],
    held: Mapping[SourceName, int],
    marks: Mapping[SourceName, Watermarks],
) -> None:
    """Refuse a start if records of pending messages are gone and the index, which has those below `held`, lacks some.
    Raises StateError."""
    for name, state in sorted(states.items()):
        if state.gone_below > held.get(name, 0):
            raise _gone(name, marks[name], gone_below=state.gone_below)


def _gone(name: SourceName, log: Watermarks, **fields: object) -> StateError:
    return StateError(
        "records of pending messages were deleted, and the local index does not cover them",
        hint=RESTORE,
        topic=name[0],
        partition=name[1],
        log_start=log.start,
        code="DB-4012",
        **fields,
    )


def ingest_start(
    cluster: Cluster,
    plan: StartPlan,
    resume: Mapping[SourceName, int | None],
    held: Mapping[SourceName, int],
    now_ms: int,
    note_gone: NoteGone,
) -> Mapping[SourceName, int]:
    """The first offsets of ingest. `resume` is the end of the index; below `held` the index has the records that Kafka
    has deleted; `note_gone` is called before a refusal. Raises StateError if messages may be lost."""
    must_hold_what_is_gone(plan.states, held, plan.log_marks)
    start, unheld = plan.ingest_start(resume, held)
    marks = {name: plan.log_marks[name] for name in unheld}
    must_hold_what_is_pending(cluster, unheld, marks, plan.spare_ms, plan.widest_ms, now_ms, note_gone)
    return start


def looked_into(plan: StartPlan, prepared: Prepared) -> tuple[StartPlan, dict[SourceName, int]]:
    """A plan after a look into the open indexes, and the offsets below which messages may be in an index alone. It
    concerns partitions whose retention does not explain their deleted records. An index without pending messages of
    such records proves that none is pending, and the windows of these records are forgotten."""
    starts = {name: plan.log_marks[name].start for name, spare in plan.spare_ms.items() if spare <= 0}
    gone = {name: start for name, start in starts.items() if prepared.stores[name].may_hold_below(start)}
    states = {
        name: replace(state, epochs=without_deleted(state.epochs, starts[name] + 1))
        for name, state in plan.states.items()
        if name in starts.keys() - gone.keys()
    }
    changed = {name for name, state in states.items() if state.epochs != plan.states[name].epochs}
    return replace(plan, states={**plan.states, **states}, changed=plan.changed | changed), gone


def note_gone(
    group: Ownership,
    assigned: frozenset[SourceName],
    directory: StoreDirectory | None,
    plan: StartPlan,
    names: Sequence[SourceName],
) -> None:
    """Commit that records of pending messages of planned partitions are gone. With the index of an earlier version it
    does nothing: that version must still start. Raises EnvironmentFailure, FencedError."""
    if names and not (directory and directory.has_index_of_earlier_version()):
        marked = {name: replace(plan.states[name], gone_below=plan.log_marks[name].start) for name in names}
        group.commit_states(marked, assigned)


class RetentionGuard:
    """Looks every minute, more often while records are gone, and whenever the start of a log rises; see the module
    docstring. One thread looks; any may read the results."""

    def __init__(
        self,
        settings: Settings,
        windows: Mapping[str, Windows],
        clock: Clock,
        oldest: OldestRecords,
        on_raised: Callable[[], None] = lambda: None,
    ) -> None:
        """`windows` by delay topic, for the owned partitions. `on_raised` is called if a topic takes larger copies than
        at the start."""
        self.headroom_s: Mapping[str, float] = {}
        """The headroom by delay topic at the last look; infinite without a retention."""
        self.trimmed: Mapping[str, int] = {}
        """By delay topic: the number of partitions with deleted unfinished records."""
        self.gone: Mapping[SourceName, int] = {}
        """The offset below which unfinished records of a partition are gone; 0: no longer any."""
        self.must_flush = False
        """Whether some of their rows are in memory alone, and need a flush."""
        self._settings = settings
        self._windows = windows
        self._clock = clock
        self._oldest = oldest
        self._on_raised = on_raised
        self._roll_bytes: dict[str, int] = {}
        """The largest copy by delay topic, as the decoder has it."""
        self._asked_ms: dict[str, int] = {}
        """The time of the last question about a topic's limit."""
        self._outgrown: set[str] = set()
        """Topics whose limit was raised: the present decoder refuses nothing of them any more."""
        self._looked_s: float | None = None
        self._starts: dict[SourceName, int] = {}
        self._in_memory: Sequence[SourceName] = ()
        self._told: dict[str, object] = {}

    def expect(
        self,
        states: Mapping[SourceName, CommittedState],
        windows: Mapping[str, Windows] = MappingProxyType({}),
        gone: Mapping[SourceName, int] = MappingProxyType({}),
    ) -> None:
        """Take the facts about new partitions from their committed states. Records of theirs may have a longer W. Below
        the offsets `gone` unfinished ones may be gone."""
        longest = {topic: max(each.largest_ms, self._windows[topic].largest_ms) for topic, each in windows.items()}
        self._windows = {
            topic: replace(each, largest_ms=longest.get(topic, each.largest_ms))
            for topic, each in self._windows.items()
        }
        self._roll_bytes |= {name[0]: state.epochs[-1].parameters.roll_bytes_max for name, state in states.items()}
        self.gone = {
            **self.gone,
            **{name: state.gone_below for name, state in states.items() if state.gone_below},
            **gone,
        }

    def refresh(
        self,
        cluster: Cluster,
        store: Stores,
        marks: Mapping[SourceName, Watermarks],
        lag_s: Mapping[SourceName, float],
    ) -> None:
        """Look again if that is due. `marks` are those of the owned partitions; `lag_s` is the lag of ingest in each.
        Without an answer from the brokers the old findings stay."""
        now_s = self._clock.monotonic_s()
        starts = {name: mark.start for name, mark in marks.items()}
        every_s = GONE_INTERVAL_S if any(self.gone.values()) else REFRESH_INTERVAL_S
        is_due = self._looked_s is None or now_s - self._looked_s >= every_s or bool(self._in_memory)
        if not marks or (starts == self._starts and not is_due and not self._oldest.has_news()):
            return
        self._looked_s, self._starts = now_s, starts
        try:
            limits = limits_of(cluster, self._windows)
            sized = [name for name in marks if limits[name[0]].retention_bytes >= 0]
            oldest = self._oldest.of_logs({name: marks[name] for name in sized})
        except EnvironmentFailure as error:
            log.warning("retention-unknown", reason=error.message)
            return
        self.look(store, limits, marks, oldest, lag_s)

    def look(
        self,
        store: Stores,
        limits: Mapping[str, TopicLimits],
        marks: Mapping[SourceName, Watermarks],
        oldest: Mapping[SourceName, Oldest],
        lag_s: Mapping[SourceName, float],
    ) -> None:
        now_ms = self._clock.now_ms()
        since_ms = store.waits_since_ms()
        overdue_ms = 0 if since_ms is None else max(0, now_ms - since_ms)
        headroom_s, gone = {}, dict.fromkeys(self._windows, 0)
        for topic, window in self._windows.items():
            mine = {partition: first for (name, partition), first in oldest.items() if name == topic}
            ends = {partition: mark for (name, partition), mark in marks.items() if name == topic}
            lag_ms = 1_000 * max((seconds for (name, _), seconds in lag_s.items() if name == topic), default=0.0)
            kept = kept_ms(limits[topic], mine, ends, now_ms)
            headroom_s[topic] = (kept - window.largest_ms - lag_ms - overdue_ms) / 1_000
            self._tell_headroom(topic, headroom_s[topic], window)
            self._tell_change(topic, limits[topic], window)
            self._follow_limit(topic, limits[topic])
        starts = {name: mark.start for name, mark in marks.items()}
        places = store.trimmed(starts)
        self._in_memory = [name for name, place in places.items() if place.is_unstored]
        self.must_flush = any(place.can_flush for place in places.values())
        short = {name: start for name, start in starts.items() if headroom_s.get(name[0], 0.0) < 0}
        self.gone = self._gone(store, starts, {*places, *store.may_hold_below(short)})
        trimmed = sorted({*places, *(name for name, bound in self.gone.items() if bound)})
        for topic, _ in trimmed:
            gone[topic] += 1
        if trimmed and self._told.get("trimmed") != (trimmed, self._in_memory):
            log.error(
                "unfinished-records-deleted",
                partitions=texts_of(trimmed),
                in_memory=texts_of(self._in_memory),
                hint="Kafka has deleted records of pending messages. They are delivered from store.directory, which "
                "must not be lost now. Those in_memory are written there as soon as possible; do not kill the process "
                "before. Raise retention.ms of the delay topic, or lower roll.window.",
            )
        self._told["trimmed"] = (trimmed, self._in_memory)
        self.headroom_s, self.trimmed = headroom_s, gone

    def _gone(
        self, store: Stores, starts: Mapping[SourceName, int], places: Collection[SourceName]
    ) -> dict[SourceName, int]:
        """Update the offsets below which records are gone, for `places`; a bound stays until no message below it can be
        pending. (`Stores.trimmed` may find them late, by the length of a segment. While the retention is too short,
        each row that may be pending counts as one of them.)"""
        bounds = {name: starts[name] if name in places else bound for name, bound in self.gone.items()}
        bounds |= {name: starts[name] for name in places}
        kept = store.may_hold_below(bounds)
        return {name: bound if name in kept else 0 for name, bound in bounds.items() if name in starts}

    def alarms(self) -> tuple[str, ...]:
        """Warnings for the operator while delivery continues."""
        in_memory = {topic for topic, _ in self._in_memory}
        short = [
            f"{topic}: retention is too short by {format_duration_ms(math.ceil(-seconds) * 1_000)}"
            for topic, seconds in self.headroom_s.items()
            if seconds < 0
        ]
        gone = [
            f"{topic}: records of pending messages were deleted in {count} partition{'s' * (count != 1)}; "
            f"they are delivered from {'memory' if topic in in_memory else 'store.directory'} alone"
            for topic, count in self.trimmed.items()
            if count
        ]
        return (*short, *gone)

    def _tell_headroom(self, topic: str, headroom_s: float, window: Windows) -> None:
        is_short = headroom_s < 0
        if is_short and not self._told.get(f"short {topic}"):
            log.error(
                "retention-too-short",
                topic=topic,
                headroom_s=round(headroom_s),
                window=format_duration_ms(window.largest_ms),
                hint="Raise the topic's retention, lower roll.window, or find the reason for the bridge's lag.",
            )
        self._told[f"short {topic}"] = is_short

    def has_outgrown(self, cluster: Cluster, refused: Mapping[str, int]) -> bool:
        """Whether topics take larger copies than the decoder knows, which has refused records of these times (ms) for
        their size. Brokers are asked again only about younger records. Without an answer the known limits count, for a
        while. Any thread."""
        if not self._outgrown.isdisjoint(refused):
            return True  # a new decoder is on its way
        now_ms = self._clock.now_ms()
        names = [name for name, ts in refused.items() if self._asked_ms.get(name, -1) < min(ts, now_ms)]
        if not names:
            return False
        try:
            limits = limits_of(cluster, names)
        except EnvironmentFailure as error:
            log.warning("retention-unknown", reason=error.message)
            self._asked_ms |= dict.fromkeys(names, now_ms + UNANSWERED_MS)
            return False
        self._asked_ms |= dict.fromkeys(names, now_ms)
        return any(self._follow_limit(name, limits[name]) for name in names)

    def _follow_limit(self, topic: str, limits: TopicLimits) -> bool:
        """Report a raised limit of the topic: the decoder refuses records that are too large for a copy. (A lowered
        limit is left to the next start: changes back and forth would fill the committed metadata.)"""
        wanted, before = roll_bytes_max(self._settings, limits), self._roll_bytes.get(topic)
        is_raised = before is not None and wanted > before
        if is_raised:
            self._outgrown.add(topic)
            log.info("roll-size-raised", topic=topic, bytes=wanted, before=before)
            self._on_raised()
        return is_raised

    def _tell_change(self, topic: str, limits: TopicLimits, window: Windows) -> None:
        """Report a change of the topic's retention. W stays the same while the bridge runs."""
        wanted: int | None
        try:
            wanted = roll_window_ms(self._settings, topic, limits)
            reason = f"a start would use {format_duration_ms(wanted)}"
        except BridgeError as error:
            wanted, reason = None, error.message
        if wanted != window.current_ms and self._told.get(f"window {topic}", window.current_ms) != wanted:
            log.warning(
                "roll-window-outdated",
                topic=topic,
                window=format_duration_ms(window.current_ms),
                retention_ms=limits.retention_ms,
                reason=reason,
                hint="The topic's retention was changed. Restart the bridge.",
            )
        self._told[f"window {topic}"] = wanted
