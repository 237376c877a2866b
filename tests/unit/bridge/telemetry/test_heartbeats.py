"""bridge.heartbeats: no thread stands still without being seen, and none is seen that rightly waits.

Each thread of the bridge is a real one here, made to stand still by something that it calls and that does not return.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import pytest

from bridge.api.listener import Listener as ApiListener
from bridge.delivery.dispatcher import Dispatcher
from bridge.delivery.doubt.doubts import look_up_in_thread
from bridge.delivery.resuming import Resuming
from bridge.delivery.states import AT_REST, Event
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.pauses import Pauses
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.ingest.ingest import Ingest
from bridge.ingest.plain_reader import NOTHING, Read
from bridge.kafka import membership as ownership
from bridge.kafka.membership import Membership, Ownership
from bridge.runtime import pipeline
from bridge.runtime.app import Application
from bridge.runtime.credentials import Credentials
from bridge.runtime.maintenance_thread import MaintenanceThread
from bridge.runtime.restart import Restart
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.settings.secrets import Redactor
from bridge.telemetry.health import Health, LongWork
from bridge.telemetry.heartbeats import CALLS_S, LOOK_S, SPARK_S, START_S, Beat, Heartbeats, Repeating
from bridge.telemetry.metrics import Metrics, StoreSnapshot
from dev.harness.waiting import wait_until
from tests.broker.rig import Listener, Tally
from tests.manual_clock import ManualClock
from tests.paths import ROOT
from tests.unit.bridge.api.fakes import Bridge as FakeBridge
from tests.unit.bridge.http.test_management import ask
from tests.unit.bridge.ingest.stand_ins import Batches, suspects
from timerstore.clock import ClockWatch

SEEN_S: Final = 20.0
"""How long a thread of a busy machine may take until it comes round."""
LOOK_SOON_S: Final = 0.02
"""In place of the intervals at which threads come round by themselves."""
INTERVALS: Final = (
    "bridge.runtime.app.LOOK_INTERVAL_S",
    "bridge.runtime.maintenance_thread.IDLE_WAIT_S",
    "bridge.delivery.targets.cache.LOOK_INTERVAL_S",
    "bridge.ingest.ingest.LOOK_S",
    "bridge.ingest.queries.LOOK_S",
    "bridge.http.server.TICK_S",
)


class Gate:
    """A call that does not return while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not self.is_open:
            self.waiting.set()
            assert self._open.wait(5 * SEEN_S), "the test has forgotten to open it"


