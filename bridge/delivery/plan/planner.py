"""Plans the fates of due rows: gathers facts about topics, and applies the passes of `fates`.

A topic may have changed. So a lasting verdict on a row (a partition number or a record that is too large, the last
attempt) needs a look-up after the message was due and written. Such a look-up of a topic happens at most once a second:
until then a copy puts other messages off, without counting an attempt. (Where no copy is possible, an answer of the
last second is good enough.) A dead-letter topic is looked up each time: a cut letter cannot be made whole again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import structlog

from bridge.delivery.doubt.findings import Findings
from bridge.delivery.plan import fates as passes
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.commands import CommandOutput, DueCommands
from bridge.delivery.plan.copies import copies, next_ticks
from bridge.delivery.plan.dead_letters import dead_letters, held
from bridge.delivery.plan.due_rows import Batch, DueRows, Ids, SourceColumns, TargetRows, integers
from bridge.delivery.plan.fates import Fate, Fates, OwnTopics, Unplannable
from bridge.delivery.plan.forwarded_cancels import Forwards
from bridge.delivery.plan.overdue import BURST_MS, CatchUp, OverduePolicy
from bridge.delivery.plan.record_size import SizeLimits, parted
from bridge.delivery.plan.spans import Delivery, OpenTelemetry
from bridge.delivery.plan.ticks import ScheduleLimits, Ticks, ticks
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.partitioner import PARTITIONER
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.stores.loan import Loan, Rows
from bridge.stores.names import Sources, pack
from bridge.telemetry.counts import Counts
from bridge.wire.answers import Answer, Outcome
from bridge.wire.headers import Where
from bridge.wire.reasons import RejectReason
from timerstore.rows.entry import Kind
from timerstore.rows.position import Bools, Int64s

NOTHING: Final = Findings()
ANY_TIME: Final = OverduePolicy()
ANY_SIZE: Final = SizeLimits()
ANY_SCHEDULE: Final = ScheduleLimits()
_NO_ROWS: Final = np.empty(0, dtype=np.intp)
PERMITTED_MAX: Final = 10_000
"""Limit of cached answers of the allow-list; names come from headers."""
WAITS_MS: Final = BURST_MS + 500
"""The wait of a tick for a command that is in transit."""
SCHEDULE_BYTES: Final = 32 << 10
"""The cost of asking a schedule for its next tick, in bytes copied meanwhile."""

log = structlog.get_logger("bridge.delivery.plan.planner")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The rows of one `take`, and their fates."""

    rows: DueRows
    fates: Fates
    deliveries: Sequence[TargetRows]
    """The rows with the fate DELIVER, by target."""
    forwards: Forwards
    next_ids: Ids
    """The rows for which a next tick is written."""
    commands: CommandOutput | None
    """The output of commands among the rows."""
    ticks: Ticks | None
    """The schedules among the rows."""
    own: OwnTopics | None
    """The bridge's own topics; None: they get nothing."""
    cut: frozenset[int]
    """Rows whose dead letters are cut, since whole letters fit nowhere."""
    records: int
    """The number of records in `batches`."""
    bytes: int
    counts: Counts
    targets: Mapping[str, Target]
    """The topics of the output."""
    traced: Sequence[Delivery]
    """The messages that get a span."""

    @property
    def keys(self) -> Int64s:
        """The rows' (source, offset), packed as in the store; int64[n]."""
        return self.rows.keys

    @property
    def released(self) -> Sequence[Rows]:
        """Rows that commands among these have made due now: they are planned next."""
        return () if self.commands is None else self.commands.released

    @property
    def weight(self) -> int:
        """The cost in bytes, including the processor's time for schedules."""
        return self.bytes + (0 if self.ticks is None else self.ticks.asked * SCHEDULE_BYTES)

    @property
    def answers(self) -> Sequence[Answer]:
        """The answers to commands."""
        return () if self.commands is None else self.commands.answers

    def batches(self) -> Iterator[Batch]:
        """All output, some megabytes at a time."""
        for mine in self.deliveries:
            yield from self.rows.batches(mine)
        if self.own is not None:
            yield from parted(self._to_delay_topics(self.own.letter_topics), self.own.chunk_bytes)
            dead = self.fates.ids(Fate.LETTER)
            refused = self.fates.refused(dead)
            letters = dead_letters(self.rows, dead, refused, self.own.letter_topics, self.cut, _report_plain)
            yield from parted(letters, self.own.letters_chunk_bytes)
            if self.commands is not None:
                yield from parted(self.commands.letters, self.own.letters_chunk_bytes)
        if self.commands is not None:
            yield from self.commands.to_repliers

    def _to_delay_topics(self, letter_topics: Mapping[str, str]) -> Iterator[Batch]:
        rows, fates = self.rows, self.fates
        roll, defer, retry, hold = map(fates.ids, (Fate.ROLL, Fate.DEFER, Fate.RETRY, Fate.HOLD))
        yield from copies(rows, roll, rolled=1)
        yield from copies(rows, defer, at_ms=fates.at_ms[defer])
        is_tick = None if self.ticks is None else self.ticks.is_tick[retry]
        attempts = fates.count_attempts(retry)
        yield from copies(rows, retry, failed=attempts, at_ms=fates.at_ms[retry], is_single=is_tick)
        refused = passes.unreadable_copies(rows) if len(hold) else {}
        yield from held(rows, hold, refused, letter_topics, fates.at_ms[hold], _report_plain)
        yield from self.forwards.batches()
        if self.ticks is not None:
            ids = self.next_ids
            is_counted = self.ticks.is_tick[ids] & ~self.ticks.is_silent[ids]
            yield from next_ticks(rows, ids, self.ticks.next_ms[ids], is_counted)
        if self.commands is not None:  # a repeated command follows the copies of its messages
            yield from self.commands.to_delay_topics


