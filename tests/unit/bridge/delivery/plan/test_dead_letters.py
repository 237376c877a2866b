"""Dead letters: what each says, and that no record spoils another's."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from bridge.delivery.plan.dead_letters import (
    BODILESS,
    CUT_BYTES,
    CUT_HEADERS,
    dead_letters,
    held,
    is_held,
    reason_of,
    reject_detail,
)
from bridge.delivery.plan.due_rows import Batch, DueRows, SourceColumns
from bridge.kafka.errors import Refusal
from bridge.stores.names import Sources
from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS
from bridge.wire.headers import Headers
from bridge.wire.letters import read_letter
from bridge.wire.reasons import RejectReason
from tests.entries import reject, rows_of, timer

SOURCES = Sources([("delay", 0)])
TS = 1_800_000_000_000


DLT = {"delay": "delay.dlt"}


def due_rows_of(*entries: dict[str, Any]) -> DueRows:
    """Rows of the delay topic."""
    return DueRows(rows_of([(e["at"], 0, e["offset"], e) for e in entries]), SourceColumns(SOURCES, {}))


def letters_of(
    due_rows: DueRows,
    *,
    cut: set[int] | None = None,
    refused: Mapping[int, Refusal] | None = None,
    told: list[tuple[int, str]] | None = None,
) -> Batch:
    """The dead letters of all rows; `told` gets offset and detail of the plain ones."""

    def report(where: h.Where, detail: str) -> None:
        assert told is not None, detail
        told.append((where.offset, detail))

    ids = np.arange(len(due_rows), dtype=np.intp)
    (batch,) = dead_letters(due_rows, ids, refused or {}, DLT, cut or (), report)
    return batch


def letters(cut: set[int], *records: dict[str, Any]) -> Batch:
    """The dead letters of rejects with these columns; those in `cut` are cut."""
    entries = [reject("delay", 0, i, TS, "payload-too-large", **record) for i, record in enumerate(records)]
    return letters_of(due_rows_of(*entries), cut=cut)


def headers_of(batch: Batch, row: int = 0) -> Headers:
    """A letter's headers."""
    assert batch.headers is not None
    return batch.headers[row]


def test_the_value_goes_and_whatever_else_is_large() -> None:
    """What is small stays, and the header says what is missing; the letter still tells where the record is."""
    small: dict[str, Any] = {"key": b"k", "headers": [("a", b"1"), ("b", None)], "value": b"v" * 9}
    large: dict[str, Any] = {"key": b"k" * (CUT_BYTES + 1), "headers": [("a", b"1" * CUT_BYTES)], "value": None}
    many: dict[str, Any] = {"key": None, "headers": [("a", b"")] * (CUT_HEADERS + 1)}
    batch = letters({1, 2, 3}, small, small, large, many)
    assert batch.headers is not None
    omitted = [dict(headers).get("delay-omitted") for headers in batch.headers]
    assert batch.values == [b"v" * 9, None, None, None]
    assert batch.keys == [b"k", b"k", None, None]
    key, headers = f"key ({CUT_BYTES + 1} bytes)", f"1 headers ({CUT_BYTES + 1} bytes)"
    assert omitted == [
        None,
        b"value (9 bytes)",
        f"value (0 bytes), {key}, {headers}".encode(),
        f"value (5 bytes), {CUT_HEADERS + 1} headers ({CUT_HEADERS + 1} bytes)".encode(),
    ]
    read = [read_letter(each) for each in batch.headers]
    assert [(each.is_cut, len(each.headers)) for each in read if each] == [(False, 2), (True, 2), (True, 0), (True, 0)]
    assert [dict(each)["delay-origin"] for each in batch.headers] == [f"delay/0/{i}".encode() for i in range(4)]


# ---- what exactly is wrong


