"""Is this still the log that the bridge has read? What a start insists on, asked again and again while it runs.

    topic now      log start    log end      partition
    missing        -            -            MISSING    held until the same topic is there again
    another id     -            -            REPLACED   held: it is another log, whatever its offsets
    the same       > expected   -            DELETED    held: records are gone that were not read
    the same       -            < read       TRUNCATED  held, mended: a leader with less of the log has cut it
    the same       <= expected  >= read      none; TRUNCATED where later leaders have written to what was read
    told by a former leader                  as without an answer

`expected` is the next offset to be read, and `read` that, or the committed O where that is not reached yet. They are
sampled before the log's marks, which are asked before the topic's id: so a topic that still has its id had it when the
marks were taken. Pure.

A partition that is held is nobody's for as long: it is neither read, delivered nor committed, and the others go on. One
that was truncated is mended (identity_watch.py): its committed offset goes back to where the log was cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bridge.errors import StateError
from bridge.kafka.admin import Watermarks
from bridge.kafka.errors import records_gone
from bridge.kafka.leader_epochs import Stretch
from bridge.start.first_commits import another_topic
from timerstore.rows.sources import SourceName


class Doubt(StrEnum):
    """Why a partition is held."""

    MISSING = "missing"
    REPLACED = "replaced"
    DELETED = "records-deleted"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    """A start would not go on with it; it came to this instance while others ran."""
    UNANSWERED = "no-answer"
    """It came to this instance while others ran, and the brokers do not say how a start would go on: it is tried again
    with the next look."""


PASSES: Final = frozenset({Doubt.MISSING, Doubt.UNANSWERED})


EXPLAINED: Final[Mapping[Doubt, str]] = {
    Doubt.MISSING: "the topic is not there any more",
    Doubt.REPLACED: "the topic was deleted and created again",
    Doubt.DELETED: "records were deleted before they were read",
    Doubt.TRUNCATED: "the brokers have lost acknowledged records",
    Doubt.UNANSWERED: "the brokers do not answer about it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One partition at one look: the next offset to be read, as of before it, and where the log begins and ends (None:
    no answer). What lies below `committed` was read earlier, perhaps by another process."""

    expected: int
    marks: Watermarks | None
    committed: int = 0

    @property
    def read(self) -> int:
        return max(self.expected, self.committed)


def findings(
    known_ids: Mapping[str, str], ids_now: Mapping[str, str], looked: Mapping[SourceName, Looked]
) -> dict[SourceName, Doubt]:
    """The doubts about partitions, as in the table; `known_ids` are topics' ids as they were read, `ids_now` those of
    the topics that exist, asked after the marks in `looked`."""
    found = {}
    for name, each in looked.items():
        doubt = _doubt(known_ids.get(name[0]), ids_now.get(name[0]), each)
        if doubt is not None:
            found[name] = doubt
    return found


def _doubt(known_id: str | None, id_now: str | None, looked: Looked) -> Doubt | None:
    if id_now is None:
        return Doubt.MISSING
    if known_id not in (None, id_now):
        return Doubt.REPLACED
    if looked.marks is None:
        return None
    if looked.marks.start > looked.expected:
        return Doubt.DELETED
    return Doubt.TRUNCATED if looked.marks.end < looked.read else None


def believed(now: Looked, before: Looked | None) -> Looked:
    """Without the marks of a former leader: a later one was known before, or its log does not have the records that
    were read. Under one leader no log ever ends earlier."""
    old, marks = None if before is None else before.marks, now.marks
    if old is None or marks is None or marks.epoch < 0:
        return now
    is_former = marks.epoch < old.epoch or (marks.epoch == old.epoch and marks.end < now.read)
    return replace(now, marks=None) if is_former else now


def stretches(
    before: Mapping[SourceName, Looked], now: Mapping[SourceName, Looked], shorter: Collection[SourceName]
) -> dict[SourceName, Stretch]:
    """The stretches to be searched for records of later leaders: all records read by the look before, of partitions
    that have had an election since then; and the rest of logs that have become `shorter`."""
    found = {}
    for name, each in now.items():
        old, marks = before.get(name), each.marks
        if marks is None:
            continue
        # The lost records of a shorter log were written under an earlier leader than its own.
        epoch, end, is_elected = marks.epoch - 1, each.read, False
        if old is not None and old.marks is not None:
            epoch, end, is_elected = old.marks.epoch, old.read, old.marks.epoch != marks.epoch
        if epoch >= 0 and (is_elected or name in shorter):
            found[name] = Stretch(epoch=epoch, start=marks.start, end=min(end, marks.end))
    return found


def refusal(name: SourceName, doubt: Doubt) -> StateError | None:
    """What ends a process that owns nothing but partitions in doubt; None where the doubt passes."""
    topic, partition = name
    if doubt is Doubt.REPLACED:
        return another_topic(topic=topic, partition=partition)
    return records_gone(topic=topic, partition=partition) if doubt is Doubt.DELETED else None
