"""A cluster that loses the end of a transaction: Kafka 4.3 writes none to partitions that have no leader when the
transaction is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest
from confluent_kafka import KafkaException, Producer

from bridge.delivery.producer.transaction_markers import are_offsets_pending
from bridge.delivery.targets import liveness
from bridge.errors import EnvironmentFailure
from bridge.kafka.releases import Release, loses_markers
from bridge.settings.model import Settings
from bridge.start.resolve import must_be_pending
from dev.broker import EmbeddedBroker
from dev.broker.embedded import kafka_version
from dev.harness.kafka import AUTHORIZER, Outgoing, Topics, produce
from dev.harness.waiting import wait_until
from tests.broker.rig import DEADLINE_S
from tests.system.broker import own_broker

OFFSETS: Final = "__consumer_offsets"
TRANSACTIONS: Final = "__transaction_state"
PARTITIONS: Final = 4
"""Of both, as the embedded broker has them."""
SOON: Final = {"broker.session.timeout.ms": 2_000, "broker.heartbeat.interval.ms": 200}
"""A node that dies is given up long before a transaction times out."""


@dataclass(frozen=True, slots=True)
class LosingCluster:
    """Two nodes: the first one coordinates transactions, the second one alone holds what groups have committed."""

    one: EmbeddedBroker
    two: EmbeddedBroker
    topics: Topics

    @property
    def bootstrap(self) -> str:
        """The first node."""
        return self.one.bootstrap

    def create(self, rows: int, headers: Sequence[tuple[str, bytes]] = ()) -> tuple[str, str]:
        """A delay topic with `rows` records on the first node, and their target on the second one."""
        delay, target = self.topics.delay(on=1), self.topics.create(on=2)
        self.topics.create(exactly=f"{delay}.dlt", on=1)
        record = Outgoing(topic=delay, headers=[*headers, ("delay-topic", target.encode())])
        produce(self.bootstrap, [record] * rows)
        return delay, target

    def losing_once(self) -> Callable[[dict[str, Any]], Producer]:
        """Makes producers. The first transaction of any of them is decided while the second node is down."""
        once = [self._lose]

        class Losing(Producer):
            def commit_transaction(self, *arguments: float) -> None:
                if once:
                    self.flush(DEADLINE_S)  # the records are to be written, however slow the nodes are
                    once.pop()()
                super().commit_transaction(*arguments)

        return Losing

    def _lose(self) -> None:
        self.two.kill()
        wait_until(self._has_no_offsets, DEADLINE_S, "the partitions have no leader")

    def regain(self, settings: Settings) -> None:
        """Start the second node again. The end is lost."""
        self.two.start()
        wait_until(lambda: not self._has_no_offsets(), DEADLINE_S, "the partitions have a leader")
        answers: list[bool] = []

        def is_answered() -> bool:
            with suppress(KafkaException):  # the coordinator may still load
                answers.append(are_offsets_pending(settings))
            return bool(answers)

        wait_until(is_answered, DEADLINE_S, "the coordinator answers")
        assert answers == [True], "no end was lost: has Kafka been mended?"

    def _has_no_offsets(self) -> bool:
        found = self.topics.admin.list_topics(OFFSETS, timeout=DEADLINE_S).topics[OFFSETS].partitions.values()
        return all(partition.leader < 0 for partition in found)


def is_running(settings: Settings) -> bool:
    """Whether the instance is a member of its group, by which `delay-bridge resolve` keeps away from it."""
    try:
        must_be_pending(settings)
    except EnvironmentFailure:
        return True
    return False


@contextmanager
def losing_cluster() -> Iterator[LosingCluster]:
    """One that is new; releases that lose no markers skip its tests."""
    if not loses_markers(Release.of(kafka_version())):
        pytest.skip(f"Kafka {kafka_version()} loses no markers")
    with (
        own_broker(properties={**AUTHORIZER, **SOON}) as one,
        own_broker(joins=one, properties=AUTHORIZER) as two,
        pytest.MonkeyPatch.context() as patch,
    ):
        # A slow node that has just started is not a dead one; a killed one refuses connections.
        patch.setattr(liveness, "ANSWER_S", DEADLINE_S)
        topics = Topics(one.bootstrap)
        compacted = {"cleanup.policy": "compact"}
        topics.create(exactly=TRANSACTIONS, partitions=PARTITIONS, on=1, config=compacted)
        topics.create(exactly=OFFSETS, partitions=PARTITIONS, on=2, config=compacted)
        yield LosingCluster(one, two, topics)
