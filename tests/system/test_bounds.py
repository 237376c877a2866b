"""Nothing that a producer chooses is unbounded: memory, metrics, files and the log stay small for any records."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until
from tests.profiles import IS_NIGHTLY
from tests.system.bridge import AS_SHIPPED, RunningBridge
from tests.system.broker import Broker
from tests.system.hostile import Arrived, Fate, HostileProducer, Made
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(2_400)]

COUNT: Final = 1_000_000 if IS_NIGHTLY else 30_000
SEED: Final = 20_261_122
AT_ONCE: Final = 2_500
RAW_AT_ONCE: Final = 25
UNDER_WAY_MAX: Final = 50_000 if IS_NIGHTLY else 2_500
"""Largest number of unread records: a load that goes on, not a backlog. With the records sent at once it is less than
the width of BEFORE and of AFTER, so that memory is seen in both."""
DONE_S_MAX: Final = 1_200
LOOK_S: Final = 1.0
BEFORE: Final = (0.2, 0.5)
AFTER: Final = (0.7, 1.0)
"""Of the records: medians of memory are compared, since records in flight come and go."""
GROWTH_BYTES_MAX: Final = 128 << 20
RSS_BYTES_MAX: Final = 1_600 << 20
SERIES_MAX: Final = 500
LABEL_CHARS_MAX: Final = 249
FILE_BYTES_MAX, FILE_BYTES_A_ROW_MAX = 8 << 20, 400
FOOTER_BYTES_MAX, FOOTER_BYTES_A_ROW_MAX = 256 << 10, 16
"""Of a segment: counts by name, and times, one for each row."""
LOG_BYTES_MAX: Final = 1 << 20
BACKLOG, HEADER_BYTES = 64_000, 8_000
"""512 MiB, which is the heap."""
CONFIG: Final[dict[str, Any]] = {
    **AS_SHIPPED,
    "delivery": {"retry": {"attempts": 2, "backoff": "100ms", "backoff_max": "1s"}},
    "store": {"flush_interval": "5s", "flush_bytes": "8MiB"},
    "logs": {"level": "info"},
}


class Watch:
    """The bridge's memory, looked at now and then."""

    def __init__(self, bridge: RunningBridge) -> None:
        self.python_bytes: list[tuple[int, int]] = []
        self.rss_bytes_max = self.series_max = self.label_chars_max = 0
        self._bridge = bridge
        self._clock = SystemClock()
        self._looked_s = 0.0
        self._looked_at = 0

    def look(self, arrived: int) -> None:
        """Note memory and metrics, each second or each twentieth of the records; fail where the bridge is not ready."""
        if self._clock.monotonic_s() - self._looked_s < LOOK_S and arrived - self._looked_at < COUNT // 20:
            return
        self._looked_s, self._looked_at = self._clock.monotonic_s(), arrived
        assert self._bridge.running, self._bridge.tail()
        for probe in ("/livez", "/readyz"):
            status, text = self._bridge.http(probe)
            assert status == 200, f"{probe} after {arrived}: {status} {text}; {self._bridge.tail()}"
        self.python_bytes.append((arrived, self._bridge.python_bytes()))
        self.rss_bytes_max = max(self.rss_bytes_max, self._bridge.rss_bytes())
        status, text = self._bridge.http("/metrics")
        series = [line for line in text.splitlines() if not line.startswith("#")]
        self.series_max = max(self.series_max, len(series))
        labels = (len(label) for line in series for label in re.findall(r'="((?:[^"\\]|\\.)*)"', line))
        self.label_chars_max = max(self.label_chars_max, *labels)
        for path in self._bridge.data.rglob("*.parquet"):
            assert_small_footer(path)

    def growth_bytes(self) -> int:
        """By how much the Python process grew after the first records."""
        arrived, sizes = np.array(self.python_bytes).T
        share = arrived / arrived[-1]
        before, after = (np.median(sizes[(share >= begin) & (share <= end)]) for begin, end in (BEFORE, AFTER))
        return int(after - before)


def assert_small_footer(segment: Path) -> None:
    """Unless it is gone by now."""
    with suppress(FileNotFoundError):
        footer = pq.read_metadata(segment)
        limit = FOOTER_BYTES_MAX + FOOTER_BYTES_A_ROW_MAX * footer.num_rows
        assert footer.serialized_size <= limit, f"{footer.serialized_size} bytes for {footer.num_rows} rows"


