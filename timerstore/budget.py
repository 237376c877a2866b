"""Budgets: memory that the stores of one process share, with a guaranteed part for each.

Half of a budget is guaranteed, in equal parts; the other half is common, for whoever needs it:

    guaranteed g = total / 2 / stores       allowed = g + the rest of the common half that the others leave

    total 120, 3 stores (g 20)      used        over g      allowed
    a flood in a                    70, 10, 0   50, 0, 0    a: 80, b: 30, c: 30
    the same, and b has more        60, 40, 0   40, 20, 0   a: 60, b: 40, c: 20

So a flood in one takes no more than the common half, and no other has less than its part. One store alone has all.
The use may exceed the allowance by the batch in progress, or after new stores have come.
"""

from __future__ import annotations

from collections.abc import Callable

from timerstore.limits import Limits


class Budget:
    """One kind of memory. Any thread; the use is read without locks."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used: dict[object, Callable[[], int]] = {}
        """Changes are single operations, and a walk is over a copy: stores come and go on different threads."""

    @property
    def guaranteed(self) -> int:
        """The least that a store may have now."""
        return (self._total - self._total // 2) // max(1, len(self._used))

    def join(self, store: object, used: Callable[[], int]) -> None:
        """A store shares in it; `used` says how much it has."""
        self._used[store] = used

    def leave(self, store: object) -> None:
        """A store is closed."""
        self._used.pop(store, None)

    def has_room(self, store: object) -> bool:
        """Whether a store may have more than it has."""
        return not self.is_used(store)

    def is_used(self, store: object, part: float = 1.0) -> bool:
        """Whether a store has as much as it may have, or a part of that."""
        used = self._used.get(store)
        if used is None:
            return False
        now = used()
        return now >= part * self.guaranteed and now >= part * self.allowed(store)

    def allowed(self, store: object) -> int:
        """How much a store may have now."""
        used, guaranteed, common = self._used.copy(), self.guaranteed, self._total // 2
        if len(used) > 1:
            common -= sum(max(0, of() - guaranteed) for each, of in used.items() if each is not store)
        return guaranteed + max(0, common)


class Budgets:
    """Those of one process, in bytes: ready rows, memtables, and rows and commands that are delivered in the order of
    offset. Tombstones in memory are counted in rows."""

    def __init__(self, limits: Limits) -> None:
        self.ready = Budget(limits.ready_rows_bytes)
        self.memtable = Budget(limits.memtable_bytes_max)
        self.waiting = Budget(limits.overtaken_bytes)
        self.tombstones = Budget(2 * limits.tombstone_rows)

    def leave(self, store: object) -> None:
        """A store is closed."""
        for each in (self.ready, self.memtable, self.waiting, self.tombstones):
            each.leave(store)
