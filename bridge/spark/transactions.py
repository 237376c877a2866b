"""The states of transactions by transactional id, from their coordinators (KIP-664). librdkafka lacks this request, so
a separate process makes it with the Java client (../ingest/java/TransactionStates.java). After a kill, delivery waits
for the answer, and must not wait for Spark, whose JVM starts later and with a lower priority.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException

from bridge.errors import EnvironmentFailure
from bridge.settings.clients import QUIET, java_client, java_program, system_properties
from bridge.settings.model import Settings
from bridge.spark.session import with_classes

ANSWER_S: Final = 10
START_S: Final = 20
"""Extra time for the start of the process on a busy machine. Then the request is repeated."""
REASON_CHARS_MAX: Final = 500
UNKNOWN: Final = "-"

log = structlog.get_logger("bridge.spark.transactions")


def coordinators(
    settings: Settings, jars: Callable[[], Sequence[Path]]
) -> Callable[[Sequence[str]], Mapping[str, str | None]]:
    """A function from transactional ids to the states of their transactions in Kafka's words (`CompleteCommit`), or
    None for an id that the coordinator does not know. Without an answer it raises KafkaException; call it again. `jars`
    are those of the connector, with Kafka's client and the bridge's Java.
    """

    def ask(names: Sequence[str]) -> Mapping[str, str | None]:
        try:
            ran = subprocess.run(
                [*_command(settings, jars()), str(ANSWER_S * 1000), *names],
                input="\0".join(part for pair in java_client(settings).items() for part in pair),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=START_S + ANSWER_S,
                check=False,
                start_new_session=True,
            )
            said = ran.stdout.splitlines()[-len(names) :]  # warnings of the JVM may precede them
            if ran.returncode == 0 and len(said) == len(names):
                return {name: None if state == UNKNOWN else state for name, state in zip(names, said, strict=True)}
            output = ran.stdout.strip() or ran.stderr.strip() or "nothing"
            reason = f"the process ended with status {ran.returncode}, and printed: {output[-REASON_CHARS_MAX:]}"
        except (OSError, subprocess.TimeoutExpired, EnvironmentFailure) as failure:
            reason = str(failure)
        log.warning("coordinator-not-asked", ids=", ".join(names), reason=reason)
        text = f"the coordinator of the transactional id has not answered: {reason}"
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text, retriable=True))

    return ask


def _command(settings: Settings, jars: Sequence[Path]) -> list[str]:
    options = (*QUIET, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m", *system_properties(settings))
    return [java_program(), *options, *with_classes(jars), "delaybridge.TransactionStates"]
