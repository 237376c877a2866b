"""At least once: records are acknowledged, then offsets and position are committed. What a crash in between costs is
repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import Producer, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.sender import Sender
from bridge.delivery.producer.writer import NO_ANSWER, Failure, Indefinite, OnStall
from bridge.errors import EnvironmentFailure
from bridge.settings.time_budgets import USUAL, TimeBudgets
from timerstore.clock import Clock


class AcknowledgedWriter(Sender):
    """See the module, and `Writer`."""

    def __init__(
        self,
        properties: Mapping[str, Any],
        clock: Clock,
        commit_offsets: Callable[[Sequence[TopicPartition]], None],
        make_producer: Callable[[dict[str, Any]], Producer] = Producer,
        budgets: TimeBudgets = USUAL,
    ) -> None:
        """`commit_offsets` commits as the group's member; it raises EnvironmentFailure or FencedError."""
        super().__init__(properties, clock, make_producer, budgets)
        self._commit_offsets = commit_offsets

    def open(self) -> None:
        """Make the producer."""
        self.close()
        self._forget()
        self._faults = []
        self._producer = self._new(self._faults)

    def begin(self) -> None:
        """Start counting. What an earlier attempt left is gone: `abort` makes a new producer."""
        self._forget()

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        """Hand a batch to the client, a report for every record. Raises Aborted, Broken."""
        accepted = self._produce(batch, first_id, reported=True)
        self._serve(self._client().poll, 0)
        if careful or batch.alone:
            self._await_reports(was_alone=len(batch) == 1)
        return accepted

    def commit(
        self,
        offsets: Sequence[TopicPartition],
        group_metadata: object,  # noqa: ARG002 - for transactions
        on_stall: OnStall,
    ) -> None:
        """Wait for the acknowledgements, then commit. Raises Aborted, Broken, Indefinite, FencedError."""
        self._await_reports(on_stall)
        try:
            self._commit_offsets(offsets)
        except EnvironmentFailure as failure:
            raise Indefinite(Failure(NO_ANSWER, str(failure))) from failure

    def abort(self) -> None:
        """What was sent cannot be taken back; the client's queue can. A record may be repeated."""
        self.open()

    def leave(self) -> None:
        """As `abort`, which waits for nothing."""
        self.open()
