"""Reads stretches of partitions batch by batch, in a Java process of its own (../java/BatchReader.java).

Kafka's consumers unpack a batch before they know its size, and neither of them reports it. This reader counts first: it
needs memory for one compressed batch and one record, and reports larger records, and batches with a wrong checksum. It
takes a second to start, so it reads only batches that have ended a reader before (suspects.py), and the first ones of a
log (start/oldest.py).
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import records_gone
from bridge.settings.clients import QUIET, java_program
from bridge.spark.session import with_classes
from bridge.stores.names import SourceName
from bridge.wire.received import Record

RECORD_BYTES_MAX: Final = 64 << 20
"""A larger record cannot be delivered either: the producer does not send it (`message.max.bytes`)."""
SILENCE_S: Final = 60.0
"""The longest silence of the process, after which it is ended."""
LOOK_S: Final = 0.5
JVM: Final = (
    *QUIET, "-Xmx320m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:MaxDirectMemorySize=64m",
)  # fmt: skip
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of a partition to read: [begin, end), and the rest of the last batch; less if the log ends."""

    name: SourceName
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLargeRecord:
    """A record beyond the memory limit; `size` in bytes, `by_broker` as in `Record`."""

    offset: int
    ts: int
    by_broker: bool
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptBatch:
    """An unreadable batch, from `offset` to before `next`; it ends its stretch."""

    offset: int
    next: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Its stretch is read up to this exclusive offset."""

    offset: int


Found = Record | TooLargeRecord | CorruptBatch | End


class BatchReader:
    """See the module. Each call of `read` is a process."""

    def __init__(
        self,
        properties: Callable[[], Mapping[str, str]],
        jars: Callable[[], Sequence[Path]],
        options: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`properties` are the Java client's, without a prefix; `options` are Java's `-D`."""
        self._properties = properties
        self._jars = jars
        self._options = options

    def read(
        self,
        stretches: Sequence[Stretch],
        is_over: Callable[[], bool] = lambda: False,
        record_bytes_max: int = RECORD_BYTES_MAX,
    ) -> Iterator[tuple[SourceName, Found]]:
        """The contents, in order, stretch by stretch; each ends with an End or a CorruptBatch. Less if `is_over`.

        Raises EnvironmentFailure if the process does not start, or cannot ask the brokers, StateError for gone records.
        If the process dies in a batch, that batch is a CorruptBatch of one offset, and the last item."""
        properties = self._properties()
        try:
            process = subprocess.Popen(
                [java_program(), *JVM, *self._options(), *with_classes(self._jars()), "delaybridge.BatchReader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise _failure(str(error)) from error
        assert process.stdin is not None and process.stdout is not None
        with process:
            try:
                _offer(process.pid)  # it unpacks nothing before the request
                with suppress(BrokenPipeError):
                    process.stdin.write(_request(properties, record_bytes_max, stretches))
                    process.stdin.flush()
                answer = _Answer(process.stdout.fileno(), is_over)
                for stretch in stretches:
                    yield from _read(answer, stretch, process)
            except _Over:
                return
            finally:
                process.kill()
                with suppress(BrokenPipeError):
                    process.stdin.close()


class _Over(Exception):
    """The answer is no longer wanted, or cannot continue."""


class _Died(Exception):
    """The process has ended before its answer."""


class _Answer:
    """The process's standard output."""

    def __init__(self, descriptor: int, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._descriptor, self._poll = descriptor, select.poll()  # `select` takes no descriptor above 1,023
        self._poll.register(descriptor, select.POLLIN)
        self._data = bytearray()
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises _Over, _Died, EnvironmentFailure after a long silence."""
        if len(self._data) - self._at < count:
            del self._data[: self._at]
            self._at = 0
            while len(self._data) < count:
                self._data += self._piece(count)
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def _piece(self, count: int) -> bytes:
        for _ in range(int(SILENCE_S / LOOK_S)):
            if self._is_over():
                raise _Over
            if self._poll.poll(LOOK_S * 1000):
                piece = os.read(self._descriptor, max(_PIECE, count - len(self._data)))
                if not piece:
                    raise _Died
                return piece
        raise _failure(f"it has said nothing for {SILENCE_S:.0f} s")

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def bytes(self) -> bytes | None:
        (count,) = self.unpack(_INT)
        return None if count < 0 else self.take(count)

    def text(self) -> str:
        return (self.bytes() or b"").decode("utf-8", "replace")


_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_PLACE: Final = struct.Struct(">qq?")
_LARGE: Final = struct.Struct(">qq?q")
_BATCH: Final = struct.Struct(">qq")


def _read(answer: _Answer, stretch: Stretch, process: subprocess.Popen[bytes]) -> Iterator[tuple[SourceName, Found]]:
    """One stretch."""
    at = stretch.begin
    while True:
        try:
            item = _next(answer, stretch.name)
        except _Died:
            reason = f"the process that reads it has ended with status {process.wait()}"
            if at == stretch.begin and process.returncode == 1:
                raise _failure(reason) from None
            yield stretch.name, CorruptBatch(offset=at, next=at + 1, reason=reason)
            raise _Over from None  # the rest of its answer is part of a record, and has nothing on other stretches
        yield stretch.name, item
        if isinstance(item, CorruptBatch | End):
            return
        at = item.offset + 1


def _next(answer: _Answer, name: SourceName) -> Found:
    kind = answer.take(1)
    if kind == b"R":
        offset, ts, by_broker = answer.unpack(_PLACE)
        key, value = answer.bytes(), answer.bytes()
        (count,) = answer.unpack(_INT)
        headers = [(answer.text(), answer.bytes()) for _ in range(count)]
        return Record(*name, offset, ts, bool(by_broker), key, value, headers)
    if kind == b"L":
        offset, ts, by_broker, size = answer.unpack(_LARGE)
        return TooLargeRecord(offset=offset, ts=ts, by_broker=bool(by_broker), size=size)
    if kind == b"C":
        offset, behind = answer.unpack(_BATCH)
        return CorruptBatch(offset=offset, next=behind, reason=answer.text())
    if kind == b"E":
        (end,) = answer.unpack(_LONG)
        return End(offset=end)
    if kind == b"G":
        (wanted,) = answer.unpack(_LONG)
        raise records_gone(topic=name[0], partition=name[1], wanted=wanted)
    raise _failure(answer.text() if kind == b"F" else f"{kind!r} is no part of an answer")


def _request(properties: Mapping[str, str], record_bytes_max: int, stretches: Sequence[Stretch]) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode()
        return _INT.pack(len(data)) + data

    pairs = [text(name) + text(value) for name, value in properties.items()]
    places = [
        text(each.name[0]) + _INT.pack(each.name[1]) + _LONG.pack(each.begin) + _LONG.pack(each.end)
        for each in stretches
    ]
    numbers = (_INT.pack(len(pairs)), *pairs, _INT.pack(record_bytes_max), _INT.pack(len(places)), *places)
    return b"".join(numbers)


def _offer(pid: int) -> None:
    """Without free memory, the kernel ends this process before the bridge, Spark or a broker beside it."""
    with suppress(OSError):  # no Linux, or an ended process
        Path("/proc", str(pid), "oom_score_adj").write_text("1000")


def _failure(reason: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "the process that reads single batches has failed",
        hint="Look at the brokers, and at the memory of the machine.",
        reason=reason,
        code="DB-3060",
    )
