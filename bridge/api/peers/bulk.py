"""A bulk action at all instances at once. Each sends lines of progress; their sum goes to the client twice a second.
After the client has left, so do the requests to the other instances, which stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Final

from bridge.api import cursor as cursors
from bridge.api.actions.bodies import BulkProgress
from bridge.api.peers.client import THIS, Peers
from bridge.wire.answers import Outcome

PROGRESS_S: Final = 0.5


async def everywhere(
    here: AsyncIterator[BulkProgress] | None, peers: Peers, target: str, body: bytes, cursor: str | None
) -> AsyncIterator[BulkProgress]:
    """The progress of all instances. `here` is the action of this instance; None: it cannot act now. `cursor` is the
    request's."""
    nothing = BulkProgress(done=0, outcomes={}, cursor=cursor, complete=False)
    last = dict.fromkeys((THIS, *peers.others()), nothing)

    async def act() -> None:
        if here is not None:
            async for line in here:
                last[THIS] = line

    async def follow(url: str) -> None:
        def tell(text: bytes) -> None:
            line = BulkProgress.model_validate_json(text)
            if line.cursor is not None:
                cursors.decode_position(line.cursor)
            last[url] = line

        reply = await peers.follow(url, target, body, tell)
        if reply.instance == peers.instance:
            del last[url]

    tasks = [asyncio.create_task(work) for work in (act(), *map(follow, peers.others()))]
    waiting, sent = set(tasks), _sum(last, [])
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            line = _sum(last, [])
            if waiting and line != sent:
                yield line
                sent = line
    finally:
        for task in tasks:
            task.cancel()
    yield _sum(last, [who for who, line in last.items() if not line.complete and line.error is None])


def _sum(last: Mapping[str, BulkProgress], silent: list[str]) -> BulkProgress:
    """The progress of all: its cursor is the earliest one. The `silent` instances ended without a result."""
    outcomes: Counter[Outcome] = Counter()
    for line in last.values():
        outcomes.update(line.outcomes)
    left = [line.cursor for line in last.values() if not line.complete]
    errors = [f"{who}: {line.error}" for who, line in last.items() if line.error is not None]
    errors += [f"{who}: no answer, or an incomplete one" for who in silent]
    missing = [*silent, *(partition for line in last.values() for partition in line.incomplete)]
    return BulkProgress(
        done=sum(line.done for line in last.values()),
        outcomes=dict(outcomes),
        cursor=None if None in left else min(filter(None, left), key=cursors.decode_position, default=None),
        complete=not left,
        error="; ".join(errors) if errors else None,
        **({"incomplete": missing} if missing else {}),
    )
