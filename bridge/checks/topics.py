"""Checks of the topics: delay topics, dead-letter topics, and the configuration's default targets.

They change nothing, except that they create missing topics with `Context.create`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from bridge.checks.finding import Context, Finding, expected, failed, ok, warned
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.kafka.admin import Topic
from bridge.settings.clients import HEADER_ALLOWANCE_BYTES
from bridge.settings.model import Settings
from bridge.settings.units import format_bytes, format_duration_ms
from bridge.start.roll_window import (
    MESSAGE_BYTES,
    TopicLimits,
    retention_to_create_ms,
    roll_window_ms,
    times_written,
)

LOG_APPEND_TIME: Final = "message.timestamp.type=LogAppendTime"
_CONFIG: Final = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}  # of new topics


def check_delay_topics(context: Context) -> Iterator[Finding]:
    """Delay topics exist, stamp records by the broker's clock, and keep them."""
    keeps = {"retention.ms": str(retention_to_create_ms(context.settings)), "retention.bytes": "-1"}
    wanted = dict.fromkeys(context.settings.delay_topics, _CONFIG | keeps)
    yield from _own_topics(context, "delay topic", wanted, partial(_delay_topic, context))


def _delay_topic(context: Context, label: str, name: str, config: dict[str, str]) -> Iterator[Finding]:
    detail = f"message.timestamp.type={config.get('message.timestamp.type', 'CreateTime')}"
    yield expected(label, detail, detail == LOG_APPEND_TIME, _alter(context, name, LOG_APPEND_TIME))
    detail = f"cleanup.policy={config.get('cleanup.policy', 'delete')}"
    yield expected(label, detail, "compact" not in detail, _alter(context, name, "cleanup.policy=delete"))
    yield from _retention(label, name, config, context)


def _retention(label: str, name: str, config: dict[str, str], context: Context) -> Iterator[Finding]:
    limits = TopicLimits.of(config)
    try:
        window_ms = roll_window_ms(context.settings, name, limits)
    except BridgeError as error:
        detail = f"{error.message}: retention.ms={limits.retention_ms}"
        yield failed(label, detail, error.hint, error=type(error))
        return
    if limits.retention_bytes >= 0:
        size = format_bytes(limits.retention_bytes)
        detail = f"retention.bytes={limits.retention_bytes}: pending records are lost if a partition outgrows {size}"
        detail += f" within {format_duration_ms(window_ms)}"
        yield warned(label, detail, _alter(context, name, "retention.bytes=-1"))
    kept = "for ever" if limits.retention_ms < 0 else format_duration_ms(limits.retention_ms)
    longest_ms = context.settings.delay.max
    times, longest = times_written(longest_ms, window_ms), format_duration_ms(longest_ms)
    often = "once" if times == 1 else f"about {times} times"
    detail = f"records are kept {kept}, and roll after {format_duration_ms(window_ms)}"
    detail += f": a message of the longest delay, {longest}, is written {often}"
    enough_ms = window_ms + min(window_ms, context.settings.retention.headroom)
    if 0 <= limits.retention_ms < enough_ms:
        spare = format_duration_ms(limits.retention_ms - window_ms)
        detail += f"; a bridge that is down or behind for more than {spare} may lose messages"
        remedy = f"lower roll.window, or: {_alter(context, name, f'retention.ms={enough_ms}')}"
        yield warned(label, detail, remedy)
    else:
        yield ok(label, detail)


def check_dead_letter_topics(context: Context) -> Iterator[Finding]:
    """Dead-letter topics exist, and have room for a reject with the headers that explain it."""
    delay_topics = list(context.settings.delay_topics)
    dead_letter = {name: context.settings.dead_letter_topic(name) for name in delay_topics}
    limits = {name: TopicLimits.of(c).message_bytes for name, c in context.cluster.topic_configs(delay_topics).items()}
    needed = {
        target: max(limits.get(name, MESSAGE_BYTES) for name in delay_topics if dead_letter[name] == target)
        + HEADER_ALLOWANCE_BYTES
        for target in dict.fromkeys(dead_letter.values())
    }
    wanted = {name: {**_CONFIG, "max.message.bytes": str(size)} for name, size in needed.items()}
    yield from _own_topics(context, "dead-letter topic", wanted, partial(_dead_letter_topic, context, needed))


