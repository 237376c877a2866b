"""Dead letters: records that cannot be delivered, byte for byte, with why and where from.

A record that decoding refused still has all its headers. A timer that is refused at dispatch (its target is missing,
forbidden, too small...) had its control headers taken off when it was decoded; they are written anew, with the due time
in its absolute form, so that the dead letter can be put back into the delay topic and is the same timer again.

Where a dead-letter topic does not take records for now, a timer is retried like any other failure, and a record that
decoding refused is *held*: it waits in the delay topic as a copy whose target is the dead-letter topic, complete with
the headers that it will have there, those that decoding would read renamed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from bridge import headers as h
from bridge.copies import to_sources
from bridge.headers import HeaderList, Headers, RejectReason, Where
from bridge.outgoing import Batch, Outgoing, pieces
from bridge.verdict import Refusal
from timerstore.entry import Kind
from timerstore.position import Int64s

DETAIL_CHARS_MAX: Final = 1_000
CUT_BYTES: Final = 64 << 10
CUT_HEADERS: Final = 1_000
_REASONS: Final = {str(reason): reason for reason in RejectReason}


def dead_letters(
    outgoing: Outgoing,
    ids: npt.NDArray[np.intp],
    condemned: Mapping[int, Refusal],
    topic_of: Mapping[str, str],
    sizes: Int64s,
    cut: Collection[int] = (),
) -> Iterator[Batch]:
    """Dead letters of the rows `ids`: rejects, `condemned` ones (by row index), and held ones that are released.

    `topic_of` maps a delay topic to its dead-letter topic. Letters of the rows in `cut` are without their value, and
    without keys and headers of more than CUT_BYTES; a header says so.
    """
    for part in pieces(ids, sizes):
        chosen = ids[part]
        headers = _headers(outgoing, chosen, condemned)
        values, keys = outgoing.column("value", chosen), outgoing.column("key", chosen)
        topics = [topic_of[outgoing.sources.name(source)[0]] for source in outgoing.rows.source[chosen].tolist()]
        for i, row in enumerate(chosen.tolist()):
            if row in cut:
                values[i], keys[i], headers[i] = _cut(values[i], keys[i], headers[i])
        for topic in dict.fromkeys(topics):
            mine = [i for i, name in enumerate(topics) if name == topic]
            yield Batch(
                topic=topic,
                ids=chosen[mine],
                values=[values[i] for i in mine],
                keys=[keys[i] for i in mine],
                headers=[headers[i] for i in mine],
            )


def held(
    outgoing: Outgoing, ids: npt.NDArray[np.intp], topic_of: Mapping[str, str], sizes: Int64s, at_ms: Int64s
) -> Iterator[Batch]:
    """Copies of the rejects `ids` that become dead letters at `at_ms` int64[m]."""
    for part in pieces(ids, sizes):
        chosen = ids[part]
        origins, dues = outgoing.column("origin", chosen), outgoing.column("due", chosen)
        topics = [topic_of[outgoing.sources.name(source)[0]] for source in outgoing.rows.source[chosen].tolist()]
        headers: list[HeaderList] = [
            [
                *h.hold([(name, _bytes(value)) for name, value in complete]),
                *h.copy_headers(origin=origin, due_ms=due, rolls=0, attempt=1, target=topic, at_ms=at),
            ]
            for complete, origin, due, topic, at in zip(
                _headers(outgoing, chosen, {}), origins, dues, topics, at_ms[part].tolist(), strict=True
            )
        ]
        values, keys = outgoing.column("value", chosen), outgoing.column("key", chosen)
        yield from to_sources(outgoing, chosen, values, keys, headers, alone=False)


def is_held(outgoing: Outgoing, ids: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Which of the rows are held dead letters; bool[m]."""
    lists = outgoing.headers(ids).lists()
    return np.fromiter((h.is_held(own) for own in lists), np.bool_, len(ids))


def _headers(outgoing: Outgoing, ids: npt.NDArray[np.intp], condemned: Mapping[int, Refusal]) -> list[HeaderList]:
    names = ("kind", "origin", "ts", "due", "reason", "target", "target_partition", "id", "attempt")
    columns = {name: outgoing.column(name, ids) for name in names}
    sources, offsets = outgoing.rows.source[ids].tolist(), outgoing.rows.offset[ids].tolist()
    result: list[HeaderList] = []
    for i, (row, own) in enumerate(zip(ids.tolist(), outgoing.headers(ids).lists(), strict=True)):
        topic, partition = outgoing.sources.name(sources[i])
        where = Where(topic, partition, offsets[i], int(columns["origin"][i]), int(columns["ts"][i]))
        original: Headers = [(name, _bytes(value)) for name, value in own]
        verdict, attempts = condemned.get(row), 0
        if columns["kind"][i] == Kind.TIMER and verdict is None:
            result.append(h.release(own))
            continue
        if columns["kind"][i] == Kind.REJECT or verdict is None:
            reason = _REASONS[columns["reason"][i]]
            detail = h.reject_detail(reason, original, where.ts_ms)
        else:
            reason, detail = verdict.reason, verdict.detail
            if columns["kind"][i] == Kind.TIMER:
                attempts = columns["attempt"][i] + 1
                original = [*original, *_control_headers({name: column[i] for name, column in columns.items()})]
        result.append(list(h.dead_letter_headers(original, reason, detail[:DETAIL_CHARS_MAX], where, attempts)))
    return result


def _cut(value: bytes | None, key: bytes | None, headers: HeaderList) -> tuple[bytes | None, bytes | None, HeaderList]:
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
    """The control headers that make a delivered timer again of a record; `partition` arrives as a float where others
    have none.
    """
    texts = [(h.UNTIL, row["due"]), (h.TOPIC, row["target"]), (h.ID, row["id"])]
    partition = row["target_partition"]
    if isinstance(partition, int | float) and partition == partition:  # noqa: PLR0124 - NaN stands for null
        texts.append((h.PARTITION, int(partition)))
    return [(name, str(value).encode()) for name, value in texts if value is not None]
