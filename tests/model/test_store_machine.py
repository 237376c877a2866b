"""The store against a plain model: a log of records, a committed state, and the list of what was output.

Records are timers, rejects, cancels and replaces (also as two rows of one offset), and some timers come back as copies
when they are output, as rolls and retries do. A timer that is finished is output, or a cancel covers it.

Hypothesis drives both through interleaved ingest, transactions (many steps long; committed, rolled back, cut off by a
crash on either side of the commit), flushes (whole, out of disk, cut off by a crash), gathers, retreats of the
frontier, replays, crashes, lost directories, damaged files, a volume that cannot be read for a while, partitions that
another instance has for a while (or for so long that they leave), each of them taken and given back at a start or in
the open store, a log that is trimmed or loses its end, here or while another instance has it, and a clock that steps
back.
Kafka is the model: what a committed transaction output is fact.

Limits are a few rows, so that every limit is met all the time.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import timerstore.cancels.cancels
import timerstore.cancels.tombstones
import timerstore.disk.column_file
import timerstore.log.packed
import timerstore.log.segment
import timerstore.log.stretches
import timerstore.memory.sorted_runs
import timerstore.operations.find
import timerstore.operations.timer_wheel
from bridge.stores.loan import Loan
from bridge.stores.names import NamedPosition, SourceName
from tests.model.stores import (
    SCHEMA,
    Loading,
    ModelStores,
    PendingRow,
    Query,
    State,
    StoresExport,
    View,
    batch,
    open_stores,
)
from tests.profiles import of_a_machine, timeout_s
from tests.unit.timerstore.entries import Record
from timerstore.cancels.cancels import NO_ORIGIN
from timerstore.disk import checkpoint as checkpoints
from timerstore.errors import DiskFailure, DiskFull
from timerstore.limits import Limits
from timerstore.log.segment import Segment, read_rows
from timerstore.log.timerlog import Window
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import concat
from timerstore.operations.find import Count
from timerstore.rows.cuts import Cuts
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN

PARTITIONS = [("delay", 0), ("delay", 1), ("retry", 0)]
TOPIC_IDS = {"delay": "a", "retry": "b"}
ROW_BYTES = 120
HORIZON_MS = 40
WINDOW_MS = 10
MARGIN_MS = 30
Key = tuple[str, int, int, bool]

LIMITS = Limits(
    repacked_bytes=1,
    flush_bytes=8 * ROW_BYTES,
    flush_interval_ms=50,
    ready_rows_bytes=10 * ROW_BYTES,
    horizon_ms=HORIZON_MS,
    overtaken_bytes=1 << 20,
    window_bytes=5 * ROW_BYTES,
    clock_step_ms=5,
    compaction_segments=2,
    sparse_ms=0,
    window_ms=WINDOW_MS,
    tombstone_rows=4,
)

# When a record is due, from now: rejects, overdue, this instant, soon, around the horizon (the frontier is half of it
# to all of it ahead), beyond it; "spot" is a millisecond that many share.
REJECT, SPOT = "reject", "spot"
DELAYS = st.one_of(
    st.just(REJECT),
    st.integers(-25, 0),
    st.just(0),
    st.integers(1, 12),
    st.integers(HORIZON_MS // 2, 2 * HORIZON_MS),
    st.integers(HORIZON_MS // 2, 2 * HORIZON_MS),
    st.just(SPOT),
    st.just(SPOT),
)
IDS = st.sampled_from(["a", "b", "c"])
# What a record is beside its delay: without id, with one, a replace (as one row or with a cancel of the same offset), a
# cancel (also of an id that no timer has), a cancel of the record so many offsets back, the first tick of a recurring
# message.
TAGS = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.just("id"), IDS),
    st.tuples(st.just("id"), IDS),
    st.tuples(st.sampled_from(["replace", "two rows"]), IDS),
    st.tuples(st.just("cancel"), st.sampled_from(["a", "b", "c", "none"])),
    st.tuples(st.just("origin"), st.integers(-1, 8) | st.just(-9 * 10**14)),
    st.tuples(st.just("recurs"), IDS),
)
RECORDS = st.lists(st.tuples(st.sampled_from(PARTITIONS), DELAYS, TAGS), min_size=1, max_size=8)
COPY_DELAYS_MS = [0, 5, 30, 70]
COPIES_MAX = 3
TICKS, TICK_MS, SCHEDULE = 3, 15, '{"every":"15ms"}'
TAKE = st.sampled_from([1, 2, 3, 8])
HOW = st.sampled_from(["acknowledge", "acknowledge", "rollback", "rollback", "crash before", "crash after"])
STEP_MS = st.sampled_from([1, 4, 4, 10, 10, 20, 40, -20, -60])
MEANWHILE = st.lists(
    st.one_of(
        st.tuples(st.just("news"), RECORDS),
        st.tuples(st.just("take"), TAKE),
        st.tuples(st.just("take"), TAKE),
        st.tuples(st.just("time"), STEP_MS),
        st.tuples(st.just("retreat"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["flush", "load", "deliver"]), st.none()),
    ),
    max_size=4,
)


class Death(Exception):
    """The process dies here."""


def key(record: Record) -> Key:
    return record.topic, record.partition, record.offset, record.at_ms == AT_MIN


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files_in(directory)}


def is_index(path: Path) -> bool:
    return path.suffix in (".parquet", ".tombstones")


def position_of(record: Record) -> NamedPosition:
    return record.at_ms, record.topic, record.partition, record.offset


class StoreMachine(RuleBasedStateMachine):
    """Rules are what the bridge, Kafka and misfortune do."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is such a file system: thousands of fsyncs tell nothing here.
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="store-machine-", dir=memory if memory.is_dir() else None))
        self.row_group_rows = timerstore.log.segment.ROW_GROUP_ROWS
        timerstore.log.segment.ROW_GROUP_ROWS = 2
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.object(timerstore.cancels.cancels, "MARGIN_MS", MARGIN_MS))
        self.patches.enter_context(mock.patch.object(timerstore.cancels.tombstones, "MERGE_STEP_ROWS", 2))
        self.patches.enter_context(mock.patch.object(timerstore.disk.column_file, "RUN_ROWS", 6))
        self.patches.enter_context(mock.patch.object(timerstore.log.packed, "PIECE_NUMBERS", 3))
        self.patches.enter_context(mock.patch.object(timerstore.log.stretches, "STRETCHES_MAX", 2))
        self.patches.enter_context(mock.patch.object(timerstore.operations.timer_wheel, "NEAR_MS", HORIZON_MS // 4))
        self.patches.enter_context(mock.patch.object(timerstore.operations.find, "SCANNED_ROWS_MAX", 6))
        self.patches.enter_context(mock.patch.object(timerstore.memory.sorted_runs, "SMALL_RUNS", 2))
        self.export: tuple[StoresExport, list[PendingRow]] | None = None
        self.now_ms = 1_000
        # The rows of each record, by offset.
        self.log: dict[SourceName, list[list[Record]]] = {name: [] for name in PARTITIONS}
        self.covers: dict[SourceName, tuple[int, dict[object, list[int]]]] = {name: (0, {}) for name in PARTITIONS}
        """How much of each log is looked through, and the offsets found of cancels and replaces, by id or origin."""
        self.copied_ms: dict[SourceName, dict[int, int]] = {name: {} for name in PARTITIONS}
        self.log_starts = dict.fromkeys(PARTITIONS, 0)
        self.buried = dict.fromkeys(PARTITIONS, 0)
        self.rumoured = dict.fromkeys(PARTITIONS, 0)
        self.cuts: dict[SourceName, Cuts] = {}
        self.excused: set[Key] = set()
        """Finished by cancels that Kafka has lost since."""
        self.torn: set[tuple[str, int, int]] = set()
        """Recurring messages of which it has lost ticks, by origin."""
        self.damaged = False
        self.committed = dict.fromkeys(PARTITIONS, State())
        self.owned = set(PARTITIONS)
        self.output: Counter[Key] = Counter()
        self.calm = 0
        self.open_steps = 0
        self.segment_rows: dict[str, pa.Table] = {}
        self.segment_keys: dict[str, list[Key]] = {}
        self.open()

    def open(self) -> None:
        self.store = open_stores(
            ModelStores,
            self.directory / "store",
            TOPIC_IDS,
            PARTITIONS,
            {name: self.committed[name] for name in self.owned},
            log_starts={name: self.log_starts[name] for name in self.owned},
            cuts=self.cuts,
            now_ms=self.now_ms,
            limits=LIMITS,
        )
        words = ("crash", "log's start", "was cut", *(["set aside"] if self.damaged else []))
        assert all(any(word in report for word in words) for report in self.store.reports), self.store.reports
        self.damaged = False
        resume = self.store.resume_offsets()
        self.ingested = {name: self.log_starts[name] if at is None else at for name, at in resume.items()}
        for name, at in resume.items():
            assert at is None or at >= self.log_starts[name]
            if at is None:
                # Its cancels are read again; those that a file has still are known before.
                self.buried[name] = 0
        self.inherited = {name: len(self.log[name]) for name in self.ingested}
        self.store.start_at(self.ingested, self.inherited)
        self.loading: Loading | None = None
        self.transaction: Loan | None = None
        self.taken: list[Record] = []
        self.held: set[SourceName] = set()
        self.joining = set(self.store.coming_up())

    @initialize(records=RECORDS, ms=st.integers(0, 30))
    def begin_with_something_pending(self, records: list[Any], ms: int) -> None:
        self.produce(records)
        self.ingest_all()
        self.pass_time(ms)

    # ---- Kafka

    def produce(self, records: list[Any]) -> None:
        spot_ms = (self.now_ms // 64 + 1) * 64
        for i, (name, delay, tag) in enumerate(records):
            due = None if delay == REJECT else spot_ms if delay == SPOT else self.now_ms + delay
            log = self.log[name]
            row = Record(name[0], name[1], len(log), due, ["orders", "bills", None][i % 3])
            what, id = tag or (None, None)
            if isinstance(id, int):
                # Some records back; the next one, which is not there yet; one that cannot be; or elsewhere.
                named = len(log) - 1 - id
                log.append([replace(row, due_ms=None, cancels=True, origin=named if named >= 0 else NO_ORIGIN)])
            elif what == "cancel":
                log.append([replace(row, due_ms=None, cancels=True, id=id)])
            elif what is None or due is None:
                log.append([row])
            else:
                if what == "recurs":
                    row = replace(row, schedule=SCHEDULE, tick=1)
                rows = [replace(row, id=id, replace=what in ("replace", "two rows"))]
                log.append(rows + [replace(row, due_ms=None, cancels=True, id=id)] * (what == "two rows"))

    def rows(self) -> list[Record]:
        return [row for log in self.log.values() for rows in log for row in rows]

    def copy(self, record: Record) -> None:
        """A roll, a retry or the next tick, written in the transaction that finishes the record."""
        name = record.topic, record.partition
        log = self.log[name]
        if record.schedule is not None and record.tick < TICKS:
            self.copied_ms[name][len(log)] = self.now_ms
            due_ms = record.at_ms + TICK_MS
            tick = replace(record, offset=len(log), due_ms=due_ms, origin=record.origin_offset, tick=record.tick + 1)
            log.append([tick])
            return
        if record.kind != Kind.TIMER or record.rolls == COPIES_MAX or (7 * record.offset + record.rolls) % 3:
            return
        due_ms = self.now_ms + COPY_DELAYS_MS[record.offset % 4]
        self.copied_ms[name][len(log)] = self.now_ms
        log.append(
            [
                replace(
                    record, offset=len(log), due_ms=due_ms, origin=record.origin_offset, rolls=record.rolls + 1,
                    replace=False,
                )
            ]
        )  # fmt: skip

    def known(self, name: SourceName) -> int:
        """Up to where the store has seen a partition's cancels: they are read, or in its files."""
        return max(self.ingested.get(name, 0), self.buried[name])

    def perhaps_covered(self, record: Record) -> bool:
        """Whether a cancel that was read once covers a record: when a partition has left, cancels may be forgotten, or
        not."""
        name = record.topic, record.partition
        return self.covered(record, max(self.known(name), self.rumoured[name]))

    def covered(self, record: Record, upto: int | None = None) -> bool:
        if record.kind != Kind.TIMER:
            return False
        name = record.topic, record.partition
        found, end = self.cancels_of(name), self.known(name) if upto is None else upto
        for named in (record.id, record.origin_offset):
            offsets = found.get(named, [])
            later = bisect_right(offsets, record.origin_offset)
            if later < len(offsets) and offsets[later] < end:
                return True
        return False

    def cancels_of(self, name: SourceName) -> dict[object, list[int]]:
        """`covers`, up to the end of the log."""
        (begin, found), log = self.covers[name], self.log[name]
        for offset in range(begin, len(log)):
            for row in log[offset]:
                if row.cancels or (row.replace and row.id is not None):
                    found.setdefault(row.origin if row.id is None else row.id, []).append(offset)
        self.covers[name] = len(log), found
        return found

    def pass_time(self, ms: int) -> None:
        """Ingest lags by less than the margin behind this process's copies: a tombstone lives that long."""
        for name in self.owned:
            for offset, copied_ms in self.copied_ms[name].items():
                unread = offset >= max(self.ingested[name], self.inherited[name])
                if unread and self.now_ms + ms - copied_ms >= MARGIN_MS:
                    self.ingest_all()
                    if offset >= self.ingested[name]:
                        return
        self.now_ms += ms

    @rule(ms=STEP_MS)
    def time_passes(self, ms: int) -> None:
        """Sometimes backwards: the wall clock may step."""
        self.pass_time(ms)

    @precondition(lambda self: self.transaction is None and self.store.is_clock_behind(self.now_ms))
    @rule()
    def step_back(self) -> None:
        """The dispatcher finds the clock behind P: afterwards nothing that is due waits behind what is not (I4)."""
        self.store.step_back(self.now_ms)
        assert not self.store.is_clock_behind(self.now_ms)
        assert all((view.resident.overtaken.all().at <= self.now_ms).all() for view in self.store.views())

    # ---- enqueue

    def is_behind(self) -> bool:
        return self.store.has_room() and any(self.ingested[name] < len(self.log[name]) for name in self.owned)

    def ingest(self, upto: int, replay: int) -> None:
        """A batch of every partition; sometimes it begins with records that were seen before."""
        if not self.store.has_room():
            return
        self.store.read_again()
        records: list[Record] = []
        ends: dict[SourceName, int] = {}
        for name in sorted(self.owned):
            log = self.log[name]
            begin = max(self.log_starts[name], self.ingested[name] - replay)
            ends[name] = max(min(len(log), self.ingested[name] + upto), self.ingested[name])
            records += [row for rows in log[begin : ends[name]] for row in rows]
        taken, reached = self.store.append(batch(records), ends, self.now_ms), self.store.next_offsets()
        ends |= {name: reached[name] for name in self.held & ends.keys()}  # as far as they have room
        expected = sum(len(rows) for name in ends for rows in self.log[name][self.ingested[name] : ends[name]])
        assert taken == expected and reached == ends
        self.ingested = ends

    def ingest_all(self) -> None:
        self.ingest(1_000, 0)

    @rule(records=RECORDS)
    def news(self, records: list[Any]) -> None:
        self.produce(records)
        self.ingest_all()

    @rule(records=RECORDS, upto=st.integers(1, 4), replay=st.integers(0, 3))
    def some_news(self, records: list[Any], upto: int, replay: int) -> None:
        """Ingest lags behind."""
        self.produce(records)
        self.ingest(upto, replay)

    @precondition(is_behind)
    @rule(upto=st.sampled_from([1, 3, 1_000]), replay=st.integers(0, 3))
    def catch_up(self, upto: int, replay: int) -> None:
        self.ingest(upto, replay)

    # ---- dispatcher

    def finished(self, record: Record) -> bool:
        return self.committed[record.topic, record.partition].finishes(record.offset, record.at_ms)

    def can_begin(self) -> bool:
        return self.transaction is None and self.store.may_begin()

    def is_open(self) -> bool:
        return self.transaction is not None

    def is_worth_while(self) -> bool:
        wakeup_ms = self.store.next_wakeup_ms()
        return self.can_begin() and (
            self.store.offsets_behind() or (wakeup_ms is not None and wakeup_ms <= self.now_ms)
        )

    @precondition(is_worth_while)
    @rule(limit=TAKE, is_narrow=st.sampled_from([False, False, True]))
    def begin(self, limit: int, is_narrow: bool = False) -> None:
        if self.joining:
            self.joined()
        self.transaction, self.open_steps = self.store.open_loan(self.now_ms, only_output=is_narrow), 0
        self.take(limit)

    @precondition(lambda self: self.transaction is None)
    @rule(names=st.sets(st.sampled_from(PARTITIONS)))
    def hold(self, names: set[SourceName]) -> None:
        """Partitions of the delay topic take nothing, or take something again."""
        self.held = names & self.owned
        self.store.hold_named(self.held)

    @precondition(lambda self: self.transaction is None and len(self.owned) > 1)
    @rule(name=st.sampled_from(PARTITIONS), delivers=st.booleans())
    def revoke(self, name: SourceName, delivers: bool) -> None:
        """Another instance gets a partition; the store stays open, and the others go on."""
        if name not in self.owned:
            return
        self.store.leave([name], self.now_ms)
        # Cancels that were read may be remembered, or not, until they are read again.
        self.rumoured[name] = max(self.rumoured[name], self.known(name))
        for names in (self.owned, self.held, self.joining):
            names.discard(name)
        del self.ingested[name], self.inherited[name]
        self.deliver_elsewhere(name, delivers)

    @precondition(lambda self: len(self.owned) < len(PARTITIONS))
    @rule()
    def assign(self) -> None:
        """All partitions come (back); the store is opened anew only where its files are not to be believed."""
        added = set(PARTITIONS) - self.owned
        committed = {name: self.committed[name] for name in added}
        starts = {name: self.log_starts[name] for name in added}
        resume = self.store.coming(committed, starts, self.cuts)
        self.owned = set(PARTITIONS)
        if resume is None:
            self.crash()
            return
        offsets = {name: self.log_starts[name] if at is None else at for name, at in resume.items()}
        for name, at in resume.items():
            assert at is None or at >= self.log_starts[name]
            if at is None:
                self.buried[name] = 0
        self.inherited |= {name: len(self.log[name]) for name in added}
        self.ingested |= offsets
        self.joining |= added
        ends = {name: self.inherited[name] for name in added}
        self.store.come(committed, starts, self.cuts, offsets, ends, self.now_ms)
        if self.transaction is None:
            self.joined()

    @precondition(lambda self: self.transaction is None and self.joining)
    @rule()
    def joined(self) -> None:
        """The dispatcher looks whether partitions that have come are read up to their committed O."""
        names = self.store.join()
        assert set(names) == {name for name in self.joining if self.ingested[name] >= self.committed[name].offset}
        self.joining -= set(names)
        if names:
            self.hold(self.held)

    @precondition(is_open)
    @rule(limit=TAKE)
    def take(self, limit: int) -> None:
        assert self.transaction is not None
        rows = self.transaction.take(self.now_ms, limit)
        payloads = zip(rows.payload.column("key").to_pylist(), rows.payload.column("kind").to_pylist(), strict=True)
        for name, offset, payload in zip(self.store.sources_of(rows), rows.offset.tolist(), payloads, strict=True):
            records = self.log[name][offset]
            record = next(row for row in records if row.kind == payload[1])
            assert payload[0] == f"{record.partition}-{record.offset}".encode(), "the payload is not the record's"
            assert record.at_ms <= self.now_ms, "early"
            assert (record.topic, record.partition) not in self.held | self.joining, "of a held source"
            assert not self.covered(record), "cancelled"
            self.taken.append(record)

    @precondition(is_open)
    @rule(ms=st.integers(0, 5), records=RECORDS, limit=TAKE)
    def take_after_news(self, ms: int, records: list[Any], limit: int) -> None:
        """What is ingested between two takes may lie before what was taken."""
        self.produce(records)
        self.ingest_all()
        self.pass_time(ms)
        self.take(limit)

    def commit(self) -> Loan:
        """Kafka commits: output and state are one fact; the output is the difference of the finished sets (I1)."""
        transaction = self.transaction
        assert transaction is not None
        before = {key(r) for r in self.rows() if self.finished(r)}
        for name, state in self.store.states_after(transaction).items():
            assert state.offset >= self.committed[name].offset, "O went back"
            assert name not in self.joining, "before it is ingested up to its O"
            if name in self.held and state.position is not None:
                before_p = self.committed[name].position
                assert before_p is not None and state.position <= before_p, "P of a held source moved on"
            self.committed[name] = state
        after = {key(r): r for r in self.rows() if self.finished(r)}
        assert before <= after.keys()
        taken = set(map(key, self.taken))
        assert len(taken) == len(self.taken), "handed out twice"
        assert taken <= after.keys() - before
        assert all(self.perhaps_covered(after[k]) for k in after.keys() - before - taken), "finished, but neither"
        self.output.update(taken)
        for record in self.taken:
            self.copy(record)
        self.transaction, self.taken = None, []
        return transaction

    def acknowledge(self) -> None:
        self.commit().acknowledge()

    def rollback(self) -> None:
        assert self.transaction is not None
        self.transaction.rollback()
        self.transaction, self.taken = None, []

    @precondition(lambda self: self.is_open() and self.open_steps > 1)
    @rule(how=HOW)
    def end(self, how: str) -> None:
        if how == "acknowledge":
            self.acknowledge()
        elif how == "rollback":
            self.rollback()
        else:
            if how == "crash after":
                self.commit()
            self.crash()

    @precondition(lambda self: self.transaction is None)
    @rule(records=RECORDS, ms=st.integers(0, HORIZON_MS), limit=TAKE, meanwhile=MEANWHILE, how=HOW)
    def transact(self, records: list[Any], ms: int, limit: int, meanwhile: list[tuple[str, Any]], how: str) -> None:
        """A transaction during which much happens, some of it on rows whose offsets are committed already."""
        self.news(records)
        if self.is_worth_while():
            self.deliver([8, 8])
        self.pass_time(ms)
        if self.is_worth_while():
            self.begin(limit)
            self.happen(meanwhile)
            self.end(how)

    @precondition(is_worth_while)
    @rule(limits=st.lists(TAKE, min_size=1, max_size=3))
    def deliver(self, limits: list[int]) -> None:
        self.begin(limits[0])
        for limit in limits[1:]:
            self.take(limit)
        self.acknowledge()

    # ---- maintenance

    def can_flush(self) -> bool:
        return any(view.can_flush() for view in self.store.views())

    @precondition(can_flush)
    @rule()
    def flush(self) -> None:
        self.store.flush(self.now_ms)
        self.note_buried()

    def note_buried(self) -> None:
        """A checkpoint names files with every cancel that is read."""
        self.buried |= {name: self.known(name) for name in self.owned}
        for name in PARTITIONS:
            self.rumoured[name] = max(self.rumoured[name], self.buried[name])

    def can_reclaim(self) -> bool:
        return any(view.can_reclaim() for view in self.store.views())

    def reclaim(self) -> None:
        self.store.reclaim(self.now_ms)

    @precondition(lambda self: self.can_reclaim() or self.can_load())
    @rule()
    def maintain(self) -> None:
        """A round of the bridge's own loop."""
        self.reclaim()
        if self.loading is None:
            self.load()
        if self.can_flush():
            self.flush()

    @precondition(lambda self: any(len(view.segments) > 1 for view in self.store.views()))
    @rule(windows=st.integers(1, 3))
    def compact(self, windows: int) -> None:
        """Some windows of a compaction; what else happens, happens in between."""
        for _ in range(windows):
            loading = self.store.next_compaction(self.now_ms)
            if loading is not None:
                self.store.compact(loading, self.gather(loading.window))

    def can_load(self) -> bool:
        near_ms = self.now_ms + HORIZON_MS // 2
        return self.loading is None and any(v.resident.frontier.at_ms < near_ms for v in self.store.views())

    @precondition(can_load)
    @rule()
    def begin_gather(self) -> None:
        self.loading = self.store.next_loading(self.now_ms)
        if self.loading is not None:
            self.gathered = self.gather(self.loading.window)
            self.flushed_since = set(self.loading.view.segments)

    @precondition(lambda self: self.loading is not None)
    @rule()
    def admit(self) -> None:
        assert self.loading is not None
        view, window = self.loading.view, self.loading.window
        moved = view.resident.frontier != window.lower
        newer = set(view.segments) != self.flushed_since
        admitted = self.store.admit(self.loading, self.gathered)
        assert admitted or moved or newer
        assert not (admitted and moved)
        if admitted:
            assert window.lower < view.resident.frontier <= window.upper
        self.loading = None

    @precondition(can_load)
    @rule(meanwhile=MEANWHILE)
    def load_while(self, meanwhile: list[tuple[str, Any]]) -> None:
        """A gather during which much happens."""
        self.begin_gather()
        self.happen(meanwhile)
        if self.loading is not None:
            self.admit()

    @precondition(lambda self: self.transaction is None)
    @rule(records=RECORDS)
    def fill_a_segment(self, records: list[Any]) -> None:
        self.news(records)
        if self.is_worth_while():
            self.deliver([8, 8])
        if self.can_flush():
            self.flush()

    def happen(self, meanwhile: list[tuple[str, Any]]) -> None:
        for what, value in meanwhile:
            if what == "news":
                self.news(value)
            elif what == "take" and self.is_open():
                self.take(value)
            elif what == "time":
                self.pass_time(value)
            elif what == "retreat":
                self.retreat(value)
            elif what == "flush" and self.can_flush():
                self.flush()
            elif what == "load" and self.can_load():
                self.load()
            elif what == "deliver" and self.is_worth_while():
                self.deliver([2])
            self.every_pending_record_is_in_one_place()

    @precondition(can_load)
    @rule()
    def load(self) -> None:
        self.begin_gather()
        if self.loading is not None:
            self.admit()

    @precondition(lambda self: any(len(view.resident.ready) for view in self.store.views()))
    @rule(rows=st.integers(0, 4))
    def retreat(self, rows: int) -> None:
        """The ready rows gives rows back, as when ingest has overfilled it."""
        for view in self.store.views():
            view.retreat(rows * ROW_BYTES)

    # ---- http

    @rule(
        what=st.sampled_from(["id", "origin", "key", "target", "from", "until", "recurring", "all"]),
        nth=st.integers(0, 20),
        limit=st.sampled_from([1, 2, 100]),
    )
    def ask(self, what: str, nth: int, limit: int) -> None:
        """Pages of what fits a query are what is pending, each message once, the soonest first."""
        timers = [row for row in self.rows() if row.kind == Kind.TIMER]
        if not timers:
            return
        one = timers[nth % len(timers)]
        origin = one.topic, one.partition, one.origin_offset
        queries: dict[str, tuple[Query, Callable[[Record], bool]]] = {
            "id": (Query(id=one.id or "a"), lambda row: row.id == (one.id or "a")),
            "origin": (Query(origin=origin), lambda row: (row.topic, row.partition, row.origin_offset) == origin),
            "key": (
                Query(key=f"{one.partition}-{one.offset}".encode()),
                lambda row: (row.partition, row.offset) == (one.partition, one.offset),
            ),
            "target": (Query(target=one.target or ""), lambda row: row.target == one.target),
            "from": (Query(due_from_ms=one.at_ms), lambda row: row.at_ms >= one.at_ms),
            "until": (Query(due_until_ms=one.at_ms), lambda row: row.at_ms < one.at_ms),
            "recurring": (Query(recurring=True), lambda row: row.schedule is not None),
            "all": (Query(), lambda row: True),
        }
        query, fits = queries[what]
        found: list[PendingRow] = []
        after = None
        for _ in range(1_000):
            page = self.store.find(query, self.now_ms, after=after, limit=limit, bulky=True)
            found += page.rows
            assert len(page.rows) <= limit
            after = page.next
            if after is None:
                break
        else:
            raise AssertionError("no end of it")
        places = [(row.at_ms, row.topic, row.partition, row.offset) for row in found]
        assert places == sorted(set(places)), "twice, or not in order"
        pending = {
            position_of(row): row
            for row in timers
            if fits(row)
            and row.offset < self.ingested.get((row.topic, row.partition), 0)
            and not (self.finished(row) or self.covered(row))
        }
        assert set(places) <= pending.keys()
        assert all(self.perhaps_covered(pending[place]) for place in pending.keys() - set(places)), "not found"
        for row, place in zip(found, places, strict=True):
            record = pending[place]
            assert row.state == ("overdue" if record.at_ms <= self.now_ms else "waiting")
            assert row.key == f"{record.partition}-{record.offset}".encode()
            assert (row.value, row.headers, row.id) == (record.value, (("h", b"v"),), record.id)
            assert (row.origin, row.rolls, row.target) == (record.origin_offset, record.rolls, record.target or "")
            assert (row.schedule, row.tick) == (record.schedule, record.tick)
        if self.export is None:
            self.export = self.store.export(query, self.now_ms, bulky=True), found
        if what not in ("target", "all"):
            assert self.store.count_where(query, self.now_ms) == Count(rows=len(found), is_exact=True)

    @precondition(lambda self: self.export is not None)
    @rule()
    def read_export(self) -> None:
        """An export has what pages had when it was begun, whatever has happened to the store since."""
        assert self.export is not None
        (export, found), self.export = self.export, None
        exported = pa.Table.from_batches(export, SCHEMA).sort_by([(name, "ascending") for name in SCHEMA.names[:3]])
        found.sort(key=lambda row: (row.topic, row.partition, row.offset))
        for row, values in zip(found, exported.to_pylist(), strict=True):
            assert values == {
                **{name: getattr(row, name) for name in SCHEMA.names if hasattr(row, name)},
                "origin": f"{row.topic}/{row.partition}/{row.origin}",
                "due": datetime.fromtimestamp(row.due_ms / 1000, UTC),
                "at": datetime.fromtimestamp(row.at_ms / 1000, UTC),
                "ts": datetime.fromtimestamp(row.ts_ms / 1000, UTC),
                "attempts": row.attempt,
                "headers": [{"key": name, "value": value} for name, value in row.headers],
            }

    # ---- misfortune

    @precondition(lambda self: self.calm > 6)
    @rule(
        what=st.sampled_from(
            ["crash", "directory", "lose", "lose", "regain", "disk", "flush", "flush", "trim", "cut", "errno", "damage"]
        ),
        step=st.integers(1, 5),
        name=st.sampled_from(PARTITIONS),
        delivers=st.booleans(),
        records=st.one_of(st.just([]), RECORDS),
    )
    def misfortune(self, what: str, step: int, name: SourceName, delivers: bool, records: list[Any]) -> None:
        """One rule for all and some calm in between, so that there is something to lose."""
        self.calm = 0
        if what in ("errno", "damage", "cut"):
            self.export = None
        if what == "crash":
            self.crash()
        elif what == "directory":
            self.store.close()
            shutil.rmtree(self.directory / "store")
            self.buried, self.rumoured = dict.fromkeys(PARTITIONS, 0), dict.fromkeys(PARTITIONS, 0)
            self.open()
        elif what == "lose" and len(self.owned) > 1:
            self.give_away(name, delivers)
        elif what == "regain" and len(self.owned) < len(PARTITIONS):
            self.owned = set(PARTITIONS)
            self.crash()
        elif what == "disk" and self.can_flush():
            self.flush_out_of_disk(["segment", "segment", "tombstones", "checkpoint", "checkpoint"][step - 1])
        elif what == "flush" and self.can_flush():
            self.die_in_flush(step)
        elif what == "trim":
            self.catch_up_with_time()
            self.trim()
            self.crash()
        elif what == "cut":
            if delivers and len(self.owned) > 1 and self.transaction is None:
                self.revoke(name, delivers)
            self.cut(name, 3 * step)
        elif what == "errno":
            self.cannot_read(step)
        elif what == "damage":
            self.damage(step)
        if records:
            self.news(records)
            if delivers and self.is_worth_while():
                self.deliver([1])

    def crash(self) -> None:
        self.store.close()
        self.open()

    def catch_up_with_time(self) -> None:
        """Nearly everything is delivered, and not written down."""
        for _ in range(8):
            self.ingest_all()
            self.pass_time(20)
            if self.can_load():
                self.load()
            if self.is_worth_while():
                self.deliver([8, 8])

    def trim(self) -> None:
        """Kafka deletes what nothing pending needs: the retention is longer than any of it takes."""
        for name, log in self.log.items():
            needed = [min(row.offset, row.origin_offset) for rows in log for row in rows if not self.finished(row)]
            upto = min([self.committed[name].offset, self.ingested.get(name, len(log)), *needed])
            self.log_starts[name] = max(self.log_starts[name], upto)

    def cut(self, name: SourceName, step: int) -> None:
        """Kafka loses the last records of a log, and its owner moves the committed state back to where they began."""
        log = self.log[name]
        at = max(self.log_starts[name], len(log) - step)
        gone = [row for rows in log[at:] for row in rows]
        del log[at:]
        self.covers[name] = 0, {}
        for row in gone:
            del self.output[key(row)]
            if row.schedule is not None and row.tick > 1:
                self.torn.add((*name, row.origin_offset))
        self.excused |= {key(r) for rows in log for r in rows if self.finished(r) and key(r) not in self.output}
        if at < self.committed[name].offset:
            steps = self.committed[name].frozen
            crossing = [(at, at_ms, o) for end, at_ms, o in steps if end >= at][:1]
            frozen = (*(step for step in steps if step[0] < at), *crossing) if at else ()
            self.committed[name] = replace(self.committed[name], offset=at, frozen=frozen)
        known = self.cuts.get(name, ())
        lower = tuple(each for each in known if each[1] < at)
        self.cuts[name] = (*lower, (known[-1][0] + 1 if known else 1, at))
        self.copied_ms[name] = {o: ms for o, ms in self.copied_ms[name].items() if o < at}
        self.buried[name], self.rumoured[name] = min(self.buried[name], at), min(self.rumoured[name], at)
        if name in self.owned:
            self.crash()

    def cannot_read(self, step: int) -> None:
        """A start fails for the volume, and leaves every file as it is."""
        self.store.close()
        where = self.directory / "store"
        before = contents(where)
        what = ["pathlib.Path.read_text", "pathlib.Path.open", "pyarrow.parquet.read_metadata", "mmap.mmap"][step % 4]
        with (
            mock.patch(what, side_effect=OSError(errno.EIO, "Input/output error")),
            contextlib.suppress(DiskFailure),
        ):
            self.open()
            self.store.close()
            return self.open()
        # Directories of other partitions may have been opened, and tidied up.
        assert all(before.get(path) == content for path, content in contents(where).items() if is_index(path))
        return self.open()

    def damage(self, step: int) -> None:
        """A bit of a file flips while the process is down: the others are kept, and Kafka has the rest."""
        named = list(self.store.named_files(self.directory / "store"))
        self.store.close()
        if named:
            path = named[step % len(named)]
            content = bytearray(path.read_bytes())
            content[-30] ^= 1
            path.write_bytes(content)
            self.damaged = True
        self.open()

    def flush_out_of_disk(self, what: str) -> None:
        """Nothing changes."""
        modules = {
            "segment": timerstore.log.segment,
            "tombstones": timerstore.cancels.tombstones,
            "checkpoint": checkpoints,
        }
        views = self.store.views()
        fails = {
            "segment": any(view.unstored() for view in views),
            "tombstones": any(view.state.cancels.tombstones.memory_rows for view in views),
            "checkpoint": True,
        }
        before = files_in(self.directory / "store")
        with mock.patch.object(modules[what], "write", side_effect=DiskFull("full")):
            if fails[what]:
                with pytest.raises(DiskFull):
                    self.store.flush(self.now_ms)
                assert before == files_in(self.directory / "store")

    def die_in_flush(self, step: int) -> None:
        """The process dies after a numbered step: 1 (nothing is written), 2 (a segment), 3 (and tombstones, without a
        checkpoint), 4 (all are there), 5 (memory is told half)."""
        owner, function = [
            (timerstore.log.segment, "write"),
            (timerstore.cancels.tombstones, "write"),
            (checkpoints, "write"),
            (Resident, "mark_stored"),
            (timerstore.cancels.tombstones.Tombstones, "stored"),
        ][step - 1]
        before = [view.state.checkpoint for view in self.store.views()]
        with mock.patch.object(owner, function, side_effect=Death), contextlib.suppress(Death):
            self.store.flush(self.now_ms)
        if any(view.state.checkpoint is not known for view, known in zip(self.store.views(), before, strict=True)):
            self.note_buried()
        self.crash()

    def give_away(self, name: SourceName, delivers: bool) -> None:
        """Another instance gets a partition; it may deliver what is due there."""
        self.owned.discard(name)
        self.crash()
        self.deliver_elsewhere(name, delivers)

    def deliver_elsewhere(self, name: SourceName, delivers: bool) -> None:
        rows = [r for records in self.log[name] for r in records]
        due = [r for r in rows if r.at_ms <= self.now_ms and not self.finished(r)]
        if delivers and due:
            before = self.committed[name]
            last = max((r.at_ms, r.offset) for r in due)
            position = max(last, before.position or last)
            if any((r.at_ms, r.offset) <= position and r.at_ms > self.now_ms for r in rows):
                # The clock has stepped back below P: what is not due stops O, too intricate for this stand-in.
                return
            output = [r for r in due if not self.covered(r, len(self.log[name]))]
            self.output.update(map(key, output))
            after = State.at(name, len(self.log[name]), position)
            if last[0] == AT_MIN:
                after = replace(before, offset=len(self.log[name]))
            frozen = tuple(step for step in before.frozen if step[1:] > position)
            self.committed[name] = replace(after, frozen=frozen)
            for record in output:
                if record.schedule is not None:
                    self.copy(record)

    # ---- promises

    @invariant()
    def steps_are_counted(self) -> None:
        self.calm += 1
        self.open_steps += 1

    @invariant()
    def every_pending_record_is_in_one_place(self) -> None:
        """Resident or handed out, or beyond the frontier in one segment; and nothing else is resident."""
        views = self.store.views()
        rows = [place for view in views for place in view.places(*view.holders(), view.state.rows_on_loan())]
        assert len(rows) == len(set(rows)), "twice in memory"
        unfinished = {
            key(r): r
            for name in self.owned
            for records in self.log[name][: self.ingested[name]]
            for r in records
            if not self.finished(r)
        }
        assert set(rows) <= unfinished.keys(), "resident, but not pending"
        stored = Counter(k for view in views for segment in view.segments for k in self.keys_of(view, segment))
        assert all(count == 1 for count in stored.values()), "in two segments"
        here, taken = set(rows), set(map(key, self.taken))
        view_of = {name: view for view in views for name in view.names}
        for k, record in unfinished.items():
            view, place = view_of[k[:2]], (k[:2], record.at_ms, record.offset)
            if k not in here:
                is_there = k in stored and (view.is_beyond(*place) or view.is_left_on_disk(*place))
                assert is_there or self.perhaps_covered(record), "lost"  # a compaction leaves the latter out
            elif k not in taken and view.is_beyond(*place):
                assert k not in stored, "in memory and in a segment beyond the frontier: would be loaded twice"

    @invariant()
    def rows_are_where_they_belong(self) -> None:
        """P <= L; ready rows lie in (P, L], the memtable's beyond L."""
        for view in self.store.views():
            resident = view.resident
            assert resident.position <= resident.frontier
            assert not resident.ready.all().at_or_below(resident.position).any()
            assert resident.ready.all().at_or_below(resident.frontier).all()
            assert not resident.memtable.all().at_or_below(resident.frontier).any()

    @invariant()
    def pending_gauge_is_exact(self) -> None:
        """It counts what is unfinished, and not cancelled as far as the store can know."""
        if any(self.known(name) < self.rumoured[name] for name in self.owned):
            return
        pending = [
            r
            for name in self.owned
            for records in self.log[name][: self.ingested[name]]
            for r in records
            if r.due_ms is not None and not self.finished(r) and not self.covered(r)
        ]
        stats = self.store.stats()
        assert stats.pending == len(pending)
        assert stats.pending_by_target == Counter(r.target or "" for r in pending)
        assert stats.recurring == sum(r.schedule is not None for r in pending)

    @invariant()
    def bytes_are_exact(self) -> None:
        for view in self.store.views():
            resident = view.resident
            ready, memtable, overtaken, *others = view.holders()
            for rows, count in (
                (ready, resident.ready.bytes),
                (concat([memtable, *others]), view.memtable_bytes),
                (overtaken, resident.overtaken.bytes),
            ):
                assert resident.chunks.bytes_of(rows.chunk) == count
        total = sum(sum(map(len, view.holders())) + len(view.state.rows_on_loan()) for view in self.store.views())
        chunks = self.store.memory.chunks
        assert chunks._live[list(chunks._payload)].sum() == total

    def rows_of(self, segment: Segment) -> pa.Table:
        """What a segment holds, read once: segments are immutable (a number is used again only after a crash)."""
        name = f"{segment.path}-{segment.named.crc}"
        if name not in self.segment_rows:
            self.segment_rows[name] = read_rows(segment)
        return self.segment_rows[name]

    def keys_of(self, view: View, segment: Segment) -> list[Key]:
        """Of what it holds; likewise."""
        name = f"{segment.path}-{segment.named.crc}"
        if name not in self.segment_keys:
            self.segment_keys[name] = view.places_of(self.rows_of(segment))
        return self.segment_keys[name]

    def gather(self, window: Window) -> pa.Table:
        """What the Spark job reads for a window, were it to filter nothing: the row groups that may have rows in it."""
        tables = []
        for segment in window.segments:
            starts = np.cumsum(segment.group_rows) - segment.group_rows
            rows = self.rows_of(segment)
            groups = segment.groups_between(window.lower, window.upper).nonzero()[0].tolist()
            tables += [rows.slice(starts[group], segment.group_rows[group]) for group in groups]
        return pa.concat_tables(tables)

    def teardown(self) -> None:
        """In the end everything is delivered exactly once, and nothing is left over."""
        try:
            if self.transaction is not None:
                self.rollback()
            if len(self.owned) < len(PARTITIONS):
                self.owned = set(PARTITIONS)
                self.crash()
            self.hold(set())
            self.joined()
            self.drain()
            assert all(count == 1 for count in self.output.values()), "doubled"
            assert all(self.covered(r) for r in self.rows() if key(r) not in self.output.keys() | self.excused), "lost"
            self.ticks_have_no_gaps()
            assert self.store.stats().pending == 0
            assert not len(self.store.memory.chunks)
        finally:
            timerstore.log.segment.ROW_GROUP_ROWS = self.row_group_rows
            self.patches.close()
            self.store.close()
            shutil.rmtree(self.directory)

    def ticks_have_no_gaps(self) -> None:
        """Of every recurring message, each of them once, up to the last one or to a cancel."""
        found: dict[tuple[str, int, int], list[Record]] = {}
        for row in self.rows():
            if row.schedule is not None and row.rolls == 0:
                found.setdefault((row.topic, row.partition, row.origin_offset), []).append(row)
        for origin, ticks in found.items():
            assert [row.tick for row in ticks] == list(range(1, len(ticks) + 1))
            assert len(ticks) == TICKS or self.covered(ticks[-1]) or origin in self.torn

    def is_done(self) -> bool:
        """P does not pass a cancelled row that a compaction has left out, if nothing comes after it."""
        return all(self.finished(record) or self.covered(record) for record in self.rows())

    def drain(self) -> None:
        """Ample limits: what could be lost or doubled by small ones has happened before."""
        self.store.set_limits(Limits(flush_interval_ms=200))
        for _ in range(60):
            self.pass_time(50)
            self.ingest_all()
            self.joined()
            if self.store.is_clock_behind(self.now_ms):
                self.step_back()
            if self.loading is not None:
                self.admit()
            if self.can_load():
                self.load()
            if self.is_worth_while():
                self.deliver([1_000, 1_000])
            if self.store.flush_due(self.now_ms):
                self.flush()
            self.compact(3)
            self.store.reclaim(self.now_ms)
            has_segments = any(view.segments for view in self.store.views())
            if self.is_done() and not has_segments and not len(self.store.memory.chunks):
                return
        assert self.is_done(), "never delivered"
        assert not any(view.segments for view in self.store.views()), "finished segments were not reclaimed"


@pytest.mark.fault("crashes, lost and damaged files, full disks, in any order")
@pytest.mark.timeout(timeout_s(1_200))
class TestStoreMachine(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    """In any course of events each record is delivered exactly once and never early, unless it is cancelled."""

    settings = of_a_machine(check=10, ci=150, nightly=10_000, steps=50)
