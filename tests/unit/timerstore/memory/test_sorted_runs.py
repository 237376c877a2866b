"""timerstore.memory.sorted_runs: sorted runs behave as one sorted list."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

import timerstore.memory.sorted_runs
from timerstore.memory.chunks import Chunks, materialize
from timerstore.memory.sorted_runs import GATHERED_BYTES_MAX, GATHERED_CHUNKS, SMALL_RUNS, RowRefs, SortedRuns
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import ORIGIN, Position, end_of

KEYS = st.tuples(st.integers(0, 6), st.integers(0, 50))
BATCHES = st.lists(st.lists(KEYS, max_size=12), max_size=8)
BOUNDS = st.builds(Position, st.integers(-1, 7), st.integers(0, 50))


def refs(positions: list[Position]) -> RowRefs:
    """References in the order of position; rows are of four chunks, so that bytes differ."""
    positions = sorted(positions)
    return RowRefs(
        np.array([p.at_ms for p in positions], dtype=np.int64),
        np.array([p.offset for p in positions], dtype=np.int64),
        np.array([p.offset % 4 for p in positions], dtype=np.int32),
        np.arange(len(positions), dtype=np.int32),
    )


def listed(rows: RowRefs) -> list[Position]:
    return [Position(at, offset) for at, offset in zip(rows.at.tolist(), rows.offset.tolist(), strict=True)]


def filled(batches: list[list[tuple[int, int]]]) -> tuple[SortedRuns, list[Position]]:
    """SortedRuns of the batches (a key counts once), and the same as a sorted list."""
    runs, seen = SortedRuns(Chunks()), set[Position]()
    for batch in batches:
        new = {Position(*key) for key in batch} - seen
        runs.insert(refs(list(new)))
        seen |= new
    return runs, sorted(seen)


@given(BATCHES, BOUNDS, st.one_of(st.none(), st.integers(0, 30)))
def test_popping_gives_the_smallest_in_order(
    batches: list[list[tuple[int, int]]], bound: Position, limit: int | None
) -> None:
    """What is popped are the first rows at or below the bound; the rest stays."""
    runs, expected = filled(batches)
    due = [p for p in expected if p <= bound]
    assert runs.count_until(bound) == len(due)
    assert listed(runs.pop_until(bound, limit)) == due[:limit]
    rest = expected[len(due[:limit]) :]
    assert sorted(listed(runs.all())) == rest
    assert len(runs) == len(rest)
    assert runs.first_at_ms() == (rest[0].at_ms if rest else None)
    if rest:
        assert runs.first() == rest[0]


@given(BATCHES, BOUNDS)
def test_splitting_takes_one_side_as_sorted_runs(batches: list[list[tuple[int, int]]], bound: Position) -> None:
    """Each part is in the order of position, and together they are that side."""
    runs, expected = filled(batches)
    above = [listed(part) for part in runs.split_after(bound)]
    assert all(part == sorted(part) for part in above)
    assert sorted(p for part in above for p in part) == [p for p in expected if p > bound]
    below = [listed(part) for part in runs.split_until(bound)]
    assert sorted(p for part in below for p in part) == [p for p in expected if p <= bound]
    assert len(runs) == 0


@given(BATCHES, BOUNDS, st.integers(0, 200))
def test_the_largest_prefix_within_a_budget_is_found(
    batches: list[list[tuple[int, int]]], bound: Position, budget: int
) -> None:
    """The answer's rows fit, one more does not; None when all fit, the origin when the first does not."""
    runs, expected = filled(batches)
    row_bytes = runs._chunks.row_bytes = np.array([1, 10, 7, 30], dtype=np.int64)
    due = [p for p in expected if p <= bound]
    total, prefix = 0, 0
    while prefix < len(due) and total + row_bytes[due[prefix].offset % 4] <= budget:
        total += int(row_bytes[due[prefix].offset % 4])
        prefix += 1
    answer = None if prefix == len(due) else due[prefix - 1] if prefix else ORIGIN
    assert runs.largest_within(bound, budget) == answer


@given(BATCHES, st.integers(0, 3))
def test_removing_takes_exactly_the_marked(batches: list[list[tuple[int, int]]], chunk: int) -> None:
    """The rest stays sorted."""
    runs, expected = filled(batches)
    removed = runs.remove(lambda rows: rows.chunk == chunk)
    assert sorted(listed(removed)) == [p for p in expected if p.offset % 4 == chunk]
    assert listed(runs.pop_until(Position(9, 0))) == [p for p in expected if p.offset % 4 != chunk]


