"""What the client's errors mean, for errors that no broker gives on demand: a producer that does as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition

from bridge.delivery.producer.acknowledged import AcknowledgedWriter
from bridge.delivery.producer.outcomes import (
    Aborted,
    Broken,
    Cause,
    Failure,
    Indefinite,
    NotReady,
)
from bridge.delivery.producer.transaction_markers import Outcome
from bridge.delivery.producer.transactional_ids import TransactionalIds
from bridge.errors import EnvironmentFailure, FencedError
from bridge.settings.time_budgets import TimeBudgets
from tests.manual_clock import ManualClock
from tests.unit.bridge.delivery.producer.stubs import (
    ABORTABLE,
    FATAL,
    RETRIABLE,
    StubProducer,
    Told,
    after_trouble_with_all,
    batch,
    begun,
    error,
)


@pytest.fixture
def told() -> Told:
    made = Told()
    made.writer.open()
    made.writer.begin()
    return made


@pytest.mark.parametrize("own", [False, True])
def test_a_full_queue_is_waited_for_and_nothing_is_sent_twice(told: Told, own: bool) -> None:
    """BufferError in the middle of a batch: each record is accepted once, in order."""
    told.producer.script["produce"] = [None, BufferError(), BufferError(), None, BufferError()]
    assert told.writer.send(batch(b"a", b"b", b"c", own=own)) == 3
    assert told.producer.sent == [b"a", b"b", b"c"]


def test_a_queue_that_stays_full_aborts(told: Told) -> None:
    """The wait has a limit."""
    told.producer.forever["produce"] = BufferError()
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"a"))
    assert aborted.value.failed == {}


@pytest.mark.parametrize("own", [False, True])
def test_a_record_that_produce_refuses_is_named(told: Told, own: bool) -> None:
    """The exception is never swallowed, and says which record it was, by its number within the transaction."""
    told.producer.script["produce"] = [None, error(KafkaError.MSG_SIZE_TOO_LARGE)]
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"a", b"b", b"c", own=own), first_id=100)
    assert list(aborted.value.failed) == [111]
    assert aborted.value.was_alone


def test_a_tick_has_its_number() -> None:
    """Also where a record has no headers of its own: the loop for those that have two headers leaves it out."""
    ticks = replace(batch(b"a", b"b"), origins=["o/0/1"] * 2, dues=["5"] * 2, headers=None, ticks=["7", None])
    assert not ticks.is_plain and replace(ticks, ticks=None).is_plain
    assert list(ticks.all_headers()) == [
        [("delay-origin", "o/0/1"), ("delay-due", "5"), ("delay-tick", "7")],
        [("delay-origin", "o/0/1"), ("delay-due", "5")],
    ]


def test_careful_sending_names_all_that_failed_and_is_sure_only_of_one_that_was_alone(told: Told) -> None:
    """A batch is answered as a whole; only a batch of one is proof."""
    told.producer.failing = {b"b", b"c"}
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"a", b"b", b"c"), careful=True)
    assert sorted(aborted.value.failed) == [11, 12]
    assert not aborted.value.was_alone
    told.writer.begin()
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"b"), careful=True)
    assert aborted.value.was_alone


def test_what_is_sent_alone_is_named_though_nothing_has_failed_before(told: Told) -> None:
    """Its fate is waited for in any case: the first abort tells which record it was."""
    told.producer.failing = {b"b"}
    assert told.writer.send(replace(batch(b"a"), alone=True)) == 1
    with pytest.raises(Aborted) as aborted:
        told.writer.send(replace(batch(b"b"), alone=True))
    assert list(aborted.value.failed) == [10] and aborted.value.was_alone


@pytest.mark.parametrize(
    ("step", "told_error", "raised"),
    [
        ("offsets", ABORTABLE, Aborted),
        ("offsets", FATAL, Broken),
        ("offsets", RETRIABLE, Broken),
        ("offsets", error(KafkaError.FENCED_INSTANCE_ID, txn_requires_abort=True), FencedError),
        ("commit", ABORTABLE, Aborted),
        ("commit", FATAL, Indefinite),
        ("commit", RETRIABLE, Indefinite),
        ("begin", FATAL, Broken),
        ("init", FATAL, Broken),
        ("init", RETRIABLE, NotReady),
        ("init", error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), EnvironmentFailure),
        ("abort", FATAL, Broken),
        ("abort", ABORTABLE, Broken),
    ],
)
def test_errors_of_each_step(step: str, told_error: Exception, raised: type[Exception]) -> None:
    """After commit was asked for, only an abortable error is a definite no; before it, everything but commit is."""
    made = Told()
    made.producer.forever[step] = told_error

    def run() -> None:
        made.writer.open()
        made.writer.begin()
        if step == "abort":
            made.writer.abort()
        made.writer.commit([], None, lambda _: False)

    with pytest.raises(raised) as caught:
        run()
    assert type(caught.value) is raised


def test_an_abortable_error_after_a_commit_without_an_answer_is_no_answer_either() -> None:
    """The call before may have been made: only the committed offsets can tell."""
    made = Told()
    made.producer.script["commit"] = [RETRIABLE, ABORTABLE]
    made.writer.open()
    made.writer.begin()
    with pytest.raises(Indefinite):
        made.writer.commit([], None, lambda _: False)


def test_retriable_errors_are_repeated_until_they_pass(told: Told) -> None:
    """A time-out of commit is asked again, not guessed."""
    told.producer.script["commit"] = [RETRIABLE, RETRIABLE, None]
    told.writer.commit([], None, lambda _: False)
    assert told.producer.calls.count("commit") == 3


def test_a_call_that_ignores_its_time_out_is_left_behind(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that never answers is given up, and the next one works while the old call still hangs."""
    monkeypatch.setattr(TimeBudgets, "unanswered_s", 0.05)
    hanging, released = told.producer, threading.Event()
    monkeypatch.setattr(hanging, "send_offsets_to_transaction", lambda *_: released.wait(30))
    with pytest.raises(Broken) as broken:
        told.writer.commit([], None, lambda _: False)
    assert broken.value.fenced_by is None
    told.producer = StubProducer(told.clock)
    told.writer.open()
    told.writer.begin()
    told.writer.commit([], None, lambda _: False)
    assert "commit" not in hanging.calls
    assert told.producer.calls == ["init", "begin", "offsets", "commit"]
    released.set()


