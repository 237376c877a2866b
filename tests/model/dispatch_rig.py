"""The real dispatcher, writer, planner, targets and store, on a scripted Kafka and a clock that a test moves.

No threads: a test calls `step`, and what would wait moves the clock. The rig is also the judge: each transaction that
Kafka commits is compared with the rows that become finished by it (invariant I1), and each record that it holds with
the row that it is made of.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from confluent_kafka import KafkaError, Producer

from bridge.delivery.commands_first import CommandsFirst
from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.doubt.doubt_file import DoubtFile
from bridge.delivery.doubt.doubts import Doubts
from bridge.delivery.doubt.look_up import WHOLE, Place
from bridge.delivery.doubt.records import IsSought, See
from bridge.delivery.doubt.torn_states import TornStates
from bridge.delivery.narrowing import STRIKES_MAX
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.dead_letters import release
from bridge.delivery.plan.planner import Planner
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.states import AT_WORK, Event, Request
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.target import Leader, Target
from bridge.errors import BridgeError, EnvironmentFailure, FencedError
from bridge.kafka.calls import Call
from bridge.kafka.errors import MEANINGS, Fault, Refusal
from bridge.kafka.membership import Membership
from bridge.settings.time_budgets import TimeBudgets
from bridge.stores.names import PlainPosition, SourceName
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.telemetry.metrics import Metrics
from bridge.wire import headers as h
from bridge.wire.committed_state import CommittedState, decode_metadata, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import Missed, packed, schedule_of, unpacked
from tests.broker.rig import Tally
from tests.entries import table_of
from tests.manual_clock import ManualClock
from tests.model.scripted_kafka import Kafka, Open, Record
from tests.model.scripted_producer import ScriptedProducer
from tests.model.stores import ModelStores, State, open_stores
from tests.unit.timerstore.entries import gather
from timerstore.limits import Limits
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN

DENIED: Final = frozenset(
    code for code, means in MEANINGS.items() if means.fault in (Fault.CREDENTIALS, Fault.FORBIDDEN)
)
OF_A_TOPIC: Final = frozenset(
    code for code, means in MEANINGS.items() if means.fault in (Fault.TARGET, Fault.MISSING, Fault.CLOCK)
)
"""Codes that speak of a topic, whichever partition they come from."""
DELAY: Final = "delay"
LETTERS: Final = "delay.dlt"
SECRET: Final = "secret"
"""A topic that the allow-list refuses."""
TOPICS: Final = {DELAY: 3, LETTERS: 1, "orders": 2, "bills": 1, "audit": 1, SECRET: 1}
SOURCES: Final = tuple((DELAY, partition) for partition in range(TOPICS[DELAY]))
WINDOW_MS: Final = 20_000
COMMIT_INTERVAL_MS: Final = 20
PARAMETERS: Final = DecodeParameters(max_delay_ms=10**9, roll_window_ms=WINDOW_MS, has_default_target=False)
RETRY: Final = RetryPolicy(attempts=3, backoff_ms=200, backoff_max_ms=1_000)
LIMITS: Final = Limits(window_ms=WINDOW_MS)
TICKS: Final = 3
REFRESH_S: Final = 0.5
FENCED_AGAIN_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A record of a delay topic, decoded; `headers` are a timer's own, else all of them."""

    source: SourceName
    offset: int
    kind: Kind
    at: int
    due: int
    ts: int
    origin: int
    target: str | None
    id: str | None
    attempt: int
    rolls: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    schedule: str | None = None
    tick: int = 0

    @property
    def position(self) -> PlainPosition:
        """Where it stands in the order of delivery of its partition."""
        return self.at, self.offset

    @property
    def is_forwarded(self) -> bool:
        """Whether a cancel needs not be sent on."""
        return self.key is not None or any(name == h.COPY_FORWARDED for name, _ in self.headers)

    def entry(self) -> dict[str, Any]:
        """As decoding hands it to the store."""
        return {
            "topic": self.source[0], "partition": self.source[1], "offset": self.offset, "at": self.at, "ts": self.ts,
            "due": self.due, "kind": int(self.kind), "target": self.target, "target_partition": None, "key": self.key,
            "value": self.value, "headers": list(self.headers), "id": self.id, "replace": False, "origin": self.origin,
            "attempt": self.attempt, "rolls": self.rolls, "reason": "no-time" if self.kind is Kind.REJECT else None,
            "schedule": self.schedule, "tick": self.tick,
        }  # fmt: skip


