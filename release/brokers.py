"""The tables of docs/brokers.md: the tests on each release of Kafka, their results, and the known anomalies.

docs/brokers.json has the results by version and test file. A file with a result of this commit is not run again, so an
interrupted run goes on from the same place.

    make matrix                             every version
    make matrix KAFKA="4.2.2 4.4.0"         these
    python -m release.brokers               the tables alone
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bridge.kafka.releases import LOSES_MARKERS, Release
from dev.broker.embedded import VERSION_VARIABLE, pom_version
from release.faults import ROOT, commit_and_date, with_part

DOCUMENT: Final = ROOT / "docs" / "brokers.md"
RESULTS: Final = ROOT / "docs" / "brokers.json"
BEGIN, END = "<!-- brokers: `make matrix` writes the following part -->", "<!-- end of brokers -->"

VERSIONS: Final = ("3.9.2", "4.0.2", "4.1.2", "4.2.2", "4.3.1", "4.4.0")
"""The newest patch release of each minor release."""
TESTS: Final[Mapping[str, str]] = {
    "tests/broker/test_dispatcher.py": "transactions, aborts, fences, commits without an answer, brokers that die",
    "tests/broker/test_injections.py": "requests that arrive late, twice or never",
    "tests/broker/test_membership.py": "ownership of partitions, committed offsets, a second instance of a name",
    "tests/broker/test_transactions.py": "transactions that a predecessor has left open",
    "tests/broker/test_transaction_markers.py": "lost markers, on releases that lose them",
    "tests/broker/test_redrive.py": "dead letters that are put back, one transaction after another",
    "tests/broker/test_plain_reader.py": "readers with `read_committed`",
    "tests/broker/test_checks.py": "look-ups of topics and settings; `delay-bridge check`",
    "tests/system/test_delivery.py": "the whole bridge, with Spark's reader",
}
"""The test files with their subjects."""

Record = Mapping[str, Mapping[str, Any]]
"""By file: `commit`, `date`, `passed`, `skipped` and `failed`, the names of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """A known fault of Kafka's transactions, in releases from `first` to `last` (None: unbounded)."""

    name: str
    effect: str
    answer: str
    first: Release | None = None
    last: Release | None = None

    def is_in(self, release: Release) -> bool:
        """Whether the release has the anomaly."""
        return (self.first is None or self.first <= release) and (self.last is None or release <= self.last)

    @property
    def releases(self) -> str:
        """The affected releases in words."""
        if self.first is None or self.last is None:
            return "all"
        return f"{self.first} to {self.last}"


ANOMALIES: Final = (
    Anomaly(
        name="KIP-890",
        effect="a late request of an ended transaction ends the next transaction of its transactional id, or sets the "
        "group's offsets back; fixed in 4.0 for clients that change the epoch with each transaction, unlike the client "
        "library of the bridge",
        answer="an id that may have sent a request twice gets a new epoch before its next transaction, which fences "
        "the late one (I9)",
    ),
    Anomaly(
        name="KIP-1228",
        effect="a late marker of the same epoch is accepted; fixed in 4.2 for the same clients only",
        answer="as above",
    ),
    Anomaly(
        name="KAFKA-20734",
        effect="the marker of a partition without a leader is dropped",
        answer="the transaction is ended again ([failures.md](failures.md#lost-transaction-markers)); `check` warns",
        first=LOSES_MARKERS[0],
        last=LOSES_MARKERS[1],
    ),
    Anomaly(
        name="KAFKA-20716",
        effect="an unclean leader election loses markers",
        answer="`check` warns if `unclean.leader.election.enable` is on",
    ),
    Anomaly(
        name="KAFKA-21181",
        effect="a former coordinator answers from its memory for seconds",
        answer="after an indefinite result the committed offsets decide, which are read with require-stable",
    ),
    Anomaly(
        name="KAFKA-20785",
        effect="a transaction that times out during its end gets the answer of a fenced one",
        answer="the producer is replaced once; only a second fence counts as a rival",
    ),
)


