"""Recovery: from a directory to the index that it still holds.

checkpoint missing          an empty index; the log is read from its start
checkpoint damaged          set aside, then as if missing
a segment damaged,          set aside; the index no longer covers the log, the other files are kept
or a file of tombstones
an id or origin index       made again from its segment
damaged
another cluster or log      refused: WrongIdentity
a file cannot be read       DiskFailure: an errno is no evidence of damage
files without a name in     removed (left by a crash between rename and checkpoint)
the checkpoint

The index *covers* the log if the checkpoint has an O_c. If not, the log is read from its start, and segments count
below that only: they alone have rows whose records were deleted from the log. Other rows would be there twice, so the
start rewrites the segments that have such rows without them. The index no longer covers the log if

    a file is damaged                       the content of the file is unknown
    O_c is below the log's start            records between them went to another instance, or were lost with this one's
                                            memory; the index cannot tell whether rows are missing
    the committed state was moved back      rows that the index left out as finished are pending again
    the log was cut                         rows of the index above the cut are in no log; the committed state has the
                                            number and the offset of each cut, the checkpoint the last number that it
                                            knows

Steps, each with the cost of a crash right after it:

    1. The damaged file is renamed. The checkpoint then names a missing file, which is damage, too.
    2. The checkpoint is written without the file and without O_c. No cost: the next start goes on from there.
    3. Segments are rewritten. The checkpoint does not name the new files; the next start sets them aside.
    4. The checkpoint names the new segments in place of the old ones. No cost.
    5. The old ones are set aside. No cost.

While the index does not cover the log, files without a name in the checkpoint are set aside, too, not removed: until
ingest has caught up, the log may lose their records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
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
from timerstore.memory.memory import Memory
from timerstore.memory.pending import Tally, labels, tally
from timerstore.memory.sorted_runs import select
from timerstore.operations.by_origin import covered_in
from timerstore.operations.state import StoreState
from timerstore.rows.cuts import Cuts, unseen_cut
from timerstore.rows.entry import payload_of
from timerstore.rows.position import ORIGIN, Position, Progress

CUT: Final = "the log was cut below the end of the index: it is rebuilt from Kafka"
MOVED_BACK: Final = "the committed state lies before the index: it is rebuilt from Kafka"
OUTDATED: Final = "the index ends before the log's start: it is rebuilt from Kafka, without the lost records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory and its checkpoint, or None without one; `reports` are sentences for the operator."""

    directory: Path
    identity: Identity
    checkpoint: Checkpoint | None = None
    reports: tuple[str, ...] = ()


def find(directory: Path, identity: Identity, now_ms: int) -> Found:
    """Read a directory's checkpoint; a damaged one is set aside. The caller has exclusive use of the directory. Raises
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


def may_hold_rows_below(found: Found, position: Position, bound: int) -> bool:
    """Whether segments may have rows below an offset, above a position. It may be wrongly true. A damaged footer counts
    as none: no start can read its rows."""
    for named in () if found.checkpoint is None or not bound else found.checkpoint.segments:
        try:
            begin, last = segment.read_span(found.directory / named.name)
        except Corrupt:
            continue
        except DiskFailure:
            return True
        if begin < bound and last > position:
            return True
    return False


def give_up(found: Found, now_ms: int) -> Found:
    """Forget the index, whose rows an operator has given up. The checkpoint is set aside. Raises DiskFailure."""
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
    memory: Memory | None = None,
    log: int = 0,
) -> StoreState:
    """The state of the store in a directory; the arguments are those of `TimerStore.open`. Raises DiskFull,
    DiskFailure."""
    # The order matters: the checkpoint may have a cut's number only without the cancels and rows from above the cut.
    unseen = unseen_in(found, cuts)
    if unseen is not None:
        found = without_cancels(found, log_start, unseen)
    number = cuts[-1][0] if cuts else 0
    found = _distrust(found, committed, log_start, cuts, number)
    while True:
        try:
            state = _restore(found, committed, log_start, now_ms, limits, progress, on_news, memory, log)
        except Corrupt as error:
            found = _without(found, error, now_ms)
        else:
            state.cut = number
            state.join()
            return state


def unseen_in(found: Found, cuts: Cuts) -> int | None:
    """The offset from which the index may have records that the log has no longer; None: none was cut since."""
    return None if found.checkpoint is None else unseen_cut(cuts, found.checkpoint.cut)


def coverage(
    found: Found, committed: Progress, log_start: int, cuts: Cuts
) -> tuple[tuple[int | None, int | None], str | None]:
    """The checkpoint's `offset` and `kept` as far as the index can be trusted (see the module), and the reason for a
    change."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return (None, None), None
    offset, kept = checkpoint.offset, checkpoint.kept
    index_end = offset if offset is not None else kept or 0
    unseen = unseen_in(found, cuts)
    if unseen is not None:
        bound = min(index_end, unseen, log_start)
        report = None if offset is None and kept is None else CUT
        return (None, 0 if lies_before(committed, checkpoint, bound) else bound), report
    if lies_before(committed, checkpoint, offset or 0):
        # An operator has reset the group's offsets, which also clears P.
        return (None, kept), MOVED_BACK
    if offset is not None and offset < log_start:
        return (None, index_end), OUTDATED
    return (offset, kept), None


