"""bridge.letters: dead letters taken apart, and what is remembered of those that have gone back."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
from confluent_kafka import KafkaError, Message
from hypothesis import given
from hypothesis import strategies as st

from bridge.dead_letters.reading import BATCH_ROWS, READ_TIMEOUT_S, record_batches
from bridge.dead_letters.redrive import CALL_TIMEOUT_S
from bridge.errors import StateError
from bridge.kafka.admin import Watermarks
from bridge.wire import headers as h
from bridge.wire import letters
from bridge.wire.letters import Letter, LetterChoice, read_letter
from bridge.wire.reasons import RejectReason
from tests.manual_clock import ManualClock

PLACE = ("delay.dlt", 0, 7)
WHERE = h.Where("delay", 3, 17, 5, 99)
OWN: h.Headers = [("x", b"1"), ("delay-for", b"?"), ("delay-reason", b"mine"), ("x", None)]


@pytest.mark.parametrize("attempts", [0, 16])
def test_a_dead_letter_becomes_the_record_that_it_was(attempts: int) -> None:
    """Whatever headers it had, a reason of its own among them."""
    written = h.dead_letter_headers(OWN, RejectReason.BAD_FOR, "why", WHERE, attempts)
    letter = read_letter(written)
    found = {"origin": "delay/3/5", "detail": "why", "attempts": attempts}
    assert letter == Letter(headers=OWN, reason="bad-for", topic="delay", partition=3, target="", **found)  # type: ignore[arg-type]


def test_a_letter_without_its_value_never_goes_back() -> None:
    """It would be another message."""
    cut = read_letter([*h.dead_letter_headers(OWN, RejectReason.TOO_LARGE, "why", WHERE), (h.OMITTED, b"value")])
    assert cut is not None and cut.headers == OWN
    assert cut.is_cut


@pytest.mark.parametrize("attempts", [None, b"", b"-1", b"x", b"\xff", "٣".encode(), b"9" * 16, b"9" * 4_301])
def test_a_letter_with_attempts_that_are_no_number_is_none_of_the_bridge(attempts: bytes | None) -> None:
    """Whatever stands there, and however long it is, nothing raises."""
    written = h.dead_letter_headers(OWN, RejectReason.BAD_FOR, "why", WHERE)
    assert read_letter([*written, (h.ATTEMPTS, b" 16\n")]) is not None
    assert read_letter([*written, (h.ATTEMPTS, attempts)]) is None


@pytest.mark.parametrize(
    "found", [None, [], OWN, [("delay-reason", b"x"), (h.DLT_TOPIC, b"t"), (h.DLT_PARTITION, b"?")]]
)
def test_what_the_bridge_did_not_write_is_no_dead_letter(found: h.Headers | None) -> None:
    """Somebody else's records in the topic stay where they are."""
    assert read_letter(found) is None


def letter(reason: str = "unknown-target", **more: object) -> Letter:
    """A dead letter of the target t."""
    own: h.Headers = [("delay-until", b"5"), ("delay-topic", b"t"), ("own", b"1")]
    return Letter(**{"headers": own, "reason": reason, "topic": "delay", "partition": 0, "target": "t", **more})  # type: ignore[arg-type]


def test_filters_choose_by_all_that_is_given() -> None:
    """Without any, everything is chosen."""
    assert LetterChoice().chooses(letter(), 9, PLACE)
    assert LetterChoice(reasons=["unknown-target"], targets=["t", "u"], topics=["delay"], since_ms=9).chooses(
        letter(), 9, PLACE
    )
    assert not LetterChoice(reasons=["too-large"]).chooses(letter(), 9, PLACE)
    assert not LetterChoice(targets=["u"]).chooses(letter(), 9, PLACE)
    assert not LetterChoice(topics=["other"]).chooses(letter(), 9, PLACE)
    assert not LetterChoice(since_ms=10).chooses(letter(), 9, PLACE)
    assert LetterChoice(until_ms=10).chooses(letter(), 9, PLACE) and not LetterChoice(until_ms=9).chooses(
        letter(), 9, PLACE
    )
    assert LetterChoice(places=[PLACE]).chooses(letter(), 9, PLACE)
    assert not LetterChoice(places=[("delay.dlt", 0, 8)]).chooses(letter(), 9, PLACE)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "belong to the delay bridge") for name in (*h.COPY, *h.DELIVERED, h.HELD, h.REASON, h.DLT_TOPIC)),
        ("a\0b", "contains NUL"),
        ("\ud800", "writable as UTF-8"),
    ],
)
def test_headers_that_are_set_obey_the_rules_of_the_client(name: str, why: str) -> None:
    """What only the bridge writes, and names that the client would cut or cannot write, are refused."""
    with pytest.raises(ValueError, match=why):
        LetterChoice(set_headers=[("delay-for", b"5s"), (name, b"1")])
    LetterChoice(set_headers=[(name, b"1") for name in (*h.REQUEST, "own")])


