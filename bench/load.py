"""Load: a separate process that sends delayed messages at a rate, or as fast as possible.

python -m bench.load --bootstrap ... --messages 1000000 --due EPOCH_MS               all due at one instant
python -m bench.load --bootstrap ... --messages 300000 --rate 10000 --delay 1000 5000   delays spread evenly, in ms
python -m bench.load --bootstrap ... --messages 300000 --delay 60000 86400000 --mixed --ids 1000   delays spread evenly
                                    in the logarithm; the first thousand messages have an id
python -m bench.load --bootstrap ... --messages 1000 --cancel                           cancels those thousand

With `--windows` it prints a JSON line: percentiles (ms) of the producer's wait for the append, for each window.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence

import numpy as np
from confluent_kafka import KafkaError, Message, Producer

from bench.report import by_window
from dev.harness.kafka import Outgoing, send_all
from timerstore.clock import Clock, SystemClock

VALUE_BYTES = 200
VALUES = 50_000
DELAY_TOPIC = "delay"
TARGETS = ("bench-a", "bench-b")


def main() -> None:
    """Send the messages, and wait for all acknowledgements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--rate", type=int)
    parser.add_argument("--due", type=int)
    parser.add_argument("--delay", type=int, nargs=2, default=(1_000, 5_000))
    parser.add_argument("--topic", default=DELAY_TOPIC)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--ids", type=int, default=0)
    parser.add_argument("--cancel", action="store_true")
    parser.add_argument("--not-idempotent", action="store_true", help="for a load without outages of brokers")
    parser.add_argument("--wait", action="store_true", help="wait for a line on standard input, ready to send")
    parser.add_argument("--windows", nargs="+", help="name, first and last second of each, for the times of appends")
    arguments = parser.parse_args()
    failed: list[object] = []
    appends = Appends(failed, SystemClock())
    producer = Producer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "delivery.report.only.error": not arguments.windows,
            "on_delivery": lambda error, _message: failed.append(error),
            "linger.ms": 5,
            # An idempotent client spins while brokers are busy (bridge/settings/time_budgets.py), on a processor that
            # it shares with broker and bridge.
            "enable.idempotence": not arguments.not_idempotent,
            "log_level": 0,
            "queue.buffering.max.messages": 200_000,
            "batch.size": 500_000,
        }
    )
    chance = random.Random(1)
    values = [chance.randbytes(VALUE_BYTES) for _ in range(VALUES)]
    records = (
        Outgoing(
            topic=arguments.topic,
            value=None if arguments.cancel else values[i % VALUES],
            key=b"key-%d" % (i % 10_000),
            headers=message_headers(i, arguments, chance),
        )
        for i in range(arguments.messages)
    )
    if arguments.wait:
        producer.list_topics()
        sys.stdin.readline()
    send_all(producer, records, appends.of_one if arguments.windows else None, per_second=arguments.rate)
    assert not failed, f"{len(failed)} records were refused: {failed[0]}"
    if arguments.windows:
        print(json.dumps(appends.by_window(arguments.windows)))


class Appends:
    """The producer's wait for the broker's append: LogAppendTime minus the time of the call, in ms, of each message."""

    def __init__(self, failed: list[object], clock: Clock) -> None:
        """`failed` gets the errors of refused messages."""
        self._failed = failed
        self._clock = clock
        self._sent_ms: list[int] = []
        self._waited_ms: list[int] = []

    def of_one(self) -> Callable[[KafkaError | None, Message], None]:
        """The callback of the next message, which is sent now."""
        sent_ms = self._clock.now_ms()

        def appended(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failed.append(error)
                return
            self._sent_ms.append(sent_ms)
            self._waited_ms.append(message.timestamp()[1] - sent_ms)

        return appended

    def by_window(self, windows: Sequence[str]) -> dict[str, dict[str, float]]:
        """Percentiles, by the second of the call since the first one."""
        since_ms = np.array(self._sent_ms) - min(self._sent_ms, default=0)
        ends_ms = [text if at % 3 == 0 else str(1000 * int(text)) for at, text in enumerate(windows)]
        return by_window(ends_ms, since_ms, np.array(self._waited_ms))


def message_headers(i: int, arguments: argparse.Namespace, chance: random.Random) -> list[tuple[str, bytes | None]]:
    """The headers of the i-th message."""
    if arguments.cancel:
        return [("delay-cancel", b"id-%d" % i)]
    if arguments.due is not None:
        when = ("delay-until", b"%d" % arguments.due)
    elif arguments.mixed:
        low, high = map(math.log, arguments.delay)
        when = ("delay-for", b"%d" % math.exp(chance.uniform(low, high)))
    else:
        when = ("delay-for", b"%d" % chance.randrange(*arguments.delay))
    headers: list[tuple[str, bytes | None]] = [
        when,
        ("delay-topic", arguments.targets[i % len(arguments.targets)].encode()),
    ]
    if i < arguments.ids:
        headers.append(("delay-id", b"id-%d" % i))
    return headers


if __name__ == "__main__":
    main()
