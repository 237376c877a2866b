"""Decoding, on Spark and in Python: examples by table, and agreement with each other and with the pure readers of
headers.py on whatever Hypothesis thinks of.

A Spark job costs tenths of a second whatever its size, so each test decodes all its examples in one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from bridge.ingest.decode import AT_MIN, decode
from bridge.wire import headers as h
from bridge.wire.decode_epochs import DEFAULT_LEVELS_MS, DecodeEpoch, DecodeEpochs, DecodeParameters
from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason
from tests.spark.engines import decoded_by_both
from timerstore.rows.entry import ENTRY

TS = 1_800_000_000_000
DAY = 86_400_000
OFFSET = 1_000
PARAMETERS = DecodeParameters(max_delay_ms=3650 * DAY, roll_window_ms=7 * DAY, has_default_target=False)
ONE: Mapping[tuple[str, int], DecodeEpochs] = {("delay", 0): (DecodeEpoch(offset=0, parameters=PARAMETERS),)}
SOURCE_SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)

Row = dict[str, Any]
Some = Sequence[tuple[str, str | bytes | None]]
Reject = tuple[RejectReason, Some]


def record(*headers: tuple[str, str | bytes | None], **columns: Any) -> Row:
    """A record as the Kafka source gives it; header values may be written as text."""
    values = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
    row = {"key": b"k", "value": b"v", "topic": "delay", "partition": 0, "offset": OFFSET, "ts": TS, "timestampType": 1}
    return {**row, "headers": values or None, **columns}


def table(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    """The records as Spark's Kafka source gives them."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    names = ("key", "value", "topic", "partition", "offset", "timestampType", "headers")
    data = [
        {"timestamp": epoch + timedelta(milliseconds=row["ts"])} | {name: row[name] for name in names} for row in rows
    ]
    return spark.createDataFrame(data, SOURCE_SCHEMA)


def decoded(
    spark: SparkSession, rows: Sequence[Row], all_epochs: Mapping[tuple[str, int], DecodeEpochs] = ONE
) -> list[Row]:
    """The entries of the records, in order, of which both engines make the same."""
    entries = decoded_by_both(table(spark, rows), rows, all_epochs)
    assert entries.schema.names == ENTRY.names
    assert entries.cast(ENTRY).num_rows == len(rows)
    assert [field.type for field in entries.schema if not pa.types.is_list(field.type)] == [
        field.type for field in ENTRY if not pa.types.is_list(field.type)
    ]
    return [{**row, "headers": _pairs(row["headers"])} for row in entries.to_pylist()]


def _pairs(headers: list[dict[str, Any]] | None) -> Headers | None:
    return [(header["key"], header["value"]) for header in headers] if headers else None


FOR = ("delay-for", "1s")
TO = ("delay-topic", "orders")
COPY = (
    ("delay-copy-origin", "5"),
    ("delay-copy-due", str(TS + 9)),
    ("delay-copy-rolls", "2"),
    ("delay-copy-attempt", "3"),
)


def _without(name: str, *more: tuple[str, str | bytes | None]) -> Some:
    return [TO, *(header for header in COPY if header[0] != name), *more]


def _each(reason: RejectReason, name: str, *texts: str | bytes | None, beside: Some = (TO,)) -> list[Reject]:
    return [(reason, [(name, text), *beside]) for text in texts]


