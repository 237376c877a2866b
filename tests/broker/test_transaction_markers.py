"""Transactions whose end the brokers lose, on brokers that do that. A stub answers for the coordinator here;
test_coordinator.py asks, and tests/system/test_outage.py has it all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError, KafkaException

from bridge.delivery.doubt import look_up
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.outcomes import Failure, Indefinite
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome, are_offsets_pending
from bridge.errors import EnvironmentFailure, StateError
from bridge.settings.model import Settings
from bridge.start.resolve import must_be_pending, resolve_transactions
from dev.harness.kafka import read_committed
from dev.harness.waiting import wait_until
from tests.broker.interfering import raising, rig_with_interference
from tests.broker.losing import LosingCluster, is_running, losing_cluster
from tests.broker.rig import DEADLINE_S, Rig, each
from tests.broker.test_dispatcher import timers

pytestmark = [pytest.mark.system, pytest.mark.slow]


ROWS: Final = 3
MORE: Final = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LosingCluster]:
    """One for all tests here; each has a delay topic, and so a group, of its own."""
    with losing_cluster() as cluster:
        yield cluster


def lose_an_end(cluster: LosingCluster, delay: str, target: str) -> Settings:
    """Deliver `ROWS` rows, and lose the end of that; returns the settings. Renewed, the id would be repaired."""
    losing = cluster.losing_once()
    with Rig(cluster.bootstrap, delay, session_timeout="6s", make_producer=losing, renews=False) as rig:
        rig.add(timers(rig, target, ROWS))
        rig.start()
        rig.wait_delivered()
    cluster.regain(rig.settings)
    return rig.settings


def test_a_start_goes_on_after_the_transaction_that_was_committed(cluster: LosingCluster) -> None:
    """Else it would wait for stable offsets without end. Delivered messages are not repeated, and become visible."""
    delay, target = cluster.create(ROWS + 1)
    lose_an_end(cluster, delay, target)
    asked: list[str] = []

    def ask(name: str) -> str:
        asked.append(name)
        return "Empty" if name.endswith((".2", ".3")) else "CompleteCommit"

    with Rig(cluster.bootstrap, delay, session_timeout="6s", ask=ask, is_opened_early=True) as rig:
        assert asked[0] == rig.settings.transactional_id
        [state] = rig.states.values()
        assert state.position is not None
        assert (state.offset, state.position[1]) == (ROWS, ROWS - 1)
        rig.add(timers(rig, target, 1, first=ROWS))
        rig.start()
        rig.wait_delivered()
        assert [record.value for record in read_committed(cluster.bootstrap, target)] == [b"v0", b"v1", b"v2", b"v3"]
        assert not are_offsets_pending(rig.settings)


@pytest.mark.parametrize(("choice", "offset"), [(Outcome.COMMITTED, ROWS), (Outcome.ABORTED, 0)])
def test_what_the_coordinator_has_forgotten_is_chosen(cluster: LosingCluster, choice: Outcome, offset: int) -> None:
    """An earlier start asked, and ended before it could use the answer. Nothing is written, and no id of it counts as
    settled before an operator has chosen; both choices make the next start possible."""
    delay, target = cluster.create(ROWS)
    settings = lose_an_end(cluster, delay, target)
    repair = MarkerRepair(settings, each(lambda _: "Empty"))
    assert repair.explain() is None, "nobody has been asked yet"
    assert repair.outcome_of(settings.transactional_id) is None
    failure = repair.explain()
    assert failure is not None
    assert "delay-bridge resolve" in failure.hint
    wait_until(lambda: not is_running(settings), DEADLINE_S, "its membership has ended")
    with pytest.raises(StateError, match="of another instance"):
        resolve_transactions(settings, choice, each(lambda _: None))
    done = resolve_transactions(settings, choice, each(lambda _: "Empty"))
    assert done[settings.transactional_id] is choice
    assert repair.explain() is None
    with Rig(cluster.bootstrap, delay, session_timeout="6s", is_opened_early=True) as rig:
        [state] = rig.states.values()
        assert state.offset == offset
    with pytest.raises(StateError, match="nothing to resolve"):
        must_be_pending(settings)


def test_what_the_coordinator_knows_wins_over_a_choice(cluster: LosingCluster) -> None:
    """Also where it has to be asked several times, as after its own restart: nothing is said to be forgotten before."""
    delay, target = cluster.create(ROWS)
    settings = lose_an_end(cluster, delay, target)
    answers: list[str | None] = [None, "CompleteCommit"]

    def ask(_: str) -> str:
        answer = answers.pop(0)
        if answer is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "loading", retriable=True))
        return answer

    with pytest.raises(EnvironmentFailure, match="same choice"):
        resolve_transactions(settings, Outcome.ABORTED, each(ask))
    assert resolve_transactions(settings, Outcome.ABORTED, each(ask)) == {settings.transactional_id: Outcome.COMMITTED}


@pytest.mark.fault("a commit whose end the brokers lose")
def test_a_commit_that_was_not_answered_is_found_out_about(cluster: LosingCluster) -> None:
    """The bridge finds the outcome of the commit, and does not wait for stable offsets for ever."""
    delay, target = cluster.create(ROWS + 1)

    def ask(name: str) -> str:
        return "Empty" if name.endswith((".2", ".3")) else "CompleteCommit"

    def unanswered() -> None:
        cluster.regain(rig.settings)
        assert is_running(rig.settings), "no command may end it meanwhile"
        raise Indefinite(Failure.of(KafkaError(KafkaError._TIMED_OUT)))

    rig, writer = rig_with_interference(
        cluster, delay, session_timeout="5m", ask=ask, make_producer=cluster.losing_once(), renews=False
    )  # renewed, the id would be repaired before anybody asks
    writer.after_commit.append(unanswered)
    with rig:
        rig.add(timers(rig, target, ROWS))
        rig.start()
        wait_until(lambda: rig.tally.rebuilt, 2 * DEADLINE_S, "the producer is given up")
        rig.wait_delivered(2 * DEADLINE_S)
        assert rig.tally.aborted == 0
        wait_until(rig.is_ready, DEADLINE_S, "the id that has lost the end is ready again")
        rig.add(timers(rig, target, 1, first=ROWS))
        rig.wait_delivered()
        assert [record.value for record in read_committed(cluster.bootstrap, target)] == [b"v0", b"v1", b"v2", b"v3"]


@pytest.mark.fault("a lost transaction marker in a target of messages in doubt")
def test_messages_in_doubt_do_not_wait_for_a_transaction_that_their_delivery_ends(
    cluster: LosingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without a record in their target are delivered, although a transaction without an end hides the rest of
    it. Later deliveries end that transaction, too."""
    monkeypatch.setattr(look_up, "QUIET_S", 3.0)
    delay, target = cluster.create(ROWS + 1 + MORE)
    rig, writer = rig_with_interference(
        cluster, delay, session_timeout="5m", make_producer=cluster.losing_once(), renews=False
    )  # renewed, the id would be repaired before the next transaction
    inner: Any = writer.writer

    def send_nothing() -> None:
        inner.send = len_of
        writer.before_commit.append(end)

    def len_of(batch: Batch, **_: object) -> int:
        return len(batch)

    def end() -> None:
        del inner.send
        inner._unasked = KafkaError(KafkaError.INVALID_TXN_STATE)
        raise inner._broken(Failure.of(inner._unasked))

    with rig:
        rig.add(timers(rig, target, ROWS))
        rig.start()
        rig.wait_delivered()
        cluster.regain(rig.settings)
        wait_until(rig.is_ready, DEADLINE_S, "another id is ready")
        writer.on_send.append(send_nothing)
        rig.add(timers(rig, target, 1, first=ROWS))
        rig.wait_delivered(2 * DEADLINE_S)
        assert rig.tally.found == 0
        count = ROWS + 1 + MORE
        for number in range(ROWS + 1, count):  # the ids take turns
            rig.add(timers(rig, target, 1, first=number))
            rig.wait_delivered()
        values = [record.value for record in read_committed(cluster.bootstrap, target)]
        assert values == [b"v%d" % number for number in range(count)]
        assert not are_offsets_pending(rig.settings)


