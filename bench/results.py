"""Results: a run of `make bench` as two files in bench/results, and the table of README made from all of them.

    make bench BENCH_ARGS="--only against-relay --save against-relay"
    .venv/bin/python -m bench.results           README's table anew

A file's name has the run's name, the machine and the commit; a commit with changes is marked as such.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import confluent_kafka
import psutil

from bench.against_relay import ARRIVED, CPU, HALF_MINUTE, SETTLED, STAMPED, START, WINDOWS
from bench.calibration import LOOP
from bench.report import Report, spread
from dev.broker.embedded import kafka_version
from timerstore.clock import SystemClock

ROOT: Final = Path(__file__).parents[1]
DIRECTORY: Final = ROOT / "bench" / "results"
README: Final = ROOT / "README.md"
BEGIN, END = "<!-- results: `python -m bench.results` writes the following part -->", "<!-- end of results -->"
SHOWN: Final = "against-relay"
"""The name of the runs that README shows."""
ROWS: Final = {
    f"{STAMPED} p99 {HALF_MINUTE}": "late in the first half minute, p99",
    f"{STAMPED} p99 {SETTLED}": "late, settled, p99",
    f"{ARRIVED} p99 {SETTLED}": "late at a `read_committed` consumer, settled, p99",
    f"{CPU} {START}": "CPU at the start, with Spark's start",
    f"{CPU} {SETTLED}": "CPU, settled",
}
"""The figures in README, with its words."""
LIBRARIES: Final = ("confluent-kafka", "numpy", "pyarrow", "pyspark")

Result = Mapping[str, Any]


def save(report: Report, name: str, directory: Path = DIRECTORY) -> Path:
    """Write both files, and README's table if they are in its directory; returns the path of the JSON."""
    result = result_of(report, name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{slug(result['machine'])}-{result['commit']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(document(result), encoding="utf-8")
    if directory == DIRECTORY:
        write_table()
    return path


def result_of(report: Report, name: str) -> Result:
    """A run as plain data."""
    return {
        "name": name,
        "measured_at": datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).isoformat(timespec="minutes"),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "calibration": report.calibration,
        "figures": [dict(zip(("scenario", "figure", "value", "bar"), line, strict=True)) for line in report.lines],
        "comparisons": [asdict(one) | {"ratios": one.ratios} for one in report.comparisons],
        "ratios": [
            dict(zip(("scenario", "figure", "ratio", "calibrated"), ratio, strict=True)) for ratio in report.ratios()
        ],
    }


def machine() -> dict[str, Any]:
    """Processor, cores and memory; no name."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory_gib = round(psutil.virtual_memory().total / (1 << 30))
    return {"processor": found[1] if found else os.uname().machine, "cores": os.cpu_count(), "memory_gib": memory_gib}


def slug(known: Mapping[str, Any]) -> str:
    """A machine in a file's name."""
    words = re.sub(r"\((?:r|tm)\)|\b(?:cpu|processor)\b|@.*", "", str(known["processor"]), flags=re.IGNORECASE)
    return f"{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}-{known['cores']}"


def versions() -> dict[str, str]:
    """Interpreter, JDK, broker, libraries."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    lines = subprocess.run([java or "java", "-version"], capture_output=True, text=True, check=True).stderr.splitlines()
    return {
        "Python": sys.version.split()[0],
        "JDK": lines[1].strip(),
        "Kafka": kafka_version(),
        "librdkafka": confluent_kafka.libversion()[0],
        **{name: version(name) for name in LIBRARIES},
    }


def commit() -> str:
    """The commit in short, with a mark if other files than results differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!README.md")
    return _git("rev-parse", "--short=8", "HEAD") + ("-changed" if changed else "")


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def document(result: Result) -> str:
    """A run for readers."""
    known, used = result["machine"], ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    size = f"{known['processor']}, {known['cores']} cores, {known['memory_gib']} GiB"
    run = f"Commit {result['commit']}, {result['measured_at']}; `{result['command']}`."
    lines = [f"# {result['name']}", "", f"{run} {size}; {used}."]
    lines += _table("Calibration", ("figure", "here"), ((n, f"{v:,.2f}") for n, v in result["calibration"].items()))
    compared = (
        (
            *(one[name] for name in ("scenario", "figure", "unit")),
            *(spread(one[name], 2 if name == "ratios" else 1) for name in ("bridge", "peer", "ratios")),
        )
        for one in result["comparisons"]
    )
    columns = ("scenario", "figure", "unit", "bridge", "peer", "ratio")
    lines += _table("Bridge and peer: medians, with the spread of the turns", columns, compared)
    figures = ((one["scenario"], one["figure"], one["value"], one["bar"]) for one in result["figures"])
    lines += _table("Figures", ("scenario", "figure", "here", "bar"), figures)
    ratios = ((one["scenario"], one["figure"], f"{one['ratio']:.2f}", one["calibrated"]) for one in result["ratios"])
    lines += _table("Ratios to the calibration", ("scenario", "figure", "ratio", "to"), ratios)
    return "\n".join(lines) + "\n"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return ["", f"## {title}", "", *head, *body] if body else []


def read_all(directory: Path = DIRECTORY) -> list[Result]:
    """All runs with the name that README shows: the newest of each machine, the fastest machine first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    shown = sorted((one for one in found if one["name"] == SHOWN), key=lambda one: str(one["measured_at"]))
    newest = {slug(one["machine"]): one for one in shown}
    return sorted(newest.values(), key=lambda one: float(one["calibration"][LOOP]))


def table_of(results: Sequence[Result]) -> str:
    """README's table: the best and the worst machine. Empty without a run."""
    if not results:
        return ""
    ends = results[:1] if len(results) == 1 else [results[0], results[-1]]
    heads = [f"{one['machine']['processor']}, {one['machine']['cores']} cores" for one in ends]
    seconds = [next((line["value"] for line in one["figures"] if line["figure"] == WINDOWS), "-") for one in ends]
    lines = [
        f"| {' | '.join(['1,000/s, delays of 1 to 5 s: bridge, relay, ratio', *heads])} |",
        f"|{'---|' * (1 + len(ends))}",
        f"| {' | '.join([WINDOWS, *seconds])} |",
    ]
    for figure, words in ROWS.items():
        lines.append(f"| {' | '.join([words, *(_cell(one, figure) for one in ends)])} |")
    return "\n".join(lines) + "\n"


def _cell(result: Result, figure: str) -> str:
    for one in result["comparisons"]:
        if one["figure"] == figure:
            unit = one["unit"].partition(" ")[0]
            bridge, peer = (f"{median(one[name]):,.0f} {unit}" for name in ("bridge", "peer"))
            return f"{bridge}, {peer}, {spread(one['ratios'], 1)}"
    return "-"


def with_table(text: str, results: Sequence[Result]) -> str:
    """A document with the table between its marks."""
    head, _, rest = text.partition(f"{BEGIN}\n")
    _, _, tail = rest.partition(END)
    table = table_of(results)
    return f"{head}{BEGIN}\n{f'{chr(10)}{table}{chr(10)}' if table else ''}{END}{tail}"


def write_table() -> None:
    """Write README's table."""
    README.write_text(with_table(README.read_text(encoding="utf-8"), read_all()), encoding="utf-8")


if __name__ == "__main__":
    write_table()
