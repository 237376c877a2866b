"""The routes of dead letters: a page, one letter, and redrive of one or of all matching letters."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Final, TypeVar

from fastapi import FastAPI, Query, Request

from bridge.api.dead_letters import models
from bridge.api.filters import LetterFilters
from bridge.api.models import bulk
from bridge.api.problems import Problem
from bridge.api.routing import (
    ACTION_REFUSALS,
    NOT_FOUND,
    PLACE,
    Asked,
    Place,
    checked,
    must_choose,
    note,
    unavailable,
)
from bridge.api.source import PREFIX, DeadLetterTopics
from bridge.errors import BridgeError
from bridge.http.workers import REQUEST_S
from bridge.wire.headers import origin_text
from bridge.wire.letters import LetterChoice

REDRIVE_S: Final = 50.0
"""The time of a redrive, less than that of a connection. A repetition of the request goes on from there."""

T = TypeVar("T")


ONE: Final = f"{PREFIX}/dead-letters/{PLACE}"


def add_dead_letters(app: FastAPI, asked: Asked) -> None:
    _add_questions(app, asked)
    _add_redrives(app, asked)


async def _ask(asked: Asked, work: Callable[[DeadLetterTopics], T], within_s: float = REDRIVE_S) -> T:
    letters = asked.source.dead_letters()
    try:
        return await asked.workers.run(lambda: work(letters), within_s)
    except BridgeError as error:
        raise unavailable(error) from None


def _add_questions(app: FastAPI, asked: Asked) -> None:
    @app.get(f"{PREFIX}/dead-letters", operation_id="dead_letters", response_model_exclude_unset=True)
    async def dead_letters(filters: Annotated[models.LetterPageFilters, Query()]) -> models.DeadLetters:
        """A page of the dead letters, the newest first."""
        choice, below = checked(lambda: (LetterChoice(**filters.values()), filters.below()))
        page = await _ask(asked, lambda letters: letters.page(choice, below, filters.limit), REQUEST_S)
        return models.DeadLetters.of(page)

    @app.get(f"{PREFIX}/dead-letters/count", operation_id="count_dead_letters")
    async def count_dead_letters(filters: Annotated[LetterFilters, Query()]) -> models.LettersCounted:
        """The number of matching dead letters. The count reads all dead-letter topics."""
        choice = checked(lambda: LetterChoice(**filters.values()))
        report = await _ask(asked, lambda letters: letters.redrive(choice, execute=False))
        return models.LettersCounted.of(report)

    @app.get(ONE, operation_id="dead_letter", responses=NOT_FOUND, response_model_exclude_unset=True)
    async def dead_letter(place: Place) -> models.DeadLetterDetail:
        """One dead letter, by its own topic, partition and offset."""
        letter = await _ask(asked, lambda letters: letters.get(place), REQUEST_S)
        if letter is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"{origin_text(*place)} is not a dead letter.")
        whole = bulk(letter.letter.headers, letter.value, show_payloads=asked.show_payloads)
        return models.DeadLetterDetail.of(letter, **whole)


def _add_redrives(app: FastAPI, asked: Asked) -> None:
    @app.post(f"{ONE}/redrive", operation_id="redrive", responses=NOT_FOUND | ACTION_REFUSALS)
    async def redrive(request: Request, place: Place, mend: models.Mend) -> models.Redriven:
        """Put one dead letter back into its delay topic, once."""
        choice = checked(lambda: LetterChoice(places=[place], **mend.mended()))
        report = await _ask(asked, lambda letters: letters.redrive(choice, execute=True))
        answer = models.Redriven.of(report)
        note(request, "redrive", origin_text(*place), outcome=answer.outcome.value)
        return answer

    @app.post(f"{PREFIX}/dead-letters/redrive", operation_id="redrive_many", responses=ACTION_REFUSALS)
    async def redrive_many(request: Request, which: models.ManyLetters) -> models.ManyRedriven:
        """Put all matching dead letters back into their delay topics, each once."""
        must_choose(which, LetterFilters, all=which.all)
        choice = checked(lambda: LetterChoice(**which.values(), **which.mended()))
        report = await _ask(asked, lambda letters: letters.redrive(choice, execute=not which.dry_run))
        answer = models.ManyRedriven.of(report, dry_run=which.dry_run)
        if not which.dry_run:
            chosen = which.model_dump(mode="json", exclude_defaults=True)
            note(request, "redrive", chosen, outcome="complete", count=answer.count)
        return answer