def tables(by_version: Mapping[str, Record]) -> str:
    """The tables in Markdown: results by version, tests, anomalies."""
    lines = ["| Kafka | result | run | known anomalies |", "|---|---|---|---|"]
    for version in VERSIONS:
        record = by_version.get(version, {})
        anomalies = ", ".join(anomaly.name for anomaly in ANOMALIES if anomaly.is_in(Release.of(version)))
        lines.append(f"| {version} | {result_of(record)} | {run_of(record)} | {anomalies} |")
    lines += ["", f"The whole suite, these tests included, runs on {pom_version()} with each change."]
    lines += ["", "Tests:", "", "| file | subject |", "|---|---|"]
    lines += [f"| `{file}` | {about} |" for file, about in TESTS.items()]
    heading = "| anomaly | releases | effect | answer of the bridge |"
    lines += ["", "Known anomalies:", "", heading, "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.releases} | {one.effect} | {one.answer} |" for one in ANOMALIES]
    return "\n".join(lines)


def result_of(record: Record) -> str:
    """The result in words: the number of passed tests, the failed ones, and the files without a run."""
    runs = [record[file] for file in TESTS if file in record]
    if not runs:
        return "not run"
    passed, skipped = sum(run["passed"] for run in runs), sum(run["skipped"] for run in runs)
    failed = [f"`{name}`" for run in runs for name in run["failed"]]
    words = [f"{passed} passed"]
    words += [f"{len(failed)} failed: {', '.join(failed)}"] if failed else []
    words += [f"{skipped} left out: no markers are lost there"] if skipped else []
    absent = [f"`{Path(file).stem}`" for file in TESTS if file not in record]
    words += [f"not run: {', '.join(absent)}"] if absent else []
    return "; ".join(words)


def run_of(record: Record) -> str:
    """Commits and dates of the results."""
    runs = dict.fromkeys((run["commit"], run["date"]) for file, run in record.items() if file in TESTS)
    return ", ".join(f"`{commit}`, {date}" for commit, date in runs)


def recorded_results() -> dict[str, dict[str, dict[str, Any]]]:
    """The results by version and file; empty before the first run."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def run_tests(version: str, file: str) -> dict[str, Any]:
    """Run a file's tests on a version, and count the outcomes."""
    commit, date = commit_and_date()
    with TemporaryDirectory(prefix="matrix-") as scratch:
        outcomes = Path(scratch, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "0", file, "--outcomes", str(outcomes)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, VERSION_VARIABLE: version}, check=False)
        results: dict[str, str] = json.loads(outcomes.read_text(encoding="utf-8"))
    counts = Counter(results.values())
    failed = sorted(test.partition("::")[2] for test, outcome in results.items() if outcome == "failed")
    return {"commit": commit, "date": date, "passed": counts["passed"], "skipped": counts["skipped"], "failed": failed}


def run_all(versions: Sequence[str]) -> None:
    """Run the files without a result of this commit; each result is saved at once."""
    commit, _ = commit_and_date()
    for version in versions:
        archive = [sys.executable, "-m", "dev.broker.archive"]
        subprocess.run(archive, cwd=ROOT, env={**os.environ, VERSION_VARIABLE: version}, check=False)
        for file in TESTS:
            if recorded_results().get(version, {}).get(file, {}).get("commit") != commit:
                result = run_tests(version, file)
                kept = recorded_results()
                kept.setdefault(version, {})[file] = result
                RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
                write_tables()


def write_tables() -> None:
    """Write the tables into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_part(text, tables(recorded_results()), BEGIN, END), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=VERSIONS, metavar="VERSION", help="default: all")
    versions = parser.parse_args().run
    if versions is not None:
        run_all(versions or VERSIONS)
    write_tables()


if __name__ == "__main__":
    main()
