"""What is asked of dead letters, and answered, as the OpenAPI document shows it. Times are epoch milliseconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bridge.api import cursor as cursors
from bridge.api.models import LIMIT_DEFAULT, PREVIEW_BYTES_MAX, Blob, Bulk, Text, bulk, fitting, time
from bridge.dead_letters.listing import LetterPage, PlacedLetter
from bridge.wire.letters import Choice, Report
from timerstore.rows.sources import SourceName

LIMIT_MAX: Final = 1_000
HEADERS_MAX: Final = 100
"""That are replaced at once."""

HeaderName = Annotated[str, StringConstraints(min_length=1, max_length=250)]


class LetterFilters(BaseModel):
    """Which dead letters: those that fit all that is given."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    topic: Text | None = Field(default=None, description="Of this delay topic.")
    reason: list[Text] = Field(default=[], max_length=50, description="With one of these reasons.")
    target: Text | None = Field(default=None, description="For this real topic.")
    since: Text | None = Field(default=None, description="Written then or later: RFC 3339 with a zone, or epoch ms.")
    until: Text | None = Field(default=None, description="Written before then.")

    def choice(self, **more: Any) -> Choice:
        """For the reader. Raises ValueError that says which parameter is wrong."""
        return Choice(
            topics=[] if self.topic is None else [self.topic],
            reasons=self.reason,
            targets=[] if self.target is None else [self.target],
            since_ms=time("since", self.since),
            until_ms=time("until", self.until),
            **more,
        )


class LetterPageFilters(LetterFilters):
    """The same, and which page of it."""

    cursor: Text | None = Field(default=None, description="`next` of the page before.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=LIMIT_MAX, description="Letters of a page.")

    def below(self) -> dict[SourceName, int] | None:
        """Where the page begins. Raises ValueError for what is no cursor."""
        return None if self.cursor is None else cursors.read_below(self.cursor)


class DeadLetter(BaseModel):
    """A dead letter; topic, partition and offset are its own."""

    topic: str
    partition: int
    offset: int
    ts: int = Field(description="When it was written.")
    reason: str
    detail: str = Field(description="What exactly was wrong.")
    origin: str = Field(description="topic/partition/offset of the record that was sent.")
    delay_topic: str
    target: str = Field(description="Empty: it named none.")
    attempts: int
    key: Blob | None
    cut: bool = Field(
        description="Its value did not fit: only the delay topic has the record, for as long as it keeps it."
    )
    redriven: bool | None = Field(description="Whether it has gone back; null: not looked up, for it is too far back.")

    @classmethod
    def of(cls, found: PlacedLetter) -> Self:
        return cls(**cls._fields(found))

    @staticmethod
    def _fields(found: PlacedLetter) -> dict[str, Any]:
        (topic, partition, offset), letter = found.place, found.letter
        return {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "ts": found.ts_ms,
            "reason": letter.reason,
            "detail": letter.detail,
            "origin": letter.origin,
            "delay_topic": letter.topic,
            "target": letter.target,
            "attempts": letter.attempts,
            "key": None if found.key is None else Blob.of(found.key, PREVIEW_BYTES_MAX),
            "cut": letter.is_cut,
            "redriven": found.redriven,
        }


class DeadLetterDetail(DeadLetter, Bulk):
    """One dead letter with what its record carries."""

    @classmethod
    def of_all(cls, found: PlacedLetter, *, show_payloads: bool) -> Self:
        return cls(**cls._fields(found), **bulk(found.letter.headers, found.value, show_payloads=show_payloads))


class DeadLetters(BaseModel):
    """A page, the newest first. It may have fewer letters than its limit, or none, and others behind it."""

    letters: list[DeadLetter]
    next: str | None = Field(description="The cursor of the next page; null: there are no more.")

    @classmethod
    def of(cls, page: LetterPage) -> Self:
        letters = fitting(map(DeadLetter.of, page.letters))
        left = [each.place for each in page.letters[len(letters) :]]
        following = dict(page.next or {})
        for topic, partition, offset in reversed(left):  # the highest offset of each partition last
            following[topic, partition] = offset + 1
        return cls(letters=letters, next=cursors.encode_below(following) if left or page.next is not None else None)


class Mend(BaseModel):
    """What is changed in a record that goes back."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    due_now: bool = Field(default=False, description="Due at once, in place of when it was.")
    set_headers: dict[HeaderName, Text] = Field(
        default={}, max_length=HEADERS_MAX, description="Headers that are replaced, or added."
    )

    def mended(self) -> dict[str, Any]:
        """For `Choice`."""
        return {"due_now": self.due_now, "set_headers": [(n, text.encode()) for n, text in self.set_headers.items()]}


class ManyLetters(LetterFilters, Mend):
    """Which letters go back, and what is changed in them."""

    all: bool = Field(default=False, description="true: without any filter, all of them.")
    dry_run: bool = Field(default=False, description="true: only count.")


class Redrive(StrEnum):
    """What has come of one letter."""

    REDRIVEN = "redriven"
    BEFORE = "redriven-before"
    """It had gone back already: nothing was done."""
    BROKEN = "broken"
    """It would be rejected again as it is, or its value is missing."""
    FOREIGN = "foreign"
    """It is no dead letter of these delay topics."""


class Redriven(BaseModel):
    """What has come of one letter."""

    outcome: Redrive

    @classmethod
    def of(cls, report: Report) -> Self:
        """Of a run over one letter."""
        outcomes = ((report.back, Redrive.REDRIVEN), (report.before, Redrive.BEFORE), (report.broken, Redrive.BROKEN))
        return cls(outcome=next((outcome for count, outcome in outcomes if count), Redrive.FOREIGN))


class LetterCount(BaseModel):
    """Letters of one reason and target."""

    reason: str
    target: str
    count: int


class LettersCounted(BaseModel):
    """How many letters fit, by reason and target."""

    count: int = Field(description="Those that have not gone back.")
    by: list[LetterCount] = Field(description="The same by reason and target, the most first.")
    redriven: int = Field(description="Of all letters, whatever the filters say: those that have gone back.")

    @classmethod
    def of(cls, report: Report) -> Self:
        """Of a run that changes nothing."""
        here = report.back + report.broken
        by = [LetterCount(reason=reason, target=target, count=n) for (reason, target), n in here.most_common()]
        return cls(count=here.total(), by=by, redriven=report.before)


class ManyRedriven(BaseModel):
    """How many letters have gone back, or would with dry_run."""

    count: int
    exact: bool
    dry_run: bool
    by: list[LetterCount] = Field(description="Those that went back, or would.")
    broken: list[LetterCount] = Field(description="Those that stay: they need due_now or set_headers, or their value.")
    before: int = Field(description="Had gone back already.")
    foreign: int = Field(description="Records that are no dead letters of these delay topics.")

    @classmethod
    def of(cls, report: Report, *, dry_run: bool) -> Self:
        by, broken = (
            [LetterCount(reason=reason, target=target, count=n) for (reason, target), n in sorted(counts.items())]
            for counts in (report.back, report.broken)
        )
        count = sum(report.back.values())
        return cls(
            count=count, exact=True, dry_run=dry_run, by=by, broken=broken, before=report.before, foreign=report.foreign
        )
