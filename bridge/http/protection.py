"""The protection of the HTTP ports: TLS and credentials, both from files. New connections get a replaced certificate
without a restart."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from bridge.errors import ConfigurationError
from bridge.settings.model import HttpSettings
from bridge.settings.secrets import read_secret_file

TOKEN: Final = "token"
"""The name of a client with the token, which has no name of its own."""
TOKEN_PATTERN: Final = "[A-Za-z0-9._~+/=-]{16,1024}"
WHO: Final = "who"
"""The client's name, in the scope's state."""

log = structlog.get_logger("bridge.http.protection")


class Certificate:
    """Certificate chain and key, PEM files. `context` follows their changes."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._lock = threading.Lock()
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"http.certificate_file, http.key_file: unusable: {error.strerror or 'not PEM'}",
                hint="Give a PEM chain, and its key without a password.",
                certificate=chain,
                key=key,
                code="DB-2025",
            ) from None

    @property
    def files(self) -> tuple[Path, Path]:
        """Chain and key."""
        return self._chain, self._key

    def context(self) -> ssl.SSLContext:
        """The context of one new connection. Half-replaced files leave the old certificate in force."""
        with self._lock:
            try:
                if self._loaded != self._changed():
                    self._load()
                    log.info("certificate-replaced", certificate=str(self._chain))
            except (OSError, ssl.SSLError) as error:
                log.warning("certificate-not-replaced", reason=str(error))
            return self._context

    def _load(self) -> None:
        changed = self._changed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._chain, self._key)
        self._loaded, self._context = changed, context

    def _changed(self) -> tuple[int, int]:
        return self._chain.stat().st_mtime_ns, self._key.stat().st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The certificate and the credentials of a port; by default none."""

    certificate: Certificate | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    on_failure: Callable[[], None] = lambda: None
    """Counts a failed login."""

    @classmethod
    def of(cls, settings: HttpSettings, on_failure: Callable[[], None] = lambda: None) -> Protection:
        """The configured protection. Raises ConfigurationError for unusable files."""
        certificate = None
        if settings.certificate_file is not None and settings.key_file is not None:
            certificate = Certificate(settings.certificate_file, settings.key_file)
        return replace(cls.of_client(settings), certificate=certificate, on_failure=on_failure)

    @classmethod
    def of_client(cls, settings: HttpSettings) -> Protection:
        """The configured credentials. Raises ConfigurationError for unusable files."""
        password, token = None, None
        if settings.password_file is not None:
            password = read_secret_file(str(settings.password_file), "http.password_file")
        if settings.token_file is not None:
            token = read_secret_file(str(settings.token_file), "http.token_file")
            if not re.fullmatch(TOKEN_PATTERN, token):
                raise ConfigurationError(
                    "http.token_file: no token in it", hint="Write 16 to 1,024 letters and digits.", code="DB-2028"
                )
        return cls(user=settings.user, password=password, token=token)

    @property
    def is_open(self) -> bool:
        """Whether the port needs no credentials."""
        return self.user is None and self.token is None

    def authorization(self) -> dict[str, str]:
        """The header of a client with these credentials."""
        if self.user is not None and self.password is not None:
            credentials = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {credentials}"}
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def login(self, scope: Any) -> str | None:
        """`who` has sent a request, also noted in its scope. A wrong password or token is counted and logged. A request
        without credentials is no failure: browsers begin with one."""
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
        who = scope.setdefault("state", {})[WHO] = self.who(given)
        if who is None and given is not None:
            self.on_failure()
            log.warning("login-failed", client=(scope.get("client") or ("", 0))[0], path=scope["path"][:200])
        return who

    def who(self, authorization: str | None) -> str | None:
        """The client with this Authorization header: the user, `TOKEN`, or "" on an open port; None: a stranger."""
        if self.is_open:
            return ""
        scheme, _, credentials = (authorization or "").partition(" ")
        # Compared in constant time: the time of an answer must not reveal the correct part of a guess.
        if scheme.lower() == "bearer" and self.token is not None:
            return TOKEN if hmac.compare_digest(credentials.encode("utf-8", "replace"), self.token.encode()) else None
        try:
            given = base64.b64decode(credentials, validate=True)
        except (binascii.Error, ValueError):
            return None
        is_user = scheme.lower() == "basic" and self.user is not None and self.password is not None
        return self.user if is_user and hmac.compare_digest(given, f"{self.user}:{self.password}".encode()) else None
