"""The API's actions: what they do, what they answer, and who may have them done."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from bridge.api.actions import bulk
from bridge.api.actions import messages as actions
from bridge.api.application import application
from bridge.api.source import Order
from bridge.errors import EnvironmentFailure
from bridge.http.protection import Protection
from bridge.stores.search import Query
from bridge.telemetry.health import Phase
from bridge.wire.headers import NAMED_MAX
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Dispatcher, Letters, Paused, Store, letter, message
from timerstore.operations.find import PendingState

ACTION = {"X-Delay-Bridge-Action": "1"}
TOKEN = "0123456789abcdef"


def client(bridge: Bridge, protection: Protection | None = None, *, is_writable: bool = True) -> TestClient:
    app = application(bridge, protection or Protection(), show_payloads=False, is_writable=is_writable)
    return TestClient(app, raise_server_exceptions=False, headers=ACTION)


def refused(answer: Any, status: int, detail: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert detail in answer.json()["detail"], answer.text


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def bridge_of(count: int, **values: Any) -> tuple[Bridge, Dispatcher]:
    bridge = Bridge(Store(*(message(n, **values) for n in range(count))))
    assert bridge.dispatcher is not None
    return bridge, bridge.dispatcher


@pytest.mark.parametrize(
    ("action", "body", "due_ms", "outcome"),
    [
        ("cancel", None, None, "cancelled"),
        ("cancel", {}, None, "cancelled"),
        ("move", {"due": NOW_MS + 5_000}, NOW_MS + 5_000, "moved"),
        ("move", {"due": "2027-01-15T08:00:05Z"}, NOW_MS + 5_000, "moved"),
        ("move", {"due": 1}, NOW_MS, "moved"),
        ("move", {"after": "15m"}, NOW_MS + 900_000, "moved"),
        ("deliver", None, NOW_MS, "moved"),
    ],
)
def test_one_message_is_acted_on(action: str, body: object, due_ms: int | None, outcome: str) -> None:
    """The answer says what has happened, and where the command is; a second one finds nothing cancelled anew."""
    bridge, dispatcher = bridge_of(3)
    api = client(bridge)
    answer = api.post(f"/api/v1/messages/delay/0/1/{action}", json=body)
    assert answer.json() == {"outcome": outcome, "count": 1, "origin": "delay/0/1", "command": "delay/0/1001"}
    assert dispatcher.sent == [Order(("delay", 0), (1,), due_ms)]
    assert api.post("/api/v1/messages/delay/0/77/cancel").json()["outcome"] == "not-pending"


def test_what_cannot_be_done_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign partition, a command that is not written, one that is not answered, and a bridge that is not ready."""
    monkeypatch.setattr(actions, "ANSWER_S", 0.01)
    bridge, dispatcher = bridge_of(3)
    api = client(bridge)
    refused(api.post("/api/v1/messages/other/0/1/cancel"), 404, "another instance")
    dispatcher.silent = {1}
    refused(api.post("/api/v1/messages/delay/0/1/cancel"), 504, "Look up the message")
    dispatcher.error = EnvironmentFailure("cannot write", hint="Look.", code="DB-3001")
    refused(api.post("/api/v1/messages/delay/0/1/cancel"), 503, "cannot write")
    bridge.dispatcher, bridge.where = None, Phase(name="connecting", reasons=("waiting",))
    refused(api.post("/api/v1/messages/delay/0/1/cancel"), 503, "waiting")


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("messages/delay/0/1/move", {}, 400, "one of due and after"),
        ("messages/delay/0/1/move", {"due": 1, "after": "1s"}, 400, "one of due and after"),
        ("messages/delay/0/1/move", {"due": "tomorrow"}, 400, "due: 'tomorrow'"),
        ("messages/delay/0/1/move", {"after": "99999999999d"}, 400, "after"),
        ("messages/delay/0/1/move", {"after": "9999999d"}, 400, "beyond the year 9999"),
        ("messages/delay/0/1/cancel", {"id": "a"}, 422, "Extra inputs"),
        ("messages/cancel", {}, 400, "all: true"),
        ("messages/cancel", {"cursor": "?", "all": True}, 400, "invalid cursor"),
        ("messages/cancel", {"targt": "a"}, 422, "Extra inputs"),
        ("messages/cancel", None, 422, "Field required"),
        ("messages/move", {"all": True}, 400, "one of due and after"),
        ("dead-letters/redrive", {}, 400, "all: true"),
        ("dead-letters/redrive", {"since": "then"}, 400, "since: 'then'"),
        ("targets/-%20-/pause", None, 400, "is not a topic name"),
    ],
)
def test_wrong_requests_say_what_to_do(path: str, body: object, status: int, detail: str) -> None:
    """And nothing is sent."""
    bridge, dispatcher = bridge_of(3)
    refused(client(bridge).post(f"/api/v1/{path}", json=body), status, detail)
    assert dispatcher.sent == []


