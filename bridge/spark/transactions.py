"""What the coordinator of a transactional id knows of it (KIP-664): asked by the Java client in Spark's JVM, since
librdkafka does not ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

from bridge.settings.clients import java_client
from bridge.settings.model import Settings
from bridge.spark import session

JAVA_S: Final = 2.0
"""How long it is waited for the JVM: most kills leave a transaction open, and delivery waits for what becomes of it."""
ANSWER_S: Final = 10
CLOSE_S: Final = 1
NOT_KNOWN: Final = ("TransactionalIdNotFoundException", "UnsupportedVersionException")
"""The coordinator has removed the id, or is of a version that cannot tell: it will never answer otherwise."""

log = structlog.get_logger("bridge.spark.transactions")


def coordinator(settings: Settings) -> Callable[[str], str | None]:
    """A function from a transactional id to the state of its transaction (`CompleteCommit`), as Kafka names it; None
    when the coordinator knows nothing of the id. It raises KafkaException when there is no answer now: ask again.
    """

    def ask(name: str) -> str | None:
        jvm = session.jvm(JAVA_S)
        if jvm is None:
            raise _no_answer("Java is still starting")
        try:
            properties = jvm.java.util.HashMap()
            for key, value in java_client(settings).items():
                properties.put(key, value)
            admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
            try:
                names = jvm.java.util.Collections.singletonList(name)
                answer = admin.describeTransactions(names).description(name)
                return str(answer.get(ANSWER_S, jvm.java.util.concurrent.TimeUnit.SECONDS).state().toString())
            finally:
                admin.close(jvm.java.time.Duration.ofSeconds(CLOSE_S))
        except Py4JJavaError as failure:
            reason = str(failure.java_exception.toString())
        except (Py4JError, OSError) as failure:  # the JVM has died; the query's thread reports it
            reason = str(failure)
        if any(exception in reason for exception in NOT_KNOWN):
            return None
        log.warning("coordinator-not-asked", id=name, reason=reason)
        raise _no_answer(reason)

    return ask


def _no_answer(reason: str) -> KafkaException:
    text = f"the coordinator of the transactional id has not answered: {reason}"
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, text, retriable=True))