@pytest.mark.fault("a hostile producer")
def test_nothing_that_a_producer_chooses_is_unbounded(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Names, ids, times, headers, keys, sizes, cancels, forged copies, another scheduler's headers: the bridge stays
    ready, its memory, metrics, files and log stay small, and each record is delivered, a dead letter as it came,
    cancelled or pending."""
    delay, foreign, target = topics.delay(partitions=2), topics.delay("foreign"), topics.create("orders", partitions=2)
    config = {**CONFIG, "delay_topics": {foreign: {"dialect": "rocketmq"}}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config) as bridge:
        bridge.start()
        watch = Watch(bridge)
        producer = HostileProducer(broker.bootstrap, delay, foreign, target, COUNT, seed=SEED)
        with closing(Arrived(broker.bootstrap, [target], [f"{delay}.dlt", f"{foreign}.dlt"], COUNT)) as arrived:
            while producer.sent < COUNT:
                producer.send_raw(min(RAW_AT_ONCE, COUNT - producer.sent))
                producer.send(min(AT_ONCE, COUNT - producer.sent))
                wait_until(lambda: keep_up(producer, arrived, watch), DONE_S_MAX, lambda: state(arrived, bridge))
            producer.flush()
            owed = int(np.isin(producer.fates, (Fate.DELIVERED, Fate.DEAD, Fate.EITHER)).sum())
            pending = int((producer.fates == Fate.PENDING).sum())
            wait_until(lambda: keep_up(producer, arrived, watch, owed), DONE_S_MAX, lambda: state(arrived, bridge))
            wait_until(lambda: bridge.metrics()["pending_messages"] == pending, 60, lambda: state(arrived, bridge))
            arrived.read(producer.kept, timeout_s=LOOK_S)
        stored = sum(path.stat().st_size for path in bridge.data.rglob("*") if path.is_file())
        print(f"grew by {watch.growth_bytes() >> 20} MiB, {watch.rss_bytes_max >> 20} MiB, {watch.series_max} series")
        print(f"{stored} bytes for {pending} pending, {bridge.log_file.stat().st_size} of log")
        assert_each_has_its_fate(producer.fates, arrived.counts)
        assert_as_they_came(producer.kept, arrived.letters)
        assert watch.growth_bytes() <= GROWTH_BYTES_MAX
        assert watch.rss_bytes_max <= RSS_BYTES_MAX
        assert watch.series_max <= SERIES_MAX
        assert watch.label_chars_max <= LABEL_CHARS_MAX
        assert stored <= FILE_BYTES_MAX + FILE_BYTES_A_ROW_MAX * pending
        assert bridge.log_file.stat().st_size <= LOG_BYTES_MAX
        assert bridge.stop() == 0


def keep_up(producer: HostileProducer, arrived: Arrived, watch: Watch, owed: int | None = None) -> bool:
    """Read the arrived records; whether it is all that is `owed`, or not too far behind what was sent."""
    arrived.read(producer.kept)
    watch.look(arrived.total)
    if owed is not None:
        return arrived.total >= owed
    expected = int((np.isin(producer.fates[: producer.sent], (Fate.DELIVERED, Fate.DEAD, Fate.EITHER))).sum())
    return expected - arrived.total <= UNDER_WAY_MAX


def state(arrived: Arrived, bridge: RunningBridge) -> str:
    return f"{arrived.total} have arrived; {bridge.tail()}"


def assert_each_has_its_fate(fates: np.ndarray, counts: dict[Fate, np.ndarray]) -> None:
    """Each record came once, or not at all, where it had to."""
    delivered, dead = counts[Fate.DELIVERED], counts[Fate.DEAD]
    either = fates == Fate.EITHER
    wrong = np.where(
        either, delivered + dead != 1, (delivered != (fates == Fate.DELIVERED)) | (dead != (fates == Fate.DEAD))
    )
    numbers = np.flatnonzero(wrong)
    shown = [(int(n), Fate(fates[n]).name, int(delivered[n]), int(dead[n])) for n in numbers[:10]]
    assert not len(numbers), f"{len(numbers)} (number, fate, delivered, dead): {shown}"


def assert_as_they_came(kept: dict[int, Made], letters: dict[int, Made]) -> None:
    """Dead letters are the records byte for byte, and headers of the bridge after theirs."""
    assert len(kept) > COUNT // 600
    for number, made in kept.items():
        letter = letters[number]
        assert (letter.key, letter.value) == (made.key, made.value), number
        if made.is_whole:
            own = list(made.headers)
            assert list(letter.headers)[: len(own)] == own, number
            assert letter.headers[len(own)][0] == "delay-reason", number


@pytest.mark.fault("a backlog of records that are all headers")
def test_a_backlog_of_records_that_are_all_headers_fits_the_heap(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """The first start reads a backlog of many records with large headers within the default heap."""
    delay = topics.delay(partitions=2)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20, "compression.type": "lz4"})
    headers: list[tuple[str, str | bytes | None]] = [("delay-for", b"30d"), ("delay-topic", b"orders")]
    headers.append(("laden", b"x" * HEADER_BYTES))
    for number in range(BACKLOG):
        producer.produce(delay, headers=headers, partition=number % 2)
        if number % 5_000 == 0:
            producer.flush(DONE_S_MAX)
    assert producer.flush(DONE_S_MAX) == 0
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=AS_SHIPPED) as bridge:
        bridge.start()
        wait_until(lambda: bridge.metrics()["pending_messages"] == BACKLOG, DONE_S_MAX, lambda: bridge.tail())
        assert bridge.stop() == 0
