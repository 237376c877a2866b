"""TimerWheel: how many entries are pending in each slot of time.

RocketMQ maps a file of slots and wraps around; here the slots are absolute, in pages of a day that exist only while
something is pending in them. Nothing aliases, a year ahead costs what is used of it, and one cumulative sum answers
every "how many until then".

A record says itself when it is due, so its time may be any. What lies before a time that never moves while the wheel
lives is counted in one slot, and what lies beyond eleven years from there in another: what was counted into a slot is
counted out of the same one, whatever the clock says then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from timerstore.rows.position import Int64s

SLOT_MS = 10_000
PAGE_SLOTS = 8_640  # a day of 10 s slots: 35 KB a page, 126 MB if every day of ten years has an entry


SPAN_SLOTS = 11 * 366 * PAGE_SLOTS


class TimerWheel:
    """Counts of pending entries by slot. `time_ms` vectors are int64 epoch milliseconds."""

    def __init__(self, since_ms: int) -> None:
        """Entries before `since_ms` share a slot."""
        self._first_slot = since_ms // SLOT_MS - 1
        self._pages: dict[int, npt.NDArray[np.int32]] = {}
        self._page_total: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._page_total.values())

    def add_slots(self, slots: Int64s, counts: Int64s) -> None:
        """Add `counts` (may be negative) to absolute `slots`, as a segment's histogram gives them."""
        slots = np.clip(slots, self._first_slot, self._first_slot + SPAN_SLOTS)
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

    def first_ms(self, after_ms: int) -> int | None:
        """The last millisecond of the first slot, from that of `after_ms` on, in which something is pending, or
        None."""
        first = after_ms // SLOT_MS
        for page in sorted(page for page in self._pages if page >= first // PAGE_SLOTS):
            pending = np.flatnonzero(self._pages[page] > 0) + page * PAGE_SLOTS
            pending = pending[pending >= first]
            if len(pending):
                return (int(pending[0]) + 1) * SLOT_MS - 1
        return None

    def _add_page(self, page: int, index: Int64s, counts: Int64s) -> None:
        slots = self._pages.get(page)
        if slots is None:
            slots = self._pages[page] = np.zeros(PAGE_SLOTS, dtype=np.int32)
            self._page_total[page] = 0
        np.add.at(slots, index, counts.astype(np.int32))  # an index may occur twice: see the module
        self._page_total[page] += int(counts.sum())
        if self._page_total[page] == 0 and not slots.any():
            del self._pages[page], self._page_total[page]
