"""The fault table of docs/guarantees.md is that of the tests; release/faults.py makes it."""

from __future__ import annotations

from release.faults import DOCUMENT, fault_table, faults, with_part, without_results


def test_the_table_names_each_marked_test() -> None:
    """With its fault and its promise, in the words of the source; results may be older."""
    text = DOCUMENT.read_text(encoding="utf-8")
    made = with_part(text, fault_table(faults(), {}))
    assert without_results(text) == without_results(made), "run make faults"
    assert len(without_results(text)) > 20


def test_each_fault_has_a_promise() -> None:
    """The first sentence of the docstring."""
    assert not [each.test for each in faults() if not each.promise]
