"""The periodic look at the delay topics' identity (identity.py), and the held partitions.

The pipeline excludes a held partition as if another instance owned it: it gives the partition up between two
transactions, and neither reads, delivers nor commits it.

The look after a cut mends the log, if the topic is still the same. These are the steps, with the cost of a crash right
after each: 1. the partition is held (nothing: the next start, here or elsewhere, compares the log with the leader
epochs of the committed state); 2. in Kafka, O goes back to the cut, and the cut gets a number (nothing: no index
without that number is trusted); 3. the partition is released: its index is opened without its rows, and it is read
again from the log's start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import structlog

from bridge.errors import BridgeError, EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Topic, Watermarks
from bridge.kafka.leader_epochs import ReadStretch
from bridge.kafka.membership import Ownership
from bridge.start.cut_search import CutSearch, warn
from bridge.start.first_commits import ANOTHER_TOPIC, GONE, NO_TOPIC, SilentLogs, StartFacts
from bridge.start.identity import (
    EXPLAINED,
    PASSES,
    Looked,
    PartitionDoubt,
    believed,
    findings,
    lasting_error,
    stretches,
)
from bridge.start.roll_window import TOO_SHORT
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from bridge.telemetry.heartbeats import Beat, unwatched
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError

LOOK_S: Final = 5.0
"""The interval of looks while no partition is delivered."""
COUNT_S: Final = 10.0
"""The longest time, in one look, for counting the pending messages above cuts."""
TOLD_S: Final = 86_400.0
"""The time for which /readyz reports a cut log."""

log = structlog.get_logger("bridge.start.identity_watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A log that was cut `at` an offset after it had been read up to `expected`, under leaders up to `epoch` (-1:
    unknown). At least `dropped` pending messages were above the cut (None: not counted)."""

    at: int
    expected: int
    epoch: int
    dropped: int | None

    def __str__(self) -> str:
        records = f"{self.expected - self.at} from offset {self.at} on"
        return records if self.dropped is None else f"{records}; {self.dropped} pending messages are dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    doubt: PartitionDoubt
    error: BridgeError | None
    cut: Cut | None = None

    @property
    def detail(self) -> str:
        words = EXPLAINED.get(self.doubt) or (self.error.message if self.error is not None else "")
        return words if self.cut is None else f"{words}: {self.cut}"


UNANSWERED: Final = _Hold(doubt=PartitionDoubt.UNANSWERED, error=None)


