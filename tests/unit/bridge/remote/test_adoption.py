"""bridge.remote.adoption: which indexes are replaced, and which attempts count."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.remote import adoption as adoption_module
from bridge.remote import objects as objects_module
from bridge.remote.objects import Missing, RemoteUnavailable
from dev.harness.waiting import wait_until
from tests.unit.bridge.remote.rig import Instance, refuse
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS

WAIT_S: Final = 60.0
TOLD_S: Final = 20.0


def lost(what: str, key: str) -> None:
    """A fault: no manifest is found."""
    if what == "before get":
        raise Missing(key)


def test_a_local_index_with_rows_that_kafka_has_lost_is_not_replaced(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka deletes records while another instance, without the index, has the partition: its copy lacks the rows."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", 1 << 30)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.reopen()
    other.work(NOW_MS + 9_000)
    other.upload()
    assert other.kafka[ORDERS][1] == 5
    one.takes_over(other)
    assert not one.adopt()
    assert {offset for _, _, offset in one.pending()} == {0, 1, 2, 4}


def test_finished_rows_that_kafka_has_lost_keep_no_index(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that comes back after all its rows were delivered takes the copy."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", 1 << 30)
    other.takes_over(one).adopt()
    other.pending()
    other.work(NOW_MS + 20_000)
    other.upload()
    other.rig.log_starts[ORDERS] = 4
    one.takes_over(other)
    assert one.adopt() and one.covered() == 5


def test_an_index_without_the_rows_that_kafka_has_lost_is_replaced(one: Instance, other: Instance) -> None:
    """An earlier start went on without them; the owner of the copy has them, and has noted that Kafka has not."""
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.stores.close()
    other.rig.open()
    other.work(NOW_MS + 9_000)
    one.takes_over(other).rig.open()
    one.work(NOW_MS + 9_500)
    one.upload()
    other.takes_over(one)
    found = other.candidate()
    assert found.found.checkpoint is not None and found.found.checkpoint.offset == 5 and one.kafka[ORDERS][1] == 6
    noted = replace(found, state=replace(found.state, gone_below=4))
    other.adoption.begin(other.adoption.wanted({ORDERS: noted}))
    assert other.adoption.wait(WAIT_S)
    other.rig.open()
    assert {offset for _, _, offset in other.pending()} == {0, 1, 2, 4, 5}


def test_an_attempt_that_a_rebalance_ends_does_not_count(one: Instance, other: Instance) -> None:
    """Shared storage works: the next pipeline of the process begins again, with all partitions."""
    reached, goes_on = threading.Event(), threading.Event()

    def slow(what: str, _: str) -> None:
        if what == "before get_part":
            reached.set()
            assert goes_on.wait(WAIT_S)

    one.objects.fault = slow
    candidate = other.takes_over(one).candidate()
    many = {(ORDERS[0], partition): candidate for partition in range(8)}
    other.adoption.begin(other.adoption.wanted(many))
    assert reached.wait(WAIT_S)
    assert other.adoption.stop(WAIT_S)
    goes_on.set()
    assert len(other.adoption.wanted(many)) == 8


def test_a_copy_that_may_be_the_last_is_waited_for(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka has deleted records, and shared storage does not answer: the partition does not go on without them."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 0.0)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    failures = 0

    def fault(what: str, key: str) -> None:
        nonlocal failures
        if "before" in what and failures < 5:
            failures += 1
            raise RemoteUnavailable(key)

    one.objects.fault = fault
    with capture_logs() as events:
        assert other.adopt()
    assert [each["event"] for each in events if "index" in each["event"]] == [
        "index-fetched",
        "index-awaited",
        "index-adopted",
    ]
    assert {offset for _, _, offset in other.pending()} == {0, 1, 2}


@pytest.mark.parametrize("what", ["remote", "remote/**/*segment*"], ids=["the directory", "an object"])
def test_a_last_copy_that_is_not_there_is_waited_for(
    one: Instance, other: Instance, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty directory in place of the mount looks like a lost copy, which an operator has to confirm; and so does a
    copy of which a part is restored."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 0.1)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.stores.close()
    [moved] = tmp_path.glob(what)
    moved.rename(tmp_path / "elsewhere")
    (tmp_path / "remote").mkdir(exist_ok=True)
    with capture_logs() as events:
        other.adoption.begin(other.adoption.wanted({ORDERS: other.candidate()}))
        wait_until(lambda: len(events) == 2, TOLD_S, "it is told")
        (tmp_path / "elsewhere").rename(moved)
        assert other.adoption.wait(WAIT_S)
    assert [each["event"] for each in events] == ["index-fetched", "index-awaited", "index-adopted"]
    assert "does not exist" in events[1]["reason"]
    other.rig.open()
    assert {offset for _, _, offset in other.pending()} == {0, 1, 2}


def test_a_partition_whose_last_copy_is_gone_delays_no_other(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are tried before it is tried again, and one that comes, or comes again, ends its pause."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 1e9)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.stores.close()
    last = other.candidate()
    gone = replace(last, state=replace(last.state, manifest=("0" * 16, 4)))
    lost = {(ORDERS[0], partition): gone for partition in range(3)}
    try:
        for come in ({**lost, (ORDERS[0], 5): last}, {(ORDERS[0], 7): last}, {(ORDERS[0], 5): last}):
            other.adoption.begin(come)
            wait_until(lambda: other.adoption.under_way() == lost.keys(), TOLD_S, "the other is adopted")
    finally:
        assert other.adoption.stop(WAIT_S)


def test_partitions_that_are_given_up_behind_one_that_waits_are_told(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from Kafka, however long shared storage does not answer."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 1e9)
    told: list[frozenset[tuple[str, int]]] = []
    one.objects.fault = refuse("get")
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.stores.close()
    last = other.candidate()
    wanted = {(ORDERS[0], 0): last, (ORDERS[0], 1): replace(last, spare_ms=1)}
    try:
        other.adoption.begin(wanted, lambda: told.append(other.adoption.under_way()))
        wait_until(lambda: bool(told), TOLD_S, "it is told")
        assert told == [{(ORDERS[0], 0)}]
    finally:
        assert other.adoption.stop(WAIT_S)


def test_a_partition_that_was_lost_ends_no_later_pause(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is left asks shared storage once in a pause."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 1e9)
    asked: list[str] = []
    reached, goes_on, many = threading.Event(), threading.Event(), threading.Event()

    def fault(what: str, key: str) -> None:
        if what == "before get":
            asked.append(key)
            reached.set()
            assert goes_on.wait(WAIT_S)
            if len(asked) > 10:
                many.set()
            raise Missing(key)

    one.objects.fault = fault
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    candidate, left = other.candidate(), (ORDERS[0], 0)
    other.adoption.begin({left: candidate, (ORDERS[0], 1): candidate})
    assert reached.wait(WAIT_S)
    other.adoption.keep([left])
    goes_on.set()
    wait_until(lambda: other.adoption.under_way() == {left}, TOLD_S, "the other is given up")
    assert not many.wait(1)
    assert other.adoption.stop(WAIT_S)


def test_a_copy_that_becomes_the_last_is_tried_again(one: Instance, other: Instance) -> None:
    """Kafka deletes records after an attempt that was given up, and before the log is read."""
    one.objects.fault = lost
    other.takes_over(one).rig.stores.close()
    first = other.candidate()
    other.adoption.begin(other.adoption.wanted({ORDERS: first}))
    assert other.adoption.wait(WAIT_S) and not other.adoption.wanted({ORDERS: first})
    one.objects.fault = lambda what, key: None
    other.rig.log_starts[ORDERS] = 4
    assert other.adopt()
    assert {offset for _, _, offset in other.pending()} == {0, 1, 2}


def test_a_copy_that_ends_below_the_log_is_taken_if_nothing_else_has_its_rows(one: Instance, other: Instance) -> None:
    """Uploads failed before Kafka deleted records: the copy has some of their messages, and no other index has any."""
    one.rig.produce(ORDERS, *[NOW_MS + 9_000] * 4)
    other.takes_over(one).rig.log_starts[ORDERS] = 6
    with capture_logs() as events:
        assert other.adopt()
    assert [each["event"] for each in events if "index" in each["event"]] == ["index-fetched", "index-adopted"]
    assert {offset for _, _, offset in other.pending()} == {0, 1, 2, 6, 7}


def test_a_partition_does_not_wait_if_its_retention_explains_the_deleted_records(
    one: Instance, other: Instance
) -> None:
    """Messages of records of that age are finished, so it is read from Kafka."""
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    other.rig.stores.close()
    candidate = other.candidate()
    assert candidate.may_be_the_last() and replace(candidate, spare_ms=0).may_be_the_last()
    explained = replace(candidate, spare_ms=1)
    assert not explained.may_be_the_last()
    assert replace(explained, state=replace(candidate.state, gone_below=3)).may_be_the_last()


def test_a_partition_that_was_lost_is_not_fetched(one: Instance, other: Instance) -> None:
    """The newcomers behind it do not wait for it, and it may come again."""
    reached, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(what: str, _: str) -> None:
        if what == "before get_part":
            reached.set()
            assert goes_on.wait(WAIT_S)

    one.objects.fault = slow
    candidate = other.takes_over(one).candidate()
    many = {(ORDERS[0], partition): candidate for partition in range(8)}
    other.adoption.begin(other.adoption.wanted(many), ended.set)
    assert reached.wait(WAIT_S)
    other.adoption.keep([(ORDERS[0], 7)])
    assert ended.wait(WAIT_S), "the one under way is given up"
    goes_on.set()
    assert other.adoption.wait(WAIT_S)
    assert set(other.adoption.wanted(many)) == {(ORDERS[0], partition) for partition in range(7)}


def test_without_room_for_the_first_thread_no_partition_waits(one: Instance, other: Instance) -> None:
    """The log is read."""
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert other.takes_over(one).adopt()
    assert other.covered() is None and not other.adoption.under_way() and other.adoption.stop(WAIT_S)


def test_the_last_copy_may_be_slow(one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts from the last part: a poorer index would take its place."""
    monkeypatch.setattr(objects_module, "PART_BYTES", 500)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    one.objects.fault = lambda what, _: other.clock.advance(20_000) if what == "before get_part" else None
    assert other.adopt() and other.covered() == 4
    assert one.objects.count("get_part") > 3


