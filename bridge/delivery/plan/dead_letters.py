"""Dead letters: undeliverable records, byte for byte, with the reason and the origin.

A record that decoding rejected still has all its headers. A timer that is rejected at dispatch lost its control headers
in decoding. They are written anew, with the absolute due time: put back into the delay topic, the dead letter is the
same timer again.

Where a dead-letter topic fails for now, a timer is retried. A record that decoding rejected is *held*: it waits in the
delay topic as a copy whose target is the dead-letter topic, with all the headers of its letter; control headers are
renamed, so that decoding does not read them. Any producer can write such a copy. So the bridge believes nothing of a
held letter but the record's own headers and the code of the reason; all else is written anew.

If no letter can be made of a record, it becomes a plain one with its readable parts; the others are not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np

from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, Record, batches_by_topic, chunks
from bridge.kafka.errors import Refusal
from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS
from bridge.wire.headers import Headers, Where
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import unpacked
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

DETAIL_CHARS_MAX: Final = 1_000
CUT_BYTES: Final = 64 << 10
CUT_HEADERS: Final = 1_000
_REASONS: Final = {str(reason): reason for reason in RejectReason}
BODILESS: Final = (RejectReason.TOO_LARGE_TO_READ, RejectReason.CORRUPT)
"""Reasons of rows without a body: their only header names the omitted parts."""
COPY_TOO_LARGE: Final = Refusal(RejectReason.TOO_LARGE, "its copy is larger than the delay topic takes")
"""Why a message cannot wait any longer. It ends the schedule of a tick, and only the letter is left of that."""
_COLUMNS: Final = (
    "kind",
    "origin",
    "ts",
    "due",
    "reason",
    "target",
    "target_partition",
    "id",
    "attempt",
    "schedule",
    "tick",
)

Report = Callable[[Where, str], None]
"""A callback for each plain letter, with its record and the error."""


def _unreported(where: Where, detail: str) -> None:
    """The letter itself has the error."""


def dead_letters(
    rows: DueRows,
    ids: Ids,
    refused: Mapping[int, Refusal],
    topic_of: Mapping[str, str],
    cut: Collection[int] = (),
    report: Report = _unreported,
) -> Iterator[Batch]:
    """Dead letters of the rows `ids`: rejects, `refused` rows (reasons by row), and held letters at their release.

    `topic_of` maps a delay topic to its dead-letter topic. Letters of the rows in `cut` have no value, and no keys and
    headers of more than CUT_BYTES; a header says so."""
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        letters, unreadable = _letters(rows, chosen, refused, cut, report)
        for batch in batches_by_topic(chosen, _topics(rows, chosen, topic_of), None, letters):
            batch.unreadable = Counter(unreadable[row] for row in batch.ids.tolist() if row in unreadable)
            yield batch


def held(
    rows: DueRows,
    ids: Ids,
    refused: Mapping[int, Refusal],
    topic_of: Mapping[str, str],
    at_ms: Int64s,
    report: Report = _unreported,
) -> Iterator[Batch]:
    """Copies of the rejects and `refused` rows `ids` that become dead letters at `at_ms` int64[m]."""
    for chunk in chunks(rows.sizes[ids]):
        chosen = ids[chunk]
        letters, _ = _letters(rows, chosen, refused, (), report)
        columns = rows.column("origin", chosen), rows.column("ts", chosen), _topics(rows, chosen, topic_of)
        records: list[Record] = []
        for (value, key, letter), origin, ts, topic, at in zip(letters, *columns, at_ms[chunk].tolist(), strict=True):
            control = h.copy_headers(origin=origin, due_ms=ts, rolls=0, attempt=1, target=topic, at_ms=at)
            records.append((value, key, [*hold(letter), *control]))
        yield from batches_by_topic(chosen, *rows.places(chosen), records)


def is_held(rows: DueRows, ids: Ids) -> Bools:
    """The timers that are held dead letters: copies that agree with their place; bool[m]."""
    columns = rows.source[ids], rows.offset[ids], rows.column("origin", ids), rows.column("due", ids)
    return np.array(
        [
            origin < offset and release(own, _origin(rows, source, origin, due_ms)) is not None
            for source, offset, origin, due_ms, own in zip(*columns, rows.headers(ids).lists(), strict=True)
        ],
        dtype=np.bool_,
    )


def held_rows(rows: DueRows, letter_topics: Mapping[str, str]) -> Bools:
    """The rows that are held dead letters for one of these topics; bool[n]."""
    names, codes = rows.targets
    result: Bools = np.isin(codes, [code for code, name in enumerate(names) if name in letter_topics.values()])
    ids = np.flatnonzero(result)
    if len(ids):
        result[ids] = is_held(rows, ids)
    return result


def reason_of(headers: Headers) -> str:
    """The reason in a held letter."""
    return _text(dict(headers).get(h.REASON))


def _topics(rows: DueRows, ids: Ids, topic_of: Mapping[str, str]) -> list[str]:
    return [topic_of[topic] for topic in rows.places(ids)[0]]


def _letters(
    rows: DueRows, ids: Ids, refused: Mapping[int, Refusal], cut: Collection[int], report: Report
) -> tuple[list[Record], dict[int, str]]:
    """The letters of the rows; and, for the plain ones by row, the reasons that they would have had. After an error,
    letters are made one at a time."""
    try:
        return _complete(rows, ids, refused, cut), {}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the other rows go on in any case
        if len(ids) == 1:
            letter, reason = _plain(rows, int(ids[0]), error, refused, report)
            return [letter], {int(ids[0]): reason}
    letters: list[Record] = []
    unreadable: dict[int, str] = {}
    for i in range(len(ids)):
        mine, plain = _letters(rows, ids[i : i + 1], refused, cut, report)
        letters += mine
        unreadable |= plain
    return letters, unreadable


def _complete(rows: DueRows, ids: Ids, refused: Mapping[int, Refusal], cut: Collection[int]) -> list[Record]:
    columns = {name: rows.column(name, ids) for name in (*_COLUMNS, "value", "key")}
    return [
        _letter(rows, row, own, {name: cells[i] for name, cells in columns.items()}, refused.get(row), row in cut)
        for i, (row, own) in enumerate(zip(ids.tolist(), rows.headers(ids).lists(), strict=True))
    ]


def _letter(
    rows: DueRows, row: int, own: Headers, cells: Mapping[str, Any], refusal: Refusal | None, is_cut: bool
) -> Record:
    source = int(rows.source[row])
    where = Where(*rows.sources.name(source), int(rows.offset[row]), cells["origin"], cells["ts"])
    attempts = 0
    if refusal is not None:
        own, reason, detail = [*own, *_control_headers(cells, refusal)], refusal.reason, refusal.detail
        attempts = cells["attempt"] + 1
    else:
        if cells["kind"] == Kind.TIMER:
            where = _origin(rows, source, where.origin, cells["due"])
            released = release(own, where)
            if released is None:
                raise ValueError("neither refused nor held")
            own, reason = released
        else:
            reason = _REASONS[cells["reason"]]
        detail = reject_detail(reason, own, where.ts_ms)
    value, key, omitted = cells["value"], cells["key"], Headers()
    if reason in BODILESS:
        own, omitted = [], own
    elif is_cut:
        value, key, own, omitted = _cut(value, key, own)
    return value, key, h.dead_letter_headers(own, reason, detail[:DETAIL_CHARS_MAX], where, attempts) + omitted


def _plain(
    rows: DueRows, row: int, error: Exception, refused: Mapping[int, Refusal], report: Report
) -> tuple[Record, str]:
    """A plain letter: the readable parts of the row, and the error; and the reason that the letter would have had."""
    ids = np.array([row], dtype=np.intp)
    (topic, partition), offset = rows.sources.name(int(rows.source[row])), int(rows.offset[row])

    def cell(name: str, default: Any) -> Any:
        return _readable(lambda: rows.column(name, ids)[0], default)

    detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
    where = Where(topic, partition, offset, cell("origin", offset), cell("ts", 0))
    report(where, detail)
    own: Headers = _readable(lambda: rows.headers(ids).lists()[0], [])
    if row in refused and cell("kind", None) == Kind.TIMER:
        own = [*own, *_control_headers({name: cell(name, None) for name in _COLUMNS}, refused[row])]
    headers = h.dead_letter_headers(own, RejectReason.UNREADABLE, detail, where)
    reason = str(refused[row].reason) if row in refused else cell("reason", "")
    return (cell("value", None), cell("key", None), headers), reason


def _readable(read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the letter has the error of the first attempt
        return default


def _origin(rows: DueRows, source: int, origin: int, ts_ms: int) -> Where:
    """The record of a held letter. The due time of the copy is the record's timestamp."""
    return Where(*rows.sources.name(source), origin, origin, ts_ms)


