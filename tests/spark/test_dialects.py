"""Records of other schedulers' producers, decoded on Spark and in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from bridge.delivery.plan.dead_letters import dead_letters, held, is_held
from bridge.delivery.plan.due_rows import DueRows, SourceColumns
from bridge.stores.names import Sources
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs
from bridge.wire.dialects import DIALECTS, NATIVE
from bridge.wire.headers import COMMANDS, COPY_FORWARDED
from bridge.wire.reasons import RejectReason
from tests.decode_examples import (
    AT,
    COPY,
    DIALECT_EPOCHS,
    DIALECT_REJECTS,
    DIALECT_TIMERS,
    KEYED_COMMANDS,
    LIMITED,
    PARAMETERS,
    TS,
    Some,
    keyed_commands,
    record,
)
from tests.entries import rows_of
from tests.spark.engines import decoded_by_both
from timerstore.rows.entry import Kind


def decoded(
    spark: SparkSession, rows: list[dict[str, Any]], all_epochs: Mapping[tuple[str, int], DecodeEpochs] = DIALECT_EPOCHS
) -> list[dict[str, Any]]:
    """The entries, their headers as pairs."""
    entries = decoded_by_both(spark, rows, all_epochs).to_pylist()
    return [{**row, "headers": [(h["key"], h["value"]) for h in row["headers"] or []]} for row in entries]


def test_every_dialect_says_what_its_scheduler_would_have_done(spark: SparkSession) -> None:
    """Time with its unit, target, key and id of each; its headers are gone, others stay, and native ones work too."""
    rows = [record(*headers, topic=topic) for topic, headers, _ in DIALECT_TIMERS]
    for row, (topic, headers, expected) in zip(decoded(spark, rows), DIALECT_TIMERS, strict=True):
        assert row["kind"] == Kind.TIMER, (topic, headers, row["reason"])
        assert {name: row[name] for name in expected} == expected, (topic, headers)


def test_what_a_dialect_does_not_understand_stays_byte_for_byte(spark: SparkSession) -> None:
    """A reject has its reason, and key, value and headers as they came."""
    rows = [record(*headers, topic=topic) for topic, headers, _ in DIALECT_REJECTS]
    for source, row, (topic, headers, reason) in zip(rows, decoded(spark, rows), DIALECT_REJECTS, strict=True):
        assert (row["kind"], row["reason"]) == (Kind.REJECT, reason), (topic, headers)
        assert (row["key"], row["value"], row["headers"]) == (source["key"], source["value"], source["headers"])


def test_limits_are_of_what_was_written_not_of_what_it_becomes(spark: SparkSession) -> None:
    """A dialect's headers are translated into more, and larger, ones: those do not count."""
    epoch, room = ("scheduler-epoch", str(AT)), 1_000 - len("scheduler-epoch" + str(AT) + "x")
    cases: list[Some] = [[epoch, *[("a", "")] * 8], [epoch, *[("a", "")] * 9]]
    cases += [[epoch, ("x", b"v" * room)], [epoch, ("x", b"v" * (room + 1))]]
    rows = [record(*headers, topic="etf1", key=b"key " * 40) for headers in cases]
    found = decoded(spark, rows)
    reasons = [None, RejectReason.TOO_MANY_HEADERS, None, RejectReason.HEADERS_TOO_LARGE]
    assert [row["reason"] for row in found] == reasons
    for source, row in ((rows[1], found[1]), (rows[3], found[3])):
        assert (row["key"], row["value"], row["headers"]) == (source["key"], source["value"], source["headers"])


def test_a_record_without_value_cancels_where_the_key_is_the_id(spark: SparkSession) -> None:
    """etf1's and Karafka's tombstones, and Karafka's explicit cancel; not where keys mean nothing."""
    rows = [
        record(topic="etf1", value=None),
        record(("scheduler-epoch", str(AT)), topic="etf1", value=None),
        record(("schedule_source_type", "cancel"), ("schedule_schema_version", "1.0.0"), topic="karafka"),
        record(topic="etf1", value=None, key=None),
        record(("x-delay", "1"), topic="rabbitmq", value=None),
    ]
    found = [(row["kind"], row["id"]) for row in decoded(spark, rows)]
    assert found == [
        (Kind.CANCEL, "k"), (Kind.CANCEL, "k"), (Kind.CANCEL, "k"), (Kind.REJECT, None), (Kind.TIMER, None),
    ]  # fmt: skip


@pytest.mark.parametrize("topic", ["etf1", "karafka"])
def test_a_native_command_is_itself_where_a_record_without_a_value_cancels_its_key(
    spark: SparkSession, topic: str
) -> None:
    """What a client writes, and what the bridge writes for it."""
    found = decoded(spark, keyed_commands(topic))
    for row, (headers, expected) in zip(found, KEYED_COMMANDS, strict=True):
        assert {name: row[name] for name in expected} == expected, headers


def test_copies_of_the_bridge_are_not_translated(spark: SparkSession) -> None:
    """A copy keeps the key that it carries, and needs none of the dialect's headers."""
    row = decoded(spark, [record(*COPY, ("delay-id", "k"), topic="etf1", key=b"tk")])[0]
    assert (row["kind"], row["key"], row["id"], row["origin"], row["replace"]) == (Kind.TIMER, b"tk", "k", 5, False)


