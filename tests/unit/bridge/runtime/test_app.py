"""bridge.runtime.app: what the application makes of its events, with stand-ins for all that it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.errors import BridgeError, EnvironmentFailure, FencedError, InternalError
from bridge.kafka.membership import Membership
from bridge.runtime import app as module
from bridge.runtime import wiring
from bridge.runtime.app import Application
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.start.first_commits import SilentLogs
from bridge.stores.names import SourceName
from dev.harness.waiting import wait_until
from tests.manual_clock import ManualClock

A, B = ("delay", 0), ("delay", 1)
SEEN_S = 10
SETTINGS = Settings.of({"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}})


class Bench:
    """An application in a thread of its own. `made` are its pipelines, `order` what was started and stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[mock.Mock] = []
        self.order: list[str] = []
        self.owned: frozenset[SourceName] = frozenset()
        self.stops = self.follows = True
        self.on_made: Callable[[], None] = lambda: None
        self.changes: list[bool] = []
        self.raised: BridgeError | None = None
        self.dispatcher = self.part("dispatcher")
        self.dispatcher.wait_open.return_value = True
        self.ownership = self.part("ownership")
        self.ownership.membership.side_effect = lambda: Membership(
            partitions=self.owned, metadata=mock.Mock(), revocations=0
        )
        self.spark = mock.Mock()
        self.spark.stop.side_effect = lambda: self.order.append("spark stops")
        for name in ("Repeating", "Credentials", "Conditions", "OpenTelemetry"):
            monkeypatch.setattr(module, name, mock.MagicMock())
        module.Credentials.return_value.alarms.return_value = ()  # type: ignore[attr-defined]
        module.Conditions.return_value.alarms.return_value = ()  # type: ignore[attr-defined]
        for name in ("Cluster", "Lag"):
            monkeypatch.setattr(module, name, mock.Mock())
        module.Cluster.return_value.topics.return_value = {}  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "run_checks", lambda *_, **__: [])
        monkeypatch.setattr(module, "Ownership", mock.Mock(return_value=self.ownership))
        monkeypatch.setattr(wiring, "session_maker", mock.Mock())
        monkeypatch.setattr(wiring, "make_planner", mock.Mock())
        monkeypatch.setattr(wiring, "make_management", mock.MagicMock())
        for name in ("make_writer", "make_targets", "make_doubts"):
            monkeypatch.setattr(wiring, name, mock.Mock())
        monkeypatch.setattr(module, "Dispatcher", mock.Mock(return_value=self.dispatcher))
        monkeypatch.setattr(module, "spark", self.spark)
        monkeypatch.setattr(module, "Pipeline", self.make)
        monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.01)
        monkeypatch.setattr(Application, "_watch_the_end", lambda _: None)
        self.clock = ManualClock()
        self.restart = mock.Mock(reason="")
        self.restart.wait_s.return_value = 0.0
        self.restart.execute.side_effect = lambda _: self.order.append("restart")
        self.application = Application(SETTINGS, self.clock, lambda: SETTINGS, Redactor(), self.restart)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.application._health.phase.name == "joining", SEEN_S)

    def part(self, name: str) -> mock.Mock:
        part = mock.Mock()
        part.start.side_effect = lambda: self.order.append(f"{name} starts")
        part.stop.side_effect = lambda **_: self.note(f"{name} stops")
        return part

    def note(self, what: str) -> bool:
        self.order.append(what)
        return True

    def make(self, context: Any, owned: frozenset[SourceName], _: Membership) -> mock.Mock:
        """A pipeline that starts at once, and follows where `follows` says so."""
        made = mock.Mock(owned=owned, context=context)
        made.follow.side_effect = lambda owned, _: self.follow(made, owned)
        made.give_up.side_effect = lambda *_: self.follows
        made.store.next_offsets.return_value = dict.fromkeys(owned, 0)
        made.store.stats.return_value = SimpleNamespace(pending=0)
        made.is_reading.return_value, made.reader = True, "plain"
        made.is_catching_up.return_value, made.is_delivering.return_value = False, True
        made.look_at_identity.side_effect = lambda *_, **__: self.changes.pop() if self.changes else False
        made.impediments.return_value = made.alarms.return_value = made.problems.return_value = ()
        made.start.side_effect = lambda: self.note("pipeline starts")
        made.stop.side_effect = lambda *_: self.note("pipeline stops") and self.stops
        self.made.append(made)
        happens, self.on_made = self.on_made, lambda: None
        happens()
        return made

    def follow(self, made: mock.Mock, owned: frozenset[SourceName]) -> bool:
        made.owned = owned if self.follows else made.owned
        return self.follows

    def run(self) -> None:
        try:
            self.application.run()
        except BridgeError as error:
            self.raised = error

    def assign(self, *partitions: SourceName) -> None:
        """The group gives this instance these partitions, all that it has."""
        self.owned = frozenset(partitions)
        self.application.on_assigned(self.owned)

    def is_in(self, phase: str, pipelines: int) -> None:
        wait_until(
            lambda: self.application._health.phase.name == phase and len(self.made) == pipelines,
            SEEN_S,
            lambda: f"{self.application._health.phase}, {self.made}",
        )

    def end(self) -> BridgeError | None:
        """Wait for the end; what it was ended by."""
        self.thread.join(SEEN_S)
        assert not self.thread.is_alive()
        return self.raised


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.stops = True
    bench.application.on_signal()
    bench.end()


