"""Dead letters taken apart, and what is remembered of those that have gone back. Pure.

A dead letter is the original record followed by headers that say why and where from (headers.dead_letter_headers), so
what goes back is the record without those.

Which letters have gone back is written into the dead-letter topic itself, into the partition that they are in: a
*redriven record* has the one header `delay-redriven`, no key, and as its value the offsets as ranges,

    {"topic_id": "...", "offsets": [[17, 19], [21, 22]]}        17, 18 and 21

It comes after the letters that it is about, and Kafka deletes a partition from its beginning: so it is there for as
long as they are. (A consumer group's offsets are not: Kafka forgets those of a group without members after
`offsets.retention.minutes`.) A dead letter cannot be taken for one, since it has the headers of a dead letter.
"""

from __future__ import annotations

import json
import re
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
"""Reasons and targets that are counted one by one: a producer may make up any number of targets."""
OTHERS: Final = "(others)"
TEXT_LENGTH_MAX: Final = 1_024
"""Of what a letter says of itself: the target is what a producer wrote, and may be as long as a record."""

_ONLY_OURS: Final = frozenset(
    (*h.COPY, *h.DELIVERED, h.REASON, h.REASON_DETAIL, h.ATTEMPTS, h.OMITTED, h.REDRIVEN, h.HELD)
)
_OUR_PREFIXES: Final = (h.HELD_PREFIX, h.ESCAPED, "kafka_dlt-")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter taken apart: the record as it was, why it was refused, where it came from, where it was to go."""

    headers: Headers
    reason: str
    topic: str
    partition: int
    target: str
    is_cut: bool = False
    """Its value is not there: only the record in the delay topic has it."""
    origin: str = ""
    detail: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which letters go back (empty: all), and what is changed in their headers."""

    topics: Collection[str] = ()
    reasons: Collection[str] = ()
    targets: Collection[str] = ()
    since_ms: int | None = None
    until_ms: int | None = None
    places: Collection[Origin] = ()
    """Letters by topic, partition and offset of their own."""
    due_now: bool = False
    set_headers: Sequence[tuple[str, bytes]] = ()

    def chooses(self, letter: Letter, timestamp_ms: int, place: Origin) -> bool:
        """Whether the filters let it pass; `timestamp_ms` and `place` are those of the dead letter."""
        if self.places and place not in self.places:
            return False
        pairs = ((self.topics, letter.topic), (self.reasons, letter.reason), (self.targets, letter.target))
        is_recent = self.since_ms is None or timestamp_ms >= self.since_ms
        is_old = self.until_ms is None or timestamp_ms < self.until_ms
        return is_recent and is_old and all(not wanted or found in wanted for wanted, found in pairs)

    def __post_init__(self) -> None:
        """Raises ValueError for a header that is not to be set."""
        names = {name for name, _ in self.set_headers}
        if taken := sorted(name for name in names if name in _ONLY_OURS or name.startswith(_OUR_PREFIXES)):
            raise ValueError(f"{', '.join(taken)} belong to the delay bridge: only it writes them")
        h.refuse_unwritable(names)

    def headers(self, letter: Letter) -> Headers:
        """The headers with which it goes back."""
        gone = {name for name, _ in self.set_headers}
        if self.due_now:
            gone |= {h.UNTIL, h.FOR, h.LEVEL, *h.COPY}
        kept = [(name, value) for name, value in letter.headers if name not in gone]
        return [*kept, *([(h.FOR, b"0")] if self.due_now else []), *self.set_headers]


@dataclass(slots=True)
class Report:
    """How many letters, by (reason, target): `back` have gone or would go back, `broken` need other headers; `left`
    were not chosen, `foreign` are no dead letters of these delay topics, `before` have gone back in an earlier run.
    """

    back: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = 0
    foreign: int = 0
    before: int = 0

    def add(self, other: Report) -> None:
        for mine, theirs in ((self.back, other.back), (self.broken, other.broken)):
            for (reason, target), count in theirs.items():
                is_known = (reason, target) in mine or len(mine) < LINES_MAX
                mine[(reason, target) if is_known else (OTHERS, "")] += count
        self.left += other.left
        self.foreign += other.foreign
        self.before += other.before


def read_letter(headers: Headers | None) -> Letter | None:
    """Take a record's headers apart; None when the bridge did not write them."""
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
            attempts=_number(_text(why[h.ATTEMPTS])) if h.ATTEMPTS in why else 0,
        )
    except (KeyError, ValueError, struct.error):
        return None


def _text(value: bytes | None) -> str:
    return (value or b"")[: 4 * TEXT_LENGTH_MAX].decode("utf-8", "replace").strip(h.WHITE_SPACE)[:TEXT_LENGTH_MAX]


def _number(text: str) -> int:
    if not re.fullmatch(h.NUMBER_PATTERN, text):
        raise ValueError(f"{text[:99]!r} is not a whole number of at most 15 digits")
    return int(text)


# -- what has gone back ------------------------------------------------------------------------------------------------


class Gone:
    """The offsets of one partition that have gone back."""

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
    """Whether a record of a dead-letter topic says what has gone back."""
    return [name for name, _ in headers or []] == [h.REDRIVEN]


def redriven(topic_id: str, offsets: Iterable[int]) -> tuple[Headers, bytes]:
    """Headers and value of the record that says that these offsets, rising ones, have gone back."""
    ranges: list[list[int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + 1
        else:
            ranges.append([offset, offset + 1])
    value = json.dumps({"topic_id": topic_id, "offsets": ranges}, separators=(",", ":"))
    return [(h.REDRIVEN, b"1")], value.encode()


def read_redriven(topic_id: str, value: bytes | None, place: str) -> list[Range]:
    """What `redriven` wrote, in the record at `place`. Raises StateError where that is about another topic, or cannot
    be read."""
    try:
        told = json.loads(value or b"")
        ranges = [(int(start), int(end)) for start, end in told["offsets"]]
        identity = told["topic_id"]
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
        raise StateError(
            "the record that says which dead letters have gone back cannot be read",
            hint=_CHOOSE,
            record=place,
            code="DB-1012",
        ) from None
    if identity != topic_id:
        raise StateError(
            "the dead-letter topic is a copy: which letters have gone back is known of the original only",
            hint=_CHOOSE,
            record=place,
            code="DB-1012",
        )
    return ranges


_CHOOSE: Final = (
    "`delay-bridge redrive --since TIME` goes on: letters from TIME on that have gone back before go back twice, "
    "older ones that have not stay here. Without --execute it only counts."
)
