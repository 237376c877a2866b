"""What the delay topics have lost of records that are not finished, on its way into the committed states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.wire.committed_state import CommittedState
from timerstore.rows.sources import SourceName

States = Mapping[SourceName, CommittedState]


class LostRecords:
    """Below which offset, by partition (0: nothing is lost any more). Noted by one thread, committed by another."""

    def __init__(self) -> None:
        self._below: Mapping[SourceName, int] = {}

    def note(self, below: Mapping[SourceName, int]) -> None:
        """It is committed with the next transaction, and one is made for it."""
        self._below = dict(below)

    def is_news(self, states: States) -> bool:
        """Whether the committed states say something else."""
        return any(name in states and states[name].gone_below != at for name, at in self._below.items())

    def within(self, after: States, states: States) -> dict[SourceName, CommittedState]:
        """The states `after` a transaction, with what is news in the committed `states`."""
        news = {name: at for name, at in self._below.items() if name in states and states[name].gone_below != at}
        return {**after, **{name: replace(after.get(name, states[name]), gone_below=at) for name, at in news.items()}}
