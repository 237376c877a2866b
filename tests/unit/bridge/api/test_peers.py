"""Several instances of the API: any of them answers for all, and says which of them did not answer."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

import httpx
import pytest
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from bridge.api import cursor as cursors
from bridge.api.actions import bulk
from bridge.api.listener import Listener
from bridge.api.peers import client, merge
from bridge.api.peers.batches import BrokenOffError, as_file, read_export
from bridge.api.peers.fan_out import FanOut
from bridge.api.source import PendingMessages
from bridge.commands.api_client import ApiClient
from bridge.http.protection import Protection
from bridge.settings.model import HttpSettings
from bridge.telemetry.health import Phase
from bridge.telemetry.metrics import StoreSnapshot
from bridge.wire.headers import NEVER_MS, NEXT_MS
from dev.harness.waiting import wait_until
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Paused, Store, message
from timerstore.errors import Corrupt

SLOW = 40
"""Instances with slow names: more than asyncio looks up at a time by itself."""
CANCELLED = 40
"""More steps of an event loop than a request takes until its head is sent."""
TOKEN = "0123456789abcdef"
PATIENT_S = 120.0
"""An instance loads FastAPI for its first client, which takes seconds on a slow machine."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEER_S", "QUESTION_S", "PART_S"):
        monkeypatch.setattr(client, name, PATIENT_S)


@contextmanager
def instances(*bridges: Bridge, gone: Sequence[str] = ()) -> Iterator[list[str]]:
    """Their base URLs; each knows all, itself and those that are gone too."""
    urls: list[str] = []
    with ExitStack() as stack:
        for i, bridge in enumerate(bridges):
            listener = Listener(
                "127.0.0.1", 0, source=bridge, protection=Protection(token=TOKEN), show_payloads=False,
                is_writable=True, peers=urls, instance=f"i-{i}",
            )  # fmt: skip
            urls.append(f"http://127.0.0.1:{stack.enter_context(listener).port}")
        urls.extend(gone)
        yield urls