def test_stable_offsets_are_not_pending(cluster: LosingCluster) -> None:
    """Nobody is asked anything."""
    delay, _ = cluster.create(0)
    with Rig(cluster.bootstrap, delay) as rig:
        assert not are_offsets_pending(rig.settings)
        assert MarkerRepair(rig.settings, raising(AssertionError("asked"))).outcome_of("x") is None


def test_who_may_not_end_it_does_not_begin_to(cluster: LosingCluster) -> None:
    """Refused in the middle, it would abort a committed transaction's repetition. Nothing is initialised: with the
    missing right or topic, the next start finds the same state."""
    delay, target = cluster.create(ROWS)
    settings = lose_an_end(cluster, delay, target)
    dead, topics = f"{delay}.dlt", cluster.topics
    repair = MarkerRepair(settings, each(lambda _: "CompleteCommit"))
    topics.forbid(dead, "READ")
    with pytest.raises(EnvironmentFailure, match="Read") as failure:
        repair.outcome_of(settings.transactional_id)
    assert failure.value.fields["topic"] == dead
    topics.permit(dead, "READ")
    topics.delete(dead)
    with pytest.raises(EnvironmentFailure, match="Make this topic"):
        repair.outcome_of(settings.transactional_id)
    topics.create(exactly=dead, on=1)
    more: dict[str, Any] = {"session_timeout": "6s", "is_opened_early": True}
    with Rig(cluster.bootstrap, delay, ask=lambda _: "CompleteCommit", **more) as rig:
        [state] = rig.states.values()
        assert state.offset == ROWS
