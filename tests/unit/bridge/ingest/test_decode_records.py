"""Decoding in Python, without a JVM: the examples that Spark's engine has to meet too (tests/spark/test_decode.py), and
agreement with the pure readers of headers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.ingest.decode_records import decode_records, spread
from bridge.ingest.finish import ControlHeaders, HeaderLimits, with_schedules
from bridge.stores.names import NAMED_ENTRY
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs
from bridge.wire.reasons import RejectReason
from tests.decode_examples import (
    DIALECT_EPOCHS,
    DIALECT_REJECTS,
    DIALECT_TIMERS,
    EDGES,
    FOR,
    KEYED_COMMANDS,
    ONE,
    PARAMETERS,
    RECURRING,
    REJECTS,
    TIMERS,
    TO,
    TS,
    Row,
    as_record,
    keyed_commands,
    pairs,
    record,
    rejected,
)
from tests.decode_oracle import copies, oracle, records
from timerstore.rows.entry import Kind

_REASONS = {reason.value: reason for reason in RejectReason}

Epochs = Mapping[tuple[str, int], DecodeEpochs]


def decoded(rows: Sequence[Row], all_epochs: Epochs = ONE) -> list[Row]:
    """The entries of the records, finished."""
    entries = decode_records([as_record(row) for row in rows], all_epochs)
    assert entries.schema == NAMED_ENTRY
    finished = ControlHeaders(all_epochs).taken_out(with_schedules(HeaderLimits(all_epochs).applied(entries)))
    return [{**row, "headers": pairs(row["headers"])} for row in finished.to_pylist()]


def test_every_reject_keeps_the_record_and_gives_its_reason() -> None:
    """Whatever is wrong: the reason, and the record as it was, with all its headers."""
    for result, (reason, headers) in zip(decoded([record(*hs) for _, hs in REJECTS]), REJECTS, strict=True):
        assert result == rejected(record(*headers), reason), f"{reason} {str(headers)[:200]}"


def test_every_form_of_time() -> None:
    """Absolute, relative and by level, rounded up."""
    results = decoded([record((name, text), TO) for name, text, _ in TIMERS])
    assert [(row["reason"], row["due"] - TS) for row in results] == [(None, delay) for *_, delay in TIMERS]


def test_edges() -> None:
    """Of calendars, of white space, of UTF-8, and of 64 bits."""
    for result, (row, expected) in zip(decoded([row for row, _ in EDGES]), EDGES, strict=True):
        assert {name: result[name] for name in expected} == expected, row["headers"]


def test_recurring_messages() -> None:
    """They come up when they are written; what their headers say is kept as it is, sense or nonsense."""
    for result, (headers, expected) in zip(decoded([record(*hs) for hs, _ in RECURRING]), RECURRING, strict=True):
        assert {name: result[name] for name in expected} == expected, headers


def test_every_dialect() -> None:
    """What other schedulers' producers write, and what a dialect does not understand."""
    rows = [record(*headers, topic=topic) for topic, headers, _ in DIALECT_TIMERS]
    for row, (topic, headers, expected) in zip(decoded(rows, DIALECT_EPOCHS), DIALECT_TIMERS, strict=True):
        found = {**row, "headers": row["headers"] or []}
        assert {name: found[name] for name in expected} == expected, (topic, headers)
    rows = [record(*headers, topic=topic) for topic, headers, _ in DIALECT_REJECTS]
    for source, row, (topic, headers, reason) in zip(rows, decoded(rows, DIALECT_EPOCHS), DIALECT_REJECTS, strict=True):
        assert row == rejected(source, _REASONS[reason]), (topic, headers)


@pytest.mark.parametrize("topic", ["etf1", "karafka"])
def test_a_native_command_is_itself_where_a_record_without_a_value_cancels_its_key(topic: str) -> None:
    """What a client writes, and what the bridge writes for it."""
    found = decoded(keyed_commands(topic), DIALECT_EPOCHS)
    for row, (headers, expected) in zip(found, KEYED_COMMANDS, strict=True):
        assert {name: row[name] for name in expected} == expected, headers


def test_a_native_command_beside_another_cancel_of_its_dialect_is_two() -> None:
    """Karafka's explicit cancel is a header, which is not passed over."""
    row = record(("schedule_source_type", "cancel"), ("delay-move", "a"), FOR, topic="karafka", value=None)
    assert decoded([row], DIALECT_EPOCHS)[0]["reason"] == "two-times"


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("headers_max", RejectReason.TOO_MANY_HEADERS),
        ("header_bytes_max", RejectReason.HEADERS_TOO_LARGE),
        ("payload_bytes_max", RejectReason.PAYLOAD_TOO_LARGE),
        ("roll_bytes_max", RejectReason.TOO_LARGE_TO_ROLL),
    ],
)
def test_each_limit_holds_from_its_epoch_on(limit: str, reason: RejectReason) -> None:
    """At the limit a record is a timer, beyond it a reject; before the epoch there was no limit."""
    far, own = ("delay-for", "30d"), ("x", "1")
    headers = len("delay-for30ddelay-topicordersx1")
    size = {"headers_max": 3, "header_bytes_max": headers, "payload_bytes_max": 2, "roll_bytes_max": headers + 2 + 30}
    for most, expected in ((size[limit], None), (size[limit] - 1, reason.value)):
        limits: dict[str, Any] = {limit: most}
        limited = replace(PARAMETERS, **limits)
        epochs = (DecodeEpoch(offset=0, parameters=PARAMETERS), DecodeEpoch(offset=100, parameters=limited))
        rows = [record(far, TO, own, offset=offset) for offset in (99, 100)]
        assert [row["reason"] for row in decoded(rows, {("delay", 0): epochs})] == [None, expected]


def test_rolls_come_up_in_the_last_quarter_of_the_window_whatever_the_sign_of_their_hash() -> None:
    """Spark's xxhash64 is signed: half of them are below 0."""
    rows = [record(("delay-for", "30d"), TO, offset=offset) for offset in range(200)]
    signs = {spread("delay", 0, offset) < 0 for offset in range(200)}
    window = PARAMETERS.roll_window_ms
    assert signs == {False, True}
    assert all(window - window // 4 < row["at"] - TS <= window for row in decoded(rows))


def test_no_records_are_an_empty_table_of_entries() -> None:
    """With all columns."""
    assert decode_records([], {}).equals(NAMED_ENTRY.empty_table())


def test_a_record_of_an_unknown_partition_is_not_guessed() -> None:
    """No parameters, no position."""
    with pytest.raises(KeyError):
        decoded([record(FOR, TO, partition=2)])


@given(st.lists(records() | copies(), min_size=1, max_size=20), st.booleans())
def test_the_pure_readers_agree(rows: list[Row], default: bool) -> None:
    """The contract has one meaning, of originals and of whatever says that it is a copy."""
    parameters = replace(PARAMETERS, has_default_target=default)
    results = decoded(rows, {("delay", 0): (DecodeEpoch(offset=0, parameters=parameters),)})
    for row, result in zip(rows, results, strict=True):
        expected = oracle(row, parameters)
        if expected["at"] is None:  # the spread of rolls is pinned among the edges
            assert result["kind"] == Kind.TIMER
            expected["at"] = result["at"]
        assert result == expected, row["headers"]
