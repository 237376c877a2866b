"""The search through all states that can be reached, breadth first, and the promises that hold in them.

States without an observable difference are one state (`reduced`): epochs count by their order, a
sequence number by its distance to the one that is expected, and a late request that can have no effect is forgotten.
A marker that nothing late can meet is written at once.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeVar

from tests.model.protocol.bridge import IDS, Budget, Client, Rules, State, Step, first_state, steps
from tests.model.protocol.brokers import (
    COMPLETED,
    EMPTY,
    NONE,
    PRODUCE,
    Brokers,
    Coordinator,
    Known,
    Log,
    Pending,
    Request,
    is_spent,
)

DOUBLED: Final = "a message is seen twice"
LOST: Final = "the committed position passes a message that nobody sees"
BACK: Final = "the committed position has gone back"
STUCK: Final = "delivery does not come to its end"

Ranked = TypeVar("Ranked", Coordinator, Log, Pending, Client, Request)


@dataclass(frozen=True)
class Found:
    """A search's result."""

    states: int
    traces: dict[str, list[str]] = field(default_factory=dict)
    """The shortest way to each broken promise."""


def search(
    rules: Rules,
    budget: Budget,
    *,
    passes: frozenset[str] = frozenset(),
    until: str = "",
    states_max: int = 3_000_000,
) -> Found:
    """Every state that can be reached, or all `until` that is found. The search does not go on from a state that breaks
    a promise, unless that `passes`.
    """
    gc.disable()  # nothing here is a circle, and looking for some would take a third of the time
    try:
        return _searched(rules, budget, passes, until, states_max)
    finally:
        gc.enable()


def _searched(rules: Rules, budget: Budget, passes: frozenset[str], until: str, states_max: int) -> Found:
    first = reduced(first_state(rules, budget))
    seen = {first: 0}
    queue = [first]
    came: list[tuple[int, str, str]] = [(NONE, "", "")]
    usual: list[int] = []  # where each state goes if nothing more goes wrong
    traces: dict[str, list[str]] = {}
    for at, state in enumerate(queue):
        goes = NONE
        for step in steps(state, rules):
            after = reduced(step.state)
            finding = step.finding or judged(after)
            if finding and finding not in traces:
                traces[finding] = _trace(came, at, step)
                if finding == until:
                    return Found(len(queue), traces)
            if finding and finding not in passes:
                goes = at if goes == NONE else goes  # it is told already
                continue
            index = seen.setdefault(after, len(queue))
            if index == len(queue):
                queue.append(after)
                came.append((at, step.who, step.what))
            if step.is_usual and goes == NONE and index != at:
                goes = index
        usual.append(goes)
        if len(queue) > states_max:
            raise AssertionError(f"more than {states_max} states")
    stuck = _stuck(queue, usual, rules)
    if stuck is not None:
        traces[STUCK] = _trace(came, stuck, None)
    return Found(len(queue), traces)


def judged(state: State) -> str:
    """The promise that is broken, if one is. Once all is committed or aborted, a reader sees all messages up to the
    committed position."""
    now = state.brokers
    if max(now.visible) > 1:
        return DOUBLED
    if now.is_quiet:
        seen = sum(now.visible)
        if seen < now.committed or 0 in now.visible[:seen]:
            return LOST
        if seen > now.committed:
            return BACK
    return ""


def is_done(state: State, rules: Rules) -> bool:
    """Everything is delivered, and the bridge knows."""
    now, bridge = state.brokers, state.bridge
    return bridge.is_up and bridge.done == now.committed == rules.messages and now.is_quiet


def reduced(state: State) -> State:
    """The one state for all without an observable difference to this one."""
    now, bridge, late, budget, zombie = state
    ones = [_of_one(*_parts(state, id_)) for id_ in IDS]
    known = tuple(one[0] for one in ones)
    if known != now.known:
        now = now._replace(known=known)
    clients = tuple(one[1] for one in ones)
    if clients != bridge.clients:
        bridge = bridge._replace(clients=clients)
    if zombie is not None:
        zombie = zombie._replace(clients=tuple(one[2] or Client() for one in ones))
    return State(_ordered(now), bridge, ones[0][3] + ones[1][3] if late else (), budget, zombie)


