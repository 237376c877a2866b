"""The identity of the logs: the conditions of a start, checked repeatedly while the bridge runs. Pure.

    topic now      log start    log end      partition
    missing        -            -            MISSING    held until the same topic exists again
    another id     -            -            REPLACED   held: it is another log, with any offsets
    the same       > expected   -            DELETED    held: unread records are gone
    the same       -            < read       TRUNCATED  held, mended: a leader with a shorter log has cut it
    the same       <= expected  >= read      none; TRUNCATED if later leaders have written to the read part
    answer of a former leader                as without an answer

`expected` is the next offset to be read; `read` is the same, or the committed O if that is higher. Both are sampled
before the log's marks, and these before the topic's id: a topic that still has its id also had it at its marks.

A held partition is neither read, delivered nor committed; the others go on. A truncated partition is mended
(identity_watch.py): its committed offset goes back to the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bridge.errors import StateError
from bridge.kafka.admin import Watermarks
from bridge.kafka.errors import records_gone
from bridge.kafka.leader_epochs import ReadStretch
from bridge.start.first_commits import another_topic
from bridge.stores.names import SourceName


class PartitionDoubt(StrEnum):
    """The reason for a hold of a partition."""

    MISSING = "missing"
    REPLACED = "replaced"
    DELETED = "records-deleted"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    """A start would refuse the partition, which came to this instance while others ran."""
    UNANSWERED = "no-answer"
    """The brokers do not answer: the partition has no leader, or it came to this instance while others ran. The next
    look that finds a leader tries again."""


PASSES: Final = frozenset({PartitionDoubt.MISSING, PartitionDoubt.UNANSWERED})


EXPLAINED: Final[Mapping[PartitionDoubt, str]] = {
    PartitionDoubt.MISSING: "the topic no longer exists",
    PartitionDoubt.REPLACED: "the topic was deleted and created again",
    PartitionDoubt.DELETED: "records were deleted before they were read",
    PartitionDoubt.TRUNCATED: "the brokers have lost acknowledged records",
    PartitionDoubt.UNANSWERED: "the brokers do not answer about it, or it has no leader",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One partition at one look: the next offset to be read, sampled before, and the marks of the log (None: no
    answer). Records below `committed` were read earlier, perhaps by another process."""

    expected: int
    marks: Watermarks | None
    committed: int = 0

    @property
    def read(self) -> int:
        return max(self.expected, self.committed)


def findings(
    known_ids: Mapping[str, str], ids_now: Mapping[str, str], looked: Mapping[SourceName, Looked]
) -> dict[SourceName, PartitionDoubt]:
    """The doubts about partitions, by the table. `known_ids` are the ids of the topics that were read; `ids_now` are
    those of the existing topics, sampled after the marks in `looked`."""
    doubts = {name: _doubt(known_ids.get(name[0]), ids_now.get(name[0]), at) for name, at in looked.items()}
    return {name: doubt for name, doubt in doubts.items() if doubt is not None}


def _doubt(known_id: str | None, id_now: str | None, looked: Looked) -> PartitionDoubt | None:
    if id_now is None:
        return PartitionDoubt.MISSING
    if known_id not in (None, id_now):
        return PartitionDoubt.REPLACED
    if looked.marks is None:
        return None
    if looked.marks.start > looked.expected:
        return PartitionDoubt.DELETED
    return PartitionDoubt.TRUNCATED if looked.marks.end < looked.read else None


def believed(now: Looked, before: Looked | None) -> Looked:
    """`now` without the marks of a former leader: one with a lower epoch than before, or with a log that lacks read
    records. Under one leader the end of a log never decreases."""
    old, marks = None if before is None else before.marks, now.marks
    if old is None or marks is None or marks.epoch < 0:
        return now
    is_former = marks.epoch < old.epoch or (marks.epoch == old.epoch and marks.end < now.read)
    return replace(now, marks=None) if is_former else now


def stretches(
    before: Mapping[SourceName, Looked], now: Mapping[SourceName, Looked], shorter: Collection[SourceName]
) -> dict[SourceName, ReadStretch]:
    """The stretches to search for records of later leaders: all records that were read before the last look, of
    partitions with an election since then; and the remaining part of logs that became `shorter`."""
    wanted = {}
    for name, at in now.items():
        old, marks = before.get(name), at.marks
        if marks is None:
            continue
        # The lost records of a shorter log were written under an earlier leader than the present one.
        epoch, end, is_elected = marks.epoch - 1, at.read, False
        if old is not None and old.marks is not None:
            epoch, end, is_elected = old.marks.epoch, old.read, old.marks.epoch != marks.epoch
        if epoch >= 0 and (is_elected or name in shorter):
            wanted[name] = ReadStretch(epoch=epoch, start=marks.start, end=min(end, marks.end))
    return wanted


def lasting_error(name: SourceName, doubt: PartitionDoubt) -> StateError | None:
    """The error that ends a process with only doubtful partitions; None for a doubt that passes."""
    topic, partition = name
    if doubt is PartitionDoubt.REPLACED:
        return another_topic(topic=topic, partition=partition)
    return records_gone(topic=topic, partition=partition) if doubt is PartitionDoubt.DELETED else None