def test_an_assignment_makes_a_pipeline_of_what_is_owned(bench: Bench) -> None:
    """The group is joined before Spark has started; ready is said when the producer is open."""
    bench.dispatcher.wait_open.return_value = False
    bench.assign(A, B)
    bench.is_in("connecting", 1)
    assert bench.made[0].owned == {A, B}
    assert bench.order == ["ownership starts", "dispatcher starts", "pipeline starts"]
    bench.dispatcher.wait_open.return_value = True
    bench.is_in("running", 1)


def test_a_running_pipeline_follows_the_assignment(bench: Bench) -> None:
    """A revocation returns when it has given up what goes. What comes is told to the same pipeline."""
    bench.assign(A, B)
    bench.is_in("running", 1)
    [made] = bench.made
    bench.owned = frozenset({A})
    bench.application.on_revoked(frozenset({B}), lost=False, revocations=1)
    made.give_up.assert_called_once_with(frozenset({B}), 1)
    assert not bench.dispatcher.quiesce.called
    wait_until(lambda: made.owned == {A}, SEEN_S)
    bench.assign(A, B)
    wait_until(lambda: made.owned == {A, B}, SEEN_S)
    bench.is_in("running", 1)
    assert "pipeline stops" not in bench.order


@pytest.mark.parametrize("lost", [False, True])
def test_a_pipeline_that_cannot_follow_is_made_anew(bench: Bench, lost: bool) -> None:
    """The revocation waits for the open transaction; then there is a pipeline for what is left."""
    bench.assign(A, B)
    bench.is_in("running", 1)
    bench.owned, bench.follows = frozenset({A}), False
    bench.application.on_revoked(frozenset({B}), lost=lost, revocations=1)
    assert bench.dispatcher.quiesce.called
    assert (bench.made[0].abandon.called, bench.made[0].give_up.called) == (lost, not lost)
    bench.is_in("running", 2)
    assert bench.made[1].owned == {A}
    assert bench.order[2:] == ["pipeline starts", "pipeline stops", "pipeline starts"]


def test_without_partitions_there_is_no_pipeline_and_the_instance_is_ready(bench: Bench) -> None:
    """It is a spare: a probe that failed would have it restarted."""
    bench.assign(A)
    bench.is_in("running", 1)
    bench.owned, bench.follows = frozenset(), False
    bench.application.on_revoked(frozenset({A}), lost=True, revocations=1)
    bench.is_in("joining", 1)
    assert bench.application._health.phase.ready


def test_partitions_that_come_without_an_answer_end_nothing(bench: Bench) -> None:
    """The pipeline goes on with what it has, and they are tried again."""
    bench.assign(A)
    bench.is_in("running", 1)
    [made], failures = bench.made, [EnvironmentFailure("no answer", hint="Wait.")]

    def follow(owned: frozenset[SourceName], _: Membership) -> bool:
        if failures:
            raise failures.pop()
        return bench.follow(made, owned)

    made.follow.side_effect = follow
    bench.assign(A, B)
    wait_until(lambda: bench.application._identity.counts() == {("delay", "no-answer"): 1}, SEEN_S)
    wait_until(lambda: made.follow.call_args.args[0] == {A}, SEEN_S)
    bench.application._identity._release(B)
    bench.assign(A, B)
    wait_until(lambda: made.owned == {A, B}, SEEN_S)
    assert "pipeline stops" not in bench.order


