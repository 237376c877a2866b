"""config/alerts.yaml: rules that fire when they should, about metrics that exist, with runbooks that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dev.harness.pace import scaled
from tests.packaging.config.exposed import exposed
from tests.packaging.programs import program, promtool
from tests.paths import ROOT

ALERTS: Final = ROOT / "config" / "alerts.yaml"
OPERATIONS: Final = ROOT / "docs" / "operations.md"
RULES: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]


@pytest.mark.skipif(program("promtool") is None, reason="no promtool: this machine has no apt-get to fetch it")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """promtool plays the series of tests/packaging/config/alerts.yaml and compares."""
    shutil.copy(ALERTS, tmp_path / "alerts-under-test.yaml")
    shutil.copy(Path(__file__).with_name("alerts.yaml"), tmp_path)
    command = [promtool(), "test", "rules", str(tmp_path / "alerts.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_is_played() -> None:
    """A rule that no series brings to fire may be one that never does."""
    tests = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_asks_for_what_the_bridge_exposes(rule: dict[str, Any]) -> None:
    """Each metric in the expression is one of the bridge's own, by its exact name."""
    names = set(re.findall(r"\b(?:delay_bridge|process)_\w+", rule["expr"]))
    assert names and names <= exposed(), names - exposed()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_its_runbook(rule: dict[str, Any]) -> None:
    """The link leads to a heading of docs/operations.md that is the alert's name."""
    document, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / document == OPERATIONS and anchor == rule["alert"].lower()
    assert re.search(rf"^#+ {rule['alert']}$", OPERATIONS.read_text(), re.MULTILINE)


def test_every_runbook_has_its_alert() -> None:
    """A runbook of an alert that is gone misleads."""
    headings = set(re.findall(r"^#+ (DelayBridge\w+)$", OPERATIONS.read_text(), re.MULTILINE))
    assert headings == {rule["alert"] for rule in RULES}
