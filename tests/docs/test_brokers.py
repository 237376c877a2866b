"""The tables of docs/brokers.md are those of the recorded results; release/brokers.py makes them."""

from __future__ import annotations

from typing import Any

from bridge.kafka.releases import SUPPORTED_MIN, Release, loses_markers
from dev.broker.embedded import pom_version
from release.brokers import ANOMALIES, BEGIN, DOCUMENT, END, TESTS, VERSIONS, recorded_results, result_of, tables
from release.faults import with_part
from tests.paths import ROOT


def test_the_tables_are_those_of_the_results() -> None:
    """Versions, results and anomalies; and nothing is told of a version that is not run any more."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_part(text, tables(recorded_results()), BEGIN, END), "run python -m release.brokers"
    assert set(recorded_results()) <= set(VERSIONS)


def test_the_oldest_release_that_is_run_is_the_oldest_that_is_supported() -> None:
    """As `check` has it, and the documents; the version that the other tests run on is among them."""
    releases = [Release.of(version) for version in VERSIONS]
    assert (min(releases), len(set(releases))) == (SUPPORTED_MIN, len(VERSIONS))
    assert pom_version() in VERSIONS
    for document in ("README.md", "docs/brokers.md", "helm/delay-bridge/README.md"):
        assert f"Kafka {SUPPORTED_MIN} or later" in (ROOT / document).read_text(encoding="utf-8"), document
    assert not [file for file in TESTS if not (ROOT / file).is_file()]
    [markers] = [each for each in ANOMALIES if each.name == "KAFKA-20734"]
    assert [markers.is_in(each) for each in releases] == [loses_markers(each) for each in releases]


def test_a_result_tells_what_failed_and_what_was_not_run() -> None:
    """A row never looks better than its run was."""
    well: dict[str, Any] = {"commit": "c", "date": "d", "passed": 2, "skipped": 0, "failed": []}
    record = dict.fromkeys(TESTS, well)
    assert result_of(record) == f"{2 * len(TESTS)} passed"
    first, second, *others = TESTS
    record = {first: {**well, "failed": ["test_one"]}, **dict.fromkeys(others, well)}
    assert "1 failed: `test_one`" in result_of(record) and f"not run: `{second[13:-3]}`" in result_of(record)
    assert result_of({}) == "not run"
