"""bench.relay, the lower bound of measurements: its deliveries, and its size."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench import relay
from bridge.settings.model import DeliverySettings
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.paths import ROOT
from tests.system.broker import Broker

RECORDS: Final = 300
LINES_MAX: Final = 80


@pytest.mark.system
def test_the_relay_delivers_each_record_once(broker: Broker, topics: Topics) -> None:
    """All records after its start, with one more header, also after a restart. It stops on SIGTERM."""
    topics.create(exactly=relay.TOPIC, partitions=4, config={"message.timestamp.type": "LogAppendTime"})
    target = topics.create("relayed")
    headers = [("delay-topic", target.encode()), ("mine", b"1")]
    sent = [Outgoing(topic=relay.TOPIC, value=b"%d" % number, headers=headers) for number in range(RECORDS)]
    produce(broker.bootstrap, sent[:1])
    command = [sys.executable, "-m", "bench.relay", "--bootstrap", broker.bootstrap]
    with TopicReader(broker.bootstrap, [target]) as reader:
        for round_ in range(2):
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout is not None and running.stdout.readline() == "ready\n"
                written = produce(broker.bootstrap, sent)
                wait_until(lambda: reader.poll() >= 0 and len(reader.records) >= RECORDS * (round_ + 1), 60, "all")  # noqa: B023
                running.send_signal(signal.SIGTERM)
                assert running.wait(scaled(30)) == 0
            assert len(reader.to_end()) == RECORDS * (round_ + 1)
            origins = {f"{one.topic}/{one.partition}/{one.offset}/{one.timestamp_ms}".encode() for one in written}
            assert {one.header(relay.ORIGIN) for one in reader.records[-RECORDS:]} == origins
    assert {one.headers[:2] for one in reader.records} == {tuple(headers)}
    assert all(len(one.headers) == 3 for one in reader.records)


def test_the_relay_commits_like_the_bridge() -> None:
    """Its commit interval is the bridge's default, and it stays a single short file."""
    assert DeliverySettings().commit_interval == relay.INTERVAL_MS
    assert len(Path(relay.__file__).read_text(encoding="utf-8").splitlines()) <= LINES_MAX
