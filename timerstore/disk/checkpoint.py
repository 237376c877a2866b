"""The checkpoint: which segments make up the index, and which offsets of the delay topics they cover.

One JSON file, replaced atomically, with a CRC over its body. A row of the delay topics below `offsets` is either in a
named segment or finished; everything from there on is read from Kafka again at the next start.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timerstore.disk import files
from timerstore.errors import Corrupt, DiskFull
from timerstore.rows.sources import NamedState, NamedStep, SourceName

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose records the index holds: the Kafka cluster's id, and the id of every delay topic by name."""

    cluster_id: str
    topic_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A segment or a file of tombstones as the checkpoint names it: file name, size in bytes, CRC-32 of its footer
    (which a file of tombstones has those of the columns in)."""

    name: str
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`offsets` is O_c by source; `progress` the last (O, P) known when it was written, by source, `frozen` its frozen
    steps, where there were any.

    Every cancel below `offsets` is in one of the `tombstones` files, unless it has expired. `cuts` is the number of the
    last cut of a source's log that is known here. A source without O_c is read again: below `kept` the segments have
    what is pending of it, which Kafka may have lost, and nothing from there on counts.
    """

    identity: Identity
    offsets: Mapping[SourceName, int]
    progress: Mapping[SourceName, NamedState] = field(default_factory=dict)
    frozen: Mapping[SourceName, tuple[NamedStep, ...]] = field(default_factory=dict)
    cuts: Mapping[SourceName, int] = field(default_factory=dict)
    kept: Mapping[SourceName, int] = field(default_factory=dict)
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
        "topic_ids": dict(checkpoint.identity.topic_ids),
        "offsets": _numbers(checkpoint.offsets),
        "progress": [
            [topic, partition, offset, position]
            for (topic, partition), (offset, position) in sorted(checkpoint.progress.items())
        ],
        "frozen": [[*name, *step] for name, steps in sorted(checkpoint.frozen.items()) for step in steps],
        "cuts": _numbers(checkpoint.cuts),
        "kept": _numbers(checkpoint.kept),
        "segments": [[s.name, s.bytes, s.crc] for s in checkpoint.segments],
        "tombstones": [[t.name, t.bytes, t.crc] for t in checkpoint.tombstones],
    }


def _from_json(body: dict[str, Any]) -> Checkpoint:
    if body["version"] != FORMAT_VERSION:
        raise ValueError(f"format version {body['version']}, this program reads {FORMAT_VERSION}")
    return Checkpoint(
        identity=Identity(cluster_id=body["cluster_id"], topic_ids=body["topic_ids"]),
        offsets=_by_name(body["offsets"]),
        progress={
            (topic, partition): (offset, None if position is None else tuple(position))
            for topic, partition, offset, position in body["progress"]
        },
        frozen=_grouped(body["frozen"]),
        cuts=_by_name(body.get("cuts", [])),
        kept=_by_name(body.get("kept", [])),
        segments=tuple(NamedFile(name=n, bytes=b, crc=c) for n, b, c in body["segments"]),
        tombstones=tuple(NamedFile(name=n, bytes=b, crc=c) for n, b, c in body["tombstones"]),
    )


def _numbers(by_source: Mapping[SourceName, int]) -> list[tuple[str, int, int]]:
    return [(*name, number) for name, number in sorted(by_source.items())]


def _by_name(rows: list[tuple[str, int, int]]) -> dict[SourceName, int]:
    return {(topic, partition): number for topic, partition, number in rows}


def _grouped(rows: list[tuple[str, int, int, int, int]]) -> dict[SourceName, tuple[NamedStep, ...]]:
    result: dict[SourceName, tuple[NamedStep, ...]] = {}
    for topic, partition, *step in rows:
        end, at_ms, offset = step
        result[topic, partition] = (*result.get((topic, partition), ()), (end, at_ms, offset))
    return result
