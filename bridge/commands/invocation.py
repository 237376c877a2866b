"""The shared parts of all commands: configuration, one line for each failure, output that cannot steer a terminal."""

from __future__ import annotations

import atexit
import base64
import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import structlog
import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

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
    """A command for Typer: each parameter whose type is a dataclass, or a model of filters, is replaced by options, the
    fields of that type."""
    hints, given = get_type_hints(command, include_extras=True), inspect.signature(command).parameters
    bundles = {name: options for name, hint in hints.items() if (options := _options_of(hint)) is not None}
    parameters = list[inspect.Parameter]()
    for name, parameter in given.items():
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in bundles.get(name, {name: (hints[name], parameter.default)}).items()
        ]

    @wraps(command)
    def seen(**values: Any) -> None:
        for name, options in bundles.items():
            filled = {option: values.pop(option) for option in options}
            values[name] = hints[name](**filled) if is_dataclass(hints[name]) else _filters(hints[name], filled)
        command(**values)

    seen.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    seen.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return seen


def _options_of(hint: Any) -> dict[str, tuple[Any, Any]] | None:
    """The options of a bundle, by name: annotation and default."""
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        defaults = {field.name: field.default for field in fields(hint)}
        empty = inspect.Parameter.empty
        return {name: (hints[name], empty if default is MISSING else default) for name, default in defaults.items()}
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return {name: (_option(name, field), None) for name, field in hint.model_fields.items()}
    return None


def _option(name: str, field: FieldInfo) -> Any:
    """The option of a filter: a text, or several values."""
    option = typer.Option(f"--{name.replace('_', '-')}", help=field.description)
    if get_origin(field.annotation) is not list:
        return Annotated[str | None, option]
    (item,) = get_args(field.annotation)
    return Annotated[list[item if isinstance(item, type) else str] | None, option]  # type: ignore[misc]


def _filters(model: type[Any], given: Mapping[str, Any]) -> Any:
    """The filters of a request to the API. A key becomes base64: options may have any bytes."""
    with failures_as_one_line():
        chosen = {name: value for name, value in given.items() if value is not None and value != []}
        if "key" in chosen and "key_base64" not in chosen:
            chosen["key_base64"] = base64.b64encode(os.fsencode(chosen.pop("key"))).decode()
        try:
            filters = model(**chosen)
            filters.values()
        except ValidationError as error:
            fault = error.errors()[0]
            text = f"{fault['loc'][0]}: {fault['msg']}"
        except ValueError as error:
            text = str(error)
        else:
            return filters
        raise ConfigurationError(f"invalid option: {text}", hint="--help has the forms.", code="DB-1003")


class OutputError(OSError):
    """Standard output takes no more text."""


def say(text: str, *, err: bool = False) -> None:
    """Print one line, with escapes: names and reasons in it may come from records and brokers."""
    if err:
        with suppress(OSError):  # nobody reads it
            typer.echo(printable(text), err=True)
    else:
        put(f"{printable(text)}\n")


def put(text: str) -> None:
    """Print text that is known to be printable. Raises OutputError."""
    try:
        typer.echo(text, nl=False)
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


def open_what_is_closed() -> None:
    """Open the standard streams that the parent process has closed, on /dev/null. Else the next file or connection
    would get their descriptors, and the program would print into it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


@contextmanager
def output_that_may_go() -> Iterator[None]:
    """Let the reader of the bridge's log leave without an effect on the exit status."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            _print_nowhere()


def _print_nowhere() -> None:
    """Discard all output, even the buffered part: Python would fail on it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def output_as_far_as_it_goes() -> Iterator[None]:
    """End the program quietly after its reader has left (`| head`), and with one line if its output cannot be
    written."""
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
def failures_end_at_once() -> Iterator[None]:
    """End a failed program without the interpreter's teardown, in which a thread that waits for a broker or for Spark
    may crash the process: its exit status would be that of a signal."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int) and end.code != 0:
            atexit._run_exitfuncs()
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(end.code)
        raise


@contextmanager
def failures_as_one_line() -> Iterator[Redactor]:
    """Print a failure as one line. After reading the settings, the caller tells this redactor the secrets."""
    redact = Redactor()
    logs.configure(level="warning", stream=sys.stderr)  # before the settings are read
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
        log.exception("internal-error")  # with the traceback; the last line is the summary
        wrapped = InternalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="This is a bug: please report it with the log.",
            code="DB-7001",
        )
        say(f"delay-bridge: {redact(str(wrapped))}", err=True)
        raise typer.Exit(wrapped.exit_code) from None


@contextmanager
def settings_of(config: Path | None) -> Iterator[tuple[Settings, Redactor]]:
    """The settings and the redactor of a command that logs only warnings."""
    with failures_as_one_line() as redact:
        settings = load(config, os.environ)
        redact.add(settings.secrets())
        logs.configure(level="warning", redact=redact, stream=sys.stderr)
        yield settings, redact


def read_option(parse: Callable[[str], Value], text: str | None, option: str) -> Value | None:
    """The parsed value of an option. Raises ConfigurationError for a ValueError of `parse`."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        hint = "See `delay-bridge send --help` for the forms."
        raise ConfigurationError(f"{option} is invalid: {error}", hint=hint, code="DB-1003") from None


def with_unit(text: str) -> int:
    """Milliseconds of a duration with a unit. Raises ValueError without one: a bare number means milliseconds in
    headers, but seconds to many people."""
    ms = parse_duration(text)
    if text.strip().isdecimal() and ms:
        raise ValueError(f"{text!r} has no unit; write {text}s, {text}m or {text}ms")
    return ms


def read_headers(texts: Iterable[str] | None, option: str) -> Iterator[tuple[str, str]]:
    """Names and values of an option of the form NAME=VALUE. Raises ConfigurationError."""
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            hint = f"Write {option} name=value."
            raise ConfigurationError(f"{option} {text!r} is not NAME=VALUE", hint=hint, code="DB-1003")
        yield name, value
