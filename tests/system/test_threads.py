"""Threads of the whole process that stand still, and what must not look like that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bridge.errors import EnvironmentFailure
from bridge.ingest.watch.waits import Wait
from bridge.telemetry.heartbeats import CALLS_S
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker, own_broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(900)]

THREADS: Final = frozenset(
    {"main", "ownership", "dispatcher", "ingest", "query", "maintenance", "targets", "clock-jumps", "credentials"}
)
SLACK_S: Final = 30
DEADLINE_S: Final = 90


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing, and keeps its connections."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def piped(path: Path) -> Iterator[None]:
    """A file from which nothing comes."""
    text, pipe = path.read_text(), path.with_suffix(".pipe")
    os.mkfifo(pipe)
    pipe.replace(path)
    try:
        yield
    finally:
        writer = os.open(path, os.O_WRONLY)  # when it is read
        pipe.write_text(text)
        pipe.replace(path)
        os.write(writer, text.encode())
        os.close(writer)


def silences(bridge: RunningBridge) -> dict[str, tuple[float, float]]:
    """By thread: how long it has been silent, and for how long it may be."""
    metrics = bridge.metrics()
    prefix = "thread_heartbeat_age_seconds"
    return {
        name.split('"')[1]: (value, metrics[name.replace("_age_", "_budget_")])
        for name, value in metrics.items()
        if name.startswith(prefix)
    }


def test_brokers_that_do_not_answer_are_waited_for(tmp_path: Path) -> None:
    """They hang for longer than any thread may be silent, and /livez has nothing to say: a restart would not help."""
    with own_broker() as broker:
        delay = Topics(broker.bootstrap).delay()
        with RunningBridge(tmp_path, broker.bootstrap, delay) as bridge:
            bridge.start()
            clock = SystemClock()
            with stopped(broker.pid):
                end_s = clock.monotonic_s() + CALLS_S + SLACK_S
                wait_until(lambda: is_well(bridge) and clock.monotonic_s() > end_s, CALLS_S + 2 * SLACK_S)


def test_what_stands_still_makes_livez_fail_until_it_goes_on(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A mounted file that cannot be read: the thread that waits for it is named within its time, and all is well when
    the file is back, without a restart."""
    rack = tmp_path / "rack"
    rack.write_text("r1")
    config = {"kafka": {"common": {"client.rack": f"${{file:{rack}}}"}}}
    delay, target = topics.delay(), topics.create()
    headers = [("delay-topic", target.encode()), ("delay-for", b"1s")]
    with (
        RunningBridge(tmp_path, broker.bootstrap, delay, config=config) as bridge,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        bridge.start()
        wait_until(lambda: silences(bridge).keys() == THREADS, DEADLINE_S, lambda: silences(bridge))
        clock = SystemClock()
        with piped(rack):
            began_s = clock.monotonic_s()
            wait_until(lambda: named(bridge) >= {"credentials"}, CALLS_S + SLACK_S, lambda: named(bridge))
            assert clock.monotonic_s() - began_s > CALLS_S / 2
            late = {thread for thread, (age_s, budget_s) in silences(bridge).items() if age_s > budget_s}
            assert late == named(bridge) == {"credentials"}
            assert len(bridge.events("thread-stands-still")) == 1
        wait_until(lambda: bridge.http("/livez")[0] == 200, DEADLINE_S, lambda: bridge.tail())
        produce(broker.bootstrap, [Outgoing(topic=delay, value=b"once more", headers=headers)])
        reader.wait_for(1, DEADLINE_S)
        assert bridge.stop() == 0


def test_a_jvm_that_does_not_come_back_ends_the_process(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """With an error that says so; what stands still is killed, and leaves nothing behind."""
    with RunningBridge(tmp_path, broker.bootstrap, topics.delay()) as bridge:
        bridge.start()
        bridge.wait_spark()
        [java] = [process for process in bridge.processes() if process.name() == "java"]
        java.suspend()
        assert bridge.wait_end(Wait.JVM.s + 2 * SLACK_S) == EnvironmentFailure.exit_code
        assert "DB-3055" in bridge.last_words()
        bridge.wait_no_orphans()


def is_well(bridge: RunningBridge) -> bool:
    assert bridge.http("/livez")[0] == 200, bridge.http("/livez")[1] + bridge.tail()
    return True


def named(bridge: RunningBridge) -> set[str]:
    """The threads that /livez names."""
    text = bridge.http("/livez")[1]
    return {thread for thread in THREADS if f"thread {thread} has stood still" in text}
