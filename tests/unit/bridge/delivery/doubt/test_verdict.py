"""Whether a commit without an answer was made."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.delivery.doubt.verdict import was_committed
from bridge.errors import StateError

A, B = ("delay", 0), ("delay", 1)


class State:
    """A committed state, by its offset and its manifest."""

    def __init__(self, offset: int, manifest: str = "m") -> None:
        self.offset, self.manifest = offset, manifest

    def written_manifest(self) -> str:
        return self.manifest

    def is_written_as(self, found: State | None) -> bool:
        return found is not None and found.offset == self.offset


def verdict(found: dict[Any, int | None], wrong: set[Any]) -> bool:
    before: Any = {A: State(10), B: State(20)}
    after: Any = {A: State(11), B: State(21)}
    held: Any = {name: None if offset is None else State(offset) for name, offset in found.items()}
    return was_committed(before, after, held, wrong)


@pytest.mark.parametrize(
    ("found", "wrong", "is_made"),
    [
        ({A: 11, B: 21}, set(), True),
        ({A: 10, B: 20}, set(), False),
        ({A: 11, B: 21}, {B}, True),
        ({A: 10, B: 5}, {B}, False),
        ({A: 10, B: None}, {B}, False),
    ],
)
def test_committed_states_tell(found: dict[Any, int | None], wrong: set[Any], is_made: bool) -> None:
    """A partition whose state in Kafka was known to be wrong tells nothing unless it has the new one."""
    assert verdict(found, wrong) is is_made


@pytest.mark.parametrize(("found", "wrong"), [({A: 10, B: 5}, set()), ({A: 11, B: 20}, set()), ({A: 11, B: 5}, {B})])
def test_what_neither_side_has_written_is_refused(found: dict[Any, int | None], wrong: set[Any]) -> None:
    """Something else commits under the bridge's id."""
    with pytest.raises(StateError, match="neither"):
        verdict(found, wrong)


@pytest.mark.parametrize(("found", "is_made"), [("m", False), ("n", True)])
def test_the_manifest_tells_if_nothing_else_does(found: str, is_made: bool) -> None:
    """A quiet partition has transactions with nothing but a new manifest."""
    before: Any = {A: State(10), B: State(20)}
    after: Any = {A: State(10, "n"), B: State(20)}
    held: Any = {A: State(10, found), B: State(20)}
    assert was_committed(before, after, held) is is_made
