"""What is known of the delay topics' logs, on its way into the committed states: below which offset records that are
not finished are gone, and under which leaders was read (wire/committed_state.py, `g` and `e`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.wire.committed_state import CommittedState
from timerstore.rows.sources import SourceName

States = Mapping[SourceName, CommittedState]


class LogNotes:
    """Noted by one thread, committed by another: what is gone at once, what was read with the next transaction."""

    def __init__(self) -> None:
        self._gone_below: Mapping[SourceName, int] = {}
        self._read_under: Mapping[SourceName, tuple[int, int]] = {}

    def note_gone(self, below: Mapping[SourceName, int]) -> None:
        """By partition (0: nothing is gone any more); a transaction is made for it."""
        self._gone_below = dict(below)

    def note_read(self, under: Mapping[SourceName, tuple[int, int]]) -> None:
        """By partition: everything below an offset was read under leaders of no later epoch."""
        self._read_under = dict(under)

    def is_news(self, states: States) -> bool:
        """Whether the committed states say something else of what is gone."""
        return any(name in states and states[name].gone_below != at for name, at in self._gone_below.items())

    def within(self, after: States, states: States) -> dict[SourceName, CommittedState]:
        """The states `after` a transaction, with what is news in the committed `states`."""
        gone = self._gone_below
        news = {name: at for name, at in gone.items() if name in states and states[name].gone_below != at}
        told = {**after, **{name: replace(after.get(name, states[name]), gone_below=at) for name, at in news.items()}}
        return {
            name: state if name not in self._read_under else replace(state, read_under=self._read_under[name])
            for name, state in told.items()
        }
