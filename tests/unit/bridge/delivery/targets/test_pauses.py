"""bridge.delivery.targets.pauses: what an operator has paused, through crashes and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.delivery.targets import pauses
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.pauses import FILE, Pauses
from bridge.errors import EnvironmentFailure
from bridge.wire.reasons import RejectReason
from tests.broker.brokers import WELL, Brokers
from tests.manual_clock import ManualClock


def test_a_pause_outlives_the_process(tmp_path: Path) -> None:
    """In a directory that need not be there yet; so does its end."""
    directory = tmp_path / "index"
    first = Pauses(directory)
    assert first.names() == frozenset()
    assert first.put("orders", paused=True) and not first.put("orders", paused=True)
    assert first.put("bills", paused=True) and first.put("bills", paused=False)
    assert Pauses(directory).names() == {"orders"}
    assert Pauses(directory, (), {"a": "orders", "b": "bills", "c": None}).topics() == {"a"}
    assert Pauses(directory).put("orders", paused=False)
    assert Pauses(directory).names() == frozenset()


def test_a_paused_target_takes_nothing_and_others_do(tmp_path: Path) -> None:
    """From the next look on, until it is resumed; what takes nothing anyway is paused first of all."""
    brokers, found = Brokers(), Pauses(tmp_path, own=["delay"])
    brokers.topics |= {"orders": WELL, "bills": WELL, "delay": WELL}
    targets = Targets(brokers, ManualClock(), pauses=found)
    assert targets.resolve(["orders"]) == {"orders": WELL}
    for name in ("orders", "missing"):
        found.put(name, paused=True)
    shown = targets.resolve(["orders", "bills", "missing"])
    assert shown["bills"] == WELL
    for name in ("orders", "missing"):
        refusal = shown[name].refusal
        assert refusal is not None and refusal.reason is RejectReason.TARGET_PAUSED and not refusal.counts
    assert ("orders", "target-paused") not in targets.failing(), "it is no trouble"
    found.put("orders", paused=False)
    assert targets.resolve(["orders"]) == {"orders": WELL}


def test_topics_of_the_bridge_are_not_paused(tmp_path: Path) -> None:
    """Neither by a request nor by a file from before the configuration changed."""
    Pauses(tmp_path).put("delay", paused=True)
    found = Pauses(tmp_path, own=["delay"])
    assert found.applied("delay", WELL) == WELL
    found.put("delay", paused=False)
    with pytest.raises(ValueError, match="a topic of the bridge itself"):
        found.put("delay", paused=True)


def test_pauses_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused."""
    monkeypatch.setattr(pauses, "PAUSED_MAX", 1)
    found = Pauses(tmp_path)
    found.put("a", paused=True)
    with pytest.raises(ValueError, match="1 targets are paused already"):
        found.put("b", paused=True)
    assert Pauses(tmp_path).names() == {"a"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paused": 1}', '{"paused": ["a b"]}', "[" * 5_000])
def test_a_damaged_file_is_not_taken_for_no_pause(tmp_path: Path, text: str) -> None:
    """The start is refused, with the file's name."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(EnvironmentFailure, match=rf"{FILE}.*Remove the file"):
        Pauses(tmp_path)


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """The target is delivered to as before."""
    good = Pauses(tmp_path / "index")
    (tmp_path / "index").write_text("a file in place of the directory")
    with pytest.raises(EnvironmentFailure, match="cannot write"):
        good.put("orders", paused=True)
    assert good.names() == frozenset() and good.applied("orders", WELL) == WELL
