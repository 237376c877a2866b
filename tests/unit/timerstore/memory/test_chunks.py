"""timerstore.memory.chunks: payloads live as long as one of their rows does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import timerstore.memory.chunks
from tests.unit.timerstore.entries import Record, entries
from timerstore.memory.chunks import (
    FEW_STRETCHES,
    ID_BYTES,
    JOINED_BYTES_MAX,
    ROW_REFERENCE_BYTES,
    Chunks,
    materialize,
)
from timerstore.rows.entry import ENTRY, PAYLOAD, payload_of


def payload(rows: int, first: int = 0) -> pa.RecordBatch:
    return payload_of(entries([Record("delay", 0, first + i, 1) for i in range(rows)]))


def test_a_chunk_goes_with_its_last_row_and_its_number_is_used_again() -> None:
    """Nothing is kept for rows that have left."""
    chunks = Chunks()
    first, second = chunks.add(payload(3)), chunks.add(payload(2))
    both = chunks.physical_bytes
    chunks.release(np.array([first, first, second], dtype=np.int32))
    assert len(chunks) == 2 and chunks.physical_bytes == both and chunks._live.tolist()[:2] == [1, 1]
    chunks.release(np.array([first], dtype=np.int32))
    assert len(chunks) == 1 and chunks.physical_bytes < both
    assert chunks.add(payload(1)) == first


def test_many_chunks_grow_the_register() -> None:
    """Numbers beyond the first vectors keep what is known of the others."""
    chunks = Chunks()
    numbers = [chunks.add(payload(1)) for _ in range(200)]
    assert numbers == list(range(200))
    assert len(set(chunks.row_bytes[numbers].tolist())) == 1
    chunks.release(np.array(numbers, dtype=np.int32))
    assert len(chunks) == 0 and chunks.physical_bytes == 0


def test_bytes_of_rows_add_up() -> None:
    """A row counts the mean of its chunk, its reference, and its entry in the index if it has an id."""
    chunks = Chunks()
    batch = payload(4)
    number = chunks.add(batch)
    size = chunks.bytes_of(np.full(4, number, dtype=np.int32))
    assert batch.nbytes <= size - 4 * ROW_REFERENCE_BYTES < batch.nbytes + 4
    named = payload_of(entries([Record("delay", 0, i, 1, id="id" if i else None) for i in range(2)]))
    size = chunks.bytes_of(np.full(2, chunks.add(named), dtype=np.int32))
    assert named.nbytes + ID_BYTES <= size - 2 * ROW_REFERENCE_BYTES < named.nbytes + ID_BYTES + 2


def test_rows_of_many_chunks_come_in_the_order_asked_for() -> None:
    """Whatever chunks they lie in, contiguous or not."""
    payloads = {7: payload(5, 0), 3: payload(5, 100)}
    chunk = np.array([3, 7, 7, 3, 7, 3], dtype=np.int32)
    row = np.array([4, 0, 1, 0, 4, 1], dtype=np.int32)
    batch = materialize(payloads, chunk, row)
    assert batch.schema == PAYLOAD
    assert batch.column("origin").to_pylist() == [104, 0, 1, 100, 4, 101]
    assert materialize(payloads, chunk[1:3], row[1:3]).column("origin").to_pylist() == [0, 1]
    nothing = materialize(payloads, chunk[:0], row[:0])
    assert nothing.num_rows == 0 and nothing.schema == PAYLOAD


@pytest.mark.parametrize("joined_bytes_max", [0, JOINED_BYTES_MAX])
def test_rows_of_many_stretches_come_in_the_order_asked_for(
    joined_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their chunks are joined first, or too large for that; a slice of a batch is a chunk, too."""
    monkeypatch.setattr(timerstore.memory.chunks, "JOINED_BYTES_MAX", joined_bytes_max)
    random = np.random.default_rng(1)
    payloads = {number: payload(20, 100 * number).slice(number % 3) for number in range(40)}
    chunk = random.integers(0, 40, 500).astype(np.int32)
    row = random.integers(0, 18, 500).astype(np.int32)
    assert np.count_nonzero(np.diff(chunk)) > FEW_STRETCHES
    found = materialize(payloads, chunk, row)
    assert found.schema == PAYLOAD
    assert found.column("origin").to_pylist() == (100 * chunk + chunk % 3 + row).tolist()


def test_a_payload_is_cast_to_its_schema() -> None:
    """Wider integers, large strings and nullability of what Spark hands over do not matter; no rows are no trouble."""
    table = entries([Record("delay", 0, 1, 1)])
    wide = table.set_column(table.schema.get_field_index("attempt"), "attempt", pa.array([0], pa.int64()))
    wide = wide.set_column(wide.schema.get_field_index("target"), "target", pa.array(["orders"], pa.large_string()))
    assert payload_of(wide).equals(payload_of(table))
    assert payload_of(ENTRY.empty_table()).num_rows == 0
    assert payload_of(pa.Table.from_batches([], schema=ENTRY)).schema == PAYLOAD
