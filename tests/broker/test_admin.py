"""Questions to the cluster, while its brokers come and go."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, TopicPartition

from bridge.kafka.admin import Cluster
from bridge.kafka.leader_epochs import ReadStretch
from bridge.settings.model import Settings
from dev.harness.kafka import Outgoing, Topics, produce
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
    """The client asks under the leader's epoch that it knows: it learns the new one then, and not minutes later. The
    records that later leaders have written are found in all partitions together."""
    with own_broker() as broker:
        topic = Topics(broker.bootstrap).create(partitions=3)
        places = [(topic, partition) for partition in range(3)]
        cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
        write(broker.bootstrap, topic)
        before = first = cluster.watermarks(places)
        for end in (broker.stop, broker.kill):
            end()
            broker.start()
            found = cluster.watermarks(places)
            assert all((found[each].start, found[each].end) == (0, before[each].end) for each in places)
            assert all(found[each].epoch > before[each].epoch for each in places)
            write(broker.bootstrap, topic)
            before = cluster.watermarks(places)
        cut = {each: first[each].end or None for each in places}
        for old, cuts in ((first, cut), (before, dict.fromkeys(places))):
            read = {each: ReadStretch(epoch=old[each].epoch, start=0, end=before[each].end) for each in places}
            assert cluster.cuts(read) == cuts


def write(bootstrap: str, topic: str) -> None:
    """Nothing to the first partition, and more to each after it."""
    produce(bootstrap, [Outgoing(topic=topic, value=b"v", partition=p) for p in range(3) for _ in range(7 * p)])
