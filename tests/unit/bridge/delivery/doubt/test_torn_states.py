"""The states of a transaction that ended unasked, and a volume that does not take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.delivery.doubt.doubt_file import DoubtFile
from bridge.delivery.doubt.doubts import Doubts, Output
from bridge.delivery.doubt.torn_states import TornStates
from bridge.wire.committed_state import initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock

NAME = ("delay", 0)
PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
BEFORE = initial_state(offset=5, topic_id="id", partitions=1, parameters=PARAMETERS)
AFTER = replace(BEFORE, offset=9)


def doubts_in(directory: Path, clock: ManualClock) -> Doubts:
    nothing = mock.Mock()
    return Doubts(
        read=nothing,
        choices=nothing,
        letter_topics=(),
        file=DoubtFile(directory),
        torn=TornStates(directory),
        clock=clock,
        metrics=nothing,
        run=nothing,
    )


@pytest.mark.fault("a full disk when a transaction has ended unasked")
def test_states_that_could_not_be_written_are_written_again(tmp_path: Path) -> None:
    """A failed write is repeated each second, also for a transaction without messages; the operator is told once."""
    directory, clock, nothing = tmp_path / "store", ManualClock(), mock.Mock()
    doubts = doubts_in(directory, clock)
    with capture_logs() as entries:
        doubts.note(Output(planned=[], sent=[], began_ms=0, after={NAME: AFTER}), {NAME: BEFORE}, nothing)
        for _ in range(2):
            clock.advance(1_000)
            assert not doubts.look(nothing)
    assert [entry["event"] for entry in entries] == ["states-not-written"]
    directory.mkdir()
    clock.advance(1_000)
    doubts.look(nothing)
    found: Any = TornStates(directory).taken_back({NAME: AFTER})
    assert found == {NAME: BEFORE}


@pytest.mark.fault("a partition that goes before its torn state is written again")
def test_a_torn_state_stays_until_kafka_holds_another_one(tmp_path: Path) -> None:
    """A partition that goes, to be read again or to another instance, and comes back finds the state before the
    transaction; a committed state ends that."""
    doubts = doubts_in(tmp_path, ManualClock())
    doubts.note(Output(planned=[], sent=[], began_ms=0, after={NAME: AFTER}), {NAME: BEFORE}, mock.Mock())
    doubts.go([NAME], mock.Mock())
    assert doubts.torn.taken_back({NAME: AFTER}) == {NAME: BEFORE}
    assert doubts.torn.taken_back({NAME: replace(AFTER, offset=10)}) == {}
    doubts.committed({NAME: BEFORE}, mock.Mock())
    assert doubts.torn.taken_back({NAME: AFTER}) == {}
