"""Checks of the brokers: reachability, release and its faults, limits, transactions, elections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from confluent_kafka import KafkaException, Producer

from bridge.checks.finding import Context, Finding, failed, ok, warned
from bridge.checks.topics import alter
from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import failure
from bridge.kafka.reach import refuse_unreachable
from bridge.kafka.releases import SUPPORTED_MIN, api_versions, is_redpanda, loses_markers, release_of, spoken
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.settings.units import format_duration_ms

METADATA_BYTES_MIN: Final = 4096  # the offset's metadata carries the committed position
VERIFICATION: Final = "transaction.partition.verification.enable"
UNCLEAN: Final = "unclean.leader.election.enable"
BROKERS_OWN: Final = ("__consumer_offsets", "__transaction_state")
"""The topics of the groups' commits and of the transactions' outcomes."""
DEFAULT: Final = "the brokers' default"
_UPGRADE: Final = f"upgrade the brokers to Kafka {SUPPORTED_MIN} or later (docs/brokers.md)"
_REPLICAS: Final = (
    "upgrade to a patch release with the fix, if one exists; until then, spread the replicas of delay topics, targets "
    f"and {BROKERS_OWN[0]} so that two never fail together"
)


def check_brokers(context: Context) -> Iterator[Finding]:
    """The brokers answer."""
    try:
        if not context.create:
            refuse_unreachable(context.bootstrap)
        cluster = context.cluster.describe()
    except EnvironmentFailure as error:
        reason = f": {error.fields['reason']}" if "reason" in error.fields else ""
        yield failed("brokers", f"{error.message}{reason} ({context.bootstrap})", error.hint)
        return
    brokers = f"{len(cluster.brokers)} broker{'s' * (len(cluster.brokers) != 1)}"
    yield ok("brokers", f"{brokers} at {context.bootstrap}, cluster id {cluster.cluster_id}")


def check_broker_version(context: Context) -> Iterator[Finding]:
    """The brokers' release was tested with the bridge, and has no fault of transactions that no client can undo."""
    name = "broker version"
    if is_redpanda(context.cluster.describe().cluster_id):
        yield warned(name, "Redpanda, which was not tested", "docs/brokers.md says what to rely on")
        return
    versions = api_versions(context.settings, timeout_s=context.timeout_s)
    if not versions:
        remedy = f"make sure that it is Kafka {SUPPORTED_MIN} or later, without the loss of markers (docs/brokers.md)"
        yield warned(name, "unknown: the brokers did not tell it", remedy)
        return
    version = release_of(versions)
    speaks = "older than Kafka 2.1" if version is None else f"speaks the protocol of {spoken(version)}"
    if version is None or version < SUPPORTED_MIN:
        detail = f"{speaks}, which was not tested"
        of_kind = failed if context.settings.delivery.mode == "exactly-once" else warned
        yield of_kind(name, detail, _UPGRADE)
        return
    yield ok(name, speaks)
    if loses_markers(version):
        detail = "4.3.0 to 4.4.0 drop the marker of a transaction in a partition without a leader (KAFKA-20734)"
        yield warned("transaction markers", detail, _REPLICAS)


def check_broker_limits(context: Context) -> Iterator[Finding]:
    """The brokers' limits admit the bridge's requests. Where the bridge may not read them, the result is a warning."""
    try:
        configs = context.cluster.broker_configs()
    except EnvironmentFailure as error:
        yield warned("broker limits", f"unknown: {error.message}", error.hint)
        return
    problems = list(_limit_problems(configs, context.settings))
    for detail, remedy in problems:
        yield failed("broker limits", detail, remedy)
    if not problems:
        yield ok("broker limits", "offset metadata, session and transaction time-outs")


