"""The states of transactional ids: the whole table, and invariants on random ways through it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from bridge.delivery.producer.outcomes import Aborted, Broken, NotReady
from bridge.delivery.producer.transactional_ids import TRANSITIONS, IdEvent, IdState, TransactionalId
from bridge.settings.time_budgets import TimeBudgets
from tests.unit.bridge.delivery.producer.stubs import ABORTABLE, FATAL, RETRIABLE, StubProducer, Told
from tests.unit.bridge.delivery.producer.test_epochs import CUT

ROUTES = {
    IdState.UNMADE: [],
    IdState.STARTING: [IdEvent.START],
    IdState.READY: [IdEvent.START, IdEvent.MADE],
    IdState.USED: [IdEvent.START, IdEvent.MADE, IdEvent.TAKEN],
}


@pytest.mark.parametrize(("state", "event"), list(product(IdState, IdEvent)))
def test_every_event_in_every_state(state: IdState, event: IdEvent) -> None:
    """It leads where the table says; an event that the table does not have raises, and changes nothing."""
    one = TransactionalId("x")
    for each in ROUTES[state]:
        one.advance(each)
    assert one.state is state
    if event in TRANSITIONS[state]:
        one.advance(event)
        assert one.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(KeyError):
            one.advance(event)
        assert one.state is state


def test_every_state_is_reached_and_none_is_the_last() -> None:
    """From each one an id becomes ready again."""
    assert TRANSITIONS.keys() == ROUTES.keys() == set(IdState)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(IdState)
    assert all(set(row.values()) - {state} for state, row in TRANSITIONS.items())


class Walk(Told):
    """A writer that goes on whatever happens; a second producer of an id fails it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = self.has_begun = False
        self.random = random.Random(0)
        self.bad_starts = 0

    def _make(self, config: dict[str, Any]) -> StubProducer:
        name = config["transactional.id"]
        rivals = [made for made, known in zip(self.made, self.names, strict=True) if known == name]
        assert all("purge" in made.calls for made in rivals), f"two producers of {name}"
        self.producer = StubProducer(self.clock)
        if self.bad_starts:
            self.bad_starts -= 1
            self.producer.script["init"] = [self.random.choice([RETRIABLE, FATAL])]
        return super()._make(config)

    def step(self, act: str) -> None:
        """Do this, if it may be done now."""
        try:
            self._acts()[act]()
        except (Aborted, NotReady):
            self.is_open = self.is_open and act != "open"
        except Broken:
            self.is_open = self.has_begun = False

    def _acts(self) -> dict[str, Callable[[], None]]:
        return {
            "open": self._open,
            "begin": self._begin,
            "commit": lambda: self._end(lambda: self.writer.commit([], None, lambda _: False)),
            "abort": lambda: self._end(self.writer.abort),
            "leave": lambda: self._end(partial(self.writer.abort, in_haste=True)),
            "be silent": lambda: self._used().script.update(abort=[RETRIABLE] * 9),
            "cut": lambda: self._used().lines.update(commit=[CUT], abort=[CUT]),
            "refuse": lambda: self._used().script.update(commit=[ABORTABLE]),
            "break": lambda: self._used().script.update(commit=[FATAL], abort=[FATAL]),
            "background": lambda: self.later.pop(0)() if self.later else None,
            "bad start": lambda: setattr(self, "bad_starts", 1),
        }

    def _used(self) -> StubProducer:
        used: StubProducer = self.writer._producer or self.producer
        return used

    def _open(self) -> None:
        if not self.is_open:
            self.writer.open()
            self.is_open, self.has_begun = True, False

    def _begin(self) -> None:
        if self.is_open and not self.has_begun:
            self.writer.begin()
            self.has_begun = True

    def _end(self, end: Callable[[], object]) -> None:
        if self.is_open and self.has_begun:
            try:
                end()
            except Aborted:
                self.writer.abort()
            self.has_begun = False


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_no_id_has_two_producers_and_delivery_goes_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would fence the first. In each state an id has the producer that the table says."""
    monkeypatch.setattr(TimeBudgets, "step_s", 0.001)
    monkeypatch.setattr("bridge.delivery.producer.transactional_ids.AGAIN_S", 0)
    walk = Walk()
    walk.random.seed(seed)
    acts = list(walk._acts())
    for _ in range(150):
        walk.step(walk.random.choice(acts))
        ids = walk.writer._ids._all
        assert all((one.producer is not None) == (one.state in (IdState.READY, IdState.USED)) for one in ids)
        assert [one for one in ids if one.state is IdState.USED] == ([walk.writer._id] if walk.writer._id else [])
    walk.bad_starts = 0
    for made in walk.made:
        made.script.clear()
    for act in ["background"] * len(walk.later) + ["open", "begin", "commit"] * 3:
        walk.step(act)
        walk.step("background")
    assert walk.is_open and walk.writer._ids.is_well
