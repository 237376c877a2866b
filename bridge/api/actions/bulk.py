"""An action on all matching messages, page by page in the order in which they come up, several pages at a time.

It acts once on each message that was sent before it began and does not have the wanted due time yet. Some of their
records may be unread at its beginning, behind a backlog or in a partition that has just come: it waits up to READ_S for
them, and acts once more. With unread records it is not complete. It leaves out the partitions that take no commands
now, names them, and is not complete either. A page counts as done after the answers to all its commands and to those of
all pages before it. So the messages that are done form a prefix, even if the client, the bridge or the network breaks
the action off. The cursor of the last line continues from there. The same action without the cursor does so, too:
cancelled messages no longer match, and moved ones have the wanted due time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final

import numpy as np
from fastapi.responses import StreamingResponse

from bridge.api import cursor as cursors
from bridge.api.actions.bodies import BulkProgress
from bridge.api.problems import Problem
from bridge.api.routing import Asked
from bridge.api.source import CommandChannel, NotOwnedError, Order, PendingMessages
from bridge.errors import BridgeError
from bridge.http.workers import Unavailable, Workers
from bridge.stores.names import NamedPosition, SourceName, texts_of
from bridge.stores.search import Query
from bridge.wire.answers import Answer, Outcome
from bridge.wire.headers import NAMED_MAX
from timerstore.errors import TimerStoreError
from timerstore.operations.find import ORIGINALS_MAX
from timerstore.rows.position import Int64s

MEDIA_TYPE: Final = "application/x-ndjson"
BULKS_MAX: Final = 2
"""Bulk actions at a time."""
PAGES_MAX: Final = 4
"""Pages of an action at a time: a transaction takes no longer for several."""
PAGE_ROWS: Final = ORIGINALS_MAX
MOVES_MAX: Final = 2_000
"""Messages of a page of moves: each is a command, and PAGES_MAX pages need answers at a time."""
MARGIN_S: Final = 5.0
PAGE_S: Final = 60.0
"""The longest wait for the answers to a page: longer than a rebalance, or the loss of a node."""
READ_S: Final = 15.0
"""The longest wait for unread records. The ends of transactions behind the last record take up to ten seconds."""
LOOK_S: Final = 0.1
NO_COMMANDS: Final = (
    "take no commands now (no leader, a corrupt batch, messages in doubt, or no open index): repeat the action"
)

NAMES_MAX: Final = 10
"""Maximum number of partitions in an error."""

LogEnds = Mapping[SourceName, int | None]
NO_OFFSETS: Final[Int64s] = np.array([-1])
"""For a search: not empty, and without an offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A bulk action. `due_ms` is that of its `Order`s; `log_ends` is that of the `Source`."""

    store: PendingMessages
    commands: CommandChannel
    query: Query
    after: NamedPosition | None
    due_ms: int | None
    log_ends: Callable[[], LogEnds]
    now_ms: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Page:
    orders: Sequence[Order]
    futures: Sequence[Future[Sequence[Answer]]]
    next: NamedPosition | None


class _SilentError(Exception):
    """Commands of the page have no answer in time; the text names their partitions."""


class Bulks:
    """Bulk actions under way; for one event loop."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._workers = asked, Workers()
        self._under_way = 0

    def answer(
        self, lines: AsyncIterator[BulkProgress], cursor: str | None, ended: Callable[[BulkProgress], None]
    ) -> StreamingResponse:
        """The response with the lines of `run`, or lines like them: sending them drives the action. It begins at
        `cursor`; `ended` gets the last line. Raises Problem if too many bulk actions are under way."""
        if self._under_way >= BULKS_MAX:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{BULKS_MAX} bulk actions are under way. Try again.")
        return StreamingResponse(self._lines(lines, cursor, ended), media_type=MEDIA_TYPE)

    async def _lines(
        self, lines: AsyncIterator[BulkProgress], cursor: str | None, ended: Callable[[BulkProgress], None]
    ) -> AsyncIterator[bytes]:
        self._under_way += 1
        last = BulkProgress(done=0, outcomes={}, cursor=cursor, complete=False, error="broken off")
        try:
            async for line in lines:
                last = line
                yield line.model_dump_json(exclude_unset=True).encode() + b"\n"
        finally:
            self._under_way -= 1
            ended(last)

    async def run(self, job: Job) -> AsyncIterator[BulkProgress]:
        """Act. Yields a line after each page, and then the last one."""
        counts: Counter[Outcome] = Counter()
        pages: deque[_Page] = deque()
        asked: dict[SourceName, Int64s] = {}
        reached, error, left_out = job.after, None, list[str]()

        def line(*, complete: bool, error: str | None = None) -> BulkProgress:
            cursor = None if complete else _text(job.after if left_out else reached)
            return BulkProgress(
                done=counts.total(), outcomes=dict(counts), cursor=cursor, complete=complete, error=error,
                **({"incomplete": left_out} if left_out else {}),
            )  # fmt: skip

        try:
            ends = await self._workers.run(job.log_ends)
            left_out = texts_of(name for name, end in ends.items() if end is None)
            for is_last_search in (False, True):
                is_read, reached = not _unread(job, ends), job.after
                after, is_last = job.after, False
                while pages or not is_last:
                    while not is_last and len(pages) < PAGES_MAX:
                        page = await self._workers.run(partial(_next_page, job, after, ends, asked))
                        pages.append(page)
                        after, is_last = page.next, page.next is None
                    page = pages.popleft()
                    answers = await self._workers.run(partial(_answers, page), PAGE_S + MARGIN_S)
                    for answer in answers:
                        counts[answer.outcome] += answer.count
                    reached = page.next if page.next is not None else reached
                    yield line(complete=False)
                if is_read:
                    break
                reached = job.after  # unread messages may come up before the messages that are done
                if is_last_search:
                    unread = _unread(job, ends)
                    error = f"{sum(unread.values())} records of {_named(unread)} are not read yet: repeat the action"
                else:
                    await _await_read(job, ends)
                    if job.due_ms is None:  # cancels are asked for again
                        counts.pop(Outcome.UNKNOWN, None)
            if left_out and error is None:
                error = f"{_named(name for name, end in ends.items() if end is None)} {NO_COMMANDS}"
        except _SilentError as silent:
            error = f"no answers from {silent} within {PAGE_S:.0f} s: commands of the last pages are in the delay topic"
        except Unavailable as late:
            error = str(late)
        except (BridgeError, TimerStoreError) as failure:
            error = failure.message
        except KeyError:
            error = "cursor names a partition that this instance does not know: start again without a cursor"
        except ValueError as refused:  # the due time is too far away
            error = str(refused)
        except NotOwnedError:
            error = "another instance took over a partition: continue the action there"
        finally:
            for future in (future for page in pages for future in page.futures):
                future.cancel()
        yield line(complete=error is None, error=error)


