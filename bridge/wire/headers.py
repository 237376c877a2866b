"""The header contract: the headers that producers write, those that the bridge reads, and those that it adds. Pure.

Records are decoded by this contract in two places, with equal results: ingest/decode.py for Spark's query, and
ingest/decode_records.py for the plain reader. ingest/finish.py does the second half for both. So two regular-expression
engines use the patterns below, Python's and Java's; the patterns use only syntax with the same meaning in both.

All values of control headers share these rules. They are UTF-8 text. Surrounding
white space (space, tab, CR, LF) is ignored. A time has at most 256 characters. A number has at most 15 digits (10
before a unit other than `ms`), so no sum overflows 64 bits. Fractions of a millisecond are rounded up: a message may be
late, never early.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from bridge.wire.reasons import RejectReason

Headers = list[tuple[str, bytes | None]]
Origin = tuple[str, int, int]
"""Topic, partition and offset of an original record."""
Origins = tuple[str, int, tuple[int, ...]]
"""Topic and partition of original records, and their offsets."""
HeaderList = list[tuple[str, str | bytes | None]]
"""Headers in the type that the client accepts."""

# Written by producers.
UNTIL: Final = "delay-until"
FOR: Final = "delay-for"
LEVEL: Final = "delay-level"
CANCEL: Final = "delay-cancel"
CANCEL_ORIGIN: Final = "delay-cancel-origin"
MOVE: Final = "delay-move"
MOVE_ORIGIN: Final = "delay-move-origin"
REPLY_TO: Final = "delay-reply-to"
CORRELATION: Final = "delay-correlation-id"
TOPIC: Final = "delay-topic"
PARTITION: Final = "delay-partition"
ID: Final = "delay-id"
REPLACE: Final = "delay-replace"
EVERY: Final = "delay-every"
ANCHOR: Final = "delay-anchor"
CRON: Final = "delay-cron"
TIME_ZONE: Final = "delay-time-zone"
END: Final = "delay-end"
TIMES: Final = "delay-times"
MISSED: Final = "delay-missed"

# Written by the bridge on its copies in the delay topic (rolls, retries, moved messages, forwarded commands).
COPY_ORIGIN: Final = "delay-copy-origin"
COPY_DUE: Final = "delay-copy-due"
COPY_ROLLS: Final = "delay-copy-rolls"
COPY_ATTEMPT: Final = "delay-copy-attempt"
COPY_AT: Final = "delay-copy-at"
COPY_TICK: Final = "delay-copy-tick"
COPY_FORWARDED: Final = "delay-copy-forwarded"
"""On a command that the bridge or a client forwarded to other partitions: it must not be forwarded again. The bridge
writes the place of the client's command as the value."""

# Written by the bridge on a held dead letter, which waits in the delay topic until its dead-letter topic accepts it.
HELD: Final = "delay-held"
HELD_PREFIX: Final = "delay-held-"

ESCAPED: Final = "delay-escaped-"
"""In a dead letter, the prefix of a header's name that the client would truncate. The name follows, URL-encoded."""

# Added by the bridge to a delivered message and to a dead letter.
ORIGIN: Final = "delay-origin"
DUE: Final = "delay-due"
TICK: Final = "delay-tick"
REASON: Final = "delay-reason"
REASON_DETAIL: Final = "delay-reason-detail"
ATTEMPTS: Final = "delay-attempts"
OMITTED: Final = "delay-omitted"
"""On a dead letter that its topic did not accept whole: the omitted parts. The complete record is at `ORIGIN` until the
delay topic deletes it."""
DLT_TOPIC: Final = "kafka_dlt-original-topic"
DLT_PARTITION: Final = "kafka_dlt-original-partition"
DLT_OFFSET: Final = "kafka_dlt-original-offset"
DLT_TIMESTAMP: Final = "kafka_dlt-original-timestamp"
DLT_MESSAGE: Final = "kafka_dlt-exception-message"
REDRIVEN: Final = "delay-redriven"
"""The only header of a redriven record: in a dead-letter topic, it names the earlier letters that have gone back."""

# Written by the bridge on an answer to a command, beside the correlation id.
OUTCOME: Final = "delay-outcome"
COMMAND: Final = "delay-command"
COUNT: Final = "delay-count"

