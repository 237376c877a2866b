"""Dead letters in their topic, as the bridge writes them."""

from __future__ import annotations

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported

from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from dev.harness.kafka import Outgoing, Topics, produce
from tests.broker.rig import DEADLINE_S
from tests.system.broker import Broker


def dead_letter_topic(topics: Topics, delay: str) -> None:
    """The dead-letter topic of a delay topic, with two partitions."""
    new = NewTopic(f"{delay}.dlt", num_partitions=2, replication_factor=1)
    topics.admin.create_topics([new])[f"{delay}.dlt"].result(DEADLINE_S)


def bury(broker: Broker, delay: str, count: int) -> None:
    """Dead letters 0 to `count` - 1 of partition i % 3, alternately of two reasons, and a stranger's record."""
    records = [Outgoing(topic=f"{delay}.dlt", value=b"stranger", headers=[("delay-reason", b"?")])]
    for i in range(count):
        own: h.Headers = [("delay-until", b"1800000000000"), ("delay-topic", b"t%d" % (i % 4)), ("own", b"%d" % i)]
        reason = RejectReason.UNKNOWN_TARGET if i % 2 else RejectReason.TOO_LARGE
        where = h.Where(delay, i % 3, i, i, 99)
        headers = h.dead_letter_headers(own, reason, "why", where, 16)
        records.append(Outgoing(topic=f"{delay}.dlt", key=b"k", value=b"%d" % i, headers=headers, partition=i % 2))
    produce(broker.bootstrap, records)
