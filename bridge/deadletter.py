"""Dead letters: records that cannot be delivered, byte for byte, with why and where from.

A record that decoding refused still has all its headers. A timer that is refused at dispatch (its target is missing,
forbidden, too small...) had its control headers taken off when it was decoded; they are written anew, with the due time
in its absolute form, so that the dead letter can be put back into the delay topic and is the same timer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from bridge import headers as h
from bridge.headers import Headers, RejectReason, Where
from bridge.outgoing import Batch, HeaderList, Outgoing, pieces
from timerstore.entry import Kind
from timerstore.position import Int64s

DETAIL_CHARS_MAX: Final = 1_000
_REASONS: Final = {str(reason): reason for reason in RejectReason}


@dataclass(frozen=True, slots=True)
class Condemned:
    """Why a timer is not delivered: the reason, and in words what exactly is wrong."""

    reason: RejectReason
    detail: str


def dead_letters(
    outgoing: Outgoing, condemned: Mapping[int, Condemned], topic_of: Mapping[str, str], sizes: Int64s
) -> Iterator[Batch]:
    """Dead letters of all rejects among the rows, and of the `condemned` ones (by row index), in the order of the rows.

    `topic_of` maps a delay topic to its dead-letter topic.
    """
    rows = outgoing.rows
    refused = outgoing.kind == Kind.REJECT
    if condemned:
        refused[list(condemned)] = True
    ids = np.flatnonzero(refused)
    for part in pieces(ids, sizes):
        chosen = ids[part]
        headers = _headers(outgoing, chosen, condemned)
        values, keys = outgoing.column("value", chosen), outgoing.column("key", chosen)
        topics = [topic_of[outgoing.sources.name(source)[0]] for source in rows.source[chosen].tolist()]
        for topic in dict.fromkeys(topics):
            mine = [i for i, name in enumerate(topics) if name == topic]
            yield Batch(
                topic=topic,
                ids=chosen[mine],
                values=[values[i] for i in mine],
                keys=[keys[i] for i in mine],
                headers=[headers[i] for i in mine],
            )


def _headers(outgoing: Outgoing, ids: np.ndarray, condemned: Mapping[int, Condemned]) -> list[HeaderList]:
    columns = {name: outgoing.column(name, ids) for name in ("kind", "origin", "ts", "due", "reason", "target", "id")}
    columns["target_partition"] = outgoing.column("target_partition", ids)
    sources, offsets = outgoing.rows.source[ids].tolist(), outgoing.rows.offset[ids].tolist()
    result: list[HeaderList] = []
    for i, (row, own) in enumerate(zip(ids.tolist(), outgoing.headers(ids).lists(), strict=True)):
        topic, partition = outgoing.sources.name(sources[i])
        where = Where(topic, partition, offsets[i], int(columns["origin"][i]), int(columns["ts"][i]))
        original: Headers = [
            (name, value if isinstance(value, bytes | None) else value.encode()) for name, value in own
        ]
        verdict = condemned.get(row)
        if columns["kind"][i] == Kind.REJECT or verdict is None:
            reason = _REASONS[columns["reason"][i]]
            detail = h.reject_detail(reason, original, where.ts_ms)
        else:
            reason, detail = verdict.reason, verdict.detail
            if columns["kind"][i] == Kind.TIMER:
                original = [*original, *_control_headers({name: column[i] for name, column in columns.items()})]
        result.append(list(h.dead_letter_headers(original, reason, detail[:DETAIL_CHARS_MAX], where)))
    return result


def _control_headers(row: Mapping[str, object]) -> Headers:
    """The control headers that make a delivered timer again of a record; `partition` arrives as a float where others
    have none.
    """
    texts = [(h.UNTIL, row["due"]), (h.TOPIC, row["target"]), (h.ID, row["id"])]
    partition = row["target_partition"]
    if isinstance(partition, int | float) and partition == partition:  # noqa: PLR0124 - NaN stands for null
        texts.append((h.PARTITION, int(partition)))
    return [(name, str(value).encode()) for name, value in texts if value is not None]
