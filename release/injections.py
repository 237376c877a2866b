"""The table of docs/brokers.md on requests that arrive late, twice or never: their number and outcome by release of
Kafka. docs/injections.json has the counts by version and combination.

    make injections KAFKA="4.2.2 4.4.0"         inject
    python -m release.injections STATE [OFF]    the counts of a state file, and of a run `--without-rule`; the table
    python -m release.injections                the table alone
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from release.brokers import DOCUMENT
from release.faults import ROOT, with_part
from tests.injections.combinations import MANY, Combination

RESULTS: Final = ROOT / "docs" / "injections.json"
BEGIN = "<!-- injections: `python -m release.injections` writes the following part -->"
END = "<!-- end of injections -->"

OFF: Final = " without the rule"
Counts = Mapping[str, Mapping[str, Any]]
"""The counts of a version by combination: see `Result` in tests/injections/piece.py."""


def group_of(one: Combination) -> str:
    """The row of a combination."""
    return f"{one.api} {one.fault}" if one in MANY else f"others {one.fault}"


def injection_table(by_version: Mapping[str, Counts]) -> str:
    """The table in Markdown: a row for each version and group."""
    heading = "| Kafka | request and fault | combinations | injected | answers | SIGKILL | lost, doubled, early | run |"
    lines = [heading, "|---|---|---|---|---|---|---|---|"]
    groups = dict.fromkeys(map(group_of, Combination.all()))
    for version, counts in sorted(by_version.items()):
        for group in groups:
            cells = row_of(group, counts, is_off=version.endswith(OFF))
            lines += [f"| {version} | {' | '.join(cells)} |"] if cells else []
    return "\n".join(lines)


def row_of(group: str, counts: Counts, *, is_off: bool = False) -> list[str]:
    """The cells of a group; empty without injections. `is_off`: without the rule, a few injections are enough."""
    combinations = [one for one in Combination.all() if group_of(one) == group]
    results = [counts[str(one)] for one in combinations if str(one) in counts]
    if not results:
        return []
    answers, runs = Counter[str](), Counter[str]()
    for result in results:
        answers.update(result["answers"])
        runs.update(result["runs"])
    total = {name: sum(one[name] for one in results) for name in ("injected", "kills", "lost", "doubled", "early")}
    wanted = sum(one.wanted for one in combinations)
    return [
        group,
        f"{len(results)} of {len(combinations)}",
        f"{total['injected']:,}" + (f" of {wanted:,}" if total["injected"] < wanted and not is_off else ""),
        ", ".join(f"{answer} {count:,}" for answer, count in answers.most_common()),
        f"{total['kills']:,}",
        f"{total['lost']}, {total['doubled']}, {total['early']}",
        "; ".join(f"{run}: {count:,}" for run, count in runs.items()) if len(runs) > 1 else next(iter(runs), ""),
    ]


def recorded_injections() -> dict[str, Counts]:
    """The counts by version; empty before the first record."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, nargs="?", metavar="STATE")
    parser.add_argument("off", type=Path, nargs="?", metavar="OFF")
    options = parser.parse_args()
    if options.state is not None:
        counts = json.loads(options.state.read_text(encoding="utf-8"))
        if options.off is not None:
            off = json.loads(options.off.read_text(encoding="utf-8"))
            counts |= {f"{version}{OFF}": of_version for version, of_version in off.items()}
        RESULTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_part(text, injection_table(recorded_injections()), BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
