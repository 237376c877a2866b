"""Faults, the requests that they meet, and the outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dev.proxy.protocol import Api, BrokerRequest

RECENT: Final = 20
"""Hits of an injection that a later request may concern."""


class RequestFault(Enum):
    """What happens to a request."""

    LATE = "late"
    """Its connection is cut when the proxy has it. The client repeats it on another one, and the first copy reaches the
    broker in the next transaction of the same id."""
    LOST_BEFORE = "lost before"
    """The broker never gets it."""
    LOST_AFTER = "lost after"
    """The client never gets the answer."""
    DOUBLED = "doubled"
    """The broker gets it twice, one right after the other, and the client gets the first answer."""
    HELD = "held"
    """It waits for `release`, and so does what follows on its connection."""
    ANSWER_HELD = "answer held"
    """The answer waits likewise."""


@dataclass(slots=True, eq=False)
class Hit:
    """A request that a fault has met."""

    request: BrokerRequest
    number: int
    """Of its transaction among those of its id; 0 without an id."""
    answer: int | None = None
    """The broker's error code: for the late or second copy, or in the lost answer. None: there is no answer."""
    was_open: bool | None = None
    """Whether the late or second copy reached the broker while a later transaction of its id was open. None: it has not
    reached it, and is not to."""
    is_over: bool = False
    """Whether nothing more of it comes."""
    is_committed: bool | None = None
    """Whether the client asked for its transaction to be committed, or to be aborted; None: for neither yet."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    deliver: Callable[[], asyncio.Future[int | None]] | None = None
    """Sends a late copy to the broker, and gives its answer."""


@dataclass(slots=True, eq=False)
class Injection:
    """A fault and the requests that it meets. `hits` are those that it has met."""

    fault: RequestFault
    api: Api
    transactional_id: str | None
    """None: any."""
    times: int | None
    """None: without end."""
    when: Callable[[BrokerRequest], bool]
    arrives: Api | None
    """A late copy reaches the broker when it has answered this request of the next transaction of the id, before the
    client has the answer; or before that transaction's end, if that comes first. None: at `release`."""
    cuts: bool
    """Whether the connection is cut where something is lost."""
    call: Callable[[Callable[[], object]], object]
    """Calls a function in the proxy's thread."""
    hits: list[Hit] = field(default_factory=list)

    def meets(self, request: BrokerRequest) -> bool:
        """Whether the fault meets this request."""
        return (
            request.api is self.api
            and self.transactional_id in (None, request.transactional_id)
            and (self.times is None or len(self.hits) < self.times)
            and self.when(request)
        )

    def stop(self) -> None:
        """It meets no further requests."""
        self.times = 0

    def release(self) -> None:
        """Let held requests and answers go on, and late copies."""
        self.call(self._release)

    def _release(self) -> None:
        for hit in self.hits:
            hit.released.set()
            if self.fault is RequestFault.LATE and not hit.is_over and hit.deliver is not None:
                hit.deliver()

    @property
    def recent(self) -> list[Hit]:
        """The last hits: those that are yet to be over are among them."""
        return self.hits[-RECENT:]

    @property
    def is_over(self) -> bool:
        """Whether it has hits, and all of them are over."""
        return bool(self.hits) and all(hit.is_over for hit in self.hits)
