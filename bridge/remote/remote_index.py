"""An index on shared storage: its manifest, and the names of its objects.

    PREFIX/CLUSTER/GROUP/TOPIC ID/PARTITION/<random>-<file name>    a segment, or a file of tombstones
                                            <random>.manifest       the checkpoint's JSON, and the objects of its files

Each upload has a new random name, so no object is ever replaced, whoever else writes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from bridge.remote.objects import Objects, RemoteTrouble
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk.checkpoint import Checkpoint, Identity, NamedFile

_FILE: Final = re.compile(r"segment-\d{10}\.parquet|cancels-\d{10}\.tombstones")
_KEY: Final = re.compile(r"[0-9a-f]{16}-[a-z0-9.-]+")
_DAMAGE: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Stored = tuple[str, str]
"""The name of an object below the partition's prefix, and the digest of its content."""

digest_of = xxhash.xxh3_128


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteIndex:
    """A manifest: a checkpoint, and the object of each of its files."""

    name: str
    checkpoint: Checkpoint
    objects: Mapping[NamedFile, Stored]

    def write(self, objects: Objects, prefix: str) -> None:
        """Raises RemoteTrouble."""
        text = checkpoints.as_text(self.checkpoint, objects={f.name: each for f, each in self.objects.items()})
        objects.put(prefix + manifest_key(self.name), text.encode())

    @classmethod
    def read(cls, objects: Objects, prefix: str, name: str, identity: Identity) -> RemoteIndex:
        """Raises RemoteTrouble if it is missing, damaged, or of another log."""
        data = objects.get(prefix + manifest_key(name))
        try:
            checkpoint, body = checkpoints.parse(data.decode())
            files = files_of(checkpoint)
            found = {file: (str(body["objects"][file.name][0]), str(body["objects"][file.name][1])) for file in files}
        except _DAMAGE as error:
            raise RemoteTrouble(f"the manifest {name} is damaged: {type(error).__name__}: {error}") from error
        if checkpoint.identity != identity:
            raise RemoteTrouble(f"the manifest {name} is of another cluster or topic: {checkpoint.identity}")
        if not all(_FILE.fullmatch(file.name) and _KEY.fullmatch(key) for file, (key, _) in found.items()):
            raise RemoteTrouble(f"the manifest {name} has names that no bridge writes")
        return cls(name=name, checkpoint=checkpoint, objects=found)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.objects)

    def keys(self) -> frozenset[str]:
        """The names of its objects, and its own."""
        return frozenset({manifest_key(self.name), *(key for key, _ in self.objects.values())})


def files_of(checkpoint: Checkpoint) -> tuple[NamedFile, ...]:
    return (*checkpoint.segments, *checkpoint.tombstones)


def new_name() -> str:
    return secrets.token_hex(8)


def manifest_key(name: str) -> str:
    return f"{name}.manifest"


def prefix_of(group_id: str, identity: Identity) -> str:
    """The beginning of the keys of a partition. A topic id may contain slashes."""
    topic_id, _, partition = identity.log_id.rpartition("/")
    return "".join(f"{_plain(part)}/" for part in (identity.cluster_id, group_id, topic_id, partition))


def _plain(text: str) -> str:
    """A different name for each text, of characters that every store takes."""
    return re.sub(r"[^A-Za-z0-9.-]|^[.]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), text)
