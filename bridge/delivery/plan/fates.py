"""Fates: for each due row one fate and one reason, decided before anything is produced. Pure.

The passes run in the order of this table. Each takes the rows with the fate `was`, and returns new fates. Every row has
exactly one fate at any time.

    pass           was           row                                                becomes   reason
    by_kind        -             a record that decoding rejected                   LETTER    its own
                   -             a cancel                                          NOTHING
                   -             a timer that is due later than now                ROLL
                   -             any other timer                                   DELIVER
    recurring      DELIVER ROLL  the record of a recurring message                 ADVANCE
                   DELIVER       a missed tick that the policy leaves out          ADVANCE
                   DELIVER ROLL  no valid schedule, or no due time from it         LETTER    bad-schedule, beyond-max
                   DELIVER ADVANCE  a next tick without a possible copy            LETTER    too-large
    misnamed       (the same)    a header name that the client would cut           LETTER    bad-header-name
    written        any           its record is already in Kafka                    NOTHING
                   any           the same, without the next tick of its schedule   ADVANCE
    after_aborts   DELIVER       rejected by its target in an earlier attempt      LETTER    the brokers' refusal
                   DELIVER       put off by an earlier attempt                     RETRY     the brokers' refusal
    overdue        DELIVER       waited longer than the policy allows              LETTER    overdue
    deferred       DELIVER       waited, and its slot in the catch-up is later     DEFER
    without_target DELIVER       no target, not even its topic's default           LETTER    no-target
    forbidden      DELIVER       a held dead letter, for its own dead-letter topic LETTER    its own
                   DELIVER       any other for a target that is not allowed        LETTER    forbidden-target
                   ADVANCE       a recurring message's record for such a target    LETTER    forbidden-target
    fitting        DELIVER       a partition that its target does not have         LETTER    partition-out-of-range
                   DELIVER       larger than the limit of its target               LETTER    too-large
                   DELIVER       no key, and its target is compacted               LETTER    no-key
                   DELIVER       maybe too large for a wary target                 RETRY     too-large
    reachable      DELIVER       its target is missing, denied or unavailable      RETRY     the target's refusal
                   DELIVER       its target is paused                              RETRY     target-paused
                   DELIVER       its partition of the target takes nothing now     RETRY     target-unavailable
    (planner.py)   LETTER RETRY  lasting, and the target was looked up before the
                                 message was due or written; a copy is possible    RETRY     target-in-doubt
    forwarded      NOTHING       a cancel without a key, not forwarded yet         FORWARD
    rolls          ROLL          a copy is not possible                            LETTER    too-large
    given_up       RETRY         no attempt is left, or a copy is not possible     LETTER    the same
    letters_down   LETTER        its topic fails, or it is too large for it; a copy is possible:
                                 a timer                                           RETRY     dead-letter-topic
                                 a record that decoding rejected, or would reject
                                 when its copy is read                             HOLD      dead-letter-topic

A copy is possible where the delay topic takes records of its size. A row is *unwritable* where it needs a partition
that takes nothing now, and has no other way: its source is held (held_sources.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from bridge.delivery.doubt.findings import Findings, Part
from bridge.delivery.plan.backoff import IN_DOUBT_MS, WINDOW_MS, RetryPolicy, parked_ms
from bridge.delivery.plan.copies import copies, copy_sizes
from bridge.delivery.plan.dead_letters import COPY_TOO_LARGE, DETAIL_CHARS_MAX, dead_letters, is_held, reason_of
from bridge.delivery.plan.due_rows import DueRows, Ids, TargetRows
from bridge.delivery.plan.forwarded_cancels import Forwards
from bridge.delivery.plan.overdue import BURST_MS
from bridge.delivery.plan.record_size import SizeLimits, exact_bytes, larger
from bridge.delivery.plan.ticks import Ticks
from bridge.delivery.targets.breakers import EVERY
from bridge.delivery.targets.partitioner import place
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.settings.clients import HEADER_ALLOWANCE_BYTES
from bridge.wire.reasons import RejectReason
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s


class Fate(IntEnum):
    """The decision on a due row."""

    NOTHING = 0  # finished without output
    DELIVER = 1
    ROLL = 2  # copied into its own partition: its due time is beyond the roll window
    DEFER = 3  # copied with a slot of its own: the bridge catches up
    RETRY = 4  # copied with a later time: its target or its topic fails for now
    LETTER = 5  # written to the dead-letter topic
    HOLD = 6  # copied as its future dead letter: the dead-letter topic fails for now
    FORWARD = 7  # written to the other partitions of its topic
    ADVANCE = 8  # delivers nothing; only the next tick of its schedule is written


OWN: Final = -1
"""In place of a reason: the one that decoding gave, or that a held dead letter carries."""
LETTERS_FAIL: Final = -2
"""In place of a reason: the dead-letter topic fails."""
DEAD_LETTER_TOPIC: Final = "dead-letter-topic"
"""The reason of a retry whose dead letter cannot be written; it never becomes that of a dead letter."""
_LASTING: Final = frozenset({RejectReason.TARGET_DENIED, RejectReason.UNKNOWN_TARGET})
"""Refusals of a delay topic that do not pass soon: dead letters take the place of retries."""
_LETTER_BYTES: Final = 4 * DETAIL_CHARS_MAX + 1_000
"""The excess of a dead letter over the copy of its record, at most: the reason in words, and the names of headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritable:
    """Why a source cannot go on: in words, and the partitions of which it needs one (empty: time alone helps)."""

    detail: str
    places: Collection[tuple[str, int]] = ()


