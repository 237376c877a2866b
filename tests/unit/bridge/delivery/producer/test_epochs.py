"""Requests that may arrive late, in the next transaction of their id: the writer gives that id a new epoch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from bridge.delivery.producer.outcomes import Aborted, Broken, Cause, EndedUnasked, Incident, Indefinite, NotReady
from bridge.delivery.producer.transaction_markers import Outcome
from bridge.errors import EnvironmentFailure
from dev.harness.waiting import wait_until
from tests.unit.bridge.delivery.producer.stubs import (
    FATAL,
    RETRIABLE,
    UNASKED,
    StubProducer,
    Told,
    after_an_outage,
    batch,
    begun,
    error,
)

CUT = ("FAIL", "broker:9092/1: Disconnected (after 7ms in state UP) (_TRANSPORT): identical to last error")
REFUSED = ("FAIL", "broker:9092/1: Connect failed: Connection refused (after 0ms in state CONNECT) (_TRANSPORT)")
TIMED_OUT = ("REQTMOUT", "broker:9092/1: Timed out 1 in-flight, 0 retry-queued, 0 out-queue, 0 partially-sent requests")


@pytest.fixture
def told() -> Told:
    """All ids are initialised, and the first has a transaction open."""
    made = Told()
    made.writer.open()
    made.writer.begin()
    made.background()
    return made


@pytest.mark.fault("a request that arrives late in the next transaction of its id")
@pytest.mark.parametrize("line", [CUT, TIMED_OUT])
def test_a_connection_that_breaks_renews_the_id(line: tuple[str, str]) -> None:
    """A transactional id gets a new epoch before its next transaction if a request of its last one may have been sent
    more than once. Another id goes on meanwhile."""
    told = Told()
    told.writer.open()
    told.background()
    told.producer.lines["commit"] = [line]
    told.writer.begin()
    told.writer.send(batch(b"a"))
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x.2"
    assert told.writer.takes_doubt() and not told.writer.takes_doubt()
    told.background()
    assert told.names[3:] == ["x"]
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x"
    assert told.made[3].calls == ["init", "begin"]
    assert told.incidents == [Incident.END_IN_DOUBT, Incident.ID_RENEWED]


@pytest.mark.parametrize("step", ["begin", "produce", "offsets"])
def test_offsets_in_doubt_are_waited_for(step: str) -> None:
    """Where they arrive while the end of their transaction is being written, they count as the latest: no other id
    commits any before a new epoch fences them."""
    told = Told()
    told.writer.open()
    told.background()
    told.producer.lines[step] = [CUT]
    told.writer.begin()
    told.writer.send(batch(b"a"))
    told.writer.commit([], None, lambda _: False)
    told.producer = StubProducer(told.clock)
    assert not told.writer.await_turn(0)
    told.later.pop()()
    assert told.writer.await_turn(0)
    told.writer.begin()
    assert told.names[3:] == ["x"] and told.producer.calls == ["init", "begin"]
    assert told.incidents == [Incident.END_IN_DOUBT, Incident.DELIVERY_WAITED, Incident.ID_RENEWED]
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x.2"


@pytest.mark.fault("a commit without an answer whose offsets may arrive late")
def test_offsets_in_doubt_are_waited_for_whether_the_commit_is_answered_or_not(told: Told) -> None:
    """Where nobody knows whether a transaction was committed, and its offsets may arrive late, no other id commits any
    before a new epoch fences them."""
    told.producer.lines["offsets"] = [CUT]
    told.producer.forever["commit"] = RETRIABLE
    with pytest.raises(Indefinite):
        told.writer.commit([], None, lambda _: False)
    assert after_an_outage(told) == "x" and told.names[3:] == ["x"] and told.writer.takes_doubt()


def test_an_id_whose_producer_has_failed_is_asked_about(told: Told) -> None:
    """Whoever has fenced it may have had a transaction since: the last end that this process knows is not the last."""
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x.2"
    told.made[0].forever["poll"] = FATAL
    told.writer.look_after()
    told.background()
    assert told.names[3:] == ["x"] and told.repair.known["x"] is None


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_end_that_was_asked_for_twice_renews_the_id(told: Told, end: str) -> None:
    """The client may have sent it before the first call gave up."""
    told.producer.script[end] = [RETRIABLE, None]
    told.writer.commit([], None, lambda _: False) if end == "commit" else told.writer.abort()
    assert begun(told) != "x"
    told.background()
    assert told.names[3:] == ["x"]
    assert told.repair.known == {
        "x": Outcome.COMMITTED if end == "commit" else Outcome.ABORTED,
        "x.2": None,
        "x.3": None,
    }


def test_an_abort_in_doubt_is_followed_by_the_id_whose_commit_is_the_longest_ago(told: Told) -> None:
    """As after other trouble: an abort of the last one may take its commit back."""
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x.2"
    told.made[1].lines["abort"] = [CUT]
    told.writer.abort()
    assert begun(told) == "x.3"


def test_a_good_commit_costs_nothing(told: Told) -> None:
    """Nor do connections that are not made, in an outage, or that break while nothing is under way."""
    told.producer.lines["produce"] = [REFUSED]
    told.writer.send(batch(b"a"))
    told.writer.commit([], None, lambda _: False)
    assert not told.writer.takes_doubt()
    told.made[1].lines["poll"] = [CUT]
    for made in told.made[1:]:
        made.poll(0)
    assert begun(told) == "x.2"
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x" and not told.later


@pytest.mark.fault("brokers that are away while nothing is due")
def test_no_log_of_a_client_grows_while_nothing_is_delivered(told: Told) -> None:
    """The dispatcher reads the news of all producers between its steps, so an outage fills no memory."""
    for made in told.made:
        made._log = [REFUSED] * 100
    told.writer.look_after()
    assert not any(made._log for made in told.made)
    told.writer.commit([], None, lambda _: False)
    assert not told.writer.takes_doubt()


def test_where_all_are_in_doubt_the_first_new_epoch_is_waited_for(told: Told) -> None:
    """And that is counted."""
    for made in told.made:
        made.lines["commit"] = [CUT]
        told.writer.commit([], None, lambda _: False)
        if made is not told.made[-1]:
            told.writer.begin()
    assert len(told.later) == 3
    renewed = told.producer = StubProducer(told.clock)
    for _ in range(3):
        assert not told.writer.await_turn(0)
    told.later.pop()()
    assert told.writer.await_turn(0)
    told.writer.begin()
    assert renewed.calls == ["init", "begin"] and told.names[-1] == "x.3"
    assert told.incidents.count(Incident.DELIVERY_WAITED) == 1


def test_where_none_is_ready_the_producer_is_opened_again(told: Told) -> None:
    """No id is made twice by that: a second producer would fence the first."""
    for made in told.made:
        made.lines["commit"] = [CUT]
        told.writer.commit([], None, lambda _: False)
        if made is not told.made[-1]:
            told.writer.begin()
    with pytest.raises(Broken):
        told.writer.begin()
    with pytest.raises(NotReady):
        told.writer.open()
    told.background()
    told.writer.open()
    assert sorted(told.names[3:]) == ["x", "x.2", "x.3"]


def test_other_offsets_are_not_sent_where_the_first_ones_may_arrive_late(told: Told) -> None:
    """They would count, in the same transaction."""
    told.producer.lines["offsets"] = [CUT]
    told.writer.send_offsets([TopicPartition("delay", 0, 7)], None)
    wait_until(lambda: told.producer.joined, 30, "the first ones have joined")
    with pytest.raises(Aborted) as aborted:
        told.writer.commit([TopicPartition("delay", 0, 8)], None, lambda _: False)
    assert aborted.value.cause is Cause.BROKERS_BUSY and len(told.producer.joined) == 1


def test_an_end_that_broke_after_it_was_written_is_indefinite(told: Told) -> None:
    """The client asks for an abort then; the brokers may have made the commit all the same."""
    text = "EndTxn commit failed: Local: SSL error"
    told.producer.script["commit"] = [KafkaException(KafkaError(KafkaError._SSL, text, txn_requires_abort=True))]
    with pytest.raises(Indefinite):
        told.writer.commit([], None, lambda _: False)


@pytest.mark.parametrize(
    "doubt", [lambda producer, _: producer._log.append(CUT), lambda _, on_repeat: on_repeat()], ids=["cut", "repeated"]
)
def test_an_end_that_was_written_again_is_in_doubt_as_any_other(doubt: Callable[..., None]) -> None:
    """The repair's own transaction: its id is initialised once more before it is used."""
    told = Told()
    told.repair.lost["x"] = Outcome.COMMITTED
    told.repair.on_write = doubt
    with pytest.raises(NotReady):
        told.writer.open()
    told.repair.on_write = lambda *_: None
    told.producer = StubProducer(told.clock)
    told.writer.open()
    assert told.repair.written == [("x", Outcome.COMMITTED)]
    assert told.names[:2] == ["x", "x.2"]


