"""After a downtime: overdue messages come at the configured rate, and newly due ones do not wait for them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from bridge.delivery.plan.overdue import WAITED_MS_MAX
from bridge.wire.reasons import RejectReason
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce, read_committed
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow]

DELIVERED_S_MAX: Final = 90
RATE: Final = 10
OVERDUE: Final = 150
NOW: Final = 20
GIVEN_UP: Final = 30
OLDER_THAN_MS: Final = 10_000
"""So old nothing may get that was sent while the bridge runs, however slow the machine is."""


def test_a_backlog_comes_at_its_rate_and_lets_what_is_due_now_pass(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """Every message arrives once, with the due time that it had; each overdue one was rewritten once at most."""
    delay, target = topics.delay(partitions=2), topics.create()
    clock = SystemClock()
    to = ("delay-topic", target.encode())
    overdue = [Outgoing(topic=delay, value=b"old-%d" % i, headers=[("delay-for", b"0"), to]) for i in range(OVERDUE)]
    written = produce(broker.bootstrap, overdue)
    last_ms = max(record.timestamp_ms for record in written)
    wait_until(lambda: clock.now_ms() > last_ms + WAITED_MS_MAX + 1_000, 60, "a downtime")
    config = {"overdue": {"rate": f"{RATE}/s"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        wait_until(lambda: bridge.metrics()["records_deferred_total"] > 0, DELIVERED_S_MAX, "the rate is in force")
        fresh = [Outgoing(topic=delay, value=b"new", headers=[("delay-for", b"500ms"), to]) for _ in range(NOW)]
        produce(broker.bootstrap, fresh)
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(OVERDUE + NOW, DELIVERED_S_MAX)
            records = reader.to_end()
        deferred = bridge.metrics()["records_deferred_total"]
    old = [record for record in records if (record.value or b"").startswith(b"old-")]
    new = [record for record in records if record.value == b"new"]
    assert sorted(record.value or b"" for record in old) == sorted(record.value or b"" for record in overdue)
    assert {r.value: r.header("delay-due") for r in old} == {r.value: b"%d" % r.timestamp_ms for r in written}
    assert len(new) == NOW
    stamps = np.array([record.timestamp_ms for record in old])
    assert stamps.max() - stamps.min() >= 1000 * (OVERDUE / RATE - 2), "spread over as long as the rate says"
    assert max(record.timestamp_ms for record in new) < stamps.max(), "what was due now did not wait"
    copies = [r for r in read_committed(broker.bootstrap, delay) if "delay-copy-at" in dict(r.headers)]
    assert len(copies) == deferred <= OVERDUE - RATE
    assert len({record.value for record in copies}) == len(copies)


def test_what_is_older_than_the_limit_is_given_up_and_the_rest_is_delivered(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """`overdue.policy: dead-letter` after a downtime: by the due time of each message, byte for byte, and once."""
    delay, target = topics.delay(partitions=2), topics.create()
    clock = SystemClock()
    to = ("delay-topic", target.encode())
    long_ago = [
        Outgoing(topic=delay, key=b"k", value=b"old-%d" % i, headers=[("delay-for", b"0"), to, ("mine", b"1")])
        for i in range(GIVEN_UP)
    ]
    written = produce(broker.bootstrap, long_ago)
    last_ms = max(record.timestamp_ms for record in written)
    wait_until(lambda: clock.now_ms() > last_ms + OLDER_THAN_MS, 60, "a downtime")
    config = {"overdue": {"policy": "dead-letter", "older_than": f"{OLDER_THAN_MS}ms"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        produce(
            broker.bootstrap,
            [Outgoing(topic=delay, value=b"new", headers=[("delay-for", b"500ms"), to]) for _ in range(NOW)],
        )
        with TopicReader(broker.bootstrap, [target]) as reader:
            reader.wait_for(NOW, DELIVERED_S_MAX)
            delivered = reader.to_end()
        with TopicReader(broker.bootstrap, [f"{delay}.dlt"]) as reader:
            reader.wait_for(GIVEN_UP, DELIVERED_S_MAX)
            dead = reader.to_end()
        bridge.stop()
    assert [record.value for record in delivered] == [b"new"] * NOW
    assert sorted(record.value or b"" for record in dead) == sorted(record.value or b"" for record in long_ago)
    assert {record.key for record in dead} == {b"k"}
    assert {record.header("mine") for record in dead} == {b"1"}
    assert {record.header("delay-reason") for record in dead} == {RejectReason.OVERDUE.value.encode()}
