"""The records of a transaction in Kafka, recognised by their own statements about their messages. Pure.

    record            in                                    names its row by                          then its row
    delivery          its target                            delay-origin, delay-tick                  has its record
    dead letter       the dead-letter topic                 kafka_dlt-original-*, delay-origin        has its record
    copy              its own partition of the delay topic  delay-copy-origin, delay-copy-tick        has its record
    copy of a tick that keeps its schedule                  the same                                  has both
    next tick         the same; it has a schedule, no time of its own, and no rolls                   has its next tick

A row with its record is finished without another record; of a tick's two records, only a missing one is written.
Forwarded commands, the output of commands, and answers are written again without a search for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bridge.delivery.doubt.findings import Part
from bridge.stores.names import SourceName
from bridge.wire import headers as h
from bridge.wire.headers import Headers
from timerstore.rows.entry import DECIDED, Kind
from timerstore.rows.position import Int64s

See = Callable[[str, int, int, Headers], None]
"""As `Wanted.see`: topic, partition, offset, headers."""
IsSought = Callable[[str, int, int, Headers], bool]
"""As `Wanted.is_sought`."""
Row = tuple[int, int, bool]
"""The row's name in records: the offset of its original, its tick, and whether it recurs."""
Seen = Mapping[SourceName, Mapping[int, Part]]
"""The rows' records in Kafka, by offset."""

COMMANDS: Final = (Kind.CANCEL, *DECIDED)
_SCHEDULE: Final = frozenset({h.EVERY, h.CRON})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Rows that were planned in one piece: their `keys`, (source, offset) packed, and `at`, int64[n]; `kind` int8[n];
    columns of their payload, which itself is not kept; `tick` int32[n]."""

    keys: Int64s
    at: Int64s
    kind: npt.NDArray[np.int8]
    origin: pa.Array
    schedule: pa.Array
    tick: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        keys: Int64s,
        at: Int64s,
        kind: npt.NDArray[np.int8],
        payload: pa.RecordBatch,
        tick: npt.NDArray[np.int32],
    ) -> Planned:
        origin, schedule = payload.column("origin"), payload.column("schedule")
        return cls(keys=keys, at=at, kind=kind, origin=origin, schedule=schedule, tick=tick)

    def commands(self) -> Int64s:
        """The keys of commands."""
        return self.keys[np.isin(self.kind, COMMANDS)]

    def rows(self) -> Iterator[tuple[int, int, Row]]:
        """Key, effective time, and name of each row."""
        key, at, tick = (array.tolist() for array in (self.keys, self.at, self.tick))
        named = zip(self.origin.to_pylist(), tick, self.schedule.is_valid().to_pylist(), strict=True)
        return zip(key, at, named, strict=True)


class Wanted:
    """Rows in doubt, and the records of theirs that were seen."""

    def __init__(self, rows: Mapping[SourceName, Mapping[int, Row]], letter_topics: Collection[str]) -> None:
        self._delay_topics = {topic for topic, _ in rows}
        self._letter_topics = letter_topics
        self._all = rows
        self._rows: defaultdict[tuple[SourceName, int, int], list[int]] = defaultdict(list)
        """Offsets of rows by source, origin and tick."""
        self._schedules: dict[tuple[SourceName, int], int] = {}
        """Offsets of rows with schedules by source and origin: each origin has one live copy with its schedule."""
        for name, mine in rows.items():
            for offset, (origin, tick, recurs) in mine.items():
                self._rows[name, origin, tick].append(offset)
                if recurs:
                    self._schedules[name, origin] = offset
        self._seen: defaultdict[SourceName, dict[int, Part]] = defaultdict(dict)

    def take(self) -> Seen:
        """The records seen since the last call, by row."""
        seen, self._seen = self._seen, defaultdict(dict)
        return seen

    def see(self, topic: str, partition: int, offset: int, headers: Headers) -> None:
        """Look at a record that may belong to a row. Wrong headers mean another producer."""
        said = dict(headers)
        if topic in self._delay_topics:
            self._see_copy((topic, partition), offset, said)
        elif topic in self._letter_topics:
            self._see_letter(said)
        else:
            self._see_delivery(said, _number(said.get(h.TICK, b"0")))

    def is_sought(self, topic: str, partition: int, offset: int, headers: Headers) -> bool:
        """Whether a record may belong to a row. It does not count as seen: its transaction may be aborted."""
        seen, self._seen = self._seen, defaultdict(dict)
        self.see(topic, partition, offset, headers)
        is_sought, self._seen = bool(self._seen), seen
        return is_sought

    def _add(self, name: SourceName, offset: int, part: Part) -> None:
        mine = self._seen[name]
        mine[offset] = mine.get(offset, Part.NONE) | part

    def _see_delivery(self, said: Mapping[str, bytes | None], tick: int | None) -> None:
        place = _origin(said.get(h.ORIGIN))
        if place is None or tick is None:
            return
        for offset in self._rows.get((place[:2], place[2], tick), ()):
            self._add(place[:2], offset, Part.RECORD)

    def _see_letter(self, said: Mapping[str, bytes | None]) -> None:
        place, offset = _origin(said.get(h.ORIGIN)), int.from_bytes(said.get(h.DLT_OFFSET) or b"", "big")
        if place is None:
            return
        if offset in self._all.get(place[:2], ()):
            self._add(place[:2], offset, Part.RECORD)
        else:  # a held letter: its copy names only the original
            self._see_delivery(said, 0)

    def _see_copy(self, name: SourceName, offset: int, said: Mapping[str, bytes | None]) -> None:
        """A copy lies behind its original, which may be a copy as well."""
        numbers = [_number(said.get(header, b"0")) for header in (h.COPY_ORIGIN, h.COPY_TICK, h.COPY_ROLLS)]
        if h.COPY_ORIGIN not in said or None in numbers:
            return
        origin, tick, rolls = (number or 0 for number in numbers)
        has_schedule = not _SCHEDULE.isdisjoint(said)
        row = self._schedules.get((name, origin))
        if has_schedule and row is not None and rolls == 0 and h.COPY_AT not in said:
            if row < offset:
                self._add(name, row, Part.NEXT)
            return
        for row in self._rows.get((name, origin, tick), ()):
            if row < offset:
                self._add(name, row, (Part.RECORD | Part.NEXT) if has_schedule else Part.RECORD)


def _origin(text: bytes | None) -> h.Origin | None:
    try:
        return h.parse_origin(h.text_of(text))
    except ValueError:
        return None


def _number(text: bytes | None) -> int | None:
    """A number in the bridge's form; None: another producer's."""
    return int(text) if text is not None and text.isdigit() and len(text) <= 15 else None
