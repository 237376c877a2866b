"""The assignment: sources come and go while a store is open, and the others go on.

    owned --give_up--> away --join--> joining --joined--> owned

*Going*: between two transactions its rows leave memory, and it is not ours from then on. Nothing is written: its rows
in segments and its O_c stay as they are, for when it comes back, like those of any source that another instance has.
What was not flushed is read from Kafka again then. `settle` takes what was pending of it out of the counts.

*Coming*: it goes on from its O_c, and is held until it is ingested up to its committed O (invariant I6 for it alone).
Then it is released as any held source: P and L go back to the smallest P, and rows are loaded from there again; what
the others have finished is left out by their own P.

A crash leaves what it always leaves: the checkpoint, and the committed states in Kafka.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from timerstore.memory.chunks import materialize
from timerstore.memory.finished import Finished
from timerstore.memory.pending import TALLIED, Tally, tally_timers
from timerstore.memory.sorted_runs import RowRefs
from timerstore.operations.by_origin import covered_in
from timerstore.operations.recovery import count_unfinished, lies_before
from timerstore.operations.state import StoreState
from timerstore.rows.position import Int64s, Progress
from timerstore.rows.sources import Cuts, NamedState, NamedStep, SourceName, named_in, unseen_cut

COUNTED = (*TALLIED, "id", "origin")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Left:
    """Sources that were given up, and are still counted: what of them was finished, the rows that were in memory
    (`payloads` by chunk, columns of COUNTED), and the offsets below which rows were in segments."""

    done: Finished
    rows: RowRefs
    payloads: dict[int, pa.RecordBatch]
    stored: Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """Sources that come: their committed states, the numbers of their last cuts, and what segments hold of them that is
    not finished, counted; and what of that is cancelled."""

    states: Mapping[int, Progress]
    cuts: Mapping[SourceName, int]
    counted: Sequence[Tally]
    covered: Sequence[Tally]


class Assignment:
    """See the module. `give_up` may be called by any thread, the others by the thread of the maintenance."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._left: list[_Left] = []

    def give_up(self, names: Collection[SourceName], now_ms: int) -> None:
        """These sources are another instance's from now on; between two transactions."""
        state, resident = self._state, self._state.resident
        with state.changing_between_transactions():
            sources = [state.sources.index(*name) for name in names]
            done = Finished.of(len(state.sources), {source: resident.committed[source] for source in sources})
            rows = resident.give_up(sources)
            payloads = {chunk: each.select(COUNTED) for chunk, each in resident.chunks.payloads(rows.chunk).items()}
            resident.chunks.release(rows.chunk)
            state.cancels.forget_stored(resident)
            state.commands.give_up(sources)
            if state.cancels.inherited is not None:
                ends = state.cancels.inherited.items()
                state.cancels.inherited = {source: end for source, end in ends if source not in sources}
            self._left.append(_Left(done=done, rows=rows, payloads=payloads, stored=resident.stored.copy()))
            self._changed(now_ms)

    def settle(self) -> bool:
        """Take what was given up out of the counts; all of it, so that it is done. Raises Corrupt, DiskFailure."""
        state = self._state
        while self._left:
            left = self._left[0]
            counted, covered = self._in_segments(left.done)
            # A flush that was under way may have put rows into a segment.
            in_memory = left.rows[left.rows.offset >= self._stored(left)[left.rows.source]]
            cancelled = None
            if len(in_memory):
                payload = materialize(left.payloads, in_memory.chunk, in_memory.row)
                with state.lock:
                    lookup = state.cancels.tombstones.lookup()
                cancelled = state.cancels.covered(lookup, in_memory.source, in_memory.offset, payload)
                counted.append(tally_timers(in_memory.at, payload, cancelled))
            with state.changing():
                # In this order no name's count falls below zero on the way.
                for each in covered:
                    state.pending.add(each)
                for each in counted:
                    state.pending.remove(each)
            del self._left[0]
        return True

    def resume_offsets(
        self,
        committed: Mapping[SourceName, NamedState],
        frozen: Mapping[SourceName, Sequence[NamedStep]],
        log_starts: Mapping[SourceName, int],
        cuts: Mapping[SourceName, Cuts] = MappingProxyType({}),
    ) -> dict[SourceName, int | None] | None:
        """Where ingest of sources that come has to start, as `TimerStore.resume_offsets`; None where the store must be
        opened anew for them: what its files hold of them is to be given up, or they are unknown. The arguments are
        those of `TimerStore.open`."""
        state = self._state
        with state.lock:
            checkpoint, segments = state.checkpoint, list(state.timerlog)
            highest = state.cancels.tombstones.lookup().highest
        if not all(name in state.sources for name in named_in(committed)):
            return None
        for name in committed:
            source, covered = state.sources.index(*name), checkpoint.offsets.get(name)
            is_in_segments = any(source in each.largest for each in segments)
            if covered is None and is_in_segments:
                return None
            is_known = covered is not None or is_in_segments or highest[source] >= 0
            if is_known and unseen_cut(cuts.get(name, ()), checkpoint.cuts.get(name, 0)) is not None:
                return None
            progress = state.sources.progress(name, *committed[name], frozen.get(name, ()))
            if covered is not None and (
                covered < log_starts[name] or lies_before(state.sources, name, progress, checkpoint, covered)
            ):
                return None
        return {name: checkpoint.offsets.get(name) for name in committed}

    def arrival(
        self,
        committed: Mapping[SourceName, NamedState],
        frozen: Mapping[SourceName, Sequence[NamedStep]],
        cuts: Mapping[SourceName, Cuts] = MappingProxyType({}),
    ) -> Arrival:
        """What `join` needs to know of sources that come: it takes a while. Raises Corrupt, DiskFailure."""
        self.settle()
        sources = self._state.sources
        states = {
            sources.index(*name): sources.progress(name, *each, frozen.get(name, ()))
            for name, each in committed.items()
        }
        counted, covered = self._in_segments(Finished.of(len(sources), states))
        numbers = {name: each[-1][0] for name, each in cuts.items() if each}
        return Arrival(states=states, cuts=numbers, counted=counted, covered=covered)

    def join(
        self,
        arrival: Arrival,
        log_starts: Mapping[SourceName, int],
        offsets: Mapping[SourceName, int],
        log_ends: Mapping[SourceName, int],
        now_ms: int,
    ) -> None:
        """These sources are ours from now on, and held until `joined`. Nothing else was done by the thread since
        `arrival`, no batch is being taken in, and `resume_offsets` was not None. `offsets` are the first expected ones,
        `log_starts` and `log_ends` as of `TimerStore.open` and `start_at`."""
        state, resident, sources = self._state, self._state.resident, self._state.sources
        with state.changing():
            state.cuts = {**state.cuts, **arrival.cuts}
            for source, progress in arrival.states.items():
                name = sources.name(source)
                resident.ends[source] = offsets[name]
                resident.stored[source] = state.checkpoint.offsets.get(name, log_starts[name])
                resident.join(source, progress)
            if state.cancels.inherited is not None:
                ends = {source: log_ends[sources.name(source)] for source in arrival.states}
                state.cancels.inherited = {**state.cancels.inherited, **ends}
            for each in arrival.counted:
                state.pending.add(each)
            for each in arrival.covered:
                state.pending.remove(each)
            self._changed(now_ms)

    def postpone(self, names: Collection[SourceName], now_ms: int) -> None:
        """These sources of ours cannot be read up to their committed O for now: they join when they are, and hold up no
        other. Before the first transaction."""
        state = self._state
        with state.changing():
            state.resident.postpone([state.sources.index(*name) for name in names])
            self._changed(now_ms)

    def arrived(self) -> list[SourceName]:
        """The sources that join, and have caught up with their committed O."""
        state = self._state
        with state.lock:
            resident = state.resident
            return [state.sources.name(source) for source in np.flatnonzero(resident.arrived()).tolist()]

    def joined(self, names: Collection[SourceName]) -> list[SourceName]:
        """Those of `names` that have arrived: the dispatcher's from here on, which calls `hold` without them before its
        next transaction. Between two transactions."""
        state = self._state
        with state.lock:
            if not names or not state.resident.joining.any():
                return []
            with state.changing_between_transactions():
                chosen = [state.sources.index(*name) for name in names]
                return [state.sources.name(source) for source in state.resident.joined(chosen)]

    def joining(self) -> list[SourceName]:
        """The sources that are held until they have caught up."""
        with self._state.lock:
            return [self._state.sources.name(int(source)) for source in self._state.resident.joining.nonzero()[0]]

    def _changed(self, now_ms: int) -> None:
        self._state.assigned_ms = now_ms
        self._state.assignments += 1
        self._state.wake()

    def _in_segments(self, done: Finished) -> tuple[list[Tally], list[Tally]]:
        """What the segments hold of the sources in `done` that is not finished; and what of that is cancelled."""
        state = self._state
        segments = [each for each in state.timerlog if done.owned[list(each.largest)].any()]
        counted = [part for each in segments for part in count_unfinished(each, state.sources, done)]
        return counted, [covered_in(state, each, done.includes) for each in segments]

    def _stored(self, left: _Left) -> Int64s:
        stored = left.stored.copy()
        for name, offset in self._state.checkpoint.offsets.items():
            source = self._state.sources.index(*name)
            if left.done.owned[source]:
                stored[source] = max(int(stored[source]), offset)
        return stored