REJECTS: list[Reject] = [
    (RejectReason.NO_TIME, []),
    (RejectReason.NO_TIME, [TO]),
    (RejectReason.NO_TIME, [("Delay-For", "1s"), TO]),
    (RejectReason.TWO_TIMES, [FOR, ("delay-level", "1"), TO]),
    (RejectReason.TWO_TIMES, [FOR, ("delay-cancel", "a"), TO]),
    (RejectReason.TWO_TIMES, [FOR, ("delay-until", None), TO]),
    (RejectReason.DUPLICATE_HEADER, [FOR, FOR, TO]),
    (RejectReason.DUPLICATE_HEADER, [FOR, TO, ("x", "1"), TO]),
    (RejectReason.DUPLICATE_HEADER, [("delay-cancel", "a"), ("delay-cancel", "b")]),
    (RejectReason.DUPLICATE_HEADER, [FOR, TO, ("delay-replace", "1"), ("delay-replace", "1"), ("delay-due", "1")]),
    (RejectReason.DUPLICATE_HEADER, [*COPY, COPY[0], TO]),
    *_each(RejectReason.BAD_UNTIL, "delay-until", "-1", "1801353600", "", None, b"\xff", "9" * 40, "soon", "٣"),
    *_each(RejectReason.BAD_UNTIL, "delay-until", "2027-01-31T08:00:00", "2027-02-30T08:00:00Z"),
    *_each(RejectReason.BAD_UNTIL, "delay-until", "1801353600000\u2028", "1801353600000\x00"),
    *_each(RejectReason.BAD_FOR, "delay-for", "-1s", "", None, b"\xc3(", "9" * 99, "P1M", "1.5s", "1s\u0085"),
    *_each(RejectReason.BAD_FOR, "delay-for", "1m" * 40_000, "PT" + "1" * 90_000 + "S", "P" * 999),
    *_each(RejectReason.BAD_LEVEL, "delay-level", "0", "-1", "", None, b"\xfe", "one", "9" * 16),
    *_each(RejectReason.BEYOND_MAX, "delay-for", "3651d", "9999999999d9999999999h", "P9999999999W"),
    *_each(RejectReason.BEYOND_MAX, "delay-until", "9999-01-01T00:00:00Z"),
    (RejectReason.NO_TARGET, [FOR]),
    (RejectReason.NO_TARGET, [*COPY]),
    *_each(RejectReason.BAD_TARGET, "delay-topic", "", None, "a/b", "..", ".", "a" * 250, b"a\xff", beside=[FOR]),
    *_each(RejectReason.BAD_PARTITION, "delay-partition", "-1", "", None, "2147483648", b"\xff", beside=[FOR, TO]),
    *_each(RejectReason.BAD_ID, "delay-id", "", " ", None, b"a\xff", "x" * 257, b"\xed\xa0\x80", beside=[FOR, TO]),
    *_each(RejectReason.BAD_ID, "delay-cancel", "", None, b"\xff", "x" * 257),
    *_each(RejectReason.BAD_REPLACE, "delay-replace", "", None, "1", b"\xff", beside=[FOR, TO, ("delay-id", "a")]),
    *_each(RejectReason.BAD_REPLACE, "delay-replace", "true", beside=[FOR, TO]),
    *((RejectReason.BAD_COPY, _without(name)) for name, _ in COPY[1:]),
    *((RejectReason.BAD_COPY, _without(name, (name, "-1"))) for name, _ in COPY),
    *((RejectReason.BAD_COPY, _without(name, (name, "x"))) for name, _ in COPY),
    (RejectReason.BAD_COPY, _without("delay-copy-origin", ("delay-copy-origin", str(OFFSET)))),
    (RejectReason.BAD_COPY, _without("delay-copy-due", ("delay-copy-due", str(TS + 3651 * DAY)))),
    (RejectReason.BAD_COPY, _without("delay-copy-rolls", ("delay-copy-rolls", "32768"))),
    *_each(RejectReason.BAD_COPY, "delay-for", "1s", beside=[*COPY, TO]),
    *_each(RejectReason.BAD_COPY, "delay-cancel", "a", beside=[*COPY, TO]),
    *_each(RejectReason.BAD_COPY, "delay-replace", "true", beside=[*COPY, TO, ("delay-id", "a")]),
    *_each(RejectReason.BAD_COPY, "delay-copy-at", "x", beside=[*COPY, TO]),
]


def test_every_reject_keeps_the_record_and_gives_its_reason(spark: SparkSession) -> None:
    """Whatever is wrong: the reason, and the record as it was, with all its headers."""
    for result, (reason, headers) in zip(decoded(spark, [record(*hs) for _, hs in REJECTS]), REJECTS, strict=True):
        expected = _reject(record(*headers), reason)
        assert result == expected, f"{reason} {str(headers)[:200]}"
    tested_below = {reason for reason in RejectReason if "large" in reason or "many" in reason}
    assert {reason for reason, _ in REJECTS} | {RejectReason.CREATE_TIME} == set(list(RejectReason)[:18]) - tested_below


def test_the_producer_s_time_is_refused(spark: SparkSession) -> None:
    """Without the broker's own timestamp nothing can be trusted, and this reason stands before all others."""
    rows = [record(FOR, TO, timestampType=kind) for kind in (0, -1)] + [record(FOR, FOR, timestampType=0)]
    assert [row["reason"] for row in decoded(spark, rows)] == ["create-time"] * 3


