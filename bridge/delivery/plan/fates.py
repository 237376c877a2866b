"""What becomes of rows that are not delivered: put off, given up, or held. It is decided here, nothing is produced.

row                                          copy possible    becomes
its target fails for now, attempts left      yes              retry: a copy that comes up again after a while
its target fails for now, attempts left      no               dead letter with the target's reason
its target fails for now, for the last time  -                dead letter with the target's reason
its target can never take it; a reject       -                dead letter ...
... where its dead-letter topic fails        yes              retry; a reject is held: see `deadletter`
... where its dead-letter topic fails        no               dead letter: the transaction fails, and the bridge says so

A copy is possible where the delay topic takes records of its size. Where it takes nothing for now, or neither of the
two topics takes anything, the row is *unwritable*: its source is held (held_sources.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.copies import copies, copy_sizes
from bridge.delivery.plan.dead_letters import is_held, reason_of
from bridge.delivery.plan.due_rows import Outgoing
from bridge.delivery.plan.record_size import exact_bytes
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.settings.clients import HEADER_ALLOWANCE_BYTES
from bridge.wire.headers import RejectReason
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Findings:
    """What aborts have taught of single records, by packed (source, offset): those whose target refuses them for good,
    those whose dead letter is refused, those whose copy is, those of which no dead letter fits unless it is cut, and
    those that wait, since one of them spoils transactions.
    """

    condemned: Mapping[int, Refusal] = field(default_factory=dict)
    no_letter: Collection[int] = ()
    no_copy: Collection[int] = ()
    cut: Collection[int] = ()
    put_off: Mapping[int, Refusal] = field(default_factory=dict)


_FOR_GOOD: Final = frozenset({RejectReason.TARGET_DENIED, RejectReason.UNKNOWN_TARGET})
"""A delay topic that takes no copies for one of these will not in a minute: dead letters in place of retries."""
_SLACK_BYTES: Final = 1_000
"""What the upper bounds are beyond the size itself, at most (but for names and ids, which are short)."""

DEAD_LETTER_TOPIC: Final = "dead-letter-topic"
"""The reason of a retry whose dead letter cannot be written; it never becomes that of a dead letter."""


@dataclass(slots=True)
class Sorting:
    """Rows on their way to a plan: `deliver` bool[n] shrinks as rows are `condemned` (for good) or `failing` (for now),
    by row; `released` are dead letters that were held.
    """

    deliver: Bools
    condemned: dict[int, Refusal] = field(default_factory=dict)
    failing: dict[int, Refusal] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)

    def refuse(self, rows: Bools, reason: RejectReason, detail: str) -> None:
        """These are not delivered, ever."""
        self._take(rows, self.condemned, Refusal(reason, detail))

    def put_off(self, rows: Bools, refusal: Refusal) -> None:
        """These are not delivered for now."""
        self._take(rows, self.failing, refusal)

    def _take(self, rows: Bools, into: dict[int, Refusal], refusal: Refusal) -> None:
        hit = np.flatnonzero(rows & self.deliver)
        if len(hit):
            self.deliver[hit] = False
            into.update(dict.fromkeys(hit.tolist(), refusal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """Rows that are not delivered, by what becomes of them, each in the order of position; `reasons` counts retries."""

    dead: Rows
    cut: frozenset[int]
    """Rows among `dead` whose letters are cut, since they fit nowhere whole."""
    retried: Rows
    retried_at_ms: Int64s
    held: Rows
    held_at_ms: Int64s
    retried_failed: Int64s
    """How many attempts each of them has behind it now that it did not have before."""
    unwritable: Rows
    """Rows whose dead letter has no topic, and of which no copy can be made."""
    reasons: Mapping[str, int]


def settle(
    outgoing: Outgoing,
    sorting: Sorting,
    *,
    keys: Int64s,
    sizes: Int64s,
    now_ms: int,
    policy: RetryPolicy,
    findings: Findings,
    outlets: Mapping[str, tuple[Target, Target]],
    bytes_max: int,
) -> Fates:
    """Decide; moves rows from `sorting.failing` to `sorting.condemned` that are given up.

    `keys` int64[n] are the rows' names in `findings`; `outlets` are, by delay topic, the topic itself and its
    dead-letter topic; `bytes_max` is what the client sends at most.
    """
    reasons: Counter[str] = Counter()
    failing = _rows(sorting.failing)
    counts = np.array([sorting.failing[row].counts for row in failing.tolist()], dtype=np.bool_)
    over = counts & policy.is_over(outgoing.attempt[failing].astype(np.int64) + 1)
    can = copyable(outgoing, failing, keys, sizes, findings, outlets, bytes_max)
    for row in failing[over | ~can].tolist():
        sorting.condemned[row] = sorting.failing.pop(row)
    retried = failing[~over & can]
    blameless = retried[~counts[~over & can]]
    reasons.update(str(sorting.failing[row].reason) for row in retried.tolist())

    rejects = np.flatnonzero(outgoing.kind == Kind.REJECT)
    dead = np.union1d(np.union1d(_rows(sorting.condemned), sorting.released), rejects).astype(np.intp)
    stuck = dead[~_writable(outgoing, dead, keys, findings, outlets)]
    held: Rows = np.empty(0, np.intp)
    if len(stuck):
        stuck = stuck[copyable(outgoing, stuck, keys, sizes, findings, outlets, bytes_max)]
        is_timer = outgoing.kind[stuck] == Kind.TIMER
        reasons[DEAD_LETTER_TOPIC] += len(stuck)
        dead = np.setdiff1d(dead, stuck)
        retried, held = np.union1d(retried, stuck[is_timer]), stuck[~is_timer]
    failed = np.where(np.isin(retried, blameless), 0, 1).astype(np.int64)
    return Fates(
        dead=dead,
        retried_failed=failed,
        unwritable=dead[~_has_topic(outgoing, dead, outlets)],
        cut=frozenset(dead[_named(keys[dead], findings.cut)].tolist()),
        retried=retried,
        retried_at_ms=now_ms + policy.waits_ms(np.maximum(1, outgoing.attempt[retried] + failed), keys[retried]),
        held=held,
        held_at_ms=now_ms + policy.waits_ms(np.ones(len(held), dtype=np.int64), keys[held]),
        reasons={reason: count for reason, count in reasons.items() if count},
    )


def copyable(
    outgoing: Outgoing,
    ids: Rows,
    keys: Int64s,
    sizes: Int64s,
    findings: Findings,
    outlets: Mapping[str, tuple[Target, Target]],
    bytes_max: int,
) -> Bools:
    """Which of the rows can be copied into their own partition of the delay topic; bool[m]."""
    limits = np.full(len(outgoing.sources), bytes_max, dtype=np.int64)
    for source in np.unique(outgoing.rows.source[ids]).tolist():
        topic, _ = outlets[outgoing.sources.name(source)[0]]
        if topic.refusal is not None and topic.refusal.reason in _FOR_GOOD:
            limits[source] = 0
        elif topic.bytes_max is not None:
            limits[source] = min(bytes_max, topic.bytes_max)
    needed = copy_sizes(outgoing, ids, sizes) + _letter_bytes(outgoing, ids)
    room = limits[outgoing.rows.source[ids]]
    fits: Bools = needed <= room
    near = ~fits & (outgoing.kind[ids] == Kind.TIMER) & (sizes[ids] - _SLACK_BYTES <= room)
    if near.any():
        exact = exact_bytes(copies(outgoing, ids[near], sizes, at_ms=outgoing.due[ids[near]]), len(outgoing))
        fits[near] = exact[ids[near]] <= room[near]
    return fits & ~_named(keys[ids], findings.no_copy)


def _letter_bytes(outgoing: Outgoing, ids: Rows) -> Int64s:
    """What a copy holds beyond the message when it is a whole dead letter."""
    extra: Int64s = np.where(outgoing.kind[ids] == Kind.TIMER, 0, HEADER_ALLOWANCE_BYTES // 8).astype(np.int64)
    return extra


def _has_topic(outgoing: Outgoing, ids: Rows, outlets: Mapping[str, tuple[Target, Target]]) -> Bools:
    """Which of the rows have a dead-letter topic that takes something; bool[m]."""
    well = np.ones(len(outgoing.sources), dtype=np.bool_)
    for source in np.unique(outgoing.rows.source[ids]).tolist():
        topic = outlets[outgoing.sources.name(source)[0]][1]
        well[source] = topic.refusal is None or topic.is_unanswered
    result: Bools = well[outgoing.rows.source[ids]]
    return result


def _writable(
    outgoing: Outgoing, ids: Rows, keys: Int64s, findings: Findings, outlets: Mapping[str, tuple[Target, Target]]
) -> Bools:
    """Which of the rows can become dead letters; bool[m]."""
    well = np.ones(len(outgoing.sources), dtype=np.bool_)
    for source in np.unique(outgoing.rows.source[ids]).tolist():
        topic = outlets[outgoing.sources.name(source)[0]][1]
        well[source] = topic.is_well or topic.is_unanswered
    result: Bools = well[outgoing.rows.source[ids]] & ~_named(keys[ids], findings.no_letter)
    return result


def _named(keys: Int64s, names: Collection[int]) -> Bools:
    return np.isin(keys, np.fromiter(names, np.int64, len(names)))


def _rows(by_row: Mapping[int, object]) -> Rows:
    return np.sort(np.fromiter(by_row, np.intp, len(by_row)))


def reasons(outgoing: Outgoing, condemned: Mapping[int, Refusal], dead: npt.NDArray[np.intp]) -> Counter[str]:
    """Dead letters by reason; one that was held is counted when it is held no longer."""
    if not len(dead):
        return Counter()
    counts = Counter(str(condemned[row].reason) for row in dead.tolist() if row in condemned)
    rejects = dead[outgoing.kind[dead] == Kind.REJECT]
    counts.update(outgoing.column("reason", rejects))
    released = np.array(
        [row for row in dead[outgoing.kind[dead] == Kind.TIMER].tolist() if row not in condemned], np.intp
    )
    if len(released):
        counts.update(reason_of(own) for own in outgoing.headers(released).lists())
    return counts


def release_letters(
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
