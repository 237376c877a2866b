"""bridge.delivery.targets.pauses: what an operator has paused, through crashes, restarts and moves of partitions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from bridge.delivery.targets import pauses as module
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.pauses import FILE, Pauses
from bridge.errors import EnvironmentFailure
from bridge.wire.committed_state import (
    METADATA_CHARS_MAX,
    SPARE_CHARS,
    CommittedState,
    decode_metadata,
    initial_state,
)
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from bridge.wire.reasons import RejectReason
from tests.broker.brokers import WELL, Brokers
from tests.manual_clock import ManualClock

STATE = initial_state(
    offset=7,
    topic_id="a",
    partitions=2,
    parameters=DecodeParameters(max_delay_ms=1_000, roll_window_ms=1_000, has_default_target=False),
)


class Kafka:
    """The committed metadata of some partitions, written by an instance whenever it should."""

    def __init__(self, partitions: int = 1) -> None:
        self.texts = {("delay", partition): STATE.metadata() for partition in range(partitions)}

    def states(self, *partitions: int) -> list[CommittedState]:
        wanted = [("delay", partition) for partition in partitions] or list(self.texts)
        return [decode_metadata(name, 7, self.texts[name]) for name in wanted]

    def crowd(self, partition: int) -> None:
        """Have its decode parameters changed so often that there is little room left."""
        [state] = self.states(partition)
        while len(state.metadata()) < METADATA_CHARS_MAX - SPARE_CHARS - 40:
            last = state.epochs[-1]
            parameters = replace(last.parameters, max_delay_ms=3_000 - last.parameters.max_delay_ms)
            epoch = DecodeEpoch(offset=last.offset + 1, parameters=parameters)
            state = replace(state, epochs=(*state.epochs, epoch))
        self.texts["delay", partition] = state.metadata()

    def serve(self, pauses: Pauses, *partitions: int) -> Callable[[], None]:
        """Have these partitions committed as this instance wants them, at once, whenever it wants that."""
        pauses.read(self.states(*partitions))

        def write() -> None:
            states = [state.saying(pauses.to_write()) for state in self.states(*partitions)]
            for number, state in zip(partitions or range(len(self.texts)), states, strict=True):
                self.texts["delay", number] = state.metadata()
            # As the dispatcher's thread: `put` waits for it.
            Thread(target=pauses.written, args=(states,)).start()

        pauses.wake = write
        pauses.has_room = lambda said: all(state.has_room_for(said) for state in self.states(*partitions))
        return write


def instance(kafka: Kafka, *partitions: int, clock: ManualClock | None = None) -> Pauses:
    found = Pauses(clock or ManualClock())
    kafka.serve(found, *partitions)
    return found


@pytest.mark.fault("the loss of store.directory while a target is paused")
def test_a_pause_outlives_the_process_and_its_volume() -> None:
    """Pauses of targets are in Kafka: a pause, its end and its reason survive a start with an empty volume."""
    kafka = Kafka()
    first = instance(kafka)
    assert first.names() == frozenset()
    assert first.put("orders", paused=True, why="repairs") and not first.put("orders", paused=True)
    assert first.put("bills", paused=True) and first.put("bills", paused=False)
    second = instance(kafka)
    assert [(each.name, each.why) for each in second.all()] == [("orders", "repairs")]
    assert [each.name for each in second.ended()] == ["bills"], "what it has put off is still to be brought forward"
    assert second.put("orders", paused=False)
    assert instance(kafka).names() == frozenset()


def test_what_is_said_to_one_instance_holds_for_all() -> None:
    """Each reads it in the partitions of the others, and says it in its own: so it outlives any of them."""
    kafka, clock = Kafka(2), ManualClock()
    first, second = instance(kafka, 0, clock=clock), instance(kafka, 1, clock=clock)
    first.put("orders", paused=True)
    second.read(kafka.states(0))
    assert second.names() == {"orders"} and not second.are_in(kafka.states(1))
    second.wake()
    assert second.are_in(kafka.states(1))
    clock.advance(1_000)
    second.put("orders", paused=False)
    first.read(kafka.states(1))
    assert first.names() == frozenset()
    first.read(kafka.states(0))
    assert first.names() == frozenset(), "what its own partition says is older"


def test_a_pause_ends_by_itself() -> None:
    """When it was said to; what it has put off is brought forward then."""
    clock, kafka = ManualClock(), Kafka()
    found = instance(kafka, clock=clock)
    found.put("orders", paused=True, until_ms=clock.now_ms() + 1_000)
    assert found.applied("orders", WELL) != WELL and not found.ended()
    clock.advance(1_000)
    assert found.applied("orders", WELL) == WELL and not found.names()
    assert [each.ended_ms(clock.now_ms()) for each in found.ended()] == [clock.now_ms()]
    assert not found.put("orders", paused=False)


def test_a_paused_target_takes_nothing_and_others_do() -> None:
    """From the next look on, until it is resumed; what takes nothing anyway is paused first of all."""
    brokers, found = Brokers(), instance(Kafka())
    brokers.topics |= {"orders": WELL, "bills": WELL, "delay": WELL}
    targets = Targets(brokers, ManualClock(), pauses=found)
    assert targets.resolve(["orders"]) == {"orders": WELL}
    for name in ("orders", "missing"):
        found.put(name, paused=True)
    shown = targets.resolve(["orders", "bills", "missing"])
    assert shown["bills"] == WELL
    for name in ("orders", "missing"):
        refusal = shown[name].refusal
        assert refusal is not None and refusal.reason is RejectReason.TARGET_PAUSED and not refusal.counts
    assert ("orders", "target-paused") not in targets.failing(), "it is no trouble"
    found.put("orders", paused=False)
    assert targets.resolve(["orders"]) == {"orders": WELL}


def test_topics_of_the_bridge_are_not_paused() -> None:
    """Neither by a request nor by what was said before the configuration changed."""
    kafka = Kafka()
    instance(kafka).put("delay", paused=True)
    found = Pauses(ManualClock(), own=["delay"], defaults={"a": "orders", "b": None})
    kafka.serve(found)
    assert found.applied("delay", WELL) == WELL
    found.put("delay", paused=False)
    with pytest.raises(ValueError, match="a topic of the bridge itself"):
        found.put("delay", paused=True)
    found.put("orders", paused=True)
    assert found.topics() == {"a"}


def test_pauses_fit_into_the_metadata() -> None:
    """One too many is refused, and what is written has room for what else must be written."""
    kafka = Kafka()
    found = instance(kafka)
    for number in range(4):
        found.put(f"{number:-<249}", paused=True, why="w" * 100)
    with pytest.raises(ValueError, match="resume some"):
        found.put("-" * 249, paused=True)
    assert len(found.names()) == len(kafka.states()[0].pauses) == 4
    assert kafka.states()[0].has_room_for_a_step()


def test_a_pause_that_a_partition_has_no_room_for_is_refused() -> None:
    """When it is put, before anything is written: the bound on pauses alone may be met, and the rest of the metadata be
    long. What was written is kept, and can be resumed."""
    kafka = Kafka(2)
    found = instance(kafka)
    found.put("orders", paused=True)
    kafka.crowd(1)
    with pytest.raises(ValueError, match="resume some"):
        found.put("bills" * 12, paused=True)
    assert found.names() == {"orders"} and found.are_in(kafka.states())
    assert found.put("orders", paused=False) and found.are_in(kafka.states())


def test_what_one_partition_has_no_room_for_is_not_written_again_and_again() -> None:
    """Another instance was told of it, and says it in its own."""
    kafka = Kafka(2)
    kafka.crowd(1)
    first, second = instance(kafka, 0), instance(kafka, 1)
    first.put("bills" * 12, paused=True)
    second.read(kafka.states(0))
    assert second.names() == first.names() and second.are_in(kafka.states(1))


def test_what_cannot_be_written_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is delivered to as before, and the error says so."""
    monkeypatch.setattr(module, "WRITE_S", 0.01)
    found = Pauses(ManualClock())
    with pytest.raises(EnvironmentFailure, match="could not be written"):
        found.put("orders", paused=True)
    assert found.names() == frozenset() and found.applied("orders", WELL) == WELL and not found.to_write()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paused": 1}', '{"paused": ["a b"]}', "[" * 5_000])
def test_a_damaged_file_is_not_taken_for_no_pause(tmp_path: Path, text: str) -> None:
    """The start is refused, with the file's name."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(EnvironmentFailure, match=rf"{FILE}.*Remove the file"):
        Pauses(ManualClock(), directory=tmp_path)


def test_the_file_of_an_earlier_version_is_read_once(tmp_path: Path) -> None:
    """Its pauses hold from the start on, and it is removed when they are in Kafka; read again after a crash, it is no
    newer than what was said since."""
    clock, kafka, file = ManualClock(), Kafka(), tmp_path / FILE
    text = json.dumps({"paused": ["orders"]})
    file.write_text(text)
    os.utime(file, (clock.now_ms() / 1000 - 60, clock.now_ms() / 1000 - 60))
    found = Pauses(clock, directory=tmp_path)
    assert found.names() == {"orders"} and file.exists()
    found.read(kafka.states())
    states = [replace(state, pauses=found.to_write()) for state in kafka.states()]
    found.written(states)
    assert not file.exists() and found.names() == {"orders"}
    kafka.serve(found)
    found.put("orders", paused=False)
    file.write_text(text)
    os.utime(file, (clock.now_ms() / 1000 - 60, clock.now_ms() / 1000 - 60))
    again = Pauses(clock, directory=tmp_path)
    kafka.serve(again)
    assert again.names() == frozenset()


def test_a_look_at_other_instances_holds_up_no_commit() -> None:
    """States are read from Kafka before anything waits for them: a slow coordinator is no reason to stop delivery."""
    kafka = Kafka()
    found = instance(kafka)

    def slow() -> Iterator[CommittedState]:
        for state in kafka.states():
            committing = Thread(target=found.written, args=([state],), daemon=True)
            committing.start()
            committing.join(10)
            assert not committing.is_alive()
            yield state

    found.read(slow())
