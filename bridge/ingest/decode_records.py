"""A record of a delay topic -> the columns of an entry, in Python: the counterpart of decode.py's Catalyst columns, for
the plain reader (plain_reader.py). A property test holds both equal, to the last byte of every column.

No record raises, with any content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import xxhash

from bridge.stores.names import NAMED_ENTRY
from bridge.wire import headers as h
from bridge.wire.commands import CORRELATION_LENGTH_MAX
from bridge.wire.decode_epochs import DecodeEpochs, DecodeParameters, parameters_at
from bridge.wire.dialects import DIALECTS, NATIVE, NOT_CANCELLING, Dialect
from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record, Unread
from bridge.wire.schedule import TICK_DELAY_MS_MAX, TICK_MAX
from timerstore.cancels.cancels import NO_ORIGIN, SEVERAL
from timerstore.rows.entry import UNCOPYABLE, Kind
from timerstore.rows.position import AT_MIN

_SMALLINT_MAX: Final = 32_767
_HEADER_BYTES: Final = 10
_HASH_SEED: Final = 42
"""The seed of Spark's xxhash64."""
_TIMES: Final = (h.UNTIL, h.FOR, h.LEVEL, h.CANCEL, h.CANCEL_ORIGIN)
_NUMBERED: Final[tuple[str, ...]] = (h.PARTITION, *h.COPY)
_BESIDE_SCHEDULE: Final = frozenset(h.SCHEDULE) - {h.EVERY, h.CRON}
_CONTROL: Final = frozenset(h.CONTROL)
_STRIPPED: Final = frozenset(h.STRIPPED)
_COMMANDS: Final = frozenset(h.COMMANDS)
_BY_ORIGIN: Final = {h.CANCEL_ORIGIN: h.ORIGINS_PATTERN, h.MOVE_ORIGIN: h.MOVED_PATTERN}


def decode_records(records: Iterable[Record], all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> pa.Table:
    """The entries of the records, in the form of `decode`: `Finish` takes the control headers out."""
    rows = [
        _entry(record, parameters_at(all_epochs[record.topic, record.partition], record.offset)) for record in records
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(NAMED_ENTRY)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, NAMED_ENTRY, strict=True)], schema=NAMED_ENTRY
    )


def unread_entry(unread: Unread) -> pa.Table:
    """The entry in place of unreadable records: a dead letter without a body."""
    (topic, partition), headers = unread.name, [(h.OMITTED, unread.omitted.encode())]
    row = {
        "topic": topic,
        "partition": partition,
        "offset": unread.offset,
        "at": AT_MIN,
        "ts": unread.ts,
        "due": unread.ts,
        "kind": int(Kind.REJECT),
        "headers": headers,
        "replace": False,
        "origin": unread.offset,
        "attempt": 0,
        "rolls": 0,
        "reason": unread.reason.value,
        "tick": 0,
    }
    return pa.table([pa.array([row.get(field.name)], field.type) for field in NAMED_ENTRY], schema=NAMED_ENTRY)


