"""The outcome of sent commands, from the bridge's answers (`bridge.wire.answers`) in their topic.

A command by id has a record in each partition, with an answer of its own, since its message may be in any of them. An
answer names its command by the place of the command's record (`delay-command`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Message

from bridge.commands.tail import Tail
from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings
from bridge.wire.answers import Outcome
from bridge.wire.headers import COMMAND, COUNT, OUTCOME
from bridge.wire.received import headers_of

SUFFIX: Final = ".answers"
"""The suffix of the topic of answers, for commands that name no topic."""
CONFIG: Final = {"cleanup.policy": "delete", "retention.ms": "3600000"}
MORE_S: Final = 0.2
DONE: Final = (Outcome.CANCELLED, Outcome.MOVED)
NOTHING: Final = (Outcome.NOT_PENDING,)


@dataclass(slots=True, kw_only=True)
class AnswerTally:
    """The number of messages of each outcome, and their origins in the answers."""

    counts: Counter[str] = field(default_factory=Counter)
    origins: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_changed(self) -> bool:
        """Whether messages were changed, and no pending one was left unchanged."""
        return any(self.counts[outcome] for outcome in DONE) and not self.counts.keys() - {*DONE, *NOTHING}

    @property
    def is_nothing(self) -> bool:
        """Whether no named message was pending."""
        return not self.counts.keys() - {*NOTHING}

    def add(self, outcome: str, count: int, origins: Sequence[str]) -> None:
        self.counts[outcome] += max(count, 1)
        self.origins.setdefault(outcome, []).extend(origins)


def await_answers(tail: Tail, commands: Collection[str], timeout_s: float, named: int | None = None) -> AnswerTally:
    """Wait for the answers to all `commands`, the places of their records. The answers to a command by origin are
    complete with `named` messages. Raises EnvironmentFailure at the end of the time."""
    left, tally, answered, records = set(commands), AnswerTally(), 0, tail.records(timeout_s)
    while left:
        if (message := next(records, None)) is None:
            raise EnvironmentFailure(
                f"no answer of the bridge within {timeout_s:g} s",
                hint="The command stays in the delay topic, in force. See /readyz and the log of the bridge.",
                first=min(left),
                code="DB-1080",
            )
        if (answer := _read(message, commands)) is None:
            continue
        command, outcome, count, origins = answer
        tally.add(outcome, count, origins)
        answered += count
        if named is None or answered >= named:
            left.discard(command)
    while (message := next(tail.records(MORE_S), None)) is not None:  # by id there is one for each outcome, in sequence
        if (answer := _read(message, commands)) is not None:
            tally.add(*answer[1:])
    return tally


def topic_of_answers(settings: Settings, delay_topic: str) -> str:
    """The topic of answers to commands that name no topic; a missing one is created if the settings allow.

    Raises ConfigurationError if the bridge may not deliver there, and EnvironmentFailure.
    """
    name = delay_topic + SUFFIX
    if not settings.target_permitted(name):
        raise ConfigurationError(
            f"the bridge may not answer in {name}",
            hint="Add it to targets.allow, or name another topic with --reply-to.",
            code="DB-1003",
        )
    cluster = Cluster(settings)
    if not cluster.topics([name]) and settings.bridge.create_topics:
        cluster.create_topic(name, partitions=1, replication=-1, config=CONFIG)
        cluster.await_topics([name])
    return name


def _read(message: Message, commands: Collection[str]) -> tuple[str, str, int, list[str]] | None:
    """Command, outcome, count and origins of an answer to one of `commands`; None for other records of the topic."""
    headers = {name: value or b"" for name, value in headers_of(message) or []}
    command, outcome = (headers.get(name, b"").decode(errors="replace") for name in (COMMAND, OUTCOME))
    if command not in commands or outcome not in set(Outcome):
        return None
    count = headers.get(COUNT, b"")
    try:
        value = json.loads(message.value() or b"{}")
    except (ValueError, RecursionError):
        value = {}
    origins = value.get("origins") if isinstance(value, dict) else None
    named = list(map(str, origins)) if isinstance(origins, list) else []
    return command, outcome, int(count) if count.isdigit() and len(count) < 10 else 0, named