def test_headers_are_replaced_and_all_else_stays() -> None:
    """`due_now` takes the place of every time, a set header that of all of its name."""
    assert LetterChoice().headers(letter()) == letter().headers
    now = LetterChoice(due_now=True).headers(letter())
    assert now == [("delay-topic", b"t"), ("own", b"1"), ("delay-for", b"0")]
    moved = LetterChoice(set_headers=[("delay-topic", b"u")]).headers(letter())
    assert moved == [("delay-until", b"5"), ("own", b"1"), ("delay-topic", b"u")]


@given(st.lists(st.sets(st.integers(0, 29)), max_size=5))
def test_what_was_noted_is_what_is_known_again(runs: list[set[int]]) -> None:
    """However many runs have noted something, in whatever pieces."""
    noted = [letters.read_redriven("id", letters.redriven("id", sorted(run))[1], "t/0/9") for run in runs]
    gone = letters.Gone(each for ranges in noted for each in ranges)
    assert {offset for offset in range(-1, 31) if offset in gone} == set().union(*runs)


def test_a_dead_letter_is_never_taken_for_a_note_of_what_has_gone_back() -> None:
    """Although its producer chose all of its own headers, and its value."""
    headers, value = letters.redriven("id", [0, 1, 5])
    assert letters.is_redriven(headers)
    assert json.loads(value) == {"topic_id": "id", "offsets": [[0, 2], [5, 6]]}
    assert not letters.is_redriven(h.dead_letter_headers(headers, RejectReason.NO_TIME, "why", WHERE))
    assert not letters.is_redriven([])


def test_many_scattered_letters_are_noted_in_little() -> None:
    """Every other one of what a transaction holds: far less than what any topic takes."""
    assert len(letters.redriven("i" * 22, range(10**9, 10**9 + 5_000, 2))[1]) < 64 << 10


@pytest.mark.parametrize(
    "value",
    [None, b"", b"[]", b"{}", b'{"topic_id": "id", "offsets": [[1]]}', b"[" * 5_000, b'{"offsets": [[1e999, 2]]}'],
)
def test_a_note_that_cannot_be_read_stops_the_run(value: bytes | None) -> None:
    """What has gone back is not guessed; the error says where it is, and what chooses."""
    with pytest.raises(StateError, match=r"cannot be read \(record=t/0/9\).*--since TIME"):
        letters.read_redriven("id", value, "t/0/9")


def test_notes_about_another_topic_stop_the_run() -> None:
    """The dead-letter topic is a copy: its offsets are others."""
    with pytest.raises(StateError, match=r"is a copy.*--since TIME"):
        letters.read_redriven("new", letters.redriven("old", [1])[1], "t/0/9")


def test_made_up_targets_make_a_short_report() -> None:
    """A line for each of the first hundred; the others are counted together."""
    report = letters.RedriveReport()
    for part in range(10):
        counted = letters.RedriveReport(left=1, before=2)
        counted.back.update({("unknown-target", f"t{part}-{i}"): 1 for i in range(1_000)})
        report.add(counted)
    assert sum(report.back.values()) == 10_000
    assert len(report.back) == letters.LINES_MAX + 1
    assert (report.left, report.before) == (10, 20)


def test_the_partition_is_read_as_it_is_written() -> None:
    """Big-endian, as Spring's."""
    assert dict(h.dead_letter_headers([], RejectReason.NO_TIME, "", WHERE))[h.DLT_PARTITION] == struct.pack(">i", 3)


def test_a_slow_commit_is_not_taken_for_topics_that_are_not_read() -> None:
    """What happens to one batch takes time; the next records may come a moment after it."""
    place, clock = ("delay.dlt", 0), ManualClock()
    ends = KafkaError(KafkaError._PARTITION_EOF)
    records = [message(offset) for offset in range(BATCH_ROWS)]
    polled = iter([*records, None, message(BATCH_ROWS), message(BATCH_ROWS + 1, ends)])
    consumer = mock.Mock(poll=lambda *_: next(polled))
    sizes = []
    for batch in record_batches(consumer, {place: Watermarks(start=0, end=BATCH_ROWS + 1)}, clock):
        sizes.append(len(batch))
        clock.advance(int(1_000 * (READ_TIMEOUT_S + CALL_TIMEOUT_S)))
    assert sizes == [BATCH_ROWS, 1]


def message(offset: int, error: KafkaError | None = None) -> Message:
    """What is asked of one."""
    asked = {"topic": "delay.dlt", "partition": 0, "offset": offset, "error": error, "key": None, "value": b""}
    answers = {name: lambda value=value: value for name, value in asked.items()}
    return cast(Message, SimpleNamespace(headers=list, **answers))
