"""The search of logs for cuts, and the logs that it leaves out.

A search reads records, and one of them may need more memory than there is: the machine ends the process
(ingest/batches/reading_mark.py). All logs are searched together, so such an end blames no log in particular:

    in the marks of the last two processes    the next search
    no log twice                              all logs together
    several logs                              first these, one at a time, each with its own mark; then the others
    one log                                   leaves this log out; the others together

A log that is left out stays in a mark of its own (`UNSEARCHED`), and /readyz reports it. It is searched again after an
operator has removed that file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.reading_mark import SEARCHED, UNSEARCHED, ReadingMark
from bridge.kafka.admin import Cluster
from bridge.kafka.leader_epochs import ReadStretch
from bridge.stores.names import Offsets, SourceName, texts_of
from bridge.telemetry.heartbeats import Beat, unwatched

Stretches = Mapping[SourceName, ReadStretch]

log: Final = structlog.get_logger("bridge.start.cut_search")


class CutSearch:
    """See the module. One thread searches; any may call `alarms`."""

    def __init__(self, beat: Beat = unwatched, directory: Path | None = None) -> None:
        """`beat` is the heartbeat of the searching thread; the marks are in `directory` (None: no marks)."""
        self._beat = beat
        self._mark: ReadingMark | None = None
        self._suspects: Offsets = {}
        self._left_out: Offsets = {}
        """By log the end of the stretch that is not searched."""
        self._missed: frozenset[SourceName] = frozenset()
        """The logs without a needed search."""
        if directory is not None:
            self._mark, left = ReadingMark(directory, SEARCHED), ReadingMark(directory, UNSEARCHED)
            self._suspects, self._left_out = self._mark.suspects, left.suspects
            if len(self._suspects) == 1:
                self._left_out = {**self._left_out, **self._suspects}
                left.distrust(self._left_out)
                self._mark.clear()

    def alarms(self) -> list[str]:
        """Sentences for /readyz about logs without a needed search."""
        return [
            f"{name} was not searched for a cut: remove {UNSEARCHED} from store.directory"
            for name in texts_of(self._missed)
        ]

    def keep(self, owned: Collection[SourceName]) -> None:
        """Forget the alarms of partitions that are no longer owned."""
        self._missed &= frozenset(owned)

    def find(self, cluster: Cluster, looked: Collection[SourceName], wanted: Stretches) -> dict[SourceName, int | None]:
        """The cut of each log of `wanted` by `Cluster.cuts`; absent: left out, or without an answer. `looked` are all
        partitions of this look."""
        missed = {name for name, each in wanted.items() if each.end <= self._left_out.get(name, -1)}
        if missed - self._missed:
            log.error(
                "log-not-searched",
                partitions=", ".join(texts_of(missed)),
                hint="Two processes have ended in the search of this log for a cut. Give the bridge more memory, and "
                f"remove {UNSEARCHED} from store.directory before the next start.",
            )
        self._missed = self._missed.difference(looked) | missed
        asked = {name: each for name, each in wanted.items() if name not in missed}
        found: dict[SourceName, int | None] = {}
        try:
            for group in self._groups(asked):
                if self._mark is not None:
                    self._mark.note({name: each.end for name, each in group.items()})
                found |= cluster.cuts(group, self._beat)
        except EnvironmentFailure as error:
            warn(asked.keys() - found.keys(), error.message)
            return found
        finally:
            if self._mark is not None and asked:
                self._mark.clear()
        self._suspects = {name: end for name, end in self._suspects.items() if name not in found}
        warn(asked.keys() - found.keys(), "their records cannot be read")
        return found

    def _groups(self, asked: Stretches) -> list[Stretches]:
        """The logs to search together, in order."""
        alone = sorted(name for name, each in asked.items() if each.end <= self._suspects.get(name, -1))
        others = {name: each for name, each in asked.items() if name not in alone}
        return [*({name: asked[name]} for name in alone), *([others] if others else [])]


def warn(names: Collection[SourceName], reason: str) -> None:
    """Report partitions about which nothing is known now."""
    if names:
        log.warning("identity-unknown", partitions=", ".join(texts_of(names)), reason=reason)
