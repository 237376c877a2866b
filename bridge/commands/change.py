"""`delay-bridge cancel|move` and `schedules cancel|pause|resume|run-now`: records that change what is pending.

They go into the delay topic as any producer's would, and need no running bridge. By id there is one for each partition:
which of them the message is in depends on the partitioner of its producer. With `--wait` the bridge says what became of
them. Their twins of the HTTP API (actions.py) ask one, and wait for its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Final

import typer
from confluent_kafka import KafkaError, Message

from bridge.client import DelayClient, remedy_of
from bridge.commands.api_client import Absent, ApiClient
from bridge.commands.invocation import ConfigOption, bundled, read_option, say, settings_of, with_unit
from bridge.commands.replies import NOTHING, Replies, Told, topic_of_answers
from bridge.errors import BridgeError, ConfigurationError, EnvironmentFailure
from bridge.kafka.reach import refuse_unreachable
from bridge.settings.model import Settings
from bridge.wire.headers import NEVER_MS, NEXT_MS, Origins, parse_origins, parse_until
from timerstore.clock import SystemClock

MOVES: Final = {
    "pause": (NEVER_MS, "Deliver no more ticks of a message that comes again, until it is resumed."),
    "resume": (NEXT_MS, "Go on with a message that was paused, at its next regular tick."),
    "run-now": (None, "Deliver the next tick of a message that comes again now, besides those of its rhythm."),
}
"""Verbs of schedules that are moves: to when (None: now), and what they do."""
ASK_S: Final = 2.0
"""How long the API may take to say what is known by a name: the command does not need it."""
WAIT: Final = "--wait 30s says what became of it"
SILENT: Final = {"log_level": "0"}
"""A command's own line says what has failed; the client would write one for each attempt."""


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
        str | None,
        typer.Option("--key", help="The key that it was sent with, for the answer; all partitions are asked."),
    ] = None
    reply_to: Annotated[
        str | None, typer.Option("--reply-to", help="Topic in which the bridge says what became of it.")
    ] = None
    wait: Annotated[
        str | None, typer.Option("--wait", help="Wait for the bridge to say what became of it, at most this long: 30s.")
    ] = None
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="Text that the answer carries.")] = None
    delay_topic: Annotated[
        str | None,
        typer.Option("--delay-topic", "--topic", help="Delay topic; default: the configuration's only one."),
    ] = None
    bootstrap: Annotated[str | None, typer.Option("--bootstrap", help="Brokers, host:port; wins over the file.")] = None
    config: ConfigOption = None

    def send(self, verb: str, command: Callable[[DelayClient, Origins | None, dict[str, Any]], None]) -> None:
        """Have `command` sent, which is called `verb`, and say what came of it, if that is waited for. It is given a
        client, the origins that are named (None: an id), and what else its record says."""
        with settings_of(self.config) as (given, _):
            settings = reaching(given, self.bootstrap)
            place = read_option(parse_origins, self.origin, "--origin")
            wait_ms = read_option(with_unit, self.wait, "--wait")
            if (self.id is None) == (place is None):
                hint = "`delay-bridge pending list` shows both."
                raise ConfigurationError("give either an id or --origin", hint=hint, code="DB-1003")
            delay_topic = self.delay_topic or (only_delay_topic(settings) if place is None else place[0])
            client, told = DelayClient(producer(settings), delay_topic), list[Message]()
            about: dict[str, Any] = {"reply_to": self.reply_to, "correlation": self.correlation_id}
            refuse_unreachable(settings.kafka.bootstrap_servers)
            with ExitStack() as stack:
                replies = None
                if wait_ms is not None:
                    topic = self.reply_to or topic_of_answers(settings, delay_topic)
                    replies = stack.enter_context(Replies(reading(settings), topic, SystemClock()))
                    about |= {"reply_to": topic, "on_delivery": partial(_taken, told)}
                known = "" if replies is not None else f"; {_known(settings, self.id, place)}"
                try:
                    command(client, place, about)
                except ValueError as error:
                    hint = "Give the id that the message was sent with; for a move, either --at or --after."
                    raise ConfigurationError(f"invalid command: {error}", hint=hint, code="DB-1003") from None
                client.flush()
                say(f"{verb} of {self.id or self.origin} sent to {delay_topic}{known}", err=True)
                if replies is not None:
                    commands = [f"{each.topic()}/{each.partition()}/{each.offset()}" for each in told]
                    named = None if place is None else len(place[2])
                    _report(self.id or self.origin or "", replies.wait(commands, (wait_ms or 0) / 1000, named))

    def move(self, verb: str, at_ms: int | None, after: timedelta | None) -> None:
        """Have the message due at another time; the command is called `verb`."""

        def command(client: DelayClient, place: Origins | None, about: dict[str, Any]) -> None:
            if place is None:
                client.move(self.id or "", self.key, at=at_ms, after=after, everywhere=True, **about)
            else:
                client.move_origin(*place, at=at_ms, after=after, **about)

        self.send(verb, command)