def test_a_dry_run_counts() -> None:
    """By the same filters; nothing is sent."""
    bridge, dispatcher = bridge_of(5, id="a")
    answer = client(bridge).post("/api/v1/messages/cancel", json={"id": "a", "dry_run": True})
    assert answer.json() == {"count": 5, "exact": True}
    assert dispatcher.sent == [] and dispatcher.store.asked == [Query(id="a")]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand messages are some."""
    monkeypatch.setattr(bulk, "PAGE_ROWS", 1_000)


def test_all_that_fit_are_acted_on_a_page_at_a_time() -> None:
    """Soonest first; each page is a line with how far it has come, and the last one says that it is complete."""
    bridge, dispatcher = bridge_of(2_500)
    found = lines(client(bridge).post("/api/v1/messages/cancel", json={"target": "orders"}))
    assert [origin for order in dispatcher.sent for origin in order.origins] == list(range(2_500))
    assert {len(order.origins) for order in dispatcher.sent} == {NAMED_MAX}
    assert [line["done"] for line in found] == [1_000, 2_000, 2_500, 2_500]
    assert [line["complete"] for line in found] == [False, False, False, True]
    assert found[-1]["outcomes"] == {"cancelled": 2_500} and found[-1]["cursor"] is None
    assert {row.state for row in dispatcher.store.rows} == {PendingState.CANCELLED}


@pytest.mark.parametrize("after", ["0", "1s", "1h"])
def test_what_an_action_moves_it_does_not_find_again(after: str) -> None:
    """Each message is moved once, whether it comes up before or after those that are left; new ones are left alone.
    One by each command."""
    bridge, dispatcher = bridge_of(2_500, due_ms=NOW_MS + 1)
    found = lines(client(bridge).post("/api/v1/messages/move", json={"all": True, "after": after}))
    assert found[-1] | {"cursor": None} == found[-1] and found[-1]["complete"]
    moved = [origin for order in dispatcher.sent for origin in order.origins]
    assert sorted(set(moved)) == sorted(moved) and len(moved) == found[-1]["done"] == 2_500
    assert {len(order.origins) for order in dispatcher.sent} == {1}


def test_a_time_that_is_too_far_away_is_told_in_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has begun by then, and is not broken off."""
    bridge, dispatcher = bridge_of(3)

    def send(_: object) -> None:
        raise ValueError("that is further away than delay.max allows.")

    monkeypatch.setattr(dispatcher, "send", send)
    (line,) = lines(client(bridge).post("/api/v1/messages/move", json={"all": True, "after": "99999d"}))
    assert (line["complete"], line["error"]) == (False, "that is further away than delay.max allows.")


def test_an_action_that_is_broken_off_has_done_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line has the cursor behind what is done, and why it ended; with it the action goes on."""
    monkeypatch.setattr(bulk, "PAGE_S", 0.01)
    bridge, dispatcher = bridge_of(2_500)
    dispatcher.silent = {1_500}
    api = client(bridge)
    found = lines(api.post("/api/v1/messages/cancel", json={"all": True}))
    assert [line["done"] for line in found] == [1_000, 1_000]
    assert not found[-1]["complete"] and "no answers" in found[-1]["error"]
    dispatcher.silent, dispatcher.sent = set(), []
    again = lines(api.post("/api/v1/messages/cancel", json={"all": True, "cursor": found[-1]["cursor"]}))
    assert [order.origins for order in dispatcher.sent] == [tuple(range(1_500, 1_600))]
    assert again[-1]["complete"] and again[-1]["outcomes"] == {"cancelled": 100}


@pytest.mark.fault("messages behind a backlog, when many are cancelled")
def test_what_was_sent_before_an_action_and_is_not_read_yet_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action on many messages covers those whose records are unread at its beginning; while any are, it is not
    complete, and says so."""
    monkeypatch.setattr(bulk, "READ_S", 0.02)
    monkeypatch.setattr(bulk, "LOOK_S", 0.01)
    bridge, dispatcher = bridge_of(3)
    dispatcher.store.unread = [message(9)]
    found = lines(client(bridge).post("/api/v1/messages/cancel", json={"all": True}))
    assert "7 records of the delay topics are not read yet" in found[-1]["error"]
    assert (found[-1]["complete"], found[-1]["cursor"], found[-1]["outcomes"]) == (False, None, {"cancelled": 3})
    waits = bulk._await_read

    async def read(*args: Any) -> None:
        dispatcher.store.rows, dispatcher.store.unread = [*dispatcher.store.rows, message(9)], []
        await waits(*args)

    monkeypatch.setattr(bulk, "_await_read", read)
    found = lines(client(bridge).post("/api/v1/messages/cancel", json={"all": True}))
    assert found[-1]["complete"] and found[-1]["outcomes"] == {"cancelled": 1}


