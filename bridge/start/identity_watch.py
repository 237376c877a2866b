"""The periodic look at the delay topics' identity (identity.py), and the partitions that are held by it.

A partition that is held is left out of what the pipeline delivers, as if another instance owned it: the pipeline gives
it up between two transactions, and nothing of it is read, delivered or committed.

A log that was cut is mended with the next look, if the topic is the same then. In this order, and what a crash right
after each step costs: 1. the partition is held (nothing: the next start, here or elsewhere, compares the log with what
the committed state says was read under which leaders); 2. O goes back to the cut in Kafka, and the cut gets a number
there (nothing: an index that does not know that number is not trusted, wherever it is); 3. the index is opened anew
without what it has of that partition, which is read from the log's start again, and released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

import structlog

from bridge.errors import BridgeError, EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.leader_epochs import Stretch
from bridge.kafka.membership import Ownership
from bridge.start.first_commits import ANOTHER_TOPIC, NO_TOPIC, StartFacts
from bridge.start.identity import EXPLAINED, PASSES, Doubt, Looked, believed, findings, refusal, stretches
from bridge.start.roll_window import TOO_SHORT
from bridge.telemetry.heartbeats import Beat, unwatched
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError
from timerstore.rows.sources import SourceName
from timerstore.store import TimerStore

LOOK_S: Final = 5.0
"""Between two looks where no partition is delivered."""
COUNT_S: Final = 10.0
"""How long it is counted, in one look, what is pending above cuts."""
TOLD_S: Final = 86_400.0
"""How long /readyz tells of a log that was cut."""

log = structlog.get_logger("bridge.start.identity_watch")


class Change(Enum):
    """What a look leads to."""

    NONE = "nothing"
    HELD = "other partitions are held than before"
    MENDED = "the index is to be opened anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A log that was cut `at` an offset, though it had been read up to `expected` under leaders up to `epoch` (-1: not
    known); `dropped` pending messages at least were above (None: they were not counted)."""

    at: int
    expected: int
    epoch: int
    dropped: int | None

    def __str__(self) -> str:
        records = f"{self.expected - self.at} from offset {self.at} on"
        return records if self.dropped is None else f"{records}; {self.dropped} pending messages are dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    doubt: Doubt
    error: BridgeError | None
    cut: Cut | None = None

    @property
    def detail(self) -> str:
        words = EXPLAINED.get(self.doubt) or (self.error.message if self.error is not None else "")
        return words if self.cut is None else f"{words}: {self.cut}"


