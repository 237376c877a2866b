"""Who reads the delay topics now, and the other values that the readers' threads share.

    query_serves   plain reader                       Spark
    no             reads                              starts; or its query reads, too, and has not come as far yet
    yes            asks where quiet partitions end    its query reads

A suspect partition has the batch reader in place of both (batches/suspects.py). Nobody reads one with a corrupt batch,
or one that is held without room (`Stores.append`), until it is released.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from bridge.stores.names import Offsets, SourceName
from timerstore.rows.position import Progress


class Reading:
    """See the module. For any thread."""

    def __init__(self) -> None:
        self.query_serves = False
        self.stopping = threading.Event()
        self.read_to: dict[SourceName, int] = {}
        """The offsets that the plain reader has reached."""
        self.log_ends: Offsets = {}
        """The latest known ends of the logs."""
        self._lock = threading.Lock()

    def known_ends(self, committed: Mapping[SourceName, Progress]) -> dict[SourceName, int]:
        """The latest known ends of the logs of these partitions. None is below the committed O."""
        offsets = {name: state.offset for name, state in committed.items()}
        return {name: max(offset, self.log_ends.get(name, 0)) for name, offset in offsets.items()}

    def pass_to(self, *, query: bool) -> bool:
        """Let the query serve, or the plain reader read; returns whether that is a change."""
        with self._lock:
            is_changed, self.query_serves = self.query_serves is not query, query
            return is_changed
