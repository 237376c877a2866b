"""bridge.delivery.narrowing: the attempt after an abort differs from the one before it, whatever brokers answer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bridge.delivery.narrowing import (
    LARGE_REFUSALS_MAX,
    PASSING_STRIKES_MAX,
    REFUSALS_MAX,
    REFUSALS_S,
    REMEDIES,
    STRIKES_MAX,
    TRIPPED_AFTER,
    Narrowing,
    Next,
)
from bridge.delivery.producer.outcomes import Aborted, Cause, FailedRecord, Failure
from bridge.delivery.targets.breakers import EVERY, LARGE
from bridge.delivery.targets.cache import Targets
from bridge.kafka.errors import Refusal
from bridge.wire.reasons import RejectReason
from tests.broker.brokers import WELL, Brokers
from tests.manual_clock import ManualClock

UNKNOWN = Failure.of(KafkaError(KafkaError.UNKNOWN))


def failed(topic: str, partition: int, error: KafkaError) -> FailedRecord:
    return FailedRecord(topic, partition, Failure.of(error))


def several(codes: list[int | None], topic: str = "t") -> dict[int, FailedRecord]:
    """Failed records of one partition, in order; None: it did not fail."""
    return {key: failed(topic, 0, KafkaError(code)) for key, code in enumerate(codes) if code is not None}


def sent(rows: int, until_ms: int = 0) -> Any:
    """An open transaction of so many rows, all for one topic."""
    return SimpleNamespace(
        rows=rows,
        until_ms=until_ms,
        places=lambda: {("t", EVERY)},
        counts=SimpleNamespace(delivered={"t": rows}),
        failed_records=lambda rows: rows,
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def targets(brokers: Brokers, clock: ManualClock) -> Targets:
    return Targets(brokers, clock)


@pytest.fixture
def found(targets: Targets, clock: ManualClock) -> Narrowing:
    return Narrowing(targets, frozenset({"delay"}), frozenset({"delay.dlt"}), clock, 20_000)


@pytest.mark.parametrize(
    "code", [KafkaError._MSG_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.KAFKA_STORAGE_ERROR]
)
def test_a_partition_that_does_not_answer_is_put_aside(
    brokers: Brokers, targets: Targets, found: Narrowing, code: int
) -> None:
    """That partition only; its records are retried, and no record is rejected."""
    brokers.topics["t"] = WELL
    assert found.learn({7: failed("t", 2, KafkaError(code))}, was_alone=True)
    assert list(targets.resolve(["t"])["t"].down) == [2]
    assert not found.findings.rejected


def test_what_the_brokers_say_themselves_needs_no_breaker(
    brokers: Brokers, clock: ManualClock, targets: Targets, found: Narrowing
) -> None:
    """They also say when it is over."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    brokers.topics["t"] = denied = replace(WELL, refusal=Refusal(RejectReason.TARGET_DENIED, "no"))
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert found.learn({7: failed("t", -1, error)}, was_alone=True)
    assert targets.resolve(["t"])["t"] == denied
    brokers.topics["t"] = WELL
    clock.advance(2_000)
    targets.refresh()
    assert targets.resolve(["t"])["t"] == WELL
    assert brokers.probed == []