def decoded(source: SourceName, offset: int, record: Record) -> Row:
    """The header contract, as far as it is used here."""
    found = {name: value.decode() for name, value in record.headers if name in h.CONTROL and value is not None}
    own = tuple(pair for pair in record.headers if pair[0] not in h.STRIPPED)
    kind, at, due, ts = Kind.TIMER, 0, 0, record.sent_ms
    said: dict[str, str] = {name: found[name] for name in h.SCHEDULE if name in found}
    if said and h.COPY_DUE not in found:
        at = due = ts
    elif h.CANCEL in found:
        kind, at, due, own = Kind.CANCEL, AT_MIN, ts, record.headers
    elif h.COPY_DUE in found or h.UNTIL in found:
        due = int(found.get(h.COPY_DUE) or found[h.UNTIL])
        at = int(found[h.COPY_AT]) if h.COPY_AT in found else due if due - ts <= WINDOW_MS else ts + WINDOW_MS - 1_000
    else:
        kind, at, due, own = Kind.REJECT, AT_MIN, ts, record.headers
    return Row(
        source=source, offset=offset, kind=kind, at=at, due=due, ts=ts,
        origin=int(found.get(h.COPY_ORIGIN, offset)), target=found.get(h.TOPIC),
        id=found.get(h.ID) or found.get(h.CANCEL),
        attempt=int(found.get(h.COPY_ATTEMPT, 0)), rolls=int(found.get(h.COPY_ROLLS, 0)),
        key=record.key, value=record.value, headers=own,
        schedule=packed(said, is_start_given=h.COPY_DUE in found) if said else None,
        tick=int(found.get(h.COPY_TICK, 0)),
    )  # fmt: skip


class Chosen(dict[tuple[SourceName, int], str]):
    """What an operator has chosen, in place of a file."""

    failure: EnvironmentFailure | None = None

    def take(self, names: Collection[SourceName]) -> Mapping[tuple[SourceName, int], str]:
        places = [place for place in self if place[0] in names]
        if places and self.failure is not None:
            raise self.failure
        return {place: self.pop(place) for place in places}


class SteppedStore(ModelStores):
    """Whose `wait` moves the clock."""

    pass_ms: Callable[[float], None]

    def wait(self, timeout_s: float | None) -> None:
        """Nothing wakes it but what is there already."""
        ms = 1.0 if self._has_news else math.ceil(1_000 * (timeout_s or 0))
        self._has_news = False
        self.pass_ms(ms)


