"""The bridge, its clients and the network between them and the brokers: the steps that are possible in a state.

The bridge delivers message after message under two transactional ids that take turns. It knows how far it has come
(`done`), and goes on from the committed position after a restart. A request and its answer are one step, since what
happens in between could have happened before. Each failure is a step of its own:

    delayed      the connection breaks; the client repeats the request, the first copy arrives later, or never
    answer lost  the same, but the first copy has arrived
    lost         the same, but the first copy never arrives
    doubled      the request arrives twice in a row, which the client does not notice
    given up     the bridge does not wait for an answer any more: the messages go back, or a commit is looked up
    to abort     the bridge aborts the transaction for a reason of its own
    crash        the bridge has forgotten everything; then it starts again
    zombie       the same, but the process of before goes on
    time-out     the coordinator aborts a transaction

The client, librdkafka, repeats silently. That it may have done so shows in the connection that broke.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tests.model.protocol.brokers import (
    ABORT,
    ADD_OFFSETS,
    ADD_PARTITION,
    BUSY,
    COMMIT,
    COMPLETED,
    INIT,
    INVALID,
    NONE,
    OFFSETS,
    OK,
    ONGOING,
    PRODUCE,
    Brokers,
    Request,
    brokers,
    mark_offsets,
    mark_target,
    put,
    receive,
    time_out,
)

IDS: Final = (0, 1)
NAMES: Final = ("A", "B")

RECORDS_FIRST: Final = (ADD_PARTITION, PRODUCE, ADD_OFFSETS, OFFSETS)
OFFSETS_FIRST: Final = (ADD_OFFSETS, OFFSETS, ADD_PARTITION, PRODUCE)
OFFSETS_TWICE: Final = (ADD_PARTITION, PRODUCE, ADD_OFFSETS, OFFSETS, PRODUCE, OFFSETS)
ALL: Final = frozenset({INIT, *RECORDS_FIRST, COMMIT, ABORT})

BEFORE_END: Final = "before its end"
AT_END: Final = "its end"

UNASKED: Final = "a transaction has ended without being asked to"
NEITHER: Final = "the committed position is neither the one before the last transaction nor the one after it"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The bounds of a search, and the rules that the bridge keeps in it."""

    requests: tuple[str, ...] = RECORDS_FIRST
    """Of a transaction, in their order; its end follows. Each Produce is of one message."""
    messages: int = 4
    delays: frozenset[str] = ALL
    """The requests that may be delayed."""
    renews: bool = True
    """An id whose requests may have been repeated gets a new epoch before its next transaction."""
    waits: bool = True
    """After its commit, answered or not, no other id goes on before that, if requests before the end are in doubt."""
    is_one_set: bool = True
    """A second set of offsets does not join a transaction in doubt, which is aborted."""
    verifies: bool = True
    """Brokers have part 1 of KIP-890."""


class Budget(NamedTuple):
    """How often each of these may still happen."""

    delayed: int = 0
    doubled: int = 0
    """Doubled, or the answer lost."""
    lost: int = 0
    given_up: int = 0
    aborted: int = 0
    crashes: int = 0
    zombies: int = 0
    timed_out: int = 0


class Client(NamedTuple):
    """The bridge's side of one transactional id."""

    epoch: int = NONE
    """NONE until it is initialised."""
    sequence: int = 0
    doubt: str = ""
    """The requests of its transaction that the client may have repeated: BEFORE_END, AT_END."""


class Bridge(NamedTuple):
    """The memory of the bridge, which a crash takes."""

    is_up: bool = False
    is_based: bool = False
    """It has read the committed position since it was started."""
    done: int = 0
    last: int = 1
    """The id of the last transaction."""
    is_well: bool = False
    """The last transaction was committed."""
    used: int = NONE
    """The id of the open transaction."""
    step: int = 0
    """How many of its requests are answered."""
    sent: int = 0
    """How many messages it has."""
    is_asked: bool = False
    """Its commit was asked for: it is not aborted any more."""
    is_aborting: bool = False
    is_resolving: bool = False
    """The last commit got no answer."""
    awaited: int = NONE
    """The id that goes next, with a new epoch."""
    clients: tuple[Client, ...] = (Client(),) * len(IDS)


