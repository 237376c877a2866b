"""The producers of a writer: the one in use, and a spare one to go on with while the first is held up.

Each has a transactional id of its own. When a transaction is decided, its coordinator writes the end of it to every
partition that was in it, and takes nothing new under that id before all of them have it. So one leader that has died
holds up the id: until the brokers have noticed (`broker.session.timeout.ms`, 9 s), and before Kafka 4 until the
partition has a leader again. Delivery goes on at once under the spare id, which is initialised beforehand and used for
nothing else.

    unmade --prepare--> recycling --(in the background)--> ready <--take, resume--> used
      ^                     ^                                                       | |
      |                     '-----------------------recycle-------------------------' |
      '-----------------------------------put_back------------------------------------'

The id that was left comes back as soon as it is ready (`resume`). Brokers may have lost the end of its last transaction
in some partition (transaction_markers.py), and only the next end there under the same id stands in for it.

Exactly-once does not rest on the id. A transaction that is left is never asked to commit, whatever becomes of its
abort. Between two processes the group's metadata decides: the brokers refuse offsets of a former member, and committed
offsets are read only when no transaction is pending on them (require-stable). Every process initialises all of its ids
when it starts, which ends what an earlier one of the same name left open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome
from bridge.kafka.errors import Fault, fault_of, is_denied, is_fatal, kafka_error

CALL_S: Final = 5.0
"""One call of the client; it is repeated."""
AGAIN_S: Final = 0.2
"""Between two of them that failed."""
ABORTS_MAX: Final = 60
"""So often an abort is asked for; then the next `init_transactions` under that id does it."""

log = structlog.get_logger("bridge.delivery.producer.producer_pool")

_initialising: Final = WeakValueDictionary[str, threading.RLock]()
"""Of the process, for the writer that comes after this one as well: a lock for each id that is being initialised, gone
with its last holder."""
_finding: Final = threading.Lock()

Make = Callable[[str, list[KafkaError]], Producer]
"""A producer of that transactional id, which adds its fatal errors to the list. Raises EnvironmentFailure."""


def names_of(name: str) -> tuple[str, str]:
    """The transactional ids of a writer: the usual one, and the spare one."""
    return name, f"{name}.spare"


class _State(Enum):
    UNMADE = "unmade"
    RECYCLING = "recycling"
    READY = "ready"
    USED = "used"
    DENIED = "denied"


@dataclass(slots=True, eq=False)
class PooledProducer:
    """A producer, its transactional id, and the fatal errors that it has reported."""

    name: str
    producer: Producer | None = None
    faults: list[KafkaError] = field(default_factory=list)
    state: _State = _State.UNMADE
    owed_outcome: Outcome | None = None
    """How its last transaction, whose end the brokers have lost, is to be ended once more."""
    comes_back: bool = False
    """It was in use when there was trouble, or a commit of its was written again: it goes on as soon as it is ready."""


class ProducerPool:
    """The producers of one writer; the first one is made first. Its methods are for one thread; `run` calls what it is
    given in another one.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Make,
        run: Callable[[Callable[[], None]], None],
        repair: MarkerRepair | None = None,
    ) -> None:
        self.make = make
        self._repair = repair
        self._run = run
        self._all = [PooledProducer(name) for name in names]
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def take(self) -> PooledProducer | None:
        """One that is ready, else the first that is unmade; None if all are being recycled."""
        with self._changed:
            return self._used(
                self._first_ready() or next((one for one in self._all if one.state is _State.UNMADE), None)
            )

    def await_ready(self, timeout_s: float) -> PooledProducer | None:
        """One that is ready, or as soon as one is; None if that takes longer, or none is on its way."""

        def is_decided() -> bool:
            return self._first_ready() is not None or all(one.state is not _State.RECYCLING for one in self._all)

        with self._changed:
            self._changed.wait_for(is_decided, timeout_s)
            return self._used(self._first_ready())

    def resume(self, current: PooledProducer) -> PooledProducer:
        """The one for the next transaction: one that comes back, if it is ready, else `current`."""
        with self._changed:
            found = self._first_ready()
            if found is None or not found.comes_back:
                return current
            current.state = _State.READY
            self._used(found)
            return found

    def _first_ready(self) -> PooledProducer | None:
        ready = [one for one in self._all if one.state is _State.READY and not one.faults]
        return min(ready, key=lambda one: not one.comes_back, default=None)

    @staticmethod
    def _used(found: PooledProducer | None) -> PooledProducer | None:
        if found is not None:
            found.state, found.comes_back = _State.USED, False
        return found

    def put_back(self, pooled: PooledProducer) -> None:
        """It is not used any more, and its producer is of no use."""
        with self._changed:
            left, pooled.producer, pooled.state = pooled.producer, None, _State.UNMADE
            pooled.comes_back = True
        if left is not None:
            drop(left)

    def learn_owed(self, pooled: PooledProducer) -> KafkaError | None:
        """Before it is initialised: learn how its last transaction ended, if that is to be written once more. Returns
        why there is no answer: then it must not be initialised yet.
        """
        if self._repair is None or pooled.owed_outcome is not None:
            return None
        try:
            pooled.owed_outcome = self._repair.outcome_of(pooled.name)
        except KafkaException as exception:
            return kafka_error(exception)
        return None

    def write_owed(self, pooled: PooledProducer, producer: Producer) -> KafkaError | None:
        """After it is initialised: write that end. Returns why that failed."""
        if self._repair is None:
            return None
        if pooled.owed_outcome is None:
            self._repair.concluded(pooled.name)
            return None
        try:
            self._repair.write(pooled.name, producer, pooled.owed_outcome)
        except KafkaException as exception:
            error = kafka_error(exception)
            log.warning("transaction-not-ended", id=pooled.name, code=error.name(), reason=error.str())
            return error
        pooled.comes_back |= pooled.owed_outcome is Outcome.COMMITTED
        pooled.owed_outcome = None
        return None

    def prepare(self) -> None:
        """Make ready what is unmade, in the background."""
        for pooled in self._all:
            if pooled.state is _State.UNMADE:
                self.recycle(pooled)

    def recycle(self, pooled: PooledProducer, *, is_open: bool = False) -> None:
        """Make it ready again in the background; `is_open`: its producer has a transaction open, to be aborted."""
        with self._changed:
            left = [] if pooled.producer is None else [pooled.producer]
            pooled.producer, pooled.state = None, _State.RECYCLING
            pooled.comes_back |= is_open
        self._run(partial(self._make_ready, pooled, left, is_open, self._closed))

    def serve(self) -> None:
        """Let the reports of the ready ones in, and replace those that have failed."""
        for pooled in self._all:
            if pooled.state is _State.READY and pooled.producer is not None:
                try:
                    pooled.producer.poll(0)
                except KafkaException as exception:
                    pooled.faults.append(kafka_error(exception))
                if pooled.faults:
                    self.recycle(pooled)

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        with self._changed:
            self._closed.set()
            self._closed = threading.Event()
            left = [pooled.producer for pooled in self._all if pooled.producer is not None]
            for pooled in self._all:
                pooled.producer, pooled.state = None, _State.UNMADE
        for producer in left:
            drop(producer)

    # -- in the background

    def _make_ready(self, pooled: PooledProducer, left: list[Producer], is_open: bool, closed: threading.Event) -> None:
        """`left`: the producer there was, if any; the caller keeps no reference to it. One that could not be
        initialised in time goes on with that by itself, and would fence a second one: it is used further.
        """
        if left and (is_open or pooled.faults):
            if is_open:
                _abort(left[0], closed)
            drop(left.pop())
        while not closed.is_set():
            with alone(pooled.name, -1):
                faults = pooled.faults if left else []
                try:
                    producer, error = self._attempt(pooled, left, faults, closed)
                except Exception as failure:  # noqa: BLE001 - it is raised again for what takes the id next
                    log.warning("transactional-id-not-ready", id=pooled.name, reason=str(failure) or repr(failure))
                    self._leave_as(pooled, _State.UNMADE, closed)
                    return
            if producer is not None:
                with self._changed:
                    if not closed.is_set():
                        pooled.producer, pooled.faults, pooled.state = producer, faults, _State.READY
                        self._changed.notify_all()
                        return
                drop(producer)
                return
            if error is not None and is_denied(error):
                log.warning("transactional-id-not-ready", id=pooled.name, reason=error.str())
                self._leave_as(pooled, _State.DENIED, closed)
                if self._repair is not None:
                    self._repair.concluded(pooled.name)
                return
            closed.wait(AGAIN_S)

    def _attempt(
        self,
        pooled: PooledProducer,
        left: list[Producer],
        faults: list[KafkaError],
        closed: threading.Event,
    ) -> tuple[Producer | None, KafkaError | None]:
        """One that is initialised, or why there is none. Raises EnvironmentFailure."""
        if not left:
            error = self.learn_owed(pooled)
            if error is not None:
                return None, error
        producer = left.pop() if left else self.make(pooled.name, faults)
        error = _init(producer, closed) or self.write_owed(pooled, producer)
        if error is None and not closed.is_set():
            return producer, None
        drop(producer)
        return None, error

    def _leave_as(self, pooled: PooledProducer, state: _State, closed: threading.Event) -> None:
        """It has come to that, unless all were dropped meanwhile."""
        with self._changed:
            if not closed.is_set():
                pooled.state = state
                self._changed.notify_all()