class _InLine:
    """In place of `AbandonableCalls`: calls in line, since nothing hangs here that cannot be interrupted. One that is
    begun runs at once where Kafka is prompt, else as late as it can: when a result is waited for, be it another's."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self._begun: list[Call] = []

    def begin(self, run: Callable[[], object]) -> Call:
        call = Call(run)
        self._begun.append(call)
        if self._kafka.is_prompt:
            self._serve()
        return call

    def result(self, call: Call, *_: object) -> Any:
        self._serve()
        return call.wait(0)

    def _serve(self) -> None:
        begun, self._begun = self._begun, []
        for call in begun:
            call.serve()

    def close(self) -> None:
        pass


class ScriptedLookUp(TargetLookUp):
    """What the brokers say of topics: all are there and well, but those that are `gone`. A partition that is silent
    does not answer a probe either."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka
        self.gone: set[str] = set()
        self.ever_gone: set[str] = set()
        self.is_reachable = True

    def __call__(self, names: Sequence[str]) -> Mapping[str, Target]:
        if not self.is_reachable:
            raise EnvironmentFailure("the brokers do not answer", hint="Scripted.")
        return {name: self._target(name) for name in names}

    def _target(self, name: str) -> Target:
        if name in self.gone or name not in self.kafka.partitions:
            return Target(partitions=0, bytes_max=None, refusal=Refusal(RejectReason.UNKNOWN_TARGET, f"{name} is gone"))
        return Target(partitions=self.kafka.partitions[name], bytes_max=None)

    def leaders(self, name: str) -> Mapping[int, Leader]:  # noqa: ARG002 - as the real one
        return {}

    def count_partitions(self, name: str) -> int:
        if not self.is_reachable:
            raise EnvironmentFailure("the brokers do not answer", hint="Scripted.")
        return self.kafka.partitions[name]

    def ask(
        self,
        leaders: Mapping[tuple[str, int], Leader | None],
        *,
        doubtful: bool,  # noqa: ARG002
    ) -> Mapping[tuple[str, int], Future[Any]]:
        answers = {}
        for name, partition in leaders:
            silent = [f for f in self.kafka.faults if f.step == "silence" and f.topic in (None, name)]
            answers[name, partition] = Future[Any]()
            is_silent = any(f.partition in (None, partition) for f in silent)
            answers[name, partition].set_result(SimpleNamespace(offset=-1 if is_silent else 0))
        return answers


