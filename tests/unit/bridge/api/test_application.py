"""The API's routes: what is asked of the store, what is answered, and what is refused."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bridge.api.application import application
from bridge.delivery.targets.target import TargetReport
from bridge.http.protection import Protection
from bridge.stores.search import Query
from bridge.telemetry.health import Phase
from bridge.telemetry.metrics import StoreSnapshot
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Letters, Store, letter, message
from timerstore.errors import Corrupt
from timerstore.operations.find import PENDING, PendingState

ACTION = {"X-Delay-Bridge-Action": "1"}


def client(bridge: Bridge, protection: Protection | None = None, *, show_payloads: bool = False) -> TestClient:
    app = application(bridge, protection or Protection(), show_payloads=show_payloads)
    return TestClient(app, raise_server_exceptions=False)


def offsets(answer: Any) -> list[int]:
    return [each["offset"] for each in answer.json()["messages"]]


@pytest.mark.parametrize(
    ("parameters", "query"),
    [
        ("id=a%20b", Query(id="a b")),
        ("origin=delay/3/42", Query(origin=("delay", 3, 42))),
        ("key=%C3%BC", Query(key="ü".encode())),
        ("key=", Query(key=b"")),
        ("key_base64=-_8%3D", Query(key=b"\xfb\xff")),
        ("key_base64=+/8", Query(key=b"\xfb\xff")),
        ("target=", Query(target="")),
        ("due_from=1800000000000", Query(due_from_ms=1_800_000_000_000)),
        ("due_until=1970-01-01T08:00:00+08:00".replace("1970", "2000"), Query(due_until_ms=946_684_800_000)),
        ("due_until=2000-01-01T08:00:00%2B08:00", Query(due_until_ms=946_684_800_000)),
        ("at_from=1&at_until=2000-01-01T00:00:00Z", Query(at_from_ms=1, at_until_ms=946_684_800_000)),
        ("state=waiting&state=cancelled", Query(states=frozenset({PendingState.WAITING, PendingState.CANCELLED}))),
        ("", Query(states=PENDING)),
    ],
)
def test_filters_reach_the_store(parameters: str, query: Query) -> None:
    """A list and a count ask the store for the same messages."""
    store = Store()
    api = client(Bridge(store))
    assert api.get(f"/api/v1/messages?{parameters}").status_code == 200
    assert api.get(f"/api/v1/count?{parameters}").status_code == 200
    assert store.asked == [query, query]


def test_a_message_in_a_list() -> None:
    """All that is known but value and headers; bytes that are no text are base64."""
    row = message(7, origin=3, key=b"\xff", id="i", rolls=2, attempt=1, reason="target-unavailable", target_partition=4)
    answer = client(Bridge(Store(row))).get("/api/v1/messages")
    assert answer.json() == {
        "messages": [
            {
                "topic": "delay",
                "partition": 0,
                "offset": 7,
                "origin": "delay/0/3",
                "due": NOW_MS,
                "at": NOW_MS + 7,
                "ts": NOW_MS - 1,
                "state": "waiting",
                "target": "orders",
                "target_partition": 4,
                "key": {"base64": "/w=="},
                "id": "i",
                "rolls": 2,
                "attempts": 1,
                "reason": "target-unavailable",
            }
        ],
        "next": None,
    }


def test_pages_have_each_message_once() -> None:
    """Cursors lead through all pages, and stay valid when the row that they name is gone."""
    store = Store(*map(message, range(5)))
    api = client(Bridge(store))
    first = api.get("/api/v1/messages?limit=2")
    assert offsets(first) == [0, 1]
    del store.rows[1]
    second = api.get("/api/v1/messages", params={"limit": 2, "cursor": first.json()["next"]})
    third = api.get("/api/v1/messages", params={"limit": 2, "cursor": second.json()["next"]})
    assert offsets(second) + offsets(third) == [2, 3, 4]
    assert third.json()["next"] is None


def test_one_message_by_its_origin() -> None:
    """It is found in its copy, and when it is cancelled."""
    headers = (("a", b"1"), ("a", b"\xff"), ("null", None))
    row = message(9, origin=2, state=PendingState.CANCELLED, headers=headers, value=b"secret")
    hidden = client(Bridge(Store(row))).get("/api/v1/messages/delay/0/2").json()
    shown = client(Bridge(Store(row)), show_payloads=True).get("/api/v1/messages/delay/0/2").json()
    assert hidden["offset"] == 9 and hidden["origin"] == "delay/0/2" and hidden["state"] == "cancelled"
    assert hidden["value"] is None and hidden["value_bytes"] == 6
    assert (hidden["headers"], hidden["headers_left_out"]) == ([], 3)
    listed = [{"name": "a", "text": "1"}, {"name": "a", "base64": "/w=="}, {"name": "null"}]
    assert shown == hidden | {"value": {"text": "secret"}, "headers": listed, "headers_left_out": 0}


@pytest.mark.fault("a payload that one answer hides and another shows")
@pytest.mark.parametrize("is_shown", [False, True])
def test_one_rule_says_what_of_a_payload_is_shown(is_shown: bool) -> None:
    """Values and own headers of messages and dead letters are shown only if http.show_payloads is on; headers of the
    bridge always. An export has the same rule (test_export.py)."""
    row = message(0, value=b"secret-1", headers=(("own", b"secret-2"),))
    placed = letter(1, value=b"secret-1")
    told = replace(placed.letter, headers=[("delay-topic", b"orders"), ("own", b"secret-2")])
    bridge = Bridge(Store(row), letters=Letters([replace(placed, letter=told)]))
    api = client(bridge, show_payloads=is_shown)
    for path in ("messages/delay/0/0", "dead-letters/delay.dlt/0/1"):
        text = api.get(f"/api/v1/{path}").text
        assert ("secret-1" in text, "secret-2" in text, '"own"' in text) == (is_shown, is_shown, is_shown)
    found = api.get("/api/v1/dead-letters/delay.dlt/0/1").json()
    assert found["headers"][0] == {"name": "delay-topic", "text": "orders"}
    assert found["headers_left_out"] == (0 if is_shown else 1)


def test_a_long_value_is_cut() -> None:
    """At a limit, and between two characters."""
    api = client(Bridge(Store(message(0, value=b"x" + "ü".encode() * 5_000))), show_payloads=True)
    value = api.get("/api/v1/messages/delay/0/0").json()["value"]
    assert value == {"text": "x" + "ü" * 2_047, "truncated": True}
    api = client(Bridge(Store(message(0, value=b"\xff" * 5_000))), show_payloads=True)
    value = api.get("/api/v1/messages/delay/0/0").json()["value"]
    assert value == {"base64": base64.b64encode(b"\xff" * 4_096).decode(), "truncated": True}


def test_what_is_not_pending_is_not_found() -> None:
    """404, as problem+json."""
    refused(client(Bridge()).get("/api/v1/messages/delay/0/1"), 404, "is not pending here")
    refused(client(Bridge()).get("/api/v1/nothing"), 404, "openapi.json")


@pytest.mark.parametrize(
    ("parameters", "status", "detail"),
    [
        ("origin=delay/0", 400, "topic/partition/offset"),
        ("origin=delay/0/99999999999999999999", 400, "topic/partition/offset"),
        ("due_from=tomorrow", 400, "due_from: 'tomorrow' is neither epoch milliseconds nor RFC 3339"),
        ("due_until=2027-02-31T00:00:00Z", 400, "due_until"),
        ("key=a&key_base64=YQ", 400, "give one of them"),
        ("key_base64=%25", 400, "not base64"),
        ("id=a&id=b", 400, "id: give it once"),
        ("cursor=abc", 400, "pass the previous page's `next`"),
        ("cursor=WzEsIm90aGVyIiwwLDBd", 400, "a partition that this instance does not know"),
        ("limit=0", 422, "greater than or equal to 1"),
        ("limit=1001", 422, "less than or equal to 1000"),
        ("state=lost", 422, "'waiting'"),
        ("targt=a", 422, "The parameters are: id, origin, key"),
        ("id=", 422, "at least 1 character"),
    ],
)
def test_wrong_parameters_say_what_to_do(parameters: str, status: int, detail: str) -> None:
    """400 or 422, never 500, and nothing is asked of the store but for a partition that it must know."""
    refused(client(Bridge()).get(f"/api/v1/messages?{parameters}"), status, detail)


def refused(answer: Any, status: int, detail: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status and body["title"] and detail in body["detail"], body


def test_until_the_index_is_complete_nothing_is_told() -> None:
    """503 with what is going on: what is pending would be told too low."""
    where = Phase(name="catching-up", reasons=("records up to the committed offsets",), progress=0.25)
    api = client(Bridge(None, where))
    for path in ("messages", "count", "summary", "messages/delay/0/1"):
        answer = api.get(f"/api/v1/{path}")
        refused(answer, 503, "records up to the committed offsets")
        assert answer.json()["phase"] == "catching-up" and answer.json()["progress"] == 0.25
        assert answer.headers["Retry-After"]


def test_a_failing_index_is_no_bug() -> None:
    """What the disk does to a search is said; what is a bug of ours tells nothing."""
    store = Store()
    store.error = Corrupt("checksum", path="/x")
    refused(client(Bridge(store)).get("/api/v1/count"), 503, "checksum")
    store.error = RuntimeError("secret")
    answer = client(Bridge(store)).get("/api/v1/count")
    refused(answer, 500, "bug")
    assert "secret" not in answer.text and answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_summary() -> None:
    """What the gauges know."""
    gauges = StoreSnapshot(
        pending_total=5,
        pending_by_topic={"orders": 5},
        pending_by_time_to_go=(1, 0, 0, 0, 0, 0, 4),
        consumer_lag={("delay", 0): 7},
        failing={("orders", "target-unavailable"): 1},
    )
    body = client(Bridge(gauges=gauges)).get("/api/v1/summary").json()
    assert (body["pending"], body["overdue"], body["next_at"], body["reader"]) == (5, 2, NOW_MS - 5, "spark")
    assert body["by_target"] == {"orders": 5}
    assert body["lateness"] == {"delivered": 1234, "p99_ms": 41.3, "over_s": 300.2}
    assert [each["pending"] for each in body["by_time_to_go"]] == [1, 0, 0, 0, 0, 0, 4]
    assert body["partitions"] == [{"topic": "delay", "partition": 0, "lag": 7, "behind_s": 1.5}]
    assert body["failing"] == [{"name": "orders", "reason": "target-unavailable", "partitions": 1}]


def test_the_timeline() -> None:
    """Counts between edges; edges that are none, too many or out of order are refused."""
    api = client(Bridge(Store(*(message(n) for n in range(10)))))
    edges = [NOW_MS + 2, NOW_MS + 5, NOW_MS + 5, NOW_MS + 9]
    body = api.get("/api/v1/timeline", params={"edge": edges}).json()
    assert body == {"before": 2, "counts": [3, 0, 4], "after": 1}
    assert api.get("/api/v1/timeline?edge=2027-01-15T08:00:00Z").json() == {"before": 0, "counts": [], "after": 10}
    refused(api.get("/api/v1/timeline?edge=2&edge=1"), 400, "in order")
    refused(api.get("/api/v1/timeline?edge=soon"), 400, "edge: 'soon'")
    refused(api.get("/api/v1/timeline"), 422, "The parameters are: edge.")
    refused(api.get("/api/v1/timeline", params={"edge": [1] * 102}), 422, "at most 101")
    refused(client(Bridge(None)).get("/api/v1/timeline?edge=1"), 503, "Try again")


def test_topics_of_the_bridge_are_not_pausable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target list has them, since copies go there."""
    there = Bridge()
    reports = [TargetReport(name="delay", partitions=1), TargetReport(name="orders", partitions=1)]
    monkeypatch.setattr(there, "targets", lambda: reports)
    found = client(there).get("/api/v1/targets").json()["targets"]
    assert [(each["name"], each["pausable"]) for each in found] == [("delay", False), ("orders", True)]


