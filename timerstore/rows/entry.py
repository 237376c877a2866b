"""The columns of an entry: a record of a log, decoded.

`ENTRY` is what the store takes in and what a segment holds. In memory the two columns of the position live in the row
references (sorted_runs.py), and the rest, `PAYLOAD`, in Arrow chunks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import pyarrow as pa


class Kind(IntEnum):
    """What a record of a delay topic is."""

    TIMER = 0
    CANCEL = 1
    REJECT = 2
    MOVE = 3
    """Gives a message another due time."""
    RECALL = 4
    """A cancel that is answered."""


UNCOPYABLE: Final = -1
"""`rolls` of an original that is too large for a copy. Decoding says so: when a command is read again, the same must
come of it as before."""
DECIDED: Final = (Kind.MOVE, Kind.RECALL)
"""Commands that take effect, and are answered, in the transaction that finishes them (cancels/commands.py)."""


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
commands. `origin` is the offset of a timer's original; of a command without an id it is that of the record which it
names, -1 for one of another log; it is -2 where there are several, and `value` is their offsets then, as text with
commas. Of a move `due` is when the message is to be due, and of a command `target` is the topic of its answer.
`schedule` is what the headers of a recurring message say, opaque to the store; `tick` is the number of its delivery, 0
for the record that begins it, and for all other messages."""

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