class State(NamedTuple):
    brokers: Brokers
    bridge: Bridge
    late: tuple[Request, ...]
    """Copies of requests that are still on their way; nobody waits for an answer."""
    budget: Budget
    zombie: Bridge | None = None
    """A process that was taken for dead, and goes on."""


class Step(NamedTuple):
    who: str
    what: str
    state: State
    is_usual: bool = True
    """Nothing goes wrong in it."""
    finding: str = ""
    """A broken promise that this step shows."""


def first_state(rules: Rules, budget: Budget) -> State:
    """All is new: nothing was delivered, the bridge is down."""
    return State(brokers(len(IDS), rules.messages, verifies=rules.verifies), Bridge(), (), budget)


def steps(state: State, rules: Rules) -> Iterator[Step]:
    """All steps that are possible."""
    markers = list(_markers(state))
    for step, is_alone in markers:
        if is_alone:
            yield step
            return
    for step, _ in markers:
        yield step
    if state.bridge.is_up:
        yield from _work(state, rules)
        yield from _initialisations(state, rules)
        yield from _crashes(state)
    else:
        yield _start(state)
    if state.zombie is not None:
        yield from _zombie(state, rules)
    for index, request in enumerate(state.late):
        after, answer = receive(state.brokers, request)
        if after != state.brokers:
            late = state.late[:index] + state.late[index + 1 :]
            what = f"{_told(request)} of before arrives: {answer}"
            yield Step(NAMES[request.id], what, state._replace(brokers=after, late=late), is_usual=False)
    if state.budget.timed_out:
        for id_ in IDS:
            if state.brokers.known[id_].coordinator.state == ONGOING:
                after = time_out(state.brokers, id_)
                yield _gone_wrong(state, "timed_out", NAMES[id_], "transaction times out", brokers=after)


def _markers(state: State) -> Iterator[tuple[Step, bool]]:
    """Those to be written, and whether nothing else need be looked at before: a marker changes places with anything but
    a late request to the same partition, and an abort of what the coordinator is too busy to take."""
    for id_ in IDS:
        found = state.brokers.known[id_].coordinator
        if found.state in COMPLETED:
            for is_left, mark, kind in (
                (found.has_target, mark_target, PRODUCE),
                (found.has_offsets, mark_offsets, OFFSETS),
            ):
                if is_left:
                    is_met = any((late.kind, late.id) == (kind, id_) for late in state.late)
                    is_alone = not is_met and not state.budget.aborted
                    after = state._replace(brokers=mark(state.brokers, id_))
                    yield Step(NAMES[id_], f"marker after {kind}", after), is_alone


def _start(state: State) -> Step:
    """The process is a member of the group again, and the former one is not."""
    late = tuple(request for request in state.late if request.kind != OFFSETS)
    return Step("bridge", "starts", state._replace(bridge=Bridge(is_up=True), late=late))


def _crashes(state: State) -> Iterator[Step]:
    if state.budget.crashes:
        yield _gone_wrong(state, "crashes", "bridge", "crashes", bridge=Bridge())
    if state.budget.zombies and state.bridge.used != NONE:
        yield _gone_wrong(state, "zombies", "bridge", "is taken for dead", bridge=Bridge(), zombie=state.bridge)


def _initialisations(state: State, rules: Rules) -> Iterator[Step]:
    """Each id that has no epoch gets one, in the background."""
    for id_ in IDS:
        if state.bridge.clients[id_].epoch != NONE:
            continue
        request = Request(INIT, id_, NONE)
        after, answer = receive(state.brokers, request)
        if after == state.brokers:
            continue
        bridge, who, what = state.bridge, NAMES[id_], f"{INIT}: {answer}"
        if answer == OK:
            client = Client(after.known[id_].coordinator.epoch)
            bridge = bridge._replace(clients=put(bridge.clients, id_, client))
        yield Step(who, what, state._replace(brokers=after, bridge=bridge))
        if state.budget.delayed and INIT in rules.delays:
            yield _gone_wrong(state, "delayed", who, f"{INIT} is delayed", late=_with(state.late, request))
        if state.budget.doubled and answer == OK:
            yield _gone_wrong(state, "doubled", who, f"{what}, and the answer is lost", brokers=after)
            twice, _ = receive(after, request)
            yield _gone_wrong(state, "doubled", who, f"{what}, doubled", brokers=twice, bridge=bridge)


