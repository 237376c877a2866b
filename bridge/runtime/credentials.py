"""The replacement of certificates, keys and passwords while the bridge runs.

Kafka's clients read them only at their creation: open connections outlive an expired certificate, but no new one
succeeds. The configuration is therefore read again every few seconds, as at a start. Changed client properties or files
that are the same at the next look (key and certificate are replaced one after the other) are tested with a connection.
Only if that succeeds does the bridge restart in place (restart.py); otherwise the old ones stay in force, and /readyz
has the reason.
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
"""The time that files must stay unchanged before they count as complete."""
_FILES: Final = (".location", ".keytab")

log = structlog.get_logger("bridge.runtime.credentials")


class Credentials:
    """Checks the credentials for changes. For one thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        read: Callable[[], Settings],
        verify: Callable[[Settings], object],
        on_replaced: Callable[[], None],
    ) -> None:
        """`settings` are in force; `read` reads them again. `verify` raises BridgeError if the brokers refuse them.
        `on_replaced` is called for new ones that work."""
        self._read = read
        self._verify = verify
        self._on_replaced = on_replaced
        self._in_force = self._seen = fingerprint(settings)
        self._refused: str | None = None

    def alarms(self) -> tuple[str, ...]:
        """Warnings for the operator while delivery continues."""
        if self._refused is None:
            return ()
        return (f"the new credentials cannot be used, the old ones stay in force: {self._refused}",)

    def look(self) -> float:
        """Look once; returns the seconds until the next look. A recent change may not be complete yet."""
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
        except Exception as error:  # noqa: BLE001 - after any error the files must be checked again
            self._refuse(f"reading them failed: {type(error).__name__}", error)
        return LOOK_S

    def _refuse(self, reason: str, bug: Exception | None = None) -> None:
        if reason != self._refused:
            hint = "The old ones stay in force. Correct the files."
            log.error("credentials-not-usable", reason=reason, hint=hint, exc_info=bug)
        self._refused = reason


def fingerprint(settings: Settings) -> bytes:
    """A digest of all client properties and of the files that they name."""
    digest = hashlib.sha256()
    for part in PARTS:
        for name, value in sorted(settings.kafka.properties(part).items()):
            digest.update(repr((name, value)).encode())
            if name.endswith(_FILES) and (path := Path(value)).is_file():
                digest.update(path.read_bytes())
    return digest.digest()


def connect(settings: Settings, redact: Redactor) -> None:
    """Connect with these credentials, as every client would. Raises BridgeError."""
    redact.add(settings.secrets())
    java(settings)
    Cluster(settings).describe()
