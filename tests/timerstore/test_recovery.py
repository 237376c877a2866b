"""timerstore.recovery: whatever is wrong with the directory, nothing is lost, doubled, or believed that is not ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.timerstore.entries import Record
from tests.timerstore.rig import BILLS, NOW_MS, ORDERS, Rig
from timerstore import files
from timerstore.checkpoint import Identity
from timerstore.errors import Corrupt, DirectoryInUse, WrongIdentity
from timerstore.position import end_of
from timerstore.segment import read_rows
from timerstore.timerlog import TimerLog

SOON_MS, FAR_MS = NOW_MS + 30_000, NOW_MS + 900_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Two segments with pending rows, and more that is not stored yet."""
    rig = Rig(tmp_path / "store", sources=[ORDERS, BILLS])
    rig.load()
    for source in (ORDERS, BILLS):
        rig.produce(NOW_MS - 5, SOON_MS, FAR_MS, FAR_MS + 1, source=source)
    for _ in range(2):
        rig.produce(FAR_MS + 7, source=ORDERS)
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    rig.produce(FAR_MS + 9, SOON_MS)
    rig.ingest()
    assert len(rig.store.timerlog) == 2
    return rig


def finish(rig: Rig) -> None:
    """What remains is delivered, each record once, and the gauge says so."""
    rig.ingest()
    assert rig.store.stats().pending == sum(len(log) for log in rig.log.values()) - len(rig.delivered)
    rig.finish(FAR_MS + 10)
    rig.assert_each_delivered_once()
    assert rig.store.stats().pending == 0


def segments(rig: Rig) -> list[Path]:
    return sorted(rig.directory.glob("*.parquet"))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def test_a_sound_directory_is_opened_and_only_the_rest_is_read_again(rig: Rig) -> None:
    """O_c is where ingest goes on."""
    store = rig.reopen()
    assert store.reports == ()
    assert store.resume_offsets() == {ORDERS: 6, BILLS: 4}
    assert rig.ingest() == 2
    finish(rig)


def test_a_lost_directory_is_rebuilt(rig: Rig) -> None:
    """The index is disposable (invariant I5): what is finished is dropped, what is pending is not."""
    rig.store.close()
    shutil.rmtree(rig.directory)
    assert rig.open().resume_offsets() == {ORDERS: None, BILLS: None}
    finish(rig)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rig: flip(rig.directory / files.CHECKPOINT, 40),
        lambda rig: (rig.directory / files.CHECKPOINT).write_bytes(b""),
        lambda rig: segments(rig)[0].unlink(),
        lambda rig: flip(segments(rig)[0], -100),
        lambda rig: segments(rig)[1].write_bytes(segments(rig)[0].read_bytes()),
    ],
    ids=["checkpoint", "checkpoint empty", "segment missing", "footer", "another segment's content"],
)
def test_damage_found_at_the_start_means_a_rebuild(rig: Rig, damage: Callable[[Rig], object]) -> None:
    """It is reported; the damaged file is set aside for who wants to look, and the next opening has nothing to
    report."""
    rig.store.close()
    damage(rig)
    store = rig.open()
    assert any("rebuilt from Kafka" in report for report in store.reports)
    assert store.resume_offsets() == {ORDERS: None, BILLS: None}
    assert list(rig.directory.glob("*.corrupt"))
    assert segments(rig) == []
    finish(rig)
    rig.store.maintenance.flush(NOW_MS)
    assert rig.reopen().reports == ()


def test_a_missing_checkpoint_is_an_empty_index(rig: Rig) -> None:
    """Segments that nobody names are removed: their rows are read from Kafka."""
    rig.store.close()
    (rig.directory / files.CHECKPOINT).unlink()
    rig.open()
    assert segments(rig) == []
    finish(rig)


