"""Dispatcher, writer, planner and store on a scripted Kafka, where everything may go wrong in any order.

What may go wrong, each with any error code that the client knows: every call of the producer; records for a target, for
the dead-letter topic, or on their way back into a delay-topic partition, all of them or those of a kind, once or for
ever, named by the broker or not; brokers that take nothing, or little at a time; transactions that outlive their
time-out; commits without an answer, made or not; rivals; revocations; missing targets; clock steps; crashes.

The rig judges every transaction when it is committed (dispatch_rig.py). Here is the other half, *progress*: when all
that passes has passed, what can be delivered is delivered after a bounded number of aborts, whatever stays broken
beside it; what cannot is tried again and becomes a dead letter.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from confluent_kafka import KafkaError
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from bridge.delivery.narrowing import LEARNED_MAX, NARROWER, PASSING_STRIKES_MAX
from bridge.wire import headers as h
from tests.model.dispatch_rig import DELAY, LETTERS, OF_A_TOPIC, SECRET, SOURCES, DispatchRig, Row
from tests.model.scripted_kafka import CODES, LARGE_BYTES, PLACE_CODES, Fault
from tests.model.sizes import largest_container
from tests.profiles import of_a_machine, timeout_s
from timerstore.rows.entry import Kind

IN_VAIN_MAX: Final = LEARNED_MAX + math.ceil(math.log(20_000, NARROWER)) + PASSING_STRIKES_MAX
"""Aborts without a commit between them that one thing may cost, or what is under way when the rest ends: what is
learned from failed records, then fewer rows down to one, then strikes until a place is left alone."""
STEPS_MAX: Final = 600
PATIENCE_MS: Final = 700_000
"""How long after its due time something may still be on its way, with everything mended that passes: a breaker is open
for five minutes at most, and a source is held for five."""

DELAYS: Final = st.sampled_from([-1_000, 0, 0, 0, 5, 5, 40, 300, 1_500, 25_000])
TARGETS: Final = st.sampled_from(["orders", "orders", "orders", "bills", "bills", "audit", "nowhere", SECRET])
KINDS: Final = st.sampled_from(["timer"] * 7 + ["keyless", "large", "reject", "cancel", "keyless cancel", "recurring"])
IDS: Final = st.sampled_from(["a", "b", None, None])
RECORDS: Final = st.lists(st.tuples(st.integers(0, 2), KINDS, DELAYS, TARGETS, IDS), min_size=1, max_size=12)
USUAL: Final = [
    KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN,
    KafkaError._MSG_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TRANSPORT,
]  # fmt: skip
PLACES: Final = st.sampled_from(
    [("orders", None), ("orders", 0), ("bills", None), ("bills", 0), ("audit", None), (LETTERS, None), (DELAY, None)]
    + [(DELAY, partition) for _, partition in SOURCES]
)
PLACE_FAULTS: Final = st.builds(
    lambda step, code, place, records, is_named, times: Fault(
        step=step, code=code, topic=place[0], partition=place[1], records=records, is_named=is_named, times=times
    ),
    st.sampled_from(["report", "report", "report", "produce", "silence"]),
    st.one_of(st.sampled_from(USUAL), st.sampled_from(PLACE_CODES)),
    PLACES,
    st.sampled_from(["all", "all", "keyless", "large"]),
    st.booleans(),
    st.sampled_from([None, None, 1, 2, 5]),
)
STEP_FAULTS: Final = st.builds(
    lambda step, code, flag, is_applied, times, takes_ms: Fault(
        step=step, code=code, is_retriable=flag == "retriable", requires_abort=flag == "abort",
        is_fatal=flag == "fatal", is_applied=is_applied and flag != "abort", times=times, takes_ms=takes_ms,
    ),
    st.sampled_from(["init", "begin", "offsets", "offsets", "commit", "commit", "commit", "abort"]),
    st.one_of(st.sampled_from([KafkaError._TIMED_OUT, KafkaError._FENCED]), st.sampled_from(CODES)),
    st.sampled_from(["", "retriable", "abort", "fatal"]),
    st.booleans(),
    st.sampled_from([1, 1, 2, 4]),
    st.sampled_from([0, 0, 5_000]),
)  # fmt: skip


class DispatchMachine(RuleBasedStateMachine):
    """Rules are what producers, Kafka, time and misfortune do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    @initialize(
        records=RECORDS,
        timeout_ms=st.sampled_from([3_000, 10_000]),
        transaction_rows=st.sampled_from([3, 20_000]),
        batch_rows=st.sampled_from([1, 4, 1_000]),
        is_prompt=st.booleans(),
    )
    def begin(
        self, records: list[Any], timeout_ms: int, transaction_rows: int, batch_rows: int, is_prompt: bool
    ) -> None:
        self.rig = DispatchRig(timeout_ms=timeout_ms, transaction_rows=transaction_rows)
        self.rig.kafka.batch_rows, self.rig.kafka.is_prompt = batch_rows, is_prompt
        self.news(records)

    def guarded(self, run: Callable[[], object]) -> None:
        """What raises here is the finding: `teardown` finds nothing more."""
        try:
            run()
        except BaseException:
            self.is_broken = True
            raise

    # ---- what is to be delivered

    @rule(records=RECORDS)
    def news(self, records: list[Any]) -> None:
        for partition, kind, delay_ms, target, id in records:
            more = [] if id is None else [(h.ID, id)]
            if kind == "reject":
                self.rig.produce(partition, ("own", "1"), (h.TOPIC, target), value=b"\x00raw")
            elif "cancel" in kind:
                self.rig.produce(partition, (h.CANCEL, id or "a"), key=None if kind == "keyless cancel" else b"k")
            elif kind == "recurring":
                self.rig.recurring(partition, 700 + abs(delay_ms), target, *more)
            else:
                record: dict[str, Any] = {"key": None} if kind == "keyless" else {}
                value = bytes(LARGE_BYTES) if kind == "large" else b"v%d" % delay_ms
                self.rig.timer(partition, delay_ms, target, *more, value=value, **record)

    @rule(steps=st.integers(1, 8))
    def deliver(self, steps: int) -> None:
        for _ in range(steps):
            self.guarded(self.rig.step)
        self.guarded(self.memory_is_bounded)

    @rule(records=RECORDS)
    def deliver_news(self, records: list[Any]) -> None:
        self.news(records)
        self.deliver(2)

    # ---- time

    @rule(ms=st.sampled_from([1, 30, 300, 3_000, 30_000]))
    def time_passes(self, ms: int) -> None:
        self.rig.pass_ms(ms)

    @rule(ms=st.sampled_from([-30_000, -3_000, -100, 3_000, 30_000]))
    def the_clock_is_set(self, ms: int) -> None:
        self.rig.clock.step_wall(ms)

    # ---- what goes wrong

    @rule(fault=PLACE_FAULTS)
    def a_place_takes_nothing(self, fault: Fault) -> None:
        """Not both of the bridge's own for ever: then there is nowhere to go, and the process ends."""
        own = {DELAY, LETTERS}
        if fault.times is None and own & {fault.topic} and own & {each.topic for each in self.rig.kafka.lasting()}:
            fault.times = 2
        if fault.step == "silence":
            self.rig.is_indulgent = True
        self.rig.kafka.inject(fault)
        self.deliver(1)

    @rule(fault=STEP_FAULTS)
    def a_call_fails(self, fault: Fault) -> None:
        self.rig.kafka.inject(fault)
        self.deliver(1)

    @precondition(lambda self: self.rig.kafka.faults)
    @rule(i=st.integers(0, 9))
    def something_is_mended(self, i: int) -> None:
        self.rig.kafka.faults.pop(i % len(self.rig.kafka.faults))

    @rule(latency_ms=st.sampled_from([1, 20, 400, 1_500]), rows=st.sampled_from([None, 1, 5]))
    def the_brokers_are_slow(self, latency_ms: int, rows: int | None) -> None:
        self.rig.kafka.latency_ms, self.rig.kafka.acknowledged_max = latency_ms, rows
        self.rig.is_indulgent = True

    @rule(topic=st.sampled_from(["orders", "bills", "audit", LETTERS]))
    def a_topic_is_deleted_or_comes_back(self, topic: str) -> None:
        self.rig.look_up.gone ^= {topic}
        self.rig.look_up.ever_gone.add(topic)

    @rule()
    def another_instance_initialises(self) -> None:
        self.rig.kafka.meanwhile.append(self.rig.kafka.rival)

    @rule(owned=st.sets(st.sampled_from(SOURCES), min_size=1), is_open=st.booleans())
    def partitions_are_revoked_or_assigned(self, owned: set[Any], is_open: bool) -> None:
        if is_open:
            self.rig.kafka.meanwhile.append(lambda: self.rig.rebase(owned))
        else:
            self.rig.rebase(owned)

    @rule(owned=st.sets(st.sampled_from(SOURCES), min_size=1), is_flushed=st.booleans())
    def partitions_come_and_go(self, owned: set[Any], is_flushed: bool) -> None:
        """While the store is open, between two transactions."""
        if is_flushed:
            self.rig.store.flush(self.rig.clock.now_ms())
        self.guarded(lambda: self.rig.follow(owned))
        self.deliver(1)

    @rule(is_flushed=st.booleans(), is_lost=st.booleans())
    def the_process_dies(self, is_flushed: bool, is_lost: bool) -> None:
        if is_flushed:
            self.rig.store.flush(self.rig.clock.now_ms())
        if is_lost:
            self.rig.store.close()
            shutil.rmtree(self.rig.directory / "store")
        self.guarded(self.rig.crash)

    # ---- promises

    def memory_is_bounded(self) -> None:
        """Nothing grows with the number of steps: what is kept is of pending rows, topics or partitions."""
        rows = sum(1 for _ in self.rig.unfinished())
        name, size = largest_container(self.rig.dispatcher, "bridge.")
        assert size <= 50 + 4 * rows, f"{name} has {size} entries for {rows} rows"

    def is_deliverable(self, row: Row) -> bool:
        """Whether what stays broken leaves a way for it."""
        lasting = self.rig.kafka.lasting()
        own = [fault for fault in lasting if fault.topic == DELAY]
        if any(fault.partition in (None, row.source[1]) or fault.code in OF_A_TOPIC for fault in own):
            return False  # its source may be left out as a whole
        if own and any(each.kind is Kind.CANCEL and not each.is_forwarded for each in self.unfinished(row.source)):
            return False  # a cancel in it cannot be sent on
        if any(f.code == KafkaError.INVALID_TIMESTAMP and f.topic in (row.target, LETTERS) for f in lasting):
            return False  # it is tried again until the clock is right
        broken = {fault.topic for fault in lasting} | self.rig.look_up.gone
        goes = row.kind is Kind.TIMER and row.target not in {*broken, SECRET, "nowhere"}
        return goes if LETTERS in broken else True

    def unfinished(self, source: Any) -> list[Row]:
        return [row for row in self.rig.unfinished() if row.source == source]

    def progress(self) -> None:
        """All that passes is over. What can be delivered is delivered, in bounded time and with few aborts."""
        rig = self.rig
        rig.kafka.end_transients()
        rig.kafka.meanwhile.clear()
        rig.rebase(SOURCES)
        for _ in range(5):
            rig.step()
        in_vain, allowed = 0, IN_VAIN_MAX * (1 + len(rig.kafka.lasting()) + len(rig.look_up.gone))
        last_ms = max([rig.clock.now_ms(), *(row.due for row in rig.unfinished())])
        for _ in range(STEPS_MAX):
            left = self.left()
            if not left:
                break
            rig.pass_ms(min(row.at for row in left) - rig.clock.now_ms())
            aborted, committed = rig.tally.aborted + rig.tally.rebuilt, rig.tally.transactions
            rig.step()
            in_vain += rig.tally.aborted + rig.tally.rebuilt - aborted
            in_vain = 0 if rig.tally.transactions > committed else in_vain
            assert in_vain <= allowed, f"{in_vain} aborts with nothing committed between them; left: {self.left()}"
            assert rig.clock.now_ms() <= last_ms + PATIENCE_MS, f"left: {self.left()}"
        assert not self.left(), f"left: {self.left()}"
        self.memory_is_bounded()

    def left(self) -> list[Row]:
        return [row for row in self.rig.unfinished() if self.is_deliverable(row)]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            if not self.is_broken:
                self.progress()
        finally:
            self.rig.close()


@pytest.mark.fault("any error of any call of the producer, in any order")
@pytest.mark.timeout(timeout_s(1_800))
class TestDispatchMachine(DispatchMachine.TestCase):  # type: ignore[misc,valid-type]
    """With any failures in any order: exactly once, never early, no message lost, and all deliverable messages
    delivered."""

    settings = of_a_machine(check=20, ci=250, nightly=100_000, steps=25)
