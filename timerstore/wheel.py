"""TimerWheel: how many entries are pending in each slot of time.

RocketMQ maps a file of slots and wraps around; here the slots are absolute, in pages of a day that exist only while
something is pending in them. Nothing aliases, a year ahead costs what is used of it, and one cumulative sum answers
every "how many until then".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from timerstore.position import Int64s

SLOT_MS = 10_000
PAGE_SLOTS = 8_640  # a day of 10 s slots: 35 KB a page, 126 MB if every day of ten years has an entry


class TimerWheel:
    """Counts of pending entries by slot. `time_ms` vectors are int64 epoch milliseconds."""

    def __init__(self) -> None:
        self._pages: dict[int, npt.NDArray[np.int32]] = {}
        self._page_total: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._page_total.values())

    def add_slots(self, slots: Int64s, counts: Int64s) -> None:
        """Add `counts` (may be negative) to distinct absolute `slots`, as a segment's histogram gives them."""
        pages = slots // PAGE_SLOTS
        for page in np.unique(pages).tolist():
            mask = pages == page
            self._add_page(page, slots[mask] - page * PAGE_SLOTS, counts[mask])

    def until(self, time_ms: int) -> int:
        """How many entries are pending in the slots before that of `time_ms`, and pro rata in its own slot."""
        slot, rest = divmod(time_ms, SLOT_MS)
        page, index = divmod(slot, PAGE_SLOTS)
        before = sum(total for p, total in self._page_total.items() if p < page)
        counts = self._pages.get(page)
        if counts is None:
            return before
        return before + int(counts[:index].sum()) + int(counts[index]) * rest // SLOT_MS

    def _add_page(self, page: int, index: Int64s, counts: Int64s) -> None:
        slots = self._pages.get(page)
        if slots is None:
            slots = self._pages[page] = np.zeros(PAGE_SLOTS, dtype=np.int32)
            self._page_total[page] = 0
        slots[index] += counts.astype(np.int32)
        self._page_total[page] += int(counts.sum())
        if self._page_total[page] == 0 and not slots.any():
            del self._pages[page], self._page_total[page]
