"""bridge.stores.directory: where the indexes of partitions are, and when they go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bridge.delivery.doubt import doubt_file, torn_states
from bridge.delivery.targets import pauses
from bridge.errors import ConfigurationError
from bridge.ingest.batches import choices, reading_mark
from bridge.settings.model import Settings
from bridge.stores.directory import KEPT_MS, StoreDirectory
from bridge.stores.search import Query
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, RETRY, Rig
from timerstore.disk import files
from timerstore.errors import DirectoryInUse, DiskFailure, WrongIdentity
from timerstore.limits import Limits


def test_a_directory_is_one_bridges(tmp_path: Path) -> None:
    """All partitions of it."""
    rig = Rig(tmp_path)
    with pytest.raises(DirectoryInUse):
        StoreDirectory.take(tmp_path, "cluster", {})
    rig.stores.close()
    StoreDirectory.take(tmp_path, "cluster", {}).release()


OWN_FILES = [
    *(files.LOCK, files.RESERVE, files.CHECKPOINT),
    *(doubt_file.FILE, torn_states.FILE, pauses.FILE, choices.BATCHES, choices.ENDS),
    *(reading_mark.READ, reading_mark.LOOKED_UP, reading_mark.SEARCHED, reading_mark.UNSEARCHED),
]


@pytest.mark.parametrize("name", OWN_FILES)
def test_no_delay_topic_has_the_name_of_a_file_beside_its_index(name: str) -> None:
    """The start would fail, or take the topic's directory for the file."""
    for each in (
        [name] if "." not in name else [name, files.temporary_of(Path(name)).name, str(Path(name).stem) + ".lock"]
    ):
        with pytest.raises(ConfigurationError, match=f"delay_topics.{each}: .* a file in store.directory"):
            Settings.of({"delay_topics": {each: {}}})
    Settings.of({"delay_topics": {f"{name}s": {}}})


