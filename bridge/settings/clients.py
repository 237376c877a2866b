"""Properties of every Kafka client of the bridge: librdkafka's and the Java client's, from one configuration.

The user's properties override the defaults here. Properties that the bridge's promises depend on override the user's;
settings may not name them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from bridge.errors import ConfigurationError
from bridge.settings.java import translate
from bridge.settings.model import Settings
from bridge.settings.secrets import unmasked
from bridge.settings.time_budgets import LINGER_MS, MESSAGE_MARGIN_MS, TRANSACTION_TIMEOUT_MS

Role = Literal["consumer", "reader", "producer", "admin"]

HEADER_ALLOWANCE_BYTES: Final = 64 << 10  # the extra size of a dead letter over its record
PRODUCER_QUEUE_KIB: Final = 64 << 10  # bounds the memory of records in transit to the brokers
RECORD_BYTES_MAX: Final = 64 << 20  # the client's own limit; the limits of the topics are lower

_COMMON: Final[Mapping[str, str]] = {
    "socket.keepalive.enable": "true",  # after idle hours behind a load balancer, a message is due within milliseconds
    # As in the Java client. By default a returning broker goes unnoticed for up to 10 s.
    "reconnect.backoff.max.ms": "1000",
}
# A hanging node that keeps its connections gets no more requests after this; by default after a minute. (For
# transactions the client derives the time-out from theirs.)
_UNANSWERED: Final[Mapping[str, str]] = {"socket.timeout.ms": "10000"}
# One connection to each node, with a back-off between attempts. With sparse connections, a waiting request for a node
# that refuses connections repeats the attempt without a pause, which takes most of a core.
_ADMIN: Final[Mapping[str, str]] = {**_UNANSWERED, "enable.sparse.connections": "false"}
_CHECKED: Final[Mapping[str, str]] = {"check.crcs": "true"}
"""A batch with a wrong checksum is reported as such, and not read as false records (bridge/ingest/batches)."""
_CONSUMER: Final[Mapping[str, str]] = {
    **_CHECKED,
    # Leaves retained partitions alone, and spreads several topics evenly.
    "partition.assignment.strategy": "cooperative-sticky",
    "queued.max.messages.kbytes": "1024",  # this consumer never fetches
    "allow.auto.create.topics": "false",
}
_READER: Final[Mapping[str, str]] = {
    **_CHECKED,
    "allow.auto.create.topics": "false",
    # As in the Java client: the longest wait for the next fetch.
    "fetch.wait.max.ms": "500",
    "fetch.error.backoff.ms": "100",
}
_PRODUCER: Final[Mapping[str, str]] = {
    "partitioner": "murmur2_random",  # as the Java client's: the same partition for the same key
    # How long records without a key stay with a partition. By default it depends on linger.ms.
    "sticky.partitioning.linger.ms": "10",
    "batch.num.messages": "10000",
    "queue.buffering.max.kbytes": str(PRODUCER_QUEUE_KIB),
    # The default of 100 ms would delay the start of each transaction after the end of the one before.
    "retry.backoff.ms": "1",
    "retry.backoff.max.ms": "250",
    "message.max.bytes": str(RECORD_BYTES_MAX),
    # A missing target would delay the commit of all other records for 30 s.
    "topic.metadata.propagation.max.ms": "2000",
    # A misspelt header must not create a topic.
    "allow.auto.create.topics": "false",
    # Compression is the user's choice: at usual rates a batch holds few records, and a topic may recompress them.
}
_JAVA: Final[Mapping[str, str]] = {
    **_CHECKED,
    # The limits of a task, one for each partition: the records and bytes in memory at once. Small compressed records
    # may be large.
    "max.poll.records": "500",
    "max.partition.fetch.bytes": str(256 << 10),
    "fetch.max.bytes": str(256 << 10),
    "allow.auto.create.topics": "false",  # a deleted topic would be created again
    "fetch.max.wait.ms": "5000",  # the interval of requests for an idle partition; records do not wait for it
}

AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # macOS, BSD
)
"""The files of certificate authorities of common systems."""
_PROBE: Final = "probe"
"""librdkafka's value for the system's authorities."""


def librdkafka(settings: Settings, role: Role) -> dict[str, str | int | float | bool]:
    """Properties of a confluent-kafka client. Holds secrets: never print it."""
    base = {"client.id": settings.group_instance_id, **_COMMON}
    if role == "consumer":
        return {**base, **with_authorities(_consumer(settings))}
    if role == "producer":
        return {**base, **with_authorities(_producer(settings))}
    own = _READER if role == "reader" else _ADMIN
    return {**base, **own, **with_authorities(settings.kafka.properties("common"))}


def java(settings: Settings) -> dict[str, str]:
    """Options of Spark's Kafka source, each with the prefix `kafka.`. Holds secrets: never print it.

    Raises ConfigurationError for properties that the Java client does not support.
    """
    user = translate(with_authorities(settings.kafka.properties("common", "consumer")))
    # Rolls and retries of an aborted transaction must stay invisible; Spark's default is read_uncommitted.
    properties = {**_JAVA, **user, "isolation.level": "read_committed"}
    if "request.timeout.ms" in user and "fetch.max.wait.ms" not in user:  # an idle partition must not look dead
        longest_ms = min(int(_JAVA["fetch.max.wait.ms"]), int(user["request.timeout.ms"]) // 2)
        properties["fetch.max.wait.ms"] = str(longest_ms)
    return {f"kafka.{name}": value for name, value in properties.items()}


def java_client(settings: Settings) -> dict[str, str]:
    """The same without the prefix, for Kafka's own clients."""
    return {name.removeprefix("kafka."): value for name, value in java(settings).items()}


