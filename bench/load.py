"""Load: a process of its own that sends delayed messages at a rate, or as fast as it can.

python -m bench.load --bootstrap ... --messages 1000000 --due EPOCH_MS               all due at one instant
python -m bench.load --bootstrap ... --messages 300000 --rate 10000 --delay 1000 5000   delays spread evenly, in ms
"""

from __future__ import annotations

import argparse
import random

from confluent_kafka import Producer

from timerstore.clock import SystemClock

VALUE_BYTES = 200
VALUES = 50_000
DELAY_TOPIC = "delay"
TARGETS = ("bench-a", "bench-b")
PACE_S = 0.005


def main() -> None:
    """Send, and wait until everything is acknowledged."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--rate", type=int)
    parser.add_argument("--due", type=int)
    parser.add_argument("--delay", type=int, nargs=2, default=(1_000, 5_000))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    arguments = parser.parse_args()
    clock = SystemClock()
    producer = Producer(
        {
            "bootstrap.servers": arguments.bootstrap,
            "linger.ms": 5,
            "acks": "all",
            "queue.buffering.max.messages": 200_000,
            "batch.size": 500_000,
        }
    )
    chance = random.Random(1)
    values = [chance.randbytes(VALUE_BYTES) for _ in range(VALUES)]
    targets = [name.encode() for name in arguments.targets]
    began_s = clock.monotonic_s()
    for i in range(arguments.messages):
        if arguments.due is not None:
            when = ("delay-until", str(arguments.due).encode())
        else:
            when = ("delay-for", str(chance.randrange(*arguments.delay)).encode())
        headers: list[tuple[str, str | bytes | None]] = [when, ("delay-topic", targets[i % len(targets)])]
        while True:
            try:
                producer.produce(DELAY_TOPIC, values[i % VALUES], key=b"key-%d" % (i % 10_000), headers=headers)
                break
            except BufferError:
                producer.poll(0.05)
        if arguments.rate:
            ahead_s = (i + 1) / arguments.rate - (clock.monotonic_s() - began_s)
            if ahead_s > PACE_S:
                producer.poll(ahead_s)
    if producer.flush(120) != 0:
        raise SystemExit("not everything was acknowledged")


if __name__ == "__main__":
    main()
