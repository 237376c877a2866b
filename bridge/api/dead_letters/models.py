"""Requests about dead letters and their answers, as the OpenAPI document shows them. Times are epoch milliseconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bridge.api import cursor as cursors
from bridge.api.models import LIMIT_DEFAULT, PREVIEW_BYTES_MAX, Blob, Bulk, Text, bulk, fitting_answer, parse_time
from bridge.dead_letters.listing import LetterPage, PlacedLetter
from bridge.stores.names import SourceName
from bridge.wire.letters import LetterChoice, RedriveReport

LIMIT_MAX: Final = 1_000
HEADERS_MAX: Final = 100
"""Maximum number of headers that a redrive sets."""

HeaderName = Annotated[str, StringConstraints(min_length=1, max_length=250)]


class LetterFilters(BaseModel):
    """The wanted dead letters: those that match all filters."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    topic: Text | None = Field(default=None, description="The delay topic that they come from.")
    reason: list[Text] = Field(default=[], max_length=50, description="The reason: one of these.")
    target: Text | None = Field(default=None, description="Their target.")
    since: Text | None = Field(
        default=None, description="The earliest time of their records: RFC 3339 with a zone, or epoch ms."
    )
    until: Text | None = Field(default=None, description="The end of the times of their records, exclusive.")

    def choice(self, **more: Any) -> LetterChoice:
        """The same for the reader. Raises ValueError with the name of the invalid parameter."""
        return LetterChoice(
            topics=[] if self.topic is None else [self.topic],
            reasons=self.reason,
            targets=[] if self.target is None else [self.target],
            since_ms=parse_time("since", self.since),
            until_ms=parse_time("until", self.until),
            **more,
        )


