"""`delay-bridge pending list|get|count|export` and `delay-bridge targets`: the pending messages and the targets of a
running bridge.

They are twins of the HTTP API with the same filters, and with `--output json` the same documents. On a terminal they
print a table; otherwise a line for each message, with tabs, for grep and cut. They change no messages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge.api.filters import Filters
from bridge.commands.api_client import Absent, ApiClient
from bridge.commands.invocation import ConfigOption, bundled, put, say, settings_of
from bridge.errors import ConfigurationError
from bridge.wire.headers import Origin, origin_text, parse_origin
from bridge.wire.printable import printable

app = typer.Typer(
    name="pending", help="List, count and export the pending messages of a running bridge.", no_args_is_help=True
)
targets_app = typer.Typer(name="targets")

PAGE_MAX: Final = 1_000
"""The API's limit of messages in an answer."""
COLUMNS: Final = ("origin", "due", "state", "target", "key", "id")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class OutputFormat(Enum):
    """The form of the output."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[OutputFormat, typer.Option("--output", help="For people, or the API's JSON.")]
OriginArgument = Annotated[
    str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The origin of the message, from `list`.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the bridge's answer.", min=0.1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Options of all commands that ask a running bridge: its address, and the time to wait."""

    url: Annotated[
        str | None, typer.Option("--url", help="Address of the bridge's API; default: http.host and http.api_port.")
    ] = None
    timeout: TimeoutOption = 30.0
    config: ConfigOption = None

    @contextmanager
    def open(self) -> Iterator[ApiClient]:
        """The client of its API; a failure ends the command with one line."""
        with settings_of(self.config) as (settings, _):
            api = ApiClient(settings.http, self.url, self.timeout)
            try:
                yield api
            except Absent:  # the API has this path
                raise api.foreign() from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Options of a list."""

    limit: Annotated[int, typer.Option("--limit", help="Maximum number of lines.", min=1)] = 100
    cursor: Annotated[str | None, typer.Option("--cursor", help="Continue an earlier list from its cursor.")] = None
    everything: Annotated[bool, typer.Option("--all", help="Show all, without a limit.")] = False
    output: OutputOption = OutputFormat.TEXT

    def show(
        self,
        api: ApiClient,
        path: str,
        name: str,
        filters: BaseModel,
        columns: Sequence[str],
        row: Callable[[Mapping[str, Any]], list[str]],
    ) -> None:
        """Print the list at `path`, page by page: there may be millions of lines. `name` is the list in an answer;
        `row` returns the cells of `columns`."""
        pages = self._pages(api, path, name, parameters_of(filters))
        if self.output is OutputFormat.JSON:
            _print_json(pages, name)
            return
        following, silent = None, set[str]()
        for page in pages:
            following = page["next"]
            silent |= _silent(page)
            print_rows(columns, list(map(row, page[name])))
        _print_silent(silent)
        if following is not None:
            say(f"there are more: --all, or --cursor {following}", err=True)

    def _pages(self, api: ApiClient, path: str, name: str, parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers. The bridge may end a page early in a long search."""
        cursor, left = self.cursor, sys.maxsize if self.everything else self.limit
        while left > 0:
            where = {} if cursor is None else {"cursor": cursor}
            answer = api.get(path, {**parameters, "limit": min(left, PAGE_MAX), **where})
            following = answer.get("next")
            left -= len(objects(api, answer, name))
            if not isinstance(following, str | None) or (following is not None and following == cursor):
                raise api.foreign()
            yield answer | {"next": following}
            if following is None:
                return
            cursor = following


@app.command("list")
@bundled
def list_messages(
    filters: Filters,
    connection: Connection,
    listing: Listing,
) -> None:
    """List pending messages in the order in which they come up."""
    with connection.open() as api:
        listing.show(api, "messages", "messages", filters, COLUMNS, _row)


