"""bridge.runtime.answers: what the API is told of a real store."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from bridge.api.application import application
from bridge.api.peers.batches import read_export
from bridge.http.protection import Protection
from bridge.runtime.answers import Answers
from bridge.runtime.gauges import Lag, snapshot
from bridge.settings.model import Settings
from bridge.stores.search import Query
from bridge.telemetry.health import Health, Phase
from bridge.telemetry.lateness import LatenessHistogram
from tests.manual_clock import ManualClock
from tests.unit.bridge.api.fakes import Paused
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS, Rig
from tests.unit.timerstore.entries import Record


def answers(rig: Rig, health: Health, clock: ManualClock) -> Answers:
    """Of a pipeline that has the rig's store."""
    lag = Lag(clock)
    return Answers(
        pipeline=lambda: cast(Any, SimpleNamespace(store=rig.stores)),
        targets=lambda: None,
        gauges=lambda: snapshot(rig.stores, Settings.of({}), clock.now_ms(), lag, None),
        lateness=LatenessHistogram(),
        health=health,
        lag=lag,
        clock=clock,
        letters=cast(Any, None),
        pauses=Paused(),
        commands=lambda: None,
        log_ends=lambda names: dict.fromkeys(names, 7),
    )


def test_what_is_overdue_and_what_comes_next(tmp_path: Path) -> None:
    """Overdue is counted in whole slots of ten seconds, so that nothing is counted before its time."""
    rig, clock, health = Rig(tmp_path), ManualClock(NOW_MS), Health()
    rig.load()
    rig.produce(ORDERS, NOW_MS + 20_000, NOW_MS + 20_001, NOW_MS + 500_000)
    rig.ingest()
    health.enter(Phase("running", ready=True))
    seen = answers(rig, health, clock).overview()
    assert seen is not None
    assert (seen.gauges.pending_total, seen.overdue, seen.next_at_ms) == (3, 0, NOW_MS + 20_000)
    clock.advance(40_000)
    seen = answers(rig, health, clock).overview()
    assert seen is not None and (seen.overdue, seen.next_at_ms) == (2, NOW_MS + 20_000)


def test_an_index_that_is_not_complete_tells_nothing(tmp_path: Path) -> None:
    """Before O is reached, less would be told than is pending."""
    rig, clock, health = Rig(tmp_path), ManualClock(), Health()
    rig.produce(ORDERS, NOW_MS + 20_000)
    rig.ingest()
    for phase, is_told in (("recovering", False), ("catching-up", False), ("connecting", True), ("stopping", False)):
        health.enter(Phase(phase))
        source = answers(rig, health, clock)
        assert (source.overview() is not None) is (source.pending() is not None) is is_told
    health.enter(Phase("running"))
    store = answers(rig, health, clock).pending()
    assert store is not None and store.count_where(Query(), NOW_MS).rows == 1
    assert answers(rig, health, clock).targets() == []


@pytest.mark.fault("a question during the read of a new partition")
def test_answers_name_the_partitions_that_are_not_read_yet(tmp_path: Path) -> None:
    """While the instance reads a new partition up to its committed offset, a pending message of it is not called
    finished, and each answer without its messages names it."""
    rig, clock, health = Rig(tmp_path), ManualClock(NOW_MS), Health()
    rig.produce(ORDERS, NOW_MS + 100_000, NOW_MS)
    rig.ingest()
    rig.deliver()
    rig.reopen()
    health.enter(Phase("running", ready=True))
    api = TestClient(application(answers(rig, health, clock), Protection(), show_payloads=True, is_writable=True))

    def asked() -> list[object]:
        paths = ("summary", "messages", "schedules", "count", f"timeline?edge={NOW_MS}")
        told = [api.get(f"/api/v1/{path}").json().get("incomplete") for path in paths]
        dry_run = api.post(
            "/api/v1/messages/cancel", json={"all": True, "dry_run": True}, headers={"X-Delay-Bridge-Action": "1"}
        )
        exported: list[list[str]] = []

        def export() -> Iterator[pa.RecordBatch]:
            exported.append((yield from read_export(io.BytesIO(api.get("/api/v1/export").content))))

        deque(export(), maxlen=0)
        return [*told, dry_run.json().get("incomplete"), exported[0] or None]

    assert asked() == [["delay/0"]] * 7
    one = api.get("/api/v1/messages/delay/0/0")
    assert one.status_code == 503 and "still reads" in one.json()["detail"] and one.headers["retry-after"]
    assert api.get("/api/v1/messages/delay/1/0").status_code == 404
    rig.ingest()
    assert asked() == [None] * 7
    assert api.get("/api/v1/messages/delay/0/0").status_code == 200


@pytest.mark.parametrize("is_stored", [False, True], ids=["in memory", "in a segment"])
def test_messages_are_found_through_the_api_until_they_are_delivered(tmp_path: Path, is_stored: bool) -> None:
    """By id, origin, key, target and time, a page at a time; one with its headers and value; then none."""
    rig, clock, health = Rig(tmp_path), ManualClock(NOW_MS), Health()
    rig.load()
    for n in range(25):
        target = "bills" if n % 5 == 0 else "orders"
        rig.logs[ORDERS].append(Record(*ORDERS, n, NOW_MS + 100_000 + n, target, b"value", f"id-{n}"))
    rig.ingest()
    rig.deliver()
    if is_stored:
        rig.stores.flush(NOW_MS)
    health.enter(Phase("running", ready=True))
    api = TestClient(application(answers(rig, health, clock), Protection(), show_payloads=True))

    def found(**parameters: object) -> list[int]:
        answer = api.get("/api/v1/messages", params=cast(Any, parameters))
        assert answer.status_code == 200, answer.text
        counted = api.get("/api/v1/count", params=cast(Any, parameters)).json()
        offsets = [each["offset"] for each in answer.json()["messages"]]
        assert counted == {"count": len(offsets), "exact": True}
        return offsets

    assert found(id="id-7") == found(origin="delay/0/7") == found(key="0-7") == [7]
    assert found(target="bills") == [0, 5, 10, 15, 20]
    assert found(due_from=NOW_MS + 100_003, due_until=NOW_MS + 100_006) == [3, 4, 5]
    assert found(at_from=NOW_MS + 100_003, at_until=NOW_MS + 100_006, target="orders") == [3, 4]
    edges = [NOW_MS - NOW_MS % 10_000 + ms for ms in (0, 100_000, 110_000)]
    timeline = api.get("/api/v1/timeline", params={"edge": edges}).json()
    assert timeline["before"] == timeline["after"] == 0 and sum(timeline["counts"]) == 25
    assert [len(found(at_from=a, at_until=b)) for a, b in pairwise(edges)] == timeline["counts"]
    assert found(state="waiting") == list(range(25)) and found(state="retrying") == []
    pages: list[dict[str, Any]] = []
    cursor = None
    while not pages or cursor is not None:
        page = api.get("/api/v1/messages", params={"limit": 10} | ({} if cursor is None else {"cursor": cursor})).json()
        pages, cursor = [*pages, *page["messages"]], page["next"]
    assert [each["offset"] for each in pages] == list(range(25))
    one = api.get("/api/v1/messages/delay/0/7").json()
    assert (one["headers"], one["value"], one["id"]) == ([{"name": "h", "text": "v"}], {"text": "value"}, "id-7")
    rig.finish(NOW_MS + 200_000)
    assert found() == [] and api.get("/api/v1/messages/delay/0/7").status_code == 404
