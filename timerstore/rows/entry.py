"""The columns of an entry, a decoded record of a log.

The store takes in rows of `ENTRY`, and a segment holds them. In memory the two columns of the position are in the row
references (sorted_runs.py), and the others, `PAYLOAD`, in Arrow chunks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import pyarrow as pa


class Kind(IntEnum):
    """The kind of a record of a delay topic."""

    TIMER = 0
    CANCEL = 1
    REJECT = 2
    MOVE = 3
    """Gives a message another due time."""
    RECALL = 4
    """A cancel with an answer."""


UNCOPYABLE: Final = -1
"""`rolls` of an original that is too large for a copy. Decoding sets it, so that a command has the same outcome when it
is read again."""
DECIDED: Final = (Kind.MOVE, Kind.RECALL)
"""Commands whose finishing transaction also carries out their effect and writes their answer (cancels/commands.py)."""


HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

_POSITION_FIELDS = [
    pa.field("offset", pa.int64()),
    pa.field("at", pa.int64()),
]
_PAYLOAD_FIELDS = [
    pa.field("ts", pa.int64()),
    pa.field("due", pa.int64()),
    pa.field("kind", pa.int8()),
    pa.field("target", pa.string()),
    pa.field("target_partition", pa.int32()),
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("headers", HEADERS),
    pa.field("id", pa.string()),
    pa.field("replace", pa.bool_()),
    pa.field("origin", pa.int64()),
    pa.field("attempt", pa.int16()),
    pa.field("rolls", pa.int16()),
    pa.field("reason", pa.string()),
    pa.field("schedule", pa.string()),
    pa.field("tick", pa.int32()),
]

PAYLOAD_COLUMNS = [field.name for field in _PAYLOAD_FIELDS]

ENTRY = pa.schema(_POSITION_FIELDS + _PAYLOAD_FIELDS)
"""Every column of an entry. `ts`, `due` and `at` are epoch milliseconds; `at` is int64's minimum for rejects and
commands. `origin` of a timer is the offset of its original. `origin` of a command without an id is the offset of the
named record: -1 for a record of another log, -2 for several records, whose offsets are then in `value`, as text with
commas. `due` of a move is the new due time; `target` of a command is the topic of its answer. `schedule` has the
headers of a recurring message, opaque to the store; `tick` is the number of its delivery, 0 for its first record and
for all other messages."""

PAYLOAD = pa.schema(_PAYLOAD_FIELDS)
"""The columns that delivery needs beside the position."""
NO_PAYLOAD = pa.RecordBatch.from_pylist([], PAYLOAD)


def payload_of(table: pa.Table) -> pa.RecordBatch:
    """The payload columns of an entry table as one record batch, cast to `PAYLOAD`."""
    columns = table.select(PAYLOAD_COLUMNS)
    if columns.schema != PAYLOAD:
        columns = columns.cast(PAYLOAD)
    batches = columns.combine_chunks().to_batches()
    return batches[0] if batches else NO_PAYLOAD
