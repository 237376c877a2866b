"""What is known of the delay topics' logs, on its way into the committed states: below which offset records that are
not finished are gone, and under which leaders was read (wire/committed_state.py, `g` and `e`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.wire.committed_state import CommittedState
from timerstore.rows.sources import SourceName

States = Mapping[SourceName, CommittedState]
Under = tuple[int, int]
"""An offset, and the epoch of a leader."""


class LogNotes:
    """Noted by one thread, committed by another: with the next transaction, and one is made for it where it is news.
    That more was read than is committed is none."""

    def __init__(self) -> None:
        self._gone_below: Mapping[SourceName, int] = {}
        self._read_under: Mapping[SourceName, Under] = {}
        self._known: Mapping[SourceName, Under] = self._read_under
        """What was noted when it was last found to be no news."""

    def note_gone(self, below: Mapping[SourceName, int]) -> None:
        """By partition (0: nothing is gone any more)."""
        self._gone_below = dict(below)

    def note_read(self, under: Mapping[SourceName, Under]) -> None:
        """By partition: everything below an offset was read under leaders of no later epoch."""
        self._read_under = dict(under)

    def is_news(self, states: States) -> bool:
        """Whether the committed states say something else."""
        if any(name in states and states[name].gone_below != at for name, at in self._gone_below.items()):
            return True
        noted = self._read_under
        if noted is self._known:
            return False
        if any(name in states and _is_news(states[name], under) for name, under in noted.items()):
            return True
        self._known = noted
        return False

    def within(self, after: States, states: States) -> dict[SourceName, CommittedState]:
        """The states `after` a transaction, with what is news in the committed `states`."""
        result, noted = dict(after), self._read_under
        for name, at in self._gone_below.items():
            if name in states and states[name].gone_below != at:
                result[name] = replace(result.get(name, states[name]), gone_below=at)
        for name, under in noted.items():
            if name in result or (name in states and _is_news(states[name], under)):
                result[name] = replace(result.get(name, states[name]), read_under=under)
        return result


def _is_news(state: CommittedState, under: Under) -> bool:
    """Whether the state tells less of what is committed, or of an earlier leader: a start would search the log again
    for records of the later one."""
    told, epoch = state.read_under or (0, under[1])
    return told < min(state.offset, under[0]) or (told <= under[0] and epoch < under[1])
