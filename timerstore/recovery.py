"""Recovery: from a directory to the index that it still holds.

checkpoint missing          an empty index; everything is read from Kafka
checkpoint damaged          set aside, then as if missing
a segment damaged,          set aside with the checkpoint, then as if missing: rows and cancels can only come from Kafka
or a file of tombstones     again
an id index damaged         made again from its segment
another cluster or topic    refused: WrongIdentity
segments nobody names       removed (a crash came between rename and checkpoint)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from timerstore import checkpoint as checkpoints
from timerstore import files, segment, tombstones
from timerstore.checkpoint import Checkpoint, Identity
from timerstore.errors import Corrupt, WrongIdentity
from timerstore.pending import Tally, tally
from timerstore.position import OFFSET_MAX
from timerstore.resident import Resident
from timerstore.runs import Selection
from timerstore.segment import Segment
from timerstore.sources import NamedPosition, NamedStep, SourceName, Sources
from timerstore.tombstones import TombstoneFile

_NamedCorner = tuple[int, NamedPosition | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """`checkpoint` and its open `segments` and `tombstones`, or None and none; `reports` are sentences for the
    operator."""

    checkpoint: Checkpoint | None
    segments: tuple[Segment, ...]
    tombstones: tuple[TombstoneFile, ...]
    reports: tuple[str, ...]


def read_checkpoint(directory: Path, identity: Identity, now_ms: int) -> tuple[Checkpoint | None, list[str]]:
    """The directory's checkpoint if it is sound and ours, and reports. Raises WrongIdentity."""
    try:
        found = checkpoints.read(directory)
    except Corrupt as error:
        aside = files.set_aside(Path(error.path), now_ms)
        return None, [f"{error.message}: set aside as {aside.name}, the index is rebuilt from Kafka"]
    if found is not None:
        _must_be_ours(found.identity, identity, directory)
    return found, []


def open_segments(
    directory: Path,
    found: Checkpoint | None,
    identity: Identity,
    sources: Sources,
    now_ms: int,
    progress: Callable[[int, int], None],
) -> Recovered:
    """Open the segments and the tombstones that `found` names; `progress(done, total)` is called after each segment."""
    reports: list[str] = []
    opened: list[Segment] = []
    cancels: list[TombstoneFile] = []
    try:
        for named in found.segments if found is not None else ():
            opened.append(segment.read(directory / named.name, identity, sources, named))
            progress(len(opened), len(found.segments) if found is not None else 0)
        if found is not None:
            cancels = [tombstones.read(directory / file.name, sources, file) for file in found.tombstones]
    except Corrupt as error:
        reports.append(discard(directory, error, now_ms))
        found, opened, cancels = None, [], []
    removed = files.remove_strangers(directory, {s.named.name for s in opened} | {t.named.name for t in cancels})
    if removed and found is not None:
        reports.append(f"removed {len(removed)} files that a crash had left unfinished")
    return Recovered(checkpoint=found, segments=tuple(opened), tombstones=tuple(cancels), reports=tuple(reports))


def count_pending(opened: Segment, resident: Resident, selection: Callable[[pa.Table], Selection]) -> Tally:
    """The pending rows of a segment, counted: by its footer when all are, else by looking at its positions (with
    `selection`)."""
    committed = resident.committed
    if all(source in committed for source in opened.largest) and opened.first > max(
        state.highest for state in committed.values()
    ):
        return opened.timers
    table = segment.read_rows(opened, columns=["topic", "partition", "offset", "at", "target"])
    rows = selection(table)
    pending = rows[~resident.finished(rows)]
    return tally(pending.at, table.column("target").take(pa.array(pending.row)))


def discard(directory: Path, error: Corrupt, now_ms: int) -> str:
    """Set a damaged segment aside and the checkpoint that names it, so that the next opening rebuilds; returns a
    report."""
    for path in (Path(error.path), directory / files.CHECKPOINT):
        if path.exists():
            files.set_aside(path, now_ms)
    return f"{error.message}: set aside, the index is rebuilt from Kafka"


def discard_outrun(
    directory: Path,
    found: Checkpoint,
    committed: Mapping[SourceName, tuple[int, NamedPosition | None]],
    frozen: Mapping[SourceName, Sequence[NamedStep]],
    now_ms: int,
) -> str | None:
    """Set the checkpoint aside if the committed state lies before it: what it left out as finished is pending again.

    Somebody has reset the group's offsets (which also clears P). Returns a report, or None when all is well.
    """
    outrun = sorted(
        name for name, (o, p) in committed.items() if _lies_before(name, _named_steps(name, o, p, frozen), found)
    )
    if not outrun:
        return None
    files.set_aside(directory / files.CHECKPOINT, now_ms)
    where = ", ".join(f"{topic}/{partition}" for topic, partition in outrun)
    return f"the committed state of {where} lies before the index: it is rebuilt from Kafka"


def _lies_before(name: SourceName, steps: Sequence[_NamedCorner], found: Checkpoint) -> bool:
    """Whether something below O_c is not finished under `steps` (the current one last) that was when the checkpoint
    was written."""
    covered = found.offsets.get(name, 0)
    offset, position = found.progress.get(name, (0, None))
    known = _named_steps(name, offset, position, found.frozen)
    return steps[-1][0] < covered or not all(
        any(o2 >= min(o, covered) and p2 is not None and p2 >= _within(name, p) for o2, p2 in steps)
        for o, p in known
        if p is not None and min(o, covered)
    )


def _within(name: SourceName, position: NamedPosition) -> NamedPosition:
    """The largest position of a source at or below another (as `Position.within`)."""
    at_ms, topic, partition, _ = position
    if (topic, partition) == name:
        return position
    return (at_ms if name < (topic, partition) else at_ms - 1, *name, OFFSET_MAX)


def _named_steps(
    name: SourceName, offset: int, position: NamedPosition | None, frozen: Mapping[SourceName, Sequence[NamedStep]]
) -> list[_NamedCorner]:
    return [*((end, (at_ms, *name, o)) for end, at_ms, o in frozen.get(name, ())), (offset, position)]


def _must_be_ours(found: Identity, ours: Identity, directory: Path) -> None:
    remedy = "point store.directory to another directory, or delete this one: it is an index and is rebuilt from Kafka"
    if found.cluster_id != ours.cluster_id:
        raise WrongIdentity(
            f"{directory} holds the index of cluster {found.cluster_id}, this cluster is {ours.cluster_id}", hint=remedy
        )
    for topic, topic_id in found.topic_ids.items():
        if topic in ours.topic_ids and ours.topic_ids[topic] != topic_id:
            raise WrongIdentity(
                f"{directory} holds the index of another topic {topic} (id {topic_id}, now {ours.topic_ids[topic]}):"
                " the topic was deleted and made again",
                hint=remedy,
            )
