"""Decoding, on Spark and in Python: examples by table, and agreement with each other and with the pure readers of
headers.py on whatever Hypothesis thinks of.

A Spark job costs a tenth of a second whatever its size, and its plan a second: each test decodes all its examples in
one, and tests with the same parameters share a plan (engines.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from bridge.ingest.decode import AT_MIN, decode
from bridge.ingest.sql import lit
from bridge.stores.names import NAMED_ENTRY
from bridge.wire import headers as h
from bridge.wire.decode_epochs import DEFAULT_LEVELS_MS, DecodeEpoch, DecodeEpochs, DecodeParameters
from bridge.wire.reasons import RejectReason
from tests.decode_examples import (
    COPY,
    DAY,
    EDGES,
    FOR,
    OFFSET,
    ONE,
    PARAMETERS,
    RECURRING,
    REJECTS,
    TIMERS,
    TO,
    TS,
    Row,
    Some,
    pairs,
    record,
    rejected,
    without,
)
from tests.decode_oracle import copies, oracle, records
from tests.spark.engines import SOURCE_SCHEMA, as_source_gives, decoded_by_both
from timerstore.rows.entry import UNCOPYABLE


def table(spark: SparkSession, rows: Sequence[Row]) -> DataFrame:
    """The records as Spark's Kafka source gives them."""
    return spark.createDataFrame(as_source_gives(rows), SOURCE_SCHEMA)


def decoded(
    spark: SparkSession, rows: Sequence[Row], all_epochs: Mapping[tuple[str, int], DecodeEpochs] = ONE
) -> list[Row]:
    """The entries of the records, in order, of which both engines make the same."""
    entries = decoded_by_both(spark, rows, all_epochs)
    assert entries.schema.names == NAMED_ENTRY.names
    assert entries.cast(NAMED_ENTRY).num_rows == len(rows)
    assert [field.type for field in entries.schema if not pa.types.is_list(field.type)] == [
        field.type for field in NAMED_ENTRY if not pa.types.is_list(field.type)
    ]
    return [{**row, "headers": pairs(row["headers"])} for row in entries.to_pylist()]


def test_every_reject_keeps_the_record_and_gives_its_reason(spark: SparkSession) -> None:
    """Whatever is wrong: the reason, and the record as it was, with all its headers."""
    for result, (reason, headers) in zip(decoded(spark, [record(*hs) for _, hs in REJECTS]), REJECTS, strict=True):
        expected = rejected(record(*headers), reason)
        assert result == expected, f"{reason} {str(headers)[:200]}"
    tested_below = {reason for reason in RejectReason if "large" in reason or "many" in reason}
    assert {reason for reason, _ in REJECTS} | {RejectReason.CREATE_TIME} == set(list(RejectReason)[:19]) - tested_below


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


def test_every_form_of_time(spark: SparkSession) -> None:
    """Absolute, relative and by level, in all their forms, rounded up and independent of the session's time zone."""
    results = decoded(spark, [record((name, text), TO) for name, text, _ in TIMERS])
    assert [(row["reason"], row["due"] - TS) for row in results] == [(None, delay) for *_, delay in TIMERS]


def test_edges(spark: SparkSession) -> None:
    """Of calendars, of white space, of UTF-8, and of 64 bits."""
    for result, (row, expected) in zip(decoded(spark, [row for row, _ in EDGES]), EDGES, strict=True):
        assert {name: result[name] for name in expected} == expected, row["headers"]


def test_recurring_messages(spark: SparkSession) -> None:
    """They come up when they are written; what their headers say is kept as it is, sense or nonsense."""
    results = decoded(spark, [record(*headers) for headers, _ in RECURRING])
    for result, (headers, expected) in zip(results, RECURRING, strict=True):
        assert {name: result[name] for name in expected} == expected, headers


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


@pytest.mark.parametrize(
    ("named", "origin"),
    [
        ("delay/0/7", 7),
        (" delay/0/007\n", 7),
        ("delay/00/7", -1),
        (f"delay/0/{9**15}", 9**15),
        ("delay/1/7", -1),
        ("other/0/7", -1),
    ],
)
def test_cancel_by_origin(spark: SparkSession, named: str, origin: int) -> None:
    """It has the offset that it names, where that is of its own partition, and no id."""
    headers = [
        ("delay-cancel-origin", named),
        ("x", "1"),
        ("delay-topic", "/"),
        ("delay-id", ""),
        ("delay-replace", "?"),
    ]
    for row in decoded(spark, [record(*headers), record(*headers, key=None)]):
        assert (row["kind"], row["id"], row["at"], row["due"], row["reason"]) == (1, None, AT_MIN, TS, None)
        assert (row["target"], row["target_partition"], row["replace"], row["origin"]) == (None, None, False, origin)
        assert row["headers"][0] == ("delay-cancel-origin", named.encode())


