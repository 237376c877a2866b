"""Delivery against a real broker: exactly what is due, exactly once, exactly as the contract says."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported

from tests.bridge.rig import Rig
from tests.bridge.stores import reject, timer
from tests.system.broker import Broker
from tests.system.kafka import Topics, read_committed

pytestmark = pytest.mark.system


def delay_topic(topics: Topics, partitions: int = 1) -> str:
    """A delay topic with its dead-letter topic."""
    name = topics.delay(partitions=partitions)
    topics.admin.create_topics([NewTopic(f"{name}.dlt", num_partitions=1, replication_factor=1)])[f"{name}.dlt"].result(
        30
    )
    return name


def test_what_is_due_is_delivered_as_the_contract_says(broker: Broker, topics: Topics) -> None:
    """Key, value and headers are the original ones, in order, and origin and due time come last."""
    delay, target = delay_topic(topics), topics.create()
    with Rig(broker.bootstrap, delay) as rig:
        assert rig.store is not None
        now = rig.clock.now_ms()
        rig.store.add(
            [timer(delay, 0, 0, now - 5, target, key=b"k", value=b"v", headers=[("a", b"1"), ("b", None), ("a", b"")])]
        )
        rig.start()
        rig.wait_delivered()
        [record] = read_committed(broker.bootstrap, target)
        assert (record.key, record.value) == (b"k", b"v")
        assert record.headers == (
            ("a", b"1"),
            ("b", None),
            ("a", b""),
            ("delay-origin", f"{delay}/0/0".encode()),
            ("delay-due", str(now - 5).encode()),
        )
        assert rig.tally.by_topic == {target: 1}
        print(rig.committed())
