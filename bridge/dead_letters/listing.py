"""Pages of dead letters, the newest first, and single letters. redrive.py puts letters back.

A page reads each partition backwards in pieces. The letters of one partition keep the order of their offsets. Those of
several partitions are merged by their timestamps, down to the latest point that all partitions have reached. A page
keeps no values, no headers and no whole keys. It reads a bounded number of records, and so may have fewer letters than
its limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaException, Message

from bridge.dead_letters.reading import LetterTopics, Place, make_consumer, partition_of, record_batches
from bridge.dead_letters.redrive import redrive_letters
from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.errors import kafka_error
from bridge.settings.model import Settings
from bridge.wire.headers import Origin
from bridge.wire.letters import Gone, Letter, LetterChoice, Range, RedriveReport, is_redriven
from bridge.wire.received import headers_of
from timerstore.clock import Clock

PIECE_ROWS: Final = 1_000
"""Records in a piece, of all partitions together."""
PIECE_ROWS_MIN: Final = 20
ROWS_MAX: Final = 20_000
"""Maximum number of records to read for a page, and again for the notes after it."""
KEY_BYTES_MAX: Final = 4_097
"""Bytes of a key in a page: one more than the shown bytes, so that a longer key is known to be longer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLetter:
    """A dead letter with its place and the timestamp of its record."""

    place: Origin
    ts_ms: int
    letter: Letter
    key: bytes | None
    value: bytes | None
    redriven: bool | None
    """Whether a redrive has put it back; None: unknown, since too many records follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """Dead letters, the newest first, and the end offset of the next page in each partition; None: this is the last
    page."""

    letters: Sequence[PlacedLetter]
    next: Mapping[Place, int] | None


@dataclass(slots=True)
class _Part:
    """A partition whose offsets [`low`, `end`) were read. No record below `low` counts as younger than `ts_ms`."""

    start: int
    low: int
    end: int
    ts_ms: float = math.inf
    matching: list[tuple[float, PlacedLetter]] = field(default_factory=list)
    """Matching letters, the newest first, each with the smallest timestamp read up to it: this keeps the order of
    offsets."""


class _Seen(NamedTuple):
    """A record that was read, with its letter if it matches; the letter has no value and no headers."""

    place: Place
    ts_ms: int
    letter: PlacedLetter | None


class Letterbox:
    """The dead-letter topics of a configuration: pages, single letters, and one redrive at a time. Any thread."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._redriving = threading.Lock()

    def page(self, choice: LetterChoice, below: Mapping[Place, int] | None, limit: int) -> LetterPage:
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
                piece = {place: Watermarks(start=max(p.start, p.low - size), end=p.low) for place, p in unread.items()}
                looked_at += sum(mark.end - mark.start for mark in piece.values())
                _take(parts, piece, reader.read(piece, partial(_seen, choice, topics)))
            letters = [letter for _, letter in sorted(_ready(parts), key=lambda ready: -ready[0])[:limit]]
            gone = reader.gone()
        chosen = {letter.place for letter in letters}
        following = {place: _next(part, chosen) for place, part in parts.items()}
        is_last = all(following[place] <= part.start for place, part in parts.items())
        return LetterPage(
            letters=[replace(letter, redriven=_has_gone(letter, gone) if is_known else None) for letter in letters],
            next=None if is_last else following,
        )

    def get(self, place: Origin) -> PlacedLetter | None:
        """The letter at `place` with its value and headers, or None. Raises EnvironmentFailure."""
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
            messages = reader.read({where: Watermarks(start=offset, end=offset + 1)}, lambda message: message)
            letter = topics.letter(messages[0]) if messages else None
            if letter is None:
                return None
            reader.read({where: Watermarks(start=offset + 1, end=end)}, _nothing)
            placed = _placed(messages[0], letter)
            is_gone = _has_gone(placed, reader.gone())
            return replace(placed, redriven=is_gone if is_gone or end == mark.end else None)

    def redrive(self, choice: LetterChoice, *, execute: bool) -> RedriveReport:
        """Put the chosen letters back, or only count them. Raises BridgeError, also during another redrive: this one
        would fence it."""
        if not self._redriving.acquire(blocking=False):
            raise EnvironmentFailure("another redrive is under way", hint="Wait for its end.", code="DB-3037")
        try:
            return redrive_letters(self._settings, self._clock, choice, execute=execute)
        finally:
            self._redriving.release()