def test_move(spark: SparkSession) -> None:
    """A move has the due time of the message, what it names, and the topic of its answer; and all its headers."""
    reply: Some = [("delay-reply-to", " answers "), ("delay-correlation-id", "é" * 256)]
    rows = [
        record(("delay-move", " a "), FOR, *reply, TO),
        record(("delay-move-origin", "delay/0/7"), ("delay-until", str(TS + 5)), ("delay-id", "a")),
        record(("delay-move-origin", "other/0/7"), ("delay-level", "1"), *reply, key=None),
        record(("delay-cancel", "a"), *reply),
    ]
    found = decoded(spark, rows)
    names = ("kind", "id", "origin", "due", "at", "target", "reason")
    assert [tuple(row[name] for name in names) for row in found] == [
        (3, "a", OFFSET, TS + 1_000, AT_MIN, "answers", None),
        (3, None, 7, TS + 5, AT_MIN, None, None),
        (3, None, -1, TS + 1_000, AT_MIN, "answers", None),
        (4, "a", OFFSET, TS, AT_MIN, "answers", None),
    ]
    assert [row["headers"] for row in found] == [row["headers"] for row in rows]


def test_copies(spark: SparkSession) -> None:
    """A copy keeps origin and due time; a backoff puts it off, but never past the roll window; what it says is read
    back."""
    window = PARAMETERS.roll_window_ms
    made = h.copy_headers(
        origin=7, due_ms=TS - 1, rolls=1, attempt=4, target="orders", at_ms=TS + 50, partition=2, id="i"
    )
    rows = [record(*COPY, TO, ("x", "1")), record(*made), record(*COPY, TO, ("delay-copy-at", str(TS + 10 * DAY)))]
    rows.append(record(*without("delay-copy-due", ("delay-copy-due", "0"))))
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
        record(*without("delay-copy-due", ("delay-copy-due", str(TS + 8 * DAY))), *own, **outgrows),
        record(("delay-cancel", "x"), **outgrows),
    ]
    limited = replace(PARAMETERS, roll_bytes_max=limit)
    all_epochs = {
        ("delay", 0): (DecodeEpoch(offset=0, parameters=PARAMETERS), DecodeEpoch(offset=100, parameters=limited))
    }
    results = decoded(spark, rows, all_epochs)
    assert [row["reason"] for row in results] == [None, "too-large-to-roll", None, None, None, None, None]
    assert results[1] == rejected(record(far, TO, *own, **outgrows), RejectReason.TOO_LARGE_TO_ROLL)
    assert [row["rolls"] for row in results] == [0, 0, 0, 0, UNCOPYABLE, 2, 0], "what is due before says so"


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
    assert refused == [rejected(row, reason) for reason, rows in beyond.items() for row in rows]


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
    rows.append(record(*without("delay-copy-due", ("delay-copy-due", str(TS + 2 * DAY))), offset=300))
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


@settings(
    max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(st.lists(records(), min_size=60, max_size=120), st.booleans())
def test_spark_and_the_pure_readers_agree(spark: SparkSession, rows: list[Row], default: bool) -> None:
    """The contract has one meaning: whatever the bytes, both implementations find the same entry or the same reason."""
    parameters = replace(PARAMETERS, has_default_target=default)
    results = decoded(spark, rows, {("delay", 0): (DecodeEpoch(offset=0, parameters=parameters),)})
    for row, result in zip(rows, results, strict=True):
        expected = oracle(row, parameters)
        if expected["at"] is None:
            expected["at"] = result["at"]  # the spread of rolls has its own test
        assert result == expected, row["headers"]


@settings(
    max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(st.lists(copies(), min_size=60, max_size=120))
def test_forged_copies_are_bounded_as_originals_are(spark: SparkSession, rows: list[Row]) -> None:
    """Whatever copy headers anybody writes: the pure readers find the same, and what is accepted comes up between 1970
    and the end of the roll window, is due within the maximum delay, and has an origin below its own offset."""
    results = decoded(spark, rows)
    for row, result in zip(rows, results, strict=True):
        expected = oracle(row, PARAMETERS)
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


CALLS_MAX = 100
"""24,000 of them, one for each node of the expressions, held up delivery for seconds of every start."""


def test_a_plan_is_made_in_a_few_calls_into_the_jvm(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    records, calls = table(spark, [record()]), list[str]()
    send = ClientServerConnection.send_command

    def counted(self: ClientServerConnection, command: str) -> object:
        calls.append(command)
        return send(self, command)

    monkeypatch.setattr(ClientServerConnection, "send_command", counted)
    decode(records, ONE)
    assert 0 < len(calls) <= CALLS_MAX


@pytest.mark.parametrize(
    "value",
    [
        "${spark.app.name} ${x}",
        r"\A it's \'d\' \z %_ \n" + '\n\t"é\0',
        b"\x00\xff'",
        -(2**63),
        2**63 - 1,
        -1,
        True,
        None,
    ],
)
def test_a_literal_is_what_it_says(spark: SparkSession, value: object) -> None:
    assert spark.sql(f"SELECT {lit(value).sql}").collect()[0][0] == value
