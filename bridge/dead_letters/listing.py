"""Dead letters, the newest first, a page at a time; one of them; and the way back (redrive.py).

A page reads each partition backwards in pieces. Within one, letters come in the order of their offsets; letters of
several are merged by the time at which they were written, as far down as all partitions have been read. It keeps
neither values nor headers of what it has read, nor whole keys, and looks at a bounded number of records: then it has
fewer letters than were asked for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaException, Message

from bridge.dead_letters.reading import LetterTopics, Place, batches, make_consumer, place_of
from bridge.dead_letters.redrive import redrive
from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.errors import kafka_error
from bridge.settings.model import Settings
from bridge.wire.headers import Origin
from bridge.wire.letters import Choice, Gone, Letter, Range, Report, is_redriven, read_redriven
from bridge.wire.received import headers_of
from timerstore.clock import Clock

PIECE_ROWS: Final = 1_000
"""Read at once, of all partitions together."""
PIECE_ROWS_MIN: Final = 20
ROWS_MAX: Final = 20_000
"""Looked at for a page, and for what was noted behind it."""
KEY_BYTES_MAX: Final = 4_097
"""Of a key in a page: one more than is shown, so that it can be told that it is longer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLetter:
    """A dead letter, and where it is; its timestamp says when it was written."""

    place: Origin
    ts_ms: int
    letter: Letter
    key: bytes | None
    value: bytes | None
    redriven: bool | None
    """Whether it has gone back; None: that was not looked up, since too much has been written behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """Dead letters, the newest first, and for each partition the offset below which the next page begins; None: there
    are no more."""

    letters: Sequence[PlacedLetter]
    next: Mapping[Place, int] | None


@dataclass(slots=True)
class _Part:
    """A partition of which [`low`, `end`) was read; `ts_ms`: nothing below `low` is younger."""

    start: int
    low: int
    end: int
    ts_ms: float = math.inf
    found: list[tuple[float, PlacedLetter]] = field(default_factory=list)
    """Letters that fit, the newest first, each with the least timestamp so far: so they stay in order of offset."""


class _Seen(NamedTuple):
    """A record that was read; `letter` where it fits, without value and headers."""

    place: Place
    ts_ms: int
    letter: PlacedLetter | None


class Letterbox:
    """The dead-letter topics of a configuration: lists, and redrive, one at a time. Any thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._redriving = threading.Lock()

    def page(self, choice: Choice, below: Mapping[Place, int] | None, limit: int) -> LetterPage:
        """At most `limit` letters. Raises EnvironmentFailure."""
        cluster = Cluster(self._settings)
        topics = LetterTopics(self._settings, cluster, list(choice.topics))
        marks = cluster.watermarks(topics.places())
        ends = {place: mark.end if below is None else below.get(place, mark.start) for place, mark in marks.items()}
        parts = {
            place: _Part(mark.start, end, end)
            for place, mark in marks.items()
            if (end := min(ends[place], mark.end)) >= mark.start
        }
        with _Reader(self._settings, self._clock, topics) as reader:
            behind = {
                place: Watermarks(start=parts[place].end, end=mark.end)
                for place, mark in marks.items()
                if place in parts
            }
            is_known = sum(mark.end - mark.start for mark in behind.values()) <= ROWS_MAX
            if is_known:
                reader.read(behind, _nothing)
            looked_at = 0
            while (unread := _unread(parts)) and len(_ready(parts)) < limit and looked_at < ROWS_MAX:
                size = max(PIECE_ROWS_MIN, PIECE_ROWS // len(unread))
                piece = {each: Watermarks(start=max(p.start, p.low - size), end=p.low) for each, p in unread.items()}
                looked_at += sum(mark.end - mark.start for mark in piece.values())
                _take(parts, piece, reader.read(piece, partial(_seen, choice, topics)))
            letters = sorted(_ready(parts), key=lambda each: -each[0])[:limit]
            gone = reader.gone()
        chosen = {each.place for _, each in letters}
        following = {place: _next(part, chosen) for place, part in parts.items()}
        is_last = all(following[place] <= part.start for place, part in parts.items())
        return LetterPage(
            letters=[replace(each, redriven=_has_gone(each, gone) if is_known else None) for _, each in letters],
            next=None if is_last else following,
        )

    def get(self, place: Origin) -> PlacedLetter | None:
        """One, with its value and its record's headers; None where there is none. Raises EnvironmentFailure."""
        cluster = Cluster(self._settings)
        topics = LetterTopics(self._settings, cluster)
        where, offset = place[:2], place[2]
        if where not in topics.places():
            return None
        mark = cluster.watermarks([where])[where]
        if not mark.start <= offset < mark.end:
            return None
        with _Reader(self._settings, self._clock, topics) as reader:
            end = min(mark.end, offset + ROWS_MAX)
            found = reader.read({where: Watermarks(start=offset, end=offset + 1)}, lambda message: message)
            letter = topics.letter(found[0]) if found else None
            if letter is None:
                return None
            reader.read({where: Watermarks(start=offset + 1, end=end)}, _nothing)
            placed = _placed(found[0], letter)
            is_gone = _has_gone(placed, reader.gone())
            return replace(placed, redriven=is_gone if is_gone or end == mark.end else None)

    def redrive(self, choice: Choice, *, execute: bool) -> Report:
        """Put back what is chosen, or only count it. Raises BridgeError, also while another one goes on: it would be
        fenced."""
        if not self._redriving.acquire(blocking=False):
            raise EnvironmentFailure("another redrive is under way", hint="Wait for its end.", code="DB-3037")
        try:
            return redrive(self._settings, self._clock, choice, execute=execute)
        finally:
            self._redriving.release()


class _Reader:
    """A consumer, and what the records that it has read say of letters that have gone back."""

    def __init__(self, settings: Settings, clock: Clock, topics: LetterTopics) -> None:
        self._consumer: Consumer = make_consumer(settings)
        self._clock, self._topics = clock, topics
        self._ranges: dict[Place, list[Range]] = {}
        self._doubtful: set[Place] = set()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read(self, marks: Mapping[Place, Watermarks], keep: Callable[[Message], T | None]) -> list[T]:
        """What `keep` makes of the records between the marks that are no notes. The notes are taken in."""
        kept: list[T] = []
        try:
            for batch in batches(self._consumer, marks, self._clock, visible=True):
                for message in batch:
                    if is_redriven(headers_of(message)):
                        self._note(message)
                    elif (found := keep(message)) is not None:
                        kept.append(found)
        except KafkaException as exception:
            raise EnvironmentFailure(
                "cannot read the dead-letter topics",
                hint="It needs Read and Describe on them.",
                reason=kafka_error(exception).str(),
                code="DB-3036",
            ) from exception
        return kept

    def _note(self, message: Message) -> None:
        place = place_of(message)
        try:
            found = read_redriven(self._topics.topics[place[0]].topic_id, message.value(), str(message.offset()))
        except StateError:  # of a copied topic: a run says so
            self._doubtful.add(place)
            return
        self._ranges.setdefault(place, []).extend(found)

    def gone(self) -> Mapping[Place, Gone | None]:
        """What has gone back, as far as it was read; None where that cannot be known."""
        known = {place: Gone(found) for place, found in self._ranges.items()}
        return {**known, **dict.fromkeys(self._doubtful)}


def _unread(parts: Mapping[Place, _Part]) -> dict[Place, _Part]:
    """Partitions that may have the next letter."""
    return {place: part for place, part in parts.items() if part.low > part.start}


def _ready(parts: Mapping[Place, _Part]) -> list[tuple[float, PlacedLetter]]:
    """Letters that nothing unread comes before."""
    since = max((part.ts_ms for part in _unread(parts).values()), default=-math.inf)
    return [each for part in parts.values() for each in part.found if each[0] >= since]


def _seen(choice: Choice, topics: LetterTopics, message: Message) -> _Seen:
    """A record as a page keeps it."""
    place, ts_ms, letter = place_of(message), message.timestamp()[1], topics.letter(message)
    if letter is None or not choice.chooses(letter, ts_ms, (*place, message.offset() or 0)):
        return _Seen(place, ts_ms, None)
    key = None if (whole := message.key()) is None else whole[:KEY_BYTES_MAX]
    placed = _placed(message, replace(letter, headers=[]))
    return _Seen(place, ts_ms, replace(placed, value=None, key=key))


def _nothing(_: Message) -> None:
    """Of records of which only the notes count."""


def _take(parts: Mapping[Place, _Part], piece: Mapping[Place, Watermarks], seen: Sequence[_Seen]) -> None:
    for each in reversed(seen):
        part = parts[each.place]
        part.ts_ms = min(part.ts_ms, each.ts_ms)
        if each.letter is not None:
            part.found.append((part.ts_ms, each.letter))
    for place, mark in piece.items():
        parts[place].low = mark.start


def _placed(message: Message, letter: Letter) -> PlacedLetter:
    place = (*place_of(message), message.offset() or 0)
    key, value = message.key(), message.value()
    return PlacedLetter(
        place=place, ts_ms=message.timestamp()[1], letter=letter, key=key, value=value, redriven=None
    )  # fmt: skip


def _next(part: _Part, chosen: set[Origin]) -> int:
    """Below which offset the next page begins: all above it is shown, or does not fit."""
    left = [each.place[2] for _, each in part.found if each.place not in chosen]
    return max(left) + 1 if left else part.low


def _has_gone(letter: PlacedLetter, gone: Mapping[Place, Gone | None]) -> bool | None:
    found = gone.get(letter.place[:2], Gone([]))
    return None if found is None else letter.place[2] in found
