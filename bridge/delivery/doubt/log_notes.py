"""Notes on the delay topics' logs, on their way into the committed states: the offset below which unfinished records
are gone, the leaders under which records were read, changed decode epochs, and manifests (wire/committed_state.py: `g`,
`e`, `h`, `m`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState, Manifest

States = Mapping[SourceName, CommittedState]
Under = tuple[int, int]
"""An offset, and a leader's epoch."""


class LogNotes:
    """The notes. One thread makes them; another commits them with the next transaction. News makes that transaction
    due at once. A read beyond the committed offset is no news."""

    def __init__(self) -> None:
        self._gone_below: Mapping[SourceName, int] = {}
        self._read_under: Mapping[SourceName, Under] = {}
        self._known: Mapping[SourceName, Under] = self._read_under
        """The notes at the last look without news."""
        self._changed: States = {}
        self._written: States = self._changed
        """The changed states at the last look, if all of them were committed."""

        self._manifests: Mapping[SourceName, Manifest | None] = {}

    def note_manifests(self, manifests: Mapping[SourceName, Manifest | None]) -> None:
        """Note the newest manifest of partitions on shared storage; None: they have none."""
        self._manifests = {**self._manifests, **manifests}

    def note_gone(self, below: Mapping[SourceName, int]) -> None:
        """Note by partition the offset below which unfinished records are gone; 0: none is gone now."""
        self._gone_below = dict(below)

    def note_read(self, under: Mapping[SourceName, Under]) -> None:
        """Note by partition (offset, epoch): all records below the offset were read under leaders up to this epoch."""
        self._read_under = dict(under)

    def note_plan(self, gone_below: Mapping[SourceName, int], changed: States) -> None:
        """Note a start: `note_gone`, and states with other decode epochs than the committed ones. A quiet partition has
        no transaction of its own, and a later start without its index would take earlier windows for those of pending
        messages."""
        self.note_gone(gone_below)
        self._changed = {**self._changed, **changed}

    def is_news(self, states: States) -> bool:
        """Whether the committed states differ from the notes."""
        changed = self._changed
        if changed is not self._written:
            if any(states.get(name) is state for name, state in changed.items()):
                return True
            if changed.keys() <= states.keys():
                self._written = changed
        if any(name in states and states[name].gone_below != at for name, at in self._gone_below.items()):
            return True
        if any(name in states and states[name].manifest != each for name, each in self._manifests.items()):
            return True
        noted = self._read_under
        if noted is self._known:
            return False
        if any(name in states and _is_news(states[name], under) for name, under in noted.items()):
            return True
        self._known = noted
        return False

    def within(self, after: States, states: States) -> dict[SourceName, CommittedState]:
        """The states `after` a transaction, with the news about the committed `states`."""
        result, noted = dict(after), self._read_under
        result |= {
            n: replace(state) for n, state in self._changed.items() if n not in result and states.get(n) is state
        }
        for name, at in self._gone_below.items():
            if name in states and states[name].gone_below != at:
                result[name] = replace(result.get(name, states[name]), gone_below=at)
        for name, manifest in self._manifests.items():
            if name in states and states[name].manifest != manifest:
                result[name] = replace(result.get(name, states[name]), manifest=manifest)
        for name, under in noted.items():
            if name in result or (name in states and _is_news(states[name], under)):
                state = result.get(name, states[name])
                result[name] = state if state.read_under == under else replace(state, read_under=under)
        return result


def _is_news(state: CommittedState, under: Under) -> bool:
    """Whether the state has a lower offset, within the committed records, or an earlier leader than the note. With such
    a state a start would search the log for records of the later leader again."""
    told, epoch = state.read_under or (0, under[1])
    return told < min(state.offset, under[0]) or (told <= under[0] and epoch < under[1])
