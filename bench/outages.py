"""Repeated outages of the only broker, with the bridge and with a plain transactional producer.

Kafka confirms a commit before it writes the markers (docs/failures.md, lost transaction markers). The plain producer
shows the cost for the next abort under the same id, which it makes after each restart.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from bench.bridge import Bridge, pause, run_program
from bench.report import Report
from dev.harness.kafka import Topics, read_committed
from timerstore.clock import Clock

RATE: Final = 2_000
DELAY_MS: Final = ("300", "10000")
UP_S: Final = 15.0
AWAY_S: Final = (2, 5, 20)
CYCLE_S: Final = 35
"""The approximate length of an outage with its recovery, which determines the length of the load."""
REST_S: Final = 120
TRANSACTIONS_S: Final = 1.5
RECORDS: Final = 10
"""The records of a plain transaction for each partition."""
TOPICS: Final = ("plain-a", "plain-b")
PARTITIONS: Final = 4
CALL_S: Final = 15.0


def outages(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """Stop and kill the broker in turn, `--outages` times."""
    bridge.start()
    seconds = CYCLE_S * arguments.outages
    count, began_s = RATE * seconds, bridge.clock.monotonic_s()
    reader = run_program(bridge, "receive", "--messages", str(count), "--seconds", str(seconds + 2 * REST_S))
    load = run_program(bridge, "load", "--messages", str(count), "--rate", str(RATE), "--delay", *DELAY_MS)
    number = restarts = 0
    while load.poll() is None:
        pause(UP_S)
        if not bridge.running:  # as a supervisor would
            bridge.start()
            restarts += 1
        if bridge.clock.monotonic_s() - began_s < seconds - CYCLE_S:
            (bridge.broker.kill if number % 2 else bridge.broker.stop)()
            pause(AWAY_S[number % len(AWAY_S)])
            bridge.broker.start()
            number += 1
    assert load.returncode == 0, "not all was sent"
    got: dict[str, Any] = json.loads(reader.communicate()[0])
    exact = f"{got['received']:,} / {got['doubled']} / {got['early']}"
    report.add("outages", f"received / doubled / early, over {number} outages", exact, f"{count:,} / 0 / 0")
    report.add("outages", "the bridge ended, and was started again", str(restarts))
    if (got["received"], got["doubled"]) != (count, 0):
        kept = Path(tempfile.mkdtemp(prefix="delay-bridge-outages-"))
        shutil.copy(bridge.log_file, kept)
        shutil.copytree(bridge.broker.data, kept / "broker")
        report.add("outages", "log and broker are kept in", str(kept))
    bridge.stop()
    plain_producer(bridge, arguments.outages, report)


def plain_producer(bridge: Bridge, restarts: int, report: Report) -> None:
    """A producer that commits one transaction after another, and aborts the first one after each restart of the
    broker."""
    for name in TOPICS:
        Topics(bridge.bootstrap).create(exactly=name, partitions=PARTITIONS)
    confirmed: list[int] = []
    transactions = PlainTransactions(bridge.bootstrap, bridge.clock)
    for number in range(restarts):
        with breaking(bridge.broker.kill if number % 2 else bridge.broker.stop):
            while (made := transactions.commit()) is not None:
                confirmed.append(made)
        bridge.broker.start()
        transactions.begin_anew()
        transactions.abort()
        confirmed += [made for _ in range(3) if (made := transactions.commit()) is not None]
    seen = Counter(int(record.value or 0) for name in TOPICS for record in read_committed(bridge.bootstrap, name))
    whole = RECORDS * PARTITIONS * len(TOPICS)
    gone = sum(seen[number] != whole for number in confirmed)
    figure = f"{gone} of {len(confirmed):,}"
    report.add("outages", f"a plain producer: confirmed commits that are gone, over {restarts} restarts", figure)


class PlainTransactions:
    """Numbered transactions of one transactional id; each writes its number to all partitions."""

    def __init__(self, bootstrap: str, clock: Clock) -> None:
        self._properties: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"plain-{clock.now_ms()}",
            "transaction.timeout.ms": 10_000,
            "linger.ms": 5,
            "log_level": 0,
        }
        self._number = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Go on with another producer of the same id, as soon as the brokers accept it."""
        while True:
            self._producer = Producer(self._properties)
            try:
                self._producer.init_transactions(CALL_S)
            except KafkaException:
                pause(0.2)
            else:
                return

    def commit(self) -> int | None:
        """The number of a transaction whose commit was confirmed; None: the brokers are away."""
        try:
            self._write()
            self._producer.commit_transaction(CALL_S / 5)
        except KafkaException:
            return None
        return self._number

    def abort(self) -> None:
        """Abort a transaction whose records have reached the brokers."""
        self._write()
        self._producer.flush(CALL_S)
        self._producer.abort_transaction(CALL_S)

    def _write(self) -> None:
        self._number += 1
        self._producer.begin_transaction()
        for name in TOPICS:
            for partition in range(PARTITIONS):
                for _ in range(RECORDS):
                    self._producer.produce(name, partition=partition, value=b"%d" % self._number)


@contextmanager
def breaking(end: Callable[[], None]) -> Iterator[None]:
    """End the broker inside the context, at a random moment."""
    timer = threading.Timer(TRANSACTIONS_S + 0.2 * random.random(), end)
    timer.start()
    try:
        yield
    finally:
        timer.join()