@pytest.mark.parametrize(
    ("reason", "headers", "part"),
    [
        (RejectReason.BAD_UNTIL, [("delay-until", b"1801353600")], "looks like seconds"),
        (RejectReason.BAD_UNTIL, [("delay-until", b"2027-01-31T08:00:00")], "with the zone"),
        (RejectReason.BAD_FOR, [("delay-for", None)], "null"),
        (RejectReason.BAD_FOR, [("delay-for", b"\xff\xfe")], "not UTF-8"),
        (RejectReason.BAD_LEVEL, [("delay-level", b"0")], "start at 1"),
        (RejectReason.BAD_TARGET, [("delay-topic", b"a/b")], "'a/b'"),
        (
            RejectReason.DUPLICATE_HEADER,
            [("delay-for", b"1"), ("x", b""), ("x", b""), ("delay-for", b"1")],
            "delay-for",
        ),
        (RejectReason.NO_TIME, [], "is present"),
    ],
)
def test_a_reject_s_detail_names_the_value(reason: RejectReason, headers: Headers, part: str) -> None:
    """A look at the dead letter shows what is wrong with it."""
    detail = reject_detail(reason, headers, 1_800_000_000_000)
    assert detail.startswith(reason.explanation)
    assert part in detail


def test_a_reject_s_detail_says_how_much_it_was() -> None:
    """So that it is known how far to raise a limit."""
    headers: Headers = [("a", b"12"), ("é", None)]
    assert reject_detail(RejectReason.TOO_MANY_HEADERS, headers, 0).endswith("allows. It has 2.")
    assert reject_detail(RejectReason.HEADERS_TOO_LARGE, headers, 0).endswith("allows. 5 bytes.")


WRONG = {
    h.UNTIL: (RejectReason.BAD_UNTIL, "soon"),
    h.FOR: (RejectReason.BAD_FOR, "soon"),
    h.LEVEL: (RejectReason.BAD_LEVEL, "low"),
    h.TOPIC: (RejectReason.BAD_TARGET, "a/b"),
    h.PARTITION: (RejectReason.BAD_PARTITION, "first"),
}
FOREIGN = [
    (name, native)
    for dialect in DIALECTS.values()
    for name, native in [*((name, native) for name, native, _ in dialect.times), *dialect.renamed.items()]
]


@pytest.mark.parametrize(("name", "native"), FOREIGN)
def test_a_dialect_s_header_is_named_as_it_was_written(name: str, native: str) -> None:
    """Its reason is that of the native header that it stands for, which the record does not have."""
    reason, text = WRONG[native]
    written: Headers = [("x", b"1"), (name, text.encode())]
    letter = headers_of(letters_of(due_rows_of(reject("delay", 0, 0, TS, reason.value, headers=written))))
    assert letter[:2] == written
    detail = (dict(letter)["delay-reason-detail"] or b"").decode()
    assert dict(letter)["delay-reason"] == reason.value.encode()
    assert f"{name}: {text!r}" in detail


def test_no_header_is_blamed_that_the_reason_is_not_about() -> None:
    """Neither one with a null value nor one that another dialect would read."""
    headers: Headers = [("x", None), ("delay-topic", None), ("x-delay", b"soon")]
    for reason in (RejectReason.NO_TIME, RejectReason.BAD_ID, RejectReason.BAD_UNTIL):
        assert reject_detail(reason, headers, TS) == reason.explanation


def test_milliseconds_where_a_dialect_has_seconds_are_said_to_be_that() -> None:
    """And what is no whole number is said to be none, of seconds."""
    for text, part in (
        ("1800000000000", "looks like milliseconds"),
        ("1.5", "whole number of seconds"),
        ("1", "ten years"),
    ):
        detail = reject_detail(RejectReason.BAD_UNTIL, [("scheduler-epoch", text.encode())], TS)
        assert "scheduler-epoch: " in detail and part in detail, detail


# ---- what cannot be made into a letter