COMMANDS: Final = (CANCEL, CANCEL_ORIGIN, MOVE, MOVE_ORIGIN)
"""The headers that make a record a command and not a message. A record has at most one of them."""
SCHEDULE: Final = (EVERY, ANCHOR, CRON, TIME_ZONE, END, TIMES, MISSED)
REQUEST: Final = (UNTIL, FOR, LEVEL, *COMMANDS, REPLY_TO, CORRELATION, TOPIC, PARTITION, ID, REPLACE, *SCHEDULE)
COPY: Final = (COPY_ORIGIN, COPY_DUE, COPY_ROLLS, COPY_ATTEMPT, COPY_AT, COPY_TICK, COPY_FORWARDED)
DELIVERED: Final = (ORIGIN, DUE, TICK)
CONTROL: Final = REQUEST + COPY
"""The headers that the bridge reads; each at most once in a record."""
STRIPPED: Final = CONTROL + DELIVERED
"""The headers that are removed before delivery. `DELIVERED` is among them, unread: a consumer that schedules a
delivered message again would otherwise get two origins, and might read the wrong one."""

WHITE_SPACE: Final = " \t\r\n"
TIME_LENGTH_MAX: Final = 256
ID_LENGTH_MAX: Final = 256
UNTIL_MS_MAX: Final = 253_402_300_799_999  # the last millisecond of the year 9999
NEVER_MS: Final = UNTIL_MS_MAX
"""Due time of a paused recurring message; in a move, `delay-until: never`."""
NEXT_MS: Final = UNTIL_MS_MAX - 1
"""In a move, `delay-until: next`: resume a recurring message at its next regular tick."""
AS_DUE_MS: Final = UNTIL_MS_MAX - 3
"""In a move, `delay-until: due`: retry a due message now whose delivery was postponed. Its due time stays."""
MOVED_TO: Final = {"never": NEVER_MS, "next": NEXT_MS, "due": AS_DUE_MS}
PAST_MS_MAX: Final = 3_653 * 86_400_000
"""A due time more than ten years ago is refused. It is probably in seconds: as milliseconds that is in 1970, and the
message would be delivered at once by mistake."""
_SECONDS_MAX: Final = (
    100_000_000_000  # epoch numbers below it are 1973 as milliseconds, but up to the year 5138 as seconds
)

NUMBER_PATTERN: Final = "[0-9]{1,15}"
ONE_UNIT_PATTERN: Final = "[0-9]{1,10}(?:ms|[smhd])"
INSTANT_PATTERN: Final = (  # RFC 3339, years 1980 to 9999, a blank allowed for the T, without leap seconds
    r"((?:19[89]|[2-9][0-9]{2})[0-9])-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[Tt ]"
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])(?:\.([0-9]+))?(?:[Zz]|([+-])(0[0-9]|1[0-7]):([0-5][0-9]))"
)
UNITS_PATTERN: Final = (  # groups: d h m s ms
    "(?=[0-9])(?:([0-9]{1,10})d)?(?:([0-9]{1,10})h)?(?:([0-9]{1,10})m)?(?:([0-9]{1,10})s)?(?:([0-9]{1,15})ms)?"
)
ISO_PATTERN: Final = (  # groups: W D H M S fraction; years and months have no fixed length and are refused
    r"P(?=[0-9T])(?:([0-9]{1,10})W)?(?:([0-9]{1,10})D)?"
    r"(?:T(?=[0-9])(?:([0-9]{1,10})H)?(?:([0-9]{1,10})M)?(?:([0-9]{1,10})(?:\.([0-9]+))?S)?)?"
)
TOPIC_PATTERN: Final = r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}"
ORIGIN_PATTERN: Final = r"([a-zA-Z0-9._-]{1,249})/([0-9]{1,9})/([0-9]{1,15})"
NAMED_MAX: Final = 100
"""Limit of messages of one partition in a cancel by origin."""
MOVED_MAX: Final = 20
"""The limit in a move by origin of an earlier version; a move names one message now."""
ORIGINS_PATTERN: Final = ORIGIN_PATTERN[:-1] + f"(?:,[0-9]{{1,15}}){{0,{NAMED_MAX - 1}}})"
MOVED_PATTERN: Final = ORIGIN_PATTERN[:-1] + f"(?:,[0-9]{{1,15}}){{0,{MOVED_MAX - 1}}})"

UNITS_MS: Final = (86_400_000, 3_600_000, 60_000, 1_000, 1)
ISO_MS: Final = (604_800_000, 86_400_000, 3_600_000, 60_000, 1_000)


# -- reading: each function raises ValueError with a sentence that describes the mistake -----------------------------


def text_of(value: bytes | None) -> str:
    """The text of a header's value without surrounding white space."""
    if value is None:
        raise ValueError("the value is null")
    try:
        return value.decode("utf-8").strip(WHITE_SPACE)
    except UnicodeDecodeError:
        raise ValueError("the value is not UTF-8") from None


