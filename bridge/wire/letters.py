"""Parsing of dead letters, and the records of the redriven ones. Pure.

A dead letter is the original record followed by headers with the reason and the origin (headers.dead_letter_headers). A
redrive writes the record without these headers.

The dead-letter topic itself records which letters have gone back, in the partition of the letters: a *redriven record*
has the single header `delay-redriven`, no key, and the offsets as ranges in its value:

    {"topic_id": "...", "offsets": [[17, 19], [21, 22]]}        17, 18 and 21

It follows the letters that it names, and Kafka deletes a partition from its beginning, so it outlives them. (A consumer
group's offsets would not: Kafka deletes those of a group without members after `offsets.retention.minutes`.) A dead
letter is never mistaken for a redriven record, since it has the headers of a dead letter.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bridge.errors import StateError
from bridge.wire import headers as h
from bridge.wire.headers import Headers, Origin

LINES_MAX: Final = 100
"""Limit of separate counts by reason and target: a producer may invent any number of targets."""
OTHERS: Final = "(others)"
TEXT_LENGTH_MAX: Final = 1_024
"""Limit of a text from a letter: the target comes from a producer, and may be as long as a record."""

_ONLY_OURS: Final = frozenset(
    (*h.COPY, *h.DELIVERED, h.REASON, h.REASON_DETAIL, h.ATTEMPTS, h.OMITTED, h.REDRIVEN, h.HELD)
)
_OUR_PREFIXES: Final = (h.HELD_PREFIX, h.ESCAPED, "kafka_dlt-")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A parsed dead letter: the original record's headers, the reason of the refusal, the origin, the target."""

    headers: Headers
    reason: str
    topic: str
    partition: int
    target: str
    is_cut: bool = False
    """Whether the letter lacks the value: only the record in the delay topic has it."""
    origin: str = ""
    detail: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterChoice:
    """The letters that go back (empty: all), and the changes of their headers."""

    topics: Collection[str] = ()
    reasons: Collection[str] = ()
    targets: Collection[str] = ()
    since_ms: int | None = None
    until_ms: int | None = None
    places: Collection[Origin] = ()
    """Letters by their own topic, partition and offset."""
    due_now: bool = False
    set_headers: Sequence[tuple[str, bytes]] = ()

    def chooses(self, letter: Letter, timestamp_ms: int, place: Origin) -> bool:
        """Whether the letter passes the filters; `timestamp_ms` and `place` are those of the dead letter."""
        if self.places and place not in self.places:
            return False
        pairs = ((self.topics, letter.topic), (self.reasons, letter.reason), (self.targets, letter.target))
        is_recent = self.since_ms is None or timestamp_ms >= self.since_ms
        is_old = self.until_ms is None or timestamp_ms < self.until_ms
        return is_recent and is_old and all(not wanted or value in wanted for wanted, value in pairs)

    def __post_init__(self) -> None:
        """Raises ValueError for a header that users must not set."""
        names = {name for name, _ in self.set_headers}
        if taken := sorted(name for name in names if name in _ONLY_OURS or name.startswith(_OUR_PREFIXES)):
            raise ValueError(f"{', '.join(taken)} belong to the delay bridge: only the bridge writes them")
        h.refuse_unwritable(names)

    def headers(self, letter: Letter) -> Headers:
        """The headers of the letter's record when it goes back."""
        gone = {name for name, _ in self.set_headers}
        if self.due_now:
            gone |= {h.UNTIL, h.FOR, h.LEVEL, *h.COPY}
        kept = [(name, value) for name, value in letter.headers if name not in gone]
        return [*kept, *([(h.FOR, b"0")] if self.due_now else []), *self.set_headers]


@dataclass(slots=True)
class RedriveReport:
    """Counts of letters, `back` and `broken` by (reason, target). `back` have gone or would go back; `broken` need
    other headers; `left` were not chosen; `foreign` are not dead letters of these delay topics; `before` went back in
    an earlier run.
    """

    back: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = 0
    foreign: int = 0
    before: int = 0

    def add(self, other: RedriveReport) -> None:
        for mine, theirs in ((self.back, other.back), (self.broken, other.broken)):
            for (reason, target), count in theirs.items():
                is_known = (reason, target) in mine or len(mine) < LINES_MAX
                mine[(reason, target) if is_known else (OTHERS, "")] += count
        self.left += other.left
        self.foreign += other.foreign
        self.before += other.before


def read_letter(headers: Headers | None) -> Letter | None:
    """Parse a record's headers; None if the record is not a dead letter."""
    names = [name for name, _ in headers or []]
    if headers is None or h.REASON not in names:
        return None
    cut = len(names) - 1 - names[::-1].index(h.REASON)
    why, record = dict(headers[cut:]), headers[:cut]
    try:
        return Letter(
            headers=record,
            reason=_text(why[h.REASON]),
            topic=_text(why[h.DLT_TOPIC]),
            partition=struct.unpack(">i", why[h.DLT_PARTITION] or b"")[0],
            target=_text(dict(record).get(h.TOPIC)),
            is_cut=h.OMITTED in why or any(name.startswith(h.ESCAPED) for name, _ in record),
            origin=_text(why.get(h.ORIGIN)),
            detail=_text(why.get(h.REASON_DETAIL)),
            attempts=h.parse_whole(_text(why[h.ATTEMPTS])) if h.ATTEMPTS in why else 0,
        )
    except (KeyError, ValueError, struct.error):
        return None


def _text(value: bytes | None) -> str:
    return (value or b"")[: 4 * TEXT_LENGTH_MAX].decode("utf-8", "replace").strip(h.WHITE_SPACE)[:TEXT_LENGTH_MAX]


# -- redriven letters --------------------------------------------------------------------------------------------------


class Gone:
    """The offsets of redriven letters in one partition."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        merged: list[Range] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]

    def __contains__(self, offset: int) -> bool:
        i = bisect_right(self._starts, offset)
        return i > 0 and offset < self._ends[i - 1]


def is_redriven(headers: Headers | None) -> bool:
    """Whether a record of a dead-letter topic is a redriven record."""
    return [name for name, _ in headers or []] == [h.REDRIVEN]


def redriven(topic_id: str, offsets: Iterable[int]) -> tuple[Headers, bytes]:
    """Headers and value of the redriven record for these offsets, which rise."""
    ranges: list[list[int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + 1
        else:
            ranges.append([offset, offset + 1])
    value = json.dumps({"topic_id": topic_id, "offsets": ranges}, separators=(",", ":"))
    return [(h.REDRIVEN, b"1")], value.encode()


def read_redriven(topic_id: str, value: bytes | None, place: str) -> list[Range]:
    """The inverse of `redriven`, for the record at `place`. Raises StateError for a record that names another topic, or
    that is unreadable."""
    try:
        fields = json.loads(value or b"")
        ranges = [(int(start), int(end)) for start, end in fields["offsets"]]
        identity = fields["topic_id"]
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
        raise StateError(
            "the record of redriven dead letters cannot be read",
            hint=_CHOOSE,
            record=place,
            code="DB-1012",
        ) from None
    if identity != topic_id:
        raise StateError(
            "the dead-letter topic is a copy: its redriven records apply to the original topic only",
            hint=_CHOOSE,
            record=place,
            code="DB-1012",
        )
    return ranges


_CHOOSE: Final = (
    "`delay-bridge redrive --since TIME` goes on. It repeats letters from TIME on that have gone back before, and "
    "leaves older ones here. Without --execute it only counts."
)
