"""`delay-bridge schedules list|get`: the recurring messages of a running bridge; change.py changes them.

They are twins of the HTTP API, like `delay-bridge pending`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from bridge.api.filters import Filters
from bridge.commands import pending
from bridge.commands.invocation import bundled, say

app = typer.Typer(
    name="schedules",
    help="List, show and change recurring messages.",
    no_args_is_help=True,
)

COLUMNS: Final = ("origin", "next", "tick", "target", "id", "schedule")


@app.command("list")
@bundled
def list_schedules(
    connection: pending.Connection,
    filters: Filters,
    listing: pending.Listing,
) -> None:
    """List recurring messages in the order of their next ticks."""
    with connection.open() as api:
        listing.show(api, "schedules", "schedules", filters, COLUMNS, _row)


@app.command("get")
@bundled
def get_schedule(
    origin: pending.OriginArgument,
    connection: pending.Connection,
    output: pending.OutputOption = pending.OutputFormat.TEXT,
) -> None:
    """Show one recurring message and its next ticks. The exit status is 1 if it does not exist."""
    with connection.open() as api:
        answer = api.get("schedules", {"origin": pending.checked_place(origin, "the message")})
        rows = pending.objects(api, answer, "schedules")
        if not rows:
            pending.print_silent(pending.silent_in(answer))
            say(f"no recurring message {origin} on this instance", err=True)
            raise typer.Exit(1)
        pending.print_one(rows[0], output)


def _row(message: Mapping[str, Any]) -> list[str]:
    following, schedule = message.get("next") or [None], message.get("schedule") or {}
    due = "paused" if message.get("paused") is True else pending.format_time(following[0])
    headers = " ".join(f"{name.removeprefix('delay-')}={text}" for name, text in schedule.items())
    shown = {name: pending.shown(message.get(name)) for name in COLUMNS}
    return list((shown | {"next": due, "schedule": headers}).values())
