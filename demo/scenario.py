"""The course of the demo: start, send, kill half-way, start again, wait for the last message, account."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from bridge.errors import EnvironmentFailure
from demo.traffic import DELAY_MS, QUIET, ArrivalListener, Sender
from demo.view import DemoView, summary
from dev.broker.embedded import free_ports
from dev.harness.bridge import BridgeProcess
from dev.harness.kafka import Topics
from dev.harness.ledger import Balance, Ledger
from timerstore.clock import Clock

TARGETS: Final = ("orders", "payments", "reminders")
PARTITIONS: Final = 2
TICK_S: Final = 0.1
# The interval of the view: its percentiles over all arrivals must not take the cores from the bridge.
SHOW_S: Final = 0.5
REQUEST_TIMEOUT_S: Final = 30
READY_TIMEOUT_S: Final = 120
STOP_TIMEOUT_S: Final = 10
# The time of a loaded machine for the last messages after their due time.
CATCH_UP_TIMEOUT_S: Final = 60
KEPT_DELAY_MS: Final = (5_000, 2 * 3_600_000)
KEPT_MESSAGES: Final = 500
KEPT_RATE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The topics of one run. They are unique, since the cluster may be in use."""

    run: str

    @property
    def delay(self) -> str:
        return f"delay-demo-{self.run}"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(f"demo-{self.run}-{name}" for name in TARGETS)

    @property
    def all(self) -> tuple[str, ...]:
        return (self.delay, f"{self.delay}.dlt", *self.targets)


@contextmanager
def topics(kafka: Mapping[str, str], names: Names) -> Iterator[None]:
    """Create the topics of the run, with the brokers' timestamps, and remove them afterwards."""
    made = Topics(kafka["bootstrap.servers"], client={**kafka, **QUIET})
    # LogAppendTime on the targets, too: the brokers' clock measures the lateness, not the bridge's.
    config = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
    for topic in (names.delay, *names.targets):
        made.create(exactly=topic, partitions=PARTITIONS, config=config)
    try:
        yield
    finally:
        existing = made.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        made.delete(*(topic for topic in names.all if topic in existing))


class Scenario:
    """One run against an existing cluster. `run` prints the summary and returns the balance."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        names: Names,
        directory: Path,
        console: Console,
        clock: Clock,
        *,
        messages: int,
        rate_s: float,
        seed: int,
    ) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._kafka = kafka
        self._seed = seed
        self._shown_s = -SHOW_S
        self._console = console
        self._names = names
        self._messages = messages
        self._rate_s = rate_s
        self._ledger = Ledger()
        self._view = DemoView(console, messages)
        self._listener = ArrivalListener(kafka, names.targets, self._ledger)
        self._sender = Sender(kafka, names.delay, names.targets, self._ledger, clock, seed=seed)
        (port,) = free_ports(1)  # the port stays after the kill, so that an open page goes on
        self._page = f"http://localhost:{port}/"
        self._bridge = BridgeProcess(
            directory,
            kafka["bootstrap.servers"],
            names.delay,
            id=names.delay,
            config={"kafka": {"common": dict(kafka)}, "http": {"api_port": port}},
        )

    def run(self) -> Balance:
        """Raises EnvironmentFailure if the bridge or the cluster are too slow."""
        self._console.print(f"After the bridge's start {self._page} shows the pending messages", highlight=False)
        try:
            with self._view:
                self._listener.start()
                self._start_bridge("starting the bridge")
                self._send(self._messages * 3 // 4)
                self._event("the bridge will be killed after the delivery of half of all messages")
                if not self._wait_until_delivered(self._messages // 2, "delivering"):
                    raise EnvironmentFailure(
                        "The bridge does not deliver", hint=f"The end of its log:\n{self._bridge.tail()}"
                    )
                killed_ms = self._clock.now_ms()
                self._bridge.end()
                self._event(f"SIGKILL: {self._ledger.pending:,} messages are pending")
                self._start_bridge("starting the bridge again")
                ready_ms = self._clock.now_ms()
                # The last quarter shows that a restarted bridge is as punctual as before.
                self._send(self._messages)
                self._wait_until_delivered(self._messages, "delivering the rest")  # the balance shows a failure
                status = self._bridge.stop(STOP_TIMEOUT_S)
                self._event(f"the bridge stopped on SIGTERM with status {status}")
        finally:
            self._bridge.end()
            self._listener.finish()
        balance = self._ledger.balance()
        around = self._ledger.lateness_around(killed_ms, ready_ms)
        self._console.print(summary(balance, self._ledger.accounts()[-1].lateness, around))
        return balance

    def stay(self) -> None:
        """Start the bridge again, and send messages with delays up to two hours, until Ctrl-C."""
        sender = Sender(
            self._kafka, self._names.delay, self._names.targets, Ledger(), self._clock, seed=self._seed,
            delay_ms=KEPT_DELAY_MS,
        )  # fmt: skip
        try:
            self._bridge.start()
            self._console.print(f"The page is at {self._page} until Ctrl-C", highlight=False)
            began_s = self._elapsed_s()
            while True:
                sender.send_up_to(KEPT_MESSAGES + int(KEPT_RATE_S * (self._elapsed_s() - began_s)))
                self._bridge.check()
                threading.Event().wait(TICK_S)
        except KeyboardInterrupt:
            sender.flush()
        finally:
            self._bridge.end()

    def _start_bridge(self, phase: str) -> None:
        began_s = self._elapsed_s()
        self._bridge.launch()
        self._event(f"{phase} (pid {self._bridge.pid})")
        while not self._bridge.is_ready():
            if self._elapsed_s() - began_s > READY_TIMEOUT_S:
                raise EnvironmentFailure(
                    f"The bridge was not ready within {READY_TIMEOUT_S} s",
                    hint=f"The end of its log:\n{self._bridge.tail()}",
                )
            self._tick(phase)
        self._event(f"ready after {self._elapsed_s() - began_s:.1f} s")

    def _send(self, up_to: int) -> None:
        """Send at the run's rate until the delay topic has taken `up_to` messages altogether."""
        began_s, before = self._elapsed_s(), self._sender.sent
        self._event(f"sending {up_to - before:,} messages with delays of {DELAY_MS[0]} to {DELAY_MS[1]:,} ms")
        while self._sender.sent < up_to:
            due = before + int(self._rate_s * (self._elapsed_s() - began_s))
            self._sender.send_up_to(min(up_to, due))
            self._bridge.check()
            self._tick("sending and delivering")
        self._sender.flush()

    def _wait_until_delivered(self, count: int, phase: str) -> bool:
        """Whether `count` messages arrived within the longest delay and the time of a loaded machine."""
        deadline_s = self._elapsed_s() + DELAY_MS[1] / 1000 + CATCH_UP_TIMEOUT_S
        while self._ledger.delivered < count:
            self._bridge.check()
            if self._elapsed_s() > deadline_s:
                self._event(f"only {self._ledger.delivered:,} of {count:,} messages arrived in time")
                return False
            self._tick(phase)
        return True

    def _tick(self, phase: str) -> None:
        self._listener.check()
        elapsed_s = self._elapsed_s()
        if elapsed_s - self._shown_s >= SHOW_S:
            self._shown_s = elapsed_s
            self._view.update(elapsed_s, phase, self._ledger.accounts())
        threading.Event().wait(TICK_S)

    def _event(self, text: str) -> None:
        self._view.event(self._elapsed_s(), text)

    def _elapsed_s(self) -> float:
        return self._clock.monotonic_s() - self._started_s
