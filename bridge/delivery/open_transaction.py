"""One transaction under way, and the seam of the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bridge.delivery.plan.due_rows import Sent
from bridge.delivery.plan.spans import Delivery
from bridge.delivery.producer.writer import FailedRow, Failure
from bridge.delivery.targets.target import Target
from bridge.telemetry.counts import Counts
from bridge.wire.committed_state import CommittedState
from timerstore.operations.transaction import Transaction
from timerstore.rows.position import Int64s
from timerstore.rows.sources import SourceName


class DispatchMetrics(Protocol):
    """What is used of `metrics.Metrics`."""

    def committed(self, counts: Counts, seconds: float) -> None:
        """A transaction was committed, so long after it was begun."""
        ...

    def transaction_aborted(self) -> None:
        """Rolled back."""
        ...

    def partitions_held(self, count: int) -> None:
        """So many partitions of delay topics are held."""
        ...

    def clock_step_refused(self) -> None:
        """The clock was set back once more than the committed metadata has room for."""
        ...

    def producer_rebuilt(self) -> None:
        """A new producer took the place of a lost one."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record that failed, and where it was sent. `partition` is -1 where that is not known."""

    topic: str
    partition: int
    failure: Failure


@dataclass(slots=True)
class OpenTransaction:
    """One transaction under way; `loan` are its rows, as the store has given them."""

    loan: Transaction
    opened_s: float
    until_ms: int = 0
    """What was due by then may be in it."""
    begun: bool = False
    planned: int = 0
    accepted: int = 0
    rows: int = 0
    bytes: int = 0
    is_ended: bool = False
    keys: list[Int64s] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)
    """What was believed of them when records were sent there; the best of it."""
    counts: Counts = field(default_factory=Counts)
    traced: list[tuple[int, Sequence[Delivery]]] = field(default_factory=list)
    """When they were produced (ms), and the messages that get a span."""
    states: dict[SourceName, CommittedState] = field(default_factory=dict)

    def failed_records(self, rows: Mapping[int, FailedRow]) -> dict[int, FailedRecord]:
        """Failed rows, by number within the transaction, as packed (source, offset) -> failed record."""
        keys = np.concatenate(self.keys) if self.keys else np.empty(0, np.int64)
        wanted = np.fromiter(rows, np.int64)
        result = {}
        for sent in self.sent:
            for row in np.intersect1d(sent.ids + sent.first, wanted).tolist():
                result[int(keys[row])] = FailedRecord(sent.topic, rows[row].partition, rows[row].failure)
        return result

    def places(self) -> set[tuple[str, int]]:
        """Topics and partitions that records were sent to; -1 for those that the partitioner chose."""
        return {place for sent in self.sent for place in sent.places()}

    def acknowledge(self) -> None:
        """The commit is known."""
        self.is_ended = True
        self.loan.acknowledge()

    def rollback(self) -> None:
        """Known not to be committed."""
        if not self.is_ended:
            self.is_ended = True
            self.loan.rollback()
