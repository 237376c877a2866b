"""bridge.delivery.doubt.read_back: which states are written again."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from unittest import mock

import pytest

from bridge.delivery.doubt.read_back import ReadBack
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState, Manifest, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock

PARAMETERS: Final = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
NAME: Final = ("orders", 0)
NEW, OLD = ("1" * 16, 5), ("2" * 16, 4)


def state_of(manifest: Manifest | None, offset: int = 9) -> CommittedState:
    state = initial_state(offset=0, topic_id="t", partitions=1, parameters=PARAMETERS)
    return replace(state, offset=offset, manifest=manifest)


@pytest.mark.parametrize(
    ("found", "is_wrong"),
    [(state_of(NEW), False), (state_of(OLD), True), (state_of(None), True), (state_of(NEW, 8), True), (None, True)],
    ids=["the same", "an earlier manifest", "no manifest", "an earlier offset", "no state"],
)
def test_a_state_that_a_late_request_has_put_back_is_written_again(
    found: CommittedState | None, is_wrong: bool
) -> None:
    """Also if it differs in the manifest alone: nobody would find the present index, nor the former one, which is
    deleted."""
    member = mock.Mock(revocations=0)
    back = ReadBack(lambda names, _: dict.fromkeys(names, found), lambda: member, ManualClock(), Metrics())
    back.committed([NAME], is_in_doubt=False)
    back.look({NAME: state_of(NEW)}, 0)
    assert back.again == ({NAME} if is_wrong else set())
