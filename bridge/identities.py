"""Transactional ids to go on under while one of them is held up.

When a transaction is decided, its coordinator writes the end of it to every partition that was in it, and takes nothing
new under that transactional id before all of them have it. So one leader that has died holds up the id: until the
brokers have noticed (`broker.session.timeout.ms`, 9 s), and before Kafka 4 until the partition has a leader again.
Whoever has another id goes on at once.

    unmade --prepare--> resting --(in the background)--> ready <--take, take_turn--> used
      ^                    ^                                                          | |
      |                    '---------------------------rest---------------------------' |
      '--------------------------------------put_back-----------------------------------'

Exactly-once does not rest on the id. A transaction that is left is never asked to commit, whatever becomes of its
abort. Between two processes the group's metadata decides: the brokers refuse offsets of a member that is none any more,
and committed offsets are read only when no transaction is pending on them (require-stable). Every process makes all of
its ids ready when it starts, which ends what an earlier one of the same name left open.

Whoever is ready and has not been used for a while takes the next transaction (`take_turn`). So each of them knows the
group's coordinator when it is needed: asked only then, it may have to ask just the node that hangs. And what is never
used is not known to work. For the same reason each learns every topic that is in use, and who leads it, beside
delivery.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.clienterrors import is_fatal, kafka_error, may_pass
from bridge.endings import Ending, Endings
from bridge.errors import EnvironmentFailure

CALL_S: Final = 5.0
"""One call of the client; it is repeated."""
AGAIN_S: Final = 0.2
"""Between two of them that failed."""
ACQUAINT_S: Final = 2.0
"""How long one topic is asked about."""
TURN_S: Final = 10.0
"""Who has not been used for so long is next."""
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
CONFLICTING: Final = frozenset({KafkaError._CONFLICT, KafkaError._PREV_IN_PROGRESS})

log = structlog.get_logger("bridge.identities")

_initialising: Final = defaultdict[str, threading.RLock](threading.RLock)
"""Also for the writer that comes after this one, in the same process."""

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
    """A transactional id, its producer, the fatal errors that this one has reported, and when it last began a
    transaction.
    """

    name: str
    producer: Producer | None = None
    faults: list[KafkaError] = field(default_factory=list)
    state: _State = _State.UNMADE
    used_s: float = -math.inf
    owed: Ending | None = None
    """How its last transaction, whose end the brokers have lost, is to be ended once more."""
    known: set[str] = field(default_factory=set)
    """The topics that its producer knows."""
    is_learning: bool = False
    is_first: bool = False
    """That was done: it has the next turn, since each partition that it writes to next has the end again, too."""
    stays_s: float = -math.inf

    @property
    def is_alive(self) -> bool:
        """Whether there is a producer that may be used."""
        return self.state in (_State.READY, _State.USED) and not self.faults

    def renew(self, make: Make) -> Producer:
        """Another producer. Raises EnvironmentFailure."""
        self.faults, self.known, self.used_s = [], set(), -math.inf
        self.producer = make(self.name, self.faults)
        return self.producer


class Identities:
    """The ids of one writer; the first one is made first. Its methods are for one thread; `run` calls what it is given
    in another one.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Make,
        run: Callable[[Callable[[], None]], None],
        in_use: Callable[[], Collection[str]] = tuple,
        endings: Endings | None = None,
    ) -> None:
        """`in_use` gives the topics that every producer is to know; it waits for nobody. They must be there: a client
        that has heard that a topic is missing says so for a second after it was made.
        """
        self.make = make
        self._endings = endings
        self._run = run
        self._in_use = in_use
        self._all = [Identity(name) for name in names]
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()

    def take(self) -> Identity | None:
        """One that is ready, else the first that is unmade; None if all are resting."""
        with self._lock:
            found = self._first_ready() or next((one for one in self._all if one.state is _State.UNMADE), None)
            if found is not None:
                found.state = _State.USED
            return found

    def await_ready(self, timeout_s: float) -> Identity | None:
        """One that is ready, or as soon as one is; None if that takes longer, or none is on its way."""

        def is_decided() -> bool:
            return self._first_ready() is not None or all(one.state is not _State.RESTING for one in self._all)

        with self._changed:
            self._changed.wait_for(is_decided, timeout_s)
            found = self._first_ready()
            if found is not None:
                found.state = _State.USED
            return found

    def _first_ready(self) -> Identity | None:
        """Of those that are ready, one that has been used, but not last: its last transaction may just be ending."""
        return min(self._ready(), key=lambda one: (not one.is_first, one.used_s == -math.inf, one.used_s), default=None)

    def _ready(self) -> list[Identity]:
        return [one for one in self._all if one.state is _State.READY and not one.faults]

    def take_turn(self, current: Identity, now_s: float, trouble_s: float = -math.inf) -> Identity:
        """Who has the next transaction: the one that is ready and has not been used for longest; `current`, if all have
        been used lately, and if there was trouble with brokers (at `trouble_s`) since it began its last one: the end of
        that may be lost, and comes with the next one of the same id.
        """
        before_s, current.used_s = current.used_s, now_s
        if current.is_first:
            current.is_first, current.stays_s = False, now_s + TURN_S
        if now_s < current.stays_s:
            return current
        with self._lock:
            found = min(self._ready(), key=lambda one: (not one.is_first, one.used_s), default=current)
            stays = -math.inf < before_s < trouble_s or now_s - found.used_s < TURN_S
            if stays and not found.is_first:
                return current
            if found.is_first:
                found.is_first, found.stays_s = False, now_s + TURN_S
            current.state, found.state, found.used_s = _State.READY, _State.USED, now_s
            return found

    def put_back(self, identity: Identity) -> None:
        """It is not used any more, and its producer is of no use."""
        with self._lock:
            left, identity.producer, identity.state = identity.producer, None, _State.UNMADE
        if left is not None:
            drop(left)

    def ask(self, identity: Identity) -> KafkaError | None:
        """Before it is initialised: learn how its last transaction ended, if that is to be ended once more. Returns why
        that cannot be said now: then it must not be initialised yet.
        """
        if self._endings is None or identity.owed is not None:
            return None
        try:
            identity.owed = self._endings.of(identity.name)
        except KafkaException as exception:
            error = kafka_error(exception)
            return error if may_pass(error) else None
        return None

    def settle(self, identity: Identity, producer: Producer) -> KafkaError | None:
        """After that: end it. Returns why that failed."""
        if self._endings is None or identity.owed is None:
            return None
        error: KafkaError | None = None
        try:
            self._endings.repeat(identity.name, producer, identity.owed)
        except KafkaException as exception:
            error = kafka_error(exception)
            log.warning("transaction-not-ended", id=identity.name, code=error.name(), reason=error.str())
        if error is None or not may_pass(error):
            identity.is_first = error is None and identity.owed is Ending.COMMITTED
            identity.owed = None
        return error

    def prepare(self) -> None:
        """Make ready what is unmade, in the background."""
        for identity in self._all:
            if identity.state is _State.UNMADE:
                self.rest(identity)

    def rest(self, identity: Identity, *, is_open: bool = False) -> None:
        """Make it ready again in the background; `is_open`: its producer has a transaction open, to be aborted."""
        with self._lock:
            left = [] if identity.producer is None else [identity.producer]
            identity.producer, identity.state = None, _State.RESTING
        self._run(partial(self._make_ready, identity, left, is_open, self._closed))

    def serve(self) -> None:
        """Let the reports of the ready ones in, replace those that have failed, and have all learn what is new."""
        in_use = frozenset(self._in_use())
        for identity in self._all:
            if identity.state is _State.READY and identity.producer is not None:
                try:
                    identity.producer.poll(0)
                except KafkaException as exception:
                    identity.faults.append(kafka_error(exception))
                if identity.faults:
                    self.rest(identity)
            if identity.producer is not None and not identity.is_learning and not in_use <= identity.known:
                identity.is_learning = True
                self._run(partial(self._learn, identity, identity.producer, in_use))

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        with self._lock:
            self._closed.set()
            self._closed = threading.Event()
            left = [identity.producer for identity in self._all if identity.producer is not None]
            for identity in self._all:
                identity.producer, identity.state = None, _State.UNMADE
        for producer in left:
            drop(producer)

    # -- in the background

    def _make_ready(self, identity: Identity, left: list[Producer], is_open: bool, closed: threading.Event) -> None:
        """`left`: the producer there was, if any; whoever calls this keeps no reference to it. One that could not be
        initialised in time goes on with that by itself, and would fence a second one: it is used further.
        """
        if left and (is_open or identity.faults):
            _retire(left.pop(), closed, is_open=is_open)
        while not closed.is_set():
            with alone(identity.name, -1):
                faults = identity.faults if left else []
                try:
                    producer, error = self._attempt(identity, left, faults, is_open, closed)
                except EnvironmentFailure as failure:
                    log.warning("transactional-id-not-ready", id=identity.name, reason=str(failure))
                    self._settle(identity, _State.UNMADE, closed)  # whoever takes it next is told why
                    return
            if producer is not None:
                known = self._acquaint(producer, self._in_use())
                with self._lock:
                    if not closed.is_set():
                        identity.producer, identity.faults, identity.known = producer, faults, known
                        identity.state, identity.used_s = _State.READY, -math.inf
                        self._changed.notify_all()
                        return
                drop(producer)
                return
            if error is not None and error.code() in DENIED_CODES:
                log.warning("transactional-id-not-ready", id=identity.name, reason=error.str())
                self._settle(identity, _State.DENIED, closed)
                return
            closed.wait(AGAIN_S)

    def _attempt(
        self,
        identity: Identity,
        left: list[Producer],
        faults: list[KafkaError],
        is_open: bool,
        closed: threading.Event,
    ) -> tuple[Producer | None, KafkaError | None]:
        """One that is initialised, or why there is none. Raises EnvironmentFailure."""
        if not left and not is_open:
            error = self.ask(identity)
            if error is not None:
                return None, error
        producer = left.pop() if left else self.make(identity.name, faults)
        error = _init(producer, closed) or self.settle(identity, producer)
        if error is None and not closed.is_set():
            return producer, None
        drop(producer)
        return None, error

    def _learn(self, identity: Identity, producer: Producer, in_use: frozenset[str]) -> None:
        try:
            learned = self._acquaint(producer, in_use - identity.known)
            with self._lock:
                identity.known |= learned if identity.producer is producer else set()
        finally:
            identity.is_learning = False

    @staticmethod
    def _acquaint(producer: Producer, topics: Collection[str]) -> set[str]:
        """Have it learn, and keep in mind, who leads these topics, until nobody answers. Returns what it learned."""
        learned = set()
        for topic in topics:
            try:
                producer.list_topics(topic, timeout=ACQUAINT_S)
            except KafkaException:
                break
            learned.add(topic)
        return learned

    def _settle(self, identity: Identity, state: _State, closed: threading.Event) -> None:
        """It has come to that, unless all were dropped meanwhile."""
        with self._lock:
            if not closed.is_set():
                identity.state = state
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
    """Nobody else in this process initialises that transactional id meanwhile: the later of two fences the other one.
    Gives whether that came true in time.
    """
    lock = _initialising[name]
    is_alone = lock.acquire(timeout=timeout_s)
    try:
        yield is_alone
    finally:
        if is_alone:
            lock.release()


def _retire(producer: Producer, closed: threading.Event, *, is_open: bool) -> None:
    """Let go of a producer, when its transaction is aborted."""
    if is_open:
        _abort(producer, closed)
    drop(producer)


def _abort(producer: Producer, closed: threading.Event) -> None:
    """Abort what it has open. The call that was left may still be under way in it."""
    for _ in range(ABORTS_MAX):
        try:
            producer.abort_transaction(CALL_S)
            return
        except KafkaException as exception:
            error = kafka_error(exception)
        if closed.is_set() or not (error.retriable() or error.code() in CONFLICTING):
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
