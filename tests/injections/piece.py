"""One piece of the bars: a combination is injected under load, the dispatching process is killed now and then, and at
the end a `read_committed` consumer counts."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported

from dev.harness.kafka import Outgoing, Topics, read_committed, send_all
from dev.harness.waiting import wait_until
from dev.proxy import Api, BrokerRequest, Hit, Injection, Proxy, RequestFault
from tests.injections.combinations import ARRIVALS, Combination
from tests.injections.dispatching import LOG, Order, Piece, deliver
from tests.injections.rows import PARTITIONS, early
from timerstore.clock import SystemClock

AHEAD_MS: Final = 50
"""Time between intake and the due time of the first of ROWS rows, which are due GAP_MS apart. More follow when fewer
than ROWS are left."""
ROWS: Final = 60
GAP_MS: Final = 2
TRANSACTION_ROWS: Final = 10
PROVOKE_S: Final = 0.25
UNDER_WAY: Final = 3
"""Limit of late copies that are under way."""
CHANCE: Final = 0.6
"""Of a request to be met by a fault, while there is room for one."""
KILL_EACH: Final = 10
END_S: Final = 120.0
PAUSE_S: Final = 0.01
ENDED_MAX: Final = 20
ERROR_CHARACTERS: Final = 2_000
LOGS: Final = Path(".cache/injections")
FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([deliver.__module__])


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
    runs: dict[str, int] = field(default_factory=dict)
    """Injections that count, by commit and date."""
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    early: int = 0

    def add(self, other: Result) -> None:
        for name in ("injected", "others", "kills", "ended", "rows", "lost", "doubled", "early"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.answers = dict(Counter(self.answers) + Counter(other.answers))
        self.runs = dict(Counter(self.runs) + Counter(other.runs))

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
        within: str = "",
        chance: float = CHANCE,
        under_way: int = UNDER_WAY,
        limit: float = inf,
    ) -> None:
        """`chance` of a request to be met by a fault, while fewer than `under_way` are not over, and there were fewer
        than `limit`; only requests with `within` in their transactional id."""
        self._random, self._chance, self._under_way, self.limit = Random(seed), chance, under_way, limit
        self._proxy = proxy
        self._within = within
        self._is_stopped = self._is_provoking = False
        self.combination = combination
        fault, api = RequestFault(combination.fault), Api[combination.api]
        self._arrivals = ARRIVALS if fault is RequestFault.LATE else ARRIVALS[:1]
        self._chosen = self._random.choice(self._arrivals)
        self._all: list[Injection] = []
        for arrival in self._arrivals:
            when = partial(self._meets, arrival)
            self._all.append(proxy.inject(fault, api, times=None, when=when, arrives=arrival))
        self._provoking = proxy.inject(RequestFault.LOST_AFTER, Api.END_TXN, times=None, when=self._provokes)

    def _is_own(self, request: BrokerRequest) -> bool:
        return self._within in (request.transactional_id or "") and not self._is_stopped

    def _meets(self, arrival: Api, request: BrokerRequest) -> bool:
        end = self.combination.end
        if arrival is not self._chosen or not self._is_own(request):
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

    def _provokes(self, request: BrokerRequest) -> bool:
        is_met = self._is_provoking and self._is_own(request)
        self._is_provoking = self._is_provoking and not is_met
        return is_met

    def provoke(self) -> None:
        """A lost answer makes an id get a new epoch, which is a request that is asked for seldom, and makes another one
        take over, for which a late copy may wait."""
        self._is_provoking = self.combination.api == Api.INIT_PRODUCER_ID.name or not self.is_idle()

    def stop(self) -> None:
        """Inject nothing more."""
        self._is_stopped = True

    def clear(self) -> None:
        """As the proxy does."""
        self._proxy.clear([*self._all, self._provoking])

    def over(self) -> list[Hit]:
        return [hit for injection in self._all for hit in injection.hits if hit.is_over]

    def is_idle(self) -> bool:
        """Whether all hits are over."""
        return all(hit.is_over for injection in self._all for hit in injection.recent)

    def counts(self, hit: Hit) -> bool:
        """Whether it is one of those that are asked for."""
        end = self.combination.end
        is_ended = end == "any" or hit.is_committed is (end == "commit")
        return is_ended and (self.combination.fault != RequestFault.LATE.value or bool(hit.was_open))


class Child:
    """The dispatching process: killed, and started again. Each is forked from one that has imported everything."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pieces: list[Piece] = []
        self._said: tuple[int, int] | None = None
        self.ended: list[str] = []
        self._directory = tempfile.TemporaryDirectory(prefix="injections-", ignore_cleanup_errors=True)
        self._start()

    def _start(self) -> None:
        self._connection, other = FORKS.Pipe()
        arguments = self._order, other, Path(self._directory.name)
        self._process = FORKS.Process(target=deliver, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._said = None
        if self._pieces:
            self._send(self._pieces)

    def _send(self, pieces: list[Piece]) -> None:
        with suppress(BrokenPipeError):
            self._connection.send(pieces)

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._send([piece])

    def said(self) -> tuple[int, int] | None:
        """How many rows there are, and how many are left, by its last word."""
        with suppress(EOFError, OSError):  # it has been killed
            while self._connection.poll():
                self._said = self._connection.recv()
        return self._said

    def look(self) -> None:
        """Start it again, if it has ended by itself."""
        if self._process.is_alive():
            return
        self.ended.append(self._log()[-ERROR_CHARACTERS:])
        if len(self.ended) > ENDED_MAX:
            raise AssertionError(f"the process does not go on: {self.ended[-1]}")
        self._connection.close()
        self._start()

    def _log(self) -> str:
        """Its words, and those of its predecessors."""
        file = Path(self._directory.name, LOG)
        return file.read_text() if file.exists() else ""

    def keep(self, *more: str) -> None:
        """Keep the log, and more lines, for whoever looks for a fault."""
        kept = LOGS / f"{self._order.delay}.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("\n".join((self._log(), *more)))

    def kill(self) -> None:
        """SIGKILL, and a successor."""
        self._end()
        self._start()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is not None:
            self.keep(repr(error))
        self._directory.cleanup()


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
    injections = Injections(proxy, combination, seed, within=delay)
    provoked_s, pause = clock.monotonic_s(), threading.Event()
    with Child(order) as child:

        def feed() -> None:
            known, left = child.said() or (0, 0)
            if known < result.rows or left >= ROWS:
                return
            send_all(source, [Outgoing(topic=delay, partition=i % PARTITIONS) for i in range(ROWS)])
            child.add((result.rows, ROWS, clock.now_ms() + AHEAD_MS, GAP_MS))
            result.rows += ROWS

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

        def finish() -> None:
            done = result.rows, 0
            wait_until(lambda: step(is_fed=False) >= 0 and child.said() == done, END_S, lambda: f"{child.said()} rows")

        try:
            while step() < wanted and clock.monotonic_s() < until_s:
                pass
            injections.stop()
            finish()
            child.kill()  # a committed state that has gone back shows
            finish()
        finally:
            injections.clear()
        result.ended = len(child.ended)
        over = injections.over()
        counted = [hit for hit in over if injections.counts(hit)]
        result.injected, result.others = len(counted), len(over) - len(counted)
        result.answers = dict(Counter(answer_of(hit) for hit in counted))
        records = read_committed(bootstrap, *targets)
        seen = Counter(int(record.value or b"-1") for record in records)
        result.lost = sum(number not in seen for number in range(result.rows))
        result.doubled = sum(times - 1 for times in seen.values())
        result.early = early(records)
        if not result.is_good:
            child.keep(
                *(f"{number} came {seen[number]} times" for number in range(result.rows) if seen[number] != 1),
                *(f"{hit.request.transactional_id} {hit.number} {hit.was_open} {answer_of(hit)}" for hit in over),
            )
    return result


def answer_of(hit: Hit) -> str:
    """The broker's answer in words."""
    return "none" if hit.answer is None else KafkaError(hit.answer).name() if hit.answer else "taken"
