"""Which records of a transaction are in Kafka, told by what each says of the message that it was made of. Pure.

    record            in                                    names its row by                          then its row
    delivery          its target                            delay-origin, delay-tick                  has its record
    dead letter       the dead-letter topic                 kafka_dlt-original-*, delay-origin        has its record
    copy              its own partition of the delay topic  delay-copy-origin, delay-copy-tick        has its record
    copy of a tick that keeps its schedule                  the same                                  has both
    next tick         the same; it has a schedule, no time of its own, and no rolls                   has its next tick

A row that has its record is finished without another one; a tick of which one of the two is missing gets that one.
Commands that were forwarded, what commands write, and answers are not looked for: they are written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bridge.delivery.doubt.findings import Part
from bridge.wire import headers as h
from bridge.wire.headers import Headers
from timerstore.rows.position import OFFSET_BITS, OFFSET_MAX, Int64s, sources_of
from timerstore.rows.sources import SourceName, Sources

See = Callable[[str, int, int, Headers], None]
"""As `Wanted.see`: topic, partition, offset, headers."""

_SCHEDULE: Final = frozenset({h.EVERY, h.CRON})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Rows that were planned in one piece: their `keys`, (source, offset) packed, int64[n]; columns of their payload,
    which is not kept itself; `tick` int32[n].
    """

    keys: Int64s
    origin: pa.Array
    schedule: pa.Array
    tick: npt.NDArray[np.int32]

    @classmethod
    def of(cls, keys: Int64s, payload: pa.RecordBatch, tick: npt.NDArray[np.int32]) -> Planned:
        return cls(keys=keys, origin=payload.column("origin"), schedule=payload.column("schedule"), tick=tick)

    def rows(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Key, source, offset of the original, tick, and whether it recurs."""
        arrays = self.keys, sources_of(self.keys), self.tick
        key, source, tick = (array.tolist() for array in arrays)
        return zip(key, source, self.origin.to_pylist(), tick, self.schedule.is_valid().to_pylist(), strict=True)


class Wanted:
    """The rows of a transaction, and which of their records have been seen."""

    def __init__(self, planned: Iterable[Planned], sources: Sources, letter_topics: Collection[str]) -> None:
        self._sources = {name: index for index, name in enumerate(sources)}
        self._delay_topics = {topic for topic, _ in sources}
        self._letter_topics = letter_topics
        self._rows: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        """Keys of rows by source, origin and tick."""
        self._schedules: dict[tuple[int, int], int] = {}
        """Keys of rows with schedules by source and origin: each origin has one live copy with its schedule."""
        self._keys: set[int] = set()
        for piece in planned:
            for key, index, origin, tick, recurs in piece.rows():
                self._keys.add(key)
                self._rows[index, origin, tick].append(key)
                if recurs:
                    self._schedules[index, origin] = key
        self.seen: defaultdict[int, Part] = defaultdict(lambda: Part.NONE)
        """What each row has, by key; of those that have anything."""

    def see(self, topic: str, partition: int, offset: int, headers: Headers) -> None:
        """A record that may be one of them. One with wrong headers is another producer's."""
        said = dict(headers)
        if topic in self._delay_topics:
            self._see_copy((topic, partition), offset, said)
        elif topic in self._letter_topics:
            self._see_letter(said)
        else:
            self._see_delivery(said, _number(said.get(h.TICK, b"0")))

    def _see_delivery(self, said: Mapping[str, bytes | None], tick: int | None) -> None:
        place = _origin(said.get(h.ORIGIN))
        if place is None or tick is None or place[:2] not in self._sources:
            return
        for key in self._rows.get((self._sources[place[:2]], place[2], tick), ()):
            self.seen[key] |= Part.RECORD

    def _see_letter(self, said: Mapping[str, bytes | None]) -> None:
        place, offset = _origin(said.get(h.ORIGIN)), int.from_bytes(said.get(h.DLT_OFFSET) or b"", "big")
        if place is None or place[:2] not in self._sources:
            return
        key = (self._sources[place[:2]] << OFFSET_BITS) | min(offset, OFFSET_MAX)
        if key in self._keys:
            self.seen[key] |= Part.RECORD
        else:  # one that was held: its copy names the original only
            self._see_delivery(said, 0)

    def _see_copy(self, name: SourceName, offset: int, said: Mapping[str, bytes | None]) -> None:
        """A copy lies behind the record that it was made of, which may be a copy as well."""
        numbers = [_number(said.get(header, b"0")) for header in (h.COPY_ORIGIN, h.COPY_TICK, h.COPY_ROLLS)]
        if h.COPY_ORIGIN not in said or None in numbers or name not in self._sources:
            return
        source, (origin, tick, rolls) = self._sources[name], (number or 0 for number in numbers)
        has_schedule = not _SCHEDULE.isdisjoint(said)
        key = self._schedules.get((source, origin))
        if has_schedule and key is not None and rolls == 0 and h.COPY_AT not in said:
            if (key & OFFSET_MAX) < offset:
                self.seen[key] |= Part.NEXT
            return
        for key in self._rows.get((source, origin, tick), ()):
            if (key & OFFSET_MAX) < offset:
                self.seen[key] |= (Part.RECORD | Part.NEXT) if has_schedule else Part.RECORD


def _origin(text: bytes | None) -> h.Origin | None:
    try:
        return h.parse_origin(h.text_of(text))
    except ValueError:
        return None


def _number(text: bytes | None) -> int | None:
    """A number of ours; None: another producer's."""
    return int(text) if text is not None and text.isdigit() and len(text) <= 15 else None
