"""What an abort leads to, on a scripted Kafka: never to the same attempt while something else can be delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError

from bridge.delivery import filling
from bridge.delivery.targets.partitioner import murmur2
from bridge.delivery.targets.target import Target
from bridge.errors import InternalError
from bridge.settings.model import Settings
from bridge.start.roll_window import TopicLimits, decode_parameters
from bridge.wire import headers as h
from tests.model import dispatch_rig
from tests.model.dispatch_rig import DELAY, LETTERS, OF_A_TOPIC, SOURCES, DispatchRig, ScriptedLookUp
from tests.model.scripted_kafka import PLACE_CODES, Fault
from tests.profiles import HUNDREDS, PROFILE
from timerstore.errors import Inconsistent
from timerstore.limits import DAY_MS
from timerstore.memory.sorted_runs import SortedRuns

ABORTS_MAX = 10
TRIED = PLACE_CODES[:: {"check": 12, "ci": 3, "nightly": 1}[PROFILE]]


@pytest.fixture
def rig() -> Iterator[DispatchRig]:
    """A bridge on a Kafka that does as it is told."""
    made = DispatchRig()
    yield made
    made.close()


def deliver(rig: DispatchRig, count: int, topic: str = "orders", steps: int = 300) -> int:
    """Step until so many records are delivered there. Returns how many transactions were aborted on the way."""
    aborted, opened = rig.tally.aborted + rig.tally.rebuilt, rig.opened
    for _ in range(steps):
        rig.step()
        assert rig.opened == opened, "the process ended"
        if rig.delivered[topic] >= count:
            return rig.tally.aborted + rig.tally.rebuilt - aborted
    raise AssertionError(f"{rig.delivered[topic]} of {count} were delivered")


def deliver_all(rig: DispatchRig, steps: int = 1_000, but: int | None = None) -> None:
    """Step until nothing is left, but for one partition of the delay topic."""
    opened = rig.opened
    for _ in range(steps):
        rig.step()
        assert rig.opened == opened, "the process ended"
        if all(row.source[1] == but for row in rig.unfinished()):
            return
    raise AssertionError(f"left: {list(rig.unfinished())}")


@pytest.mark.parametrize("step", ["report", "produce"])
def test_a_target_that_answers_with_an_unknown_code_holds_up_no_other(step: str) -> None:
    """Whatever it answers, now or ever, the others' records go out after a few aborts, and its own are tried again and
    then dead letters."""
    for code in TRIED:
        rig = DispatchRig()
        try:
            rig.kafka.inject(Fault(step=step, code=code, topic="bills"))
            for i in range(5):
                rig.timer(i % 2, i, "orders")
                rig.timer(i % 2, i, "bills")
            twice = code == KafkaError.INVALID_TXN_STATE  # such an abort costs the producer, too
            assert deliver(rig, 5) <= ABORTS_MAX * (1 + twice), KafkaError(code).name()
            if code != KafkaError.INVALID_TIMESTAMP:  # that is no record's fault, however often it is tried
                deliver_all(rig)
                assert rig.ends["dead"] == 5, KafkaError(code).name()
        finally:
            rig.close()


@pytest.mark.parametrize("step", ["report", "produce"])
def test_a_delay_topic_partition_that_takes_nothing_holds_up_no_other_source(step: str) -> None:
    """Rolls and retries that cannot be written stay where they are; what lies in the other partitions is delivered, or
    tried again there, whatever the code."""
    for code in TRIED:
        rig = DispatchRig()
        try:
            rig.kafka.inject(Fault(step=step, code=code, topic=DELAY, partition=0))
            rig.timer(0, 60_000, "orders")
            rig.timer(0, 20, "nowhere")
            for _ in range(30):
                rig.step()
            for i in range(5):
                rig.timer(1 + i % 2, i, "orders")
            if code not in OF_A_TOPIC:
                rig.timer(1, 10, "nowhere")
            rig.pass_ms(20_000)
            assert deliver(rig, 5) <= ABORTS_MAX, KafkaError(code).name()
            deliver_all(rig, but=0)
            rig.kafka.faults.clear()
            deliver_all(rig)
        finally:
            rig.close()


@pytest.mark.parametrize("step", ["report", "produce"])
def test_a_cancel_that_cannot_be_forwarded_holds_up_no_other_source(step: str) -> None:
    """Its partition waits for the one that does not take it, whatever the code; the others do not."""
    for code in {*TRIED, KafkaError.INVALID_RECORD, KafkaError.MSG_SIZE_TOO_LARGE}:
        rig = DispatchRig()
        try:
            rig.kafka.inject(Fault(step=step, code=code, topic=DELAY, partition=0))
            rig.produce(1, (h.CANCEL, "a"), key=None)
            for i in range(5):
                rig.timer(2, i, "orders")
            assert deliver(rig, 5) <= ABORTS_MAX, KafkaError(code).name()
            rig.kafka.faults.clear()
            deliver_all(rig)
        finally:
            rig.close()


@pytest.mark.parametrize("acknowledged", [10, 30])
def test_a_transaction_that_outlives_its_time_out_is_halved_and_not_taken_for_a_rival(
    rig: DispatchRig, acknowledged: int
) -> None:
    """Brokers that take a hundred records a second need longer for a large transaction than it may stay open; all of it
    is delivered all the same, exactly once."""
    rig.kafka.acknowledged_max = acknowledged
    rig.is_indulgent = True
    for i in range(4_000):
        rig.timer(i % 3, 0, "orders")
    deliver(rig, 4_000)


def test_a_transaction_that_is_fenced_for_its_age_is_halved(rig: DispatchRig) -> None:
    """Each answer takes so long that the transaction is gone before it is committed: twice within a minute, without any
    rival."""
    rig.kafka.is_prompt = True
    for _ in range(3):
        for i in range(100):
            rig.timer(i % 3, 0, "orders")
        rig.kafka.inject(Fault(step="offsets", code=KafkaError._TIMED_OUT, is_retriable=True, times=2, takes_ms=5_000))
        deliver_all(rig)
    assert rig.delivered["orders"] == 300


@pytest.mark.parametrize("code", [KafkaError.INVALID_RECORD, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.UNKNOWN])
@pytest.mark.parametrize("is_named", [True, False])
def test_records_that_only_the_broker_refuses_cost_few_aborts(rig: DispatchRig, code: int, is_named: bool) -> None:
    """1,000 among 10,000 of one instant: the good ones are delivered after at most ten aborts, within three seconds.
    (`make check`: 300 among 3,000.)"""
    rig.kafka.inject(Fault(step="report", code=code, topic="bills", records="keyless", is_named=is_named))
    rig.kafka.batch_rows = 5 * HUNDREDS
    for i in range(100 * HUNDREDS):
        if i % 10:
            rig.timer(i % 3, 5, "orders")
        else:
            rig.timer(i % 3, 5, "bills", key=None)
    began_s = rig.clock.monotonic_s()
    assert deliver(rig, 90 * HUNDREDS) <= ABORTS_MAX
    assert rig.clock.monotonic_s() - began_s <= 3
    deliver_all(rig)


def test_good_records_for_a_target_that_refuses_others_are_delivered(rig: DispatchRig) -> None:
    """They may be put off with the others; none of them becomes a dead letter."""
    rig.kafka.inject(
        Fault(step="report", code=KafkaError.INVALID_RECORD, topic="bills", records="keyless", is_named=True)
    )
    for i in range(1_000):
        rig.timer(i % 3, 5, "bills", key=None if i % 2 else b"k")
    deliver_all(rig, 3_000)
    assert (rig.delivered["bills"], rig.ends["dead"]) == (500, 500)


def test_a_partition_that_is_held_and_moves_to_another_instance_is_counted_no_more(rig: DispatchRig) -> None:
    """The metric, and its alert, are about what this instance has."""
    rig.kafka.inject(Fault(step="report", code=KafkaError.NOT_ENOUGH_REPLICAS, topic=DELAY, partition=0))
    rig.timer(0, 60_000, "orders")
    rig.pass_ms(20_000)
    for _ in range(30):
        rig.step()
    assert rig.tally.held == 1
    rig.rebase(SOURCES[1:])
    for _ in range(3):
        rig.step()
    assert rig.tally.held == 0


def test_a_store_on_states_from_before_the_last_commit_is_refused(rig: DispatchRig) -> None:
    """They were read while a transaction was open that has been committed since: all of it would be delivered again."""
    before = rig.read_committed(rig.owned)
    rig.timer(0, 0, "orders")
    deliver_all(rig)
    rig.dispatcher.quiesce()
    rig.store.close()
    with pytest.raises(InternalError, match="behind the last commit"):
        rig.open_store(before)


def test_a_source_without_a_dead_letter_topic_goes_on_with_copies(rig: DispatchRig) -> None:
    """It was held while the delay topic refused copies as well. When that takes them again, nothing waits for the
    dead-letter topic any more."""
    rig.look_up.gone = rig.look_up.ever_gone = {"bills", LETTERS}
    rig.kafka.inject(
        Fault(step="report", code=KafkaError.TOPIC_AUTHORIZATION_FAILED, topic=DELAY, partition=2, times=2)
    )
    rig.timer(2, 0, "bills")
    for _ in range(40):
        rig.step()
    rig.kafka.faults.clear()
    rig.timer(2, 1, "orders")
    deliver(rig, 1)


@pytest.mark.parametrize("step", ["report", "silence"])
def test_a_dead_letter_that_has_no_other_place_holds_up_its_own_source_alone(
    rig: DispatchRig, monkeypatch: Any, step: str
) -> None:
    """One partition of the dead-letter topic takes nothing, and the record for it is too large to be put off in the
    delay topic: its source waits for that partition, what lies in others is delivered."""
    look = ScriptedLookUp._target

    def smaller(look_up: ScriptedLookUp, name: str) -> Target:
        return replace(look(look_up, name), bytes_max=1_000 if name == DELAY else None)

    monkeypatch.setattr(ScriptedLookUp, "_target", smaller)
    rig.kafka.partitions[LETTERS], rig.kafka.logs[LETTERS, 1] = 2, []
    rig.kafka.inject(Fault(step=step, code=KafkaError.NOT_ENOUGH_REPLICAS, topic=LETTERS, partition=1))
    key = next(key for key in map(str.encode, "abcdefgh") if (murmur2(key) & 0x7FFFFFFF) % 2)
    rig.produce(0, key=key, value=bytes(990))
    for i in range(5):
        rig.timer(1 + i % 2, i, "orders")
    assert deliver(rig, 5) <= ABORTS_MAX
    deliver_all(rig, but=0)
    rig.kafka.faults.clear()
    deliver_all(rig)
    assert rig.ends["dead"] == 1


def test_a_clock_that_is_set_back_too_often_is_told_and_counted(rig: DispatchRig) -> None:
    """Once for each time that nothing can be written down any more; afterwards all goes on."""
    for i in range(90):
        rig.timer(i % 3, 0, "orders")
        rig.pass_ms(50)
        for _ in range(5):
            rig.step()
        rig.clock.step_wall(-8_000)
    refused = rig.tally.steps_refused
    assert refused >= 1
    for _ in range(50):
        rig.step()
    assert rig.tally.steps_refused == refused, "told once, not at every look"
    rig.pass_ms(900_000)
    deliver_all(rig)
    assert rig.delivered["orders"] == 90


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("delay_ms", [100, 0, -3_000])
def test_records_that_are_refused_all_the_time_do_not_keep_others_from_being_delivered(
    rig: DispatchRig, is_named: bool, delay_ms: int
) -> None:
    """A tenant sends fifty bad records a second, and more of them are due at every attempt: what is due is bounded
    until something is committed, so the records for others go out, later by as much as a few aborts take."""
    rig.kafka.latency_ms = 10
    rig.kafka.inject(
        Fault(step="report", code=KafkaError.INVALID_RECORD, topic="bills", records="keyless", is_named=is_named)
    )
    began_ms = next_ms = rig.clock.now_ms()
    while rig.clock.now_ms() < began_ms + 5_000:
        while next_ms <= (now_ms := rig.clock.now_ms()):
            due_in_ms = next_ms + delay_ms - now_ms
            rig.timer(0, due_in_ms, "orders")
            rig.timer(1, due_in_ms, "bills")
            rig.timer(1, due_in_ms, "bills")
            rig.timer(2, due_in_ms, "bills", key=None)
            next_ms += 20
        rig.step()
    assert rig.delivered["orders"] >= 100


@pytest.mark.parametrize("is_begun", [False, True], ids=["at first", "with a transaction open"])
def test_a_take_that_fails_half_way_ends_delivery(rig: DispatchRig, monkeypatch: Any, is_begun: bool) -> None:
    """With that error, and not with one of the abort that follows. Nothing more is committed, offsets neither, and the
    next start delivers all of it."""
    gather_near, calls = SortedRuns.gather_near, 0

    def fail(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > is_begun:
            raise MemoryError("half-way")
        return gather_near(*args)

    for i in range(5):
        rig.timer(i % 2, 0, "orders")
    with monkeypatch.context() as patch:
        patch.setattr(filling, "PIECE_ROWS", 2)
        patch.setattr(SortedRuns, "gather_near", fail)
        with pytest.raises(MemoryError, match="half-way"):
            deliver(rig, 5)
    rig.pass_ms(2_000)
    with pytest.raises(Inconsistent):
        rig.dispatcher._step()
    assert not rig.delivered
    rig.crash()
    deliver_all(rig)
    assert rig.delivered["orders"] == 5


def test_records_that_do_not_fit_into_many_targets_cost_one_look_up(rig: DispatchRig, monkeypatch: Any) -> None:
    """The targets are asked about again together: one after the other, slow brokers would hold all others up."""
    names = [f"small{i}" for i in range(40)]
    asked: list[list[str]] = []

    def answer(_: ScriptedLookUp, wanted: Sequence[str]) -> Mapping[str, Target]:
        asked.append(list(wanted))
        limit = {name: 100 if name in names else None for name in wanted}
        return {name: Target(partitions=1, bytes_max=limit[name]) for name in wanted}

    monkeypatch.setattr(ScriptedLookUp, "__call__", answer)
    rig.targets.resolve([*names, "orders", DELAY, "delay.dlt"])
    rig.kafka.faulty_topics |= set(names)
    rig.pass_ms(6_000)
    for name in names:
        rig.timer(0, 0, name, value=bytes(500))
    rig.timer(1, 0, "orders")
    asked.clear()
    deliver(rig, 1)
    deliver_all(rig)
    assert rig.ends["dead"] == len(names)
    assert len(asked) == 1


@pytest.mark.fault("a transaction that is left before another transactional id is ready")
def test_no_rows_are_on_loan_while_no_transactional_id_is_ready(rig: DispatchRig, monkeypatch: Any) -> None:
    """Nothing is taken out of the store before an id is ready to deliver it, so that a rebalance or the end of the
    process does not wait for that."""
    monkeypatch.setattr("bridge.delivery.dispatcher.SLICE_S", 0)
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(rig, "_in_background", later.append)
    rig.kafka.inject(Fault(step="silence", code=KafkaError._MSG_TIMED_OUT, topic="orders"))
    rig.timer(0, 0, "orders")
    while not rig.tally.aborted:
        rig.step()
    rig.kafka.faults.clear()
    rig.timer(1, 0, "bills")
    begin = mock.Mock(wraps=rig.store.begin)
    monkeypatch.setattr(rig.store, "begin", begin)
    for _ in range(3):
        rig.step()
    assert not begin.called and not rig.tally.rebuilt
    while later:
        later.pop()()
    deliver_all(rig)


@pytest.mark.fault("a delay of many roll windows in a topic without retention")
@pytest.mark.parametrize(("retention_ms", "is_rolled"), [(14 * DAY_MS, True), (-1, False)])
def test_a_topic_that_keeps_its_records_gets_no_copies(
    rig: DispatchRig, monkeypatch: Any, retention_ms: int, is_rolled: bool
) -> None:
    """A message that is due after five usual roll windows arrives once, on time, without one copy in the delay topic.
    A cancel holds as long."""
    settings = Settings.of({"delay_topics": {DELAY: {}}})
    parameters = decode_parameters(settings, DELAY, TopicLimits(retention_ms=retention_ms))
    monkeypatch.setattr(dispatch_rig, "WINDOW_MS", parameters.roll_window_ms)
    due_ms = rig.clock.now_ms() + 35 * DAY_MS
    rig.timer(0, 35 * DAY_MS, "orders", (h.ID, "kept"))
    rig.timer(1, 35 * DAY_MS, "orders", (h.ID, "cancelled"))
    rig.step()
    rig.produce(1, (h.CANCEL, "cancelled"))
    while rig.clock.now_ms() < due_ms:
        assert rig.delivered["orders"] == 0
        rig.step()
        rig.pass_ms(min(DAY_MS // 2, due_ms - rig.clock.now_ms()))
        rig.store.flush(rig.clock.now_ms())
    deliver_all(rig)
    assert rig.delivered["orders"] == 1 and rig.clock.now_ms() - due_ms < 60_000
    copies = [record for place in SOURCES for record in rig.kafka.logs[place] if h.COPY_ORIGIN in dict(record.headers)]
    assert (len(copies) >= 4, rig.tally.rolls >= 4) == (is_rolled, is_rolled)
    assert is_rolled or copies == []
