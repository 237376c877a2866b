"""`delay-bridge schedules list|get`: the messages of a running bridge that come again; change.py changes them.

Twins of the HTTP API, as `delay-bridge pending`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from bridge.commands import pending
from bridge.commands.invocation import bundled, say

app = typer.Typer(
    name="schedules",
    help="The messages that come again: ask a running bridge for them, and change them.",
    no_args_is_help=True,
)

COLUMNS: Final = ("origin", "next", "tick", "target", "id", "schedule")


@app.command("list")
@bundled
def list_schedules(
    connection: pending.Connection,
    listing: pending.Listing,
    id: Annotated[str | None, typer.Option("--id", help="With this id.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="For this real topic.")] = None,
) -> None:
    """List messages that come again, those whose next tick is due first at the top."""
    with connection.open() as api:
        parameters = pending.Filters(id=id, target=target).parameters()
        listing.show(api, "schedules", "schedules", parameters, COLUMNS, _row)


@app.command()
@bundled
def get(
    origin: pending.OriginArgument,
    connection: pending.Connection,
    output: pending.OutputOption = pending.Output.TEXT,
) -> None:
    """Show one message that comes again, and its next ticks. Exit status 1 if there is none."""
    with connection.open() as api:
        found = api.get("schedules", pending.Search(origin=origin).parameters())
        rows = pending.objects(api, found, "schedules")
        if not rows:
            say(f"{origin} is not a message that comes again here", err=True)
            raise typer.Exit(1)
        pending.print_one(rows[0], output)


def _row(message: Mapping[str, Any]) -> list[str]:
    following, schedule = message.get("next") or [None], message.get("schedule") or {}
    due = "paused" if message.get("paused") is True else pending.time(following[0])
    said = " ".join(f"{name.removeprefix('delay-')}={text}" for name, text in schedule.items())
    shown = {name: pending.shown(message.get(name)) for name in COLUMNS}
    return list((shown | {"next": due, "schedule": said}).values())
