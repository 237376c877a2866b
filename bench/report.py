"""The table of measurements, comparisons in turns, and percentiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure of the bridge and of its peer, one value of each for each turn."""

    scenario: str
    figure: str
    unit: str
    bridge: tuple[float, ...]
    peer: tuple[float, ...]
    name: str = "relay"
    """The peer."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """The bridge's value against the peer's in the same turn."""
        return tuple(one / other for one, other in zip(self.bridge, self.peer, strict=True) if other)

    def tell(self) -> str:
        """Medians, with the spread of the turns."""
        return f"{spread(self.bridge)} {self.unit}, {self.name} {spread(self.peer)}, ratio {spread(self.ratios, 2)}"


@dataclass(slots=True)
class Report:
    """Lines of the table: scenario, figure, value, and the value for comparison."""

    lines: list[tuple[str, str, str, str]] = field(default_factory=list)
    calibration: dict[str, float] = field(default_factory=dict)
    """The machine's figures at the beginning of the run."""
    numbers: list[tuple[str, str, float, str]] = field(default_factory=list)
    """Scenario, figure, number, and the figure of the calibration with the same unit."""
    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, scenario: str, figure: str, value: str, compared: str = "") -> None:
        """Add a line, and print it at once."""
        self.lines.append((scenario, figure, value, compared))
        _tell_at_once(f"{scenario}: {figure} {value}  [{compared}]")

    def against(self, scenario: str, figure: str, number: float, calibrated: str) -> None:
        """Take a number's ratio to a figure of the calibration, at the end of the run."""
        self.numbers.append((scenario, figure, number, calibrated))

    def compare(self, comparison: Comparison) -> None:
        """Add a comparison, and print it at once."""
        self.comparisons.append(comparison)
        _tell_at_once(f"{comparison.scenario}: {comparison.figure} {comparison.tell()}")

    def ratios(self) -> list[tuple[str, str, float, str]]:
        """Scenario, figure, ratio, and its figure of the calibration."""
        return [
            (scenario, figure, number / self.calibration[name], name)
            for scenario, figure, number, name in self.numbers
            if self.calibration.get(name)
        ]

    def print(self) -> None:
        """Print the table, with the ratios to the calibration at its end."""
        table = Table(title="delay bridge, measured")
        for column in ("scenario", "figure", "here", "bar (prototype; RocketMQ 5.5)"):
            table.add_column(column)
        for line in self.lines:
            table.add_row(*line)
        for one in self.comparisons:
            table.add_row(one.scenario, one.figure, one.tell(), "")
        for scenario, figure, ratio, name in self.ratios():
            table.add_row(scenario, f"{figure}, against: {name}", f"{ratio:.2f}", "")
        Console(width=150).print(table)


def _tell_at_once(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, with the least and the largest value if there are several."""
    if not values:
        return "-"
    least, middle, most = (f"{value:,.{digits}f}" for value in (min(values), median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def mib(size: int) -> str:
    """A size in MiB."""
    return f"{size / (1 << 20):,.0f} MiB"


def tell(figures: Mapping[str, float]) -> str:
    """Percentiles in ms."""
    return (
        f"{figures['p50']:.0f} / {figures['p99']:.0f} / {figures['p999']:.0f} ms (max {figures['max']:.0f})"
        if figures
        else "nothing came"
    )


def percentiles(values: np.ndarray) -> dict[str, float]:
    """p50, p99, p99.9 and maximum over messages, each with the same weight."""
    if not len(values):
        return {}
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "p999": float(np.percentile(values, 99.9)),
        "max": float(values.max()),
    }


def windows_of(texts: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Name, start and end (exclusive) of each window."""
    for name, start, end in zip(texts[0::3], texts[1::3], texts[2::3], strict=True):
        yield name, int(start), int(end)


def by_window(texts: Sequence[str], at: np.ndarray, values: np.ndarray) -> dict[str, dict[str, float]]:
    """Percentiles of the values whose time (`at`) is in the window, for each window."""
    return {name: percentiles(values[(at >= start) & (at < end)]) for name, start, end in windows_of(texts)}