def test_a_record_of_which_no_letter_can_be_made_is_a_plain_one_and_spoils_no_other() -> None:
    """Key, value and headers as they are, a reason of its own, and the batch says so; the others are whole."""
    fine = [reject("delay", 0, i, TS, "no-time", headers=[("x", b"%d" % i)]) for i in (0, 2)]
    odd = reject("delay", 0, 1, TS, "of-a-later-version", key=b"k", value=b"v", headers=[("delay-for", b"?")])
    told: list[tuple[int, str]] = []
    batch = letters_of(due_rows_of(fine[0], odd, fine[1]), told=told)
    reasons = [dict(headers_of(batch, row))["delay-reason"] for row in range(3)]
    assert reasons == [b"no-time", b"unreadable", b"no-time"]
    plain = headers_of(batch, 1)
    assert (batch.keys[1], batch.values[1], plain[0]) == (b"k", b"v", ("delay-for", b"?"))
    assert b"KeyError" in (dict(plain)["delay-reason-detail"] or b"")
    assert dict(plain)["delay-origin"] == b"delay/0/1"
    assert batch.unreadable == {"of-a-later-version": 1}
    assert told == [(1, "KeyError: 'of-a-later-version'")]


def test_what_cannot_be_read_is_left_out_of_a_plain_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of a row whose headers and columns cannot be read there is a letter."""
    due_rows = due_rows_of(reject("delay", 0, 7, TS, "no-time", key=b"k", headers=[("x", b"1")]))
    column = due_rows.column

    def reading(name: str, ids: Any = None) -> Any:
        if name != "key":
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return column(name, ids)

    monkeypatch.setattr(due_rows, "column", reading)
    monkeypatch.setattr(due_rows, "headers", lambda _: 1 / 0)
    batch = letters_of(due_rows, told=[])
    assert (batch.keys, batch.values) == ([b"k"], [None])
    assert headers_of(batch)[0] == ("delay-reason", b"unreadable")
    assert dict(headers_of(batch))["delay-origin"] == b"delay/0/7"


def test_a_plain_letter_of_a_timer_can_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the control headers that can be read, as every dead letter of a timer."""
    due_rows = due_rows_of(timer("delay", 0, 3, TS, "orders", headers=[("x", b"1")], id="i"))
    column = due_rows.column
    monkeypatch.setattr(due_rows, "column", lambda name, ids=None: 1 / 0 if name == "attempt" else column(name, ids))
    batch = letters_of(due_rows, refused={0: Refusal(RejectReason.TOO_LARGE, "why")}, told=[])
    until = ("delay-until", b"%d" % TS)
    assert headers_of(batch)[:4] == [("x", b"1"), until, ("delay-topic", b"orders"), ("delay-id", b"i")]
    assert dict(headers_of(batch))["delay-reason"] == b"unreadable"


# ---- held

OWN: Headers = [
    ("delay-for", b"?"),
    ("delay-held", b""),
    ("delay-held-x", None),
    ("x\0y", b"1"),
    ("delay-reason", b"mine"),
]


def held_copy(offset: int = 9, **changed: Any) -> dict[str, Any]:
    """A held dead letter of the record at offset 4, as decoding would read its copy."""
    due_rows = due_rows_of(reject("delay", 0, 4, TS, "bad-for", key=b"k", headers=OWN))
    ids = np.array([0], dtype=np.intp)
    (copy,) = held(due_rows, ids, {}, DLT, np.array([TS + 1_000]))
    found = dict(headers_of(copy))
    assert (copy.topic, copy.partitions, found["delay-topic"]) == ("delay", [0], b"delay.dlt")
    assert (found["delay-copy-origin"], found["delay-copy-due"]) == (b"4", b"%d" % TS)
    own = [pair for pair in headers_of(copy) if pair[0] not in h.STRIPPED]
    columns = {"key": b"k", "headers": own, "origin": 4, "attempt": 1, **changed}
    return timer("delay", 0, offset, TS, "delay.dlt", **columns)


def test_a_held_letter_is_released_as_what_it_would_have_been() -> None:
    """The record's headers byte for byte, and the same reason, detail and origin as if its topic had taken it at
    once."""
    at_once = headers_of(letters_of(due_rows_of(reject("delay", 0, 4, TS, "bad-for", key=b"k", headers=OWN))))
    due_rows = due_rows_of(held_copy())
    assert is_held(due_rows, np.array([0])).tolist() == [True]
    assert headers_of(letters_of(due_rows)) == at_once
    assert reason_of(held_copy()["headers"]) == "bad-for"