def test_an_own_initialisation_that_fences_late_is_no_rival(told: Told) -> None:
    """It was sent twice; the first copy arrives when the id is in use."""
    told.producer.forever["offsets"] = FATAL
    told.writer._in_use().may_fence_itself = True
    with pytest.raises(Broken) as broken:
        told.writer.commit([], None, lambda _: False)
    assert broken.value.fenced_by is None


def test_without_the_rule_the_id_goes_on() -> None:
    """For injections that are to show that they reach their aim."""
    told = Told(renews=False)
    told.writer.open()
    told.writer.begin()
    told.producer.lines["commit"] = [CUT]
    told.writer.commit([], None, lambda _: False)
    assert begun(told) == "x" and told.writer.takes_doubt()


@pytest.mark.fault("a transaction that was ended by a late request")
@pytest.mark.parametrize("step", ["offsets", "commit", "abort", "poll"])
def test_it_is_told_by_whatever_call_finds_out(told: Told, step: str) -> None:
    """A transaction that ended before the bridge asked for its end counts neither as committed nor as aborted."""
    told.writer.send(batch(b"a"))
    told.producer.forever[step] = UNASKED
    end = told.writer.abort if step in ("abort", "poll") else lambda: told.writer.commit([], None, lambda _: False)
    with pytest.raises(EndedUnasked):
        end()
    assert told.incidents == [Incident.ENDED_UNASKED]


