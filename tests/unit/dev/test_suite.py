"""How the suite is run: its order, its examples, its skips, and the table of faults that is made from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from release.faults import Shown, fault_table, faults_of, first_sentence, record_of, with_part, without_results
from tests import profiles
from tests.distribution import DURATIONS, longest_first, unit_of
from tests.outcomes import Outcomes
from tests.paths import ROOT


def item(nodeid: str) -> Any:
    return SimpleNamespace(nodeid=nodeid)


def test_the_longest_unit_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with a duration of its own is a unit of its own; others are their files'; within one the order stays."""
    monkeypatch.setitem(DURATIONS, "tests/a.py", 5.0)
    monkeypatch.setitem(DURATIONS, "tests/b.py::long", 9.0)
    monkeypatch.setitem(DURATIONS, "tests/folder/", 3.0)
    assert unit_of("tests/folder/d.py::x") == unit_of("tests/folder/e.py::y[1]") == "tests/folder/"
    tests = ["tests/c.py::x", "tests/b.py::short", "tests/a.py::x[b-1]", "tests/a.py::y", "tests/b.py::long[1::2]"]
    ordered = [each.nodeid for each in longest_first([item(test) for test in tests])]
    assert ordered == [tests[4], tests[2], tests[3], tests[0], tests[1]]
    assert [unit_of(test) for test in tests] == [
        *("tests/c.py", "tests/b.py", "tests/a.py", "tests/a.py", "tests/b.py::long"),
    ]


def test_durations_name_what_there_is() -> None:
    """A renamed test would run where its file does, and late."""
    for unit in DURATIONS:
        file, _, name = unit.partition("::")
        assert (ROOT / file).exists(), unit
        assert not name or f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), unit


def test_examples_are_random_in_the_night_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of `make test` try the same; those of the night do not, and their seed is told."""
    assert hypothesis.settings.get_profile("tests").derandomize is not profiles.IS_NIGHTLY
    monkeypatch.delenv(profiles.SEED, raising=False)
    monkeypatch.setattr(profiles, "IS_NIGHTLY", False)
    assert profiles.seed() == profiles.SEED_OF_DAY
    monkeypatch.delenv(profiles.SEED)
    monkeypatch.setattr(profiles, "IS_NIGHTLY", True)
    first = profiles.seed()
    assert profiles.seed() == first, "one for all of a session"
    monkeypatch.delenv(profiles.SEED)
    assert profiles.seed() != first


def report(nodeid: str, outcome: str, when: str = "call", longrepr: Any = None) -> Any:
    return SimpleNamespace(
        nodeid=nodeid,
        when=when,
        outcome=outcome,
        passed=outcome == "passed",
        skipped=outcome == "skipped",
        longrepr=longrepr,
    )


def test_a_skip_without_leave_fails_the_run(tmp_path: Path) -> None:
    """The list has reasons; a test that is skipped for another one is told, and the run has failed."""
    allowed = tmp_path / "allowed"
    allowed.write_text("# what no machine has\nno container engine\n")
    outcomes = Outcomes(None, allowed)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    outcomes.pytest_runtest_logreport(
        report("t.py::a", "skipped", "setup", ("t.py", 1, "Skipped: no container engine answers"))
    )
    outcomes.pytest_sessionfinish(session)
    assert (session.exitstatus, outcomes.unexpected()) == (pytest.ExitCode.OK, {})
    outcomes.pytest_runtest_logreport(report("t.py::b", "skipped", "setup", ("t.py", 1, "Skipped: no helm")))
    outcomes.pytest_sessionfinish(session)
    assert (session.exitstatus, outcomes.unexpected()) == (pytest.ExitCode.TESTS_FAILED, {"t.py::b": "no helm"})


def test_a_test_is_as_bad_as_its_worst_parameter(tmp_path: Path) -> None:
    """And one whose set-up or end fails has failed."""
    file = tmp_path / "new" / "outcomes.json"
    outcomes = Outcomes(file, None)
    for each in (
        *(report("t.py::a[1]", "passed"), report("t.py::a[2]", "failed"), report("t.py::a[3]", "passed")),
        *(report("t.py::b", "passed", "setup"), report("t.py::b", "passed"), report("t.py::b", "failed", "teardown")),
        *(report("t.py::c", "passed", "setup"), report("t.py::c", "passed"), report("t.py::c", "passed", "teardown")),
    ):
        outcomes.pytest_runtest_logreport(each)
    outcomes.pytest_sessionfinish(SimpleNamespace(exitstatus=pytest.ExitCode.TESTS_FAILED))  # type: ignore[arg-type]
    assert json.loads(file.read_text()) == {"t.py::a": "failed", "t.py::b": "failed", "t.py::c": "passed"}


SOURCE = '''
@pytest.mark.fault("a | kill")
@pytest.mark.timeout(5)
def test_one() -> None:
    """Each once, e.g. two
    of them. More.
    """

def test_other() -> None:
    """No."""

@pytest.mark.fault("all of it")
class TestMachine:
    """Whatever fails."""
'''


def test_faults_are_read_from_marks_and_docstrings(tmp_path: Path) -> None:
    """The fault is the mark's, the promise the first sentence; results are of tests, or of all tests of a class."""
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_x.py"
    file.write_text(SOURCE)
    shown = list(faults_of(file, tmp_path))
    one, machine = "tests/test_x.py::test_one", "tests/test_x.py::TestMachine"
    assert shown == [
        Shown("a | kill", "Each once, e.g. two of them", one),
        Shown("all of it", "Whatever fails", machine),
    ]
    record = record_of({one: "passed", f"{machine}::runTest": "failed", "other": "passed"}, shown, "abc", "2026-01-31")
    assert record["results"] == {one: "passed", machine: "failed"}
    document = with_part("before\n" + with_part("", "old") + "after\n", fault_table(shown, record))
    assert document.startswith("before\n") and document.endswith("after\n") and "old" not in document
    assert "commit `abc`, 2026-01-31" in document
    assert f"| a \\| kill | Each once, e.g. two of them | `{one}` | passed |" in document
    assert without_results(document) == without_results(with_part("", fault_table(shown, {})))


@pytest.mark.parametrize(("text", "first"), [("One. Two.", "One"), ("One", "One"), ("In 0.5 s.\n\nTwo.", "In 0.5 s")])
def test_a_promise_is_the_first_sentence(text: str, first: str) -> None:
    assert first_sentence(text) == first