def _work(state: State, rules: Rules) -> Iterator[Step]:
    """The next request of the bridge, and its failures."""
    bridge, now = state.bridge, state.brokers
    if not bridge.is_based or bridge.is_resolving:
        if now.is_stable:
            yield _looked_up(state, rules)
        return
    for begun in _begun(bridge, rules):
        kind = _next(begun, rules)
        request = _request(begun, kind)
        after, answer = receive(now, request)
        if after != now or answer != BUSY:
            done = state._replace(brokers=after, bridge=_answered(begun, rules, kind, answer))
            # The client also asks to abort what the coordinator has not taken yet: it was busy with the one before.
            finding = UNASKED if answer == INVALID and begun.step else ""
            yield Step(NAMES[begun.used], f"{_told(request)}: {answer}", done, finding=finding)
        yield from _failures(state._replace(bridge=begun), rules, request, after, answer)


def _failures(state: State, rules: Rules, request: Request, after: Brokers, answer: str) -> Iterator[Step]:
    """The failures of a request that usually leads to `after`."""
    budget, bridge, who, told = state.budget, state.bridge, NAMES[request.id], _told(request)
    client, is_commit = bridge.clients[request.id], request.kind == COMMIT
    doubt = client.doubt or (AT_END if is_commit else BEFORE_END)
    doubtful = bridge._replace(
        clients=put(bridge.clients, request.id, client._replace(doubt=doubt)), is_asked=is_commit
    )
    if budget.delayed and request.kind in rules.delays:
        late = _with(state.late, request)
        yield _gone_wrong(state, "delayed", who, f"{told} is delayed", late=late, bridge=doubtful)
    if budget.doubled and after != state.brokers:
        what = f"{told}: {answer}, and the answer is lost"
        yield _gone_wrong(state, "doubled", who, what, brokers=after, bridge=doubtful)
        twice, _ = receive(after, request)
        if twice != after:
            answered = _answered(bridge, rules, request.kind, answer)
            yield _gone_wrong(state, "doubled", who, f"{told}: {answer}, doubled", brokers=twice, bridge=answered)
    if budget.lost and not client.doubt:
        yield _gone_wrong(state, "lost", who, f"{told} is lost", bridge=doubtful)
    if budget.given_up and bridge.step:
        left = _left(bridge, rules, is_resolving=is_commit)
        yield _gone_wrong(state, "given_up", who, f"{told} is given up", bridge=left)
        if after != state.brokers:
            what = f"{told}: {answer}, and is given up"
            yield _gone_wrong(state, "given_up", who, what, brokers=after, bridge=left)
    if budget.aborted and (bridge.step or answer == BUSY) and not (bridge.is_aborting or bridge.is_asked):
        yield _gone_wrong(state, "aborted", "bridge", "is to abort", bridge=bridge._replace(is_aborting=True))


def _zombie(state: State, rules: Rules) -> Iterator[Step]:
    """One request of a process whose successor may be at work already; after an error it is gone."""
    zombie = state.zombie
    if zombie is None or zombie.used == NONE:
        return
    kind = _next(zombie, rules)
    request = _request(zombie, kind)._replace(is_former=state.bridge.is_up)
    after, answer = receive(state.brokers, request)
    if answer != BUSY:
        left = _answered(zombie, rules, kind, answer)
        goes_on = left if answer == OK and left.used != NONE else None
        what = f"zombie: {_told(request)}: {answer}"
        yield Step(NAMES[request.id], what, state._replace(brokers=after, zombie=goes_on), is_usual=False)


