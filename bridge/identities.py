"""Transactional ids to go on under while one of them is held up.

When a transaction is decided, its coordinator writes the end of it to every partition that was in it, and takes nothing
new under that transactional id before all of them have it. So one leader that has died holds up the id: until the
brokers have noticed (`broker.session.timeout.ms`, 9 s), and before Kafka 4 until the partition has a leader again.
Whoever has another id goes on at once.

    unmade --prepare--> resting --(in the background)--> ready --take--> used --rest--> resting
                           ^                               ^-----------put_back---------'

Exactly-once does not rest on the id. A transaction that is left is never asked to commit, whatever becomes of its
abort. Between two processes the group's metadata decides: the brokers refuse offsets of a member that is none any more,
and committed offsets are read only when no transaction is pending on them (require-stable). Every process makes all of
its ids ready when it starts, which ends what an earlier one of the same name left open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.clienterrors import is_fatal, kafka_error
from bridge.errors import EnvironmentFailure

CALL_S: Final = 5.0
"""One call of the client; it is repeated."""
AGAIN_S: Final = 0.2
"""Between two of them that failed."""
ABORTS_MAX: Final = 60
"""So often an abort is asked for; then the next `init_transactions` under that id does it."""

DENIED_CODES: Final = frozenset(
    {
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._AUTHENTICATION,
    }
)
_CONFLICTING: Final = frozenset({KafkaError._CONFLICT, KafkaError._PREV_IN_PROGRESS})

log = structlog.get_logger("bridge.identities")

Make = Callable[[str, list[KafkaError]], Producer]
"""A producer of that transactional id, which adds its fatal errors to the list. Raises EnvironmentFailure."""


class _State(Enum):
    UNMADE = "unmade"
    RESTING = "resting"
    READY = "ready"
    USED = "used"
    DENIED = "denied"


@dataclass(slots=True, eq=False)
class Identity:
    """A transactional id, its producer, and the fatal errors that this one has reported."""

    name: str
    producer: Producer | None = None
    faults: list[KafkaError] = field(default_factory=list)
    state: _State = _State.UNMADE

    def renew(self, make: Make) -> Producer:
        """Another producer. Raises EnvironmentFailure."""
        self.faults = []
        self.producer = make(self.name, self.faults)
        return self.producer


class Identities:
    """The ids of one writer, the preferred one first. Its methods are for one thread; `run` calls what it is given in
    another one.
    """

    def __init__(self, names: Sequence[str], make: Make, run: Callable[[Callable[[], None]], None]) -> None:
        self.make = make
        self._run = run
        self._all = [Identity(name) for name in names]
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def take(self, *, before: Identity | None = None, is_ready: bool = False) -> Identity | None:
        """The first that is ready, else (unless it must be) the first that is unmade; None if all are resting. With
        `before`, only one that is ready and preferred to that one.
        """
        with self._lock:
            wanted = self._all if before is None else self._all[: self._all.index(before)]
            found = next((one for one in wanted if one.state is _State.READY and not one.faults), None)
            if found is None and before is None and not is_ready:
                found = next((one for one in wanted if one.state is _State.UNMADE), None)
            if found is not None:
                found.state = _State.USED
            return found

    def put_back(self, identity: Identity, *, is_ready: bool = False) -> None:
        """It is not used any more; `is_ready`: its producer is well, and has no transaction open."""
        with self._lock:
            left = None if is_ready else identity.producer
            identity.producer = identity.producer if is_ready else None
            identity.state = _State.READY if is_ready else _State.UNMADE
        if left is not None:
            drop(left)

    def prepare(self) -> None:
        """Make ready what is unmade, in the background."""
        for identity in self._all:
            if identity.state is _State.UNMADE:
                self.rest(identity)

    def rest(self, identity: Identity, *, is_open: bool = False) -> None:
        """Make it ready again in the background; `is_open`: its producer has a transaction open, to be aborted."""
        with self._lock:
            left, identity.producer = identity.producer, None
            identity.state = _State.RESTING
        self._run(partial(self._make_ready, identity, left, is_open, self._closed))

    def serve(self) -> None:
        """Let the reports of those that are ready in, and make others of those that have failed."""
        for identity in self._all:
            if identity.state is _State.READY and identity.producer is not None:
                try:
                    identity.producer.poll(0)
                except KafkaException as exception:
                    identity.faults.append(kafka_error(exception))
                if identity.faults:
                    self.rest(identity)

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        with self._lock:
            self._closed.set()
            self._closed = threading.Event()
            left = [identity.producer for identity in self._all]
            for identity in self._all:
                identity.producer, identity.state = None, _State.UNMADE
        for producer in left:
            if producer is not None:
                drop(producer)

    # -- in the background

    def _make_ready(self, identity: Identity, left: Producer | None, is_open: bool, closed: threading.Event) -> None:
        if left is not None:
            if is_open:
                _abort(left, closed)
            drop(left)
        while not closed.is_set():
            faults: list[KafkaError] = []
            try:
                producer = self.make(identity.name, faults)
                error = _init(producer, closed)
            except EnvironmentFailure as failure:
                log.warning("transactional-id-not-ready", id=identity.name, reason=str(failure))
                self._settle(identity, _State.UNMADE, closed)  # whoever takes it next is told why
                return
            with self._lock:
                if error is None and not closed.is_set():
                    identity.producer, identity.faults, identity.state = producer, faults, _State.READY
                    return
            drop(producer)
            if error is not None and error.code() in DENIED_CODES:
                log.warning("transactional-id-not-ready", id=identity.name, reason=error.str())
                self._settle(identity, _State.DENIED, closed)
                return
            closed.wait(AGAIN_S)

    def _settle(self, identity: Identity, state: _State, closed: threading.Event) -> None:
        """It has come to that, unless all were dropped meanwhile."""
        with self._lock:
            if not closed.is_set():
                identity.state = state


def in_thread(run: Callable[[], None]) -> None:
    """Call it in a thread of its own."""
    threading.Thread(target=run, name="spare-producer", daemon=True).start()


def drop(producer: Producer) -> None:
    """Let go of a producer without waiting for anything."""
    with suppress(KafkaException):  # it says once more that it cannot go on
        producer.purge(in_queue=True, in_flight=True, blocking=False)
        producer.poll(0)


def _abort(producer: Producer, closed: threading.Event) -> None:
    """Abort what it has open. The call that was left may still be under way in it."""
    for _ in range(ABORTS_MAX):
        try:
            producer.abort_transaction(CALL_S)
            return
        except KafkaException as exception:
            error = kafka_error(exception)
        if closed.is_set() or not (error.retriable() or error.code() in _CONFLICTING):
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
