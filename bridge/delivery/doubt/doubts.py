"""Transactions that ended unasked: the records of each that are in Kafka, and its messages in doubt.

    such a transaction ------ its id has a new epoch -----> its records are looked up (look_up.py)
    a record is there ------------------------------------> its row is finished without another one
    a record is not there --------------------------------> its row is pending again
    a topic cannot be read (no Read; no answer, or too much to read, for a minute)
                              ----------------------------> the partitions of its rows are held
    held -- `delay-bridge resolve --as aborted` ----------> the rows are pending: those delivered before are repeated
    held -- `delay-bridge resolve --as committed` --------> the rows are finished: those not delivered are lost

Knowledge is kept by partition, and outlives a store; of partitions that are held also the process (doubt_file.py). It
does not outlive the ownership of a partition: for another instance the committed state counts: the rows are pending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from bridge.delivery.doubt.doubt_file import Doubt, DoubtFile
from bridge.delivery.doubt.findings import Part
from bridge.delivery.doubt.log_notes import States
from bridge.delivery.doubt.records import Planned, See, Wanted
from bridge.errors import EnvironmentFailure
from bridge.telemetry.metrics import Metrics
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Int64s
from timerstore.rows.sources import SourceName, Sources

UNANSWERED_S: Final = 60.0
CHOICE_S: Final = 1.0
"""Between two looks at what an operator has chosen."""
DOUBT: Final = "unasked-end"
"""The doubt of a partition that is held, in metrics."""

log = structlog.get_logger("bridge.delivery.doubt")

Read = Callable[[Collection[str], Mapping[SourceName, int], int, See], dict[str, str]]
"""As `LookUp`."""


class Choice(Protocol):
    """What an operator has chosen, by place; as `Choices`."""

    def follow(self, name: SourceName, offset: int) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a transaction: its rows, and for each batch the topic, the partitions, and the keys of its
    rows."""

    planned: Sequence[Planned]
    sent: Sequence[tuple[str, Collection[int], Int64s]]
    began_ms: int