class Bench:
    """Hearts by a clock that the test moves, as /livez and /metrics tell them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.hearts = Heartbeats(self.clock)
        metrics = Metrics(lambda: StoreSnapshot(heartbeats=self.hearts.ages()))
        health = Health(lambda: self.hearts.problems())
        self.server = ManagementServer("127.0.0.1", 0, health=health, registry=metrics.registry)
        self.gate = Gate()

    def livez(self) -> tuple[int, str]:
        status, _, body = ask(self.server.port, "/livez")
        return status, body

    def alarms(self) -> list[str]:
        """The threads of which the alert's expression is true."""
        found: dict[str, dict[str, float]] = {"age": {}, "budget": {}}
        for line in ask(self.server.port, "/metrics")[2].splitlines():
            for kind, values in found.items():
                if line.startswith(f"delay_bridge_thread_heartbeat_{kind}_seconds{{"):
                    values[line.split('"')[1]] = float(line.rpartition(" ")[2])
        assert found["age"].keys() == found["budget"].keys()
        return [thread for thread, age_s in found["age"].items() if age_s > found["budget"][thread]]

    def silent_s(self, thread: str) -> float:
        return self.hearts.ages()[thread][0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for interval in INTERVALS:
        monkeypatch.setattr(interval, LOOK_SOON_S)
    bench = Bench()
    with bench.server:
        yield bench
        bench.gate.open()


# --- the registry ----------------------------------------------------------------------------------------------------


def test_a_thread_is_told_of_when_its_time_is_over_and_until_it_comes_back(bench: Bench) -> None:
    """Not before; once more after it has been well; and where it stands is in the log, once."""
    beat = bench.hearts.watch("main", 10)
    bench.clock.advance(100_000)
    assert bench.hearts.problems() == [], "it has not begun"
    beat()
    bench.clock.advance(10_000)
    assert (bench.livez()[0], bench.alarms()) == (200, [])
    bench.clock.advance(1)
    assert bench.hearts.problems() == ["thread main has stood still for 10 s"]
    assert (bench.livez()[0], bench.alarms()) == (503, ["main"])
    beat(500)
    bench.clock.advance(400_000)
    assert bench.hearts.problems() == []
    beat()
    bench.clock.advance(11_000)
    assert bench.hearts.problems() == ["thread main has stood still for 11 s"]
    bench.hearts.forget("main", "nothing of that name")
    assert (bench.hearts.problems(), bench.hearts.ages()) == ([], {})


def test_a_heart_of_the_same_name_takes_the_place_of_the_old_one(bench: Bench) -> None:
    """A pipeline that is made anew has the same threads; what the old ones still say counts no more."""
    old = bench.hearts.watch("ingest", 10)
    old()
    new = bench.hearts.watch("ingest", 10)
    assert bench.hearts.ages() == {}
    new()
    bench.clock.advance(11_000)
    old()
    assert bench.hearts.problems() == ["thread ingest has stood still for 11 s"]
    with bench.hearts.watching("ingest", 10):
        new = bench.hearts.watch("ingest", 10)
        new()
    assert bench.hearts.ages() == {"ingest": (0.0, 10)}, "the end of one is not that of the next"


# --- the threads -----------------------------------------------------------------------------------------------------


class Case:
    """A thread that runs: how it is brought to a stand, and on again."""

    def __init__(self, bench: Bench, provoke: Callable[[], object] = lambda: None) -> None:
        self._gate = bench.gate
        self._provoke = provoke

    def stop(self) -> None:
        """Returns when the thread stands still."""
        self._gate.close()
        self._provoke()
        assert self._gate.waiting.wait(SEEN_S)

    def go_on(self) -> None:
        self._gate.open()


class FatalError(AssertionError):
    """What a thread has told the application."""


def fatal(error: BaseException) -> None:
    raise FatalError(str(error))


@contextmanager
def main(bench: Bench, _: Path) -> Iterator[Case]:
    """Asks brokers that do not answer for the ends of the logs."""
    settings = Settings.of({})
    application = Application(settings, bench.clock, lambda: settings, Redactor(), Restart(bench.clock))
    bench.hearts = application._hearts
    store = SimpleNamespace(next_offsets=dict)
    pipeline: Any = SimpleNamespace(
        store=store, look_at_retention=lambda _: None, cancel=lambda: None, is_catching_up=lambda: True,
        look_at_identity=lambda _: bench.gate() or False,
    )  # fmt: skip
    application._pipeline = pipeline
    application._conditions = cast(Any, SimpleNamespace(look=lambda _: None, alarms=tuple, counts=dict))
    around: Any = SimpleNamespace(cluster=None)
    thread = threading.Thread(target=application._serve, args=(around,), daemon=True)
    thread.start()
    yield Case(bench, lambda: bench.clock.advance(10_000))
    application._stopping = True


@contextmanager
def group_member(bench: Bench, _: Path) -> Iterator[Case]:
    """In a poll, which is where callbacks are made."""

    class Consumer:
        def __init__(self, *_: object) -> None:
            self.subscribe = self.close = self.consumer_group_metadata = lambda *_, **__: None

        def poll(self, _: float) -> None:
            bench.gate()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "Consumer", Consumer)
        member = Ownership(
            config={},
            group_id="g",
            instance_id="i",
            topics=["delay"],
            listener=Listener(),
            clock=bench.clock,
            beat=bench.hearts.watch("ownership", CALLS_S),
        )
        member.start()
    yield Case(bench)
    member.stop(SEEN_S)


def dispatching(bench: Bench, *, opens: Callable[[], None], waits: Callable[[], None]) -> Dispatcher:
    """With a store in which nothing is due for a long time."""
    never = threading.Event()

    def wait(_: float) -> None:
        waits()
        never.wait(0.02)

    store: Any = SimpleNamespace(
        is_clock_behind=lambda _: False,
        next_offsets=dict,
        has_room=lambda: True,
        in_life=lambda *_: [],
        go_live=list,
        read_again=lambda: None,
        next_wakeup_ms=lambda: None,
        offsets_behind=lambda: False,
        needs_offset_commit=lambda: False,
        wait=wait,
        wake=lambda: None,
        sources=None,
    )
    targets: Any = SimpleNamespace(start=lambda *_: None, stop=lambda: None)
    planner: Any = SimpleNamespace(delay_topics=frozenset(), dead_letter_topics=frozenset())
    writer: Any = SimpleNamespace(open=opens, close=lambda: None, look_after=lambda: None)
    dispatcher = Dispatcher(
        writer=writer,
        planner=planner,
        targets=targets,
        membership=lambda: Membership(partitions=frozenset(), revocations=0, metadata=None),
        read_committed=lambda *_: {},
        doubts=mock.Mock(**{"held.return_value": frozenset(), "look.return_value": False}),
        clock=bench.clock,
        metrics=cast(Metrics, Tally()),
        on_fatal=fatal,
        commit_interval_ms=20,
        transaction_rows=20_000,
        beat=bench.hearts.watch("dispatcher", CALLS_S),
    )
    dispatcher.start()
    wait_until(lambda: dispatcher.state in AT_REST, SEEN_S)
    dispatcher.resume(store, {}, 0)
    return dispatcher