@bundled
def cancel(change: Change) -> None:
    """Cancel a pending message, in whichever partition it is. With --wait the exit status is 1 if nothing was pending;
    without it the command is sent, and what the bridge's API knows by the name before is said, if one answers."""

    def command(client: DelayClient, place: Origins | None, about: dict[str, Any]) -> None:
        if place is None:
            client.cancel(change.id or "", change.key, everywhere=True, **about)
        else:
            client.cancel_origin(*place, **about)

    change.send("cancel", command)


@bundled
def move(
    *,
    at: Annotated[str | None, typer.Option(help="New due time: RFC 3339 with a zone, or epoch milliseconds.")] = None,
    after: Annotated[str | None, typer.Option(help="New delay from now: 0s (now), 90s, 1h30m, 7d, PT15M.")] = None,
    change: Change,
) -> None:
    """Have a pending message due at another time, as `cancel` finds it. Exit status as of `cancel`."""
    until, after_ms = read_option(parse_until, at, "--at"), read_option(with_unit, after, "--after")
    change.move("move", until, None if after_ms is None else timedelta(milliseconds=after_ms))


def _known(settings: Settings, id: str | None, place: Origins | None) -> str:
    """What a bridge knows by a name before the command is sent, if its API is where the settings have it."""
    names = [("id", id or "")] if place is None else [("origin", f"{place[0]}/{place[1]}/{each}") for each in place[2]]
    with suppress(BridgeError, Absent):
        if len(names) == 1:
            api = ApiClient(settings.http, None, ASK_S)
            is_known = api.get("count", names).get("count") != 0
            return WAIT if is_known else f"nothing that is pending is known by that name at {api.address}; {WAIT}"
    return f"nobody has said whether anything is known by that name; {WAIT}"


def _taken(told: list[Message], error: KafkaError | None, message: Message) -> None:
    """Raises EnvironmentFailure, from `flush`, if the delay topic has not taken a command."""
    if error is not None:
        raise EnvironmentFailure(f"not taken: {error.str()}", hint=remedy_of(error), code="DB-1004")
    told.append(message)


def _report(name: str, told: Told) -> None:
    """Say what became of what was named. Raises typer.Exit with 1 unless all is done."""
    for outcome, count in told.counts.items():
        origins = told.origins.get(outcome, [])
        if outcome in NOTHING and not told.is_nothing:
            continue
        for origin in origins:
            say(f"{origin}: {outcome}")
        if outcome in NOTHING and not origins:
            say(f"nothing that is pending is known by the id {name}", err=True)
        elif count > len(origins):
            say(f"{name}: {outcome} {count - len(origins)}{' more' * bool(origins)}")
    if not told.has_changed:
        raise typer.Exit(1)


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


def reaching(settings: Settings, bootstrap: str | None) -> Settings:
    """`settings`, with these brokers in place of the configuration's."""
    if bootstrap is None:
        return settings
    common = {**settings.kafka.common, "bootstrap.servers": bootstrap}
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"common": common})})


def producer(settings: Settings) -> dict[str, Any]:
    """The configuration's security and brokers; what belongs to the bridge's own producer stays out."""
    properties: dict[str, Any] = settings.kafka.properties("common", "producer")
    properties.pop("transaction.timeout.ms", None)
    return SILENT | properties


def reading(settings: Settings) -> dict[str, Any]:
    """Of a consumer, with a group that the bridge's user may name anyway; it is never joined."""
    return SILENT | settings.kafka.properties("common") | {"group.id": settings.group_id}


def only_delay_topic(settings: Settings) -> str:
    """The configuration's. Raises ConfigurationError if it has several."""
    names = list(settings.delay_topics)
    if len(names) > 1:
        hint = "Name one with --delay-topic."
        raise ConfigurationError(f"which delay topic: {', '.join(names)}?", hint=hint, code="DB-1001")
    return names[0]
