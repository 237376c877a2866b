"""bridge.delivery.states: the whole table, and that requests are obeyed between two steps only."""

from __future__ import annotations

import threading
from itertools import product

import pytest

from bridge.delivery.states import AT_REST, AT_WORK, TRANSITIONS, Event, Lifecycle, Request, State
from bridge.errors import InternalError

ROUTES = {
    State.OPENING: [],
    State.HELD: [Event.OPENED],
    State.RESOLVING: [Event.OPENED, Event.RESUMED],
    State.DELIVERING: [Event.OPENED, Event.RESUMED, Event.RESOLVED],
    State.ENDED: [Event.STOPPED],
}
DEADLINE_S = 30.0


def in_state(state: State) -> Lifecycle:
    """A thread that has come there, and is asked for nothing."""
    life = Lifecycle()
    life.resume()
    for event in ROUTES[state]:
        life.advance(event)
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_in_every_state(state: State, event: Event) -> None:
    """It leads where the table says; an event that the table does not have raises, and changes nothing."""
    life = in_state(state)
    if event in TRANSITIONS[state]:
        life.advance(event)
        assert life.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(InternalError):
            life.advance(event)
        assert life.state is state


def test_every_state_is_reached_and_only_the_last_one_is_final() -> None:
    """Each state has a row; from each one the thread can end."""
    assert TRANSITIONS.keys() == ROUTES.keys() == set(State)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(State)
    assert [state for state, row in TRANSITIONS.items() if not row] == [State.ENDED]
    assert all(row[Event.STOPPED] is State.ENDED for state, row in TRANSITIONS.items() if state is not State.ENDED)


def test_work_goes_on_only_after_an_unanswered_commit_is_resolved() -> None:
    """Nothing leads to DELIVERING but RESOLVED, and the store is used in no other states than those two."""
    assert {state for state, row in TRANSITIONS.items() if State.DELIVERING in row.values()} == {State.RESOLVING}
    assert set(State) == AT_REST | AT_WORK and not AT_REST & AT_WORK


@pytest.mark.parametrize(("state", "request_", "then"), [
    (State.OPENING, Request.HOLD, State.OPENING),
    (State.RESOLVING, Request.HOLD, State.HELD),
    (State.DELIVERING, Request.HOLD, State.HELD),
])  # fmt: skip
def test_requests_are_obeyed_between_two_steps(state: State, request_: Request, then: State) -> None:
    """Not before: until then the state is what it was."""
    life = in_state(state)
    life.ask(request_)
    assert life.state is state
    if then is State.HELD:
        assert not life.obey(lambda: life.ask(Request.STOP))  # held, it beats
    else:
        assert life.obey(lambda: None)
    assert life.state is then


@pytest.mark.parametrize("state", list(State))
def test_a_thread_that_is_to_stop_takes_no_further_step(state: State) -> None:
    """Whatever else it was asked for."""
    life = in_state(state)
    life.ask(Request.HOLD)
    life.ask(Request.STOP)
    assert not life.obey(lambda: None)


def test_a_held_thread_waits_shows_that_it_is_alive_and_goes_on() -> None:
    """Held from the start, until another thread resumes it."""
    life, beats = Lifecycle(), threading.Event()
    life.advance(Event.OPENED)
    thread = threading.Thread(target=life.obey, args=(beats.set,))
    thread.start()
    assert beats.wait(DEADLINE_S)
    assert life.wait_for({State.HELD}, 0)
    life.resume()
    thread.join(DEADLINE_S)
    assert life.state is State.RESOLVING


def test_a_held_thread_without_a_producer_does_not_try_again_without_a_pause() -> None:
    """It is held from the start, and brokers that answer at once that they are not ready would keep a core busy."""
    life = Lifecycle()
    thread = threading.Thread(target=life.pause, args=(DEADLINE_S,))
    thread.start()
    life.ask(Request.HOLD)
    thread.join(0.1)
    assert thread.is_alive()
    life.ask(Request.STOP)
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive()


def test_a_pause_ends_with_a_request_to_hold() -> None:
    """A revocation does not wait for a back-off to be over."""
    life = in_state(State.DELIVERING)
    thread = threading.Thread(target=life.pause, args=(DEADLINE_S,))
    thread.start()
    life.ask(Request.HOLD)
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive()