@contextmanager
def dispatcher_at_the_store(bench: Bench, _: Path) -> Iterator[Case]:
    """Waits for the store's lock, that another thread does not give back."""
    dispatcher = dispatching(bench, opens=lambda: None, waits=bench.gate)
    yield Case(bench)
    dispatcher.stop(SEEN_S)


@contextmanager
def dispatcher_at_the_client(bench: Bench, _: Path) -> Iterator[Case]:
    """Opens a producer, and the client does not come back."""
    dispatcher = dispatching(bench, opens=bench.gate, waits=lambda: None)
    yield Case(bench, lambda: dispatcher._life.advance(Event.PRODUCER_LOST))
    dispatcher.stop(SEEN_S)


def ingesting(
    bench: Bench,
    directory: Path,
    make_query: Callable[..., Any],
    poll: Callable[..., Any],
    *,
    room: bool = True,
) -> Ingest:
    """With a session that is there already, and a store that may have no room."""
    store: Any = SimpleNamespace(
        run=1, next_offsets=lambda _=None: {}, committed=dict, has_room=lambda: room, in_life=lambda *_: []
    )
    session: Future[Any] = Future()
    session.set_result(mock.Mock())
    return Ingest(
        session=session,
        make_query=make_query,
        make_reader=lambda: SimpleNamespace(assign=lambda _: None, poll=poll, close=lambda: None),  # type: ignore[arg-type, return-value]
        store=store,
        log_starts=lambda offsets, _: offsets,
        all_epochs={},
        way=None,
        suspects=suspects(Batches({}), bench.clock, directory),
        clock=bench.clock,
        metrics=Metrics(),
        on_fatal=fatal,
        beat=bench.hearts.watch("ingest", CALLS_S),
        beat_query=bench.hearts.watch("query", SPARK_S),
    )


@contextmanager
def plain_reader(bench: Bench, directory: Path) -> Iterator[Case]:
    """Polls a client that does not come back."""
    never = threading.Event()
    ready = SimpleNamespace(slots=lambda: -1, state=dict)  # the query waits for more
    poll = lambda: bench.gate() or never.wait(0.02) or Read(entries=NOTHING)  # noqa: E731
    made = ingesting(bench, directory, lambda *_: ready, poll)
    made.start()
    yield Case(bench)
    made.stop(SEEN_S)


@contextmanager
def query(bench: Bench, directory: Path) -> Iterator[Case]:
    """Asks a JVM that does not answer."""
    never = threading.Event()
    query = SimpleNamespace(awaitTermination=lambda _: bench.gate() or never.wait(0.02), stop=lambda: None)
    ready = SimpleNamespace(
        session=object(), slots=lambda: 1, state=dict, warm_up=lambda _: None, start=lambda *_: query
    )
    made = ingesting(bench, directory, lambda *_: ready, lambda: never.wait(0.02) or Read(entries=NOTHING))
    made.start()
    yield Case(bench)
    made.stop(SEEN_S)


@contextmanager
def maintenance(bench: Bench, _: Path) -> Iterator[Case]:
    """Waits for a disk that does not answer."""
    upkeep = SimpleNamespace(
        flush_due=lambda _: False,
        has_rows=lambda: True,
        reclaim=lambda _: 0,
        segments=lambda: 0,
        next_compaction=lambda _: None,
        next_window=bench.gate,
    )
    store: Any = SimpleNamespace(
        upkeep=upkeep,
        remove_left=lambda _: 0,
        limits=SimpleNamespace(flush_bytes=1 << 20, ready_rows_bytes=1 << 20, segment_bytes_max=1 << 20),
    )
    made = MaintenanceThread(
        store=store,
        clock=bench.clock,
        metrics=Metrics(),
        on_fatal=fatal,
        beat=bench.hearts.watch("maintenance", SPARK_S),
    )
    made.start()
    yield Case(bench)
    assert made.stop(SEEN_S)


