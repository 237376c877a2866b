"""bridge.remote.adoption: which indexes are replaced, and which attempts count."""

from __future__ import annotations

import threading

import pytest

from bridge.remote import adoption as adoption_module
from tests.unit.bridge.remote.rig import Instance, refuse
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS

WAIT_S = 60.0


def test_a_local_index_with_rows_that_kafka_has_lost_is_not_replaced(
    one: Instance, other: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka deletes records while another instance, without the index, has the partition: its copy lacks the rows."""
    monkeypatch.setattr(adoption_module, "RECORD_BYTES", 1 << 30)
    other.takes_over(one).rig.log_starts[ORDERS] = 4
    one.objects.fault = refuse("before get")
    other.adopt()
    one.objects.fault = lambda what, key: None
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
