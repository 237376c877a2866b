"""timerstore.memory.incoming: rows of small batches are placed together, and seen as if each were placed at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.timerstore.rig import NOW_MS, Rig, take
from timerstore.errors import Inconsistent
from timerstore.memory.incoming import ENOUGH_ROWS

SOON_MS = NOW_MS + 1_000


def filled(directory: Path, *due_ms: int) -> Rig:
    """Each row is a batch."""
    rig = Rig(directory)
    rig.load()
    for each in due_ms:
        rig.produce(each)
        rig.ingest()
    return rig


def test_small_batches_share_a_chunk(tmp_path: Path) -> None:
    """They wait until there are enough rows; counts and the next due time include them before."""
    rig = filled(tmp_path, *range(SOON_MS + ENOUGH_ROWS - 1, SOON_MS, -1))
    resident = rig.store.state.resident
    assert len(resident.chunks) == 0
    assert rig.store.next_due_ms() == SOON_MS + 1 and len(rig.store.state.pending) == ENOUGH_ROWS - 1
    rig.produce(SOON_MS)
    rig.ingest()
    assert len(resident.chunks) == 1 and rig.store.next_due_ms() == SOON_MS
    assert [row.at_ms for row in rig.deliver(SOON_MS + ENOUGH_ROWS)] == list(range(SOON_MS, SOON_MS + ENOUGH_ROWS))


def test_a_take_has_due_rows_placed(tmp_path: Path) -> None:
    """Rows that are due later go on waiting; those that P has passed meanwhile are overtaken."""
    rig = filled(tmp_path, SOON_MS + 5, SOON_MS + 9)
    resident = rig.store.state.resident
    transaction = rig.store.begin()
    assert len(take(transaction, SOON_MS, 9)) == 0 and len(resident.chunks) == 0
    assert take(transaction, SOON_MS + 6, 9).offset.tolist() == [0] and len(resident.chunks) == 1
    rig.produce(SOON_MS + 4, SOON_MS + 7)
    rig.ingest()
    rig.commit(transaction, [])
    assert resident.overtaken.all().offset.tolist() == [2]
    rig.finish(SOON_MS + 9)
    assert [record.offset for record in rig.delivered] == [2, 3, 1]


def test_a_look_sees_all_rows(tmp_path: Path) -> None:
    """So does a flush."""
    rig = filled(tmp_path, SOON_MS, SOON_MS + 3_600_000)
    assert rig.store.stats().ready_rows == 1
    rig.produce(SOON_MS + 3_600_001)
    rig.ingest()
    rig.deliver()
    assert rig.store.maintenance.flush(NOW_MS).rows == 3
    rig.reopen()
    rig.finish(SOON_MS + 3_600_001)
    rig.assert_each_delivered_once()


def test_rows_that_cannot_be_placed_end_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that loses them is a change that failed: nothing can be committed over them."""
    rig = filled(tmp_path, SOON_MS, SOON_MS + 1)

    def fail(*_: object, **__: object) -> int:
        raise MemoryError

    monkeypatch.setattr(rig.store.state.resident.chunks, "add", fail)
    with pytest.raises(MemoryError):
        rig.store.stats()
    with pytest.raises(Inconsistent):
        rig.store.begin()
