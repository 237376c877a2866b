"""The header contract without Spark: what is read, what is refused, and what is written."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.wire import headers as h
from bridge.wire.commands import cancel_headers, move_headers, move_origin_headers
from bridge.wire.reasons import RejectReason

DAY = 86_400_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1801353600000", 1_801_353_600_000),
        (" \t1801353600000\r\n", 1_801_353_600_000),
        ("2027-01-31T08:00:00Z", 1_801_382_400_000),
        ("2027-01-31t08:00:00z", 1_801_382_400_000),
        ("2027-01-31 08:00:00Z", 1_801_382_400_000),
        ("2027-01-31T08:00:00+08:00", 1_801_353_600_000),
        ("2027-01-31T08:00:00-08:30", 1_801_413_000_000),
        ("2027-01-31T08:00:00-00:00", 1_801_382_400_000),
        ("2027-01-31T08:00:00.5Z", 1_801_382_400_500),
        ("2027-01-31T08:00:00.123Z", 1_801_382_400_123),
        ("2027-01-31T08:00:00.1230001Z", 1_801_382_400_124),
        ("2027-01-31T08:00:00.000000000000000000001Z", 1_801_382_400_001),
        ("2027-01-31T08:00:00.9999Z", 1_801_382_401_000),
        ("2028-02-29T00:00:00Z", 1_835_395_200_000),
        ("9999-12-31T23:59:59.999Z", h.UNTIL_MS_MAX),
    ],
)
def test_until_is_epoch_milliseconds_or_rfc_3339_rounded_up(text: str, ms: int) -> None:
    """Every form of an absolute time is understood, and none comes out early."""
    assert h.parse_until(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-1", "+1", "1.5", "1e12", "1_000", "soon", "1234567890123456", "9" * 400, "253402300800000", "١٢٣"),
        *("2027-01-31T08:00:00", "2027-01-31", "2027-1-31T08:00:00Z", "2027-02-30T08:00:00Z", "2027-01-31T24:00:00Z"),
        *("2027-01-31T08:00:60Z", "2027-01-31T08:00Z", "2027-01-31T08:00:00.Z", "2027-01-31T08:00:00,5Z"),
        *("0000-01-01T00:00:00Z", "1979-12-31T00:00:00Z", "9999-12-31T23:59:59.9999Z", "2027-01-31T08:00:00 Z"),
        *("2027-01-31T08:00:00+0800", "2027-01-31T08:00:00+18:00", "2027-01-31T08:00:00." + "0" * 300 + "Z"),
    ],
)
def test_what_is_not_an_absolute_time_is_refused(text: str) -> None:
    """No zone, no such day, no number: refused rather than guessed."""
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        h.parse_until(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1500", 1_500),
        ("250ms", 250),
        ("90s", 90_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("7d", 7 * DAY),
        ("1h30m", 5_400_000),
        ("1d2h3m4s5ms", DAY + 7_384_005),
        ("1m5ms", 60_005),
        ("PT15M", 900_000),
        ("P1DT2H", DAY + 7_200_000),
        ("P2W", 14 * DAY),
        ("PT0.5S", 500),
        ("PT0.0001S", 1),
        ("PT1.9999S", 2_000),
        ("PT1H0.001S", 3_600_001),
        ("9999999999d", 9_999_999_999 * DAY),
    ],
)
def test_durations(text: str, ms: int) -> None:
    """Units, combinations of them, ISO 8601 and bare milliseconds; fractions are rounded up."""
    assert h.parse_duration(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "-5s", "+5s", "1.5s", "5 s", "1m1h", "1s1s", "5S", "5w", "1y", "99999999999s", "9" * 16, "５s"),
        *("P", "PT", "P1", "P1M", "P1Y", "PT1H30", "-PT1M", "PT-1M", "P1WT", "PT.5S", "PT0.5M", "pt5m"),
        "PT0." + "1" * 300 + "S",
    ],
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    """Negative, out of order, repeated, without fixed length: refused."""
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        h.parse_duration(text)


def test_levels_start_at_one_and_end_at_the_last() -> None:
    """A level beyond the last means the last, as RocketMQ has it."""
    levels = h.parse_levels("1s 5s 2h")
    assert levels == (1_000, 5_000, 7_200_000)
    assert [h.parse_level(text, levels) for text in ("1", " 2 ", "3", "4", "999999999999999")] == [1_000, 5_000] + [
        7_200_000
    ] * 3
    for text in ("0", "-1", "", "x", "1.0", "9" * 16):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            h.parse_level(text, levels)
    with pytest.raises(ValueError, match="no level"):
        h.parse_levels("  ")


def test_seconds_are_called_seconds() -> None:
    """Seconds given as milliseconds lie in 1970: refused, and the message says what they look like."""
    now = 1_800_000_000_000
    assert h.check_until(now - 9 * 365 * DAY, now) == now - 9 * 365 * DAY
    with pytest.raises(ValueError, match="looks like seconds"):
        h.check_until(1_801_353_600, now)


def test_names_ids_partitions_and_replace() -> None:
    """Each reader takes what its header allows and nothing else."""
    assert h.check_topic(" a.b_C-1 ") == "a.b_C-1"
    assert h.check_id(" order 17 é ") == "order 17 é"
    assert h.parse_partition("2147483647") == 2**31 - 1
    assert [h.parse_replace(text) for text in ("true", "TRUE", " False ")] == [True, True, False]
    for read, text in [
        *((h.check_topic, text) for text in ("", ".", "..", "a b", "a/b", "ä", "a" * 250)),
        *((h.check_id, text) for text in ("", "  ", "x" * 257, "\ud800")),
        *((h.parse_partition, text) for text in ("", "-1", "2147483648", "1.0", "9" * 30)),
        *((h.parse_replace, text) for text in ("", "yes", "1", "ſrue")),
    ]:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            read(text)


def test_timer_headers() -> None:
    """What a producer asks for becomes the headers that the bridge reads."""
    at = datetime(2027, 1, 31, 8, 0, 0, 1, tzinfo=timezone(timedelta(hours=8)))
    assert h.timer_headers("orders", at=at, id="a", replace=True, partition=3) == [
        ("delay-until", b"1801353600001"),
        ("delay-topic", b"orders"),
        ("delay-partition", b"3"),
        ("delay-id", b"a"),
        ("delay-replace", b"true"),
    ]
    assert h.timer_headers(None, after=timedelta(microseconds=1)) == [("delay-for", b"1")]
    assert h.timer_headers(None, at=1_801_353_600_000) == [("delay-until", b"1801353600000")]
    assert cancel_headers(" a ") == [("delay-cancel", b"a")]
    assert move_headers("a", after=timedelta(0), forwarded="delay/0/7") == [
        ("delay-move", b"a"),
        ("delay-for", b"0"),
        ("delay-copy-forwarded", b"delay/0/7"),
    ]
    assert move_origin_headers("delay/1/7", at=1_800_000_000_000, reply_to="answers", correlation=" é ") == [
        ("delay-move-origin", b"delay/1/7"),
        ("delay-until", b"1800000000000"),
        ("delay-reply-to", b"answers"),
        ("delay-correlation-id", "é".encode()),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either at or after"),
        ({"at": 1_801_353_600_000, "after": timedelta(1)}, "either at or after"),
        ({"at": datetime(2027, 1, 1)}, "no time zone"),  # noqa: DTZ001
        ({"at": 1_801_353_600}, "looks like seconds.*1801353600000"),
        ({"at": datetime(1970, 1, 2, tzinfo=UTC)}, "looks like seconds"),
        ({"at": 1_801_353_600_000_000}, "looks like micro"),
        ({"at": 900_000_000_000, "now_ms": 1_800_000_000_000}, "ten years"),
        ({"after": timedelta(seconds=-1)}, "negative"),
        ({"after": timedelta(1), "replace": True}, "needs the id"),
        ({"after": timedelta(1), "partition": -1}, "not in 0"),
        ({"after": timedelta(1), "id": ""}, "characters"),
        ({"after": timedelta(1), "topic": "no/topic"}, "not a topic name"),
    ],
)
def test_timer_headers_refuses_eagerly(arguments: dict[str, object], message: str) -> None:
    """A mistake shows where it is made, not in the dead-letter topic."""
    with pytest.raises(ValueError, match=message):
        h.timer_headers(**{"topic": None, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"at": True}, {"at": 1.5e12}, {"at": "now"}, {"after": 5}])
def test_timer_headers_refuses_other_types(arguments: dict[str, object]) -> None:
    """A float of seconds or a bare number for a duration is ambiguous."""
    with pytest.raises(TypeError):
        h.timer_headers(None, **arguments)  # type: ignore[arg-type]


@given(
    st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=36_500)),
    st.datetimes(datetime(1980, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 (wanted so)
)
def test_what_is_written_is_read_back_and_never_early(after: timedelta, at: datetime) -> None:
    """Rounding to milliseconds goes up, by less than one."""
    after_ms = h.parse_duration(h.timer_headers(None, after=after)[0][1].decode())
    assert timedelta(0) <= timedelta(milliseconds=after_ms) - after < timedelta(milliseconds=1)
    at_ms = h.parse_until(h.timer_headers(None, at=at)[0][1].decode())
    assert h.parse_until(at.isoformat()) == at_ms
    assert (
        timedelta(0)
        <= datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms) - at
        < timedelta(milliseconds=1)
    )


def test_control_headers_are_refused_among_a_message_s_own() -> None:
    """A header that the bridge would read or remove cannot slip in."""
    h.refuse_control(["traceparent", "delayed"])
    with pytest.raises(ValueError, match="delay-due, delay-for"):
        h.refuse_control(["delay-for", "x", "delay-due"])


@pytest.mark.parametrize("name", ["a\0b", "delay-for\0", "\ud800"])
def test_a_name_that_the_client_would_cut_or_die_of_is_refused(name: str) -> None:
    """The client takes what is before a NUL for the name, and ends the process for a lone surrogate."""
    with pytest.raises(ValueError, match="is not a valid header name"):
        h.refuse_control(["x", name])


def test_copy_headers() -> None:
    """A copy names all that the original's decoding found."""
    copy = h.copy_headers(origin=17, due_ms=99, rolls=40_000, attempt=2, target="t", at_ms=5, partition=1, id="é")
    assert [name for name, _ in copy[:4]] == [
        "delay-copy-origin",
        "delay-copy-due",
        "delay-copy-rolls",
        "delay-copy-attempt",
    ]
    assert copy[2:] == [
        ("delay-copy-rolls", b"32767"),
        ("delay-copy-attempt", b"2"),
        ("delay-topic", b"t"),
        ("delay-copy-at", b"5"),
        ("delay-partition", b"1"),
        ("delay-id", "é".encode()),
    ]


