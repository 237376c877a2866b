"""The command `delay-bridge`: run, check, reset-offsets, rebuild, resolve, skip-batch, redrive, send, cancel, move,
pending, schedules, targets, dead-letters, config, version.

Every failure is one clear line on standard error and the exit status of its kind (bridge/errors.py): 2 configuration,
3 environment, 4 state, 5 another instance took over.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from confluent_kafka import Message
from rich.console import Console
from rich.text import Text

from bridge import __version__
from bridge.checks.finding import Finding
from bridge.client import DelayClient
from bridge.commands import actions, change, dead_letters, pending, schedules
from bridge.commands.arrivals import await_arrivals
from bridge.commands.invocation import (
    ConfigOption,
    failures_as_one_line,
    failures_end_at_once,
    output_as_far_as_it_goes,
    output_that_may_go,
    put,
    read_headers,
    read_option,
    say,
    settings_of,
    with_unit,
)
from bridge.commands.tail import Tail
from bridge.delivery.producer.transaction_markers import Outcome
from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.kafka.reach import refuse_unreachable
from bridge.runtime import allocator
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.telemetry import logs
from bridge.wire.headers import parse_until
from bridge.wire.letters import LetterChoice, RedriveReport
from bridge.wire.printable import printable
from bridge.wire.reasons import RejectReason
from bridge.wire.received import record_place
from bridge.wire.schedule import Missed
from timerstore.clock import SystemClock

app = typer.Typer(
    name="delay-bridge",
    help="Delayed delivery for Kafka.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they print local variables, among them secrets
)

ONCE: Final[dict[str, Any]] = {
    "every": None, "anchor": None, "cron": None, "time_zone": "UTC", "end": None, "times": None, "missed": Missed.LAST
}  # fmt: skip
"""The recurrence arguments of a message that does not recur."""
STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "bold red"}


class Reset(Enum):
    """The new place of committed offsets."""

    EARLIEST = "earliest"
    LATEST = "latest"
    COMMITTED = "committed"


@app.command("run")
def run_until_signal(config: ConfigOption = None) -> None:
    """Run the bridge until SIGTERM or SIGINT."""
    with output_that_may_go(), failures_as_one_line() as redact:
        allocator.restrain()
        settings = load(config, os.environ)
        redact.add(settings.secrets())
        logs.configure(format=settings.logs.format, level=settings.logs.level, redact=redact)
        threading.excepthook = logs.thread_failed
        from bridge.runtime import app as application  # Spark takes a second to import, and no other command needs it

        application.run_bridge(settings, partial(load, config, dict(os.environ)), redact)


@app.command()
def check(
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the brokers' answers.", min=0.1)] = 10.0,
) -> None:
    """Check brokers, topics, rights, disk and Java, and print the remedies. The exit status is 1 if a check fails."""
    with settings_of(config) as (settings, redact):
        from bridge.checks.run import run_checks

        findings = run_checks(settings, timeout_s=timeout)
        _print_findings(findings, redact)
        raise typer.Exit(any(finding.status == "failed" for finding in findings))


@app.command("reset-offsets")
def reset_committed_offsets(
    to: Annotated[Reset, typer.Option(help="The records of the delay topics to deliver.")],
    config: ConfigOption = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only this delay topic; may be repeated.")] = None,
) -> None:
    """Write new committed offsets after a start that was refused without them. Every instance must be down.

    earliest: deliver every record in the topics, even those delivered before. latest: deliver none of them. committed:
    deliver the pending ones, and give up only the records that the topics have lost.
    """
    with settings_of(config) as (settings, _):
        _must_be_delay_topics(topic, settings)
        from bridge.kafka.admin import Cluster
        from bridge.settings.clients import librdkafka
        from bridge.start import reset_offsets as resetting
        from bridge.start.facts import topic_facts
        from bridge.start.roll_window import decode_parameters, limits_of

        refuse_unreachable(settings.kafka.bootstrap_servers)
        cluster = Cluster(settings)
        limits = limits_of(cluster, topic or settings.delay_topics)
        states = resetting.reset_committed_states(
            consumer=librdkafka(settings, "consumer"),
            group_id=settings.group_id,
            topics=topic_facts(cluster, topic or settings.delay_topics),
            parameters=lambda name: decode_parameters(settings, name, limits[name]),
            to=to.value,
            directory=settings.store.directory,
            now_ms=SystemClock().now_ms(),
        )
        for (name, partition), state in sorted(states.items()):
            say(f"{name}/{partition}: from offset {state.offset}")


@app.command("rebuild")
def rebuild_indexes(
    only: Annotated[list[str] | None, typer.Argument(metavar="TOPIC/PARTITION", help="Only these; else all.")] = None,
    config: ConfigOption = None,
) -> None:
    """Bring the indexes in store.directory up to the committed offsets with a parallel job of Spark, before a start
    that would read very many records again. The bridge of this directory must be down; other instances go on."""
    with settings_of(config) as (settings, _):
        places = {pending.read_place(f"{text}/0", "with /0, the argument")[:2] for text in only or ()}
        _must_be_delay_topics([topic for topic, _ in places], settings)
        from bridge.install import connector
        from bridge.spark import session as spark
        from bridge.start.rebuild import TASK_ATTEMPTS, rebuild

        make = cache(partial(spark.start, settings, connector.jars(), attempts=TASK_ATTEMPTS))
        for done in rebuild(settings, make, SystemClock(), places):
            (topic, partition), read = done.name, done.end - done.begin
            say(f"{topic}/{partition}: {read} offsets read up to {done.end}, {done.pending} timers of them are pending")
        spark.stop()


@app.command("resolve")
def decide_outcome(
    ending: Annotated[Outcome, typer.Option("--as", help="The outcome of the transaction.")],
    place: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The place of messages in doubt, from the log."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Decide the unknown outcome of a transaction. With a place: one that ended unasked, and whose partition is held.
    Without a place: one that the brokers have forgotten, after the refusal of a start.

    aborted: its messages are delivered, even those delivered before. committed: they are not delivered, even those that
    never were. With a place, run it on the machine of the running bridge, whose store.directory it needs. Without a
    place, this instance must be down; if the brokers know the outcome, theirs is used.
    """
    with settings_of(config) as (settings, _):
        if place is not None:
            from bridge.delivery.doubt.doubt_file import DoubtFile
            from bridge.ingest.batches.choices import ENDS

            where = _place(settings, place, what := "the transaction")
            doubt = DoubtFile(settings.store.directory).read().get(where[0])
            if doubt is None or not doubt.unread or doubt.offset != where[1]:
                raise EnvironmentFailure(
                    f"no messages are in doubt at {place} here",
                    hint="Run it on the machine of the bridge that holds the partition, with the place from its log "
                    "(messages-in-doubt).",
                    directory=settings.store.directory,
                    code="DB-1024",
                )
            _choose(settings, ENDS, where, ending.value, what)
            return
        from bridge.install import connector
        from bridge.spark.transactions import coordinators
        from bridge.start import resolve

        resolve.must_be_pending(settings)
        done = resolve.resolve_transactions(settings, ending, coordinators(settings, connector.jars))
        for name, end in done.items():
            say(f"{name}: the last transaction is {end.value}")


