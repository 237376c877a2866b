"""`delay-bridge cancel|move` and `schedules cancel|pause|resume|run-now`: records that change what is pending.

They go into the delay topic as any producer's would, and need no running bridge. Their twins of the HTTP API
(actions.py) ask one, and wait for its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from bridge.client import DelayClient
from bridge.commands.invocation import ConfigOption, bundled, read_option, say, settings_of
from bridge.errors import ConfigurationError
from bridge.settings.model import Settings
from bridge.wire.headers import NEVER_MS, NEXT_MS, Origins, parse_duration, parse_origins, parse_until

MOVES: Final = {
    "pause": (NEVER_MS, "Deliver no more ticks of a message that comes again, until it is resumed."),
    "resume": (NEXT_MS, "Go on with a message that was paused, at its next regular tick."),
    "run-now": (None, "Deliver the next tick of a message that comes again now, besides those of its rhythm."),
}
"""Verbs of schedules that are moves: to when (None: now), and what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Options of all commands: the message, by its id or its origin, and where the record goes."""

    id: Annotated[str | None, typer.Argument(help="The id that the message was sent with.")] = None
    origin: Annotated[
        str | None,
        typer.Option(
            "--origin",
            help="In place of an id: where it is, as topic/partition/offset, or topic/partition/12,15 of up to 100.",
        ),
    ] = None
    key: Annotated[
        str | None, typer.Option("--key", help="The key that it was sent with; without it, all partitions.")
    ] = None
    reply_to: Annotated[
        str | None, typer.Option("--reply-to", help="Topic in which the bridge says what became of it.")
    ] = None
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="Text that the answer carries.")] = None
    delay_topic: Annotated[
        str | None,
        typer.Option("--delay-topic", "--topic", help="Delay topic; default: the configuration's only one."),
    ] = None
    bootstrap: Annotated[str | None, typer.Option("--bootstrap", help="Brokers, host:port; wins over the file.")] = None
    config: ConfigOption = None

    @contextmanager
    def client(self) -> Iterator[tuple[DelayClient, Origins | None]]:
        """A client for it, and the origins that it names (None: it names an id)."""
        with settings_of(self.config) as (settings, _):
            place = read_option(parse_origins, self.origin, "--origin")
            if (self.id is None) == (place is None):
                hint = "`delay-bridge pending list` shows both."
                raise ConfigurationError("give either an id or --origin", hint=hint, code="DB-1003")
            delay_topic = self.delay_topic or (only_delay_topic(settings) if place is None else place[0])
            try:
                yield DelayClient(producer(settings, self.bootstrap), delay_topic), place
            except ValueError as error:
                hint = "Give the id that the message was sent with; for a move, either --at or --after."
                raise ConfigurationError(f"invalid command: {error}", hint=hint, code="DB-1003") from None

    def move(self, verb: str, at_ms: int | None, after: timedelta | None) -> None:
        """Have the message due at another time; the command is called `verb`."""
        with self.client() as (client, place):
            reply_to, correlation = self.reply_to, self.correlation_id
            if place is None:
                client.move(self.id or "", self.key, at=at_ms, after=after, reply_to=reply_to, correlation=correlation)
            else:
                client.move_origin(*place, at=at_ms, after=after, reply_to=reply_to, correlation=correlation)
            client.flush()
            say(f"{verb} of {self.id or self.origin} sent to {client.delay_topic}", err=True)


@bundled
def cancel(change: Change) -> None:
    """Cancel a pending message. An id that is unknown, or already delivered, is not an error."""
    with change.client() as (client, place):
        if place is None:
            client.cancel(change.id or "", change.key, reply_to=change.reply_to, correlation=change.correlation_id)
        else:
            client.cancel_origin(*place, reply_to=change.reply_to, correlation=change.correlation_id)
        client.flush()
        say(f"cancel of {change.id or change.origin} sent to {client.delay_topic}", err=True)


@bundled
def move(
    *,
    at: Annotated[str | None, typer.Option(help="New due time: RFC 3339 with a zone, or epoch milliseconds.")] = None,
    after: Annotated[str | None, typer.Option(help="New delay from now: 0s (now), 90s, 1h30m, 7d, PT15M.")] = None,
    change: Change,
) -> None:
    """Have a pending message due at another time. An id that is unknown, or already delivered, is not an error."""
    until, after_ms = read_option(parse_until, at, "--at"), read_option(parse_duration, after, "--after")
    change.move("move", until, None if after_ms is None else timedelta(milliseconds=after_ms))


def _moving(verb: str) -> Callable[..., None]:
    to_ms = MOVES[verb][0]

    @bundled
    def moves(change: Change) -> None:
        change.move(verb, to_ms, timedelta(0) if to_ms is None else None)

    return moves


def add(app: typer.Typer, schedules: typer.Typer) -> None:
    for each in (app, schedules):
        each.command()(cancel)
    app.command()(move)
    for verb in MOVES:
        schedules.command(verb, help=MOVES[verb][1])(_moving(verb))


def producer(settings: Settings, bootstrap: str | None) -> dict[str, Any]:
    """The configuration's security and brokers; what belongs to the bridge's own producer stays out."""
    properties: dict[str, Any] = settings.kafka.properties("common", "producer")
    properties.pop("transaction.timeout.ms", None)
    return properties | ({"bootstrap.servers": bootstrap} if bootstrap else {})


def only_delay_topic(settings: Settings) -> str:
    """The configuration's. Raises ConfigurationError if it has several."""
    names = list(settings.delay_topics)
    if len(names) > 1:
        hint = "Name one with --delay-topic."
        raise ConfigurationError(f"which delay topic: {', '.join(names)}?", hint=hint, code="DB-1001")
    return names[0]
