"""The transactional ids of a writer: two with turns, and one that rests until one of them is held up.

After the decision on a transaction its coordinator writes the end to each partition, and accepts nothing new under that
id meanwhile. That takes milliseconds; if a leader has died, it lasts until the brokers have noticed
(`broker.session.timeout.ms`, 9 s), or before Kafka 4 until the partition has a leader again.

    state     its producer                          leads to, by event
    UNMADE    none                                  STARTING (start)
    STARTING  the background's, not initialised     READY (made), UNMADE (lost)
    READY     initialised                           USED (taken), UNMADE (lost)
    USED      the writer's, with its transaction    READY (spared), UNMADE (lost)

An id that needs a new epoch loses its producer, and another one initialises it in the background. The next turn:

    the last transaction    the next id
    was committed           an id that comes back, else the ready one with the latest commit, else the same
    was aborted             the same; if the next transaction is small, an id that comes back
    has lost its id         the ready one with the earliest commit

An id comes back after it was left with an open transaction, or has lost its producer. For speed, "else the ready one"
of the first row is enough. The rest serves lost ends of transactions, and goes with transaction_markers.py. If the end
of a commit is missing, an abort under the same id takes the commit back: hence the last rows, and after trouble the
small transactions of the last two ids to commit, which are rarely aborted. The next records of an id in a partition end
its open transaction there: hence the ids that come back.

Exactly-once does not rest on the turns. A transaction begins only once the commit of the one before is certain, or
given up for good; its abort may go on. Offsets that two ids have committed count in the order in which the group's
coordinator wrote them; if a copy of some may arrive late, all ids wait for their new epochs. Between two processes the
group's metadata decides: brokers refuse offsets of a former member, and committed offsets are read only without a
pending transaction on them (require-stable). At its start every process initialises all of its ids, which ends the open
transactions of an earlier process of the same name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.delivery.producer.outcomes import NO_ANSWER, Broken, Failure, Incident, NotReady, OnIncident
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import is_denied, is_fatal, is_fenced, kafka_error
from bridge.kafka.repeats import Repeats
from bridge.settings.time_budgets import USUAL

AGAIN_S: Final = 0.2
"""Pause after a failed call."""
HELD_UP: Final = Failure(NO_ANSWER, "every transactional id is held up")
DENIED: Final = "DB-3006"
"""The code of an id that brokers refuse to initialise."""
SUSPECTS: Final = 2
"""The last two ids to commit may lack an end: a transaction can be shorter than the writing of the end before it."""
REPAIR_IN_DOUBT: Final = KafkaError(KafkaError._RETRY, "an end that was written again may arrive late", retriable=True)

log = structlog.get_logger("bridge.delivery.producer.transactional_ids")

Make = Callable[[str, list[KafkaError], Repeats], Producer]
"""Makes a producer of that id, which adds its fatal errors to the list and reports repeated requests. Raises
EnvironmentFailure."""


def names_of(name: str) -> tuple[str, ...]:
    """The transactional ids of a writer."""
    return name, f"{name}.2", f"{name}.3"


class IdState(Enum):
    """See the table above."""

    UNMADE = "unmade"
    STARTING = "starting"
    READY = "ready"
    USED = "used"


class IdEvent(Enum):
    START = "start"
    MADE = "made"
    TAKEN = "taken"
    SPARED = "spared"
    LOST = "lost"


TRANSITIONS: Final[Mapping[IdState, Mapping[IdEvent, IdState]]] = {
    IdState.UNMADE: {IdEvent.START: IdState.STARTING},
    IdState.STARTING: {IdEvent.MADE: IdState.READY, IdEvent.LOST: IdState.UNMADE},
    IdState.READY: {IdEvent.TAKEN: IdState.USED, IdEvent.LOST: IdState.UNMADE},
    IdState.USED: {IdEvent.SPARED: IdState.READY, IdEvent.LOST: IdState.UNMADE},
}


@dataclass(slots=True, eq=False)
class TransactionalId:
    """One id, its producer, and the fatal errors of that."""

    name: str
    state: IdState = IdState.UNMADE
    producer: Producer | None = None
    faults: list[KafkaError] = field(default_factory=list)
    repeats: Repeats = field(default_factory=Repeats)
    failure: Exception | None = None
    """Why it could not be initialised."""
    committed: int = 0
    """The number of its last commit that was requested and not refused, in the order of all commits; 0: none."""
    comes_back: bool = False
    was_made: bool = False
    may_fence_itself: bool = False
    """Its own late initialisation may fence its producer, as a rival does."""
    outcome: Outcome | None = None
    """The end of its last transaction, according to its coordinator."""
    owed_outcome: Outcome | None = None
    """The lost end of its last transaction, which must be written again."""

    def advance(self, event: IdEvent) -> None:
        """Go to the next state. Raises KeyError for an event without a transition."""
        self.state = TRANSITIONS[self.state][event]

    def let_in(self) -> None:
        """Poll its producer, if any, for all news: otherwise the queue of its log would grow."""
        try:
            if self.producer is not None:
                self.producer.poll(0)
        except KafkaException as exception:
            self.faults.append(kafka_error(exception))

    def is_in_doubt(self) -> bool:
        """Whether a request of its transaction may have been sent more than once, as far as is known."""
        self.let_in()
        return self.repeats.are_possible


BY_COMMIT: Final = attrgetter("committed")


class TransactionalIds:
    """The ids of one writer; the first one is made first. Its methods are for one thread; `run` calls a function in
    another one. `close` is final."""

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
        self._all = [TransactionalId(name) for name in names]
        self.first: TransactionalId | None = None
        """The id that must go next, if any: no transaction begins before it is initialised, since until then its last
        transaction may have a late effect. Offsets that arrive while the end of their transaction is being written
        count as the latest, even after another id's commits in between."""
        self._is_waited_for = False
        self.is_well = False
        """Whether the last transaction was committed."""
        self._commits = count(1)
        self._changed = threading.Condition()
        self._closed = threading.Event()

    # -- which id goes next

    def next(self, current: TransactionalId | None, *, is_small: bool = False) -> TransactionalId | None:
        """The id for the next transaction, if one is ready; `current` is the last one's, if it may go on."""
        with self._changed:
            ready = self._ready()
            able = [one for one in ready if self.is_well or (is_small and current is not None and one.comes_back)]
            chosen = max(able, key=lambda one: (one.comes_back, one.committed), default=current)
            chosen = chosen or min(ready, key=BY_COMMIT, default=None)
            if chosen is not None and chosen is not current:
                if current is not None:
                    current.advance(IdEvent.SPARED)
                chosen.advance(IdEvent.TAKEN)
                chosen.comes_back, self.first = False, None
            return chosen

    def open(self) -> TransactionalId:
        """An id that is ready; otherwise one that is unmade is initialised now, and the others in the background. At a
        start, an id whose last transaction is still open goes first.

        Raises EnvironmentFailure if that can never work, NotReady if it may work later, Broken."""
        self.is_well = False
        self.look_after()
        left_open = self._left_open()
        one = self.next(None)
        if one is None:
            made = left_open or min(self._unmade(), key=BY_COMMIT, default=None)
            if made is None:
                raise NotReady(HELD_UP)
            made.advance(IdEvent.START)
            self._make_ready(made, [], [], at_once=True)
            if made.failure is not None:
                raise made.failure
            one = self.next(None)
        for other in self._all:
            if other.state is IdState.UNMADE:
                self._start(other)
        if one is None:
            raise NotReady(HELD_UP)
        return one

    def await_ready(self, timeout_s: float) -> bool:
        """Whether an id is ready within that time, or none is worth waiting for."""
        with self._changed:
            if not (self._is_waited_for or self._is_decided()):
                self._on_incident(Incident.DELIVERY_WAITED)
            self._is_waited_for = not self._changed.wait_for(self._is_decided, timeout_s)
            return not self._is_waited_for

    def _is_decided(self) -> bool:
        return bool(self._ready() or self._unmade()) or not self._are_starting()

    def asked_to_commit(self, one: TransactionalId) -> None:
        """It may commit from now on; the answer may be lost."""
        one.committed = next(self._commits)

    def is_suspect(self, one: TransactionalId) -> bool:
        """Whether the end of its last commit may be lost: then its next transaction must not be aborted."""
        later = sum(other.committed > one.committed for other in self._all)
        return not self.is_well and one.committed > 0 and later < SUSPECTS

    def _able(self) -> list[TransactionalId]:
        """The ids that may be used once they are ready."""
        return self._all if self.first is None else [self.first]

    def _ready(self) -> list[TransactionalId]:
        return [one for one in self._able() if one.state is IdState.READY and not one.faults]

    def _are_starting(self) -> bool:
        return any(one.state is IdState.STARTING for one in self._able())

    def _unmade(self) -> list[TransactionalId]:
        """The ids that may be made now; a denied one only without an alternative."""
        unmade = [one for one in self._able() if one.state is IdState.UNMADE]
        hopeful = [one for one in unmade if getattr(one.failure, "code", None) != DENIED]
        return hopeful or ([] if self._are_starting() else unmade)

    # -- changes of one id

    def renew(self, one: TransactionalId) -> None:
        """Give it a new epoch before its next transaction; that also ends its open one."""
        self._start(one, self._lose(one))

    def renew_last(self) -> None:
        """Renew the last id to commit, which may be held up, too: once it is ready again, it certainly is not."""
        last = max(self._all, key=BY_COMMIT)
        if last.committed and last.state is IdState.READY:
            self.renew(last)

    def give_up(self, one: TransactionalId) -> None:
        """Drop its lost producer; the id must be made anew."""
        one.comes_back = True
        for left in self._lose(one):
            drop(left)

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        self._closed.set()
        for one in self._all:
            self.give_up(one)

    def look_after(self) -> None:
        """Let in the news of all producers. A ready one that has failed is made anew."""
        for one in self._all:
            one.let_in()
            if one.faults and one.state is IdState.READY:
                self.renew(one)

    def _lose(self, one: TransactionalId) -> list[Producer]:
        """Remove the id's producer. Returns a list with it, or an empty list."""
        with self._changed:
            left, one.producer = one.producer, None
            if one.state is not IdState.UNMADE:
                one.advance(IdEvent.LOST)
        return [] if left is None else [left]

    # -- initialisation

    def _left_open(self) -> TransactionalId | None:
        """At a start, the id with an open transaction of a killed process, if any. Raises NotReady."""
        if self._repair is None or any(one.state is not IdState.UNMADE for one in self._all):
            return None
        try:
            name = self._repair.left_open([one.name for one in self._all])
        except KafkaException as exception:
            raise NotReady(Failure.of(kafka_error(exception))) from None
        owner = next((one for one in self._all if one.name == name), None)
        if owner is not None and owner.owed_outcome is None:  # otherwise its interrupted repair is still owed
            owner.owed_outcome = Outcome.ABORTED  # no further question to the coordinator
        return owner

    def _start(self, one: TransactionalId, left: Sequence[Producer] = ()) -> None:
        """Make it ready in the background, which also drops its former producer."""
        with self._changed:
            one.advance(IdEvent.START)
        self._run(partial(self._make_ready, one, [], list(left)))

    def _make_ready(
        self, one: TransactionalId, held: list[Producer], left: list[Producer], *, at_once: bool = False
    ) -> None:
        """Try until the id is ready, or cannot become ready. With `at_once`, try one call only; if that is not enough,
        the tries go on in the background, with the same producer (`held`): it initialises itself meanwhile, and would
        fence another one."""
        while left:  # the caller keeps no reference
            drop(left.pop())
        while not self._closed.is_set():
            try:
                error = self._attempt(one, held, (lambda: False) if at_once else self._may_go_on)
                failure = None if error is None else _meaning(one, error)
            except Exception as raised:  # noqa: BLE001 - the id's next user raises it again
                failure = raised.with_traceback(None)  # else it keeps its calls' producer alive
            may_pass = isinstance(failure, NotReady | Broken)
            if at_once and held and isinstance(failure, NotReady):
                one.failure = failure
                self._run(partial(self._make_ready, one, held, left))
                return
            if failure is not None and held:
                drop(held.pop())
            if at_once or not may_pass:
                if failure is not None and not at_once:
                    log.warning("transactional-id-not-ready", id=one.name, reason=str(failure) or repr(failure))
                self._conclude(one, held, failure)
                return
            self._may_go_on()

    def _conclude(self, one: TransactionalId, held: list[Producer], failure: Exception | None) -> None:
        """Set its producer, or the failure of all attempts."""
        if one.was_made and held:
            self._on_incident(Incident.ID_RENEWED)
        with self._changed:
            if not self._closed.is_set():
                one.failure, one.producer = failure, held.pop() if held else None
                one.was_made |= one.producer is not None
                one.advance(IdEvent.LOST if one.producer is None else IdEvent.MADE)
                self._changed.notify_all()

    def _attempt(self, one: TransactionalId, held: list[Producer], may_repeat: Callable[[], bool]) -> KafkaError | None:
        """Initialise the producer in `held`; an empty `held` gets one. Returns the error that prevents its use, if any.
        Raises EnvironmentFailure."""
        repair, error = self._repair, None
        try:
            if not held:
                if repair is not None and one.owed_outcome is None:
                    # The outcome, before an initialisation makes the coordinator forget it. The last transaction may
                    # be another process's, if that has fenced this one.
                    one.owed_outcome = repair.outcome_of(one.name, None if one.faults else one.outcome)
                    one.outcome = None
                one.faults, one.repeats = [], Repeats()
                held.append(self._make(one.name, one.faults, one.repeats))
            one.repeats.forget()
            error = _initialised(held[0], self._call_s, may_repeat, one.repeats)
            one.may_fence_itself |= error is not None or one.repeats.are_possible
            if error is None and repair is not None and one.owed_outcome is not None:
                self._repaired(repair, one, held[0], one.owed_outcome)
                if one.repeats.are_possible:
                    drop(held.pop())
                    return REPAIR_IN_DOUBT
        except KafkaException as exception:
            error = kafka_error(exception)
            if one.owed_outcome is not None:
                log.warning("transaction-not-ended", id=one.name, code=error.name(), reason=error.str())
        if repair is not None and (error is None or is_denied(error)):
            repair.concluded(one.name)
        return error

    def _repaired(self, repair: MarkerRepair, one: TransactionalId, producer: Producer, owed: Outcome) -> None:
        """End its last transaction again."""
        one.repeats.forget()
        repair.write(one.name, producer, owed, one.repeats.note)
        let_in(producer)
        one.owed_outcome = None
        if owed is Outcome.COMMITTED:  # its records in the targets may still be open
            one.comes_back = True
            self.asked_to_commit(one)

    def _may_go_on(self) -> bool:
        """Pause; returns whether to try again."""
        return not self._closed.wait(AGAIN_S)


