"""Where a log was cut: its last records were lost, and others are written at their offsets."""

from __future__ import annotations

Cuts = tuple[tuple[int, int], ...]
"""(number, offset), both of which rise. Cuts above a later one are left out: what lies above that is another's
anyway."""


def unseen_cut(cuts: Cuts, seen: int) -> int | None:
    """From which offset on the log may be another than the one that was read when `seen` was the last cut (0: none had
    been); None where nothing was cut since."""
    last = cuts[-1][0] if cuts else 0
    if seen == last:
        return None
    return next((offset for number, offset in cuts if number > seen), 0)
