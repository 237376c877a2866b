"""Recovery: from a directory to the index that it still holds.

checkpoint missing          an empty index; everything is read from the log
checkpoint damaged          set aside, then as if missing
a segment damaged,          set aside; the index covers the log no more, the other files are kept
or a file of tombstones
an id index damaged         made again from its segment
another cluster or log      refused: WrongIdentity
a file cannot be read       DiskFailure: an errno says nothing of the file
files that are not named    removed (a crash came between rename and checkpoint)

The log is *covered* when the checkpoint has an O_c. Where it is not, it is read from its start, and segments count for
what lies below that: what was deleted from the log is nowhere else. The rest would be there twice; so opening writes
the segments that have such rows anew without them. It is not covered any more

    when a file is damaged                  it is not known what was in it
    when O_c lies below the log's start     what was taken in between O_c and there was with another instance, or is
                                            lost with this one's memory; whether anything can be is not for the index
                                            to say
    when the committed state was moved back what the index left out as finished is pending again
    when the log was cut                    what the index has above the cut is in no log any more; the committed state
                                            says where and how often, the checkpoint up to which cut it knows

The order, and what a crash right after each step costs: 1. the damaged file is renamed (the checkpoint names a file
that is missing, which is damage too); 2. the checkpoint without it, and without O_c (nothing: the rest is as after
a start); 3. segments are written anew (files that no checkpoint names); 4. the checkpoint names them (the old
ones are named no more); 5. the old ones are put aside. Where the log is not covered, files that are not named are put
aside too, not removed: until ingest has caught up, the log may lose what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from timerstore.cancels import tombstones
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import Checkpoint, Identity, NamedFile
from timerstore.errors import Corrupt, DiskFailure, WrongIdentity
from timerstore.limits import Limits
from timerstore.log import segment
from timerstore.log.segment import Segment
from timerstore.memory.pending import Tally, labels, tally
from timerstore.memory.sorted_runs import select
from timerstore.operations.by_origin import covered_in
from timerstore.operations.state import StoreState
from timerstore.rows.cuts import Cuts, unseen_cut
from timerstore.rows.entry import payload_of
from timerstore.rows.position import ORIGIN, Progress

CUT: Final = "the log was cut below what the index has read: it is rebuilt from Kafka"
MOVED_BACK: Final = "the committed state lies before the index: it is rebuilt from Kafka"
OUTDATED: Final = "the index ends before the log's start: it is rebuilt from Kafka, and goes on without what is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory, and the checkpoint that was in it, or None; `reports` are sentences for the operator."""

    directory: Path
    identity: Identity
    checkpoint: Checkpoint | None = None
    reports: tuple[str, ...] = ()


def find(directory: Path, identity: Identity, now_ms: int) -> Found:
    """Read a directory's checkpoint; one that is damaged is set aside. The caller has the directory to itself. Raises
    WrongIdentity, DiskFailure."""
    files.make_directory(directory)
    found = Found(directory=directory, identity=identity)
    try:
        found = replace(found, checkpoint=checkpoints.read(directory))
    except Corrupt as error:
        aside = files.set_aside(Path(error.path), now_ms)
        report = f"{error.message}: set aside as {aside.name}, the index is rebuilt from Kafka"
        return replace(found, reports=(report,))
    if found.checkpoint is not None:
        _must_be_ours(found.checkpoint.identity, identity, directory)
    return found


def holds_rows(found: Found) -> bool:
    """Whether the checkpoint names segments."""
    return found.checkpoint is not None and bool(found.checkpoint.segments)


def give_up(found: Found, now_ms: int) -> Found:
    """Forget the index: an operator has given up what it holds. The checkpoint is set aside."""
    if found.checkpoint is not None:
        files.set_aside(found.directory / files.CHECKPOINT, now_ms)
    return replace(found, checkpoint=None)


def restore(
    found: Found,
    committed: Progress,
    log_start: int,
    cuts: Cuts,
    now_ms: int,
    limits: Limits,
    progress: Callable[[int, int], None],
    on_news: Callable[[], None] = lambda: None,
) -> StoreState:
    """The store that a directory holds; the arguments are those of `TimerStore.open`. Raises DiskFull, DiskFailure."""
    # In this order: the checkpoint knows of a cut once all that was read above it is out.
    unseen = unseen_in(found, cuts)
    if unseen is not None:
        found = without_cancels(found, log_start, unseen)
    number = cuts[-1][0] if cuts else 0
    found = _distrust(found, committed, log_start, unseen, number)
    while True:
        try:
            state = _restore(found, committed, log_start, now_ms, limits, progress, on_news)
        except Corrupt as error:
            found = _without(found, error, now_ms)
        else:
            state.cut = number
            return state


def unseen_in(found: Found, cuts: Cuts) -> int | None:
    """From which offset on the index has what is in the log no more."""
    return None if found.checkpoint is None else unseen_cut(cuts, found.checkpoint.cut)