def _meaning(one: TransactionalId, error: KafkaError) -> Exception:
    """The exception for an error that prevents an id's initialisation; the id's next user raises it."""
    if is_denied(error):
        return EnvironmentFailure(
            "the brokers refuse transactions",
            hint="Grant WRITE and DESCRIBE on the transactional id; check credentials, transaction.timeout.ms.",
            id=one.name,
            reason=error.str(),
            code="DB-3006",
        )
    failure = Failure.of(error)
    return Broken(failure) if is_fatal(error) or is_fenced(error) else NotReady(failure)


def in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="producer-start", daemon=True).start()


def drop(producer: Producer) -> None:
    """Let go of a producer without waiting for anything."""
    with suppress(KafkaException):  # it repeats its fatal error
        producer.purge(in_queue=True, in_flight=True, blocking=False)
        producer.poll(0)


def let_in(producer: Producer) -> None:
    """Let in all news of a producer. Its calls will report a fatal error."""
    with suppress(KafkaException):
        producer.poll(0)


def _initialised(
    producer: Producer, call_s: float, may_repeat: Callable[[], bool], repeats: Repeats
) -> KafkaError | None:
    """Initialise the producer, with repeated calls. Returns the error if that fails."""
    while True:
        try:
            producer.init_transactions(call_s)
            return None
        except KafkaException as exception:
            error = kafka_error(exception)
        finally:
            let_in(producer)
        if not error.retriable() or is_fatal(error) or not may_repeat():
            return error
        repeats.note()