def _dead_letter_topic(
    context: Context, sizes: Mapping[str, int], label: str, name: str, config: dict[str, str]
) -> Iterator[Finding]:
    needed = sizes[name]
    limit = TopicLimits.of(config).message_bytes
    if limit >= needed:
        yield ok(label, f"max.message.bytes={limit}")
    else:  # a reject beyond the limit stays pending: nothing is lost
        detail = f"max.message.bytes={limit}: a large reject with its headers needs {needed}"
        yield warned(label, detail, _alter(context, name, f"max.message.bytes={needed}"))
    if "compact" in (policy := config.get("cleanup.policy", "delete")):
        detail = f"cleanup.policy={policy}: records without a key are refused, others overwritten"
        yield failed(label, detail, _alter(context, name, "cleanup.policy=delete"))


def _own_topics(
    context: Context,
    kind: str,
    wanted: Mapping[str, Mapping[str, str]],
    look: Callable[[str, str, dict[str, str]], Iterator[Finding]],
) -> Iterator[Finding]:
    """Findings about topics and their `wanted` configuration; `look` checks those that exist."""
    topics, missing = _present(context, wanted)
    configs = context.cluster.topic_configs(topics)
    for name, config in wanted.items():
        label = f"{kind} {name}"
        if name in topics:
            yield _partitions(label, topics[name])
            yield from look(label, name, configs.get(name, {}))
        else:
            yield _missing(label, context, name, config, missing.get(name))


def check_default_targets(context: Context) -> Iterator[Finding]:
    """The default targets of delay topics exist and are allowed."""
    targets = {topic.target for topic in context.settings.delay_topics.values() if topic.target}
    present = context.cluster.topics(sorted(targets))
    for name in sorted(targets):
        if not context.settings.target_permitted(name):
            remedy = "add it to targets.allow, or remove it from targets.deny"
            yield failed(f"target {name}", "not allowed by targets", remedy)
        elif name not in present:
            yield warned(f"target {name}", "does not exist", "create it before messages are due")
        else:
            yield _partitions(f"target {name}", present[name])


def _present(
    context: Context, wanted: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, Topic], dict[str, EnvironmentFailure]]:
    """The existing topics, after the creation of missing ones if that is allowed; and the failures of creation.

    `wanted`: the configuration of a new topic, by name.
    """
    topics = context.cluster.topics(wanted)
    failures: dict[str, EnvironmentFailure] = {}
    absent = [name for name in wanted if name not in topics]
    if not (context.create and context.settings.bridge.create_topics and absent):
        return topics, failures
    for name in absent:
        partitions, replication = _size(context.settings, name)
        try:
            context.cluster.create_topic(name, partitions=partitions, replication=replication, config=wanted[name])
        except EnvironmentFailure as error:
            failures[name] = error
    return context.cluster.await_topics(list(wanted), without=failures), failures


def _size(settings: Settings, name: str) -> tuple[int, int]:
    """Partitions and replicas of a new topic; a dead-letter topic is like the delay topic that uses it."""
    users = [t for n, t in settings.delay_topics.items() if n == name or settings.dead_letter_topic(n) == name]
    return users[0].partitions, users[0].replication


def _missing(
    label: str, context: Context, name: str, config: Mapping[str, str], error: EnvironmentFailure | None
) -> Finding:
    partitions, _ = _size(context.settings, name)
    given = "".join(f" --config {key}={value}" for key, value in config.items())
    create = f"kafka-topics --bootstrap-server {context.bootstrap} --create --topic {name}"
    command = f"{create} --partitions {partitions}{given}"
    if error is not None:
        return failed(label, error.message, f"{error.hint}, or: {command}")
    if context.settings.bridge.create_topics and not context.create:
        return warned(label, "does not exist; `run` will create it", f"or: {command}")
    return failed(label, "does not exist", f"{command} (or bridge.create_topics: true)")


def _partitions(label: str, topic: Topic) -> Finding:
    plural = "s" * (topic.partitions != 1), "s" * (topic.replicas != 1)
    count = f"{topic.partitions} partition{plural[0]}, {topic.replicas} replica{plural[1]}"
    if topic.leaderless:
        which = ", ".join(map(str, topic.leaderless))
        detail = f"{count}; no leader for {which}"
        return warned(label, detail, "bring back the brokers of these partitions")
    return ok(label, count)


def _alter(context: Context, topic: str, setting: str) -> str:
    return alter(context, f"topics --entity-name {topic}", setting)


def alter(context: Context, entity: str, setting: str) -> str:
    """The command that changes a setting of a topic or of the brokers."""
    command = f"kafka-configs --bootstrap-server {context.bootstrap} --alter --entity-type {entity}"
    return f"{command} --add-config {setting}"
