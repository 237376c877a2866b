"""The outcome of each test, for `.ci/run`: a plugin of pytest.

--outcomes FILE         writes {test: passed, failed or skipped}; a test with parameters is as bad as its worst
--allowed-skips FILE    fails the run if a test is skipped for a reason that none of the file's lines matches
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

WORST_FIRST: Final = ("failed", "skipped", "passed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("delay-bridge")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="write the outcome of each test")
    group.addoption("--allowed-skips", type=Path, metavar="FILE", help="regular expressions, one a line")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            Outcomes(config.getoption("outcomes"), config.getoption("allowed_skips")), "outcomes-of-tests"
        )


class Outcomes:
    """In the process that the others report to."""

    def __init__(self, file: Path | None, allowed: Path | None) -> None:
        self._file = file
        self._allowed = None if allowed is None else expressions(allowed.read_text(encoding="utf-8"))
        self._outcomes: dict[str, str] = {}
        self._skips: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One report for each phase; a test that never came to its call is told of by its setup."""
        if report.when != "call" and report.passed:
            return
        test = report.nodeid.partition("[")[0]
        self._outcomes[test] = worst(self._outcomes.get(test, "passed"), report.outcome)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skips[report.nodeid] = reason(report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skips[report.nodeid] = reason(report.longrepr)

    def unexpected(self) -> dict[str, str]:
        """Skipped tests whose reasons are not on the list."""
        allowed = self._allowed
        if allowed is None:
            return {}
        return {test: why for test, why in self._skips.items() if not any(each.search(why) for each in allowed)}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._outcomes, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        if self.unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        unexpected = self.unexpected()
        if unexpected:
            terminalreporter.section("skipped without leave", red=True)
            for test, why in sorted(unexpected.items()):
                terminalreporter.line(f"{test}: {why}")


def worst(one: str, other: str) -> str:
    """Of two outcomes the worse one."""
    return min(one, other, key=WORST_FIRST.index)


def reason(longrepr: Any) -> str:
    """Of a skip: pytest gives file, line and `Skipped: reason`."""
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")


def expressions(text: str) -> list[re.Pattern[str]]:
    """The file's lines, but for empty ones and comments."""
    return [re.compile(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
