"""glibc's allocator, told what this process is: it lives for weeks, and works in pieces of megabytes.

By default each thread may have an arena of its own, and what is freed is kept: the size from which an array is mapped
by itself, and goes back when it is freed, rises to that of the largest one there was, up to 32 MiB. What lies between
the pieces of batches then stays resident for good: some 150 MiB of it with ten million pending (bench, pending).
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
    """Have this process give memory back, as these variables would; call it before there are threads. What the
    environment says of it stays. Returns what was set: nothing where the allocator is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in environment:
        return []
    return [name for name, option in _OPTIONS.items() if name not in environment and mallopt(*option)]
