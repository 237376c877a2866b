"""The last step of decoding, in Arrow: of a timer's headers only its own are kept.

Catalyst would need a lambda for it, and a lambda keeps its whole stage out of generated code: every task of every
micro-batch then pays for generating what is left. Here it is a few vector operations, and nothing at all for records
that carry control headers only (decoding leaves their `headers` null).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.headers import STRIPPED
from timerstore.entry import Kind
from timerstore.position import Bools

_STRIPPED: Final = pa.array(STRIPPED, pa.string())


def own_headers(entries: pa.Table, foreign: Mapping[str, Sequence[str]] | None = None) -> pa.Table:
    """`entries` (columns of `timerstore.entry.ENTRY`) with the control headers taken out of the timers' `headers`.

    `foreign` are further control headers by topic: those of its dialect. Order and duplicates stay. Rejects and cancels
    keep all of theirs: they may have to leave byte for byte.
    """
    column = entries.column("headers")
    if column.null_count == len(column):
        return entries
    # A table of no columns but these, so that all have the same chunks.
    batches = entries.select(["headers", "kind", *(["topic"] if foreign else [])]).to_batches()
    stripped = [_stripped(batch, foreign or {}) for batch in batches]
    index = entries.schema.get_field_index("headers")
    return entries.set_column(index, entries.schema.field(index), pa.chunked_array(stripped, column.type))


def _stripped(batch: pa.RecordBatch, foreign: Mapping[str, Sequence[str]]) -> pa.ListArray:
    lists = batch.column("headers")
    parents = pc.list_parent_indices(lists).to_numpy()
    headers = pc.list_flatten(lists)
    names = headers.field("key")
    control = _are_in(names, _STRIPPED)
    for topic, theirs in foreign.items():
        of_topic = pc.equal(batch.column("topic"), topic).to_numpy(zero_copy_only=False)
        control |= _are_in(names, pa.array(theirs, pa.string())) & of_topic[parents]
    control &= (batch.column("kind").to_numpy() == Kind.TIMER)[parents]
    counts = np.bincount(parents[~control], minlength=len(lists))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), headers.filter(pa.array(~control)), type=lists.type, mask=lists.is_null()
    )


def _are_in(names: pa.Array, wanted: pa.Array) -> Bools:
    mask: Bools = pc.is_in(names, wanted).to_numpy(zero_copy_only=False)
    return mask