class Unplannable(Exception):
    """Rows of these sources (by index) cannot be finished now: plan again without them."""

    def __init__(self, unwritable: Mapping[int, Unwritable]) -> None:
        super().__init__(f"{len(unwritable)} sources cannot be written to")
        self.unwritable = unwritable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fates:
    """Fate and reason of n rows: `fate` int8[n]; `reason` int32[n], an index into `refusals`, or OWN or LETTERS_FAIL;
    `at_ms` int64[n], the effective time of a copy, for the fates DEFER, RETRY and HOLD."""

    fate: npt.NDArray[np.int8]
    reason: npt.NDArray[np.int32]
    at_ms: Int64s
    refusals: tuple[Refusal, ...] = ()

    def are(self, fate: Fate) -> Bools:
        """The rows with that fate; bool[n]."""
        result: Bools = self.fate == fate.value  # numpy is slow with an enum's member
        return result

    def ids(self, *fates: Fate) -> Ids:
        """The rows with one of these fates, in the order of position."""
        return np.flatnonzero(np.logical_or.reduce([self.are(fate) for fate in fates]))

    @property
    def are_plain(self) -> bool:
        """Whether all rows are delivered, or finished without output: the usual case."""
        return bool(self.fate.max(initial=0) <= Fate.DELIVER.value)

    def instead(self, rows: Bools, fate: Fate, reason: Refusal | int = OWN, *, was: Fate = Fate.DELIVER) -> Fates:
        """Give another fate to those of `rows` bool[n] with the fate `was`; without such rows, the same object."""
        return self.put(np.flatnonzero(rows & self.are(was)), fate, [reason])

    def put(self, ids: Ids, fate: Fate, reasons: Sequence[Refusal | int] | None = None) -> Fates:
        """Give the rows `ids` another fate, with one reason, with one each, or with the present ones (None)."""
        if not len(ids):
            return self
        fates, codes = self.fate.copy(), self.reason.copy()
        code_of = {refusal: code for code, refusal in enumerate(self.refusals)}
        fates[ids] = fate
        if reasons is not None:
            codes[ids] = [r if isinstance(r, int) else code_of.setdefault(r, len(code_of)) for r in reasons]
        return replace(self, fate=fates, reason=codes, refusals=tuple(code_of))

    def refused(self, ids: Ids) -> dict[int, Refusal]:
        """The refusals, by row, of the given rows without a reason of their own."""
        codes = zip(ids.tolist(), self.reason[ids].tolist(), strict=True)
        return {row: self.refusals[code] for row, code in codes if code >= 0}

    def count_attempts(self, ids: Ids) -> Int64s:
        """The number of attempts that each of these retries adds; int64[m]."""
        # The last two stand for LETTERS_FAIL and OWN.
        counts = np.array([*(refusal.counts for refusal in self.refusals), True, True], dtype=np.int64)
        result: Int64s = counts[self.reason[ids]]
        return result

    def retried(self) -> Counter[str]:
        """Rows with a retry or a held dead letter, by reason."""
        codes = self.reason[self.ids(Fate.RETRY, Fate.HOLD)].tolist()
        return Counter(DEAD_LETTER_TOPIC if c == LETTERS_FAIL else str(self.refusals[c].reason) for c in codes)

    def rejected(self, rows: DueRows) -> Counter[str]:
        """Dead letters by reason. A held one counts at its release."""
        dead = self.ids(Fate.LETTER)
        counts = Counter(str(refusal.reason) for refusal in self.refused(dead).values())
        own = dead[self.reason[dead] == OWN]
        was_held = rows.kind[own] == Kind.TIMER
        counts.update(rows.column("reason", own[~was_held]))
        if was_held.any():
            counts.update(reason_of(headers) for headers in rows.headers(own[was_held]).lists())
        return counts


