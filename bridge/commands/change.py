"""`delay-bridge cancel|move` and `schedules cancel|pause|resume|run-now`: commands that change pending messages.

They write records into the delay topic, like any producer, and need no running bridge. By id they write one record for
each partition, since the partition of the message depends on its producer's partitioner. With `--wait` the command
waits for the bridge's answers. Its twins in actions.py ask a running bridge over the HTTP API.
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
from bridge.commands.replies import NOTHING, AnswerTally, await_answers, topic_of_answers
from bridge.commands.tail import Tail
from bridge.errors import BridgeError, ConfigurationError, EnvironmentFailure
from bridge.kafka.reach import refuse_unreachable
from bridge.settings.model import Settings
from bridge.wire.headers import NEVER_MS, NEXT_MS, Origins, origins_text, parse_origins, parse_until
from bridge.wire.received import record_place
from timerstore.clock import SystemClock

MOVES: Final = {
    "pause": (NEVER_MS, "Pause a recurring message: deliver no ticks until it is resumed."),
    "resume": (NEXT_MS, "Resume a paused recurring message at its next regular tick."),
    "run-now": (None, "Deliver the next tick of a recurring message now, in addition to its regular ticks."),
}
"""The moves among the verbs of schedules: the new due time (None: now), and the help text."""
ASK_S: Final = 2.0
"""The longest wait for the API's answer about a message: the command itself does not need it."""
WAIT: Final = "--wait 30s shows the outcome"
SILENT: Final = {"log_level": "0"}
"""The command's own line names a failure; the client would log each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions:
    """Options of all commands: the message, by its id or its origin, and the destination of the record."""

    id: Annotated[str | None, typer.Argument(help="The id of the message (delay-id).")] = None
    origin: Annotated[
        str | None,
        typer.Option(
            "--origin",
            help="Its origin, in place of an id: topic/partition/offset, or topic/partition/12,15 for up to 100.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option("--key", help="The key of the message, for the answer; the command goes to all partitions."),
    ] = None
    reply_to: Annotated[str | None, typer.Option("--reply-to", help="Topic for the answer of the bridge.")] = None
    wait: Annotated[
        str | None, typer.Option("--wait", help="Wait for the answer of the bridge, at most this long: 30s.")
    ] = None
    correlation_id: Annotated[str | None, typer.Option("--correlation-id", help="Text for the answer to repeat.")] = (
        None
    )
    delay_topic: Annotated[
        str | None,
        typer.Option("--delay-topic", "--topic", help="Delay topic; default: the configuration's only one."),
    ] = None
    bootstrap: Annotated[str | None, typer.Option("--bootstrap", help="Brokers, host:port; wins over the file.")] = None
    config: ConfigOption = None

    def send(self, verb: str, command: Callable[[DelayClient, Origins | None, dict[str, Any]], None]) -> None:
        """Send a command and, with --wait, print its outcome. `command` gets a client, the named origins (None: an id),
        and further arguments of the record; `verb` is its name for people."""
        with settings_of(self.config) as (given, _):
            settings = reaching(given, self.bootstrap)
            place = read_option(parse_origins, self.origin, "--origin")
            wait_ms = read_option(with_unit, self.wait, "--wait")
            if (self.id is None) == (place is None):
                hint = "`delay-bridge pending list` shows both."
                raise ConfigurationError("give either an id or --origin", hint=hint, code="DB-1003")
            delay_topic = self.delay_topic or (only_delay_topic(settings) if place is None else place[0])
            client, taken = DelayClient(producer_properties(settings), delay_topic), list[Message]()
            about: dict[str, Any] = {"reply_to": self.reply_to, "correlation": self.correlation_id}
            refuse_unreachable(settings.kafka.bootstrap_servers)
            with ExitStack() as stack:
                tail = None
                if wait_ms is not None:
                    topic = self.reply_to or topic_of_answers(settings, delay_topic)
                    tail = stack.enter_context(Tail(consumer_properties(settings), [topic], SystemClock()))
                    about |= {"reply_to": topic, "on_delivery": partial(keep_taken, taken)}
                remark = "" if tail is not None else f"; {_remark(settings, self.id, place)}"
                try:
                    command(client, place, about)
                except ValueError as error:
                    hint = "Give the id of the message; for a move, either --at or --after."
                    raise ConfigurationError(f"invalid command: {error}", hint=hint, code="DB-1003") from None
                client.flush()
                say(f"{verb} of {self.id or self.origin} sent to {delay_topic}{remark}", err=True)
                if tail is not None:
                    named = None if place is None else len(place[2]) // max(1, len(taken))
                    tally = await_answers(
                        tail, [record_place(record) for record in taken], (wait_ms or 0) / 1000, named
                    )
                    _report(self.id or self.origin or "", tally)

    def move(self, verb: str, at_ms: int | None, after: timedelta | None) -> None:
        """Move the message to another due time; `verb` is the name of the command for people."""

        def command(client: DelayClient, place: Origins | None, about: dict[str, Any]) -> None:
            if place is None:
                client.move(self.id or "", self.key, at=at_ms, after=after, everywhere=True, **about)
            else:
                for offset in place[2]:
                    client.move_origin(place[0], place[1], offset, at=at_ms, after=after, **about)

        self.send(verb, command)


@bundled
def cancel_message(change: ChangeOptions) -> None:
    """Cancel a pending message in any partition. With --wait the exit status is 1 if no message was pending; without it
    the command says whether the bridge's API knows the message, if the API answers."""

    def command(client: DelayClient, place: Origins | None, about: dict[str, Any]) -> None:
        if place is None:
            client.cancel(change.id or "", change.key, everywhere=True, **about)
        else:
            client.cancel_origin(*place, **about)

    change.send("cancel", command)


