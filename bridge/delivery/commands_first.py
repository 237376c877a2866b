"""Commands first: after a start, no message is delivered while a command that may cover it is still unread.

A cancel may have been written in time, above the committed O, while no bridge ran. So messages wait until each
partition is read up to its end as of the start, and every command up to there has taken effect:

    CLOSED --read up to the ends, no command waits--> commands were written on? --no--> OPEN
      ^                                                        |
      '---- the ends behind them are looked up <-----yes-------'
    CLOSED --time is over, or no room for new rows--> OPEN, with one warning

While closed, commands and rejects are finished and O follows, so that segments are written and memory stays bounded. A
joining partition waits by itself, held: the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from bridge.errors import EnvironmentFailure
from bridge.ingest.watch.waits import Wait
from bridge.stores.names import SourceName
from bridge.stores.stores import Stores
from timerstore.clock import Clock
from timerstore.rows.position import AT_MIN

PATIENCE_S: Final = Wait.COMMANDS.s
"""Default of `start.read_commands`."""
FULL_S: Final = Wait.COMMANDS_ROOM.s
"""The longest time without room for new rows: a flush may be making room."""
LOOK_S: Final = 0.05
"""Interval between checks of the reading progress."""
EFFECT_S: Final = 1.0
"""The time in which commands of joining partitions must take effect, before all others go on."""

Offsets = Mapping[SourceName, int]

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
    """See the module. For the dispatcher's thread, but for `is_closed`; `begin` and `expect` while that is at rest or
    under its lock."""

    def __init__(
        self,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        log_ends: Callable[[Collection[SourceName]], Offsets] | None = None,
        run: Callable[[Callable[[], None]], None] = _on_a_thread,
    ) -> None:
        """`log_ends` looks up the ends of logs, in the background by way of `run`, and raises EnvironmentFailure; None:
        there is no wait for commands that were written on."""
        self._clock = clock
        self._patience_s = patience_s
        self._log_ends = log_ends
        self._run = run
        self._until_s: float | None = None
        """None: open."""
        self._ends: Offsets = {}
        self._look: _Look | None = None
        """A running look-up of the next ends."""
        self._are_written_on = False
        self._full_since_s: float | None = None
        self._coming: dict[SourceName, int] = {}
        """The log ends of joining partitions at their arrival."""
        self._arrived_s: dict[SourceName, float] = {}

    @property
    def is_closed(self) -> bool:
        """Whether messages wait for commands."""
        return self._until_s is not None

    def begin(self, ends: Offsets, coming: Collection[SourceName] = ()) -> None:
        """A start: messages wait until the logs are read up to these ends; coming partitions wait separately."""
        self._ends, self._look = {name: end for name, end in ends.items() if name not in coming}, None
        self._are_written_on, self._full_since_s = False, None
        self._coming, self._arrived_s = {name: ends[name] for name in coming if name in ends}, {}
        self._until_s = self._clock.monotonic_s() + self._patience_s

    def is_to_wait(self, store: Stores) -> bool:
        """Whether messages must wait; asked again and again."""
        until_s = self._until_s
        if until_s is None:
            return False
        now_s, at = self._clock.monotonic_s(), store.next_offsets()
        self._take_answer()
        unread = self._unread(at)
        if now_s >= until_s or self._is_stuck(store, now_s):
            self._open(unread)
            return False
        if self._look is not None or unread or store.next_wakeup_ms() == AT_MIN:
            return True
        if self._are_written_on and self._log_ends is not None:
            look = self._look = _Look()
            self._are_written_on = False
            self._run(lambda: self._look_up(look, store, at.keys()))
            return True
        self._open({})
        return False

    def committed(self, topics: Collection[str], delay_topics: Collection[str]) -> None:
        """A transaction wrote to these topics: commands among its output may have been written on into delay topics."""
        if self.is_closed and not set(topics).isdisjoint(delay_topics):
            self._are_written_on = True

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
            self._ends, self._look = look.ends, None
            self._are_written_on |= look.has_failed

    def _unread(self, at: Offsets) -> dict[SourceName, tuple[int, int]]:
        return {name: (at[name], end) for name, end in self._ends.items() if name in at and at[name] < end}

    def _is_stuck(self, store: Stores, now_s: float) -> bool:
        if store.has_room():
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = now_s
        return self._full_since_s is not None and now_s - self._full_since_s >= FULL_S

    def _open(self, unread: Mapping[SourceName, tuple[int, int]]) -> None:
        self._until_s = None
        if unread and self._patience_s > 0:
            _tell(unread, self._patience_s)

    # ---- partitions that join

    def expect(self, ends: Offsets) -> None:
        """Expect partitions with these log ends."""
        self._coming |= ends

    def forget(self, names: Collection[SourceName]) -> None:
        """Forget partitions that have gone."""
        for name in names:
            self._coming.pop(name, None)
            self._arrived_s.pop(name, None)

    def ready(self, arrived: Collection[SourceName], store: Stores) -> list[SourceName]:
        """The arrived partitions (read up to their committed O) that have read or waited enough."""
        now_s, at = self._clock.monotonic_s(), store.next_offsets()
        left = {name: (at[name], end) for name, end in self._coming.items() if name in at and at[name] < end}
        is_stuck = bool(arrived) and self._is_stuck(store, now_s)
        over = [
            name
            for name in arrived
            if name in left and (is_stuck or now_s >= self._arrived_s.setdefault(name, now_s) + self._patience_s)
        ]
        if over and self._patience_s > 0:
            _tell({name: left[name] for name in over}, self._patience_s)
        ready = [name for name in arrived if name not in left or name in over]
        self.forget(ready)
        return ready

    def joined(self) -> None:
        """Partitions have joined: their commands take effect before their messages leave."""
        if not self.is_closed:
            self._ends, self._look, self._are_written_on, self._full_since_s = {}, None, False, None
            self._until_s = self._clock.monotonic_s() + EFFECT_S


def _tell(unread: Mapping[SourceName, tuple[int, int]], patience_s: float) -> None:
    log.warning(
        "commands-unread",
        patience_s=patience_s,
        records=sum(end - at for at, end in unread.values()),
        partitions=[f"{topic}/{p}: read to {at} of {end}" for (topic, p), (at, end) in sorted(unread.items())],
    )