@app.command()
def skip_batch(
    place: Annotated[
        str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="Its place, from the log or the alert.")
    ],
    config: ConfigOption = None,
) -> None:
    """Skip a batch of a delay topic that is corrupt on the brokers' disks, and read on after it.

    Run it on the machine of the running bridge, whose store.directory it needs. A dead letter names the lost offsets.
    """
    with settings_of(config) as (settings, _):
        from bridge.ingest.batches.choices import BATCHES, SKIPPED

        where = _place(settings, place, what := "the batch")
        _choose(settings, BATCHES, where, SKIPPED, what, topic=_topic_id(settings, where[0][0]))


@app.command()
def redrive(
    config: ConfigOption = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only from this delay topic; may be repeated.")] = None,
    reason: Annotated[list[str] | None, typer.Option(help="Only with this delay-reason; may be repeated.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only for this target; may be repeated.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only rejected from this time on: RFC 3339, or epoch ms.")
    ] = None,
    due: dead_letters.DueOption = dead_letters.Due.ORIGINAL,
    set_header: dead_letters.SetHeaderOption = None,
    dry_run: actions.DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", "--execute", help="Do not ask for confirmation.")] = False,
) -> None:
    """Put dead letters back into their delay topics, each once, even if the command runs again. It counts them first
    and asks for confirmation. `dead-letters redrive` asks a running bridge to do the same.

    A record with a bad header needs --due now or --set-header, or it would be rejected again.
    """
    with settings_of(config) as (settings, _):
        _must_be_delay_topics(topic, settings)
        if unknown := set(reason or ()) - set(RejectReason):
            hint = "See the list of reasons in docs/errors.md."
            raise ConfigurationError(f"not a reason: {', '.join(sorted(unknown))}", hint=hint, code="DB-1002")
        from bridge.dead_letters.redrive import redrive_letters

        since_ms = read_option(parse_until, since, "--since")
        set_headers = [(name, os.fsencode(text)) for name, text in read_headers(set_header, "--set-header")]
        try:
            choice = LetterChoice(
                topics=topic or (),
                reasons=reason or (),
                targets=target or (),
                since_ms=since_ms,
                due_now=due is dead_letters.Due.NOW,
                set_headers=set_headers,
            )
        except ValueError as error:
            hint = "Set only headers of producers."
            raise ConfigurationError(f"--set-header: {error}", hint=hint, code="DB-1003") from None
        if dry_run or not yes:
            counted = redrive_letters(settings, SystemClock(), choice, execute=False)
            _say_report(counted, execute=False)
            if dry_run or not counted.back:
                return
            actions.confirm("put them back?")
        _say_report(redrive_letters(settings, SystemClock(), choice, execute=True), execute=True)