def _entry(record: Record, p: DecodeParameters) -> tuple[Any, ...]:
    """The columns of `names.NAMED_ENTRY`, in its order."""
    headers, key = record.headers, record.key
    by_name = _first(headers)
    is_copy = h.COPY_ORIGIN in by_name
    if p.dialect != NATIVE and not is_copy:
        dialect = DIALECTS[p.dialect]
        if dialect.key is not None and dialect.key in by_name:
            key = by_name[dialect.key]
        headers = _added(dialect, record, by_name) + headers
        by_name = _first(headers)
    times: list[str] = [name for name in _TIMES if name in by_name]
    delay = _delay(record.ts, by_name, times, p)
    commands = by_name.keys() & _COMMANDS
    by_origin = bool(commands & _BY_ORIGIN.keys())
    kind = _kind(by_name, commands)
    recurs = _recurs(by_name)
    identity = _text(by_name.get(next((name for name in (h.CANCEL, h.MOVE) if name in by_name), h.ID)))
    replaces = (_text(by_name.get(h.REPLACE)) or "").lower()
    numbers = {name: _number(_text(by_name[name])) for name in _NUMBERED if name in by_name}
    reason = _reason(record, p, headers, by_name, times, delay, identity, replaces, numbers, key)
    kind = Kind.REJECT if reason is not None else kind
    own: Headers | None = headers or None
    at, due, target, partition = AT_MIN, record.ts, None, None
    value = record.value
    origin, attempt, rolls, tick = record.offset, 0, 0, 0
    if kind == Kind.TIMER:
        assert delay is not None
        rolls = UNCOPYABLE if not is_copy and _is_uncopyable(record, headers, key, p) else 0
        due = record.ts + delay
        at = record.ts if recurs and not is_copy else _at(record, delay, p, numbers.get(h.COPY_AT))
        target = _text(by_name.get(h.TOPIC))
        partition = numbers.get(h.PARTITION)
        if len(by_name) == len(headers) and by_name.keys() <= _STRIPPED and not recurs:
            own = None  # as in decode.py: ControlHeaders makes repeated headers an empty list
        if is_copy:
            origin = numbers.get(h.COPY_ORIGIN) or 0
            attempt, rolls = numbers.get(h.COPY_ATTEMPT) or 0, numbers.get(h.COPY_ROLLS) or 0
            tick = numbers.get(h.COPY_TICK) or 0
    elif kind == Kind.REJECT:
        own, key = record.headers or None, record.key
    else:
        target = _text(by_name.get(h.REPLY_TO))
        if kind == Kind.MOVE:
            due = record.ts + (delay or 0)
        if by_origin:
            origin, names = _named_origins(record, by_name)
            value = names if origin == SEVERAL else value
    return (
        record.topic,
        record.partition,
        record.offset,
        at,
        record.ts,
        due,
        int(kind),
        target,
        partition,
        key,
        value,
        own,
        None if kind == Kind.REJECT or by_origin else identity,
        kind == Kind.TIMER and replaces == "true",
        origin,
        attempt,
        rolls,
        None if reason is None else reason.value,
        "" if kind == Kind.TIMER and recurs else None,
        tick,
    )


def _reason(
    record: Record,
    p: DecodeParameters,
    headers: Headers,
    by_name: Mapping[str, bytes | None],
    times: list[str],
    delay: int | None,
    identity: str | None,
    replaces: str,
    numbers: Mapping[str, int | None],
    key: bytes | None,
) -> RejectReason | None:
    """The first applicable reason, in the order of `RejectReason`."""
    commands = by_name.keys() & _COMMANDS
    is_copy, is_timer = h.COPY_ORIGIN in by_name, not commands
    if not record.by_broker:
        return RejectReason.CREATE_TIME
    if len(by_name) < len(headers) and _is_control_twice(headers):
        return RejectReason.DUPLICATE_HEADER
    if is_copy and not _is_good_copy(record.offset, by_name, times, delay, numbers, p):
        return RejectReason.BAD_COPY
    recurs = _recurs(by_name)
    if not is_copy and not times and not recurs:
        return RejectReason.NO_TIME
    if len(times) > 1 or len(commands) > 1 or (not is_copy and recurs and not _is_one_schedule(by_name, times)):
        return RejectReason.TWO_TIMES
    if not recurs and by_name.keys() & _BESIDE_SCHEDULE:
        return RejectReason.BAD_SCHEDULE
    if delay is None:
        return {h.UNTIL: RejectReason.BAD_UNTIL, h.FOR: RejectReason.BAD_FOR}.get(times[0], RejectReason.BAD_LEVEL)
    if not is_copy and delay > p.max_delay_ms and not _is_moved_to(record.ts + delay, by_name):
        return RejectReason.BEYOND_MAX
    if is_timer and h.TOPIC not in by_name and not p.has_default_target:
        return RejectReason.NO_TARGET
    if is_timer and h.TOPIC in by_name and not re.fullmatch(h.TOPIC_PATTERN, _text(by_name[h.TOPIC]) or ""):
        return RejectReason.BAD_TARGET
    if is_timer and h.PARTITION in by_name and not 0 <= _or(numbers.get(h.PARTITION), -1) < 2**31:
        return RejectReason.BAD_PARTITION
    if (commands & {h.CANCEL, h.MOVE} or (is_timer and h.ID in by_name)) and not 1 <= len(
        identity or ""
    ) <= h.ID_LENGTH_MAX:
        return RejectReason.BAD_ID
    if any(not re.fullmatch(_BY_ORIGIN[name], _text(by_name[name]) or "") for name in commands & _BY_ORIGIN.keys()):
        return RejectReason.BAD_ORIGIN
    if commands and not _can_reply(by_name):
        return RejectReason.BAD_REPLY
    if is_timer and h.REPLACE in by_name and not (replaces == "false" or (replaces == "true" and h.ID in by_name)):
        return RejectReason.BAD_REPLACE
    if is_copy:
        return None  # the bridge's own: its original was within the limits
    if p.headers_max and len(record.headers) > p.headers_max:
        return RejectReason.TOO_MANY_HEADERS
    payload = len(key or b"") + len(record.value or b"")
    if p.payload_bytes_max and payload > p.payload_bytes_max:
        return RejectReason.PAYLOAD_TOO_LARGE
    is_copied = is_timer and (delay > p.roll_window_ms or recurs)
    if is_copied and 0 < p.roll_bytes_max < _bytes(record, headers, key):
        return RejectReason.TOO_LARGE_TO_ROLL
    if p.dialect != NATIVE and p.header_bytes_max and _header_bytes(record.headers) > p.header_bytes_max:
        return RejectReason.HEADERS_TOO_LARGE
    return None


