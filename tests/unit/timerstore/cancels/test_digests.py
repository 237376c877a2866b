"""Digests of ids: a known hash, the same for a row in any company, and lookups among millions of keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timerstore.cancels.digests import MOVE, ORIGIN, RECALL, Digests, are_of, concat_digests, digest, find_all, index_of
from timerstore.cancels.digests import keys_of as originals


def text_of(keys: Digests) -> list[str]:
    return [f"{int(hi):016x}{int(lo):016x}" for hi, lo in zip(keys.hi, keys.lo, strict=True)]


def of(*ids: str) -> Digests:
    return digest(pa.array(ids, pa.string()))


def keys_of(*pairs: tuple[int, int]) -> Digests:
    return Digests(np.array([hi for hi, _ in pairs], np.uint64), np.array([lo for _, lo in pairs], np.uint64))


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("", "00000000000000000000000000000000"),
        ("hello", "cbd8a7b341bd9b025b1e906a48ae1d19"),
        ("The quick brown fox jumps over the lazy dog", "e34bbc7bbc071b6c7a433ca9c49a9347"),
    ],
)
def test_it_is_murmur_hash_3(id: str, expected: str) -> None:
    """The published values: files stay readable whatever becomes of this code."""
    assert text_of(of(id)) == [expected]


@given(st.lists(st.text(max_size=40)), st.integers(0, 3))
def test_a_digest_does_not_depend_on_the_rows_around(ids: list[str], skipped: int) -> None:
    """Of any length, in any batch, sliced or not."""
    column = pa.array(["x"] * skipped + ids, pa.string()).slice(skipped)
    together = digest(column)
    assert text_of(together) == [text_of(of(id))[0] for id in ids]
    assert len(set(text_of(together))) == len(set(ids))


def test_keys_of_originals_tell_what_they_are() -> None:
    """Cancels, moves and recalls of one original have three keys, and none is an id's."""
    origins = np.array([0, 7, 1 << 47])
    for what in (ORIGIN, MOVE, RECALL):
        keys = originals(what, origins)
        assert keys.lo.tolist() == origins.tolist()
        assert [bool(are_of(each, keys).all()) for each in (ORIGIN, MOVE, RECALL)] == [
            each == what for each in (ORIGIN, MOVE, RECALL)
        ]
    assert not are_of(ORIGIN, of("a", "b", "")).any()


def test_keys_that_share_64_bits_are_told_apart() -> None:
    """By the other 64."""
    keys = keys_of((1, 5), (2, 1), (2, 4), (2, 9), (7, 0))
    wanted = keys_of((2, 9), (2, 5), (0, 0), (7, 0), (9, 9), (2, 1))
    assert index_of(keys, wanted).tolist() == [3, -1, -1, 4, -1, 1]
    unsorted = keys_of((2, 9), (1, 5), (2, 1), (7, 0), (2, 4))
    assert text_of(unsorted[unsorted.order()]) == text_of(keys)


@pytest.mark.parametrize("rows_max", [1, 2, 3, 100])
def test_all_occurrences_are_found_piece_by_piece(rows_max: int) -> None:
    """However many rows share a key."""
    keys = keys_of((1, 5), (2, 1), (2, 1), (2, 9), (2, 9), (2, 9), (7, 0))
    wanted = keys_of((2, 9), (3, 3), (7, 0), (2, 1))
    pieces = list(find_all(keys, wanted, rows_max))
    assert all(len(query) <= rows_max for query, _ in pieces)
    pairs = [pair for query, row in pieces for pair in zip(query.tolist(), row.tolist(), strict=True)]
    assert pairs == [(0, 3), (0, 4), (0, 5), (2, 6), (3, 1), (3, 2)]
    assert list(find_all(keys, keys_of((9, 9)), rows_max)) == []


def test_distinct_keys_begin_where_they_change() -> None:
    """In either half."""
    keys = concat_digests([keys_of((1, 1), (1, 1), (1, 2)), keys_of((2, 2))])
    assert keys.starts().tolist() == [0, 2, 3]
    assert concat_digests([]).starts().tolist() == []
