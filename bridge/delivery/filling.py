"""Filling of a transaction: rows are taken and planned in pieces, and their records handed to the client.

Rows that fall due within the next 40 ms of the commit interval are taken and planned at once, since a take costs
several times as much as a row. A record is handed to the client at its due time, not before (invariant I4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bridge.delivery.departures import Departures
from bridge.delivery.narrowing import Narrowing
from bridge.delivery.open_transaction import OpenTransaction
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.planner import Plan, Planner
from bridge.delivery.producer.outcomes import Aborted, Cause, Failure
from bridge.delivery.producer.writer import SMALL_RECORDS, Writer
from bridge.kafka.errors import Fault, Meaning
from bridge.settings.time_budgets import TimeBudgets
from bridge.stores.loan import Rows
from bridge.stores.stores import Stores
from timerstore.clock import Clock

PIECE_ROWS: Final = 5_000
PIECE_BYTES: Final = 16 << 20
TRANSACTION_BYTES_MAX: Final = 64 << 20
GATHER_S: Final = 0.005
"""The shortest wait within a transaction: waking for each millisecond's records costs more than the records. The usual
lateness grows by half of it."""
AHEAD_MS: Final = 40
"""Rows are taken up to this time before they are due. A request of another thread waits for at most as long, and a
cancel that is read meanwhile comes too late."""
BUSY_ROWS: Final = 100
BUSY_ROWS_EACH: Final = 20
"""From this many rows on, in all and for each partition with rows, a transaction ends after half the interval: twice
the requests, but consumers see records sooner. (A partition costs a transaction as much as dozens of rows.)"""
SET_BACK_MS: Final = 100
"""The largest step back of the clock that is waited out."""

CLOCK_SET_BACK: Final = Failure(Meaning(Fault.UNKNOWN), "the clock was set back")


@dataclass(slots=True, kw_only=True)
class Filling:
    """See the module. For the dispatcher's thread."""

    writer: Writer
    planner: Planner
    narrowing: Narrowing
    clock: Clock
    budgets: TimeBudgets
    commit_interval_ms: int
    is_to_end: Callable[[], bool]
    """Whether another thread waits for the end of the transaction."""
    on_taken: Callable[[Stores, OpenTransaction], None]
    """Called at most once in a transaction, when probably no more rows will be taken for it."""
    beat: Callable[[], None]
    row_bytes: float = 1_000.0
    """The usual size of a row, according to past plans."""
    is_busy: bool = False
    """Whether the previous transaction had many rows."""

    def fill(self, store: Stores, transaction: OpenTransaction) -> None:
        """Take, plan and produce until the time to commit."""
        self._fill(store, transaction)
        self.is_busy = transaction.rows >= max(BUSY_ROWS, BUSY_ROWS_EACH * transaction.loan.touched)

    def _fill(self, store: Stores, transaction: OpenTransaction) -> None:
        while True:
            self.beat()
            left_ms = self._left_ms(transaction)
            transaction.until_ms = self._take_until_ms(left_ms)
            room = self._piece_rows(transaction)
            rows = transaction.loan.take(transaction.until_ms, room)
            if len(rows):
                plans = self._plans(store, rows, transaction)
                for plan in plans:
                    self._produce(store, transaction, plan, is_last=len(rows) < room and plan is plans[-1])
            open_s = self.clock.monotonic_s() - transaction.opened_s
            is_full = transaction.rows >= self._rows_max(transaction) or transaction.bytes >= TRANSACTION_BYTES_MAX
            if is_full or open_s >= self.budgets.fill_s or self.is_to_end():
                return
            if len(rows) >= room:
                continue  # a backlog
            left_ms = self._left_ms(transaction)
            if not transaction.rows or self.narrowing.until_ms is not None or left_ms <= 0:
                return
            wakeup_ms, now_ms = store.next_wakeup_ms(), self.clock.now_ms()
            if wakeup_ms is None or wakeup_ms - now_ms > left_ms:
                return
            store.wait(max((wakeup_ms - now_ms) / 1000, GATHER_S))

    def _left_ms(self, transaction: OpenTransaction) -> int:
        """The rest of the commit interval, or of half of it if there is much to deliver."""
        interval_ms = self.commit_interval_ms / (2 if self.is_busy else 1)
        return int(interval_ms - 1000 * (self.clock.monotonic_s() - transaction.opened_s))

    def _take_until_ms(self, left_ms: int) -> int:
        """The bound of the next take: the commit's time, or now, if an abort has taught caution."""
        now_ms, bound_ms = self.clock.now_ms(), self.narrowing.until_ms
        if bound_ms is not None:
            return min(now_ms, bound_ms)
        return now_ms if self.narrowing.is_careful else now_ms + max(0, min(left_ms, AHEAD_MS))

    def _rows_max(self, transaction: OpenTransaction) -> int:
        is_small = transaction.begun and self.writer.is_to_stay_small
        return min(self.narrowing.rows, SMALL_RECORDS) if is_small else self.narrowing.rows

    def _piece_rows(self, transaction: OpenTransaction) -> int:
        """The number of rows to take next, limited in rows, and in bytes according to past plans."""
        left = self._rows_max(transaction) - transaction.rows
        return max(1, min(PIECE_ROWS, left, int(PIECE_BYTES / self.row_bytes)))

    def _plans(self, store: Stores, rows: Rows, transaction: OpenTransaction) -> list[Plan]:
        """The plan of taken rows, and the plans of rows that commands among them have made due now."""
        plan = self._plan(store, rows, transaction)
        return [plan, *(self._plan(store, released, transaction) for released in plan.released)]

    def _plan(self, store: Stores, rows: Rows, transaction: OpenTransaction) -> Plan:
        findings = self.narrowing.findings
        plan = self.planner.plan(rows, store.sources, transaction.until_ms, findings, transaction.loan)
        self.row_bytes += 0.5 * (max(1.0, plan.weight / len(rows)) - self.row_bytes)
        return plan

    def _produce(self, store: Stores, transaction: OpenTransaction, plan: Plan, *, is_last: bool) -> None:
        """Hand all records of a plan to the client, each at its due time and each batch in its order. `is_last`: the
        take has returned all due rows."""
        if plan.records and not transaction.begun:
            self.writer.begin(plan.records)
            transaction.begun = True
        first, departures = transaction.add(plan), Departures(plan)
        if is_last and transaction.begun and not (transaction.states or self.narrowing.is_careful):
            self.on_taken(store, transaction)
        while True:
            now_ms = self.clock.now_ms()
            for part in departures.until(now_ms):
                self._send(transaction, part, plan, first)
            next_ms = departures.next_ms()
            if next_ms is None:
                break
            if next_ms - now_ms > SET_BACK_MS:
                # The wall clock was set back after the take: the rows are not due for a while (I4).
                raise Aborted(Cause.CLOCK_SET_BACK, CLOCK_SET_BACK)
            self.beat()
            store.wait(max((next_ms - now_ms) / 1000, GATHER_S))
        transaction.produced(plan, departures.lateness_ms(), now_ms)

    def _send(self, transaction: OpenTransaction, batch: Batch, plan: Plan, first: int) -> None:
        transaction.counts.are_unreadable(batch.unreadable)
        careful = self.narrowing.is_careful
        for part in self.narrowing.split(batch, plan.keys[batch.ids]) if careful else (batch,):
            self.beat()
            transaction.sent.append(part.sent(first))
            transaction.accepted += self.writer.send(part, first_id=first, careful=careful)
