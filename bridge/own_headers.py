"""The last step of decoding, in Arrow: of a timer's headers only its own are kept.

Catalyst would need a lambda for it, and a lambda keeps its whole stage out of generated code: every task of every
micro-batch then pays for generating what is left. Here it is a few vector operations, and nothing at all for records
that carry control headers only (decoding leaves their `headers` null).

The headers of a dialect are control headers where it was in force, by partition and offset; and of originals only,
since the bridge's copies carry native ones: what looks like a dialect's is the message's own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.barriers import History
from bridge.dialects import DIALECTS, NATIVE
from bridge.headers import STRIPPED
from timerstore.entry import Kind
from timerstore.position import Bools, Int64s

_STRIPPED: Final = pa.array(STRIPPED, pa.string())
_FOREIGN: Final = [pa.array(dialect.names, pa.string()) for dialect in DIALECTS.values()]
_CODES: Final = {NATIVE: -1} | {name: code for code, name in enumerate(DIALECTS)}


class ControlHeaders:
    """Which headers are control headers, by partition and offset."""

    def __init__(self, histories: Mapping[tuple[str, int], History]) -> None:
        self._steps = {  # from which offsets on which dialects, where there are any
            source: (_int64s([b.offset for b in history]), _int64s([_CODES[b.parameters.dialect] for b in history]))
            for source, history in histories.items()
            if any(barrier.parameters.dialect != NATIVE for barrier in history)
        }

    def taken_out(self, entries: pa.Table) -> pa.Table:
        """`entries` (columns of `timerstore.entry.ENTRY`) with the control headers taken out of the timers' `headers`.

        Order and duplicates stay. Rejects and cancels keep all of theirs: they may have to leave byte for byte.
        """
        column = entries.column("headers")
        if column.null_count == len(column):
            return entries
        # A table of no columns but these, so that all have the same chunks.
        places = ["topic", "partition", "offset", "origin"] if self._steps else []
        stripped = [self._stripped(batch) for batch in entries.select(["headers", "kind", *places]).to_batches()]
        index = entries.schema.get_field_index("headers")
        return entries.set_column(index, entries.schema.field(index), pa.chunked_array(stripped, column.type))

    def _stripped(self, batch: pa.RecordBatch) -> pa.ListArray:
        lists = batch.column("headers")
        parents = pc.list_parent_indices(lists).to_numpy()
        headers = pc.list_flatten(lists)
        names = headers.field("key")
        control = _are_in(names, _STRIPPED)
        if self._steps:
            dialect = self._dialects(batch)
            for code in np.unique(dialect[dialect >= 0]).tolist():
                control |= _are_in(names, _FOREIGN[code]) & (dialect == code)[parents]
        control &= (batch.column("kind").to_numpy() == Kind.TIMER)[parents]
        counts = np.bincount(parents[~control], minlength=len(lists))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), headers.filter(pa.array(~control)), type=lists.type, mask=lists.is_null()
        )

    def _dialects(self, batch: pa.RecordBatch) -> Int64s:
        """The dialect in which each record was read, as an index of `_FOREIGN`, -1 for none; int64[n]."""
        result: Int64s = np.full(len(batch), -1, dtype=np.int64)
        topic, offset = batch.column("topic").dictionary_encode(), batch.column("offset").to_numpy()
        names, codes = topic.dictionary.to_pylist(), topic.indices.to_numpy().astype(np.int64)
        places, which = np.unique(codes << 32 | batch.column("partition").to_numpy(), return_inverse=True)
        for i, place in enumerate(places.tolist()):
            steps = self._steps.get((names[place >> 32], place & 0xFFFFFFFF))
            if steps is not None:
                starts, dialects = steps
                mine = np.flatnonzero(which == i)
                result[mine] = dialects[np.searchsorted(starts, offset[mine], side="right") - 1]
        result[batch.column("origin").to_numpy() != offset] = -1
        return result


def _int64s(numbers: list[int]) -> Int64s:
    return np.array(numbers, dtype=np.int64)


def _are_in(names: pa.Array, wanted: pa.Array) -> Bools:
    mask: Bools = pc.is_in(names, wanted).to_numpy(zero_copy_only=False)
    return mask
