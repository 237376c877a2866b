"""An action on all messages that fit: page by page, what comes up first at its beginning; some pages are under way.

What is acted on: messages that were sent before the action began, and are not due already at the time that is wanted;
so what the action itself has moved is not found again. A page is told as done when all its commands are answered, and
all pages before it: what is done is a prefix, also where the client, the bridge or the network break it off. The cursor
of the last line goes on there, and so does the same action without it, since what is done fits no more (cancelled) or
is due already (moved).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final

from fastapi.responses import StreamingResponse

from bridge.api import cursor as cursors
from bridge.api.actions.bodies import Progress
from bridge.api.guard import Workers
from bridge.api.problems import Problem
from bridge.api.routing import PREFIX, Asked
from bridge.api.source import Commands, NotOwnedError, Order, PendingMessages
from bridge.errors import BridgeError
from bridge.wire.answers import Answer, Outcome
from bridge.wire.headers import MOVED_MAX, NAMED_MAX
from timerstore.errors import TimerStoreError
from timerstore.operations.find import ORIGINALS_MAX, Query
from timerstore.rows.sources import NamedPosition, SourceName

MEDIA_TYPE: Final = "application/x-ndjson"
BULKS_MAX: Final = 2
"""At a time."""
PAGES_MAX: Final = 4
"""Under way: a transaction takes as long for many as for one."""
PAGE_ROWS: Final = ORIGINALS_MAX
PATHS: Final = tuple(f"{PREFIX}/messages/{action}" for action in ("cancel", "move", "deliver"))
MARGIN_S: Final = 5.0
PAGE_S: Final = 60.0
"""For the answers to a page: longer than a rebalance or a lost node takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done: `due_ms` as an `Order` has it; `ends` are the next offsets when the action began."""

    store: PendingMessages
    commands: Commands
    query: Query
    after: NamedPosition | None
    due_ms: int | None
    ends: Mapping[SourceName, int]
    now_ms: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Page:
    futures: Sequence[Future[Sequence[Answer]]]
    next: NamedPosition | None


class _SilentError(Exception):
    """A command of the page is not answered."""


class Bulks:
    """Bulk actions under way; for one event loop."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._workers = asked, Workers()
        self._under_way = 0

    def answer(
        self, lines: AsyncIterator[Progress], cursor: str | None, ended: Callable[[Progress], None]
    ) -> StreamingResponse:
        """The answer with lines such as those of `run`, which act as they are sent, from `cursor` on; `ended` is told
        the last one. Raises Problem if there are too many."""
        if self._under_way >= BULKS_MAX:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{BULKS_MAX} bulk actions are under way. Ask again.")
        return StreamingResponse(self._lines(lines, cursor, ended), media_type=MEDIA_TYPE)

    async def _lines(
        self, lines: AsyncIterator[Progress], cursor: str | None, ended: Callable[[Progress], None]
    ) -> AsyncIterator[bytes]:
        self._under_way += 1
        last = Progress(done=0, outcomes={}, cursor=cursor, complete=False, error="broken off")
        try:
            async for line in lines:
                last = line
                yield line.model_dump_json(exclude_unset=True).encode() + b"\n"
        finally:
            self._under_way -= 1
            ended(last)

    async def run(self, job: Job) -> AsyncIterator[Progress]:
        """Acts. A line for each page that is done, then the last one."""
        counts: Counter[Outcome] = Counter()
        pages: deque[_Page] = deque()
        after, is_last, error = job.after, False, None
        reached = job.after

        def line(*, complete: bool, error: str | None = None) -> Progress:
            cursor = None if complete else _text(reached)
            return Progress(done=counts.total(), outcomes=dict(counts), cursor=cursor, complete=complete, error=error)

        try:
            while pages or not is_last:
                while not is_last and len(pages) < PAGES_MAX:
                    page = await self._workers.run(partial(_next_page, job, after))
                    pages.append(page)
                    after, is_last = page.next, page.next is None
                page = pages.popleft()
                answers = await self._workers.run(partial(_answers, page), PAGE_S + MARGIN_S)
                for answer in answers:
                    counts[answer.outcome] += answer.count
                reached = page.next if page.next is not None else reached
                yield line(complete=False)
        except _SilentError:
            error = f"no answers within {PAGE_S:.0f} s: the commands of the last pages are in the delay topic"
        except Problem as problem:
            error = problem.detail
        except (BridgeError, TimerStoreError) as failure:
            error = failure.message
        except KeyError:
            error = "cursor names a partition that this instance does not know: begin anew, without it"
        except ValueError as refused:  # a time that is too far away
            error = str(refused)
        except NotOwnedError:
            error = "a partition has gone to another instance: ask it to go on"
        finally:
            for future in (future for page in pages for future in page.futures):
                future.cancel()
        yield line(complete=error is None, error=error)


def _next_page(job: Job, after: NamedPosition | None) -> _Page:
    page = job.store.find_originals(job.query, job.now_ms(), after=after, limit=PAGE_ROWS)
    orders, named_max = [], NAMED_MAX if job.due_ms is None else MOVED_MAX
    for source, (origin, due_ms) in page.found.items():
        is_old = origin < job.ends.get(source, 0)
        kept = origin[is_old if job.due_ms is None else is_old & (due_ms != job.due_ms)]
        named = list(dict.fromkeys(kept.tolist()))
        orders += [
            Order(source, tuple(named[begin : begin + named_max]), job.due_ms)
            for begin in range(0, len(named), named_max)
        ]
    return _Page(job.commands.send(orders), page.next)


def _answers(page: _Page) -> list[Answer]:
    _, left = wait(page.futures, PAGE_S)
    for future in left:
        future.cancel()
    if left:
        raise _SilentError  # no TimeoutError: that would be of the thread that waits
    return [answer for future in page.futures for answer in future.result()]


def _text(position: NamedPosition | None) -> str | None:
    return None if position is None else cursors.encode(position)
