"""bridge.runtime.wiring: the planner's limits, as the producer's properties say."""

from __future__ import annotations

from unittest import mock

import pytest

from bridge.kafka.admin import Watermarks
from bridge.runtime import wiring
from bridge.settings.model import Settings


@pytest.mark.fault("compression under its other name")
@pytest.mark.parametrize(
    ("properties", "can_go"),
    [
        ({}, 1_000),
        ({"compression.type": "none"}, 1_000),
        ({"compression.codec": "none"}, 1_000),
        ({"compression.type": "lz4"}, 5_000_000),
        ({"compression.codec": "zstd"}, 5_000_000),
    ],
)
def test_compression_has_two_names(monkeypatch: pytest.MonkeyPatch, properties: dict[str, str], can_go: int) -> None:
    """With either name of compression, only the brokers judge whether a record is too large for its target."""
    planner = mock.Mock()
    monkeypatch.setattr(wiring, "Planner", planner)
    common = {"bootstrap.servers": "127.0.0.1:1"}
    producer = {"message.max.bytes": "5000000", **properties}
    wiring.make_planner(Settings.of({"kafka": {"common": common, "producer": producer}}), mock.Mock(), None)
    limits = planner.call_args.kwargs["limits"]
    assert limits.record_bytes(mock.Mock(bytes_max=1_000)) == can_go


def test_a_log_without_a_leader_hides_no_other_end() -> None:
    """The ends of the logs with a leader are known, also while another one has none."""
    led, silent = ("delay", 0), ("delay", 1)

    def watermarks(names: list[tuple[str, int]], *, of_all: bool = True) -> dict[tuple[str, int], Watermarks]:
        assert not of_all, "it would raise"
        return {name: Watermarks(start=0, end=7, epoch=1) for name in names if name != silent}

    assert wiring.log_ends(mock.Mock(watermarks=watermarks), {led, silent}) == {led: 7}