def test_of_several_reasons_the_first_in_order_is_given(spark: SparkSession) -> None:
    """The order is that of `RejectReason`, so that a reject is the same on every read."""
    wrong: list[tuple[str, str]] = [
        ("delay-topic", "a/b"),
        ("delay-partition", "x"),
        ("delay-id", ""),
        ("delay-replace", "x"),
    ]
    rows = [
        record(("delay-for", "x"), *wrong),
        *(record(FOR, TO, *wrong[i:]) for i in range(1, 4)),
        record(FOR, *wrong),
    ]
    reasons = [row["reason"] for row in decoded(spark, rows)]
    assert reasons == ["bad-for", "bad-partition", "bad-id", "bad-replace", "bad-target"]


TIMERS: list[tuple[str, str, int]] = [
    ("delay-until", str(TS + 5), 5),
    ("delay-until", f" {TS - DAY}\n", -DAY),
    ("delay-until", "2027-01-31t08:00:00.0000001+08:00", 1_801_353_600_001 - TS),
    ("delay-until", "2027-01-31 00:00:00.9999999Z", 1_801_353_601_000 - TS),
    ("delay-until", "2027-01-31T00:00:00." + "0" * 200 + "1z", 1_801_353_600_001 - TS),
    ("delay-until", "2028-02-29T00:00:00Z", 1_835_395_200_000 - TS),
    ("delay-for", "0", 0),
    ("delay-for", "1500", 1_500),
    ("delay-for", "90s", 90_000),
    ("delay-for", "250ms", 250),
    ("delay-for", "1d2h3m4s5ms", DAY + 7_384_005),
    ("delay-for", "PT15M", 900_000),
    ("delay-for", "P1W1DT1H1M1.0001S", 8 * DAY + 3_661_001),
    ("delay-for", "3650d", 3650 * DAY),
    ("delay-level", "1", 1_000),
    ("delay-level", "18", 7_200_000),
    ("delay-level", "19", 7_200_000),
    ("delay-level", "999999999999999", 7_200_000),
]


def test_every_form_of_time(spark: SparkSession) -> None:
    """Absolute, relative and by level, in all their forms, rounded up and independent of the session's time zone."""
    results = decoded(spark, [record((name, text), TO) for name, text, _ in TIMERS])
    assert [(row["reason"], row["due"] - TS) for row in results] == [(None, delay) for *_, delay in TIMERS]


def test_a_timer_keeps_what_is_not_control(spark: SparkSession) -> None:
    """Key, value and own headers with their order, duplicates and null values; the previous delivery's headers are
    gone."""
    rows = [
        record(
            ("a", "1"),
            FOR,
            ("b", None),
            TO,
            ("a", b"\xff"),
            ("delay-origin", "x/0/1"),
            ("delay-due", "1"),
            ("delay-until-x", ""),
        ),
        record(FOR, TO, key=None, value=None),
        record(FOR, TO, ("delay-id", " é "), ("delay-replace", "TRUE"), ("delay-partition", "2147483647")),
        record(FOR, TO, ("delay-origin", "1"), ("delay-origin", "2")),
    ]
    plain, empty, full, twice = decoded(spark, rows)
    assert plain["headers"] == [("a", b"1"), ("b", None), ("a", b"\xff"), ("delay-until-x", b"")]
    assert (empty["key"], empty["value"], empty["headers"]) == (None, None, None)
    assert (full["id"], full["replace"], full["target_partition"], full["headers"]) == ("é", True, 2**31 - 1, None)
    assert (twice["kind"], twice["headers"]) == (0, None)
    for row in (plain, empty, full):
        assert (row["kind"], row["target"], row["origin"], row["attempt"], row["rolls"]) == (0, "orders", OFFSET, 0, 0)


def test_cancel(spark: SparkSession) -> None:
    """A cancel has the id, all its headers, and the smallest position; what a timer would need is not looked at."""
    headers = [("delay-cancel", " a "), ("x", "1"), ("delay-topic", "/"), ("delay-id", ""), ("delay-replace", "?")]
    for row in decoded(spark, [record(*headers), record(*headers, ("delay-copy-forwarded", "1"), key=None)]):
        assert (row["kind"], row["id"], row["at"], row["due"], row["reason"]) == (1, "a", AT_MIN, TS, None)
        assert (row["target"], row["target_partition"], row["replace"], row["origin"]) == (None, None, False, OFFSET)
        assert row["headers"][0] == ("delay-cancel", b" a ")


