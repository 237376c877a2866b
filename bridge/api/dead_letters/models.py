"""Requests about dead letters and their answers, as the OpenAPI document shows them. Times are epoch milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import AliasPath, BaseModel, ConfigDict, Field, StringConstraints

from bridge.api import cursor as cursors
from bridge.api.filters import LetterFilters, Text
from bridge.api.models import LIMIT_DEFAULT, Bulk, Preview, View, fitting_answer
from bridge.dead_letters.listing import LetterPage
from bridge.stores.names import SourceName
from bridge.wire.letters import RedriveReport

LIMIT_MAX: Final = 1_000
HEADERS_MAX: Final = 100
"""Maximum number of headers that a redrive sets."""

HeaderName = Annotated[str, StringConstraints(min_length=1, max_length=250)]


class LetterPageFilters(LetterFilters):
    """The filters, and a page of the list."""

    cursor: Text | None = Field(default=None, description="The previous page's `next`.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=LIMIT_MAX, description="Maximum number of letters.")

    def below(self) -> dict[SourceName, int] | None:
        """The page's end offsets. Raises ValueError for an invalid cursor."""
        return None if self.cursor is None else cursors.decode_below(self.cursor)


class DeadLetter(View):
    """A dead letter. `topic`, `partition` and `offset` are those of its record in the dead-letter topic."""

    topic: str = Field(validation_alias=AliasPath("place", 0))
    partition: int = Field(validation_alias=AliasPath("place", 1))
    offset: int = Field(validation_alias=AliasPath("place", 2))
    ts: int = Field(validation_alias="ts_ms", description="The time of its record.")
    reason: str = Field(validation_alias=AliasPath("letter", "reason"))
    detail: str = Field(validation_alias=AliasPath("letter", "detail"), description="The exact fault.")
    origin: str = Field(
        validation_alias=AliasPath("letter", "origin"),
        description="topic/partition/offset of the message's first record.",
    )
    delay_topic: str = Field(validation_alias=AliasPath("letter", "topic"))
    target: str = Field(validation_alias=AliasPath("letter", "target"), description="Empty: the message named none.")
    attempts: int = Field(validation_alias=AliasPath("letter", "attempts"))
    key: Preview
    cut: bool = Field(
        validation_alias=AliasPath("letter", "is_cut"),
        description="true: the value was too large. Only the delay topic has the record, until its retention ends.",
    )
    redriven: bool | None = Field(description="Whether it was redriven; null: unknown, too many records follow it.")


class DeadLetterDetail(DeadLetter, Bulk):
    """One dead letter with its headers and value."""


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

    @classmethod
    def of(cls, counts: Iterable[tuple[tuple[str, str], int]]) -> list[Self]:
        """The numbers by reason and target."""
        return [cls(reason=reason, target=target, count=count) for (reason, target), count in counts]


class LettersCounted(BaseModel):
    """The number of matching letters, by reason and target."""

    count: int = Field(description="The letters that were not redriven yet.")
    by: list[LetterCount] = Field(description="The same by reason and target, the largest number first.")
    redriven: int = Field(description="The redriven letters, regardless of the filters.")

    @classmethod
    def of(cls, report: RedriveReport) -> Self:
        """The numbers from the report of a dry run."""
        left = report.back + report.broken
        return cls(count=left.total(), by=LetterCount.of(left.most_common()), redriven=report.before)


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
        return cls(
            count=report.back.total(),
            exact=True,
            dry_run=dry_run,
            by=LetterCount.of(sorted(report.back.items())),
            broken=LetterCount.of(sorted(report.broken.items())),
            before=report.before,
            foreign=report.foreign,
        )