def parse_until(text: str) -> int:
    """Epoch milliseconds of a number or an RFC 3339 time (`2027-01-31T08:00:00.5+08:00`), rounded up."""
    text = _time_text(text)
    until_ms = int(text) if re.fullmatch(NUMBER_PATTERN, text) else _instant_ms(text)
    if until_ms > UNTIL_MS_MAX:
        raise ValueError(f"{text!r} lies beyond the year 9999; it looks like micro- or nanoseconds")
    return until_ms


def check_until(until_ms: int, now_ms: int) -> int:
    """Return `until_ms`, or raise ValueError if it is more than ten years before `now_ms`."""
    if until_ms < now_ms - PAST_MS_MAX:
        seconds = "; it looks like seconds, epoch milliseconds are needed" if until_ms < _SECONDS_MAX else ""
        raise ValueError(f"{until_ms} lies more than ten years in the past{seconds}")
    return until_ms


def parse_duration(text: str) -> int:
    """Milliseconds of `250ms`, `90s`, `1h30m`, `7d`, `PT15M`, `P1DT2H`, or of a bare number, rounded up."""
    text = _time_text(text)
    if re.fullmatch(NUMBER_PATTERN, text):
        return int(text)
    if match := re.fullmatch(UNITS_PATTERN, text):
        return _sum_ms(match.groups(), UNITS_MS)
    if match := re.fullmatch(ISO_PATTERN, text):
        *whole, fraction = match.groups()
        return _sum_ms(whole, ISO_MS) + _fraction_ms(fraction)
    raise ValueError(
        f"{text!r} is not a duration; write milliseconds, or numbers with the units d h m s ms in this order (1h30m), "
        "or ISO 8601 without years and months (PT15M)"
    )


def parse_levels(text: str) -> tuple[int, ...]:
    """Milliseconds of each level in `1s 5s 10s 30s 1m`, level 1 first."""
    levels_ms = tuple(parse_duration(part) for part in text.split())
    if not levels_ms:
        raise ValueError("there is no level; write durations with blanks between them, such as 1s 5s 10s")
    return levels_ms


def parse_level(text: str, levels_ms: Sequence[int]) -> int:
    """Milliseconds of level 1..n; a number beyond n means n."""
    level = parse_whole(text)
    if level < 1:
        raise ValueError("levels start at 1")
    return levels_ms[min(level, len(levels_ms)) - 1]


def parse_partition(text: str) -> int:
    """A partition's number, 0..2147483647."""
    partition = parse_whole(text)
    if partition > 2**31 - 1:
        raise ValueError(f"{partition} is beyond 2147483647")
    return partition


def parse_times(text: str) -> int:
    """A largest number of ticks, 1..2147483647."""
    times = parse_whole(text)
    if not 1 <= times <= 2**31 - 1:
        raise ValueError(f"{times} is not in 1..2147483647")
    return times


def parse_replace(text: str) -> bool:
    """`true` or `false`, in any case."""
    text = text.strip(WHITE_SPACE)
    if not re.fullmatch("true|false", text, re.IGNORECASE | re.ASCII):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def check_topic(name: str) -> str:
    """The name of a topic without surrounding white space. Raises ValueError."""
    name = name.strip(WHITE_SPACE)
    if not re.fullmatch(TOPIC_PATTERN, name):
        raise ValueError(f"{name!r} is not a topic name: 1 to 249 of a-z A-Z 0-9 . _ -, and neither . nor ..")
    return name


def parse_origin(text: str) -> Origin:
    """Topic, partition and offset of `topic/partition/offset`."""
    match = re.fullmatch(ORIGIN_PATTERN, text.strip(WHITE_SPACE))
    if match is None:
        raise ValueError(f"{text!r} is not topic/partition/offset of a record")
    topic, partition, offset = match.groups()
    return topic, int(partition), int(offset)


def parse_origins(text: str) -> Origins:
    """Topic, partition and offsets of `topic/partition/offset,offset...`; the offsets sorted and unique."""
    match = re.fullmatch(ORIGINS_PATTERN, text.strip(WHITE_SPACE))
    if match is None:
        raise ValueError(f"{text!r} is not topic/partition/offset of a record, or of up to {NAMED_MAX} of a partition")
    topic, partition, offsets = match.groups()
    return topic, int(partition), tuple(sorted(set(map(int, offsets.split(",")))))


def check_id(id: str) -> str:
    """An id without surrounding white space. Raises ValueError."""
    id = id.strip(WHITE_SPACE)
    if not 1 <= len(id) <= ID_LENGTH_MAX:
        raise ValueError(f"an id has 1 to {ID_LENGTH_MAX} characters, this one {len(id)}")
    try:
        id.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("an id must be writable as UTF-8") from None
    return id


