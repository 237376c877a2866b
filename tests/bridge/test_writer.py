"""What the client's errors mean, for errors that no broker gives on demand: a producer that does as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.errors import EnvironmentFailure, FencedError
from bridge.headers import HeaderList
from bridge.identities import Identities
from bridge.outgoing import Batch
from bridge.writer import Aborted, AcknowledgedWriter, Broken, Indefinite, TransactionalWriter
from timerstore.clock import ManualClock


def error(code: int, **flags: bool) -> KafkaException:
    return KafkaException(KafkaError(code, "as told", **flags))


RETRIABLE = error(KafkaError._TIMED_OUT, retriable=True)
ABORTABLE = error(KafkaError.TRANSACTION_ABORTABLE, txn_requires_abort=True)
FATAL = error(KafkaError._FENCED, fatal=True)


class Written:
    """What a delivery report says of the record."""

    def partition(self) -> int:
        return 3


class StubProducer:
    """Each method does the next thing of its script: None, or an exception to raise. Time passes with every call."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.script: dict[str, list[Exception | None]] = {}
        self.forever: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.sent: list[bytes | None] = []
        self.reports: list[Callable[..., None]] = []
        self.failing: set[bytes] = set()

    def _do(self, name: str) -> None:
        self.calls.append(name)
        self.clock.advance(100)
        script = self.script.get(name, [])
        told = script.pop(0) if script else self.forever.get(name)
        if told is not None:
            raise told

    def init_transactions(self, _timeout: float) -> None:
        self._do("init")

    def begin_transaction(self) -> None:
        self._do("begin")

    def send_offsets_to_transaction(self, _offsets: Any, _metadata: Any, _timeout: float) -> None:
        self._do("offsets")

    def commit_transaction(self, _timeout: float) -> None:
        self._do("commit")

    def abort_transaction(self, _timeout: float) -> None:
        self._do("abort")

    def produce(self, _topic: str, value: bytes | None, _key: Any, _partition: int, callback: Any, *_rest: Any) -> None:
        self._do("produce")
        self.sent.append(value)
        if callback is not None:
            failed = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE) if value in self.failing else None
            self.reports.append(lambda: callback(failed, Written()))

    def poll(self, timeout: float) -> int:
        self._do("poll")
        self.clock.advance(int(timeout * 1000))
        return 0

    def flush(self, _timeout: float) -> int:
        self._do("flush")
        for report in self.reports:
            report()
        self.reports = []
        return 0

    def purge(self, **_: bool) -> None:
        self.calls.append("purge")

    def __len__(self) -> int:
        return len(self.reports)


class Told:
    """A writer on stub producers."""

    def __init__(self, writer: Callable[..., Any] = TransactionalWriter, *more: Any) -> None:
        self.clock = ManualClock()
        self.producer = StubProducer(self.clock)
        self.made: list[StubProducer] = []
        self.names: list[str] = []
        self.later: list[Callable[[], None]] = []
        run = {"run": self.later.append} if writer is TransactionalWriter else {}
        self.writer = writer({"transactional.id": "x"}, self.clock, *more, make_producer=self._make, **run)

    def _make(self, config: dict[str, Any]) -> StubProducer:
        self.made.append(self.producer)
        self.names.append(config["transactional.id"])
        return self.producer

    def background(self) -> None:
        """Everything that was to be done there, each with a producer of its own."""
        used = self.producer
        while self.later:
            self.producer = StubProducer(self.clock)
            self.later.pop(0)()
        self.producer = used


def batch(*values: bytes, own: bool = False) -> Batch:
    n = len(values)
    headers: list[HeaderList] | None = [[("h", b"1")] for _ in values] if own else None
    texts = [str(i) for i in range(n)]
    keys: list[bytes | None] = [None] * n
    return Batch(
        topic="t", ids=np.arange(n) + 10, values=list(values), keys=keys, origins=texts, dues=texts, headers=headers
    )  # fmt: skip


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
    assert aborted.value.culprits == {}


@pytest.mark.parametrize("own", [False, True])
def test_a_record_that_produce_refuses_is_named(told: Told, own: bool) -> None:
    """The exception is never swallowed, and says which record it was, by its number within the transaction."""
    told.producer.script["produce"] = [None, error(KafkaError.MSG_SIZE_TOO_LARGE)]
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"a", b"b", b"c", own=own), first_id=100)
    assert list(aborted.value.culprits) == [111]
    assert aborted.value.is_exact


