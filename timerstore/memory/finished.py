"""Which rows are finished, under the committed states of all sources (invariant I1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from timerstore.rows.position import ORIGIN, Bools, Int64s, Positions, Progress, Step, at_or_below


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """By source: whether it is owned, its O (`offset`), its P (`at`, `seq`), and its frozen steps, where there are any
    (invariant I4). `note` changes them in place."""

    owned: Bools
    offset: Int64s
    at: Int64s
    seq: Int64s
    frozen: dict[int, tuple[Step, ...]]

    @classmethod
    def of(cls, sources: int, committed: Mapping[int, Progress]) -> Finished:
        """Of the committed states of the owned sources, `sources` many in all."""
        owned = np.zeros(sources, dtype=np.bool_)
        owned[list(committed)] = True
        at, seq = np.full(sources, ORIGIN.at_ms, dtype=np.int64), np.full(sources, ORIGIN.seq, dtype=np.int64)
        made = cls(owned, np.zeros(sources, dtype=np.int64), at, seq, {})
        for source, state in committed.items():
            made.note(source, state)
        return made

    def note(self, source: int, state: Progress) -> None:
        """The committed state of a source is this one from now on."""
        self.offset[source] = state.offset
        self.at[source] = state.position.at_ms
        self.seq[source] = state.position.seq
        if state.frozen:
            self.frozen[source] = state.frozen
        else:
            self.frozen.pop(source, None)

    def copy(self) -> Finished:
        """What is finished now, whatever is finished later."""
        return Finished(self.owned.copy(), self.offset.copy(), self.at.copy(), self.seq.copy(), dict(self.frozen))

    def includes(self, rows: Positions) -> Bools:
        """Mask of the rows that are finished, or of no source of ours."""
        source = rows.source
        finished: Bools = ((rows.offset < self.offset[source]) & self.is_passed(rows)) | ~self.owned[source]
        for stepped, frozen in self.frozen.items():
            mine = source == stepped
            for step in frozen:
                finished |= mine & (rows.offset < step.offset) & rows.at_or_below(step.position)
        return finished

    def is_passed(self, rows: Positions) -> Bools:
        """Mask of the rows that lie at or below the P of their own source."""
        source = rows.source
        return at_or_below(rows.at, rows.seq, self.at[source], self.seq[source])