def test_a_held_dead_letter_keeps_the_headers_and_the_key_of_its_dialect(spark: SparkSession) -> None:
    """What waits in the delay topic for its dead-letter topic comes back byte for byte: it is a copy, and says so."""
    written: Some = [("scheduler-epoch", "soon"), ("scheduler-target-key", "tk"), ("own", None), ("x-delay", "1")]
    topics, first = {"etf1": "etf1.dlt"}, np.array([0], dtype=np.intp)
    (copy,) = held(taken(spark, record(*written, topic="etf1", offset=5)), first, {}, topics, np.array([TS + 9]))
    assert copy.headers is not None
    due_rows = taken(spark, record(*copy.headers[0], topic="etf1", offset=9, ts=TS + 1, key=copy.keys[0]))
    assert is_held(due_rows, first).tolist() == [True]
    (letter,) = dead_letters(due_rows, first, {}, topics)
    assert letter.headers is not None
    assert letter.keys == [b"k"]
    assert letter.headers[0][:4] == [(name, value and str(value).encode()) for name, value in written]
    assert dict(letter.headers[0])["delay-reason"] == b"bad-until"
    assert dict(letter.headers[0])["delay-origin"] == b"etf1/0/5"


def taken(spark: SparkSession, row: dict[str, Any]) -> DueRows:
    """A record of the topic etf1, decoded and handed out by the store."""
    (entry,) = decoded(spark, [row])
    return DueRows(rows_of([(entry["at"], 0, entry["offset"], entry)]), SourceColumns(Sources([("etf1", 0)]), {}))


def test_a_dialect_holds_from_its_decode_epoch_on(spark: SparkSession) -> None:
    """A topic that gets a dialect, and loses it again: records of before and after keep headers of those names."""
    native, foreign = (DIALECT_EPOCHS[name, 0][0].parameters for name in (NATIVE, "rabbitmq"))
    epochs = tuple(DecodeEpoch(offset=o, parameters=p) for o, p in ((0, native), (100, foreign), (200, native)))
    headers = [("x-delay", "5"), ("x", "1")]
    rows = [record(*headers, ("delay-for", "9"), topic="t", offset=offset) for offset in (99, 200)]
    rows.append(record(*headers, topic="t", offset=100))
    before, after, between = decoded(spark, rows, {("t", 0): epochs})
    assert [row["due"] - TS for row in (before, after, between)] == [9, 9, 5]
    assert before["headers"] == after["headers"] == [("x-delay", b"5"), ("x", b"1")]
    assert between["headers"] == [("x", b"1")]


@pytest.mark.parametrize("name", DIALECTS)
def test_no_dialect_shares_a_header_with_another(name: str) -> None:
    """Nor with the native headers: what is stripped of one topic's records belongs to its dialect."""
    others = {header for other, dialect in DIALECTS.items() if other != name for header in dialect.names}
    assert not others & set(DIALECTS[name].names)
    assert not any(header.startswith("delay-") for header in DIALECTS[name].names)


_NATIVE = {"delay-for", "delay-id", *COMMANDS, COPY_FORWARDED}
_NAMES = sorted({name for dialect in DIALECTS.values() for name in dialect.names} | _NATIVE | {"own"})
_VALUES = st.one_of(
    st.none(),
    st.integers(-5, 2 * TS).map(lambda number: str(number).encode()),
    st.integers(0, 10**10).map(lambda number: f" {number}\n".encode()),
    st.sampled_from(
        [b"", b"cancel", b" cancel", b"t", b"mixed/0/7", b"1s", b"\xff", str(TS + 5).encode(), str(AT).encode()]
    ),
)
TIGHT = replace(
    PARAMETERS, headers_max=3, header_bytes_max=60, payload_bytes_max=4, roll_bytes_max=90, roll_window_ms=1_000
)
_EPOCHS: DecodeEpochs = tuple(
    DecodeEpoch(offset=100 * number, parameters=replace(limits, dialect=name, has_default_target=True))
    for number, (limits, name) in enumerate(product((LIMITED, TIGHT), (NATIVE, *DIALECTS)))
)


@settings(
    max_examples=5, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(_NAMES), _VALUES), max_size=5),
            st.integers(0, 100 * len(_EPOCHS) + 50),
            st.none() | st.binary(max_size=3),
            st.none() | st.binary(max_size=3),
            st.booleans(),
        ),
        min_size=60,
        max_size=120,
    )
)
def test_both_engines_agree_on_whatever_a_dialect_may_be_written_like(
    spark: SparkSession, drawn: list[tuple[list[tuple[str, bytes | None]], int, bytes | None, bytes | None, bool]]
) -> None:
    """All dialects, each in its epochs of one partition, with wide limits and tight ones, and copies among them."""
    rows = []
    for headers, offset, key, value, is_copy in drawn:
        copy = [("delay-copy-origin", b"0"), *((n, str(v).encode()) for n, v in COPY[1:])] if is_copy else []
        rows.append(record(*copy, *headers, topic="mixed", offset=offset, key=key, value=value))
    assert len(decoded(spark, rows, {("mixed", 0): _EPOCHS})) == len(rows)
