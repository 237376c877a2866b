"""The brokers' side of Kafka's transactions: two coordinators and one target partition.

The protocol is that of transactions V1, which librdkafka speaks: the end of a transaction leaves the epoch as it is.

    KIP-98   transactions: the states of a transactional id, the markers, the fence of an older epoch
    KIP-360  the epoch grows with each InitProducerId; one that finds a transaction open aborts it under a new epoch
    KIP-447  offsets carry the group's member, so that those of a former member are refused; a look-up may ask for
             stable offsets, and waits for those that are pending
    KIP-890  part 1: a partition asks the transaction coordinator before it takes the first record of a transaction
             (`verifies`); part 2, an epoch for each transaction, needs another client

States of a transactional id, and the answer of its coordinator to a request of the right epoch; BUSY and INVALID leave
the state as it is:

    state             add                       commit           abort            init
    Empty             Ongoing                   INVALID          INVALID          Empty
    Ongoing           Ongoing                   PrepareCommit    PrepareAbort     PrepareAbort
    PrepareCommit     BUSY                      BUSY             INVALID          BUSY
    PrepareAbort      BUSY                      INVALID          BUSY             BUSY
    CompleteCommit    Ongoing                   CompleteCommit   INVALID          Empty
    CompleteAbort     Ongoing                   INVALID          CompleteAbort    Empty

`add` is AddPartitionsToTxn and AddOffsetsToTxn. `init` is InitProducerId, under a new epoch where the state changes.
Prepare becomes Complete when each partition of the transaction has its marker.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

EMPTY: Final = "Empty"
ONGOING: Final = "Ongoing"
PREPARE_COMMIT: Final = "PrepareCommit"
PREPARE_ABORT: Final = "PrepareAbort"
COMPLETE_COMMIT: Final = "CompleteCommit"
COMPLETE_ABORT: Final = "CompleteAbort"
COMPLETED: Final = {PREPARE_COMMIT: COMPLETE_COMMIT, PREPARE_ABORT: COMPLETE_ABORT}
"""The prepared states, and the one after each."""

INIT: Final = "InitProducerId"
ADD_PARTITION: Final = "AddPartitionsToTxn"
ADD_OFFSETS: Final = "AddOffsetsToTxn"
OFFSETS: Final = "TxnOffsetCommit"
PRODUCE: Final = "Produce"
COMMIT: Final = "EndTxn(commit)"
ABORT: Final = "EndTxn(abort)"

OK: Final = "OK"
BUSY: Final = "CONCURRENT_TRANSACTIONS"
FENCED: Final = "PRODUCER_FENCED"
INVALID: Final = "INVALID_TXN_STATE"
NO_MEMBER: Final = "FENCED_INSTANCE_ID"
OUT_OF_ORDER: Final = "OUT_OF_ORDER_SEQUENCE_NUMBER"

ENDS: Final = {
    COMMIT: {
        ONGOING: (PREPARE_COMMIT, OK),
        PREPARE_COMMIT: (PREPARE_COMMIT, BUSY),
        COMPLETE_COMMIT: (COMPLETE_COMMIT, OK),
    },
    ABORT: {
        ONGOING: (PREPARE_ABORT, OK),
        PREPARE_ABORT: (PREPARE_ABORT, BUSY),
        COMPLETE_ABORT: (COMPLETE_ABORT, OK),
    },
}
"""The state after an end, and its answer; INVALID in the other states."""

NONE: Final = -1


class Request(NamedTuple):
    """One request as it is on the wire. `value` is the message of a Produce, or the position of a TxnOffsetCommit."""

    kind: str
    id: int
    epoch: int
    value: int = NONE
    sequence: int = NONE
    is_former: bool = False
    """It names a member that the group has fenced."""


class Coordinator(NamedTuple):
    """One transactional id, as the transaction coordinator knows it."""

    state: str = EMPTY
    epoch: int = 0
    has_target: bool = False
    """The target partition is in the transaction, and has no marker of its end yet."""
    has_offsets: bool = False
    """The same of the group's partition of __consumer_offsets."""


class Log(NamedTuple):
    """One producer, as the target partition knows it."""

    epoch: int = 0
    sequence: int = 0
    """The one that it expects."""
    open: tuple[int, ...] = ()
    """Messages of the transaction that has no marker yet: they hold back the last stable offset."""


class Pending(NamedTuple):
    """One producer, as the group coordinator knows it."""

    epoch: int = 0
    position: int = NONE
    order: int = 0
    """Its place in the log of offsets, among those that are pending and the committed one."""


class Known(NamedTuple):
    """The state of one transactional id: at its coordinator, in the target partition, at the group's coordinator."""

    coordinator: Coordinator = Coordinator()
    log: Log = Log()
    pending: Pending = Pending()

    @property
    def is_quiet(self) -> bool:
        """Whether all that it has sent is committed or aborted, markers included."""
        return self.pending.position == NONE and not self.log.open and self.coordinator.state not in COMPLETED


class Brokers(NamedTuple):
    """All that is on the brokers."""

    known: tuple[Known, ...]
    """By the number of the transactional id."""
    visible: tuple[int, ...]
    """How often a reader of committed records sees each message."""
    committed: int = 0
    order: int = 0
    """As in Pending."""
    verifies: bool = True

    @property
    def is_stable(self) -> bool:
        """Whether a look-up of stable offsets is answered."""
        return all(known.pending.position == NONE for known in self.known)

    @property
    def is_quiet(self) -> bool:
        """Whether all that was sent is committed or aborted."""
        return all(known.is_quiet for known in self.known)


def brokers(ids: int, messages: int, *, verifies: bool) -> Brokers:
    """Brokers that have not heard of these ids, and a target without these messages."""
    return Brokers((Known(),) * ids, (0,) * messages, verifies=verifies)


