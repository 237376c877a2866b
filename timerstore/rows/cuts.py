"""Cuts of a log: its last records were lost, and new ones are written at their offsets."""

from __future__ import annotations

Cuts = tuple[tuple[int, int], ...]
"""(number, offset) of each cut; both rise. A cut above a later one is left out, because the later one replaces all
records above it."""


def unseen_cut(cuts: Cuts, seen: int) -> int | None:
    """The offset from which the log may have changed since cut number `seen` (0: no cut yet); None if it was not cut
    since."""
    last = cuts[-1][0] if cuts else 0
    if seen == last:
        return None
    return next((offset for number, offset in cuts if number > seen), 0)
