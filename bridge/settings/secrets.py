"""Secrets: their sources, and their removal from all printed text.

Any string of the configuration may contain `${file:/path}` (the file's text, without its last line break) or
`${env:NAME}`; `$${` stands for a literal `${`. In client maps `name_file: /path` is short for `name: ${file:/path}`.

A value is secret if its key looks like a secret's, or if it comes from a file. Parts of values are secret, too: the
user and the password of a URL, and the text after such a key and `=` (`?api_key=...`, `-Dx.password=...`). A dump of
the settings hides secret values, and `Redactor` removes them from any text of another library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from bridge.errors import ConfigurationError

MASK: Final = "********"
SECRET_FILE_BYTES_MAX: Final = 1 << 20  # a larger file is a mistake, not a password

_SECRET_KEY: Final = re.compile(r"password|secret|key|token|jaas", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)\S+(?=@)")
_PAIR: Final = re.compile(r"(?P<key>[\w.-]+)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s&#;,]+)")
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{(file|env):([^}]*)\}")
_SECRET_SHOWN: Final = str(SecretStr("x"))
_PART_LENGTH_MIN: Final = 6
_REDACT_LENGTH_MIN: Final = 4  # a shorter secret would mask half of every message


def is_secret_key(name: str) -> bool:
    """Whether the value of this key must be hidden. Paths (`ssl.key.location`, `x_file`) need not."""
    return bool(_SECRET_KEY.search(name)) and not name.lower().endswith((".location", "_file"))


def unmasked(value: str | SecretStr) -> str:
    """The unwrapped value for a client; never print it."""
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def mask(tree: Any) -> Any:
    """`tree` with masks for the values of secret keys, for wrapped secrets, and for the secret parts of other texts."""
    if isinstance(tree, list):
        return [mask(value) for value in tree]
    if isinstance(tree, str):
        for part in parts(tree):
            tree = tree.replace(part, MASK)
        return tree
    if not isinstance(tree, dict):
        return tree
    return {k: MASK if is_secret_key(k) or v == _SECRET_SHOWN else mask(v) for k, v in tree.items()}


def parts(text: str) -> list[str]:
    """The secret parts of a value, the longest first."""
    secret = {match[0] for match in _USER.finditer(text)}
    secret |= {match["value"] for match in _PAIR.finditer(text) if is_secret_key(match["key"])}
    return sorted(secret, key=len, reverse=True)


def parts_of(tree: Any) -> set[str]:
    """The secret parts of all texts in `tree`, for a `Redactor`; without common words such as `true`."""
    if isinstance(tree, str):
        return {part for part in parts(tree) if len(part) >= _PART_LENGTH_MIN}
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return {part for value in inner for part in parts_of(value)}


def read_secret_file(path: str, where: str) -> str:
    """The text of `path` without its last line break; `where` is the referring key. Raises ConfigurationError."""
    try:
        data = Path(path).read_bytes()
        if len(data) > SECRET_FILE_BYTES_MAX:
            raise ConfigurationError(
                f"{where}: {path} is too large", hint="Give a secret file of at most 1 MiB.", code="DB-2010"
            )
        text = data.decode()
    except OSError as error:
        raise ConfigurationError(
            f"{where}: cannot read {path}: {error.strerror}",
            hint="Mount the file, or correct the path.",
            code="DB-2009",
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{where}: {path} is not UTF-8 text", hint="Name a text file.", code="DB-2011"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def interpolate(text: str, where: str, env: Mapping[str, str]) -> tuple[str, bool]:
    """`text` with its references resolved, and whether it contains a secret. Raises ConfigurationError.

    A resolved reference is not resolved again: a password may contain `${`.
    """
    secret = False

    def resolve(match: re.Match[str]) -> str:
        nonlocal secret
        kind, name = match[1], match[2]
        if kind is None:
            return "${"
        if kind == "file":
            secret = True
            return read_secret_file(name, where)
        secret = secret or is_secret_key(name)
        if name not in env:
            raise ConfigurationError(
                f"{where}: environment variable {name} is not set",
                hint="Set it, or remove the reference.",
                code="DB-2012",
            )
        return env[name]

    return _REFERENCE.sub(resolve, text), secret


class Redactor:
    """Replaces known secret values by a mask in any text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        self._known |= {part for secret in secrets for part in (secret, *secret.splitlines())}
        by_length = sorted((s for s in self._known if len(s.strip()) >= _REDACT_LENGTH_MIN), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text) if self._pattern else text