class _Cached(Protocol):
    """The bridge's own topics, looked up once for each plan, and again after `cache_clear`."""

    def __call__(self) -> OwnTopics: ...

    def cache_clear(self) -> None: ...


class Planner:
    """Makes plans. One thread."""

    def __init__(
        self,
        *,
        targets: Targets,
        permitted: Callable[[str], bool],
        default_targets: Mapping[str, str | None],
        dead_letter_topics: Mapping[str, str],
        retry: RetryPolicy,
        overdue: OverduePolicy = ANY_TIME,
        limits: SizeLimits = ANY_SIZE,
        schedules: ScheduleLimits = ANY_SCHEDULE,
        partitioner: str = PARTITIONER,
        tracer: OpenTelemetry | None = None,
    ) -> None:
        """`permitted` is the allow-list; the bridge's own topics are refused in any case. By delay topic:
        `default_targets`, `dead_letter_topics`. `partitioner` names the producer's."""
        self.delay_topics = frozenset(default_targets)
        self.dead_letter_topics = frozenset(dead_letter_topics.values())
        self._targets = targets
        own = self.delay_topics | self.dead_letter_topics
        self._may_go_to = lru_cache(PERMITTED_MAX)(
            lambda name: not name.startswith("__") and name not in own and permitted(name)
        )
        self._default_targets = default_targets
        self._letter_topics = dead_letter_topics
        self._retry = retry
        self._catch_up = CatchUp(overdue)
        self._limits = limits
        self._schedules = schedules
        self._partitioner = partitioner
        self._tracer = tracer
        self._columns: SourceColumns | None = None
        self.windows_ms: dict[str, int] = {}
        """The roll windows of the delay topics (ms)."""

    def begin(self) -> None:
        """Begin a transaction; it owns the plans that follow."""
        self._catch_up.begin()

    def committed(self, traced: Sequence[tuple[int, Sequence[Delivery]]], now_ms: int) -> None:
        """The transaction was committed. `traced`: messages with a span, and the time of their production (ms)."""
        self._catch_up.commit()
        if self._tracer is not None:
            for produced_ms, deliveries in traced:
                self._tracer.delivered(deliveries, produced_ms, now_ms)

    def plan(
        self,
        taken: Rows,
        sources: Sources,
        now_ms: int,
        findings: Findings = NOTHING,
        loan: Loan | None = None,
    ) -> Plan:
        """Plan the rows taken at `now_ms`, with the `findings` of earlier aborts. `loan` decides the commands among the
        rows, and learns of the copies. Raises Unplannable with the sources that must be held, since a partition that
        they need takes nothing now."""
        if self._columns is None or self._columns.sources is not sources:
            self._columns = SourceColumns(sources, self._default_targets)
        rows = DueRows(taken, self._columns)
        targets: dict[str, Target] = {}
        forwards = Forwards(rows, self._targets.count_partitions)
        own = cache(lambda: self._own_topics(rows, forwards, findings, targets))
        fates = passes.by_kind(rows, now_ms)
        schedules = ticks(rows, now_ms, self._schedules)
        if schedules is not None:
            rows.redue(schedules.due_ms)
            self._assure(rows, own, np.flatnonzero(schedules.has_next), now_ms)
            fates = passes.recurring(rows, fates, schedules, own())
        fates = passes.written(rows, passes.misnamed(rows, fates), findings, schedules)
        fates = passes.after_aborts(rows, fates, findings)
        fates = self._catching_up(rows, fates, own, now_ms)
        if schedules is not None and loan is not None:
            fates = _waiting(rows, fates, schedules, own, now_ms, loan)
        fates, deliveries = self._by_target(rows, fates, targets, own, now_ms)
        if len(forwards.ids):
            fates = fates.put(forwards.ids, Fate.FORWARD)
        cut: frozenset[int] = frozenset()
        next_ids = _next_ids(rows, fates, schedules)
        commands = DueCommands(rows)
        if not fates.are_plain or len(next_ids) or len(commands.ids) or forwards.unknown:
            self._assure(rows, own, fates.ids(Fate.ROLL, Fate.RETRY), now_ms)
            fates = passes.rolls(rows, fates, own())
            fates = passes.given_up(rows, fates, own(), self._retry)
            is_told = True
            if small := own().small_letter_topics(fates):
                is_told = self._targets.look_again(small) is not None
                own.cache_clear()
            fates = passes.letters_down(rows, fates, own())
            fates = passes.timed(rows, fates, self._retry, now_ms, self.windows_ms)
            next_ids = _next_ids(rows, fates, schedules)
            if unwritable := own().unwritable(fates, forwards, np.concatenate((next_ids, commands.ids))):
                raise Unplannable(unwritable)
            cut = passes.cut(rows, fates, own() if is_told else None, findings)
            if cut and not findings.cut:
                reason = "larger than its topic and the delay topic take"
                log.warning("dead-letter-cut", records=len(cut), reason=reason)
        output = None
        if loan is not None:
            _tell_copied(loan, rows, np.concatenate((fates.ids(Fate.ROLL, Fate.DEFER, Fate.RETRY), next_ids)))
            if len(commands.ids):
                output = self._commanded(commands, rows, forwards, own, findings, targets, now_ms, loan)
                for keys, payload in output.copied:
                    loan.copied(keys, payload.column("origin").to_numpy(), payload.column("id"))
        is_own = not fates.are_plain or len(next_ids) > 0 or (output is not None and output.writes_back)
        return Plan(
            rows=rows,
            fates=fates,
            deliveries=deliveries,
            forwards=forwards,
            next_ids=next_ids,
            commands=output,
            ticks=schedules,
            own=own() if is_own else None,
            cut=cut,
            records=len(rows)
            - len(fates.ids(Fate.NOTHING, Fate.FORWARD, Fate.ADVANCE))
            + len(next_ids)
            + forwards.records
            + (0 if output is None else output.records),
            bytes=int(rows.sizes.sum() + rows.sizes[next_ids].sum())
            + forwards.bytes
            + (0 if output is None else output.bytes),
            counts=_counts(rows, fates, deliveries, forwards, schedules, output),
            targets=targets,
            traced=self._tracer.chosen(rows, fates.are(Fate.DELIVER), now_ms) if self._tracer is not None else (),
        )

    def _commanded(
        self,
        commands: DueCommands,
        rows: DueRows,
        forwards: Forwards,
        own: Callable[[], OwnTopics],
        findings: Findings,
        known: dict[str, Target],
        now_ms: int,
        loan: Loan,
    ) -> CommandOutput:
        """The output of the commands among the rows."""
        topics = {topic for topic, _ in rows.sources}
        elsewhere = {
            row: Outcome.NOT_PENDING if topic in topics else Outcome.FORBIDDEN
            for row, topic in commands.named_elsewhere()
            if row not in forwards.ids
        }
        return commands.output(
            loan.decide(commands.seqs, now_ms, commands.passed(findings.no_copy), findings.no_copy),
            elsewhere,
            own,
            self._letter_topics,
            lambda names: self._sure({name for name in names if self._may_go_to(name)}, now_ms),
            self._limits.record_bytes,
            findings,
            known,
            now_ms,
        )

    def _catching_up(self, rows: DueRows, fates: Fates, own: Callable[[], OwnTopics], now_ms: int) -> Fates:
        """Apply the overdue policy to all rows but held dead letters."""
        catch_up = self._catch_up
        if not catch_up.policy.is_any:
            return fates
        names, codes = rows.targets
        others = ~np.isin(codes, [code for code, name in enumerate(names) if name in self.dead_letter_topics])
        # The copy for a tick that is already due was written only now, but the tick has waited.
        ts = np.where(rows.recurs, rows.at, integers(rows.payload.column("ts"), 0))
        waited_ms = catch_up.waited_ms(now_ms, rows.at, ts)
        fates = passes.overdue(fates, others & catch_up.given_up(waited_ms))
        behind = np.flatnonzero(others & fates.are(Fate.DELIVER) & catch_up.is_behind(waited_ms))
        if not len(behind):
            return fates
        behind = behind[own().copyable(behind) & ~own().is_down[rows.source[behind]]]
        return passes.deferred(fates, behind, catch_up.slots_ms(now_ms, len(behind)), now_ms)

    def _by_target(
        self, rows: DueRows, fates: Fates, known: dict[str, Target], own: Callable[[], OwnTopics], now_ms: int
    ) -> tuple[Fates, list[TargetRows]]:
        """Rows by target. Adds the targets with deliveries to `known`."""
        names, codes = rows.targets
        fates = passes.without_target(fates, codes < 0)
        coded = np.unique(codes[fates.ids(Fate.DELIVER, Fate.ADVANCE)])
        used = [(names[code], codes == code) for code in coded[coded >= 0].tolist()]
        targets = dict(self._targets.resolve({name for name, _ in used if self._may_go_to(name)}))
        before = fates
        fates, going = self._placed(rows, before, used, targets)
        needed = self._needed(rows, before, fates, used, targets, now_ms)
        if needed:
            targets |= self._targets.renew(needed)
            fates, going = self._placed(rows, before, used, targets)
            for name, mine in used:
                told_ms = targets[name].told_ms if name in needed else None
                if told_ms is None:
                    continue
                ids = self._lasting(rows, before, fates, mine)
                ids = ids[rows.decided_ms(ids, now_ms) > told_ms]
                if len(ids):
                    refusal = Refusal(
                        RejectReason.TARGET_IN_DOUBT, f"{name}: {RejectReason.TARGET_IN_DOUBT.explanation}"
                    )
                    fates = fates.put(ids[own().copyable(ids)], Fate.RETRY, [refusal])
        known |= {each.topic: targets[each.topic] for each in going}
        return fates, [replace(each, chunk_bytes=self._limits.chunk_bytes([targets[each.topic]])) for each in going]

    def _placed(
        self, rows: DueRows, fates: Fates, used: Sequence[tuple[str, Bools]], targets: Mapping[str, Target]
    ) -> tuple[Fates, list[TargetRows]]:
        """Rows by target, from the known facts; names that are missing in `targets` are not allowed."""
        deliveries = []
        for name, mine in used:
            target = targets.get(name)
            if target is None:
                fates = passes.forbidden(rows, fates, mine, name, self._letter_topics)
                continue
            fates = passes.fitting(rows, fates, mine, name, target, self._limits)
            fates, going = passes.reachable(rows, fates, mine, name, target, self._partitioner)
            if len(going.ids):
                deliveries.append(going)
        return fates, deliveries

    def _needed(
        self,
        rows: DueRows,
        before: Fates,
        after: Fates,
        used: Sequence[tuple[str, Bools]],
        targets: Mapping[str, Target],
        now_ms: int,
    ) -> dict[str, int]:
        """Targets on which some rows have a lasting verdict, and the time after which their look-up must be (ms)."""
        needed: dict[str, int] = {}
        for name, mine in used if after is not before else ():
            ids = self._lasting(rows, before, after, mine) if name in targets else _NO_ROWS
            if len(ids):
                needed[name] = int(rows.decided_ms(ids, now_ms).max())
        return needed

    def _lasting(self, rows: DueRows, before: Fates, after: Fates, mine: Bools) -> Ids:
        """The rows of `mine` with a lasting verdict: `before` the look at their target they had the fate DELIVER, and
        `after` it they are dead letters, or retries without a further attempt."""
        ids = np.flatnonzero(mine & before.are(Fate.DELIVER) & (after.are(Fate.LETTER) | after.are(Fate.RETRY)))
        is_last = (after.count_attempts(ids) > 0) & self._retry.is_over(rows.attempt[ids].astype(np.int64) + 1)
        result: Ids = ids[(after.fate[ids] == Fate.LETTER.value) | is_last]
        return result

    def _assure(self, rows: DueRows, own: _Cached, ids: Ids, now_ms: int) -> None:
        """Renew the look-up of the delay topics that seem to refuse copies of some of these rows."""
        if not len(ids) or not len(ids := ids[~own().copyable(ids)]):
            return
        needed: dict[str, int] = {}
        for topic, since_ms in zip(rows.places(ids)[0], rows.decided_ms(ids, now_ms).tolist(), strict=True):
            needed[topic] = max(since_ms, needed.get(topic, since_ms))
        self._targets.renew(needed)
        own.cache_clear()

    def _sure(self, names: Collection[str], now_ms: int) -> Mapping[str, Target]:
        """Topics of answers. One with a seeming refusal is looked up again: a dropped answer is lost for good."""
        targets = self._targets.resolve(names)
        doubtful = [name for name, target in targets.items() if not target.is_well or target.needs_key]
        if not doubtful:
            return targets
        self._targets.renew(dict.fromkeys(doubtful, now_ms))
        return self._targets.resolve(names)

    def _own_topics(self, rows: DueRows, forwards: Forwards, findings: Findings, known: dict[str, Target]) -> OwnTopics:
        """The bridge's own topics for these rows; adds them to `known`."""
        used = {rows.sources.name(source)[0] for source in np.unique(rows.source).tolist()}
        letters = {self._letter_topics[name] for name in used}
        known.update(self._targets.resolve([*(used | forwards.topics), *letters]))
        return OwnTopics(rows, known, self._letter_topics, findings, self._limits)


