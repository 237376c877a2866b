"""Settings of glibc's allocator for a process that runs for weeks and allocates pieces of megabytes.

By default each thread may get an arena, and freed memory is kept. The size from which an array is mapped separately,
and unmapped when it is freed, grows to that of the largest freed array, up to 32 MiB. The gaps between the pieces of
batches then stay resident: about 150 MiB with ten million pending messages (bench, pending).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

ARENAS_MAX: Final = 2
MAPPED_BYTES: Final = 1 << 20
"""Arrays of at least this size are mapped separately."""
KEPT_BYTES: Final = 32 << 20
"""The largest free space at the end of the heap."""

# Numbers of <malloc.h>, by the names of the equivalent variables.
_OPTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "MALLOC_ARENA_MAX": (-8, ARENAS_MAX),
    "MALLOC_MMAP_THRESHOLD_": (-3, MAPPED_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
}


def restrain(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Make this process return freed memory, as these variables would. Call it before threads start. A variable that is
    set takes precedence. Returns the names that were set: none with another allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in environment:
        return []
    return [name for name, option in _OPTIONS.items() if name not in environment and mallopt(*option)]
