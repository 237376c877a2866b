"""bridge.commands.pending: the questions that reach the API, what is printed of the answers, and how failures end."""

from __future__ import annotations

import base64
import io
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console
from typer.testing import CliRunner

from bridge.api.filters import Filters, LetterFilters
from bridge.api.listener import Listener
from bridge.commands import pending
from bridge.commands.cli import app
from bridge.http.protection import Protection
from tests.system.secure import Authority
from tests.unit.bridge.api import fakes

HOSTILE: Final = "\x1b[2J\x9b31m\u202e\r\n\t[bold red]x[/]\x7f"
MESSAGE: Final[dict[str, Any]] = {
    "topic": "delay",
    "partition": 2,
    "offset": 41,
    "origin": "delay/2/7",
    "due": 1_800_000_000_123,
    "at": 1_800_000_000_000,
    "ts": 1_700_000_000_000,
    "state": "retrying",
    "target": "orders",
    "target_partition": None,
    "key": {"text": "customer-1"},
    "value": None,
    "headers": [],
    "id": "a",
    "rolls": 1,
    "attempts": 3,
    "reason": "target-denied",
}

HEADERS: Final[list[dict[str, Any]]] = [
    {"name": "colour", "text": "red"},
    {"name": "raw", "base64": "/w=="},
    {"name": "long", "text": "abc", "base64": None, "truncated": True},
    {"name": "null", "text": None, "base64": None},
]

Query = list[tuple[str, str]]
Answer = tuple[int, str, bytes]


def answer(body: object, status: int = 200, kind: str = "application/json") -> Answer:
    return status, kind, json.dumps(body).encode()


def problem(status: int, title: str, detail: str = "") -> Answer:
    return answer({"title": title, "detail": detail}, status, "application/problem+json")


