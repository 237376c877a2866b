"""The list of checks, for `delay-bridge check` and for the start of `run`.

A check is a function of the `Context` that yields findings. `failed` refuses the start, which would lose or repeat
messages, or never deliver them. `warning` informs the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog

from bridge.checks.brokers import (
    check_broker_limits,
    check_broker_version,
    check_brokers,
    check_transactions,
    check_unclean_elections,
)
from bridge.checks.finding import Check, Context, Finding, failed
from bridge.checks.host import (
    check_connector,
    check_directory,
    check_directory_identity,
    check_http,
    check_java,
    check_java_client,
    check_java_properties,
    check_remote,
)
from bridge.checks.topics import check_dead_letter_topics, check_default_targets, check_delay_topics
from bridge.errors import BridgeError, EnvironmentFailure
from bridge.install.connector import jars
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings

log = structlog.get_logger("bridge.checks.run")


def run_checks(
    settings: Settings,
    *,
    create: bool = False,
    timeout_s: float = 10.0,
    connector_jars: Callable[[], Sequence[Path]] = jars,
) -> list[Finding]:
    """All findings, in the order of the tables below. With `create`, missing topics are created if the settings allow.

    Without an answer of the brokers, their checks are skipped: the first finding names the reason.
    """
    context = Context(
        settings=settings,
        cluster=Cluster(settings, timeout_s=timeout_s),
        connector_jars=connector_jars,
        create=create,
        timeout_s=timeout_s,
    )
    findings = list(check_brokers(context))
    reached = all(finding.status != "failed" for finding in findings)
    slow_checks = () if create else (check_remote, *((check_java_client,) if reached else ()))
    for check in (*(BROKER_CHECKS if reached else ()), *LOCAL_CHECKS, *slow_checks):
        findings += _guarded(check, context)
    return findings


def _guarded(check: Check, context: Context) -> list[Finding]:
    try:
        return list(check(context))
    except BridgeError as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [failed(name, error.message, error.hint, error=type(error))]


def log_warnings(findings: Iterable[Finding]) -> None:
    """Log the warnings of a start that goes on."""
    for finding in findings:
        if finding.status == "warning":
            log.warning("check", name=finding.name, detail=finding.detail, remedy=finding.remedy)


def require(findings: Iterable[Finding]) -> None:
    """Raise one error that names all failures, or return. Its class is that of the failures, or EnvironmentFailure if
    they have several: the repair of one may change the others.
    """
    failed = [finding for finding in findings if finding.status == "failed"]
    if failed:
        details = "; ".join(f"{finding.name}: {finding.detail}" for finding in failed)
        remedies = "; ".join(dict.fromkeys(finding.remedy for finding in failed if finding.remedy))
        kinds = {finding.error for finding in failed}
        kind = kinds.pop() if len(kinds) == 1 else EnvironmentFailure
        raise kind(details, hint=remedies)


BROKER_CHECKS: Final[tuple[Check, ...]] = (
    check_broker_version,
    check_broker_limits,
    check_unclean_elections,
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
