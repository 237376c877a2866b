"""The client of the HTTP API. Answers are JSON objects; errors are problem+json with title and detail.

Address, user and password come from the bridge's own configuration. The client follows no redirect and uses no proxy:
the password goes to the given address and to no other.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bridge.errors import BridgeError, ConfigurationError, EnvironmentFailure
from bridge.http.protection import Protection
from bridge.settings.model import HttpSettings
from bridge.settings.secrets import read_secret_file

if TYPE_CHECKING:
    import httpx

PREFIX: Final = "/api/v1/"
ANSWER_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes of an answer. A page of a thousand messages has far fewer; only another server sends more."""
LINE_BYTES_MAX: Final = 1 << 20
ACTION: Final = {"X-Delay-Bridge-Action": "1", "Content-Type": "application/json"}
"""Headers of an action."""
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address for clients, by the wildcard address of a listening server."""

Parameters = Mapping[str, Any]
"""Texts, numbers, and lists of them."""


class Absent(Exception):
    """The API answers that the resource does not exist; the text is the bridge's."""


class ApiClient:
    def __init__(self, settings: HttpSettings, url: str | None, timeout_s: float) -> None:
        """`url` wins over the address in `settings`; `timeout_s` limits each wait, not the whole answer.

        Raises ConfigurationError for an invalid address, and for an unreadable password or certificate.
        """
        self.address = _address(settings) if url is None else _checked(url)
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
        self._headers |= Protection.of_client(settings).authorization()
        # For the configured address the client pins the certificate: the name in it is the service's.
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.address.startswith("https:"):
            trust = _context(settings.certificate_file, any_name=url is None)
        import httpx  # it takes a while, and most commands need no bridge

        self._client = httpx.Client(verify=trust, timeout=timeout_s, trust_env=False)

    def get(self, path: str, parameters: Parameters | None = None) -> dict[str, Any]:
        """The answer. `path` begins below /api/v1/ and is quoted.

        Raises Absent, ConfigurationError for refused parameters, EnvironmentFailure without an answer.
        """
        with self.opened(path, parameters) as response:
            return self._object(_whole(response))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send an action; returns its answer. Raises the errors of `get`."""
        with self.opened(path, body=body) as response:
            return self._object(_whole(response))

    def lines(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send an action on many messages; yields each line of its answer. Raises the errors of `get`."""
        with self.opened(path, body=body) as response:
            left = b""
            for part in response.iter_raw():
                *lines, left = (left + part).split(b"\n")
                yield from map(self._object, lines)
                if len(left) > LINE_BYTES_MAX:
                    raise self.foreign()

    @contextmanager
    def opened(
        self, path: str, parameters: Parameters | None = None, body: Mapping[str, Any] | None = None
    ) -> Iterator[httpx.Response]:
        """An answer to read inside `with`; a `body` makes the request an action. Raises the errors of `get`, also for
        failures of reading."""
        import httpx

        method, headers = ("GET", {}) if body is None else ("POST", ACTION)
        try:
            request = self._client.build_request(
                method, f"{self.address}{PREFIX}{path}", params=parameters, json=body, headers=self._headers | headers
            )
        except UnicodeEncodeError:
            hint = "Only keys may have other bytes: --key-base64."
            raise ConfigurationError("an option is not UTF-8", hint=hint, code="DB-1003") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise self._silent(error) from None
        try:
            with closing(self._client.send(request, stream=True)) as response:
                if not response.is_success:
                    raise self._refusal(response)
                yield response
        except (OSError, httpx.HTTPError, UnicodeError) as error:
            raise self._silent(error) from None

    def _silent(self, error: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{self.address} does not answer",
            hint="Is the bridge running, and its API on? --url names another address.",
            reason=str(error) or type(error).__name__,
            code="DB-1015",
        )

    def _object(self, body: bytes) -> dict[str, Any]:
        if (answer := _object(body)) is None:
            raise self.foreign()
        return answer

    def foreign(self) -> EnvironmentFailure:
        """The error for an answer that does not come from this API."""
        return EnvironmentFailure(
            f"{self.address} answers, but not like the API",
            hint="Correct --url, or http.api_port; the bridge may have another version.",
            code="DB-1018",
        )

    def _refusal(self, response: httpx.Response) -> BridgeError | Absent:
        """The exception for an error status. The API's own errors are problem+json."""
        problem, status = None, response.status_code
        if media_type(response) == "application/problem+json":
            problem = _object(_whole(response))
        if status == HTTPStatus.FORBIDDEN and problem is not None:
            hint = "Set http.api to write in the configuration of the bridge."
            return ConfigurationError(f"{self.address} takes no actions", hint=hint, code="DB-1023")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return EnvironmentFailure(
                f"{self.address} refuses to answer this user",
                hint="Set http.user and http.password_file, or http.token_file, to those of the bridge.",
                status=status,
                code="DB-1017",
            )
        if problem is None:
            return self.foreign()
        if status == HTTPStatus.NOT_FOUND:
            return Absent(str(problem.get("detail") or ""))
        text = ": ".join(str(problem[name]) for name in ("title", "detail") if problem.get(name)) or str(status)
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            hint = "Correct the options; use a cursor only with its own filters."
            return ConfigurationError(f"the bridge refuses the request: {text}", hint=hint, code="DB-1016")
        hint = "Try again; /readyz and the log of the bridge name the fault."
        return EnvironmentFailure(f"the bridge cannot answer: {text}", hint=hint, status=status, code="DB-1019")


def _address(settings: HttpSettings) -> str:
    if not settings.api_port:
        raise ConfigurationError(
            "http.api_port names no port",
            hint="Give --url, with the port from the log of the bridge.",
            code="DB-1014",
        )
    host = WILDCARDS.get(settings.host, settings.host)
    scheme = "http" if settings.certificate_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.api_port}"


def _checked(url: str) -> str:
    """`url` without its trailing slash. Raises ConfigurationError for an invalid one."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError(
            "--url is not the address of an API", hint="Write it like http://localhost:8081.", code="DB-1014"
        )
    if "@" in parts.netloc:
        raise ConfigurationError(
            "--url has a user or password: other users of this machine could see it",
            hint="Set http.user and http.password_file instead.",
            code="DB-1014",
        )
    return url.rstrip("/")


def _context(certificate: Path | None, *, any_name: bool) -> ssl.SSLContext:
    """Trusts the system's authorities (`SSL_CERT_FILE` names others) and the bridge's own certificate.

    With `any_name` it trusts that certificate alone, under any name.
    """
    pinned = any_name and certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if pinned else ssl.create_default_context()
    if certificate is not None:
        end = "-----END CERTIFICATE-----"
        text = read_secret_file(str(certificate), "http.certificate_file")
        try:
            # The chain begins with the server's own certificate. The authorities after it sign others, too.
            context.load_verify_locations(cadata=text.partition(end)[0] + end + "\n")
        except (ssl.SSLError, ValueError):
            raise ConfigurationError(
                "http.certificate_file: not a PEM file", hint="Name a PEM file.", code="DB-1014"
            ) from None
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if pinned:
        context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in `body`; None if it is something else, or too large."""
    if len(body) > ANSWER_BYTES_MAX:
        return None
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _whole(response: httpx.Response) -> bytes:
    """The body, up to a part beyond the limit."""
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            break
    return bytes(body)


def media_type(response: httpx.Response) -> str:
    """The media type of an answer, without its parameters."""
    return str(response.headers.get("Content-Type", "")).partition(";")[0].strip().lower()