@pytest.mark.fault("a partition of a delay topic that has no leader, at a start or a rebuild")
def test_a_start_goes_on_without_a_silent_partition(bench: Bench) -> None:
    """A start holds a partition whose leader does not answer, and delivers all others."""
    bench.follows = False
    for pipelines in (1, 3):
        bench.on_made = lambda: setattr(bench.made[-1].start, "side_effect", SilentLogs(frozenset({B})))
        bench.assign(A, B)
        bench.is_in("running", pipelines + 1)
        assert bench.made[-1].owned == {A} and bench.application._identity.counts() == {("delay", "no-answer"): 1}
        bench.application._identity._release(B)


def test_partitions_in_doubt_are_not_delivered(bench: Bench) -> None:
    """The others go on; with none left the pipeline ends, and the process waits until one is released."""
    identity = bench.application._identity
    held: set[SourceName] = {B}
    identity.without = lambda owned: owned - held  # type: ignore[method-assign]
    identity.look = lambda *_, **__: bench.changes.pop() if bench.changes else False  # type: ignore[method-assign]
    identity.alarms = lambda: ("delay/1 is held: why",)  # type: ignore[method-assign]
    bench.assign(A, B)
    bench.is_in("running", 1)
    assert bench.made[0].owned == {A}
    held.add(A)
    bench.changes.append(True)
    bench.is_in("held", 1)
    assert bench.order[-1] == "pipeline stops" and not bench.application._health.phase.ready
    held.clear()
    bench.changes.append(True)
    bench.is_in("running", 2)
    assert bench.made[1].owned == {A, B}


@pytest.mark.fault("a log that is cut while a start catches up")
def test_a_start_that_catches_up_looks_at_the_logs(bench: Bench) -> None:
    """Logs are watched during the start: no start waits for records that a log has lost."""
    bench.on_made = lambda: setattr(bench.made[-1].is_catching_up, "return_value", True)
    bench.assign(A)
    wait_until(lambda: bench.made and bench.made[0].is_catching_up.called, SEEN_S)
    bench.changes.append(True)
    wait_until(lambda: bench.made[0].follow.called, SEEN_S)
    assert bench.application._health.phase.name != "running"
    bench.made[0].is_catching_up.return_value = False
    bench.is_in("running", 1)


def test_damage_makes_a_pipeline_anew_of_the_same_partitions(bench: Bench) -> None:
    bench.assign(A)
    bench.is_in("running", 1)
    bench.made[0].context.on_rebuild()
    bench.is_in("running", 2)
    assert bench.made[1].owned == {A}
    assert bench.order[-2:] == ["pipeline stops", "pipeline starts"]


def test_a_start_that_is_out_of_date_already_is_not_made(bench: Bench) -> None:
    """Assignments come in a row; only the last one counts."""
    bench.assign(A)
    bench.is_in("running", 1)
    starts, bench.follows = bench.order.count("pipeline starts"), False
    bench.on_made = lambda: bench.assign(A, B)
    bench.application.on_assigned(frozenset({A}))
    wait_until(lambda: bench.order.count("pipeline starts") == starts + 1, SEEN_S)
    bench.is_in("running", 3)
    assert not bench.made[1].start.called and bench.made[2].owned == {A, B}


def test_new_credentials_end_everything_in_order_and_restart_in_place(bench: Bench) -> None:
    """As a signal does, and then the process is replaced."""
    bench.assign(A)
    bench.is_in("running", 1)
    bench.application._ask_for_restart(module.CREDENTIALS)
    assert bench.end() is None
    assert bench.order[3:] == ["pipeline stops", "dispatcher stops", "ownership stops", "spark stops", "restart"]
    bench.restart.execute.assert_called_once_with("credentials-replaced")