@contextmanager
def targets(bench: Bench, _: Path) -> Iterator[Case]:
    """Looks a topic up, and no broker answers, not even that it will not."""

    class Silent:
        def __call__(self, _: object) -> Any:
            return bench.gate() or {}

    made = Targets(cast(TargetLookUp, Silent()), bench.clock, bench.hearts.watch("targets", CALLS_S))
    made.start()
    yield Case(bench, lambda: made.request_refresh(["orders"]))
    made.stop()


@contextmanager
def clock_jumps(bench: Bench, _: Path) -> Iterator[Case]:
    """Tells another thread of a jump, and does not get through."""
    watch = ClockWatch(bench.clock)

    def look() -> float:
        if watch.jump_ms():
            bench.gate()
        return 0.02

    with Repeating("clock-jumps", look, bench.hearts.watch("clock-jumps", LOOK_S), 0.02):
        yield Case(bench, lambda: bench.clock.step_wall(-3_600_000))


@contextmanager
def api(bench: Bench, _: Path) -> Iterator[Case]:
    """A first client comes, and what it asks for is not answered on the listener's thread."""

    class Silent(FakeBridge):
        def pending(self) -> None:
            bench.gate()

    with ApiListener(
        "127.0.0.1",
        0,
        source=Silent(),
        protection=Protection(),
        show_payloads=False,
        beat=bench.hearts.watch("api", LOOK_S),
    ) as served:

        def come() -> None:
            with suppress(OSError):  # its patience may end before the gate opens
                ask(served.port, "/api/v1/count")

        client = threading.Thread(target=come)
        yield Case(bench, client.start)
        client.join()


class Pipe(Case):
    """A file becomes a pipe into which nothing is written."""

    def __init__(self, bench: Bench, path: Path) -> None:
        super().__init__(bench)
        self._path = path

    def stop(self) -> None:
        pipe = self._path.with_suffix(".pipe")
        os.mkfifo(pipe)
        pipe.replace(self._path)
        (self._writer,) = wait_until(self._opened, SEEN_S, "it is read")

    def _opened(self) -> list[int]:
        """Possible as soon as it is read."""
        with suppress(OSError):
            return [os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)]
        return []

    def go_on(self) -> None:
        file = self._path.with_suffix(".file")
        file.write_text("secret")
        file.replace(self._path)
        os.write(self._writer, b"secret")
        os.close(self._writer)


@contextmanager
def credentials(bench: Bench, directory: Path) -> Iterator[Case]:
    """Reads a password from where nothing comes."""
    password, config = directory / "password", directory / "bridge.yaml"
    password.write_text("secret")
    config.write_text(f"kafka: {{common: {{sasl.password_file: {password}}}}}")
    read = partial(load, config, {})
    made = Credentials(
        read(),
        read=read,
        verify=lambda _: None,
        on_replaced=lambda: None,
    )

    def look() -> float:
        made.look()
        return 0.02

    with Repeating("credentials", look, bench.hearts.watch("credentials", CALLS_S), 0.02):
        yield Pipe(bench, password)


@contextmanager
def resuming(bench: Bench, _: Path) -> Iterator[Case]:
    """Looks for what a pause has put off, and the store does not answer."""

    def store() -> None:
        bench.gate()

    made = Resuming(
        pauses=Pauses(bench.clock),
        store=store,
        bring=lambda _: None,
        read=lambda _: (),
        log_ends=lambda _: {},
        clock=bench.clock,
        rate=1,
    )

    def look() -> float:
        made.look()
        return 0.02

    with Repeating("resuming", look, bench.hearts.watch("resuming", CALLS_S), 0.02):
        yield Case(bench)


@contextmanager
def look_up(bench: Bench, _: Path) -> Iterator[Case]:
    """Reads a topic of messages in doubt."""
    ended = threading.Event()

    def look(beat: Beat) -> None:
        while not ended.wait(LOOK_SOON_S):
            beat()
            bench.gate()

    look_up_in_thread(bench.hearts, look)
    yield Case(bench)
    ended.set()
    wait_until(lambda: "look-up" not in bench.hearts.ages(), SEEN_S, "it has ended")


CASES: Final[tuple[tuple[str, Callable[[Bench, Path], AbstractContextManager[Case]]], ...]] = (
    ("main", main),
    ("ownership", group_member),
    ("dispatcher", dispatcher_at_the_store),
    ("dispatcher", dispatcher_at_the_client),
    ("ingest", plain_reader),
    ("query", query),
    ("maintenance", maintenance),
    ("targets", targets),
    ("clock-jumps", clock_jumps),
    ("api", api),
    ("credentials", credentials),
    ("resuming", resuming),
    ("look-up", look_up),
)