class Api:
    """An HTTP server of this test that answers with what `respond` makes of path and query, and keeps what it got."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[tuple[str, Query]] = []
        self.headers: list[dict[str, str]] = []
        self.respond: Callable[[str, Query], Answer] = lambda *_: problem(404, "not found")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = parse_qsl(parts.query, keep_blank_values=True)
                api.asked.append((parts.path, query))
                api.headers.append(dict(self.headers))
                status, kind, body = api.respond(parts.path, query)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if status == 302:
                    self.send_header("Location", f"{api.url}/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    yield server
    server.close()


def invoke(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, list(arguments), env=env)
    return result.exit_code, result.stdout, result.stderr


def paged(total: int, size: int) -> Callable[[str, Query], Answer]:
    """Messages with the origin offsets 0 to `total`, at most `size` a page; the cursor is the next offset."""

    def respond(_: str, query: Query) -> Answer:
        start = int(dict(query).get("cursor", "0"))
        end = min(start + min(size, int(dict(query)["limit"])), total)
        messages = [{**MESSAGE, "origin": f"delay/2/{offset}"} for offset in range(start, end)]
        return answer({"messages": messages, "next": str(end) if end < total else None})

    return respond


# --- questions -------------------------------------------------------------------------------------------------------


def test_filters_reach_the_api_as_they_are_meant(api: Api) -> None:
    """By their names there; a key as base64, the default target as an empty text."""
    api.respond = lambda *_: answer({"count": 3, "exact": True})
    options = ["--id", "ä&=", "--origin", "delay/0/7", "--key", "k/1", "--target", "", "--state", "overdue"]
    options += ["--state", "rolled", "--due-from", "2027-01-31T08:00:00+08:00", "--due-until", "1801353600000"]
    assert invoke("pending", "count", *options, "--url", api.url)[:2] == (0, "3\n")
    expected = [("id", "ä&="), ("origin", "delay/0/7"), ("key_base64", base64.b64encode(b"k/1").decode())]
    expected += [("target", ""), ("due_from", "2027-01-31T08:00:00+08:00"), ("due_until", "1801353600000")]
    assert api.asked == [("/api/v1/count", [*expected, ("state", "overdue"), ("state", "rolled")])]


@pytest.mark.parametrize(
    ("command", "model"),
    [
        *((("pending", name), Filters) for name in ("list", "count", "export", "cancel", "move", "deliver")),
        (("schedules", "list"), Filters),
        *((("dead-letters", name), LetterFilters) for name in ("list", "redrive")),
    ],
    ids=str,
)
def test_each_filter_of_the_api_is_an_option(command: tuple[str, str], model: type[BaseModel]) -> None:
    """The commands have the filters of the API, with the same words."""
    words = invoke(*command, "--help", env={"COLUMNS": "400", "TERM": "dumb"})[1]
    for name, field in model.model_fields.items():
        (line,) = [line for line in words.splitlines() if f"--{name.replace('_', '-')} " in line]
        assert str(field.description) in line


def test_a_list_asks_with_the_same_filters(api: Api) -> None:
    """And with the size of a page, and where it is to begin; nothing is asked for that was not given."""
    api.respond = paged(0, 1)
    assert invoke("pending", "list", "--key-base64", "/w==", "--limit", "7", "--cursor", "5", "--url", api.url)[0] == 0
    assert invoke("pending", "list", "--url", f"{api.url}/behind/a/proxy/")[0] == 0
    assert api.asked == [
        ("/api/v1/messages", [("key_base64", "/w=="), ("limit", "7"), ("cursor", "5")]),
        ("/behind/a/proxy/api/v1/messages", [("limit", "100")]),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--key", "a", "--key-base64", "YQ=="],
        ["list", "--origin", "delay/0"],
        ["get", "delay/0/../1"],
        ["count", "--due-from", "tomorrow"],
        ["count", "--id", "\udcff"],
        ["list", "--url", "localhost:8081"],
        ["list", "--url", "file:///etc/hostname"],
        ["list", "--url", "http://localhost:99999"],
        ["list", "--url", "http://localhost/?x=1"],
        ["list", "--url", "http://user:secret-c0de@localhost:8081"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line_and_status_2(arguments: list[str], api: Api) -> None:
    """Nobody is asked, and a password in an address is not repeated."""
    others = [] if "--url" in arguments else ["--url", api.url]
    status, out, err = invoke("pending", *arguments, *others)
    assert (status, out, err.count("\n"), api.asked) == (2, "", 1, [])
    assert "secret-c0de" not in err


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_page_is_a_message_a_line(api: Api) -> None:
    """With tabs between the columns; standard error says how to go on."""
    api.respond = paged(5, 2)
    status, out, err = invoke("pending", "list", "--limit", "2", "--url", api.url)
    line = "delay/2/{}\t2027-01-15T08:00:00.123Z\tretrying\torders\tcustomer-1\ta\n"
    assert (status, out) == (0, line.format(0) + line.format(1))
    assert err == "there are more: --all, or --cursor 2\n"


def test_all_pages_are_each_message_once(api: Api) -> None:
    """In order, as lines and as one JSON document; there is nothing more to ask for."""
    api.respond = paged(5, 2)
    status, out, err = invoke("pending", "list", "--all", "--url", api.url)
    assert (status, [line.split("\t")[0] for line in out.splitlines()], err) == (
        0,
        [f"delay/2/{n}" for n in range(5)],
        "",
    )
    _, out, _ = invoke("pending", "list", "--all", "--output", "json", "--url", api.url)
    assert json.loads(out) == {"messages": [{**MESSAGE, "origin": f"delay/2/{n}"} for n in range(5)], "next": None}


@pytest.mark.fault("a command's answer without a part of the instances")
@pytest.mark.parametrize(
    ("words", "name"),
    [("pending list", "messages"), ("schedules list", "schedules"), ("dead-letters list", "letters")],
)
def test_a_list_has_all_pages_and_names_who_did_not_answer(words: str, name: str, api: Api) -> None:
    """A list goes on through all pages with --all; it names the instances that did not answer, on standard error or in
    its JSON."""
    silent = ["http://b", "http://a"]

    def respond(_: str, query: Query) -> Answer:
        start = int(dict(query).get("cursor", "0"))
        following = str(start + 1) if start < 2 else None
        return answer({name: [{**MESSAGE, "next": []}], "next": following, "incomplete": silent[start : start + 1]})

    api.respond = respond
    status, out, err = invoke(*words.split(), "--all", "--url", api.url)
    assert (status, len(out.splitlines()), err) == (0, 3, "incomplete: messages of http://a, http://b are missing\n")
    _, out, err = invoke(*words.split(), "--limit", "1", "--output", "json", "--url", api.url)
    assert json.loads(out) == {name: [{**MESSAGE, "next": []}], "next": "1", "incomplete": ["http://b"]}


@pytest.mark.parametrize(
    ("words", "found"), [("pending count", {"count": 1, "exact": True}), ("targets", {"targets": []})]
)
def test_an_incomplete_answer_is_called_so(words: str, found: dict[str, Any], api: Api) -> None:
    """A count, and the list of targets."""
    api.respond = lambda *_: answer({**found, "incomplete": ["http://a"]})
    assert invoke(*words.split(), "--url", api.url)[2] == "incomplete: messages of http://a are missing\n"


def test_a_list_is_filled_from_pages_that_have_less(api: Api) -> None:
    """The bridge may end a page early, even an empty one; never is a message too many asked for."""

    def respond(_: str, query: Query) -> Answer:
        start = int(dict(query).get("cursor", "0"))
        rows = [{**MESSAGE, "origin": f"delay/2/{start}"}] if start % 2 else []
        return answer({"messages": rows, "next": str(start + 1)})

    api.respond = respond
    status, out, err = invoke("pending", "list", "--limit", "3", "--url", api.url)
    assert (status, [line.split("\t")[0] for line in out.splitlines()]) == (0, ["delay/2/1", "delay/2/3", "delay/2/5"])
    assert err == "there are more: --all, or --cursor 6\n"
    assert [dict(query)["limit"] for _, query in api.asked] == ["3", "3", "2", "2", "1", "1"]


def test_a_limit_may_be_larger_than_a_page(api: Api) -> None:
    """The API gives a thousand at a time."""
    api.respond = paged(3_000, 1_000)
    _, out, err = invoke("pending", "list", "--limit", "1500", "--url", api.url)
    assert (len(out.splitlines()), err) == (1_500, "there are more: --all, or --cursor 1500\n")
    assert [dict(query)["limit"] for _, query in api.asked] == ["1000", "500"]


@pytest.mark.parametrize(("total", "following"), [(0, None), (2, None), (3, "2")])
def test_json_is_what_the_api_says(api: Api, total: int, following: str | None) -> None:
    """Its messages and its cursor, so that a script can read either."""
    api.respond = paged(total, 2)
    status, out, err = invoke("pending", "list", "--limit", "2", "--output", "json", "--url", api.url)
    messages = [{**MESSAGE, "origin": f"delay/2/{n}"} for n in range(min(total, 2))]
    assert (status, json.loads(out), err) == (0, {"messages": messages, "next": following}, "")


def test_one_message_has_all_that_is_known(api: Api) -> None:
    """A line each; bytes that are no text as base64; what is absent or hidden is left out."""
    api.respond = lambda *_: answer(MESSAGE | {"headers": HEADERS})
    status, out, _ = invoke("pending", "get", "delay/2/7", "--url", api.url)
    assert (status, api.asked[0]) == (0, ("/api/v1/messages/delay/2/7", []))
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["header", "colour: red"] in lines
    assert ["header", "raw: base64:/w=="] in lines
    assert ["header", "long: abc (cut)"] in lines
    assert ["header", "null"] in lines
    assert ["ts", "2023-11-14T22:13:20.000Z"] in lines
    assert ["reason", "target-denied"] in lines
    assert not {"value", "target_partition"} & {name for name, *_ in lines}
    assert (
        json.loads(invoke("pending", "get", "delay/2/7", "--output", "json", "--url", api.url)[1])["headers"] == HEADERS
    )


def test_a_message_that_is_not_pending_is_status_1(api: Api) -> None:
    """A script can tell it from every failure."""
    api.respond = lambda *_: problem(404, "Not Found", "Another instance has its partition.")
    status, out, err = invoke("pending", "get", "delay/2/7", "--url", api.url)
    assert (status, out, err) == (1, "", "delay/2/7 is not pending. Another instance has its partition.\n")


def test_a_count_says_if_it_is_not_exact(api: Api) -> None:
    """As text and as JSON."""
    api.respond = lambda *_: answer({"count": 12, "exact": False})
    assert invoke("pending", "count", "--url", api.url)[:2] == (0, "at least 12\n")
    _, out, _ = invoke("pending", "count", "--output", "json", "--url", api.url)
    assert json.loads(out) == {"count": 12, "exact": False}


def test_targets_are_shown_with_all_that_the_api_has(api: Api) -> None:
    """A line each, the columns in the API's order."""
    rows = [{"target": "orders", "pending": 2, "breaker": None}, {"target": "", "pending": 1, "failing": True}]
    api.respond = lambda *_: answer({"targets": rows})
    assert invoke("targets", "--url", api.url)[:2] == (0, "orders\t2\t\t\n\t1\t\ttrue\n")
    assert json.loads(invoke("targets", "--output", "json", "--url", api.url)[1]) == {"targets": rows}
    assert api.asked[0] == ("/api/v1/targets", [])


