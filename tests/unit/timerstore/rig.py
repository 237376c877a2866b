"""A stand-in for Kafka and the bridge around a store: the log, the committed state, and what was delivered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.unit.timerstore.entries import Record, entries, gather
from timerstore.disk.checkpoint import Identity
from timerstore.limits import Limits
from timerstore.operations import recovery
from timerstore.operations.state import Taken
from timerstore.operations.transaction import Transaction
from timerstore.rows.cuts import Cuts
from timerstore.rows.position import NOTHING_FINISHED, end_of
from timerstore.store import TimerStore

IDENTITY = Identity(cluster_id="cluster", log_id="a/0")
ORDERS = ("delay", 0)
NOW_MS = 1_000_000


def take(transaction: Transaction, until_ms: int, limit: int) -> Taken:
    """Of a store alone: overtaken rows leave half of the room to what is due on time."""
    resident, until = transaction._state.resident, end_of(until_ms)
    on_time = resident.ready.count_until(min(until, resident.frontier))
    overtaken = min(transaction.late(until_ms), max(limit - on_time, (limit + 1) // 2))
    return transaction.take(until_ms, overtaken, end_of(until_ms), limit - overtaken)


class Rig:
    """One log, one committed state, one directory; stores come and go."""

    def __init__(self, directory: Path, *, limits: Limits | None = None) -> None:
        self.directory = directory
        self.limits = limits or Limits()
        self.log: list[Record] = []
        self.committed = NOTHING_FINISHED
        self.log_start = 0
        self.cuts: Cuts = ()
        self.delivered: list[Record] = []
        self.identity = IDENTITY
        self.news = threading.Event()
        """Set where the store has something nearer."""
        self.store = self.open()

    def open(self, now_ms: int = NOW_MS) -> TimerStore:
        self.store = TimerStore.open(
            recovery.find(self.directory, self.identity, now_ms),
            self.committed,
            log_start=self.log_start,
            cuts=self.cuts,
            now_ms=now_ms,
            limits=self.limits,
            on_news=self.news.set,
        )
        resume = self.store.resume_offset()
        self.store.start_at(self.log_start if resume is None else resume, len(self.log))
        return self.store

    def reopen(self) -> TimerStore:
        self.store.close()
        return self.open()

    def cut(self, offset: int) -> None:
        """The log loses what lies there and above, and the committed state follows."""
        del self.log[offset:]
        self.committed = replace(self.committed, offset=min(self.committed.offset, offset))
        lower = tuple(each for each in self.cuts if each[1] < offset)
        self.cuts = (*lower, (self.cuts[-1][0] + 1 if self.cuts else 1, offset))

    def produce(self, *due_ms: int | None) -> None:
        for due in due_ms:
            self.log.append(Record(*ORDERS, len(self.log), due))

    def ingest(self) -> int:
        """Everything new, as one batch."""
        return self.store.append(entries(self.log[self.store.next_offset :]), len(self.log), NOW_MS)

    def deliver(self, now_ms: int = NOW_MS, limit: int = 1_000) -> list[Record]:
        """One transaction, committed and acknowledged."""
        transaction = self.store.begin()
        return self.commit(transaction, [take(transaction, now_ms, limit)])

    def commit(self, transaction: Transaction, parts: Sequence[Taken]) -> list[Record]:
        """Commit what was taken, and acknowledge."""
        taken = [self.log[offset] for rows in parts for offset in rows.offset.tolist()]
        self.committed = transaction.progress()
        transaction.acknowledge()
        self.delivered += taken
        return taken

    def load(self, now_ms: int = NOW_MS) -> bool:
        """The next window, if there is one to gather."""
        window = self.store.wheel.next_window(now_ms)
        return window is not None and self.store.wheel.admit(window, gather(window))

    def finish(self, now_ms: int, rounds: int = 1_000) -> None:
        """Deliver everything that is due at `now_ms`, loading windows, as the bridge would."""
        for _ in range(rounds):
            loaded = self.load(now_ms)
            if not self.deliver(now_ms) and not loaded and self.store.state.resident.frontier.at_ms >= now_ms:
                return
        raise AssertionError("no end of it")

    def assert_each_delivered_once(self) -> None:
        offsets = [record.offset for record in self.delivered]
        assert len(offsets) == len(set(offsets)), "doubled"
        assert set(offsets) == {record.offset for record in self.log}, "lost"
