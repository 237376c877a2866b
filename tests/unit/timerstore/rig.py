"""A stand-in for Kafka and the bridge around a store: the log, the committed state, and what was delivered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.unit.timerstore.entries import Record, entries, gather
from timerstore.disk.checkpoint import Identity
from timerstore.limits import Limits
from timerstore.operations import recovery
from timerstore.operations.transaction import Rows, Transaction
from timerstore.rows.position import ORIGIN
from timerstore.rows.sources import Cuts, NamedPosition, NamedStep, SourceName
from timerstore.store import TimerStore

IDENTITY = Identity(cluster_id="cluster", topic_ids={"delay": "a"})
ORDERS = ("delay", 0)
BILLS = ("delay", 1)
NOW_MS = 1_000_000


class Rig:
    """One log, one committed state, one directory; stores come and go."""

    def __init__(
        self, directory: Path, *, sources: Sequence[SourceName] = (ORDERS,), limits: Limits | None = None
    ) -> None:
        self.directory = directory
        self.limits = limits or Limits()
        self.log: dict[SourceName, list[Record]] = {name: [] for name in sources}
        self.committed: dict[SourceName, tuple[int, NamedPosition | None]] = dict.fromkeys(sources, (0, None))
        self.frozen: dict[SourceName, tuple[NamedStep, ...]] = {}
        self.log_starts: dict[SourceName, int] = {}
        self.cuts: dict[SourceName, Cuts] = {}
        self.delivered: list[Record] = []
        self.identity = IDENTITY
        self.store = self.open()

    def open(self, now_ms: int = NOW_MS) -> TimerStore:
        self.store = TimerStore.open(
            recovery.find(self.directory, self.identity, now_ms),
            partitions=list(self.log),
            committed=self.committed,
            frozen=self.frozen,
            log_starts=self.log_starts,
            cuts=self.cuts,
            now_ms=now_ms,
            limits=self.limits,
        )
        resume = self.store.resume_offsets()
        ends = {name: len(self.log[name]) for name in self.committed}
        starts = {name: self.log_starts.get(name, 0) if at is None else at for name, at in resume.items()}
        self.store.start_at(starts, ends)
        return self.store

    def reopen(self) -> TimerStore:
        self.store.close()
        return self.open()

    def cut(self, offset: int, source: SourceName = ORDERS) -> None:
        """The log loses what lies there and above, and the committed state follows."""
        del self.log[source][offset:]
        committed, position = self.committed[source]
        self.committed[source] = min(committed, offset), position
        known = self.cuts.get(source, ())
        lower = tuple(each for each in known if each[1] < offset)
        self.cuts[source] = (*lower, (known[-1][0] + 1 if known else 1, offset))

    def produce(self, *due_ms: int | None, source: SourceName = ORDERS) -> None:
        log = self.log[source]
        for due in due_ms:
            log.append(Record(*source, len(log), due))

    def ingest(self) -> int:
        """Everything new, as one batch."""
        at = self.store.next_offsets()
        new = [record for name in at for record in self.log[name][at[name] :]]
        return self.store.append(entries(new), {name: len(self.log[name]) for name in at}, NOW_MS)

    def deliver(self, now_ms: int = NOW_MS, limit: int = 1_000) -> list[Record]:
        """One transaction, committed and acknowledged."""
        transaction = self.store.begin()
        return self.commit(transaction, [transaction.take(now_ms, limit)])

    def commit(self, transaction: Transaction, parts: Sequence[Rows]) -> list[Record]:
        """Commit what was taken, and acknowledge."""
        taken = [
            self.log[self.store.sources.name(source)][offset]
            for rows in parts
            for source, offset in zip(rows.source.tolist(), rows.offset.tolist(), strict=True)
        ]
        for source, progress in transaction.progress().items():
            name = self.store.sources.name(source)
            position = None if progress.position == ORIGIN else self.store.sources.named(progress.position)
            self.committed[name] = (progress.offset, position)
            self.frozen[name] = self.store.sources.named_steps(progress.frozen)
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
        keys = [(r.topic, r.partition, r.offset) for r in self.delivered]
        assert len(keys) == len(set(keys)), "doubled"
        assert set(keys) == {(r.topic, r.partition, r.offset) for log in self.log.values() for r in log}, "lost"
