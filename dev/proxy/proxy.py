"""The proxy: connections in pairs, one to the client and one to the broker, with faults between them.

    with Proxy(broker.bootstrap) as proxy:
        late = proxy.inject(Fault.LATE, Api.END_TXN, arrives=Api.PRODUCE)
        Producer({"bootstrap.servers": proxy.bootstrap, "transactional.id": "one"})

Each broker has a port here. Clients stay behind the proxy because it writes these ports into answers that name brokers
(Metadata, FindCoordinator); an answer to Produce or Fetch that names a partition's new leader is passed on unchanged.
All traffic is in one thread with one event loop, so that no state of it needs a lock.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from dev.proxy.injection import Hit, Injection, RequestFault
from dev.proxy.protocol import (
    TRANSACTIONAL,
    Address,
    Api,
    BrokerRequest,
    correlation_of,
    error_of,
    request_of,
    with_addresses,
)

HOST: Final = "127.0.0.1"
ANSWER_S: Final = 20.0
"""The client waits no longer for the answer to a late copy."""
BEGINS: Final = frozenset({Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN})
"""A transaction is open when the broker has answered one of these."""
ENDS: Final = frozenset({Api.END_TXN, Api.INIT_PRODUCER_ID})
BROKEN: Final = (OSError, EOFError, asyncio.IncompleteReadError)

T = TypeVar("T")


class Proxy:
    """In front of the brokers of one cluster. Its methods are for any thread."""

    def __init__(self, bootstrap: str) -> None:
        """`bootstrap`: `host:port` of a broker."""
        self._upstream = _address(bootstrap)
        self._ports: dict[Address, Address] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self.injections: list[Injection] = []
        self._changing = threading.Lock()
        self.transactions = Transactions()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._wait_for(self.local(self._upstream))

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        host, port = self._ports[self._upstream]
        return f"{host}:{port}"

    def inject(
        self,
        fault: RequestFault,
        api: Api,
        id: str | None = None,
        *,
        times: int | None = 1,
        when: Callable[[BrokerRequest], bool] = lambda _: True,
        arrives: Api | None = Api.PRODUCE,
        cuts: bool = True,
    ) -> Injection:
        """Inject this fault into such requests from now on; see `Injection`. Earlier injections are asked first.
        `when` is called in the proxy's thread.
        """
        injection = Injection(fault, api, id, times, when, arrives, cuts, self._loop.call_soon_threadsafe)
        with self._changing:
            self.injections = [*self.injections, injection]
        return injection

    def clear(self, injections: Sequence[Injection] | None = None) -> None:
        """Inject nothing more, or no more of these. Held requests go on; late copies are forgotten."""
        with self._changing:
            gone = self.injections if injections is None else injections
            self.injections = [each for each in self.injections if each not in gone]
        for injection in gone:
            injection.stop()
            if injection.fault is not RequestFault.LATE:
                injection.release()

    def cut(self) -> None:
        """Cut all connections of clients."""

        async def cut() -> None:
            for connection in list(self._connections):
                connection.cut()

        self._wait_for(cut())

    def close(self) -> None:
        """Cut everything and end the thread."""
        if self._loop.is_closed():
            return
        self._wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- in the proxy's thread

    async def local(self, upstream: Address) -> Address:
        """The address here of a broker."""
        if upstream not in self._ports:
            server = await asyncio.start_server(lambda r, w: self._serve(upstream, r, w), HOST, 0)
            # Another answer may have named the same broker meanwhile: the first one counts.
            if upstream in self._ports:
                server.close()
            else:
                self._servers.append(server)
                self._ports[upstream] = HOST, int(server.sockets[0].getsockname()[1])
        return self._ports[upstream]

    def meet(self, request: BrokerRequest) -> tuple[Injection, Hit] | None:
        """The fault that meets this request, if one does."""
        for injection in self.injections:
            if injection.meets(request):
                hit = Hit(request, self.transactions.number_of(request))
                injection.hits.append(hit)
                return injection, hit
        return None

    def asked(self, request: BrokerRequest) -> None:
        """A request goes to the broker."""
        self.transactions.asked(request)
        if request.api not in ENDS:
            return
        number = self.transactions.number(request.transactional_id)
        for hit in (hit for injection in self.injections for hit in injection.recent):
            is_of_it = hit.request.transactional_id == request.transactional_id and hit.number == number
            if is_of_it and (request.api is Api.END_TXN or hit.is_committed is None):
                hit.is_committed = bool(request.is_commit)

    async def deliver_late(self, transactional_id: str | None, api: Api | None) -> None:
        """Send the late copies that were to wait for this answer in a later transaction of their id; None: all that
        are left of earlier transactions."""
        number = self.transactions.number(transactional_id)
        for injection in self.injections:
            if injection.fault is not RequestFault.LATE or injection.arrives is None:
                continue
            for hit in injection.recent:
                is_due = api is None or api is injection.arrives
                if hit.is_over or not is_due or hit.number >= number or hit.deliver is None:
                    continue
                if hit.request.transactional_id == transactional_id:
                    await asyncio.wait([hit.deliver()], timeout=ANSWER_S)

    async def _serve(self, upstream: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker = await asyncio.open_connection(*upstream)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(self, (reader, writer), broker)
        self._connections.add(connection)
        with suppress(asyncio.CancelledError):  # by `close`: the server would report it as an error
            await connection.run()
        self._connections.discard(connection)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        asked: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return asked.result()


class Transactions:
    """Which transactions of an id are open, as the answers that pass say."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._open: set[str] = set()
        self._beginning: set[str] = set()
        """Ids of which the broker was asked to begin one; its answer may be under way."""

    def number(self, transactional_id: str | None) -> int:
        """Of the last transaction that was begun, counted from 1."""
        return self._numbers.get(transactional_id or "", 0)

    def number_of(self, request: BrokerRequest) -> int:
        """Of the transaction that this request belongs to."""
        name = request.transactional_id
        is_first = request.api in BEGINS or name in self._beginning
        return self.number(name) + (is_first and name not in self._open)

    def is_open(self, transactional_id: str | None, since: int) -> bool:
        """Whether one with a higher number than `since` is open, and the broker has not been asked to end it."""
        return transactional_id in self._open and self.number(transactional_id) > since

    def asked(self, request: BrokerRequest) -> None:
        """A request goes to the broker. One that ends the transaction may have done so from now on."""
        if request.transactional_id is None:
            return
        if request.api in ENDS:
            self._open.discard(request.transactional_id)
            self._beginning.discard(request.transactional_id)
        elif request.api in BEGINS:
            self._beginning.add(request.transactional_id)

    def answered(self, request: BrokerRequest, error: int) -> None:
        """The broker has answered it."""
        name = request.transactional_id
        if name is None or error or request.api not in BEGINS or name in self._open:
            return
        self._open.add(name)
        self._numbers[name] = self._numbers.get(name, 0) + 1


