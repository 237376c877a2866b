"""An open transaction: its taken, planned and sent rows, and the committed states after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from confluent_kafka import TopicPartition

from bridge.delivery.doubt.doubts import Output
from bridge.delivery.doubt.log_notes import LogNotes, States
from bridge.delivery.doubt.records import Planned
from bridge.delivery.plan.due_rows import Sent
from bridge.delivery.plan.planner import Plan
from bridge.delivery.plan.spans import Delivery
from bridge.delivery.producer.outcomes import FailedRecord
from bridge.delivery.setbacks import Setback, setbacks
from bridge.delivery.targets.target import Target
from bridge.errors import InternalError
from bridge.stores.loan import Loan
from bridge.stores.names import SourceName, Sources, sources_of
from bridge.telemetry.counts import Counts
from bridge.wire.answers import Answer
from bridge.wire.committed_state import CommittedState, Said
from timerstore.rows.position import Int64s, Progress


class Stale(Exception):
    """Partitions were revoked after the store was based on their committed states: nothing of this may be committed."""


@dataclass(slots=True)
class OpenTransaction:
    """An open transaction; `loan` has its rows."""

    loan: Loan
    opened_s: float
    opened_ms: int
    until_ms: int = 0
    """The due-time bound of its last take (ms); 0: no take."""
    begun: bool = False
    planned: int = 0
    accepted: int = 0
    rows: int = 0
    bytes: int = 0
    is_ended: bool = False
    pieces: list[Planned] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)
    """The best known state of each target when records were sent there."""
    counts: Counts = field(default_factory=Counts)
    traced: list[tuple[int, Sequence[Delivery]]] = field(default_factory=list)
    """The time of production (ms), and the messages with a span."""
    answers: list[Answer] = field(default_factory=list)
    """The outcomes of commands."""
    setbacks: list[Setback] = field(default_factory=list)
    """Undelivered records, with the reasons."""
    moves: Mapping[int, Progress] = field(default_factory=dict)
    """The progress of the partitions, by number, as of the last look;"""
    states: dict[SourceName, CommittedState] = field(default_factory=dict)
    """and the committed states after it."""
    offsets: list[TopicPartition] = field(default_factory=list)
    """The same, in Kafka's form."""

    def add(self, plan: Plan) -> int:
        """Add the rows of a plan. Returns the number of its first row within the transaction."""
        first = self.rows
        rows = plan.rows
        self.pieces.append(Planned.of(rows.keys, rows.at, rows.kind, rows.payload, rows.tick))
        self.rows += len(plan.keys)
        self.bytes += plan.bytes
        self.planned += plan.records
        self.counts += plan.counts
        self.answers += plan.answers
        self.setbacks += setbacks(plan)
        return first

    def produced(self, plan: Plan, lateness_ms: Int64s, now_ms: int) -> None:
        """Note that the client has taken the plan's records, the last one at `now_ms`; `lateness_ms` int64[] are those
        of its deliveries."""
        for topic, target in plan.targets.items():
            if topic not in self.targets or self.targets[topic].takes_less_than(target):
                self.targets[topic] = target
        self.counts.lateness_ms.append(lateness_ms)
        if plan.traced:
            self.traced.append((now_ms, plan.traced))

    def failed_records(self, rows: Mapping[int, FailedRecord]) -> dict[int, FailedRecord]:
        """The same records, by packed (source, offset) in place of the row's number within the transaction."""
        keys = self._keys()
        wanted = np.fromiter(rows, np.int64)
        result = {}
        for sent in self.sent:
            for row in np.intersect1d(sent.ids + sent.first, wanted).tolist():
                if rows[row].topic == sent.topic:  # a tick goes to its target, and the next one to its own topic
                    result[int(keys[row])] = rows[row]
        return result

    def _keys(self) -> Int64s:
        return np.concatenate([np.empty(0, np.int64), *(piece.keys for piece in self.pieces)])

    def output(self) -> Output:
        """The records that it may have written."""
        keys = self._keys()
        sent = [(each.topic, keys[each.ids + each.first]) for each in self.sent]
        return Output(planned=self.pieces, sent=sent, began_ms=self.opened_ms, after=self.states)

    def places(self) -> set[tuple[str, int]]:
        """Topics and partitions of its records; -1 for a choice of the partitioner."""
        return {place for sent in self.sent for place in sent.places()}

    def written(self, topics: Collection[str], sources: Sources) -> set[SourceName]:
        """The partitions with records for these topics."""
        keys = self._keys()
        numbers = [sources_of(keys[each.ids + each.first]).tolist() for each in self.sent if each.topic in topics]
        return {sources.name(source) for source in set().union(*numbers)}

    def look_ahead(
        self, states: States, sources: Sources, said: Said, notes: LogNotes, again: Collection[SourceName] = ()
    ) -> None:
        """Set the committed states after it, and the offsets; after a look with the same progress they remain. Each
        partition states `said` about targets; the states of `again` are written in any case. Raises InternalError for a
        state that would go back (I1)."""
        moves = self.loan.progress()
        if self.states and moves == self.moves:
            return
        self.moves = moves
        told = {name: state.saying(said) for name, state in states.items() if state.pauses != said}
        result = {name: states[name] for name in again if name in states}
        result |= {name: state for name, state in told.items() if state != states[name]}
        for source, new in moves.items():
            name = sources.name(source)
            old = states[name].progress()
            if not new.includes(old):
                raise bug("the committed state would go back", code="DB-7002", source=name, old=old, new=new)
            result[name] = result.get(name, states[name]).moved(new)
        result = notes.within(result, states)
        self.states = result
        self.offsets = [TopicPartition(*name, state.offset, state.metadata()) for name, state in result.items()]

    def acknowledge(self) -> None:
        """The commit is certain."""
        self.is_ended = True
        self.loan.acknowledge()

    def rollback(self) -> None:
        """The transaction was certainly not committed."""
        if not self.is_ended:
            self.is_ended = True
            self.loan.rollback()


def bug(message: str, *, code: str, **fields: object) -> InternalError:
    """An internal promise of delivery is broken; nothing was committed."""
    hint = "This is a bug of the bridge; nothing was committed. Please report it."
    return InternalError(message, hint=hint, code=code, **fields)
