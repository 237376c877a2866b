"""Liveness of the targets' leaders.

While a transaction is not acknowledged, every leader gets a small request. If some answer and others do not, the others
are unresponsive, with all partitions that they lead: the death of a node is known within half a second, long before the
brokers report it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaException

from bridge.delivery.targets.target import Leader
from bridge.kafka.errors import is_unreadable, kafka_error

ANSWER_S: Final = 0.3
"""A leader without an answer within this time, while others have answered, is unresponsive; after a refused connection,
at once. Usually an answer takes milliseconds."""


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


def is_answered(answer: Future[Any]) -> bool | None:
    """Whether a leader has answered by now; None: with an error. After its time-out the client may give an offset that
    is invalid."""
    if not answer.done():
        return False
    failure = answer.exception()
    if isinstance(failure, KafkaException) and is_unreadable(kafka_error(failure)):
        return None
    return failure is None and bool(answer.result().offset >= 0)


def _is_connection_refused(answer: Future[Any]) -> bool:
    return answer.done() and isinstance(answer.exception(), ConnectionRefusedError)