def test_a_fencing_is_told_from_other_trouble(told: Told) -> None:
    """Only a fencing counts towards giving up."""
    told.producer.forever["offsets"] = FATAL
    with pytest.raises(Broken) as broken:
        told.writer.commit([], None, lambda _: False)
    assert broken.value.fenced_by is not None
    assert Broken(Failure.of(KafkaError(KafkaError._TIMED_OUT))).fenced_by is None


@pytest.mark.parametrize("after", ["commit", "close"])
def test_a_fatal_error_that_comes_too_late_changes_nothing(told: Told, after: str) -> None:
    """The client raises it out of poll: after a commit was made it must not undo it, and a producer that is dropped
    anyway is dropped."""
    if after == "commit":
        told.writer.send(batch(b"a"))
    told.producer.forever["poll"] = FATAL
    if after == "commit":
        told.writer.commit([], None, lambda _: False)
    else:
        told.writer.close()


@pytest.mark.parametrize("step", ["send", "careful", "abort"])
def test_a_fatal_error_out_of_poll_breaks_the_producer(told: Told, step: str) -> None:
    """A forbidden topic may end like this when its transaction is aborted; another producer goes on."""
    told.producer.forever["poll" if step != "careful" else "flush"] = FATAL
    act = told.writer.abort if step == "abort" else partial(told.writer.send, batch(b"a"), careful=step == "careful")
    with pytest.raises(Broken):
        act()


