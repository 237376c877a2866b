"""What becomes of every row that is due: delivered, rolled, or a dead letter. The targets are looked at before anything
is produced.

kind      due          target                                             becomes
reject    -            -                                                  dead letter with its reason
cancel    -            -                                                  nothing: it has done its work in the store
timer     after now    -                                                  a roll: a copy in its own partition of the
delay topic
timer     by now       condemned after an abort                           dead letter with what the brokers said
timer     by now       none, not allowed, missing, no such partition,     dead letter with its reason
                       larger than the topic takes
timer     by now       fine                                               delivered
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bridge.copies import rolls
from bridge.deadletter import Condemned, dead_letters
from bridge.headers import RejectReason
from bridge.outgoing import Batch, Lane, Outgoing, SourceColumns, integers
from bridge.targets import Target, Targets
from timerstore.entry import Kind
from timerstore.position import Bools, Int64s, pack
from timerstore.sources import Sources
from timerstore.transaction import Rows

PERMITTED_MAX: Final = 10_000
"""Answers of the allow-list that are kept; names come from headers."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The rows of one `take`, sorted out. `batches` may be asked for once; `records` is how many records they hold.

    `keys` int64[n] are the rows' (source, offset) packed as in the store, `due` int64[] the due times of the rows that
    are delivered,
    `delivered` counts by topic, `rejected` by reason, `bytes` all that is sent.
    """

    batches: Iterator[Batch]
    records: int
    bytes: int
    keys: Int64s
    due: Int64s
    delivered: Mapping[str, int]
    rejected: Mapping[str, int]
    rolled: int


@dataclass(slots=True)
class _Sorting:
    """Rows on their way to a plan: `deliver` bool[n] shrinks as rows are `condemned` (by row)."""

    deliver: Bools
    condemned: dict[int, Condemned] = field(default_factory=dict)

    def refuse(self, rows: Bools, reason: RejectReason, detail: str) -> None:
        hit = np.flatnonzero(rows & self.deliver)
        if len(hit):
            self.deliver[hit] = False
            self.condemned.update(dict.fromkeys(hit.tolist(), Condemned(reason, detail)))


class Planner:
    """Sorts out rows. One thread."""

    def __init__(
        self,
        *,
        targets: Targets,
        permitted: Callable[[str], bool],
        default_targets: Mapping[str, str | None],
        dead_letter_topics: Mapping[str, str],
        batch_bytes_max: int = 1_000_000,
        record_bytes_max: int = 64 << 20,
        compressed: bool = False,
    ) -> None:
        """`permitted` is the allow-list; dead-letter topics are refused here, whatever it says. By delay topic: default
        target, dead-letter topic.

        `batch_bytes_max` is the producer's batch.size: targets that take less get their records in smaller lots.
        `record_bytes_max` is its message.max.bytes. With `compressed`, only the brokers can tell whether a record is
        too large.
        """
        self.targets = targets
        self.own_topics = frozenset(dead_letter_topics.values()) | frozenset(default_targets)
        self._permitted = permitted
        self._permitted_known: dict[str, bool] = {}
        self._default_targets = default_targets
        self._dead_letter_topics = dead_letter_topics
        self._batch_bytes_max = batch_bytes_max
        self._record_bytes_max = record_bytes_max
        self._compressed = compressed
        self._columns: SourceColumns | None = None

    def plan(self, rows: Rows, sources: Sources, now_ms: int, condemned: Mapping[int, Condemned]) -> Plan:
        """Sort out the rows taken at `now_ms`. `condemned` (by packed source and offset) were refused by the brokers
        before.

        Raises EnvironmentFailure when a target cannot be looked up now.
        """
        if self._columns is None or self._columns.sources is not sources:
            self._columns = SourceColumns(sources, self._default_targets)
        outgoing = Outgoing(rows, self._columns)
        keys = pack(rows.source.astype(np.int64), rows.offset)
        sizes = outgoing.bytes()
        timers = outgoing.kind == Kind.TIMER
        rolling = timers & (outgoing.due > now_ms)
        sorting = _Sorting((timers & ~rolling) | (outgoing.kind == Kind.CANCEL))
        sorting.refuse(_unsupported(outgoing), RejectReason.UNSUPPORTED, RejectReason.UNSUPPORTED.explanation)
        if condemned:
            for row in np.flatnonzero(np.isin(keys, np.fromiter(condemned, np.int64))).tolist():
                mine = condemned[int(keys[row])]
                sorting.refuse(_only(row, len(rows)), mine.reason, mine.detail)
        names, codes = outgoing.targets()
        lanes = self._lanes(outgoing, sorting, names, codes, sizes)
        rolled = np.flatnonzero(rolling)
        dead = int((outgoing.kind == Kind.REJECT).sum()) + len(sorting.condemned)
        due = outgoing.due if len(lanes) == 1 and len(lanes[0][0].ids) == len(rows) else outgoing.due[sorting.deliver]
        return Plan(
            batches=self._batches(outgoing, lanes, sorting.condemned, rolled, sizes, dead),
            records=sum(len(lane.ids) for lane, _ in lanes) + len(rolled) + dead,
            bytes=int(sizes.sum()),
            keys=keys,
            due=due,
            delivered={lane.topic: len(lane.ids) for lane, _ in lanes},
            rejected=_reasons(outgoing, sorting.condemned, dead),
            rolled=len(rolled),
        )

    def _lanes(
        self, outgoing: Outgoing, sorting: _Sorting, names: list[str], codes: npt.NDArray[np.int32], sizes: Int64s
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
            if name not in allowed:
                sorting.refuse(
                    rows, RejectReason.FORBIDDEN_TARGET, f"{name}: {RejectReason.FORBIDDEN_TARGET.explanation}"
                )
            elif target is None:
                sorting.refuse(rows, RejectReason.UNKNOWN_TARGET, f"{name}: {RejectReason.UNKNOWN_TARGET.explanation}")
            elif target.refusal is not None:
                sorting.refuse(rows, RejectReason.PRODUCE_FAILED, f"{name}: {target.refusal}")
            else:
                self._refuse_misfits(sorting, rows, name, target, partition, sizes)
                ids = np.flatnonzero(rows & sorting.deliver)
                if len(ids):
                    lanes.append((Lane(topic=name, ids=ids), target))
        return lanes

    def _refuse_misfits(
        self,
        sorting: _Sorting,
        rows: Bools,
        name: str,
        target: Target,
        partition: npt.NDArray[np.int32] | None,
        sizes: Int64s,
    ) -> None:
        if partition is not None:
            outside = rows & (partition >= target.partitions)
            sorting.refuse(outside, RejectReason.PARTITION_OUT_OF_RANGE, f"{name} has {target.partitions} partitions")
        limit = self._record_bytes_max
        if target.bytes_max is not None and not self._compressed:
            limit = min(limit, target.bytes_max)
        if int(sizes.max()) > limit:
            sorting.refuse(rows & (sizes > limit), RejectReason.TOO_LARGE, f"{name} takes at most {limit} bytes")

    def _may_go_to(self, name: str) -> bool:
        known = self._permitted_known.get(name)
        if known is None:
            if len(self._permitted_known) >= PERMITTED_MAX:
                self._permitted_known.clear()
            known = not name.startswith("__") and name not in self.own_topics and self._permitted(name)
            self._permitted_known[name] = known
        return known

    def _batches(
        self,
        outgoing: Outgoing,
        lanes: list[tuple[Lane, Target]],
        condemned: Mapping[int, Condemned],
        rolled: npt.NDArray[np.intp],
        sizes: Int64s,
        dead: int,
    ) -> Iterator[Batch]:
        for lane, target in lanes:
            # The client fills batches up to batch.size whatever the topic takes: a topic that takes less gets what
            # fits, one lot at a time.
            small = target.bytes_max is not None and target.bytes_max < self._batch_bytes_max and not self._compressed
            yield from outgoing.batches(lane, sizes, lot_bytes=target.bytes_max if small else None)
        if len(rolled):
            yield from rolls(outgoing, rolled, sizes)
        if dead:
            yield from dead_letters(outgoing, condemned, self._dead_letter_topics, sizes)


def _unsupported(outgoing: Outgoing) -> Bools:
    """Cancels, and timers that ask to take the place of another: a promise that is not kept must not look kept."""
    replaces: Bools = outgoing.rows.payload.column("replace").to_numpy(zero_copy_only=False)
    cancels: Bools = outgoing.kind == Kind.CANCEL
    return cancels | replaces


def _only(row: int, n: int) -> Bools:
    mask: Bools = np.zeros(n, dtype=np.bool_)
    mask[row] = True
    return mask


def _reasons(outgoing: Outgoing, condemned: Mapping[int, Condemned], dead: int) -> dict[str, int]:
    if not dead:
        return {}
    counts = Counter(str(verdict.reason) for verdict in condemned.values())
    rejects = outgoing.rows.payload.column("reason").filter(pa.array(outgoing.kind == Kind.REJECT))
    counts.update(reason for reason in rejects.to_numpy(zero_copy_only=False).tolist())
    return dict(counts)