def _limit_problems(configs: dict[str, str], settings: Settings) -> Iterator[tuple[str, str]]:
    def limit(name: str, default: int) -> int:
        return int(configs.get(name, default))

    if (size := limit("offset.metadata.max.bytes", METADATA_BYTES_MIN)) < METADATA_BYTES_MIN:
        yield f"offset.metadata.max.bytes is {size}", f"set it to at least {METADATA_BYTES_MIN} on the brokers"
    session = settings.delivery.session_timeout
    least, most = limit("group.min.session.timeout.ms", session), limit("group.max.session.timeout.ms", session)
    if not least <= session <= most:
        span = f"{format_duration_ms(least)} to {format_duration_ms(most)}"
        yield (
            f"delivery.session_timeout {format_duration_ms(session)} is outside {span}",
            "choose a value within this range",
        )
    timeout = int(librdkafka(settings, "producer").get("transaction.timeout.ms", 0))
    if timeout > (most := limit("transaction.max.timeout.ms", timeout)):
        remedy = "lower kafka.producer.transaction.timeout.ms"
        yield f"transaction.timeout.ms {timeout} is more than the brokers' transaction.max.timeout.ms {most}", remedy
    if configs.get(VERIFICATION) == "false" and settings.delivery.mode == "exactly-once":
        detail = "transaction.partition.verification.enable is false: late records may join a transaction (KIP-890)"
        yield detail, "leave it at its default, true"


def check_transactions(context: Context) -> Iterator[Finding]:
    """The brokers admit a transactional producer. The check's own transactional id fences no running instance."""
    if context.settings.delivery.mode == "at-least-once":
        yield ok("transactions", "not used: delivery.mode is at-least-once")
        return
    name = f"{context.settings.bridge.id}-check"
    properties = librdkafka(context.settings, "producer") | {"transactional.id": name, "log_level": "0"}
    try:
        Producer(properties).init_transactions(context.timeout_s)
    except KafkaException as error:
        redact = Redactor(context.settings.secrets())
        refused = failure("begin transactions", error.args[0], None, context.bootstrap, redact, code="DB-3006")
        prefix = context.settings.bridge.id
        remedy = f"grant Write and Describe on transactional ids with the prefix {prefix}; {refused.hint}"
        yield failed("transactions", refused.message, remedy)
        return
    yield ok("transactions", f"allowed for {context.settings.transactional_id}")


def check_unclean_elections(context: Context) -> Iterator[Finding]:
    """No lagging replica becomes leader: it would cut off acknowledged records, commits and transactions."""
    name, settings = "unclean elections", context.settings
    delay_topics = list(settings.delay_topics)
    letters = [settings.dead_letter_topic(topic) for topic in delay_topics]
    targets = sorted({topic.target for topic in settings.delay_topics.values() if topic.target})
    topics = dict.fromkeys([*delay_topics, *letters, *targets, *BROKERS_OWN])
    configs = context.cluster.readable_topic_configs(topics) | {DEFAULT: _default_config(context)}
    unknown = [where for where, config in configs.items() if isinstance(config, EnvironmentFailure)]
    unclean = [where for where, config in configs.items() if where not in unknown and _is_unclean(config)]
    for where in unclean:
        detail = f"unclean.leader.election.enable=true of {where}: a lagging replica may become leader"
        kind = "brokers --entity-default" if where == DEFAULT else f"topics --entity-name {where}"
        yield warned(name, detail, alter(context, kind, f"{UNCLEAN}=false"))
    if unknown:
        remedy = f"grant DescribeConfigs on them, or make sure that {UNCLEAN} is false"
        yield warned(name, f"unknown for {', '.join(unknown)}", remedy)
    if not unknown and not unclean:
        yield ok(name, f"off for {len(topics)} topics and by default")


def _default_config(context: Context) -> dict[str, str] | EnvironmentFailure:
    try:
        return context.cluster.broker_configs()
    except EnvironmentFailure as error:
        return error


def _is_unclean(config: dict[str, str] | EnvironmentFailure) -> bool:
    return not isinstance(config, EnvironmentFailure) and config.get(UNCLEAN) == "true"
