"""One piece of the bars: a combination is injected under load, the dispatching process is killed now and then, and at
the end a `read_committed` consumer counts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported

from dev.harness.kafka import Outgoing, Topics, produce_with, read_committed
from dev.harness.waiting import wait_until
from dev.proxy import Api, Fault, Hit, Injection, Proxy, Request
from tests.injections.combinations import ARRIVALS, Combination
from tests.injections.dispatching import Order, Piece
from tests.injections.rows import PARTITIONS, early
from timerstore.clock import SystemClock

AHEAD_MS: Final = 300
"""Time between intake and the due time of the first of ROWS rows, which are due GAP_MS apart."""
ROWS: Final = 100
GAP_MS: Final = 4
TRANSACTION_ROWS: Final = 40
PROVOKE_S: Final = 1.0
UNDER_WAY: Final = 3
"""Limit of late copies that are under way."""
CHANCE: Final = 0.6
"""Of a request to be met by a fault, while there is room for one."""
KILL_EACH: Final = 10
END_S: Final = 60.0
PAUSE_S: Final = 0.01
ENDED_MAX: Final = 20
ERROR_CHARACTERS: Final = 2_000


@dataclass(slots=True, kw_only=True)
class Result:
    """Counts of a piece, or of several."""

    injected: int = 0
    """Those that count: they ended as the combination says, and a late copy reached an open transaction."""
    answers: dict[str, int] = field(default_factory=dict)
    """The broker's answers to them."""
    others: int = 0
    """Injections that do not count."""
    kills: int = 0
    ended: int = 0
    """How often the process ended by itself, and was started again."""
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    early: int = 0

    def add(self, other: Result) -> None:
        for name in ("injected", "others", "kills", "ended", "rows", "lost", "doubled", "early"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.answers = dict(Counter(self.answers) + Counter(other.answers))

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.early)


class Injections:
    """A combination's injections, at random; late copies arrive at various moments."""

    def __init__(
        self,
        proxy: Proxy,
        combination: Combination,
        seed: int,
        *,
        chance: float = CHANCE,
        under_way: int = UNDER_WAY,
        limit: float = inf,
    ) -> None:
        """`chance` of a request to be met by a fault, while fewer than `under_way` are not over, and there were fewer
        than `limit`."""
        self._random, self._chance, self._under_way, self.limit = Random(seed), chance, under_way, limit
        self._proxy = proxy
        self._is_stopped = False
        self.combination = combination
        fault, api = Fault(combination.fault), Api[combination.api]
        self._arrivals = ARRIVALS if fault is Fault.LATE else ARRIVALS[:1]
        self._chosen = self._random.choice(self._arrivals)
        self._provoking: list[Injection] = []
        self._all: list[Injection] = []
        for arrival in self._arrivals:
            when = partial(self._meets, arrival)
            self._all.append(proxy.inject(fault, api, times=None, when=when, arrives=arrival))

    def _meets(self, arrival: Api, request: Request) -> bool:
        end = self.combination.end
        if arrival is not self._chosen or self._is_stopped:
            return False
        if end != "any" and request.is_commit is not None and request.is_commit is not (end == "commit"):
            return False
        under_way = sum(not hit.is_over for injection in self._all for hit in injection.recent)
        if under_way >= self._under_way or sum(len(injection.hits) for injection in self._all) >= self.limit:
            return False
        if self._random.random() > self._chance:
            return False
        self._chosen = self._random.choice(self._arrivals)
        return True

    def provoke(self) -> None:
        """A lost answer makes an id get a new epoch, which is a request that is asked for seldom, and makes another one
        take over, for which a late copy may wait."""
        is_wanted = self.combination.api == Api.INIT_PRODUCER_ID.name or not self.is_idle()
        if is_wanted and all(one.hits for one in self._provoking):
            self._provoking = [self._proxy.inject(Fault.LOST_AFTER, Api.END_TXN)]

    def stop(self) -> None:
        self._is_stopped = True

    def over(self) -> list[Hit]:
        return [hit for injection in self._all for hit in injection.hits if hit.is_over]

    def is_idle(self) -> bool:
        """Whether all hits are over."""
        return all(hit.is_over for injection in self._all for hit in injection.recent)

    def counts(self, hit: Hit) -> bool:
        """Whether it is one of those that are asked for."""
        end = self.combination.end
        is_ended = end == "any" or hit.is_committed is (end == "commit")
        return is_ended and (self.combination.fault != Fault.LATE.value or bool(hit.was_open))


