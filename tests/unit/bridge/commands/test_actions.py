"""bridge.commands.actions, dead_letters: what the commands have a bridge do, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridge.api.listener import Listener
from bridge.api.source import Order
from bridge.commands import change
from bridge.commands.change import WAIT, _remark
from bridge.commands.cli import app
from bridge.http.protection import Protection
from bridge.settings.load import load
from bridge.settings.model import Settings
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Letters, Paused, Store, letter, message

TOKEN = "0123456789abcdef"


@pytest.fixture
def bridge() -> Bridge:
    rows = [message(n, id=f"id-{n % 2}", due_ms=NOW_MS + 1 + n) for n in range(6)]
    return Bridge(Store(*rows), letters=Letters([letter(n) for n in range(3)]), paused=Paused())


@pytest.fixture
def served(bridge: Bridge, tmp_path: Path) -> Iterator[list[str]]:
    """Options that name the bridge."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    protection = Protection(token=TOKEN)
    with Listener(
        "127.0.0.1", 0, source=bridge, protection=protection, show_payloads=False, is_writable=True
    ) as listener:
        config = tmp_path / "bridge.yaml"
        config.write_text(f"http: {{api: write, token_file: {tmp_path / 'token'}}}")
        yield ["--url", f"http://127.0.0.1:{listener.port}", "--config", str(config)]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def sent(bridge: Bridge) -> list[Order]:
    assert bridge.dispatcher is not None
    return bridge.dispatcher.sent


