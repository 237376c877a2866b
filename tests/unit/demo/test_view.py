"""What the demo prints."""

from __future__ import annotations

import io

from rich.console import Console

from demo.view import DemoView, summary
from dev.harness.kafka import ReadRecord
from dev.harness.ledger import Expected, Ledger


def books() -> Ledger:
    """Two messages, one of them delivered 7 ms late."""
    ledger = Ledger()
    for number in range(2):
        ledger.planned(number, Expected(topic="orders", key=None, value=b""))
        ledger.acknowledged(number, 1_000)
    headers = (("n", b"0"), ("delay-due", b"1000"), ("delay-origin", b"delay/0/0"))
    ledger.arrived(
        ReadRecord(
            topic="orders",
            partition=0,
            offset=0,
            timestamp_ms=1_007,
            timestamp_type=2,
            key=None,
            value=b"",
            headers=headers,
        )
    )
    return ledger


def test_without_a_terminal_there_are_plain_lines() -> None:
    """No control characters, an event a line, and progress at most every two seconds."""
    output = io.StringIO()
    with DemoView(Console(file=output, width=120), 2) as view:
        view.event(0.5, "ready")
        for elapsed_s in (1.0, 1.5, 3.5):
            view.update(elapsed_s, "delivering", books().accounts())
    assert "\x1b" not in output.getvalue()
    assert output.getvalue().splitlines() == [
        "   0.5 s  ready",
        "   1.0 s  delivering: sent 2, pending 1, delivered 1, late p50 7 ms, p99 7 ms",
        "   3.5 s  delivering: sent 2, pending 1, delivered 1, late p50 7 ms, p99 7 ms",
    ]


def test_on_a_terminal_the_picture_is_live_and_the_events_stay() -> None:
    """The table names topics and counts; after the picture is gone the events are printed."""
    output = io.StringIO()
    with DemoView(Console(file=output, width=120, force_terminal=True), 2) as view:
        view.event(0.5, "SIGKILL")
        view.update(1.0, "delivering", books().accounts())
    assert "orders" in output.getvalue()
    assert output.getvalue().rstrip().endswith("SIGKILL")


def test_the_summary_has_every_count() -> None:
    """Sent, delivered, lost, duplicated, early, and the percentiles."""
    output = io.StringIO()
    ledger = books()
    accounts = ledger.accounts()
    Console(file=output, width=120).print(
        summary(ledger.balance(), accounts[-1].lateness, {"before the kill": accounts[0].lateness})
    )
    text = output.getvalue()
    words = {" ".join(line.split()) for line in text.splitlines()}
    assert {"sent 2", "delivered 1", "lost 1", "duplicated 0", "early 0"} <= words
    assert {"all 1 7 ms 7 ms 7 ms", "before the kill 1 7 ms 7 ms 7 ms"} <= words
