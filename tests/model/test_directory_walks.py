"""Walks of the machine of index directories (test_directories.py) that always take place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final

import pytest

from tests.model.directories_promises import Marks, flushable
from tests.model.directories_rig import (
    MINUTE_MS,
    NAMES,
    RETENTION_MS,
    WINDOW_MS,
    Crash,
    Instance,
    Message,
    crashing_after,
)
from tests.model.test_directories import Directories
from timerstore.disk import files
from timerstore.errors import Corrupt

D, D1, E = NAMES
FAR: Final = 100
"""Minutes until a message is due."""


def begun(
    *written: tuple[tuple[str, int], int],
    owners: tuple[int, int, int] = (0, 0, 1),
    machine: Directories | None = None,
) -> Directories:
    """Instance 0 has d, instance 1 has e; both run, and have read and flushed messages due after these minutes."""
    machine = machine or Directories()
    machine.begin(owners=owners, earlier=set(), written=[*written])
    for here in machine.instances:
        machine._start(here)
        settle(machine, here)
    machine.in_doubt.clear()  # of a first use
    return machine


def settle(machine: Directories, here: Instance) -> None:
    """An instance reads to the end, and commits and flushes that; it looks at retention."""
    machine.decoding.note(here)
    here.read()
    machine._must_be_whole(here)
    here.deliver(0)
    here.look()
    here.deliver(0)
    flush(machine, here)
    Marks.must_stand(here, machine.broker)


def flush(machine: Directories, here: Instance) -> None:
    here.flush()
    ends = flushable(here)
    machine.indexes.must_be_flushed(here, ends, ends)


def down(machine: Directories) -> None:
    """All instances end without another word."""
    for each in machine.instances:
        each.crash()


def up(machine: Directories, refused: str | None = None) -> None:
    """All instances start, and one is `refused`, or none."""
    for each in machine.instances:
        if not each.is_running:
            each.refusals = []
            machine._start(each)
    codes = {error.code for each in machine.instances for error in each.refusals}
    assert codes == ({refused} if refused else set()), codes


def deliver(machine: Directories, here: Instance) -> None:
    """All due messages, which must be whole, each once."""
    settle(machine, here)
    for message in here.deliver(100):
        assert message.is_pending, f"{message} comes again"
        assert message.record.at_ms <= machine.clock.now_ms(), f"{message} is early"
        message.is_delivered = True


def read_and_deliver(here: Instance) -> None:
    """All due messages, at once."""
    here.read()
    for message in here.deliver(100):
        message.is_delivered = True


def finish(machine: Directories, refused: str | None = None) -> None:
    """`up`, and all messages of open partitions are delivered in the end."""
    up(machine, refused)
    opened = {name for each in machine.instances for name in each.opened()}
    assert not machine.in_doubt & {message for name in opened for message in _pending(machine, name)}
    for minutes in (0, FAR // 2, WINDOW_MS // MINUTE_MS):
        machine.clock.advance(minutes * MINUTE_MS)
        for each in machine.instances:
            deliver(machine, each)
    lost = {name: pending for name in opened if (pending := _pending(machine, name))}
    assert not lost, lost
    machine.teardown()


def _pending(machine: Directories, name: tuple[str, int]) -> Collection[Message]:
    return machine.broker.pending(name).values()


def deleted_with_the_owner_gone() -> None:
    """The index has them, and is enough. Kafka says so until they are delivered, and then needs no index again."""
    machine = begun((D, FAR), (D, FAR), (E, FAR))
    here = machine.instances[0]
    down(machine)
    machine.delete_records(D, 1.0)
    up(machine)
    settle(machine, here)
    assert machine._marked(D) == 2
    down(machine)
    up(machine)
    read_and_deliver(here)  # before the first look
    machine.clock.advance(MINUTE_MS)
    settle(machine, here)
    assert machine._marked(D) == 0
    down(machine)
    machine.lose_index(0, D, None)
    finish(machine)


def deleted_and_the_index_lost() -> None:
    """The mark of the last owner refuses a start without it, here and on any instance."""
    machine = begun((D, FAR), (D1, FAR))
    machine.delete_records(D, 1.0)
    down(machine)
    machine.lose_index(0, D, None)
    finish(machine, refused="DB-4012")


def torn_mark() -> None:
    """The mark is committed, and its process does not learn that; before that, the index counts alone."""
    for is_committed in (True, False):
        machine = begun((D, FAR), (D1, FAR))
        machine.clock.advance(RETENTION_MS)
        machine.broker.starts[D] = 1
        machine.instances[0].look()
        if is_committed:
            machine.instances[0].deliver(0, is_acknowledged=False)
        down(machine)
        up(machine)
        settle(machine, machine.instances[0])
        down(machine)
        machine.lose_index(0, D, None)
        finish(machine, refused="DB-4012")


def long_downtime() -> None:
    """Without the index, an old unread record tells that others are gone. Kafka knows then, and the next start does."""
    machine = begun((D, FAR), (D1, FAR))
    down(machine)
    machine.write(D, FAR)
    machine.a_day_passes()
    machine.broker.starts[D] = 1
    machine.lose_index(0, D, None)
    up(machine, "DB-4012")
    assert machine._marked(D) == 1
    down(machine)
    machine.in_doubt.clear()
    finish(machine, refused="DB-4012")


def short_downtime() -> None:
    """Without the index, a young unread record tells that nothing is gone that was pending."""
    machine = begun((D, 0), (D1, FAR))
    deliver(machine, machine.instances[0])
    down(machine)
    machine.a_day_passes()
    machine.broker.starts[D] = 1
    machine.write(D, FAR)
    machine.lose_index(0, D, None)
    finish(machine)


def lost_index() -> None:
    """All is in Kafka: it is read again, without the delivered messages."""
    machine = begun((D, 0), (D, FAR), (D1, FAR), (E, FAR))
    deliver(machine, machine.instances[0])
    down(machine)
    machine.lose_index(0, D, None)
    machine.lose_index(1, E, None)
    finish(machine)


def moved_index() -> None:
    """In another partition's directory it is foreign; another instance can use it."""
    machine = begun((D, FAR), (D1, FAR), (E, FAR))
    down(machine)
    machine.lose_index(0, D, (0, D1))
    up(machine, "DB-4015")
    down(machine)
    machine.lose_index(0, D1, (1, D))
    machine.broker.owners[D] = 1
    finish(machine)


