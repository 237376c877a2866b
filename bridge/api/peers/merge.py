"""Merges the answers of several instances into one. Pure: JSON objects in, a JSON object out.

Each partition of the delay topics belongs to one instance. So the counts of the instances add up, and their lists of
messages merge by position, the order of every list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final, TypeVar

from bridge.api import cursor as cursors
from bridge.api.models import ANSWER_BYTES_MAX
from bridge.stores.names import NamedPosition

Json = dict[str, Any]
Rule = Callable[[list[Any]], Any]
"""Merges the values of a field."""
K = TypeVar("K")
BY_TARGET_MAX: Final = 100


def merge_messages(answers: Sequence[Json], limit: int, name: str = "messages") -> Json:
    """A page: the rows up to the earliest end of the instances' pages. Later ones may lack rows in between."""
    ends = [cursors.decode_position(answer["next"]) for answer in answers if answer["next"] is not None]
    end = min(ends, default=None)
    rows = sorted((row for answer in answers for row in answer[name]), key=_position)
    whole = [row for row in rows if end is None or _position(row) <= end]
    page = _fitting(whole[:limit])
    if len(page) < len(whole):
        end = _position(page[-1])
    return {name: page, "next": None if end is None else cursors.encode_position(end)}


def merge_targets(answers: Sequence[Json]) -> Json:
    """Each target in the worst state that an instance reports of it."""
    merged: dict[str, Json] = {}
    for target in (target for answer in answers for target in answer["targets"]):
        other = merged.get(target["name"], target)
        worst = target if _trouble(target) > _trouble(other) else other
        pause = target.get("pause") or other.get("pause")
        merged[target["name"]] = (
            worst | {"paused": target["paused"] or other["paused"]} | ({"pause": pause} if pause else {})
        )
    return {"targets": sorted(merged.values(), key=lambda target: (not target["failing_partitions"], target["name"]))}


def merge_summaries(answers: Sequence[Json]) -> Json:
    """Sums of counts, and the worst of other values. Phase, reader and the like are those of the first answer."""
    paused = [answer.get("paused", ()) for answer in answers]  # absent in version 0.1.0
    return answers[0] | _SUMMARY(answers) | {"paused": _paused(paused)}


LISTS: Final = {"/messages": "messages", "/schedules": "schedules"}
"""The name of the list in the answer, by path. `messages` merges them, with the limit of the request."""


def _fitting(rows: Sequence[Json]) -> Sequence[Json]:
    """The same as `models.fitting_answer`, for JSON objects."""
    sizes = accumulate(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows)
    return rows[: max(1, sum(size <= ANSWER_BYTES_MAX for size in sizes))]


def _position(row: Json) -> NamedPosition:
    return row["at"], row["topic"], row["partition"], row["offset"]


def _trouble(target: Json) -> tuple[int, int]:
    return target["failing_partitions"], target["partitions"]


def _by(rules: Mapping[str, Rule]) -> Callable[[Sequence[Json]], Json]:
    """Merges each of these fields of objects by its rule."""
    return lambda objects: {name: rule([each[name] for each in objects]) for name, rule in rules.items()}


def _each(rule: Rule, maps: Iterable[Mapping[K, Any]]) -> dict[K, Any]:
    """One value for each key of the maps."""
    values: dict[K, list[Any]] = {}
    for key, value in (pair for each in maps for pair in each.items()):
        values.setdefault(key, []).append(value)
    return {key: rule(several) for key, several in values.items()}


def _known(rule: Rule) -> Rule:
    """The rule for the values that are known; None without any."""

    def merge(values: list[Any]) -> Any:
        known = [value for value in values if value is not None]
        return rule(known) if known else None

    return merge


def _failing(lists: list[Any]) -> list[Json]:
    counts = _each(sum, ({(each["name"], each["reason"]): each["partitions"] for each in failing} for failing in lists))
    return [{"name": name, "reason": why, "partitions": count} for (name, why), count in sorted(counts.items())]


def _paused(lists: list[Any]) -> list[Json]:
    longest = _each(max, ({target["name"]: target["paused_s"] for target in paused} for paused in lists))
    return [{"name": name, "paused_s": s} for name, s in sorted(longest.items(), key=lambda item: -item[1])]


def _buckets(lists: list[Any]) -> list[Json]:
    same = zip(*lists, strict=True)
    return [{"until": parts[0]["until"], "pending": sum(part["pending"] for part in parts)} for parts in same]


_SUMMARY: Final = _by(
    {
        "ready": all,
        "reasons": lambda lists: [*chain(*lists)],
        **dict.fromkeys(("pending", "schedules", "overdue"), sum),
        "oldest_overdue_s": max,
        "next_at": _known(min),
        "lateness": _known(_by({"delivered": sum, "p99_ms": _known(max), "over_s": max})),
        "by_target": lambda maps: dict(Counter(_each(sum, maps)).most_common(BY_TARGET_MAX)),
        "by_time_to_go": _buckets,
        "partitions": lambda lists: sorted(chain(*lists), key=lambda each: (each["topic"], each["partition"])),
        "retention_headroom_s": lambda maps: _each(min, maps),
        # The sum of the sizes, and the free bytes of the fullest disk.
        "disk": _by(
            {"bytes": _known(sum), "free_bytes": _known(min)}
            | dict.fromkeys(("segments", "segment_bytes"), sum)
            | {"full": any}
        ),
        "failing": _failing,
    }
)
MERGED: Final[Mapping[str, Callable[[Sequence[Json]], Json]]] = {
    "/summary": merge_summaries,
    "/count": _by({"count": sum, "exact": all}),
    "/timeline": _by({"before": sum, "counts": lambda lists: [*map(sum, zip(*lists, strict=True))], "after": sum}),
    "/targets": merge_targets,
}
"""The merging function by path."""