@pytest.mark.parametrize(("thread", "start"), CASES, ids=[start.__name__ for _, start in CASES])
def test_a_thread_that_stands_still_is_seen_and_one_that_waits_is_not(
    bench: Bench, tmp_path: Path, thread: str, start: Callable[[Bench, Path], AbstractContextManager[Case]]
) -> None:
    """By /livez and by what the alert asks for, as soon as its time is over and not before; when it goes on it is well
    again. While it waits for its work, for however long, it shows life."""
    with start(bench, tmp_path) as case:
        wait_until(lambda: thread in bench.hearts.ages(), SEEN_S, "it has begun")
        for _ in range(3):
            bench.clock.advance(int(1_000 * SPARK_S))
            wait_until(lambda: bench.silent_s(thread) == 0, SEEN_S, "it has come round")
        case.stop()
        budget_s = bench.hearts.ages()[thread][1]
        bench.clock.advance(int(1_000 * (budget_s - bench.silent_s(thread))))
        assert thread not in bench.livez()[1] and thread not in bench.alarms()
        bench.clock.advance(1)
        status, body = bench.livez()
        assert status == 503 and f"thread {thread} has stood still" in body
        assert thread in bench.alarms()
        case.go_on()
        wait_until(lambda: thread not in bench.livez()[1], SEEN_S, "it is well again")


def test_every_thread_that_is_watched_is_among_them() -> None:
    """Whoever adds a thread adds a way of stopping it."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "bridge").glob("**/*.py")]
    watched = {name for source in sources for name in re.findall(r'hearts\.watch(?:ing)?\(\s*"([\w-]+)"', source)}
    watched |= {
        getattr(pipeline, name) for source in sources for name in re.findall(r"hearts\.watch\(([A-Z]+)", source)
    }
    assert watched == {thread for thread, _ in CASES}


# --- what takes long and is well -------------------------------------------------------------------------------------


def test_a_store_that_is_full_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    """For any time: a disk may be full for hours. Both readers show that they are there."""
    never = threading.Event()
    query = SimpleNamespace(awaitTermination=lambda _: never.wait(0.02), stop=lambda: None)
    ready = SimpleNamespace(
        session=object(), slots=lambda: 1, state=dict, warm_up=lambda _: None, start=lambda *_: query
    )
    made = ingesting(bench, tmp_path, lambda *_: ready, lambda: Read(entries=NOTHING), room=False)
    made.start()
    for _ in range(2):
        wait_until(lambda: bench.hearts.ages().keys() == {"ingest", "query"}, SEEN_S, "both have begun")
        bench.clock.advance(int(1_000 * SPARK_S))
        wait_until(lambda: bench.silent_s("query") == bench.silent_s("ingest") == 0, SEEN_S, "both show life")
    made.stop(SEEN_S)


def test_a_flush_has_the_time_that_a_slow_disk_needs(bench: Bench) -> None:
    """All that may be in memory, at a megabyte a second."""
    gate = Gate()
    limits = SimpleNamespace(flush_bytes=128 << 20, ready_rows_bytes=256 << 20, segment_bytes_max=1 << 30)
    upkeep = SimpleNamespace(
        flush_due=lambda _: True, flush=lambda *_, **__: gate(), reclaim=lambda _: 0, next_window=lambda _: None
    )
    store: Any = SimpleNamespace(upkeep=upkeep, limits=limits, remove_left=lambda _: 0)
    made = MaintenanceThread(
        store=store,
        clock=bench.clock,
        metrics=Metrics(),
        on_fatal=lambda _: None,
        beat=bench.hearts.watch("maintenance", SPARK_S),
    )
    gate.close()
    made.start()
    assert gate.waiting.wait(SEEN_S)
    bench.clock.advance(384_000)
    assert bench.hearts.problems() == []
    bench.clock.advance(1_000 * int(SPARK_S) + 1)
    assert len(bench.hearts.problems()) == 1
    gate.open()
    made.stop(SEEN_S)


def test_long_work_of_the_start_shows_life_with_its_progress(bench: Bench) -> None:
    """A rebuild may take hours: each report of it counts."""
    beat = bench.hearts.watch("main", CALLS_S)
    health = Health(on_enter=lambda: beat(START_S))
    work = LongWork(health, bench.clock, "catching-up", "records")
    for done in range(50):
        bench.clock.advance(int(1_000 * START_S))
        assert bench.hearts.problems() == []
        work.report(done, 50)