class _Connection:
    """Of a client to one broker."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = client
        self._from_broker, self._to_broker = broker
        self._sent: dict[int, tuple[BrokerRequest, tuple[Injection, Hit] | None]] = {}
        self._numbers = itertools.count(-2, -1)
        self._copies: dict[int, tuple[BrokerRequest, asyncio.Future[int | None]]] = {}
        """Answers to these go to nobody. The client's own numbers are not negative."""
        self._late = 0
        """Copies that are yet to be sent. While there are copies, the broker's connection stays."""

    async def run(self) -> None:
        answers = asyncio.create_task(self._pass_answers())
        try:
            with suppress(*BROKEN):
                await self._pass_requests()
            self.cut()
            self._leave()
            with suppress(*BROKEN):
                await answers
        finally:
            answers.cancel()
            self.cut()
            self._to_broker.close()
            for _, waiting in self._copies.values():
                if not waiting.done():
                    waiting.set_result(None)

    def cut(self) -> None:
        self._to_client.transport.abort()

    def _leave(self) -> None:
        """Close the broker's connection, if nobody needs it any more."""
        if self._to_client.transport.is_closing() and not self._late and not self._copies:
            self._to_broker.close()

    async def _pass_requests(self) -> None:
        while True:
            frame = await _read(self._from_client)
            request = request_of(frame)
            if request is None:
                _write(self._to_broker, frame)
            elif not await self._pass(request):
                return
            await self._to_broker.drain()

    async def _pass(self, request: BrokerRequest) -> bool:
        """Whether the connection is to go on."""
        met = self._proxy.meet(request) if request.api in TRANSACTIONAL else None
        fault = None if met is None else met[0].fault
        if met is not None and fault is RequestFault.LATE:
            self._late += 1
            met[1].deliver = partial(self._deliver, met[1])
            return False
        if met is not None and fault is RequestFault.LOST_BEFORE:
            met[1].is_over = True
            return not met[0].cuts
        if met is not None and fault is RequestFault.HELD:
            await met[1].released.wait()
            met[1].is_over = True
        if request.api is Api.END_TXN:
            await self._proxy.deliver_late(request.transactional_id, None)
        self._proxy.asked(request)
        self._sent[request.correlation] = request, met
        _write(self._to_broker, request.frame)
        if met is not None and fault is RequestFault.DOUBLED:
            self._copy(met[1])
        return True

    def _copy(self, hit: Hit) -> asyncio.Future[int | None]:
        """Send it once more, or for the first time after all."""
        number = next(self._numbers)
        waiting: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._copies[number] = hit.request, waiting
        hit.was_open = self._proxy.transactions.is_open(hit.request.transactional_id, hit.number)
        _write(self._to_broker, hit.request.numbered(number))

        def answered(answer: asyncio.Future[int | None]) -> None:
            hit.answer, hit.is_over = answer.result(), True

        waiting.add_done_callback(answered)
        return waiting

    def _deliver(self, hit: Hit) -> asyncio.Future[int | None]:
        """Send a late copy, once."""
        hit.deliver = None
        self._late -= 1
        return self._copy(hit)

    async def _pass_answers(self) -> None:
        try:
            while True:
                await self._answer(await _read(self._from_broker))
        finally:
            self.cut()

    async def _answer(self, answer: bytes) -> None:
        correlation = correlation_of(answer)
        if correlation in self._copies:
            request, waiting = self._copies.pop(correlation)
            waiting.set_result(error_of(request, answer))
            self._leave()
            return
        request_and_fault = self._sent.pop(correlation, None)
        if request_and_fault is not None:
            request, met = request_and_fault
            if request.api not in TRANSACTIONAL:
                answer = await self._with_addresses(request, answer)
            elif not await self._may_pass(request, answer, met):
                return
        if not self._to_client.transport.is_closing():
            _write(self._to_client, answer)
            with suppress(OSError):
                await self._to_client.drain()

    async def _may_pass(self, request: BrokerRequest, answer: bytes, met: tuple[Injection, Hit] | None) -> bool:
        """Whether the client gets this answer."""
        error = error_of(request, answer)
        self._proxy.transactions.answered(request, error)
        if not error:
            await self._proxy.deliver_late(request.transactional_id, request.api)
        if met is None:
            return True
        injection, hit = met
        if injection.fault is RequestFault.LOST_AFTER:
            hit.answer, hit.is_over = error, True
            if injection.cuts:
                self.cut()
            return False
        if injection.fault is RequestFault.ANSWER_HELD:
            hit.answer = error
            await hit.released.wait()
            hit.is_over = True
        return True

    async def _with_addresses(self, request: BrokerRequest, answer: bytes) -> bytes:
        named: list[Address] = []

        def name(address: Address) -> Address:
            named.append(address)
            return address

        with_addresses(request, answer, name)
        found = {address: await self._proxy.local(address) for address in named}
        return with_addresses(request, answer, found.__getitem__)


def _address(bootstrap: str) -> Address:
    host, port = bootstrap.rsplit(":", 1)
    return host, int(port)


async def _read(reader: asyncio.StreamReader) -> bytes:
    [size] = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)
