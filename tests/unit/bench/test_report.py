"""Percentiles by window, comparisons in turns, and ratios to the calibration."""

from __future__ import annotations

import numpy as np

from bench.report import Comparison, Report, by_window, spread


def comparison(figure: str, bridge: tuple[float, ...], relay: tuple[float, ...]) -> Comparison:
    """A comparison in ms."""
    return Comparison(scenario="1,000/s", figure=figure, unit="ms", bridge=bridge, peer=relay)


def test_each_message_has_the_same_weight() -> None:
    """A late batch of many messages counts as many, and a window has no messages of its end."""
    at, late_ms = np.array([0] * 10 + [1] * 990 + [2]), np.array([1] * 10 + [50] * 990 + [900])
    figures = by_window(["both", "0", "2", "last", "2", "3", "none", "7", "9"], at, late_ms)
    assert (figures["both"]["p50"], figures["both"]["max"]) == (50, 50)
    assert figures["last"]["p99"] == 900
    assert figures["none"] == {}


def test_a_ratio_belongs_to_one_turn() -> None:
    """The median of the turns' ratios, with their spread: not the ratio of medians."""
    late = comparison("late p99", (10, 90, 40), (10, 30, 80))
    assert list(late.ratios) == [1, 3, 0.5]
    assert spread(late.ratios, 2) == "1.00 (0.50 to 3.00)"
    assert spread((7.0,)) == "7.0"
    assert comparison("CPU", (1, 4), (0, 2)).ratios[0] == 2, "nothing is measured against zero"


def test_a_run_ends_with_ratios_to_its_calibration() -> None:
    """A figure without its counterpart, because the run had no calibration, has no ratio."""
    report = Report(calibration={"CPU": 8.0})
    report.against("costs", "CPU", 20.0, "CPU")
    report.against("costs", "late p99", 50.0, "late p99")
    assert report.ratios() == [("costs", "CPU", 2.5, "CPU")]
