"""A producer that does as it is told, for errors that no broker gives on demand, and a writer on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.outcomes import Incident, NotReady
from bridge.delivery.producer.transaction_markers import Outcome
from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.wire.headers import Headers
from tests.manual_clock import ManualClock


def error(code: int, **flags: bool) -> KafkaException:
    return KafkaException(KafkaError(code, "as told", **flags))


RETRIABLE = error(KafkaError._TIMED_OUT, retriable=True)
ABORTABLE = error(KafkaError.TRANSACTION_ABORTABLE, txn_requires_abort=True)
FATAL = error(KafkaError._FENCED, fatal=True)
UNASKED = error(KafkaError.INVALID_TXN_STATE, fatal=True)


class Written:
    """What a delivery report says of the record."""

    def topic(self) -> str:
        return "orders"

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
        self.joined: list[Sequence[TopicPartition]] = []
        self.reports: list[Callable[..., None]] = []
        self.failing: set[bytes] = set()
        self.failing_with = KafkaError.MSG_SIZE_TOO_LARGE
        self.is_silent = False
        self.joining: Callable[[], object] = lambda: None
        self.logger: Any = None
        self.lines: dict[str, list[tuple[str, str]]] = {}
        """What the client's log says after a call: kind and text. `poll` lets it in."""
        self._log: list[tuple[str, str]] = []

    def _do(self, name: str) -> None:
        self.calls += [] if name == "poll" else [name]
        self.clock.advance(100)
        self._log += self.lines.pop(name, [])
        script = self.script.get(name, [])
        told = script.pop(0) if script else self.forever.get(name)
        if told is not None:
            raise told

    def init_transactions(self, _timeout: float) -> None:
        self._do("init")

    def begin_transaction(self) -> None:
        self._do("begin")

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], _metadata: Any, _timeout: float) -> None:
        self.joining()
        self.joined.append(offsets)
        self._do("offsets")

    def commit_transaction(self, _timeout: float) -> None:
        self._do("commit")

    def abort_transaction(self, _timeout: float) -> None:
        self._do("abort")

    def produce(self, _topic: str, value: bytes | None, _key: Any, _partition: int, callback: Any, *_rest: Any) -> None:
        self._do("produce")
        self.sent.append(value)
        if callback is not None:
            failed = KafkaError(self.failing_with) if value in self.failing else None
            self.reports.append(lambda: callback(failed, Written()))

    def poll(self, timeout: float) -> int:
        lines, self._log = self._log, []
        for kind, text in lines:
            self.logger.log(20, "%s [%s] %s", kind, "x#producer-1", text)
        self._do("poll")
        self.clock.advance(int(timeout * 1000))
        return 0

    def flush(self, _timeout: float) -> int:
        self._do("flush")
        if self.is_silent:
            return len(self)
        for report in self.reports:
            report()
        self.reports = []
        return 0

    def purge(self, **_: bool) -> None:
        self.calls.append("purge")

    def __len__(self) -> int:
        return len(self.reports)


class LostMarkers:
    """Knows how the transactions of some ids ended, and keeps what was ended once more."""

    def __init__(self) -> None:
        self.lost: dict[str, Outcome] = {}
        self.failures: list[Exception] = []
        self.unanswered: list[Exception] = []
        self.asked: list[str] = []
        self.known: dict[str, Outcome | None] = {}
        self.open: str | None = None
        self.written: list[tuple[str, Outcome]] = []
        self.on_write: Callable[[Any, Callable[[], None]], object] = lambda *_: None

    def left_open(self, names: Sequence[str]) -> str | None:
        assert self.open is None or self.open in names
        self.asked += [] if self.open is None else [self.open]
        return self.open

    def outcome_of(self, name: str, known: Outcome | None = None) -> Outcome | None:
        self.known[name] = known
        self.asked.append(name)
        if self.unanswered:
            raise self.unanswered.pop(0)
        return self.lost.pop(name, None)

    def concluded(self, name: str) -> None:
        assert name in self.asked

    def write(self, name: str, producer: Any, outcome: Outcome, on_repeat: Callable[[], None]) -> None:
        assert producer.calls[-1] == "init"
        if self.failures:
            raise self.failures.pop(0)
        self.on_write(producer, on_repeat)
        self.written.append((name, outcome))


class Told:
    """A writer on stub producers."""

    def __init__(self, writer: Callable[..., Any] = TransactionalWriter, *more: Any, renews: bool = True) -> None:
        self.clock = ManualClock()
        self.producer = StubProducer(self.clock)
        self.made: list[StubProducer] = []
        self.names: list[str] = []
        self.later: list[Callable[[], None]] = []
        self.repair = LostMarkers()
        self.incidents: list[Incident] = []
        run: dict[str, Any] = {"run": self.later.append, "repair": self.repair}
        run |= {"on_incident": self.incidents.append, "renews": renews}
        run = run if writer is TransactionalWriter else {}
        self.writer = writer({"transactional.id": "x"}, self.clock, *more, make_producer=self._make, **run)

    def _make(self, config: dict[str, Any]) -> StubProducer:
        self.made.append(self.producer)
        self.names.append(config["transactional.id"])
        self.producer.logger = config.get("logger")
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
    headers: list[Headers] | None = [[("h", b"1")] for _ in values] if own else None
    texts = [str(i) for i in range(n)]
    keys: list[bytes | None] = [None] * n
    return Batch(
        topic="t", ids=np.arange(n) + 10, values=list(values), keys=keys, origins=texts, dues=texts, headers=headers
    )  # fmt: skip


def begun(told: Told, records: int = 1_000) -> str:
    """Begin a transaction; returns the id that does."""
    before = [made.calls.count("begin") for made in told.made]
    told.writer.begin(records)
    counts = zip(told.names, told.made, before, strict=True)
    (name,) = [name for name, made, begins in counts if made.calls.count("begin") > begins]
    return name


def after_trouble_with_all(told: Told) -> str:
    """The only broker was away; when it is back, all ids are ready. Returns the one that begins a transaction
    then."""
    for _ in range(2):
        told.writer.open()
    return after_an_outage(told)


def after_an_outage(told: Told) -> str:
    """No id can be initialised at first, and all can later. Returns the one that begins a transaction then."""
    told.producer = StubProducer(told.clock)
    told.producer.script["init"] = [RETRIABLE]
    with pytest.raises(NotReady):
        told.writer.open()
    told.background()
    told.writer.open()
    return begun(told)
