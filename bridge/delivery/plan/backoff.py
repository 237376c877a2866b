"""When a message for a failing target is tried again, and when it is given up. Pure.

    attempt failed   1     2     3     ...   10     11     ...   15     16
    tried again in   1 s   2 s   4 s   ...   512 s  600 s  ...   600 s  never: dead letter      (the defaults, 67 min)

A message for a paused target waits for the end of the pause instead, at most as long as a record may wait, and at most
seven days (`parked_ms`).

A hash of the record's partition and offset shortens each wait by up to a quarter: records that failed together do not
come back together, and a rehearsal gives the same times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from timerstore.rows.position import Bools, Int64s

WINDOW_MS: Final = 30_000
"""The roll window if the topic's own is unknown."""
PARKED_MS_MAX: Final = 7 * 86_400_000
"""The longest wait for a paused target. It is shorter than the time for which the end of a pause is remembered
(`targets/pauses.py`): a message whose instance was down for that time comes up by itself."""
IN_DOUBT_MS: Final = 1_000
"""The wait of a verdict for the next look-up of its topic."""
_DOUBLINGS_MAX: Final = 30
"""A wait of up to an hour, doubled this many times, fits into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of attempts in all, the first wait, and the longest wait (ms)."""

    attempts: int = 16
    backoff_ms: int = 1_000
    backoff_max_ms: int = 600_000

    def is_over(self, failures: Int64s) -> Bools:
        """Whether a message is given up after this many failures; bool[n]."""
        over: Bools = failures >= self.attempts
        return over

    def waits_ms(self, failures: Int64s, keys: Int64s) -> Int64s:
        """Waits after the last of `failures` int64[n], which count from 1; `keys` int64[n] name the records."""
        doublings = np.clip(failures - 1, 0, _DOUBLINGS_MAX).astype(np.int64)
        full = np.minimum(np.left_shift(np.int64(self.backoff_ms), doublings), self.backoff_max_ms)
        spread = (_mixed(keys) % (full // 4 + 1).astype(np.uint64)).astype(np.int64)
        result: Int64s = full - spread
        return result


def parked_ms(windows_ms: Int64s, keys: Int64s) -> Int64s:
    """The waits of records `keys` int64[n] for a paused target: up to the last quarter of their roll windows int64[n],
    as rolls have, or of `PARKED_MS_MAX`. A pause of any length causes no more writes than that."""
    longest_ms = np.minimum(windows_ms, PARKED_MS_MAX)
    spread = (_mixed(keys) % np.maximum(longest_ms // 4, 1).astype(np.uint64)).astype(np.int64)
    result: Int64s = longest_ms - spread
    return result


def _mixed(keys: Int64s) -> np.ndarray:
    """A hash of each key (SplitMix64's finish: Steele, Lea, Flood, 2014), uint64[n]."""
    mixed = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
