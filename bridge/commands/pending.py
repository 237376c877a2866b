"""`delay-bridge pending list|get|count|export` and `delay-bridge targets`: what a running bridge has to deliver, and
where.

Twins of the HTTP API: the same filters, and with `--output json` the same documents. On a terminal a table; otherwise a
message a line, with tabs, for grep and cut. Nothing here changes what is pending.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge.commands.api_client import Absent, ApiClient
from bridge.commands.invocation import ConfigOption, bundled, put, read_option, say, settings_of
from bridge.errors import ConfigurationError
from bridge.wire.headers import parse_until
from bridge.wire.printable import printable

app = typer.Typer(name="pending", help="Ask a running bridge what is pending.", no_args_is_help=True)
targets_app = typer.Typer(name="targets")

PAGE_MAX: Final = 1_000
"""Messages of one answer: the API gives no more."""
COLUMNS: Final = ("origin", "due", "state", "target", "key", "id")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class State(Enum):
    """The store's `PendingState`, which takes Arrow to import."""

    WAITING = "waiting"
    ROLLED = "rolled"
    RETRYING = "retrying"
    OVERDUE = "overdue"
    PAUSED = "paused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages as the API gives them, and the cursor of the page after them; None at the end."""

    messages: list[dict[str, Any]]
    following: str | None


