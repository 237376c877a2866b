"""Doubts in a file beside the index, for as long as their rows may be pending. A pure value, and its text.

The text is compressed. With numbers chosen by a hostile producer it takes up to 45 bytes a row, so the file has room
for 1.4 million rows. The largest configurable transaction has a million rows, and the one after an unasked end is eight
times smaller.

A doubt holds until the committed state covers its rows, whoever has committed that. So it outlives stores, the process,
and times in which the partition belongs to another instance. It ends with its topic, and above a cut of its log: there,
other records have these offsets.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bridge.delivery.doubt.findings import Part
from bridge.delivery.doubt.records import Row
from bridge.json_file import JsonFile
from bridge.stores.names import PlainPosition, SourceName
from bridge.wire.committed_state import CommittedState
from timerstore.rows.cuts import unseen_cut
from timerstore.rows.position import OFFSET_MAX

FILE: Final = "rows-in-doubt.json"
LEVEL: Final = 1
"""The compression level: delivery waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Rows of one partition in a transaction that ended unasked.

    `rows` by offset, in ascending order; `unread`: the rows' destination topics that are not yet looked up, with the
    offsets of those rows; `written`: the records that were found. The transaction began at `began_ms`, when O was
    `since`. `last` is the largest position of the rows (None: they are finished by offset); `topic_id` and `cut`, a
    number, identify the log."""

    topic_id: str
    cut: int
    began_ms: int
    since: int
    last: PlainPosition | None
    rows: dict[int, Row]
    unread: Mapping[str, tuple[int, ...]]
    written: Mapping[int, Part]

    @property
    def offset(self) -> int:
        """The place by which an operator names the doubt."""
        return next(iter(self.rows))

    def in_doubt(self) -> set[int]:
        """Rows with a destination topic that is not yet looked up."""
        return {offset for offsets in self.unread.values() for offset in offsets}

    def read(self, topic: str) -> Doubt:
        """The doubt after the look-up of a topic."""
        return replace(self, unread={name: offsets for name, offsets in self.unread.items() if name != topic})

    def found(self, parts: Mapping[int, Part]) -> Doubt:
        """The doubt after these records were seen."""
        new = {o: self.written.get(o, Part.NONE) | part for o, part in parts.items() if o in self.rows}
        return replace(self, written={**self.written, **new})

    def decided(self, name: SourceName, *, is_committed: bool) -> Doubt:
        """The doubt after a decision: the records without a look-up count as written, or as not written."""
        parts: dict[int, Part] = {}
        for topic, offsets in self.unread.items() if is_committed else ():
            sought = Part.RECORD | Part.NEXT if topic == name[0] else Part.RECORD
            parts |= {offset: parts.get(offset, Part.NONE) | sought for offset in offsets}
        return replace(self.found(parts), unread={})

    def joined(self, later: Doubt) -> Doubt:
        """Both doubts, of the same log, in one."""
        return replace(
            later,
            began_ms=min(self.began_ms, later.began_ms),
            since=min(self.since, later.since),
            last=max((each.last for each in (self, later) if each.last is not None), default=None),
            rows=dict(sorted({**self.rows, **later.rows}.items())),
            unread={t: (*self.unread.get(t, ()), *later.unread.get(t, ())) for t in {*self.unread, *later.unread}},
            written=self.written,
        )

    def under(self, state: CommittedState) -> Doubt | None:
        """The rest of the doubt under a committed state."""
        if state.topic_id != self.topic_id:
            return None
        kept, cut = self, unseen_cut(state.cuts, self.cut)
        if cut is not None:
            # Copies that are written behind a cut lie below the O from before the cut.
            number, since = state.cuts[-1][0] if state.cuts else 0, min(self.since, cut)
            kept = replace(self._within(range(cut)), cut=number, since=since)
        if kept.rows and kept.offset < state.first_offset:  # given up by an operator, or no longer in the log
            kept = kept._within(range(state.first_offset, OFFSET_MAX))
        steps = [(state.offset, state.position), *((end, (at, offset)) for end, at, offset in state.frozen)]
        is_over = not kept.rows or any(
            (kept.last is None or (position is not None and kept.last <= position)) and next(reversed(kept.rows)) < end
            for end, position in steps
        )
        return None if is_over else kept

    def _within(self, kept: range) -> Doubt:
        unread = {topic: tuple(o for o in offsets if o in kept) for topic, offsets in self.unread.items()}
        return replace(
            self,
            rows={offset: row for offset, row in self.rows.items() if offset in kept},
            unread={topic: offsets for topic, offsets in unread.items() if offsets},
            written={offset: part for offset, part in self.written.items() if offset in kept},
        )


class DoubtFile:
    """See the module. One thread."""

    def __init__(self, directory: Path) -> None:
        self._file = JsonFile(directory, FILE, "messages in doubt are delivered again then, so that some come twice.")

    def write(self, doubts: Mapping[SourceName, Doubt]) -> None:
        """Write these doubts in place of all earlier ones. Raises EnvironmentFailure."""
        if doubts or self._file.path.exists():
            text = json.dumps([_told(name, doubt) for name, doubt in doubts.items()], separators=(",", ":"))
            self._file.write({"doubts": base64.b64encode(zlib.compress(text.encode(), LEVEL)).decode()})

    def read(self) -> dict[SourceName, Doubt]:
        """Read the doubts. Raises EnvironmentFailure, also for a damaged file: it ends a start, since the partitions to
        hold are unknown."""
        return self._file.read(_unpacked) or {}


def _unpacked(found: dict[str, Any]) -> dict[SourceName, Doubt]:
    try:
        text = zlib.decompress(base64.b64decode(found["doubts"]))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return dict(map(_decoded, json.loads(text)))


def _told(name: SourceName, doubt: Doubt) -> dict[str, Any]:
    return {
        "partition": name,
        "log": [doubt.topic_id, doubt.cut],
        "began": [doubt.began_ms, doubt.since],
        "last": doubt.last,
        "rows": [[offset, *row] for offset, row in doubt.rows.items()],
        "unread": {topic: list(offsets) for topic, offsets in doubt.unread.items()},
        "written": [[offset, part.value] for offset, part in doubt.written.items()],
    }


def _decoded(told: dict[str, Any]) -> tuple[SourceName, Doubt]:
    (topic, number), (topic_id, cut), (began_ms, since) = told["partition"], told["log"], told["began"]
    last = told["last"]
    return (str(topic), int(number)), Doubt(
        topic_id=str(topic_id),
        cut=int(cut),
        began_ms=int(began_ms),
        since=int(since),
        last=None if last is None else (int(last[0]), int(last[-1])),  # earlier versions name the partition in between
        rows={int(offset): (int(origin), int(tick), bool(recurs)) for offset, origin, tick, recurs in told["rows"]},
        unread={str(name): tuple(map(int, offsets)) for name, offsets in told["unread"].items()},
        written={int(offset): Part(part) for offset, part in told["written"]},
    )
