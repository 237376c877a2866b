"""The librdkafka properties that users may set. The library itself checks them, so the answer fits its version.

`OWNED` are the properties that the bridge's promises depend on, each with the reason why users cannot set it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaException, Producer

from bridge.settings.java_properties import WHOLE, in_place_of

_COMMIT: Final = "offsets are committed together with the output, never by a timer"
OWNED: Final[Mapping[str, str]] = {
    "acks": "a delivered message must be on all in-sync replicas",
    "auto.commit.enable": _COMMIT,
    "auto.commit.interval.ms": _COMMIT,
    "auto.offset.reset": "a lost position must stop the bridge; a new beginning would lose or repeat messages",
    "check.crcs": "a record damaged on a broker's disk must not be delivered",
    "delivery.report.only.error": "every accepted message is counted before a commit",
    "enable.auto.commit": _COMMIT,
    "enable.auto.offset.store": _COMMIT,
    "enable.gapless.guarantee": "the order of delivery is the dispatcher's",
    "enable.idempotence": "without it a retry could duplicate a message",
    "enable.partition.eof": "the bridge fetches nothing through this consumer",
    "group.id": "it is bridge.id",
    "group.protocol": "it is classic: with another one, a restart after a kill waits for the session time-out",
    "group.instance.id": "it is derived from bridge.id and bridge.instance",
    "group.remote.assignor": "the bridge follows the group's own assignor",
    "isolation.level": "records of aborted transactions must stay invisible",
    "request.required.acks": "a delivered message must be on all in-sync replicas",
    "session.timeout.ms": "it is delivery.session_timeout",
    "transactional.id": "it is derived from bridge.id and bridge.instance, and fences a second instance",
    "default.topic.config": "topic properties belong beside the others",
    "plugin.library.paths": "a configuration must not load code",
}

# Common names, for suggestions and for the environment, where dots and underscores look alike. Others work as well.
COMMON_NAMES: Final[tuple[str, ...]] = tuple(
    """
    allow.auto.create.topics api.version.request.timeout.ms batch.num.messages batch.size bootstrap.servers
    broker.address.family broker.address.ttl client.dns.lookup client.id client.rack compression.codec
    compression.level compression.type connections.max.idle.ms debug delivery.timeout.ms enable.metrics.push
    enable.ssl.certificate.verification fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.wait.max.ms
    heartbeat.interval.ms linger.ms log_level max.in.flight max.in.flight.requests.per.connection
    max.partition.fetch.bytes max.poll.interval.ms message.max.bytes message.send.max.retries message.timeout.ms
    metadata.max.age.ms metadata.recovery.strategy partition.assignment.strategy partitioner
    queue.buffering.max.kbytes queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes
    queued.min.messages receive.message.max.bytes reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms
    retries retry.backoff.max.ms retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd
    sasl.kerberos.principal sasl.kerberos.service.name sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.id
    sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions sasl.oauthbearer.method
    sasl.oauthbearer.scope sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol
    socket.connection.setup.timeout.ms socket.keepalive.enable socket.nagle.disable socket.receive.buffer.bytes
    socket.send.buffer.bytes socket.timeout.ms ssl.ca.location ssl.ca.pem ssl.certificate.location
    ssl.certificate.pem ssl.cipher.suites ssl.curves.list ssl.endpoint.identification.algorithm ssl.key.location
    ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.sigalgs.list
    statistics.interval.ms topic.metadata.propagation.max.ms topic.metadata.refresh.interval.ms
    transaction.timeout.ms
    """.split()  # noqa: SIM905 - a list of a hundred quoted strings is harder to read
)

_PROBE: Final = "delay.bridge.probe"
_RANGE: Final = re.compile(r"allowed range (-?\d+\.\.\d+)")
_LIKE_A_NUMBER: Final = re.compile(r"\s*[-+]?[.\d]")
_TRUTH_OF_YAML: Final = ("yes", "no", "on", "off", "y", "n")
_DECIMALS: Final = ("linger.ms", "queue.buffering.max.ms")
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_UNKNOWN: Final = re.compile(r'No such configuration property: "([^"]*)"')


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str | None:
    """The known name that was probably meant by `name`."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def problems(properties: Mapping[str, str], path: str) -> list[str]:
    """The problems of one map of user properties, a sentence each; `path` is its place, such as `kafka.common`.

    Values are never shown: any of them may be a secret under the wrong name.
    """
    refused = [f"{path}.{name} cannot be set: {OWNED[name]}" for name in properties if name in OWNED]
    allowed = {name: value for name, value in properties.items() if name not in OWNED}
    return refused + [problem for name, value in allowed.items() if (problem := _problem(name, value, path))]


def _problem(name: str, value: str, path: str) -> str | None:
    if name.endswith("_cb") or name in ("logger", "on_delivery"):
        return f"{path}.{name} cannot be set: it is not a value"
    if instead := in_place_of(name):  # librdkafka knows some of these names only to refuse them
        return f"{path}.{name} is a name of Java's clients; here it is {instead}"
    refusal = _refusal(name, value)
    if refusal is None:
        # C reads 010 as 8 and 1e3 as 1. A property that accepts any text is not a number.
        whole = _DECIMAL if name in _DECIMALS else WHOLE
        odd = _LIKE_A_NUMBER.match(value) and not whole.fullmatch(value) and _refusal(name, _PROBE) is not None
        return f"{path}.{name} is not a whole number in decimal digits" if odd else None
    if _UNKNOWN.search(refusal):
        if in_place_of(name) is not None:
            return f"{path}.{name} exists only in Java's clients; remove it"
        suggestion = nearest(name, COMMON_NAMES)
        return f"{path}.{name} is not a known key" + (f"; did you mean {path}.{suggestion}?" if suggestion else "")
    if value.lower() in _TRUTH_OF_YAML:
        return f"{path}.{name} must be true or false for the Kafka client, if it is a truth value"
    allowed = _RANGE.search(refusal)
    return f"{path}.{name} has a value that the Kafka client refuses" + (f"; allowed: {allowed[1]}" if allowed else "")


def _refusal(name: str, value: str) -> str | None:
    """librdkafka's error for one property, or None if it accepts the property.

    An unknown name, set last, makes the construction fail in any case, before it creates a thread or a connection.
    """
    try:
        Producer({name: value, _PROBE: ""})
    except KafkaException as error:
        text = str(error)
        unknown = _UNKNOWN.search(text)
        return None if unknown and unknown[1] == _PROBE else text
    except (TypeError, ValueError) as error:
        return str(error)
    return None  # pragma: no cover - the probe is always refused