def _bytes(record: Record, headers: Headers, key: bytes | None) -> int:
    payload = len(key or b"") + len(record.value or b"")
    return payload + _header_bytes(headers) + _HEADER_BYTES * len(headers)


def _is_uncopyable(record: Record, headers: Headers, key: bytes | None, p: DecodeParameters) -> bool:
    """Whether it is too large for a copy. (Headers are counted only for records that are large without them.)"""
    payload = len(key or b"") + len(record.value or b"")
    is_large = p.roll_bytes_max > 0 and payload > p.roll_bytes_max // 2
    return is_large and _bytes(record, headers, key) > p.roll_bytes_max


def _is_control_twice(headers: Headers) -> bool:
    control = [name for name, _ in headers if name in _CONTROL]
    return len(set(control)) < len(control)


def _is_good_copy(
    offset: int,
    by_name: Mapping[str, bytes | None],
    times: list[str],
    delay: int | None,
    numbers: Mapping[str, int | None],
    p: DecodeParameters,
) -> bool:
    return (
        not times
        and not by_name.keys() & _COMMANDS
        and h.REPLACE not in by_name
        and _or(numbers.get(h.COPY_ORIGIN), offset) < offset
        and delay is not None
        and (delay <= p.longest_copy_ms or (_recurs(by_name) and _is_tick_delay(delay, numbers.get(h.COPY_DUE))))
        and _or(numbers.get(h.COPY_ROLLS), _SMALLINT_MAX + 1) <= _SMALLINT_MAX
        and _or(numbers.get(h.COPY_ATTEMPT), _SMALLINT_MAX + 1) <= _SMALLINT_MAX
        and (h.COPY_AT not in by_name or numbers.get(h.COPY_AT) is not None)
        and (h.COPY_TICK in by_name or not _recurs(by_name))
        and (h.COPY_TICK not in by_name or _or(numbers.get(h.COPY_TICK), TICK_MAX + 1) <= TICK_MAX)
    )


def _is_tick_delay(delay: int, due: int | None) -> bool:
    return delay <= TICK_DELAY_MS_MAX or due == h.NEVER_MS


def _is_moved_to(due: int, by_name: Mapping[str, bytes | None]) -> bool:
    """Whether a recurring message is paused or resumed, or put-off messages are brought forward."""
    return (
        (due >= h.NEXT_MS or due == h.AS_DUE_MS)
        and h.UNTIL in by_name
        and bool(by_name.keys() & {h.MOVE, h.MOVE_ORIGIN})
    )


def _kind(by_name: Mapping[str, bytes | None], commands: set[str]) -> Kind:
    if not commands:
        return Kind.TIMER
    if commands & {h.MOVE, h.MOVE_ORIGIN}:
        return Kind.MOVE
    return Kind.RECALL if by_name.keys() & {h.REPLY_TO, h.CORRELATION} else Kind.CANCEL


def _recurs(by_name: Mapping[str, bytes | None]) -> bool:
    return h.EVERY in by_name or h.CRON in by_name


def _is_one_schedule(by_name: Mapping[str, bytes | None], times: list[str]) -> bool:
    """Whether there is exactly one of the two headers, with no command, and no time beside it except a start."""
    return (
        (h.EVERY in by_name) != (h.CRON in by_name)
        and set(times) <= {h.UNTIL, h.FOR}
        and not by_name.keys() & _COMMANDS
    )


def _can_reply(by_name: Mapping[str, bytes | None]) -> bool:
    """Whether the headers about the command's answer, its topic and its correlation id, are valid."""
    if h.REPLY_TO in by_name and not re.fullmatch(h.TOPIC_PATTERN, _text(by_name[h.REPLY_TO]) or ""):
        return False
    text = _text(by_name[h.CORRELATION]) if h.CORRELATION in by_name else ""
    return text is not None and len(text) <= CORRELATION_LENGTH_MAX


