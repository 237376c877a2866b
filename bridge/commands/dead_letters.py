"""`delay-bridge dead-letters list|get|redrive`: the dead letters, through a running bridge.

They are twins of the HTTP API. `delay-bridge redrive` needs no running bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from bridge.api.filters import LetterFilters
from bridge.commands import pending
from bridge.commands.actions import OneOrMany, PatientConnection, confirm
from bridge.commands.api_client import Absent, ApiClient
from bridge.commands.invocation import bundled, read_headers, say

app = typer.Typer(
    name="dead-letters",
    help="List, show and redrive dead letters through a running bridge.",
    no_args_is_help=True,
)

COLUMNS = ("letter", "written", "reason", "origin", "target", "redriven")


class Due(Enum):
    """The due time of a redriven dead letter."""

    ORIGINAL = "original"
    NOW = "now"


DueOption = Annotated[Due, typer.Option(help="Due at the original time (at once, if that has passed), or now.")]
SetHeaderOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Replace a header; may be repeated.")
]


@app.command("list")
@bundled
def list_letters(filters: LetterFilters, connection: pending.Connection, listing: pending.Listing) -> None:
    """List dead letters, the newest first."""
    with connection.open() as api:
        listing.show(api, "dead-letters", "letters", filters, COLUMNS, _row)


@app.command("get")
@bundled
def get_letter(
    place: Annotated[
        str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The place of the letter, from `list`.")
    ],
    connection: pending.Connection,
    output: pending.OutputOption = pending.OutputFormat.TEXT,
) -> None:
    """Show one dead letter. The exit status is 1 if it does not exist."""
    with connection.open() as api:
        try:
            letter = api.get(_path(place))
        except Absent as absent:
            say(str(absent) or f"{place} is not a dead letter.", err=True)
            raise typer.Exit(1) from None
        pending.print_one(letter, output)


@app.command("redrive")
@bundled
def ask_redrive(
    filters: LetterFilters,
    connection: PatientConnection,
    place: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC/PARTITION/OFFSET]", help="The place of one letter, from `list`; else filters."),
    ] = None,
    due: DueOption = Due.ORIGINAL,
    set_header: SetHeaderOption = None,
    *,
    choice: OneOrMany,
) -> None:
    """Put one dead letter, or all matching ones, back into their delay topics, each once. The exit status is 1 if the
    one letter stays."""
    with connection.open() as api:
        chosen = pending.parameters_of(filters)
        mend: dict[str, Any] = {
            "due_now": due is Due.NOW,
            "set_headers": dict(read_headers(set_header, "--set-header")),
        }
        choice.must_be_clear(place, chosen, "a letter", "dead letters")
        if place is not None:
            _redrive_one(api, place, mend, choice.output)
            return
        body = {**chosen, **mend, "all": choice.everything}
        if choice.dry_run or not choice.yes:
            counted = api.post("dead-letters/redrive", body | {"dry_run": True})
            if choice.dry_run:
                _print_report(counted, choice.output)
                return
            confirm(f"put {counted.get('count')} dead letters back?")
        _print_report(api.post("dead-letters/redrive", body), choice.output)


def _redrive_one(api: ApiClient, place: str, mend: dict[str, Any], output: pending.OutputFormat) -> None:
    done = api.post(f"{_path(place)}/redrive", mend)
    pending.print_answer(done, output, f"{place}: {pending.shown(done.get('outcome'))}")
    if done.get("outcome") not in ("redriven", "redriven-before"):
        raise typer.Exit(1)


def _print_report(report: dict[str, Any], output: pending.OutputFormat) -> None:
    if output is pending.OutputFormat.JSON:
        say(pending.as_json(report))
        return
    verb = "goes back" if report.get("dry_run") is True else "put back"
    for name, what in (("by", verb), ("broken", "stays")):
        for part in report.get(name) or ():
            say(f"{what:12}{part.get('count'):>8}  {part.get('reason')}  {part.get('target')}")
    say(f"{report.get('count')} dead letters {'would go back' if verb == 'goes back' else verb}")


def _path(place: str) -> str:
    return f"dead-letters/{pending.checked_place(place, 'the letter')}"


def _row(letter: Mapping[str, Any]) -> list[str]:
    place = "/".join(pending.shown(letter.get(name)) for name in ("topic", "partition", "offset"))
    others = [pending.shown(letter.get(name)) for name in ("reason", "origin", "target")]
    gone = {True: "yes", False: ""}.get(letter.get("redriven"), "?")  # type: ignore[arg-type]
    return [place, pending.format_time(letter.get("ts")), *others, gone]
