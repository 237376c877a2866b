"""The owned partitions, delivered or catching up, with their committed states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import structlog

from bridge.delivery.commands_first import CommandsFirst
from bridge.delivery.doubt.log_notes import LogNotes, States
from bridge.delivery.open_transaction import Stale, bug
from bridge.kafka.membership import Membership
from bridge.stores.names import Offsets, SourceName
from bridge.stores.stores import DELIVERS, Stores
from bridge.wire.committed_state import CommittedState, Said, are_same_progress

log = structlog.get_logger("bridge.delivery.partitions")


class Partitions:
    """See the module. For the dispatcher's thread, or any while that is at rest; `expect`, `advance` under its lock."""

    def __init__(self, membership: Callable[[], Membership], commands_first: CommandsFirst) -> None:
        self._membership = membership
        self._commands_first = commands_first
        self.states: dict[SourceName, CommittedState] = {}
        self.coming: dict[SourceName, CommittedState] = {}
        """Partitions that catch up; until they have, no transaction commits for them."""
        self.notes = LogNotes()
        self.revocations = 0

    def begin(self, states: States, *, is_known: bool) -> None:
        """Begin with another store, opened on `states`. `is_known`: only this instance has committed for these
        partitions. Raises InternalError for states from before the last commit, unless the log was cut."""
        old = {n: state for n, state in self.states.items() if n in states and state.cuts == states[n].cuts}
        if is_known and not are_same_progress(old, states):
            raise bug("the store lies behind the last commit", code="DB-7002")
        self.states, self.coming = {}, {}
        self._commands_first.begin()

    def expect(self, states: States, log_ends: Offsets) -> None:
        """Add coming partitions: they catch up, and then their messages wait for commands below these ends."""
        self.coming = {**self.coming, **states}
        self._commands_first.expect(log_ends)

    def advance(self, store: Stores) -> dict[SourceName, CommittedState]:
        """Let partitions that have caught up with their committed O deliver their commands, and partitions without
        unread commands their messages. Returns the states of the partitions that have caught up."""
        arrived = {name: self.coming.pop(name) for name in store.arrive()} if self.coming else {}
        self.states |= arrived
        store.read_again()
        waiting = self._commands_first.waiting
        live = self._commands_first.ready(store)
        store.go_live(live)
        if joined := sorted(waiting.intersection(live)):
            names = ", ".join(f"{topic}/{number}" for topic, number in joined)
            log.info("partitions-joined", partitions=names, owned=len(store.in_life(*DELIVERS)))
        return arrived

    def forget(self, gone: Collection[SourceName]) -> None:
        """Forget partitions of other instances."""
        for states in (self.states, self.coming):
            for name in gone:
                states.pop(name, None)
        self._commands_first.forget(gone)

    def have_room_for(self, said: Said) -> bool:
        """Whether each state has room for the pauses of targets in `said`."""
        return all(each.has_room_for(said) for each in list(self.states.values()))

    def all(self) -> list[CommittedState]:
        """All states, including those of coming partitions."""
        return [*self.states.values(), *self.coming.values()]

    def member_for(self, written: Mapping[SourceName, CommittedState]) -> Membership:
        """The membership for a commit. Raises Stale if the member may not commit for these partitions."""
        member = self._membership()
        if member.revocations > self.revocations or not member.partitions >= written.keys():
            raise Stale
        return member