class OwnTopics:
    """What delay topics and dead-letter topics accept now, for some rows."""

    def __init__(
        self,
        rows: DueRows,
        known: Mapping[str, Target],
        letter_topics: Mapping[str, str],
        findings: Findings,
        limits: SizeLimits,
    ) -> None:
        """`known` has both kinds of topics, by name; `letter_topics` maps a delay topic to its dead-letter topic."""
        self._rows = rows
        self._findings = findings
        self._known = known
        self._limits = limits
        self.letter_topics = letter_topics
        size = len(rows.sources)
        self.is_down: Bools = np.zeros(size, dtype=np.bool_)
        """Whether a source's own partition takes nothing now; bool by index, as the others."""
        self._takes_letters: Bools = np.ones(size, dtype=np.bool_)
        self._copy_bytes_max: Int64s = np.zeros(size, dtype=np.int64)
        self._letter_bytes_max: Int64s = np.zeros(size, dtype=np.int64)
        sources = {source: rows.sources.name(source) for source in np.unique(rows.source).tolist()}
        self.chunk_bytes = limits.chunk_bytes(known[name] for name, _ in sources.values())
        """Of the delay topics; see `SizeLimits.chunk_bytes`."""
        self.letters_chunk_bytes = limits.chunk_bytes(known[letter_topics[name]] for name, _ in sources.values())
        """Of the dead-letter topics."""
        for source, (name, partition) in sources.items():
            topic, letters = known[name], known[letter_topics[name]]
            self.is_down[source] = topic.is_down(partition)
            self._takes_letters[source] = letters.is_well or letters.is_unanswered
            self._letter_bytes_max[source] = limits.record_bytes(letters)
            is_lasting = topic.refusal is not None and topic.refusal.reason in _LASTING
            self._copy_bytes_max[source] = 0 if is_lasting else limits.record_bytes(topic)

    def of(self, rows: DueRows) -> OwnTopics:
        """The same for other rows of the same topics."""
        return OwnTopics(rows, self._known, self.letter_topics, self._findings, self._limits)

    def copyable(self, ids: Ids) -> Bools:
        """The rows whose copy their own partition of the delay topic can take; bool[m]."""
        rows, is_timer = self._rows, self._rows.kind[ids] == Kind.TIMER
        # The copy of a record that decoding rejects is a whole dead letter.
        needed, more = copy_sizes(rows, ids), HEADER_ALLOWANCE_BYTES // 8
        room = self._copy_bytes_max[rows.source[ids]]
        if (needed + more > room).any():
            is_timer &= ~np.isin(ids, list(unreadable_copies(rows)))
        needed = needed + np.where(is_timer, 0, more)
        fits: Bools = needed <= room
        near = ~fits & is_timer & (room > 0)
        if near.any():
            exact = exact_bytes(copies(rows, ids[near], at_ms=rows.due[ids[near]]), len(rows))
            fits[near] = exact[ids[near]] <= room[near]
        return fits & ~_named(rows.keys[ids], self._findings.no_copy)

    def takes_letters(self, ids: Ids, refused: Mapping[int, Refusal]) -> Bools:
        """The rows that can become dead letters (`refused`: why, by row); bool[m]."""
        taken: Bools = self._takes_letters[self._rows.source[ids]] & self.letters_fit(ids, refused)
        return taken & ~_named(self._rows.keys[ids], self._findings.no_letter)

    def letters_fit(self, ids: Ids, refused: Mapping[int, Refusal]) -> Bools:
        """The rows whose dead letters are within their topic's limit; bool[m]."""
        rows, room = self._rows, self._letter_bytes_max[self._rows.source[ids]]
        fits: Bools = copy_sizes(rows, ids) + _LETTER_BYTES <= room
        if not fits.all():
            near = ids[~fits]
            exact = exact_bytes(dead_letters(rows, near, refused, self.letter_topics), len(rows))
            fits[~fits] = exact[near] <= room[~fits]
        return fits

    def small_letter_topics(self, fates: Fates) -> set[str]:
        """Dead-letter topics that seem too small for some of the letters."""
        ids = fates.ids(Fate.LETTER)
        topics, _ = self._rows.places(ids[~self.letters_fit(ids, fates.refused(ids))])
        return {self.letter_topics[topic] for topic in topics}

    def without_letters(self, source: int) -> Unwritable | None:
        """Why no dead letter can be written for a source now."""
        name = self.letter_topics[self._rows.sources.name(source)[0]]
        if self._takes_letters[source] or not self._known[name].is_down(EVERY):
            return None
        return Unwritable(detail=f"{name} takes nothing now", places={(name, EVERY)})

    def unwritable(self, fates: Fates, forwards: Forwards, next_ids: Ids) -> dict[int, Unwritable]:
        """Sources, by index, with rows that need a partition which takes nothing now, and the partitions that they wait
        for; `next_ids`: commands, and rows with a next tick."""
        rows = self._rows
        result = {source: Unwritable(detail=text) for source, text in forwards.unknown.items()}
        places = forwards.places()
        copied = np.concatenate((fates.ids(Fate.ROLL, Fate.RETRY, Fate.HOLD), next_ids))
        for source in np.unique(rows.source[copied]).tolist():
            places.setdefault(source, set()).add(rows.sources.name(source))
        dead = rows.source[fates.ids(Fate.LETTER)]
        # The client chooses a letter's partition: it may be one that takes nothing.
        for source in np.unique(dead[~self._takes_letters[dead]]).tolist():
            places.setdefault(source, set()).add((self.letter_topics[rows.sources.name(source)[0]], EVERY))
        for source, wanted in places.items():
            down = {(topic, number) for topic, number in wanted if self._known[topic].is_down(number)}
            if down:
                topic, number = min(down)
                # While the source's own partition takes nothing, no copy can stand in for a dead letter.
                own = {rows.sources.name(source)} if self.is_down[source] else set()
                result[source] = Unwritable(detail=f"{topic}-{number} takes nothing now", places=frozenset(down | own))
        return result


