"""What a check yields and what it looks at."""

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
    """One thing that was looked at: what to do about it (empty where all is well), and what `run` ends with."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    error: type[BridgeError] = EnvironmentFailure


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name=name, status="ok", detail=detail)


def warned(name: str, detail: str, remedy: str) -> Finding:
    """Something for the operator to know."""
    return Finding(name=name, status="warning", detail=detail, remedy=remedy)


def failed(name: str, detail: str, remedy: str, error: type[BridgeError] = EnvironmentFailure) -> Finding:
    """Something that refuses the start."""
    return Finding(name=name, status="failed", detail=detail, remedy=remedy, error=error)


def expected(name: str, detail: str, is_so: bool, remedy: str) -> Finding:
    """All is well, or the start is refused."""
    return ok(name, detail) if is_so else failed(name, detail, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the checks look at. `connector_jars` yields the jars that Spark needs, or raises a BridgeError."""

    settings: Settings
    cluster: Cluster
    connector_jars: Callable[[], Sequence[Path]]
    create: bool
    timeout_s: float

    @property
    def bootstrap(self) -> str:
        """Where the cluster is, for remedies."""
        return self.settings.kafka.bootstrap_servers


Check = Callable[[Context], Iterator[Finding]]
