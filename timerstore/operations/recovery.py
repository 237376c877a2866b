"""Recovery: from a directory to the index that it still holds.

checkpoint missing          an empty index; everything is read from Kafka
checkpoint damaged          set aside, then as if missing
a segment damaged,          set aside; the index covers no source any more, the other files are kept
or a file of tombstones
an id index damaged         made again from its segment
another cluster or topic    refused: WrongIdentity
a file cannot be read       DiskFailure: an errno says nothing of the file
files that are not named    removed (a crash came between rename and checkpoint)

A source is *covered* when the checkpoint has an O_c of it. Of one that is not, Kafka is read from the log's start, and
segments count for what lies below it: what was deleted from Kafka is nowhere else. The rest would be there twice; so
opening writes the segments that have such rows anew without them. A source is not covered any more

    when a file is damaged                  it is not known what was in it: all sources
    when its O_c lies below the log's start what was taken in between O_c and there was with another instance, or is
                                            lost with this one's memory; whether anything can be is not for the index
                                            to say
    when its committed state was moved back what the index left out as finished is pending again
    when its log was cut                    what the index has above the cut is in no log any more; the committed state
                                            says where and how often, the checkpoint up to which cut it knows
    when another instance has it for long   its rows are dead weight here (maintenance.py)

The order, and what a crash right after each step costs: 1. the damaged file is renamed (the checkpoint names a file
that is missing, which is damage too); 2. the checkpoint without it, and without the offsets (nothing: the rest is as
after a start); 3. segments are written anew (files that no checkpoint names); 4. the checkpoint names them (the old
ones are named no more); 5. the old ones are put aside. Where an owned source is not covered, files that are not named
are put aside too, not removed: until ingest has caught up, Kafka may lose what they hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa

from timerstore.cancels import tombstones
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint, Identity, NamedFile
from timerstore.errors import Corrupt, DiskFailure, WrongIdentity
from timerstore.limits import Limits
from timerstore.log import segment
from timerstore.log.segment import Segment
from timerstore.memory.finished import Finished
from timerstore.memory.pending import Tally, labels, tally
from timerstore.operations.by_origin import covered_in
from timerstore.operations.state import StoreState
from timerstore.rows.entry import payload_of
from timerstore.rows.position import OFFSET_MAX, ORIGIN, Int64s, Progress
from timerstore.rows.sources import Cuts, NamedState, NamedStep, SourceName, Sources, named_in, unseen_cut

CUT: Final = "the log of {} was cut below what the index has read: it is rebuilt from Kafka"
MOVED_BACK: Final = "the committed state of {} lies before the index: it is rebuilt from Kafka"
OUTDATED: Final = (
    "the index of {} ends before the log's start: it is rebuilt from Kafka, and goes on without what is gone"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory whose lock is held, and the checkpoint that was in it, or None; `reports` are sentences for the
    operator."""

    directory: Path
    descriptor: int
    identity: Identity
    checkpoint: Checkpoint | None
    reports: tuple[str, ...] = ()

    def release(self) -> None:
        os.close(self.descriptor)


def find(directory: Path, identity: Identity, now_ms: int) -> Found:
    """Take the directory, and read its checkpoint; one that is damaged is set aside. Raises DirectoryInUse,
    WrongIdentity, DiskFailure."""
    descriptor = files.lock_directory(directory)
    found = Found(directory=directory, descriptor=descriptor, identity=identity, checkpoint=None)
    try:
        try:
            found = replace(found, checkpoint=checkpoints.read(directory))
        except Corrupt as error:
            aside = files.set_aside(Path(error.path), now_ms)
            report = f"{error.message}: set aside as {aside.name}, the index is rebuilt from Kafka"
            return replace(found, reports=(report,))
        if found.checkpoint is not None:
            _must_be_ours(found.checkpoint.identity, identity, directory)
    except BaseException:
        found.release()
        raise
    return found


def holds(found: Found, names: Collection[SourceName]) -> bool:
    """Whether a segment of the checkpoint has rows of these sources; one that is damaged does not tell, opening comes
    across it. Raises DiskFailure."""
    named = found.checkpoint.segments if found.checkpoint is not None and names else ()
    for each in named:
        with suppress(Corrupt):
            if not set(names).isdisjoint(segment.read_footer(found.directory / each.name, found.identity, each).names):
                return True
    return False


def give_up(found: Found, now_ms: int) -> Found:
    """Forget the index: an operator has given up what it holds. The checkpoint is set aside."""
    if found.checkpoint is not None:
        files.set_aside(found.directory / files.CHECKPOINT, now_ms)
    return replace(found, checkpoint=None)