def ask(url: str, path: str, body: object = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Delay-Bridge-Action": "1", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(f"{url}/api/v1/{path}", data, headers), timeout=30) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def two() -> tuple[Bridge, Bridge]:
    """Messages 0, 2, ... of partition 0 are of one, 1, 3, ... of partition 1 of the other."""
    rows = [message(n, partition=n % 2) for n in range(20)]
    gauges = StoreSnapshot(pending_total=10, pending_by_topic={"orders": 10}, consumer_lag={("delay", 0): 1})
    made = [Bridge(Store(*rows[i::2]), gauges=gauges, paused=Paused()) for i in (0, 1)]
    for i, bridge in enumerate(made):
        assert bridge.dispatcher is not None
        bridge.dispatcher.partition = i
    return made[0], made[1]


def test_any_instance_answers_for_all() -> None:
    """Counts add up, lists are merged in order through all pages, and a message is found wherever it is."""
    made = two()
    for each in made:
        assert each.store is not None
        each.store.rows[0] = replace(each.store.rows[0], schedule='{"every":"1h"}', tick=1)
    with instances(*made) as urls:
        for url in urls:
            assert [each["offset"] for each in ask(url, "schedules")[1]["schedules"]] == [0, 1]
            assert ask(url, "count") == (200, {"count": 20, "exact": True})
            summary = ask(url, "summary")[1]
            assert (summary["pending"], summary["by_target"], len(summary["partitions"])) == (20, {"orders": 20}, 2)
            assert "incomplete" not in summary
            edges = f"timeline?edge={NOW_MS + 5}&edge={NOW_MS + 10}"
            assert ask(url, edges)[1] == {"before": 5, "counts": [5], "after": 10}
            assert [each["name"] for each in ask(url, "targets")[1]["targets"]] == ["orders", "well"]
            found = ask(url, "messages?limit=3")[1]
            offsets = [each["offset"] for each in found["messages"]]
            while found["next"] is not None:
                found = ask(url, f"messages?limit=3&cursor={found['next']}")[1]
                assert len(found["messages"]) <= 3
                offsets += [each["offset"] for each in found["messages"]]
            assert offsets == list(range(20))
            for n in (4, 5):
                assert ask(url, f"messages/delay/{n % 2}/{n}")[1]["offset"] == n
            assert ask(url, "messages/delay/0/99")[0] == 404
            assert ask(url, "count?limit=x")[0] == 422


def test_actions_go_to_the_instance_that_owns_the_partition() -> None:
    """Once; a pause goes to all."""
    one, other = two()
    with instances(one, other) as urls:
        for n in (2, 3):
            status, done = ask(urls[0], f"messages/delay/{n % 2}/{n}/cancel", {})
            assert (status, done["outcome"]) == (200, "cancelled")
        assert one.dispatcher is not None and other.dispatcher is not None
        assert [len(each.dispatcher.sent) for each in (one, other) if each.dispatcher] == [1, 1]
        assert ask(urls[0], "messages/delay/7/3/cancel", {})[0] == 404
        assert ask(urls[1], "messages/delay/1/3/move", {})[0] == 400
        assert ask(urls[1], "targets/orders/pause", {}) == (200, {"name": "orders", "paused": True, "changed": True})
        assert one.paused.names() == other.paused.names() == {"orders"}


def test_a_schedule_is_paused_and_resumed_by_the_instance_that_owns_it() -> None:
    """Whichever is asked, once, and by no other."""
    one, other = two()
    with instances(one, other) as urls:
        assert ask(urls[0], "messages/delay/1/3/pause", {})[1]["outcome"] == "moved"
        assert ask(urls[1], "messages/delay/0/2/resume", {})[1]["outcome"] == "moved"
        assert ask(urls[0], "messages/delay/7/3/pause", {})[0] == 404
    sent = [
        [(order.origins, order.due_ms) for order in each.dispatcher.sent] for each in (one, other) if each.dispatcher
    ]
    assert sent == [[((2,), NEXT_MS)], [((3,), NEVER_MS)]]


def test_an_instance_that_does_not_answer_is_named() -> None:
    """By its URL; one that cannot tell yet counts as one; what may be with it is not said to be absent."""
    one, other = two()
    gone = "http://127.0.0.1:9"
    with instances(one, other, gone=[gone]) as urls:
        assert ask(urls[0], "count") == (200, {"count": 20, "exact": True, "incomplete": [gone]})
        assert ask(urls[0], "targets/orders/resume", {})[1]["incomplete"] == [gone]
        assert ask(urls[0], "messages/delay/1/3")[0] == 200
        status, problem = ask(urls[0], "messages/delay/0/99")
        assert (status, problem["incomplete"]) == (503, [gone])
        other.store, other.where = None, Phase(name="catching-up")
        assert ask(urls[0], "count")[1] == {"count": 10, "exact": True, "incomplete": [urls[1], gone]}
        assert ask(urls[1], "count")[1] == {"count": 10, "exact": True, "incomplete": ["this instance", gone]}
        one.store = None
        assert ask(urls[1], "count")[0] == 503


@pytest.mark.fault("other instances that do not answer")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.ConnectError("Connection refused"), "Connection refused"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.Response(401, json={"detail": "Send the user."}), "401: Send the user."),
        (httpx.Response(503, json={"detail": "Catching up."}), "503: Catching up."),
        (httpx.Response(500, json={"detail": "x" * 9_999}), f"500: {'x' * 195}"),
        (httpx.Response(502, text="<html>"), "502 without a JSON object"),
        (httpx.Response(200, json=[]), "200 without a JSON object"),
        (httpx.Response(520, json={}), "520 is not a valid HTTPStatus"),
        (httpx.Response(200, json={"count": 1}), None),
        (httpx.Response(404, json={"detail": "Not here."}), None),
        (httpx.Response(508, json={}, headers={client.INSTANCE: "me"}), None),
    ],
)
def test_the_reason_for_a_missing_answer_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str | None
) -> None:
    """The log has the reason why an instance did not answer, or refused to; none for its answers, and for this one."""

    async def asked() -> None:
        def handle(_: httpx.Request) -> httpx.Response:
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(answer.status_code, headers=answer.headers, stream=answer.stream)

        peers = client.Peers(["http://it"], "me", Protection())
        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(peers, "_connection", lambda: httpx.AsyncClient(transport=transport))
        await peers.ask("/api/v1/count", None)

    with capture_logs() as logs:
        asyncio.run(asked())
    assert [(line["event"], line["peer"], line["reason"]) for line in logs] == (
        [] if reason is None else [("peer-unavailable", "http://it", reason)]
    )


