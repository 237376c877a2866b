"""Records of delay topics, and their decoded rows, written by hand: the judge of both engines
(tests/spark/test_decode.py runs Spark's, tests/unit/bridge/ingest/test_decode_records.py Python's, without a JVM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs, DecodeParameters
from bridge.wire.dialects import DIALECTS, NATIVE
from bridge.wire.headers import NEVER_MS, Headers
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record
from timerstore.rows.position import AT_MIN

TS = 1_800_000_000_000
DAY = 86_400_000
OFFSET = 1_000
PARAMETERS = DecodeParameters(max_delay_ms=3650 * DAY, roll_window_ms=7 * DAY, has_default_target=False)
ONE: Mapping[tuple[str, int], DecodeEpochs] = {("delay", 0): (DecodeEpoch(offset=0, parameters=PARAMETERS),)}
Row = dict[str, Any]
Some = Sequence[tuple[str, str | bytes | None]]
Reject = tuple[RejectReason, Some]


def record(*headers: tuple[str, str | bytes | None], **columns: Any) -> Row:
    """A record as the Kafka source gives it; header values may be written as text."""
    values = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
    row = {"key": b"k", "value": b"v", "topic": "delay", "partition": 0, "offset": OFFSET, "ts": TS, "timestampType": 1}
    return {**row, "headers": values or None, **columns}


def as_record(row: Mapping[str, Any]) -> Record:
    """The same record as a consumer gives it."""
    return Record(
        topic=row["topic"],
        partition=row["partition"],
        offset=row["offset"],
        ts=row["ts"],
        by_broker=row["timestampType"] == 1,
        key=row["key"],
        value=row["value"],
        headers=list(row["headers"] or []),
    )


def pairs(headers: list[dict[str, Any]] | None) -> Headers | None:
    return [(header["key"], header["value"]) for header in headers] if headers else None


FOR = ("delay-for", "1s")
TO = ("delay-topic", "orders")
COPY = (
    ("delay-copy-origin", "5"),
    ("delay-copy-due", str(TS + 9)),
    ("delay-copy-rolls", "2"),
    ("delay-copy-attempt", "3"),
)


def without(name: str, *more: tuple[str, str | bytes | None]) -> Some:
    return [TO, *(header for header in COPY if header[0] != name), *more]


def each(reason: RejectReason, name: str, *texts: str | bytes | None, beside: Some = (TO,)) -> list[Reject]:
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
    *each(RejectReason.BAD_UNTIL, "delay-until", "-1", "1801353600", "", None, b"\xff", "9" * 40, "soon", "٣"),
    *each(RejectReason.BAD_UNTIL, "delay-until", "2027-01-31T08:00:00", "2027-02-30T08:00:00Z"),
    *each(RejectReason.BAD_UNTIL, "delay-until", "1801353600000\u2028", "1801353600000\x00"),
    *each(RejectReason.BAD_FOR, "delay-for", "-1s", "", None, b"\xc3(", "9" * 99, "P1M", "1.5s", "1s\u0085"),
    *each(RejectReason.BAD_FOR, "delay-for", "1m" * 40_000, "PT" + "1" * 90_000 + "S", "P" * 999),
    *each(RejectReason.BAD_LEVEL, "delay-level", "0", "-1", "", None, b"\xfe", "one", "9" * 16),
    *each(RejectReason.BEYOND_MAX, "delay-for", "3651d", "9999999999d9999999999h", "P9999999999W"),
    *each(RejectReason.BEYOND_MAX, "delay-until", "9999-01-01T00:00:00Z"),
    (RejectReason.NO_TARGET, [FOR]),
    (RejectReason.NO_TARGET, [*COPY]),
    *each(RejectReason.BAD_TARGET, "delay-topic", "", None, "a/b", "..", ".", "a" * 250, b"a\xff", beside=[FOR]),
    *each(RejectReason.BAD_PARTITION, "delay-partition", "-1", "", None, "2147483648", b"\xff", beside=[FOR, TO]),
    *each(RejectReason.BAD_ID, "delay-id", "", " ", None, b"a\xff", "x" * 257, b"\xed\xa0\x80", beside=[FOR, TO]),
    *each(RejectReason.BAD_ID, "delay-cancel", "", None, b"\xff", "x" * 257),
    *each(RejectReason.BAD_ORIGIN, "delay-cancel-origin", "", None, b"\xff", "delay/0", "delay/0/-1", "delay/0/5/6"),
    *each(RejectReason.BAD_ORIGIN, "delay-cancel-origin", "delay/0/5,", "delay/0/5,,6", "delay/0/5, 6", "delay/0/,5"),
    *each(RejectReason.BAD_ORIGIN, "delay-cancel-origin", "delay/0/" + ",".join(map(str, range(101)))),
    *each(RejectReason.BAD_ORIGIN, "delay-cancel-origin", "a b/0/5", "delay/0/٣", "delay//5", "delay/0/" + "9" * 16),
    (RejectReason.TWO_TIMES, [("delay-cancel-origin", "delay/0/5"), ("delay-cancel", "a")]),
    *each(RejectReason.BAD_COPY, "delay-cancel-origin", "delay/0/5", beside=[*COPY, TO]),
    *each(RejectReason.BAD_REPLACE, "delay-replace", "", None, "1", b"\xff", beside=[FOR, TO, ("delay-id", "a")]),
    *each(RejectReason.BAD_REPLACE, "delay-replace", "true", beside=[FOR, TO]),
    *((RejectReason.BAD_COPY, without(name)) for name, _ in COPY[1:]),
    *((RejectReason.BAD_COPY, without(name, (name, "-1"))) for name, _ in COPY),
    *((RejectReason.BAD_COPY, without(name, (name, "x"))) for name, _ in COPY),
    (RejectReason.BAD_COPY, without("delay-copy-origin", ("delay-copy-origin", str(OFFSET)))),
    (RejectReason.BAD_COPY, without("delay-copy-due", ("delay-copy-due", str(TS + 3651 * DAY)))),
    (RejectReason.BAD_COPY, without("delay-copy-rolls", ("delay-copy-rolls", "32768"))),
    *each(RejectReason.BAD_COPY, "delay-for", "1s", beside=[*COPY, TO]),
    *each(RejectReason.BAD_COPY, "delay-cancel", "a", beside=[*COPY, TO]),
    *each(RejectReason.BAD_COPY, "delay-replace", "true", beside=[*COPY, TO, ("delay-id", "a")]),
    *each(RejectReason.BAD_COPY, "delay-copy-at", "x", beside=[*COPY, TO]),
    *each(RejectReason.BAD_COPY, "delay-copy-tick", "", None, "-1", "x", "2147483648", beside=[*COPY, TO]),
    *each(RejectReason.BAD_COPY, "delay-every", "1h", beside=[*COPY, TO]),
    *each(
        RejectReason.BAD_COPY,
        "delay-copy-due",
        str(TS + 3661 * DAY),
        beside=[TO, ("delay-cron", "x"), ("delay-copy-tick", "1"), *(pair for pair in COPY if "due" not in pair[0])],
    ),
    *each(RejectReason.TWO_TIMES, "delay-every", "1h", beside=[TO, ("delay-cron", "0 9 * * *")]),
    *each(RejectReason.TWO_TIMES, "delay-every", "1h", beside=[TO, ("delay-level", "1")]),
    *each(RejectReason.TWO_TIMES, "delay-cron", "0 9 * * *", beside=[("delay-cancel", "a")]),
    *each(RejectReason.TWO_TIMES, "delay-cron", "0 9 * * *", beside=[("delay-cancel-origin", "delay/0/5")]),
    *each(RejectReason.TWO_TIMES, "delay-every", "1h", beside=[TO, FOR, ("delay-until", str(TS))]),
    *each(RejectReason.BAD_SCHEDULE, "delay-time-zone", "UTC", beside=[TO, FOR]),
    *each(RejectReason.BAD_SCHEDULE, "delay-end", str(TS), beside=[TO, FOR]),
    *each(RejectReason.BAD_SCHEDULE, "delay-times", "3", beside=[TO, FOR]),
    *each(RejectReason.BAD_SCHEDULE, "delay-missed", "all", beside=[("delay-cancel", "a")]),
    *each(RejectReason.BAD_SCHEDULE, "delay-every", None, b"\xff", "1" * 257, beside=[TO]),
    *each(RejectReason.BAD_SCHEDULE, "delay-end", None, b"\xff", beside=[TO, ("delay-every", "1h")]),
    *each(RejectReason.BAD_FOR, "delay-for", "x", beside=[TO, ("delay-every", "1h")]),
    *each(RejectReason.NO_TARGET, "delay-every", "1h", beside=[]),
    *each(RejectReason.BAD_COPY, "delay-move", "a", beside=[*COPY, TO]),
    *each(RejectReason.NO_TIME, "delay-move", "a", beside=[]),
    *each(RejectReason.NO_TIME, "delay-move-origin", "delay/0/5", beside=[("delay-cancel-x", "1")]),
    (RejectReason.TWO_TIMES, [FOR, ("delay-move", "a"), ("delay-level", "1")]),
    (RejectReason.TWO_TIMES, [FOR, ("delay-move", "a"), ("delay-move-origin", "delay/0/5")]),
    (RejectReason.TWO_TIMES, [("delay-cancel", "a"), ("delay-move", "a")]),
    (RejectReason.TWO_TIMES, [("delay-cancel-origin", "delay/0/5"), ("delay-move-origin", "delay/0/5")]),
    *each(RejectReason.BAD_FOR, "delay-for", "soon", beside=[("delay-move", "a")]),
    *each(RejectReason.BEYOND_MAX, "delay-for", "3651d", beside=[("delay-move", "a")]),
    *each(RejectReason.BAD_UNTIL, "delay-until", "never", "next", "due", beside=[TO]),
    *each(RejectReason.BAD_UNTIL, "delay-until", "nevermore", "ne", beside=[("delay-move", "a")]),
    *each(RejectReason.BEYOND_MAX, "delay-until", "9999-12-31T23:59:59.997Z", beside=[("delay-move", "a")]),
    *each(RejectReason.BAD_SCHEDULE, "delay-anchor", str(TS), beside=[TO, FOR]),
    *each(
        RejectReason.BAD_COPY,
        "delay-copy-due",
        "253402300799999",
        beside=[TO, *(pair for pair in COPY if "due" not in pair[0])],
    ),
    *each(RejectReason.BAD_ID, "delay-move", "", None, b"\xff", "x" * 257, beside=[FOR]),
    *each(RejectReason.BAD_ORIGIN, "delay-move-origin", "", None, b"\xff", "delay/0", beside=[FOR]),
    *each(RejectReason.BAD_REPLY, "delay-reply-to", "", None, "a/b", b"\xff", beside=[("delay-cancel", "a")]),
    *each(RejectReason.BAD_REPLY, "delay-correlation-id", None, b"\xff", "x" * 257, beside=[("delay-cancel", "a")]),
    *each(RejectReason.BAD_REPLY, "delay-reply-to", "..", beside=[FOR, ("delay-move-origin", "delay/0/5")]),
]

RECURRING: list[tuple[Some, dict[str, Any]]] = [
    (
        [("delay-every", " 1h "), TO],
        {"at": TS, "due": TS, "schedule": '{"every":"1h"}', "tick": 0, "headers": None, "kind": 0},
    ),
    (
        [("x", "1"), ("delay-cron", "0 9 * * *"), ("delay-time-zone", "Europe/Berlin"), TO],
        {"at": TS, "schedule": '{"cron":"0 9 * * *","time-zone":"Europe/Berlin"}', "headers": [("x", b"1")]},
    ),
    (
        [("delay-cron", "nonsense \u00e9"), ("delay-until", str(TS + 9 * DAY)), ("delay-missed", ""), TO],
        {"at": TS, "due": TS + 9 * DAY, "schedule": '{"cron":"nonsense \u00e9","missed":"","given":true}'},
    ),
    (
        [("delay-every", "1h"), FOR, ("delay-end", "1"), ("delay-times", "9"), ("delay-id", "a"), TO],
        {"at": TS, "due": TS + 1000, "id": "a", "schedule": '{"every":"1h","end":"1","times":"9","given":true}'},
    ),
    (
        [*COPY, TO, ("delay-every", "1h"), ("delay-copy-tick", "2147483647")],
        {"at": TS + 9, "due": TS + 9, "tick": 2147483647, "schedule": '{"every":"1h","given":true}', "origin": 5},
    ),
    (
        [TO, *(p for p in COPY if "due" not in p[0]), ("delay-copy-due", str(TS + 3655 * DAY)),
         ("delay-cron", "0 9 29 2 *"), ("delay-copy-tick", "1")],
        {"due": TS + 3655 * DAY, "tick": 1},
    ),
    (
        [TO, *(p for p in COPY if "due" not in p[0]), ("delay-copy-due", "253402300799999"),
         ("delay-every", "1h"), ("delay-anchor", "9"), ("delay-copy-tick", "3")],
        {"due": NEVER_MS, "tick": 3, "schedule": '{"every":"1h","anchor":"9","given":true}'},
    ),
    ([*COPY, TO, ("delay-copy-tick", "7")], {"at": TS + 9, "tick": 7, "schedule": None, "headers": None}),
]  # fmt: skip


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


def rejected(row: Row, reason: RejectReason) -> Row:
    kept = {name: row[name] for name in ("topic", "partition", "offset", "ts", "key", "value", "headers")}
    nothing = dict.fromkeys(("target", "target_partition", "id"))
    numbers = {"due": row["ts"], "at": AT_MIN, "kind": 2, "origin": row["offset"], "attempt": 0, "rolls": 0}
    numbers["tick"] = 0
    return {**kept, **nothing, **numbers, "replace": False, "reason": reason.value, "schedule": None}


# -- other schedulers' headers ---------------------------------------------------------------------------------------

LIMITED = replace(PARAMETERS, headers_max=9, header_bytes_max=1_000)
DIALECT_EPOCHS: dict[tuple[str, int], DecodeEpochs] = {
    (name, 0): (DecodeEpoch(offset=0, parameters=replace(LIMITED, dialect=name, has_default_target=True)),)
    for name in (NATIVE, *DIALECTS)
}
AT = (TS + 60_000) // 1000
DIALECT_TIMERS: list[tuple[str, Some, dict[str, Any]]] = [
    (
        "etf1",
        [("scheduler-epoch", str(AT)), ("scheduler-target-topic", "t"), ("scheduler-target-key", "tk"), ("own", "1")],
        {"due": AT * 1000, "target": "t", "key": b"tk", "id": "k", "replace": True, "headers": [("own", b"1")]},
    ),
    ("etf1", [("scheduler-epoch", str(AT))], {"due": AT * 1000, "target": None, "key": b"k", "id": "k"}),
    ("etf1", [("delay-for", "5s")], {"due": TS + 5_000, "key": b"k", "id": None, "replace": False}),
    (
        "karafka",
        [
            ("schedule_schema_version", "1.0.0"),
            ("schedule_target_epoch", str(AT)),
            ("schedule_source_type", "schedule"),
            ("schedule_target_topic", "t"),
            ("schedule_target_key", "tk"),
            ("schedule_target_partition", "3"),
        ],
        {
            "due": AT * 1000,
            "target": "t",
            "key": b"tk",
            "id": "k",
            "replace": True,
            "target_partition": 3,
            "headers": [],
        },
    ),
    (
        "rocketmq",
        [("TIMER_DELAY_SEC", "9"), ("TIMER_DELAY_MS", "5"), ("REAL_TOPIC", "t")],
        {"due": TS + 9_000, "target": "t"},
    ),
    ("rocketmq", [("TIMER_DELAY_MS", "5"), ("TIMER_DELIVER_MS", "7")], {"due": TS + 5}),
    ("rocketmq", [("TIMER_DELIVER_MS", str(TS + 7)), ("__STARTDELIVERTIME", "1")], {"due": TS + 7}),
    ("rocketmq", [("__STARTDELIVERTIME", str(TS + 8))], {"due": TS + 8, "id": None}),
    ("rocketmq", [("DELAY", "2")], {"due": TS + 5_000}),
    ("wushilin", [("publish-after-ts", str(TS + 11))], {"due": TS + 11, "target": None}),
    ("cesium", [("cesium-delay-by", "12")], {"due": TS + 12}),
    ("cesium", [("cesium-delay-until", str(TS + 13))], {"due": TS + 13}),
    ("rabbitmq", [("x-delay", "14"), ("x-other", "o")], {"due": TS + 14, "headers": [("x-other", b"o")]}),
    ("native", [("x-delay", "14"), ("delay-for", "1s")], {"due": TS + 1_000, "headers": [("x-delay", b"14")]}),
]

DIALECT_REJECTS: list[tuple[str, Some, str]] = [
    ("etf1", [("scheduler-epoch", "soon"), ("scheduler-target-key", "tk")], "bad-until"),
    ("etf1", [("scheduler-epoch", str(AT * 1000))], "bad-until"),
    ("etf1", [("scheduler-target-topic", "t")], "no-time"),
    ("etf1", [("scheduler-epoch", str(AT)), ("scheduler-target-topic", "a/b")], "bad-target"),
    ("karafka", [("schedule_target_epoch", "")], "bad-until"),
    ("rocketmq", [("TIMER_DELAY_SEC", "x"), ("TIMER_DELAY_MS", "5")], "bad-for"),
    ("rocketmq", [("DELAY", "0")], "bad-level"),
    ("wushilin", [("publish-after-ts", str(AT))], "bad-until"),
    ("wushilin", [("publish-after-ts", str(TS)), ("delay-until", str(TS))], "duplicate-header"),
    ("cesium", [("cesium-delay-by", "12"), ("cesium-delay-until", str(TS + 13))], "two-times"),
    ("rabbitmq", [("x-delay", "-1")], "bad-for"),
    ("native", [("x-delay", "14")], "no-time"),
]


FORWARDED = ("delay-copy-forwarded", "etf1/0/9")
KEYED_COMMANDS: list[tuple[Some, dict[str, Any]]] = [
    ([("delay-cancel", "a")], {"kind": 1, "id": "a"}),
    ([("delay-cancel-origin", "{topic}/0/7")], {"kind": 1, "origin": 7, "id": None}),
    ([("delay-move", "a"), ("delay-for", "5s")], {"kind": 3, "id": "a", "due": TS + 5_000}),
    ([("delay-move-origin", "{topic}/0/7,8"), ("delay-for", "5s")], {"kind": 3, "origin": -2, "value": b"7,8"}),
    ([("delay-cancel", "k"), ("delay-reply-to", "r"), FORWARDED], {"kind": 4, "id": "k", "target": "r"}),
    ([("delay-move-origin", "{topic}/0/7"), ("delay-until", str(TS + 9)), FORWARDED], {"kind": 3, "origin": 7}),
    ([FORWARDED], {"kind": 2, "reason": "no-time"}),
    ([("delay-reply-to", "r")], {"kind": 4, "id": "k", "target": "r"}),
    ([("delay-cancel", "a"), ("delay-cancel-origin", "{topic}/0/7")], {"kind": 2, "reason": "two-times"}),
    ([("delay-for", "5s")], {"kind": 2, "reason": "two-times"}),
]
"""Records with a key and no value, in a dialect whose key is the id: native commands are
themselves, and the bridge's own, too; all else cancels the key."""


