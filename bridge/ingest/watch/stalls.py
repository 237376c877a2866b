"""Stalls: partitions without progress, and a JVM that does not answer."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.errors import EnvironmentFailure
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import SourceName


class Laggards:
    """Partitions that are behind, without progress for `patience_s`. Times are arguments; one thread."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[SourceName, tuple[int, float]] = {}

    def look(self, behind: Mapping[SourceName, int], now_s: float) -> list[SourceName]:
        """Those of `behind` (the present offset of each) without progress for that long."""
        seen = self._seen
        self._seen = {
            name: seen[name] if name in seen and seen[name][0] == at else (at, now_s) for name, at in behind.items()
        }
        return [name for name, (_, since_s) in sorted(self._seen.items()) if now_s - since_s >= self._patience_s]


def jvm_stands_still(wait: Wait, waited_s: float) -> EnvironmentFailure:
    """The process must end: Spark's JVM does not come back."""
    return EnvironmentFailure(
        "Spark's Java process stands still",
        hint="It was stopped, swaps, or has no processor. After a restart the bridge continues from the same place.",
        waits_for=wait.waits_for,
        waited_s=round(waited_s),
        code="DB-3055",
    )


def session_missing() -> EnvironmentFailure:
    """The process must end: Spark's JVM has not come up."""
    return EnvironmentFailure(
        "Spark does not come up",
        hint="Check its processors and its memory; the lines above (jvm-output) are the output of its Java process.",
        waited_s=round(Wait.SESSION.s),
        code="DB-3056",
    )
