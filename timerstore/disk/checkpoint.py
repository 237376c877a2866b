"""The checkpoint: the segments of the index, and the offsets of the log that they cover.

It is one JSON file, replaced atomically, with a CRC of its body. A row of the log below `offset` is either in a named
segment or finished; the next start reads the log from `offset` on.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timerstore.disk import files
from timerstore.errors import DiskFull
from timerstore.rows.position import NOTHING_FINISHED, ORIGIN, Position, Progress, Step

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The owner of the records in the index: the id of the cluster, and the id of the log in it."""

    cluster_id: str
    log_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A segment or a file of tombstones, as the checkpoint names it: file name, size in bytes, CRC-32 of its footer.
    The footer of a file of tombstones has the CRCs of the columns."""

    name: str
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`offset` is O_c, `progress` the committed state at the time of writing.

    Every cancel below `offset` is in one of the `tombstones` files, unless it has expired. `cut` is the number of the
    last known cut of the log. Without O_c (None) the log is read again. Then the segments have the pending rows below
    `kept`, which the log may have lost, and their other rows do not count; without `kept` (None) the log's start stands
    in for it.
    """

    identity: Identity
    offset: int | None = None
    progress: Progress = NOTHING_FINISHED
    cut: int = 0
    kept: int | None = None
    segments: tuple[NamedFile, ...] = ()
    tombstones: tuple[NamedFile, ...] = ()


def write(directory: Path, checkpoint: Checkpoint, *, frees: bool = False) -> None:
    """Replace the directory's checkpoint durably. If files can be removed after it (`frees`), it takes the reserve when
    the disk is full. Raises DiskFull or DiskFailure; the old checkpoint is then still valid."""
    text = as_text(checkpoint)

    def put() -> None:
        files.write_durably(directory / files.CHECKPOINT, lambda path: _write_text(path, text))

    try:
        put()
    except DiskFull:
        if not frees or not files.give_reserve(directory):
            raise
        put()


def read(directory: Path) -> Checkpoint | None:
    """The directory's checkpoint, or None without one. Raises Corrupt if it is damaged or has an unknown version,
    DiskFailure if it cannot be read."""
    path = directory / files.CHECKPOINT
    with files.reading(path, AttributeError):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return _from_json(_body_of(text))


def as_text(checkpoint: Checkpoint, **more: object) -> str:
    """A checkpoint as text, with `more` values."""
    body = json.dumps({**_to_json(checkpoint), **more}, separators=(",", ":"), sort_keys=True)
    return json.dumps({"crc": zlib.crc32(body.encode()), "body": body})


def parse(text: str) -> tuple[Checkpoint, dict[str, Any]]:
    """The inverse of `as_text`: the checkpoint, and all values. Raises ValueError, LookupError, TypeError,
    AttributeError."""
    body = _body_of(text)
    return _from_json(body), body


def _body_of(text: str) -> dict[str, Any]:
    """The values of a text. Raises as `parse`."""
    envelope = json.loads(text)
    body = envelope["body"]
    if zlib.crc32(body.encode()) != envelope["crc"]:
        raise ValueError("it fails its checksum")
    fields: dict[str, Any] = json.loads(body)
    return fields


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "cluster_id": checkpoint.identity.cluster_id,
        "log_id": checkpoint.identity.log_id,
        "offset": checkpoint.offset,
        "steps": [_step_to_json(step) for step in checkpoint.progress.steps],
        "cut": checkpoint.cut,
        "kept": checkpoint.kept,
        "segments": [[s.name, s.bytes, s.crc] for s in checkpoint.segments],
        "tombstones": [[t.name, t.bytes, t.crc] for t in checkpoint.tombstones],
    }


def _from_json(body: dict[str, Any]) -> Checkpoint:
    if body["version"] != FORMAT_VERSION:
        raise ValueError(f"format version {body['version']}, this program reads {FORMAT_VERSION}")
    *frozen, last = map(_step_from_json, body["steps"])
    return Checkpoint(
        identity=Identity(cluster_id=body["cluster_id"], log_id=body["log_id"]),
        offset=body["offset"],
        progress=Progress(last.offset, last.position, tuple(frozen)),
        cut=body["cut"],
        kept=body["kept"],
        segments=tuple(NamedFile(name=n, bytes=b, crc=c) for n, b, c in body["segments"]),
        tombstones=tuple(NamedFile(name=n, bytes=b, crc=c) for n, b, c in body["tombstones"]),
    )


def _step_to_json(step: Step) -> list[int]:
    """[offset], if no row is finished, or [offset, at_ms, offset of the position]."""
    return [step.offset] if step.position == ORIGIN else [step.offset, step.position.at_ms, step.position.offset]


def _step_from_json(row: list[int]) -> Step:
    end, *position = row
    return Step(end, Position(*position) if position else ORIGIN)
