"""What the cluster is asked, while its brokers come and go."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, TopicPartition

from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings
from dev.harness.kafka import Topics
from tests.system.broker import Broker, own_broker

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_what_a_group_has_committed_is_read_without_being_a_member(broker: Broker, topics: Topics) -> None:
    """Offsets and metadata, as other instances have written them; partitions without a commit are left out."""
    topic = topics.create(partitions=2)
    group = f"group-{topic}"
    member = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    member.commit(offsets=[TopicPartition(topic, 1, 7, '{"x":1}')], asynchronous=False)
    member.close()
    cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
    assert cluster.committed(group, [(topic, 0), (topic, 1)]) == {(topic, 1): (7, '{"x":1}')}
    assert cluster.committed(f"another-{topic}", [(topic, 0)]) == {}


def test_offsets_are_found_again_after_a_leader_was_elected() -> None:
    """The client asks under the leader's epoch that it knows: it learns the new one then, and not minutes later."""
    with own_broker() as broker:
        place = (Topics(broker.bootstrap).create(), 0)
        cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
        before = cluster.watermarks([place])[place]
        for end in (broker.stop, broker.kill):
            end()
            broker.start()
            found = cluster.watermarks([place])[place]
            assert (found.start, found.end) == (before.start, before.end) and found.epoch > before.epoch
            before = found