def test_dead_letter_headers_keep_the_original_ones_first() -> None:
    """The original headers come first and unchanged, then the reason, the origin, and Spring's names."""
    original: h.Headers = [("delay-for", b"\xff"), ("x", None), ("x", b"")]
    where = h.Where(topic="delay", partition=3, offset=17, origin=5, ts_ms=99)
    letter = h.dead_letter_headers(original, RejectReason.BAD_FOR, "why", where)
    assert letter[:3] == original
    assert dict(letter[3:]) == {
        "delay-reason": b"bad-for",
        "delay-reason-detail": b"why",
        "delay-origin": b"delay/3/5",
        "kafka_dlt-original-topic": b"delay",
        "kafka_dlt-original-partition": struct.pack(">i", 3),
        "kafka_dlt-original-offset": struct.pack(">q", 17),
        "kafka_dlt-original-timestamp": struct.pack(">q", 99),
        "kafka_dlt-exception-message": b"bad-for: why",
    }


@pytest.mark.parametrize("name", ["delay-for\0x", "\0", "é\0/%", "delay-escaped-x"])
def test_a_name_that_cannot_be_written_is_read_back_from_its_dead_letter(name: str) -> None:
    """Nothing of it is lost, and nothing of it is taken for another header."""
    where = h.Where(topic="delay", partition=3, offset=17, origin=5, ts_ms=99)
    ((written, value), *_) = h.dead_letter_headers([(name, b"1")], RejectReason.NO_TIME, "why", where)
    assert written.isascii() and "\0" not in written and written.startswith("delay-escaped-")
    assert (h.unescaped(written), value) == (name, b"1")


def test_every_reason_explains_itself_in_a_sentence() -> None:
    """Codes are for machines; each has a sentence for people."""
    for reason in RejectReason:
        assert reason.explanation.endswith(".")
        assert str(reason) == reason.value