class Output(Enum):
    """How an answer is printed."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="For people, or the API's JSON.")]
OriginArgument = Annotated[
    str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="The record that was sent, as `list` names it.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the bridge's answer.", min=0.1)]
CursorOption = Annotated[str | None, typer.Option("--cursor", help="Go on where an earlier list ended.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Options of all that ask a running bridge: which one, and for how long."""

    url: Annotated[
        str | None, typer.Option("--url", help="Address of the bridge's API; default: http.host and http.api_port.")
    ] = None
    timeout: TimeoutOption = 30.0
    config: ConfigOption = None

    @contextmanager
    def open(self) -> Iterator[ApiClient]:
        """Its API; failures end the command with one line."""
        with settings_of(self.config) as (settings, _):
            api = ApiClient(settings.http, self.url, self.timeout)
            try:
                yield api
            except Absent:  # of a path that the API has
                raise api.foreign() from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Options that say which messages are meant."""

    id: Annotated[str | None, typer.Option("--id", help="With this id.")] = None
    key: Annotated[str | None, typer.Option("--key", help="With this key.")] = None
    key_base64: Annotated[str | None, typer.Option("--key-base64", help="With this key, which is no text.")] = None
    target: Annotated[
        str | None, typer.Option("--target", help="For this real topic; '' is the delay topic's default.")
    ] = None
    due_from: Annotated[
        str | None,
        typer.Option("--due-from", metavar="TIME", help="Due then or later: RFC 3339 with a zone, or epoch ms."),
    ] = None
    due_until: Annotated[str | None, typer.Option("--due-until", metavar="TIME", help="Due before then.")] = None
    state: Annotated[
        list[State] | None, typer.Option("--state", help="In this state; may be repeated. Default: all but cancelled.")
    ] = None

    def parameters(self) -> list[tuple[str, str]]:
        """The API's. A key is sent as base64: the command line may hold any bytes. Raises ConfigurationError."""
        if self.key is not None and self.key_base64 is not None:
            hint = "Give one of them."
            raise ConfigurationError("both --key and --key-base64 are given", hint=hint, code="DB-1003")
        given = {
            "id": self.id,
            "key_base64": self.key_base64 if self.key is None else base64.b64encode(os.fsencode(self.key)).decode(),
            "target": self.target,
            "due_from": read_option(parse_until, self.due_from, "--due-from"),
            "due_until": read_option(parse_until, self.due_until, "--due-until"),
        }
        found = [(name, str(text)) for name, text in given.items() if text is not None]
        return found + [("state", state.value) for state in self.state or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(Filters):
    """Filters of what only looks."""

    origin: Annotated[
        str | None,
        typer.Option(
            "--origin", metavar="TOPIC/PARTITION/OFFSET", help="That was sent as this record of a delay topic."
        ),
    ] = None

    def parameters(self) -> list[tuple[str, str]]:
        origin = [] if self.origin is None else [("origin", place_of(self.origin, "--origin"))]
        return [*origin, *Filters.parameters(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Options of a list that is one page."""

    limit: Annotated[int, typer.Option("--limit", help="Show at most so many.", min=1, max=PAGE_MAX)] = 100
    cursor: CursorOption = None
    output: OutputOption = Output.TEXT

    def show(
        self,
        api: ApiClient,
        path: str,
        name: str,
        parameters: Sequence[tuple[str, str]],
        columns: Sequence[str],
        row: Callable[[Mapping[str, Any]], list[str]],
    ) -> None:
        """A page of `path`, whose answer calls it `name`; `row` gives the cells of `columns`."""
        cursor = [] if self.cursor is None else [("cursor", self.cursor)]
        found = api.get(path, [*parameters, ("limit", str(self.limit)), *cursor])
        rows = objects(api, found, name)
        if self.output is Output.JSON:
            say(as_json(found))
            return
        print_rows(columns, [row(each) for each in rows])
        if found.get("next") is not None:
            say(f"there are more: --cursor {found['next']}", err=True)


@app.command("list")
@bundled
def list_messages(
    search: Search,
    connection: Connection,
    limit: Annotated[int, typer.Option(help="Show at most so many.", min=1)] = 100,
    cursor: CursorOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all, however many there are.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List pending messages, those that come up first at the top."""
    with connection.open() as api:
        pages = _pages(api, search.parameters(), cursor, None if everything else limit)
        if output is Output.JSON:
            _print_json(pages)
        elif (following := _print_pages(pages)) is not None:
            say(f"there are more: --all, or --cursor {following}", err=True)


@app.command()
@bundled
def get(
    origin: OriginArgument,
    connection: Connection,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show one pending message. Exit status 1 if it is not pending."""
    with connection.open() as api:
        try:
            message = api.get(f"messages/{place_of(origin, 'the message')}")
        except Absent as absent:
            say(f"{origin} is not pending. {absent}".rstrip(), err=True)
            raise typer.Exit(1) from None
        print_one(message, output)


@app.command()
@bundled
def count(
    search: Search,
    connection: Connection,
    output: OutputOption = Output.TEXT,
) -> None:
    """Count pending messages; `at least` so many, where counting them all would take too long."""
    with connection.open() as api:
        found = api.get("count", search.parameters())
        if not isinstance(found.get("count"), int) or not isinstance(found.get("exact"), bool):
            raise api.foreign()
        say(as_json(found) if output is Output.JSON else f"{'' if found['exact'] else 'at least '}{found['count']}")


@app.command()
@bundled
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FILE.parquet", help="Where to write them; it is replaced.")],
    search: Search,
    connection: Connection,
) -> None:
    """Write all pending messages of one moment into a Parquet file; there is none if it fails."""
    with connection.open() as api:
        from bridge.commands.export import batches, write  # it takes Arrow, and a while

        with closing(batches(api, search.parameters())) as stream:
            rows = write(to, stream)
        say(f"{rows} messages written to {to}")


@targets_app.callback(invoke_without_command=True)
@bundled
def targets(
    context: typer.Context,
    connection: Connection,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the targets of a running bridge, and what is wrong with them; or pause and resume one."""
    if context.invoked_subcommand is not None:
        return
    with connection.open() as api:
        found = api.get("targets")
        rows = objects(api, found, "targets")
        if output is Output.JSON:
            say(as_json(found))
            return
        names = list(dict.fromkeys(name for row in rows for name in row))  # in the order of the API
        print_rows(names, [[shown(row.get(name)) for name in names] for row in rows])


# --- asking ----------------------------------------------------------------------------------------------------------


def place_of(text: str, what: str) -> str:
    """`text`, if it is TOPIC/PARTITION/OFFSET, and then a part of a URL as it is. Raises ConfigurationError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}/[0-9]{1,10}/[0-9]{1,19}", text):
        hint = "Write it as delay/0/42."
        raise ConfigurationError(f"{what} is not TOPIC/PARTITION/OFFSET", hint=hint, code="DB-1003")
    return text


def _pages(
    api: ApiClient, parameters: Sequence[tuple[str, str]], cursor: str | None, limit: int | None
) -> Iterator[Page]:
    """Pages until there are `limit` messages or no more. The bridge may end a page early if its search is long."""
    while True:
        size = PAGE_MAX if limit is None else min(limit, PAGE_MAX)
        where = [] if cursor is None else [("cursor", cursor)]
        answer = api.get("messages", [*parameters, ("limit", str(size)), *where])
        messages, following = objects(api, answer, "messages"), answer.get("next")
        if not isinstance(following, str | None) or (following is not None and following == cursor):
            raise api.foreign()
        yield Page(messages=messages, following=following)
        if limit is not None:
            limit -= len(messages)
        if following is None or (limit is not None and limit <= 0):
            return
        cursor = following


def objects(api: ApiClient, answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = answer.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise api.foreign()
    return found


# --- printing --------------------------------------------------------------------------------------------------------


def _print_json(pages: Iterable[Page]) -> None:
    """One document like the API's, a message a line, written page by page: there may be millions."""
    before, following = '{"messages": [', None
    for page in pages:
        following = page.following
        for message in page.messages:
            put(f"{before}\n{as_json(message)}")
            before = ","
    put(f'{before.removeprefix(",")}\n], "next": {as_json(following)}}}\n')


def _print_pages(pages: Iterable[Page]) -> str | None:
    """Each page as it comes. Returns the cursor of the page that would be next."""
    following = None
    for page in pages:
        following = page.following
        print_rows(COLUMNS, [_row(message) for message in page.messages])
    return following


def print_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; where it is not read by people, a row a line."""
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
    for row in rows:  # in a table as narrow as this, names would be broken
        for name, cell in zip(names, row, strict=True):
            if cell:
                say(f"{name:17}{cell}")
        say("")


def _row(message: Mapping[str, Any]) -> list[str]:
    others = [shown(message.get(name)) for name in COLUMNS[2:]]
    return [shown(message.get("origin")), time(message.get("due")), *others]


def print_one(found: Mapping[str, Any], output: Output) -> None:
    """All that is known of one message, schedule or dead letter."""
    if output is Output.JSON:
        say(as_json(found))
        return
    for name, text in _lines(found):
        say(f"{name:17}{text}")


def _lines(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts, in the order of the API."""
    for name, found in message.items():
        if name in ("due", "at", "ts"):
            yield name, time(found)
        elif name == "next" and isinstance(found, list):
            for due in found:
                yield name, time(due)
        elif name == "headers" and isinstance(found, list):
            for header in found:
                if isinstance(header, dict):
                    has_value = isinstance(header.get("text"), str) or isinstance(header.get("base64"), str)
                    yield "header", shown(header.get("name")) + (f": {shown(header)}" if has_value else "")
        elif found is not None:
            yield name, shown(found)


def time(epoch_ms: object) -> str:
    """RFC 3339 in UTC."""
    if not isinstance(epoch_ms, int):
        return ""
    try:
        instant = EPOCH + timedelta(milliseconds=epoch_ms)
    except OverflowError:
        return str(epoch_ms)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(found: object) -> str:
    """A value of the API for people: bytes that are text as text, others as base64."""
    if found is None:
        return ""
    if isinstance(found, dict):
        cut = " (cut)" if found.get("truncated") is True else ""
        if isinstance(found.get("text"), str):
            return f"{found['text']}{cut}"
        if isinstance(found.get("base64"), str):
            return f"base64:{found['base64']}{cut}"
    return as_json(found) if isinstance(found, dict | list | bool) else str(found)


def as_json(found: object) -> str:
    """JSON of one line in printable ASCII."""
    return json.dumps(found).replace("\x7f", "\\u007f")