@pytest.mark.parametrize("in_haste", [False, True])
def test_a_record_that_was_refused_for_it_is_no_reason_to_send_it_again(told: Told, in_haste: bool) -> None:
    """Its partition has the end already, others of the transaction may be without one."""
    told.producer.script["commit"] = [error(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True)]
    with pytest.raises(Aborted):
        told.writer.commit([], None, lambda _: False)
    with pytest.raises(EndedUnasked):
        told.writer.abort(in_haste=in_haste)
    assert told.incidents == [Incident.ENDED_UNASKED]


def test_a_commit_that_is_asked_for_twice_does_not_hide_it(told: Told) -> None:
    """Nor does a producer that is lost on the way to the abort."""
    told.producer.script["commit"] = [RETRIABLE, error(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True)]
    with pytest.raises(EndedUnasked):
        told.writer.commit([], None, lambda _: False)
    told.producer = StubProducer(told.clock)
    told.writer.open()
    told.writer.begin()
    told.producer.script["offsets"] = [error(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True)]
    told.producer.forever["abort"] = FATAL
    with pytest.raises(Aborted):
        told.writer.commit([], None, lambda _: False)
    with pytest.raises(EndedUnasked):
        told.writer.abort()


@pytest.mark.fault("a transaction that was ended by a late request while records were in flight")
@pytest.mark.parametrize("in_haste", [False, True])
@pytest.mark.parametrize("sent", ["nothing", "a record in flight", "an acknowledged one", "one of a part", "offsets"])
def test_an_abort_tells_of_it_unless_nothing_was_sent(told: Told, sent: str, in_haste: bool) -> None:
    """A transaction that ended unasked is distinguished from one that never began, before its messages are planned
    again, since records in flight may be visible."""
    if sent == "one of a part":
        told.producer.script["produce"] = [None, error(KafkaError.MSG_SIZE_TOO_LARGE)]
        with pytest.raises(Aborted):
            told.writer.send(batch(b"a", b"b"))
    elif sent == "offsets":
        told.writer.send_offsets([TopicPartition("delay", 0, 7)], None)
        wait_until(lambda: "offsets" in told.producer.calls, 30, "they have joined")
    elif sent != "nothing":
        told.writer.send(batch(b"a"))
    told.producer.reports = [lambda: None] if sent == "a record in flight" else []
    told.producer.forever["abort"] = UNASKED
    with pytest.raises(Broken) as broken:
        told.writer.abort(in_haste=in_haste)
    assert isinstance(broken.value, EndedUnasked) == (sent != "nothing")


