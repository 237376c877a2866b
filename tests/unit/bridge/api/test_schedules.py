"""Messages that come again, over HTTP and on the command line."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from bridge.api import cursor as cursors
from bridge.api.application import application
from bridge.commands import pending
from bridge.commands.api_client import ApiClient
from bridge.commands.cli import app
from bridge.http.protection import Protection
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Store, message

HOUR = 3_600_000
NINE = '{"cron":"0 9 * * *","time-zone":"Europe/Berlin"}'


def client(store: Store) -> TestClient:
    return TestClient(application(Bridge(store), Protection(), show_payloads=False), raise_server_exceptions=False)


def test_only_what_comes_again_is_listed() -> None:
    """A page at a time, with the schedule's headers, the number of the next tick, and when the next five are due."""
    rows = (
        message(0),
        message(1, schedule='{"every":"1h"}', tick=4, due_ms=NOW_MS, id="a"),
        message(2, schedule=NINE, tick=1, due_ms=NOW_MS),
    )
    api = client(Store(*rows))
    first = api.get("/api/v1/schedules?limit=1").json()
    (found,) = first["schedules"]
    assert (found["origin"], found["id"], found["tick"]) == ("delay/0/1", "a", 4)
    assert found["schedule"] == {"delay-every": "1h"}
    assert found["next"] == [NOW_MS + n * HOUR for n in range(5)]
    (found,) = api.get("/api/v1/schedules", params={"cursor": first["next"]}).json()["schedules"]
    assert found["schedule"] == {"delay-cron": "0 9 * * *", "delay-time-zone": "Europe/Berlin"}
    assert {time % (24 * HOUR) for time in found["next"][1:]} == {8 * HOUR}  # January 2027


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"schedule": '{"every":"1h","times":"6"}', "tick": 5}, [NOW_MS, NOW_MS + HOUR]),
        ({"schedule": f'{{"every":"1h","end":"{NOW_MS + 1}"}}', "tick": 5}, [NOW_MS]),
        ({"schedule": '{"every":"1h","times":"1"}', "ts_ms": NOW_MS - HOUR}, [NOW_MS]),
        ({"schedule": '{"every":"1h","times":"1","given":true}', "ts_ms": NOW_MS - 9}, [NOW_MS]),
        ({"schedule": '{"every":"1h","end":"1"}'}, []),
        ({"schedule": '{"cron":"nonsense"}'}, []),
    ],
)
def test_the_next_ticks(values: dict[str, Any], expected: list[int]) -> None:
    """No more than there are; of what has not begun those that will be; of what is no schedule none."""
    (found,) = client(Store(message(0, **values))).get("/api/v1/schedules").json()["schedules"]
    assert found["next"] == expected


def test_a_parameter_that_is_misspelled() -> None:
    """The answer names those that there are."""
    answer = client(Store()).get("/api/v1/schedules?ids=a")
    assert answer.status_code == 422 and "limit" in answer.json()["detail"]


def test_a_cursor_of_a_partition_that_is_not_known() -> None:
    """As for messages, the answer says to begin anew."""
    cursor = cursors.encode_position((NOW_MS, "other", 0, 1))
    answer = client(Store()).get("/api/v1/schedules", params={"cursor": cursor})
    assert (answer.status_code, answer.headers["Content-Type"]) == (400, "application/problem+json")
    assert "a partition that this instance does not know" in answer.json()["detail"]


def run(monkeypatch: pytest.MonkeyPatch, store: Store, *arguments: str) -> tuple[int, str]:
    """The command against that bridge."""
    api = client(store)

    def get(_: ApiClient, path: str, parameters: Any = None) -> Any:
        return api.get(f"/api/v1/{path}", params=parameters).json()

    monkeypatch.setattr(ApiClient, "get", get)
    result = CliRunner().invoke(app, ["schedules", *arguments, "--url", "http://127.0.0.1:1"])
    return result.exit_code, result.stdout


def test_the_command_lists_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each; all that is known of one; status 1 for what does not come again."""
    store = Store(message(0), message(1, schedule='{"every":"1h","times":"5"}', tick=4, due_ms=NOW_MS, id="a"))
    cells = ["delay/0/1", pending.format_time(NOW_MS), "4", "orders", "a", "every=1h times=5"]
    assert run(monkeypatch, store, "list") == (0, "\t".join(cells) + "\n")
    status, shown = run(monkeypatch, store, "get", "delay/0/1")
    assert status == 0
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("next")] == [
        pending.format_time(NOW_MS),
        pending.format_time(NOW_MS + HOUR),
    ]
    assert run(monkeypatch, store, "get", "delay/0/0")[0] == 1
    assert '"tick": 4' in run(monkeypatch, store, "list", "--output", "json")[1]
