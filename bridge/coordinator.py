"""What the coordinator of a transactional id knows of it (KIP-664): asked by the Java client in Spark's JVM, since
librdkafka does not ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkContext

from bridge.kafka import java
from bridge.settings import Settings

ANSWER_S: Final = 10
CLOSE_S: Final = 1

log = structlog.get_logger("bridge.coordinator")


def coordinator(settings: Settings) -> Callable[[str], str | None]:
    """A function from a transactional id to the state of its transaction (`CompleteCommit`), as Kafka names it; None
    when there is no JVM yet, no answer, or no such id.
    """

    def ask(name: str) -> str | None:
        context = SparkContext._active_spark_context
        jvm = None if context is None else context._jvm
        if jvm is None:
            return None
        try:
            properties = jvm.java.util.HashMap()
            for key, value in java(settings).items():
                properties.put(key.removeprefix("kafka."), value)
            admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
            try:
                names = jvm.java.util.Collections.singletonList(name)
                answer = admin.describeTransactions(names).description(name)
                return str(answer.get(ANSWER_S, jvm.java.util.concurrent.TimeUnit.SECONDS).state().toString())
            finally:
                admin.close(jvm.java.time.Duration.ofSeconds(CLOSE_S))
        except Py4JJavaError as failure:
            reason = str(failure.java_exception.toString())
        except Py4JError as failure:
            reason = str(failure)
        if "TransactionalIdNotFoundException" not in reason:
            log.warning("coordinator-not-asked", id=name, reason=reason)
        return None

    return ask