def _distrust(found: Found, committed: Progress, log_start: int, cuts: Cuts, number: int) -> Found:
    """Remove O_c from the checkpoint if the index cannot cover the log. `number` is the last cut's."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return found
    (offset, kept), report = coverage(found, committed, log_start, cuts)
    if (offset, kept) == (checkpoint.offset, checkpoint.kept) and number == checkpoint.cut:
        return found
    checkpoint = replace(checkpoint, offset=offset, cut=number, kept=kept)
    checkpoints.write(found.directory, checkpoint, frees=True)
    return replace(found, checkpoint=checkpoint, reports=(*found.reports, *([] if report is None else [report])))


def without_cancels(found: Found, log_start: int, cut: int) -> Found:
    """Keep cancels from above a cut from acting on the new records there: their tombstones are lowered to the cut, or
    to the log's start if that is lower. Cancels below the cut are read again, from the log's start on. The start treats
    damaged files later. Raises DiskFull, DiskFailure."""
    checkpoint = found.checkpoint
    if checkpoint is None or not checkpoint.tombstones:
        return found
    number = max(files.number_of(file.name) for file in checkpoint.tombstones)
    kept: list[NamedFile] = []
    for named in checkpoint.tombstones:
        with suppress(Corrupt):
            file = tombstones.read(found.directory / named.name, named)
            if file.highest.any >= cut:
                number += 1
                merge = tombstones.TombstoneMerge.cut(file, cut, min(cut, log_start))
                anew = tombstones.write(found.directory / files.tombstones_name(number), merge)
                kept += [] if anew is None else [anew.named]
                continue
        kept.append(named)
    checkpoint = replace(checkpoint, tombstones=tuple(kept))
    checkpoints.write(found.directory, checkpoint, frees=True)
    return replace(found, checkpoint=checkpoint)


def _without(found: Found, error: Corrupt, now_ms: int) -> Found:
    """The directory without a damaged file that the checkpoint names: steps 1 and 2. Raises DiskFull, DiskFailure."""
    checkpoint, damaged = checkpoints.read(found.directory), Path(error.path)
    names = {each.name for each in (*checkpoint.segments, *checkpoint.tombstones)} if checkpoint else set()
    if checkpoint is None or damaged.name not in names:
        raise DiskFailure(
            f"{damaged} is damaged right after it was written: {error.message}",
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
    """Rename a damaged file, if it exists, so that the next start goes on without it. Returns a report. Raises
    DiskFailure."""
    if Path(error.path).exists():
        files.set_aside(Path(error.path), now_ms)
    return f"{error.message}: set aside, the index is rebuilt from Kafka and from the other files"


def _restore(
    found: Found,
    committed: Progress,
    log_start: int,
    now_ms: int,
    limits: Limits,
    progress: Callable[[int, int], None],
    on_news: Callable[[], None],
    memory: Memory | None,
    log: int,
) -> StoreState:
    """Open the files that the checkpoint names; steps 3 to 5. `progress(done, total)` is called after each segment that
    is opened, rewritten or counted. Raises Corrupt, DiskFull, DiskFailure."""
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
        checkpoint = replace(checkpoint, segments=tuple(file.named for file in kept))
        checkpoints.write(found.directory, checkpoint, frees=True)
    in_use = {s.named.name for s in kept} | {t.named.name for t in cancels}
    removed, aside = _clear(found.directory, in_use, covered is None, now_ms)
    state = StoreState(found.directory, found.identity, committed, limits, now_ms, on_news, memory, log)
    state.aside = aside
    state.reports = found.reports
    if removed and found.checkpoint is not None:
        state.reports += (f"removed {removed} files that a crash had left unfinished",)
    state.checkpoint = checkpoint
    # A log that the index does not cover is read again from its start. Segments have the rows below.
    state.resident.stored = log_start if covered is None else covered
    state.cancels.tombstones.restore(cancels)
    state.next_tombstones += max((files.number_of(file.named.name) for file in cancels), default=0)
    state.next_segment += max((files.number_of(file.named.name) for file in kept), default=0)
    for file in kept:
        state.timerlog.add(file)
        for part in segment.read_counts(file):
            state.pending.add(part)
        for part in chain(_finished_in(file, state.resident.committed), covered_in(state, file)):
            state.pending.remove_counted(part)
        progress(len(kept), len(kept))
    return state


def _kept(opened: list[Segment], found: Found, bound: int, written: Callable[[], None]) -> list[Segment]:
    """The segments without rows at or above `bound`, which do not count. Segments that have such rows are rewritten
    without them; `written` is called after each. Raises Corrupt, DiskFull, DiskFailure."""
    kept = []
    number = max((files.number_of(old.path.name) for old in opened), default=0)
    for old in opened:
        if old.end <= bound:
            kept.append(old)
        elif old.begin < bound:
            number += 1
            with segment.SegmentWriter(found.directory, number, found.identity) as writer:
                for group in range(len(old.group_rows)):
                    table = segment.read_rows(old, [group])
                    rows = select(table)
                    rows = rows[rows.offset < bound]
                    if len(rows):
                        writer.add(rows, payload_of(table).take(pa.array(rows.row)))
                anew = writer.close()
            kept += [] if anew is None else [anew]
            written()
    return kept


def _clear(directory: Path, named: set[str], is_rebuilt: bool, now_ms: int) -> tuple[int, tuple[Path, ...]]:
    """Remove the files that are not in `named`, or set them aside. Returns the number of removed files, and the files
    that are aside. Raises DiskFailure."""
    removed = 0
    for path in files.unreferenced(directory, named):
        if is_rebuilt and path.suffix in (files.SEGMENT_SUFFIX, files.TOMBSTONES_SUFFIX):
            files.set_aside(path, now_ms, files.ASIDE_SUFFIX)
        else:
            files.remove(path)
            removed += path.suffix not in files.INDEX_SUFFIXES
    return removed, tuple(sorted(directory.glob(f"*{files.ASIDE_SUFFIX}")))


def _finished_in(opened: Segment, committed: Progress) -> Iterator[Tally]:
    """Counts of a segment's finished rows, with cancelled ones. It reads the row groups that may have any: their number
    does not depend on the pending rows. Raises Corrupt, DiskFailure."""
    groups = np.flatnonzero(opened.fences.at_or_below(committed.highest)).tolist()
    if not groups:
        return
    with segment.SegmentReader(opened) as reader:
        for group in groups:
            table = reader.read(group, ["offset", "at", "target", "schedule"])
            rows = select(table)
            finished = rows[committed.finished(rows)]
            yield tally(finished.at, labels(table).take(pa.array(finished.row)))


def lies_before(state: Progress, found: Checkpoint, covered: int) -> bool:
    """Whether a row below `covered` that was finished when the checkpoint was written is not finished in `state`."""
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
            " and created anew, or the directory was moved",
            hint=remedy,
            code="DB-4015",
        )
