"""`delay-bridge pending cancel|move|deliver` and `targets pause|resume`: actions of a running bridge.

They are twins of the HTTP API. An origin names one message; filters name many. Before an action on many messages the
command counts them and asks for confirmation. The exit status is 1 if not all of the messages were changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from bridge.api.filters import Filters
from bridge.commands import pending
from bridge.commands.api_client import Absent, ApiClient
from bridge.commands.invocation import bundled, read_option, say, with_unit
from bridge.errors import ConfigurationError
from bridge.wire.headers import parse_until
from bridge.wire.printable import printable

OriginArgument = Annotated[
    str | None,
    typer.Argument(metavar="[TOPIC/PARTITION/OFFSET]", help="The origin of one message, from `list`; else filters."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count.")]
CHANGED: Final = ("cancelled", "moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientConnection(pending.Connection):
    """The connection for actions that may take long."""

    timeout: pending.TimeoutOption = 70.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOrMany:
    """Options of an action on one message or letter, or on all that filters choose."""

    everything: Annotated[bool, typer.Option("--all", help="All, without a filter.")] = False
    dry_run: DryRunOption = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False
    output: pending.OutputOption = pending.OutputFormat.TEXT

    def must_be_clear(self, one: str | None, chosen: Mapping[str, Any], a: str, several: str) -> None:
        """Raises ConfigurationError unless either `one` is given, or filters or --all. `a` and `several` name them."""
        if one is not None and (chosen or self.everything or self.dry_run):
            raise ConfigurationError(f"{a} and filters are given", hint="Give one or the other.", code="DB-1003")
        if one is None and not chosen and not self.everything:
            hint = f"Give {a}, a filter, or --all."
            raise ConfigurationError(f"no {several} are selected", hint=hint, code="DB-1003")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode(OneOrMany):
    """Options of an action on messages."""

    cursor: Annotated[str | None, typer.Option("--cursor", help="Continue an interrupted action from its cursor.")] = (
        None
    )

    def act(self, api: ApiClient, action: str, one: str | None, filters: Filters, when: Mapping[str, str]) -> None:
        """Act on one message, or on the chosen ones. Raises ConfigurationError for options that exclude each other."""
        chosen = pending.parameters_of(filters)
        cursor = {} if self.cursor is None else {"cursor": self.cursor}
        self.must_be_clear(one, chosen | (cursor if one is not None else {}), "an origin", "messages")
        if one is not None:
            _act_on_one(api, action, pending.checked_place(one, "the message"), when, self.output)
            return
        body: dict[str, Any] = {**chosen, **when, "all": self.everything}
        if self.dry_run or not self.yes:
            counted = api.post(f"messages/{action}", body | {"dry_run": True})
            number = f"{'' if counted.get('exact') is True else 'at least '}{counted.get('count')}"
            if self.dry_run:
                pending.print_answer(counted, self.output, number)
                return
            confirm(f"{action} {number} messages?")
        _act_on_many(api, action, body | cursor, self.output)


def command_of(action: str) -> Callable[..., None]:
    """The command of an action without arguments of its own."""

    @bundled
    def command(filters: Filters, mode: Mode, connection: PatientConnection, one: OriginArgument = None) -> None:
        with connection.open() as api:
            mode.act(api, action, one, filters, {})

    return command


@bundled
def move_messages(
    *,
    one: OriginArgument = None,
    at: Annotated[str | None, typer.Option(help="New due time: RFC 3339 with a zone, or epoch milliseconds.")] = None,
    after: Annotated[str | None, typer.Option(help="Delay from now: 250ms, 90s, 1h30m, 7d, PT15M.")] = None,
    filters: Filters,
    mode: Mode,
    connection: PatientConnection,
) -> None:
    """Move one pending message, or all matching ones, to another due time. The exit status is that of `cancel`."""
    with connection.open() as api:
        read_option(parse_until, at, "--at")
        read_option(with_unit, after, "--after")
        if (at is None) == (after is None):
            hint = "`delay-bridge pending move --help` has the forms."
            raise ConfigurationError("give either --at or --after", hint=hint, code="DB-1003")
        mode.act(api, "move", one, filters, {"due": at} if at is not None else {"after": after or ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTarget(pending.Connection):
    """A target, the connection, and the output."""

    name: Annotated[str, typer.Argument(metavar="TARGET", help="The target topic.")]
    unknown: Annotated[bool, typer.Option("--unknown", help="Allow a target that the bridge does not know.")] = False
    output: pending.OutputOption = pending.OutputFormat.TEXT

    def put(self, action: str, body: Mapping[str, str]) -> None:
        """Pause or resume it. Raises typer.Exit for an unknown one."""
        with self.open() as api:
            if not self.unknown and not _is_known(api, self.name):
                say(
                    f"unknown target {self.name}: the bridge has no message for it, and has delivered none."
                    f" --unknown {action}s it anyway",
                    err=True,
                )
                raise typer.Exit(1)
            done = api.post(f"targets/{quote(self.name, safe='')}/{action}", body)
            changed = "" if done.get("changed") is True else " already"
            pending.print_answer(done, self.output, f"{self.name} is{changed} {action}d")


@bundled
def pause_target(
    reason: Annotated[str, typer.Option(help="The reason, for people: at most 100 characters.")] = "",
    until: Annotated[
        str | None, typer.Option(help="End of the pause: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None,
    after: Annotated[str | None, typer.Option("--for", help="Duration of the pause: 90s, 1h30m, 7d, PT15M.")] = None,
    *,
    target: OneTarget,
) -> None:
    """Pause a target: its messages wait until it is resumed. The exit status is 1 if the target is unknown."""
    read_option(with_unit, after, "--for")
    options = {"reason": reason, "until": until, "after": after}
    target.put("pause", {key: text for key, text in options.items() if text})


@bundled
def resume_target(target: OneTarget) -> None:
    """Resume a paused target. The exit status is that of `pause`."""
    target.put("resume", {})


def _is_known(api: ApiClient, target: str) -> bool:
    """Whether the bridge has delivered to a target, or has messages for it."""
    if any(row.get("name") == target for row in pending.objects(api, api.get("targets"), "targets")):
        return True
    count = api.get("count", {"target": target}).get("count")
    return isinstance(count, int) and count > 0


def add_actions() -> None:
    status = "The exit status is 1 if a message was not pending, or not all are done."
    cancel = f"Cancel one pending message, or all matching ones. {status}"
    pending.app.command("cancel", help=cancel)(command_of("cancel"))
    pending.app.command("move")(move_messages)
    deliver = f"Deliver one pending message, or all matching ones, now. {status}"
    pending.app.command("deliver", help=deliver)(command_of("deliver"))
    pending.targets_app.command("pause")(pause_target)
    pending.targets_app.command("resume")(resume_target)


def confirm(question: str) -> None:
    """Ask on the terminal. Raises typer.Exit if the answer is no, ConfigurationError without a terminal."""
    if not _is_terminal():
        hint = "Give --yes; --dry-run counts."
        raise ConfigurationError("confirmation needs a terminal", hint=hint, code="DB-1003")
    if not typer.confirm(printable(question), err=True):
        raise typer.Exit(1)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _act_on_one(
    api: ApiClient, action: str, origin: str, when: Mapping[str, str], output: pending.OutputFormat
) -> None:
    try:
        done = api.post(f"messages/{origin}/{action}", when)
    except Absent as absent:
        say(f"{origin} cannot be changed. {absent}".rstrip(), err=True)
        raise typer.Exit(1) from None
    outcome = done.get("outcome")
    if not isinstance(outcome, str):
        raise api.foreign()
    pending.print_answer(done, output, f"{origin}: {outcome}")
    if outcome not in CHANGED:
        raise typer.Exit(1)


def _act_on_many(api: ApiClient, action: str, body: Mapping[str, Any], output: pending.OutputFormat) -> None:
    last: dict[str, Any] = {}
    for last in api.lines(f"messages/{action}", body):
        if sys.stderr.isatty() and last.get("complete") is not True:
            say(f"{last.get('done')} so far", err=True)
    outcomes = last.get("outcomes")
    if not isinstance(outcomes, dict):
        raise api.foreign()
    text = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
    pending.print_answer(last, output, text or "no matching messages")
    if last.get("complete") is not True:
        more = f"; continue with --cursor {last['cursor']}" if last.get("cursor") else ""
        say(f"ended early: {last.get('error') or 'the bridge broke off'}{more}", err=True)
        raise typer.Exit(1)
