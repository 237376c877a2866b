"""An exception in the middle of a change: no commit and no flush certifies what is missing in memory since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.timerstore.rig import NOW_MS, Rig
from tests.unit.timerstore.rig import take as take_from
from timerstore.errors import Inconsistent
from timerstore.memory.resident import Resident
from timerstore.memory.sorted_runs import SortedRuns

SOON_MS, FAR_MS = NOW_MS + 20_000, NOW_MS + 900_000


def ingest(rig: Rig) -> None:
    rig.produce(FAR_MS)
    rig.ingest()


def take(rig: Rig) -> None:
    transaction = rig.store.begin()
    try:
        take_from(transaction, SOON_MS, 99)
    finally:
        transaction.rollback()


def acknowledge(rig: Rig) -> None:
    transaction = rig.store.begin()
    rows = take_from(transaction, SOON_MS, 99)
    rig.delivered += [rig.log[offset] for offset in rows.offset.tolist()]
    rig.commit(transaction, [])


def admit(rig: Rig) -> None:
    assert rig.load(FAR_MS)


def advance(rig: Rig) -> None:
    rig.produce(NOW_MS + 100_000)
    rig.ingest()
    assert rig.store.wheel.next_window(NOW_MS + 80_000) is None


def step_back(rig: Rig) -> None:
    rig.deliver(SOON_MS)
    rig.store.step_back(NOW_MS)


def flush(rig: Rig) -> None:
    rig.store.maintenance.flush(NOW_MS)


CHANGES: dict[str, tuple[Callable[[Rig], None], type, str]] = {
    "a batch is taken in": (ingest, Resident, "take_in"),
    "rows are taken": (take, SortedRuns, "gather_near"),
    "rows are put back": (take, Resident, "place"),
    "a commit is known": (acknowledge, Resident, "commit"),
    "a window is admitted": (admit, Resident, "add"),
    "the frontier moves": (advance, Resident, "place"),
    "the clock was set back": (step_back, Resident, "place"),
    "a flush has written": (flush, Resident, "mark_stored"),
}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Rows in a segment, ready rows, and rows in the memtable."""
    rig = Rig(tmp_path / "store")
    rig.produce(FAR_MS)
    rig.ingest()
    rig.deliver()
    flush(rig)
    rig.load()
    rig.produce(SOON_MS, SOON_MS + 1, FAR_MS - 1)
    rig.ingest()
    return rig


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def is_refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except Inconsistent:
        return True
    return False


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed")], ids=repr)
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_fails_half_way_costs_a_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, change: str, error: Exception
) -> None:
    """The caller sees the error itself. Whatever is done until the process has ended, a transaction or the last flush,
    is refused; opened anew, the store delivers everything once."""
    act, owner, name = CHANGES[change]

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(MemoryError) as raised:
            act(rig)
        assert raised.value is error
    files = names_in(rig.directory)
    refused = [is_refused(rig.deliver), is_refused(lambda: ingest(rig)), is_refused(lambda: flush(rig))]
    is_untouched = names_in(rig.directory) == files
    rig.reopen()
    rig.ingest()
    rig.finish(FAR_MS)
    rig.assert_each_delivered_once()
    assert all(refused) and is_untouched


def test_a_transaction_that_is_open_then_is_not_committed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ingest fails meanwhile: where the offsets may go is not said any more, and an abort has nothing to say."""
    transaction = rig.store.begin()
    assert len(take_from(transaction, SOON_MS, 99)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Resident, "take_in", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ingest(rig)
    for call in (transaction.progress, transaction.acknowledge, lambda: take_from(transaction, FAR_MS, 99)):
        with pytest.raises(Inconsistent, match="ZeroDivisionError"):
            call()
    transaction.rollback()