def _cut(value: bytes | None, key: bytes | None, own: Headers) -> tuple[bytes | None, bytes | None, Headers, Headers]:
    """Value, key and headers of a record, cut so that any topic takes them, and the header that names the omitted
    parts."""
    omitted = {"value": len(value or b"")}
    if len(key or b"") > CUT_BYTES:
        omitted["key"], key = len(key or b""), None
    size = _header_bytes(own)
    if size > CUT_BYTES or len(own) > CUT_HEADERS:
        omitted[f"{len(own)} headers"], own = size, []
    text = ", ".join(f"{what} ({size} bytes)" for what, size in omitted.items())
    return None, key, own, [(h.OMITTED, text.encode())]


def _control_headers(row: Mapping[str, Any], refusal: Refusal) -> Headers:
    """The control headers that make a record the same timer again; for a schedule that ends with it, those of the
    rest."""
    names = [(h.UNTIL, "due"), (h.TOPIC, "target"), (h.ID, "id"), (h.PARTITION, "target_partition")]
    schedule: Mapping[str, str] = {}
    if row["schedule"] is not None and (not row["tick"] or refusal == COPY_TOO_LARGE):  # else the tick stands alone
        schedule, is_start_given = unpacked(row["schedule"])
        names = names if is_start_given else names[1:]
        if row["tick"] and (times := schedule.get(h.TIMES, "")).isdecimal():
            schedule = {**schedule, h.TIMES: str(max(1, int(times) - row["tick"] + 1))}
    texts = [(header, str(row[name])) for header, name in names if row[name] is not None]
    return [(header, text.encode()) for header, text in [*texts, *schedule.items()]]


