"""The bridge's wall clock jumps: libfaketime stands between the process (Python, librdkafka, JVM) and its clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

import pytest

from dev.harness.kafka import Outgoing, TopicReader, Topics, assert_each_once, produce
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker, own_broker
from tests.system.quota import reading_throttled
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

LIBRARY: Final = Path(sysconfig.get_path("purelib"), "libfaketime", "vendor", "libfaketime", "src", "libfaketime.so.1")
COMPILER: Final = shutil.which("cc") or ""
JUMP_S: Final = 3_600
STEP_S: Final = 300
DEADLINE_S: Final = 60
CUT_OFF_S_MAX: Final = 20
"""A second until the jump is noticed, nine until the stop is cut off, and the time before the log."""
LATE_MS_MAX: Final = 20_000
"""A message that waited for the old clock would be an hour late."""


class WallClock:
    """The wall clock of a bridge that is started with it."""

    def __init__(self, directory: Path, bridge: RunningBridge, *, at_once: bool = False) -> None:
        """`at_once`: the process looks every time that it asks for the time, which is slow, and not once a second."""
        self._file, waits = directory / "faketime", directory / "wallwait.so"
        self.set(0)
        source = Path(__file__).with_name("wallwait.c")
        subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(waits), str(source), "-ldl"], check=True)
        bridge.environment = {
            "LD_PRELOAD": f"{waits} {LIBRARY}",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            **({"FAKETIME_NO_CACHE": "1"} if at_once else {"FAKETIME_CACHE_DURATION": "1"}),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def set(self, ahead_s: int) -> None:
        """Seconds before the true time; the process sees it within a second, or at once."""
        new = self._file.with_suffix(".new")  # the process may read at any moment
        new.write_text(f"{ahead_s:+d}s\n")
        new.replace(self._file)


@pytest.mark.fault("a clock that jumps and comes back")
@pytest.mark.skipif(not COMPILER, reason="no C compiler: without wallwait.c, libfaketime stalls librdkafka")
def test_a_clock_that_jumps_and_comes_back_is_followed(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """After a jump of an hour forward all messages that are due by the new time arrive. Back again: messages that are
    sent then arrive at their time by the new clock, in order, without waiting for others, exactly once; and messages
    with a later due time stay, also over a restart."""
    assert LIBRARY.is_file(), "the wheel of libfaketime holds another file: make install"
    delay, clock = topics.delay(), SystemClock()
    target = topics.create("orders", config={"message.timestamp.type": "LogAppendTime"})

    def send(name: bytes, due_ms: int) -> None:
        headers = [("delay-until", b"%d" % due_ms), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, value=name, headers=headers)])

    with RunningBridge(tmp_path, broker.bootstrap, delay) as bridge, TopicReader(broker.bootstrap, [target]) as reader:
        wall = WallClock(tmp_path, bridge)
        bridge.start()
        begun_ms = clock.now_ms()
        send(b"within the hour", begun_ms + (JUMP_S - 600) * 1_000)
        send(b"beyond it", begun_ms + 2 * JUMP_S * 1_000)
        wall.set(JUMP_S)
        reader.wait_for(1, DEADLINE_S)
        wait_until(lambda: jumps(bridge, "forward") == 1, DEADLINE_S, "the jump is told")
        send(b"by the same producer", begun_ms)
        reader.wait_for(2, DEADLINE_S)
        wall.set(0)
        wait_until(lambda: bridge.events("restarted-in-place"), CUT_OFF_S_MAX, lambda: f"log:\n{bridge.tail()}")
        wait_until(lambda: jumps(bridge, "back") == 1, DEADLINE_S, "the jump back is told")
        assert [event["reason"] for event in bridge.events("restarted-in-place")] == ["clock-set-back"]
        now_ms = clock.now_ms()
        send(b"second", now_ms + 8_000)
        send(b"third", now_ms + JUMP_S * 1_000)
        send(b"first", now_ms + 4_000)
        records = reader.wait_for(4, DEADLINE_S)[2:]
        assert [record.value for record in records] == [b"first", b"second"]
        for record, due_ms in zip(records, (now_ms + 4_000, now_ms + 8_000), strict=True):
            late_ms = record.timestamp_ms - due_ms
            assert 0 <= late_ms < LATE_MS_MAX, f"{late_ms} ms late; log:\n{bridge.tail()}"
        wait_until(lambda: bridge.metrics()["pending_messages"] == 2, DEADLINE_S, "both stay")
        assert bridge.metrics()["early_deliveries_total"] == 0
        assert bridge.events("clock-behind-position")
        assert bridge.stop() == 0
        bridge.start()
        wait_until(lambda: bridge.metrics()["pending_messages"] == 2, DEADLINE_S, "pending messages are known again")
        wall.set(3 * JUMP_S)
        values = [record.value for record in reader.wait_for(6, DEADLINE_S)]
        assert values[4:] == [b"third", b"beyond it"]
        bridge.wait_idle(DEADLINE_S)
        assert len(reader.to_end()) == 6
        assert bridge.stop() == 0


@pytest.fixture
def slow() -> Iterator[Broker]:
    """A broker whose readers may be slowed down: no other test uses it."""
    with own_broker() as broker:
        yield broker


@pytest.mark.fault("a clock that jumps in the middle of a read")
@pytest.mark.skipif(not COMPILER, reason="no C compiler: without wallwait.c, libfaketime stalls librdkafka")
def test_a_jump_in_the_middle_of_a_read_ends_neither_the_read_nor_the_bridge(slow: Broker, tmp_path: Path) -> None:
    """Reading goes on, although Java's consumer waits by the wall clock and may return nothing after a jump. The query
    is started anew then, and the same process reads each record once."""
    broker, topics, clock = slow, Topics(slow.bootstrap), SystemClock()
    delay = topics.delay()
    target = topics.create("orders", config={"message.timestamp.type": "LogAppendTime"})
    headers = [("delay-until", b"%d" % (clock.now_ms() + STEP_S * 1_000)), ("delay-topic", target.encode())]
    padding = os.urandom(100_000)
    records = [Outgoing(topic=delay, value=b"%d " % n + padding, headers=headers) for n in range(20)]
    with RunningBridge(tmp_path, broker.bootstrap, delay) as bridge, TopicReader(broker.bootstrap, [target]) as reader:
        wall = WallClock(tmp_path, bridge)
        bridge.start()
        bridge.wait_spark()
        with reading_throttled(broker.bootstrap, bytes_per_s=60_000):  # a first MB comes at once, another after 5 s
            produce(broker.bootstrap, records)
            for number, ahead_s in enumerate(range(STEP_S, JUMP_S, STEP_S), start=1):
                wall.set(ahead_s)
                wait_until(partial(lambda n: jumps(bridge, "forward") == n, number), DEADLINE_S, "the jump is told")
        reader.wait_for(len(records), DEADLINE_S)
        bridge.wait_idle(DEADLINE_S)
        assert_each_once((int((record.value or b"").split(b" ")[0]) for record in reader.to_end()), len(records))
        assert jumps(bridge, "forward")
        assert bridge.stop() == 0


@pytest.mark.fault("a clock that is set back while clients connect")
@pytest.mark.skipif(not COMPILER, reason="no C compiler: without wallwait.c, libfaketime stalls librdkafka")
def test_a_clock_that_is_set_back_while_clients_connect_stops_delivery_for_seconds(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """The process restarts in place, since its clients would wait for an hour. Set back once more within a minute, it
    ends, to be started again. Everything arrives, once."""
    delay, clock = topics.delay(), SystemClock()
    target = topics.create("orders")

    def send(name: bytes) -> None:
        headers = [("delay-until", b"%d" % clock.now_ms()), ("delay-topic", target.encode())]
        produce(broker.bootstrap, [Outgoing(topic=delay, value=name, headers=headers)])

    with (
        RunningBridge(tmp_path, broker.bootstrap, delay, spark=False) as bridge,
        TopicReader(broker.bootstrap, [target]) as reader,
    ):
        wall = WallClock(tmp_path, bridge, at_once=True)
        wall.set(JUMP_S)
        bridge.launch()
        pid = bridge.pid
        wait_until(lambda: bridge.events("management-port"), DEADLINE_S, "it has begun")
        wall.set(0)
        wait_until(lambda: bridge.events("restarted-in-place"), CUT_OFF_S_MAX, lambda: f"log:\n{bridge.tail()}")
        bridge.wait_ready(DEADLINE_S)
        assert bridge.running and bridge.pid == pid
        assert [event["reason"] for event in bridge.events("restarted-in-place")] == ["clock-set-back"]
        send(b"after one jump")
        reader.wait_for(1, DEADLINE_S)
        wall.set(-JUMP_S)
        assert bridge.wait_end(CUT_OFF_S_MAX) == 3
        assert "was set back within a minute of a restart in place" in bridge.last_words()
        wall.set(0)
        bridge.start()
        send(b"after another")
        reader.wait_for(2, DEADLINE_S)
        bridge.wait_idle(DEADLINE_S)
        assert [record.value for record in reader.to_end()] == [b"after one jump", b"after another"]
        assert bridge.stop() == 0


def jumps(bridge: RunningBridge, direction: str) -> float:
    """How many jumps the bridge has counted; 0 where it does not answer in time, as may be just after one."""
    if bridge.http("/livez")[0] != HTTPStatus.OK:
        return 0
    return bridge.metrics().get(f'clock_jumps_total{{direction="{direction}"}}', 0)