class IdentityWatch:
    """See the module. One thread looks; any may ask for `alarms` and `counts`."""

    def __init__(
        self,
        clock: Clock,
        on_cut: Callable[[str, int], None] = lambda topic, records: None,
        beat: Beat = unwatched,
    ) -> None:
        """`on_cut` is told the topic of a log that was cut, and how many records the brokers have lost with that;
        `beat` is that of the thread that looks."""
        self._clock = clock
        self._on_cut = on_cut
        self._beat = beat
        self._ids: dict[str, str] = {}
        self._holds: Mapping[SourceName, _Hold] = {}
        self._before: Mapping[SourceName, Looked] = {}
        self._replaced: frozenset[str] = frozenset()
        """Topics that were found replaced, be they owned or not: another process is needed for the new ones."""
        self._looked_s = 0.0
        self._told: list[tuple[float, str]] = []

    # ---- what is held

    def without(self, owned: frozenset[SourceName]) -> frozenset[SourceName]:
        """Those of the owned partitions that are not held. Raises the error where none is left, and the doubt does not
        pass. What is not owned any more is forgotten."""
        self._holds = {name: hold for name, hold in self._holds.items() if name in owned}
        left = owned - self._holds.keys()
        lasting = [hold.error for hold in self._holds.values() if hold.error is not None]
        if not left and lasting:
            raise lasting[0]
        return left

    @property
    def replaced(self) -> frozenset[str]:
        """The topics of which the index, if it has any of them, is another's."""
        missing = {name[0] for name, hold in self._holds.items() if hold.doubt is Doubt.MISSING}
        return self._replaced | missing

    def holds_any(self, names: Iterable[SourceName]) -> bool:
        """Whether one of these partitions is held."""
        return not self._holds.keys().isdisjoint(names)

    def refuse(self, error: BridgeError, owned: Collection[SourceName], delivered: Collection[SourceName] = ()) -> bool:
        """Hold the partitions with which a start would not go on, as `error` says, while others of `owned` are
        delivered. Returns whether there are such partitions, and others, unless they may be there again soon; at the
        process's own start there are none. What the brokers do not answer concerns those that come beside `delivered`
        ones."""
        topic, partition = error.fields.get("topic"), error.fields.get("partition")
        if error.code == ANOTHER_TOPIC:
            partition = None  # it names one of all
        new = {name for name in owned if name[0] == topic and partition in (None, name[1])} - self._holds.keys()
        is_missing, is_lasting = error.code == NO_TOPIC, isinstance(error, StateError) or error.code in TOO_SHORT
        if isinstance(error, EnvironmentFailure) and not is_lasting and delivered:
            come = {*owned} - {*delivered} - self._holds.keys()
            log.warning("identity-unknown", reason=str(error))
            self._hold(dict.fromkeys(come, _Hold(doubt=Doubt.UNANSWERED, error=None)))
            return bool(come)
        if not is_lasting or not self._ids or not new or not (is_missing or set(owned) - new - self._holds.keys()):
            return False
        if is_missing:
            self._hold({name: _Hold(doubt=Doubt.MISSING, error=None) for name in new})
            return True
        doubt = Doubt.REPLACED if error.code == ANOTHER_TOPIC else Doubt.REFUSED
        self._hold({name: _Hold(doubt=doubt, error=error) for name in new})
        return True

    def holds_cut(self, cluster: Cluster, facts: StartFacts) -> bool:
        """Hold those of the owned partitions whose logs were cut since their states were committed, by whichever
        process; returns whether there are some."""
        read, looked, ids = {}, {}, {}
        for name in facts.owned - self._holds.keys():
            state, topic = facts.committed.get(name), facts.topics[name[0]]
            if state is None or state.read_under is None or state.topic_id != topic.topic_id:
                continue
            end, epoch = state.read_under
            read[name] = Looked(expected=end, marks=Watermarks(start=0, end=end, epoch=epoch))
            looked[name] = Looked(expected=end, marks=topic.marks(name[1]), committed=state.offset)
            ids[name[0]] = topic.topic_id
        found, unsure = self._new_holds(cluster, ids, read, looked, lambda _name, _offset: None, is_told=False)
        # What was known before they went says nothing of what another instance has made of them.
        others = {name: each for name, each in self._before.items() if name not in facts.owned}
        doubtful = {name for name, each in looked.items() if believed(each, read[name]) is not each}
        sure = {name: looked[name] for name in looked.keys() - found.keys() - unsure - doubtful}
        self._before = {**others, **read, **sure}
        self._ids = {**ids, **self._ids} if found else self._ids
        self._hold(found)
        return bool(found)

    @property
    def read_under(self) -> dict[SourceName, tuple[int, int]]:
        """By partition: everything below an offset was read under leaders of no later epoch, as of the last look."""
        before = self._before.items()
        return {name: (at.read, at.marks.epoch) for name, at in before if at.marks is not None and at.marks.epoch >= 0}

    # ---- the look

    def look(
        self,
        group: Ownership,
        cluster: Cluster,
        store: TimerStore | None = None,
        topic_ids: Mapping[str, str] = MappingProxyType({}),
        looked: Mapping[SourceName, Looked] | None = MappingProxyType({}),
        *,
        is_told: bool = False,
    ) -> Change:
        """Look at the partitions that are delivered from `store` (`looked`; None: it is not time) and those that are
        held.

        `topic_ids` are those under which the pipeline has begun. `is_told`: a reader does not find what it is to read.
        Brokers that do not answer leave everything as it is.
        """
        now_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()

        def is_over() -> bool:
            self._beat()
            return self._clock.monotonic_s() - now_s > COUNT_S

        def count(name: SourceName, offset: int) -> int | None:
            try:
                return None if store is None else store.pending_from(name, offset, now_ms, is_over)
            except TimerStoreError as error:
                _warn([name], error.message)
                return None

        self._ids = {**topic_ids, **self._ids}
        if looked is None or not self._ids or (not looked and now_s - self._looked_s < LOOK_S):
            return Change.NONE
        self._looked_s = now_s
        try:
            ids = cluster.topic_ids(sorted({*self._ids, *(topic for topic, _ in self._holds)}))
            # What the pipeline still has to give up may be committed by it.
            given_up = {name: hold for name, hold in self._holds.items() if name not in looked}
            free = {name: each for name, each in looked.items() if name not in self._holds}
            before = self._before
            # Two clients that say the same are believed.
            now = free if is_told else {name: believed(each, before.get(name)) for name, each in free.items()}
            _warn([name for name in free if now[name] is not free[name]], "a former leader has answered")
            new, unsure = self._new_holds(cluster, ids, before, now, count, is_told=is_told)
            self._before = {
                name: before.get(name, each) if each.marks is None or name in unsure else each
                for name, each in now.items()
                if name not in new
            }
            self._hold(new)
            change = self._review(group, cluster, ids, given_up)
            return Change.HELD if new and change is Change.NONE else change
        except EnvironmentFailure as error:
            log.warning("identity-unknown", reason=error.message)
            return Change.NONE

    def alarms(self) -> tuple[str, ...]:
        """In words, for /readyz."""
        now_s = self._clock.monotonic_s()
        held = [f"{topic}/{p} is held: {hold.detail}" for (topic, p), hold in sorted(self._holds.items())]
        return (*held, *(text for until_s, text in self._told if now_s < until_s))

    def counts(self) -> dict[tuple[str, str], int]:
        """Partitions that are held, by topic and doubt."""
        found: dict[tuple[str, str], int] = {}
        for (topic, _), hold in self._holds.items():
            found[topic, hold.doubt.value] = found.get((topic, hold.doubt.value), 0) + 1
        return found

    # ---- its parts

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
        """And the partitions that may be cut, but do not answer."""
        found, shorter = {}, set()
        for name, doubt in findings(self._ids, ids, looked).items():
            if doubt is Doubt.TRUNCATED:
                shorter.add(name)
            # Between what was read and the log's start there may be nothing but the ends of transactions, which a
            # reader that is at work will pass.
            elif doubt is not Doubt.DELETED or is_told or _stands_still(before.get(name), looked[name]):
                found[name] = _Hold(doubt=doubt, error=refusal(name, doubt))
        wanted = stretches(before, {name: each for name, each in looked.items() if name not in found}, shorter)
        told = self._cuts(cluster, wanted)
        for name in sorted(shorter | {name for name, at in told.items() if at is not None}):
            cut = _cut(looked[name], wanted.get(name), told.get(name), is_searched=name in told)
            cut = replace(cut, dropped=count(name, cut.at))
            found[name] = _Hold(doubt=Doubt.TRUNCATED, error=None, cut=cut)
        return found, wanted.keys() - told.keys()

    def _cuts(self, cluster: Cluster, wanted: Mapping[SourceName, Stretch]) -> dict[SourceName, int | None]:
        try:
            told = cluster.cuts(wanted, self._beat)
        except EnvironmentFailure as error:
            _warn(wanted, error.message)
            return {}
        _warn(wanted.keys() - told.keys(), "their records cannot be read")
        return told

    def _hold(self, new: Mapping[SourceName, _Hold]) -> None:
        for (topic, partition), hold in new.items():
            log.error(
                "partition-in-doubt",
                topic=topic,
                partition=partition,
                doubt=hold.doubt.value,
                detail=hold.detail,
                hint="It is neither read nor delivered nor committed; the others go on.",
            )
        self._holds = {**self._holds, **new}
        self._replaced |= {name[0] for name, hold in new.items() if hold.doubt is Doubt.REPLACED}

    def _review(
        self, group: Ownership, cluster: Cluster, ids: Mapping[str, str], held: Mapping[SourceName, _Hold]
    ) -> Change:
        """Look again at what is held, and is given up."""
        changes = {Change.NONE}
        for name, hold in held.items():
            try:
                changes.add(self._reviewed(group, cluster, ids, name, hold))
            except EnvironmentFailure as error:  # others are looked at, and new holds take effect
                _warn([name], error.message)
            except StateError as error:
                self._hold({name: _Hold(doubt=Doubt.REFUSED, error=error)})
                changes.add(Change.HELD)
        return next(each for each in (Change.MENDED, Change.HELD, Change.NONE) if each in changes)

    def _reviewed(
        self, group: Ownership, cluster: Cluster, ids: Mapping[str, str], name: SourceName, hold: _Hold
    ) -> Change:
        known, is_there = self._ids.get(name[0]), name[0] in ids
        if is_there and known not in (None, ids[name[0]]) and hold.error is None:
            self._hold({name: _Hold(doubt=Doubt.REPLACED, error=refusal(name, Doubt.REPLACED))})
            return Change.HELD
        if is_there and hold.doubt in PASSES:
            self._release(name)
            return Change.HELD
        if not is_there or hold.cut is None or not self._mend(group, cluster, name, hold.cut):
            return Change.NONE
        self._release(name)
        return Change.MENDED

    def _release(self, name: SourceName) -> None:
        self._holds = {other: hold for other, hold in self._holds.items() if other != name}
        log.info("partition-released", topic=name[0], partition=name[1])

    def _mend(self, group: Ownership, cluster: Cluster, name: SourceName, cut: Cut) -> bool:
        """Move O back to where the log was cut; returns whether the partition may go on."""
        marks = cluster.watermarks([name])[name]
        if 0 <= marks.epoch <= cut.epoch:
            return False  # a former leader: under one leader no log ever ends earlier
        at = min(marks.end, cut.expected)
        if cut.epoch >= 0:
            told = self._cuts(cluster, {name: Stretch(epoch=cut.epoch, start=marks.start, end=at)})
            if name not in told:
                return False
            at = at if (later := told[name]) is None else later
        if -1 in (cut.epoch, marks.epoch):
            at = min(at, cut.at)  # no epoch tells what was written since
        if at >= cut.expected:
            return True  # a leader had not known its log's end yet
        owned = group.assignment()
        if name not in owned:
            return False  # it is another instance's by now
        state = group.read_committed_states([name])[name]
        if state is None or not group.commit_states({name: state.rewound(at, self._clock.now_ms())}, owned):
            return False
        self._on_cut(name[0], cut.expected - at)
        text = f"{name[0]}/{name[1]}: {EXPLAINED[Doubt.TRUNCATED]}: {cut}"
        self._told.append((self._clock.monotonic_s() + TOLD_S, text))
        log.error(
            "log-truncated",
            topic=name[0],
            partition=name[1],
            offset=at,
            records=cut.expected - at,
            dropped=cut.dropped,
            hint="The brokers have lost acknowledged records (an election of a replica that was behind?): what was "
            "pending of them is dropped. Their producers must send them again.",
        )
        return True


def _stands_still(old: Looked | None, now: Looked) -> bool:
    return old is not None and old.marks is not None and old.marks.start > old.expected == now.expected


def _cut(looked: Looked, stretch: Stretch | None, later: int | None, *, is_searched: bool) -> Cut:
    """Of a log that ends too early, or has records of `later` leaders."""
    epoch, marks = -1 if stretch is None else stretch.epoch, looked.marks
    end, told = (looked.read, -1) if marks is None else (marks.end, marks.epoch)
    if is_searched and later is None:
        epoch = max(epoch, told - 1)  # leaders in between have cut nothing, and may have written records that were read
    return Cut(at=min(end, looked.read) if later is None else later, expected=looked.read, epoch=epoch, dropped=None)


def _warn(names: Collection[SourceName], reason: str) -> None:
    if names:
        partitions = ", ".join(f"{topic}/{partition}" for topic, partition in sorted(names))
        log.warning("identity-unknown", partitions=partitions, reason=reason)
