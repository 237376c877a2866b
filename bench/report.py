"""The table of measurements."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    """Lines of the table: scenario, figure, value, and the value for comparison."""

    lines: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, scenario: str, figure: str, value: str, compared: str = "") -> None:
        """Add a line, and print it at once."""
        self.lines.append((scenario, figure, value, compared))
        Console(stderr=True).print(f"{scenario}: {figure} {value}  [{compared}]", highlight=False, markup=False)

    def print(self) -> None:
        """Print the table."""
        table = Table(title="delay bridge, measured")
        for column in ("scenario", "figure", "here", "bar (prototype; RocketMQ 5.5)"):
            table.add_column(column)
        for line in self.lines:
            table.add_row(*line)
        Console(width=150).print(table)


def mib(size: int) -> str:
    """A size in MiB."""
    return f"{size / (1 << 20):,.0f} MiB"


def tell(figures: dict[str, float]) -> str:
    """Percentiles in ms."""
    return (
        f"{figures['p50']:.0f} / {figures['p99']:.0f} / {figures['p999']:.0f} ms (max {figures['max']:.0f})"
        if figures
        else "nothing came"
    )
