"""An OpenID Connect issuer, as far as Kafka's clients and brokers need one: tokens for client credentials, and keys."""

from __future__ import annotations

import base64
import json
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from dev.harness.pace import scaled
from tests.system.serving import Serving
from timerstore.clock import SystemClock

LIFETIME_S: Final = 300
KEY_ID: Final = "key-1"
EXPONENT: Final = b"\x01\x00\x01"  # 65537, openssl's


class Issuer(Serving):
    """Serves `/token` to clients that know the secret, and `/jwks`, while it is entered. `issued` counts tokens by the
    agent that asked for them.
    """

    def __init__(self, directory: Path, *, client: str, secret: str) -> None:
        self.client = client
        self.issued: dict[str, int] = {}
        self._key = directory / "issuer.key"
        _openssl("genrsa", "-out", str(self._key), "2048")
        self._basic = "Basic " + base64.b64encode(f"{client}:{secret}".encode()).decode()
        super().__init__(_Handler, issuer=self)

    def token(self, authorization: str, agent: str) -> dict[str, Any] | None:
        """The answer to a request for a token; None for any other client."""
        if authorization != self._basic:
            return None
        self.issued[agent] = self.issued.get(agent, 0) + 1
        now_s = SystemClock().now_ms() // 1000
        claims = {"iss": self.url, "sub": self.client, "iat": now_s, "exp": now_s + LIFETIME_S, "scope": "kafka"}
        return {"access_token": self._signed(claims), "token_type": "Bearer", "expires_in": LIFETIME_S}

    def keys(self) -> dict[str, Any]:
        """The public key, as a set of one."""
        modulus = _openssl("rsa", "-in", str(self._key), "-noout", "-modulus").decode().strip().partition("=")[2]
        key = {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": KEY_ID}
        return {"keys": [{**key, "n": _encoded(bytes.fromhex(modulus)), "e": _encoded(EXPONENT)}]}

    def _signed(self, claims: dict[str, Any]) -> str:
        head = {"alg": "RS256", "typ": "JWT", "kid": KEY_ID}
        text = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = _openssl("dgst", "-sha256", "-sign", str(self._key), stdin=text.encode())
        return f"{text}.{_encoded(signature)}"


class _Handler(BaseHTTPRequestHandler):
    issuer: Issuer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        agent = self.headers.get("User-Agent", "")
        self._answer(self.issuer.token(self.headers.get("Authorization", ""), agent) if self.path == "/token" else None)

    def do_GET(self) -> None:
        self._answer(self.issuer.keys() if self.path == "/jwks" else None)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _answer(self, answer: dict[str, Any] | None) -> None:
        body = json.dumps(answer or {"error": "invalid_client"}).encode()
        self.send_response(200 if answer else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _openssl(*arguments: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(
        ["openssl", *arguments], input=stdin, capture_output=True, check=True, timeout=scaled(60)
    ).stdout