def test_nothing_that_is_pending_steers_the_terminal(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, ids and headers are escaped as lines and in a table, and JSON stays JSON."""
    hostile = MESSAGE | {"id": HOSTILE, "key": {"text": HOSTILE}, "headers": [{"name": HOSTILE, "text": HOSTILE}]}
    api.respond = lambda path, _: answer(
        {"messages": [hostile], "next": HOSTILE} if path.endswith("messages") else hostile
    )
    for arguments in (["list"], ["get", "delay/2/7"], ["list", "--output", "json"]):
        _, out, err = invoke(
            "pending", *arguments, "--url", api.url, *(["--limit", "1"] if "list" in arguments else [])
        )
        assert all(line.replace("\t", "").isprintable() for line in [*out.split("\n"), *err.split("\n")])
    assert json.loads(out) == {"messages": [hostile], "next": HOSTILE}
    shown = io.StringIO()
    monkeypatch.setattr(pending, "Console", lambda: Console(file=shown, force_terminal=True, no_color=True, width=400))
    assert invoke("pending", "list", "--limit", "1", "--url", api.url)[0] == 0
    table = shown.getvalue()
    assert "[bold red]x[/]" in table and "[2J" in table
    assert not [steers for steers in ("\x1b[2J", "\x9b", "\u202e", "\r", "\t", "\x7f") if steers in table]


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["name", "text", "base64"]) | st.text(), inner),
    max_leaves=10,
)


@given(found=st.dictionaries(st.sampled_from(sorted(MESSAGE)), JSON))
def test_any_message_can_be_shown(found: dict[str, Any]) -> None:
    """A field that is absent, new or of another type is shown somehow: an answer is never a bug of the command."""
    assert len(pending._row(found)) == len(pending.COLUMNS)
    assert all(isinstance(text, str) for line in pending._lines(found) for text in line)


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_answer", "expected", "code"),
    [
        (problem(400, "invalid cursor", "it is of other filters"), 2, "DB-1016"),
        (problem(401, "who are you?"), 3, "DB-1017"),
        (answer({}, 403), 3, "DB-1017"),
        (problem(503, "not ready", "the index is being read"), 3, "DB-1019"),
        (problem(404, "no such thing"), 3, "DB-1018"),
        (answer({"detail": "Not Found"}, 404), 3, "DB-1018"),
        (answer({}, 302), 3, "DB-1018"),
        (answer({"messages": 1, "next": None}), 3, "DB-1018"),
        (answer({"messages": [1], "next": None}), 3, "DB-1018"),
        (answer({"messages": [], "next": 7}), 3, "DB-1018"),
        (answer([]), 3, "DB-1018"),
        ((200, "text/html", b"<html>"), 3, "DB-1018"),
        ((200, "application/json", b"[" * 100_000), 3, "DB-1018"),
    ],
)
def test_a_refusal_is_one_line_with_its_status(api: Api, given_answer: Answer, expected: int, code: str) -> None:
    """The caller's mistake is 2, everything else 3; title and detail are shown, and a redirect is not followed."""
    api.respond = lambda *_: given_answer
    status, out, err = invoke("pending", "list", "--url", api.url)
    assert (status, out, err.count("\n"), len(api.asked)) == (expected, "", 1, 1)
    assert err.startswith(f"delay-bridge: {code} ")
    if code in ("DB-1016", "DB-1019"):
        said = json.loads(given_answer[2])
        assert f"{said['title']}: {said['detail']}" in err


def test_a_bridge_that_is_down_is_status_3() -> None:
    """The line has the address and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, out, err = invoke("pending", "list", "--url", url)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert err.startswith(f"delay-bridge: DB-1015 {url} does not answer (reason=")


@pytest.mark.parametrize("host", ["a..b", "xn--zzzzzz", "a" * 64], ids=["empty label", "no IDNA name", "long label"])
def test_a_host_name_that_cannot_exist_is_status_3(host: str) -> None:
    """The line has the address and the reason."""
    status, out, err = invoke("pending", "list", "--url", f"http://{host}:1")
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert err.startswith(f"delay-bridge: DB-1015 http://{host}:1 does not answer (reason=")


def test_filters_that_fill_no_url_are_status_3() -> None:
    """They end no command with a traceback."""
    long = "ä" * 8_000
    status, out, err = invoke("pending", "list", "--url", "http://127.0.0.1:1", "--id", long, "--target", long)
    assert (status, out, err.count("\n")) == (3, "", 1)


def test_pages_that_do_not_end_are_noticed(api: Api) -> None:
    """A cursor that leads to itself would be followed for ever."""
    api.respond = lambda *_: answer({"messages": [], "next": "again"})
    assert invoke("pending", "list", "--all", "--url", api.url)[0] == 3
    assert len(api.asked) == 2


def test_a_reader_that_has_read_enough_ends_the_list_quietly(api: Api) -> None:
    """`| head` is no failure of the bridge: no traceback, and no more pages."""
    api.respond = paged(1_000_000_000, 1_000)
    command = [sys.executable, "-m", "bridge", "pending", "list", "--all", "--url", api.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("delay/2/0\t")
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")


# --- who asks, and whom ----------------------------------------------------------------------------------------------


def configured(directory: Path, **settings: object) -> list[str]:
    file = directory / "bridge.yaml"
    file.write_text(json.dumps({"http": settings}))
    return ["--config", str(file)]


def test_address_and_password_are_the_configurations(api: Api, tmp_path: Path) -> None:
    """All interfaces are asked at this machine's own."""
    api.respond = paged(0, 1)
    (tmp_path / "password").write_text("canary-c0de\n")
    options = configured(
        tmp_path, host="0.0.0.0", api_port=api.port, user="ops", password_file=str(tmp_path / "password")
    )
    status, _, err = invoke("pending", "list", *options)
    assert (status, err) == (0, "")
    assert api.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'ops:canary-c0de').decode()}"
    proxied = invoke("pending", "list", *options, env={"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": ""})
    assert proxied[0] == 0
    api.respond = lambda *_: answer({}, 302)
    assert invoke("pending", "list", *options)[0] == 3
    assert "canary-c0de" not in invoke("pending", "list", *options)[2]


