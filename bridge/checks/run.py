"""What must be so before the bridge may run, one by one, each with a remedy: `delay-bridge check`, and `run`'s start.

A check is a function of the `Context` that yields findings. `failed` refuses the start: going on would lose, repeat or
never deliver messages. `warning` is for the operator to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from bridge.checks.finding import Check, Context, Finding, expected, failed, ok, warned
from bridge.checks.host import (
    check_connector,
    check_directory,
    check_directory_identity,
    check_http,
    check_java,
    check_java_client,
    check_java_properties,
)
from bridge.checks.topics import check_dead_letter_topics, check_default_targets, check_delay_topics
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.kafka.admin import TXN_OFFSET_COMMIT, TXN_OFFSET_COMMIT_FENCED, Cluster, api_versions, failure, release
from bridge.kafka.reach import refuse_unreachable
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.settings.units import format_duration_ms

METADATA_BYTES_MIN: Final = 4096  # the committed position is carried in the offset's metadata

log = structlog.get_logger("bridge.checks.run")


def run_checks(
    settings: Settings,
    *,
    create: bool = False,
    timeout_s: float = 10.0,
    connector_jars: Callable[[], Sequence[Path]] | None = None,
) -> list[Finding]:
    """All findings, in the order of the table. With `create`, missing topics are made where the settings allow it.

    Without brokers, what needs them is left out: the first finding says why.
    """
    context = Context(
        settings=settings,
        cluster=Cluster(settings, timeout_s=timeout_s),
        connector_jars=connector_jars or _installed_jars,
        create=create,
        timeout_s=timeout_s,
    )
    findings = list(check_brokers(context))
    reached = all(finding.status != "failed" for finding in findings)
    java_checks = () if create or not reached else (check_java_client,)
    for check in (*(BROKER_CHECKS if reached else ()), *LOCAL_CHECKS, *java_checks):
        findings += _guarded(check, context)
    return findings


def _installed_jars() -> Sequence[Path]:
    from bridge.install.connector import jars  # imports PySpark, which nothing else here needs

    return jars()


def _guarded(check: Check, context: Context) -> list[Finding]:
    try:
        return list(check(context))
    except BridgeError as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [failed(name, error.message, error.hint, error=type(error))]


def log_warnings(findings: Iterable[Finding]) -> None:
    """What the operator should know though the bridge runs."""
    for finding in findings:
        if finding.status == "warning":
            log.warning("check", name=finding.name, detail=finding.detail, remedy=finding.remedy)


def require(findings: Iterable[Finding]) -> None:
    """Raise an error that names everything that failed, of the kind of the failures; EnvironmentFailure where they are
    of several kinds, since mending one may change the others.
    """
    failed = [finding for finding in findings if finding.status == "failed"]
    if failed:
        found = "; ".join(f"{finding.name}: {finding.detail}" for finding in failed)
        remedies = "; ".join(dict.fromkeys(finding.remedy for finding in failed if finding.remedy))
        kinds = {finding.error for finding in failed}
        kind = kinds.pop() if len(kinds) == 1 else EnvironmentFailure
        raise kind(found, hint=remedies)


def check_brokers(context: Context) -> Iterator[Finding]:
    """They answer."""
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
    """They are recent enough for transactions that fence a second instance."""
    versions = api_versions(context.settings, timeout_s=context.timeout_s)
    if not versions:
        yield warned("broker version", "could not be found out", "make sure it is Kafka 2.5 or later")
        return
    known = release(versions)
    speaks = f"speaks the protocol of Kafka {known} or later" if known else "older than Kafka 2.1"
    fences = versions.get(TXN_OFFSET_COMMIT, -1) >= TXN_OFFSET_COMMIT_FENCED
    yield expected("broker version", speaks, fences, "upgrade the brokers to Kafka 2.5 or later (KIP-447)")


def check_broker_limits(context: Context) -> Iterator[Finding]:
    """What the brokers allow fits what the bridge asks for. Reading this may be forbidden; then it is not known."""
    try:
        configs = context.cluster.broker_configs()
    except EnvironmentFailure as error:
        yield warned("broker limits", f"not known: {error.message}", error.hint)
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
            f"delivery.session_timeout {format_duration_ms(session)} is outside of {span}",
            "choose one within the span",
        )
    timeout = int(librdkafka(settings, "producer").get("transaction.timeout.ms", 0))
    if timeout > (most := limit("transaction.max.timeout.ms", timeout)):
        remedy = "lower kafka.producer.transaction.timeout.ms"
        yield f"transaction.timeout.ms {timeout} is more than the brokers' transaction.max.timeout.ms {most}", remedy


def check_transactions(context: Context) -> Iterator[Finding]:
    """A transactional producer gets its id; a name of its own, so that no running instance is fenced by the check."""
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


BROKER_CHECKS: Final[tuple[Check, ...]] = (
    check_broker_version,
    check_broker_limits,
    check_delay_topics,
    check_dead_letter_topics,
    check_default_targets,
    check_transactions,
    check_directory_identity,
)
LOCAL_CHECKS: Final[tuple[Check, ...]] = (
    check_directory,
    check_http,
    check_java,
    check_connector,
    check_java_properties,
)