@pytest.mark.parametrize("reason", BODILESS)
def test_a_letter_without_a_body_has_its_place_and_says_what_is_left_out(reason: RejectReason) -> None:
    """Also when it had to wait for its topic; and it is never put back, as there is nothing to put back."""
    entry = reject("delay", 0, 4, TS, reason.value, headers=[("delay-omitted", b"record (700000000 bytes)")])
    at_once = letters_of(due_rows_of(entry))
    (waits,) = held(due_rows_of(entry), np.array([0]), {}, DLT, np.array([TS]))
    later = letters_of(due_rows_of(held_copy(headers=headers_of(waits))))
    for batch in (at_once, later):
        headers = headers_of(batch)
        assert headers[0] == ("delay-reason", reason.value.encode())
        assert headers[-1] == ("delay-omitted", b"record (700000000 bytes)")
        assert ("delay-origin", b"delay/0/4") in headers
        letter = read_letter(headers)
        assert letter is not None and letter.is_cut
    assert headers_of(at_once) == headers_of(later)


FORGED: dict[str, dict[str, Any]] = {
    "no copy": {"origin": 9},
    "of another offset": {"origin": 5},
    "of another time": {"due": TS + 1},
    "of no reason": {"headers": [("delay-held", None), ("x", b"1")]},
    "not held": {"headers": [("delay-held", b""), ("delay-reason", b"bad-for")]},
}


def replaced(name: str, value: bytes) -> dict[str, Any]:
    """Columns of a held letter that says something else."""
    headers = cast("Headers", held_copy()["headers"])
    last = max(i for i, (found, _) in enumerate(headers) if found == name)
    return {"headers": [*headers[:last], (name, value), *headers[last + 1 :]]}


@pytest.mark.parametrize(
    "changed",
    [
        *FORGED.values(),
        replaced("kafka_dlt-original-topic", b"other"),
        replaced("kafka_dlt-original-partition", struct.pack(">i", 1)),
        replaced("delay-held-delay-origin", b"other/0/4"),
        replaced("delay-reason", b"because"),
        replaced("delay-reason", b"\xff"),
    ],
)
def test_what_says_otherwise_than_the_bridge_knows_is_not_held(changed: dict[str, Any]) -> None:
    """Only copies are released, and only those that agree with the topic, partition, origin and time of theirs."""
    entry = {**held_copy(), **changed}
    assert is_held(due_rows_of(entry), np.array([0])).tolist() == [False]


def test_nothing_that_a_producer_writes_becomes_the_bridge_s_word() -> None:
    """A forged letter that agrees with its place says why in the bridge's words, and no header of its own follows."""
    forged = replaced("delay-reason-detail", b"\x1b[2Jlies")["headers"]
    forged = [*forged, ("kafka_dlt-original-consumer-group", b"lies"), ("delay-omitted", b"lies")]
    due_rows = due_rows_of(held_copy(headers=forged))
    assert is_held(due_rows, np.array([0])).tolist() == [True]
    assert headers_of(letters_of(due_rows)) == headers_of(letters_of(due_rows_of(held_copy())))


def test_a_refused_timer_names_what_could_not_be_written() -> None:
    """A header whose name the client would cut is in the letter, escaped; the letter is not put back as it is."""
    entry = timer("delay", 0, 3, TS, "orders", headers=[("delay-until\0", b"1"), ("x", b"2")], id="i")
    refusal = Refusal(RejectReason.BAD_HEADER_NAME, RejectReason.BAD_HEADER_NAME.explanation)
    letter = headers_of(letters_of(due_rows_of(entry), refused={0: refusal}))
    assert letter[:3] == [("delay-escaped-delay-until%00", b"1"), ("x", b"2"), ("delay-until", b"%d" % TS)]
    read = read_letter(letter)
    assert read is not None and read.is_cut
