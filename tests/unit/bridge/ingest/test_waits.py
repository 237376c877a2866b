"""bridge.ingest.watch: the table of waits. Each one ends as its row says, whatever the one that is waited for does."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.errors import EnvironmentFailure
from bridge.ingest import ingest as module
from bridge.ingest import queries
from bridge.ingest.plain_reader import NOTHING, Read
from bridge.ingest.watch import backlogs, waits
from bridge.ingest.watch.hand_over import CLOSE_S, SETTLE_S, HandOver
from bridge.ingest.watch.waits import Then, Wait, Watch
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock
from tests.paths import ROOT
from tests.unit.bridge.ingest.stand_ins import A, B
from tests.unit.bridge.ingest.test_ingest import SEEN_S, Bench, Stream, come_back


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    """Both partitions have three records below the committed O."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(queries, "LOOK_S", 0.01)
    monkeypatch.setattr(queries, "quiet", lambda _: nullcontext())
    monkeypatch.setattr(waits, "GAP_S", inf)
    made = Bench(tmp_path, {A: 3, B: 3})
    made.plain.log = {A: 3, B: 3}
    over = made.ingest._watch.over = mock.Mock(wraps=made.ingest._watch.over)  # type: ignore[method-assign]
    made.looks = lambda: over.call_count
    yield made
    made.ingest.stop()
    assert all(not thread.is_alive() for thread in made.ingest._threads)


def passed(bench: Bench, wait: Wait, is_so: Callable[[], object], waited_s: int = 0) -> None:
    """It is not so until the time of `wait` is over, and then it is. `waited_s` of this time are over already."""
    assert not is_so()
    bench.clock.advance(int(1_000 * (wait.s - waited_s)) - 100)
    seen, never = bench.looks(), threading.Event()
    wait_until(lambda: bench.looks() > seen + 2, SEEN_S, "it is looked at")
    assert not is_so(), wait

    def over() -> object:
        bench.clock.advance(1_000)
        never.wait(0.01)
        return is_so()

    wait_until(over, SEEN_S, wait.name)


def serving(bench: Bench) -> Stream:
    """A query that serves. It begins behind the plain reader's records, which it would have to send otherwise."""
    bench.ingest.start()
    for name, end in bench.store.offsets.items():
        bench.reads(name, end)
    bench.session.set_result(mock.Mock())
    stream = bench.next_stream()
    stream.opens()
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the query serves")
    return stream


def session(bench: Bench) -> None:
    """From the moment on at which Java begins, which may be later (`spark.start_after`)."""
    bench.ingest.start()
    bench.reads(A, 5)
    bench.clock.advance(int(2_000 * Wait.SESSION.s))
    seen = bench.looks()
    wait_until(lambda: bench.looks() > seen + 2, SEEN_S, "it is looked at")
    assert bench.session.set_running_or_notify_cancel() and not bench.failures
    seen = bench.looks()
    wait_until(lambda: bench.looks() > seen + 5, SEEN_S, "it is noticed")
    passed(bench, Wait.SESSION, lambda: bench.failures)
    assert bench.failures[0].code == "DB-3056"


def up_to_committed(bench: Bench) -> None:
    """The plain reader does not come on, and Spark's session may be due later: it is wanted at once."""
    bench.plain.log[A] = 1
    with mock.patch.object(queries, "want") as want:
        bench.ingest.start()
        wait_until(lambda: bench.store.ends == {A: 1, B: 3}, SEEN_S, "all but what cannot be read")
        passed(bench, Wait.UP_TO_COMMITTED, lambda: want.called)
    bench.session.set_result(mock.Mock())
    assert bench.next_stream().offsets == {A: 1, B: 3} and not bench.failures


def call(bench: Bench) -> None:
    goes_on = threading.Event()
    bench.holds_plan = goes_on
    bench.begin()
    bench.reads(A, 5)
    passed(bench, Wait.CALL, lambda: bench.failures)
    assert bench.failures[0].code == "DB-3055" and bench.ended.is_set()
    goes_on.set()


def tasks(bench: Bench) -> None:
    """A partition whose task does not begin is read by the plain reader, until another query has one for it."""
    bench.begin()
    stream = bench.next_stream()
    stream.opens(tasks=1)
    stream.is_looked_at()
    bench.reads(B, 9)
    passed(bench, Wait.TASKS, lambda: not bench.streams.empty())
    assert bench.ingest.reader == "plain" and stream.stopped.is_set() and not bench.failures