# -- the passes --------------------------------------------------------------------------------------------------------


def by_kind(rows: DueRows, now_ms: int) -> Fates:
    """The fate of each row by its kind and due time alone."""
    timer = np.where(rows.due > now_ms, Fate.ROLL.value, Fate.DELIVER.value)
    other = np.where(rows.kind == Kind.REJECT.value, Fate.LETTER.value, Fate.NOTHING.value)
    fate = np.where(rows.kind == Kind.TIMER.value, timer, other).astype(np.int8)
    return Fates(fate=fate, reason=np.full(len(rows), OWN, dtype=np.int32), at_ms=np.zeros(len(rows), dtype=np.int64))


def recurring(rows: DueRows, fates: Fates, ticks: Ticks, own: OwnTopics) -> Fates:
    """The fates of rows with a schedule. It ends if its next tick cannot be copied, and the letter says so."""
    silent = np.flatnonzero(ticks.is_silent)
    goes_on = ticks.has_next[silent]
    fates = fates.put(silent[goes_on], Fate.ADVANCE).put(silent[~goes_on], Fate.NOTHING)
    wrong = np.array(list(ticks.wrong), dtype=np.intp)
    fates = fates.put(wrong, Fate.LETTER, list(ticks.wrong.values()))
    if unreadable := unreadable_copies(rows):
        ticks.ends(np.array(sorted(unreadable), dtype=np.intp))
    ids = np.flatnonzero(ticks.has_next)
    ids = ids[~own.copyable(ids) & ~own.is_down[rows.source[ids]]]
    ticks.ends(ids)
    return fates.put(ids, Fate.LETTER, [COPY_TOO_LARGE])