@pytest.mark.parametrize(("jump_ms", "restarts"), [(-5_001, True), (-5_000, False), (3_600_000, False)])
def test_a_clock_that_is_set_back_restarts_in_place(bench: Bench, jump_ms: int, restarts: bool) -> None:
    """Clients wait longer by as much; not by much is left to heal, and forward nothing waits."""
    bench.assign(A)
    bench.is_in("running", 1)
    bench.clock.step_wall(jump_ms)
    bench.application._look_at_clock()
    bench.application._look_at_clock()
    if not restarts:
        bench.application.on_signal()
    bench.end()
    assert bench.restart.execute.called == restarts


def test_a_clock_that_is_set_back_again_and_again_ends_the_process(bench: Bench) -> None:
    """One restart a minute."""
    bench.restart.wait_s.return_value = 1.0
    bench.clock.step_wall(-3_600_000)
    bench.application._look_at_clock()
    error = bench.end()
    assert isinstance(error, EnvironmentFailure) and error.code == "DB-3012"
    assert not bench.restart.execute.called


def test_an_end_that_was_asked_for_goes_before_a_restart(bench: Bench) -> None:
    """By a signal, whichever comes first, or by a failure before it."""

    def stops(**_: float) -> bool:
        bench.application.on_signal()
        return True

    bench.dispatcher.stop.side_effect = stops
    bench.application._ask_for_restart(module.CLOCK)
    bench.end()
    assert not bench.restart.execute.called


def test_a_failure_goes_before_a_restart(bench: Bench) -> None:
    """Another instance took over: it must not be driven out again."""
    bench.application.on_fatal(FencedError("another instance took over", hint="Stop one."))
    bench.application._ask_for_restart(module.CREDENTIALS)
    assert isinstance(bench.end(), FencedError)
    assert not bench.restart.execute.called


def test_an_end_that_takes_too_long_is_cut_off_and_restarts_all_the_same(bench: Bench) -> None:
    """A client may wait by the clock that was set back."""
    bench.restart.execute.side_effect = SystemExit
    bench.application._restarts_for = module.CLOCK
    with pytest.raises(SystemExit):
        bench.application._end_now()


def test_a_signal_ends_everything_in_order(bench: Bench) -> None:
    bench.assign(A)
    bench.is_in("running", 1)
    bench.application.on_signal()
    assert bench.end() is None
    assert bench.order[3:] == ["pipeline stops", "dispatcher stops", "ownership stops", "spark stops"]


def test_what_is_fatal_ends_the_process_with_its_status(bench: Bench) -> None:
    """Whichever thread says so, and everything is stopped all the same."""
    bench.assign(A)
    bench.is_in("running", 1)
    bench.application.on_fatal(FencedError("another instance took over", hint="Stop one."))
    error = bench.end()
    assert error is not None and error.exit_code == 5
    assert bench.made[0].cancel.called and bench.order[-1] == "spark stops"


def test_the_trace_of_a_bug_is_logged(bench: Bench) -> None:
    """The last line says what it was, not where."""
    with capture_logs() as entries:
        bench.application.on_fatal(InternalError("delivery failed", hint="Report this.", code="DB-7001"))
        bench.application.on_fatal(EnvironmentFailure("gone", hint="Look."))
    (entry,) = [each for each in entries if each["event"] == "internal-error"]  # other threads may log as well
    assert entry["log_level"] == "error"
    assert isinstance(entry["exc_info"], InternalError)
    assert isinstance(bench.end(), InternalError)


def test_what_fails_while_stopping_is_no_failure(bench: Bench) -> None:
    """Brokers that go away at the same time, for example."""
    bench.made.clear()
    bench.application._stopping = True
    bench.application.on_fatal(EnvironmentFailure("gone", hint="Look."))
    assert bench.end() is None


def test_a_pipeline_that_does_not_stop_ends_the_process(bench: Bench) -> None:
    """The directory stays locked: only the end of the process frees it."""
    bench.assign(A)
    bench.is_in("running", 1)
    bench.stops = bench.follows = False
    bench.assign(A, B)
    error = bench.end()
    assert isinstance(error, EnvironmentFailure) and error.code == "DB-3019"
    assert len(bench.made) == 1
