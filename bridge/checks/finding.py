"""The findings of a check, and its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.settings.model import Settings

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check. `remedy` is the operator's next step, empty after success; `error` is how `run` ends."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    error: type[BridgeError] = EnvironmentFailure


def ok(name: str, detail: str) -> Finding:
    """The condition holds."""
    return Finding(name=name, status="ok", detail=detail)


def warned(name: str, detail: str, remedy: str) -> Finding:
    """A warning to the operator; the start goes on."""
    return Finding(name=name, status="warning", detail=detail, remedy=remedy)


def failed(name: str, detail: str, remedy: str, error: type[BridgeError] = EnvironmentFailure) -> Finding:
    """A failure that refuses the start."""
    return Finding(name=name, status="failed", detail=detail, remedy=remedy, error=error)


def expected(name: str, detail: str, is_so: bool, remedy: str) -> Finding:
    """`ok` if the condition holds, else `failed`."""
    return ok(name, detail) if is_so else failed(name, detail, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The input of the checks. `connector_jars` returns Spark's jars, or raises a BridgeError."""

    settings: Settings
    cluster: Cluster
    connector_jars: Callable[[], Sequence[Path]]
    create: bool
    timeout_s: float

    @property
    def bootstrap(self) -> str:
        """The cluster's address, for remedies."""
        return self.settings.kafka.bootstrap_servers


Check = Callable[[Context], Iterator[Finding]]