class _Reader:
    """A consumer, and the redriven letters that its records name."""

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
        """The results of `keep` for the records between the marks. Notes of a redrive are taken in instead."""
        kept: list[T] = []
        try:
            for batch in record_batches(self._consumer, marks, self._clock, visible=True):
                for message in batch:
                    if is_redriven(headers_of(message)):
                        self._note(message)
                    elif (result := keep(message)) is not None:
                        kept.append(result)
        except KafkaException as exception:
            raise EnvironmentFailure(
                "cannot read the dead-letter topics",
                hint="Grant Read and Describe on them.",
                reason=kafka_error(exception).str(),
                code="DB-3036",
            ) from exception
        return kept

    def _note(self, message: Message) -> None:
        place = partition_of(message)
        try:
            self._ranges.setdefault(place, []).extend(self._topics.redriven(message))
        except StateError:  # the topic is a copy: a redrive reports it
            self._doubtful.add(place)

    def gone(self) -> Mapping[Place, Gone | None]:
        """The redriven letters by the notes that were read; None for a partition with unreadable notes."""
        gone = {place: Gone(ranges) for place, ranges in self._ranges.items()}
        return {**gone, **dict.fromkeys(self._doubtful)}


def _unread(parts: Mapping[Place, _Part]) -> dict[Place, _Part]:
    """The partitions that are not read to their starts."""
    return {place: part for place, part in parts.items() if part.low > part.start}


def _ready(parts: Mapping[Place, _Part]) -> list[tuple[float, PlacedLetter]]:
    """The letters that come before all unread ones."""
    since = max((part.ts_ms for part in _unread(parts).values()), default=-math.inf)
    return [(ts_ms, letter) for part in parts.values() for ts_ms, letter in part.matching if ts_ms >= since]


def _seen(choice: LetterChoice, topics: LetterTopics, message: Message) -> _Seen:
    """The parts of a record that a page keeps."""
    place, ts_ms, letter = partition_of(message), message.timestamp()[1], topics.letter(message)
    if letter is None or not choice.chooses(letter, ts_ms, (*place, message.offset() or 0)):
        return _Seen(place, ts_ms, None)
    key = None if (whole := message.key()) is None else whole[:KEY_BYTES_MAX]
    placed = _placed(message, replace(letter, headers=[]))
    return _Seen(place, ts_ms, replace(placed, value=None, key=key))


def _nothing(_: Message) -> None:
    """Keep no record: only the notes count."""


def _take(parts: Mapping[Place, _Part], piece: Mapping[Place, Watermarks], seen: Sequence[_Seen]) -> None:
    for record in reversed(seen):
        part = parts[record.place]
        part.ts_ms = min(part.ts_ms, record.ts_ms)
        if record.letter is not None:
            part.matching.append((part.ts_ms, record.letter))
    for place, mark in piece.items():
        parts[place].low = mark.start


def _placed(message: Message, letter: Letter) -> PlacedLetter:
    place = (*partition_of(message), message.offset() or 0)
    key, value = message.key(), message.value()
    return PlacedLetter(
        place=place, ts_ms=message.timestamp()[1], letter=letter, key=key, value=value, redriven=None
    )  # fmt: skip


def _next(part: _Part, chosen: set[Origin]) -> int:
    """The end offset of the next page: the letters above it are shown, or do not match."""
    left = [letter.place[2] for _, letter in part.matching if letter.place not in chosen]
    return max(left) + 1 if left else part.low


def _has_gone(letter: PlacedLetter, gone: Mapping[Place, Gone | None]) -> bool | None:
    offsets = gone.get(letter.place[:2], Gone([]))
    return None if offsets is None else letter.place[2] in offsets
