"""The objects of store.remote. Each call is bounded in memory, and in time but for a mounted directory that hangs.

Credentials come from the environment, as cloud SDKs find them; no reason of an error has their values.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

from bridge.errors import ConfigurationError
from bridge.settings.secrets import Redactor

PART_BYTES: Final = 5 << 20
"""The size of a request; S3 takes no smaller parts."""
PARTS_AT_ONCE: Final = 4
"""Requests for parts of an object: their answers share the network, and each has `REQUEST_S`."""
REQUEST_S: Final = 20.0
RETRIES: Final = 1
CALL_S: Final = (RETRIES + 1) * REQUEST_S + 10.0
"""The longest call."""
SMALL_BYTES_MAX: Final = 16 << 20
_REASON_CHARS_MAX: Final = 300
_SECRET: Final = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(KEY|TOKEN|SECRET|PASSWORD|SAS)\w*")

_UNFINISHED: Final = "#"
"""In a mounted directory, a file has its name, this and a number until it is whole. Names of objects do not have it."""
_USER: Final = re.compile(r"://[^\s/]*@")
"""The user and the password of an address."""


class RemoteTrouble(Exception):
    """Shared storage, or an index on it, cannot be used now; the text is the reason."""


class Missing(RemoteTrouble):
    """The object does not exist."""


class RemoteUnavailable(RemoteTrouble):
    """Shared storage does not answer, or refuses: probably for all partitions."""


class Stopped(Exception):
    """A step of the caller ends the work."""


class Objects:
    """See the module. Any thread. Each call raises RemoteTrouble."""

    def __init__(self, uri: str) -> None:
        """Raises ConfigurationError for a URI without a store."""
        self._uri = uri
        self._redact = Redactor(
            frozenset(value for name, value in os.environ.items() if _SECRET.fullmatch(name) and value)
        )
        if self._path is None:
            _ = self._store

    @cached_property
    def _path(self) -> Path | None:
        parts = urlsplit(self._uri)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    @cached_property
    def _store(self) -> Any:
        if self._path is not None:
            return LocalStore(self._path)
        try:
            return from_url(
                self._uri,
                client_options={
                    "timeout": f"{REQUEST_S:.0f}s",
                    "connect_timeout": "5s",
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=REQUEST_S)},
            )
        except Exception as error:
            raise ConfigurationError(
                "store.remote: this address cannot be used",
                hint="write it as s3://BUCKET/PREFIX or file:///MOUNTED/PATH; the region is AWS_REGION",
                reason=self._reason(error),
                code="DB-2029",
            ) from error

    def put(self, key: str, data: bytes) -> None:
        with self._call("write", key):
            obstore.put(self._store, key, data, use_multipart=False)

    def put_file(self, key: str, file: IO[bytes], step: Callable[[bytes], None]) -> None:
        """Write the rest of an open file; `step` gets each piece before it is sent."""
        with self._call("write", key):
            piece = _piece_of(file)
            step(piece)
            if len(piece) < PART_BYTES:
                obstore.put(self._store, key, piece, use_multipart=False)
                return
            with obstore.open_writer(self._store, key, buffer_size=PART_BYTES, max_concurrency=1) as writer:
                while piece:
                    writer.write(piece)
                    piece = _piece_of(file)
                    step(piece)

    def get(self, key: str) -> bytes:
        """A small object."""
        with self._call("read", key):
            found = obstore.get(self._store, key)
            if found.meta["size"] > SMALL_BYTES_MAX:
                raise RemoteTrouble(f"{key} has {found.meta['size']} bytes")
            return bytes(found.bytes())

    def parts(self, key: str, size: int, at_once: int = PARTS_AT_ONCE) -> Generator[bytes]:
        """An object of this size, in order; memory holds `at_once` parts, whose requests are under way together. Close
        the iterator: that ends them."""
        with self._call("read", key), asyncio.Runner() as runner:
            loop, begun = runner.get_loop(), deque[asyncio.Task[bytes]]()
            loop.set_exception_handler(lambda *_: None)  # the first error is the reason, not those of later parts
            for start in range(0, size, PART_BYTES):
                begun.append(loop.create_task(self._part(key, start, min(PART_BYTES, size - start))))
                if len(begun) == at_once:
                    yield loop.run_until_complete(begun.popleft())
            while begun:
                yield loop.run_until_complete(begun.popleft())

    async def _part(self, key: str, start: int, length: int) -> bytes:
        return bytes(await obstore.get_range_async(self._store, key, start=start, length=length))

    def keys(self, prefix: str, step: Callable[[], None]) -> Iterator[str]:
        """The keys below a prefix, perhaps an old list; `step` is called for each page. Of a mounted directory, also
        the unfinished files that a killed process has left."""
        with self._call("list", prefix):
            if self._path is not None:
                yield from (prefix + path.name for path in (self._path / prefix).glob(f"*{_UNFINISHED}*"))
            for page in obstore.list(self._store, prefix=prefix, chunk_size=1_000):
                step()
                yield from (each["path"] for each in page)

    def exists(self, key: str) -> bool:
        try:
            with self._call("look up", key):
                obstore.head(self._store, key)
        except Missing:
            return False
        return True

    def delete(self, key: str) -> None:
        """An object that is gone is no error."""
        try:
            with self._call("delete", key):
                if self._path is not None and _UNFINISHED in key:
                    (self._path / key).unlink()
                    return
                obstore.delete(self._store, key)
        except Missing:
            pass

    @contextmanager
    def _call(self, what: str, key: str) -> Iterator[None]:
        if self._path is not None and not self._path.is_dir():
            raise RemoteUnavailable(f"{self._path} is not a directory: it must exist, or be mounted")
        try:
            yield
        except (RemoteTrouble, Stopped):
            raise
        except FileNotFoundError as error:
            raise Missing(f"{key} does not exist") from error
        except Exception as error:
            if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
                self.__dict__.pop("_store", None)  # the next call asks for credentials anew
            raise RemoteUnavailable(f"cannot {what} {key}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        text = _USER.sub("://", " ".join(str(error).split()))
        return f"{type(error).__name__}: {self._redact(text)[:_REASON_CHARS_MAX]}"


def _piece_of(file: IO[bytes]) -> bytes:
    try:
        return file.read(PART_BYTES)
    except OSError as error:  # of the local disk: shared storage may work
        raise RemoteTrouble(f"cannot read {file.name}: {error}") from error