def _unread(job: Job, ends: LogEnds) -> dict[SourceName, int]:
    """The number of unread records below these ends, by partition."""
    at = job.store.next_offsets()
    return {name: end - at.get(name, 0) for name, end in ends.items() if end is not None and end > at.get(name, 0)}


async def _await_read(job: Job, ends: LogEnds) -> None:
    until_s = asyncio.get_running_loop().time() + READ_S
    while _unread(job, ends) and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(LOOK_S)


def _next_page(job: Job, after: NamedPosition | None, ends: LogEnds, asked: dict[SourceName, Int64s]) -> _Page:
    """Send the commands of the next page. `asked` are the sorted originals of earlier moves: the next tick of a
    recurring message that was delivered is found again, and so is a message that stays."""
    rows, named_max = (PAGE_ROWS, NAMED_MAX) if job.due_ms is None else (min(PAGE_ROWS, MOVES_MAX), 1)
    page, orders = job.store.find_originals(job.query, job.now_ms(), after=after, limit=rows), []
    for source, (origin, due_ms) in page.found.items():
        is_wanted = origin < (ends.get(source) or 0)
        if job.due_ms is not None:
            before = asked.get(source, NO_OFFSETS)
            is_wanted &= (due_ms != job.due_ms) & (before.take(before.searchsorted(origin), mode="clip") != origin)
            new = np.sort(origin[is_wanted])
            asked[source] = np.insert(before, before.searchsorted(new), new)
        named = list(dict.fromkeys(origin[is_wanted].tolist()))
        orders += [
            Order(source, tuple(named[begin : begin + named_max]), job.due_ms)
            for begin in range(0, len(named), named_max)
        ]
    return _Page(orders, job.commands.send(orders), page.next)


def _answers(page: _Page) -> list[Answer]:
    _, left = wait(page.futures, PAGE_S)
    for future in left:
        future.cancel()
    if left:  # an error of its own: other waits raise TimeoutError, too
        silent = {order.source for order, future in zip(page.orders, page.futures, strict=True) if future in left}
        raise _SilentError(_named(silent))
    return [answer for future in page.futures for answer in future.result()]


def _named(names: Iterable[SourceName]) -> str:
    """The first of these partitions, for people."""
    texts = texts_of(names)
    return ", ".join([*texts[:NAMES_MAX], *([f"{len(texts) - NAMES_MAX} more"] if len(texts) > NAMES_MAX else [])])


def _text(position: NamedPosition | None) -> str | None:
    return None if position is None else cursors.encode_position(position)