# -- writing: the producer's side ------------------------------------------------------------------------------------


def timer_headers(
    topic: str | None,
    *,
    at: datetime | int | None = None,
    after: timedelta | None = None,
    id: str | None = None,
    replace: bool = False,
    partition: int | None = None,
    now_ms: int | None = None,
    schedule: Mapping[str, str] | None = None,
) -> list[tuple[str, bytes]]:
    """The control headers of a message for `topic` (None: the delay topic's default target).

    `at` is an aware datetime or epoch milliseconds; `after` counts from the broker's timestamp of the record. Give
    exactly one of them, or at most one with a `schedule` (`Schedule.texts`), which does not begin before that time.
    With `now_ms`, a time more than ten years before it is refused here and not by the bridge. Raises ValueError,
    TypeError.
    """
    texts = [] if at is None and after is None and schedule is not None else [time_header(at, after, now_ms)]
    if replace and id is None:
        raise ValueError("replace needs the id of the message that it replaces")
    if partition is not None and not 0 <= partition < 2**31:
        raise ValueError(f"partition {partition} is not in 0..2147483647")
    names = (
        (TOPIC, None if topic is None else check_topic(topic)),
        (PARTITION, partition),
        (ID, None if id is None else check_id(id)),
        (REPLACE, "true" if replace else None),
    )
    return encoded([*texts, *_present(*names), *(schedule or {}).items()])


def refuse_control(names: Iterable[str]) -> None:
    """Raise ValueError for a control header among a message's own headers (the bridge would read or remove it), and for
    the names that `refuse_unwritable` refuses."""
    given = set(names)
    taken = sorted(given & set(STRIPPED))
    if taken:
        raise ValueError(f"{', '.join(taken)} belong to the delay bridge; give them as arguments, not as headers")
    refuse_unwritable(given)


def refuse_unwritable(names: Iterable[str]) -> None:
    """Raise ValueError for a header's name that the client would cut at a NUL, or cannot encode."""
    for name in sorted(names):
        if "\0" in name:
            raise ValueError(f"{name!r} is not a valid header name: it contains NUL, and the client would cut it there")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name!r} is not a valid header name: it must be writable as UTF-8") from None


# -- writing: the bridge's side --------------------------------------------------------------------------------------


def origin_text(topic: str, partition: int, origin: int) -> str:
    """`topic/partition/offset` of the first record: a key for deduplication that no roll or retry changes."""
    return f"{topic}/{partition}/{origin}"


def origins_text(topic: str, partition: int, origins: Iterable[int]) -> str:
    """`topic/partition/offset,offset...` of records of one partition."""
    return f"{topic}/{partition}/{','.join(map(str, origins))}"


def copy_headers(
    *,
    origin: int,
    due_ms: int,
    rolls: int,
    attempt: int,
    target: str | None,
    at_ms: int | None = None,
    partition: int | None = None,
    id: str | None = None,
    tick: int | None = None,
    schedule: Mapping[str, str] | None = None,
) -> list[tuple[str, bytes]]:
    """The control headers of a copy, which follow the timer's own headers.

    `target` is the resolved target, since the default may change before the copy is read; None: no default is left. The
    original has already done the cancelling half of a replace, so a copy has no delay-replace.
    """
    counts = ((COPY_ROLLS, min(rolls, 32_767)), (COPY_ATTEMPT, min(attempt, 32_767)))
    named = ((TOPIC, target), (COPY_AT, at_ms), (PARTITION, partition), (ID, id), (COPY_TICK, tick))
    texts = _present((COPY_ORIGIN, origin), (COPY_DUE, due_ms), *counts, *named)
    return encoded([*texts, *(schedule or {}).items()])


class Where(NamedTuple):
    """The place of a record in a delay topic, and its origin offset (its own offset for an original)."""

    topic: str
    partition: int
    offset: int
    origin: int
    ts_ms: int


def dead_letter_headers(
    original: Headers, reason: RejectReason, detail: str, where: Where, attempts: int = 0
) -> Headers:
    """The headers of a dead letter: first the original headers, byte for byte, then the reason and the origin.
    `attempts` counts the attempts to deliver it.

    The `kafka_dlt-*` names and encodings (integers big-endian) are Spring's, so Spring's tools understand them. A name
    that the client would cut at a NUL is written as `delay-escaped-` and the URL-encoded name.
    """
    return [
        *((_escaped(name), value) for name, value in original),
        (REASON, reason.value.encode()),
        (REASON_DETAIL, detail.encode("utf-8", "replace")),
        *([(ATTEMPTS, str(attempts).encode())] if attempts else []),
        *provenance(where),
        (DLT_MESSAGE, f"{reason.value}: {detail}".encode("utf-8", "replace")),
    ]


