"""What all commands share: the configuration, one line for each failure, and text that cannot steer a terminal."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import structlog
import typer

from bridge.errors import BridgeError, ConfigurationError, EnvironmentFailure, InternalError
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.telemetry import logs
from bridge.wire.headers import parse_duration
from bridge.wire.printable import printable

log = structlog.get_logger("bridge.commands.invocation")

Value = TypeVar("Value")
_OUTPUT_FAILURES: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML; DELAY_BRIDGE__* variables win over it.")
]


def bundled(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it: a parameter whose type is a dataclass stands for options, its fields."""
    hints, given = get_type_hints(command, include_extras=True), inspect.signature(command).parameters
    bundles: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[inspect.Parameter]()
    for name, parameter in given.items():
        options = {name: parameter.default}
        if name in bundles:
            options = {field.name: field.default for field in fields(bundles[name])}
            hints |= get_type_hints(bundles[name], include_extras=True)
        parameters += [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each])
            for each, default in options.items()
        ]

    @wraps(command)
    def seen(**values: Any) -> None:
        for name, bundle in bundles.items():
            values[name] = bundle(**{each.name: values.pop(each.name) for each in fields(bundle)})
        command(**values)

    seen.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    seen.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return seen


class OutputError(OSError):
    """Standard output takes nothing more."""


def say(text: str, *, err: bool = False) -> None:
    """One line. Names and reasons in it may come from records and brokers."""
    if err:
        with suppress(OSError):  # there is nobody to tell
            typer.echo(printable(text), err=True)
    else:
        put(f"{printable(text)}\n")


def put(text: str) -> None:
    """Text that is printable. Raises OutputError."""
    try:
        typer.echo(text, nl=False)
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


def open_what_is_closed() -> None:
    """Standard streams that the parent process has closed lead nowhere from now on: else the next file or connection
    has their descriptor, and what is printed goes there."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


@contextmanager
def output_that_may_go() -> Iterator[None]:
    """Of the bridge: whoever reads its log may go, and has no say in how it ends."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            _print_nowhere()


def _print_nowhere() -> None:
    """What is buffered, too: Python would fail on it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def output_as_far_as_it_goes() -> Iterator[None]:
    """Of the whole program: it ends quietly where nobody reads any more (`| head`), and with one line where its output
    cannot be written."""
    open_what_is_closed()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_FAILURES:
            raise
        _print_nowhere()
        if error.errno == errno.EPIPE:
            sys.exit(1)
        failure = EnvironmentFailure(
            "the output cannot be written", hint="Make room, or write it to another place.", reason=error.strerror,
            code="DB-1081",
        )  # fmt: skip
        say(f"delay-bridge: {failure}", err=True)
        sys.exit(failure.exit_code)


@contextmanager
def failures_as_one_line() -> Iterator[Redactor]:
    """The redactor of the one line is to be told the secrets as soon as the settings are read."""
    redact = Redactor()
    logs.configure(level="warning", stream=sys.stderr)  # until the settings are read
    try:
        yield redact
    except BridgeError as error:
        say(f"delay-bridge: {redact(str(error))}", err=True)
        raise typer.Exit(error.exit_code) from None
    except (typer.Exit, typer.Abort):
        raise
    except (OutputError, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        log.exception("internal-error")  # the outermost frame: the last line sums it up
        wrapped = InternalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="This is a bug: please report it with the log.",
            code="DB-7001",
        )
        say(f"delay-bridge: {redact(str(wrapped))}", err=True)
        raise typer.Exit(wrapped.exit_code) from None


@contextmanager
def settings_of(config: Path | None) -> Iterator[tuple[Settings, Redactor]]:
    """Settings and redactor of a command that logs warnings only."""
    with failures_as_one_line() as redact:
        settings = load(config, os.environ)
        redact.add(settings.secrets())
        logs.configure(level="warning", redact=redact, stream=sys.stderr)
        yield settings, redact


def read_option(parse: Callable[[str], Value], text: str | None, option: str) -> Value | None:
    """What `parse` makes of an option's text. Raises ConfigurationError for its ValueError."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        hint = "See `delay-bridge send --help` for the forms."
        raise ConfigurationError(f"{option} is invalid: {error}", hint=hint, code="DB-1003") from None


def with_unit(text: str) -> int:
    """Milliseconds of a duration whose unit is written: a bare number is milliseconds in headers, and seconds to many
    who type it. Raises ValueError."""
    ms = parse_duration(text)
    if text.strip().isdecimal() and ms:
        raise ValueError(f"{text!r} has no unit; write {text}s, {text}m or {text}ms")
    return ms


def read_headers(texts: Iterable[str] | None, option: str) -> Iterator[tuple[str, str]]:
    """Names and values of an option that is NAME=VALUE. Raises ConfigurationError."""
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            hint = f"Write {option} name=value."
            raise ConfigurationError(f"{option} {text!r} is not NAME=VALUE", hint=hint, code="DB-1003")
        yield name, value
