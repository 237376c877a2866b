"""Look-ups about the Kafka cluster: its identity, its topics, their configuration, and the ends of their logs.

Every call is one round trip with a time-out. Its EnvironmentFailure names the brokers and librdkafka's last error;
"timed out" alone would hide a wrong password.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from bridge.errors import EnvironmentFailure
from bridge.kafka import leader_epochs
from bridge.kafka.construction import collecting_logger, made
from bridge.kafka.errors import Fault, fault_of
from bridge.kafka.leader_epochs import ReadStretch
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from timerstore.clock import SystemClock

_POLLS: Final = 20
_RETRY_S: Final = 0.1
_CONNECT_S: Final = 1.0
_ELECTION_S: Final = 2.0
_RENEW_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """The identity of the cluster; `brokers` are host:port."""

    cluster_id: str
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """An existing topic. A topic that is deleted and created again has another `topic_id`. `leaderless` are partition
    numbers."""

    name: str
    topic_id: str
    partitions: int
    replicas: int
    leaderless: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """The offsets of a partition's log: its first record and its next one; and the epoch of the leader that answered
    (-1: unknown)."""

    start: int
    end: int
    epoch: int = -1


class Cluster:
    """A connection for look-ups, without state of its own. Use it once and drop it."""

    def __init__(self, settings: Settings, *, timeout_s: float = 10.0) -> None:
        self._bootstrap = settings.kafka.bootstrap_servers
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self._pause = threading.Event()  # never set: a wait for it is a pause
        self._redact = Redactor(settings.secrets())
        self._last_error: KafkaError | None = None
        self._properties: dict[str, Any] = {**librdkafka(settings, "admin"), "error_cb": self._remember}
        self._consumer: dict[str, Any] = {
            **librdkafka(settings, "admin"),
            "group.id": f"{settings.group_id}-sample",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "check.crcs": "true",
            "enable.sparse.connections": "true",  # the consumer is short-lived
        }
        self._admin = self._make_admin()

    def describe(self) -> ClusterDescription:
        """The cluster's id and brokers. An answer also proves that the cluster is reachable."""
        result = self._describe()
        return ClusterDescription(
            cluster_id=result.cluster_id or "",
            brokers=tuple(sorted(f"{node.host}:{node.port}" for node in result.nodes)),
        )

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """The existing topics among `names`."""
        wanted = list(names)
        if not wanted:
            return {}

        def ask() -> dict[str, Any]:
            futures = self._admin.describe_topics(TopicCollection(wanted), request_timeout=self._timeout_s)
            return {
                name: self._unless_missing(future, f"look up topic {name}", code="DB-3002")
                for name, future in futures.items()
            }

        descriptions = self._patiently(ask).items()
        return {name: _topic(name, described) for name, described in descriptions if described is not None}

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """The ids, as text, of the existing topics among `names`."""
        return {name: topic.topic_id for name, topic in self.topics(names).items()}

    def topic_configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The effective configuration of the existing topics among `names`; values in Kafka's notation."""
        return {name: _readable(config) for name, config in self.readable_topic_configs(names).items()}

    def readable_topic_configs(self, names: Iterable[str]) -> dict[str, dict[str, str] | EnvironmentFailure]:
        """`topic_configs`, with the error in place of an unreadable configuration."""
        return self._configs(ResourceType.TOPIC, names)

    def broker_configs(self) -> dict[str, str]:
        """The effective configuration of one broker: the controller, or another broker if the controller is dead."""
        result = self._describe()
        nodes = [result.controller, *result.nodes] if result.controller else result.nodes
        broker = str(next(filter(_takes_connections, nodes), nodes[0]).id)
        return _readable(self._configs(ResourceType.BROKER, [broker]).get(broker, {}))

    def await_topics(self, names: Sequence[str], *, without: Container[str] = ()) -> dict[str, Topic]:
        """`topics` once all of `names` except `without` exist with leaders, or after the time-out. Right after the
        creation of a topic, other brokers may not know it yet.
        """
        deadline = self._clock.monotonic_s() + self._timeout_s
        while True:
            topics = self.topics(names)
            ready = all(n in topics and not topics[n].leaderless for n in names if n not in without)
            if ready or self._clock.monotonic_s() > deadline:
                return topics
            self._pause.wait(_RETRY_S)

    def watermarks(
        self, partitions: Sequence[tuple[str, int]], *, of_all: bool = True
    ) -> dict[tuple[str, int], Watermarks]:
        """Start and end of the log of each (topic, partition); without `of_all`, of those whose leaders answer. The end
        includes the records of open transactions."""
        starts = self._offsets(partitions, OffsetSpec.earliest(), of_all=of_all)  # type: ignore[no-untyped-call]
        ends = self._offsets(list(starts), OffsetSpec.latest(), of_all=of_all)  # type: ignore[no-untyped-call]
        return {p: Watermarks(start=starts[p][0], end=end, epoch=epoch) for p, (end, epoch) in ends.items()}

    def first_after(
        self, partitions: Sequence[tuple[str, int]], timestamp_ms: int
    ) -> dict[tuple[str, int], int | None]:
        """The first offset with this timestamp or a later one, by (topic, partition); None: all records are older."""
        offsets = self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms))
        return {place: offset if offset >= 0 else None for place, (offset, _) in offsets.items()}

    def committed(
        self, group: str, partitions: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], tuple[int, str | None]]:
        """A group's committed offset and metadata of each (topic, partition) with a commit. Does not wait for open
        transactions."""
        places = [TopicPartition(*place) for place in partitions]
        if not places:
            return {}
        asked = ConsumerGroupTopicPartitions(group, places)
        futures = self._admin.list_consumer_group_offsets(
            [asked], require_stable=False, request_timeout=self._timeout_s
        )
        answer = self._result(futures[group], "read the committed offsets", code="DB-3071")
        return {
            (place.topic, place.partition): (place.offset, place.metadata)
            for place in answer.topic_partitions
            if place.error is None and place.offset >= 0
        }

    def cuts(
        self, stretches: Mapping[tuple[str, int], ReadStretch], beat: Callable[[], None] = lambda: None
    ) -> dict[tuple[str, int], int | None]:
        """The cuts of the logs: the first offset in each stretch with a later leader epoch (None: no cut). Partitions
        that do not answer are left out."""
        if not stretches:
            return {}
        config = {
            "isolation.level": "read_uncommitted",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end of a log is reported at once
            "fetch.message.max.bytes": 16_384,  # one record of each partition is enough
            "queued.min.messages": 1,
            "fetch.queue.backoff.ms": 0,  # the next stretch is fetched at once
        }
        with closing(self._sampling(config)) as consumer:
            return leader_epochs.cuts(consumer, stretches, beat)

    def _sampling(self, more: Mapping[str, Any]) -> Consumer:
        return made("for samples", lambda: Consumer({**self._consumer, **more}, logger=collecting_logger([])))

    def create_topic(self, name: str, *, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Create a topic. An existing topic stays unchanged. `replication` -1: the brokers' default."""
        new = NewTopic(name, num_partitions=partitions, replication_factor=replication, config=dict(config))
        futures = self._admin.create_topics([new], request_timeout=self._timeout_s, operation_timeout=self._timeout_s)
        try:
            futures[name].result(timeout=self._timeout_s + 1)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._failure(f"create topic {name}", error.args[0], code="DB-3003") from None

    def _configs(self, kind: ResourceType, names: Iterable[str]) -> dict[str, dict[str, str] | EnvironmentFailure]:
        """The configurations by name; missing resources are left out."""
        resources = [ConfigResource(kind, name) for name in names]

        def ask() -> dict[str, Any]:
            futures = self._admin.describe_configs(resources, request_timeout=self._timeout_s)
            return {
                r.name: self._unless_refused(f, f"read the configuration of {r.name}", code="DB-3002")
                for r, f in futures.items()
            }

        configs = self._patiently(ask).items() if resources else ()
        return {name: _config(entries) for name, entries in configs if entries is not None}

    def _make_admin(self) -> AdminClient:
        return made("for look-ups", lambda: AdminClient(self._properties, logger=collecting_logger([])))

    def _offsets(
        self, partitions: Sequence[tuple[str, int]], spec: OffsetSpec, *, of_all: bool = True
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Offset and leader epoch by partition. A partition between two leaders, such as a new one, is asked again for
        a while. After an election librdkafka asks under the old epoch until it renews its metadata, which takes
        minutes. A client that is created after the election does not.
        """
        renew_s = self._clock.monotonic_s()
        deadline_s = renew_s + _ELECTION_S
        while True:
            offsets, missing = self._ask_offsets(partitions, spec)
            now_s = self._clock.monotonic_s()
            is_partial = not of_all and (bool(offsets) or isinstance(missing, _Leaderless))
            if missing is None or (now_s > deadline_s and is_partial):
                return offsets
            if now_s > deadline_s:
                raise missing
            if now_s >= renew_s:
                renew_s = now_s + _RENEW_S
                with suppress(EnvironmentFailure):  # while its certificate is replaced, say, the old client goes on
                    self._admin = self._make_admin()
            self._pause.wait(_RETRY_S)

    def _ask_offsets(
        self, partitions: Sequence[tuple[str, int]], spec: OffsetSpec
    ) -> tuple[dict[tuple[str, int], tuple[int, int]], _Leaderless | _Unanswered | None]:
        """Offset and leader epoch by partition, and the error of a missing partition."""
        if not partitions:
            return {}, None
        offsets: dict[tuple[str, int], tuple[int, int]] = {}
        missing: _Leaderless | _Unanswered | None = None
        asked = {TopicPartition(topic, partition): spec for topic, partition in partitions}
        futures = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=self._timeout_s
        )
        for tp, future in futures.items():
            try:
                answer = self._result(future, f"look up offsets of {tp.topic}[{tp.partition}]", code="DB-3002")
                if answer.offset == OFFSET_INVALID:  # the broker's answer lacks this partition
                    absent = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)
                    raise self._failure(f"look up offsets of {tp.topic}[{tp.partition}]", absent, code="DB-3002")
            except (_Leaderless, _Unanswered) as error:
                missing = error
            else:
                epoch = -1 if answer.leader_epoch is None else int(answer.leader_epoch)
                offsets[tp.topic, tp.partition] = int(answer.offset), epoch
        return offsets, missing

    def _describe(self) -> Any:
        ask = partial(self._admin.describe_cluster, request_timeout=self._timeout_s)
        return self._patiently(lambda: self._result(ask(), "reach the brokers", code="DB-3001"))

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Call `ask`, and once more if there was no answer. The client waits for the controller. With KRaft, brokers
        name any broker as the controller, even a dead one until they notice (9 s). A second request names another.
        """
        try:
            return ask()
        except _Unanswered:
            if not self._finds_controller():
                raise
            return ask()

    def _finds_controller(self) -> bool:
        """Whether the brokers name a controller that accepts connections, in time."""
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        while self._clock.monotonic_s() < deadline_s:
            try:
                cluster = self._admin.list_topics(timeout=_CONNECT_S)
            except KafkaException:
                return False  # no broker answers
            controller = cluster.brokers.get(cluster.controller_id)
            if controller is not None and _takes_connections(controller):
                return True
            self._pause.wait(_RETRY_S)
        return False

    def _result(self, future: Future[Any], what: str, *, code: str) -> Any:
        try:
            return future.result(timeout=self._timeout_s + 1)
        except KafkaException as error:
            raise self._failure(what, error.args[0], code=code) from None
        except TimeoutError:
            raise self._failure(what, None, code=code) from None

    def _unless_missing(self, future: Future[Any], what: str, *, code: str) -> Any | None:
        try:
            return self._result(future, what, code=code)
        except _Missing:
            return None

    def _unless_refused(self, future: Future[Any], what: str, *, code: str) -> Any | None:
        try:
            return self._unless_missing(future, what, code=code)
        except _Unanswered:
            raise
        except EnvironmentFailure as failure:
            return failure

    def _remember(self, error: KafkaError) -> None:
        """Keep the most specific error: a wrong password is followed by the uninformative `all brokers down`."""
        if self._last_error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._last_error = error

    def _failure(self, what: str, error: KafkaError | None, *, code: str) -> EnvironmentFailure:
        for _ in range(_POLLS):  # each poll delivers at most one queued error
            self._admin.poll(0)
        kind = EnvironmentFailure if error is None else _KINDS.get(error.code(), EnvironmentFailure)
        return failure(what, error, self._last_error, self._bootstrap, self._redact, kind, code=code)


def _takes_connections(node: Any) -> bool:
    with suppress(OSError):
        socket.create_connection((str(node.host), int(node.port)), _CONNECT_S).close()
        return True
    return False


class _Unanswered(EnvironmentFailure):
    """No answer came in time."""


class _Leaderless(EnvironmentFailure):
    """The partition is between two leaders, or has another leader than the client assumes."""


class _Missing(EnvironmentFailure):
    """The topic does not exist."""


_KINDS: Final[Mapping[int, type[EnvironmentFailure]]] = {
    KafkaError._TIMED_OUT: _Unanswered,
    KafkaError._NOENT: _Leaderless,
    KafkaError.FENCED_LEADER_EPOCH: _Leaderless,
    KafkaError.LEADER_NOT_AVAILABLE: _Leaderless,
    KafkaError.NOT_LEADER_FOR_PARTITION: _Leaderless,
    KafkaError.UNKNOWN_LEADER_EPOCH: _Leaderless,
    KafkaError.UNKNOWN_TOPIC_OR_PART: _Missing,
}


def failure(
    what: str,
    error: KafkaError | None,
    background: KafkaError | None,
    bootstrap: str,
    redact: Callable[[str], str],
    kind: type[EnvironmentFailure] = EnvironmentFailure,
    *,
    code: str,
) -> EnvironmentFailure:
    """An EnvironmentFailure from a call's error and the client's last background error."""
    errors = [e for e in (error, background) if e is not None]
    faults = {fault_of(e) for e in errors}
    if Fault.FORBIDDEN in faults or any(e.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED for e in errors):
        hint = "Grant this user the right; docs/operations.md lists the required rights."
    elif Fault.CREDENTIALS in faults or any(e.code() == KafkaError._SSL for e in errors):
        hint = "Check security.protocol, sasl.* and ssl.* under kafka.common."
    else:
        hint = (
            "Check kafka.common.bootstrap.servers, and that the brokers' advertised addresses are reachable from here."
        )
    said = [redact(e.str()) for e in errors]
    reason = "; ".join(dict.fromkeys(said)) or "no answer in time"
    return kind(f"cannot {what}: {reason}", hint=hint, code=code, bootstrap=bootstrap)


def _config(entries: Mapping[str, Any] | EnvironmentFailure) -> dict[str, str] | EnvironmentFailure:
    if isinstance(entries, EnvironmentFailure):
        return entries
    return {name: str(entry.value) for name, entry in entries.items() if entry.value is not None}


def _readable(config: dict[str, str] | EnvironmentFailure) -> dict[str, str]:
    if isinstance(config, EnvironmentFailure):
        raise config
    return config


def _topic(name: str, described: Any) -> Topic:
    leaderless = tuple(p.id for p in described.partitions if p.leader is None)
    replicas = min((len(p.replicas) for p in described.partitions), default=0)
    return Topic(
        name=name,
        topic_id=str(described.topic_id),
        partitions=len(described.partitions),
        replicas=replicas,
        leaderless=leaderless,
    )
