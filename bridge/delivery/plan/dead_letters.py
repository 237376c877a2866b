"""Dead letters: records that cannot be delivered, byte for byte, with the reason and the origin.

A record that decoding rejected still has all its headers. A timer that is rejected at dispatch (its target is missing,
forbidden, too small...) lost its control headers when it was decoded; they are written anew, with the due time in its
absolute form, so that the dead letter can be put back into the delay topic and is the same timer again.

Where a dead-letter topic does not take records for now, a timer is retried like any other failure, and a record that
decoding rejected is *held*: it waits in the delay topic as a copy whose target is the dead-letter topic, with all the
headers that it will have there; those that decoding would read are renamed. Any producer can write such a copy. So
nothing of a held letter is believed but the record's own headers and the code of the reason; the rest is written anew.

Where a letter cannot be made of a record, that record becomes a plain one with what can be read of it; the others are
not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np

from bridge.delivery.plan.copies import to_sources
from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, chunks
from bridge.kafka.errors import Refusal
from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS
from bridge.wire.headers import HeaderList, Headers, Where
from bridge.wire.reasons import RejectReason
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

DETAIL_CHARS_MAX: Final = 1_000
CUT_BYTES: Final = 64 << 10
CUT_HEADERS: Final = 1_000
_REASONS: Final = {str(reason): reason for reason in RejectReason}
_COLUMNS: Final = ("kind", "origin", "ts", "due", "reason", "target", "target_partition", "id", "attempt")

Letter = tuple[bytes | None, bytes | None, HeaderList]
"""Value, key and headers."""

Report = Callable[[Where, str], None]
"""Is called for each plain letter: of which record it is, and what went wrong."""


def _unreported(where: Where, detail: str) -> None:
    """The letter says it."""


def dead_letters(
    rows: DueRows,
    ids: Ids,
    refused: Mapping[int, Refusal],
    topic_of: Mapping[str, str],
    cut: Collection[int] = (),
    report: Report = _unreported,
) -> Iterator[Batch]:
    """Dead letters of the rows `ids`: rejects, `refused` ones (why, by row), and held ones that are released.

    `topic_of` maps a delay topic to its dead-letter topic. Letters of the rows in `cut` are without their value, and
    without keys and headers of more than CUT_BYTES; a header says so.
    """
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        letters, unreadable = _letters(rows, chosen, refused, cut, report)
        topics = _topics(rows, chosen, topic_of)
        for topic in dict.fromkeys(topics):
            mine = [i for i, name in enumerate(topics) if name == topic]
            yield Batch(
                topic=topic,
                ids=chosen[mine],
                values=[letters[i][0] for i in mine],
                keys=[letters[i][1] for i in mine],
                headers=[letters[i][2] for i in mine],
                unreadable=Counter(unreadable[row] for row in chosen[mine].tolist() if row in unreadable),
            )


def held(
    rows: DueRows, ids: Ids, topic_of: Mapping[str, str], at_ms: Int64s, report: Report = _unreported
) -> Iterator[Batch]:
    """Copies of the rejects `ids` that become dead letters at `at_ms` int64[m]."""
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        letters, _ = _letters(rows, chosen, {}, (), report)
        columns = rows.column("origin", chosen), rows.column("ts", chosen), _topics(rows, chosen, topic_of)
        headers: list[HeaderList] = [
            [
                *hold([(name, _bytes(value)) for name, value in complete]),
                *h.copy_headers(origin=origin, due_ms=ts_ms, rolls=0, attempt=1, target=topic, at_ms=at),
            ]
            for (_, _, complete), origin, ts_ms, topic, at in zip(letters, *columns, at_ms[chunk].tolist(), strict=True)
        ]
        values, keys = [value for value, _, _ in letters], [key for _, key, _ in letters]
        yield from to_sources(rows, chosen, values, keys, headers, alone=False)


def is_held(rows: DueRows, ids: Ids) -> Bools:
    """Which of the timers are held dead letters: copies that agree with where they are; bool[m]."""
    columns = rows.source[ids], rows.offset[ids], rows.column("origin", ids), rows.column("due", ids), _own(rows, ids)
    return np.array(
        [
            origin < offset and release(own, _origin(rows, source, origin, due_ms)) is not None
            for source, offset, origin, due_ms, own in zip(*columns, strict=True)
        ],
        dtype=np.bool_,
    )


def reason_of(headers: HeaderList) -> str:
    """The reason that a held letter gives."""
    return _text(dict(headers).get(h.REASON))


def _topics(rows: DueRows, ids: Ids, topic_of: Mapping[str, str]) -> list[str]:
    return [topic_of[rows.sources.name(source)[0]] for source in rows.source[ids].tolist()]


def _letters(
    rows: DueRows, ids: Ids, refused: Mapping[int, Refusal], cut: Collection[int], report: Report
) -> tuple[list[Letter], dict[int, str]]:
    """The letters of the rows; and of those that are plain ones, by row, the reason that each would have had. Which row
    it is that cannot be made into a letter, only one at a time can tell.
    """
    try:
        return _complete(rows, ids, refused, cut), {}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows go on
        if len(ids) == 1:
            letter, reason = _plain(rows, int(ids[0]), error, refused, report)
            return [letter], {int(ids[0]): reason}
    letters: list[Letter] = []
    unreadable: dict[int, str] = {}
    for i in range(len(ids)):
        mine, plain = _letters(rows, ids[i : i + 1], refused, cut, report)
        letters += mine
        unreadable |= plain
    return letters, unreadable


def _complete(rows: DueRows, ids: Ids, refused: Mapping[int, Refusal], cut: Collection[int]) -> list[Letter]:
    columns = {name: rows.column(name, ids) for name in _COLUMNS}
    values, keys, own = rows.column("value", ids), rows.column("key", ids), _own(rows, ids)
    letters: list[Letter] = []
    for i, row in enumerate(ids.tolist()):
        headers = _headers(rows, row, own[i], {name: column[i] for name, column in columns.items()}, refused.get(row))
        letter = (values[i], keys[i], headers)
        letters.append(_cut(*letter) if row in cut else letter)
    return letters


def _headers(rows: DueRows, row: int, own: Headers, cells: Mapping[str, Any], refusal: Refusal | None) -> HeaderList:
    """The headers of one letter."""
    source, origin = int(rows.source[row]), int(cells["origin"])
    where = Where(*rows.sources.name(source), int(rows.offset[row]), origin, int(cells["ts"]))
    if refusal is not None:
        own, detail = [*own, *_control_headers(cells)], refusal.detail[:DETAIL_CHARS_MAX]
        return list(h.dead_letter_headers(own, refusal.reason, detail, where, cells["attempt"] + 1))
    if cells["kind"] == Kind.TIMER:
        where = _origin(rows, source, origin, int(cells["due"]))
        released = release(own, where)
        if released is None:
            raise ValueError("neither refused nor held")
        own, reason = released
    else:
        reason = _REASONS[cells["reason"]]
    detail = reject_detail(reason, own, where.ts_ms)[:DETAIL_CHARS_MAX]
    return list(h.dead_letter_headers(own, reason, detail, where))


def _plain(
    rows: DueRows, row: int, error: Exception, refused: Mapping[int, Refusal], report: Report
) -> tuple[Letter, str]:
    """The letter of a row of which none can be made: what can be read of it, and what went wrong; and the reason that
    it would have had.
    """
    ids = np.array([row], dtype=np.intp)
    (topic, partition), offset = rows.sources.name(int(rows.source[row])), int(rows.offset[row])

    def cell(name: str, default: Any) -> Any:
        return _readable(lambda: rows.column(name, ids)[0], default)

    detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
    where = Where(topic, partition, offset, cell("origin", offset), cell("ts", 0))
    report(where, detail)
    own: Headers = _readable(lambda: _own(rows, ids)[0], [])
    if row in refused and cell("kind", None) == Kind.TIMER:
        own = [*own, *_control_headers({name: cell(name, None) for name in _COLUMNS})]
    headers = h.dead_letter_headers(own, RejectReason.UNREADABLE, detail, where)
    reason = str(refused[row].reason) if row in refused else cell("reason", "")
    return (cell("value", None), cell("key", None), list(headers)), reason


def _readable(read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the letter says what went wrong
        return default


def _own(rows: DueRows, ids: Ids) -> list[Headers]:
    return [[(name, _bytes(value)) for name, value in own] for own in rows.headers(ids).lists()]


def _origin(rows: DueRows, source: int, origin: int, ts_ms: int) -> Where:
    """The record of a held letter: the due time of the copy is the timestamp that the record had."""
    return Where(*rows.sources.name(source), origin, origin, ts_ms)


def _cut(value: bytes | None, key: bytes | None, headers: HeaderList) -> Letter:
    """What of a dead letter fits into any topic."""
    names = [name for name, _ in headers]
    end = len(names) - 1 - names[::-1].index(h.REASON) if h.REASON in names else len(headers)
    header_bytes = sum(len(name.encode()) + len(_bytes(text) or b"") for name, text in headers[:end])
    omitted = {"value": len(value or b"")}
    if len(key or b"") > CUT_BYTES:
        omitted["key"], key = len(key or b""), None
    if header_bytes > CUT_BYTES or end > CUT_HEADERS:
        omitted[f"{end} headers"], headers = header_bytes, headers[end:]
    text = ", ".join(f"{what} ({size} bytes)" for what, size in omitted.items())
    return None, key, [*headers, (h.OMITTED, text.encode())]


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _control_headers(row: Mapping[str, object]) -> Headers:
    """The control headers that make a record the same timer again."""
    names = ((h.UNTIL, "due"), (h.TOPIC, "target"), (h.ID, "id"), (h.PARTITION, "target_partition"))
    return [(header, str(row[name]).encode()) for header, name in names if row[name] is not None]


# -- held --------------------------------------------------------------------------------------------------------------


def hold(headers: Headers) -> Headers:
    """The headers of a dead letter for a copy of it: those that decoding would read are renamed."""
    held: Headers = [(h.HELD, None)]
    for name, value in headers:
        held.append((h.HELD_PREFIX + name if name in h.STRIPPED or name.startswith(h.HELD) else name, value))
    return held


def release(headers: Headers, where: Where) -> tuple[Headers, RejectReason] | None:
    """The record's headers and the reason, of what `hold` wrote; None: it did not write this, since it contradicts
    `where`, what the bridge knows of the record.
    """
    if not headers or headers[0] != (h.HELD, None):
        return None
    letter = [(name.removeprefix(h.HELD_PREFIX), value) for name, value in headers[1:]]
    names = [name for name, _ in letter]
    if h.REASON not in names:
        return None
    end = len(names) - 1 - names[::-1].index(h.REASON)
    reason = _REASONS.get(_text(letter[end][1]))
    if reason is None or not set(h.provenance(where)) <= set(letter[end:]):
        return None
    return [(h.unescaped(name), value) for name, value in letter[:end]], reason


def _text(value: str | bytes | None) -> str:
    return value if isinstance(value, str) else (value or b"").decode("utf-8", "replace")


# -- what exactly is wrong ---------------------------------------------------------------------------------------------


_READERS: Final[dict[RejectReason, tuple[str, Callable[[str], object]]]] = {
    RejectReason.BAD_UNTIL: (h.UNTIL, h.parse_until),
    RejectReason.BAD_FOR: (h.FOR, h.parse_duration),
    RejectReason.BAD_LEVEL: (h.LEVEL, lambda text: h.parse_level(text, (0,))),
    RejectReason.BAD_TARGET: (h.TOPIC, h.check_topic),
    RejectReason.BAD_PARTITION: (h.PARTITION, h.parse_partition),
    RejectReason.BAD_REPLACE: (h.REPLACE, h.parse_replace),
}
"""The native header that a reason is about, and what reads it."""

_SECONDS_DIGITS_MAX: Final = 12
"""With three more a number has as many digits as it may have."""
_IN_SECONDS: Final = {name: seconds for dialect in DIALECTS.values() for name, _, seconds in dialect.times}
_NATIVE: Final = {
    name: native
    for dialect in DIALECTS.values()
    for name, native in [*((name, native) for name, native, _ in dialect.times), *dialect.renamed.items()]
}
"""The native header that a dialect's header stands for. No two dialects share a header."""


