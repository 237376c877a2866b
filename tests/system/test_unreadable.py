"""Batches that no reader can take: damaged on the brokers' disk, or holding more than memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from bridge.commands import cli
from bridge.ingest.batches import reading_mark
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.damage import flip_a_bit

pytestmark = pytest.mark.system

DELIVERED_S_MAX = 120
BOMB_BYTES = 70 << 20
"""More than is ever held; about 70 KB compressed."""


@pytest.mark.fault("batches that no reader can take")
def test_what_cannot_be_read_holds_up_its_own_partition_until_it_is_decided(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """A corrupt batch is named, and waits for an operator; a record that ended two processes becomes a dead letter with
    its place. Everything before, beside and behind them is delivered once."""
    delay, target = topics.delay(partitions=3), topics.create()
    headers = [("delay-for", b"1"), ("delay-topic", target.encode())]

    def send(partition: int, *values: bytes) -> None:
        for value in values:  # a batch each
            produce(broker.bootstrap, [Outgoing(topic=delay, partition=partition, value=value, headers=headers)])

    send(0, b"0.0", b"torn", b"0.2")
    send(1, b"1.0")
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "compression.type": "gzip", "message.max.bytes": 2 * BOMB_BYTES}
    )
    producer.produce(delay, bytes(BOMB_BYTES), partition=1, headers=headers)  # type: ignore[arg-type]
    assert producer.flush(DELIVERED_S_MAX) == 0
    send(1, b"1.2")
    flip_a_bit(broker, delay, 0, 1)
    with RunningBridge(tmp_path, broker.bootstrap, delay) as bridge, TopicReader(broker.bootstrap, [target]) as reader:
        bridge.data.mkdir(parents=True)
        mark = {f"{delay}/1": 0}
        (bridge.data / reading_mark.READ).write_text(json.dumps({"at": mark, "before": mark}))
        bridge.start()
        send(2, b"2.0")
        reader.wait_for(4, DELIVERED_S_MAX)
        assert sorted(record.value or b"" for record in reader.records) == [b"0.0", b"1.0", b"1.2", b"2.0"]
        (corrupt,) = bridge.events("batch-corrupt")
        place = (corrupt["topic"], corrupt["partition"], corrupt["offset"], corrupt["next"], corrupt["code"])
        assert place == (delay, 0, 1, 2, "DB-4060")

        def told() -> bool:
            return f"{delay}/0 is not read: its batch at offset 1 is corrupt (DB-4060)" in bridge.http("/readyz")[1]

        wait_until(told, DELIVERED_S_MAX, lambda: bridge.http("/readyz")[1])
        metric = f'delay_bridge_corrupt_batch_offset{{partition="0",topic="{delay}"}} 1.0'
        assert metric in bridge.http("/metrics")[1]
        command = ["skip-batch", f"{delay}/0/1", "--config", str(bridge.config_file)]
        assert "will count as skipped" in CliRunner().invoke(cli.app, command).output
        reader.wait_for(5, DELIVERED_S_MAX)
        assert reader.records[-1].value == b"0.2" and bridge.events("batch-skipped")
        with TopicReader(broker.bootstrap, [f"{delay}.dlt"]) as letters:
            letters.wait_for(2, DELIVERED_S_MAX)
            found = {record.header("delay-reason"): record for record in letters.to_end()}
        bomb, torn = found[b"too-large-to-read"], found[b"corrupt"]
        assert (bomb.key, bomb.value, bomb.header("delay-origin")) == (None, None, f"{delay}/1/1".encode())
        assert (bomb.header("delay-omitted") or b"").startswith(b"record (734")
        assert (torn.value, torn.header("delay-origin")) == (None, f"{delay}/0/1".encode())
        assert torn.header("delay-omitted") == b"records from offset 1 to 1"
        assert not bridge.events("query-failed")
