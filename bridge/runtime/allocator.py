"""Settings of glibc's allocator for a process that lives for weeks and works in pieces of megabytes.

By default each thread may get an arena, and freed memory is kept: the size from which an array is mapped on its own,
and unmapped when it is freed, grows to that of the largest one so far, up to 32 MiB. What lies between the pieces of
batches then stays resident: some 150 MiB with ten million pending messages (bench, pending).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

ARENAS_MAX: Final = 2
MAPPED_BYTES: Final = 1 << 20
"""What is as large as this is mapped by itself."""
KEPT_BYTES: Final = 32 << 20
"""So much may be free at the end of the heap."""

# Numbers of <malloc.h>, by the names of the variables for the same.
_OPTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "MALLOC_ARENA_MAX": (-8, ARENAS_MAX),
    "MALLOC_MMAP_THRESHOLD_": (-3, MAPPED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
}


def restrain(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Make this process give memory back, as these variables would; to be called before there are threads. A variable
    that is set wins. Returns what was set: nothing with another allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in environment:
        return []
    return [name for name, option in _OPTIONS.items() if name not in environment and mallopt(*option)]