def test_copies(spark: SparkSession) -> None:
    """A copy keeps origin and due time; a backoff puts it off, but never past the roll window; what it says is read
    back."""
    window = PARAMETERS.roll_window_ms
    made = h.copy_headers(
        origin=7, due_ms=TS - 1, rolls=1, attempt=4, target="orders", at_ms=TS + 50, partition=2, id="i"
    )
    rows = [record(*COPY, TO, ("x", "1")), record(*made), record(*COPY, TO, ("delay-copy-at", str(TS + 10 * DAY)))]
    rows.append(record(*_without("delay-copy-due", ("delay-copy-due", "0"))))
    first, second, far, past = decoded(spark, rows)
    assert (first["origin"], first["rolls"], first["attempt"], first["due"], first["at"]) == (5, 2, 3, TS + 9, TS + 9)
    assert first["headers"] == [("x", b"1")]
    assert (second["origin"], second["rolls"], second["attempt"], second["due"], second["at"]) == (
        7,
        1,
        4,
        TS - 1,
        TS + 50,
    )
    assert (second["target"], second["target_partition"], second["id"], second["headers"]) == ("orders", 2, "i", None)
    assert (far["due"], far["at"]) == (TS + 9, TS + window)
    assert (past["due"], past["at"], past["reason"]) == (0, 0, None)