def test_the_last_copy_waits_for_room_on_the_disk(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it waits for shared storage."""
    monkeypatch.setattr(adoption_module, "RETRY_S", 0.0)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    usage = shutil.disk_usage(other.directory)
    looks = [usage._replace(free=0)] * 2 + [usage]
    with mock.patch("shutil.disk_usage", side_effect=looks), capture_logs() as events:
        assert other.adopt() and other.covered() == 4
    assert [each["event"] for each in events if "index" in each["event"]] == [
        "index-fetched", "index-awaited", "index-adopted"
    ]  # fmt: skip


def test_a_call_that_never_ends_leaves_one_thread(one: Instance, other: Instance) -> None:
    """A mount hangs: later attempts wait for its call, and start no other one."""
    hangs = threading.Event()

    def slow(what: str, _: str) -> None:
        if what == "before get":
            other.clock.advance(200_000)
            hangs.wait(WAIT_S)

    one.objects.fault = slow
    assert other.takes_over(one).adopt()
    [late] = [thread for thread in threading.enumerate() if thread.name.startswith("adoption-")]
    other.clock.advance(600_000)
    candidate = other.candidate()
    other.adoption.begin({ORDERS: candidate})

    def is_over() -> bool:
        other.clock.advance(10_000)
        return not other.adoption.under_way()

    wait_until(is_over, WAIT_S, "it is given up")
    assert [thread for thread in threading.enumerate() if thread.name.startswith("adoption-")] == [late]
    hangs.set()
    late.join(WAIT_S)
    other.clock.advance(600_000)
    one.objects.fault = lambda what, key: None
    assert other.adopt() and other.covered() == 4