def _distrust(found: Found, committed: Progress, log_start: int, unseen: int | None, number: int) -> Found:
    """Let the index cover nothing where it cannot hold everything; see the module. `number` is that of the last cut."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return found
    offset, kept = checkpoint.offset, checkpoint.kept
    known = offset if offset is not None else kept or 0
    report = None
    if unseen is not None:
        report = None if offset is None and kept is None else CUT
        bound = min(known, unseen, log_start)
        offset, kept = None, 0 if lies_before(committed, checkpoint, bound) else bound
    elif lies_before(committed, checkpoint, offset or 0):
        # An operator has reset the group's offsets (which also clears P).
        offset, report = None, MOVED_BACK
    elif offset is not None and offset < log_start:
        offset, kept, report = None, known, OUTDATED
    if (offset, kept) == (checkpoint.offset, checkpoint.kept) and number == checkpoint.cut:
        return found
    checkpoint = replace(checkpoint, offset=offset, cut=number, kept=kept)
    checkpoints.write(found.directory, checkpoint, frees=True)
    return replace(found, checkpoint=checkpoint, reports=(*found.reports, *([] if report is None else [report])))


def without_cancels(found: Found, log_start: int, cut: int) -> Found:
    """Let no cancel that was read above a cut act on what is written there now. Those below are read again, from the
    log's start on; what lies below both is cancelled as it was. A damaged file is left to opening. Raises DiskFull,
    DiskFailure."""
    checkpoint = found.checkpoint
    if checkpoint is None or not checkpoint.tombstones:
        return found
    number = max(files.number_of(each.name) for each in checkpoint.tombstones)
    kept: list[NamedFile] = []
    for named in checkpoint.tombstones:
        with suppress(Corrupt):
            each = tombstones.read(found.directory / named.name, named)
            if each.highest.any >= cut:
                number += 1
                merge = tombstones.TombstoneMerge.cut(each, cut, min(cut, log_start))
                anew = tombstones.write(found.directory / files.tombstones_name(number), merge)
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
        offset=None,
        kept=None,
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
    committed: Progress,
    log_start: int,
    now_ms: int,
    limits: Limits,
    progress: Callable[[int, int], None],
    on_news: Callable[[], None],
) -> StoreState:
    """Open the files that the checkpoint names; steps 3 to 5. `progress(done, total)` is called after each segment, and
    again after each that is written anew or counted. Raises Corrupt, DiskFull, DiskFailure."""
    checkpoint = found.checkpoint or Checkpoint(identity=found.identity)
    covered, total = checkpoint.offset, len(checkpoint.segments)
    opened = []
    for named in checkpoint.segments:
        opened.append(segment.read(found.directory / named.name, found.identity, named))
        progress(len(opened), total)
    cancels = [tombstones.read(found.directory / t.name, t) for t in checkpoint.tombstones]
    kept = opened
    if covered is None:
        bound = log_start if checkpoint.kept is None else min(log_start, checkpoint.kept)
        kept = _kept(opened, found, bound, lambda: progress(total, total))
    if kept != opened:
        checkpoint = replace(checkpoint, segments=tuple(each.named for each in kept))
        checkpoints.write(found.directory, checkpoint, frees=True)
    in_use = {s.named.name for s in kept} | {t.named.name for t in cancels}
    removed, aside = _clear(found.directory, in_use, covered is None, now_ms)
    state = StoreState(found.directory, found.identity, committed, limits, now_ms, on_news)
    state.aside = aside
    state.reports = found.reports
    if removed and found.checkpoint is not None:
        state.reports += (f"removed {removed} files that a crash had left unfinished",)
    state.checkpoint = checkpoint
    # A log that the index does not cover is read again from its start. Of what lies below, there is what the segments
    # hold.
    state.resident.stored = log_start if covered is None else covered
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


def _kept(opened: list[Segment], found: Found, bound: int, written: Callable[[], None]) -> list[Segment]:
    """The segments without rows from `bound` on, which do not count: those that have some are written anew. `written`
    is called after each of these."""
    kept = []
    number = max((files.number_of(each.path.name) for each in opened), default=0)
    for each in opened:
        if each.end <= bound:
            kept.append(each)
        elif each.begin < bound:
            number += 1
            with segment.Writer(found.directory, number, found.identity) as writer:
                for group in range(len(each.group_rows)):
                    table = segment.read_rows(each, [group])
                    rows = select(table)
                    rows = rows[rows.offset < bound]
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
    return [opened.timers] if opened.first > committed.highest else _count_unfinished(opened, committed)


def _count_unfinished(opened: Segment, committed: Progress) -> Iterator[Tally]:
    """The rows of a segment that are not finished, cancelled ones too, counted by row group. Raises Corrupt,
    DiskFailure."""
    with segment.Reader(opened) as reader:
        for group in range(len(opened.group_rows)):
            table = reader.read(group, ["offset", "at", "target", "schedule"])
            rows = select(table)
            pending = rows[~committed.finished(rows)]
            yield tally(pending.at, labels(table).take(pa.array(pending.row)))


def lies_before(state: Progress, found: Checkpoint, covered: int) -> bool:
    """Whether something below `covered` is not finished under a committed state that was when the checkpoint was
    written."""
    return state.offset < covered or not all(
        state.finishes(min(step.offset, covered), step.position)
        for step in found.progress.steps
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
    if found.log_id != ours.log_id:
        raise WrongIdentity(
            f"{directory} holds the index of another log (id {found.log_id}, now {ours.log_id}): the topic was deleted"
            " and made again, or the directory was moved",
            hint=remedy,
            code="DB-4015",
        )