def _parts(state: State, id_: int) -> tuple[Known, Client, Client | None, tuple[Request, ...], bool, bool]:
    now, bridge, late, _, zombie = state
    copies = tuple(request for request in late if request.id == id_) if late else ()
    other = None if zombie is None else zombie.clients[id_]
    is_used = bridge.used == id_ or (zombie is not None and zombie.used == id_)
    return now.known[id_], bridge.clients[id_], other, copies, is_used, now.verifies


@cache
def _of_one(
    known: Known, client: Client, other: Client | None, copies: tuple[Request, ...], is_used: bool, verifies: bool
) -> tuple[Known, Client, Client | None, tuple[Request, ...]]:
    """The same for one id; `other` is a zombie's client."""
    copies = tuple(request for request in copies if not is_spent(known, request, verifies=verifies))
    found, log, pending = known
    held = {client.epoch, *(request.epoch for request in copies)} | ({other.epoch} if other else set())
    held.discard(NONE)
    if not is_used and not copies and found.state in COMPLETED.values():
        found = found._replace(state=EMPTY)
    if all(epoch >= found.epoch for epoch in held):
        log = log if log.open or log.epoch == found.epoch else Log(found.epoch)
        pending = pending if pending.position != NONE else Pending(found.epoch)
    if other is None and all(request.kind != PRODUCE for request in copies):
        if client.epoch == log.epoch:
            least = min(client.sequence, log.sequence)
            client = client._replace(sequence=client.sequence - least)
            log = log._replace(sequence=log.sequence - least)
        elif log.epoch not in held:
            log = log._replace(sequence=0)
    ranks = {epoch: rank for rank, epoch in enumerate(sorted({found.epoch, log.epoch, pending.epoch, *held}))}
    ranks[NONE] = NONE
    return (
        Known(_ranked(found, ranks), _ranked(log, ranks), _ranked(pending, ranks)),
        _ranked(client, ranks),
        other and _ranked(other, ranks),
        tuple(sorted(_ranked(request, ranks) for request in copies)),
    )


def _ranked(value: Ranked, ranks: dict[int, int]) -> Ranked:
    return value._replace(epoch=ranks[value.epoch])


def _ordered(now: Brokers) -> Brokers:
    """Places in the log of offsets count by their order."""
    pending = [one.pending for one in now.known]
    if not now.order and all(one.position == NONE for one in pending):
        return now
    orders = sorted({now.order, *(one.order for one in pending if one.position != NONE)})
    if orders == list(range(len(orders))):
        return now
    ranks = {order: rank for rank, order in enumerate(orders)}
    known = [
        one
        if one.pending.position == NONE
        else one._replace(pending=one.pending._replace(order=ranks[one.pending.order]))
        for one in now.known
    ]
    return now._replace(known=tuple(known), order=ranks[now.order])


def _stuck(queue: list[State], usual: list[int], rules: Rules) -> int | None:
    """The first state from which delivery does not come to its end although nothing more goes wrong."""
    ends = [NONE] * len(queue)  # 1: it does, 0: it does not
    for start in range(len(queue)):
        way, at = [], start
        while ends[at] == NONE:
            ends[at] = 0  # until it is known: met again, it is a circle
            way.append(at)
            if usual[at] in (NONE, at):
                ends[at] = int(usual[at] == at or is_done(queue[at], rules))
                break
            at = usual[at]
        for passed in way:
            ends[passed] = ends[at]
        if not ends[start]:
            return start
    return None


def _trace(came: list[tuple[int, str, str]], at: int, last: Step | None) -> list[str]:
    lines = [] if last is None else [f"{last.who}: {last.what}"]
    while at > 0:
        at, who, what = came[at]
        lines.append(f"{who}: {what}")
    return lines[::-1]
