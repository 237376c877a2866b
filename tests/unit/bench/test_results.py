"""Results as files, and README's table made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results
from bench.against_relay import SETTLED, STAMPED
from bench.calibration import LOOP
from bench.report import Comparison, Report

README = "# A\n\n" + results.BEGIN + "\nold\n" + results.END + "\n\nMore.\n"


def run_of(processor: str, loop_ms: float, late_ms: float, measured_at: str = "2026-01-01") -> dict[str, Any]:
    """A run of two turns in which only lateness was measured."""
    report = Report(calibration={LOOP: loop_ms})
    figure = f"{STAMPED} p99 {SETTLED}"
    report.compare(Comparison(scenario="1,000/s", figure=figure, unit="ms", bridge=(late_ms, late_ms), peer=(80, 40)))
    known = {"processor": processor, "cores": 2, "memory_gib": 24}
    return {**results.result_of(report, results.SHOWN), "machine": known, "measured_at": measured_at}


def test_a_run_is_two_files(tmp_path: Path) -> None:
    """The name has the run's name, the machine and the commit; the JSON has all that the document tells."""
    report = Report(calibration={LOOP: 50.0})
    report.add("costs", "CPU", "20 %", "<= 30 %")
    path = results.save(report, "costs", tmp_path)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem == f"costs-{results.slug(result['machine'])}-{result['commit']}"
    assert {"command", "versions", "machine", "calibration", "figures", "ratios"} <= result.keys()
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert text == results.document(result)
    assert "| costs | CPU | 20 % | <= 30 % |" in text and f"| {LOOP} | 50.00 |" in text


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("AMD EPYC", "amd-epyc-2"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-2"),
        ("ARM Neoverse-V1", "arm-neoverse-v1-2"),
    ],
)
def test_machines_have_short_names(processor: str, name: str) -> None:
    """Letters, digits and dashes: part of a file's name."""
    assert results.slug({"processor": processor, "cores": 2}) == name


def test_readme_has_the_best_and_the_worst_machine(tmp_path: Path) -> None:
    """Side by side, the newest run of each machine; five rows; the rest of the document stays."""
    runs = [run_of("Slow", 150, 90), run_of("Middle", 100, 60), run_of("Fast", 50, 20)]
    runs += [run_of("Fast", 50, 10, "2026-02-02"), {**run_of("Other", 1, 1), "name": "costs"}]
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(run), encoding="utf-8")
    text = results.with_table(README, results.read_all(tmp_path))
    assert text.startswith("# A\n") and text.endswith(results.END + "\n\nMore.\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 1 + 5
    assert "Fast, 2 cores | Slow, 2 cores" in rows[0]
    assert "10 ms, 60 ms, 0.2 (0.1 to 0.2) | 90 ms, 60 ms, 1.7 (1.1 to 2.2)" in text


def test_a_document_without_runs_has_no_table() -> None:
    """The marks remain, and a second time changes nothing."""
    text = results.with_table(README, [])
    assert text == results.with_table(text, []) and "|" not in text


def test_readme_agrees_with_the_results() -> None:
    """README's table is the one that the files in bench/results make, and each document beside them as well."""
    text = results.README.read_text(encoding="utf-8")
    assert text == results.with_table(text, results.read_all()), "run `python -m bench.results`"
    for path in results.DIRECTORY.glob("*.json"):
        document = path.with_suffix(".md").read_text(encoding="utf-8")
        assert document == results.document(json.loads(path.read_text(encoding="utf-8"))), path.name
