"""Brokers that answer look-ups of targets as a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.target import Leader, Target
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Refusal
from bridge.wire.reasons import RejectReason

WELL = Target(partitions=3, bytes_max=1_000)
MISSING = Target(partitions=0, bytes_max=None, refusal=Refusal(RejectReason.UNKNOWN_TARGET, "missing"))
ONE, TWO = Leader(1, "one", 9092), Leader(2, "two", 9092)
ON_TWO = replace(WELL, leaders={0: ONE, 1: TWO, 2: ONE})
ON_ONE = replace(WELL, leaders={0: ONE, 1: ONE, 2: ONE})
SILENT = Refusal(RejectReason.TARGET_UNAVAILABLE, "no answer")


class Brokers(TargetLookUp):
    """The brokers' answers."""

    def __init__(self) -> None:
        self.topics: dict[str, Target] = {}
        self.asked: list[list[str]] = []
        self.probed: list[tuple[str, int]] = []
        self.doubtful: list[bool] = []
        self.dead: set[tuple[str, int]] = set()
        self.is_hanging = False
        self.is_refusing = False
        self.is_silent = False

    def __call__(self, names: Sequence[str]) -> Mapping[str, Target]:
        self.asked.append(list(names))
        if self.is_silent:
            raise EnvironmentFailure("no answer", hint="wait")
        return {name: self.topics.get(name, MISSING) for name in names}

    def leaders(self, name: str) -> Mapping[int, Leader]:
        if self.is_silent:
            raise EnvironmentFailure("no answer", hint="wait")
        return self.topics[name].leaders

    def count_partitions(self, name: str) -> int:
        if self.is_silent:
            raise EnvironmentFailure("no answer", hint="wait")
        return self.topics[name].partitions

    def ask(
        self, leaders: Mapping[tuple[str, int], Leader | None], *, doubtful: bool
    ) -> Mapping[tuple[str, int], Future[Any]]:
        asked: dict[tuple[str, int], Future[Any]] = {}
        self.doubtful.append(doubtful)
        for name, partition in leaders:
            self.probed.append((name, partition))
            asked[name, partition] = Future()
            if (name, partition) not in self.dead:
                asked[name, partition].set_result(SimpleNamespace(offset=0))
            elif not self.is_hanging:
                asked[name, partition].set_exception(ConnectionRefusedError() if self.is_refusing else TimeoutError())
        return asked
