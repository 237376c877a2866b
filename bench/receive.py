"""Receive: a separate process that reads a number of messages from the targets, and reports their lateness.

It prints one JSON line: counts, duplicates, early messages, and percentiles (ms) of record timestamp minus due time and
of arrival here minus due time. A record of the relay is due when it is appended to the relay's topic.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from bench.load import TARGETS
from bench.relay import ORIGIN
from bench.report import by_window, percentiles, windows_of
from timerstore.clock import SystemClock

FETCHED = 2_000
POLL_S = 0.002
"""A longer time-out would affect the measurement: the client waits for a full batch."""


def main() -> None:
    """Read until `--messages` have come or `--seconds` are over. Messages due before `--skip-due-before` (epoch ms) do
    not count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--isolation", default="read_committed")
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--skip-due-before", type=int, default=0)
    parser.add_argument("--windows", nargs="+", default=(), help="name, first and last due time (epoch ms) of each")
    parser.add_argument("--wait", action="store_true", help="wait for the windows as JSON on standard input")
    parser.add_argument("--from-end", action="store_true", help="skip existing records")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    arguments = parser.parse_args()
    gc.disable()  # its pauses, which grow with the messages, would be measured as lateness
    clock = SystemClock()
    consumer = Consumer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "group.id": f"bench-{arguments.isolation}-{clock.now_ms()}",
            "isolation.level": arguments.isolation,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    # Not as a member of a group: a member that is evicted during an outage would read all records again.
    topics = consumer.list_topics().topics
    partitions = [TopicPartition(name, number) for name in arguments.targets for number in topics[name].partitions]
    for partition in partitions:
        _, end = consumer.get_watermark_offsets(partition)
        partition.offset = end if arguments.from_end else OFFSET_BEGINNING
    consumer.assign(partitions)
    origins: list[bytes] = []  # the growth of a set would affect the measurement
    stamped: list[int] = []
    arrived: list[int] = []
    due: list[int] = []
    deadline_s = clock.monotonic_s() + arguments.seconds
    while len(due) < arguments.messages and clock.monotonic_s() < deadline_s:
        batch = consumer.consume(FETCHED, timeout=POLL_S)
        now_ms = clock.now_ms()
        for message in batch:
            if (error := message.error()) is not None:
                assert error.code() != KafkaError._AUTO_OFFSET_RESET, error  # brokers may be away: no record is skipped
                continue
            headers: dict[str, Any] = dict(message.headers() or [])
            if (relayed := headers.get(ORIGIN)) is None:
                origin, due_ms = headers["delay-origin"], headers["delay-due"]
            else:
                origin, _, due_ms = relayed.rpartition(b"/")
            origins.append(origin)
            due.append(int(due_ms))
            stamped.append(message.timestamp()[1])
            arrived.append(now_ms)
    consumer.close()
    windows = json.loads(sys.stdin.readline()) if arguments.wait else arguments.windows
    dues = np.array(due)
    late_ms, later_ms = np.array(stamped) - dues, np.array(arrived) - dues
    of_records, of_arrivals = (by_window(windows, dues, values) for values in (late_ms, later_ms))
    steady = dues >= arguments.skip_due_before
    print(
        json.dumps(
            {
                "received": len(due),
                "doubled": len(origins) - len(set(origins)),
                "early": int((np.array(stamped) < dues).sum()),
                "last_ms": int(max(stamped, default=0)),
                "stamped_ms": percentiles(late_ms[steady]),
                "arrived_ms": percentiles(later_ms[steady]),
                "windows": {
                    name: {
                        "stamped_ms": of_records[name],
                        "arrived_ms": of_arrivals[name],
                        "by_partition_ms": by_partition(origins, late_ms, (dues >= start) & (dues < end)),
                    }
                    for name, start, end in windows_of(windows)
                },
            }
        )
    )


def by_partition(origins: Sequence[bytes], late_ms: np.ndarray, chosen: np.ndarray) -> dict[str, dict[str, float]]:
    """Percentiles of the lateness by partition of the delay topic."""
    late: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(chosen).tolist():
        late[origins[row].decode().rpartition("/")[0]].append(int(late_ms[row]))
    return {name: percentiles(np.array(values)) for name, values in late.items()}


if __name__ == "__main__":
    main()
