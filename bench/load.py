"""Load: a separate process that sends delayed messages at a rate, or as fast as possible.

python -m bench.load --bootstrap ... --messages 1000000 --due EPOCH_MS               all due at one instant
python -m bench.load --bootstrap ... --messages 300000 --rate 10000 --delay 1000 5000   delays spread evenly, in ms
python -m bench.load --bootstrap ... --messages 300000 --delay 60000 86400000 --mixed --ids 1000   delays spread evenly
                                    in the logarithm; the first thousand messages have an id
python -m bench.load --bootstrap ... --messages 1000 --cancel                           cancels those thousand
"""

from __future__ import annotations

import argparse
import math
import random
import sys

from confluent_kafka import Producer

from dev.harness.kafka import Outgoing, send_all

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
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--ids", type=int, default=0)
    parser.add_argument("--cancel", action="store_true")
    parser.add_argument("--not-idempotent", action="store_true", help="for a load without outages of brokers")
    parser.add_argument("--wait", action="store_true", help="wait for a line on standard input, ready to send")
    arguments = parser.parse_args()
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "delivery.report.only.error": True,
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
            topic=DELAY_TOPIC,
            value=None if arguments.cancel else values[i % VALUES],
            key=b"key-%d" % (i % 10_000),
            headers=message_headers(i, arguments, chance),
        )
        for i in range(arguments.messages)
    )
    if arguments.wait:
        producer.list_topics()
        sys.stdin.readline()
    send_all(producer, records, per_second=arguments.rate)
    assert not failed, f"{len(failed)} records were refused: {failed[0]}"


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
