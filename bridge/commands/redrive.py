"""`delay-bridge redrive`: what is said of dead letters that go back (bridge/dead_letters/redrive.py)."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.letters import Report


def lines(report: Report, *, execute: bool) -> Iterator[str]:
    """The report for people, one line for each reason and target."""
    for (reason, target), count in sorted(report.back.items()):
        yield f"{'put back' if execute else 'goes back':12}{count:>8}  {reason}  {target}"
    for (reason, target), count in sorted(report.broken.items()):
        yield f"{'stays':12}{count:>8}  {reason}  {target}  (needs --due now or --set-header)"
    others = {"not chosen": report.left, "back before": report.before, "no letters": report.foreign}
    for name, count in others.items():
        if count:
            yield f"{name:12}{count:>8}"
    total = sum(report.back.values())
    letters = f"{total} dead letter{'s' * (total != 1)}"
    yield f"{letters} put back" if execute else f"{letters} would go back: --execute does it"