def test_a_target_is_paused_and_resumed() -> None:
    """The list of targets shows it, also one that was not used yet."""
    bridge = Bridge(paused=Paused())
    api = client(bridge)
    assert api.post("/api/v1/targets/orders/pause").json() == {"name": "orders", "paused": True, "changed": True}
    until = {"reason": "repairs", "after": "2h"}
    assert api.post("/api/v1/targets/new/pause", json=until).json()["changed"]
    assert bridge.paused.said == [(None, ""), (bridge.now_ms() + 7_200_000, "repairs")]
    wrong = [{"reason": "w" * 101}, {"until": "1"}, {"until": "soon"}, {"until": "1", "after": "1s"}, {"why": "x"}]
    assert all(api.post("/api/v1/targets/new/pause", json=each).status_code in (400, 422) for each in wrong)
    assert not api.post("/api/v1/targets/new/pause").json()["changed"]
    shown = {each["name"]: each["paused"] for each in api.get("/api/v1/targets").json()["targets"]}
    assert shown == {"new": True, "orders": True, "well": False}
    api.get("/api/v1/messages?state=paused")
    assert bridge.store is not None
    (query,) = bridge.store.asked
    assert query.paused == {"new", "orders"} and query.paused_topics == {"delay"}
    assert api.post("/api/v1/targets/new/resume").json() == {"name": "new", "paused": False, "changed": True}


def test_dead_letters_are_listed_a_page_at_a_time() -> None:
    """The newest first, by what is given; the cursor leads on."""
    letters = Letters([letter(n) for n in range(5)])
    api = client(Bridge(letters=letters))
    first = api.get("/api/v1/dead-letters?limit=2&reason=unknown-target&reason=too-large&topic=delay").json()
    assert [each["offset"] for each in first["letters"]] == [4, 3]
    assert first["letters"][0] == {
        "topic": "delay.dlt",
        "partition": 0,
        "offset": 4,
        "ts": NOW_MS + 4,
        "reason": "unknown-target",
        "detail": "orders does not exist",
        "origin": "delay/0/4",
        "delay_topic": "delay",
        "target": "orders",
        "attempts": 16,
        "key": {"text": "k"},
        "cut": False,
        "redriven": False,
    }
    rest = api.get("/api/v1/dead-letters", params={"cursor": first["next"]}).json()
    assert [each["offset"] for each in rest["letters"]] == [2, 1, 0] and rest["next"] is None
    one = api.get("/api/v1/dead-letters/delay.dlt/0/3").json()
    assert (one["value"], one["value_bytes"]) == (None, 1)
    refused(api.get("/api/v1/dead-letters/delay.dlt/0/9"), 404, "not a dead letter")
    refused(api.get("/api/v1/dead-letters?cursor=abc"), 400, "the previous page's `next`")
    refused(api.get("/api/v1/dead-letters?resaon=x"), 422, "The parameters are: topic, reason")


def test_dead_letters_are_counted() -> None:
    """By reason and target, without those that have gone back; nothing is put back for it, and reading is enough."""
    letters = Letters([letter(n, redriven=n == 4) for n in range(5)])
    placed = letters.rows[0]
    letters.rows[0] = replace(placed, letter=replace(placed.letter, is_cut=True, reason="too-large"))
    api = client(Bridge(letters=letters), is_writable=False)
    counted = api.get("/api/v1/dead-letters/count").json()
    by = [
        {"reason": "unknown-target", "target": "orders", "count": 3},
        {"reason": "too-large", "target": "orders", "count": 1},
    ]
    assert counted == {"count": 4, "by": by, "redriven": 1}
    assert [each.redriven for each in letters.rows] == [False] * 4 + [True]
    assert api.get("/api/v1/dead-letters/count?reason=too-large").json()["count"] == 1
    refused(api.get("/api/v1/dead-letters/count?resaon=x"), 422, "The parameters are: topic, reason")


