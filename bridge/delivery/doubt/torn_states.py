"""The committed states of a transaction that ended unasked, in a file beside the index: they may be in Kafka, without
all of the output.

    step        content                                       a crash before it
    1 note      the states before the transaction, and after  leaves the (O, P) that Kafka holds; before its messages
                                                              are noted (doubts.py), some are repeated
    2 again     the states before it are committed, alone     the next start finds the states after it in Kafka, and
                                                              commits those before it
    3 forget    Kafka holds the states before it              the next start finds other states

So in any case a start goes on from the start of the transaction, and its messages are looked up.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from bridge.delivery.doubt.log_notes import States
from bridge.errors import EnvironmentFailure
from bridge.json_file import JsonFile
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState, decode_metadata

FILE: Final = "states-in-doubt.json"

Told = tuple[int, str]
"""A state in Kafka's form: offset and metadata."""

log = structlog.get_logger("bridge.delivery.doubt.torn_states")


class TornStates:
    """See the module. Any thread."""

    def __init__(self, directory: Path) -> None:
        self._file = JsonFile(directory, FILE, "messages that a transaction has not written may be lost then.")
        self._lock = threading.Lock()
        self._states: Mapping[SourceName, tuple[Told, Told]] | None = None
        """The states before and after it; None: not read yet."""
        self._is_kept = True

    def note(self, before: States, after: States) -> None:
        """A transaction ended unasked: Kafka may hold the states `after` it. Until `forget`, no other transaction has
        output."""
        new = {name: (_told(before[name]), _told(state)) for name, state in after.items() if name in before}
        with self._lock:
            noted = self._known()
            if new.keys() - noted.keys():
                self._change({**new, **noted})

    def forget(self, names: Collection[SourceName]) -> None:
        """Forget partitions with other states in Kafka, or of another instance. Raises EnvironmentFailure for an
        unreadable file."""
        with self._lock:
            noted = self._known()
            if not noted.keys().isdisjoint(names):
                self._change({name: states for name, states in noted.items() if name not in names})

    def taken_back(self, found: Mapping[SourceName, CommittedState | None]) -> dict[SourceName, CommittedState]:
        """The states to commit in place of those that were `found` in Kafka. Raises as `forget`."""
        with self._lock:
            noted = self._known()
        return {
            name: decode_metadata(name, *noted[name][0])
            for name, state in found.items()
            if name in noted and decode_metadata(name, *noted[name][1]).is_written_as(state)
        }

    def _known(self) -> Mapping[SourceName, tuple[Told, Told]]:
        if self._states is None:
            self._states = self._file.read(lambda found: dict(map(_decoded, found["states"]))) or {}
        return self._states

    def keep(self) -> None:
        """Repeat a failed write."""
        with self._lock:
            if not self._is_kept:
                self._change(self._known())

    def _change(self, states: Mapping[SourceName, tuple[Told, Told]]) -> None:
        self._states, was_kept = states, self._is_kept
        try:
            self._file.write({"states": [[name, *each] for name, each in states.items()]})
            self._is_kept = True
        except EnvironmentFailure as failure:
            self._is_kept = False
            if was_kept:
                log.error("states-not-written", code=failure.code, reason=str(failure))


def _told(state: CommittedState) -> Told:
    return state.offset, state.metadata()


def _decoded(told: list[Any]) -> tuple[SourceName, tuple[Told, Told]]:
    (topic, number), (offset, text), (later, its) = told
    return (str(topic), int(number)), ((int(offset), str(text)), (int(later), str(its)))
