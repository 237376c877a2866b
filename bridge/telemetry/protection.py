"""TLS and a password for the management port, both from files and both optional.

A certificate that is replaced serves new connections from then on, without a restart. The password guards /metrics
alone: who probes has no place for one, and the probes tell nothing worth guarding.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bridge.errors import ConfigurationError
from bridge.settings.model import Http
from bridge.settings.secrets import read_secret_file

log = structlog.get_logger("bridge.telemetry.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Certificate chain and key, PEM files; `context` has what they held when they last changed."""

    chain: Path
    key: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _loaded: list[tuple[tuple[int, int], ssl.SSLContext]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"http.certificate_file, http.key_file: cannot be used: {error.strerror or 'not PEM'}",
                hint="give a PEM chain, and its key without a password",
                certificate=self.chain,
                key=self.key,
                code="DB-2025",
            ) from None

    def context(self) -> ssl.SSLContext:
        """For one new connection. Files that are just being replaced leave the old certificate in force."""
        with self._lock:
            try:
                if self._loaded[0][0] != self._changed():
                    self._load()
                    log.info("certificate-replaced", certificate=str(self.chain))
            except (OSError, ssl.SSLError) as error:
                log.warning("certificate-not-replaced", reason=str(error))
            return self._loaded[0][1]

    def _load(self) -> None:
        changed = self._changed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.chain, self.key)
        self._loaded[:] = [(changed, context)]

    def _changed(self) -> tuple[int, int]:
        return self.chain.stat().st_mtime_ns, self.key.stat().st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What the management port asks for: nothing by default."""

    certificate: Certificate | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Http) -> Protection:
        """As configured. Raises ConfigurationError for files that cannot be used."""
        certificate, password = None, None
        if settings.certificate_file is not None and settings.key_file is not None:
            certificate = Certificate(chain=settings.certificate_file, key=settings.key_file)
        if settings.password_file is not None:
            password = read_secret_file(str(settings.password_file), "http.password_file")
        return cls(certificate=certificate, user=settings.user, password=password)

    def permits(self, authorization: str | None) -> bool:
        """Whether a request with this Authorization header may see the metrics."""
        if self.user is None or self.password is None:
            return True
        scheme, _, credentials = (authorization or "").partition(" ")
        try:
            given = base64.b64decode(credentials, validate=True)
        except (binascii.Error, ValueError):
            return False
        # In constant time: the time of an answer must not tell how much of a guess was right.
        return scheme.lower() == "basic" and hmac.compare_digest(given, f"{self.user}:{self.password}".encode())
