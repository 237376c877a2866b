"""Which transactional id goes next: decided here, and nowhere else. Two ids take turns while all is well.

    the last transaction    the next one is of
    was committed           an id that comes back, else the ready one that has committed the latest, else the same
    was not                 the same; where it is small, an id that comes back
    its id is not there     (committed) as in the first row; else the ready one that has committed the longest ago

For speed the first row is enough. The rest is for ends of transactions that brokers lose, and goes with the module
that mends those (transaction_markers.py). Where the end of a commit is missing, an abort under the same id takes the
commit back. So after trouble the last two ids to commit begin small transactions only, which are hardly aborted. An id
that was in use at the time comes back: its next records in a partition end the transaction that it has left open there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

SUSPECTS: Final = 2
"""The last two ids to commit may lack an end: a transaction can be shorter than the writing of the end before."""


class Turns:
    """See the module."""

    def __init__(self) -> None:
        self.is_well = False
        """Whether the last transaction was committed."""
        self._commits = count(1)
        self._committed: dict[str, int] = {}
        """When, in the order of all commits, each may have committed last: it was asked to, and not told no."""
        self._coming_back: set[str] = set()

    def next(self, ready: Sequence[str], current: str | None, *, is_small: bool) -> str | None:
        """The id for the next transaction, which is taken; `current` is that of the last one, if it may go on."""
        able = [name for name in ready if self.is_well or (is_small and current and name in self._coming_back)]
        found = max(able, key=lambda name: (name in self._coming_back, self.when(name)), default=None)
        found = found or current or min(ready, key=self.when, default=None)
        self._coming_back.discard(found or "")
        return found

    def last(self) -> str | None:
        """The one that has committed last."""
        return max(self._committed, key=self.when, default=None)

    def comes_back(self, name: str) -> None:
        """It was in use when there was trouble, or a commit of its was written again."""
        self._coming_back.add(name)

    def asked_to_commit(self, name: str) -> None:
        """It may commit from now on; the answer may be lost."""
        self._committed[name] = next(self._commits)

    def has_not_committed(self, name: str, before: int) -> None:
        """The answer is no; `before` is what `when` was."""
        self._committed[name] = before

    def when(self, name: str) -> int:
        """See `asked_to_commit`; 0 if it never was."""
        return self._committed.get(name, 0)

    def is_to_stay_small(self, name: str) -> bool:
        """Whether the end of its last commit may be lost: then its next transaction must not be aborted."""
        later = sum(when > self.when(name) for when in self._committed.values())
        return not self.is_well and self.when(name) > 0 and later < SUSPECTS