def hold(letter: Headers) -> Headers:
    """A dead letter's headers for a held copy: control headers are renamed."""
    renamed = [
        (h.HELD_PREFIX + name if name in h.STRIPPED or name.startswith(h.HELD) else name, value)
        for name, value in letter
    ]
    return [(h.HELD, None), *renamed]


def release(headers: Headers, where: Where) -> tuple[Headers, RejectReason] | None:
    """The inverse of `hold`: the record's own headers and the reason. None for headers that `hold` did not write, since
    they contradict `where`, the bridge's own knowledge of the record."""
    if headers[:1] != [(h.HELD, None)]:
        return None
    letter = [(name.removeprefix(h.HELD_PREFIX), value) for name, value in headers[1:]]
    end = max((i for i, (name, _) in enumerate(letter) if name == h.REASON), default=None)
    if end is None:
        return None
    reason = _REASONS.get(_text(letter[end][1]))
    if reason is None or not set(h.provenance(where)) <= set(letter[end:]):
        return None
    own = [header for header in letter[end:] if header[0] == h.OMITTED][-1:] if reason in BODILESS else letter[:end]
    return [(h.unescaped(name), value) for name, value in own], reason


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


_READERS: Final[dict[RejectReason, tuple[str, Callable[[str], object]]]] = {
    RejectReason.BAD_UNTIL: (h.UNTIL, h.parse_until),
    RejectReason.BAD_FOR: (h.FOR, h.parse_duration),
    RejectReason.BAD_LEVEL: (h.LEVEL, lambda text: h.parse_level(text, (0,))),
    RejectReason.BAD_TARGET: (h.TOPIC, h.check_topic),
    RejectReason.BAD_PARTITION: (h.PARTITION, h.parse_partition),
    RejectReason.BAD_REPLACE: (h.REPLACE, h.parse_replace),
}
"""For each reason, its native header and the parser of that."""

_SECONDS_DIGITS_MAX: Final = 12
"""Three more digits reach the limit of a number."""
_IN_SECONDS: Final = {name: seconds for dialect in DIALECTS.values() for name, _, seconds in dialect.times}
_NATIVE: Final = {name: native for dialect in DIALECTS.values() for name, native, _ in dialect.times} | {
    name: native for dialect in DIALECTS.values() for name, native in dialect.renamed.items()
}
"""The native header for a dialect's header. No two dialects share a header."""


def reject_detail(reason: RejectReason, headers: Headers, ts_ms: int) -> str:
    """The reason's explanation, and the exact defect."""
    if reason is RejectReason.DUPLICATE_HEADER:
        names = [name for name, _ in headers]
        what = ", ".join(name for name in h.CONTROL if names.count(name) > 1)
    elif reason is RejectReason.TOO_MANY_HEADERS:
        what = f"It has {len(headers)}."
    elif reason is RejectReason.HEADERS_TOO_LARGE:
        what = f"{_header_bytes(headers)} bytes."
    else:
        what = _complaint(reason, headers, ts_ms)
    return f"{reason.explanation} {what}".rstrip()


def _complaint(reason: RejectReason, headers: Headers, ts_ms: int) -> str:
    """The defect of a header behind the reason: the native header is checked first, then those of dialects."""
    if reason not in _READERS:
        return ""
    native, read = _READERS[reason]
    about = [(name, value) for name, value in headers if native in (name, _NATIVE.get(name))]
    for name, value in sorted(about, key=lambda header: header[0] != native):
        try:
            text = h.text_of(value)[: 2 * h.TIME_LENGTH_MAX]
            result = read(_milliseconds(text) if _IN_SECONDS.get(name) else text)
            if reason is RejectReason.BAD_UNTIL and isinstance(result, int):
                h.check_until(result, ts_ms)
        except ValueError as error:
            return f"{name}: {error}"
    return ""


def _header_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


def _milliseconds(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number of seconds")
    if len(text) > _SECONDS_DIGITS_MAX:
        raise ValueError(f"{text!r} has too many digits for seconds; it looks like milliseconds")
    return f"{text}000"
