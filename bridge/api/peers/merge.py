"""Merges the answers of several instances into one. Pure: JSON objects in, a JSON object out.

Each partition of the delay topics belongs to one instance. So the counts of the instances add up, and their lists of
messages merge by position, the order of every list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from bridge.api import cursor as cursors
from bridge.api.models import ANSWER_BYTES_MAX
from bridge.stores.names import NamedPosition

Json = dict[str, Any]
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


def merge_counts(answers: Sequence[Json]) -> Json:
    return {"count": _sum(answers, "count"), "exact": all(answer["exact"] for answer in answers)}


def merge_timelines(answers: Sequence[Json]) -> Json:
    counts = [sum(column) for column in zip(*(answer["counts"] for answer in answers), strict=True)]
    return {"before": _sum(answers, "before"), "counts": counts, "after": _sum(answers, "after")}


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
    first = answers[0]
    nexts = [answer["next_at"] for answer in answers if answer["next_at"] is not None]
    by_target: Counter[str] = Counter()
    failing: Counter[tuple[str, str]] = Counter()
    headroom: dict[str, float] = {}
    for answer in answers:
        by_target.update(answer["by_target"])
        failing.update({(target["name"], target["reason"]): target["partitions"] for target in answer["failing"]})
        for topic, left_s in answer["retention_headroom_s"].items():
            headroom[topic] = min(left_s, headroom.get(topic, left_s))
    paused: dict[str, float] = {}
    for target in (target for answer in answers for target in answer.get("paused", ())):  # absent in version 0.1.0
        paused[target["name"]] = max(target["paused_s"], paused.get(target["name"], 0.0))
    return first | {
        "paused": [
            {"name": name, "paused_s": paused_s} for name, paused_s in sorted(paused.items(), key=lambda item: -item[1])
        ],
        "ready": all(answer["ready"] for answer in answers),
        "reasons": [reason for answer in answers for reason in answer["reasons"]],
        "pending": _sum(answers, "pending"),
        "schedules": _sum(answers, "schedules"),
        "overdue": _sum(answers, "overdue"),
        "oldest_overdue_s": max(answer["oldest_overdue_s"] for answer in answers),
        "next_at": min(nexts, default=None),
        "lateness": _lateness([answer["lateness"] for answer in answers if answer["lateness"] is not None]),
        "by_target": dict(by_target.most_common(BY_TARGET_MAX)),
        "by_time_to_go": [
            {"until": bucket["until"], "pending": sum(answer["by_time_to_go"][i]["pending"] for answer in answers)}
            for i, bucket in enumerate(first["by_time_to_go"])
        ],
        "partitions": sorted(
            (partition for answer in answers for partition in answer["partitions"]),
            key=lambda partition: (partition["topic"], partition["partition"]),
        ),
        "retention_headroom_s": headroom,
        "disk": _disk([answer["disk"] for answer in answers]),
        "failing": [{"name": n, "reason": r, "partitions": count} for (n, r), count in sorted(failing.items())],
    }


MERGED: Final[Mapping[str, Callable[[Sequence[Json]], Json]]] = {
    "/summary": merge_summaries,
    "/count": merge_counts,
    "/timeline": merge_timelines,
    "/targets": merge_targets,
}
"""The merging function by path."""
LISTS: Final = {"/messages": "messages", "/schedules": "schedules"}
"""The name of the list in the answer, by path. `messages` merges them, with the limit of the request."""


def _fitting(rows: Sequence[Json]) -> Sequence[Json]:
    """The same as `models.fitting`, for JSON objects."""
    sizes = accumulate(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows)
    return rows[: max(1, sum(size <= ANSWER_BYTES_MAX for size in sizes))]


def _position(row: Json) -> NamedPosition:
    return row["at"], row["topic"], row["partition"], row["offset"]


def _sum(answers: Sequence[Json], name: str) -> int:
    return sum(answer[name] for answer in answers)


def _trouble(target: Json) -> tuple[int, int]:
    return target["failing_partitions"], target["partitions"]


def _lateness(parts: Sequence[Json]) -> Json | None:
    if not parts:
        return None
    worst = max((part["p99_ms"] for part in parts if part["p99_ms"] is not None), default=None)
    return {"delivered": _sum(parts, "delivered"), "p99_ms": worst, "over_s": max(part["over_s"] for part in parts)}


def _disk(disks: Sequence[Json]) -> Json:
    """The sum of the sizes, and the free bytes of the fullest disk."""
    used = [disk["bytes"] for disk in disks if disk["bytes"] is not None]
    free = [disk["free_bytes"] for disk in disks if disk["free_bytes"] is not None]
    return {
        "bytes": sum(used) if used else None,
        "free_bytes": min(free, default=None),
        "segments": _sum(disks, "segments"),
        "segment_bytes": _sum(disks, "segment_bytes"),
        "full": any(disk["full"] for disk in disks),
    }
