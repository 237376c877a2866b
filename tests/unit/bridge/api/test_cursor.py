"""bridge.api.cursor: text that comes back as the position it was made of, and nothing else that is taken for one."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.api import cursor
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX

positions = st.tuples(
    st.integers(AT_MIN, AT_MAX), st.text(max_size=20), st.integers(0, 2**31), st.integers(0, OFFSET_MAX)
)


@given(positions)
def test_a_position_comes_back(position: tuple[int, str, int, int]) -> None:
    """Of any time, topic, partition and offset."""
    assert cursor.decode_position(cursor.encode_position(position)) == position


@given(st.text() | st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_no_other_text_is_a_cursor(text: str) -> None:
    """What is not made by `encode` is a ValueError, or a position with values that the store takes."""
    try:
        at_ms, _, _, offset = cursor.decode_position(text)
    except ValueError:
        return
    assert AT_MIN <= at_ms <= AT_MAX and 0 <= offset <= OFFSET_MAX


@pytest.mark.parametrize(
    "found", [[1, "a", 0], [2**63, "a", 0, 0], [0, "a", 0, -1], [True, "a", 0, 0], {}, None, [1.0, "a", 0, 0]]
)
def test_wrong_values_are_refused(found: object) -> None:
    """Out of bounds, or of another type."""
    with pytest.raises(ValueError, match="invalid cursor"):
        cursor.decode_position(base64.urlsafe_b64encode(json.dumps(found).encode()).decode())