def misnamed(rows: DueRows, fates: Fates) -> Fates:
    """Turn rows into dead letters where the client would cut a header's name."""
    if (hit := rows.misnamed) is None:
        return fates
    refusal = _plain(RejectReason.BAD_HEADER_NAME)
    for was in (Fate.DELIVER, Fate.ROLL, Fate.ADVANCE):
        fates = fates.instead(hit, Fate.LETTER, refusal, was=was)
    return fates


def written(rows: DueRows, fates: Fates, findings: Findings, ticks: Ticks | None) -> Fates:
    """Do not write records that are already in Kafka; write only the missing next ticks."""
    if not findings.written:
        return fates
    parts = np.array([findings.written.get(key, Part.NONE) for key in rows.keys.tolist()], dtype=np.int8)
    is_there, goes_on = (parts & Part.RECORD) > 0, np.zeros(len(rows), dtype=np.bool_)
    if ticks is not None:
        ticks.ends(np.flatnonzero(parts & Part.NEXT))
        goes_on = ticks.has_next
    fates = fates.put(np.flatnonzero(is_there & ~goes_on), Fate.NOTHING)
    return fates.put(np.flatnonzero(is_there & goes_on), Fate.ADVANCE)


def unreadable_copies(rows: DueRows) -> dict[int, Refusal]:
    """Timers, by index, whose copies decoding would reject; a copy's reader has no other information about them."""
    names, is_timer = rows.misnamed, rows.kind == Kind.TIMER
    refusals = dict.fromkeys(np.flatnonzero(is_timer & (rows.targets[1] < 0)).tolist(), _plain(RejectReason.NO_TARGET))
    wrong = () if names is None else np.flatnonzero(is_timer & names).tolist()
    return refusals | dict.fromkeys(wrong, _plain(RejectReason.BAD_HEADER_NAME))


def after_aborts(rows: DueRows, fates: Fates, findings: Findings) -> Fates:
    """Records that failed in earlier attempts."""
    for refusals, fate in ((findings.rejected, Fate.LETTER), (findings.put_off, Fate.RETRY)):
        if refusals:
            ids = np.flatnonzero(_named(rows.keys, refusals) & fates.are(Fate.DELIVER))
            fates = fates.put(ids, fate, [refusals[key] for key in rows.keys[ids].tolist()])
    return fates


def overdue(fates: Fates, rows: Bools) -> Fates:
    """`rows` bool[n] have waited longer than the policy allows."""
    return fates.instead(rows, Fate.LETTER, _plain(RejectReason.OVERDUE))


def deferred(fates: Fates, ids: Ids, slots_ms: Int64s, now_ms: int) -> Fates:
    """Defer the rows `ids` to their slots in the catch-up, int64[m], but not to slots within BURST_MS."""
    later = slots_ms > now_ms + BURST_MS
    at_ms = fates.at_ms.copy()
    at_ms[ids[later]] = slots_ms[later]
    return replace(fates.put(ids[later], Fate.DEFER), at_ms=at_ms)


