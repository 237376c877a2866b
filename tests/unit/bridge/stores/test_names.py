"""bridge.stores.names: (topic, partition) as numbers, in order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from bridge.stores.names import SOURCE_MAX, Sources, offsets_of, pack, sources_of
from timerstore.errors import Misuse
from timerstore.rows.position import OFFSET_MAX

SOURCES = Sources([("b", 0), ("a", 3), ("a", 0), ("a", 3)])


def test_numbers_follow_the_order_of_names() -> None:
    """So an added topic or partition moves no position relative to another."""
    assert list(SOURCES) == [("a", 0), ("a", 3), ("b", 0)]
    assert [SOURCES.index(*name) for name in SOURCES] == [0, 1, 2]
    assert ("a", 3) in SOURCES and ("a", 1) not in SOURCES


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
def test_columns_are_numbered_whatever_their_encoding(dictionary: bool, chunked: bool) -> None:
    """Plain or dictionary-encoded topics, one chunk or several with dictionaries of their own; -1 is none of ours."""
    topics, partitions = ["b", "a", "a", "a", "x", "a"], [0, 3, 0, 1, 0, 9]

    def column(values: list[str]) -> pa.Array:
        array = pa.array(values)
        return array.dictionary_encode() if dictionary else array

    topic = pa.chunked_array([column(topics[:2]), column(topics[2:])]) if chunked else column(topics)
    numbers = SOURCES.of_columns(topic, pa.array(partitions, pa.int32()))
    assert numbers.tolist() == [2, 1, 0, -1, -1, -1]
    assert numbers.dtype == np.int64


def test_no_rows_are_no_sources() -> None:
    """A table of zero chunks, as Spark gives for an empty batch."""
    table = pa.schema([("topic", pa.string()), ("partition", pa.int32())]).empty_table()
    assert SOURCES.of_columns(table.column("topic"), table.column("partition")).tolist() == []
    assert SOURCES.of_columns(pa.chunked_array([], pa.string()), pa.chunked_array([], pa.int32())).tolist() == []


def test_a_row_survives_packing() -> None:
    """A key is its partition's number and its offset, to the ends of their ranges."""
    source, offset = np.array([0, 1, SOURCE_MAX]), np.array([OFFSET_MAX, 0, OFFSET_MAX])
    keys = pack(source, offset)
    assert sources_of(keys).tolist() == source.tolist() and offsets_of(keys).tolist() == offset.tolist()
    assert keys.max() == np.iinfo(np.int64).max


def test_more_sources_than_fit_are_refused() -> None:
    """A key has 15 bits for the number."""
    with pytest.raises(Misuse, match="at most"):
        Sources(("t", i) for i in range(SOURCE_MAX + 2))
