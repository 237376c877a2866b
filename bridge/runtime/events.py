"""What the application's main thread is told by others."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import BridgeError
from bridge.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal came."""

    signal_name: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The assignment changed."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The index was found damaged."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """Credentials were replaced, and work."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Fatal:
    """Some part cannot go on."""

    error: BridgeError


Event = Stop | Changed | Rebuild | Renewed | Fatal
