"""At least once: records are acknowledged, then offsets and position are committed. A crash between them repeats
records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import Producer, TopicPartition

from bridge.delivery.producer.outcomes import NO_ANSWER, Failure, Indefinite, OnStall
from bridge.delivery.producer.writer import Writer
from bridge.errors import EnvironmentFailure
from bridge.settings.time_budgets import USUAL, TimeBudgets
from timerstore.clock import Clock


class AcknowledgedWriter(Writer):
    is_each_reported = True

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
        self.close()
        self._forget()
        self._faults = []
        self._producer = self._new(self._faults)

    def begin(self, records: int = 0) -> None:  # noqa: ARG002 - for transactions
        self._forget()

    def commit(
        self,
        offsets: Sequence[TopicPartition],
        group_metadata: object,  # noqa: ARG002 - for transactions
        on_stall: OnStall,
    ) -> None:
        self._await_reports(on_stall)
        try:
            self._commit_offsets(offsets)
        except EnvironmentFailure as failure:
            raise Indefinite(Failure(NO_ANSWER, str(failure))) from failure

    def abort(self, *, in_haste: bool = False) -> None:  # noqa: ARG002 - for transactions
        """Sent records stay, and may be repeated; the client's queue is emptied."""
        self.open()
