"""bridge.sizes: the size of a record as brokers count it. (tests/broker/test_refused_records.py asks a broker.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.delivery.plan.due_rows import BATCH_BYTES, Batch, DueRows, SourceColumns, TargetRows
from bridge.delivery.plan.record_size import _field, _varint, parted, record_bytes
from bridge.stores.names import Sources
from bridge.wire.headers import HeaderList
from tests.entries import rows_of, timer


@pytest.mark.parametrize(
    ("key", "value", "headers", "size"),
    [
        (None, None, [], 68),  # 61 + length 1 + attributes, timestamp, offset, key -1, value -1, no headers
        (b"", b"", [], 68),
        (b"k", b"v", [], 70),
        (None, bytes(63), [], 132),  # a record of 69 bytes has a length of two, a value of 63 one of one
        (None, bytes(64), [], 134),
        (None, None, [("a", b"b")], 72),
        (None, None, [("a", None)], 71),
        (None, None, [("ä", "ö")], 74),
    ],
)
def test_a_record_alone_in_its_batch(key: bytes | None, value: bytes | None, headers: HeaderList, size: int) -> None:
    """Lengths are zigzag varints; null is the length -1."""
    assert record_bytes(key, value, headers) == size


@pytest.mark.fault("dead letters of a hundred thousand headers")
def test_headers_are_measured_together() -> None:
    """The estimated size of many headers is nearly exact, so that limits need no count one by one."""
    headers: list[tuple[str, bytes | None]] = [("n" * (i % 70), bytes(i * 40) if i % 3 else None) for i in range(300)]
    entry = timer("delay", 0, 7, 1, "t", key=None, value=None, headers=headers)
    rows = DueRows(rows_of([(1, 0, 7, entry)]), SourceColumns(Sources([("delay", 0)]), {"delay": None}))
    exact = record_bytes(None, None, [*headers, ("delay-origin", "delay/0/7"), ("delay-due", "1")])
    assert exact <= int(rows.sizes[0]) <= exact + 200


def batch_bytes(keys: list[bytes | None], values: list[bytes | None], headers: list[HeaderList], ms: int) -> int:
    """Of records that were made `ms` after each other, in one batch."""
    total = BATCH_BYTES
    for i, (key, value, own) in enumerate(zip(keys, values, headers, strict=True)):
        body = 1 + _varint(i * ms) + _varint(i) + _field(key) + _field(value) + _varint(len(own))
        body += sum(_field(n.encode()) + _field(t.encode() if isinstance(t, str) else t) for n, t in own)
        total += _varint(body) + body
    return total


ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**42),
        st.none() | st.binary(max_size=300),
        st.none() | st.binary(max_size=3_000),
        st.lists(st.tuples(st.text("aä", max_size=9), st.none() | st.binary(max_size=200)), max_size=4),
    ),
    min_size=1,
    max_size=60,
)


@given(ENTRIES, st.sampled_from([0, 1, 60_000]), st.integers(500, 20_000), st.sampled_from(["d", "d" * 249]))
def test_what_is_sent_together_fits_into_a_batch(
    entries: list[tuple[Any, ...]], ms: int, bytes_max: int, topic: str
) -> None:
    """To a topic that takes less than the client puts together: no chunk of more than one record is larger, and
    what is counted for a record is at most some bytes of framing more than it has."""
    source = Sources([(topic, 12)])
    rows = DueRows(
        rows_of(
            [
                (due, 0, offset, timer(topic, 12, offset, due, "t", key=key, value=value, headers=own))
                for offset, due, key, value, own in entries
            ]
        ),
        SourceColumns(source, {topic: None}),
    )
    ids = np.arange(len(entries))
    batches = list(rows.batches(TargetRows(topic="t", ids=ids, chunk_bytes=bytes_max)))
    assert np.concatenate([batch.ids for batch in batches]).tolist() == ids.tolist()
    for batch in batches:
        headers = list(batch.all_headers())
        size = batch_bytes(batch.keys, batch.values, headers, ms)
        assert batch.alone and (len(batch) == 1 or size <= bytes_max)
        bound = int(rows.batched_sizes(batch.ids).sum()) + BATCH_BYTES
        assert size <= bound <= size + 35 * len(batch) + 20 * sum(map(len, headers))


def test_a_batch_in_parts_is_all_of_it_in_order_and_counted_once() -> None:
    """Each part is sent alone and fits into the topic's largest batch; one record that does not is a part by itself."""
    sizes = [400, 400, 5_000, 10, 10, 900]
    count = len(sizes)
    batch = Batch(
        topic="t",
        ids=np.arange(count),
        values=[bytes(size) for size in sizes],
        keys=[None] * count,
        headers=[[("h", b"x")] for _ in sizes],
        unreadable={"no-time": 2},
    )
    parts = list(parted([batch], 1_000))
    assert [[len(value or b"") for value in part.values] for part in parts] == [[400, 400], [5_000], [10, 10], [900]]
    assert all(part.alone for part in parts)
    assert [dict(part.unreadable) for part in parts] == [{"no-time": 2}, {}, {}, {}]
    assert list(parted([batch], None)) == [batch]