def moved_partition() -> None:
    """The other instance reads all; back here within ten minutes, the index goes on from its end, and later it is
    gone. With deleted records of pending messages it stays."""
    machine = begun((D, FAR), (D1, FAR))
    for minutes, is_left in ((8, False), (11, True)):
        machine.move(D, 1, True)
        settle(machine, machine.instances[1])
        machine.pass_time(1)
        machine.write(D, FAR)
        machine.pass_time(minutes)
        assert machine.instances[0].path(D).is_dir() is not is_left
        machine.move(D, 0, True)
        settle(machine, machine.instances[0])
    machine.delete_records(D, 1.0)
    machine.move(D, 1, True)
    machine.pass_time(61)
    machine.move(D, 0, True)
    finish(machine)


def held_index() -> None:
    """The index of a held partition stays; it is ours."""
    machine = begun((D, FAR), (D1, FAR), (E, FAR), owners=(0, 0, 0))
    down(machine)
    machine.broker.silent.add(E)
    up(machine, "DB-3002")
    for _ in range(2):
        machine.pass_time(11)
    down(machine)
    machine.broker.silent.clear()
    finish(machine)


def read_ahead() -> None:
    """An index never ends beyond the committed offset."""
    machine = begun((D, FAR), (D1, FAR), (E, FAR))
    machine.write(D, 0)
    machine.instances[0].read()
    flush(machine, machine.instances[0])
    down(machine)
    finish(machine)


def outrun() -> None:
    """An index that ends before the log begins is not read on; its rows are finished elsewhere."""
    machine = begun((D, 0), (D1, FAR))
    machine.move(D, 1, False)
    machine.write(D, 0)
    deliver(machine, machine.instances[1])
    machine.broker.starts[D] = 2
    down(machine)
    machine.broker.owners[D] = 0
    finish(machine)


