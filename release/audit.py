"""`make audit`: known vulnerabilities of the image's contents.

`pip-audit` looks up the Python packages, and `osv-scanner`, if on the PATH, the jars and Debian packages of
dist/sbom.json. Exit status: 0 without vulnerabilities, 1 with some, 2 after an incomplete look-up, which proves
nothing. With `--lenient` an incomplete look-up is a warning: a change must not fail because a service is down.
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
"""Exit status with vulnerabilities, here and of osv-scanner, which has others for failures."""
UNKNOWN: Final = 2
TIMEOUT_S: Final = 120


@dataclass(slots=True)
class AuditReport:
    """Sentences about vulnerabilities, and about incomplete look-ups."""

    vulnerable: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def status(self, *, lenient: bool) -> int:
        """The exit status."""
        return FOUND if self.vulnerable else UNKNOWN if self.unknown and not lenient else 0


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; a missing or hanging program gets the status 127."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))


def last_line(text: str) -> str:
    """The last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1]


def read_pip_audit(ran: subprocess.CompletedProcess[str], report: AuditReport) -> None:
    """Read `pip-audit --format json`. Its status is 1 for findings and for failures; only its output tells them
    apart."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
    except (ValueError, LookupError):
        report.unknown.append(f"Python packages: {last_line(ran.stderr)}")
        return
    for package in dependencies:
        ids = ", ".join(vulnerability["id"] for vulnerability in package.get("vulns", []))
        if ids:
            report.vulnerable.append(f"{package['name']} {package['version']}: {ids}")
    skipped = [package["name"] for package in dependencies if "skip_reason" in package]
    if skipped:
        report.unknown.append(
            f"{len(skipped)} of {len(dependencies)} Python packages: no advisories for {', '.join(skipped[:3])}..."
        )


def read_osv_scanner(ran: subprocess.CompletedProcess[str], report: AuditReport) -> None:
    """Read `osv-scanner --format json`: status 0 without findings, 1 with some, others for failures."""
    if ran.returncode not in (0, FOUND):
        report.unknown.append(f"jars and Debian packages: {last_line(ran.stderr)}")
        return
    for result in json.loads(ran.stdout)["results"]:
        for entry in result["packages"]:
            ids = ", ".join(vulnerability["id"] for vulnerability in entry["vulnerabilities"])
            report.vulnerable.append(f"{entry['package']['name']} {entry['package']['version']}: {ids}")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release.audit", description=__doc__)
    parser.add_argument("--uv", default="uv", help="the program that fetches pip-audit")
    parser.add_argument("--lock", default="requirements.runtime.lock")
    parser.add_argument("--sbom", default="dist/sbom.json")
    parser.add_argument("--lenient", action="store_true", help="an incomplete look-up is a warning")
    arguments = parser.parse_args()
    report = AuditReport()
    pip_audit = [arguments.uv, "tool", "run", "--from", "pip-audit==2.10.1", "pip-audit"]
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    read_pip_audit(run_command([*pip_audit, *options, "--requirement", arguments.lock]), report)
    if shutil.which("osv-scanner"):
        scan = ["osv-scanner", "scan", "--format", "json", "--sbom", arguments.sbom]
        read_osv_scanner(run_command(scan), report)
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