def in_thread(run: Callable[[], None]) -> None:
    """Call it in a thread of its own."""
    threading.Thread(target=run, name="spare-producer", daemon=True).start()


def drop(producer: Producer) -> None:
    """Let go of a producer without waiting for anything."""
    with suppress(KafkaException):  # it says once more that it cannot go on
        producer.purge(in_queue=True, in_flight=True, blocking=False)
        producer.poll(0)


@contextmanager
def alone(name: str, timeout_s: float) -> Iterator[bool]:
    """No other thread of this process initialises that transactional id meanwhile: the later of two fences the other.
    Yields whether that came true in time.
    """
    with _finding:
        lock = _initialising.setdefault(name, threading.RLock())
    is_alone = lock.acquire(timeout=timeout_s)
    try:
        yield is_alone
    finally:
        if is_alone:
            lock.release()


def _abort(producer: Producer, closed: threading.Event) -> None:
    """Abort what it has open. The call that was left may still be under way in it."""
    for _ in range(ABORTS_MAX):
        try:
            producer.abort_transaction(CALL_S)
            return
        except KafkaException as exception:
            error = kafka_error(exception)
        if closed.is_set() or not (error.retriable() or fault_of(error) is Fault.BUSY):
            return
        closed.wait(AGAIN_S)


def _init(producer: Producer, closed: threading.Event) -> KafkaError | None:
    """Why it cannot be used; None: it can."""
    while True:
        try:
            producer.init_transactions(CALL_S)
            return None
        except KafkaException as exception:
            error = kafka_error(exception)
        if closed.is_set() or is_fatal(error) or not error.retriable():
            return error
        closed.wait(AGAIN_S)
