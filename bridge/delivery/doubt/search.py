"""One look-up of rows in doubt, in a thread of its own: other rows are delivered meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

from bridge.delivery.doubt.doubt_file import Doubt
from bridge.delivery.doubt.look_up import WHOLE, Place
from bridge.delivery.doubt.records import IsSought, See, Seen, Wanted
from bridge.stores.names import SourceName
from bridge.telemetry.heartbeats import Beat, unwatched

Read = Callable[[Mapping[Place, int], See, IsSought, Callable[[], bool]], Iterator[tuple[Place, str]]]
"""As `LookUp`."""


class DoubtSearch:
    """See the module. Its findings are facts, independent of the partitions' present owner."""

    def __init__(self, read: Read, doubts: Mapping[SourceName, Doubt], letter_topics: Collection[str]) -> None:
        self.names = set(doubts)
        """The partitions in the look-up, which wait for it."""
        self._read = read
        self._wanted = Wanted({name: doubt.rows for name, doubt in doubts.items()}, letter_topics)
        self._since = _since(doubts)
        self._is_over = threading.Event()
        self._told: queue.SimpleQueue[tuple[Place, str, Seen]] = queue.SimpleQueue()
        self._is_done = threading.Event()

    def run(self, beat: Beat = unwatched) -> None:
        """Run until all is read, or cannot be read, or `end`."""
        left = dict.fromkeys(self._since)

        def is_over() -> bool:
            beat()
            return self._is_over.is_set()

        try:
            for place, reason in self._read(self._since, self._wanted.see, self._wanted.is_sought, is_over):
                self._told.put((place, reason, self._wanted.take()))
                left.pop(place, None)
        except Exception as error:  # noqa: BLE001 - it becomes the reason of a failed read, which is repeated
            for place in left:
                self._told.put((place, str(error) or repr(error), {}))
        self._is_done.set()

    def leave(self, names: Collection[SourceName]) -> bool:
        """Remove partitions that need it no longer. Returns whether others remain; otherwise it ends."""
        self.names.difference_update(names)
        if not self.names:
            self.end()
        return bool(self.names)

    def end(self) -> None:
        """End as soon as possible, since no partition needs the result."""
        self._is_over.set()

    @property
    def is_done(self) -> bool:
        """Whether `told` has all results."""
        return self._is_done.is_set()

    def told(self) -> list[tuple[Place, str, Seen]]:
        """The places that are done by now, with the reason of a failed read, and the records seen meanwhile."""
        results = []
        while not self._told.empty():
            results.append(self._told.get_nowait())
        return results


def place_of(name: SourceName, topic: str) -> Place:
    """The place to read for a partition's rows in a topic: copies are in the partition itself."""
    return name if topic == name[0] else (topic, WHOLE)


def _since(doubts: Mapping[SourceName, Doubt]) -> dict[Place, int]:
    since: dict[Place, int] = {}
    for name, doubt in doubts.items():
        for topic in doubt.unread:
            place = place_of(name, topic)
            begin = doubt.began_ms if place[1] == WHOLE else doubt.since
            since[place] = min(begin, since.get(place, begin))
    return since
