"""The thread that uploads indexes, one partition after the other, and collects garbage.

Steps, each with the cost of a crash right after it:

    1. upload of files    new ones of the present checkpoint            objects without a name: garbage
    2. manifest           under a new name                              as 1
    3. commit             the next transaction has its name, and a      none: the new manifest counts
                          quiet partition gets one without rows
    4. collection         objects that nobody names are deleted         the next process deletes the rest

An object is garbage if two lists, `GRACE_S` apart, have it, and neither the manifest that Kafka names after the second
one nor this thread's next one does. So no clock of the store counts, and another owner's work is not deleted. The same
lists find objects that are gone: they are uploaded again. That mends the one harm of an owner that has lost its
partition and does not notice for `GRACE_S`: it may delete objects which the next owner has not named in Kafka for as
long, but never those of a manifest that Kafka names.

A file is open during its upload, so its removal does no harm. If a file is gone before, the present checkpoint names
other ones. Errors end nothing, not even unexpected ones: delivery does not need a copy, so the thread tries again after
a pause. Nor has it a heartbeat: a mount may hang for ever, and a new process would hang likewise. The age of the copy
shows that.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from bridge.errors import BridgeError
from bridge.ingest.watch.guarded import guarded
from bridge.remote.objects import Objects, RemoteTrouble, RemoteUnavailable, Stopped
from bridge.remote.remote_index import RemoteIndex, Stored, digest_of, files_of, manifest_key, new_name, prefix_of
from bridge.stores.names import SourceName
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState, Manifest
from timerstore.clock import Clock
from timerstore.disk.checkpoint import Checkpoint, NamedFile
from timerstore.store import TimerStore

ROUND_S: Final = 0.5
GRACE_S: Final = 900.0
PAUSE_S: Final = (1.0, 300.0)
"""The first and the longest pause after an error."""
TELL_S: Final = 600.0
ANSWER_S: Final = 5.0
"""The longest wait for a committed state, which an open transaction withholds: copies of other partitions wait, too."""

log = structlog.get_logger("bridge.remote.uploads")


@dataclass(slots=True)
class _Partition:
    store: TimerStore
    objects: dict[NamedFile, Stored] | None = None
    """The objects of files; None: not read yet."""
    index: RemoteIndex | None = None
    """The newest manifest."""
    sent_s: float = float("-inf")
    behind_s: float | None = None
    """The time since which no committed manifest has the present index."""
    looked_s: float = float("-inf")
    unnamed: dict[str, float] = field(default_factory=dict)
    """Objects without a name, and the time of the first list with them."""


class Uploads:
    """See the module. `announce` notes a manifest for the next transaction, for a store that is still open;
    `committed` returns the one of the last transaction, `read_committed` what Kafka has."""

    def __init__(
        self,
        objects: Objects,
        group_id: str,
        *,
        stores: Callable[[], Mapping[SourceName, TimerStore]],
        announce: Callable[[SourceName, TimerStore, Manifest], None],
        committed: Callable[[SourceName], Manifest | None],
        read_committed: Callable[[list[SourceName], float | None], Mapping[SourceName, CommittedState | None]],
        interval_s: float,
        clock: Clock,
        metrics: Metrics,
        on_fatal: Callable[[BridgeError], None],
    ) -> None:
        """`interval_s` is the shortest time between two manifests of a partition."""
        self._objects = objects
        self._group_id = group_id
        self._stores = stores
        self._announce = announce
        self._committed = committed
        self._read_committed = read_committed
        self._interval_s = interval_s
        self._clock = clock
        self._metrics = metrics
        self._on_fatal = on_fatal
        self._partitions: dict[SourceName, _Partition] = {}
        self._failed: SourceName = "", 0
        self._pause_s = 0.0
        self._not_before_s = float("-inf")
        self._told_s = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the current request. Returns whether that was in time; later, nothing of it counts."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def age_s(self) -> float:
        """The time for which shared storage has lacked the present index of a partition, at worst; 0: it has all."""
        now_s = self._clock.monotonic_s()
        self._note_behind(now_s)
        return max(
            (now_s - each.behind_s for each in list(self._partitions.values()) if each.behind_s is not None),
            default=0.0,
        )

    def _run(self) -> None:
        guarded("uploads", self._work, on_fatal=self._on_fatal)

    def _work(self) -> None:
        while not self._stop.wait(ROUND_S):
            try:
                self.go_round()
            except Stopped:
                return

    def go_round(self) -> None:
        """Look at each partition once."""
        stores, known, now_s = self._stores(), self._partitions, self._clock.monotonic_s()
        self._partitions = {
            name: known[name] if name in known and known[name].store is store else _Partition(store)
            for name, store in stores.items()
        }
        self._note_behind(now_s)
        if now_s < self._not_before_s:
            return
        trouble: RemoteTrouble | None = None
        for name, partition in self._in_turn():
            try:
                self._serve(name, partition)
            except RemoteTrouble as error:
                trouble, self._failed = error, name
                self._tell(name, error)
                if isinstance(error, RemoteUnavailable):
                    break  # each of the others would wait as long
            except Stopped:
                raise
            except Exception as error:
                trouble = RemoteTrouble(repr(error))
                self._metrics.remote_failures.inc()
                log.exception("remote-failed-unexpectedly", topic=name[0], partition=name[1])
        if trouble is not None:
            self._pause_s = min(max(2 * self._pause_s, PAUSE_S[0]), PAUSE_S[1])
            self._not_before_s = self._clock.monotonic_s() + self._pause_s
        elif self._pause_s:
            self._pause_s, self._told_s = 0.0, float("-inf")
            log.info("remote-works-again")

    def _in_turn(self) -> list[tuple[SourceName, _Partition]]:
        """All partitions, from the one behind the last failure on: none keeps the others from their turn."""
        names = sorted(self._partitions)
        start = bisect_right(names, self._failed)
        return [(name, self._partitions[name]) for name in (*names[start:], *names[:start])]

    def _note_behind(self, now_s: float) -> None:
        for name, each in list(self._partitions.items()):
            index, committed = each.index, self._committed(name)
            has_all = index is not None and _same(index.checkpoint, each.store.state.checkpoint)
            if has_all and committed is not None and index is not None and committed[0] == index.name:
                each.behind_s = None
            elif each.behind_s is None:
                each.behind_s = now_s

    def _tell(self, name: SourceName, trouble: RemoteTrouble) -> None:
        self._metrics.remote_failures.inc()
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            log.warning(
                "remote-failed", topic=name[0], partition=name[1], reason=str(trouble),
                hint="Delivery goes on. `delay-bridge check` tries store.remote.",
            )  # fmt: skip

    # ---- one partition

    def _serve(self, name: SourceName, partition: _Partition) -> None:
        if partition.objects is None:
            self._begin(name, partition)
        now_s = self._clock.monotonic_s()
        checkpoint, index = partition.store.state.checkpoint, partition.index
        is_new = index is None or not _same(index.checkpoint, checkpoint)
        if checkpoint.offset is not None and is_new and now_s - partition.sent_s >= self._interval_s:
            self._send(name, partition, checkpoint, checkpoint.offset)
        if now_s - partition.looked_s >= GRACE_S:
            self._look(name, partition)
            partition.looked_s = now_s

    def _begin(self, name: SourceName, partition: _Partition) -> None:
        """Go on from the manifest that Kafka names. Without it, all files are uploaded. Raises RemoteUnavailable if
        shared storage does not tell."""
        noted = self._committed(name)
        if noted is not None:
            try:
                partition.index = self._read(partition, noted[0])
            except RemoteUnavailable:
                raise
            except RemoteTrouble as trouble:
                log.warning("manifest-lost", topic=name[0], partition=name[1], manifest=noted[0], reason=str(trouble))
        partition.objects = {} if partition.index is None else dict(partition.index.objects)

    def _read(self, partition: _Partition, manifest: str) -> RemoteIndex:
        return RemoteIndex.read(self._objects, self._prefix(partition), manifest, partition.store.state.identity)

    def _prefix(self, partition: _Partition) -> str:
        return prefix_of(self._group_id, partition.store.state.identity)

    def _send(self, name: SourceName, partition: _Partition, checkpoint: Checkpoint, offset: int) -> None:
        known = {} if partition.objects is None else partition.objects
        objects: dict[NamedFile, Stored] = {}
        for file in files_of(checkpoint):
            stored = known.get(file) or self._upload(partition, file)
            if stored is None:
                return  # a later checkpoint does not name it
            objects[file] = known[file] = stored
        index = RemoteIndex(name=new_name(), checkpoint=checkpoint, objects=objects)
        self._step()
        index.write(self._objects, self._prefix(partition))
        partition.objects, partition.index, partition.sent_s = objects, index, self._clock.monotonic_s()
        self._announce(name, partition.store, (index.name, offset))

    def _upload(self, partition: _Partition, file: NamedFile) -> Stored | None:
        """Upload a file. None: it is gone."""
        key, digest, sent = f"{new_name()}-{file.name}", digest_of(), 0

        def step(piece: bytes) -> None:
            nonlocal sent
            self._step()
            digest.update(piece)
            sent += len(piece)
            self._metrics.remote_bytes.inc(len(piece))

        try:
            opened = (partition.store.state.directory / file.name).open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RemoteTrouble(f"cannot read {file.name}: {error}") from error
        with opened:
            self._objects.put_file(self._prefix(partition) + key, opened, step)
        if sent != file.bytes:
            raise RemoteTrouble(f"{file.name} has {sent} bytes, not {file.bytes}")
        self._metrics.remote_uploads.inc()
        return key, digest.hexdigest()

    def _step(self) -> None:
        """Between two requests."""
        if self._stop.is_set():
            raise Stopped

    # ---- objects that are gone, and garbage

    def _look(self, name: SourceName, partition: _Partition) -> None:
        prefix, objects = self._prefix(partition), partition.objects or {}
        found = {key.removeprefix(prefix) for key in self._objects.keys(prefix, self._step)}
        lacking = [file for file, (key, _) in objects.items() if key not in found]
        for file in lacking:  # a list may be old
            self._step()
            if not self._objects.exists(prefix + objects[file][0]):
                log.warning("remote-object-lost", topic=name[0], partition=name[1], file=file.name)
                del objects[file]
                partition.index = None
        index = partition.index
        if index is not None and manifest_key(index.name) not in found:
            partition.index = index if self._objects.exists(prefix + manifest_key(index.name)) else None
        named = self._named(name, partition)
        if named is not None:
            self._collect(prefix, partition, found - named)

    def _named(self, name: SourceName, partition: _Partition) -> frozenset[str] | None:
        """The objects with a name, read after the list; None: unknown, or the partition is another instance's now."""
        try:
            state = self._read_committed([name], ANSWER_S)[name]
        except BridgeError as error:
            log.info("garbage-not-collected", topic=name[0], partition=name[1], reason=error.message)
            return None
        if state is None or self._stores().get(name) is not partition.store:
            return None
        index, objects = partition.index, partition.objects or {}
        named = {key for key, _ in objects.values()} | (set() if index is None else index.keys())
        if state.manifest is not None and (index is None or index.name != state.manifest[0]):
            try:
                named |= self._read(partition, state.manifest[0]).keys()
            except RemoteTrouble:
                return None
        return frozenset(named)

    def _collect(self, prefix: str, partition: _Partition, unnamed: set[str]) -> None:
        now_s = self._clock.monotonic_s()
        partition.unnamed = {key: partition.unnamed.get(key, now_s) for key in unnamed}
        for key in [key for key, since_s in partition.unnamed.items() if now_s - since_s >= GRACE_S]:
            self._step()
            self._objects.delete(prefix + key)
            del partition.unnamed[key]


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether both have the same files, and cover the log to the same place."""
    return (one.offset, one.cut, files_of(one)) == (other.offset, other.cut, files_of(other))
