"""What becomes of every row that is due. The targets are looked at before anything is produced.

kind      due          target                                             becomes
reject    -            -                                                  dead letter with its reason
cancel    -            -                                                  nothing, or sent on: see `cancels`
timer     after now    -                                                  a roll: a copy in its own partition
timer     by now       -, and it has waited too long                      dead letter, or a copy with a slot: see
                                                                          `catchup`
timer     by now       condemned after an abort                           dead letter with what the brokers said
timer     by now       none, not allowed, no such partition, too small    dead letter with its reason
timer     by now       missing, denied, unavailable, unknown to be any    retry: see `sorting`
timer     by now       its own dead-letter topic, and it was held         the dead letter that it is
timer     by now       fine                                               delivered

A partition number that is too large and a record that is too large are looked up again before they are believed: the
target may have grown since. They are not retried: what is wrong is most likely the message, and its sender should know
now and not in an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from bridge.cancels import Forwards
from bridge.catchup import BURST_MS, CatchUp, OverduePolicy
from bridge.copies import copies
from bridge.deadletter import dead_letters, held, is_held
from bridge.headers import RejectReason
from bridge.outgoing import Batch, Lane, Outgoing, SourceColumns, integers
from bridge.placement import PARTITIONER, place
from bridge.retry import RetryPolicy
from bridge.sorting import Fates, Sorting, copyable, reasons, settle
from bridge.target import Target
from bridge.targets import Targets
from bridge.tracing import Delivery, Tracer
from bridge.verdict import Findings, Refusal
from timerstore.entry import Kind
from timerstore.position import Bools, Int64s, pack
from timerstore.sources import Sources
from timerstore.transaction import Rows

NOTHING: Final = Findings()
ANY_TIME: Final = OverduePolicy()
NO_TIMES: Final = np.empty(0, dtype=np.int64)
NO_ROWS: Final = np.empty(0, dtype=np.intp)
PERMITTED_MAX: Final = 10_000
"""Answers of the allow-list that are kept; names come from headers."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The rows of one `take`, sorted out. `batches` may be asked for once; `records` is how many records they hold.

    `keys` int64[n] are the rows' (source, offset) packed as in the store, `due` int64[] the due times of the rows that
    are delivered, `traced` those rows of them that get a span, `delivered` counts by topic, `rejected` and `retried` by
    reason, `bytes` all that is sent, `targets` what is believed of the topics that get any of it (all of them are there
    when the last batch has been asked for).
    """

    batches: Iterator[Batch]
    records: int
    bytes: int
    keys: Int64s
    due: Int64s
    delivered: Mapping[str, int]
    rejected: Mapping[str, int]
    retried: Mapping[str, int]
    rolled: int
    deferred: int
    forwarded: int
    targets: Mapping[str, Target]
    traced: Sequence[Delivery] = ()


class Planner:
    """Sorts out rows. One thread."""

    def __init__(
        self,
        *,
        targets: Targets,
        permitted: Callable[[str], bool],
        default_targets: Mapping[str, str | None],
        dead_letter_topics: Mapping[str, str],
        retry: RetryPolicy,
        overdue: OverduePolicy = ANY_TIME,
        batch_bytes_max: int = 1_000_000,
        record_bytes_max: int = 64 << 20,
        compressed: bool = False,
        partitioner: str = PARTITIONER,
        tracer: Tracer | None = None,
    ) -> None:
        """`permitted` is the allow-list; dead-letter topics are refused here, whatever it says. By delay topic: default
        target, dead-letter topic.

        `batch_bytes_max` is the producer's batch.size: targets that take less get their records in smaller lots.
        `record_bytes_max` is its message.max.bytes. With `compressed`, only the brokers can tell whether a record is
        too large. `partitioner` is the producer's, by its name.
        """
        self.targets = targets
        self.delay_topics = frozenset(default_targets)
        self.dead_letter_topics = frozenset(dead_letter_topics.values())
        self._permitted = permitted
        self._permitted_known: dict[str, bool] = {}
        self._default_targets = default_targets
        self._dead_letter_topic_of = dead_letter_topics
        self._retry = retry
        self.catch_up = CatchUp(overdue)
        self._batch_bytes_max = batch_bytes_max
        self._record_bytes_max = record_bytes_max
        self._compressed = compressed
        self._partitioner = partitioner
        self.tracer = tracer
        self._columns: SourceColumns | None = None
        self._believed: dict[str, Target] = {}

    def plan(self, rows: Rows, sources: Sources, now_ms: int, findings: Findings = NOTHING) -> Plan:
        """Sort out the rows taken at `now_ms`. `findings` are what aborts have taught."""
        if self._columns is None or self._columns.sources is not sources:
            self._columns = SourceColumns(sources, self._default_targets)
        self._believed = {}
        outgoing = Outgoing(rows, self._columns)
        keys = pack(rows.source.astype(np.int64), rows.offset)
        sizes = outgoing.bytes()
        timers = outgoing.kind == Kind.TIMER
        rolling = timers & (outgoing.due > now_ms)
        sorting = Sorting(timers & ~rolling)
        if findings.condemned:
            for row in np.flatnonzero(np.isin(keys, np.fromiter(findings.condemned, np.int64))).tolist():
                mine = findings.condemned[int(keys[row])]
                sorting.refuse(np.arange(len(rows)) == row, mine.reason, mine.detail)
        names, codes = outgoing.targets()
        letters = np.isin(codes, [i for i, name in enumerate(names) if name in self.dead_letter_topics])
        deferred, slots_ms = self._overdue(outgoing, sorting, timers & ~letters, keys, sizes, now_ms, findings)
        lanes = self._lanes(outgoing, sorting, names, codes, sizes)
        rolled = np.flatnonzero(rolling)
        if findings.no_copy and len(rolled):
            rolled = self._give_up_rolls(rolled, keys, findings, sorting)
        fates = self._settle(outgoing, sorting, keys, sizes, now_ms, findings)
        batches = self._batches(outgoing, lanes, sorting.condemned, rolled, deferred, slots_ms, sizes, fates)
        cancels = Forwards(outgoing)
        due = outgoing.due if len(lanes) == 1 and len(lanes[0][0].ids) == len(rows) else outgoing.due[sorting.deliver]
        dead = NO_ROWS if fates is None else fates.dead
        return Plan(
            batches=chain(batches, cancels.batches(sizes)),
            records=sum(len(lane.ids) for lane, _ in lanes)
            + len(rolled)
            + len(deferred)
            + cancels.records
            + (0 if fates is None else len(dead) + len(fates.retried) + len(fates.held)),
            bytes=int(sizes.sum()) + cancels.bytes,
            keys=keys,
            due=due,
            delivered={lane.topic: len(lane.ids) for lane, _ in lanes},
            rejected=reasons(outgoing, sorting.condemned, dead),
            retried={} if fates is None else fates.reasons,
            rolled=len(rolled),
            deferred=len(deferred),
            forwarded=cancels.records,
            targets=self._believed,
            traced=() if self.tracer is None else self.tracer.chosen(outgoing, sorting.deliver, (names, codes), now_ms),
        )

    def _overdue(
        self,
        outgoing: Outgoing,
        sorting: Sorting,
        timers: Bools,
        keys: Int64s,
        sizes: Int64s,
        now_ms: int,
        findings: Findings,
    ) -> tuple[npt.NDArray[np.intp], Int64s]:
        """Apply the overdue policy; returns the rows that are put off to slots of their own, and the slots."""
        if not self.catch_up.policy.is_any:
            return NO_ROWS, NO_TIMES
        waited_ms = self.catch_up.waited_ms(now_ms, outgoing.rows.at, outgoing.ts())
        sorting.refuse(
            timers & self.catch_up.given_up(waited_ms), RejectReason.OVERDUE, RejectReason.OVERDUE.explanation
        )
        behind = np.flatnonzero(timers & sorting.deliver & self.catch_up.is_behind(waited_ms))
        if not len(behind):
            return NO_ROWS, NO_TIMES
        behind = behind[
            copyable(outgoing, behind, keys, sizes, findings, self._outlets(outgoing), self._record_bytes_max)
        ]
        slots_ms = self.catch_up.slots_ms(now_ms, len(behind))
        later = slots_ms > now_ms + BURST_MS
        sorting.deliver[behind[later]] = False
        return behind[later], slots_ms[later]

    def _give_up_rolls(
        self, rolled: npt.NDArray[np.intp], keys: Int64s, findings: Findings, sorting: Sorting
    ) -> npt.NDArray[np.intp]:
        """Rolls whose copies are refused become dead letters; returns the others."""
        refused = np.isin(keys[rolled], np.fromiter(findings.no_copy, np.int64))
        refusal = Refusal(RejectReason.TOO_LARGE, "its copy is larger than the delay topic takes")
        sorting.condemned.update(dict.fromkeys(rolled[refused].tolist(), refusal))
        return rolled[~refused]

    def _settle(
        self, outgoing: Outgoing, sorting: Sorting, keys: Int64s, sizes: Int64s, now_ms: int, findings: Findings
    ) -> Fates | None:
        """What becomes of rows that are not delivered; None when there is none, the usual case."""
        rejects = outgoing.kind == Kind.REJECT
        if not (sorting.condemned or sorting.failing or sorting.released or rejects.any()):
            return None
        return settle(
            outgoing,
            sorting,
            keys=keys,
            sizes=sizes,
            now_ms=now_ms,
            policy=self._retry,
            findings=findings,
            outlets=self._outlets(outgoing),
            bytes_max=self._record_bytes_max,
        )

    def _outlets(self, outgoing: Outgoing) -> dict[str, tuple[Target, Target]]:
        """The delay topics that the rows are of, each with its dead-letter topic."""
        used = {outgoing.sources.name(source)[0] for source in np.unique(outgoing.rows.source).tolist()}
        found = self.targets.resolve([*used, *(self._dead_letter_topic_of[name] for name in used)])
        self._believed.update(found)
        if self._compressed:
            found = {name: replace(target, bytes_max=None) for name, target in found.items()}
        return {name: (found[name], found[self._dead_letter_topic_of[name]]) for name in used}

    def _lanes(
        self, outgoing: Outgoing, sorting: Sorting, names: list[str], codes: npt.NDArray[np.int32], sizes: Int64s
    ) -> list[tuple[Lane, Target]]:
        """One lane for each target that gets anything; what may not go there is condemned in `sorting`."""
        without = codes < 0
        if without.any():
            sorting.refuse(without, RejectReason.NO_TARGET, RejectReason.NO_TARGET.explanation)
        used = [(i, names[i]) for i in np.unique(codes[sorting.deliver]).tolist()]
        allowed = {name for _, name in used if self._may_go_to(name)}
        found = self.targets.resolve(allowed)
        partition = None
        if outgoing.has_partition:
            partition = integers(outgoing.rows.payload.column("target_partition"), -1)
        lanes = []
        for code, name in used:
            rows = codes == code
            target = found.get(name)
            if target is None:
                detail = f"{name}: {RejectReason.FORBIDDEN_TARGET.explanation}"
                if name in self.dead_letter_topics:
                    _release(outgoing, sorting, rows, name, self._dead_letter_topic_of)
                sorting.refuse(rows, RejectReason.FORBIDDEN_TARGET, detail)
                continue
            target = self._refuse_misfits(sorting, rows, name, target, partition, sizes)
            if target.refusal is not None:
                sorting.put_off(rows, target.refusal)
                continue
            lane = self._lane(outgoing, sorting, rows, name, target, partition)
            if len(lane.ids):
                lanes.append((lane, target))
                self._believed[name] = target
        return lanes

    def _lane(
        self,
        outgoing: Outgoing,
        sorting: Sorting,
        rows: Bools,
        name: str,
        target: Target,
        partition: npt.NDArray[np.int32] | None,
    ) -> Lane:
        """The rows that go there; what belongs into partitions that are down is put off."""
        ids = np.flatnonzero(rows & sorting.deliver)
        if not target.down or not len(ids):
            return Lane(topic=name, ids=ids)
        placed, is_up = place(
            outgoing.column("key", ids),
            np.full(len(ids), -1, dtype=np.int32) if partition is None else partition[ids],
            partitions=target.partitions,
            down=target.down,
            partitioner=self._partitioner,
        )
        waiting: Bools = np.zeros(len(rows), dtype=np.bool_)
        waiting[ids[~is_up]] = True
        number, trouble = next(iter(target.down.items()))
        more = f" and {len(target.down) - 1} more" if len(target.down) > 1 else ""
        sorting.put_off(
            waiting, Refusal(RejectReason.TARGET_UNAVAILABLE, f"{name}: partition {number}{more} {trouble}")
        )
        return Lane(topic=name, ids=ids[is_up], partitions=placed[is_up])

    def _refuse_misfits(
        self,
        sorting: Sorting,
        rows: Bools,
        name: str,
        target: Target,
        partition: npt.NDArray[np.int32] | None,
        sizes: Int64s,
    ) -> Target:
        """Condemn what cannot go there by its size or partition; returns the target as it turned out to be."""
        if target.refusal is not None and not target.partitions:
            return target
        outside, large = self._misfits(target, rows, partition, sizes)
        if outside.any() or large.any():
            target = self.targets.renew(name)
            if target.refusal is not None and not target.partitions:
                return target
            outside, large = self._misfits(target, rows, partition, sizes)
            detail = f"{name} has {target.partitions} partitions"
            sorting.refuse(outside, RejectReason.PARTITION_OUT_OF_RANGE, detail)
            sorting.refuse(large, RejectReason.TOO_LARGE, f"{name} takes at most {self._limit(target)} bytes")
        return target

    def _misfits(
        self, target: Target, rows: Bools, partition: npt.NDArray[np.int32] | None, sizes: Int64s
    ) -> tuple[Bools, Bools]:
        """Rows whose partition does not exist, and rows that are too large."""
        none: Bools = np.zeros(len(rows), dtype=np.bool_)
        limit = self._limit(target)
        return (
            none if partition is None else rows & (partition >= target.partitions),
            none if int(sizes.max()) <= limit else rows & (sizes > limit),
        )

    def _limit(self, target: Target) -> int:
        """Bytes of the largest record that can go there."""
        if target.bytes_max is None or self._compressed:
            return self._record_bytes_max
        return min(self._record_bytes_max, target.bytes_max)

    def _may_go_to(self, name: str) -> bool:
        known = self._permitted_known.get(name)
        if known is None:
            if len(self._permitted_known) >= PERMITTED_MAX:
                self._permitted_known.clear()
            is_own = name in self.delay_topics or name in self.dead_letter_topics
            known = not name.startswith("__") and not is_own and self._permitted(name)
            self._permitted_known[name] = known
        return known

    def _batches(
        self,
        outgoing: Outgoing,
        lanes: list[tuple[Lane, Target]],
        condemned: Mapping[int, Refusal],
        rolled: npt.NDArray[np.intp],
        deferred: npt.NDArray[np.intp],
        slots_ms: Int64s,
        sizes: Int64s,
        fates: Fates | None,
    ) -> Iterator[Batch]:
        for lane, target in lanes:
            # The client fills batches up to batch.size whatever the topic takes: a topic that takes less gets what
            # fits, one lot at a time.
            small = target.bytes_max is not None and target.bytes_max < self._batch_bytes_max and not self._compressed
            yield from outgoing.batches(lane, sizes, lot_bytes=target.bytes_max if small else None)
        lot = self._copy_lot_bytes(outgoing) if len(rolled) or len(deferred) or fates is not None else None
        if len(rolled):
            yield from copies(outgoing, rolled, sizes, rolled=1, lot_bytes=lot)
        if len(deferred):
            yield from copies(outgoing, deferred, sizes, at_ms=slots_ms, lot_bytes=lot)
        if fates is not None:
            if len(fates.retried):
                yield from copies(outgoing, fates.retried, sizes, failed=1, at_ms=fates.retried_at_ms, lot_bytes=lot)
            if len(fates.held):
                yield from held(outgoing, fates.held, self._dead_letter_topic_of, sizes, fates.held_at_ms)
            if len(fates.dead):
                yield from dead_letters(outgoing, fates.dead, condemned, self._dead_letter_topic_of, sizes, fates.cut)

    def _copy_lot_bytes(self, outgoing: Outgoing) -> int | None:
        """As for targets: what a delay topic takes at once, if that is less than the client's batches."""
        limits = [topic.bytes_max for topic, _ in self._outlets(outgoing).values()]
        least = min((limit for limit in limits if limit is not None), default=self._batch_bytes_max)
        return least if least < self._batch_bytes_max else None


def _release(
    outgoing: Outgoing, sorting: Sorting, rows: Bools, name: str, dead_letter_topics: Mapping[str, str]
) -> None:
    """Dead letters that were held come back for their dead-letter topic; nobody else may send there."""
    ids = np.flatnonzero(rows & sorting.deliver)
    ids = ids[is_held(outgoing, ids)]
    own = [
        dead_letter_topics[outgoing.sources.name(source)[0]] == name for source in outgoing.rows.source[ids].tolist()
    ]
    ids = ids[np.array(own, dtype=np.bool_)]
    sorting.deliver[ids] = False
    sorting.released += ids.tolist()
