"""bridge.ingest.watch.steps: a query that does not serve says why, every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.errors import EnvironmentFailure
from bridge.ingest import ingest as module
from bridge.ingest import queries
from bridge.ingest.query import REASON_CHARS_MAX, SparkQuery
from bridge.ingest.watch.steps import REPORT_S, SILENT_S, QueryStep, Steps
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.unit.bridge.ingest.stand_ins import A, B
from tests.unit.bridge.ingest.test_ingest import SEEN_S, Bench, Stream

LOOKS_MAX: Final = 500
REPORT_MS: Final = int(1_000 * REPORT_S)
SPARK: Final = {"executors": 1, "tasks_running": 1, "tasks_waiting": 2}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    for each in (module, queries):
        monkeypatch.setattr(each, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "REPORT_S", 0.02)
    monkeypatch.setattr(queries, "quiet", lambda _: nullcontext())
    made = Bench(tmp_path)
    made.spark = dict(SPARK)
    yield made
    made.spark_answers.set()
    made.ingest.stop()


@pytest.fixture
def reported(bench: Bench) -> Iterator[Callable[[QueryStep], dict[str, Any]]]:
    """Waits for the report of a step, which comes within two of its intervals."""
    never = threading.Event()
    with capture_logs() as logs:

        def wait(step: QueryStep) -> dict[str, Any]:
            logs.clear()
            for _ in range(LOOKS_MAX):
                bench.clock.advance(REPORT_MS // 5)
                never.wait(0.01)
                waits = [dict(entry) for entry in logs if entry["event"] == "query-waits"]
                if found := [entry for entry in waits if entry["waits_for"] == step.value]:
                    return found[0]
            raise AssertionError(f"{step} is not reported: {logs}")

        yield wait


@pytest.mark.fault("a query that does not serve, without a word in the log")
def test_each_step_says_what_it_waits_for(bench: Bench, reported: Callable[[QueryStep], dict[str, Any]]) -> None:
    """Until the query serves, every five seconds: the step, its duration, and what Spark lacks for it, such as
    executors, slots or running tasks."""
    walked = [
        QueryStep.SESSION,
        QueryStep.SLOTS,
        QueryStep.PLAN,
        QueryStep.BATCHES,
        QueryStep.BEGIN,
        QueryStep.TASKS,
        QueryStep.RELIEF,
    ]
    assert [*walked, QueryStep.END, QueryStep.PAUSE] == list(QueryStep)
    gates = {step: threading.Event() for step in (QueryStep.PLAN, QueryStep.BEGIN, QueryStep.END)}
    bench.slots, bench.holds_plan, is_done = 1, gates[QueryStep.PLAN], [False]
    bench.ingest.start()
    assert bench.session.set_running_or_notify_cancel()
    assert not reported(QueryStep.SESSION).keys() & SPARK.keys(), "Spark cannot be asked yet"

    def held_start(stream: Stream) -> Stream:
        assert gates[QueryStep.BEGIN].wait(SEEN_S)
        stream.stop = lambda: gates[QueryStep.END].wait(SEEN_S)  # type: ignore[method-assign, assignment]
        return stream

    with (
        mock.patch.object(bench, "start", lambda offsets, start=bench.start: held_start(start(offsets))),
        mock.patch.object(bench.suspects, "are_done", side_effect=lambda _: is_done[0]),
    ):
        bench.session.set_result(mock.Mock())
        assert reported(QueryStep.SLOTS).items() >= {"slots": 1, "partitions": 2, **SPARK}.items()
        bench.slots = 2
        assert reported(QueryStep.PLAN).items() >= SPARK.items()
        gates[QueryStep.PLAN].set()
        reported(QueryStep.BATCHES)
        is_done[0] = True
        reported(QueryStep.BEGIN)
        gates[QueryStep.BEGIN].set()
        stream = bench.next_stream()
        stream.opens(tasks=1)
        assert reported(QueryStep.TASKS).items() >= {"tasks": 1, "partitions": 2, **SPARK}.items()
        bench.reads(B, 9)
        stream.opens(tasks=1)
        assert reported(QueryStep.RELIEF)["behind"] == 9
        bench.ingest.restart("a test")
        reported(QueryStep.END)
        bench.fails_at_once = EnvironmentFailure("it fails", hint="", code="DB-3017")
        gates[QueryStep.END].set()
        reported(QueryStep.PAUSE)


def test_a_query_that_serves_says_nothing(bench: Bench) -> None:
    """Neither does one that is not wanted yet (`spark.start_after`)."""
    with capture_logs() as logs:
        bench.ingest.start()
        bench.reads(A, 3)
        bench.clock.advance(10 * REPORT_MS)
        bench.reads(A, 4)
        bench.session.set_result(mock.Mock())
        stream = bench.next_stream()
        stream.opens()
        stream.send(A, 4, 5)
        wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
        logs.clear()
        asked = bench.states
        for _ in range(5):
            bench.clock.advance(REPORT_MS)
            stream.is_looked_at()
        assert not [entry for entry in logs if entry["event"] == "query-waits"] and bench.states <= asked + 1


def test_a_jvm_that_stands_still_is_reported_too(bench: Bench, reported: Callable[[QueryStep], dict[str, Any]]) -> None:
    """The report does not wait for Spark's answer, and says since when it is missing."""
    bench.spark_answers.clear()
    bench.slots = 1
    bench.begin()
    wait_until(lambda: reported(QueryStep.SLOTS).get("spark_silent_s", 0) > SILENT_S, SEEN_S, "it is silent")
    bench.spark_answers.set()
    wait_until(lambda: "spark_silent_s" not in reported(QueryStep.SLOTS), SEEN_S, "it answers")


def test_a_step_lasts_until_the_next_one_and_reports_are_rare() -> None:
    clock = ManualClock()
    steps = Steps(clock)
    seconds = []
    for number in range(50):
        steps.enter(QueryStep.SLOTS, slots=number)
        seconds += [report["seconds"] for report in [steps.report()] if report]
        clock.advance(250)
    assert seconds == [5, 10]
    clock.advance(REPORT_MS)
    steps.enter(QueryStep.PLAN)
    assert steps.report() == {"waits_for": QueryStep.PLAN.value, "seconds": 0}
    steps.serve()
    clock.advance(REPORT_MS)
    assert steps.is_over and steps.report() is None
    steps.answer(SPARK)
    steps.enter(QueryStep.END)
    clock.advance(REPORT_MS)
    assert steps.report() == {"waits_for": QueryStep.END.value, "seconds": 5}, "a late answer is not kept"


def test_the_report_has_the_first_line_of_an_error() -> None:
    """After a failure, Spark's word for the state of the query is the whole error."""
    query = SparkQuery(mock.MagicMock(), kafka_options={}, group_prefix="", all_epochs={}, address="", token="")
    query._started = mock.Mock(status={"message": "Terminated with exception: " + "x" * 999 + "\nat a.b.c"})
    word = query.state()["query"]
    assert isinstance(word, str) and word.startswith("Terminated with exception: x") and len(word) == REASON_CHARS_MAX
    query._started.status["message"] = "Waiting\nat a.b.c"
    assert query.state()["query"] == "Waiting"