def test_a_damaged_page_that_counting_comes_across_means_a_rebuild(tmp_path: Path) -> None:
    """A segment that is partly finished is looked at on opening; a bad page there must not fail every start."""
    rig = Rig(tmp_path / "store")
    rig.produce(SOON_MS, SOON_MS + 1, FAR_MS)
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.load(SOON_MS)
    assert len(rig.deliver(SOON_MS)) == 1
    rig.store.close()
    path = segments(rig)[0]
    content = path.read_bytes()
    for place in range(10, len(content) // 2, 9):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        store = rig.open()
        reports = store.reports
        store.close()
        if reports:
            break
        path.write_bytes(content)
    assert "rebuilt from Kafka" in reports[0]
    rig.open()
    finish(rig)


def test_a_damaged_page_that_a_window_comes_across_is_corrupt(rig: Rig) -> None:
    """The reader says which file; whoever gathers has it set aside."""
    log: TimerLog = rig.store.timerlog
    window = log.window(end_of(NOW_MS), end_of(FAR_MS), 1 << 30)
    path = window.segments[0].path
    content = path.read_bytes()
    for place in range(10, len(content) // 2, 9):
        flip(path, place)
        try:
            read_rows(window.segments[0])
        except Corrupt as error:
            found = Path(error.path)
            break
        path.write_bytes(content)
    assert found == path


@pytest.mark.parametrize(
    "identity",
    [Identity(cluster_id="other", topic_ids={"delay": "a"}), Identity(cluster_id="cluster", topic_ids={"delay": "b"})],
    ids=["cluster", "topic made anew"],
)
def test_a_directory_of_another_cluster_or_topic_is_refused(rig: Rig, identity: Identity) -> None:
    """Its rows are not ours; the remedy is named, nothing is changed, and the lock is given back."""
    rig.store.close()
    before = sorted(path.name for path in rig.directory.iterdir())
    ours, rig.identity = rig.identity, identity
    with pytest.raises(WrongIdentity) as caught:
        rig.open()
    assert "store.directory" in caught.value.hint
    assert sorted(path.name for path in rig.directory.iterdir()) == before
    rig.identity = ours
    rig.open()
    finish(rig)


def test_the_id_of_a_topic_that_is_not_configured_is_remembered(rig: Rig) -> None:
    """It may come back, made anew: the rows in the segments are of the old one."""
    rig.store.close()
    everything = rig.committed
    rig.identity, rig.committed = Identity(cluster_id="cluster", topic_ids={"else": "e"}), {("else", 0): (0, None)}
    rig.log[("else", 0)] = [Record("else", 0, 0, NOW_MS)]
    rig.open()
    rig.ingest()
    rig.deliver()
    rig.store.maintenance.flush(NOW_MS)
    rig.store.close()
    rig.identity, rig.committed = Identity(cluster_id="cluster", topic_ids={"delay": "new"}), everything
    with pytest.raises(WrongIdentity):
        rig.open()


def test_a_committed_offset_that_was_moved_back_rebuilds_the_index(rig: Rig) -> None:
    """Rows below O_c that the index left out as finished are pending again."""
    offset, position = rig.committed[BILLS]
    rig.committed[BILLS] = (offset - 1, position)
    store = rig.reopen()
    assert store.reports and "delay/1" in store.reports[0]
    assert store.resume_offsets() == {ORDERS: None, BILLS: None}


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "moved back"])
def test_a_committed_position_that_was_moved_back_rebuilds_the_index(rig: Rig, cleared: bool) -> None:
    """Resetting a group's offsets clears its metadata: what lay below P is not in the segments, and pending again."""
    offset, position = rig.committed[ORDERS]
    assert position is not None
    rig.committed[ORDERS] = (offset, None if cleared else (position[0] - 1, *position[1:]))
    store = rig.reopen()
    assert store.reports and "delay/0" in store.reports[0]
    rig.ingest()
    rig.load()
    assert rig.deliver()[0].offset == 0, "what was finished is delivered again, as the operator asked"


def test_a_partition_that_is_not_ours_for_a_while_keeps_its_rows(rig: Rig) -> None:
    """Its rows and its O_c stay together, through flush and reclaim (section 4)."""
    theirs = rig.committed.pop(BILLS)
    rig.reopen()
    rig.ingest()
    rig.finish(FAR_MS + 10)
    rig.store.maintenance.flush(FAR_MS)
    assert rig.store.maintenance.reclaim(FAR_MS) < 2
    assert {record.partition for record in rig.delivered[2:]} == {0}
    rig.committed[BILLS] = theirs
    assert rig.reopen().resume_offsets()[BILLS] == 4
    finish(rig)


def test_a_partition_more_changes_nothing_for_the_others(rig: Rig) -> None:
    """It starts without an O_c, and its P is minus infinity."""
    rig.log[("delay", 2)] = [Record("delay", 2, 0, NOW_MS - 10), Record("delay", 2, 1, FAR_MS)]
    rig.committed[("delay", 2)] = (0, None)
    assert rig.reopen().resume_offsets() == {ORDERS: 6, BILLS: 4, ("delay", 2): None}
    finish(rig)


def test_progress_is_told_segment_by_segment(rig: Rig) -> None:
    """Opening many takes a while."""
    rig.store.close()
    told: list[tuple[int, int]] = []
    store = type(rig.store).open(
        rig.directory, identity=rig.identity, partitions=list(rig.log), committed=rig.committed, now_ms=NOW_MS,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    store.close()
    assert told == [(1, 2), (2, 2)]


def test_an_open_directory_is_not_opened_twice(rig: Rig) -> None:
    """Two writers would destroy each other's index."""
    with pytest.raises(DirectoryInUse):
        rig.open()
