"""Certificates, keys and passwords that are replaced while the bridge runs.

Kafka's clients read them only when they are made: open connections outlive an expired certificate, but no new one
succeeds. So the configuration is read again every few seconds, as a start would read it. When the client properties or
the files they name have changed, and are the same at the next look (key and certificate are replaced one after the
other), a connection is made with them. Only if it succeeds does the bridge restart in place (restart.py); otherwise the
old ones stay in force, and /readyz says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from bridge.errors import BridgeError
from bridge.kafka.admin import Cluster
from bridge.settings.clients import java
from bridge.settings.model import PARTS, Settings
from bridge.settings.secrets import Redactor

LOOK_S: Final = 10.0
STABLE_S: Final = 2.0
"""How long files must stay as they are before they are believed to be complete."""
_FILES: Final = (".location", ".keytab")

log = structlog.get_logger("bridge.runtime.credentials")


class Credentials:
    """Looks when it is told to, by one thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        read: Callable[[], Settings],
        verify: Callable[[Settings], object],
        on_replaced: Callable[[], None],
    ) -> None:
        """`settings` are in force. `read` reads them again; `verify` raises BridgeError when the brokers refuse them;
        `on_replaced` is called when they are new, and work."""
        self._read = read
        self._verify = verify
        self._on_replaced = on_replaced
        self._in_force = self._seen = fingerprint(settings)
        self._refused: str | None = None

    def alarms(self) -> tuple[str, ...]:
        """What an operator should know although delivery continues."""
        if self._refused is None:
            return ()
        return (f"the new credentials cannot be used, the old ones stay in force: {self._refused}",)

    def look(self) -> float:
        """Look once; returns in how many seconds to look again. What has just changed may not be complete yet."""
        try:
            fresh = self._read()
            seen = fingerprint(fresh)
            if seen == self._in_force:
                self._seen, self._refused = seen, None
            elif seen != self._seen:
                self._seen = seen
                return STABLE_S
            else:
                self._verify(fresh)
                self._in_force, self._refused = seen, None
                log.info("credentials-replaced")
                self._on_replaced()
        except (BridgeError, OSError) as error:
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is: the files must be looked at again
            self._refuse(f"reading them failed: {type(error).__name__}", error)
        return LOOK_S

    def _refuse(self, reason: str, bug: Exception | None = None) -> None:
        if reason != self._refused:
            hint = "The old ones stay in force. Correct the files."
            log.error("credentials-not-usable", reason=reason, hint=hint, exc_info=bug)
        self._refused = reason


def fingerprint(settings: Settings) -> bytes:
    """Of all client properties, and of the files that they name."""
    digest = hashlib.sha256()
    for part in PARTS:
        for name, value in sorted(settings.kafka.properties(part).items()):
            digest.update(repr((name, value)).encode())
            if name.endswith(_FILES) and (path := Path(value)).is_file():
                digest.update(path.read_bytes())
    return digest.digest()


def connect(settings: Settings, redact: Redactor) -> None:
    """Connect with these credentials, as each client would. Raises BridgeError."""
    redact.add(settings.secrets())
    java(settings)
    Cluster(settings).describe()
