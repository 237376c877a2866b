"""The checkpoint: which segments make up the index, and which offsets of the log they cover.

One JSON file, replaced atomically, with a CRC over its body. A row of the log below `offset` is either in a named
segment or finished; everything from there on is read from the log again at the next start.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timerstore.disk import files
from timerstore.errors import Corrupt, DiskFull
from timerstore.rows.position import NOTHING_FINISHED, ORIGIN, Position, Progress, Step

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose records the index holds: the id of the cluster, and that of the log in it."""

    cluster_id: str
    log_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A segment or a file of tombstones as the checkpoint names it: file name, size in bytes, CRC-32 of its footer
    (which a file of tombstones has those of the columns in)."""

    name: str
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`offset` is O_c, `progress` the last committed state known when it was written.

    Every cancel below `offset` is in one of the `tombstones` files, unless it has expired. `cut` is the number of the
    last cut of the log that is known here. Without O_c (None) the log is read again: below `kept` the segments have
    what is pending of it, which the log may have lost, and nothing from there on counts; None: the log's start.
    """

    identity: Identity
    offset: int | None = None
    progress: Progress = NOTHING_FINISHED
    cut: int = 0
    kept: int | None = None
    segments: tuple[NamedFile, ...] = ()
    tombstones: tuple[NamedFile, ...] = ()


def write(directory: Path, checkpoint: Checkpoint, *, frees: bool = False) -> None:
    """Replace the directory's checkpoint durably. One that `frees` room, since files can be removed after it, takes the
    reserve where there is no room. Raises DiskFull or DiskFailure; the old one then still stands."""
    body = json.dumps(_to_json(checkpoint), separators=(",", ":"), sort_keys=True)
    text = json.dumps({"crc": zlib.crc32(body.encode()), "body": body})

    def put() -> None:
        files.write_durably(directory / files.CHECKPOINT, lambda path: _write_text(path, text))

    try:
        put()
    except DiskFull:
        if not frees or not files.give_reserve(directory):
            raise
        put()


def read(directory: Path) -> Checkpoint | None:
    """The directory's checkpoint, or None when there is none. Raises Corrupt when it is damaged or of an unknown
    version, DiskFailure when it cannot be read."""
    path = directory / files.CHECKPOINT
    with files.reading(path, AttributeError):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        envelope = json.loads(text)
        body = envelope["body"]
        if zlib.crc32(body.encode()) != envelope["crc"]:
            raise Corrupt(f"{path.name} fails its checksum", path=str(path))
        return _from_json(json.loads(body))


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
    """Without a position: nothing is finished."""
    return [step.offset] if step.position == ORIGIN else [step.offset, step.position.at_ms, step.position.offset]


def _step_from_json(row: list[int]) -> Step:
    end, *position = row
    return Step(end, Position(*position) if position else ORIGIN)