class DispatchRig:
    """See the module. `process` is what dies in a crash: store, dispatcher, writer; Kafka stays."""

    def __init__(self, *, timeout_ms: int = 10_000, transaction_rows: int = 20_000) -> None:
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="dispatch-machine-", dir=memory if memory.is_dir() else None))
        self.clock = ManualClock(now_ms=1_000_000_000)
        self.budgets = TimeBudgets(transaction_s=timeout_ms / 1_000, message_s=timeout_ms / 1_000 - 1)
        self.kafka = Kafka(self.clock, dict(TOPICS), timeout_ms / 1_000)
        self.kafka.on_commit = self.judge
        self.kafka.on_offsets = self.judge_offsets
        self.look_up = ScriptedLookUp(self.kafka)
        self.owned = set(SOURCES)
        self.revocations = 0
        self.transaction_rows = transaction_rows
        self.tally = Tally()
        self.rows: dict[SourceName, list[Row]] = {name: [] for name in SOURCES}
        self.finished: set[tuple[SourceName, int]] = set()
        self.ends: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.is_indulgent = False
        """Anything may be put off: all brokers were slow, or silent, or out of reach."""
        self.opened = self.followed = 0
        self.unreadable: set[str] = set()
        """Topics on which Read is not granted."""
        self.is_answering = True
        self.read_back = 0
        self.chosen = Chosen()
        self.looks_up = True
        self.searches: list[Callable[[], None]] = []
        """Look-ups that have begun, while `looks_up` is false."""
        self.reads: Mapping[SourceName, int] = {}
        """So far ingest comes, where it is said."""
        for name in SOURCES:
            state = initial_state(offset=0, topic_id="a", partitions=len(SOURCES), parameters=PARAMETERS)
            self.kafka.offsets[name] = (0, state.metadata())
        self.open()

    # -- the process

    def open(self) -> None:
        """Start: store and dispatcher from what Kafka holds."""
        self.opened += 1
        self.targets = Targets(self.look_up, self.clock)
        self.writer = TransactionalWriter(
            {"transactional.id": "bridge", "transaction.timeout.ms": round(self.kafka.timeout_s * 1_000)},
            self.clock,
            lambda config: cast(Producer, ScriptedProducer(self.kafka, config)),
            run=lambda ready: self._in_background(ready),
            budgets=self.budgets,
        )
        self.writer._calls = cast(Any, _InLine(self.kafka))
        self.writer._pause = cast(Any, self)  # `wait`
        planner = Planner(
            targets=self.targets,
            permitted=lambda name: name != SECRET,
            default_targets={DELAY: None},
            dead_letter_topics={DELAY: LETTERS},
            retry=RETRY,
        )
        self.doubts = Doubts(
            read=self.read_since,
            choices=self.chosen,
            letter_topics={LETTERS},
            file=DoubtFile(self.directory),
            torn=TornStates(self.directory),
            clock=self.clock,
            metrics=cast(Metrics, self.tally),
            run=self._run_look_up,
        )
        self.dispatcher = Dispatcher(
            writer=self.writer,
            planner=planner,
            targets=self.targets,
            membership=self.membership,
            read_committed=self.read_committed,
            doubts=self.doubts,
            clock=self.clock,
            metrics=cast(Metrics, self.tally),
            on_fatal=lambda error: None,
            commit_interval_ms=COMMIT_INTERVAL_MS,
            transaction_rows=self.transaction_rows,
            budgets=self.budgets,
            commands_first=CommandsFirst(self.clock, log_ends=self.log_ends, run=lambda look: look()),
        )
        self.dispatcher._life.pause = self.wait  # type: ignore[method-assign]
        self._refreshed_s = self.clock.monotonic_s()
        self.open_store()

    def _run_look_up(self, look_up: Callable[[Beat], None]) -> None:
        if self.looks_up:
            look_up(unwatched)
        else:
            self.searches.append(partial(look_up, unwatched))

    def open_store(self, states: Mapping[SourceName, CommittedState] | None = None) -> None:
        """Another store, for the partitions that are ours now (on these states: None: Kafka's); the dispatcher goes
        on."""
        states = states or self._planned(self.owned)
        self.store = open_stores(
            SteppedStore,
            self.directory / "store",
            {DELAY: "a"},
            SOURCES,
            _progress(states),
            log_starts={},
            cuts={},
            now_ms=self.clock.now_ms(),
            limits=LIMITS,
        )
        self.store.pass_ms = self.pass_ms
        resume = {name: offset or 0 for name, offset in self.store.resume_offsets().items()}
        self.store.start_at(resume, {name: len(self.kafka.logs[name]) for name in resume})
        self.ingest()
        self.dispatcher.resume(self.store, states, self.revocations, self.log_ends(self.owned))

    def _planned(self, names: Collection[SourceName]) -> dict[SourceName, CommittedState]:
        """The states to go on from, as a start finds them."""
        states = {name: decode_metadata(name, *self.kafka.offsets[name]) for name in names}
        again = self.doubts.torn.taken_back(states)
        self.kafka.offsets |= {name: (state.offset, state.metadata()) for name, state in again.items()}
        return states | again

    def log_ends(self, names: Collection[SourceName]) -> dict[SourceName, int]:
        """Where the logs end by now."""
        return {name: len(self.kafka.logs[name]) for name in names}

    def crash(self) -> None:
        """The process dies, and starts again."""
        self.store.close()
        self.open()

    def rebase(self, owned: Collection[SourceName]) -> None:
        """The assignment has changed: what is open is not committed, and a store on what is ours now follows."""
        self.owned = set(owned)
        self.kafka.generation += 1
        self.revocations += 1

    def follow(self, owned: Collection[SourceName]) -> None:
        """The assignment has changed: the store stays open, and only the partitions that come or go are touched. Where
        that cannot be, as `rebase`."""
        gone, come = self.owned - set(owned), set(owned) - self.owned
        is_possible = self.dispatcher._unanswered is None and gone < self.owned and self._is_up_to_date()
        if not is_possible or self.kafka.are_pending(sorted(come)):
            self.rebase(owned)
            return
        self.kafka.generation += 1
        if gone:
            self.dispatcher.quiesce()
            if self.dispatcher.state in AT_WORK:
                self.dispatcher._life.advance(Event.HOLD)
            self.store.leave(gone, self.clock.now_ms())
            self.revocations += 1
            self.dispatcher.go_on_without(gone, self.revocations)
        self.owned = set(owned)
        if come:
            states = self._planned(come)
            starts = dict.fromkeys(come, 0)
            resume = self.store.coming(_progress(states), starts, {})
            assert resume is not None, "nothing else commits for them"
            self.dispatcher.expect(states, self.log_ends(come))
            offsets = {name: offset or 0 for name, offset in resume.items()}
            ends = {name: len(self.kafka.logs[name]) for name in come}
            self.store.come(_progress(states), starts, {}, offsets, ends, self.clock.now_ms())
            self.followed += 1

    def _is_up_to_date(self) -> bool:
        return self.revocations == self.dispatcher._partitions.revocations and not self.dispatcher._life.is_asked(
            Request.HOLD
        )

    def close(self) -> None:
        """Everything is gone."""
        self.store.close()
        shutil.rmtree(self.directory)

    def _in_background(self, run: Callable[[], None]) -> None:
        """In line. It repeats a failed `init` until that succeeds, so none fails here."""
        faults, self.kafka.faults = self.kafka.faults, [f for f in self.kafka.faults if f.step not in ("init", "abort")]
        try:
            run()
        finally:
            self.kafka.faults = faults

    # -- what surrounds it

    def wait(self, seconds: float) -> None:
        """A pause of the writer."""
        self.pass_ms(1_000 * seconds)

    def pass_ms(self, ms: float) -> None:
        """Time passes, a millisecond at least; the thread of the targets has its turns."""
        self.kafka.pass_ms(max(1, ms))
        if self.clock.monotonic_s() - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self.clock.monotonic_s()
            self.targets.refresh()

    def membership(self) -> Membership:
        return Membership(
            partitions=frozenset(self.owned), revocations=self.revocations, metadata=self.kafka.generation
        )

    def read_since(
        self,
        since: Mapping[Place, int],
        see: See,
        is_sought: IsSought,  # noqa: ARG002 - nothing is hidden
        is_over: Callable[[], bool],  # noqa: ARG002 - it is not interrupted
    ) -> Iterator[tuple[Place, str]]:
        """What a look-up of records reads, but for the topics that may not be read."""
        for place, begin in since.items():
            topic, number = place
            if topic in self.unreadable or not self.is_answering:
                yield place, "denied" if self.is_answering else "no answer"
                continue
            for part in range(TOPICS.get(topic, 0)) if number == WHOLE else (number,):
                start = 0 if number == WHOLE else begin
                for offset, record in enumerate(self.kafka.logs[topic, part][start:], start):
                    see(topic, part, offset, list(record.headers))
            yield place, ""

    def read_committed(
        self,
        names: Collection[SourceName],
        timeout_s: float | None = None,  # noqa: ARG002 - it answers at once, or not at all
    ) -> Mapping[SourceName, CommittedState]:
        self.read_back += 1
        self._must_answer()
        if self.kafka.are_pending(list(names)):
            raise EnvironmentFailure("offsets are pending", hint="Scripted.")
        return {name: decode_metadata(name, *self.kafka.offsets[name]) for name in names}

    def _must_answer(self) -> None:
        if not self.is_answering:
            raise EnvironmentFailure("the brokers do not answer", hint="Scripted.")

    # -- the other side

    def produce(
        self, partition: int, *headers: tuple[str, object], key: bytes | None = b"k", value: bytes | None = b"v"
    ) -> int:
        """A producer's record, ingested later. Returns its offset."""
        log = self.kafka.logs[DELAY, partition]
        pairs = tuple((name, str(text).encode()) for name, text in headers)
        log.append(
            Record(topic=DELAY, partition=partition, key=key, value=value, headers=pairs, sent_ms=self.clock.now_ms())
        )
        return len(log) - 1

    def timer(self, partition: int, delay_ms: int, target: str, *more: tuple[str, object], **record: Any) -> int:
        """A timer from now on."""
        due_ms = self.clock.now_ms() + delay_ms
        return self.produce(partition, ("own", "1"), (h.UNTIL, due_ms), (h.TOPIC, target), *more, **record)

    def recurring(self, partition: int, every_ms: int, target: str, *more: tuple[str, object], **record: Any) -> int:
        """A recurring message that begins now, for three ticks."""
        schedule = (h.EVERY, f"{every_ms}ms"), (h.TIMES, TICKS), (h.MISSED, list(Missed)[every_ms % 3])
        return self.produce(partition, ("own", "1"), *schedule, (h.TOPIC, target), *more, **record)

    def ingest(self) -> None:
        """Everything new, as one batch."""
        at = self.store.next_offsets()
        new = [row for name in at for row in self._decoded(name)[at[name] : self.reads.get(name)]]
        ends = {
            name: max(at[name], min(len(self.rows[name]), self.reads.get(name, len(self.rows[name])))) for name in at
        }
        if new or any(ends[name] > at[name] for name in at):
            self.store.append(table_of([row.entry() for row in new]), ends, self.clock.now_ms())

    def _decoded(self, name: SourceName) -> list[Row]:
        rows, log = self.rows[name], self.kafka.logs[name]
        rows += [decoded(name, offset, log[offset]) for offset in range(len(rows), len(log))]
        return rows

    # -- steps

    def step(self) -> BridgeError | None:
        """One step of the dispatcher's thread, with ingest and maintenance before it. What ends the process is
        returned, after it has been started again; what must not end it is raised."""
        self.ingest()
        now_ms = self.clock.now_ms()
        loading = self.store.next_loading(now_ms)
        if loading is not None:
            self.store.admit(loading, gather(loading.window))
        try:
            self.dispatcher._step()
        except (FencedError, EnvironmentFailure) as error:
            is_explained = self._is_a_rival() if isinstance(error, FencedError) else self._may_end()
            if not is_explained:
                raise
            self.crash()
            return error
        if not self._is_up_to_date():
            self.dispatcher.quiesce()
            self.store.close()
            self.open_store()
        self.pass_ms(1)
        return None

    def _is_a_rival(self) -> bool:
        """Whether the brokers spoke of another producer lately: a transaction's age is none."""
        now_s = self.clock.monotonic_s()
        return any(now_s - claimed_s < FENCED_AGAIN_S + 2 * self.kafka.timeout_s for claimed_s in self.kafka.fenced_s)

    def _may_end(self) -> bool:
        """Whether the brokers gave a reason to end the process: they deny transactions, or take neither copies nor
        dead letters."""
        return bool({DELAY, LETTERS} & self.kafka.faulty_topics or DENIED & self.kafka.told)

    # -- the judge

    def finished_under(self, name: SourceName, state: CommittedState) -> Iterator[tuple[Row, bool]]:
        """The rows of a source, and whether each is finished: invariant I1."""
        steps = [(state.offset, state.position), *((end, (at, o)) for end, at, o in state.frozen)]
        for row in self._decoded(name):
            offset, position = row.offset, row.position
            for end, last in steps:
                if offset < end and (row.at == AT_MIN or (last is not None and position <= last)):
                    yield row, True
                    break
            else:
                yield row, False

    def judge_offsets(self, names: Collection[SourceName]) -> None:
        """When offsets join a transaction. (It may be committed after a revocation: a reader then waits for that.)"""
        assert self.owned.issuperset(names), "offsets of a partition of another instance"

    def judge(self, transaction: Open) -> None:
        """Before it is committed: it holds exactly what becomes finished."""
        news: defaultdict[tuple[SourceName, int, bool], list[Row]] = defaultdict(list)
        for name, (offset, metadata) in transaction.offsets.items():
            state = decode_metadata(name, offset, metadata)
            for row, is_finished in self.finished_under(name, state):
                if (name, row.offset) in self.finished:
                    assert is_finished, f"the committed state goes back: {row}"
                elif is_finished:
                    self.finished.add((name, row.offset))
                    origin = row.offset if row.kind is Kind.CANCEL else row.origin
                    news[name, origin, row.kind is Kind.CANCEL].append(row)
        outputs: defaultdict[int, list[Record]] = defaultdict(list)
        for record in transaction.records:
            mine = news.get(origin_of(record), [])
            assert mine, f"output of what is not finished: {record}"
            outputs[id(row_of(record, mine))].append(record)
        for rows in news.values():
            for row in rows:
                if row.schedule is not None:
                    self._judge_tick(row, outputs[id(row)])
                else:
                    self._judge_row(row, outputs[id(row)])

    def _judge_tick(self, row: Row, outputs: list[Record]) -> None:
        """Of a recurring message: what becomes of the tick, and the copy for the next one, each once."""
        schedule, _ = schedule_of(row.schedule or "")
        following = [record for record in outputs if is_next(record)]
        rest = [record for record in outputs if not is_next(record)]
        if not outputs:
            assert self._is_covered(row), f"nothing becomes of {row}"
        assert len(following) <= 1, f"{len(following)} next ticks of {row}"
        if rest:
            self._judge_row(row, rest)
        elif following and row.tick:
            assert schedule.missed is Missed.NONE, f"left out: {row}"
        for record in following:
            again = decoded(row.source, -1, record)
            assert again.tick == (row.tick + 1 if rest else max(1, row.tick)), "a gap"
            assert again.due > row.due and (again.due - row.due) % (schedule.every_ms or 1) == 0, "off its rhythm"
            assert (again.attempt, again.rolls, again.schedule) == (
                0, 0, packed(unpacked(row.schedule or "")[0], is_start_given=True)
            )  # fmt: skip
            assert (again.key, again.value, again.headers, again.id) == (row.key, row.value, row.headers, row.id)
            self.ends["ticks"] += 1
        # One that policy leaves out is not counted: its number goes to the next.
        is_over = bool(rest) and (row.tick == 0 or row.tick >= TICKS)
        is_rolled = any(h.EVERY in dict(record.headers) for record in rest if record.topic == DELAY)
        is_refused = any(record.topic == LETTERS for record in rest) and DELAY in self.kafka.faulty_topics
        assert bool(following) != (not outputs or is_over or is_rolled) or is_refused, f"the next tick of {row}"

    def _judge_row(self, row: Row, outputs: list[Record]) -> None:
        if row.kind is Kind.CANCEL:
            others = set() if row.is_forwarded else {p for _, p in SOURCES} - {row.source[1]}
            assert Counter(record.partition for record in outputs) == Counter(others), "a cancel is forwarded once"
            return
        if not outputs and self._is_covered(row):
            self.ends["cancelled"] += 1
            return
        assert len(outputs) == 1, f"{len(outputs)} records of {row}"
        [record] = outputs
        assert (record.key, record.value) == (row.key, row.value), "not byte for byte"
        is_released = row.target == LETTERS and row.headers[:1] == ((h.HELD, None),)
        if record.topic == DELAY:
            self._judge_copy(row, record)
        elif record.topic == LETTERS:
            own = self._released(row) if is_released else row.headers
            assert record.headers[: len(own)] == own, "a dead letter's headers"
            is_refused = self._is_trouble(row.target) or DELAY in self.kafka.faulty_topics
            assert is_released or row.kind is Kind.REJECT or is_refused, f"condemned: {row}"
            self.ends["dead"] += 1
        else:
            assert (row.kind, record.topic) == (Kind.TIMER, row.target), "delivered to another place"
            due = self._due_of(row, int(dict(record.headers)[h.DUE] or b""))
            assert record.sent_ms >= due, "early"
            origin = h.origin_text(*row.source, row.origin).encode()
            tick = ((h.TICK, b"%d" % row.tick),) if row.tick else ()
            assert record.headers == (*row.headers, (h.ORIGIN, origin), (h.DUE, b"%d" % due), *tick), "its headers"
            self.ends["delivered"] += 1
            self.delivered[record.topic] += 1

    def _judge_copy(self, row: Row, record: Record) -> None:
        again = decoded(row.source, -1, record)
        assert record.partition == row.source[1], "a copy stays in its partition"
        if row.kind is Kind.REJECT:
            assert self._released(again) == row.headers, "a held letter's headers"
            assert self._is_trouble(LETTERS), "held without need"
            self.ends["held"] += 1
            return
        assert (again.target, again.id, again.headers) == (row.target, row.id, row.headers)
        assert again.due == self._due_of(row, again.due)
        keeps = row.schedule is not None and (again.rolls > row.rolls or row.tick == 0)
        assert again.tick == row.tick and (again.schedule is not None) == keeps, "its schedule"
        if again.rolls == row.rolls + 1:
            assert row.due > row.at, "rolled, but due"
            self.ends["rolled"] += 1
        else:
            # Nor is it counted where the target is looked up anew, before a verdict that lasts (`target-in-doubt`).
            is_doubted = row.target in {SECRET, *self.look_up.gone} or self._is_trouble(row.target)
            is_uncounted = is_doubted or KafkaError.INVALID_TIMESTAMP in self.kafka.told
            assert again.attempt == row.attempt + 1 or (is_uncounted and again.attempt == row.attempt)
            assert self._is_trouble(row.target) or self._is_trouble(LETTERS), f"put off without need: {row}"
            self.ends["retried"] += 1

    def _due_of(self, row: Row, said: int) -> int:
        """When it is due: of ticks that were missed the last one may stand for all."""
        if row.schedule is None or said == row.due:
            return row.due
        schedule, _ = schedule_of(row.schedule)
        assert schedule.missed is Missed.LAST and said > row.due and (said - row.due) % (schedule.every_ms or 1) == 0
        return said

    def _released(self, row: Row) -> tuple[tuple[str, bytes | None], ...]:
        """The headers of the record that a held dead letter is of."""
        released = release(list(row.headers), h.Where(*row.source, row.origin, row.origin, row.due))
        assert released is not None, "a held letter that is not taken for one"
        return tuple(released[0])

    def _is_trouble(self, topic: str | None) -> bool:
        """Whether anything was ever wrong with it, or aborts that nothing explains may have been laid at its door."""
        if self.kafka.unexplained >= STRIKES_MAX:
            return True
        found = {*self.kafka.faulty_topics, *self.look_up.ever_gone, SECRET, None}
        return self.is_indulgent or topic in found or topic not in self.kafka.partitions or topic == DELAY

    def _is_covered(self, row: Row) -> bool:
        later = self.rows[row.source][row.origin + 1 :]
        return row.id is not None and any(each.kind is Kind.CANCEL and each.id == row.id for each in later)

    def unfinished(self) -> Iterable[Row]:
        """Rows of our partitions that no commit has finished yet."""
        for name in self.owned:
            yield from (row for row in self._decoded(name) if (name, row.offset) not in self.finished)


