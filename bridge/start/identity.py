"""Is this still the log that the bridge has read? What a start insists on, asked again and again while it runs.

    topic now      log start    log end      partition
    missing        -            -            MISSING    held until the same topic is there again
    another id     -            -            REPLACED   held: it is another log, whatever its offsets
    the same       > expected   -            DELETED    held: records are gone that were not read
    the same       -            < read       TRUNCATED  held, mended: a leader with less of the log has cut it
    the same       <= expected  >= read      none; TRUNCATED where later leaders have written to what was read

`expected` is the next offset to be read, and `read` that, or the committed O where that is not reached yet. They are
sampled before the log's marks, which are asked before the topic's id: so a topic that still has its id had it when the
marks were taken. Pure.

A partition that is held is nobody's for as long: it is neither read, delivered nor committed, and the others go on. One
that was truncated is mended (identity_watch.py): its committed offset goes back to where the log was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bridge.errors import StateError
from bridge.kafka.admin import Watermarks
from bridge.kafka.errors import records_gone
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


EXPLAINED: Final[Mapping[Doubt, str]] = {
    Doubt.MISSING: "the topic is not there any more",
    Doubt.REPLACED: "the topic was deleted and created again",
    Doubt.DELETED: "records were deleted before they were read",
    Doubt.TRUNCATED: "the brokers have lost acknowledged records",
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


def suspects(before: Mapping[SourceName, Looked], now: Mapping[SourceName, Looked]) -> dict[SourceName, Looked]:
    """Partitions that have had an election since the look before, with what was known then: a new leader may have cut
    the log, and written more since."""
    found = {}
    for name, each in now.items():
        old = before.get(name)
        if old is None or old.marks is None or each.marks is None or old.marks.epoch < 0:
            continue
        if each.marks.epoch != old.marks.epoch:
            found[name] = old
    return found


def refusal(name: SourceName, doubt: Doubt) -> StateError | None:
    """What ends a process that owns nothing but partitions in doubt; None where the doubt passes."""
    topic, partition = name
    if doubt is Doubt.REPLACED:
        return another_topic(topic=topic, partition=partition)
    return records_gone(topic=topic, partition=partition) if doubt is Doubt.DELETED else None
