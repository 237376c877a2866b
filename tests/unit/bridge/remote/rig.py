"""Instances with stores on real files, shared storage, and the manifests that Kafka names."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from bridge.remote import objects as objects_module
from bridge.remote.adoption import Adoption, Candidate
from bridge.remote.objects import PARTS_AT_ONCE, Objects, RemoteUnavailable
from bridge.remote.uploads import Uploads
from bridge.stores.names import SourceName
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState, Manifest, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS, Rig
from timerstore.store import TimerStore

PARAMETERS: Final = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
ENDED_S: Final = 60.0
INTERVAL_S: Final = 10.0


class Crash(BaseException):
    """Ends a process between two steps."""


class FaultyObjects(Objects):
    """Shared storage with faults: `fault` is called with each request's name and key, before it and after it."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.fault: Callable[[str, str], None] = lambda what, key: None
        self.requests: list[tuple[str, str]] = []
        self.listed: list[str] | None = None
        """A list in place of the true one."""

    def _do(self, what: str, key: str, do: Callable[[], Any]) -> Any:
        self.fault(f"before {what}", key)
        result = do()
        self.requests.append((what, key))
        self.fault(f"after {what}", key)
        return result

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: super(FaultyObjects, self).put(key, data))

    def put_file(self, key: str, file: IO[bytes], step: Callable[[bytes], None]) -> None:
        self._do("put_file", key, lambda: super(FaultyObjects, self).put_file(key, file, step))

    def get(self, key: str) -> bytes:
        return bytes(self._do("get", key, lambda: super(FaultyObjects, self).get(key)))

    def parts(self, key: str, size: int, at_once: int = PARTS_AT_ONCE) -> Generator[bytes]:
        with closing(super().parts(key, size, at_once)) as parts:
            for _ in range(0, size, objects_module.PART_BYTES):
                yield bytes(self._do("get_part", key, lambda: next(parts)))

    def keys(self, prefix: str, step: Callable[[], None]) -> Iterator[str]:
        found = list(self._do("list", prefix, lambda: list(super(FaultyObjects, self).keys(prefix, step))))
        return iter(found if self.listed is None else self.listed)

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: super(FaultyObjects, self).delete(key))

    def all(self) -> list[str]:
        return sorted(super().keys("", lambda: None))

    def count(self, what: str) -> int:
        return [name for name, _ in self.requests].count(what)


class Instance:
    """One process with a directory: its stores, uploads and adoptions. `kafka` has the manifests that Kafka names."""

    def __init__(self, directory: Path, objects: FaultyObjects, kafka: dict[SourceName, Manifest]) -> None:
        self.directory, self.objects, self.kafka = directory, objects, kafka
        self.clock = ManualClock()
        self.rig = Rig(directory, [ORDERS])
        self.noted: dict[SourceName, Manifest] = {}
        self.metrics = Metrics()
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.adoption = Adoption(self.objects, "group", self.clock, self.metrics)
        self.uploads = Uploads(
            self.objects, "group", stores=lambda: self.rig.stores.by_name, announce=self._announce,
            committed=self.kafka.get, read_committed=lambda names, _: {name: self.state(name) for name in names},
            interval_s=INTERVAL_S, clock=self.clock, metrics=self.metrics, on_fatal=lambda _: None,
        )  # fmt: skip

    def _announce(self, name: SourceName, store: TimerStore, manifest: Manifest) -> None:
        assert self.rig.stores.by_name[name] is store
        self.noted[name] = manifest

    @property
    def store(self) -> TimerStore:
        return self.rig.stores.by_name[ORDERS]

    def state(self, name: SourceName = ORDERS) -> CommittedState:
        """The committed state in Kafka."""
        state = initial_state(offset=0, topic_id="t", partitions=1, parameters=PARAMETERS)
        progress = self.rig.states[name]
        state = replace(state, offset=progress.offset, position=progress.position, frozen=progress.frozen)
        return replace(state, manifest=self.kafka.get(name), cuts=self.rig.cuts.get(name, ()))

    def work(self, *due_ms: int) -> None:
        """Messages come and are written to a segment; past ones are delivered."""
        self.rig.produce(ORDERS, *due_ms)
        self.rig.ingest()
        self.rig.stores.arrive()
        self.rig.stores.go_live([ORDERS])
        self.rig.finish(NOW_MS)
        self.rig.stores.flush(NOW_MS)

    def upload(self) -> None:
        """A round of the uploads, and a transaction."""
        self.clock.advance(int(INTERVAL_S * 1_000))
        self.uploads.go_round()
        self.kafka |= self.noted

    def look(self) -> None:
        """Time for a list passes."""
        self.clock.advance(900_000)
        self.upload()

    def candidate(self) -> Candidate:
        found = self.rig.stores.directory.find(ORDERS, NOW_MS)
        return Candidate(found=found, state=self.state(), log_start=self.rig.log_starts.get(ORDERS, 0))

    def adopt(self) -> bool:
        """Adopt as a start does, and open. Returns whether an adoption was tried."""
        self.rig.stores.close()
        wanted = self.adoption.wanted({ORDERS: self.candidate()})
        self.adoption.begin(wanted)
        assert self.adoption.wait(ENDED_S)
        self.rig.open()
        return bool(wanted)

    def takes_over(self, other: Instance) -> Instance:
        """Share the log and the committed states of another one, which is gone."""
        other.rig.stores.close()
        self.rig.logs, self.rig.states, self.rig.cuts = other.rig.logs, other.rig.states, other.rig.cuts
        self.rig.log_starts = other.rig.log_starts
        return self

    def lose_disk(self) -> None:
        self.rig.stores.close()
        shutil.rmtree(self.directory)
        self.rig.open()

    def covered(self) -> int | None:
        """O_c of the open store: the end of the covered records."""
        return self.store.resume_offset()

    def pending(self) -> list[tuple[int, SourceName, int]]:
        """All rows, as a delivery of everything gives them."""
        self.rig.ingest()
        self.rig.stores.arrive()
        self.rig.stores.go_live([ORDERS])
        rows: list[tuple[int, SourceName, int]] = []
        while True:
            loaded = self.rig.load(10 * NOW_MS)
            new = self.rig.deliver(10 * NOW_MS)
            rows += new
            if not loaded and not new:
                return rows


def refuse(what: str, *, part: str = "") -> Callable[[str, str], None]:
    """A fault: these requests are refused."""

    def fault(request: str, key: str) -> None:
        if what in request and part in key:
            raise RemoteUnavailable(f"{request} {key} is refused")

    return fault