def _progress(states: Mapping[SourceName, CommittedState]) -> dict[SourceName, State]:
    return {
        name: State(offset=state.offset, position=state.position, frozen=state.frozen) for name, state in states.items()
    }


def is_next(record: Record) -> bool:
    """Whether it is the copy for the next tick of a schedule: not one that was rolled."""
    headers = dict(record.headers)
    return record.topic == DELAY and h.EVERY in headers and headers[h.COPY_ROLLS] == b"0" and h.COPY_AT not in headers


def row_of(record: Record, mine: list[Row]) -> Row:
    """Of the rows of one origin, the one that a record is made of: a retried tick, or what there is of the schedule."""
    headers = dict(record.headers)
    tick, until = headers.get(h.TICK) or headers.get(h.COPY_TICK), headers.get(h.UNTIL)
    for row in mine:
        is_its = tick == b"%d" % row.tick or (record.topic == LETTERS and until == b"%d" % row.due)
        if row.schedule is None and h.EVERY not in headers and (is_its or len(mine) == 1):
            return row
    return next((row for row in mine if row.schedule is not None), mine[0])


def origin_of(record: Record) -> tuple[SourceName, int, bool]:
    """Which row a record is made of: its partition, its origin's offset, and whether it is a cancel."""
    headers = dict(record.headers)
    if record.topic == DELAY and h.CANCEL in headers:
        topic, partition, offset = (headers[h.COPY_FORWARDED] or b"").decode().rsplit("/", 2)
        return (topic, int(partition)), int(offset), True
    if record.topic == DELAY:
        return (DELAY, record.partition), int(headers[h.COPY_ORIGIN] or b""), False
    topic, partition, offset = (headers[h.ORIGIN] or b"").decode().rsplit("/", 2)
    return (topic, int(partition)), int(offset), False
