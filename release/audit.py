"""`make audit`: known vulnerabilities of what the image holds.

Python packages are looked up by `pip-audit`; jars and Debian packages by `osv-scanner`, if it is on the PATH, from
dist/sbom.json. Exit status: 0 none are known, 1 some are, 2 something could not be looked up, which is not the same
as having none. With `--lenient` the last is a warning: a change must not fail because a service is down.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

FOUND: Final = 1
"""Exit status: there are vulnerabilities. Also of osv-scanner, which has others for what went wrong."""
UNKNOWN: Final = 2
TIMEOUT_S: Final = 120


@dataclass(slots=True)
class Report:
    """Sentences: what is vulnerable, and what could not be found out."""

    vulnerable: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def status(self, *, lenient: bool) -> int:
        """The exit status."""
        return FOUND if self.vulnerable else UNKNOWN if self.unknown and not lenient else 0


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run it; a program that is missing or hangs has the status 127."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))


def last_line(text: str) -> str:
    """What a program ended with."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def read_pip_audit(ran: subprocess.CompletedProcess[str], report: Report) -> None:
    """`pip-audit --format json`: its status is 1 for findings and for failures alike, its output tells."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
    except (ValueError, LookupError):
        report.unknown.append(f"Python packages: {last_line(ran.stderr)}")
        return
    for each in dependencies:
        found = ", ".join(vulnerability["id"] for vulnerability in each.get("vulns", []))
        if found:
            report.vulnerable.append(f"{each['name']} {each['version']}: {found}")
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    if skipped:
        report.unknown.append(
            f"{len(skipped)} of {len(dependencies)} Python packages: no advisories for {', '.join(skipped[:3])}..."
        )


def read_osv_scanner(ran: subprocess.CompletedProcess[str], report: Report) -> None:
    """`osv-scanner --format json`: 0 nothing, 1 findings, else it could not tell."""
    if ran.returncode not in (0, FOUND):
        report.unknown.append(f"jars and Debian packages: {last_line(ran.stderr)}")
        return
    for result in json.loads(ran.stdout)["results"]:
        for each in result["packages"]:
            found = ", ".join(vulnerability["id"] for vulnerability in each["vulnerabilities"])
            report.vulnerable.append(f"{each['package']['name']} {each['package']['version']}: {found}")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release.audit", description=__doc__)
    parser.add_argument("--uv", default="uv", help="the program that fetches pip-audit")
    parser.add_argument("--lock", default="requirements.runtime.lock")
    parser.add_argument("--sbom", default="dist/sbom.json")
    parser.add_argument("--lenient", action="store_true", help="what could not be looked up is a warning")
    arguments = parser.parse_args()
    report = Report()
    pip_audit = [arguments.uv, "tool", "run", "--from", "pip-audit==2.10.1", "pip-audit"]
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    read_pip_audit(run([*pip_audit, *options, "--requirement", arguments.lock]), report)
    if shutil.which("osv-scanner"):
        scan = ["osv-scanner", "scan", "--format", "json", "--sbom", arguments.sbom]
        read_osv_scanner(run(scan), report)
    else:
        report.unknown.append("jars and Debian packages: osv-scanner is not on the PATH")
    for sentence in report.vulnerable:
        print(f"vulnerable: {sentence}")
    for sentence in report.unknown:
        print(f"warning: not looked up: {sentence}", file=sys.stderr)
    if not report.vulnerable and not report.unknown:
        print("no known vulnerabilities")
    return report.status(lenient=arguments.lenient)


if __name__ == "__main__":
    sys.exit(main())
