"""What pending messages in segments take of the memory: by the sizes of the store's structures, without a clock."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.timerstore.entries import Record
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from timerstore.memory.pending import SLOT_MS
from timerstore.operations.find import LogQuery

FAR_MS = NOW_MS // SLOT_MS * SLOT_MS + 3_600_000
NOT_HELD = (type, ModuleType, FunctionType, BuiltinFunctionType, mmap.mmap, type(None))


def held_bytes(root: object) -> int:
    """The bytes of everything that `root` refers to: objects, vectors and Arrow data, but not mapped files."""
    size, seen, waiting = 0, set[int](), [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, NOT_HELD):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray) and each.base is not None:
            waiting.append(each.base)
        elif isinstance(each, memoryview):
            waiting.append(each.obj)
        elif isinstance(each, pa.RecordBatch | pa.Table):
            size += each.get_total_buffer_size()
        else:
            size += each.nbytes if isinstance(each, np.ndarray) else sys.getsizeof(each)
            waiting += gc.get_referents(each)
    return size


def filled_bytes(directory: Path, messages: int, slots: int) -> tuple[int, int]:
    """The memory of a store with a segment of this many messages, which are due in this many slots with gaps between
    them. Each has an id, and one in ten is cancelled. Then the memory after a restart."""
    rig = Rig(directory)
    due_ms = (FAR_MS + 2 * (i * slots // messages) * SLOT_MS for i in range(messages))
    rig.log = [Record(*ORDERS, i, each, id=f"{i}") for i, each in enumerate(due_ms)]
    cancelled = range(0, messages, 10)
    rig.log += [Record(*ORDERS, messages + i, None, id=f"{each}", cancels=True) for i, each in enumerate(cancelled)]
    rig.ingest()
    while rig.deliver():
        pass
    rig.store.maintenance.flush(NOW_MS)
    sizes = []
    for store in (rig.store, rig.reopen()):
        assert store.stats().pending == messages - len(cancelled) and store.stats().segments == 1
        for query in (LogQuery(id="7"), LogQuery(origin_offset=7)):
            assert [row.offset for row in store.find(query, NOW_MS).rows] == [7]
        sizes.append(held_bytes(store.state))
    return sizes[0], sizes[1]


@pytest.mark.parametrize(("slots", "bytes_max"), [((100, 100), 0.2), ((500, 1_000), 2), ((2_000, 10_000), 10)])
def test_a_pending_message_in_a_segment_takes_no_memory_but_for_its_time(
    tmp_path: Path, slots: tuple[int, int], bytes_max: float
) -> None:
    """Eight thousand more messages at the same times take a fifth of a byte each, with their ids, origins and cancels.
    Each further slot of ten seconds takes eight bytes, and a byte for each of its messages."""
    few, many = (filled_bytes(tmp_path / f"{i}", 2_000 + 8_000 * i, slots[i]) for i in (0, 1))
    for less, more in zip(few, many, strict=True):
        assert more - less <= bytes_max * 8_000


def test_vectors_are_counted_and_mapped_files_are_not(tmp_path: Path) -> None:
    """Of the count itself: a view counts as its whole vector, once."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with (tmp_path / "file").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
    vector = np.zeros(1 << 17, np.int64)
    batch = pa.record_batch({"a": pa.array(np.zeros(1 << 17, np.int64))})
    for root, mib in (([mapped], 0), ([vector[:5], vector[5:]], 1), ({"a": (batch, vector)}, 2)):
        assert mib << 20 <= held_bytes(root) < (mib << 20) + 4_096