class Doubts:
    """See the module. The dispatcher's thread; `held` and `alarms` any."""

    def __init__(
        self,
        *,
        read: Read,
        is_committed: Choice,
        is_aborted: Choice,
        letter_topics: Collection[str],
        file: DoubtFile,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._read = read
        self._is_committed, self._is_aborted = is_committed, is_aborted
        self._letter_topics = letter_topics
        self._file = file
        self._clock = clock
        self._metrics = metrics
        self.written: dict[int, Part] = {}
        """What rows have in Kafka, by packed (source, offset); the same object always."""
        self._by_name: dict[SourceName, dict[int, Part]] = {}
        self._firsts: dict[SourceName, int] = {}
        """The key of offset 0, of the partitions that the store has."""
        self._held: dict[SourceName, Doubt] = {}
        self._is_loaded = False
        self._asked_s: float | None = None
        self._looked_s = 0.0

    def settle(self, output: Output, states: States, sources: Sources) -> None:
        """Look up the records of a transaction: its id has a new epoch, and its rows go back to the store after this.
        Before it the partitions had these `states`. Raises EnvironmentFailure without an answer, for UNANSWERED_S at
        most."""
        wanted = Wanted(output.planned, sources, self._letter_topics)
        own = {(topic, number) for topic, numbers, _ in output.sent for number in numbers} & states.keys()
        topics = {topic for topic, _, _ in output.sent} - {topic for topic, _ in sources}
        if self._asked_s is None:
            self._asked_s = self._clock.monotonic_s()
        try:
            unread = self._read(topics, {name: states[name].offset for name in own}, output.began_ms, wanted.see)
        except EnvironmentFailure as failure:
            if self._clock.monotonic_s() - self._asked_s < UNANSWERED_S:
                raise
            unread = dict.fromkeys(topics | {topic for topic, _ in own}, str(failure))
        self._asked_s = None
        self._note(wanted.seen, sources)
        self._hold(output.sent, unread, states, sources)
        found = sum(Part.RECORD in part for part in wanted.seen.values())
        self._metrics.rows_found(found)
        rows = sum(len(piece.keys) for piece in output.planned)
        log.warning("transaction-looked-up", rows=rows, found=found, unread=", ".join(sorted(unread)))

    def _note(self, seen: Mapping[int, Part], sources: Sources) -> None:
        for key, part in seen.items():
            mine = self._by_name.setdefault(sources.name(key >> OFFSET_BITS), {})
            mine[key & OFFSET_MAX] = mine.get(key & OFFSET_MAX, Part.NONE) | part
        self.number(sources)

    def _hold(
        self,
        sent: Iterable[tuple[str, Collection[int], Int64s]],
        unread: Mapping[str, str],
        states: States,
        sources: Sources,
    ) -> None:
        delay_topics = {topic for topic, _ in sources}
        rows: dict[SourceName, dict[int, Part]] = {}
        reasons: dict[SourceName, str] = {}
        for topic, _, keys in (each for each in sent if each[0] in unread):
            sought = Part.RECORD | Part.NEXT if topic in delay_topics else Part.RECORD
            for key in keys.tolist():
                if sought & ~self.written.get(key, Part.NONE):
                    name, offset = sources.name(key >> OFFSET_BITS), key & OFFSET_MAX
                    mine = rows.setdefault(name, {})
                    mine[offset] = mine.get(offset, Part.NONE) | sought
                    reasons[name] = f"{topic}: {unread[topic]}"
        for name, mine in rows.items():
            before = self._held[name].rows if name in self._held else {}
            written = self._by_name.get(name, {})
            self._held[name] = Doubt(position=states[name].position, rows={**before, **mine}, written=written)
            place = _place(name, self._held[name])
            log.error("messages-in-doubt", code="DB-4071", place=place, rows=len(mine), reason=reasons[name])

        if rows:
            self._keep()

    def _keep(self) -> None:
        try:
            self._file.write(self._held)
        except TimerStoreError as failure:
            log.warning("doubts-not-written", code=failure.code, reason=str(failure))

    # -- another store, other partitions

    def begin(self, states: States, sources: Sources) -> None:
        """A store was opened on these. The first time the process before may have left doubts. Raises
        EnvironmentFailure where they cannot be read."""
        found = {} if self._is_loaded else self._file.read()
        self._is_loaded, self._asked_s = True, None
        for name, doubt in found.items():
            if name in states and states[name].position == doubt.position:
                self._held[name], self._by_name[name] = doubt, dict(doubt.written)
                log.error(
                    "messages-in-doubt", code="DB-4071", place=_place(name, doubt), rows=len(doubt.rows), reason=""
                )
        self.number(sources)

    def number(self, sources: Sources) -> None:
        """The rows are named by these sources from now on."""
        self.written.clear()
        self._firsts = {name: sources.index(*name) << OFFSET_BITS for name in self._by_name if name in sources}
        for name, first in self._firsts.items():
            self.written.update((first | offset, part) for offset, part in self._by_name[name].items())

    def forget(self, names: Collection[SourceName]) -> None:
        """These partitions are another instance's."""
        if not self._held.keys().isdisjoint(names):
            self._held = {name: each for name, each in self._held.items() if name not in names}
            self._keep()
        for name in names:
            first = self._firsts.pop(name, 0)
            for offset in self._by_name.pop(name, {}):
                self.written.pop(first | offset, None)

    def finished(self, keys: Iterable[Int64s]) -> None:
        """The transaction with these rows is committed."""
        if not self.written:
            return
        over = {key for piece in keys for key in piece.tolist()} & self.written.keys()
        for key in over:
            del self.written[key]
        for name, first in self._firsts.items():
            self._by_name[name] = {o: part for o, part in self._by_name[name].items() if first | o not in over}

    # -- partitions that are held

    def held(self) -> frozenset[SourceName]:
        """Partitions of which nothing is delivered until an operator has chosen."""
        return frozenset(self._held)

    def counts(self) -> dict[tuple[str, str], int]:
        """How many partitions of each topic are held, by topic and doubt."""
        return dict(Counter((topic, DOUBT) for topic, _ in list(self._held)))

    def alarms(self) -> tuple[str, ...]:
        """In words, for the health."""
        held = sorted(dict(self._held).items())
        return tuple(f"{topic}/{number} is held: {each.text}" for (topic, number), each in held)

    def release(self, sources: Sources) -> bool:
        """Follow what an operator has chosen; whether anything is."""
        now_s = self._clock.monotonic_s()
        if not self._held or now_s - self._looked_s < CHOICE_S:
            return False
        self._looked_s = now_s
        try:
            chosen = [name for name in sorted(self._held) if self._is_chosen(name, self._held[name])]
        except EnvironmentFailure as failure:
            log.warning("choices-not-read", code=failure.code, reason=str(failure))
            return False
        for name in chosen:
            del self._held[name]
        if chosen:
            self._keep()
            self.number(sources)
        return bool(chosen)

    def _is_chosen(self, name: SourceName, held: Doubt) -> bool:
        is_committed = self._is_committed.follow(name, held.offset)
        if not is_committed and not self._is_aborted.follow(name, held.offset):
            return False
        if is_committed:
            mine = self._by_name.setdefault(name, {})
            for offset, part in held.rows.items():
                mine[offset] = mine.get(offset, Part.NONE) | part
        ending = "committed" if is_committed else "aborted"
        log.warning("doubt-resolved", place=_place(name, held), rows=len(held.rows), ending=ending)
        return True


def _place(name: SourceName, doubt: Doubt) -> str:
    return f"{name[0]}/{name[1]}/{doubt.offset}"