def test_far_timers_roll_in_the_last_quarter_of_the_window(spark: SparkSession) -> None:
    """Up to the window a timer waits for its due time; beyond it rolls, spread over the window's last quarter."""
    window = PARAMETERS.roll_window_ms
    rows = [record(("delay-for", str(window)), TO)]
    rows += [record(("delay-for", str(window + 1)), TO, offset=offset) for offset in range(200)]
    near, *far = decoded(spark, rows)
    assert near["at"] == near["due"] == TS + window
    spans = [row["at"] - TS for row in far]
    assert all(window - window // 4 < span <= window for span in spans)
    assert len(set(spans)) == 200
    assert max(spans) - min(spans) > window // 5
    assert all(row["due"] == TS + window + 1 for row in far)


def test_what_would_outgrow_the_topic_by_rolling_is_refused_at_first_sight(spark: SparkSession) -> None:
    """Key, value and headers count, in bytes. What is due within the window is not rolled; a copy passes."""
    far, limit = ("delay-for", "8d"), 500
    own: Some = [("a", b"\xff" * 10), ("b", None), ("delay-id", "é")]
    size = len("delay-for8ddelay-topicordersabdelay-id") + 10 + 2 + 5 * 10 + len("key")
    fits: Row = {"key": b"key", "value": b"v" * (limit - size)}
    outgrows: Row = {"key": b"key", "value": b"v" * (limit - size + 1)}
    rows = [
        record(far, TO, *own, **fits),
        record(far, TO, *own, **outgrows),
        record(far, TO, key=None, value=None),
        record(far, TO, *own, **outgrows, offset=99),
        record(("delay-for", "7d"), TO, *own, **outgrows),
        record(*_without("delay-copy-due", ("delay-copy-due", str(TS + 8 * DAY))), *own, **outgrows),
        record(("delay-cancel", "x"), **outgrows),
    ]
    limited = replace(PARAMETERS, roll_bytes_max=limit)
    all_epochs = {
        ("delay", 0): (DecodeEpoch(offset=0, parameters=PARAMETERS), DecodeEpoch(offset=100, parameters=limited))
    }
    results = decoded(spark, rows, all_epochs)
    assert [row["reason"] for row in results] == [None, "too-large-to-roll", None, None, None, None, None]
    assert results[1] == _reject(record(far, TO, *own, **outgrows), RejectReason.TOO_LARGE_TO_ROLL)


SMALL = replace(PARAMETERS, headers_max=4, header_bytes_max=60, payload_bytes_max=10)
OWN = ("a" * 10, b"v" * (60 - len("a" * 10 + "delay-for1sdelay-topicorders")))
MORE = (OWN[0], OWN[1] + b"v")


def test_what_is_larger_than_the_limits_is_refused_as_it_is(spark: SparkSession) -> None:
    """One header, one byte of headers or one byte of payload too many; copies of the bridge's own are never refused."""
    many: Some = [("a", "1"), ("b", None), ("c", "")]
    at_most = [
        record(FOR, TO, *many[:2]),
        record(FOR, TO, OWN),
        record(FOR, TO, key=b"k" * 5, value=b"v" * 5),
        record(FOR, TO, key=None, value=None),
        record(("delay-for", "1s" + " " * 99), TO),  # nothing of it travels on
        record(*COPY, TO, *many, MORE, value=b"v" * 20),
    ]
    beyond = {
        RejectReason.TOO_MANY_HEADERS: [record(FOR, TO, *many), record(("delay-cancel", "x"), *many, ("d", "1"))],
        RejectReason.HEADERS_TOO_LARGE: [record(FOR, TO, MORE), record(("delay-cancel", "x"), ("a", b"v" * 60))],
        RejectReason.PAYLOAD_TOO_LARGE: [record(FOR, TO, key=b"k" * 5, value=b"v" * 6), record(FOR, TO, key=b"k" * 11)],
    }
    all_epochs = {
        ("delay", 0): (DecodeEpoch(offset=0, parameters=PARAMETERS), DecodeEpoch(offset=100, parameters=SMALL))
    }
    rows = [row for rows in beyond.values() for row in rows]
    before = [{**row, "offset": 99} for row in rows]
    fit, refused, old = (decoded(spark, each, all_epochs) for each in (at_most, rows, before))
    assert [row["reason"] for row in fit + old] == [None] * (len(at_most) + len(before))
    assert refused == [_reject(row, reason) for reason, rows in beyond.items() for row in rows]


def test_a_position_never_changes(spark: SparkSession) -> None:
    """The spread is part of positions that Kafka holds: its values are pinned."""
    (row,) = decoded(spark, [record(("delay-for", "30d"), TO)])
    assert row["at"] - TS == PINNED_SPAN_MS


PINNED_SPAN_MS = 483_561_926


def test_records_below_a_decode_epoch_are_decoded_by_the_old_parameters(spark: SparkSession) -> None:
    """Levels, maximum, window and default target are those in force at the record's offset in its own partition."""
    old = DecodeParameters(levels_ms=(1_000,), max_delay_ms=DAY, roll_window_ms=DAY, has_default_target=False)
    new = DecodeParameters(
        levels_ms=(1_000, 2_000), max_delay_ms=9 * DAY, roll_window_ms=4_000, has_default_target=True
    )
    last = replace(old, has_default_target=True).following(new)
    all_epochs: dict[tuple[str, int], DecodeEpochs] = {
        ("delay", 0): (
            DecodeEpoch(offset=0, parameters=old),
            DecodeEpoch(offset=100, parameters=new),
            DecodeEpoch(offset=200, parameters=last),
        ),
        ("delay", 2): (DecodeEpoch(offset=0, parameters=old), DecodeEpoch(offset=150, parameters=new)),
        ("other", 1): (DecodeEpoch(offset=0, parameters=new),),
    }
    places = [
        ("delay", 0, 99),
        ("delay", 0, 100),
        ("delay", 0, 200),
        ("delay", 2, 149),
        ("delay", 2, 150),
        ("other", 1, 0),
    ]
    rows = [
        record(*headers, topic=topic, partition=partition, offset=offset)
        for headers in ([("delay-level", "2"), TO], [("delay-for", "2d"), TO], [FOR])
        for topic, partition, offset in places
    ]
    rows.append(record(*_without("delay-copy-due", ("delay-copy-due", str(TS + 2 * DAY))), offset=300))
    *results, copy = decoded(spark, rows, all_epochs)
    levels, far, default = results[:6], results[6:12], results[12:]
    assert [row["due"] - TS for row in levels] == [1_000, 2_000, 1_000, 1_000, 2_000, 2_000]
    assert [row["reason"] for row in far] == ["beyond-max", None, "beyond-max", "beyond-max", None, None]
    assert all(3_000 < far[i]["at"] - TS <= 4_000 for i in (1, 4, 5))
    assert [row["reason"] for row in default] == ["no-target", None, None, "no-target", None, None]
    assert copy["reason"] is None, "a timer that was accepted under a longer maximum rolls under a shorter one"


def test_a_record_of_an_unknown_partition_stops_the_query(spark: SparkSession) -> None:
    """No parameters, no position: a guess would break what is finished."""
    other = replace(PARAMETERS, max_delay_ms=DAY)
    all_epochs = {**ONE, ("delay", 1): (DecodeEpoch(offset=0, parameters=other),)}
    with pytest.raises(Exception, match="no decode parameters for delay/2"):
        decoded(spark, [record(FOR, TO, partition=2)], all_epochs)


def test_decode_epochs_are_checked(spark: SparkSession) -> None:
    """They begin at offset 0, and their offsets rise."""
    frame = spark.createDataFrame([], SOURCE_SCHEMA)
    late, early = DecodeEpoch(offset=5, parameters=PARAMETERS), DecodeEpoch(offset=0, parameters=PARAMETERS)
    for all_epochs in ({}, {("delay", 0): ()}, {("delay", 0): (late,)}, {("delay", 0): (early, late, late)}):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            decode(frame, all_epochs)


def test_parameters_in_json() -> None:
    """Parameters survive committed metadata, in few characters; what this version does not know is refused."""
    plain = DecodeParameters(max_delay_ms=5, roll_window_ms=4, has_default_target=False)
    full = DecodeParameters(
        levels_ms=(1, 2), max_delay_ms=5, roll_window_ms=4, has_default_target=True, copy_max_delay_ms=9,
        roll_bytes_max=7, headers_max=1, header_bytes_max=2, payload_bytes_max=3,
    )  # fmt: skip
    for parameters in (plain, full):
        assert DecodeParameters.from_json(json.loads(json.dumps(parameters.to_json()))) == parameters
    assert plain.to_json() == {"m": 5, "w": 4}
    assert plain.levels_ms == DEFAULT_LEVELS_MS
    for unknown in ({"x": 1}, {"v": 2}, {"d": "klingon"}):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            DecodeParameters.from_json({**plain.to_json(), **unknown})
    for wrong in (
        {"levels_ms": ()},
        {"levels_ms": (-1,)},
        {"max_delay_ms": 0},
        {"roll_window_ms": 3},
        {"max_delay_ms": 10**15},
        {"roll_bytes_max": -1},
        {"headers_max": -1},
        {"payload_bytes_max": 2**31},
    ):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            replace(plain, **wrong)


# -- agreement with the pure readers ---------------------------------------------------------------------------------


def _reject(row: Row, reason: RejectReason) -> Row:
    kept = {name: row[name] for name in ("topic", "partition", "offset", "ts", "key", "value", "headers")}
    nothing = dict.fromkeys(("target", "target_partition", "id"))
    numbers = {"due": row["ts"], "at": AT_MIN, "kind": 2, "origin": row["offset"], "attempt": 0, "rolls": 0}
    return {**kept, **nothing, **numbers, "replace": False, "reason": reason.value}


def _oracle(row: Row, parameters: DecodeParameters) -> Row:
    """What an original record decodes to, by the readers of headers.py and nothing else."""
    headers: Headers = row["headers"] or []
    names = [name for name, _ in headers]
    found = dict(headers)
    times = [name for name in (h.UNTIL, h.FOR, h.LEVEL, h.CANCEL) if name in found]
    if any(names.count(name) > 1 for name in h.CONTROL):
        return _reject(row, RejectReason.DUPLICATE_HEADER)
    if h.COPY_ORIGIN in found:
        return _copy_oracle(row, found, len(times), parameters)
    if len(times) != 1:
        return _reject(row, RejectReason.TWO_TIMES if times else RejectReason.NO_TIME)
    reason, ts = RejectReason.BAD_ID, row["ts"]
    entry = {**_reject(row, reason), "reason": None}
    try:
        if times == [h.CANCEL]:
            return {**entry, "kind": 1, "id": h.check_id(h.text_of(found[h.CANCEL]))}
        text = found[times[0]]
        if times == [h.UNTIL]:
            reason = RejectReason.BAD_UNTIL
            due = h.check_until(h.parse_until(h.text_of(text)), ts)
        elif times == [h.FOR]:
            reason = RejectReason.BAD_FOR
            due = ts + h.parse_duration(h.text_of(text))
        else:
            reason = RejectReason.BAD_LEVEL
            due = ts + h.parse_level(h.text_of(text), parameters.levels_ms)
        if due - ts > parameters.max_delay_ms:
            return _reject(row, RejectReason.BEYOND_MAX)
        if h.TOPIC not in found and not parameters.has_default_target:
            return _reject(row, RejectReason.NO_TARGET)
        reason = RejectReason.BAD_TARGET
        target = h.check_topic(h.text_of(found[h.TOPIC])) if h.TOPIC in found else None
        reason = RejectReason.BAD_PARTITION
        partition = h.parse_partition(h.text_of(found[h.PARTITION])) if h.PARTITION in found else None
        reason = RejectReason.BAD_ID
        id = h.check_id(h.text_of(found[h.ID])) if h.ID in found else None
        reason = RejectReason.BAD_REPLACE
        replaces = h.parse_replace(h.text_of(found[h.REPLACE])) if h.REPLACE in found else False
        if replaces and id is None:
            return _reject(row, RejectReason.BAD_REPLACE)
    except ValueError:
        return _reject(row, reason)
    own = [header for header in headers if header[0] not in h.STRIPPED] or None
    entry |= {
        "kind": 0,
        "due": due,
        "target": target,
        "target_partition": partition,
        "id": id,
        "replace": replaces,
        "headers": own,
    }
    return {**entry, "at": due if due - ts <= parameters.roll_window_ms else None}


def _number(value: bytes | None) -> int | None:
    try:
        text = h.text_of(value)
    except ValueError:
        return None
    return int(text) if re.fullmatch(h.NUMBER_PATTERN, text) else None


def _copy_oracle(row: Row, found: dict[str, bytes | None], times: int, parameters: DecodeParameters) -> Row:
    """What a record decodes to that says that it is a copy, whoever wrote it: bounded as an original is."""
    ts, window = row["ts"], parameters.roll_window_ms
    numbers = {name: _number(found[name]) if name in found else None for name in h.COPY}
    origin, due, rolls, attempt, at, _ = numbers.values()
    bad = times or h.REPLACE in found or (h.COPY_AT in found and at is None)
    if bad or origin is None or due is None or rolls is None or attempt is None:
        return _reject(row, RejectReason.BAD_COPY)
    if origin >= row["offset"] or max(rolls, attempt) > 32_767 or due - ts > parameters.longest_copy_ms:
        return _reject(row, RejectReason.BAD_COPY)
    # The rest is what an original says, with its time in another header.
    original = {name: value for name, value in found.items() if name not in h.COPY}
    original[h.UNTIL] = str(max(due, ts)).encode()
    entry = _oracle({**row, "headers": list(original.items())}, parameters)
    if entry["kind"] == 2:
        return {**entry, "headers": row["headers"]}
    rolled = due - ts > window
    assert rolled == (entry["at"] is None)
    own = [header for header in row["headers"] if header[0] not in h.STRIPPED] or None
    entry |= {"headers": own, "due": due, "origin": origin, "rolls": rolls, "attempt": attempt}
    return {**entry, "at": None if rolled else max(due, min(at or 0, ts + window))}


_JUNK = st.one_of(
    st.none(),
    st.binary(max_size=12),
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text("0123456789.:-+TZtzPWDHMSsmhd \t\n\x85\u2028", max_size=24).map(str.encode),
    st.integers(-(10**20), 10**20).map(lambda number: str(number).encode()),
)
_INSTANT = st.builds(
    lambda at, fraction, zone, t: f"{at:%Y-%m-%d}{t}{at:%H:%M:%S}{fraction}{zone}".encode(),
    st.datetimes(datetime(2016, 1, 1), datetime(2040, 1, 1)),  # noqa: DTZ001 (the zone is drawn below)
    st.from_regex(r"\A(\.[0-9]{1,12})?\Z"),
    st.one_of(st.sampled_from(["Z", "z", ""]), st.from_regex(r"\A[+-][01][0-9]:[0-6][0-9]\Z")),
    st.sampled_from(["T", "t", " "]),
)
_MILLIS = st.integers(TS - 4000 * DAY, TS + 4000 * DAY).map(lambda number: str(number).encode())
_UNITS = st.lists(st.tuples(st.integers(0, 10**10), st.sampled_from(["d", "h", "m", "s", "ms"])), max_size=4).map(
    lambda parts: "".join(f"{number}{unit}" for number, unit in parts).encode()
)
_ISO = st.from_regex(
    r"\AP([0-9]{1,3}W)?([0-9]{1,3}D)?(T([0-9]{1,3}H)?([0-9]{1,3}M)?([0-9]{1,3}(\.[0-9]{1,6})?S)?)?\Z"
).map(lambda text: text.encode("utf-8"))
_LEVEL = st.integers(-1, 30).map(lambda number: str(number).encode())
_ID = st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass"))
_HEADERS = {
    h.UNTIL: st.one_of(_MILLIS, _INSTANT, _INSTANT, _JUNK),
    h.FOR: st.one_of(_UNITS, _UNITS, _ISO, _JUNK),
    h.LEVEL: st.one_of(_LEVEL, _JUNK),
    h.CANCEL: st.one_of(_ID, _JUNK),
    h.TOPIC: st.one_of(st.just(b"orders"), st.from_regex(r"\A[a-c./ ]{1,3}\Z").map(str.encode), _JUNK),
    h.PARTITION: st.one_of(_LEVEL, _JUNK),
    h.ID: st.one_of(_ID, _JUNK),
    h.REPLACE: st.one_of(st.sampled_from([b"true", b"FALSE", b" True\n"]), _JUNK),
    h.DUE: _JUNK,
    "x": _JUNK,
}


def _header(name: str) -> st.SearchStrategy[tuple[str, bytes | None]]:
    return st.tuples(st.just(name), _HEADERS[name])


@st.composite
def _records(draw: st.DrawFn) -> Row:
    """One time and a target as a rule, anything beside them."""
    headers = [draw(_header(draw(st.sampled_from([h.UNTIL, h.UNTIL, h.FOR, h.FOR, h.LEVEL, h.CANCEL]))))]
    if draw(st.integers(0, 4)):
        headers.append((h.TOPIC, b"t"))
    if draw(st.booleans()):
        headers += draw(st.lists(st.sampled_from(sorted(_HEADERS)).flatmap(_header), max_size=4))
    return record(*draw(st.permutations(headers)), key=draw(st.none() | st.binary(max_size=3)))


@settings(
    max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(st.lists(_records(), min_size=60, max_size=120), st.booleans())
def test_spark_and_the_pure_readers_agree(spark: SparkSession, rows: list[Row], default: bool) -> None:
    """The contract has one meaning: whatever the bytes, both implementations find the same entry or the same reason."""
    parameters = replace(PARAMETERS, has_default_target=default)
    results = decoded(spark, rows, {("delay", 0): (DecodeEpoch(offset=0, parameters=parameters),)})
    for row, result in zip(rows, results, strict=True):
        expected = _oracle(row, parameters)
        if expected["at"] is None:
            expected["at"] = result["at"]  # the spread of rolls has its own test
        assert result == expected, row["headers"]


_FORGED = {
    h.COPY_ORIGIN: st.one_of(st.integers(0, 2 * OFFSET).map(lambda n: str(n).encode()), _JUNK),
    h.COPY_DUE: st.one_of(_MILLIS, _MILLIS, st.integers(0, 10**15).map(lambda n: str(n).encode()), _JUNK),
    h.COPY_ROLLS: st.one_of(st.integers(0, 33_000).map(lambda n: str(n).encode()), _JUNK),
    h.COPY_ATTEMPT: st.one_of(st.just(b"1"), st.just(b"1"), _JUNK),
    h.COPY_AT: st.one_of(_MILLIS, _JUNK),
}


@st.composite
def _copies(draw: st.DrawFn) -> Row:
    """Mostly whole copies, with one header of an original beside them now and then."""
    names = [name for name in _FORGED if name == h.COPY_ORIGIN or draw(st.integers(0, 9))]
    headers = [(name, draw(_FORGED[name])) for name in names]
    headers += [(h.TOPIC, b"t"), *draw(st.lists(st.sampled_from([h.ID, "x", h.FOR]).flatmap(_header), max_size=1))]
    return record(*draw(st.permutations(headers)))


@settings(
    max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(st.lists(_copies(), min_size=60, max_size=120))
def test_forged_copies_are_bounded_as_originals_are(spark: SparkSession, rows: list[Row]) -> None:
    """Whatever copy headers anybody writes: the pure readers find the same, and what is accepted comes up between 1970
    and the end of the roll window, is due within the maximum delay, and has an origin below its own offset."""
    results = decoded(spark, rows)
    for row, result in zip(rows, results, strict=True):
        expected = _oracle(row, PARAMETERS)
        if expected["at"] is None:
            expected["at"] = result["at"]
        assert result == expected, row["headers"]
        if result["kind"] == 0:
            assert 0 <= result["at"] <= TS + PARAMETERS.roll_window_ms
            assert 0 <= result["due"] <= TS + PARAMETERS.max_delay_ms
            assert 0 <= result["origin"] < OFFSET


METHOD_BYTES_MAX = 8_000
"""What is longer HotSpot does not compile."""


@pytest.mark.parametrize("dialect", ["native", "rocketmq"])
def test_generated_methods_are_short_enough_to_be_compiled(spark: SparkSession, dialect: str) -> None:
    """All of decoding is one stage of generated code, whatever parameters are in force, in methods that the JVM
    compiles.
    """
    other = replace(PARAMETERS, dialect=dialect, roll_window_ms=5_000)
    for epochs in (ONE["delay", 0], (*ONE["delay", 0], DecodeEpoch(offset=7, parameters=other))):
        plan = decode(table(spark, [record()]), {("delay", 0): epochs})
        stages = plan._jdf.queryExecution().debug().codegenToSeq()
        sizes = [stages.apply(i)._3().maxMethodCodeSize() for i in range(stages.size())]
        assert len(sizes) <= (2 if dialect != "native" else 1)
        assert max(sizes) <= METHOD_BYTES_MAX