@bundled
def move_message(
    *,
    at: Annotated[str | None, typer.Option(help="New due time: RFC 3339 with a zone, or epoch milliseconds.")] = None,
    after: Annotated[str | None, typer.Option(help="New delay from now: 0s (now), 90s, 1h30m, 7d, PT15M.")] = None,
    change: ChangeOptions,
) -> None:
    """Move a pending message in any partition to another due time. The exit status is that of `cancel`."""
    until, after_ms = read_option(parse_until, at, "--at"), read_option(with_unit, after, "--after")
    change.move("move", until, None if after_ms is None else timedelta(milliseconds=after_ms))


def _remark(settings: Settings, id: str | None, place: Origins | None) -> str:
    """Whether the API knows the message before the command is sent, in words; the settings have its address."""
    with suppress(BridgeError, Absent):
        if place is None or len(place[2]) == 1:
            api = ApiClient(settings.http, None, ASK_S)
            name = {"id": id or ""} if place is None else {"origin": origins_text(*place)}
            is_known = api.get("count", name).get("count") != 0
            return WAIT if is_known else f"no pending message of that name at {api.address}; {WAIT}"
    return f"not known whether such a message is pending; {WAIT}"


def keep_taken(taken: list[Message], error: KafkaError | None, message: Message) -> None:
    """Keep a record. Raises EnvironmentFailure, from `flush`, if the delay topic has not taken it."""
    if error is not None:
        raise EnvironmentFailure(f"not taken: {error.str()}", hint=remedy_of(error), code="DB-1004")
    taken.append(message)


def _report(name: str, tally: AnswerTally) -> None:
    """Print the outcomes. Raises typer.Exit with 1 unless all named messages were changed."""
    for outcome, count in tally.counts.items():
        origins = tally.origins.get(outcome, [])
        if outcome in NOTHING and not tally.is_nothing:
            continue
        for origin in origins:
            say(f"{origin}: {outcome}")
        if outcome in NOTHING and not origins:
            say(f"no pending message has the id {name}", err=True)
        elif count > len(origins):
            say(f"{name}: {outcome} {count - len(origins)}{' more' * bool(origins)}")
    if not tally.has_changed:
        raise typer.Exit(1)


def _moving(verb: str) -> Callable[..., None]:
    to_ms = MOVES[verb][0]

    @bundled
    def moves(change: ChangeOptions) -> None:
        change.move(verb, to_ms, timedelta(0) if to_ms is None else None)

    return moves


def add_changes(app: typer.Typer, schedules: typer.Typer) -> None:
    for parent in (app, schedules):
        parent.command("cancel")(cancel_message)
    app.command("move")(move_message)
    for verb in MOVES:
        schedules.command(verb, help=MOVES[verb][1])(_moving(verb))


def reaching(settings: Settings, bootstrap: str | None) -> Settings:
    """`settings` with these brokers in place of the configured ones."""
    if bootstrap is None:
        return settings
    common = {**settings.kafka.common, "bootstrap.servers": bootstrap}
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"common": common})})


def producer_properties(settings: Settings) -> dict[str, Any]:
    """The configured properties of a producer, without those of the bridge's own transactions."""
    properties: dict[str, Any] = settings.kafka.properties("common", "producer")
    properties.pop("transaction.timeout.ms", None)
    return SILENT | properties


def consumer_properties(settings: Settings) -> dict[str, Any]:
    """The properties of a consumer. It never joins its group, the bridge's, which its user may name anyway."""
    return SILENT | settings.kafka.properties("common") | {"group.id": settings.group_id}


def only_delay_topic(settings: Settings) -> str:
    """The configured delay topic. Raises ConfigurationError if there are several."""
    names = list(settings.delay_topics)
    if len(names) > 1:
        hint = "Name one with --delay-topic."
        raise ConfigurationError(f"which delay topic: {', '.join(names)}?", hint=hint, code="DB-1001")
    return names[0]