def test_targets() -> None:
    """Their trouble, and when it is looked at again."""
    failing, well = client(Bridge()).get("/api/v1/targets").json()["targets"]
    assert failing == {
        "name": "orders",
        "partitions": 3,
        "failing_partitions": 1,
        "reason": "target-unavailable",
        "detail": "no leader",
        "open_breakers": 1,
        "retry_in_s": 4.3,
        "paused": False,
        "pausable": True,
    }
    assert well["failing_partitions"] == 0 and well["reason"] is None


def test_a_password_guards_everything() -> None:
    """401 for each path, the OpenAPI document too; no answer admits other origins."""
    api = client(Bridge(), Protection(user="u", password="p"))
    for path in ("summary", "messages", "openapi.json", "nothing"):
        answer = api.get(f"/api/v1/{path}", headers={"Origin": "https://elsewhere.example"})
        refused(answer, 401, "http.user")
        assert answer.headers["WWW-Authenticate"].startswith("Basic")
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert api.get("/api/v1/summary", auth=("u", "wrong")).status_code == 401
    assert api.get("/api/v1/summary", auth=("u", "p")).status_code == 200


def test_it_only_reads() -> None:
    """Unless it is told to write, actions are refused, as are other methods and bodies; no page comes with the
    document."""
    api = client(Bridge())
    refused(api.post("/api/v1/messages/cancel", json={"all": True}, headers=ACTION), 403, "http.api")
    assert api.get("/api/v1/summary").json()["writable"] is False
    refused(api.put("/api/v1/messages"), 405, "not allowed")
    refused(api.request("GET", "/api/v1/messages", content=b"{}"), 413, "Send no body")
    assert api.get("/api/v1/openapi.json").json()["openapi"].startswith("3.")
    assert {api.get(path).status_code for path in ("/docs", "/redoc", "/api/v1/docs")} == {404}


def test_answers_cannot_be_taken_for_something_else() -> None:
    """Security headers are on every answer."""
    for path in ("summary", "nothing"):
        headers = client(Bridge()).get(f"/api/v1/{path}").headers
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