def restore(
    found: Found,
    partitions: Iterable[SourceName],
    committed: Mapping[SourceName, NamedState],
    frozen: Mapping[SourceName, Sequence[NamedStep]],
    log_starts: Mapping[SourceName, int],
    now_ms: int,
    limits: Limits,
    progress: Callable[[int, int], None],
    *,
    cuts: Mapping[SourceName, Cuts] = MappingProxyType({}),
) -> StoreState:
    """The store that a directory holds; the arguments are those of `TimerStore.open`. Raises DiskFull, DiskFailure."""
    names = [*partitions, *named_in(committed)]
    # Of owned sources alone: the rows of others stay as the index read them, before the cut.
    numbers = {name: each[-1][0] for name in committed if (each := cuts.get(name))}
    # In this order: the checkpoint knows of a cut once all that was read above it is out.
    if unseen := unseen_cuts(found, {name: cuts.get(name, ()) for name in committed}):
        found = without_cancels(found, names, log_starts, unseen)
    found = _distrust(found, committed, frozen, log_starts, unseen, numbers)
    while True:
        try:
            state = _restore(found, names, committed, frozen, log_starts, now_ms, limits, progress)
        except Corrupt as error:
            found = _without(found, error, now_ms)
        else:
            state.cuts = numbers
            return state


def unseen_cuts(found: Found, cuts: Mapping[SourceName, Cuts]) -> dict[SourceName, int]:
    """From which offset on the index has what is in no log any more, by source."""
    if found.checkpoint is None:
        return {}
    seen = found.checkpoint.cuts
    lowest = {name: unseen_cut(each, seen.get(name, 0)) for name, each in cuts.items()}
    return {name: offset for name, offset in lowest.items() if offset is not None}


