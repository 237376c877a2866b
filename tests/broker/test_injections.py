"""Requests of transactions that arrive late, twice or never: a dispatcher behind a proxy, and a consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError

from dev.harness.kafka import TopicReader, Topics, assert_each_once
from dev.proxy import Api, Hit, Proxy, RequestFault
from dev.proxy.protocol import TRANSACTIONAL
from tests.broker.rig import Rig
from tests.injections.combinations import FAULTS, Combination
from tests.injections.dispatching import Order, add, begin, rig_of
from tests.injections.piece import Injections
from tests.injections.rows import PARTITIONS
from tests.system.broker import Broker

pytestmark = pytest.mark.system

ROWS = 24
FENCED = {KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
REFUSED = FENCED | {KafkaError.CONCURRENT_TRANSACTIONS}
"""A coordinator that is writing the state of the next transaction says so before it looks at the epoch."""
TRIES = 20
COMBINATIONS = [(fault, api) for fault in FAULTS for api in sorted(TRANSACTIONAL)]


@dataclass(slots=True)
class Delivery:
    """A dispatcher behind a proxy, and a consumer of its targets."""

    proxy: Proxy
    rig: Rig
    order: Order
    reader: TopicReader
    rows: int = 0

    def deliver(self) -> None:
        """Rows for several transactions, which are due."""
        now_ms = self.rig.clock.now_ms()
        add(self.rig, self.order, [(self.rows, ROWS, now_ms, 0)])
        self.rows += ROWS
        self.rig.wait_delivered()

    def inject(self, combination: Combination) -> list[Hit]:
        """Deliver until one injection counts, and a little more."""
        injections = Injections(self.proxy, combination, seed=self.rows, chance=0.3, under_way=1, limit=1)
        for _ in range(TRIES):
            injections.provoke()
            self.deliver()
            if counted := [hit for hit in injections.over() if injections.counts(hit)]:
                break
            injections.limit = len(injections.over()) + 1
        self.proxy.clear()
        self.deliver()
        return counted


@contextmanager
def delivering(broker: Broker, topics: Topics, *, renews: bool = True) -> Iterator[Delivery]:
    delay = topics.delay(partitions=PARTITIONS)
    topics.create(exactly=f"{delay}.dlt")
    targets = topics.create(), topics.create()
    with Proxy(broker.bootstrap) as proxy:
        order = Order(
            bootstrap=proxy.bootstrap,
            direct=broker.bootstrap,
            delay=delay,
            targets=targets,
            abort_each=3,
            renews=renews,
        )
        with rig_of(order) as rig, TopicReader(broker.bootstrap, targets) as reader:
            begin(rig, order, [(0, 0, 0, 0)])
            yield Delivery(proxy, rig, order, reader)


@pytest.fixture(scope="module")
def delivery(broker: Broker, topics: Topics) -> Iterator[Delivery]:
    """Shared by all: a start takes longer than an injection."""
    with delivering(broker, topics) as started:
        yield started


@pytest.mark.parametrize(
    ("fault", "api"), COMBINATIONS, ids=[f"{fault.name}-{api.name}" for fault, api in COMBINATIONS]
)
def test_each_message_is_seen_once(delivery: Delivery, fault: RequestFault, api: Api) -> None:
    """A transaction with a request that is late, lost or doubled ends in a commit or an abort, and a late request is
    refused."""
    [hit] = delivery.inject(Combination(fault.value, api.name, "any"))
    if fault is RequestFault.LATE and api is not Api.INIT_PRODUCER_ID:
        assert hit.answer in REFUSED
    assert_each_once((int(record.value or b"-1") for record in delivery.reader.to_end()), delivery.rows)


def test_without_new_epochs_what_is_late_is_taken(broker: Broker, topics: Topics) -> None:
    """So the injections reach their aim."""
    with delivering(broker, topics, renews=False) as delivery:
        for api in (Api.END_TXN, Api.TXN_OFFSET_COMMIT):
            [hit] = delivery.inject(Combination(RequestFault.LATE.value, api.name, "commit"))
            assert hit.answer not in FENCED