def test_there_are_never_many_runs() -> None:
    """A thousand batches of one row are some dozen runs: waiting ones, and merged ones."""
    runs = SortedRuns(Chunks())
    for i in range(1_000):
        runs.insert(refs([Position(i * 7919 % 1_000, i)]))
    assert len(runs._runs) < SMALL_RUNS + 10


def test_a_run_beyond_the_limit_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge happens under the lock: its length is bounded."""
    monkeypatch.setattr(timerstore.memory.sorted_runs, "MERGED_ROWS_MAX", 10)
    runs = SortedRuns(Chunks())
    for i in range(8):
        runs.insert(refs([Position(at, i * 10 + at) for at in range(6)]))
    assert max(len(run) for run in runs._runs) <= 10
    assert listed(runs.pop_until(Position(9, 0), 5)) == [Position(0, i * 10) for i in range(5)]


def test_a_mask_of_all_copies_nothing() -> None:
    """Placing a batch that belongs into one place as a whole is the usual case."""
    rows = refs([Position(1, 1), Position(2, 2)])
    everything: Callable[[RowRefs], bool] = lambda picked: picked is rows  # noqa: E731
    assert everything(rows.where(np.array([True, True])))
    assert len(rows.where(np.array([False, False]))) == 0
    assert listed(rows.where(np.array([False, True]))) == [Position(2, 2)]


def insert_sent(runs: SortedRuns, chunks: Chunks, offsets: list[int], due_ms: list[int], value: bytes) -> None:
    """A batch of rows whose payloads tell their offsets."""
    order = sorted(range(len(offsets)), key=lambda i: (due_ms[i], offsets[i]))
    columns = {"origin": pa.array([offsets[i] for i in order], pa.int64()), "value": pa.array([value] * len(order))}
    payload = pa.RecordBatch.from_arrays(
        [columns.get(each.name, pa.nulls(len(order), each.type)) for each in PAYLOAD], schema=PAYLOAD
    )
    at, offset = (np.array([values[i] for i in order], np.int64) for values in (due_ms, offsets))
    chunk = np.full(len(order), chunks.add(payload), np.int32)
    runs.insert(RowRefs(at, offset, chunk, np.arange(len(order), dtype=np.int32)))


def offsets_in(chunks: Chunks, rows: RowRefs) -> list[int]:
    """What the payloads say."""
    found: list[int] = materialize(chunks.payloads(rows.chunk), rows.chunk, rows.row).column("origin").to_pylist()
    return found


@given(st.integers(0, 2**32), st.integers(1, 30), st.lists(st.integers(0, 5_000), max_size=3))
@settings(max_examples=30)
def test_small_batches_are_put_together(seed: int, rows: int, bounds_ms: list[int]) -> None:
    """What is due at one time comes from a few chunks, whatever was popped meanwhile; each row keeps its payload, bytes
    are those of what is there, and what was popped before can still be read."""
    random, chunks, popped, count = np.random.default_rng(seed), Chunks(), list[RowRefs](), 200
    runs = SortedRuns(chunks)
    for batch in range(count):
        offsets = list(range(batch * rows, (batch + 1) * rows))
        insert_sent(runs, chunks, offsets, random.integers(0, 5_000, rows).tolist(), bytes(int(random.integers(9))))
        if batch % 50 == 49 and bounds_ms:
            popped.append(runs.pop_until(end_of(bounds_ms.pop())))
    left = runs.all()
    for each in (*popped, left):
        assert offsets_in(chunks, each) == each.offset.tolist()
    assert sorted(np.concatenate([each.offset for each in (*popped, left)]).tolist()) == list(range(count * rows))
    assert runs.bytes == chunks.bytes_of(left.chunk)
    assert len(np.unique(left.chunk)) < SMALL_RUNS + count // GATHERED_CHUNKS
    chunks.release(np.concatenate([each.chunk for each in (*popped, left)]))
    assert len(chunks) == 0


def test_large_rows_are_left_where_they_are() -> None:
    """Putting them together would copy megabytes under the store's lock, and a chunk of one row costs little more."""
    chunks = Chunks()
    runs = SortedRuns(chunks)
    for offset in range(4 * GATHERED_CHUNKS):
        insert_sent(runs, chunks, [offset], [0], bytes(GATHERED_BYTES_MAX // GATHERED_CHUNKS))
    assert len(chunks) == 4 * GATHERED_CHUNKS