def keyed_commands(topic: str) -> list[Row]:
    """The records, in a topic."""
    return [
        record(*((name, str(text).format(topic=topic)) for name, text in headers), topic=topic, value=None)
        for headers, _ in KEYED_COMMANDS
    ]


# -- the edges -------------------------------------------------------------------------------------------------------

_HUNDRED = ",".join(str(10**15 - n) for n in range(1, 101))
_TWENTY = ",".join(_HUNDRED.split(",")[:20])
_1980 = 315_532_800_000
_LEAP = 1_835_395_200_000


def _for(text: str | bytes, **columns: Any) -> Row:
    return record(("delay-for", text), TO, **columns)


def _until(text: str, **columns: Any) -> Row:
    return record(("delay-until", text), TO, **columns)


def _due(ts: int, due: int) -> Row:
    return {"kind": 0, "reason": None, "ts": ts, "due": due, "at": due}


def _refused(reason: RejectReason) -> Row:
    return {"kind": 2, "reason": reason.value, "at": AT_MIN}


EDGES: list[tuple[Row, Row]] = [
    # Leap years, the first and the last year, offsets, fractions.
    (_until("2028-02-29T23:59:59.9990000Z", ts=_LEAP), _due(_LEAP, _LEAP + DAY - 1)),
    *(
        (_until(text), _refused(RejectReason.BAD_UNTIL))
        for text in (
            "2027-02-29T00:00:00Z",
            "2028-02-30T00:00:00Z",
            "2100-02-29T00:00:00Z",
            "2027-04-31T00:00:00Z",
            "2027-01-31T24:00:00Z",
            "2027-01-31T23:59:60Z",
            "2027-01-31T08:00:00+18:00",
            "2027-01-31T08:00:00+0800",
            "2027-01-31T08:00:00,5Z",
            "2027-01-31T08:00:00.Z",
            "2027-01-31T08:00:00 Z",
            "9999-12-31T23:59:59.9990001Z",
            "9999-12-31T23:59:59-00:01",
            "10000-01-01T00:00:00Z",
            "253402300800000",
        )
    ),
    (_until("9999-12-31T23:59:59.999Z"), _refused(RejectReason.BEYOND_MAX)),
    (_until("9999-12-31T23:59:59+00:01"), _refused(RejectReason.BEYOND_MAX)),
    (_until("253402300799999"), _refused(RejectReason.BEYOND_MAX)),
    (_until("1980-01-01T00:00:00Z"), _refused(RejectReason.BAD_UNTIL)),
    (_until("1980-01-01T00:00:00-00:00", ts=_1980), _due(_1980, _1980)),
    (_until("1980-01-01T00:00:00+17:59", ts=_1980), _due(_1980, _1980 - 64_740_000)),
    (_until("1979-12-31T23:59:59Z", ts=_1980), _refused(RejectReason.BAD_UNTIL)),
    (_until("2027-01-15T08:00:00." + "9" * 230 + "Z"), _due(TS, TS + 1_000)),
    (_until("2027-01-15T08:00:00." + "0" * 236 + "Z"), _refused(RejectReason.BAD_UNTIL)),
    # Ten years back, and one millisecond more.
    (_until(str(TS - 3653 * DAY)), _due(TS, TS - 3653 * DAY)),
    (_until(str(TS - 3653 * DAY - 1)), _refused(RejectReason.BAD_UNTIL)),
    # Durations.
    (_for("PT0.0001S"), _due(TS, TS + 1)),
    (_for("P1DT0S"), _due(TS, TS + DAY)),
    (_for("1h0ms"), _due(TS, TS + 3_600_000)),
    *(
        (_for(text), _refused(RejectReason.BAD_FOR))
        for text in (
            "P",
            "PT",
            "P1DT",
            "P1Y",
            "PT1.S",
            "PT.5S",
            "p1D",
            "1s1m",
            "1 s",
            "+1s",
            "1S",
            "12345678901s",
            "1" * 16,
        )
    ),
    # White space with and without a meaning; NUL; digits of other scripts.
    (_for("\r\n\t 1s \t\n\r"), _due(TS, TS + 1_000)),
    *(
        (_for(text), _refused(RejectReason.BAD_FOR))
        for text in (
            "\v1s",
            "1s\f",
            "\xa01s",
            "1s\u2028",
            "\ufeff1s",
            "1s\x1c",
            "1s\x00",
            "\x001s",
            "\uff11s",
            b"1s\xff",
            b"\xc0\xb1s",
        )
    ),
    (record(FOR, TO, ("delay-id", "a\x00b")), {"kind": 0, "id": "a\x00b"}),
    (record(FOR, TO, ("delay-id", "\U0001f600" * 256)), {"kind": 0, "id": "\U0001f600" * 256}),
    (record(FOR, TO, ("delay-id", "\U0001f600" * 257)), _refused(RejectReason.BAD_ID)),
    *(
        (record(FOR, TO, ("delay-id", value)), _refused(RejectReason.BAD_ID))
        for value in (
            b"\xc3 ",
            b" \xe2\x80",
            b"\xf4\x90\x80\x80",
            b"\xe0\x80\xa0",
            b"\xed\xa0\x80",
        )
    ),
    (record(FOR, TO, ("delay-replace", "tru\u017f"), ("delay-id", "a")), _refused(RejectReason.BAD_REPLACE)),
    (record(("delay-for\x00", "1s"), TO), _refused(RejectReason.NO_TIME)),
    (record(FOR, TO, ("delay-for\x00", None), ("", b"\xff")), {"headers": [("delay-for\x00", None), ("", b"\xff")]}),
    # A record without headers; and one that is no copy but says when it comes up.
    (record(), _refused(RejectReason.NO_TIME)),
    (record(FOR, TO, ("delay-copy-at", str(TS + 5_000))), {**_due(TS, TS + 1_000), "at": TS + 5_000}),
    (record(FOR, TO, ("delay-copy-at", str(TS + 8 * DAY))), {**_due(TS, TS + 1_000), "at": TS + 7 * DAY}),
    (record(FOR, TO, ("delay-copy-at", "x")), _due(TS, TS + 1_000)),
    # Commands that name several messages; of another partition, or in another way, they are sent on.
    (record(("delay-cancel-origin", " delay/0/7,09,7\n")), {"kind": 1, "origin": -2, "value": b"7,09,7"}),
    (record(("delay-cancel-origin", "delay/00/7,8")), {"kind": 1, "origin": -1, "value": b"v"}),
    (record(("delay-move-origin", "delay/1/7,8"), FOR), {"kind": 3, "origin": -1, "value": b"v"}),
    (record(("delay-cancel-origin", f"delay/0/{_HUNDRED}")), {"kind": 1, "origin": -2, "value": _HUNDRED.encode()}),
    (record(("delay-cancel-origin", f"delay/0/{_HUNDRED},7")), _refused(RejectReason.BAD_ORIGIN)),
    (record(("delay-move-origin", f"delay/0/{_TWENTY}"), FOR), {"kind": 3, "origin": -2, "value": _TWENTY.encode()}),
    (record(("delay-move-origin", f"delay/0/{_TWENTY},7"), FOR), _refused(RejectReason.BAD_ORIGIN)),
    (record(("delay-move-origin", "delay/0/7,8"), ("delay-for", "x")), {"kind": 2, "origin": OFFSET, "value": b"v"}),
    # Timestamps before 1970.
    (_for("1s", ts=0), _due(0, 1_000)),
    (_for("1s", ts=-5), _due(-5, 995)),
    (_until("0", ts=-5), _due(-5, 0)),
    (_for("1s", ts=-1, timestampType=0), {**_refused(RejectReason.CREATE_TIME), "ts": -1, "due": -1}),
    # Beyond the window: xxhash64 of (topic, partition, offset) above and below 0.
    (_for("30d"), {"at": TS + 483_561_926, "due": TS + 30 * DAY}),
]
"""Records, and columns that they decode to."""