def forgotten_offsets() -> None:
    """With an index nothing begins anew; elsewhere it does, and then the index here is outdated."""
    machine = begun((D, FAR), (E, FAR))
    machine.write(E, 0)
    read_and_deliver(machine.instances[1])  # no flush has it
    settle(machine, machine.instances[1])
    machine.forget_offsets("e", None)
    down(machine)
    up(machine, "DB-4001")
    down(machine)
    machine.broker.owners = dict.fromkeys(NAMES, 0)
    up(machine)
    down(machine)
    machine.in_doubt.clear()
    machine.broker.owners[E] = 1
    finish(machine)


def reset_elsewhere() -> None:
    """An index that a reset on another machine has outdated is not taken for valid."""
    for to in ("earliest", "latest"):
        machine = begun((D, 0), (D, FAR), (D1, FAR), (E, FAR))
        deliver(machine, machine.instances[0])
        flush(machine, machine.instances[0])
        machine.reset("d", to, 1)
        finish(machine)


def given_up_elsewhere() -> None:
    """Messages whose records are gone are given up, with an index of them that ends where the remaining ones begin."""
    machine = begun((D, FAR), (D, FAR), (D1, FAR))
    machine.delete_records(D, 1.0)
    machine.reset("d", "committed", 1)
    machine.in_doubt.clear()
    for message in machine.broker.gone(D).values():
        message.is_given_up = True
    finish(machine)


