"""How long a doubt lasts, and its text."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.delivery.doubt.doubt_file import FILE, DoubtFile
from bridge.delivery.doubt.findings import Part
from bridge.errors import EnvironmentFailure
from bridge.json_file import BYTES_MAX
from bridge.wire.committed_state import CommittedState
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from tests.unit.bridge.delivery.doubt.entries import doubt

NAME = ("delay", 0)
TRANSACTION_ROWS_MAX = 1_000_000
"""Of `delivery.transaction_rows`."""
EPOCH = DecodeEpoch(
    offset=0, parameters=DecodeParameters(max_delay_ms=10**9, roll_window_ms=20_000, has_default_target=False)
)
BEFORE = CommittedState(offset=5, position=(900, 4), topic_id="id", partitions=1, epochs=(EPOCH,))
ROWS = {6: (6, 0, False), 8: (3, 2, True)}
DOUBT = doubt(ROWS, unread={"orders": (6,), "delay": (8,)}, written={6: Part.RECORD})


@pytest.mark.parametrize(
    ("state", "is_left"),
    [
        (BEFORE, True),
        (replace(BEFORE, offset=9), True),
        (replace(BEFORE, offset=9, position=(1_000, 7)), True),
        (replace(BEFORE, offset=9, position=(1_000, 8)), False),
        (replace(BEFORE, offset=8, position=(2_000, 8)), True),
        (replace(BEFORE, offset=9, position=(3_000, 0)), False),
        (replace(BEFORE, offset=9, frozen=((9, 1_000, 8),)), False),
        (replace(BEFORE, topic_id="another"), False),
        (replace(BEFORE, cuts=((7, 6),)), False),
        (replace(BEFORE, offset=9, position=None, first_offset=9), False),
    ],
)
def test_a_doubt_lasts_until_its_rows_are_finished(state: CommittedState, is_left: bool) -> None:
    """By whomever; or until its topic, or that part of the log, is another one."""
    assert DOUBT.under(state) == (DOUBT if is_left else None)


def test_rows_above_a_cut_are_other_records() -> None:
    """What lies below it is in doubt further, and the next look at the same state changes nothing."""
    state = replace(BEFORE, cuts=((7, 8),))
    left = DOUBT.under(state)
    assert left is not None and left.under(state) == left
    assert (list(left.rows), left.unread, left.in_doubt()) == ([6], {"orders": (6,)}, {6})


@pytest.mark.fault("a log that is cut while a copy written into it is in doubt")
def test_copies_behind_a_cut_are_looked_for() -> None:
    """Copies that a leader with a shorter log has lost are looked up, and written again."""
    left = replace(DOUBT, since=9, rows={3: (3, 0, False)}).under(replace(BEFORE, offset=5, cuts=((7, 4),)))
    assert left is not None and left.since == 4


def test_rows_that_were_given_up_are_in_doubt_no_more() -> None:
    """`reset-offsets` begins behind them."""
    left = DOUBT.under(replace(BEFORE, offset=8, first_offset=8))
    assert left is not None and (list(left.rows), left.unread, left.written) == ([8], {"delay": (8,)}, {})


def test_rows_that_are_finished_by_offset_wait_for_no_position() -> None:
    """Rejects, and cancels that are sent on."""
    assert replace(DOUBT, last=None).under(replace(BEFORE, offset=9, position=None)) is None


def test_what_counts_as_written_is_what_the_topics_should_have() -> None:
    """A delivery has its record; a copy may be that of a schedule, too. What is no row of it counts for nothing."""
    both = Part.RECORD | Part.NEXT
    chosen = {each: DOUBT.decided(NAME, is_committed=each) for each in (True, False)}
    assert chosen[True].written == {6: Part.RECORD, 8: both} and chosen[False].written == {6: Part.RECORD}
    assert not chosen[True].unread and not chosen[False].unread
    assert DOUBT.found({8: Part.NEXT, 7: Part.RECORD}).written == {6: Part.RECORD, 8: Part.NEXT}
    assert DOUBT.read("orders").in_doubt() == {8}


def test_two_transactions_that_ended_unasked_are_one_doubt() -> None:
    """What was found of the first is known of the second."""
    later = doubt({8: ROWS[8], 9: (9, 0, False)}, began_ms=2_000, since=7, unread={"bills": (8, 9)})
    both = DOUBT.joined(later)
    assert (both.began_ms, both.since, both.last) == (900, 5, (1_000, 9))
    assert both.rows == {**ROWS, **later.rows} and both.written == DOUBT.written
    assert both.unread == {"orders": (6,), "delay": (8,), "bills": (8, 9)}


@pytest.mark.fault("more messages in doubt than a file has room for")
def test_the_file_has_room_for_the_largest_transaction(tmp_path: Path) -> None:
    """The file has room for a million rows with any numbers of a producer, and for an eighth more."""
    choose, count = random.Random(7), 10_000
    offsets = sorted(choose.sample(range(10**11, 10**11 + 10**8), count))
    rows = {offset: (choose.randrange(10**11), choose.randrange(1 << 31), choose.random() < 0.5) for offset in offsets}
    written = {offset: Part(choose.choice((1, 3))) for offset in offsets}
    unread = {"orders": tuple(offsets), "delay": tuple(offsets)}
    DoubtFile(tmp_path).write({NAME: doubt(rows, unread=unread, written=written)})
    assert (tmp_path / FILE).stat().st_size / count * 1.125 * TRANSACTION_ROWS_MAX < BYTES_MAX


@pytest.mark.parametrize("text", ["", "AAAA", "eJw=", [{}]])
def test_a_damaged_text_is_told(tmp_path: Path, text: object) -> None:
    """Text that does not unpack is damage like any other."""
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "doubts": text}))
    with pytest.raises(EnvironmentFailure) as raised:
        DoubtFile(tmp_path).read()
    assert raised.value.code == "DB-3061"


def test_the_file_tells_all_of_it(tmp_path: Path) -> None:
    """Also nothing, in place of what was told before."""
    file = DoubtFile(tmp_path)
    file.write({})
    assert not list(tmp_path.iterdir())
    told = {NAME: DOUBT, ("delay", 1): replace(DOUBT, last=None)}
    file.write(told)
    assert DoubtFile(tmp_path).read() == told
    file.write({})
    assert DoubtFile(tmp_path).read() == {}
