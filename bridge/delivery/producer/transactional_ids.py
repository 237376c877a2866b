"""The transactional ids of a writer: two that take turns, and one that rests until one of them is held up.

After the decision on a transaction its coordinator writes the end of it to each partition, and takes nothing new under
that id meanwhile. That takes milliseconds, and a client that is refused waits for 20 more: hence the turns. Where a
leader has died it takes until the brokers have noticed (`broker.session.timeout.ms`, 9 s), and before Kafka 4 until the
partition has a leader again: hence the third. The id that committed the transaction before may be held up as well, and
is initialised again, which waits until it is not.

    state     its producer                          leads to, by event
    UNMADE    none                                  STARTING (start), USED (taken: the first of a start)
    STARTING  the background's, to be initialised   READY (made), UNMADE (failed), DENIED (refused)
    READY     initialised                           USED (taken), STARTING (start)
    USED      the writer's, with its transaction    READY (spared), STARTING (start)
    DENIED    none: it may not be used              nothing
    each      is dropped (given up)                 UNMADE, but for DENIED

Which of those that are ready goes next: turns.py.

Exactly-once does not rest on the turns. No transaction is begun before the commit of the one before is known, or given
up for good; its abort may go on. Offsets that two ids have committed count in the order in which the
group's coordinator wrote them; where a copy of some may arrive late, all ids wait for a new epoch of theirs (`renew`).
Between two processes the group's metadata decides: brokers refuse offsets of a former member, and committed offsets are
read only when no transaction is pending on them (require-stable). Every process initialises all of its ids when it
starts, which ends what an earlier one of the same name left open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.delivery.producer.outcomes import NO_ANSWER, Broken, Failure, Incident, NotReady, OnIncident
from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome
from bridge.delivery.producer.turns import Turns
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Fault, fault_of, is_denied, is_fatal, is_fenced, kafka_error
from bridge.kafka.repeats import Repeats
from bridge.settings.time_budgets import USUAL

AGAIN_S: Final = 0.2
"""Between two calls that failed."""
ABORTS_MAX: Final = 60
"""How often an abort is asked for; then the next `init_transactions` under that id does it."""
HELD_UP: Final = Failure(NO_ANSWER, "every transactional id is held up")
REPAIR_IN_DOUBT: Final = KafkaError(KafkaError._RETRY, "an end that was written again may arrive late", retriable=True)

log = structlog.get_logger("bridge.delivery.producer.transactional_ids")

Make = Callable[[str, list[KafkaError], Repeats], Producer]
"""A producer of that id, which adds its fatal errors to the list and tells of repeated requests. Raises
EnvironmentFailure."""


def names_of(name: str) -> tuple[str, ...]:
    """The transactional ids of a writer."""
    return name, f"{name}.2", f"{name}.3"


class State(Enum):
    """See the table above."""

    UNMADE = "unmade"
    STARTING = "starting"
    READY = "ready"
    USED = "used"
    DENIED = "denied"


class Event(Enum):
    START = "start"
    MADE = "made"
    FAILED = "failed"
    REFUSED = "refused"
    TAKEN = "taken"
    SPARED = "spared"
    GIVEN_UP = "given up"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.UNMADE: {Event.START: State.STARTING, Event.TAKEN: State.USED, Event.GIVEN_UP: State.UNMADE},
    State.STARTING: {
        Event.MADE: State.READY,
        Event.FAILED: State.UNMADE,
        Event.REFUSED: State.DENIED,
        Event.GIVEN_UP: State.UNMADE,
    },
    State.READY: {Event.TAKEN: State.USED, Event.START: State.STARTING, Event.GIVEN_UP: State.UNMADE},
    State.USED: {Event.SPARED: State.READY, Event.START: State.STARTING, Event.GIVEN_UP: State.UNMADE},
    State.DENIED: {Event.GIVEN_UP: State.DENIED},
}


@dataclass(slots=True, eq=False)
class TransactionalId:
    """One id, its producer, and the fatal errors that this has reported."""

    name: str
    state: State = State.UNMADE
    producer: Producer | None = None
    faults: list[KafkaError] = field(default_factory=list)
    repeats: Repeats = field(default_factory=Repeats)
    may_fence_itself: bool = False
    """An initialisation of its may arrive late: that would fence its producer, as a rival does."""
    outcome: Outcome | None = None
    """The end of its last transaction, as its coordinator has answered; until the next initialisation."""
    owed_outcome: Outcome | None = None
    """The end of its last transaction, which the brokers have lost: it is to be written once more."""

    def advance(self, event: Event) -> None:
        """Go to the next state. A KeyError: the table has none."""
        self.state = TRANSITIONS[self.state][event]

    def is_in_doubt(self) -> bool:
        """Whether a request of its transaction may have been sent more than once, all that is known by now."""
        if self.producer is not None:
            let_in(self.producer)
        return self.repeats.are_possible


class TransactionalIds:
    """The ids of one writer; the first one is made first. Its methods are for one thread; `run` calls a function in
    another one. After `close` there is no way back.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Make,
        run: Callable[[Callable[[], None]], None],
        turns: Turns,
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
        self._first: TransactionalId | None = None
        """Its last transaction may have one more effect until it is initialised: nothing is begun before."""
        self._turns = turns
        self._changed = threading.Condition()
        self._closed = threading.Event()

    # -- which id goes next

    def next(self, current: TransactionalId | None, *, is_small: bool = False) -> TransactionalId | None:
        """The id for the next transaction, if one is ready; `current` is that of the last one, if it may go on."""
        self.look_after()
        with self._changed:
            found = self._chosen(self._ready(), current, is_small=is_small)
            if found is None or found is current:
                return found
            if current is not None:
                current.advance(Event.SPARED)
            return self._take(found)

    def open(self) -> TransactionalId:
        """One that is ready, else one that is unmade: it is initialised now, and the others in the background. At a
        start it is the one whose last transaction is still open, if one is.

        Raises EnvironmentFailure when that can never work, NotReady when it may work later, Broken.
        """
        self._turns.is_well = False
        left_open = self._left_open()
        one = self.next(None)
        if one is None:
            unmade = [each for each in self._able() if each.state is State.UNMADE]
            one = self._chosen([left_open] if left_open is not None else unmade, None, is_small=False)
            if one is None:
                raise NotReady(HELD_UP)
            self._initialise(self._take(one))
        self._first = None
        self.prepare()
        return one

    def prepare(self) -> None:
        """Make unmade ids ready, in the background."""
        for one in self._all:
            if one.state is State.UNMADE:
                self._start(one)

    def await_next(self, timeout_s: float) -> TransactionalId | None:
        """As `next`, as soon as one is ready; None if that takes longer, or none is on its way."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready() or all(one.state is not State.STARTING for one in self._able()), timeout_s
            )
        return self.next(None)

    def _chosen(
        self, able: Sequence[TransactionalId], current: TransactionalId | None, *, is_small: bool
    ) -> TransactionalId | None:
        name = None if current is None else current.name
        name = self._turns.next([one.name for one in able], name, is_small=is_small)
        return next((one for one in self._all if one.name == name), None)

    def _able(self) -> list[TransactionalId]:
        """The ids that may be used once they are ready."""
        first = self._first
        return self._all if first is None or first.state is State.DENIED else [first]

    def _ready(self) -> list[TransactionalId]:
        return [one for one in self._able() if one.state is State.READY and not one.faults]

    def _take(self, one: TransactionalId) -> TransactionalId:
        one.advance(Event.TAKEN)
        if one.producer is not None:
            self._first = None
        return one

    # -- what becomes of one

    def renew(self, one: TransactionalId, outcome: Outcome, *, is_awaited: bool) -> None:
        """A request of its last transaction may arrive late: it gets a new epoch before its next one (repeats.py).
        `is_awaited`: and before anything else is begun. Offsets that arrive while the end of their transaction is being
        written count as the latest, whatever another id has committed meanwhile."""
        self._on_incident(Incident.END_IN_DOUBT)
        log.warning("request-may-arrive-late", id=one.name, ended=outcome.value, all_wait=is_awaited)
        self._first = one if is_awaited else self._first
        one.outcome = outcome
        self._start(one, anew=True, renews=True)

    def ended_unasked(self, one: TransactionalId) -> None:
        """Nothing is begun until it is initialised, so that no more becomes of its transaction."""
        if self._first is not one:
            self._on_incident(Incident.ENDED_UNASKED)
        self._first = one

    def leave(self, one: TransactionalId) -> None:
        """Its transaction, which is open, is aborted in the background. The last that has committed may wait for the
        same partition: it is ready when it is known not to."""
        self._turns.comes_back(one.name)
        self._start(one, is_open=True, anew=True)
        for last in self._all:
            if last.name == self._turns.last() and last.state is State.READY:
                self._start(last, anew=True)

    def give_up(self, one: TransactionalId) -> None:
        """Its producer is lost; the id is to be made anew."""
        with self._changed:
            left, one.producer = one.producer, None
            one.advance(Event.GIVEN_UP)
        self._turns.comes_back(one.name)
        if left is not None:
            drop(left)

    def close(self) -> None:
        """Drop all of them, without waiting for anything."""
        self._closed.set()
        for one in self._all:
            self.give_up(one)

    def look_after(self) -> None:
        """Let in the news of all producers: otherwise their logs would grow. A ready one that has failed is made
        anew."""
        for one in self._all:
            if one.state in (State.READY, State.USED) and one.producer is not None:
                try:
                    one.producer.poll(0)
                except KafkaException as exception:
                    one.faults.append(kafka_error(exception))
                if one.faults and one.state is State.READY:
                    self._start(one)

    # -- making one ready

    def _left_open(self) -> TransactionalId | None:
        """At a start: the one under which a process that was killed has left a transaction open. Raises NotReady."""
        if self._repair is None or any(one.state is not State.UNMADE for one in self._all):
            return None
        try:
            name = self._repair.left_open([one.name for one in self._all])
        except KafkaException as exception:
            raise NotReady(Failure.of(kafka_error(exception))) from None
        found = next((one for one in self._all if one.name == name), None)
        if found is not None and found.owed_outcome is None:  # else a repair of its was interrupted, and is still owed
            found.owed_outcome = Outcome.ABORTED  # the coordinator need not be asked once more
        return found

    def _initialise(self, one: TransactionalId) -> None:
        """Make its producer, by one call. One that needs more goes on in the background, with the same producer."""
        held: list[Producer] = []
        error = self._attempt(one, held, lambda: False)
        one.producer = held.pop() if held else None
        if error is None:
            return
        is_lost = is_fatal(error) or is_fenced(error)
        if one.producer is None or is_lost or is_denied(error):
            self.give_up(one)
        else:
            self._start(one)
        if is_denied(error):
            raise EnvironmentFailure(
                "the brokers refuse transactions",
                hint="Grant WRITE and DESCRIBE on the transactional id; check credentials, transaction.timeout.ms.",
                reason=error.str(),
                code="DB-3006",
            )
        raise Broken(Failure.of(error)) if is_lost else NotReady(Failure.of(error))

    def _start(self, one: TransactionalId, *, is_open: bool = False, anew: bool = False, renews: bool = False) -> None:
        """Make it ready in the background; `is_open`: its producer has a transaction open, to be aborted; `anew`: by
        another producer, as the rule wants if that `renews` it."""
        with self._changed:
            left = [] if one.producer is None else [one.producer]
            one.producer = None
            one.advance(Event.START)
        self._run(partial(self._make_ready, one, left, is_open, anew, renews))

    def _make_ready(self, one: TransactionalId, held: list[Producer], is_open: bool, anew: bool, renews: bool) -> None:
        """`held`: the producer there was, if any; the caller keeps no reference to it. One that could not be
        initialised in time goes on with that by itself, and would fence a second one: it is used further.
        """
        if held and is_open:
            more = iter(range(ABORTS_MAX))
            may_repeat = lambda: next(more, None) is not None and self._may_go_on()  # noqa: E731
            _repeated(held[0], held[0].abort_transaction, self._call_s, may_repeat, one.repeats)
        if held and (anew or one.faults):
            drop(held.pop())
        while not self._closed.is_set():
            event = self._attempted(one, held)
            if event is not None:
                with self._changed:
                    if self._closed.is_set():
                        return
                    if renews and event is Event.MADE:
                        self._on_incident(Incident.ID_RENEWED)
                    one.producer = held.pop() if event is Event.MADE else None
                    one.advance(event)
                    self._changed.notify_all()
                return
            self._may_go_on()

    def _attempted(self, one: TransactionalId, held: list[Producer]) -> Event | None:
        """Try once. Returns the event; None: another attempt is made."""
        try:
            error = self._attempt(one, held, self._may_go_on)
        except Exception as failure:  # noqa: BLE001 - it is raised again for what takes the id next
            log.warning("transactional-id-not-ready", id=one.name, reason=str(failure) or repr(failure))
            return Event.FAILED
        if error is None:
            return Event.MADE
        if held:
            drop(held.pop())
        if not is_denied(error):
            return None
        log.warning("transactional-id-not-ready", id=one.name, reason=error.str())
        if self._repair is not None:
            self._repair.concluded(one.name)
        return Event.REFUSED

    def _attempt(self, one: TransactionalId, held: list[Producer], may_repeat: Callable[[], bool]) -> KafkaError | None:
        """Initialise the producer in `held`; an empty `held` gets one. Returns the reason against its use, if there is
        one. Raises EnvironmentFailure.
        """
        repair, error = self._repair, None
        try:
            if not held:
                if repair is not None and one.owed_outcome is None:
                    one.owed_outcome = repair.outcome_of(one.name, one.outcome)  # initialised, it would be forgotten
                    one.outcome = None
                one.faults, one.repeats = [], Repeats()
                held.append(self._make(one.name, one.faults, one.repeats))
            one.repeats.forget()
            error = _repeated(held[0], held[0].init_transactions, self._call_s, may_repeat, one.repeats)
            one.may_fence_itself |= error is not None or one.repeats.are_possible
            if error is None and repair is not None:
                if one.owed_outcome is not None and not self._repaired(repair, one, held[0], one.owed_outcome):
                    drop(held.pop())
                    return REPAIR_IN_DOUBT
                repair.concluded(one.name)
        except KafkaException as exception:
            error = kafka_error(exception)
            if one.owed_outcome is not None:
                log.warning("transaction-not-ended", id=one.name, code=error.name(), reason=error.str())
        return error

    def _repaired(self, repair: MarkerRepair, one: TransactionalId, producer: Producer, owed: Outcome) -> bool:
        """End its last transaction once more. False: that may arrive late, too."""
        one.repeats.forget()
        repair.write(one.name, producer, owed)
        if owed is Outcome.COMMITTED:  # what it had in the targets may still be open there
            self._turns.comes_back(one.name)
            self._turns.asked_to_commit(one.name)
        one.owed_outcome = None
        let_in(producer)
        return not one.repeats.are_possible

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
    """Let in all news of a producer. Its calls will tell of a fatal error."""
    with suppress(KafkaException):
        producer.poll(0)


def _repeated(
    producer: Producer,
    call: Callable[[float], None],
    call_s: float,
    may_repeat: Callable[[], bool],
    repeats: Repeats,
) -> KafkaError | None:
    """Make this call of the producer until it succeeds. Returns why it does not."""
    while True:
        error = None
        try:
            call(call_s)
        except KafkaException as exception:
            error = kafka_error(exception)
        let_in(producer)
        if error is None:
            return None
        # BUSY: the call that was left is still under way in it.
        if is_fatal(error) or not (error.retriable() or fault_of(error) is Fault.BUSY) or not may_repeat():
            return error
        repeats.note()