def reject_detail(reason: RejectReason, headers: Headers, ts_ms: int) -> str:
    """The reason's explanation, and where it is about one header, what exactly is wrong with its value."""
    if reason is RejectReason.DUPLICATE_HEADER:
        names = [name for name, _ in headers]
        twice = [name for name in h.CONTROL if names.count(name) > 1]
        return f"{reason.explanation} {', '.join(twice)}".rstrip()
    if reason is RejectReason.TOO_MANY_HEADERS:
        return f"{reason.explanation} It has {len(headers)}."
    if reason is RejectReason.HEADERS_TOO_LARGE:
        return f"{reason.explanation} {sum(len(name.encode()) + len(value or b'') for name, value in headers)} bytes."
    return next((f"{reason.explanation} {what}" for what in _complaints(reason, headers, ts_ms)), reason.explanation)


def _complaints(reason: RejectReason, headers: Headers, ts_ms: int) -> Iterator[str]:
    """What is wrong with the headers that a reason may be about: the native one first, then those of dialects."""
    if reason not in _READERS:
        return
    native, read = _READERS[reason]
    about = [(name, value) for name, value in headers if native in (name, _NATIVE.get(name))]
    for name, value in sorted(about, key=lambda header: header[0] != native):
        try:
            text = h.text_of(value)[: 2 * h.TIME_LENGTH_MAX]
            if _IN_SECONDS.get(name):
                text = _milliseconds(text)
            result = read(text)
            if reason is RejectReason.BAD_UNTIL and isinstance(result, int):
                h.check_until(result, ts_ms)
        except ValueError as error:
            yield f"{name}: {error}"


def _milliseconds(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number of seconds")
    if len(text) > _SECONDS_DIGITS_MAX:
        raise ValueError(f"{text!r} is too long a number of seconds; it looks like milliseconds")
    return f"{text}000"