class Child:
    """The dispatching process: killed, and started again."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pieces: list[Piece] = []
        self.said = ""
        self.ended: list[str] = []
        self._start()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is the process's
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.injections.dispatching", self._order.text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        if self._pieces:
            self._write(self._pieces)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if process is self._process:
                self.said = line.strip()

    def _write(self, pieces: list[Piece]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(pieces) + "\n")
            self._process.stdin.flush()

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._write([piece])

    def look(self) -> None:
        """Start it again, if it has ended by itself."""
        if self._process.poll() is None:
            return
        self._errors.seek(0)
        self.ended.append(self._errors.read()[-ERROR_CHARACTERS:])
        if len(self.ended) > ENDED_MAX:
            raise AssertionError(f"the process does not go on: {self.ended[-1]}")
        self._start()

    def kill(self) -> None:
        """SIGKILL, and a successor."""
        self._end()
        self._start()

    def _end(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def run(
    bootstrap: str,
    proxy: Proxy,
    combination: Combination,
    wanted: int,
    *,
    seed: int,
    seconds: float,
    renews: bool = True,
) -> Result:
    """Inject until `wanted` count, for `seconds` at most, and read the targets."""
    topics, result = Topics(bootstrap), Result()
    delay = topics.delay(partitions=PARTITIONS)
    dead = NewTopic(f"{delay}.dlt", num_partitions=1, replication_factor=1)
    topics.admin.create_topics([dead])[f"{delay}.dlt"].result(END_S)
    stamped = {"message.timestamp.type": "LogAppendTime"}
    targets = tuple(topics.create(partitions=2, config=stamped) for _ in range(2))
    abort_each = 0 if combination.end == "commit" else 2
    order = Order(
        bootstrap=proxy.bootstrap,
        direct=bootstrap,
        delay=delay,
        targets=targets,
        abort_each=abort_each,
        rows=TRANSACTION_ROWS,
        renews=renews,
    )
    source, clock = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1}), SystemClock()
    until_s = clock.monotonic_s() + seconds
    injections = Injections(proxy, combination, seed)
    due_ms, provoked_s, pause = clock.now_ms() + AHEAD_MS, clock.monotonic_s(), threading.Event()
    with Child(order) as child:

        def feed() -> None:
            nonlocal due_ms
            if due_ms - clock.now_ms() > AHEAD_MS:
                return
            due_ms = max(due_ms, clock.now_ms())
            produce_with(source, [Outgoing(topic=delay, partition=i % PARTITIONS) for i in range(ROWS)])
            child.add((result.rows, ROWS, due_ms, GAP_MS))
            result.rows += ROWS
            due_ms += ROWS * GAP_MS

        def step(*, is_fed: bool = True) -> int:
            nonlocal provoked_s
            child.look()
            if is_fed:
                feed()
            if clock.monotonic_s() - provoked_s > PROVOKE_S:
                provoked_s = clock.monotonic_s()
                injections.provoke()
            over = injections.over()
            if len(over) >= (result.kills + 1) * KILL_EACH:
                result.kills += 1
                child.kill()
            pause.wait(PAUSE_S)
            return sum(map(injections.counts, over))

        try:
            while step() < wanted and clock.monotonic_s() < until_s:
                pass
            injections.stop()
            done = f"{result.rows} 0"
            wait_until(lambda: step(is_fed=False) >= 0 and child.said == done, END_S, lambda: f"{child.said} rows")
            result.ended = len(child.ended)
        finally:
            proxy.clear()
    over = injections.over()
    counted = [hit for hit in over if injections.counts(hit)]
    result.injected, result.others = len(counted), len(over) - len(counted)
    result.answers = dict(Counter(answer_of(hit) for hit in counted))
    records = read_committed(bootstrap, *targets)
    seen = Counter(int(record.value or b"-1") for record in records)
    result.lost = sum(number not in seen for number in range(result.rows))
    result.doubled = sum(times - 1 for times in seen.values())
    result.early = early(records)
    return result


def answer_of(hit: Hit) -> str:
    """The broker's answer in words."""
    return "none" if hit.answer is None else KafkaError(hit.answer).name() if hit.answer else "taken"