@pytest.mark.parametrize("code", [KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT])
def test_a_record_that_has_never_left_is_not_visible(told: Told, code: int) -> None:
    """The attempt after a node's death waits for each record, and gives up those that are not acknowledged. The client
    asks for the abort although each partition was refused until then."""
    told.producer.failing, told.producer.failing_with = {b"a", b"b"}, code
    told.writer._is_overdue = True
    with pytest.raises(Aborted):
        told.writer.send(batch(b"a", b"b"), careful=True)
    told.producer.forever["abort"] = UNASKED
    with pytest.raises(Broken) as broken:
        told.writer.abort()
    assert isinstance(broken.value, EndedUnasked) == (code == KafkaError._PURGE_INFLIGHT)


def test_nothing_is_begun_before_its_id_has_a_new_epoch(told: Told) -> None:
    """Another id that is ready has to wait: the look-up of its rows needs an end."""
    told.producer.forever["commit"] = UNASKED
    with pytest.raises(EndedUnasked):
        told.writer.commit([], None, lambda _: False)
    told.producer = StubProducer(told.clock)
    told.producer.script["init"] = [RETRIABLE]
    for _ in range(2):
        with pytest.raises(NotReady):
            told.writer.open()
    told.background()
    told.writer.open()
    assert begun(told) == "x" and told.names[3:] == ["x"]


@pytest.mark.fault("an id that waits for a new epoch, and may not be initialised any more")
def test_nothing_is_begun_unfenced_where_the_new_epoch_is_denied() -> None:
    """Delivery ends with the error of a start if a late copy of offsets would count and no new epoch can fence it;
    other ready ids do not go on."""
    told = Told()
    told.writer.open()
    told.background()
    told.producer.lines["begin"] = [CUT]
    told.writer.begin()
    told.writer.commit([], None, lambda _: False)
    told.producer = StubProducer(told.clock)
    told.producer.forever["init"] = error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    told.later.pop()()
    assert told.writer.await_turn(0), "none is on its way"
    with pytest.raises(Broken):
        told.writer.begin()
    with pytest.raises(EnvironmentFailure) as denied:
        told.writer.open()
    assert denied.value.code == "DB-3006" and denied.value.fields["id"] == "x"


@pytest.mark.fault("a right to transactions that is taken away")
def test_where_every_id_is_denied_delivery_ends() -> None:
    """If no transactional id may be used any more, delivery ends with the error of a start; it waits only for an id
    that is held up."""
    told = Told()
    told.writer.open()
    told.background()
    told.producer.forever["init"] = error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    for made in told.made:
        told.writer.begin()
        made.lines["commit"] = [CUT]
        told.writer.commit([], None, lambda _: False)
    for ready in told.later[:2]:
        ready()
    with pytest.raises(NotReady):
        told.writer.open()
    told.later[2]()
    with pytest.raises(EnvironmentFailure) as denied:
        told.writer.open()
    assert denied.value.code == "DB-3006"
