"""Random commands about the time when their messages are due, with kills: each answer says what consumers saw."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer

from bridge.wire.answers import Outcome
from bridge.wire.commands import cancel_headers, cancel_origin_headers, move_headers, move_origin_headers
from bridge.wire.headers import CORRELATION, COUNT, DUE, OUTCOME, origin_text, origins_text, timer_headers
from dev.harness.kafka import Outgoing, ReadRecord, TopicReader, Topics, produce_with
from dev.harness.waiting import wait_until
from tests.profiles import IS_NIGHTLY, seed
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.crash, pytest.mark.slow]

MESSAGES: Final = 100_000 if IS_NIGHTLY else 3_000
KILLS: Final = 40 if IS_NIGHTLY else 4
BURST: Final = 100
KEYS: Final = 40
DELAY_MS: Final = (200, 5_000)
MOVED_MS: Final = (0, 6_000)
SETTLED_S_MAX: Final = 900 if IS_NIGHTLY else 120
CONFIG: Final = {
    # Within seconds messages roll, are flushed, and loaded again.
    "roll": {"window": "2s"},
    "store": {"flush_interval": "500ms"},
    "ready_rows": {"horizon": "1s"},
}


@dataclass(slots=True)
class Fate:
    """A message: when it was to be due, the commands about it by correlation id, and where moves were to take it."""

    due_ms: int
    commands: list[str] = field(default_factory=list)
    moved_ms: dict[str, int] = field(default_factory=dict)


class Commands:
    """Sends messages, and commands about some of them shortly before, at and after their due times."""

    def __init__(self, bootstrap: str, delay: str, target: str, replies: str, seed: int) -> None:
        self.fates: dict[str, Fate] = {}
        self._delay, self._target, self._replies = delay, target, replies
        self._random = random.Random(seed)
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "enable.idempotence": True})
        self._waiting: list[tuple[int, list[ReadRecord]]] = []
        """The time of a command on some messages of a partition, and their records."""
        self.commands: dict[str, list[str]] = {}
        """The messages that each command is about."""
        self.origins: dict[str, str] = {}
        """The messages, by origin."""

    def burst(self, now_ms: int) -> None:
        """Send some messages, and the commands whose time has come."""
        names = [str(len(self.fates) + n) for n in range(BURST)]
        delays = [self._random.randrange(*DELAY_MS) for _ in names]
        written = produce_with(
            self._producer,
            [
                Outgoing(
                    topic=self._delay,
                    key=f"k{int(name) % KEYS}".encode(),
                    value=name.encode(),
                    headers=timer_headers(self._target, after=timedelta(milliseconds=delay), id=name),
                )
                for name, delay in zip(names, delays, strict=True)
            ],
        )
        for name, delay, record in zip(names, delays, written, strict=True):
            self.fates[name] = Fate(record.timestamp_ms + delay)
            self.origins[origin_text(record.topic, record.partition, record.offset)] = name
            for _ in range(self._random.choice((0, 1, 1, 2))):
                # As many long before as shortly before, at, and after the due time.
                ahead_ms = self._random.choice((delay, 300, 100, 20, 0, -200))
                beside = [each for each in written if each.partition == record.partition and each is not record]
                more = min(len(beside), self._random.choice((0, 0, 3, 19)))
                about = [record, *self._random.sample(beside, more)]
                self._waiting.append((record.timestamp_ms + delay - self._random.randint(0, max(1, ahead_ms)), about))
        self.send_until(now_ms)

    def send_until(self, now_ms: int) -> bool:
        """Send the records that are scheduled by then; whether any is left."""
        due = [records for at_ms, records in self._waiting if at_ms <= now_ms]
        self._waiting = [(at_ms, records) for at_ms, records in self._waiting if at_ms > now_ms]
        made = [self._command(records) for records in due]
        for (_, names, correlation, is_relative), written in zip(
            made, produce_with(self._producer, [outgoing for outgoing, *_ in made]), strict=True
        ):
            for name in names if is_relative else ():
                self.fates[name].moved_ms[correlation] += written.timestamp_ms
        return bool(self._waiting)

    def _command(self, records: list[ReadRecord]) -> tuple[Outgoing, list[str], str, bool]:
        """A command, the names of the messages that it is about, its correlation id, and whether it moves them."""
        kind, record, correlation = self._random.randrange(4), records[0], str(len(self.commands))
        records = records if kind == 2 else records[:1]
        names = [(each.value or b"").decode() for each in records]
        origin = origins_text(record.topic, record.partition, [each.offset for each in records])
        ms = self._random.choice((0, self._random.randrange(*MOVED_MS)))
        after = timedelta(milliseconds=ms)
        about: dict[str, Any] = {"reply_to": self._replies, "correlation": correlation}
        self.commands[correlation] = names
        for each in names:
            self.fates[each].commands.append(correlation)
            if kind in (1, 3):
                self.fates[each].moved_ms[correlation] = ms
        name = names[0]
        headers = (
            cancel_headers(name, **about)
            if kind == 0
            else move_headers(name, after=after, **about)
            if kind == 1
            else cancel_origin_headers(origin, **about)
            if kind == 2
            else move_origin_headers(origin, after=after, **about)
        )
        # One by an origin may be sent anywhere.
        partition = None if kind in (0, 1) or self._random.random() < 0.2 else record.partition
        key = None if kind in (2, 3) else record.key
        outgoing = Outgoing(topic=self._delay, key=key, value=None, headers=headers, partition=partition)
        return outgoing, names, correlation, kind in (1, 3)


@pytest.mark.fault("kills amid commands about messages that fall due")
@pytest.mark.timeout(3_600)
def test_every_answer_says_what_consumers_saw(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Each command is answered once. A message comes once, when it is due or where the last move took it, and never if
    one of its commands was answered with `cancelled`."""
    drawn = seed()
    clock, chance = SystemClock(), random.Random(drawn)
    delay, target, replies = topics.delay(partitions=3), topics.create("orders"), topics.create("answers")
    sent = Commands(broker.bootstrap, delay, target, replies, drawn)
    kills = {chance.randrange(1, MESSAGES // BURST) for _ in range(KILLS)}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=CONFIG, spark=False) as bridge:
        bridge.start()
        for number in range(MESSAGES // BURST):
            if number in kills:
                bridge.kill()
                bridge.launch()
            sent.burst(clock.now_ms())
        wait_until(lambda: not sent.send_until(clock.now_ms()), 60, "the last command")
        bridge.wait_ready()
        with TopicReader(broker.bootstrap, [replies]) as reader:
            reader.wait_for(len(sent.commands), SETTLED_S_MAX)
            bridge.wait_idle(SETTLED_S_MAX)
            answered = reader.to_end()
        with TopicReader(broker.bootstrap, [target, f"{delay}.dlt"]) as reader:
            delivered = reader.to_end()
        assert bridge.metric("early_deliveries_total") == 0
    wrong = compared(sent, answered, delivered, target)
    assert not wrong, f"seed {drawn}: {len(wrong)} of {len(sent.fates)}: {wrong[:10]}"


def compared(
    sent: Commands, answered: list[ReadRecord], delivered: list[ReadRecord], target: str
) -> list[tuple[str, str, object]]:
    """Messages whose answers and deliveries do not go together, and why."""
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for record in answered:
        correlation, outcome = (record.header(name) or b"" for name in (CORRELATION, OUTCOME))
        names = sent.commands[correlation.decode()]
        if len(names) > 1:
            names = [sent.origins[origin] for origin in json.loads(record.value or b"")["origins"]]
            assert int(record.header(COUNT) or b"0") == len(names), record
        for name in names:
            outcomes[correlation.decode(), name].append(Outcome(outcome.decode()))
    arrived: dict[str, list[ReadRecord]] = defaultdict(list)
    for record in delivered:
        arrived[(record.value or b"").decode()].append(record)
    wrong: list[tuple[str, str, object]] = []
    for name, fate in sent.fates.items():
        found = {each: outcomes[each, name] for each in fate.commands}
        told = [outcome for each in found.values() for outcome in each]
        came = arrived[name]
        if any(len(each) != 1 for each in found.values()):
            wrong.append((name, "not one answer for each command", found))
        elif any(record.topic != target for record in came):
            wrong.append((name, "a dead letter", found))
        elif len(came) != (0 if Outcome.CANCELLED in told else 1):
            wrong.append((name, f"came {len(came)} times", found))
        elif told.count(Outcome.CANCELLED) > 1:
            wrong.append((name, "cancelled twice", found))
        elif came:
            due_ms = int(came[0].header(DUE) or b"0")
            moved = {fate.moved_ms[each] for each, (outcome,) in found.items() if outcome is Outcome.MOVED}
            if due_ms not in (moved or {fate.due_ms}):
                wrong.append((name, f"was due at {due_ms}", (fate, found)))
            elif came[0].timestamp_ms < due_ms:
                wrong.append((name, "came early", (fate, found)))
        elif not set(told) <= {Outcome.CANCELLED, Outcome.MOVED, Outcome.NOT_PENDING}:
            wrong.append((name, "is told to have been delivered, and was not", found))
    return wrong