def without_target(fates: Fates, rows: Bools) -> Fates:
    """`rows` bool[n] name no target, and their topic has no default."""
    for was in (Fate.DELIVER, Fate.ROLL, Fate.ADVANCE):
        fates = fates.instead(rows, Fate.LETTER, _plain(RejectReason.NO_TARGET), was=was)
    return fates


def forbidden(rows: DueRows, fates: Fates, mine: Bools, name: str, letter_topics: Mapping[str, str]) -> Fates:
    """`mine` bool[n] are for the target `name`, which is not allowed. Only a held dead letter may go to its own
    dead-letter topic (`letter_topics`: by delay topic)."""
    if name in letter_topics.values():
        ids = np.flatnonzero(mine & fates.are(Fate.DELIVER))
        if len(ids):
            ids = ids[is_held(rows, ids)]
            own = [letter_topics[topic] == name for topic in rows.places(ids)[0]]
            fates = fates.put(ids[np.array(own, dtype=np.bool_)], Fate.LETTER)
    refusal = Refusal(RejectReason.FORBIDDEN_TARGET, f"{name}: {RejectReason.FORBIDDEN_TARGET.explanation}")
    fates = fates.instead(mine & (rows.tick == 0), Fate.LETTER, refusal, was=Fate.ADVANCE)
    return fates.instead(mine, Fate.LETTER, refusal)


def fitting(rows: DueRows, fates: Fates, mine: Bools, name: str, target: Target, limits: SizeLimits) -> Fates:
    """Refuse those of `mine` bool[n] whose partition, size or missing key the target `name` cannot take; without such
    rows, returns the same object. They are not retried: most likely the message is wrong, and its sender should know
    now."""
    if target.refusal is not None and not target.partitions:
        return fates
    mine = mine & fates.are(Fate.DELIVER)
    limit = limits.record_bytes(target)
    if rows.partition is not None:
        refusal = Refusal(RejectReason.PARTITION_OUT_OF_RANGE, f"{name} has {target.partitions} partitions")
        fates = fates.instead(mine & (rows.partition >= target.partitions), Fate.LETTER, refusal)
    refusal = Refusal(RejectReason.TOO_LARGE, f"{name} takes at most {limit} bytes")
    fates = fates.instead(larger(rows, name, mine, limit), Fate.LETTER, refusal)
    if target.needs_key:
        refusal = Refusal(RejectReason.NO_KEY, f"{name}: {RejectReason.NO_KEY.explanation}")
        fates = fates.instead(mine & rows.keyless(), Fate.LETTER, refusal)
    if target.is_wary:
        refusal = Refusal(RejectReason.TOO_LARGE, f"{name} has rejected records of this size")
        fates = fates.instead(larger(rows, name, mine, target.bytes_max or limit), Fate.RETRY, refusal)
    return fates


def reachable(
    rows: DueRows, fates: Fates, mine: Bools, name: str, target: Target, partitioner: str
) -> tuple[Fates, TargetRows]:
    """Those of `mine` bool[n] that can go to the target `name` now: all or some of its partitions may take nothing."""
    if target.refusal is not None:
        fates = fates.instead(mine, Fate.RETRY, target.refusal)
    ids = np.flatnonzero(mine & fates.are(Fate.DELIVER))
    if not target.down or not len(ids):
        return fates, TargetRows(topic=name, ids=ids)
    placed, is_up = place(
        rows.column("key", ids),
        np.full(len(ids), -1, dtype=np.int32) if rows.partition is None else rows.partition[ids],
        partitions=target.partitions,
        down=target.down,
        partitioner=partitioner,
    )
    number, trouble = next(iter(target.down.items()))
    more = f" and {len(target.down) - 1} more" if len(target.down) > 1 else ""
    refusal = Refusal(RejectReason.TARGET_UNAVAILABLE, f"{name}: partition {number}{more} {trouble}")
    fates = fates.put(ids[~is_up], Fate.RETRY, [refusal])
    return fates, TargetRows(topic=name, ids=ids[is_up], partitions=placed[is_up])