def test_a_free_port_must_be_named(tmp_path: Path) -> None:
    """The configuration does not say which it is."""
    status, _, err = invoke("pending", "list", *configured(tmp_path, api_port=0))
    assert status == 2
    assert err.startswith("delay-bridge: DB-1014 ")


def test_only_the_bridges_own_certificate_is_trusted(tmp_path: Path) -> None:
    """At the configured address, whatever name is in it; another one of the same authority is refused."""
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("bridge")
    other_key, other = authority.issue("other")
    chain = tmp_path / "chain.pem"
    chain.write_text(certificate.read_text() + authority.certificate.read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    server = Api(context)
    server.respond = paged(0, 1)
    try:
        where = {"host": "localhost", "api_port": server.port}
        own = configured(tmp_path, **where, certificate_file=str(chain), key_file=str(key))
        assert invoke("pending", "list", *own)[0] == 0
        foreign = configured(tmp_path, **where, certificate_file=str(other), key_file=str(other_key))
        status, _, err = invoke("pending", "list", *foreign)
        assert (status, len(server.asked)) == (3, 1)
        assert "certificate verify failed" in err.lower()
    finally:
        server.close()


# --- the bridge's own API --------------------------------------------------------------------------------------------


def test_the_api_and_the_command_understand_each_other() -> None:
    """All questions, asked of the real server: filters fit, cursors lead on, and one message is found by its origin."""
    rows = [fakes.message(n, key=b"\xff" if n % 2 else b"k", value=None) for n in range(5)]
    with Listener(
        "127.0.0.1", 0, source=fakes.Bridge(fakes.Store(*rows)), protection=Protection(), show_payloads=True
    ) as served:
        where = ["--url", f"http://127.0.0.1:{served.port}"]
        status, out, err = invoke("pending", "list", "--key-base64", "/w==", "--limit", "1", *where)
        assert (status, out.split("\t")[0], out.count("\n")) == (0, "delay/0/1", 1)
        cursor = err.split()[-1]
        _, out, _ = invoke("pending", "list", "--key-base64", "/w==", "--cursor", cursor, "--output", "json", *where)
        assert [message["origin"] for message in json.loads(out)["messages"]] == ["delay/0/3"]
        assert invoke("pending", "list", "--limit", "1", "--key", "k", "--cursor", "x", *where)[0] == 2
        assert invoke("pending", "count", "--key", "k", "--state", "waiting", *where)[:2] == (0, "3\n")
        assert invoke("pending", "get", "delay/0/4", *where)[0] == 0
        assert invoke("pending", "get", "delay/0/5", *where)[0] == 1
        assert invoke("targets", *where)[1].startswith("orders\t3\t1\ttarget-unavailable\t")