def _next_ids(rows: DueRows, fates: Fates, schedules: Ticks | None) -> Ids:
    """The rows with a next tick to write: any decided fate of the tick itself counts."""
    if schedules is None:
        return _NO_ROWS
    is_over = np.isin(fates.fate, (Fate.DELIVER.value, Fate.RETRY.value, Fate.LETTER.value)) & (rows.tick > 0)
    return np.flatnonzero(schedules.has_next & (is_over | fates.are(Fate.ADVANCE)))


def _waiting(
    rows: DueRows, fates: Fates, schedules: Ticks, own: Callable[[], OwnTopics], now_ms: int, loan: Loan
) -> Fates:
    """Put off ticks with missed ones behind them while commands for their schedules are in transit. Otherwise each tick
    would leave before the command is read, and the next one would be written behind that."""
    ids = np.flatnonzero(
        schedules.is_tick & schedules.has_next & (schedules.next_ms <= now_ms) & fates.are(Fate.DELIVER)
    )
    if not len(ids):
        return fates
    origin = rows.payload.column("origin").to_numpy()[ids]
    ids = ids[loan.are_waited_for(pack(rows.source[ids].astype(np.int64), origin))]
    ids = ids[own().copyable(ids) & ~own().is_down[rows.source[ids]]] if len(ids) else ids
    return passes.deferred(fates, ids, np.full(len(ids), now_ms + WAITS_MS), now_ms)