class LetterPageFilters(LetterFilters):
    """The filters, and a page of the list."""

    cursor: Text | None = Field(default=None, description="The previous page's `next`.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=LIMIT_MAX, description="Maximum number of letters.")

    def below(self) -> dict[SourceName, int] | None:
        """The page's end offsets. Raises ValueError for an invalid cursor."""
        return None if self.cursor is None else cursors.read_below(self.cursor)


class DeadLetter(BaseModel):
    """A dead letter. `topic`, `partition` and `offset` are those of its record in the dead-letter topic."""

    topic: str
    partition: int
    offset: int
    ts: int = Field(description="The time of its record.")
    reason: str
    detail: str = Field(description="The exact fault.")
    origin: str = Field(description="topic/partition/offset of the message's first record.")
    delay_topic: str
    target: str = Field(description="Empty: the message named none.")
    attempts: int
    key: Blob | None
    cut: bool = Field(
        description="true: the value was too large. Only the delay topic has the record, until its retention ends."
    )
    redriven: bool | None = Field(description="Whether it was redriven; null: unknown, too many records follow it.")

    @classmethod
    def of(cls, placed: PlacedLetter) -> Self:
        return cls(**cls._fields(placed))

    @staticmethod
    def _fields(placed: PlacedLetter) -> dict[str, Any]:
        (topic, partition, offset), letter = placed.place, placed.letter
        return {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "ts": placed.ts_ms,
            "reason": letter.reason,
            "detail": letter.detail,
            "origin": letter.origin,
            "delay_topic": letter.topic,
            "target": letter.target,
            "attempts": letter.attempts,
            "key": None if placed.key is None else Blob.of(placed.key, PREVIEW_BYTES_MAX),
            "cut": letter.is_cut,
            "redriven": placed.redriven,
        }


class DeadLetterDetail(DeadLetter, Bulk):
    """One dead letter with its headers and value."""

    @classmethod
    def of_all(cls, placed: PlacedLetter, *, show_payloads: bool) -> Self:
        return cls(**cls._fields(placed), **bulk(placed.letter.headers, placed.value, show_payloads=show_payloads))


class DeadLetters(BaseModel):
    """A page of dead letters, the newest first. Even a page below its limit, or an empty one, may have a successor."""

    letters: list[DeadLetter]
    next: str | None = Field(description="The cursor of the next page; null: this is the last page.")

    @classmethod
    def of(cls, page: LetterPage) -> Self:
        letters = fitting_answer(map(DeadLetter.of, page.letters))
        left = [placed.place for placed in page.letters[len(letters) :]]
        following = dict(page.next or {})
        for topic, partition, offset in reversed(left):  # the highest offset of each partition last
            following[topic, partition] = offset + 1
        return cls(letters=letters, next=cursors.encode_below(following) if left or page.next is not None else None)


class Mend(BaseModel):
    """Changes to a record before it goes back."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    due_now: bool = Field(default=False, description="true: due at once, in place of its own due time.")
    set_headers: dict[HeaderName, Text] = Field(
        default={}, max_length=HEADERS_MAX, description="Headers to replace or add."
    )

    def mended(self) -> dict[str, Any]:
        """The changes as arguments of `LetterChoice`."""
        return {"due_now": self.due_now, "set_headers": [(n, text.encode()) for n, text in self.set_headers.items()]}


class ManyLetters(LetterFilters, Mend):
    """The letters to redrive, and the changes to them."""

    all: bool = Field(default=False, description="true: redrive all letters, without a filter.")
    dry_run: bool = Field(default=False, description="true: only count.")


class RedriveOutcome(StrEnum):
    """The outcome of a redrive of one letter."""

    REDRIVEN = "redriven"
    BEFORE = "redriven-before"
    """An earlier redrive put it back: nothing was done."""
    BROKEN = "broken"
    """It would be rejected again unchanged, or its value is missing."""
    FOREIGN = "foreign"
    """The record is not a dead letter of these delay topics."""


class Redriven(BaseModel):
    """The answer to a redrive of one letter."""

    outcome: RedriveOutcome

    @classmethod
    def of(cls, report: RedriveReport) -> Self:
        """The answer from the report of a run over one letter."""
        outcomes = (
            (report.back, RedriveOutcome.REDRIVEN),
            (report.before, RedriveOutcome.BEFORE),
            (report.broken, RedriveOutcome.BROKEN),
        )
        return cls(outcome=next((outcome for count, outcome in outcomes if count), RedriveOutcome.FOREIGN))


class LetterCount(BaseModel):
    """The number of letters of one reason and target."""

    reason: str
    target: str
    count: int


class LettersCounted(BaseModel):
    """The number of matching letters, by reason and target."""

    count: int = Field(description="The letters that were not redriven yet.")
    by: list[LetterCount] = Field(description="The same by reason and target, the largest number first.")
    redriven: int = Field(description="The redriven letters, regardless of the filters.")

    @classmethod
    def of(cls, report: RedriveReport) -> Self:
        """The numbers from the report of a dry run."""
        left = report.back + report.broken
        by = [LetterCount(reason=reason, target=target, count=n) for (reason, target), n in left.most_common()]
        return cls(count=left.total(), by=by, redriven=report.before)


class ManyRedriven(BaseModel):
    """The numbers of letters of a redrive, or of a dry run."""

    count: int
    exact: bool
    dry_run: bool
    by: list[LetterCount] = Field(description="The redriven letters; in a dry run, the letters to redrive.")
    broken: list[LetterCount] = Field(description="The letters left: they need due_now, set_headers, or their value.")
    before: int = Field(description="The letters of earlier redrives.")
    foreign: int = Field(description="Other records: they are not dead letters of these delay topics.")

    @classmethod
    def of(cls, report: RedriveReport, *, dry_run: bool) -> Self:
        by, broken = (
            [LetterCount(reason=reason, target=target, count=n) for (reason, target), n in sorted(counts.items())]
            for counts in (report.back, report.broken)
        )
        count = sum(report.back.values())
        return cls(
            count=count, exact=True, dry_run=dry_run, by=by, broken=broken, before=report.before, foreign=report.foreign
        )
