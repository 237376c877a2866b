"""What becomes of every row that is due. The targets are looked at before anything is produced.

kind      due          target                                             becomes
reject    -            -                                                  dead letter with its reason
cancel    -            -                                                  nothing, or sent on: see `cancels`
timer     after now    -                                                  a roll: a copy in its own partition
timer     by now       -, and it has waited too long                      dead letter, or a copy with a slot: see
                                                                          `catchup`
timer     -            has a header whose name the client would cut       dead letter
timer     by now       condemned after an abort                           dead letter with what the brokers said
timer     by now       none, not allowed, no such partition, too small,   dead letter with its reason
                       compacted and the message has no key
timer     by now       missing, denied, unavailable, unknown to be any    retry: see `sorting`
timer     by now       its own dead-letter topic, and it was held         the dead letter that it is
timer     by now       fine                                               delivered

A partition number that is too large and a record that is too large are looked up again before they are believed: the
target may have grown since. They are not retried: what is wrong is most likely the message, and its sender should know
now and not in an hour.

What has to be written into a partition of a delay topic that takes nothing (a roll, a retry, a cancel that is sent on)
can wait only where it is: the plan is refused with the sources that must be held (`Unplannable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.copies import copies
from bridge.delivery.plan.dead_letters import dead_letters, held
from bridge.delivery.plan.due_rows import Batch, Lane, Outgoing, SourceColumns, integers
from bridge.delivery.plan.fates import Fates, Findings, Sorting, copyable, reasons, release_letters, settle
from bridge.delivery.plan.forwarded_cancels import Forwards
from bridge.delivery.plan.overdue import BURST_MS, CatchUp, OverduePolicy
from bridge.delivery.plan.partitioner import PARTITIONER, place
from bridge.delivery.plan.record_size import larger
from bridge.delivery.plan.spans import Delivery, Tracer
from bridge.delivery.plan.unwritable import Unplannable, Unwritable, refuse_down
from bridge.delivery.targets.breakers import EVERY
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.wire.headers import RejectReason, Where
from timerstore.operations.transaction import Rows
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s, pack
from timerstore.rows.sources import Sources

NOTHING: Final = Findings()
ANY_TIME: Final = OverduePolicy()
NO_TIMES: Final = np.empty(0, dtype=np.int64)
NO_ROWS: Final = np.empty(0, dtype=np.intp)
PERMITTED_MAX: Final = 10_000
"""Answers of the allow-list that are kept; names come from headers."""

log = structlog.get_logger("bridge.delivery.plan.planner")


@dataclass(slots=True, kw_only=True)
class Plan:
    """The rows of one `take`, sorted out. `batches` may be asked for once; `records` is how many records they hold.

    `keys` int64[n] are the rows' (source, offset) packed as in the store, `due` int64[] the due times of the rows that
    are delivered, `traced` those rows of them that get a span, `delivered` counts by topic, `rejected` and `retried` by
    reason, `bytes` all that is sent, `targets` what is believed of the topics that get any of it. That and `rejected`
    are whole when the last batch has been asked for.
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
        """Sort out the rows taken at `now_ms`. `findings` are what aborts have taught. Raises Unplannable."""
        if self._columns is None or self._columns.sources is not sources:
            self._columns = SourceColumns(sources, self._default_targets)
        self._believed = {}
        outgoing = Outgoing(rows, self._columns)
        keys = pack(rows.source.astype(np.int64), rows.offset)
        sizes = outgoing.bytes()
        timers = outgoing.kind == Kind.TIMER
        rolling = timers & (outgoing.due > now_ms)
        misnamed = outgoing.misnamed()
        if misnamed is not None:
            rolling &= ~misnamed
        sorting = Sorting(timers & ~rolling)
        if misnamed is not None:
            sorting.refuse(misnamed, RejectReason.BAD_HEADER_NAME, RejectReason.BAD_HEADER_NAME.explanation)
        if findings.condemned:
            for row in np.flatnonzero(np.isin(keys, np.fromiter(findings.condemned, np.int64))).tolist():
                mine = findings.condemned[int(keys[row])]
                sorting.refuse(np.arange(len(rows)) == row, mine.reason, mine.detail)
        for row in np.flatnonzero(np.isin(keys, np.fromiter(findings.put_off, np.int64))).tolist():
            sorting.put_off(np.arange(len(rows)) == row, findings.put_off[int(keys[row])])
        names, codes = outgoing.targets()
        letters = np.isin(codes, [i for i, name in enumerate(names) if name in self.dead_letter_topics])
        deferred, slots_ms = self._overdue(outgoing, sorting, timers & ~letters, keys, sizes, now_ms, findings)
        lanes = self._lanes(outgoing, sorting, names, codes, sizes)
        rolled = np.flatnonzero(rolling)
        cancels = Forwards(outgoing, self.targets.count_partitions)
        self._must_be_writable(outgoing, rolled, cancels)
        if len(rolled):
            rolled = self._give_up_rolls(outgoing, rolled, keys, sizes, findings, sorting)
        fates = self._settle(outgoing, sorting, keys, sizes, now_ms, findings)
        dead = NO_ROWS if fates is None else fates.dead
        rejected = reasons(outgoing, sorting.condemned, dead)
        batches = self._batches(outgoing, lanes, sorting.condemned, rolled, deferred, slots_ms, sizes, fates, rejected)
        due = outgoing.due if len(lanes) == 1 and len(lanes[0][0].ids) == len(rows) else outgoing.due[sorting.deliver]
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
            rejected=rejected,
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
        behind = behind[~self._is_down(outgoing)[outgoing.rows.source[behind]]]
        slots_ms = self.catch_up.slots_ms(now_ms, len(behind))
        later = slots_ms > now_ms + BURST_MS
        sorting.deliver[behind[later]] = False
        return behind[later], slots_ms[later]

    def _is_down(self, outgoing: Outgoing) -> Bools:
        """Which sources' own partitions take nothing now, bool by index."""
        outlets = self._outlets(outgoing)
        return np.array([t in outlets and outlets[t][0].is_down(p) for t, p in outgoing.sources], dtype=np.bool_)

    def _must_be_writable(self, outgoing: Outgoing, rolled: npt.NDArray[np.intp], cancels: Forwards) -> None:
        """Rolls and cancels that are sent on have one place to go to. Raises Unplannable where that takes nothing."""
        if cancels.unknown:
            why = {each: Refusal(RejectReason.TARGET_UNAVAILABLE, text) for each, text in cancels.unknown.items()}
            raise Unplannable({each: Unwritable(refusal=refusal) for each, refusal in why.items()})
        if not len(rolled) and not cancels.records:
            return
        topics = {name: topic for name, (topic, _) in self._outlets(outgoing).items()}
        if all(topic.is_well for topic in topics.values()):
            return
        places = {
            source: {outgoing.sources.name(source)} for source in np.unique(outgoing.rows.source[rolled]).tolist()
        }
        for source, others in cancels.places().items():
            places.setdefault(source, set()).update(others)
        refuse_down(topics, places)

    def _give_up_rolls(
        self,
        outgoing: Outgoing,
        rolled: npt.NDArray[np.intp],
        keys: Int64s,
        sizes: Int64s,
        findings: Findings,
        sorting: Sorting,
    ) -> npt.NDArray[np.intp]:
        """Rolls whose copies are refused, or would be, become dead letters; returns the others."""
        outlets = self._outlets(outgoing)
        refused = ~copyable(outgoing, rolled, keys, sizes, findings, outlets, self._record_bytes_max)
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
        outlets = self._outlets(outgoing)
        fates = settle(
            outgoing,
            sorting,
            keys=keys,
            sizes=sizes,
            now_ms=now_ms,
            policy=self._retry,
            findings=findings,
            outlets=outlets,
            bytes_max=self._record_bytes_max,
        )
        back = np.unique(outgoing.rows.source[np.concatenate((fates.retried, fates.held))]).tolist()
        places = {source: {outgoing.sources.name(source)} for source in back}
        for source in np.unique(outgoing.rows.source[fates.unwritable]).tolist():
            letters = self._dead_letter_topic_of[outgoing.sources.name(source)[0]]
            places.setdefault(source, set()).add((letters, EVERY))
        refuse_down({target: known for pair in outlets.items() for target, known in self._named(*pair)}, places)
        return fates

    def _named(self, delay_topic: str, outlets: tuple[Target, Target]) -> Iterator[tuple[str, Target]]:
        yield delay_topic, outlets[0]
        yield self._dead_letter_topic_of[delay_topic], outlets[1]

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
        doubtful = {
            name
            for code, name in used
            if name in found
            and self._has_misfits(outgoing, sorting, codes == code, name, found[name], partition, sizes)
        }
        if doubtful:
            found |= self.targets.renew(doubtful)
        lanes = []
        for code, name in used:
            rows = codes == code
            target = found.get(name)
            if target is None:
                detail = f"{name}: {RejectReason.FORBIDDEN_TARGET.explanation}"
                if name in self.dead_letter_topics:
                    release_letters(outgoing, sorting, rows, name, self._dead_letter_topic_of)
                sorting.refuse(rows, RejectReason.FORBIDDEN_TARGET, detail)
                continue
            if name in doubtful:
                self._refuse_misfits(outgoing, sorting, rows, name, target, partition, sizes)
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
        outgoing: Outgoing,
        sorting: Sorting,
        rows: Bools,
        name: str,
        target: Target,
        partition: npt.NDArray[np.int32] | None,
        sizes: Int64s,
    ) -> None:
        """Condemn what cannot go there by its size, partition or key."""
        if target.refusal is not None and not target.partitions:
            return
        rows = rows & sorting.deliver
        outside, large, keyless, wary = self._misfits(outgoing, name, target, rows, partition, sizes)
        detail = f"{name} has {target.partitions} partitions"
        sorting.refuse(outside, RejectReason.PARTITION_OUT_OF_RANGE, detail)
        sorting.refuse(large, RejectReason.TOO_LARGE, f"{name} takes at most {self._limit(target)} bytes")
        sorting.refuse(keyless, RejectReason.NO_KEY, f"{name}: {RejectReason.NO_KEY.explanation}")
        sorting.put_off(wary, Refusal(RejectReason.TOO_LARGE, f"{name} has refused records of this size"))

    def _has_misfits(
        self,
        outgoing: Outgoing,
        sorting: Sorting,
        rows: Bools,
        name: str,
        target: Target,
        partition: npt.NDArray[np.int32] | None,
        sizes: Int64s,
    ) -> bool:
        """Whether some of the rows cannot go there, by what is known of it."""
        if target.refusal is not None and not target.partitions:
            return False
        found = self._misfits(outgoing, name, target, rows & sorting.deliver, partition, sizes)
        return any(misfits.any() for misfits in found)

    def _misfits(
        self,
        outgoing: Outgoing,
        name: str,
        target: Target,
        rows: Bools,
        partition: npt.NDArray[np.int32] | None,
        sizes: Int64s,
    ) -> tuple[Bools, Bools, Bools, Bools]:
        """Rows whose partition does not exist, that are too large, that have no key where one is needed, and that may
        be too large where that has happened often lately."""
        none: Bools = np.zeros(len(rows), dtype=np.bool_)
        limit = self._limit(target)
        return (
            none if partition is None else rows & (partition >= target.partitions),
            larger(outgoing, name, rows, sizes, limit),
            rows & outgoing.keyless() if target.needs_key else none,
            larger(outgoing, name, rows, sizes, target.bytes_max or limit) if target.is_wary else none,
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
        rejected: Counter[str],
    ) -> Iterator[Batch]:
        for lane, target in lanes:
            # The client fills batches up to batch.size whatever the topic takes: a topic that takes less gets what
            # fits, one lot at a time. (Compressed, more would fit: how much, only the broker can tell.)
            small = target.bytes_max is not None and target.bytes_max < self._batch_bytes_max
            yield from outgoing.batches(lane, sizes, lot_bytes=target.bytes_max if small else None)
        topics = self._dead_letter_topic_of
        lot = self._copy_lot_bytes(outgoing) if len(rolled) or len(deferred) or fates is not None else None
        if len(rolled):
            yield from copies(outgoing, rolled, sizes, rolled=1, lot_bytes=lot)
        if len(deferred):
            yield from copies(outgoing, deferred, sizes, at_ms=slots_ms, lot_bytes=lot)
        if fates is not None:
            if len(fates.retried):
                failed, at_ms = fates.retried_failed, fates.retried_at_ms
                yield from copies(outgoing, fates.retried, sizes, failed=failed, at_ms=at_ms, lot_bytes=lot)
            if len(fates.held):
                yield from held(outgoing, fates.held, topics, sizes, fates.held_at_ms, partial(_plain, Counter()))
            if len(fates.dead):
                plain = partial(_plain, rejected)
                yield from dead_letters(outgoing, fates.dead, condemned, topics, sizes, fates.cut, plain)

    def _copy_lot_bytes(self, outgoing: Outgoing) -> int | None:
        """As for targets: what a delay topic takes at once, if that is less than the client's batches."""
        limits = [self._believed[name].bytes_max for name in self._outlets(outgoing)]
        least = min((limit for limit in limits if limit is not None), default=self._batch_bytes_max)
        return least if least < self._batch_bytes_max else None


def _plain(counts: Counter[str], reason: str, where: Where, detail: str) -> None:
    """A row that was counted with its reason has become a plain letter."""
    if counts[reason]:
        counts[reason] -= 1
        counts[str(RejectReason.UNREADABLE)] += 1
    log.error("dead-letter-plain", topic=where.topic, partition=where.partition, offset=where.offset, reason=detail)
