"""bridge.remote: what an instance without an index gets back from shared storage, and at which risk (none)."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.remote import adoption as adoption_module
from bridge.remote.objects import Objects, RemoteTrouble
from bridge.remote.remote_index import prefix_of
from dev.harness.waiting import wait_until
from tests.unit.bridge.remote.rig import Crash, Instance, refuse
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS
from timerstore.disk import files
from timerstore.disk.checkpoint import Identity


def logged(events: list[Any], event: str) -> list[Any]:
    return [each for each in events if each["event"] == event]


def test_another_instance_goes_on_from_the_copy(one: Instance, other: Instance) -> None:
    """It has the same index, so it reads nothing again."""
    other.takes_over(one)
    assert other.adopt()
    assert other.covered() == 4 == len(other.rig.logs[ORDERS])
    assert other.pending() == [(NOW_MS + 1_000, ORDERS, 1), (NOW_MS + 3_000, ORDERS, 2), (NOW_MS + 5_000, ORDERS, 0)]


def test_each_file_is_uploaded_once(one: Instance, other: Instance) -> None:
    """Also by the next process, and by the next owner; without news there is no manifest."""
    assert one.objects.count("put_file") == 1
    one.upload()
    one.begin()
    one.upload()
    assert one.objects.count("put_file") == 1 and one.objects.count("put") == 1
    other.takes_over(one).adopt()
    other.upload()
    assert one.objects.count("put_file") == 1 and one.objects.count("put") == 1
    other.work(NOW_MS + 9_000)
    other.upload()
    assert one.objects.count("put_file") == 2 and one.objects.count("put") == 2


def test_a_copy_is_sent_before_the_look_for_garbage(one: Instance) -> None:
    """The look asks Kafka, which withholds a committed state while a transaction is open."""
    assert [what for what, _ in one.objects.requests] == ["put_file", "put", "list"]


def test_a_partition_has_one_manifest_in_an_interval(one: Instance) -> None:
    """However often its index changes."""
    for _ in range(3):
        one.work(NOW_MS + 9_000)
        one.uploads.go_round()
    assert one.objects.count("put") == 1
    one.upload()
    assert one.objects.count("put") == 2


def test_an_object_that_is_gone_is_uploaded_again(one: Instance, other: Instance) -> None:
    """A list finds it, and an old list makes nobody upload twice."""
    one.objects.listed = []
    one.look()
    assert one.objects.count("put_file") == 1, "a look-up shows that it is there"
    [segment] = [key for key in one.objects.all() if key.endswith(".parquet")]
    Objects.delete(one.objects, segment)
    one.objects.listed = None
    one.look()
    one.upload()
    assert one.objects.count("put_file") == 2
    assert other.takes_over(one).adopt() and other.covered() == 4


def test_what_nobody_names_is_removed_after_two_lists(one: Instance, other: Instance) -> None:
    """The present index stays."""
    first = set(one.objects.all())
    one.work(NOW_MS + 9_000)
    one.upload()
    one.look()
    assert first <= set(one.objects.all())
    one.look()
    one.look()
    gone = first - set(one.objects.all())
    assert [key for key in gone if key.endswith(".manifest")] == sorted(gone), "its segment is in the next index, too"
    assert other.takes_over(one).adopt() and other.covered() == 5


def test_a_former_owner_removes_nothing_of_the_present_one(one: Instance, other: Instance, tmp_path: Path) -> None:
    """Two instances believe to be the owner: the one whose commits Kafka takes keeps its objects."""
    logs = one.rig.logs
    other.rig.logs, other.rig.states = logs, one.rig.states
    other.rig.stores.close()
    other.adopt()
    other.work(NOW_MS + 9_000)
    other.upload()
    named = dict(one.kafka)
    for _ in range(3):
        one.clock.advance(900_000)
        one.uploads.go_round()
    assert one.kafka == named
    third = Instance(tmp_path / "third", one.objects, one.kafka).takes_over(other)
    one.rig.stores.close()
    assert third.adopt() and third.covered() == 5


def test_nothing_is_removed_without_knowing_the_names(one: Instance) -> None:
    """If Kafka does not tell them, or their list cannot be read."""
    one.work(NOW_MS + 9_000)
    one.upload()
    everything = one.objects.all()
    one.kafka[ORDERS] = ("0" * 16, 5)
    for _ in range(4):
        one.clock.advance(900_000)
        one.uploads.go_round()
    assert set(everything) <= set(one.objects.all())


def damage(one: Instance, suffix: str, change: Callable[[bytes], bytes] | None) -> None:
    for key in one.objects.all():
        if key.endswith(suffix) and change is None:
            Objects.delete(one.objects, key)
        elif key.endswith(suffix) and change is not None:
            Objects.put(one.objects, key, change(Objects.get(one.objects, key)))


def of_another_cluster(text: bytes) -> bytes:
    body = json.loads(json.loads(text)["body"])
    body["cluster_id"] = "another"
    new = json.dumps(body)
    return json.dumps({"crc": zlib.crc32(new.encode()), "body": new}).encode()


def with_a_path(text: bytes) -> bytes:
    new = json.loads(text)["body"].replace("segment-", "../segment-")
    return json.dumps({"crc": zlib.crc32(new.encode()), "body": new}).encode()


def flipped(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def nested() -> bytes:
    return json.dumps({"crc": zlib.crc32(b"[" * 200_000), "body": "[" * 200_000}).encode()


FAULTS: Final[dict[str, Callable[[Instance], object]]] = {
    "no manifest": lambda one: setattr(one.objects, "fault", refuse("before get", part="manifest")),
    "no segment": lambda one: damage(one, "parquet", None),
    "a refusal": lambda one: setattr(one.objects, "fault", refuse("before")),
    "a damaged segment": lambda one: damage(one, "parquet", flipped),
    "a short segment": lambda one: damage(one, "parquet", lambda data: data[:-1]),
    "a damaged manifest": lambda one: damage(one, "manifest", flipped),
    "a manifest that nests deeply": lambda one: damage(one, "manifest", lambda _: nested()),
    "an empty manifest": lambda one: damage(one, "manifest", lambda _: b""),
    "another cluster": lambda one: damage(one, "manifest", of_another_cluster),
    "a name with a path": lambda one: damage(one, "manifest", with_a_path),
    "another offset": lambda one: one.kafka.update({ORDERS: (one.kafka[ORDERS][0], 3)}),
    "a state that went back": lambda one: one.rig.states.update({ORDERS: replace(one.rig.states[ORDERS], offset=2)}),
    "a cut": lambda one: one.rig.cut(ORDERS, 2),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
@pytest.mark.fault("a lost disk, and a copy of the index that cannot be used")
def test_a_copy_that_cannot_be_used_is_reported_once(
    one: Instance, other: Instance, fault: Callable[[Instance], object]
) -> None:
    """The partition is read from Kafka, and the same copy is not tried again; nothing of it stays in the directory."""
    fault(one)
    with capture_logs() as events:
        other.takes_over(one)
        other.adopt()
        assert other.covered() is None
        assert not other.adopt()
    assert len(logged(events, "index-not-adopted")) == 1
    assert not list((other.directory / ORDERS[0] / str(ORDERS[1])).glob("*.parquet*"))
    assert {row[2] for row in other.pending()} >= {0, 1}


def test_a_copy_is_tried_again_after_a_while(one: Instance, other: Instance) -> None:
    """The partition comes again to the same process, and shared storage works again."""
    one.objects.fault = refuse("before")
    other.takes_over(one).adopt()
    assert other.covered() is None
    one.objects.fault = lambda what, key: None
    assert not other.adopt()
    other.clock.advance(600_000)
    assert other.adopt() and other.covered() == 4


def test_a_full_disk_gets_no_copy(one: Instance, other: Instance) -> None:
    """Its room is for new messages."""
    other.takes_over(one)
    with mock.patch.object(adoption_module, "FREE_BYTES_MIN", 1 << 60), capture_logs() as events:
        other.adopt()
    assert "no room" in logged(events, "index-not-adopted")[0]["reason"] and other.covered() is None


@pytest.mark.fault("shared storage that does not answer during a start")
def test_a_store_that_hangs_ends_nothing(one: Instance, other: Instance) -> None:
    """The adoption ends after its time, and an answer that comes later changes nothing."""

    hangs = threading.Event()

    def late(request: str, _: str) -> None:
        if request == "before get_part":
            other.clock.advance(3_600_000)
            assert hangs.wait(60)

    one.objects.fault = late
    other.takes_over(one)
    with capture_logs() as events:
        other.adopt()
        hangs.set()
    wait_until(lambda: one.objects.count("get_part") == 1, 60, "the late answer")
    assert len(logged(events, "index-not-adopted")) == 1 and other.covered() is None
    assert len(other.pending()) == 3


def test_a_store_that_fails_for_one_partition_is_not_waited_for_by_others(one: Instance, other: Instance) -> None:
    """A start with many partitions waits once."""
    one.objects.fault = refuse("before")
    candidate = other.takes_over(one).candidate()
    before = len(one.objects.requests)
    many = {(ORDERS[0], partition): candidate for partition in range(50)}
    with capture_logs() as events:
        other.adoption.begin(other.adoption.wanted(many))
        assert other.adoption.wait(60)
    assert len(logged(events, "index-not-adopted")) == 50 and len(one.objects.requests) == before
    assert not other.adoption.wanted(many) and not other.adoption.under_way()


def test_a_slow_store_is_given_up(one: Instance, other: Instance) -> None:
    """Kafka is faster."""
    one.objects.fault = lambda what, _: other.clock.advance(40_000) if what == "before get_part" else None
    other.takes_over(one)
    with capture_logs() as events:
        other.adopt()
    assert "takes more than" in logged(events, "index-not-adopted")[0]["reason"] and other.covered() is None


@pytest.mark.parametrize(
    ("manifest", "gone", "kept", "rows", "wanted"),
    [
        (5, 0, None, True, True),
        (4, 0, None, True, False),
        (3, 0, None, True, False),
        (5, 2, None, True, False),
        (5, 2, None, False, True),
        (9, 8, None, True, True),
        (9, 0, 4, True, False),
    ],
    ids=[
        "it reaches further", "it reaches as far", "it is behind", "the local one holds lost rows", "it holds nothing",
        "it does not hold all of them", "the local one alone has rows",
    ],
)  # fmt: skip
def test_a_local_index_is_replaced_by_a_better_one_only(
    one: Instance, manifest: int, gone: int, kept: int | None, rows: bool, wanted: bool
) -> None:
    """And never if it alone has messages."""
    mine = one.candidate()
    assert mine.found.checkpoint is not None and mine.found.checkpoint.offset == 4
    checkpoint = replace(mine.found.checkpoint, kept=kept, offset=4 if kept is None else None)
    if not rows:
        checkpoint = replace(checkpoint, segments=())
    state = replace(mine.state, offset=9, manifest=("1" * 16, manifest), gone_below=gone)
    assert replace(mine, state=state, found=replace(mine.found, checkpoint=checkpoint)).is_worthwhile() is wanted


@pytest.mark.parametrize(
    ("record_bytes", "due_ms", "log_start", "adopted"),
    [(1 << 30, NOW_MS + 7_000, 0, True), (1, NOW_MS + 7_000, 0, False), (1, NOW_MS - 1, 3, True)],
    ids=["the records take longer", "the copy takes longer", "Kafka has lost records"],
)
def test_a_copy_is_fetched_only_if_it_saves_time(
    one: Instance,
    other: Instance,
    record_bytes: int,
    due_ms: int,
    log_start: int,
    adopted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A local index that is slightly behind goes on with the log."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", record_bytes)
    other.work(due_ms)
    other.takes_over(one)
    other.rig.logs[ORDERS][0] = one.rig.logs[ORDERS][0]
    other.rig.log_starts[ORDERS] = log_start
    with capture_logs() as events:
        assert other.adopt()
    assert bool(logged(events, "index-adopted")) is adopted and bool(logged(events, "index-not-needed")) is not adopted
    assert other.candidate().is_worthwhile() is not adopted


def test_without_a_manifest_nothing_is_asked(one: Instance, other: Instance) -> None:
    """Nor if the local index is as good: a start does not depend on shared storage."""
    before = len(one.objects.requests)
    assert not one.adopt()
    one.kafka.clear()
    other.takes_over(one)
    assert not other.adopt() and len(one.objects.requests) == before


def test_a_failing_store_is_told_of_at_intervals(one: Instance) -> None:
    """Delivery and flushes go on meanwhile, and the pauses between attempts grow up to a bound."""
    one.objects.fault = refuse("before")
    with capture_logs() as events:
        for number in range(200):
            one.work(NOW_MS + 9_000 + number)
            one.upload()
    told, asked = logged(events, "remote-failed"), one.metrics.remote_failures._value.get()
    assert 2 <= len(told) <= 5 and 8 < asked < 30
    assert one.uploads.age_s() > 1_900
    one.objects.fault = lambda what, key: None
    one.clock.advance(300_000)
    with capture_logs() as events:
        one.upload()
        one.upload()
    assert logged(events, "remote-works-again") and one.uploads.age_s() == 0


def test_a_store_that_does_not_answer_at_first_costs_no_second_upload(one: Instance) -> None:
    """A manifest that cannot be read is not a lost one."""
    uploads = one.objects.count("put_file")
    one.begin()
    one.objects.fault = refuse("before get")
    one.upload()
    one.objects.fault = lambda what, key: None
    with capture_logs() as events:
        one.work(NOW_MS + 9_000)
        one.upload()
        one.upload()
    assert one.objects.count("put_file") == uploads + 1 and not logged(events, "manifest-lost")


def test_an_unexpected_error_ends_no_upload(one: Instance) -> None:
    """It is logged with its trace, and counted; delivery needs no copy."""

    def fault(_: str, key: str) -> None:
        raise KeyError(key)

    one.objects.fault = fault
    one.work(NOW_MS + 9_000)
    with capture_logs() as events:
        one.upload()
    assert logged(events, "remote-failed-unexpectedly") and one.metrics.remote_failures._value.get() == 1
    one.objects.fault = lambda what, key: None
    one.upload()
    assert one.uploads.age_s() == 0


def test_a_segment_that_is_reclaimed_before_its_upload_does_no_harm(one: Instance, other: Instance) -> None:
    """The manifest names the files of the checkpoint after it."""
    one.work(NOW_MS + 9_000)
    one.rig.ingest()
    stale = one.store.state.checkpoint
    one.work(NOW_MS + 9_500)
    [path] = [one.store.state.directory / f.name for f in stale.segments[-1:]]
    path.rename(path.with_suffix(".away"))
    one.upload()
    assert one.objects.count("put") == 1, "no manifest without all of its files"
    path.with_suffix(".away").rename(path)
    one.upload()
    assert other.takes_over(one).adopt() and other.covered() == 6


# ---- crashes


STEPS: Final = [f"{when} {what}" for what in ("put_file", "put", "delete", "list") for when in ("before", "after")] + [
    "after the manifest, before the commit"
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.fault("a crash during an upload to shared storage")
def test_a_crash_of_an_upload_costs_garbage_only(one: Instance, step: str, tmp_path: Path) -> None:
    """Kafka names a whole index before and after it, and later processes remove the rest."""

    def crash(request: str, _: str) -> None:
        if request == step:
            raise Crash

    one.work(NOW_MS + 9_000)
    if "delete" in step:
        one.upload()
        one.look()
    one.objects.fault = crash
    try:
        one.clock.advance(900_000)
        one.uploads.go_round()
    except Crash:
        pass
    one.objects.fault = lambda what, key: None
    one.noted.clear()
    one.lose_disk()
    one.begin()
    assert one.adopt() and one.covered() in (4, 5)
    one.rig.ingest()
    one.rig.stores.flush(NOW_MS)
    for _ in range(4):
        one.look()
    others = Instance(tmp_path / "third", one.objects, one.kafka).takes_over(one)
    assert others.adopt() and others.covered() == 5
    assert len([key for key in one.objects.all() if key.endswith("manifest")]) == 1
    assert len([key for key in one.objects.all() if not key.endswith("manifest")]) == len(
        others.store.state.checkpoint.segments
    )
    assert len(others.pending()) == 4


@contextmanager
def crashing_at(count: int) -> Iterator[list[str]]:
    """A context in which a process ends at a change of a file in its directory with this number."""
    done: list[str] = []

    def then(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **more: Any) -> Any:
            if len(done) == count:
                raise Crash
            done.append(name)
            return change(*args, **more)

        return changed

    with (
        mock.patch.object(files, "remove", then("remove", files.remove)),
        mock.patch.object(files, "sync_directory", then("sync", files.sync_directory)),
        mock.patch.object(os, "replace", then("replace", os.replace)),
    ):
        yield done


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.fault("a crash during the adoption of an index")
def test_a_crash_of_an_adoption_costs_another_one(
    one: Instance, other: Instance, count: int, has_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two changes of files: the next start adopts again, or finds the whole index."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", 1 << 30)
    if has_index:
        other.work(NOW_MS + 7_000)
    other.takes_over(one)
    if has_index:
        other.rig.logs[ORDERS][0] = one.rig.logs[ORDERS][0]
    wanted = other.adoption.wanted({ORDERS: other.candidate()})
    manifest = other.kafka[ORDERS]
    fetch = adoption_module._Fetch(
        other.objects, "/".join(other.objects.all()[0].split("/")[:-1]) + "/", wanted[ORDERS], other.clock
    )
    with crashing_at(count) as done, pytest.raises(Crash) if count < 6 else nullcontext():
        fetch._fetch()
    assert len(done) == min(count, 6)
    other.begin()
    other.kafka[ORDERS] = manifest
    other.adopt()
    assert other.covered() == 4 and len(other.pending()) == 3


def test_a_disk_that_fills_up_keeps_its_index(one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is full at the last moment."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", 1 << 30)
    other.work(NOW_MS + 7_000)
    other.takes_over(one)
    other.rig.logs[ORDERS][0] = one.rig.logs[ORDERS][0]
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(Path, "write_text", side_effect=full), capture_logs() as events:
        other.adoption.begin(other.adoption.wanted({ORDERS: other.candidate()}))
        assert other.adoption.wait(60)
    assert "no room" in logged(events, "index-not-adopted")[0]["reason"]
    found = other.candidate().found.checkpoint
    assert found is not None and found.offset == 1
    assert {path.suffix for path in other.candidate().found.directory.iterdir()}.isdisjoint({files.TEMPORARY_SUFFIX})


def test_without_room_for_a_thread_the_log_is_read(one: Instance, other: Instance) -> None:
    """The partition waits for nothing."""
    other.takes_over(one)
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("adoption-"):
            raise RuntimeError("can't start new thread")
        real(thread)

    with mock.patch.object(threading.Thread, "start", start):
        other.adopt()
    assert other.covered() is None and not other.adoption.under_way()


def test_the_end_of_the_process_ends_an_adoption(one: Instance, other: Instance) -> None:
    """No index is put in place after it."""
    stopped: list[bool] = []
    other.takes_over(one)
    one.objects.fault = lambda what, _: stopped.append(other.adoption.stop(60)) if what == "before get_part" else None
    other.adopt()
    wait_until(lambda: stopped == [True], 60, "its end")
    assert other.covered() is None


def test_a_missing_mount_is_trouble_and_not_the_end(tmp_path: Path) -> None:
    """Nothing is written below a directory that is not there."""
    missing = Objects(f"file://{tmp_path}/missing")
    with pytest.raises(RemoteTrouble, match="mounted"):
        missing.put("a", b"x")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("topic_id", ["oeQkYc4qQyS//39q9hLH5g", "/eQkYc4qQySa+39q9hLH5/", "t"])
def test_a_topic_id_may_contain_slashes(tmp_path: Path, topic_id: str) -> None:
    """Kafka's client encodes it in base64. A path has no empty parts."""
    prefix = prefix_of("g", Identity(cluster_id="c", log_id=f"{topic_id}/12"))
    assert re.fullmatch(r"c/g/[^/]+/12/", prefix)
    objects = Objects(f"file://{tmp_path}")
    objects.put(f"{prefix}a.manifest", b"x")
    assert list(objects.keys(prefix, lambda: None)) == [f"{prefix}a.manifest"]


def test_two_groups_never_share_objects() -> None:
    """Each would take the other's objects for garbage."""
    identity = Identity(cluster_id="c", log_id="t/0")
    groups = ("a/b", "a_b", "a:b", "a_2fb", "a", ".", "..", "a.b", "\u00e4")
    prefixes = {prefix_of(group, identity) for group in groups}
    assert len(prefixes) == len(groups)
    assert not any("/./" in prefix or "/../" in prefix for prefix in prefixes)
