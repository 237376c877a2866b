"""Calibration: the speed of this machine and of its broker, at the beginning of each run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from confluent_kafka import Consumer

from bench.bridge import Bridge, pause, run_program
from bench.relay import INTERVAL_MS, TOPIC
from bench.report import percentiles
from bench.turns import DELAY_MS, Relay, measure
from dev.harness.pace import loop_processor_s

RATE: Final = 1_000
WARM_S: Final = 5
"""The first seconds of a load, which do not count."""
COPIED_BYTES: Final = 256 << 20
COPIES: Final = 5
SYNCED: Final = b"." * 4_096
SYNCS: Final = 50
FETCHED: Final = 1_000

LOOP: Final = "Python loop of a million turns, ms"
COPY: Final = "memory copy, GB/s"
SYNC: Final = "write and fsync of 4 KiB, median, ms"
CONSUMER_P50, CONSUMER_P99 = (f"plain consumer at 1,000/s: append to arrival {p}, ms" for p in ("p50", "p99"))
LATE_P50, LATE_P99 = (f"relay at 1,000/s: late {p}, ms" for p in ("p50", "p99"))
ARRIVAL_P50, ARRIVAL_P99 = (f"relay at 1,000/s: late at the consumer {p}, ms" for p in ("p50", "p99"))
RELAY_CPU: Final = "relay at 1,000/s: CPU, % of a core"
"""The figures."""


def calibrate(bridge: Bridge, seconds: int) -> dict[str, float]:
    """The figures; the plain consumer and the relay take `seconds` each. The bridge must not run."""
    figures = {
        LOOP: 1000 * loop_processor_s(),
        COPY: copied_bytes_per_s(bridge) / 1e9,
        SYNC: 1000 * sync_s(bridge),
    }
    figures |= _figures(_consumer(bridge, seconds), CONSUMER_P50, CONSUMER_P99)
    with Relay(bridge.bootstrap, INTERVAL_MS) as relay:
        relay.launch()
        relay.wait_ready()
        turn = measure(bridge, relay, TOPIC, RATE, [("warm", WARM_S, WARM_S + seconds)])
    figures |= _figures(turn.stamped_ms["warm"], LATE_P50, LATE_P99)
    figures |= _figures(turn.arrived_ms["warm"], ARRIVAL_P50, ARRIVAL_P99)
    return figures | {RELAY_CPU: 100 * turn.cpu["warm"]}


def copied_bytes_per_s(bridge: Bridge) -> float:
    """The best of five copies of 256 MiB."""
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    taken_s = []
    for _ in range(COPIES):
        began_s = bridge.clock.monotonic_s()
        np.copyto(target, source)
        taken_s.append(bridge.clock.monotonic_s() - began_s)
    return COPIED_BYTES / min(taken_s)


def sync_s(bridge: Bridge) -> float:
    """The median time of a write with fsync, beside the bridge's data, in seconds."""
    path: Path = bridge.directory / "synced"
    taken_s = []
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            began_s = bridge.clock.monotonic_s()
            file.write(SYNCED)
            os.fsync(file.fileno())
            taken_s.append(bridge.clock.monotonic_s() - began_s)
    path.unlink()
    return median(taken_s)


def _figures(late_ms: Mapping[str, float], p50: str, p99: str) -> dict[str, float]:
    """Two percentiles by their names; without a message, none."""
    return {p50: late_ms["p50"], p99: late_ms["p99"]} if late_ms else {}


def _consumer(bridge: Bridge, seconds: int) -> dict[str, float]:
    """Append to arrival at a plain consumer: percentiles in ms."""
    what = ("--messages", str(RATE * (WARM_S + seconds)), "--rate", str(RATE), "--delay", *map(str, DELAY_MS))
    load = run_program(bridge, "load", "--topic", TOPIC, *what, "--not-idempotent")
    pause(WARM_S)
    with plain_consumer(bridge, TOPIC) as arrived_ms:
        load.wait()
    return percentiles(np.array(arrived_ms))


@contextmanager
def plain_consumer(bridge: Bridge, topic: str) -> Iterator[list[int]]:
    """Arrival minus record timestamp, ms, of a consumer in this process: the lower bound for any bridge."""
    group = f"bound-{bridge.clock.now_ms()}"
    consumer = Consumer({"bootstrap.servers": bridge.bootstrap, "group.id": group, "auto.offset.reset": "latest"})
    consumer.subscribe([topic])
    late_ms: list[int] = []
    closed = threading.Event()

    def read() -> None:
        while not closed.is_set():
            messages = consumer.consume(FETCHED, 0.002)
            now_ms = bridge.clock.now_ms()
            late_ms.extend(now_ms - message.timestamp()[1] for message in messages if message.error() is None)

    thread = threading.Thread(target=read, name="plain-consumer")
    thread.start()
    try:
        yield late_ms
    finally:
        closed.set()
        thread.join()
        consumer.close()