def relief(bench: Bench) -> None:
    bench.begin()
    stream = bench.next_stream()
    bench.reads(B, 9)
    stream.opens()
    stream.is_looked_at()
    steps, step_s = 4, 60
    for _ in range(steps):  # the query's thread makes progress within Wait.JVM
        bench.clock.advance(1_000 * step_s)
        stream.is_looked_at()
    passed(bench, Wait.RELIEF, lambda: not bench.streams.empty(), waited_s=steps * step_s)
    assert bench.ingest.reader == "plain" and not bench.failures


def look(bench: Bench) -> None:
    """The JVM does not answer: the plain reader reads within seconds, and the query goes on when it is back."""
    stream = serving(bench)
    stream.send(A, 3, 5)
    stream.freeze()
    passed(bench, Wait.LOOK, lambda: bench.ingest.reader == "plain")
    bench.reads(A, 9)
    assert not bench.failures and not bench.ended.is_set()
    stream.runs.set()
    bench.clock.advance(1_000)
    stream.is_looked_at()
    assert bench.ingest.reader == "plain", "it lacks what the plain reader has read"
    stream.send(A, 5, 9)
    wait_until(lambda: bench.ingest.reader == "spark", SEEN_S, "the same query serves again")
    assert bench.streams.empty() and bench.store.held[A] == list(range(9))


def jvm(bench: Bench) -> None:
    stream = serving(bench)
    stream.freeze()
    passed(bench, Wait.JVM, lambda: bench.failures)
    [failure] = bench.failures
    assert isinstance(failure, EnvironmentFailure) and failure.code == "DB-3055" and bench.ended.is_set()
    stream.runs.set()


def backlog(bench: Bench) -> None:
    """A partition comes with a large backlog, and the query does not begin: the plain reader reads this one, too."""
    serving(bench)
    bench.slots = 0
    with mock.patch.object(backlogs, "RECORDS_MAX", 1), capture_logs() as logs:
        come_back(bench, B, 0)
        bench.reads(A, 5)
        passed(bench, Wait.BACKLOG, lambda: bench.store.ends[B] == 3)
    assert bench.ingest.reader == "plain" and not bench.failures
    assert "plain-reader-takes-over" in {each["event"] for each in logs}


def ends_of_quiet(bench: Bench) -> None:
    """Brokers that do not answer are asked again, and nothing else waits for them."""
    stream = serving(bench)
    asked = mock.Mock(side_effect=lambda *_: bench.plain.wakes.wait(0.01) or Read(entries=NOTHING))
    with mock.patch.object(bench.plain, "poll", asked):
        bench.plain.markers[A] = 5
        bench.ingest.note_log_ends({A: 5, B: 3})

        def is_asked() -> bool:
            bench.clock.advance(500)
            return bool(asked.call_count)

        wait_until(is_asked, SEEN_S, "it is asked")
        bench.clock.advance(int(1_000 * Wait.ENDS_OF_QUIET.s))
        wait_until(lambda: bench.plain.at == {}, SEEN_S, "it is waited for no longer")
    assert bench.store.ends[A] == 3

    def is_told() -> bool:
        bench.clock.advance(500)
        return bench.store.ends[A] == 5

    wait_until(is_told, SEEN_S, "it is asked again")
    assert not stream.stopped.is_set()


EDGES: Final = {
    Wait.SESSION: session,
    Wait.UP_TO_COMMITTED: up_to_committed,
    Wait.CALL: call,
    Wait.TASKS: tasks,
    Wait.RELIEF: relief,
    Wait.LOOK: look,
    Wait.JVM: jvm,
    Wait.BACKLOG: backlog,
    Wait.ENDS_OF_QUIET: ends_of_quiet,
}
ELSEWHERE: Final = {
    Wait.OTHERS_COMMITS: "unit.bridge.start.test_facts.test_waiting_for_the_first_commits_has_a_limit",
    Wait.SLOTS: "unit.bridge.ingest.test_ingest.test_too_few_slots_are_waited_for_and_then_told",
    Wait.CLOSE: "unit.bridge.ingest.test_ingest.test_a_query_that_is_behind_does_not_serve_yet",
    Wait.STARVING: "unit.bridge.ingest.test_ingest.test_quiet_partitions_are_asked_where_they_end",
    Wait.STEP_OF_MAINTENANCE: "unit.bridge.runtime.test_pipeline.test_a_partition_that_comes_joins_the_open_store",
    Wait.FLUSH_OF_GONE: (
        "unit.bridge.runtime.test_maintenance_thread.test_what_is_asked_for_is_done_between_two_pieces_of_work"
    ),
    Wait.TOKEN: "unit.bridge.ingest.test_frames.test_one_that_says_nothing_is_closed",
    Wait.DESCRIPTORS: "unit.bridge.ingest.test_frames.test_a_connection_that_cannot_be_accepted_is_accepted_later",
    Wait.COMMANDS: "model.test_commands_first.test_commands_that_are_not_read_in_time_hold_up_nothing_for_longer",
    Wait.COMMANDS_STILL: "model.test_commands_first.test_other_partitions_wait_for_one_while_it_comes_on",
    Wait.JOB: "system.test_rebuild.test_a_job_without_progress_is_cancelled",
    Wait.COMMANDS_ROOM: "model.test_commands_first.test_what_leaves_no_room_is_not_waited_for",
}
"""Waits of which a test of another module shows the end."""


