"""Budgets: memory that the stores of one process share, with a guaranteed part for each.

Half of a budget is guaranteed, in equal parts; the other half is common:

    guaranteed g = total / 2 / stores       allowed = g + the part of the common half that other stores leave

    total 120, 3 stores (g 20)      used        over g      allowed
    a flood in a                    70, 10, 0   50, 0, 0    a: 80, b: 30, c: 30
    the same, and b has more        60, 40, 0   40, 20, 0   a: 60, b: 40, c: 20

So a flood in one store takes the common half at most, and every other store keeps its part. A single store has the
whole budget. The use may exceed the allowance by the batch in progress, or after new stores have come.
"""

from __future__ import annotations

from collections.abc import Callable

from timerstore.limits import Limits


class Budget:
    """A budget of one kind of memory. Any thread may use it; it reads the use without the stores' locks."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used: dict[object, Callable[[], int]] = {}
        """Changes are single operations, and a walk is over a copy: stores come and go on different threads."""

    @property
    def guaranteed(self) -> int:
        """The guaranteed part of each store."""
        return (self._total - self._total // 2) // max(1, len(self._used))

    def join(self, store: object, used: Callable[[], int]) -> None:
        """Add a store; `used` returns its present use, and is called from any thread."""
        self._used[store] = used

    def leave(self, store: object) -> None:
        """Remove a closed store."""
        self._used.pop(store, None)

    def has_room(self, store: object) -> bool:
        """Whether a store uses less than it may."""
        return not self.is_used(store)

    def is_used(self, store: object, part: float = 1.0) -> bool:
        """Whether a store uses its allowance, or a `part` of it."""
        used = self._used.get(store)
        if used is None:
            return False
        now = used()
        return now >= part * self.guaranteed and now >= part * self.allowed(store)

    def full(self) -> dict[object, int]:
        """The stores that use their allowance, and their allowances, by one walk over all."""
        guaranteed, now = self.guaranteed, {store: of() for store, of in self._used.copy().items()}
        over = sum(max(0, used - guaranteed) for used in now.values())
        full = {}
        for store, used in now.items():
            mine = used - guaranteed
            common = max(0, self._total // 2 - (over - max(0, mine)))
            if mine >= common:
                full[store] = guaranteed + common
        return full

    def allowed(self, store: object) -> int:
        """The present allowance of a store."""
        used, guaranteed, common = self._used.copy(), self.guaranteed, self._total // 2
        if len(used) > 1:
            common -= sum(max(0, of() - guaranteed) for each, of in used.items() if each is not store)
        return guaranteed + max(0, common)


class Budgets:
    """The budgets of one process, in bytes: ready rows; memtables; overtaken rows and commands. Tombstones in memory
    count in rows."""

    def __init__(self, limits: Limits) -> None:
        self.ready = Budget(limits.ready_rows_bytes)
        self.memtable = Budget(limits.memtable_bytes_max)
        self.waiting = Budget(limits.overtaken_bytes)
        self.tombstones = Budget(2 * limits.tombstone_rows)

    def leave(self, store: object) -> None:
        """Remove a closed store from all budgets."""
        for each in (self.ready, self.memtable, self.waiting, self.tombstones):
            each.leave(store)
