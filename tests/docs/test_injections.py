"""The table of docs/brokers.md on injections is that of the recorded counts; release/injections.py makes it."""

from __future__ import annotations

from typing import Any

from release.brokers import DOCUMENT
from release.faults import with_part
from release.injections import BEGIN, END, injection_table, recorded_injections, row_of
from tests.injections.combinations import MANY, Combination


def test_the_table_is_that_of_the_counts() -> None:
    """And each combination that was counted is one that is injected."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_part(text, injection_table(recorded_injections()), BEGIN, END), (
        "run python -m release.injections"
    )
    known = set(map(str, Combination.all()))
    assert not [name for counts in recorded_injections().values() for name in counts if name not in known]


def test_a_row_tells_what_is_missing_and_what_went_wrong() -> None:
    """A row never looks better than its runs were."""
    one = MANY[0]
    counts: dict[str, Any] = {"injected": 900, "kills": 90, "lost": 0, "doubled": 2, "early": 1}
    counts |= {"answers": {"INVALID_PRODUCER_EPOCH": 899, "taken": 1}, "runs": {"`a`, d": 300, "`b`, d": 600}}
    [group, combinations, injected, answers, kills, wrong, run] = row_of(f"{one.api} {one.fault}", {str(one): counts})
    assert (group, combinations, injected) == ("END_TXN late", "1 of 1", "900 of 1,000")
    assert (answers, kills, wrong) == ("INVALID_PRODUCER_EPOCH 899, taken 1", "90", "0, 2, 1")
    assert run == "`a`, d: 300; `b`, d: 600"
    assert row_of("others late", {str(one): counts}) == []
    assert row_of(group, {str(one): counts}, is_off=True)[2] == "900"
