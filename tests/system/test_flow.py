"""Disk and memory of a running bridge: many flushes, a disk that is full, floods of near and far delays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Producer

from dev.harness.kafka import Outgoing, TopicReader, Topics, assert_each_once, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import AS_SHIPPED, RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE_S: Final = 90
DISK_BYTES: Final = 24 << 20
DAY_MS: Final = 86_400_000
FLOOD: Final = 120_000
FLOOD_AHEAD_MS: Final = 20_000
FLOOD_FOR_MS: Final = 20_000
FLOOD_LATE_MS_MAX: Final = 45_000
READY_ROWS_BYTES: Final = 16 << 20
FLUSHES: Final = 9
"""One more than the segments that become one."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


@pytest.mark.fault("a full disk")
def test_many_flushes_and_a_full_disk(broker: Broker, topics: Topics, tmp_path: Path, small_disk: Path) -> None:
    """Segments of many flushes become one. On a full disk ingest stops, as /readyz and a metric say, due messages are
    delivered nevertheless, and with room again ingest goes on by itself: each message arrives once."""
    delay, target, clock = topics.delay(), topics.create("orders"), SystemClock()
    sent = 0

    def send(count: int, delay_ms: int, size: int = 10) -> None:
        nonlocal sent
        headers = [("delay-until", b"%d" % (clock.now_ms() + delay_ms)), ("delay-topic", target.encode())]
        values = [b"%08d" % number + b"." * size for number in range(sent, sent + count)]
        produce(broker.bootstrap, [Outgoing(topic=delay, value=value, headers=headers) for value in values])
        sent += count

    store = {"directory": str(small_disk / "data"), "flush_interval": "1s", "flush_bytes": "4MiB"}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config={"store": store}, spark=False) as bridge:
        bridge.start()
        for flush in range(FLUSHES):
            send(20, DAY_MS)
            wait_until(lambda n=flush + 1: len(bridge.events("segment-written")) >= n, DEADLINE_S, "a flush")  # type: ignore[misc]
        wait_until(lambda: bridge.events("segments-compacted"), DEADLINE_S, lambda: f"compaction; {bridge.tail()}")
        assert bridge.metrics()["segments"] <= 2

        with TopicReader(broker.bootstrap, [target]) as reader:
            ballast = small_disk / "ballast"
            with pytest.raises(OSError, match="No space left"):
                fill(ballast)
            send(50, 20_000)
            send(12_000, DAY_MS, size=1_000)
            wait_until(lambda: bridge.http("/readyz")[0] == 503, DEADLINE_S, lambda: f"not ready; {bridge.tail()}")
            assert "disk is full" in bridge.http("/readyz")[1]
            assert bridge.http("/livez")[0] == 200
            reader.wait_for(50, DEADLINE_S)
            assert bridge.metrics()["disk_full"] == 1
            send(100, DAY_MS)
            lag = f'consumer_lag_records{{partition="0",topic="{delay}"}}'
            # At least the records sent just now: how much was read before there was no room depends on the machine.
            wait_until(lambda: bridge.metrics()[lag] >= 100, DEADLINE_S, "Kafka keeps the rest")
            assert bridge.http("/readyz")[0] == 503
            ballast.unlink()
            wait_until(lambda: bridge.http("/readyz")[0] == 200, DEADLINE_S, lambda: f"ready again; {bridge.tail()}")
            send(20, 0)
            values = [record.value or b"" for record in reader.wait_for(70, DEADLINE_S)]
        far = FLUSHES * 20
        expected = [*range(far, far + 50), *range(sent - 20, sent)]
        assert sorted(value[:8] for value in values) == [b"%08d" % number for number in expected]
        wait_until(lambda: bridge.metrics()["pending_messages"] == far + 12_100, DEADLINE_S, "all that is far is known")
        metrics = bridge.metrics()
        assert metrics["disk_full"] == metrics["early_deliveries_total"] == 0
        assert bridge.stop() == 0


@pytest.mark.fault("a flood of delays")
def test_floods_of_near_and_far_delays_stay_within_their_memory(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """With several times the memory of messages due within the horizon, and as many due in days, ready rows stay within
    `ready_rows.bytes`, near messages arrive once and in time, and far ones wait."""
    delay, target, clock = topics.delay(partitions=2), topics.create("orders", partitions=2), SystemClock()
    limits = {"ready_rows": {"bytes": READY_ROWS_BYTES}, "store": {"flush_bytes": "8MiB", "flush_interval": "5s"}}
    with (
        RunningBridge(tmp_path, broker.bootstrap, delay, config={**limits, **AS_SHIPPED}) as bridge,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        bridge.start()
        start_ms = clock.now_ms() + FLOOD_AHEAD_MS
        room = {
            "queue.buffering.max.messages": 2 * FLOOD
        }  # for all: a slow broker must not fail the test's own producer
        producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20, **room})
        for number in range(FLOOD):
            near = b"%d" % (start_ms + number * FLOOD_FOR_MS // FLOOD)
            far = b"%d" % (start_ms + DAY_MS * (1 + number % 30))
            for until in (near, far):
                headers: list[tuple[str, str | bytes | None]] = [("delay-until", until), ("delay-topic", target)]
                producer.produce(delay, b"%08d" % number + b"." * 192, headers=headers, partition=number % 2)
            producer.poll(0)
        assert producer.flush(DEADLINE_S) == 0
        ready_rows_bytes, rss_bytes = [], []

        def have_arrived() -> bool:
            reader.poll(0.2)
            ready_rows_bytes.append(bridge.metrics()["ready_rows_bytes"])
            rss_bytes.append(bridge.rss_bytes())
            return len(reader.records) >= FLOOD

        wait_until(have_arrived, 2 * DEADLINE_S, lambda: f"{len(reader.records)} have arrived; {bridge.tail()}")
        records = reader.to_end()
        assert_each_once((int((record.value or b"")[:8]) for record in records), FLOOD)
        late_ms = [record.timestamp_ms - int(record.header("delay-due") or b"") for record in records]
        print(f"ready {max(ready_rows_bytes) / 2**20:.0f} MiB, RSS {max(rss_bytes) >> 20} MiB, late {max(late_ms)} ms")
        assert min(late_ms) >= 0
        assert max(late_ms) <= FLOOD_LATE_MS_MAX
        assert max(ready_rows_bytes) <= READY_ROWS_BYTES
        assert max(rss_bytes) <= 1 << 30
        wait_until(lambda: bridge.metrics()["pending_messages"] == FLOOD, DEADLINE_S, "the far ones are pending")
        assert bridge.stop() == 0


def fill(path: Path) -> None:
    """Write a file until there is no room."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