@app.command("get")
@bundled
def get_message(
    origin: OriginArgument,
    connection: Connection,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show one pending message. The exit status is 1 if it is not pending."""
    with connection.open() as api:
        try:
            message = api.get(f"messages/{checked_place(origin, 'the message')}")
        except Absent as absent:
            say(f"{origin} is not pending. {absent}".rstrip(), err=True)
            raise typer.Exit(1) from None
        print_one(message, output)


@app.command("count")
@bundled
def count_messages(
    filters: Filters,
    connection: Connection,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Count pending messages. `at least` marks a count that ended early."""
    with connection.open() as api:
        answer = api.get("count", parameters_of(filters))
        if not isinstance(answer.get("count"), int) or not isinstance(answer.get("exact"), bool):
            raise api.foreign()
        print_answer(answer, output, f"{'' if answer['exact'] else 'at least '}{answer['count']}")
        _print_silent(_silent(answer))


@app.command("export")
@bundled
def export_messages(
    to: Annotated[Path, typer.Option("--to", metavar="FILE.parquet", help="The file to write or replace.")],
    filters: Filters,
    connection: Connection,
) -> None:
    """Write all pending messages of one moment into a Parquet file. A failure leaves no file."""
    with connection.open() as api:
        from bridge.commands.export import export_batches, write_parquet  # imports Arrow, which takes a while

        with closing(export_batches(api, parameters_of(filters))) as stream:
            rows = write_parquet(to, stream)
        say(f"{rows} messages written to {to}")


@targets_app.callback(invoke_without_command=True)
@bundled
def list_targets(
    context: typer.Context,
    connection: Connection,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """List the targets of a running bridge and their failures; or pause and resume one."""
    if context.invoked_subcommand is not None:
        return
    with connection.open() as api:
        answer = api.get("targets")
        rows = objects(api, answer, "targets")
        if output is OutputFormat.JSON:
            say(as_json(answer))
            return
        _print_silent(_silent(answer))
        names = list(dict.fromkeys(name for row in rows for name in row))  # in the order of the API
        print_rows(names, [[shown(row.get(name)) for name in names] for row in rows])


# --- asking ----------------------------------------------------------------------------------------------------------


def parameters_of(filters: BaseModel) -> dict[str, Any]:
    """The given filters, as parameters or a body of the API."""
    return filters.model_dump(mode="json", exclude_unset=True)


def read_place(text: str, what: str) -> Origin:
    """The place of a record, written as TOPIC/PARTITION/OFFSET. Raises ConfigurationError."""
    try:
        return parse_origin(text)
    except ValueError:
        hint = "Write it like delay/0/42."
        raise ConfigurationError(f"{what} is not TOPIC/PARTITION/OFFSET", hint=hint, code="DB-1003") from None


def checked_place(text: str, what: str) -> str:
    """The same as text; it needs no quoting in a URL."""
    return origin_text(*read_place(text, what))


def objects(api: ApiClient, answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    listed = answer.get(name)
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise api.foreign()
    return listed


# --- printing --------------------------------------------------------------------------------------------------------


def _print_json(pages: Iterable[Mapping[str, Any]], name: str) -> None:
    """Print one document like the API's, with a line for each item of the list."""
    before, following, silent = f"{{{as_json(name)}: [", None, set[str]()
    for page in pages:
        following = page["next"]
        silent |= _silent(page)
        for item in page[name]:
            put(f"{before}\n{as_json(item)}")
            before = ","
    incomplete = f', "incomplete": {as_json(sorted(silent))}' if silent else ""
    put(f'{before.removeprefix(",")}\n], "next": {as_json(following)}{incomplete}}}\n')


def _silent(answer: Mapping[str, Any]) -> set[str]:
    """The instances that did not answer, and the partitions that are not read yet."""
    silent = answer.get("incomplete")
    return set(map(str, silent)) if isinstance(silent, list) else set()


def _print_silent(silent: Iterable[str]) -> None:
    if silent:
        say(f"incomplete: messages of {', '.join(sorted(silent))} are missing", err=True)


def print_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, and a line for each row elsewhere."""
    console = Console()
    if not console.is_terminal:  # one line each, for grep
        for row in rows:
            put("\t".join(map(printable, row)) + "\n")
        return
    table = Table()
    for name in names:
        table.add_column(Text(printable(name)))
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if table.__rich_measure__(console, console.options).maximum <= console.width:
        console.print(table)
        return
    for row in rows:  # a table of this width would break names
        for name, cell in zip(names, row, strict=True):
            if cell:
                say(f"{name:17}{cell}")
        say("")


def _row(message: Mapping[str, Any]) -> list[str]:
    others = [shown(message.get(name)) for name in COLUMNS[2:]]
    return [shown(message.get("origin")), format_time(message.get("due")), *others]


def print_answer(answer: Mapping[str, Any], output: OutputFormat, text: str) -> None:
    """Print an answer as JSON, or its text for people."""
    say(as_json(answer) if output is OutputFormat.JSON else text)


def print_one(item: Mapping[str, Any], output: OutputFormat) -> None:
    """Print all fields of one message, schedule or dead letter."""
    if output is OutputFormat.JSON:
        say(as_json(item))
        return
    for name, text in _lines(item):
        say(f"{name:17}{text}")


def _lines(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts, in the order of the API."""
    for name, value in message.items():
        if name in ("due", "at", "ts"):
            yield name, format_time(value)
        elif name == "next" and isinstance(value, list):
            for due in value:
                yield name, format_time(due)
        elif name == "headers" and isinstance(value, list):
            for header in value:
                if isinstance(header, dict):
                    has_value = isinstance(header.get("text"), str) or isinstance(header.get("base64"), str)
                    yield "header", shown(header.get("name")) + (f": {shown(header)}" if has_value else "")
        elif value is not None:
            yield name, shown(value)


def format_time(epoch_ms: object) -> str:
    """RFC 3339 in UTC."""
    if not isinstance(epoch_ms, int):
        return ""
    try:
        instant = EPOCH + timedelta(milliseconds=epoch_ms)
    except OverflowError:
        return str(epoch_ms)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(value: object) -> str:
    """A value of the API for people: text as text, other bytes as base64."""
    if value is None:
        return ""
    if isinstance(value, dict):
        cut = " (cut)" if value.get("truncated") is True else ""
        if isinstance(value.get("text"), str):
            return f"{value['text']}{cut}"
        if isinstance(value.get("base64"), str):
            return f"base64:{value['base64']}{cut}"
    return as_json(value) if isinstance(value, dict | list | bool) else str(value)


def as_json(value: object) -> str:
    """JSON of one line in printable ASCII."""
    return json.dumps(value).replace("\x7f", "\\u007f")
