"""The producers of a writer: two that take turns, and one that rests until one of them is held up.

Each has a transactional id of its own. When a transaction is decided, its coordinator writes the end of it to every
partition that was in it, and takes nothing new under that id before all of them have it. That takes milliseconds, and a
client that is refused waits for 20 more. So the next transaction is another id's turn.

It takes longer where a leader has died: until the brokers have noticed (`broker.session.timeout.ms`, 9 s), and before
Kafka 4 until the partition has a leader again. Delivery goes on at once under the id that rests. The one that committed
the transaction before may be held up as well, and is initialised again, which waits until it is not.

    unmade --prepare--> recycling --(in the background)--> ready --open, next, await_ready--> used
      ^ |                   ^ ^                             | ^                              | | ^
      | |                   | '---------recycle-------------' '------------next--------------' | |
      | |                   '--------------------------recycle---------------------------------' |
      | '-------------------------------------------open-----------------------------------------'
      '----------------------------------------------put_back----------------------------------'

Brokers may have lost the end of the last transaction of an id in some partition (transaction_markers.py), also of one
whose commit they had confirmed, and only the next end there under the same id stands in for it: an abort would take
back what was committed. So after trouble the id goes on whose last commit is the longest ago (`open`, `await_ready`),
and the last two that have committed begin small transactions only, until one is committed. What was in use comes back
when it is ready: for a small transaction at once, for a large one after another id has committed one (`next`).

Exactly-once does not rest on the id. No transaction is begun before the one before is known to be committed, or will
never be asked to, whatever becomes of its abort. Offsets that two of them have committed count in the order in which
Kafka's coordinator wrote them, whichever end is written first. Between two processes the group's metadata decides: the
brokers refuse offsets of a former member, and committed offsets are read only when no transaction is pending on them
(require-stable). Every process initialises all of its ids when it starts, which ends what an earlier one of the same
name left open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.delivery.producer.outcomes import NO_ANSWER, Broken, Failure, Incident, NotReady, OnIncident
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Fault, fault_of, is_denied, is_fatal, is_fenced, kafka_error
from bridge.kafka.repeats import Repeats
from bridge.settings.time_budgets import USUAL

AGAIN_S: Final = 0.2
"""Between two calls that failed."""
ABORTS_MAX: Final = 60
"""How often an abort is asked for; then the next `init_transactions` under that id does it."""
SUSPECTS: Final = 2
"""So many ids, the last that have committed, may lack the end of that: a transaction can be shorter than the writing of
the end of the one before."""
REPAIR_IN_DOUBT: Final = KafkaError(KafkaError._RETRY, "an end that was written again may arrive late", retriable=True)
HELD_UP: Final = Failure(NO_ANSWER, "every transactional id is held up")

log = structlog.get_logger("bridge.delivery.producer.producer_pool")

Make = Callable[[str, list[KafkaError], Repeats], Producer]
"""A producer of that transactional id, which adds its fatal errors to the list, and tells of repeated requests. Raises
EnvironmentFailure."""


def names_of(name: str) -> tuple[str, ...]:
    """The transactional ids of a writer."""
    return name, f"{name}.2", f"{name}.3"


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
    repeats: Repeats = field(default_factory=Repeats)
    state: _State = _State.UNMADE
    owed_outcome: Outcome | None = None
    """How its last transaction, whose end the brokers have lost, is to be ended once more."""
    comes_back: bool = False
    """It was in use when there was trouble, or a commit of its was written again: it goes on as soon as it is ready,
    and what it is to write is likely to be committed."""
    committed: int = 0
    """In what order, among all commits, it may have committed last: it was asked to, and the answer was not no."""
    may_fence_itself: bool = False
    """An initialisation of its may arrive late: that would fence its producer, as a rival does."""

    def is_in_doubt(self) -> bool:
        """Whether a request of its transaction may have been sent more than once, all that is known by now."""
        if self.producer is not None:
            let_in(self.producer)
        return self.repeats.are_possible


class ProducerPool:
    """The producers of one writer; the first one is made first. Its methods are for one thread; `run` calls what it is
    given in another one. After `close` there is no way back.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Make,
        run: Callable[[Callable[[], None]], None],
        repair: MarkerRepair | None = None,
        call_s: float = USUAL.call_s,
        on_incident: OnIncident = lambda _: None,
    ) -> None:
        """`call_s` is the time-out of one call of the client; calls are repeated."""
        self._make = make
        self._run = run
        self._repair = repair
        self._call_s = call_s
        self._on_incident = on_incident
        self._all = [PooledProducer(name) for name in names]
        self._commits = count(1)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._comes_first: PooledProducer | None = None
        """Its last transaction may have one more effect until it is initialised: delivery waits for that."""
        self.is_well = False
        """Whether the transaction before this one was committed."""

    def open(self) -> PooledProducer:
        """One that is ready, else one that is unmade: it is initialised now, and the others in the background. At a
        start it is the one whose last transaction is still open, if one is.

        Raises EnvironmentFailure when that can never work, NotReady when it may work later, Broken.
        """
        self.is_well = False
        left_open = self._left_open()
        with self._changed:
            unmade = [one for one in self._able() if one.state is _State.UNMADE]
            pooled = self._used(self._first_of(self._ready()) or left_open or self._first_of(unmade))
        if pooled is None:
            raise NotReady(HELD_UP)
        if pooled.producer is None:
            self._initialise(pooled)
            self._comes_first = None
        self.prepare()
        return pooled

    def next(self, current: PooledProducer | None, *, is_small: bool) -> PooledProducer | None:
        """The one for the next transaction: if all is well one that comes back, or has committed the one before the
        last, else `current`, or one that comes back if the transaction is small. Without `current` it may be none, or
        the one whose last commit is the longest ago. Reports of those that are ready are let in, and those that have
        failed are replaced.
        """
        for pooled in self._all:
            if pooled.state is _State.READY and pooled.producer is not None:
                try:
                    pooled.producer.poll(0)
                except KafkaException as exception:
                    pooled.faults.append(kafka_error(exception))
                if pooled.faults:
                    self.recycle(pooled)
        with self._changed:
            able = [one for one in self._ready() if self.is_well or (is_small and one.comes_back)]
            found = max(able, key=lambda one: (one.comes_back, one.committed), default=None)
            if current is None:
                return self._used(found or self._first_of(self._ready()))
            if found is not None:
                current.state = _State.READY
            return self._used(found) or current

    def renew(self, pooled: PooledProducer, *, is_awaited: bool) -> None:
        """A request of its last transaction may arrive late: it gets a new epoch before its next one (repeats.py).
        `is_awaited`: and before anything else is begun. Offsets that arrive while the end of their transaction is being
        written count as the latest, whatever another id has committed meanwhile."""
        self._on_incident(Incident.END_IN_DOUBT)
        if is_awaited:
            self._comes_first = pooled
        self.recycle(pooled, anew=True, is_renewed=True)

    def has_ended_unasked(self, pooled: PooledProducer) -> None:
        """Nothing is begun until it is initialised, so that no more becomes of that transaction."""
        if self._comes_first is not pooled:
            self._on_incident(Incident.ENDED_UNASKED)
        self._comes_first = pooled

    def await_renewed(self, timeout_s: float) -> PooledProducer | None:
        """As `await_ready`, where every id is in doubt, or one that goes first."""
        self._on_incident(Incident.DELIVERY_WAITED)
        return self.await_ready(timeout_s)

    def await_ready(self, timeout_s: float) -> PooledProducer | None:
        """One that is ready, or as soon as one is; None if that takes longer, or none is on its way."""

        def is_decided() -> bool:
            return bool(self._ready()) or all(one.state is not _State.RECYCLING for one in self._able())

        with self._changed:
            self._changed.wait_for(is_decided, timeout_s)
            return self._used(self._first_of(self._ready()))

    def put_back(self, pooled: PooledProducer) -> None:
        """It is not used any more, and its producer is of no use."""
        left, pooled.producer, pooled.state, pooled.comes_back = pooled.producer, None, _State.UNMADE, True
        if left is not None:
            drop(left)

    def prepare(self) -> None:
        """Make ready what is unmade, in the background."""
        for pooled in self._all:
            if pooled.state is _State.UNMADE:
                self.recycle(pooled)

    def recycle(
        self, pooled: PooledProducer, *, is_open: bool = False, anew: bool = False, is_renewed: bool = False
    ) -> None:
        """Make it ready again in the background; `is_open`: its producer has a transaction open, to be aborted; `anew`:
        by another producer, as the rule wants if it `is_renewed`."""
        with self._changed:
            left = [] if pooled.producer is None else [pooled.producer]
            pooled.producer, pooled.state = None, _State.RECYCLING
            pooled.comes_back |= is_open
        self._run(partial(self._make_ready, pooled, left, is_open, anew or is_open, is_renewed))

    def doubt_last_committer(self) -> None:
        """The end of its transaction may wait for a partition that does not answer: it is ready when it is known not
        to."""
        last = max(self._all, key=lambda one: one.committed)
        if last.committed and last.state is _State.READY:
            self.recycle(last, anew=True)

    def asked_to_commit(self, pooled: PooledProducer) -> int:
        """It may commit from now on. Returns what `committed` was before, for an answer that is no."""
        before, pooled.committed = pooled.committed, next(self._commits)
        return before

    def is_to_stay_small(self, pooled: PooledProducer) -> bool:
        """Whether the end of its last commit may be lost: then its next transaction must not be aborted."""
        later = sum(one.committed > pooled.committed for one in self._all)
        return not self.is_well and pooled.committed > 0 and later < SUSPECTS

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        self._closed.set()
        for pooled in self._all:
            self.put_back(pooled)

    def _able(self) -> list[PooledProducer]:
        """Those that may be used, as soon as they are ready."""
        first = self._comes_first
        return self._all if first is None or first.state is _State.DENIED else [first]

    def _ready(self) -> list[PooledProducer]:
        return [one for one in self._able() if one.state is _State.READY and not one.faults]

    def _first_of(self, found: Sequence[PooledProducer]) -> PooledProducer | None:
        """The one whose last commit is the longest ago."""
        return min(found, key=lambda one: one.committed, default=None)

    def _used(self, found: PooledProducer | None) -> PooledProducer | None:
        if found is not None:
            if found.state is _State.READY:
                self._comes_first = None
            found.state, found.comes_back = _State.USED, False
        return found

    def _left_open(self) -> PooledProducer | None:
        """At a start: the one under which a process that was killed has left a transaction open. Raises NotReady."""
        if self._repair is None or any(one.state is not _State.UNMADE for one in self._all):
            return None
        try:
            name = self._repair.left_open([one.name for one in self._all])
        except KafkaException as exception:
            raise NotReady(Failure.of(kafka_error(exception))) from None
        found = next((one for one in self._all if one.name == name), None)
        if found is not None and found.owed_outcome is None:  # else a repair of its was interrupted, and is still owed
            found.owed_outcome = Outcome.ABORTED  # the coordinator need not be asked once more
        return found

    def _initialise(self, pooled: PooledProducer) -> None:
        """Make its producer, by one call. One that needs more goes on in the background."""
        held: list[Producer] = []
        error = self._attempt(pooled, held, lambda: False)
        if error is None:
            pooled.producer = held.pop()
            return
        if not held:
            self.put_back(pooled)
            raise NotReady(Failure.of(error))
        pooled.producer = held.pop()
        is_lost = is_fatal(error) or is_fenced(error)
        if is_lost or is_denied(error):
            self.put_back(pooled)
        else:
            self.recycle(pooled)
        if is_denied(error):
            raise EnvironmentFailure(
                "the brokers refuse transactions",
                hint="Grant WRITE and DESCRIBE on the transactional id; check credentials, transaction.timeout.ms.",
                reason=error.str(),
                code="DB-3006",
            )
        raise Broken(Failure.of(error)) if is_lost else NotReady(Failure.of(error))

    def _attempt(
        self, pooled: PooledProducer, held: list[Producer], may_repeat: Callable[[], bool]
    ) -> KafkaError | None:
        """Initialise the producer in `held`, which is made and put there first where there is none. Returns why it
        cannot be used. Raises EnvironmentFailure.
        """
        repair, error = self._repair, None
        try:
            if not held:
                if repair is not None and pooled.owed_outcome is None:
                    pooled.owed_outcome = repair.outcome_of(pooled.name)  # initialised, it would be forgotten
                pooled.faults, pooled.repeats = [], Repeats()
                held.append(self._make(pooled.name, pooled.faults, pooled.repeats))
            pooled.repeats.forget()
            error = _repeated(held[0].init_transactions, self._call_s, may_repeat, pooled.repeats)
            let_in(held[0])
            pooled.may_fence_itself |= error is not None or pooled.repeats.are_possible
            if error is None and repair is not None:
                if pooled.owed_outcome is not None:
                    pooled.repeats.forget()
                    repair.write(pooled.name, held[0], pooled.owed_outcome)
                    if pooled.owed_outcome is Outcome.COMMITTED:  # what it had in the targets may still be open there
                        pooled.comes_back = True
                        self.asked_to_commit(pooled)
                    pooled.owed_outcome = None
                    let_in(held[0])
                    if pooled.repeats.are_possible:
                        drop(held.pop())
                        return REPAIR_IN_DOUBT
                repair.concluded(pooled.name)
        except KafkaException as exception:
            error = kafka_error(exception)
            if pooled.owed_outcome is not None:
                log.warning("transaction-not-ended", id=pooled.name, code=error.name(), reason=error.str())
        return error

    # -- in the background

    def _make_ready(
        self, pooled: PooledProducer, held: list[Producer], is_open: bool, anew: bool, is_renewed: bool
    ) -> None:
        """`held`: the producer there was, if any; the caller keeps no reference to it. One that could not be
        initialised in time goes on with that by itself, and would fence a second one: it is used further.
        """
        if held and is_open:
            more = iter(range(ABORTS_MAX))
            _repeated(
                held[0].abort_transaction,
                self._call_s,
                lambda: next(more, None) is not None and self._may_go_on(),
                pooled.repeats,
            )
        if held and (anew or pooled.faults):
            drop(held.pop())
        while not self._closed.is_set():
            state = self._attempted(pooled, held)
            if state is not _State.RECYCLING:
                if is_renewed and state is _State.READY:
                    self._on_incident(Incident.ID_RENEWED)
                with self._changed:
                    pooled.producer, pooled.state = held.pop() if state is _State.READY else None, state
                    self._changed.notify_all()
                return
            self._may_go_on()

    def _attempted(self, pooled: PooledProducer, held: list[Producer]) -> _State:
        """What comes of an attempt; RECYCLING: another one is made."""
        try:
            error = self._attempt(pooled, held, self._may_go_on)
        except Exception as failure:  # noqa: BLE001 - it is raised again for what takes the id next
            log.warning("transactional-id-not-ready", id=pooled.name, reason=str(failure) or repr(failure))
            return _State.UNMADE
        if error is None:
            return _State.READY
        if held:
            drop(held.pop())
        if not is_denied(error):
            return _State.RECYCLING
        log.warning("transactional-id-not-ready", id=pooled.name, reason=error.str())
        if self._repair is not None:
            self._repair.concluded(pooled.name)
        return _State.DENIED

    def _may_go_on(self) -> bool:
        """A pause; then whether to try once more."""
        return not self._closed.wait(AGAIN_S)


def in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="producer-start", daemon=True).start()


def drop(producer: Producer) -> None:
    """Let go of a producer without waiting for anything."""
    with suppress(KafkaException):  # it says once more that it cannot go on
        producer.purge(in_queue=True, in_flight=True, blocking=False)
        producer.poll(0)


def let_in(producer: Producer) -> None:
    """All that a producer has to tell by now. What it cannot do any more its calls say."""
    with suppress(KafkaException):
        producer.poll(0)


def _repeated(
    call: Callable[[float], None], call_s: float, may_repeat: Callable[[], bool], repeats: Repeats
) -> KafkaError | None:
    """Make this call until it succeeds. Returns why it does not."""
    while True:
        try:
            call(call_s)
            return None
        except KafkaException as exception:
            error = kafka_error(exception)
        # BUSY: the call that was left is still under way in it.
        if is_fatal(error) or not (error.retriable() or fault_of(error) is Fault.BUSY) or not may_repeat():
            return error
        repeats.note()