def provenance(where: Where) -> Headers:
    """The headers with the origin of a dead letter."""
    return [
        (ORIGIN, origin_text(where.topic, where.partition, where.origin).encode()),
        (DLT_TOPIC, where.topic.encode()),
        (DLT_PARTITION, struct.pack(">i", where.partition)),
        (DLT_OFFSET, struct.pack(">q", where.offset)),
        (DLT_TIMESTAMP, struct.pack(">q", where.ts_ms)),
    ]


def _escaped(name: str) -> str:
    return ESCAPED + quote(name, safe="") if "\0" in name or name.startswith(ESCAPED) else name


def unescaped(name: str) -> str:
    """The original name of a header in a dead letter."""
    return unquote(name.removeprefix(ESCAPED)) if name.startswith(ESCAPED) else name


def _time_text(text: str) -> str:
    text = text.strip(WHITE_SPACE)
    if len(text) > TIME_LENGTH_MAX:
        raise ValueError(f"longer than {TIME_LENGTH_MAX} characters")
    return text


def _instant_ms(text: str) -> int:
    match = re.fullmatch(INSTANT_PATTERN, text)
    if match is None:
        raise ValueError(
            f"{text!r} is neither epoch milliseconds nor RFC 3339; "
            "write 2027-01-31T08:00:00+08:00 or ...Z, with the zone"
        )
    *parts, fraction, sign, hours, minutes = match.groups()
    year, month, day, hour, minute, second = map(int, parts)
    local = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    zone = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    return (local - datetime(1970, 1, 1, tzinfo=UTC) - zone) // timedelta(milliseconds=1) + _fraction_ms(fraction)


def _fraction_ms(digits: str | None) -> int:
    """Milliseconds of a second's decimal digits, rounded up."""
    if not digits:
        return 0
    return int(digits[:3].ljust(3, "0")) + (digits[3:].strip("0") != "")


def _sum_ms(numbers: Iterable[str | None], units_ms: Iterable[int]) -> int:
    return sum(int(number or 0) * unit_ms for number, unit_ms in zip(numbers, units_ms, strict=True))


def parse_whole(text: str) -> int:
    """A whole number of at most 15 digits. Raises ValueError."""
    text = text.strip(WHITE_SPACE)
    if not re.fullmatch(NUMBER_PATTERN, text):
        raise ValueError(f"{text!r} is not a whole number of at most 15 digits")
    return int(text)


def time_header(at: datetime | int | None, after: timedelta | None, now_ms: int | None) -> tuple[str, str]:
    """The header of a time; arguments as for `timer_headers`."""
    if at is not None and after is None:
        return UNTIL, str(epoch_ms(at, now_ms))
    if after is not None and at is None:
        return FOR, str(_after_ms(after))
    raise ValueError("give either at or after")


def epoch_ms(at: datetime | int, now_ms: int | None = None) -> int:
    """Epoch milliseconds of an aware datetime or of an int, rounded up. Raises ValueError, TypeError."""
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            raise ValueError(f"at={at.isoformat()} has no time zone; write datetime(..., tzinfo=UTC) or .astimezone()")
        at_ms = -((datetime(1970, 1, 1, tzinfo=UTC) - at) // timedelta(milliseconds=1))  # rounded up: never early
    elif isinstance(at, bool) or not isinstance(at, int):
        raise TypeError(f"at={at!r} is neither an aware datetime nor an int of epoch milliseconds")
    else:
        at_ms = at
    if at_ms < _SECONDS_MAX:
        raise ValueError(f"at={at!r} looks like seconds; epoch milliseconds are needed, perhaps {at_ms * 1000}")
    if at_ms > UNTIL_MS_MAX:
        raise ValueError(f"at={at!r} looks like micro- or nanoseconds; epoch milliseconds are needed")
    return at_ms if now_ms is None else check_until(at_ms, now_ms)


def _after_ms(after: timedelta) -> int:
    if not isinstance(after, timedelta):
        raise TypeError(f"after={after!r} is not a timedelta")
    if after < timedelta(0):
        raise ValueError(f"after={after} is negative")
    return -(-after // timedelta(milliseconds=1))  # rounded up: never early


def _present(*headers: tuple[str, str | int | None]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in headers if value is not None]


def encoded(texts: Iterable[tuple[str, str]]) -> list[tuple[str, bytes]]:
    """The headers as UTF-8 bytes, for the client."""
    return [(name, text.encode("utf-8")) for name, text in texts]
