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

from confluent_kafka import KafkaException

from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.target import Leader, Place, Target
from bridge.kafka.errors import is_unreadable, kafka_error

ANSWER_S: Final = 0.3
"""A leader that has not answered within this, while others have, is unresponsive; one that refuses a connection, at
once. Usually an answer takes milliseconds."""
PROBE_S: Final = 2.0
"""How long a breaker that may be closed waits for its leader."""


@dataclass(frozen=True, slots=True, eq=False)
class Ping:
    """A question to each leader (`TargetLookUp.ask`), all asked at one time."""

    asked_s: float
    answers: Mapping[Leader, Future[Any]]

    def is_answered(self) -> bool:
        """Whether all leaders have answered without an error."""
        return all(map(is_answered, self.answers.values()))

    def unresponsive_leaders(self, now_s: float) -> frozenset[Leader]:
        """Leaders that do not answer while others do."""
        silent = {leader for leader, answer in self.answers.items() if is_answered(answer) is False}
        if len(silent) == len(self.answers):
            return frozenset()  # the leaders are not the cause
        if now_s - self.asked_s < ANSWER_S and not all(_is_connection_refused(self.answers[each]) for each in silent):
            return frozenset()  # a slow leader may still answer; one that refuses a connection will not
        return frozenset(silent)


def probe(
    look_up: TargetLookUp, known: Mapping[str, Target], places: Sequence[Place]
) -> dict[Place, list[Place] | None]:
    """Ask the leaders of the places whose breakers may be closed; one question to each, and one wait for all.

    By place: the partitions that stay open, or None where all of it does. A whole target is closed when one of its
    leaders answers.
    """
    probed: dict[Place, list[Place]] = {}
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
        silent = [each for each in several if not is_answered(answers[each])]
        is_well = len(silent) < len(several) or (not several and place[0] not in known)
        found[place] = silent if is_well else None
    return found


def is_answered(answer: Future[Any]) -> bool | None:
    """Whether a leader has answered by now; None: with an error. After its time-out the client may give an offset that
    is none."""
    if not answer.done():
        return False
    failure = answer.exception()
    if isinstance(failure, KafkaException) and is_unreadable(kafka_error(failure)):
        return None
    return failure is None and bool(answer.result().offset >= 0)


def _is_connection_refused(answer: Future[Any]) -> bool:
    return answer.done() and isinstance(answer.exception(), ConnectionRefusedError)
