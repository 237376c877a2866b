"""The fault table of docs/guarantees.md: each fault with its promise, its test, and the result of the last `.ci/run`.

Faults, promises and tests come from the tests' syntax trees: the words of `@pytest.mark.fault("...")`, and the first
sentence of the docstring. docs/faults.json has the results, with commit and date; `.ci/run` replaces them.

    make faults                                     the table, after a change of a mark or its words
    python -m release.faults --record OUTCOMES      the results as well, from the file of `--outcomes`
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from timerstore.clock import SystemClock

ROOT: Final = Path(__file__).parents[1]
DOCUMENT: Final = ROOT / "docs" / "guarantees.md"
RESULTS: Final = ROOT / "docs" / "faults.json"
BEGIN, END = "<!-- faults: `make faults` writes the following part -->", "<!-- end of faults -->"
NEW: Final = "new"
"""The result of a test without a recorded run."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True, order=True)
class Shown:
    """A fault, the promise for it, and the name of the test that shows it, without parameters."""

    fault: str
    promise: str
    test: str


def faults(root: Path = ROOT) -> list[Shown]:
    """The faults of all tests, sorted by their words."""
    shown = [fault for path in sorted((root / "tests").rglob("test_*.py")) for fault in faults_of(path, root)]
    return sorted(shown, key=lambda fault: (fault.fault.lower(), fault.test))


def faults_of(path: Path, root: Path) -> Iterator[Shown]:
    """The faults of a file. A test without a docstring has an empty promise."""
    text = path.read_text(encoding="utf-8")
    if "mark.fault" not in text:
        return
    file = path.relative_to(root).as_posix()
    for names, node in functions(ast.parse(text)):
        promise = first_sentence(ast.get_docstring(node) or "")
        for words in marked(node):
            yield Shown(words, promise, "::".join((file, *names)))


def functions(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], Function]]:
    """Functions, classes and their methods, with their names."""
    for node in tree.body:
        if isinstance(node, Function):
            yield (node.name,), node
            if isinstance(node, ast.ClassDef):
                yield from (((node.name, inner.name), inner) for inner in node.body if isinstance(inner, Function))


def marked(node: Function) -> Iterator[str]:
    """The words of a test's marks."""
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            yield str(ast.literal_eval(mark.args[0]))


def first_sentence(docstring: str) -> str:
    """The first sentence, on one line, without its full stop."""
    line = " ".join(docstring.split())
    return re.split(r"(?<!\be\.g)(?<!\bi\.e)\.(?=\s|$)", line, maxsplit=1)[0]


def recorded_faults() -> dict[str, Any]:
    """Commit, date, and results by test; empty before the first record."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def fault_table(shown: list[Shown], record: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    results: Mapping[str, str] = record.get("results", {})
    run = f"commit `{record['commit']}`, {record['date']}" if record else "none yet"
    lines = [f"Last recorded run of `.ci/run`: {run}.", "", "| fault | promise | test | result |", "|---|---|---|---|"]
    for fault in shown:
        cells = (fault.fault, fault.promise, f"`{fault.test}`", results.get(fault.test, NEW))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_part(text: str, inner: str, begin: str = BEGIN, end: str = END) -> str:
    """The document with `inner` between the two comments."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{inner}\n\n{end}{after}"


def commit_and_date() -> tuple[str, str]:
    """The commit and date for a run that is recorded now."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return commit, datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).date().isoformat()


def without_results(text: str) -> list[str]:
    """The rows of the table in a document, without their last cells."""
    inside = text.partition(BEGIN)[2].partition(END)[0]
    return [line.rsplit(" | ", 1)[0] for line in inside.splitlines() if line.startswith("| ")]


def record_of(outcomes: Mapping[str, str], shown: list[Shown], commit: str, date: str) -> dict[str, Any]:
    """The record of a run. A class has the result of its tests."""
    results = {
        fault.test: result
        for fault in shown
        for name, result in sorted(outcomes.items())
        if name == fault.test or name.startswith(f"{fault.test}::")
    }
    return {"commit": commit, "date": date, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="OUTCOMES")
    outcomes = parser.parse_args().record
    shown = faults()
    if outcomes is not None:
        record = record_of(json.loads(outcomes.read_text(encoding="utf-8")), shown, *commit_and_date())
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_part(text, fault_table(shown, recorded_faults())), encoding="utf-8")


if __name__ == "__main__":
    main()
