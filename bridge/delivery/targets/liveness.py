"""Whether the leaders of targets answer.

While a transaction is not acknowledged, every leader is asked something small. If some answer and others do not, the
others are unresponsive, with all partitions that they lead: a node that has just died is known of half a second later,
long before the brokers say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from bridge.delivery.targets.target import Leader, LookUp, Place, Target

ANSWER_S: Final = 0.3
"""A leader that has not answered within this, while others have, is unresponsive; one that refuses a connection, at
once. Usually an answer takes milliseconds.
"""
PROBE_S: Final = 2.0
"""How long a breaker that may be closed waits for its leader."""


@dataclass(frozen=True, slots=True, eq=False)
class Ping:
    """A question to each leader, all asked at one time."""

    look_up: LookUp
    asked_s: float
    answers: Mapping[Leader, Future[Any]]

    def is_answered(self) -> bool:
        """Whether all leaders have answered."""
        return all(map(self.look_up.is_answered, self.answers.values()))

    def unresponsive_leaders(self, now_s: float) -> frozenset[Leader]:
        """Leaders that do not answer while others do."""
        silent = {leader for leader, answer in self.answers.items() if self.look_up.is_answered(answer) is False}
        if len(silent) == len(self.answers):
            return frozenset()  # the leaders are not the cause
        if now_s - self.asked_s < ANSWER_S and not all(self.look_up.is_refused(self.answers[each]) for each in silent):
            return frozenset()  # a slow leader may still answer; one that refuses a connection will not
        return frozenset(silent)


def ping_leaders(look_up: LookUp, partition_of: Mapping[Leader, Place], now_s: float, *, doubtful: bool) -> Ping:
    """Ask each leader for a partition of its own; a single one is not asked, since it cannot be compared."""
    if len(partition_of) < 2:
        return Ping(look_up, now_s, {})
    asked = look_up.ask({place: leader for leader, place in partition_of.items()}, doubtful=doubtful)
    return Ping(look_up, now_s, {leader: asked[place] for leader, place in partition_of.items()})


def probe(look_up: LookUp, known: Mapping[str, Target], places: Sequence[Place]) -> dict[Place, list[Place] | None]:
    """Ask the leaders of the places whose breakers may be closed; one question to each, and one wait for all.

    By place: the partitions that stay open, or None where all of it does. A whole target is closed when one of its
    leaders answers.
    """
    probed = {}
    for name, partition in places:
        count = known[name].partitions if name in known else 0
        probed[name, partition] = [(name, n) for n in ([partition] if partition >= 0 else range(count))]
    leaders = {
        (name, n): known[name].leaders.get(n) if name in known else None
        for several in probed.values()
        for name, n in several
    }
    answers = look_up.ask(leaders, doubtful=True)
    wait(answers.values(), PROBE_S)
    found: dict[Place, list[Place] | None] = {}
    for place, several in probed.items():
        silent = [each for each in several if each not in answers or not look_up.is_answered(answers[each])]
        is_well = len(silent) < len(several) or (not several and place[0] not in known)
        found[place] = silent if is_well else None
    return found