def rolls(rows: DueRows, fates: Fates, own: OwnTopics) -> Fates:
    """Turn rolls without a possible copy into dead letters. Those whose partition takes nothing now wait for it."""
    ids = fates.ids(Fate.ROLL)
    ids = ids[~own.copyable(ids) & ~own.is_down[rows.source[ids]]]
    return fates.put(ids, Fate.LETTER, [COPY_TOO_LARGE])


def given_up(rows: DueRows, fates: Fates, own: OwnTopics, policy: RetryPolicy) -> Fates:
    """Turn retries without a possible copy or another attempt into dead letters, for the same reason."""
    ids = fates.ids(Fate.RETRY)
    is_over = (fates.count_attempts(ids) > 0) & policy.is_over(rows.attempt[ids].astype(np.int64) + 1)
    return fates.put(ids[is_over | ~own.copyable(ids)], Fate.LETTER)


def letters_down(rows: DueRows, fates: Fates, own: OwnTopics) -> Fates:
    """Put off dead letters whose topic fails, where a copy is possible."""
    ids = fates.ids(Fate.LETTER)
    ids = ids[~own.takes_letters(ids, fates.refused(ids))]
    ids = ids[own.copyable(ids) & ~rows.by_producers_clock(ids)]
    is_timer = (rows.kind[ids] == Kind.TIMER) & ~np.isin(ids, list(unreadable_copies(rows)) if len(ids) else [])
    return fates.put(ids[is_timer], Fate.RETRY, [LETTERS_FAIL]).put(ids[~is_timer], Fate.HOLD, [LETTERS_FAIL])


def timed(
    rows: DueRows, fates: Fates, policy: RetryPolicy, now_ms: int, windows_ms: Mapping[str, int] = MappingProxyType({})
) -> Fates:
    """Set the effective times of retries and held letters. `windows_ms`: a record's longest wait, by delay topic."""
    ids = fates.ids(Fate.RETRY, Fate.HOLD)
    failures = np.maximum(1, rows.attempt[ids] + fates.count_attempts(ids))
    failures[fates.fate[ids] == Fate.HOLD] = 1
    at_ms = fates.at_ms.copy()
    at_ms[ids] = now_ms + policy.waits_ms(failures, rows.keys[ids])
    doubted = [code for code, each in enumerate(fates.refusals) if each.reason is RejectReason.TARGET_IN_DOUBT]
    if doubted:
        at_ms[ids[np.isin(fates.reason[ids], doubted)]] = now_ms + IN_DOUBT_MS
    paused = [code for code, each in enumerate(fates.refusals) if each.reason is RejectReason.TARGET_PAUSED]
    if paused:
        ids = ids[np.isin(fates.reason[ids], paused)]
        windows = [windows_ms.get(topic, WINDOW_MS) for topic in rows.places(ids)[0]]
        at_ms[ids] = now_ms + parked_ms(np.array(windows, dtype=np.int64), rows.keys[ids])
    return replace(fates, at_ms=at_ms)


def cut(rows: DueRows, fates: Fates, own: OwnTopics | None, findings: Findings) -> frozenset[int]:
    """The rows whose dead letters must be cut, since the whole ones fit nowhere (`own` None: only those that an abort
    has shown)."""
    dead = fates.ids(Fate.LETTER)
    is_cut = _named(rows.keys[dead], findings.cut)
    if own is not None:
        is_cut |= ~own.letters_fit(dead, fates.refused(dead))
    return frozenset(dead[is_cut].tolist())


def _plain(reason: RejectReason) -> Refusal:
    return Refusal(reason, reason.explanation)


def _named(keys: Int64s, names: Collection[int]) -> Bools:
    return np.isin(keys, np.fromiter(names, np.int64, len(names)))