@pytest.mark.fault("a request whose path names another host")
@pytest.mark.parametrize(
    ("raw_path", "query", "target"),
    [
        ("%2Fapi%2Fv1%2Fmessages%2F@other:80/0/0", "", "/api/v1/messages/%40other%3A80/0/0"),
        ("/api/v1/messages/%23/0/0", "", "/api/v1/messages/%23/0/0"),
        ("/api/v1/count", "id=a%20b+c&target=%c3%a4", "/api/v1/count?id=a%20b+c&target=%c3%a4"),
        ("/api/v1/count", "id=a#b", "/api/v1/count?id=a%23b"),
    ],
)
def test_a_path_does_not_choose_the_host_of_a_forwarded_request(
    monkeypatch: pytest.MonkeyPatch, raw_path: str, query: str, target: str
) -> None:
    """Forwarded requests go to the configured instances alone, with the whole path and query."""
    asked: list[str] = []

    async def empty() -> AsyncIterator[bytes]:
        yield b"{}"

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(404, content=empty())

    async def unknown(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({}, 404)(scope, receive, send)

    async def nothing(*_: object) -> Message:
        return {}

    async def forward() -> None:
        peers = client.Peers(["http://peer:8081"], "i-0", Protection())
        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(peers, "_connection", lambda: httpx.AsyncClient(transport=transport))
        asking: Scope = {"type": "http", "method": "GET", "headers": [], "path": unquote(raw_path)}
        scope: Scope = {**asking, "raw_path": raw_path.encode(), "query_string": query.encode()}
        await FanOut(unknown, peers)(scope, nothing, cast("Send", nothing))

    asyncio.run(forward())
    assert asked == [f"http://peer:8081{target}"]


@pytest.mark.fault("requests to other instances that are cancelled")
def test_a_cancelled_request_leaves_no_connection() -> None:
    """A request to another instance ends its connection, even if its time is over or its client leaves."""
    served = set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(writer)
        with suppress(OSError):
            await reader.read()
        served.remove(writer)
        writer.close()

    async def cancel() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        peers = client.Peers([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], "i-0", Protection())
        for steps in range(CANCELLED):
            request = asyncio.create_task(peers.ask("/api/v1/count", None))
            for _ in range(steps):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
        async with asyncio.timeout(PATIENT_S / 10):
            while served:
                await asyncio.sleep(0)
        server.close()

    asyncio.run(cancel())


@pytest.mark.fault("slow look-ups of host names")
def test_slow_names_of_some_instances_delay_no_question_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance with a slow host name delays no question to the others."""
    one, other = two()
    look_up, pending, asked, in_time = socket.getaddrinfo, other.pending, threading.Event(), list[bool]()

    def slow(host: str | bytes, *more: Any, **named: Any) -> Any:
        if "slow" in str(host):
            in_time.append(asked.wait(PATIENT_S / 20))
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return look_up(host, *more, **named)

    def answer() -> PendingMessages | None:
        asked.set()
        return pending()

    monkeypatch.setattr(other, "pending", answer)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    names = [f"http://slow{n}:1" for n in range(SLOW)]
    with instances(one, other) as urls:
        urls[1:] = [*names, urls[1].replace("127.0.0.1", "localhost")]
        for url in (urls[0], urls[-1]):
            assert ask(url, "openapi.json")[0] == 200  # the first request loads FastAPI
        assert ask(urls[0], "count")[1] == {"count": 20, "exact": True, "incomplete": names}
    assert in_time == [True] * SLOW


def client_of(url: str) -> ApiClient:
    client = ApiClient(HttpSettings(), url, 30.0)
    client._headers["Authorization"] = f"Bearer {TOKEN}"
    return client


def act(url: str, path: str, body: object) -> list[dict[str, Any]]:
    """The lines of a bulk action."""
    return list(client_of(url).lines(path, {"all": True, **body} if isinstance(body, dict) else {}))


def test_any_instance_acts_for_all() -> None:
    """Once on each message, though an instance is in its own list; a dry run counts them all."""
    one, other = two()
    with instances(one, other) as urls:
        for dry_run in (True, "true"):
            found = ask(urls[1], "messages/cancel", {"target": "orders", "dry_run": dry_run})
            assert found == (200, {"count": 20, "exact": True})
        assert ask(urls[0], "messages/cancel", {"dry_run": True})[0] == 400
        assert ask(urls[0], "messages/cancel", {"dry_run": 7})[0] == 422
        last = act(urls[1], "messages/move", {"after": "1h", "due_from": NOW_MS})[-1]
        assert (last["done"], last["outcomes"], last["complete"]) == (20, {"moved": 20}, True)
        assert (last["error"], last["cursor"], last.get("incomplete")) == (None, None, None)
        for i, each in enumerate((one, other)):
            assert each.dispatcher is not None
            sent = [(order.source[1], order.origins) for order in each.dispatcher.sent]
            assert sent == [(i, (origin,)) for origin in range(i, 20, 2)]
            assert {order.due_ms for order in each.dispatcher.sent} == {NOW_MS + 3_600_000}
        assert act(urls[0], "messages/cancel", {})[-1]["outcomes"] == {"cancelled": 20}


def test_a_bulk_action_says_who_did_not_act_and_goes_on_behind_what_all_have_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are away, that cannot act yet, and one that breaks off: the cursor is the one of whoever is behind."""
    monkeypatch.setattr(bulk, "PAGE_S", 0.1)
    monkeypatch.setattr(bulk, "PAGE_ROWS", 4)
    one, other = two()
    assert other.dispatcher is not None
    gone = "http://127.0.0.1:9"
    with instances(one, other, gone=[gone]) as urls:
        last = act(urls[0], "messages/move", {"after": "1h"})[-1]
        assert (last["done"], last["complete"], last["cursor"], last["incomplete"]) == (20, False, None, [gone])
        assert gone in last["error"]
        other.dispatcher.silent = {11}
        urls.remove(gone)
    with instances(one, other) as urls:
        last = act(urls[0], "messages/cancel", {})[-1]
        assert (last["done"], last["complete"], "incomplete" in last) == (14, False, False)
        assert last["error"].startswith(f"{urls[1]}: no answers from delay/1 within")
        assert cursors.decode_position(last["cursor"])[1:3] == ("delay", 1)
        other.dispatcher.silent = set()
        again = act(urls[0], "messages/cancel", {"cursor": last["cursor"]})[-1]
        assert (again["outcomes"], again["complete"]) == ({"cancelled": 4}, True)
        one.store, one.where = None, Phase(name="catching-up")
        last = act(urls[0], "messages/cancel", {"state": ["cancelled"]})[-1]
        assert (last["outcomes"], last["incomplete"]) == ({"not-pending": 10}, ["this instance"])
        assert ask(urls[0], "messages/cancel", {"all": True, "dry_run": True})[1]["incomplete"] == ["this instance"]


def test_a_bulk_action_ends_everywhere_when_its_client_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end with their next page, and the log says so; what they had sent by then is done."""
    monkeypatch.setattr(bulk, "PAGE_ROWS", 1)
    made = two()
    for i, each in enumerate(made):
        assert each.store is not None
        each.store.rows = [message(n, partition=i) for n in range(30_000)]
    with capture_logs() as logs, instances(*made) as urls:
        with client_of(urls[0]).opened("messages/cancel", body={"all": True}) as response:
            assert json.loads(as_file(response.iter_raw()).readline())["done"] > 0
        wait_until(lambda: len(logs) == 2, 20, lambda: str(logs))
    assert [each["outcome"] for each in logs] == ["broken off"] * 2
    assert all(len(each.dispatcher.sent) < 30_000 for each in made if each.dispatcher)


def test_an_export_has_the_messages_of_all() -> None:
    """From whichever instance; who did not answer is told behind the last row."""
    one, other = two()

    def exported(url: str) -> tuple[list[tuple[int, int]], list[str]]:
        request = Request(f"{url}/api/v1/export?target=orders", headers={"Authorization": f"Bearer {TOKEN}"})
        rows, stream, silent = [], None, []
        with urlopen(request, timeout=30) as response:
            stream = read_export(response)
            while True:
                try:
                    rows += [(row["partition"], row["offset"]) for row in next(stream).to_pylist()]
                except StopIteration as end:
                    silent = end.value
                    return sorted(rows), silent

    everything = sorted((n % 2, n) for n in range(20))
    with instances(one, other) as urls:
        assert exported(urls[0]) == exported(urls[1]) == (everything, [])
        one.store = None
        assert exported(urls[0]) == ([each for each in everything if each[0]], ["this instance"])
        assert exported(urls[1]) == ([each for each in everything if each[0]], [urls[0]])
        other.store = None
        assert ask(urls[0], "export")[0] == 503


def test_the_partitions_that_an_instance_has_not_read_are_named_by_all() -> None:
    """An answer names the unread partitions of every instance, beside the silent instances."""
    one, other = two()
    other.joining, gone = [("delay", 1)], "http://127.0.0.1:1"
    with instances(one, other, gone=[gone]) as urls:
        for path in ("count", "messages", "summary", f"timeline?edge={NOW_MS}"):
            for url in urls[:2]:
                assert ask(url, path)[1]["incomplete"] == [gone, "delay/1"]
        for url in urls[:2]:
            request = Request(f"{url}/api/v1/export", headers={"Authorization": f"Bearer {TOKEN}"})
            missing: list[str] = []
            with urlopen(request, timeout=30) as response:
                deque(_told(response, missing), maxlen=0)
            assert missing == [gone, "delay/1"]


def _told(response: Any, missing: list[str]) -> Iterator[Any]:
    missing += yield from read_export(response)


@pytest.mark.fault("an export that fails at its beginning")
def test_an_export_that_cannot_begin_here_ends_the_requests_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that fails at its beginning leaves no connection to another instance open."""
    one, other = two()
    assert one.store is not None
    ended, close = list[client.PeerStream](), client.PeerStream.close

    def fail(*_: object, **__: object) -> Any:
        raise Corrupt("checksum", path="x")

    def end(stream: client.PeerStream) -> None:
        ended.append(stream)
        close(stream)

    monkeypatch.setattr(one.store, "export", fail)
    monkeypatch.setattr(client.PeerStream, "close", end)
    with instances(one, other) as urls:
        assert ask(urls[0], "export")[0] == 503
        assert len(ended) == 1


def test_an_export_breaks_off_with_an_instance_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not seem to be whole; all are closed."""
    one, other = two()
    assert other.store is not None
    closed = []

    class Damaged:
        def __next__(self) -> Any:
            raise Corrupt("checksum", path="x")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(other.store, "export", lambda *_, **__: Damaged())
    with (
        instances(one, other) as urls,
        client_of(urls[0]).opened("export") as response,
        pytest.raises(BrokenOffError),
    ):
        list(read_export(as_file(response.iter_raw())))
    assert closed


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**32))
def test_merged_pages_have_each_message_once_in_order(rows: int, count: int, limit: int, seed: int) -> None:
    """However the messages are dealt out, and also where an instance gives fewer than it was asked for."""
    chance = random.Random(seed)
    messages = [{"at": chance.randrange(5), "topic": "t", "partition": n % count, "offset": n} for n in range(rows)]

    def key(each: dict[str, Any]) -> tuple[int, str, int, int]:
        return each["at"], each["topic"], each["partition"], each["offset"]

    def page(instance: int, after: Any) -> dict[str, Any]:
        mine = sorted((each for each in messages if each["partition"] == instance), key=key)
        left = [each for each in mine if after is None or key(each) > after]
        size = chance.randint(1, limit)
        shown = left[:size]
        return {"messages": shown, "next": cursors.encode_position(key(shown[-1])) if len(left) > size else None}

    found: list[dict[str, Any]] = []
    after, is_last = None, False
    while not is_last:
        merged = merge.merge_messages([page(instance, after) for instance in range(count)], limit)
        assert len(merged["messages"]) <= limit
        found += merged["messages"]
        is_last = merged["next"] is None
        after = None if is_last else cursors.decode_position(merged["next"])
    assert found == sorted(messages, key=key)


@pytest.mark.parametrize("body", [{"messages": [{}], "next": None}, {"messages": 1, "next": None}, {"next": "x"}, {}])
def test_an_instance_of_another_version_is_no_bug_of_this_one(body: dict[str, Any]) -> None:
    """What cannot be merged is an error that the fan-out answers with 503."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        merge.merge_messages([{"messages": [], "next": None}, body, {"messages": [{}], "next": None}], 10)


def test_an_instance_of_the_first_version_says_nothing_of_pauses() -> None:
    """While instances are upgraded one by one, the overview is there."""
    disk = {"bytes": 1, "free_bytes": 1, "segments": 1, "segment_bytes": 1, "full": False}
    old: dict[str, Any] = {
        "ready": True, "reasons": [], "pending": 1, "schedules": 0, "overdue": 0, "oldest_overdue_s": 0.0,
        "next_at": None, "lateness": None, "by_target": {}, "by_time_to_go": [], "partitions": [],
        "retention_headroom_s": {}, "disk": disk, "failing": [],
    }  # fmt: skip
    paused = [{"name": "orders", "paused_s": 5.0}]
    merged = merge.merge_summaries([old | {"paused": paused}, old])
    assert (merged["pending"], merged["paused"]) == (2, paused)