def cut_elsewhere() -> None:
    """Rows above a cut of the log do not count. Those below it, of deleted records, are in the index alone."""
    machine = begun((D, FAR), (D, FAR // 4), (D, FAR // 4), (D1, FAR))
    machine.broker.starts[D] = 1
    settle(machine, machine.instances[0])
    assert machine._marked(D) == 1
    down(machine)
    state = machine.broker.state(D)
    assert state is not None
    state = state.rewound(1, machine.clock.now_ms())
    machine.broker.logs[D] = machine.broker.logs[D][:1]
    machine.write(D, FAR // 2)
    machine.write(D, FAR // 2)
    state = replace(state, offset=3)  # another instance has read them
    machine.broker.commits[D] = state.offset, state.metadata()
    machine.indexes.doubt([D])
    finish(machine)


def damaged_file(kind: str) -> None:
    """Its content stays as evidence, and the other files until all is read again. Each crash of the repair costs
    another start, and nothing else."""
    machine = begun((D, FAR), (D1, FAR), (E, FAR))
    here = machine.instances[0]
    machine.write(D, FAR)
    settle(machine, here)
    down(machine)
    [*_, path] = sorted(here.path(D).glob(kind))
    path.write_bytes(b"damaged")
    machine.indexes.doubt([D])
    for count in range(1, 7):
        machine.crash_between_files(0, "start", count)
    up(machine)
    assert [each.read_bytes() for each in here.path(D).glob(f"*{files.CORRUPT_SUFFIX}")] == [b"damaged"]
    assert [*here.path(D).glob(f"*{files.ASIDE_SUFFIX}")]
    settle(machine, here)
    assert not [*here.path(D).glob(f"*{files.ASIDE_SUFFIX}")]
    finish(machine)


def damaged_checkpoint() -> None:
    """See `damaged_file`."""
    damaged_file(files.CHECKPOINT)


def damaged_segment() -> None:
    """See `damaged_file`."""
    damaged_file(f"*{files.SEGMENT_SUFFIX}")


def killed_with_a_file_aside() -> None:
    """A running instance sets a damaged file aside, and ends before its partition is open again, behind each change of
    files. The other partition's index is used."""
    for count in range(6):
        machine = begun((D, FAR), (D1, FAR), (E, FAR))
        here = machine.instances[0]
        [path] = here.path(D).glob(f"*{files.SEGMENT_SUFFIX}")
        content = path.read_bytes()
        path.write_bytes(content[:4] + bytes(60) + content[64:])  # opening it does not tell
        machine.indexes.doubt([D])
        assert here.store is not None
        here.store.damage.set_aside(Corrupt("it fails its checksum", path=str(path)), machine.clock.now_ms())
        here.context.on_held.assert_called_once_with()  # type: ignore[attr-defined]
        assert [*here.path(D).glob(f"*{files.CORRUPT_SUFFIX}")] and not path.exists()
        if count:
            with crashing_after(count), suppress(Crash):
                here.rebase()
                assert here.store.next_offsets() == {D: 0, D1: 1} and not here.store.damage.names
        down(machine)
        finish(machine)


def earlier_version() -> None:
    """The index of an earlier version stays until all is read again, and while it is the only place of messages."""
    for is_marked in (False, True):
        machine = Directories()
        machine.begin(owners=(0, 0, 1), earlier={0}, written=[(D, FAR), (D1, FAR)])
        here = machine.instances[0]
        machine.earlier_version_runs(0, 0, True)
        if is_marked:
            machine.broker.starts[D] = 1
            machine.earlier_version_runs(0, 0, False)
            machine._start(here)
            assert here.refusal is not None and here.refusal.code == "DB-4012"
        else:
            machine._start(here)
            here.look()
        assert here.has_index_of_earlier_version()
        if not is_marked:
            settle(machine, here)
            here.look()
            assert not here.has_index_of_earlier_version()
        machine.old_indexes_stay_while_they_are_needed()
        machine.teardown()


def earlier_version_of_another_topic() -> None:
    """The index of an earlier version says nothing about a topic that was created again and lost its offsets."""
    machine = Directories()
    machine.begin(owners=(0, 0, 0), earlier={0}, written=[(D, FAR)])
    machine.earlier_version_runs(0, 0, True)
    machine.make_topic_again("d")
    machine.forget_offsets("d", None)
    machine.write(D, FAR)
    here = machine.instances[0]
    machine._start(here)
    assert here.refusal is None
    settle(machine, here)
    machine.teardown()


def changed_retention() -> None:
    """Records are read again with the window that they were finished with."""
    machine = begun((D, FAR), (D1, FAR), (E, FAR))
    for days in (2, 1):
        machine.change_retention(days)
        down(machine)
        machine.write(D, FAR)
        up(machine)
        for each in machine.instances:
            settle(machine, each)
    down(machine)
    machine.lose_index(0, D, None)
    finish(machine)


def lowered_retention() -> None:
    """The pending messages of a quiet partition may have been deleted: without the index, a start is refused, also
    once the retention is raised again. After their delivery none is refused."""
    for is_delivered, is_raised in ((False, False), (False, True), (True, False)):
        machine = Directories()
        machine.change_retention(2)
        machine = begun((D, FAR), (D1, FAR), machine=machine)
        here = machine.instances[0]
        down(machine)
        machine.change_retention(1)
        machine.clock.advance(RETENTION_MS if is_delivered else MINUTE_MS)
        if is_delivered:
            up(machine)
            read_and_deliver(here)
            settle(machine, here)
            machine.broker.starts[D] = 1
            down(machine)
            up(machine)  # with an index, and nothing to deliver
            settle(machine, here)
            down(machine)
        machine.broker.starts[D] = 1
        machine.lose_index(0, D, None)
        machine.in_doubt.clear()
        if is_raised:
            up(machine, "DB-4012")
            down(machine)
            machine.change_retention(2)
        finish(machine, None if is_delivered else "DB-4012")


WALKS: Final = [
    deleted_with_the_owner_gone, deleted_and_the_index_lost, torn_mark, long_downtime, short_downtime, lost_index,
    moved_index, moved_partition, held_index, read_ahead, outrun, forgotten_offsets, reset_elsewhere,
    given_up_elsewhere, cut_elsewhere, damaged_checkpoint, damaged_segment,
    killed_with_a_file_aside, earlier_version, earlier_version_of_another_topic, changed_retention,
    lowered_retention,
]  # fmt: skip


@pytest.mark.fault("an index directory that is lost, moved, outdated or damaged")
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_a_valid_index_is_used_and_no_other_one(walk: Callable[[], None]) -> None:
    """A start uses a valid index to its end, and no other one; it is refused only where messages may be lost."""
    walk()