class IdentityWatch:
    """Holds and releases partitions, as in the module docstring. One thread looks; any may call `alarms` and
    `counts`."""

    def __init__(
        self,
        clock: Clock,
        on_cut: Callable[[str, int], None] = lambda topic, records: None,
        beat: Beat = unwatched,
        searches: CutSearch | None = None,
    ) -> None:
        """`on_cut` gets the topic of a cut log and the number of records that the brokers have lost; `beat` is the
        heartbeat of the looking thread; `searches` are those for cuts (None: without marks)."""
        self._clock = clock
        self._on_cut = on_cut
        self._beat = beat
        self._searches = searches or CutSearch(beat)
        self._ids: dict[str, str] = {}
        self._holds: Mapping[SourceName, _Hold] = {}
        self._before: Mapping[SourceName, Looked] = {}
        self._replaced: frozenset[str] = frozenset()
        """Topics that were replaced, owned or not: the new ones need another process."""
        self._looked_s = 0.0
        self._told: list[tuple[float, str]] = []

    # ---- holds

    def without(self, owned: frozenset[SourceName]) -> frozenset[SourceName]:
        """The owned partitions without a hold. Forgets partitions that are no longer owned. If all are held, and no
        doubt passes, raises the error of one."""
        self._holds = {name: hold for name, hold in self._holds.items() if name in owned}
        self._searches.keep(owned)
        left = owned - self._holds.keys()
        lasting = [hold.error for hold in self._holds.values() if hold.error is not None]
        if not left and lasting and len(lasting) == len(self._holds):
            raise lasting[0]
        return left

    @property
    def replaced(self) -> frozenset[str]:
        """The topics whose rows in the index, if any, belong to another topic of the same name."""
        missing = {name[0] for name, hold in self._holds.items() if hold.doubt is PartitionDoubt.MISSING}
        return self._replaced | missing

    def holds_any(self, names: Iterable[SourceName]) -> bool:
        """Whether one of these partitions is held."""
        return not self._holds.keys().isdisjoint(names)

    def refuse(self, error: BridgeError, owned: Collection[SourceName], delivered: Collection[SourceName] = ()) -> bool:
        """Hold the partitions of `error`, which a start refuses, if others of `owned` are delivered. Returns whether it
        held any. If all partitions are concerned, it holds them only if the topic may soon exist again. At the start of
        the process it holds only silent partitions, and partitions with lost records. A request without an answer
        concerns the partitions that are not `delivered` yet."""
        if isinstance(error, SilentLogs):
            self._hold(dict.fromkeys(error.partitions.intersection(owned), UNANSWERED))
            return True
        topic, partition = error.fields.get("topic"), error.fields.get("partition")
        if error.code == ANOTHER_TOPIC:
            partition = None  # the error names one of several
        new = {name for name in owned if name[0] == topic and partition in (None, name[1])} - self._holds.keys()
        is_missing, is_lasting = error.code == NO_TOPIC, isinstance(error, StateError) or error.code in TOO_SHORT
        if isinstance(error, EnvironmentFailure) and not is_lasting and delivered:
            come = {*owned} - {*delivered} - self._holds.keys()
            log.warning("identity-unknown", reason=str(error))
            self._hold(dict.fromkeys(come, UNANSWERED))
            return bool(come)
        is_known = self._ids or error.code == GONE
        if not is_lasting or not is_known or not new or not (is_missing or set(owned) - new - self._holds.keys()):
            return False
        if is_missing:
            self._hold({name: _Hold(doubt=PartitionDoubt.MISSING, error=None) for name in new})
            return True
        doubt = PartitionDoubt.REPLACED if error.code == ANOTHER_TOPIC else PartitionDoubt.REFUSED
        self._hold({name: _Hold(doubt=doubt, error=error) for name in new})
        return True

    def holds_cut(self, cluster: Cluster, facts: StartFacts) -> bool:
        """Hold the owned partitions whose logs were cut after the commit of their states, by any process; returns
        whether it held any."""
        read, looked, ids = {}, {}, {}
        for name in facts.owned - self._holds.keys():
            state, topic = facts.committed.get(name), facts.topics[name[0]]
            if state is None or state.read_under is None or state.topic_id != topic.topic_id:
                continue
            end, epoch = state.read_under
            read[name] = Looked(expected=end, marks=Watermarks(start=0, end=end, epoch=epoch))
            looked[name] = Looked(expected=end, marks=topic.logs[name[1]], committed=state.offset)
            ids[name[0]] = topic.topic_id
        new, unsure = self._new_holds(cluster, ids, read, looked, lambda _name, _offset: None, is_told=False)
        # Earlier looks at these partitions are void: another instance may have owned them meanwhile.
        others = {name: at for name, at in self._before.items() if name not in facts.owned}
        doubtful = {name for name, at in looked.items() if believed(at, read[name]) is not at}
        sure = {name: looked[name] for name in looked.keys() - new.keys() - unsure - doubtful}
        self._before = {**others, **read, **sure}
        self._ids = {**ids, **self._ids} if new else self._ids
        self._hold(new)
        return bool(new)

    @property
    def read_under(self) -> dict[SourceName, tuple[int, int]]:
        """By partition (offset, epoch): by the last look, all records below the offset were read under leaders of at
        most this epoch."""
        before = self._before.items()
        return {name: (at.read, at.marks.epoch) for name, at in before if at.marks is not None and at.marks.epoch >= 0}

    # ---- the look

    def look(
        self,
        group: Ownership,
        cluster: Cluster,
        store: Stores | None = None,
        topic_ids: Mapping[str, str] = MappingProxyType({}),
        looked: Mapping[SourceName, Looked] | None = MappingProxyType({}),
        *,
        is_told: bool = False,
    ) -> bool:
        """Look at the partitions that are delivered from `store` (`looked`; None: not due yet) and at the held ones.

        `topic_ids` are the ids at the start of the pipeline. `is_told`: a reader misses the records at its position.
        Returns whether the set of held partitions has changed: without an answer from the brokers nothing does.
        """
        now_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()

        def is_over() -> bool:
            self._beat()
            return self._clock.monotonic_s() - now_s > COUNT_S

        def count(name: SourceName, offset: int) -> int | None:
            try:
                return None if store is None else store.pending_from(name, offset, now_ms, is_over)
            except TimerStoreError as error:
                warn([name], error.message)
                return None

        self._ids = {**topic_ids, **self._ids}
        names = sorted({*self._ids, *(topic for topic, _ in self._holds)})
        if looked is None or not names or (not looked and now_s - self._looked_s < LOOK_S):
            return False
        self._looked_s = now_s
        try:
            topics = cluster.topics(names)
            ids = {name: topic.topic_id for name, topic in topics.items()}
            silent = self._silent(cluster, topics)
            # The pipeline may still commit partitions that it has not given up yet.
            given_up = {name: hold for name, hold in self._holds.items() if name not in looked and name not in silent}
            free = {name: at for name, at in looked.items() if name not in self._holds}
            before = self._before
            # Two clients with the same answer are believed.
            now = free if is_told else {name: believed(at, before.get(name)) for name, at in free.items()}
            warn([name for name in free if now[name] is not free[name]], "a former leader has answered")
            new, unsure = self._new_holds(cluster, ids, before, now, count, is_told=is_told)
            self._before = {
                name: before.get(name, at) if at.marks is None or name in unsure else at
                for name, at in now.items()
                if name not in new
            }
            self._hold(new)
            return self._review(group, cluster, ids, given_up) or bool(new)
        except EnvironmentFailure as error:
            log.warning("identity-unknown", reason=error.message)
            return False

    def alarms(self) -> tuple[str, ...]:
        """Sentences about held partitions and cut logs, for /readyz."""
        now_s = self._clock.monotonic_s()
        held = [f"{topic}/{p} is held: {hold.detail}" for (topic, p), hold in sorted(self._holds.items())]
        return (*held, *self._searches.alarms(), *(text for until_s, text in self._told if now_s < until_s))

    def counts(self) -> dict[tuple[str, str], int]:
        """The number of held partitions by topic and doubt."""
        held: dict[tuple[str, str], int] = {}
        for (topic, _), hold in self._holds.items():
            held[topic, hold.doubt.value] = held.get((topic, hold.doubt.value), 0) + 1
        return held

    # ---- parts of a look

    def _new_holds(
        self,
        cluster: Cluster,
        ids: Mapping[str, str],
        before: Mapping[SourceName, Looked],
        looked: Mapping[SourceName, Looked],
        count: Callable[[SourceName, int], int | None],
        *,
        is_told: bool,
    ) -> tuple[dict[SourceName, _Hold], set[SourceName]]:
        """New holds, and the partitions that may be cut but do not answer."""
        new, shorter = {}, set()
        for name, doubt in findings(self._ids, ids, looked).items():
            if doubt is PartitionDoubt.TRUNCATED:
                shorter.add(name)
            # The gap before the log's start may contain only ends of transactions, which an active reader will pass.
            elif doubt is not PartitionDoubt.DELETED or is_told or _stands_still(before.get(name), looked[name]):
                new[name] = _Hold(doubt=doubt, error=lasting_error(name, doubt))
        wanted = stretches(before, {name: at for name, at in looked.items() if name not in new}, shorter)
        cuts = self._searches.find(cluster, looked, wanted)
        for name in sorted(shorter | {name for name, offset in cuts.items() if offset is not None}):
            cut = _cut(looked[name], wanted.get(name), cuts.get(name), is_searched=name in cuts)
            cut = replace(cut, dropped=count(name, cut.at))
            new[name] = _Hold(doubt=PartitionDoubt.TRUNCATED, error=None, cut=cut)
        return new, wanted.keys() - cuts.keys()

    def _silent(self, cluster: Cluster, topics: Mapping[str, Topic]) -> set[SourceName]:
        """The unanswered partitions whose leaders do not answer yet."""
        held = {
            name for name, hold in self._holds.items() if hold.doubt is PartitionDoubt.UNANSWERED and name[0] in topics
        }
        led = sorted(name for name in held if name[1] not in topics[name[0]].leaderless)
        try:
            return held - cluster.watermarks(led, of_all=False).keys()
        except EnvironmentFailure as error:
            warn(led, error.message)
            return held

    def _hold(self, new: Mapping[SourceName, _Hold]) -> None:
        for (topic, partition), hold in new.items():
            log.error(
                "partition-in-doubt",
                topic=topic,
                partition=partition,
                doubt=hold.doubt.value,
                detail=hold.detail,
                hint="The partition is neither read, delivered nor committed; the others go on.",
            )
        self._holds = {**self._holds, **new}
        self._replaced |= {name[0] for name, hold in new.items() if hold.doubt is PartitionDoubt.REPLACED}

    def _review(
        self, group: Ownership, cluster: Cluster, ids: Mapping[str, str], held: Mapping[SourceName, _Hold]
    ) -> bool:
        """Look again at held partitions that the pipeline has given up."""
        is_changed = False
        for name, hold in held.items():
            try:
                is_changed |= self._is_changed(group, cluster, ids, name, hold)
            except EnvironmentFailure as error:  # the others are still reviewed, and new holds take effect
                warn([name], error.message)
            except StateError as error:
                self._hold({name: _Hold(doubt=PartitionDoubt.REFUSED, error=error)})
                is_changed = True
        return is_changed

    def _is_changed(
        self, group: Ownership, cluster: Cluster, ids: Mapping[str, str], name: SourceName, hold: _Hold
    ) -> bool:
        old_id, is_there = self._ids.get(name[0]), name[0] in ids
        if is_there and old_id not in (None, ids[name[0]]) and hold.error is None:
            self._hold({name: _Hold(doubt=PartitionDoubt.REPLACED, error=lasting_error(name, PartitionDoubt.REPLACED))})
            return True
        if not is_there or not (
            hold.doubt in PASSES or (hold.cut is not None and self._mend(group, cluster, name, hold.cut))
        ):
            return False
        self._release(name)
        return True

    def _release(self, name: SourceName) -> None:
        self._holds = {other: hold for other, hold in self._holds.items() if other != name}
        log.info("partition-released", topic=name[0], partition=name[1])

    def _mend(self, group: Ownership, cluster: Cluster, name: SourceName, cut: Cut) -> bool:
        """Move O back to the cut of the log; returns whether the partition may go on."""
        marks = cluster.watermarks([name])[name]
        if 0 <= marks.epoch <= cut.epoch:
            return False  # a former leader: under one leader the end of a log never decreases
        at = min(marks.end, cut.expected)
        if cut.epoch >= 0:
            stretch = ReadStretch(epoch=cut.epoch, start=marks.start, end=at)
            cuts = self._searches.find(cluster, [name], {name: stretch})
            if name not in cuts:
                return False
            at = at if (later := cuts[name]) is None else later
        if -1 in (cut.epoch, marks.epoch):
            at = min(at, cut.at)  # without epochs, newer records cannot be recognised
        if at >= cut.expected:
            return True  # the leader did not know the end of its log yet
        owned = group.assignment()
        if name not in owned:
            return False  # another instance owns it by now
        state = group.read_committed_states([name])[name]
        if state is None or not group.commit_states({name: state.rewound(at, self._clock.now_ms())}, owned):
            return False
        self._on_cut(name[0], cut.expected - at)
        text = f"{name[0]}/{name[1]}: {EXPLAINED[PartitionDoubt.TRUNCATED]}: {cut}"
        self._told.append((self._clock.monotonic_s() + TOLD_S, text))
        log.error(
            "log-truncated",
            topic=name[0],
            partition=name[1],
            offset=at,
            records=cut.expected - at,
            dropped=cut.dropped,
            hint="The brokers have lost acknowledged records (perhaps by electing a replica that was behind). Their "
            "pending messages are dropped. The producers must send them again.",
        )
        return True


def _stands_still(old: Looked | None, now: Looked) -> bool:
    return old is not None and old.marks is not None and old.marks.start > old.expected == now.expected


def _cut(looked: Looked, stretch: ReadStretch | None, later: int | None, *, is_searched: bool) -> Cut:
    """The cut of a log that ends too early, or has records of later leaders from the offset `later` on."""
    epoch, marks = -1 if stretch is None else stretch.epoch, looked.marks
    end, leader_epoch = (looked.read, -1) if marks is None else (marks.end, marks.epoch)
    if is_searched and later is None:
        # Leaders in between cut nothing, and may have written records that were read.
        epoch = max(epoch, leader_epoch - 1)
    return Cut(at=min(end, looked.read) if later is None else later, expected=looked.read, epoch=epoch, dropped=None)