@pytest.mark.fault("two workers that wait for each other")
@pytest.mark.parametrize("wait", list(EDGES), ids=[wait.name for wait in EDGES])
def test_each_wait_ends_as_the_table_says(bench: Bench, wait: Wait) -> None:
    """After its deadline, and not before, a wait ends with a next step that does not depend on its result: for a JVM
    that hangs, a record that one reader cannot read, a session that does not start."""
    EDGES[wait](bench)


def test_the_whole_table_is_walked() -> None:
    """Each row has its test."""
    assert EDGES.keys() | ELSEWHERE.keys() == set(Wait) and not EDGES.keys() & ELSEWHERE.keys()
    for name in ELSEWHERE.values():
        home, _, test = name.rpartition(".")
        assert callable(getattr(importlib.import_module(f"tests.{home}"), test, None)), name


def test_the_document_has_the_table() -> None:
    """An operator who sees a wait finds what follows."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for wait in Wait:
        row = wait.value
        assert f"| {row.who} | {row.waits_for} | {row.s:g} s | {row.then.value} |" in text, wait.name


def test_a_machine_that_stood_still_has_not_waited() -> None:
    """The watcher slept too: that time counts for nobody, or a suspended machine would end the process."""
    clock = ManualClock()
    watch = Watch(clock)
    with watch.waiting(Wait.LOOK, Wait.JVM):
        for _ in range(3):
            clock.advance(1_000_000)
            assert watch.over() == []
        for _ in range(int(Wait.LOOK.s) - 1):
            clock.advance(1_000)
            assert watch.over() == []
        clock.advance(1_000)
        assert [wait for wait, _ in watch.over()] == [Wait.LOOK]
        clock.advance(1_000)
        assert watch.over() == [], "each is told once"
        watch.progress()
        for _ in range(int(Wait.LOOK.s)):
            clock.advance(1_000)
            told = watch.over()
        assert [wait for wait, _ in told] == [Wait.LOOK], "and once more after progress"
    clock.advance(1_000)
    assert watch.over() == []


@pytest.mark.fault("partitions that nobody reads during a hand-over")
def test_a_hand_over_waits_for_the_task_of_each_partition() -> None:
    """The plain reader reads until the last task has begun and has had time to fetch, although tasks begin seconds
    apart on a slow machine."""
    hand_over, now_s = HandOver({A: 0, B: 0}, 0.0), 50.0
    hand_over.task_begins(1.0)
    assert not hand_over.is_over({A: 9, B: 0}, {}, now_s)
    hand_over.task_begins(now_s)
    assert not hand_over.is_over({A: 9, B: 0}, {B: 3}, now_s + SETTLE_S)
    assert not hand_over.is_over({A: 9, B: 0}, {B: 3}, now_s + SETTLE_S + 0.1), "sampled"
    assert not hand_over.is_over({A: 9, B: 2}, {B: 3}, now_s + SETTLE_S + 0.1 + CLOSE_S / 2)
    assert hand_over.is_over({A: 9, B: 3}, {B: 3}, now_s + SETTLE_S + 0.1 + CLOSE_S / 2)


@pytest.mark.fault("a small partition that comes with a large one")
def test_a_large_backlog_makes_progress_before_others_go_on_without_its_commands() -> None:
    """Messages of the small partition wait for the commands of the large one, although the query that shall read its
    backlog does not begin: the plain reader takes over, with a second to spare, before the wait for commands ends."""
    assert Wait.BACKLOG.s + 1 <= Wait.COMMANDS_STILL.s <= Wait.COMMANDS.s


def test_no_wait_is_without_an_end() -> None:
    for wait in Wait:
        assert 0 < wait.s < inf and isinstance(wait.then, Then)
