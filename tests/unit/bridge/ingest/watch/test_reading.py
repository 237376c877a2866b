"""bridge.ingest.watch.reading: who reads now."""

from __future__ import annotations

from bridge.ingest.watch.reading import Reading
from timerstore.rows.position import Progress


def test_of_a_repeated_cause_only_the_first_changes_the_reader() -> None:
    """A change is logged and acted on once; at first the plain reader reads, which needs nothing but the brokers."""
    reading = Reading()
    changes = [reading.pass_to(query=query) for query in (False, True, True, False)]
    assert changes == [False, True, False, True] and not reading.query_serves


def test_a_log_ends_at_its_committed_offset_or_later() -> None:
    reading = Reading()
    reading.log_ends = {("delay", 0): 7, ("delay", 1): 3}
    committed = {("delay", n): Progress(5) for n in range(3)}
    assert reading.known_ends(committed) == {("delay", 0): 7, ("delay", 1): 5, ("delay", 2): 5}
