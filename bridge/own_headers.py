"""The last step of decoding, in Arrow: of a timer's headers only its own are kept.

Catalyst would need a lambda for it, and a lambda keeps its whole stage out of generated code: every task of every
micro-batch then pays for generating what is left. Here it is a few vector operations, and nothing at all for records
that carry control headers only (decoding leaves their `headers` null).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bridge.headers import STRIPPED
from timerstore.entry import Kind

_STRIPPED: Final = pa.array(STRIPPED, pa.string())


def own_headers(entries: pa.Table) -> pa.Table:
    """`entries` (columns of `timerstore.entry.ENTRY`) with the control headers taken out of the timers' `headers`.

    Order and duplicates stay. Rejects and cancels keep all of theirs: they may have to leave byte for byte.
    """
    column = entries.column("headers")
    if column.null_count == len(column):
        return entries
    # A table of no columns but these two, so that both have the same chunks.
    batches = entries.select(["headers", "kind"]).to_batches()
    stripped = [_stripped(batch.column("headers"), batch.column("kind")) for batch in batches]
    index = entries.schema.get_field_index("headers")
    return entries.set_column(index, entries.schema.field(index), pa.chunked_array(stripped, column.type))


def _stripped(lists: pa.ListArray, kind: pa.Array) -> pa.ListArray:
    parents = pc.list_parent_indices(lists).to_numpy()
    headers = pc.list_flatten(lists)
    names = headers.field("key")
    is_timer = kind.to_numpy() == Kind.TIMER
    control = pc.is_in(names, _STRIPPED).to_numpy(zero_copy_only=False) & is_timer[parents]
    counts = np.bincount(parents[~control], minlength=len(lists))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), headers.filter(pa.array(~control)), type=lists.type, mask=lists.is_null()
    )
