"""Commands first: no message of a partition is delivered while a command that may cover it is still unread.

A cancel may have been written in time, above the committed O, while no bridge read the partition; without a key even in
another partition. So messages of a partition that has caught up with its committed O wait (`Life.COMMANDS_FIRST`) until
all partitions that are not live yet are read up to their ends as of their arrival, and every command up to there has
taken effect:

    COMMANDS_FIRST --read up to the ends, no command waits--> commands were written on? --no--> all go LIVE
      ^                                                                |
      '--------- the ends behind them are looked up <-------yes--------'
    COMMANDS_FIRST --time is over, or no room for new rows--> LIVE, with one warning

A partition waits for its own commands. It waits for the commands of other partitions while one of these makes progress,
but never for a held one, or one that nobody can read now.

Meanwhile commands and rejects are finished and O follows, so that segments are written and memory stays bounded. Live
partitions wait for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import Offsets, SourceName
from bridge.stores.stores import Life, Stores
from timerstore.clock import Clock

PATIENCE_S: Final = Wait.COMMANDS.s
"""Default of `start.read_commands`."""
FULL_S: Final = Wait.COMMANDS_ROOM.s
"""The longest time without room for new rows: a flush may be making room."""
STILL_S: Final = Wait.COMMANDS_STILL.s
"""The longest time without progress of any other partition: some may rest while a large backlog is read."""
LOOK_S: Final = 0.05
"""Interval between checks of the reading progress."""

log = structlog.get_logger("bridge.delivery.commands_first")


@dataclass(slots=True)
class _Look:
    """A running look-up. A new one replaces it, and its late answer is ignored."""

    ends: Offsets | None = None
    """None: not yet known."""
    has_failed: bool = False


def _on_a_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="log-ends", daemon=True).start()


class CommandsFirst:
    """See the module. For the dispatcher's thread; `begin`, `expect` and `forget` while that is at rest or under its
    lock."""

    def __init__(
        self,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        log_ends: Callable[[Collection[SourceName]], Offsets] | None = None,
        run: Callable[[Callable[[], None]], None] = _on_a_thread,
    ) -> None:
        """`log_ends` looks up the ends of the logs with a leader; `run` calls it in the background, and it may raise
        EnvironmentFailure. None: messages do not wait for commands that were written on."""
        self._clock = clock
        self._patience_s = patience_s
        self._log_ends = log_ends
        self._run = run
        self.unreadable: Collection[SourceName] = ()
        """The partitions that nobody can read now: a corrupt batch, or no leader. Replaced by any thread."""
        self.begin()

    def begin(self) -> None:
        """Begin with another store."""
        self._ends: dict[SourceName, int] = {}
        """The ends up to which the partitions that are not live yet must be read."""
        self._until_s: dict[SourceName, float] = {}
        """The ends of the waits of those that have arrived."""
        self._seen: dict[SourceName, int] = {}
        """The reading progress of those that are unread."""
        self._seen_s = 0.0
        """The time of the last progress."""
        self._look: _Look | None = None
        """A running look-up of the next ends."""
        self._are_written_on = False
        self._full_since_s: float | None = None

    def expect(self, ends: Offsets) -> None:
        """Add coming partitions, with the ends of their logs."""
        self._ends = {**self._ends, **ends}
        self._look, self._are_written_on = None, self._are_written_on or self._look is not None

    def forget(self, names: Iterable[SourceName]) -> None:
        """Forget partitions that are live, or have gone."""
        for name in names:
            self._ends.pop(name, None)
            self._until_s.pop(name, None)

    @property
    def waiting(self) -> frozenset[SourceName]:
        """The partitions that are not live yet."""
        return frozenset(self._ends)

    def ready(self, store: Stores) -> list[SourceName]:
        """Remove and return the arrived partitions whose messages need not wait any longer. Called repeatedly."""
        arrived = store.in_life(Life.COMMANDS_FIRST)
        if self._ends.keys().isdisjoint(arrived):  # they were live before
            self._full_since_s = None
            return arrived
        now_s, at = self._clock.monotonic_s(), store.next_offsets()
        self._take_answer()
        until_s = {name: self._until_s.setdefault(name, now_s + self._patience_s) for name in arrived}
        unread = {name: (at[name], end) for name, end in self._ends.items() if name in at and at[name] < end}
        is_stuck = self._is_stuck(store, now_s)
        ready = [name for name in arrived if is_stuck or now_s >= until_s[name] or name not in self._ends]
        if not (self._look is not None or self._awaited(store, unread, now_s) or store.has_commands()):
            if self._are_written_on and self._log_ends is not None:
                look = self._look = _Look()
                self._are_written_on, names = False, list(self._ends)
                self._run(lambda: self._look_up(look, store, names))
            else:
                ready = [name for name in arrived if name in ready or name not in unread]
        if unread and self._patience_s > 0 and not self._ends.keys().isdisjoint(ready):
            _tell(unread, self._patience_s)
        self.forget(ready)
        return ready

    def _awaited(
        self, store: Stores, unread: Mapping[SourceName, tuple[int, int]], now_s: float
    ) -> Collection[SourceName]:
        """The unread partitions that others wait for."""
        names = unread.keys() - {*self.unreadable, *store.in_life(Life.HELD)}
        if (seen := {name: unread[name][0] for name in names}) != self._seen:
            self._seen, self._seen_s = seen, now_s
        return names if now_s - self._seen_s < STILL_S else ()

    def committed(self, written: Collection[SourceName]) -> None:
        """Note that a transaction wrote rows of these partitions to delay topics. Rows of partitions that are not live
        are commands, so these have new records to wait for."""
        self._are_written_on |= not self._ends.keys().isdisjoint(written)

    def _look_up(self, look: _Look, store: Stores, names: Collection[SourceName]) -> None:
        assert self._log_ends is not None
        try:
            look.ends = self._log_ends(names)
        except EnvironmentFailure as failure:
            log.warning("log-ends-unknown", reason=failure.message)
            look.has_failed, look.ends = True, {}
        store.wake()

    def _take_answer(self) -> None:
        """Take the answer of a look-up that has ended. Without an answer it is repeated, until the time is over."""
        look = self._look
        if look is not None and look.ends is not None:
            self._ends |= {name: end for name, end in look.ends.items() if name in self._ends}
            self._look = None
            self._are_written_on |= look.has_failed

    def _is_stuck(self, store: Stores, now_s: float) -> bool:
        if store.has_room():
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = now_s
        return self._full_since_s is not None and now_s - self._full_since_s >= FULL_S


def _tell(unread: Mapping[SourceName, tuple[int, int]], patience_s: float) -> None:
    log.warning(
        "commands-unread",
        patience_s=patience_s,
        records=sum(end - at for at, end in unread.values()),
        partitions=[f"{topic}/{p}: read to {at} of {end}" for (topic, p), (at, end) in sorted(unread.items())],
    )