def receive(before: Brokers, request: Request) -> tuple[Brokers, str]:
    """The brokers after a request, and its answer."""
    order = 1 + max(before.order, *(one.pending.order for one in before.known)) if request.kind == OFFSETS else 0
    known, answer = _received(before.known[request.id], request, order, before.verifies)
    return _with(before, request.id, known), answer


@cache
def _received(known: Known, request: Request, order: int, verifies: bool) -> tuple[Known, str]:
    """`order` is that of offsets, if the request has some."""
    if request.kind == PRODUCE:
        log, answer = _produced(known, request, verifies=verifies)
        return known._replace(log=log), answer
    if request.kind == OFFSETS:
        pending, answer = _pending(known, request, order, verifies=verifies)
        return known._replace(pending=pending), answer
    coordinator, answer = coordinated(known.coordinator, request)
    return known._replace(coordinator=coordinator), answer


def coordinated(found: Coordinator, request: Request) -> tuple[Coordinator, str]:
    """The table of the module."""
    if request.kind == INIT:
        if found.state in COMPLETED:
            return found, BUSY
        return (_fenced(found), BUSY) if found.state == ONGOING else (Coordinator(EMPTY, found.epoch + 1), OK)
    if request.epoch != found.epoch:
        return found, FENCED
    if request.kind in ENDS:
        state, answer = ENDS[request.kind].get(found.state, (found.state, INVALID))
        return found._replace(state=state), answer
    if found.state in COMPLETED:
        return found, BUSY
    if found.state != ONGOING:
        found = Coordinator(ONGOING, found.epoch)
    has = found._replace(has_target=True) if request.kind == ADD_PARTITION else found._replace(has_offsets=True)
    return has, OK


def time_out(before: Brokers, id_: int) -> Brokers:
    """The transaction has been open for too long: the coordinator aborts it under a new epoch, which fences."""
    known = before.known[id_]
    return _with(before, id_, known._replace(coordinator=_fenced(known.coordinator)))


def mark_target(before: Brokers, id_: int) -> Brokers:
    """The target partition gets its marker: open messages become visible, or never will."""
    found, log, pending = before.known[id_]
    if found.state == PREPARE_COMMIT and log.open:
        visible = tuple(seen + log.open.count(message) for message, seen in enumerate(before.visible))
        before = before._replace(visible=visible)
    marked = Log(found.epoch, log.sequence if found.epoch == log.epoch else 0)
    return _with(before, id_, Known(_completed(found._replace(has_target=False)), marked, pending))


def mark_offsets(before: Brokers, id_: int) -> Brokers:
    """The group's partition gets its marker. The offsets that were written last count, whichever marker comes
    first."""
    found, log, pending = before.known[id_]
    if found.state == PREPARE_COMMIT and pending.position != NONE and pending.order > before.order:
        before = before._replace(committed=pending.position, order=pending.order)
    marked = Known(_completed(found._replace(has_offsets=False)), log, Pending(found.epoch))
    return _with(before, id_, marked)


def is_spent(known: Known, request: Request, *, verifies: bool) -> bool:
    """Whether a late copy of this request can never have an effect again."""
    found, log, pending = known
    if request.kind == INIT:
        return False
    is_older = request.epoch < found.epoch
    if request.kind == PRODUCE:
        if (request.epoch, request.sequence) < (log.epoch, log.sequence):
            return True
        return is_older and verifies and not (log.open and log.epoch == request.epoch)
    if request.kind == OFFSETS:
        if request.is_former or request.epoch < pending.epoch:
            return True
        return is_older and verifies and not (pending.position != NONE and pending.epoch == request.epoch)
    return is_older


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """The same with another value at that index."""
    return (*values[:index], value, *values[index + 1 :])


def _with(before: Brokers, id_: int, known: Known) -> Brokers:
    return before if known == before.known[id_] else before._replace(known=put(before.known, id_, known))


def _fenced(found: Coordinator) -> Coordinator:
    return found._replace(state=PREPARE_ABORT, epoch=found.epoch + 1)


def _completed(found: Coordinator) -> Coordinator:
    is_left = found.has_target or found.has_offsets
    return found if is_left else found._replace(state=COMPLETED[found.state])


def _refusal(found: Coordinator, request: Request, *, is_added: bool) -> str | None:
    """The coordinator's no to a partition that asks about the first record of a transaction (KIP-890)."""
    if request.epoch != found.epoch:
        return FENCED
    if found.state in COMPLETED:
        return BUSY
    return None if found.state == ONGOING and is_added else INVALID


def _produced(known: Known, request: Request, *, verifies: bool) -> tuple[Log, str]:
    found, log, _ = known
    if request.epoch < log.epoch:
        return log, FENCED
    if verifies and not (log.open and log.epoch == request.epoch):
        refusal = _refusal(found, request, is_added=found.has_target)
        if refusal is not None:
            return log, refusal
    expected = log.sequence if request.epoch == log.epoch else 0
    if request.sequence != expected:
        return log, OK if request.sequence < expected else OUT_OF_ORDER
    return Log(request.epoch, expected + 1, (*log.open, request.value)), OK


def _pending(known: Known, request: Request, order: int, *, verifies: bool) -> tuple[Pending, str]:
    found, _, pending = known
    if request.is_former:
        return pending, NO_MEMBER
    if request.epoch < pending.epoch:
        return pending, FENCED
    if verifies and not (pending.position != NONE and pending.epoch == request.epoch):
        refusal = _refusal(found, request, is_added=found.has_offsets)
        if refusal is not None:
            return pending, refusal
    return Pending(request.epoch, request.value, order), OK