@app.command()
def send(
    value: Annotated[
        str | None, typer.Argument(help="The message. Without it and --file: each line of standard input.")
    ] = None,
    topic: Annotated[str | None, typer.Option("--to", help="Target; else the delay topic's default.")] = None,
    other_topic: Annotated[str | None, typer.Option("--topic", hidden=True)] = None,
    at: Annotated[str | None, typer.Option(help="Due time: RFC 3339 with a zone, or epoch milliseconds.")] = None,
    after: Annotated[str | None, typer.Option(help="Delay from now: 250ms, 90s, 1h30m, 7d, PT15M.")] = None,
    every: Annotated[str | None, typer.Option(help="Repeat at this interval: 15m, 1d.")] = None,
    anchor: Annotated[
        str | None, typer.Option(help="For --every: the start of the intervals; RFC 3339, or epoch milliseconds.")
    ] = None,
    cron: Annotated[str | None, typer.Option(help="Repeat at these times: '0 9 * * MON-FRI'.")] = None,
    time_zone: Annotated[str, typer.Option(help="For --cron: an IANA name.")] = "UTC",
    end: Annotated[
        str | None, typer.Option(help="No ticks after: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None,
    times: Annotated[int | None, typer.Option(help="Maximum number of ticks.")] = None,
    missed: Annotated[Missed, typer.Option(help="The ticks to deliver of several missed ones.")] = Missed.LAST,
    key: Annotated[str | None, typer.Option(help="Key of the message.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Header; may be repeated.")] = None,
    id: Annotated[str | None, typer.Option(help="Id, to cancel or replace the message.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the pending message with this id.")] = False,
    partition: Annotated[int | None, typer.Option(help="Partition of the target.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with the message.")] = None,
    delay_topic: Annotated[str | None, typer.Option(help="Delay topic; default: the configuration's only one.")] = None,
    wait: Annotated[
        str | None, typer.Option(help="Wait for the arrival of the messages, at most this long: 60s, 5m.")
    ] = None,
    bootstrap: Annotated[str | None, typer.Option(help="Brokers, host:port; wins over the configuration.")] = None,
    config: ConfigOption = None,
) -> None:
    """Send messages for later delivery. With --every or --cron they recur, from --at or --after on. Prints the origin
    of each message, its place in the delay topic, for a later look-up or cancel."""
    with settings_of(config) as (given, _):
        settings = change.reaching(given, bootstrap)
        if other_topic is not None:
            hint = "Name the target with --to, the delay topic with --delay-topic."
            raise ConfigurationError("send has no option --topic", hint=hint, code="DB-1003")
        if value is not None and file is not None:
            raise ConfigurationError("both a message and --file are given", hint="Give one of them.", code="DB-1003")
        send_at, after_ms = read_option(parse_until, at, "--at"), read_option(with_unit, after, "--after")
        send_after = None if after_ms is None else timedelta(milliseconds=after_ms)
        every_ms = read_option(with_unit, every, "--every")
        recurrence: dict[str, Any] = {
            "every": None if every_ms is None else timedelta(milliseconds=every_ms),
            "anchor": read_option(parse_until, anchor, "--anchor"),
            "cron": cron,
            "time_zone": time_zone,
            "end": read_option(parse_until, end, "--end"),
            "times": times,
            "missed": missed,
        }
        headers = [(name, os.fsencode(text)) for name, text in read_headers(header, "--header")]
        delay_topic = delay_topic or change.only_delay_topic(settings)
        client = DelayClient(change.producer_properties(settings), delay_topic)
        if wait is not None:
            refuse_unreachable(settings.kafka.bootstrap_servers)
        arrivals = _arrivals(settings, delay_topic, topic) if wait is not None else None
        wait_ms = read_option(with_unit, wait, "--wait") or 0
        send_one: Callable[..., None] = client.send if recurrence == ONCE else partial(client.schedule, **recurrence)
        taken: list[Message] = []
        count = 0
        for message in _messages(value, file):
            try:
                send_one(
                    topic,
                    message,
                    key,
                    headers,
                    at=send_at,
                    after=send_after,
                    id=id,
                    replace=replace,
                    partition=partition,
                    on_delivery=partial(change.keep_taken, taken),
                )
            except ValueError as error:
                hint = "See `delay-bridge send --help`."
                raise ConfigurationError(f"invalid message: {error}", hint=hint, code="DB-1003") from None
            count += 1
            if count == 1:
                refuse_unreachable(settings.kafka.bootstrap_servers)
        client.flush()
        say(f"{count} message{'s' * (count != 1)} sent to {client.delay_topic}", err=True)
        origins = list(map(record_place, taken))
        if arrivals is not None:
            tail, letter_topics = arrivals
            with tail:
                for arrived in await_arrivals(tail, origins, wait_ms / 1000, letter_topics):
                    say(f"{arrived.origin} arrived at {arrived.place}, {arrived.lateness_ms} ms late")
        else:
            for origin in origins:
                say(origin)


@app.command("config")
def show_config(config: ConfigOption = None) -> None:
    """Print the effective configuration, without secrets."""
    with settings_of(config) as (settings, _):
        put(yaml.safe_dump(settings.masked(), sort_keys=False, allow_unicode=True))


@app.command("version")
def print_version() -> None:
    """Print the versions of the bridge and of its main dependencies."""
    packages = {name: metadata.version(name) for name in ("confluent-kafka", "pyspark", "pyarrow", "numpy")}
    for name, number in {"delay-bridge": __version__, "python": platform.python_version(), **packages}.items():
        say(f"{name} {number}")


app.add_typer(pending.app)
app.add_typer(schedules.app)
change.add_changes(app, schedules.app)
app.add_typer(pending.targets_app)
app.add_typer(dead_letters.app)
actions.add_actions()


def main() -> None:
    """The entry point of `delay-bridge` and `python -m bridge`."""
    with failures_end_at_once(), output_as_far_as_it_goes():
        app(prog_name="delay-bridge")


def _place(settings: Settings, place: str, what: str) -> tuple[tuple[str, int], int]:
    """The partition and offset of a place in a delay topic."""
    topic, partition, offset = pending.read_place(place, what)
    _must_be_delay_topics([topic], settings)
    return (topic, partition), offset


def _topic_id(settings: Settings, name: str) -> str:
    """The id of an existing delay topic."""
    from bridge.kafka.admin import Cluster
    from bridge.start.facts import existing

    refuse_unreachable(settings.kafka.bootstrap_servers)
    return existing(Cluster(settings), [name])[name].topic_id


def _choose(
    settings: Settings, file: str, where: tuple[tuple[str, int], int], word: str, what: str, topic: str | None = None
) -> None:
    """Write the operator's choice into a file of the running bridge, where `topic` stands for the topic's name."""
    from bridge.ingest.batches.choices import Choices

    (name, partition), offset = where
    is_new = Choices(settings.store.directory, file).add((topic or name, partition), offset, word)
    say(f"{name}/{partition}: {what} at offset {offset} {'will count as' if is_new else 'already counts as'} {word}")


def _must_be_delay_topics(names: Sequence[str] | None, settings: Settings) -> None:
    if unknown := set(names or ()) - settings.delay_topics.keys():
        raise ConfigurationError(
            f"not a delay topic: {', '.join(sorted(unknown))}", hint="Name one of delay_topics.", code="DB-1001"
        )


# --- check -----------------------------------------------------------------------------------------------------------


def _print_findings(findings: Sequence[Finding], redact: Redactor) -> None:
    console = Console()
    if not console.is_terminal:  # one line each, for grep
        for finding in findings:
            remedy = f" -> {redact(finding.remedy)}" if finding.remedy else ""
            say(f"{finding.status:8}{finding.name}: {redact(finding.detail)}{remedy}")
        return
    for finding in findings:  # soft wraps: the operator copies a remedy as a whole
        line = Text(f"{finding.status:8}", STYLES[finding.status])
        line.append(printable(redact(f"{finding.name}: {finding.detail}")), "default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(printable(redact(finding.remedy))), soft_wrap=True)


# --- redrive ---------------------------------------------------------------------------------------------------------


def _say_report(report: RedriveReport, *, execute: bool) -> None:
    for (reason, target), count in sorted(report.back.items()):
        say(f"{'put back' if execute else 'goes back':12}{count:>8}  {reason}  {target}")
    for (reason, target), count in sorted(report.broken.items()):
        say(f"{'stays':12}{count:>8}  {reason}  {target}  (needs --due now or --set-header)")
    others = {"not chosen": report.left, "back before": report.before, "no letters": report.foreign}
    for name, count in others.items():
        if count:
            say(f"{name:12}{count:>8}")
    total = sum(report.back.values())
    letters = f"{total} dead letter{'s' * (total != 1)}"
    say(f"{letters} put back" if execute else f"{letters} would go back")


# --- send ------------------------------------------------------------------------------------------------------------


def _messages(value: str | None, file: Path | None) -> Iterator[bytes]:
    if value is not None:
        yield os.fsencode(value)
    elif file is not None:
        try:
            yield file.read_bytes()
        except OSError as error:
            hint = "Correct --file."
            raise ConfigurationError(f"cannot read {file}: {error.strerror}", hint=hint, code="DB-2001") from None
    else:
        for line in sys.stdin.buffer:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _arrivals(settings: Settings, delay_topic: str, topic: str | None) -> tuple[Tail, list[str]]:
    """The tail of the target and of the dead-letter topics, and the latter. Made before the first message is sent, so
    that none is missed."""
    mapped = settings.delay_topics.get(delay_topic)
    target = topic or (mapped.target if mapped is not None else None)
    if target is None:
        raise ConfigurationError("--wait needs a target", hint="Name it with --to.", code="DB-1003")
    dead_letters = [settings.dead_letter_topic(delay_topic)] if mapped is not None else []
    return Tail(change.consumer_properties(settings), [target, *dead_letters], SystemClock()), dead_letters