def _distrust(
    found: Found,
    committed: Mapping[SourceName, NamedState],
    frozen: Mapping[SourceName, Sequence[NamedStep]],
    log_starts: Mapping[SourceName, int],
    cuts: Mapping[SourceName, int],
    numbers: Mapping[SourceName, int],
) -> Found:
    """Let the index cover no owned source of which it cannot hold everything; see the module. `numbers` are those of
    the last cuts."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return found
    sources = Sources([*named_in(checkpoint.progress), *named_in(committed)])
    left: dict[str, list[SourceName]] = {}
    kept = dict(checkpoint.kept)
    for name, state in sorted(committed.items()):
        progress = sources.progress(name, *state, frozen.get(name, ()))
        known = checkpoint.offsets.get(name, kept.get(name, 0))
        if name in cuts:
            if name in checkpoint.offsets or name in kept:
                left.setdefault(CUT, []).append(name)
            bound = min(known, cuts[name], log_starts[name])
            kept[name] = 0 if lies_before(sources, name, progress, checkpoint, bound) else bound
        elif lies_before(sources, name, progress, checkpoint, checkpoint.offsets.get(name, 0)):
            # An operator has reset the group's offsets (which also clears P).
            left.setdefault(MOVED_BACK, []).append(name)
        elif checkpoint.offsets.get(name, OFFSET_MAX) < log_starts[name]:
            left.setdefault(OUTDATED, []).append(name)
            kept[name] = known
    if not left and kept == checkpoint.kept:
        return found
    where = {what: ", ".join(f"{topic}/{partition}" for topic, partition in names) for what, names in left.items()}
    uncovered = {name for names in left.values() for name in names}
    offsets = {name: offset for name, offset in checkpoint.offsets.items() if name not in uncovered}
    seen = {**checkpoint.cuts, **numbers}
    checkpoint = replace(checkpoint, offsets=offsets, cuts=seen, kept=kept)
    checkpoints.write(found.directory, checkpoint, frees=True)
    reports = (what.format(where[what]) for what in (CUT, MOVED_BACK, OUTDATED) if what in where)
    return replace(found, checkpoint=checkpoint, reports=(*found.reports, *reports))


def without_cancels(
    found: Found,
    names: Iterable[SourceName],
    log_starts: Mapping[SourceName, int],
    cuts: Mapping[SourceName, int],
) -> Found:
    """Let no cancel that was read above a cut act on what is written there now. Those below are read again, from the
    log's start on; what lies below both is cancelled as it was. A damaged file is left to opening. Raises DiskFull,
    DiskFailure."""
    checkpoint = found.checkpoint
    if checkpoint is None or not checkpoint.tombstones:
        return found
    sources = Sources([*names, *checkpoint.offsets])
    above, bound = (np.full(len(sources), OFFSET_MAX, dtype=np.int64) for _ in range(2))
    for name, cut in cuts.items():
        above[sources.index(*name)], bound[sources.index(*name)] = cut, min(cut, log_starts.get(name, 0))
    number = max(files.number_of(each.name) for each in checkpoint.tombstones)
    kept: list[NamedFile] = []
    for named in checkpoint.tombstones:
        with suppress(Corrupt):
            each = tombstones.read(found.directory / named.name, sources, named)
            if any(offset >= above[source] for source, offset in each.highest.items()):
                number += 1
                merge = tombstones.TombstoneMerge.cut(each, above, bound)
                anew = tombstones.write(found.directory / files.tombstones_name(number), sources, merge)
                kept += [] if anew is None else [anew.named]
                continue
        kept.append(named)
    checkpoint = replace(checkpoint, tombstones=tuple(kept))
    checkpoints.write(found.directory, checkpoint, frees=True)
    return replace(found, checkpoint=checkpoint)


def _without(found: Found, error: Corrupt, now_ms: int) -> Found:
    """What is left when a file that the checkpoint names is damaged: steps 1 and 2."""
    checkpoint, damaged = checkpoints.read(found.directory), Path(error.path)
    names = {each.name for each in (*checkpoint.segments, *checkpoint.tombstones)} if checkpoint else set()
    if checkpoint is None or damaged.name not in names:
        raise DiskFailure(
            f"{damaged} was written just now, and is damaged: {error.message}",
            hint="replace the volume",
            code="DB-3027",
        ) from error
    report = set_aside(error, now_ms)
    checkpoint = replace(
        checkpoint,
        offsets={},
        kept={},
        segments=tuple(s for s in checkpoint.segments if s.name != damaged.name),
        tombstones=tuple(t for t in checkpoint.tombstones if t.name != damaged.name),
    )
    checkpoints.write(found.directory, checkpoint, frees=True)
    return replace(found, checkpoint=checkpoint, reports=(*found.reports, report))


def set_aside(error: Corrupt, now_ms: int) -> str:
    """Rename a damaged file, if it is there: the next opening goes on without it. Returns a report."""
    if Path(error.path).exists():
        files.set_aside(Path(error.path), now_ms)
    return f"{error.message}: set aside, the index is rebuilt from Kafka and from what is left"


def _restore(
    found: Found,
    names: Iterable[SourceName],
    committed: Mapping[SourceName, NamedState],
    frozen: Mapping[SourceName, Sequence[NamedStep]],
    log_starts: Mapping[SourceName, int],
    now_ms: int,
    limits: Limits,
    progress: Callable[[int, int], None],
) -> StoreState:
    """Open the files that the checkpoint names; steps 3 to 5. `progress(done, total)` is called after each segment, and
    again after each that is written anew or counted. Raises Corrupt, DiskFull, DiskFailure."""
    checkpoint = found.checkpoint or Checkpoint(identity=found.identity, offsets={})
    footers = [segment.read_footer(found.directory / s.name, found.identity, s) for s in checkpoint.segments]
    covered = checkpoint.offsets
    sources = Sources([*names, *covered, *(name for footer in footers for name in footer.names)])
    states = {sources.index(*n): sources.progress(n, *each, frozen.get(n, ())) for n, each in committed.items()}
    state = StoreState(found.directory, found.identity, sources, states, limits, now_ms)
    total = len(footers)
    opened = []
    for footer in footers:
        opened.append(segment.of_footer(footer, sources))
        progress(len(opened), total)
    cancels = [tombstones.read(found.directory / t.name, sources, t) for t in checkpoint.tombstones]
    bounds = {name: min(start, checkpoint.kept.get(name, start)) for name, start in log_starts.items()}
    kept = _kept(opened, state, {**bounds, **dict.fromkeys(covered, OFFSET_MAX)}, lambda: progress(total, total))
    if kept != opened:
        checkpoint = replace(checkpoint, segments=tuple(each.named for each in kept))
        checkpoints.write(found.directory, checkpoint, frees=True)
    is_rebuilt = any(name not in covered for name in log_starts)
    in_use = {s.named.name for s in kept} | {t.named.name for t in cancels}
    removed, state.aside = _clear(found.directory, in_use, is_rebuilt, now_ms)
    state.reports = found.reports
    if removed and found.checkpoint is not None:
        state.reports += (f"removed {removed} files that a crash had left unfinished",)
    state.checkpoint = checkpoint
    # A topic that is not configured now may come back: its rows in the segments must be known to be of that topic.
    state.identity = replace(found.identity, topic_ids={**checkpoint.identity.topic_ids, **found.identity.topic_ids})
    # What is read again of a source that the index does not cover begins at the log's start. Of what lies below, there
    # is what the segments hold.
    for name, offset in {**log_starts, **covered}.items():
        state.resident.stored[sources.index(*name)] = offset
    state.cancels.tombstones.restore(cancels)
    state.next_tombstones += max((files.number_of(each.named.name) for each in cancels), default=0)
    state.next_segment += max((files.number_of(each.named.name) for each in kept), default=0)
    for each in kept:
        state.timerlog.add(each)
        for part in _count_pending(each, state):
            state.pending.add(part)
        state.pending.remove(covered_in(state, each))
        progress(len(kept), len(kept))
    return state


def _kept(
    opened: list[Segment], state: StoreState, bounds: Mapping[SourceName, int], written: Callable[[], None]
) -> list[Segment]:
    """The segments, those with rows of owned sources that are read again written anew without them (and then without
    all that does not count). `bounds` say from which offset on rows of a source do not count (0: none does); `written`
    is called after each of those."""
    kept, sources = [], state.sources
    bound: Int64s = np.array([bounds.get(name, 0) for name in sources], dtype=np.int64)
    number = max((files.number_of(each.path.name) for each in opened), default=0)
    for each in opened:
        if not any(end > bound[source] for source, end in each.ends.items() if state.resident.owned[source]):
            kept.append(each)
        elif any(begin < bound[source] for source, begin in each.begins.items()):
            number += 1
            with segment.Writer(state.directory, number, state.identity, sources) as writer:
                for group in range(len(each.group_rows)):
                    table = segment.read_rows(each, [group])
                    rows = segment.references(each, table, sources)
                    rows = rows[rows.offset < bound[rows.source]]
                    if len(rows):
                        writer.add(rows, payload_of(table).take(pa.array(rows.row)))
                anew = writer.close()
            kept += [] if anew is None else [anew]
            written()
    return kept


def _clear(directory: Path, named: set[str], is_rebuilt: bool, now_ms: int) -> tuple[int, tuple[Path, ...]]:
    """Remove what no checkpoint names, or put it aside; returns how many were removed, and what is aside."""
    removed = 0
    for path in files.unreferenced(directory, named):
        if is_rebuilt and path.suffix in (files.SEGMENT_SUFFIX, files.TOMBSTONES_SUFFIX):
            files.set_aside(path, now_ms, files.ASIDE_SUFFIX)
        else:
            files.remove(path)
            removed += path.suffix not in files.INDEX_SUFFIXES
    return removed, tuple(sorted(directory.glob(f"*{files.ASIDE_SUFFIX}")))


def _count_pending(opened: Segment, state: StoreState) -> Iterable[Tally]:
    """The pending rows of a segment, counted: by its footer when all are, else by looking at its positions."""
    committed = state.resident.committed
    is_whole = all(source in committed for source in opened.largest)
    if is_whole and opened.first > max(each.highest for each in committed.values()):
        return [opened.timers]
    return count_unfinished(opened, state.sources, state.resident.done)


def count_unfinished(opened: Segment, sources: Sources, done: Finished) -> Iterator[Tally]:
    """The rows of a segment that are not finished, cancelled ones too, counted by row group. Raises Corrupt,
    DiskFailure."""
    with segment.Reader(opened) as reader:
        for group in range(len(opened.group_rows)):
            table = reader.read(group, ["topic", "partition", "offset", "at", "target", "schedule"])
            rows = segment.references(opened, table, sources)
            pending = rows[~done.includes(rows)]
            yield tally(pending.at, labels(table).take(pa.array(pending.row)))


def lies_before(sources: Sources, name: SourceName, state: Progress, found: Checkpoint, covered: int) -> bool:
    """Whether something below `covered` is not finished under a committed state that was when the checkpoint was
    written."""
    source = sources.index(*name)
    known = sources.progress(name, *found.progress.get(name, (0, None)), found.frozen.get(name, ()))
    return state.offset < covered or not all(
        state.finishes(min(step.offset, covered), step.position.within(source))
        for step in known.steps
        if min(step.offset, covered) and step.position != ORIGIN
    )


def _must_be_ours(found: Identity, ours: Identity, directory: Path) -> None:
    remedy = "point store.directory to another directory, or delete this one: it is an index and is rebuilt from Kafka"
    if found.cluster_id != ours.cluster_id:
        raise WrongIdentity(
            f"{directory} holds the index of cluster {found.cluster_id}, this cluster is {ours.cluster_id}",
            hint=remedy,
            code="DB-4015",
        )
    for topic, topic_id in found.topic_ids.items():
        if topic in ours.topic_ids and ours.topic_ids[topic] != topic_id:
            raise WrongIdentity(
                f"{directory} holds the index of another topic {topic} (id {topic_id}, now {ours.topic_ids[topic]}):"
                " the topic was deleted and made again",
                hint=remedy,
                code="DB-4015",
            )