def _looked_up(state: State, rules: Rules) -> Step:
    """The committed position, at a start and after a commit without an answer."""
    bridge, found = state.bridge, state.brokers.committed
    finding = ""
    if bridge.is_based and found not in (bridge.done, bridge.done + _size(rules)):
        finding = NEITHER
    based = bridge._replace(is_based=True, is_resolving=False, done=found)
    return Step("bridge", f"reads the committed position: {found}", state._replace(bridge=based), finding=finding)


def _begun(bridge: Bridge, rules: Rules) -> list[Bridge]:
    """With a transaction: the one that is open, or else the next, under whichever id it may be."""
    if bridge.used != NONE:
        return [bridge]
    if bridge.done >= rules.messages:
        return []
    able = [id_ for id_ in IDS if bridge.clients[id_].epoch != NONE and bridge.awaited in (NONE, id_)]
    if bridge.is_well and len(able) > 1:
        able.remove(bridge.last)
    return [bridge._replace(used=id_) for id_ in able]


def _next(bridge: Bridge, rules: Rules) -> str:
    """The kind of the next request of the open transaction."""
    if bridge.is_aborting:
        return ABORT
    if bridge.step == len(rules.requests):
        return COMMIT
    kind = rules.requests[bridge.step]
    is_second = kind == OFFSETS and OFFSETS in rules.requests[: bridge.step]
    return ABORT if is_second and rules.is_one_set and bridge.clients[bridge.used].doubt else kind


def _request(bridge: Bridge, kind: str) -> Request:
    client = bridge.clients[bridge.used]
    if kind == PRODUCE:
        return Request(kind, bridge.used, client.epoch, bridge.done + bridge.sent, client.sequence)
    if kind == OFFSETS:
        return Request(kind, bridge.used, client.epoch, bridge.done + max(1, bridge.sent))
    return Request(kind, bridge.used, client.epoch)


def _answered(bridge: Bridge, rules: Rules, kind: str, answer: str) -> Bridge:
    """The bridge after an answer to a request of the open transaction."""
    if answer == BUSY:
        return bridge
    if answer != OK:
        return _left(bridge, rules, is_resolving=kind == COMMIT)
    client = bridge.clients[bridge.used]
    if kind in (COMMIT, ABORT):
        is_renewed = rules.renews and client.doubt != ""
        ended = _ended(bridge, Client() if is_renewed else client._replace(doubt=""))
        if kind == ABORT:
            return ended
        awaited = _awaited(bridge, rules)
        return ended._replace(done=bridge.done + _size(rules), is_well=True, awaited=awaited)
    if kind == PRODUCE:
        counted = put(bridge.clients, bridge.used, client._replace(sequence=client.sequence + 1))
        return bridge._replace(step=bridge.step + 1, sent=bridge.sent + 1, clients=counted)
    return bridge._replace(step=bridge.step + 1)


def _left(bridge: Bridge, rules: Rules, *, is_resolving: bool) -> Bridge:
    """The producer is given up. Its messages go back, or wait for a look at the committed position."""
    awaited = _awaited(bridge, rules) if is_resolving else NONE
    return _ended(bridge, Client())._replace(is_resolving=is_resolving, awaited=awaited)


def _awaited(bridge: Bridge, rules: Rules) -> int:
    """The id that goes next after a commit."""
    is_late = bridge.clients[bridge.used].doubt == BEFORE_END
    return bridge.used if is_late and rules.renews and rules.waits else NONE


def _ended(bridge: Bridge, client: Client) -> Bridge:
    clients = put(bridge.clients, bridge.used, client)
    return Bridge(is_up=True, is_based=True, done=bridge.done, last=bridge.used, clients=clients)


def _size(rules: Rules) -> int:
    """How many messages a transaction has."""
    return rules.requests.count(PRODUCE)


def _gone_wrong(state: State, budget: str, who: str, what: str, **changed: Any) -> Step:
    """A step that is one of those in the budget."""
    left = state.budget._replace(**{budget: getattr(state.budget, budget) - 1})
    return Step(who, what, state._replace(budget=left, **changed), is_usual=False)


def _with(late: tuple[Request, ...], request: Request) -> tuple[Request, ...]:
    return tuple(sorted((*late, request)))


def _told(request: Request) -> str:
    return request.kind if request.value == NONE else f"{request.kind}({request.value})"
