"""Resuming: after the pause of a target it brings the postponed messages forward. It also learns of pauses that clients
requested from other instances.

A search by target finds the messages. One command for each (`delay-until: due`) moves them, at a limited rate: exactly
once, like any command. The remaining work needs no record of its own: a search finds it again.

    1 search     waiting copies of due messages, written before the pause ended                 nothing
    2 command    one into the partition of each message, then a wait for its answer             it is carried out
    3 again      after some seconds, and after a minute: copies may have been in transit,
                 and other instances learn of the end later; also after partitions came         searched again
    4 and again  each minute, until the logs are read up to their ends as of step 3: copies
                 may lie behind a backlog                                                       searched again
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from bridge.delivery.targets.pauses import Pauses
from bridge.errors import BridgeError
from bridge.stores.names import NamedPosition, SourceName
from bridge.stores.search import Query
from bridge.stores.stores import Life, Stores
from bridge.wire.committed_state import CommittedState
from timerstore.clock import Clock
from timerstore.errors import TimerStoreError
from timerstore.operations.find import ORIGINALS_MAX
from timerstore.rows.position import Int64s

LOOK_S: Final = 1.0
OTHERS_S: Final = 5.0
"""Interval between reads of the states of other instances' partitions."""
AGAIN_MS: Final = (0, 5_000, 65_000)
"""The times of the searches, after the end of the pause or the arrival of partitions."""
LATE_MS: Final = 60_000
"""Copies written up to this long after the end of a pause are brought forward, too: another instance may have learned
of it later, and clocks differ."""
ANSWER_S: Final = 10.0
UNREAD_MS: Final = 60_000
"""Interval between searches while copies may be unread."""

Named = Sequence[tuple[SourceName, int]]
"""Messages by the offsets of their originals."""

log = structlog.get_logger("bridge.delivery.resuming")


@dataclass(slots=True)
class _Pass:
    """The searches for the messages that one pause has put off; `after` is the place of the present search."""

    began_ms: int
    due_ms: int | None
    """The time of the next search; None: no more searches."""
    number: int = 0
    after: NamedPosition | None = None
    moved: int = 0
    ends: dict[SourceName, int] = field(default_factory=dict)
    """Ends of the logs: the copies in transit lie below."""
    is_last: bool = False
    """Whether the present search finds all copies."""

    def is_due(self, now_ms: int) -> bool:
        return self.due_ms is not None and now_ms >= self.due_ms

    def over(self, now_ms: int) -> None:
        """The present search is over."""
        self.number, self.moved = self.number + 1, 0
        if self.number < len(AGAIN_MS):
            self.due_ms = self.began_ms + AGAIN_MS[self.number]
        else:
            self.due_ms = None if self.is_last else now_ms + UNREAD_MS


class Resuming:
    """See the module. One thread."""

    def __init__(
        self,
        *,
        pauses: Pauses,
        store: Callable[[], Stores | None],
        bring: Callable[[Named], Sequence[Future[Any]] | None],
        read: Callable[[Collection[SourceName]], Iterable[CommittedState]],
        log_ends: Callable[[Collection[SourceName]], Mapping[SourceName, int]],
        clock: Clock,
        rate: int,
    ) -> None:
        """`store` is None until it is complete. `bring` writes commands that bring messages forward (None: partitions
        have gone), `read` reads committed states, `log_ends` looks up the ends of logs, of those with an answer;
        `rate` is in messages a second."""
        self._pauses, self._store, self._bring = pauses, store, bring
        self._read, self._log_ends = read, log_ends
        self._clock, self._rate = clock, rate
        self._owned: frozenset[SourceName] = frozenset()
        self._read_s: float | None = None
        self._passes: dict[tuple[str, int], _Pass] = {}

    def look(self) -> float:
        """Work for up to a second; returns the wait until the next call (s)."""
        store = self._store()
        if store is None:
            return LOOK_S
        try:
            self._learn(store)
            return self._bring_forward(store)
        except (BridgeError, TimerStoreError) as error:
            log.warning("pauses-not-followed", reason=error.message)
        return LOOK_S

    def _learn(self, store: Stores) -> None:
        now_s, others = self._clock.monotonic_s(), set(store.sources) - store.next_offsets().keys()
        if not others or (self._read_s is not None and now_s - self._read_s < OTHERS_S):
            return
        self._read_s = now_s
        self._pauses.read(self._read(sorted(others)))

    def _bring_forward(self, store: Stores) -> float:
        joining = frozenset(store.in_life(Life.CATCHING_UP))  # their content is not known yet
        owned = frozenset(store.next_offsets()) - joining
        if owned != self._owned:
            self._owned = owned
            self._passes.clear()
        now_ms = self._clock.now_ms()
        for pause in self._pauses.ended():
            ended_ms = pause.ended_ms(now_ms)
            if ended_ms is None:
                continue
            search = self._passes.setdefault((pause.name, ended_ms), _Pass(now_ms, now_ms))
            if search.is_due(now_ms):
                return self._page(store, pause.name, ended_ms, search)
        return LOOK_S

    def _page(self, store: Stores, name: str, ended_ms: int, search: _Pass) -> float:
        """Bring one page of found messages forward; returns the wait that keeps the rate (s)."""
        began_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()
        if search.after is None and search.number >= len(AGAIN_MS) - 1:
            search.is_last = self._is_read(store, search)
        query = Query(target=name, due_until_ms=now_ms + 1, at_from_ms=now_ms + 1, ts_until_ms=ended_ms + LATE_MS + 1)
        page = store.find_originals(query, now_ms, after=search.after, limit=min(self._rate, ORIGINALS_MAX))
        named = list(_named({source: originals for source, originals in page.found.items() if source in self._owned}))
        futures = self._bring(named) if named else []
        if futures is None:
            self._passes.clear()
            return LOOK_S
        for future in wait(futures, ANSWER_S).not_done:
            future.cancel()  # the command is in the delay topic, and is carried out
        search.moved, search.after = search.moved + len(named), page.next
        if page.next is None:
            if search.moved:
                log.info("messages-brought-forward", topic=name, messages=search.moved)
            search.over(now_ms)
        return max(0.0, len(named) / self._rate - (self._clock.monotonic_s() - began_s))

    def _is_read(self, store: Stores, search: _Pass) -> bool:
        """Whether the logs are read up to their ends at the first call for this pass."""
        if unknown := self._owned - search.ends.keys():
            search.ends |= self._log_ends(unknown)
        at = store.next_offsets()
        return all(name in search.ends and at.get(name, 0) >= search.ends[name] for name in self._owned)


def _named(found: Mapping[SourceName, tuple[Int64s, Int64s]]) -> Iterable[tuple[SourceName, int]]:
    for source, (origins, _) in found.items():
        yield from ((source, origin) for origin in dict.fromkeys(origins.tolist()))
