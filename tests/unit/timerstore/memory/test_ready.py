"""timerstore.memory.ready: ready rows of several logs, in one order."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from hypothesis import given

from timerstore.memory.chunks import Chunks
from timerstore.memory.ready import MergedRows, ReadyRows, with_log
from timerstore.memory.sorted_runs import RowRefs, concat, gathered
from timerstore.rows.entry import PAYLOAD
from timerstore.rows.position import KEY_MAX, OFFSET_BITS, OFFSET_MAX, Position, RowBound, order_by_position

LOGS = 3
Key = tuple[int, int, int]


def rows(chunks: Chunks, log: int, positions: list[tuple[int, int]]) -> RowRefs:
    """Rows of a log with a chunk of their own; the payload has the log and the offset."""
    at, offset = (np.array([each[i] for each in sorted(positions)], np.int64) for i in (0, 1))
    columns = [
        pa.array(offset, field.type) if field.name == "origin" else pa.nulls(len(at), field.type) for field in PAYLOAD
    ]
    chunk = np.full(len(at), chunks.add(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD), 100 + log), np.int32)
    return RowRefs(at, offset, chunk, np.arange(len(at), dtype=np.int32))


def keys(found: RowRefs) -> list[Key]:
    log, offset = found.offset >> OFFSET_BITS, found.offset & OFFSET_MAX
    return list(zip(found.at.tolist(), log.tolist(), offset.tolist(), strict=True))


POSITIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=8, unique_by=lambda each: each[1])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["own", "merged"]), st.integers(0, LOGS - 1), POSITIONS),
        st.tuples(st.sampled_from(["merge", "take back", "pop own", "gather"]), st.integers(0, LOGS - 1), st.just([])),
        st.tuples(st.just("pop"), st.integers(0, 9), st.just([])),
    ),
    max_size=20,
)


@given(steps=STEPS, limit=st.integers(1, 9))
def test_rows_of_several_logs_leave_in_one_order_wherever_they_are(
    steps: list[tuple[str, int, list[tuple[int, int]]]], limit: int
) -> None:
    """A log's rows are all there, with exact bytes, be they merged or not; a pop has the first ones by time, log and
    offset."""
    chunks = Chunks()
    merged = MergedRows(chunks)
    logs = [ReadyRows(chunks, merged, log) for log in range(LOGS)]
    own, all_merged = [set[tuple[int, int]]() for _ in logs], set[Key]()
    for step, which, positions in steps:
        if step == "pop":
            popped = merged.pop_until(RowBound(which, KEY_MAX), limit)
            assert keys(popped) == sorted(each for each in all_merged if each[0] <= which)[:limit]
            all_merged -= {*keys(popped)}
            chunks.release(popped.chunk)
            continue
        log, mine = logs[which], {each[::2] for each in all_merged if each[1] == which}
        if step in ("own", "merged"):
            new = [each for each in positions if each not in own[which] | mine]
            if not new:
                continue
            if step == "own":
                log.insert(rows(chunks, which, new))
                own[which] |= {*new}
            else:
                merged.insert(with_log(rows(chunks, which, new), which))
                all_merged |= {(at, which, offset) for at, offset in new}
        elif step == "merge":
            merged.take_over([log])
            all_merged |= {(at, which, offset) for at, offset in own[which]}
            own[which] = set()
        elif step == "gather":
            merged.insert(gathered(chunks, merged.pop_until(RowBound(which, KEY_MAX), limit)))
        else:
            all_merged = {each for each in all_merged if each[1] != which}
            own[which] |= mine
            merged.give_back([log])
            if step == "pop own":
                popped = log.pop_until(Position(4, 0))
                own[which] -= {*zip(popped.at.tolist(), popped.offset.tolist(), strict=True)}
                assert all(each > (4, 0) for each in own[which])
                chunks.release(popped.chunk)
    for number, log in enumerate(logs):
        found = log.all()
        expected = own[number] | {each[::2] for each in all_merged if each[1] == number}
        assert {*zip(found.at.tolist(), found.offset.tolist(), strict=True)} == expected and len(log) == len(expected)
        assert log.bytes == chunks.bytes_of(found.chunk)
        assert log.first_at_ms() == min((at for at, _ in expected), default=None)
    bounds = {log: 30 * (log + 1) for log in range(LOGS)}
    below = {each for each in all_merged if each[2] < bounds[each[1]]}
    found_below = {log: found for log, found in merged.below(bounds)().items() if len(found)}
    assert {(at, log, o) for log, f in found_below.items() for at, o in zip(f.at, f.offset, strict=True)} == below
    assert chunks._live[list(chunks._payload)].sum() == sum(map(len, logs))
    merged.give_back(logs)
    for log in logs:
        chunks.release(concat(log.pop_own()).chunk)
    assert not len(chunks) and not len(merged)


def test_many_rows_of_several_logs_are_sorted_by_one_key() -> None:
    """By time, log and offset; also offsets that are far apart, and a log alone."""
    random = np.random.default_rng(1)
    for logs, offsets in ((1, 1 << 40), (32, 1 << 20), (1 << 15, OFFSET_MAX)):
        at, log = random.integers(0, 50, 2_000), random.integers(0, logs, 2_000)
        key = log << OFFSET_BITS | random.integers(0, offsets, 2_000)
        assert (order_by_position(at, key) == np.lexsort((key, at))).all()