def test_careful_sending_names_everyone_who_failed_but_convicts_only_who_was_alone(told: Told) -> None:
    """A batch is answered as a whole; only a batch of one is proof."""
    told.producer.failing = {b"b", b"c"}
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"a", b"b", b"c"), careful=True)
    assert sorted(aborted.value.culprits) == [11, 12]
    assert not aborted.value.is_exact
    told.writer.begin()
    with pytest.raises(Aborted) as aborted:
        told.writer.send(batch(b"b"), careful=True)
    assert aborted.value.is_exact


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
        ("init", RETRIABLE, Aborted),
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
        made.writer.commit([], None, lambda _: None)

    with pytest.raises(raised) as caught:
        run()
    assert type(caught.value) is raised


def test_retriable_errors_are_repeated_until_they_pass(told: Told) -> None:
    """A time-out of commit is asked again, not guessed."""
    told.producer.script["commit"] = [RETRIABLE, RETRIABLE, None]
    told.writer.commit([], None, lambda _: None)
    assert told.producer.calls.count("commit") == 3


def test_a_call_that_ignores_its_time_out_is_left_behind(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that never answers is given up, and the next one works while the old call still hangs."""
    monkeypatch.setattr("bridge.writer.UNANSWERED_S", 0.05)
    hanging, released = told.producer, threading.Event()
    monkeypatch.setattr(hanging, "send_offsets_to_transaction", lambda *_: released.wait(30))
    with pytest.raises(Broken) as broken:
        told.writer.commit([], None, lambda _: None)
    assert not broken.value.is_fenced
    told.producer = StubProducer(told.clock)
    told.writer.open()
    told.writer.begin()
    told.writer.commit([], None, lambda _: None)
    assert "commit" not in hanging.calls
    assert told.producer.calls == ["init", "begin", "offsets", "commit", "poll"]
    released.set()


def test_a_fencing_is_told_from_other_trouble(told: Told) -> None:
    """Only a fencing counts towards giving up."""
    told.producer.forever["offsets"] = FATAL
    with pytest.raises(Broken) as broken:
        told.writer.commit([], None, lambda _: None)
    assert broken.value.is_fenced
    assert not Broken(KafkaError(KafkaError._TIMED_OUT)).is_fenced


@pytest.mark.parametrize("after", ["commit", "close"])
def test_a_fatal_error_that_comes_too_late_changes_nothing(told: Told, after: str) -> None:
    """The client raises it out of poll: after a commit was made it must not undo it, and a producer that is dropped
    anyway is dropped."""
    if after == "commit":
        told.writer.send(batch(b"a"))
    told.producer.forever["poll"] = FATAL
    if after == "commit":
        told.writer.commit([], None, lambda _: None)
    else:
        told.writer.close()


@pytest.mark.parametrize("step", ["send", "careful", "abort"])
def test_a_fatal_error_out_of_poll_breaks_the_producer(told: Told, step: str) -> None:
    """A forbidden topic may end like this when its transaction is aborted; another producer goes on."""
    told.producer.forever["poll" if step != "careful" else "flush"] = FATAL
    act = told.writer.abort if step == "abort" else partial(told.writer.send, batch(b"a"), careful=step == "careful")
    with pytest.raises(Broken):
        act()


class TestSpares:
    """Other transactional ids, for while a partition without a leader holds one up."""

    @pytest.fixture
    def ready(self) -> Told:
        made = Told()
        made.writer.open()
        made.background()
        assert made.names == ["x", "x.spare-1", "x.spare-2"]
        made.writer.begin()
        return made

    def test_delivery_goes_on_under_another_id_and_comes_back(self, ready: Told) -> None:
        """Without a word to the producer that is left; what it has open is aborted in the background."""
        first, spare = ready.made[:2]
        ready.writer.send(batch(b"a"))
        assert ready.writer.leave()
        assert "abort" not in first.calls
        ready.writer.begin()
        ready.writer.send(batch(b"a"))
        ready.writer.commit([], None, lambda _: None)
        assert "commit" in spare.calls
        assert "commit" not in first.calls
        ready.background()
        assert "abort" in first.calls
        again = ready.made[-1]
        assert ready.names[-1] == "x"
        ready.clock.advance(1_000)
        ready.writer.begin()
        assert again.calls[-1] == "begin"
        assert spare.calls.count("begin") == 1

    def test_an_abort_that_waits_for_the_call_that_was_left_is_repeated(self, ready: Told) -> None:
        """Then the id is initialised for as long as that takes."""
        first = ready.made[0]
        first.script["abort"] = [error(KafkaError._CONFLICT), RETRIABLE, None]
        ready.writer.leave()
        made = StubProducer(ready.clock)
        made.script["init"] = [RETRIABLE, None]
        ready.producer = made
        ready.later.pop(0)()
        assert first.calls.count("abort") == 3
        assert made.calls.count("init") == 2

    def test_without_a_spare_it_is_an_abort(self, told: Told) -> None:
        """Here the background has not been reached yet."""
        assert not told.writer.leave()
        assert told.producer.calls[-2:] == ["abort", "poll"]

    def test_spares_that_are_denied_change_nothing(self) -> None:
        """Rights on the one id were enough once."""
        made = Told()
        made.writer.open()
        first = made.producer
        made.producer = StubProducer(made.clock)
        made.producer.forever["init"] = error(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        for later in made.later:
            later()
        made.writer.begin()
        made.writer.leave()
        assert "abort" in first.calls

    def test_an_id_that_is_held_up_at_the_start_is_gone_round(self) -> None:
        """By what an earlier process left there: the next attempt takes another id."""
        made = Told()
        made.producer.forever["init"] = RETRIABLE
        with pytest.raises(Aborted):
            made.writer.open()
        made.producer = StubProducer(made.clock)
        made.writer.open()
        assert made.names == ["x", "x.spare-1"]
        made.writer.begin()
        made.writer.commit([], None, lambda _: None)

    def test_a_spare_that_fails_is_made_anew(self, ready: Told) -> None:
        """And is not used meanwhile."""
        ready.made[1].forever["poll"] = FATAL
        ready.clock.advance(1_000)
        ready.writer.begin()
        assert len(ready.later) == 1
        ready.writer.leave()
        ready.writer.begin()
        assert ready.made[2].calls[-1] == "begin"

    def test_an_id_whose_producer_could_not_be_made_is_tried_again(self) -> None:
        """Its key was just being replaced, say. Left at rest, it would be lost until the process ends."""

        def refuse(_name: str, _faults: list[KafkaError]) -> Producer:
            raise EnvironmentFailure("the producer cannot be made", hint="")

        identities = Identities(["x"], refuse, lambda run: run())
        identities.prepare()
        taken = identities.take()
        assert taken is not None and taken.producer is None

    def test_a_call_that_does_not_return_is_watched(self, ready: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """Offsets are not taken while the id is held up: whoever looks at the targets meanwhile may end that."""
        released, told = threading.Event(), []

        def look(stalled_s: float) -> None:
            told.append(stalled_s)
            if len(told) == 3:
                raise Aborted(KafkaError(KafkaError._MSG_TIMED_OUT), is_explained=True)

        monkeypatch.setattr("bridge.writer.STALLED_S", 0.01)
        monkeypatch.setattr(ready.made[0], "send_offsets_to_transaction", lambda *_: released.wait(30))
        with pytest.raises(Aborted):
            ready.writer.commit([], None, look)
        assert len(told) == 3
        ready.writer.leave()
        ready.writer.begin()
        ready.writer.commit([], None, look)
        assert "commit" in ready.made[1].calls
        released.set()


class TestAtLeastOnce:
    """Acknowledged first, committed afterwards."""

    def test_offsets_are_committed_only_after_every_acknowledgement(self) -> None:
        committed: list[Any] = []
        made = Told(AcknowledgedWriter, committed.append)
        made.writer.open()
        made.writer.begin()
        made.writer.send(batch(b"a", b"b"))
        made.writer.commit(["offsets"], None, lambda _: None)
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
            made.writer.commit(["offsets"], None, lambda _: None)
        assert list(aborted.value.culprits) == [16]
        assert committed == []

    def test_a_commit_that_fails_is_indefinite(self) -> None:
        def fail(_offsets: Any) -> None:
            raise EnvironmentFailure("no answer", hint="wait")

        made = Told(AcknowledgedWriter, fail)
        made.writer.open()
        made.writer.begin()
        with pytest.raises(Indefinite):
            made.writer.commit([], None, lambda _: None)
