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
    """The values that Java's client accepts: `words` (in any case), or whole numbers from `least` to `most`, or any
    text without blanks around it. `java` is its name there, if it differs; `zero` is its notation of librdkafka's 0."""

    type: Literal["INT", "LONG", "BOOLEAN", "STRING"] = "STRING"
    java: str | None = None
    least: int = 0
    most: int = LONG_MAX
    zero: str = "0"
    words: tuple[str, ...] = ()

    def read(self, value: str) -> str:
        """`value` in the notation of Java's client. Raises ValueError, whose text hides the value."""
        if self.type in ("INT", "LONG"):
            if not WHOLE.fullmatch(value) or not self.least <= int(value) <= self.most:
                raise ValueError(f"is not a whole number from {self.least} to {self.most}")
            return self.zero if value == "0" else value
        if self.type == "BOOLEAN":
            if value.lower() not in TRUE | FALSE:
                raise ValueError("is neither true nor false")
            return str(value.lower() in TRUE).lower()
        if self.words:
            meant = [word for word in self.words if word.lower() == value.lower()]
            if not meant:
                raise ValueError(f"is not one of {', '.join(self.words)}")
            return meant[0]
        if value != value.strip():
            raise ValueError("begins or ends with a blank, which the Java client cuts off")
        return value


def _whole(java: str | None = None, *, least: int = 0, zero: str = "0") -> Property:
    return Property(type="INT", java=java, least=least, most=INT_MAX, zero=zero)


_LONG: Final = Property(type="LONG")
_TEXT: Final = Property()
PROPERTIES: Final[Mapping[str, Property]] = {
    "bootstrap.servers": _TEXT,
    "check.crcs": Property(type="BOOLEAN"),
    "client.dns.lookup": Property(words=("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only")),
    "client.rack": _TEXT,
    "connections.max.idle.ms": Property(type="LONG", least=-1, zero="-1"),
    "enable.metrics.push": Property(type="BOOLEAN"),
    "fetch.max.bytes": _whole(),
    "fetch.message.max.bytes": _whole("max.partition.fetch.bytes"),
    "fetch.min.bytes": _whole(),
    "fetch.wait.max.ms": _whole("fetch.max.wait.ms"),
    "max.partition.fetch.bytes": _whole(),
    "metadata.broker.list": Property(java="bootstrap.servers"),
    "metadata.max.age.ms": _LONG,
    "metadata.recovery.strategy": Property(words=("none", "rebootstrap")),
    "reconnect.backoff.max.ms": _LONG,
    "reconnect.backoff.ms": _LONG,
    "retry.backoff.max.ms": _LONG,
    "retry.backoff.ms": _LONG,
    "sasl.kerberos.min.time.before.relogin": _LONG,
    "sasl.kerberos.service.name": _TEXT,
    "sasl.mechanism": _TEXT,
    "sasl.mechanisms": Property(java="sasl.mechanism"),
    "socket.connection.setup.timeout.ms": _LONG,
    "socket.receive.buffer.bytes": _whole("receive.buffer.bytes", least=-1, zero="-1"),
    "socket.send.buffer.bytes": _whole("send.buffer.bytes", least=-1, zero="-1"),
    "socket.timeout.ms": _whole("request.timeout.ms"),
}
"""The properties of librdkafka that Spark's source gets, too."""

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