def test_a_command_says_what_is_known_by_its_name_before_it_is_sent(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo in an id or an origin is seen at once where the bridge's API answers; else that nobody was asked."""
    monkeypatch.setattr(change, "ASK_S", 60.0)  # a busy machine may need more than a user waits for
    port = int(served[1].rpartition(":")[2])
    http = load(Path(served[3]), {}).http.model_copy(update={"host": "127.0.0.1", "api_port": port})
    settings = Settings().model_copy(update={"http": http})
    known, nothing, unasked = WAIT, "no pending message of that name", "not known whether"
    for id, origins, said in (
        ("id-1", None, known), ("nosuch", None, nothing), (None, ("delay", 0, (3,)), known),
        (None, ("delay", 0, (33,)), nothing), (None, ("delay", 0, (3, 4)), unasked), ("", None, unasked),
    ):  # fmt: skip
        assert _remark(settings, id, origins).startswith(said)
    assert _remark(Settings.of({"http": {"api_port": 1}}), "id-1", None).startswith(unasked)


def test_one_message_by_its_origin(bridge: Bridge, served: list[str]) -> None:
    """What has happened is said; the status is 1 where it was not pending, or is another instance's."""
    assert invoke("pending", "cancel", "delay/0/1", *served) == (0, "delay/0/1: cancelled\n", "")
    assert invoke("pending", "move", "delay/0/2", "--after", "1h", *served) == (0, "delay/0/2: moved\n", "")
    status, out, _ = invoke("pending", "deliver", "delay/0/3", "--output", "json", *served)
    assert status == 0 and json.loads(out)["outcome"] == "moved"
    assert invoke("pending", "cancel", "delay/0/1", *served) == (1, "delay/0/1: not-pending\n", "")
    status, out, err = invoke("pending", "cancel", "delay/9/1", *served)
    assert (status, out) == (1, "") and "another instance" in err
    moved = Order(("delay", 0), (2,), NOW_MS + 3_600_000), Order(("delay", 0), (3,), NOW_MS)
    assert sent(bridge)[:3] == [Order(("delay", 0), (1,), None), *moved]


def test_many_messages_are_counted_before_anything_is_done(bridge: Bridge, served: list[str]) -> None:
    """Without a terminal to ask on, `--yes` is needed; `--dry-run` only counts."""
    assert invoke("pending", "cancel", "--id", "id-1", "--dry-run", *served) == (0, "3\n", "")
    status, out, _ = invoke("pending", "cancel", "--id", "id-1", "--dry-run", "--output", "json", *served)
    assert json.loads(out) == {"count": 3, "exact": True}
    status, _, err = invoke("pending", "cancel", "--id", "id-1", *served)
    assert status == 2 and "--yes" in err and sent(bridge) == []
    assert invoke("pending", "cancel", "--id", "id-1", "--yes", *served) == (0, "cancelled 3\n", "")
    assert invoke("pending", "cancel", "--id", "id-1", "--yes", *served) == (0, "no matching messages\n", "")
    at = ["--at", str(NOW_MS + 9_000)]
    status, out, _ = invoke("pending", "move", "--all", "--yes", "--output", "json", *at, *served)
    assert (status, json.loads(out)["outcomes"]) == (0, {"moved": 3})


def test_a_question_is_asked_on_a_terminal(bridge: Bridge, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number; no is status 1, and nothing is done."""
    monkeypatch.setattr("bridge.commands.actions._is_terminal", lambda: True)
    arguments = ["pending", "deliver", "--all", *served]
    refused = CliRunner().invoke(app, arguments, input="n\n")
    assert refused.exit_code == 1 and "deliver 6 messages?" in refused.stderr and sent(bridge) == []
    assert CliRunner().invoke(app, arguments, input="y\n").exit_code == 0
    assert [order.origins for order in sent(bridge)] == [(n,) for n in range(6)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel"], "no messages are selected"),
        (["cancel", "delay/0/1", "--id", "a"], "an origin and filters are given"),
        (["cancel", "delay/0/x"], "TOPIC/PARTITION/OFFSET"),
        (["move", "delay/0/1"], "either --at or --after"),
        (["move", "delay/0/1", "--at", "1800000000000", "--after", "1s"], "either --at or --after"),
        (["move", "delay/0/1", "--after", "soon"], "--after is invalid"),
    ],
)
def test_options_that_do_not_go_together(bridge: Bridge, served: list[str], arguments: list[str], said: str) -> None:
    """Status 2, and nothing is sent."""
    status, out, err = invoke("pending", *arguments, *served)
    assert (status, out) == (2, "") and said in err
    assert sent(bridge) == []


def test_an_action_that_is_broken_off_says_how_to_go_on(
    bridge: Bridge, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, with what is done so far and the reason."""
    monkeypatch.setattr("bridge.api.actions.bulk.PAGE_S", 0.05)
    assert bridge.dispatcher is not None
    bridge.dispatcher.silent = {3}
    status, _, err = invoke("pending", "cancel", "--all", "--yes", *served)
    assert status == 1 and "ended early: no answers" in err


def test_targets_are_paused_and_resumed(bridge: Bridge, served: list[str]) -> None:
    """And listed as before, without a word in between."""
    assert invoke("targets", "pause", "orders", *served) == (0, "orders is paused\n", "")
    assert invoke("targets", "pause", "orders", *served) == (0, "orders is already paused\n", "")
    assert bridge.paused.names() == {"orders"}
    assert "orders" in invoke("targets", *served)[1]
    assert invoke("targets", "resume", "orders", "--output", "json", *served)[0] == 0
    assert bridge.paused.names() == frozenset()


@pytest.mark.fault("a name that is mistyped")
def test_a_target_that_nobody_knows_is_not_paused(bridge: Bridge, served: list[str]) -> None:
    """An unknown target is status 1, with the way to pause it nevertheless."""
    for verb in ("pause", "resume"):
        status, out, err = invoke("targets", verb, "ordrs", *served)
        assert (status, out) == (1, "") and "unknown target ordrs" in err and "--unknown" in err
    assert bridge.paused.names() == frozenset()
    assert invoke("targets", "pause", "ordrs", "--unknown", *served) == (0, "ordrs is paused\n", "")


def test_dead_letters_are_listed_and_put_back(served: list[str]) -> None:
    """The newest at the top; one, or all that fit after a count."""
    status, out, err = invoke("dead-letters", "list", "--limit", "2", *served)
    assert [line.split("\t")[0] for line in out.splitlines()] == ["delay.dlt/0/2", "delay.dlt/0/1"]
    assert status == 0 and "--cursor" in err
    found: dict[str, Any] = json.loads(invoke("dead-letters", "list", "--output", "json", *served)[1])
    assert len(found["letters"]) == 3
    assert "orders does not exist" in invoke("dead-letters", "get", "delay.dlt/0/1", *served)[1]
    assert invoke("dead-letters", "get", "delay.dlt/0/9", *served)[0] == 1
    assert invoke("dead-letters", "redrive", "delay.dlt/0/1", *served) == (0, "delay.dlt/0/1: redriven\n", "")
    status, out, _ = invoke("dead-letters", "redrive", "--reason", "unknown-target", "--dry-run", *served)
    assert (status, out.splitlines()[-1]) == (0, "2 dead letters would go back")
    assert invoke("dead-letters", "redrive", "--all", *served)[0] == 2, "without a terminal it needs --yes"
    status, out, _ = invoke("dead-letters", "redrive", "--all", "--yes", "--due", "now", *served)
    assert (status, out.splitlines()[-1]) == (0, "2 dead letters put back")
    assert invoke("dead-letters", "redrive", *served)[0] == 2


def test_a_bridge_that_only_reads_is_told_of() -> None:
    """Status 2, with the key to change."""
    with Listener("127.0.0.1", 0, source=Bridge(), protection=Protection(), show_payloads=False) as listener:
        status, _, err = invoke("pending", "cancel", "delay/0/1", "--url", f"http://127.0.0.1:{listener.port}")
    assert status == 2 and "http.api" in err