class TestOffsetsThatJoinBesideRecords:
    """`send_offsets` is called while records wait for their time."""

    OFFSETS = (TopicPartition("delay", 0, 7),)

    def test_the_commit_does_not_send_them_again(self, told: Told) -> None:
        told.writer.send_offsets(self.OFFSETS, None)
        told.writer.send(batch(b"a"))
        told.writer.commit(self.OFFSETS, None, lambda _: False)
        assert told.producer.calls.count("offsets") == 1

    def test_records_leave_before_offsets_are_waited_for(self, told: Told) -> None:
        """Both take a while with brokers far away, and linger.ms is longer than that."""
        told.writer.send(batch(b"a"))
        told.producer.reports.append(lambda: None)  # it is with the client
        told.writer.commit(self.OFFSETS, None, lambda _: False)
        assert told.producer.calls.index("flush") < told.producer.calls.index("offsets")

    def test_where_more_was_taken_the_last_ones_join_last(self, told: Told) -> None:
        more = [TopicPartition("delay", 0, 8)]
        told.writer.send_offsets(self.OFFSETS, None)
        told.writer.commit(more, None, lambda _: False)
        assert [[each.offset for each in offsets] for offsets in told.producer.joined] == [[7], [8]]

    @pytest.mark.parametrize("failure", [RETRIABLE, error(KafkaError._CONFLICT, retriable=True)])
    def test_a_failure_that_passes_is_repeated_by_the_commit(self, told: Told, failure: Exception) -> None:
        told.producer.script["offsets"] = [failure]
        told.writer.send_offsets(self.OFFSETS, None)
        told.writer.commit(self.OFFSETS, None, lambda _: False)
        assert told.producer.calls.count("offsets") == 2
        assert told.producer.calls[-1] == "commit"

    @pytest.mark.parametrize(
        ("failure", "raised"),
        [
            (error(KafkaError.ILLEGAL_GENERATION, txn_requires_abort=True), Aborted),
            (error(KafkaError.FENCED_INSTANCE_ID, txn_requires_abort=True), FencedError),
            (error(KafkaError.GROUP_AUTHORIZATION_FAILED), Broken),
        ],
    )
    @pytest.mark.parametrize("told_by", ["produce", "commit"])
    def test_the_reason_is_theirs_whatever_tells_of_it_first(
        self, told: Told, failure: Exception, raised: type[Exception], told_by: str
    ) -> None:
        """The client takes no record after it, and says of that one only that it does not."""
        told.producer.script = {"offsets": [failure], "produce": [error(KafkaError._STATE)]}
        told.writer.send_offsets(self.OFFSETS, None)
        calls: dict[str, Callable[[], object]] = {
            "produce": lambda: told.writer.send(batch(b"a")),
            "commit": lambda: told.writer.commit(self.OFFSETS, None, lambda _: False),
        }
        with pytest.raises(raised) as failed:
            calls[told_by]()
        assert "commit" not in told.producer.calls
        if isinstance(failed.value, Aborted):
            assert failed.value.failure.code == "ILLEGAL_GENERATION" and not failed.value.failed

    def test_a_record_that_has_failed_is_the_reason_if_they_have_joined(self, told: Told) -> None:
        told.producer.script["produce"] = [error(KafkaError._STATE)]
        told.writer.send_offsets(self.OFFSETS, None)
        with pytest.raises(Aborted) as aborted:
            told.writer.send(batch(b"a"))
        assert aborted.value.failure.code == "_STATE"

    def test_those_of_a_transaction_that_was_aborted_join_no_other(self, told: Told) -> None:
        """Nor if their call is made later than the abort: they say that rows are finished which nobody gets."""
        goes_on = threading.Event()
        told.writer._calls.begin(goes_on.wait)
        told.writer.send_offsets(self.OFFSETS, None)
        told.writer.abort()
        goes_on.set()
        told.writer.begin()
        told.writer.commit([], None, lambda _: False)
        assert told.producer.joined == [[]]

    @pytest.mark.parametrize("returns", [True, False])
    def test_an_abort_waits_for_the_call_that_is_under_way(
        self, told: Told, monkeypatch: pytest.MonkeyPatch, returns: bool
    ) -> None:
        """For as long as a commit would. Then another id goes on."""
        is_called, goes_on = threading.Event(), threading.Event()
        monkeypatch.setattr(TimeBudgets, "unanswered_s", 30 if returns else 0.05)

        def join() -> None:
            is_called.set()
            assert goes_on.wait(30)

        told.producer.joining = join
        told.writer.send_offsets(self.OFFSETS, None)
        assert is_called.wait(10)
        if returns:
            threading.Timer(0.05, goes_on.set).start()
            told.writer.abort()
            assert told.producer.calls[-2:] == ["offsets", "abort"]
        else:
            told.background()
            told.writer.abort()
            assert "abort" not in told.producer.calls and begun(told) == "x.2"
        goes_on.set()

    def test_where_more_was_taken_and_they_have_failed_none_are_sent(self, told: Told) -> None:
        """Brokers may have the first ones before them still, and would take them last."""
        told.producer.script["offsets"] = [RETRIABLE]
        told.writer.send_offsets(self.OFFSETS, None)
        with pytest.raises(Aborted) as aborted:
            told.writer.commit([TopicPartition("delay", 0, 8)], None, lambda _: False)
        assert aborted.value.cause is Cause.BROKERS_BUSY
        assert told.producer.calls.count("offsets") == 1

    def test_a_record_that_is_not_acknowledged_because_of_them_is_not_to_blame(self, told: Told) -> None:
        told.producer.script["offsets"] = [error(KafkaError.UNKNOWN_MEMBER_ID, txn_requires_abort=True)]
        told.producer.is_silent = True
        told.writer.send_offsets(self.OFFSETS, None)
        with pytest.raises(Aborted) as aborted:
            told.writer.send(replace(batch(b"a"), alone=True))
        assert aborted.value.failure.code == "UNKNOWN_MEMBER_ID" and not aborted.value.failed

    def test_a_call_that_does_not_return_is_left_behind(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one that the commit makes itself: delivery goes on with another producer."""
        returned = threading.Event()
        monkeypatch.setattr(told.producer, "send_offsets_to_transaction", lambda *_: returned.wait())
        monkeypatch.setattr(TimeBudgets, "unanswered_s", 0.05)
        told.writer.send_offsets(self.OFFSETS, None)
        with pytest.raises(Broken):
            told.writer.commit(self.OFFSETS, None, lambda _: False)
        returned.set()


class TestTurns:
    """Other transactional ids: for the time in which the end of the last transaction is written, and for while a
    partition without a leader holds one up."""

    @pytest.fixture
    def ready(self) -> Told:
        """All ids are initialised, and the first has a transaction open."""
        made = Told()
        made.writer.open()
        made.writer.begin()
        made.background()
        assert made.names == ["x", "x.2", "x.3"]
        return made

    def test_they_take_turns_while_all_is_well(self, ready: Told) -> None:
        """None is asked for a transaction while the end of its last one may still be written."""
        order = []
        for _ in range(6):
            ready.writer.commit([], None, lambda _: False)
            order.append(begun(ready))
        assert order == ["x.2", "x"] * 3
        assert [made.calls.count("init") for made in ready.made] == [1, 1, 1]
        assert set(ready.made[2].calls) == {"init"}, "one rests"

    def test_an_abort_is_followed_by_a_transaction_of_the_same_id(self, ready: Told) -> None:
        """The one that has committed last rests: an abort of its own could take that back."""
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x.2"
        for _ in range(2):
            ready.writer.abort()
            assert begun(ready) == "x.2"
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x"

    def test_delivery_goes_on_under_another_id_and_comes_back(self, ready: Told) -> None:
        """What it has open is aborted, be there an answer or not: then by a new epoch. The id comes back between two
        transactions: what it left open in a partition ends with what it writes there next."""
        left, other, _ = ready.made
        ready.writer.send(batch(b"a"))
        left.forever["abort"] = RETRIABLE
        ready.writer.abort(in_haste=True)
        assert begun(ready) == "x.2"
        ready.writer.send(batch(b"a"))
        ready.background()
        assert ready.made[3].calls == ["init"]
        ready.writer.commit([], None, lambda _: False)
        assert other.calls.count("commit") == 1
        assert "commit" not in left.calls
        order = []
        for _ in range(3):
            order.append(begun(ready))
            ready.writer.commit([], None, lambda _: False)
        assert order == ["x", "x.2", "x"]
        assert ready.made[-1].calls.count("commit") == 2

    def test_the_id_that_has_committed_before_may_be_held_up_as_well(self, ready: Told) -> None:
        """By the end of its transaction, in the same partition. It is made anew, which waits for that; the one that
        rests was in no partition."""
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x.2"
        ready.writer.abort(in_haste=True)
        assert begun(ready) == "x.3"
        for _ in range(3):
            ready.writer.commit([], None, lambda _: False)
            assert begun(ready) == "x.3"
        ready.background()
        assert ready.names[3:] == ["x.2", "x"]
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x.2"

    @pytest.mark.parametrize("way", ["leave", "open"])
    def test_after_trouble_the_id_that_has_committed_last_waits_for_a_commit_of_another(
        self, ready: Told, way: str
    ) -> None:
        """The end of its commit may be lost where there was no leader: an abort there would take back what was
        delivered. The one that was in trouble comes back after the commit."""
        for name in ("x.2", "x"):
            ready.writer.commit([], None, lambda _: False)
            assert begun(ready) == name
        ready.writer.open() if way == "open" else ready.writer.abort(in_haste=True)
        assert begun(ready) == "x.3"
        ready.background()
        assert ready.names[3:] == ["x", *(["x.2"] if way == "leave" else [])]
        for _ in range(2):
            ready.writer.abort()
            assert begun(ready) == "x.3" and not ready.writer.is_to_stay_small
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x"

    def test_the_last_two_that_have_committed_stay_small(self, ready: Told) -> None:
        """A transaction can be shorter than the writing of the end of the one before."""
        for name in ("x.2", "x"):
            ready.writer.commit([], None, lambda _: False)
            assert begun(ready) == name
        ready.later.clear()
        ready.writer.open()
        assert (begun(ready), ready.writer.is_to_stay_small) == ("x.3", False)
        ready.writer.open()
        assert (begun(ready), ready.writer.is_to_stay_small) == ("x.2", True)
        ready.writer.commit([], None, lambda _: False)
        assert not ready.writer.is_to_stay_small

    def test_an_id_whose_commit_was_not_answered_comes_back_after_another(self, ready: Told) -> None:
        """It may have committed last."""
        ready.producer.forever["commit"] = RETRIABLE
        with pytest.raises(Indefinite):
            ready.writer.commit([], None, lambda _: False)
        ready.writer.open()
        ready.background()
        assert begun(ready) == "x.2"
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x"

    @pytest.mark.parametrize("is_answered", [True, False])
    def test_when_all_ids_had_trouble_one_that_has_not_committed_last_goes_on(
        self, ready: Told, is_answered: bool
    ) -> None:
        """The answer may be lost with the only broker: then nobody knows whether it has."""
        if is_answered:
            ready.writer.commit([], None, lambda _: False)
        else:
            ready.producer.forever["commit"] = RETRIABLE
            with pytest.raises(Indefinite):
                ready.writer.commit([], None, lambda _: False)
        assert after_trouble_with_all(ready) == "x.2"

    def test_a_commit_that_was_refused_is_none(self, ready: Told) -> None:
        """The first id has still committed last."""
        ready.writer.commit([], None, lambda _: False)
        ready.writer.abort(in_haste=True)
        ready.made[1].script["commit"] = [ABORTABLE]
        ready.writer.begin()
        with pytest.raises(Aborted):
            ready.writer.commit([], None, lambda _: False)
        assert after_trouble_with_all(ready) == "x.2"

    def test_a_commit_that_was_written_again_counts(self) -> None:
        """What it had in the targets may still be open there."""
        made = Told()
        made.repair.lost["x"] = Outcome.COMMITTED
        made.writer.open()
        made.background()
        assert after_trouble_with_all(made) == "x.2"

    def test_of_ids_that_are_not_made_the_one_that_has_committed_last_is_made_last(self) -> None:
        """The other one could not be made beforehand."""
        failures: list[Exception] = []

        def make(*_: object) -> Any:
            if failures:
                raise failures.pop()
            return StubProducer(ManualClock())

        later: list[Callable[[], None]] = []
        pool = TransactionalIds(["x", "x.2"], make, later.append)
        usual = pool.open()
        assert usual is not None
        pool.asked_to_commit(usual)
        failures.append(EnvironmentFailure("cannot make the producer", hint=""))
        later.pop()()
        pool.give_up(usual)
        assert pool.open().name == "x.2"

    def test_every_id_that_is_left_comes_back(self, ready: Told) -> None:
        """It may have something open, too."""
        order = []
        for _ in range(3):
            ready.writer.abort(in_haste=True)
            order.append(begun(ready))
            ready.background()
        assert order == ["x.2", "x", "x.2"]
        assert ready.names[3:] == ["x", "x.2", "x"]
        ready.writer.commit([], None, lambda _: False)
        assert begun(ready) == "x"

    def test_an_abort_in_haste_waits_for_no_call_that_was_left(self, ready: Told) -> None:
        """Nor for the coordinator. The id is initialised for as long as that takes."""
        used = ready.made[0]
        used.forever["abort"] = error(KafkaError._CONFLICT)
        ready.writer.abort(in_haste=True)
        assert begun(ready) == "x.2"
        made = StubProducer(ready.clock)
        made.script["init"] = [RETRIABLE, None]
        ready.producer = made
        ready.later.pop(0)()
        assert made.calls.count("init") == 2

    def test_the_id_that_is_ready_first_goes_on(self, told: Told) -> None:
        """Soon after a start no other id is ready yet. Delivery waits for none that may wait for a dead node."""
        other = told.producer = StubProducer(told.clock)
        told.writer.abort(in_haste=True)
        threading.Timer(0.05, told.later[0]).start()
        assert told.writer.await_turn(30)
        told.writer.begin()
        assert other.calls[-1] == "begin"

    def test_no_id_is_ready(self, told: Told) -> None:
        """Then the producer is opened again, as often as it takes."""
        told.writer.abort(in_haste=True)
        with pytest.raises(Broken):
            told.writer.begin()
        with pytest.raises(NotReady):
            told.writer.open()
        told.background()
        told.writer.open()
        told.writer.begin()

    def test_a_call_that_is_refused_for_another_one_is_not_repeated_without_a_pause(
        self, told: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The client says so at once, and a core would be busy with asking."""
        pauses: list[float] = []
        monkeypatch.setattr(told.writer._pause, "wait", pauses.append)
        told.producer.script["abort"] = [error(KafkaError._CONFLICT, retriable=True)] * 3 + [RETRIABLE, None]
        told.writer.abort()
        assert told.producer.calls.count("abort") == 5
        assert len(pauses) == 3

    def test_another_id_that_is_denied_changes_nothing(self) -> None:
        """Rights on the one id were enough once."""
        made = Told()
        made.writer.open()
        first = made.producer
        made.producer = StubProducer(made.clock)
        made.producer.forever["init"] = error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        for later in made.later:
            later()
        made.writer.begin()
        again = made.producer = StubProducer(made.clock)
        made.later.clear()
        made.writer.abort(in_haste=True)
        made.later.pop()()
        made.writer.begin()
        assert "abort" in first.calls and again.calls[-1] == "begin"

    def test_an_id_that_is_held_up_at_the_start_is_gone_round(self) -> None:
        """By what an earlier process left there: the next attempt takes another id."""
        made = Told()
        made.producer.forever["init"] = RETRIABLE
        with pytest.raises(NotReady):
            made.writer.open()
        made.producer = StubProducer(made.clock)
        made.writer.open()
        assert made.names == ["x", "x.2"]
        made.writer.begin()
        made.writer.commit([], None, lambda _: False)

    def test_a_producer_whose_start_takes_longer_is_used_further(self) -> None:
        """It goes on with that by itself, and would fence another one of its id."""
        made = Told()
        slow = made.producer
        slow.script["init"] = [RETRIABLE, RETRIABLE, None]
        with pytest.raises(NotReady):
            made.writer.open()
        made.background()
        assert made.names == ["x"]
        made.writer.open()
        assert made.names == ["x"]
        assert slow.calls.count("init") == 3

    def test_a_producer_that_fails_while_it_rests_is_made_anew(self, ready: Told) -> None:
        """And is not used meanwhile."""
        usual, other, _ = ready.made
        other.forever["poll"] = FATAL
        ready.clock.advance(1_000)
        ready.writer.begin()
        assert usual.calls[-1] == "begin"
        ready.background()
        ready.writer.abort(in_haste=True)
        ready.writer.begin()
        assert ready.made[3].calls[-1] == "begin"
        assert ready.names[3] == "x.2"

    def test_an_id_whose_producer_could_not_be_made_is_tried_again(self) -> None:
        """Its key was just being replaced, say. Left at rest, it would be lost until the process ends."""

        def refuse(*_: object) -> Producer:
            raise EnvironmentFailure("cannot make the producer", hint="")

        pool = TransactionalIds(["x"], refuse, lambda run: run())
        pool._start(pool._all[0])
        with pytest.raises(EnvironmentFailure):
            pool.open()

    def test_an_id_that_cannot_be_made_ready_for_whatever_reason_is_left_to_what_takes_it_next(self) -> None:
        """The thread that was to make it ready ends; the id is not lost with it, or delivery would wait for ever."""

        def fail(*_: object) -> Producer:
            raise BufferError("Local: Queue full")

        pool = TransactionalIds(["x"], fail, lambda run: run())
        pool._start(pool._all[0])
        with pytest.raises(BufferError):
            pool.open()

    def test_a_call_that_does_not_return_is_watched(self, ready: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """Offsets are not taken while the id is held up: the look at the targets meanwhile may end that."""
        released, told = threading.Event(), []

        def look(stalled_s: float) -> bool:
            told.append(stalled_s)
            return len(told) == 3

        monkeypatch.setattr("bridge.delivery.producer.transactional.STALLED_S", 0.01)
        monkeypatch.setattr(ready.made[0], "send_offsets_to_transaction", lambda *_: released.wait(30))
        with pytest.raises(Aborted) as aborted:
            ready.writer.commit([], None, look)
        assert aborted.value.cause is Cause.TARGETS_WORSE
        assert len(told) == 3
        ready.writer.abort(in_haste=True)
        ready.writer.begin()
        ready.writer.commit([], None, look)
        assert ready.made[1].calls.count("commit") == 1
        released.set()


class TestLostMarkers:
    """A transaction whose end the brokers have lost is ended once more when its id is initialised."""

    @pytest.mark.parametrize("outcome", list(Outcome))
    def test_the_first_id_ends_it_and_goes_on(self, outcome: Outcome) -> None:
        """Its coordinator is asked before it is initialised: afterwards it no longer knows."""
        told = Told()
        told.repair.lost["x"] = outcome
        told.writer.open()
        assert told.repair.written == [("x", outcome)]
        told.background()
        assert told.repair.asked == ["x", "x.2", "x.3"]
        told.writer.begin()
        assert told.made[0].calls[-1] == "begin"

    def test_a_transaction_that_a_kill_has_left_open_is_ended_first(self) -> None:
        """It holds offsets back: the others would seem to have lost the end of theirs. Nobody asks about it twice."""
        told = Told()
        told.repair.open = "x.2"
        told.writer.open()
        assert told.repair.written == [("x.2", Outcome.ABORTED)]
        told.background()
        assert told.names == told.repair.asked == ["x.2", "x", "x.3"]
        told.writer.open()
        assert told.names[3:] == []

    def test_what_an_interrupted_repair_owes_is_not_forgotten(self) -> None:
        """Its own transaction is what is open; the end of the one before has to be the same as ever."""
        told = Told()
        told.repair.open = "x.2"
        told.writer._ids._all[1].owed_outcome = Outcome.COMMITTED
        told.writer.open()
        assert told.repair.written == [("x.2", Outcome.COMMITTED)]

    def test_another_id_ends_it_and_goes_on_if_it_was_committed(self) -> None:
        """What it had in the targets ends with what it writes there next, and that is as soon as another one has
        committed."""
        told = Told()
        told.repair.lost["x.3"] = Outcome.COMMITTED
        told.writer.open()
        told.background()
        assert told.repair.written == [("x.3", Outcome.COMMITTED)]
        assert begun(told) == "x"
        told.writer.commit([], None, lambda _: False)
        assert begun(told) == "x.3"

    @pytest.mark.parametrize("failure", [RETRIABLE, error(KafkaError.TOPIC_AUTHORIZATION_FAILED)])
    def test_an_end_that_could_not_be_written_is_kept_in_mind(self, failure: Exception) -> None:
        """The coordinator would say something else now. The usual id's second attempt is in the background."""
        told = Told()
        told.repair.lost["x"] = Outcome.COMMITTED
        told.repair.failures = [failure, failure]
        with pytest.raises(NotReady):
            told.writer.open()
        told.producer = StubProducer(told.clock)
        told.background()
        told.writer.open()
        assert told.repair.written == [("x", Outcome.COMMITTED)]
        assert told.repair.asked == ["x"]

    @pytest.mark.parametrize("failure", [RETRIABLE, error(KafkaError.TOPIC_AUTHORIZATION_FAILED)])
    def test_an_id_is_not_initialised_before_there_is_an_answer(self, failure: Exception) -> None:
        """With that the coordinator would forget what it has not told yet. In the background it is asked until it
        answers."""
        told = Told()
        told.repair.unanswered = [failure]
        with pytest.raises(NotReady):
            told.writer.open()
        assert told.made == []
        told.repair.lost["x"] = Outcome.COMMITTED
        told.writer.open()
        assert told.repair.written == [("x", Outcome.COMMITTED)]
        told.repair.unanswered = [failure, failure]
        told.background()
        assert told.repair.asked == ["x"] * 2 + ["x.2"] * 3 + ["x.3"]
        assert told.names == ["x", "x.2", "x.3"]

    def test_the_end_of_what_was_left_may_be_lost_as_well(self, told: Told) -> None:
        """It is asked about when it is aborted, before its id is initialised."""
        told.background()
        told.repair.asked.clear()
        told.repair.lost["x"] = Outcome.ABORTED
        told.writer.abort(in_haste=True)
        told.background()
        assert told.repair.asked == ["x"]
        assert told.repair.written == [("x", Outcome.ABORTED)]


class TestAtLeastOnce:
    """Acknowledged first, committed afterwards."""

    def test_offsets_are_committed_only_after_every_acknowledgement(self) -> None:
        committed: list[Any] = []
        made = Told(AcknowledgedWriter, committed.append)
        made.writer.open()
        made.writer.begin()
        made.writer.send(batch(b"a", b"b"))
        made.writer.commit(["offsets"], None, lambda _: False)
        assert committed == [["offsets"]]
        assert made.producer.calls.index("flush") > made.producer.calls.index("produce")

    def test_a_failed_record_keeps_offsets_where_they_are(self) -> None:
        committed: list[Any] = []
        made = Told(AcknowledgedWriter, committed.append)
        made.producer.failing = {b"b"}
        made.writer.open()
        made.writer.begin()
        made.writer.send(batch(b"a", b"b"), first_id=5)
        with pytest.raises(Aborted) as aborted:
            made.writer.commit(["offsets"], None, lambda _: False)
        assert list(aborted.value.failed) == [16]
        assert committed == []

    def test_a_commit_that_fails_is_indefinite(self) -> None:
        def fail(_offsets: Any) -> None:
            raise EnvironmentFailure("no answer", hint="wait")

        made = Told(AcknowledgedWriter, fail)
        made.writer.open()
        made.writer.begin()
        with pytest.raises(Indefinite):
            made.writer.commit([], None, lambda _: False)
