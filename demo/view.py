"""The demo's output during the run and at its end: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dev.harness.ledger import Account, Balance, LatenessSummary

EVENTS_SHOWN: Final = 8
PLAIN_INTERVAL_S: Final = 2.0
SECONDS_FROM_MS: Final = 10_000


class DemoView:
    """Progress and events. `update` may be called at any rate."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._events: list[str] = []
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._printed_s = -PLAIN_INTERVAL_S

    def event(self, elapsed_s: float, text: str) -> None:
        """Show an event on its own line."""
        line = f"{elapsed_s:6.1f} s  {text}"
        self._events.append(line)
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)

    def update(self, elapsed_s: float, phase: str, accounts: Sequence[Account]) -> None:
        """Show the present state; the last of `accounts` is the sum of all topics."""
        if self._live is not None:
            self._live.update(self._picture(elapsed_s, phase, accounts))
        elif elapsed_s - self._printed_s >= PLAIN_INTERVAL_S:
            self._printed_s = elapsed_s
            everything = accounts[-1]
            late = everything.lateness
            line = f"{elapsed_s:6.1f} s  {phase}"
            if everything.sent:
                line += f": sent {everything.sent}, pending {everything.pending}, delivered {everything.delivered}"
            if everything.delivered:
                line += f", late p50 {_duration(late.p50_ms)}, p99 {_duration(late.p99_ms)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _picture(self, elapsed_s: float, phase: str, accounts: Sequence[Account]) -> RenderableType:
        bar = ProgressBar(total=self._total, completed=accounts[-1].delivered, width=60)
        events = Text("\n".join(self._events[-EVENTS_SHOWN:]), style="dim")
        title = f"[bold]delay bridge[/]  {elapsed_s:.0f} s  [cyan]{phase}[/]"
        return Panel(Group(bar, accounts_table(accounts), events), title=title, title_align="left")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            # The live view is gone: print the events above the summary.
            for line in self._events:
                self._console.print(line, highlight=False, soft_wrap=True)


def accounts_table(accounts: Sequence[Account]) -> Table:
    """A line for each topic, and a last line for all."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("topic")
    for name in ("sent", "pending", "delivered", "late p50", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for account in accounts:
        counts = (account.sent, account.pending, account.delivered)
        # Without the common prefix of the run's topics there is more room for the numbers.
        table.add_row(
            account.topic.rsplit("-", 1)[-1], *(f"{count:,}" for count in counts), *_durations(account.lateness)
        )
    return table


def summary(balance: Balance, lateness: LatenessSummary, around: Mapping[str, LatenessSummary]) -> RenderableType:
    """The summary: the counts, and the lateness of all messages and of those around the kill."""
    counts = Table(title="Summary", title_justify="left", box=None, pad_edge=False, padding=(0, 2), show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    counts.add_row("sent", f"{balance.sent:,}")
    counts.add_row("delivered", f"{balance.delivered:,}")
    bad = {"lost": len(balance.lost), "duplicated": len(balance.doubled), "early": len(balance.early)}
    # Rare kinds of failure appear only if they happened.
    bad |= {name: len(which) for name, which in (("altered", balance.altered), ("unknown", balance.unknown)) if which}
    for name, count in bad.items():
        counts.add_row(name, Text(f"{count:,}", style="bold red" if count else "green"))

    late = Table(title="Lateness", title_justify="left", box=None, pad_edge=False, padding=(0, 2))
    late.add_column("")
    for name in ("messages", "p50", "p99", "max"):
        late.add_column(name, justify="right", no_wrap=True)
    for name, part in {"all": lateness, **around}.items():
        late.add_row(name, f"{part.count:,}", *_durations(part))
    return Group("", counts, "", late, "")


def _durations(lateness: LatenessSummary) -> tuple[str, str, str]:
    if not lateness.count:
        return ("-", "-", "-")
    return (_duration(lateness.p50_ms), _duration(lateness.p99_ms), _duration(lateness.max_ms))


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < SECONDS_FROM_MS else f"{ms / 1000:.1f} s"
