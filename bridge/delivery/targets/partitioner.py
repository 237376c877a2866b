"""The partition of a record's target, if some partitions take nothing now. Pure.

Usually the client's partitioner decides. While a partition is down, a record whose key belongs there waits, and one
without a key goes to a partition that is up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from timerstore.rows.position import Bools

PARTITIONER: Final = "murmur2_random"
"""The bridge's default. With any other, the partition of a key is unknown here."""


def place(
    keys: Sequence[bytes | None],
    wanted: npt.NDArray[np.int32],
    *,
    partitions: int,
    down: Collection[int],
    partitioner: str,
) -> tuple[npt.NDArray[np.int32], Bools]:
    """Partition of each record, int32[n], and whether it is up, bool[n]. `wanted` int32[n] is the record's own choice,
    or -1; -1 in the result: the partitioner's choice."""
    up = [partition for partition in range(partitions) if partition not in down]
    placed = wanted.copy()
    reached = ~np.isin(wanted, np.fromiter(down, np.int32, len(down)))
    if not up:
        return placed, np.zeros(len(wanted), dtype=np.bool_)
    for i in np.flatnonzero(wanted < 0).tolist():
        key = keys[i]
        if partitioner != PARTITIONER:
            reached[i] = False
        elif key is None:
            placed[i] = up[(i // 100) % len(up)]  # in runs, so that batches stay large
        else:
            reached[i] = (murmur2(key) & 0x7FFFFFFF) % partitions not in down
    return placed, reached


def murmur2(data: bytes) -> int:
    """The hash of Kafka's default partitioner: Austin Appleby's MurmurHash2, 32 bits, with Kafka's seed."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)
