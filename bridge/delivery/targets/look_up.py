"""Looks targets up without producing to them: existence, largest record, the bridge's permission to write, and
partitions without a leader, or with fewer replicas in sync than acks=all needs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AclOperation,
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from bridge.delivery.targets.target import Leader, Place, Target
from bridge.errors import EnvironmentFailure
from bridge.kafka.construction import CLIENT_LOG, made
from bridge.kafka.errors import Refusal, kafka_error
from bridge.wire.reasons import RejectReason

PROBE_TIMEOUT_S: Final = 2.0


class TargetLookUp:
    """Looks targets up with an admin client, all names in three requests. Any thread."""

    def __init__(self, properties: Mapping[str, Any], timeout_s: float = 1.5) -> None:
        """`timeout_s` applies to each of three requests; their sum must stay well below the transaction time-out, since
        a transaction may be open meanwhile."""
        # Otherwise a question about a misspelt name would create the topic, on brokers that do that.
        asking = {**properties, "allow.auto.create.topics": "false"}
        self._admin = made("for targets", lambda: AdminClient(asking, logger=CLIENT_LOG))
        self._timeout_s = timeout_s

    def __call__(self, names: Sequence[str]) -> Mapping[str, Target]:
        """The present state of each topic. Raises EnvironmentFailure when the brokers do not answer."""
        # The other requests go to a broker that this client remembers, maybe the one that has just died. This one goes
        # to any that answers, and refreshes that memory.
        self._metadata(names[0])
        try:
            return self._ask(names)
        except KafkaException as exception:
            raise _unanswered(names[0], kafka_error(exception).str()) from None

    def _ask(self, names: Sequence[str]) -> Mapping[str, Target]:
        described = self._admin.describe_topics(
            TopicCollection(list(names)), request_timeout=self._timeout_s, include_authorized_operations=True
        )
        topics = {name: self._result(name, future) for name, future in described.items()}
        present = [name for name, answer in topics.items() if not isinstance(answer, Refusal)]
        configs: dict[str, Any] = {}
        if present:
            resources = [ConfigResource(ResourceType.TOPIC, name) for name in present]
            answers = self._admin.describe_configs(resources, request_timeout=self._timeout_s)
            configs = {resource.name: self._result(resource.name, future) for resource, future in answers.items()}
        return {name: _target(name, answer, configs.get(name)) for name, answer in topics.items()}

    def leaders(self, name: str) -> Mapping[int, Leader]:
        """The present leader of each partition of a topic. Raises EnvironmentFailure.

        Any broker may answer. To describe a topic the client asks the controller, which with KRaft is any broker in its
        view: maybe the dead one."""
        metadata = self._metadata(name)
        nodes = {node.id: Leader(node.id, str(node.host), int(node.port)) for node in metadata.brokers.values()}
        led = metadata.topics[name].partitions if name in metadata.topics else {}
        return {number: nodes[partition.leader] for number, partition in led.items() if partition.leader in nodes}

    def count_partitions(self, name: str) -> int:
        """The present number of a topic's partitions. Raises EnvironmentFailure."""
        topic = self._metadata(name).topics.get(name)
        if topic is None or topic.error is not None:
            raise _unanswered(name, "no metadata" if topic is None else topic.error.str())
        return len(topic.partitions)

    def _metadata(self, name: str) -> Any:
        try:
            return self._admin.list_topics(name, timeout=self._timeout_s)
        except KafkaException as exception:
            raise _unanswered(name, kafka_error(exception).str()) from None

    def ask(self, leaders: Mapping[Place, Leader | None], *, doubtful: bool) -> Mapping[Place, Future[Any]]:
        """Ask the leader of each partition for its end offset, without waiting (`liveness.is_answered`); each in its
        own request, since a silent leader would delay the answers of the others.

        `doubtful`: some may be dead, and only those that accept a connection are asked: the silence of the others is
        known at once."""
        asked: dict[Place, Future[Any]] = {}
        checked: dict[Leader, dict[Place, Future[Any]]] = {}
        for place, leader in leaders.items():
            if leader is None or not doubtful:
                asked[place] = self._end_of(place)
            else:
                asked[place] = checked.setdefault(leader, {})[place] = Future()
        for leader, questions in checked.items():
            threading.Thread(target=self._ask_if_there, args=(leader, questions), name="leader", daemon=True).start()
        return asked

    def _ask_if_there(self, leader: Leader, questions: Mapping[Place, Future[Any]]) -> None:
        try:
            socket.create_connection((leader.host, leader.port), PROBE_TIMEOUT_S).close()
            answers = {place: self._end_of(place) for place in questions}
        except Exception as error:  # noqa: BLE001 - every error means no answer
            for question in questions.values():
                question.set_exception(error)
            return
        for place, question in questions.items():
            try:
                question.set_result(answers[place].result(2 * PROBE_TIMEOUT_S))
            except Exception as error:  # noqa: BLE001 - the answer may be an error
                question.set_exception(error)

    def _end_of(self, place: Place) -> Future[Any]:
        wanted = TopicPartition(*place)
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        answer: Future[Any] = self._admin.list_offsets({wanted: latest}, request_timeout=PROBE_TIMEOUT_S)[wanted]
        return answer

    def _result(self, name: str, future: Future[Any]) -> Any:
        """The answer, or a Refusal: the topic is missing, or may not be described."""
        try:
            return future.result(timeout=self._timeout_s + 0.5)
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION):
                return Refusal(RejectReason.UNKNOWN_TARGET, f"{name}: {RejectReason.UNKNOWN_TARGET.explanation}")
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return Refusal(RejectReason.TARGET_DENIED, f"{name}: no permission to DESCRIBE it")
            reason = error.str()
        except FutureTimeout:
            reason = "no answer in time"
        raise _unanswered(name, reason)


def _unanswered(name: str, reason: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "could not look up the target topics",
        hint="Check that the brokers are reachable. Delivery then continues by itself.",
        topic=name,
        reason=reason,
        code="DB-3013",
    )


def _target(name: str, answer: Any, config: Any) -> Target:
    if isinstance(answer, Refusal):
        return Target(partitions=0, bytes_max=None, refusal=answer)
    refusal = None
    # Older brokers, and other makes, may not report permissions: then only producing shows them.
    if answer.authorized_operations and AclOperation.WRITE not in answer.authorized_operations:
        refusal = Refusal(RejectReason.TARGET_DENIED, f"{name}: no permission to WRITE to it")
    told = {} if config is None or isinstance(config, Refusal) else {key: entry.value for key, entry in config.items()}
    replicas_min = int(told.get("min.insync.replicas", 1))
    return Target(
        partitions=len(answer.partitions),
        bytes_max=int(told["max.message.bytes"]) if told else None,
        refusal=refusal,
        needs_key="compact" in told.get("cleanup.policy", ""),
        down={p.id: why for p in answer.partitions if (why := _trouble(p, replicas_min))},
        leaders={p.id: Leader(p.leader.id, p.leader.host, p.leader.port) for p in answer.partitions if _has_leader(p)},
    )


def _has_leader(partition: Any) -> bool:
    return partition.leader is not None and partition.leader.id >= 0


def _trouble(partition: Any, replicas_min: int) -> str:
    """Why a partition takes nothing now; empty if it takes records."""
    if not _has_leader(partition):
        return "has no leader"
    if len(partition.isr) < min(replicas_min, len(partition.replicas)):
        return f"has {len(partition.isr)} replicas in sync and needs {replicas_min}"
    return ""