def with_authorities(properties: Mapping[str, str]) -> dict[str, str]:
    """`properties`, with the system's authorities for TLS without a named file, so that both clients use the same.
    librdkafka would search for the system's file; Java has its own key store with other authorities.

    Raises ConfigurationError.
    """
    named = properties.get("ssl.ca.location")
    uses_tls = properties.get("security.protocol", "").lower() in ("ssl", "sasl_ssl")
    if not uses_tls or "ssl.ca.pem" in properties or named not in (None, _PROBE):
        return dict(properties)
    files = (os.environ.get("SSL_CERT_FILE"), *AUTHORITIES)
    file = next((name for name in files if name and Path(name).is_file()), None)
    if file is None:
        raise ConfigurationError(
            "ssl.ca.location is missing: this system has no file of authorities",
            hint="Name the file of the authority that signed the brokers' certificates.",
            code="DB-2084",
        )
    return {**properties, "ssl.ca.location": file}


def _consumer(settings: Settings) -> dict[str, str]:
    return {
        **_CONSUMER,
        **settings.kafka.properties("common", "consumer"),
        "group.id": settings.group_id,
        "group.instance.id": settings.group_instance_id,
        "session.timeout.ms": str(settings.delivery.session_timeout),
        # Also makes look-ups of committed offsets wait for an open transaction (require-stable).
        "isolation.level": "read_committed",
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
    }


def _producer(settings: Settings) -> dict[str, str]:
    # Twice, because a transaction's acknowledged records leave the queue only when their reports are polled.
    queued = {"queue.buffering.max.messages": str(max(100_000, 2 * settings.delivery.transaction_rows))}
    promised = {"enable.idempotence": "true", "acks": "all"}
    properties = {**_PRODUCER, **queued, **settings.kafka.properties("common", "producer"), **promised}
    # A larger record would never get into the queue.
    longest = min(int(properties["message.max.bytes"]), int(properties["queue.buffering.max.kbytes"]) << 10)
    properties["message.max.bytes"] = str(longest)
    if settings.delivery.mode == "at-least-once":
        # Consumers see a record when it is written, not at the end of a transaction.
        return {"linger.ms": "5", **_UNANSWERED, **properties}
    if "queue.buffering.max.ms" not in properties:
        properties.setdefault("linger.ms", str(LINGER_MS))
    properties.setdefault("transaction.timeout.ms", str(TRANSACTION_TIMEOUT_MS))
    # When no broker answers, the client would forget them all and begin with the bootstrap servers; but it would send
    # the offsets of transactions to the forgotten coordinator forever (seen in 2.16). The bridge replaces an unusable
    # producer anyway, and the new one begins with the bootstrap servers, too.
    properties.setdefault("metadata.recovery.strategy", "none")
    properties["transactional.id"] = settings.transactional_id
    if not {"message.timeout.ms", "delivery.timeout.ms"} & properties.keys():
        # Below the transaction's time-out: the failure of a record must be known before the transaction ends.
        limit = int(properties["transaction.timeout.ms"]) - MESSAGE_MARGIN_MS
        properties["message.timeout.ms"] = str(max(limit, 1_000))
    return properties


QUIET: Final = ("-Xlog:disable", "-Xlog:all=warning:stderr")
"""Options of a JVM whose standard output is parsed: warnings go to standard error."""


def java_program() -> str:
    """The `java` of JAVA_HOME, or the first one in the path."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


def system_properties(settings: Settings) -> list[str]:
    """The `-D` options for every JVM that connects to brokers: the user's proxies, trust stores and logins."""
    user = (unmasked(settings.spark.conf.get(f"spark.driver.{name}JavaOptions", "")) for name in ("default", "extra"))
    given = [option for options in user for option in shlex.split(options)]
    return [*allowed_urls(settings), *(option for option in given if option.startswith("-D"))]


def allowed_urls(settings: Settings) -> list[str]:
    """The option with the allowed token endpoint: Kafka's Java client uses no other one (CVE-2025-27817)."""
    url = java(settings).get("kafka.sasl.oauthbearer.token.endpoint.url")
    return [] if url is None else [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}"]
