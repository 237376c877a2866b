"""Who reads the delay topics now: all decisions about it are in this file.

    PLAIN --RELIEVED--> QUERY --QUERY_ENDED, STANDS_STILL, CHANGED--> PLAIN
    PLAIN --JOB_BEGAN--> JOB --JOB_ENDED, STANDS_STILL--> PLAIN

    state   plain reader                               Spark
    PLAIN   reads                                      starts; or its query reads, too, and has not come as far yet
    JOB     rests                                      a batch job reads a large backlog
    QUERY   asks where quiet partitions end            its query reads

A suspect partition has the batch reader in place of both (batches/suspects.py). Nobody reads one with a corrupt batch,
or one that is held without room (`Stores.append`), until it is released.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import Enum
from typing import Final

from bridge.stores.names import SourceName

Offsets = Mapping[SourceName, int]


class Reader(Enum):
    """See the table above."""

    PLAIN = "plain"
    JOB = "job"
    QUERY = "query"


class ReaderEvent(Enum):
    """The causes of changes."""

    RELIEVED = "the query has come as far as the plain reader"
    QUERY_ENDED = "the query has ended, or is to end"
    JOB_BEGAN = "a batch job begins"
    JOB_ENDED = "the batch job has ended"
    STANDS_STILL = "Spark does not come on"
    CHANGED = "partitions have come or gone"


TRANSITIONS: Final[Mapping[Reader, Mapping[ReaderEvent, Reader]]] = {
    Reader.PLAIN: {ReaderEvent.RELIEVED: Reader.QUERY, ReaderEvent.JOB_BEGAN: Reader.JOB},
    Reader.JOB: {ReaderEvent.JOB_ENDED: Reader.PLAIN, ReaderEvent.STANDS_STILL: Reader.PLAIN},
    Reader.QUERY: dict.fromkeys((ReaderEvent.QUERY_ENDED, ReaderEvent.STANDS_STILL, ReaderEvent.CHANGED), Reader.PLAIN),
}


class Reading:
    """The state, and other values that the readers' threads share. For any thread."""

    def __init__(self) -> None:
        self.reader = Reader.PLAIN
        self.stopping = threading.Event()
        self.read_to: dict[SourceName, int] = {}
        """The offsets that the plain reader has reached."""
        self.log_ends: Offsets = {}
        """The latest known ends of the logs."""
        self._lock = threading.Lock()

    def advance(self, event: ReaderEvent) -> bool:
        """Go to the next state, if the event changes the present one; returns whether it does."""
        with self._lock:
            after = TRANSITIONS[self.reader].get(event, self.reader)
            is_changed, self.reader = after is not self.reader, after
            return is_changed
