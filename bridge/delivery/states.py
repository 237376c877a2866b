"""The dispatcher's thread as a state machine: all decisions about its state are in this file.

       .---------------- PRODUCER_LOST -----------------------------.
       v                                      |                     |
    OPENING --OPENED--> HELD --RESUMED--> RESOLVING --RESOLVED--> DELIVERING
                         ^                    |                     |
                         '-------- HOLD ----------------------------'
    each of them --STOPPED--> ENDED

    state       work of the thread                                        rows of the store
    OPENING     makes a producer, again and again                         untouched
    HELD        waits for `resume`                                        untouched
    RESOLVING   learns the outcome of a commit without an answer, if any  those of that transaction are on loan
    DELIVERING  takes, produces, commits                                  those of one transaction are on loan
    ENDED       nothing                                                   untouched

Other threads do not change the state. They make requests, which the thread obeys between two steps (`Lifecycle.obey`).
Then no transaction is open, except one whose commit got no answer. A step ends with an event, or with none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Final

from bridge.errors import InternalError

HELD_LOOK_S: Final = 1.0
"""The interval of periodic work while the thread is held."""


BACKOFF_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class State(Enum):
    """See the table above."""

    OPENING = "opening"
    HELD = "held"
    RESOLVING = "resolving"
    DELIVERING = "delivering"
    ENDED = "ended"


class Event(Enum):
    """The causes of transitions."""

    OPENED = "opened"
    RESUMED = "resumed"
    RESOLVED = "resolved"
    HOLD = "hold"
    PRODUCER_LOST = "producer lost"
    STOPPED = "stopped"


class Request(Enum):
    """The requests of other threads."""

    HOLD = "hold"
    """Valid until `Lifecycle.resume`. The thread makes this request itself when its assignment is out of date."""
    STOP = "stop"


_FROM_WORK: Final = {Event.HOLD: State.HELD, Event.PRODUCER_LOST: State.OPENING, Event.STOPPED: State.ENDED}
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.OPENING: {Event.OPENED: State.HELD, Event.STOPPED: State.ENDED},
    State.HELD: {Event.RESUMED: State.RESOLVING, Event.STOPPED: State.ENDED},
    State.RESOLVING: {Event.RESOLVED: State.DELIVERING, **_FROM_WORK},
    State.DELIVERING: _FROM_WORK,
    State.ENDED: {},
}
AT_REST: Final = frozenset({State.OPENING, State.HELD, State.ENDED})
"""States that do not touch the store."""
AT_WORK: Final = frozenset({State.RESOLVING, State.DELIVERING})


class Lifecycle:
    """The state, and the requests of other threads. `changed` guards both, and everything that changes with them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.state = State.OPENING
        self._requests = {Request.HOLD}
        self.failures = 0

    # -- any thread

    def ask(self, request: Request) -> None:
        """Have the thread do this as soon as no transaction is open."""
        with self.changed:
            self._requests.add(request)
            self.changed.notify_all()

    def resume(self) -> None:
        with self.changed:
            self._requests.discard(Request.HOLD)
            self.changed.notify_all()

    def is_asked(self, *requests: Request) -> bool:
        """Whether one of these requests is pending."""
        return not self._requests.isdisjoint(requests)

    def wait_for(self, states: Collection[State], timeout_s: float) -> bool:
        """Wait for one of these states. Returns whether the thread has reached one."""
        with self.changed:
            return self.changed.wait_for(lambda: self.state in states, timeout_s)

    # -- the thread

    def obey(self, *now_and_then: Callable[[], None]) -> bool:
        """Obey the requests; while held, wait here. Returns False if the thread must end."""
        with self.changed:
            while Request.STOP not in self._requests:
                for act in now_and_then:
                    act()
                is_to_hold = Request.HOLD in self._requests
                if is_to_hold and self.state in AT_WORK:
                    self.advance(Event.HOLD)
                elif not is_to_hold and self.state is State.HELD:
                    self.advance(Event.RESUMED)
                elif self.state is not State.HELD:
                    return True
                else:
                    self.changed.wait(HELD_LOOK_S)
            return False

    def advance(self, event: Event | None) -> None:
        """Go to the next state; None: stay. Raises InternalError for an event without a transition."""
        if event is None:
            return
        with self.changed:
            if event not in TRANSITIONS[self.state]:
                raise InternalError(
                    "delivery failed",
                    hint="Please report this.",
                    reason=f"{event.value} while {self.state.value}",
                    code="DB-7001",
                )
            self.state = TRANSITIONS[self.state][event]
            self.changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait; a request to stop ends the wait. So does a request to hold, except while a producer is made."""
        urgent = {Request.STOP} if self.state is State.OPENING else {Request.STOP, Request.HOLD}
        with self.changed:
            self.changed.wait_for(lambda: self.is_asked(*urgent), seconds)

    def back_off(self) -> None:
        """Wait after a failure, longer after each further one. A success resets `failures` to 0."""
        seconds = BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]
        self.failures += 1
        self.pause(seconds)