def test_a_target_that_refuses_without_the_brokers_saying_so_is_put_aside(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """A policy, or brokers that do not tell permissions."""
    brokers.topics["t"] = WELL
    error = KafkaError(KafkaError.POLICY_VIOLATION)
    assert found.learn({7: failed("t", 0, error)}, was_alone=False)
    assert targets.resolve(["t"])["t"].refusal == Refusal(RejectReason.PRODUCE_FAILED, error.str())


def test_brokers_that_do_not_answer_at_all_are_no_targets_fault(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """Everything is tried again, and no attempt is counted."""
    brokers.topics["t"] = WELL
    targets.resolve(["t"])
    brokers.is_silent = True
    error = KafkaError(KafkaError._MSG_TIMED_OUT)
    assert targets.look_again(["t"]) is None
    assert not found.learn({7: failed("t", 0, error)}, was_alone=True)
    assert targets.resolve(["t"])["t"] == WELL


def test_a_delay_partition_that_does_not_answer_is_put_aside(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """What has to be written there waits where it is; other partitions go on."""
    brokers.topics["delay"] = WELL
    assert found.learn({7: failed("delay", 0, KafkaError(KafkaError._MSG_TIMED_OUT))}, was_alone=True)
    assert targets.resolve(["delay"])["delay"].is_down(0)
    assert not targets.resolve(["delay"])["delay"].is_down(1)


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN, KafkaError._RETRY, 12_345])
def test_a_partition_that_fails_again_and_again_is_put_aside_whatever_the_code(
    brokers: Brokers, targets: Targets, found: Narrowing, code: int
) -> None:
    """A code that is in no list may be for ever."""
    brokers.topics["t"] = WELL
    records = {7: failed("t", 1, KafkaError(code))}
    assert [found.learn(records, was_alone=False) for _ in range(STRIKES_MAX)] == [False] * (STRIKES_MAX - 1) + [True]
    assert list(targets.resolve(["t"])["t"].down) == [1]


def test_a_target_is_put_aside_late_where_the_brokers_are_busy(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """That passes as a rule, and no target is the reason."""
    brokers.topics["t"] = WELL
    found.rows = 1
    error = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    narrower = [found.narrow(sent(1), Cause.QUEUE_FULL, Failure.of(error)) for _ in range(PASSING_STRIKES_MAX)]
    assert narrower == [False] * (PASSING_STRIKES_MAX - 1) + [True]
    assert targets.resolve(["t"])["t"].refusal is not None


def test_an_abort_that_teaches_nothing_makes_the_next_transaction_smaller(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """Down to one row, and what that was sent to is put aside; commits make it large again."""
    brokers.topics["t"] = WELL
    assert found.narrow(sent(found.rows), Cause.REFUSED, UNKNOWN)
    sizes = [found.rows]
    while found.narrow(sent(found.rows), Cause.REFUSED, UNKNOWN):
        sizes.append(found.rows)
    assert sizes == sorted(set(sizes), reverse=True) and sizes[-1] == 1 and len(sizes) <= 6
    assert found.is_careful and found.is_narrowest
    assert not found.narrow(sent(1), Cause.REFUSED, UNKNOWN)
    assert found.narrow(sent(1), Cause.REFUSED, UNKNOWN)
    assert targets.resolve(["t"])["t"].refusal is not None
    while found.rows < 20_000:
        before = found.rows
        found.committed(found.rows)
        assert found.rows > before
    assert not found.is_careful


def test_an_abort_without_rows_makes_nothing_smaller(found: Narrowing) -> None:
    """Only offsets were to be committed: what is due next is no smaller for it."""
    before = found.rows
    assert not found.narrow(sent(0), Cause.COMMIT_NOT_MADE, UNKNOWN)
    assert found.rows == before


BAD, BYSTANDER = KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD


def test_records_that_the_broker_names_are_believed(brokers: Brokers, found: Narrowing) -> None:
    """All of them at once (KIP-467), as far as they stand between bystanders of their batch."""
    brokers.topics["t"] = WELL
    assert found.learn(several([BYSTANDER, BAD, BYSTANDER, BYSTANDER, BAD, BYSTANDER]), was_alone=False)
    assert set(found.findings.rejected) == {1, 4}


def test_names_at_the_end_of_what_failed_are_not_believed(brokers: Brokers, found: Narrowing) -> None:
    """The client marks all records of a batch if the broker has named one of them: they may be of another batch."""
    brokers.topics["t"] = WELL
    assert found.learn(several([BYSTANDER, BAD, BAD, BYSTANDER, BAD]), was_alone=False)
    assert not found.findings.rejected
    assert found.is_careful


def test_a_target_that_refuses_too_often_has_what_is_suspected_put_off(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """Some aborts find some records; then the others go on, and the target is left alone only if that does not end."""
    brokers.topics["t"] = WELL
    for _ in range(REFUSALS_MAX):
        assert not found.findings.put_off
        found.learn(several([BAD, BAD, BAD]), was_alone=False)
    assert set(found.findings.put_off) == {0, 1, 2}
    assert targets.resolve(["t"])["t"].is_well
    for _ in range((TRIPPED_AFTER - 1) * REFUSALS_MAX):
        found.learn(several([BAD, BAD, BAD]), was_alone=False)
    assert targets.resolve(["t"])["t"].refusal is not None


def test_refusals_now_and_then_put_nothing_off(brokers: Brokers, clock: ManualClock, found: Narrowing) -> None:
    """Each is found, and costs some aborts of its own."""
    brokers.topics["t"] = WELL
    for _ in range(5 * REFUSALS_MAX):
        found.learn(several([BAD, BAD, BAD]), was_alone=False)
        found.committed(3)
        clock.advance(round(2_000 * REFUSALS_S / REFUSALS_MAX))
    assert not found.findings.put_off


def test_a_target_that_refuses_sizes_too_often_is_left_alone_with_large_records(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """Compressed, only the broker can tell whether a record fits; what fits in any case goes on."""
    brokers.topics["t"] = WELL
    for key in range(LARGE_REFUSALS_MAX):
        assert targets.resolve(["t"])["t"].is_well
        found.learn({key: failed("t", 0, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))}, was_alone=True)
    target = targets.resolve(["t"])["t"]
    assert target.is_wary and target.refusal is None and not target.down
    assert targets._breakers.due(1e9) == [("t", LARGE)]
    for _ in range(REFUSALS_MAX - LARGE_REFUSALS_MAX):
        assert not found.findings.put_off
        found.learn(several([KafkaError.MSG_SIZE_TOO_LARGE] * 2), was_alone=False)
    assert set(found.findings.put_off) == {0, 1}, "what is refused all the same is not large"


def test_a_target_that_refuses_our_clock_is_put_off_without_a_count(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """Our clock is at fault, not the message: it never becomes a dead letter for that."""
    brokers.topics["t"] = WELL
    assert found.learn({7: failed("t", 0, KafkaError(KafkaError.INVALID_TIMESTAMP))}, was_alone=True)
    refusal = targets.resolve(["t"])["t"].refusal
    assert refusal is not None and refusal.reason is RejectReason.CLOCK_AHEAD and not refusal.counts
    assert not found.findings.rejected


def test_a_record_that_neither_of_our_topics_takes_is_cut(brokers: Brokers, found: Narrowing) -> None:
    """Its dead letter is refused, then its copy, or the letter again where no copy is possible. Only if what is cut is
    refused as well has it nowhere to go: its source has to wait."""
    brokers.topics = {"delay": WELL, "delay.dlt": WELL}
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    assert found.learn({7: failed("delay.dlt", 0, error)}, was_alone=True)
    assert set(found.findings.no_letter) == {7}
    assert found.learn({8: failed("delay", 0, error)}, was_alone=True)
    assert set(found.findings.no_copy) == {8}
    assert not found.findings.cut
    assert found.learn({7: failed("delay", 0, error)}, was_alone=True)
    assert found.learn({9: failed("delay.dlt", 0, error)}, was_alone=True)
    assert found.learn({9: failed("delay.dlt", 0, error)}, was_alone=True)
    assert set(found.findings.cut) == {7, 9}
    assert not found.take_stuck()
    assert found.learn({7: failed("delay.dlt", 0, error)}, was_alone=True)
    assert set(found.take_stuck()) == {0} and not found.take_stuck()
    found.committed(1)
    assert not found.findings.cut


def test_a_delay_topic_that_takes_smaller_records_than_was_known_is_looked_up(
    brokers: Brokers, targets: Targets, found: Narrowing
) -> None:
    """A move that names a hundred messages then leaves out what is too large, and not all of them."""
    brokers.topics = {"delay": replace(WELL, bytes_max=1_000)}
    targets.resolve(["delay"])
    brokers.topics = {"delay": replace(WELL, bytes_max=500)}
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    assert found.learn({8: failed("delay", 0, error)}, was_alone=True)
    assert not found.findings.no_copy
    assert targets.resolve(["delay"])["delay"].bytes_max == 500
    assert found.learn({8: failed("delay", 0, error)}, was_alone=True)
    assert set(found.findings.no_copy) == {8}


def test_a_record_that_is_refused_for_what_it_is_is_not_cut(brokers: Brokers, found: Narrowing) -> None:
    """Cut, it would be refused again: its source waits."""
    brokers.topics = {"delay": WELL, "delay.dlt": WELL}
    key, error = (3 << 48) | 7, KafkaError(KafkaError.INVALID_RECORD)
    assert found.learn({key: failed("delay.dlt", 0, error)}, was_alone=True)
    assert found.learn({key: failed("delay", 0, error)}, was_alone=True)
    assert set(found.take_stuck()) == {3}


def test_a_forbidden_dead_letter_topic_is_put_aside(brokers: Brokers, targets: Targets, found: Narrowing) -> None:
    """The other one of our topics is tried next."""
    brokers.topics = {"delay": WELL, "delay.dlt": WELL}
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert found.learn({7: failed("delay.dlt", EVERY, error)}, was_alone=True)
    assert targets.resolve(["delay.dlt"])["delay.dlt"].refusal is not None


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_remedy_and_leads_to_another_attempt_or_to_a_wait(
    brokers: Brokers, found: Narrowing, cause: Cause
) -> None:
    """The next attempt is careful, smaller, planned anew, or made later; never the same one at once."""
    brokers.topics["t"] = WELL
    at_once = found.after(sent(found.rows, until_ms=7), Aborted(cause, UNKNOWN))
    remedy = REMEDIES[cause]
    assert at_once is not remedy.waits
    assert found.is_careful is (remedy.next is Next.CAREFUL)
    assert (found.rows < 20_000) is (remedy.next is Next.SMALLER)
    assert found.until_ms == (None if remedy.passes else 7)


@pytest.mark.parametrize("cause", [Cause.REFUSED, Cause.TOO_SLOW, Cause.BROKERS_BUSY])
def test_what_failed_records_tell_comes_first(brokers: Brokers, found: Narrowing, cause: Cause) -> None:
    """Then nothing else is narrowed, and nothing waits."""
    brokers.topics["t"] = WELL
    records: Any = {7: failed("t", 0, KafkaError(BAD))}
    assert found.after(sent(5), Aborted(cause, UNKNOWN, records, was_alone=True))
    assert set(found.findings.rejected) == {7}
    assert found.rows == 20_000
