"""The store against a plain model: a log of records, a committed state, and the list of what was output.

Hypothesis drives both through interleaved ingest, transactions (committed, rolled back, cut off by a crash on either side of the commit), flushes,
gathers, retreats of the frontier, replays, crashes and lost directories. Kafka is the model: what a committed transaction output is fact.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import timerstore.segment
from tests.timerstore.entries import Record, entries, gather
from timerstore.checkpoint import Identity
from timerstore.position import AT_MIN
from timerstore.sources import NamedPosition
from timerstore.store import Limits, TimerStore
from timerstore.timerlog import Window
from timerstore.transaction import Transaction

PARTITIONS = [("delay", 0), ("delay", 1), ("retry", 0)]
IDENTITY = Identity(cluster_id="cluster", topic_ids={"delay": "a", "retry": "b"})
ROW_BYTES = 110
LIMITS = Limits(
    flush_bytes=12 * ROW_BYTES,
    flush_interval_ms=50,
    hot_bytes=16 * ROW_BYTES,
    horizon_ms=40,
    late_bytes=1 << 20,
    window_bytes=8 * ROW_BYTES,
)
Key = tuple[str, int, int]


class StoreMachine(RuleBasedStateMachine):
    """Rules are what the bridge, Kafka and misfortune do."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.row_group_rows = timerstore.segment.ROW_GROUP_ROWS
        timerstore.segment.ROW_GROUP_ROWS = 3
        self.now_ms = 1_000
        self.log: dict[tuple[str, int], list[Record]] = {name: [] for name in PARTITIONS}
        self.committed: dict[tuple[str, int], tuple[int, NamedPosition | None]] = {name: (0, None) for name in PARTITIONS}
        self.output: list[Record] = []
        self.ingested: dict[tuple[str, int], int] = {}
        self.window: Window | None = None
        self.open()

    def open(self) -> None:
        self.store = TimerStore.open(
            self.directory / "store", identity=IDENTITY, partitions=PARTITIONS, committed=self.committed,
            now_ms=self.now_ms, limits=LIMITS,
        )  # fmt: skip
        assert self.store.reports == () or "crash" in self.store.reports[0]
        self.ingested = {name: offset or 0 for name, offset in self.store.resume_offsets().items()}
        self.store.start_at(self.ingested)
        self.window = None

    # ---- Kafka

    @rule(
        name=st.sampled_from(PARTITIONS),
        delays=st.lists(st.one_of(st.none(), st.integers(-20, 30), st.sampled_from([5, 60, 200])), min_size=1, max_size=8),
        to=st.sampled_from(["orders", "bills", None]),
    )
    def produce(self, name: tuple[str, int], delays: list[int | None], to: str | None) -> None:
        for delay in delays:
            due = None if delay is None else self.now_ms + delay
            self.log[name].append(Record(name[0], name[1], len(self.log[name]), due, to))

    @rule(ms=st.sampled_from([1, 7, 30, 100]))
    def tick(self, ms: int) -> None:
        self.now_ms += ms

    # ---- enqueue

    def room(self) -> bool:
        return self.store.resident.memtable_bytes < LIMITS.memtable_bytes_max

    @precondition(lambda self: self.room())
    @rule(upto=st.integers(1, 10), replay=st.integers(0, 3))
    def ingest(self, upto: int, replay: int) -> None:
        """A micro-batch of every partition; sometimes it begins with records that were seen before."""
        batch: list[Record] = []
        ends: dict[tuple[str, int], int] = {}
        for name, log in self.log.items():
            begin = max(0, self.ingested[name] - replay)
            end = min(len(log), self.ingested[name] + upto)
            batch += log[begin:end]
            ends[name] = max(end, self.ingested[name])
        expected = sum(ends[name] - self.ingested[name] for name in ends)
        assert self.store.append(entries(batch), ends) == expected
        self.ingested = ends

    # ---- dispatcher

    def finished(self, record: Record) -> bool:
        offset, position = self.committed[(record.topic, record.partition)]
        if record.offset >= offset:
            return False
        if record.at_ms == AT_MIN:
            return True
        return position is not None and (record.at_ms, record.topic, record.partition, record.offset) <= position

    def take(self, transaction: Transaction, limit: int) -> list[Record]:
        rows = transaction.take(self.now_ms, limit)
        keys = rows.payload.column("key").to_pylist()
        taken = []
        for source, offset, key in zip(rows.source.tolist(), rows.offset.tolist(), keys, strict=True):
            record = self.log[self.store.sources.name(source)][offset]
            assert key == f"{record.partition}-{record.offset}".encode(), "the payload is not the record's"
            assert record.at_ms <= self.now_ms, "early"
            taken.append(record)
        return taken

    def commit(self, transaction: Transaction, taken: list[Record]) -> None:
        """Kafka commits: output and state are one fact; the difference of the finished sets is exactly the output (I1)."""
        before = [r for log in self.log.values() for r in log if self.finished(r)]
        for source, progress in transaction.progress().items():
            name = self.store.sources.name(source)
            assert progress.offset >= self.committed[name][0], "O went back"
            self.committed[name] = (progress.offset, self.store.sources.named(progress.position))
        after = [r for log in self.log.values() for r in log if self.finished(r)]
        key = lambda r: (r.topic, r.partition, r.offset)  # noqa: E731
        assert sorted(map(key, before + taken)) == sorted(map(key, after))
        self.output += taken

    @precondition(lambda self: self.store.is_caught_up())
    @rule(
        limits=st.lists(st.sampled_from([0, 1, 2, 5, 50]), min_size=1, max_size=3),
        between=st.sampled_from(["nothing", "ingest", "flush", "tick"]),
        end=st.sampled_from(["commit", "commit", "commit", "rollback", "crash before", "crash after"]),
    )
    def transact(self, limits: list[int], between: str, end: str) -> None:
        transaction = self.store.begin()
        taken: list[Record] = []
        for i, limit in enumerate(limits):
            taken += self.take(transaction, limit)
            if i == 0 and between == "ingest" and self.room():
                self.ingest(4, 0)
            elif i == 0 and between == "flush":
                self.flush()
            elif between == "tick":
                self.now_ms += 3
        if end in ("commit", "crash after"):
            self.commit(transaction, taken)
        if end == "commit":
            transaction.acknowledge()
        elif end == "rollback":
            transaction.rollback()
        else:
            self.crash()

    # ---- maintenance

    @rule()
    def flush(self) -> None:
        self.store.maintenance.flush(self.now_ms)

    @rule()
    def reclaim(self) -> None:
        self.store.maintenance.reclaim(self.now_ms)

    @precondition(lambda self: self.window is None)
    @rule()
    def begin_gather(self) -> None:
        self.window = self.store.maintenance.next_window(self.now_ms)
        self.gathered = gather(self.window) if self.window is not None else pa.table({})

    @precondition(lambda self: self.window is not None)
    @rule()
    def admit(self) -> None:
        assert self.window is not None
        moved = self.store.resident.frontier != self.window.lower
        assert self.store.maintenance.admit(self.window, self.gathered) is not moved
        self.window = None

    # ---- misfortune

    @rule()
    def crash(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def lose_directory(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory / "store")
        self.open()

    # ---- promises

    @invariant()
    def frontier_is_ahead_of_delivered(self) -> None:
        assert self.store.resident.position <= self.store.resident.frontier

    @invariant()
    def pending_gauge_is_exact(self) -> None:
        pending = [
            r
            for name, log in self.log.items()
            for r in log[: self.ingested[name]]
            if r.due_ms is not None and not self.finished(r)
        ]
        stats = self.store.stats()
        assert stats.pending == len(pending)
        by_target: dict[str, int] = {}
        for r in pending:
            by_target[r.target or ""] = by_target.get(r.target or "", 0) + 1
        assert stats.pending_by_target == by_target

    @invariant()
    def bytes_are_exact(self) -> None:
        resident = self.store.resident
        for rows, count in ((resident.hot.all(), resident.hot_bytes), (resident.memtable.all(), resident.memtable_bytes),
                            (resident.late.all(), resident.late_bytes)):  # fmt: skip
            assert resident.chunks.bytes_of(rows.chunk) == count

    def teardown(self) -> None:
        """In the end everything is delivered exactly once."""
        try:
            self.drain()
            keys = [(r.topic, r.partition, r.offset) for r in self.output]
            assert len(keys) == len(set(keys)), "doubled"
            assert set(keys) == {(r.topic, r.partition, r.offset) for log in self.log.values() for r in log}, "lost"
            assert self.store.stats().pending == 0
        finally:
            timerstore.segment.ROW_GROUP_ROWS = self.row_group_rows
            self.store.close()
            shutil.rmtree(self.directory)

    def drain(self) -> None:
        total = sum(len(log) for log in self.log.values())
        for _ in range(20 + 10 * total):
            self.now_ms += 20
            if self.room():
                self.ingest(10, 0)
            if self.window is not None:
                self.admit()
            self.begin_gather()
            if self.window is not None:
                self.admit()
            if self.store.is_caught_up():
                transaction = self.store.begin()
                self.commit(transaction, self.take(transaction, 10))
                transaction.acknowledge()
            if self.store.maintenance.flush_due(self.now_ms):
                self.flush()
            self.store.maintenance.reclaim(self.now_ms)
            if len(self.output) == total and len(self.store.timerlog) == 0:
                return
        assert len(self.output) == total, f"{total - len(self.output)} never delivered"
        assert len(self.store.timerlog) == 0, "finished segments were not reclaimed"


@pytest.mark.timeout(600)
class TestStoreMachine(StoreMachine.TestCase):  # type: ignore[name-defined,misc]
    """Whatever happens in whatever order, each record is delivered exactly once and never early."""

    settings = settings(
        max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
