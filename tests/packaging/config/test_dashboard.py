"""config/dashboard.json: every query is about metrics and labels that the bridge exposes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.telemetry.metrics import TIME_TO_GO
from dev.harness.pace import scaled
from tests.packaging.config.exposed import exposed, labels
from tests.packaging.programs import program, promtool
from tests.paths import ROOT

DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "config" / "dashboard.json").read_text(encoding="utf-8"))
HIDDEN: Final = {
    "delay_bridge_build_info",
    "delay_bridge_disk_size_bytes",
    "delay_bridge_ready_messages",
}


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel, and query."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def test_queries_ask_for_what_the_bridge_exposes() -> None:
    """Each metric by its exact name, and each label that a query sums by is one of its metrics'."""
    for title, query in queries():
        names = set(re.findall(r"\b(?:delay_bridge|process)_\w+", query))
        assert names and names <= exposed(), f"{title}: {names - exposed()}"
        wanted = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")}
        assert wanted <= labels(names), f"{title}: {wanted - labels(names)}"


def test_every_metric_that_tells_of_delivery_is_shown() -> None:
    """The dashboard has every metric, except for those for debugging."""
    part = re.compile(r"_(bucket|sum|count)$")
    shown = {part.sub("", name) for _, query in queries() for name in re.findall(r"\bdelay_bridge_\w+", query)}
    told = {part.sub("", name) for name in exposed() if name.startswith("delay_bridge_")}
    hidden = {name for name in told - shown if not name.endswith("_created")}
    assert hidden <= HIDDEN, hidden - HIDDEN


@pytest.mark.skipif(program("promtool") is None, reason="no promtool: this machine has no apt-get to fetch it")
def test_queries_can_be_parsed(tmp_path: Path) -> None:
    """By Prometheus itself, with Grafana's variables filled in."""
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$job", ".*")}
        for number, (_, query) in enumerate(queries())
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = [promtool(), "check", "rules", str(tmp_path / "rules.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_panels_do_not_overlap() -> None:
    """Each cell of the grid belongs to one panel."""
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert x < 24 and (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_colours_do_not_come_from_defaults() -> None:
    """Grafana's own threshold turns red at 80, be that messages or milliseconds."""
    stats = [panel for panel in DASHBOARD["panels"] if panel["type"] == "stat"]
    assert stats and [p["title"] for p in stats if "thresholds" not in p["fieldConfig"]["defaults"]] == []


def test_heatmaps_show_the_histograms_buckets() -> None:
    """One without options is taken for a panel of the time before buckets, and shows how high the counts are."""
    [panel] = (panel for panel in DASHBOARD["panels"] if panel["type"] == "heatmap")
    assert panel["options"]["calculate"] is False
    assert panel["options"]["yAxis"]["unit"] == "s"


def test_pending_messages_are_shown_in_the_order_of_their_time() -> None:
    """Not in the alphabet's, in which a day comes before a minute: one query for each bucket."""
    [panel] = (panel for panel in DASHBOARD["panels"] if panel["title"] == "Pending by time to go")
    shown = [re.search(r'within="(\w+)"', target["expr"]) for target in panel["targets"]]
    assert [found[1] for found in shown if found] == list(TIME_TO_GO)