def test_an_index_is_its_partitions(tmp_path: Path) -> None:
    """One that was moved, or is of a topic that was deleted, is refused."""
    rig = Rig(tmp_path)
    for name in rig.logs:
        rig.produce(name, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.stores.close()
    (tmp_path / "delay" / "0").rename(tmp_path / "delay" / "2")
    taken = StoreDirectory.take(tmp_path, "cluster", {"delay": "id of delay", "retry": "another"})
    for name in (("delay", 2), RETRY):
        with pytest.raises(WrongIdentity):
            taken.find(name, NOW_MS)
    assert taken.find(ORDERS, NOW_MS).checkpoint is None
    assert taken.find(BILLS, NOW_MS).checkpoint is not None
    taken.release()


def test_an_index_of_another_instances_partition_goes_after_ten_minutes(tmp_path: Path) -> None:
    """Not before, and not while it is looked up again; own indexes stay, and so do other directories."""
    rig = Rig(tmp_path)
    for name in rig.logs:
        rig.produce(name, NOW_MS + 900_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    (tmp_path / "lost+found" / "0a").mkdir(parents=True)
    rig.stores.close_partitions([BILLS, RETRY])
    assert not rig.stores.remove_left(NOW_MS)
    assert not rig.stores.remove_left(NOW_MS + KEPT_MS - 1)
    assert rig.stores.directory.find(RETRY, NOW_MS + KEPT_MS - 1).checkpoint is not None
    assert rig.stores.remove_left(NOW_MS + KEPT_MS) == 1
    assert not rig.stores.directory.of(BILLS).exists() and rig.stores.directory.of(RETRY).exists()
    assert rig.stores.directory.of(ORDERS).exists() and (tmp_path / "lost+found" / "0a").exists()
    assert not rig.stores.remove_left(NOW_MS), "the clock was set back"
    assert not rig.stores.remove_left(NOW_MS + KEPT_MS - 1)
    assert rig.stores.remove_left(NOW_MS + 2 * KEPT_MS) == 1
    assert rig.reopen().stats().pending == 1


@pytest.mark.fault("old indexes of which some cannot be removed")
def test_an_index_that_cannot_be_removed_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of old indexes goes on after a failure, and its error names all indexes that stay."""
    left = [("delay", n) for n in range(1, 4)]
    rig = Rig(tmp_path, [ORDERS, *left])
    rig.stores.flush(NOW_MS)
    paths = [rig.stores.directory.of(name) for name in left]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    rig.stores.close_partitions(left)
    rig.stores.remove_left(NOW_MS)
    remove = shutil.rmtree

    def refuse(path: Path) -> None:
        if path != paths[1]:
            raise PermissionError(path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(DiskFailure) as failed:
        rig.stores.remove_left(NOW_MS + KEPT_MS)
    assert [path.exists() for path in paths] == [True, False, True]
    assert str(paths[0]) in failed.value.message and str(paths[2]) in failed.value.message
    monkeypatch.undo()
    assert rig.stores.remove_left(NOW_MS + KEPT_MS) == 2


def test_an_index_of_an_earlier_version_is_removed(tmp_path: Path) -> None:
    """One index of all partitions, beside files that are none of an index, or are just written."""
    for name in (
        files.CHECKPOINT,
        files.RESERVE,
        files.segment_name(1),
        "segment-0000000001.ids",
        "segment-1.parquet.tmp",
    ):
        (tmp_path / name).touch()
    rig = Rig(tmp_path)
    rig.produce(ORDERS, NOW_MS + 900_000)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    others = {"rows-in-doubt.json", "states-in-doubt.json.tmp", "being-read.tmp"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "cancels-of-orders" / "0").mkdir(parents=True)  # of a topic
    directory = rig.stores.directory
    assert directory.has_index_of_earlier_version()
    directory.drop_index_of_earlier_version()
    assert not directory.has_index_of_earlier_version()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {files.LOCK, *others}
    assert (tmp_path / "cancels-of-orders" / "0").exists() and rig.reopen().stats().pending == 1


@pytest.mark.fault("a partition that leaves while it is read again, after Kafka has lost records of it")
def test_what_is_kept_of_a_partition_stays_while_another_instance_has_it(tmp_path: Path) -> None:
    """Its rows that are nowhere else stay in its index, which stays for as long as Kafka lacks their records."""
    rig = Rig(tmp_path, limits=Limits(horizon_ms=1_000))
    rig.produce(ORDERS, *(NOW_MS + 36_000_000 + i for i in range(6)))
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.cut(ORDERS, 4)
    rig.log_starts[ORDERS] = 2
    for _ in range(2):
        rig.reopen()
        assert rig.stores.prepared.held_below()[ORDERS] == 2
        rig.stores.flush(NOW_MS)
        rig.stores.close_partitions([ORDERS])
        assert not rig.stores.remove_left(NOW_MS)
        rig.gone = {ORDERS}
        assert not rig.stores.remove_left(NOW_MS + 2 * KEPT_MS)
    rig.reopen()
    rig.ingest()
    assert [row.offset for row in rig.stores.find(Query(), NOW_MS).rows] == [0, 1, 2, 3]


def test_an_index_is_known_whoever_has_its_partition(tmp_path: Path) -> None:
    """For the question whether the bridge has ever committed for it. One of another topic of the same name says
    nothing."""
    rig = Rig(tmp_path, [ORDERS, BILLS])
    for name in (ORDERS, BILLS):
        rig.produce(name, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.stores.flush(NOW_MS)
    rig.stores.close_partitions([BILLS])
    names = [ORDERS, BILLS, RETRY]
    assert rig.stores.directory.known(names) == {ORDERS, BILLS}
    assert rig.stores.directory.known([BILLS, RETRY]) == {BILLS}
    rig.stores.close()
    taken = StoreDirectory.take(tmp_path, "cluster", {"delay": "another", "retry": "id of retry"})
    assert taken.known(names) == set()
    ids, offsets = {"delay": "id of delay", "retry": "id of retry"}, [(*name, 7) for name in names]
    body = {"cluster_id": "cluster", "topic_ids": ids, "offsets": offsets}
    (tmp_path / files.CHECKPOINT).write_text(json.dumps({"crc": 0, "body": json.dumps(body)}))
    assert taken.known(names) == {RETRY}, "by the index of an earlier version"
    (tmp_path / files.CHECKPOINT).write_text("{")
    assert taken.known(names) == set()
    taken.release()
