"""Settings of glibc's allocator for a process that runs for weeks and allocates pieces of megabytes.

By default each thread may get an arena, and freed memory is kept. The size from which an array is mapped separately,
and unmapped when it is freed, grows to that of the largest freed array, up to 32 MiB. The gaps between the pieces of
batches then stay resident: about 150 MiB with ten million pending messages (bench, pending). Arrow's own allocator
keeps even more: 160 MiB after a merge of a million messages. So Arrow uses glibc's, at the same cost of CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping
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


ARROW_POOL: Final = "ARROW_DEFAULT_MEMORY_POOL"


def restrain(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Make this process return freed memory, as these variables would. Call it before threads start, and before Arrow
    is imported. A variable that is set takes precedence. Returns the names that were set: none with another
    allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in environment:
        return []
    done = [name for name, option in _OPTIONS.items() if name not in environment and mallopt(*option)]
    if ARROW_POOL not in environment:
        environment[ARROW_POOL] = "system"
        done.append(ARROW_POOL)
    return done
