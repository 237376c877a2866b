"""Properties of the Java client (kafka-clients 3.9) with its own checks: types, bounds, words; and librdkafka's names.

Spark's JVM reads them half a minute after delivery has begun. A value that it would refuse or misread is refused here,
before the first delivery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
WHOLE: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII)
"""A whole number that both clients read alike: librdkafka reads 010 as 8, and 1e3 as 1."""
TRUE: Final = frozenset(("true", "t", "1"))
FALSE: Final = frozenset(("false", "f", "0"))
"""librdkafka's words for a truth value; Java accepts only `true` and `false`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """The values that Java's client accepts: `words` (in `any_case`), or whole numbers from `least` to `most`, or any
    value of its type."""

    type: Literal["INT", "LONG", "BOOLEAN", "STRING", "LIST", "PASSWORD", "CLASS"] = "STRING"
    least: int = 0
    most: int = LONG_MAX
    words: tuple[str, ...] = ()
    any_case: bool = False

    def read(self, value: str) -> str:
        """`value` in the notation of Java's client. Raises ValueError, whose text hides the value."""
        if self.type in ("INT", "LONG"):
            if not WHOLE.fullmatch(value) or not self.least <= int(value) <= self.most:
                raise ValueError(f"is not a whole number from {self.least} to {self.most}")
        elif self.type == "BOOLEAN":
            if value.lower() not in TRUE | FALSE:
                raise ValueError("is neither true nor false")
            return str(value.lower() in TRUE).lower()
        elif self.words:
            meant = [word for word in self.words if word.lower() == value.lower()]
            if not meant:
                raise ValueError(f"is not one of {', '.join(self.words)}")
            return meant[0]
        elif value != value.strip():
            raise ValueError("begins or ends with a blank, which the Java client cuts off")
        return value


def _whole(least: int = 0) -> Property:
    return Property(type="INT", least=least, most=INT_MAX)


def _long(least: int = 0) -> Property:
    return Property(type="LONG", least=least)


_TEXT: Final = Property()
_SECRET: Final = Property(type="PASSWORD")
PROPERTIES: Final[Mapping[str, Property]] = {
    "allow.auto.create.topics": Property(type="BOOLEAN"),
    "bootstrap.servers": Property(type="LIST"),
    "check.crcs": Property(type="BOOLEAN"),
    "client.dns.lookup": Property(words=("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only")),
    "client.rack": _TEXT,
    "connections.max.idle.ms": _long(-1),
    "enable.metrics.push": Property(type="BOOLEAN"),
    "fetch.max.bytes": _whole(),
    "fetch.max.wait.ms": _whole(),
    "fetch.min.bytes": _whole(),
    "isolation.level": Property(words=("read_committed", "read_uncommitted")),
    "max.partition.fetch.bytes": _whole(),
    "max.poll.records": _whole(1),
    "metadata.max.age.ms": _long(),
    "metadata.recovery.strategy": Property(words=("none", "rebootstrap"), any_case=True),
    "receive.buffer.bytes": _whole(-1),
    "reconnect.backoff.max.ms": _long(),
    "reconnect.backoff.ms": _long(),
    "request.timeout.ms": _whole(),
    "retry.backoff.max.ms": _long(),
    "retry.backoff.ms": _long(),
    "sasl.jaas.config": _SECRET,
    "sasl.kerberos.min.time.before.relogin": _long(),
    "sasl.kerberos.service.name": _TEXT,
    "sasl.login.callback.handler.class": Property(type="CLASS"),
    "sasl.mechanism": _TEXT,
    "sasl.oauthbearer.token.endpoint.url": _TEXT,
    "security.protocol": Property(words=("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"), any_case=True),
    "send.buffer.bytes": _whole(-1),
    "socket.connection.setup.timeout.max.ms": _long(),
    "socket.connection.setup.timeout.ms": _long(),
    "ssl.endpoint.identification.algorithm": _TEXT,
    "ssl.key.password": _SECRET,
    "ssl.keystore.certificate.chain": _SECRET,
    "ssl.keystore.key": _SECRET,
    "ssl.keystore.location": _TEXT,
    "ssl.keystore.password": _SECRET,
    "ssl.keystore.type": _TEXT,
    "ssl.truststore.certificates": _SECRET,
    "ssl.truststore.location": _TEXT,
    "ssl.truststore.type": _TEXT,
}
"""The properties for Spark's source."""

_STORE: Final = "ssl.key.location and ssl.certificate.location, or ssl.keystore.location, a PKCS#12 file"
_LOGIN: Final = "sasl.username and sasl.password, sasl.kerberos.* or sasl.oauthbearer.*"
_LEVEL: Final = "compression.level"
IN_ITS_PLACE: Final[Mapping[str, str]] = {
    "buffer.memory": "queue.buffering.max.kbytes, in KiB",
    "compression.gzip.level": _LEVEL,
    "compression.lz4.level": _LEVEL,
    "compression.zstd.level": _LEVEL,
    "default.api.timeout.ms": "socket.timeout.ms",
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "max.block.ms": "message.timeout.ms",
    "max.request.size": "message.max.bytes",
    "metadata.max.idle.ms": "metadata.max.age.ms",
    "partitioner.class": "partitioner",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "sasl.jaas.config": _LOGIN,
    "sasl.login.callback.handler.class": "sasl.oauthbearer.method: oidc",
    "sasl.login.class": _LOGIN,
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "socket.connection.setup.timeout.max.ms": "socket.connection.setup.timeout.ms",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.keystore.type": _STORE,
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.truststore.location": "ssl.ca.location, a PEM file",
    "ssl.truststore.password": "ssl.ca.location, a PEM file, which has no password",
    "ssl.truststore.type": "ssl.ca.location, a PEM file",
}
"""librdkafka's equivalents of properties that only Java's clients have."""
_ONLY_JAVA: Final = re.compile(
    r"""
    auto\.include\.jmx\.reporter | bootstrap\.controllers | exclude\.internal\.topics | interceptor\.classes
    | internal\..* | (key|value)\.(de)?serializer | max\.poll\.records | metric\.reporters | metrics\..*
    | partitioner\.(adaptive\.partitioning\.enable|availability\.timeout\.ms|ignore\.keys)
    | sasl\.client\.callback\.handler\.class | sasl\.kerberos\.ticket\.renew\..*
    | sasl\.login\.(connect|read)\.timeout\.ms | sasl\.login\.re(fresh|try)\..*
    | sasl\.oauthbearer\.(clock|expected|header|jwks|scope\.claim|sub)\..*
    | security\.providers | ssl\.(enabled\.protocols|protocol|provider|engine\.factory\.class)
    | ssl\.(keymanager|trustmanager)\.algorithm | ssl\.secure\.random\.implementation
    """,
    re.VERBOSE,
)


def in_place_of(name: str) -> str | None:
    """librdkafka's equivalent of a Java property, empty without one; None for a name that is no Java property."""
    return IN_ITS_PLACE.get(name, "" if _ONLY_JAVA.fullmatch(name) else None)
