"""Commands that were written in time while no bridge ran, on a scripted Kafka: they come before what they cover."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.delivery import commands_first as module
from bridge.delivery.commands_first import CommandsFirst
from bridge.errors import EnvironmentFailure
from bridge.stores.names import SourceName
from bridge.stores.stores import Life
from bridge.wire import headers as h
from tests.manual_clock import ManualClock
from tests.model.dispatch_rig import DELAY, DispatchRig
from timerstore.rows.position import AT_MIN

HERE: SourceName = (DELAY, 0)
ELSEWHERE: SourceName = (DELAY, 1)
THERE: SourceName = (DELAY, 2)
DUE_MS = 21_000
STEPS = 200


@pytest.fixture
def rig() -> Iterator[DispatchRig]:
    made = DispatchRig()
    yield made
    made.close()


def step(rig: DispatchRig, steps: int = STEPS) -> None:
    for _ in range(steps):
        rig.step()


def orders(rig: DispatchRig) -> int:
    """How many messages were delivered."""
    return rig.delivered["orders"]


def written(rig: DispatchRig, *ids: str) -> None:
    """Messages with these ids, read, below the committed O."""
    for id in ids:
        rig.timer(0, DUE_MS, "orders", (h.ID, id), key=None)
    while rig.kafka.offsets[HERE][0] < len(rig.kafka.logs[HERE]):
        rig.step()


def came_back(rig: DispatchRig) -> None:
    """The process ends, and is started again when all is overdue; nothing is read beyond the committed O yet."""
    rig.pass_ms(DUE_MS + 3_000)
    rig.reads = {name: rig.kafka.offsets[name][0] for name in rig.owned}
    rig.crash()


@pytest.mark.fault("commands written while the bridge was down")
def test_commands_above_the_committed_offset_come_before_what_they_cover(rig: DispatchRig) -> None:
    """A cancel that was written in time during the downtime takes effect before any delivery, also one without a key in
    another partition."""
    written(rig, "with its key", "without a key", "kept")
    rig.produce(0, (h.CANCEL, "with its key"))
    rig.produce(1, (h.CANCEL, "without a key"), key=None)
    came_back(rig)
    step(rig, 20)
    assert not orders(rig) and rig.store.in_life(Life.COMMANDS_FIRST)
    rig.reads = {}
    step(rig, 30)
    assert orders(rig) == 1 and rig.store.in_life(Life.LIVE) == [HERE, ELSEWHERE, THERE]


def test_commands_that_are_not_read_in_time_hold_up_nothing_for_longer(rig: DispatchRig) -> None:
    """After `start.read_commands` it delivers, and a warning says how far each partition was not read: also when the
    other partitions no longer wait for it."""
    written(rig, "a")
    rig.produce(0, (h.CANCEL, "a"), key=None)
    with capture_logs() as logs:
        came_back(rig)
        step(rig, 5)
        rig.pass_ms(1_000 * module.PATIENCE_S - 500)
        step(rig, 5)
        assert not orders(rig)
        rig.pass_ms(1_000)
        step(rig)
    assert orders(rig) == 1
    for told in [line for line in logs if line["event"] == "commands-unread"]:
        assert told["partitions"] == [f"{DELAY}/0: read to 1 of 2"] and told["records"] == 1
    assert [line["event"] for line in logs].count("commands-unread") == 2


def test_what_leaves_no_room_is_not_waited_for(rig: DispatchRig) -> None:
    """The end of the log would never be read; a flush has a while to make room."""
    written(rig, "a")
    rig.produce(0, (h.CANCEL, "a"), key=None)
    came_back(rig)
    with mock.patch.object(rig.store, "has_room", return_value=False):
        step(rig, 5)
        assert not orders(rig)
        rig.pass_ms(1_000 * module.FULL_S)
        step(rig)
    assert orders(rig) == 1


def test_while_messages_wait_their_offsets_are_committed_and_rejects_are_finished(rig: DispatchRig) -> None:
    """So that segments are written of what is read, and memory stays bounded."""
    written(rig, "a")
    for _ in range(3):
        rig.produce(0, (h.TOPIC, "orders"))  # without a time
    rig.timer(0, 1, "orders")
    rig.produce(1, (h.CANCEL, "a"), key=None)
    came_back(rig)
    rig.reads = {ELSEWHERE: rig.kafka.offsets[ELSEWHERE][0]}
    step(rig, 40)
    assert rig.kafka.offsets[HERE][0] == 5 and rig.ends["dead"] == 3 and not orders(rig)


def test_ends_that_are_not_known_are_asked_for_again(rig: DispatchRig) -> None:
    """Brokers that do not answer cost the time until they do, no more."""
    written(rig, "a")
    rig.produce(1, (h.CANCEL, "a"), key=None)
    came_back(rig)
    first = rig.dispatcher.commands_first
    failures = [EnvironmentFailure("no", hint="")]

    def log_ends(names: Collection[SourceName]) -> Mapping[SourceName, int]:
        if failures:
            raise failures.pop()
        return rig.log_ends(names)

    ends = mock.Mock(side_effect=log_ends)
    first._log_ends = ends
    rig.reads = {HERE: 1}
    step(rig, 20)
    assert ends.call_count == 2 and rig.store.in_life(Life.COMMANDS_FIRST), "the forwarded cancel is to be read"
    rig.reads = {}
    step(rig)
    assert not orders(rig) and not rig.store.in_life(Life.COMMANDS_FIRST)


@pytest.mark.fault("a late answer of the brokers, of an earlier start")
def test_a_late_answer_does_not_count_for_a_later_start() -> None:
    """Messages of a start wait for the log ends of that start, not for late answers to earlier look-ups."""
    asked: list[Callable[[], None]] = []
    ends = {HERE: 9}
    clock = ManualClock(0)
    first = CommandsFirst(clock, log_ends=lambda _: ends, run=asked.append)
    store = mock.Mock(**{"next_offsets.return_value": {HERE: 5}, "has_commands.return_value": False})
    store.in_life.side_effect = lambda *lives: [HERE] if Life.COMMANDS_FIRST in lives else []
    for _ in range(2):
        first.begin()
        first.expect({HERE: 5})
        first.committed({HERE})
        assert not first.ready(store)
    late, current = asked
    ends = {HERE: 5}
    late()
    assert not first.ready(store), "what was looked up for it is not answered"
    ends = {HERE: 9}
    current()
    assert not first.ready(store), "it is not read up to there"
    store.next_offsets.return_value = {HERE: 9}
    assert first.ready(store) == [HERE]


def test_a_partition_that_joins_waits_for_its_commands_alone(rig: DispatchRig) -> None:
    """It is held until it is read up to its end as of the join; the others go on meanwhile."""
    written(rig, "a")
    rig.follow({ELSEWHERE, THERE})
    rig.produce(0, (h.CANCEL, "a"), key=None)
    rig.pass_ms(DUE_MS)
    rig.reads = {HERE: 1}
    rig.follow({HERE, ELSEWHERE, THERE})
    rig.timer(1, 10, "orders")
    step(rig, 20)
    assert rig.followed and orders(rig) == 1 and rig.store.in_life(Life.COMMANDS_FIRST) == [HERE]
    rig.reads = {}
    step(rig, 30)
    assert orders(rig) == 1 and rig.store.in_life(Life.LIVE) == [HERE, ELSEWHERE, THERE]
    assert rig.store.next_wakeup_ms() in (None, AT_MIN)


def test_a_partition_that_joins_does_not_wait_for_ever(rig: DispatchRig) -> None:
    written(rig, "a")
    rig.follow({ELSEWHERE, THERE})
    rig.produce(0, (h.CANCEL, "a"), key=None)
    rig.pass_ms(DUE_MS)
    rig.reads = {HERE: 1}
    rig.follow({HERE, ELSEWHERE, THERE})
    step(rig, 20)
    assert not orders(rig)
    rig.pass_ms(1_000 * module.PATIENCE_S)
    step(rig)
    assert orders(rig) == 1


class Reads:
    """Partitions whose reading progress is set by hand: all have arrived, but for those that catch up or are held."""

    def __init__(self, at: dict[SourceName, int]) -> None:
        self.clock = ManualClock(0)
        self.first = CommandsFirst(self.clock)
        self.at = at
        self.lives: dict[SourceName, Life] = dict.fromkeys(at, Life.COMMANDS_FIRST)
        self.store = mock.Mock(**{"has_commands.return_value": False, "has_room.return_value": True})
        self.store.next_offsets.side_effect = lambda: dict(self.at)
        self.store.in_life.side_effect = lambda *lives: [name for name, life in self.lives.items() if life in lives]
        self.first.expect(dict.fromkeys(at, 9))

    def ready(self) -> list[SourceName]:
        live = self.first.ready(self.store)
        self.lives |= dict.fromkeys(live, Life.LIVE)
        return live


@pytest.mark.fault("a corrupt batch, or a lost leader, at a start")
@pytest.mark.parametrize("life", [Life.CATCHING_UP, Life.COMMANDS_FIRST, Life.HELD])
def test_no_other_partition_waits_for_one_that_nobody_can_read(life: Life) -> None:
    """The partitions that can be read go live at once. Of its own commands it waits for `start.read_commands`."""
    reads = Reads({HERE: 9, ELSEWHERE: 4})
    reads.lives[ELSEWHERE] = life
    if life is not Life.HELD:
        assert not reads.ready(), "it is not known yet"
        reads.first.unreadable = {ELSEWHERE}
    assert reads.ready() == [HERE] and not reads.ready()
    reads.lives[ELSEWHERE] = Life.COMMANDS_FIRST
    assert not reads.ready()
    reads.clock.advance(int(1_000 * module.PATIENCE_S))
    assert reads.ready() == [ELSEWHERE]


@pytest.mark.fault("a partition that is not read, at a start")
def test_other_partitions_wait_for_one_while_it_comes_on() -> None:
    """They wait for `start.read_commands`, or until none has come on for five seconds. One may rest meanwhile, as
    Spark reads the backlog of another."""
    reads = Reads({HERE: 9, ELSEWHERE: 4, THERE: 0})
    for at in (5, 6, 7):
        reads.clock.advance(int(1_000 * module.STILL_S) - 1)
        reads.at[ELSEWHERE] = at
        assert not reads.ready()
    reads.clock.advance(int(1_000 * module.STILL_S) - 1)
    reads.at[THERE] = 9
    assert not reads.ready()
    reads.clock.advance(int(1_000 * module.STILL_S))
    assert reads.ready() == [HERE, THERE]
    reads.at[ELSEWHERE] = 9
    assert reads.ready() == [ELSEWHERE]