def _delay(ts: int, by_name: Mapping[str, bytes | None], times: list[str], p: DecodeParameters) -> int | None:
    """due - ts in ms; None if invalid."""
    if h.COPY_ORIGIN in by_name:
        due = _number(_text(by_name.get(h.COPY_DUE)))
        return None if due is None else due - ts
    if not times and _recurs(by_name):
        return 0
    if len(times) != 1:
        return None
    text = _text(by_name[times[0]])
    if times[0] in (h.CANCEL, h.CANCEL_ORIGIN):
        return 0
    if text is None:
        return None
    if times[0] == h.FOR:
        return _read(h.parse_duration, text)
    if times[0] == h.UNTIL:
        is_move = by_name.keys() & {h.MOVE, h.MOVE_ORIGIN}
        until = h.MOVED_TO.get(text.lower()) if is_move else None
        until = _read(h.parse_until, text) if until is None else until
        return until - ts if until is not None and until >= ts - h.PAST_MS_MAX else None
    return _read(lambda level: h.parse_level(level, p.levels_ms), text)


def _named_origins(record: Record, by_name: Mapping[str, bytes | None]) -> tuple[int, bytes]:
    """The offset in a command by origin: SEVERAL for more than one, NO_ORIGIN for those of another partition. And their
    text."""
    text = _text(by_name[h.MOVE_ORIGIN if h.MOVE_ORIGIN in by_name else h.CANCEL_ORIGIN]) or ""
    is_own = text.startswith(f"{record.topic}/{record.partition}/")
    named = text.rpartition("/")[2]
    origin = NO_ORIGIN if not is_own else SEVERAL if "," in named else int(named)
    return origin, named.encode()


def _at(record: Record, delay: int, p: DecodeParameters, copy_at: int | None) -> int:
    """The effective time; a forged backoff does not outlive the roll window."""
    due, window = record.ts + delay, p.roll_window_ms
    if delay <= window:
        at = due
    else:
        at = record.ts + window - spread(record.topic, record.partition, record.offset) % (window // 4)
    return at if copy_at is None else max(at, min(copy_at, record.ts + window))


def spread(topic: str, partition: int, offset: int) -> int:
    """Spark's xxhash64(topic, partition, offset), signed."""
    seed = xxhash.xxh64_intdigest(topic.encode(), _HASH_SEED)
    seed = xxhash.xxh64_intdigest(partition.to_bytes(4, "little", signed=True), seed)
    digest = xxhash.xxh64_intdigest(offset.to_bytes(8, "little", signed=True), seed)
    return digest - (1 << 64) if digest >> 63 else digest


def _added(dialect: Dialect, record: Record, by_name: Mapping[str, bytes | None]) -> Headers:
    """The native equivalents of the record's dialect headers."""
    key, is_cancelled = record.key, False
    if dialect.keyed and key is not None:
        is_cancelled = record.value is None and not by_name.keys() & NOT_CANCELLING
        if dialect.cancels is not None:
            name, text = dialect.cancels
            is_cancelled = is_cancelled or _trimmed(by_name.get(name)) == text.encode()
    if is_cancelled:
        return [(h.CANCEL, key)]
    times: Headers = [
        (native, _milliseconds(by_name[name]) if seconds else by_name[name])
        for name, native, seconds in dialect.times
        if name in by_name
    ]
    added = times if dialect.several_times else times[:1]
    added += [(native, by_name[name]) for name, native in dialect.renamed.items() if name in by_name]
    if dialect.keyed and times and key is not None:
        added += [(h.ID, key), (h.REPLACE, b"true")]
    return added


def _milliseconds(value: bytes | None) -> bytes | None:
    """Whole seconds as text of milliseconds; None, which is refused, for any other value."""
    text = _trimmed(value)
    return text + b"000" if text is not None and re.fullmatch(b"[0-9]+", text) else None


def _first(headers: Headers) -> dict[str, bytes | None]:
    """The first value of each name."""
    return dict(reversed(headers))


def _trimmed(value: bytes | None) -> bytes | None:
    return None if value is None else value.strip(h.WHITE_SPACE.encode())


def _text(value: bytes | None) -> str | None:
    """A header's text; None without a header, or for bytes that are not UTF-8."""
    try:
        return None if value is None else h.text_of(value)
    except ValueError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(h.NUMBER_PATTERN, text) else None


def _or(number: int | None, default: int) -> int:
    return default if number is None else number


def _read(parse: Callable[[str], int], text: str) -> int | None:
    try:
        return parse(text)
    except ValueError:
        return None


def _header_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)