def _tell_copied(loan: Loan, rows: DueRows, ids: Ids) -> None:
    """Tell the loan of rows that leave as a copy or have a next tick, and of copies that came back as rejects."""
    refused = np.flatnonzero(rows.kind == Kind.REJECT)
    if len(refused) and len(refused := refused[rows.by_producers_clock(refused)]):
        loan.refused(rows.claimed_origins(refused))
    if len(ids):
        columns = rows.payload.select(["origin", "id"]).take(pa.array(ids))
        loan.copied(rows.keys[ids], columns.column("origin").to_numpy(), columns.column("id"))


def _report_plain(where: Where, detail: str) -> None:
    log.error("dead-letter-plain", topic=where.topic, partition=where.partition, offset=where.offset, reason=detail)


def _counts(
    rows: DueRows,
    fates: Fates,
    deliveries: Sequence[TargetRows],
    forwards: Forwards,
    schedules: Ticks | None,
    output: CommandOutput | None,
) -> Counts:
    delivered = Counter({mine.topic: len(mine.ids) for mine in deliveries})
    missed = Counter() if schedules is None else schedules.missed
    ticks = int((fates.are(Fate.DELIVER) & (rows.tick > 0)).sum())
    commands = Counter() if output is None else output.counts
    if fates.are_plain:
        return Counts(delivered=delivered, ticks=ticks, missed=missed, commands=commands)
    return Counts(
        delivered=delivered,
        commands=commands,
        ticks=ticks,
        missed=missed,
        rejected=fates.rejected(rows),
        retried=fates.retried(),
        rolled=len(fates.ids(Fate.ROLL)),
        deferred=len(fates.ids(Fate.DEFER)),
        forwarded=forwards.records,
    )
