"""One answer of those of several instances. Pure: JSON objects in, a JSON object out.

The partitions of the delay topics are dealt out among the instances, so what they count adds up, and their lists of
messages are merged by position, which is in the same order everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from bridge.api import cursor as cursors
from bridge.api.models import ANSWER_BYTES_MAX
from timerstore.rows.sources import NamedPosition

Json = dict[str, Any]
BY_TARGET_MAX: Final = 100


def messages(answers: Sequence[Json], limit: int, name: str = "messages") -> Json:
    """A page: what no instance may have something before that it has not given."""
    ends = [cursors.decode(each["next"]) for each in answers if each["next"] is not None]
    end = min(ends, default=None)
    rows = sorted((row for each in answers for row in each[name]), key=_position)
    whole = [row for row in rows if end is None or _position(row) <= end]
    page = _fitting(whole[:limit])
    if len(page) < len(whole):
        end = _position(page[-1])
    return {name: page, "next": None if end is None else cursors.encode(end)}


def count(answers: Sequence[Json]) -> Json:
    return {"count": _sum(answers, "count"), "exact": all(each["exact"] for each in answers)}


def timeline(answers: Sequence[Json]) -> Json:
    counts = [sum(each) for each in zip(*(answer["counts"] for answer in answers), strict=True)]
    return {"before": _sum(answers, "before"), "counts": counts, "after": _sum(answers, "after")}


def targets(answers: Sequence[Json]) -> Json:
    """Each target as the instance has it that has most trouble with it."""
    found: dict[str, Json] = {}
    for each in (target for answer in answers for target in answer["targets"]):
        other = found.get(each["name"], each)
        worst = each if _trouble(each) > _trouble(other) else other
        pause = each.get("pause") or other.get("pause")
        found[each["name"]] = (
            worst | {"paused": each["paused"] or other["paused"]} | ({"pause": pause} if pause else {})
        )
    return {"targets": sorted(found.values(), key=lambda each: (not each["failing_partitions"], each["name"]))}


def summary(answers: Sequence[Json]) -> Json:
    """Sums, and the worst of what cannot be added; phase, reader and the like are the first one's."""
    first = answers[0]
    nexts = [each["next_at"] for each in answers if each["next_at"] is not None]
    by_target: Counter[str] = Counter()
    failing: Counter[tuple[str, str]] = Counter()
    headroom: dict[str, float] = {}
    for answer in answers:
        by_target.update(answer["by_target"])
        failing.update({(each["name"], each["reason"]): each["partitions"] for each in answer["failing"]})
        for topic, left_s in answer["retention_headroom_s"].items():
            headroom[topic] = min(left_s, headroom.get(topic, left_s))
    paused: dict[str, float] = {}
    for each in (target for answer in answers for target in answer.get("paused", ())):  # 0.1.0 says nothing of them
        paused[each["name"]] = max(each["paused_s"], paused.get(each["name"], 0.0))
    return first | {
        "paused": [
            {"name": name, "paused_s": paused_s} for name, paused_s in sorted(paused.items(), key=lambda each: -each[1])
        ],
        "ready": all(each["ready"] for each in answers),
        "reasons": [reason for each in answers for reason in each["reasons"]],
        "pending": _sum(answers, "pending"),
        "schedules": _sum(answers, "schedules"),
        "overdue": _sum(answers, "overdue"),
        "oldest_overdue_s": max(each["oldest_overdue_s"] for each in answers),
        "next_at": min(nexts, default=None),
        "lateness": _lateness([each["lateness"] for each in answers if each["lateness"] is not None]),
        "by_target": dict(by_target.most_common(BY_TARGET_MAX)),
        "by_time_to_go": [
            {"until": each["until"], "pending": sum(answer["by_time_to_go"][i]["pending"] for answer in answers)}
            for i, each in enumerate(first["by_time_to_go"])
        ],
        "partitions": sorted(
            (each for answer in answers for each in answer["partitions"]),
            key=lambda each: (each["topic"], each["partition"]),
        ),
        "retention_headroom_s": headroom,
        "disk": _disk([each["disk"] for each in answers]),
        "failing": [{"name": n, "reason": r, "partitions": count} for (n, r), count in sorted(failing.items())],
    }


MERGED: Final[Mapping[str, Callable[[Sequence[Json]], Json]]] = {
    "/summary": summary,
    "/count": count,
    "/timeline": timeline,
    "/targets": targets,
}
"""By path."""
LISTS: Final = {"/messages": "messages", "/schedules": "schedules"}
"""Their names in the answer, by path; they need their limit, too."""


def _fitting(rows: Sequence[Json]) -> Sequence[Json]:
    """As `models.fitting`."""
    sizes = accumulate(len(json.dumps(row, ensure_ascii=False).encode()) for row in rows)
    return rows[: max(1, sum(size <= ANSWER_BYTES_MAX for size in sizes))]


def _position(row: Json) -> NamedPosition:
    return row["at"], row["topic"], row["partition"], row["offset"]


def _sum(answers: Sequence[Json], name: str) -> int:
    return sum(each[name] for each in answers)


def _trouble(target: Json) -> tuple[int, int]:
    return target["failing_partitions"], target["partitions"]


def _lateness(found: Sequence[Json]) -> Json | None:
    if not found:
        return None
    worst = max((each["p99_ms"] for each in found if each["p99_ms"] is not None), default=None)
    return {"delivered": _sum(found, "delivered"), "p99_ms": worst, "over_s": max(each["over_s"] for each in found)}


def _disk(disks: Sequence[Json]) -> Json:
    """What is used of all, and how much the fullest has."""
    used = [each["bytes"] for each in disks if each["bytes"] is not None]
    free = [each["free_bytes"] for each in disks if each["free_bytes"] is not None]
    return {
        "bytes": sum(used) if used else None,
        "free_bytes": min(free, default=None),
        "segments": _sum(disks, "segments"),
        "segment_bytes": _sum(disks, "segment_bytes"),
        "full": any(each["full"] for each in disks),
    }