def test_a_dead_letter_goes_back_once() -> None:
    """One by its place, or all that fit; a dry run counts."""
    letters = Letters([letter(n) for n in range(3)])
    api = client(Bridge(letters=letters))
    assert api.post("/api/v1/dead-letters/delay.dlt/0/1/redrive", json={}).json() == {"outcome": "redriven"}
    again = api.post("/api/v1/dead-letters/delay.dlt/0/1/redrive", json={"due_now": True, "set_headers": {"a": "b"}})
    assert again.json() == {"outcome": "redriven-before"}
    assert letters.rows[1].redriven
    counted = api.post("/api/v1/dead-letters/redrive", json={"target": "orders", "dry_run": True}).json()
    by = [{"reason": "unknown-target", "target": "orders", "count": 2}]
    assert counted == {
        "count": 2, "exact": True, "dry_run": True, "by": by, "broken": [], "before": 1, "foreign": 0
    }  # fmt: skip
    assert api.post("/api/v1/dead-letters/redrive", json={"all": True}).json()["count"] == 2
    assert api.post("/api/v1/dead-letters/redrive", json={"all": True}).json()["count"] == 0


@pytest.mark.parametrize(
    ("headers", "status", "detail"),
    [
        ({"X-Delay-Bridge-Action": ""}, 403, "X-Delay-Bridge-Action"),
        ({"X-Delay-Bridge-Action": "true"}, 403, "X-Delay-Bridge-Action"),
        ({"Origin": "https://elsewhere.example"}, 403, "another site"),
        ({"Origin": "null"}, 403, "another site"),
        ({"Origin": "http://["}, 403, "another site"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "another site"),
        ({"Sec-Fetch-Site": "none"}, 403, "another site"),
        ({"Content-Type": "text/plain"}, 415, "application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        ({"Content-Length": "65537"}, 413, "65536 bytes"),
        ({"Transfer-Encoding": "chunked"}, 413, "Content-Length"),
    ],
)
def test_a_page_of_another_site_can_have_nothing_done(headers: dict[str, str], status: int, detail: str) -> None:
    """Neither with a form nor with a script; bodies are JSON, and small."""
    bridge, dispatcher = bridge_of(3)
    answer = client(bridge).post("/api/v1/messages/cancel", content=b'{"all": true}', headers=headers)
    refused(answer, status, detail)
    assert dispatcher.sent == []


@pytest.mark.parametrize("origin", ["null", "http://[", "//"])
def test_an_origin_without_a_host_is_no_origin_of_a_request_without_one(origin: str) -> None:
    """Two that are missing are not the same."""
    bridge, dispatcher = bridge_of(1)
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "", "Origin": origin}
    answer = client(bridge, Protection(token=TOKEN)).post("/api/v1/messages/delay/0/0/cancel", headers=headers)
    refused(answer, 403, "another site")
    assert dispatcher.sent == []


def test_the_page_itself_may_act() -> None:
    """What a browser sends along from the page of this bridge."""
    bridge, _ = bridge_of(1)
    headers = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    assert client(bridge).post("/api/v1/messages/delay/0/0/cancel", content=b"{}", headers=headers).status_code == 200


def test_an_action_needs_the_password_or_the_token_and_is_logged() -> None:
    """With who did what to what, and what came of it; never the token."""
    bridge, _ = bridge_of(3)
    protection = Protection(user="u", password="p", token=TOKEN)
    api = client(bridge, protection)
    path = "/api/v1/messages/delay/0/1/cancel"
    refused(api.post(path), 401, "http.token_file")
    refused(api.post(path, headers={"Authorization": "Bearer wrong"}), 401, "http.token_file")
    refused(api.post(path, headers={"Authorization": f"Basic {TOKEN}"}), 401, "http.token_file")
    with capture_logs() as logs:
        assert api.post(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert api.post("/api/v1/messages/cancel", json={"id": "x"}, auth=("u", "p")).status_code == 200
    one, many = (line for line in logs if line["event"] == "api-action")
    assert (one["who"], one["action"], one["chosen"], one["outcome"]) == ("token", "cancel", "delay/0/1", "cancelled")
    assert (many["who"], many["chosen"], many["outcome"], many["count"]) == ("u", "{'id': 'x'}", "complete", 0)
    assert TOKEN not in str(logs)
