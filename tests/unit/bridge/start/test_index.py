"""bridge.start.index: what a directory that cannot be used is to a start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.errors import EnvironmentFailure
from bridge.settings.model import Settings
from bridge.start import index
from bridge.start.index import find_index
from bridge.stores.names import SourceName
from bridge.wire.committed_state import initial_state
from bridge.wire.decode_epochs import DecodeParameters


def test_a_directory_that_cannot_be_made_is_the_environments(tmp_path: Path) -> None:
    """The volume may have become unusable since the checks; the error says what to look at, and is no bug of ours."""
    (tmp_path / "file").touch()
    settings = Settings.of(
        {
            "bridge": {"id": "bridge", "instance": "one"},
            "kafka": {"common": {"bootstrap.servers": "localhost:1"}},
            "delay_topics": {"delay": {}},
            "store": {"directory": str(tmp_path / "file" / "store")},
        }
    )
    cluster: Any = SimpleNamespace(
        topic_ids=lambda names: dict.fromkeys(names, "id"), describe=lambda: SimpleNamespace(cluster_id="cluster")
    )
    with pytest.raises(EnvironmentFailure, match="cannot use"):
        find_index(settings, cluster)


STATE = initial_state(
    offset=9,
    topic_id="a",
    partitions=2,
    parameters=DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False),
)
OURS, THEIRS, GONE, NEW = ("delay", 0), ("delay", 1), ("delay", 2), ("delay", 3)


def test_the_index_of_another_instance_is_spare_if_kafka_has_its_records() -> None:
    """By its committed state. Own ones never are, nor those without a state, nor any without an answer."""
    states = dict.fromkeys((OURS, THEIRS), STATE) | {GONE: replace(STATE, gone_below=3)}
    answers = {name: (state.offset, state.metadata()) for name, state in states.items()}
    names = [OURS, THEIRS, GONE, NEW]

    def committed(_: str, wanted: Collection[SourceName]) -> dict[SourceName, tuple[int, str]]:
        assert OURS not in wanted
        return {name: answers[name] for name in wanted if name in answers}

    def silent(*_: object) -> None:
        raise EnvironmentFailure("no answer", hint="", code="DB-3071")

    cluster: Any = SimpleNamespace(committed=committed)
    assert index.spare(Settings.of({}), cluster, lambda: {OURS}, names) == {THEIRS}
    assert index.spare(Settings.of({}), cast(Any, SimpleNamespace(committed=silent)), set, names) == set()


@pytest.mark.parametrize(
    ("here", "catching_up", "spare", "is_dropped"),
    [
        ([OURS, THEIRS], [], [], True),
        ([OURS], [], [THEIRS], True),
        ([OURS], [], [], False),  # Kafka may lack records of the other one
        ([OURS, THEIRS], [THEIRS], [], False),
        ([THEIRS], [], [OURS], False),  # ours is assigned, and not open yet
    ],
)
def test_an_index_of_an_earlier_version_stays_while_it_may_be_needed(
    here: list[SourceName], catching_up: list[SourceName], spare: list[SourceName], is_dropped: bool
) -> None:
    dropped: list[bool] = []
    directory: Any = SimpleNamespace(
        spare=lambda names: set(spare) & set(names), drop_index_of_earlier_version=lambda: dropped.append(True)
    )
    store: Any = SimpleNamespace(
        next_offsets=lambda: dict.fromkeys(here, 0), sources=[OURS, THEIRS], in_life=lambda *_: catching_up
    )
    index.drop_earlier(directory, store, {OURS})
    assert bool(dropped) is is_dropped
