"""Adoption: the index that Kafka names is fetched from shared storage into the local directory.

It follows the facts of Kafka, and precedes the opening of the store, which then finds an ordinary local index. Without
a whole index in time, the partition is read from Kafka, as without shared storage.

Steps, each with the cost of a crash right after it:

    1. files        under temporary names of their own, checked, synced,    the next opening removes them
                    also the checkpoint: no later step needs room
    2. old index    its checkpoint is removed                               no index: it is adopted, or read from Kafka
    3. names        the files get their names                               as 2; the next opening removes the files
    4. checkpoint   names the files                                         none: an ordinary local index

A local index stays if it reaches as far, if it alone may have rows that Kafka has lost (its rows of that age are not
compared with those of the copy), or if the rest of the log is read sooner than the copy. Each manifest is tried once by
a process, so a damaged index never comes again and again. The exception is a copy that may be the only one with
messages, since Kafka lacks records that the local index does not cover, and their age does not explain it: the
partition waits for it while shared storage does not answer or lacks an object of it (another address, a mount that is
not there), or the disk has no room, however slow it comes.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from bridge.remote.objects import CALL_S, PARTS_AT_ONCE, Missing, Objects, RemoteTrouble, RemoteUnavailable
from bridge.remote.remote_index import RemoteIndex, Stored, digest_of, new_name, prefix_of
from bridge.stores.names import SourceName
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState, Manifest
from timerstore.clock import Clock
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk import files
from timerstore.disk.checkpoint import NamedFile
from timerstore.errors import TimerStoreError
from timerstore.operations import recovery
from timerstore.operations.recovery import Found

GRACE_S: Final = 30.0
BYTES_PER_S_MIN: Final = 8 << 20
"""A slower store is no faster than Kafka."""
RECORD_BYTES: Final = 1 << 10
"""A record of the log takes about as long to read as this part of a copy: 20,000 of them a second against 20 MiB."""
FREE_BYTES_MIN: Final = 64 << 20
"""The room that an adoption leaves to others."""
WAIT_S: Final = 0.05
RETRY_S: Final = 5.0
"""The pause of a partition that waits for shared storage."""
TRY_AGAIN_S: Final = 600.0
"""The pause after an attempt for a partition, which may come again to this process."""

Attempt = tuple[Manifest | None, bool]

log = structlog.get_logger("bridge.remote.adoption")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A partition whose index may be adopted: its local one, and Kafka's facts."""

    found: Found
    state: CommittedState
    log_start: int
    spare_ms: int | None = None
    """See `StartPlan`."""

    def is_worthwhile(self) -> bool:
        """Whether the manifest that Kafka names reaches further than the local index, which may be replaced."""
        state, local = self.state, self.found.checkpoint
        if state.manifest is None or state.manifest[1] < state.first_offset:
            return False
        if local is None:
            return True
        offset, kept = self._coverage(self.found)
        held = offset if offset is not None else kept or 0
        if state.manifest[1] <= held:
            return False
        if held < state.gone_below:  # the owner of the copy has noted rows that this index cannot have
            return True
        if local.kept is not None and recovery.holds_rows(self.found):
            return False
        # The copy may lack those.
        lost_below = max(self.log_start, state.gone_below)
        return not recovery.may_hold_rows_below(self.found, state.progress().position, lost_below)

    def saves_time(self, index: RemoteIndex) -> bool:
        """Whether its fetch costs less than the records that the local index lacks, or nothing else has the rows."""
        offset, _ = self._coverage(self.found)
        if offset is None or self.state.gone_below:
            return True
        return index.size <= RECORD_BYTES * ((index.checkpoint.offset or 0) - offset)

    def may_be_the_last(self) -> bool:
        """Whether Kafka lacks records that the local index does not cover, and their age does not explain it: only the
        copy may have their messages."""
        offset, _ = self._coverage(self.found)
        is_explained = self.spare_ms is not None and self.spare_ms > 0 and not self.state.gone_below
        return offset is None and self.log_start > self.state.first_offset and not is_explained

    def attempt(self) -> Attempt:
        """What an attempt concerns. If Kafka deletes records after it, the copy may be the last one: another matter."""
        return self.state.manifest, self.may_be_the_last()

    def must_be_better(self, index: RemoteIndex) -> None:
        """Raises RemoteTrouble for an index that the opening would not trust."""
        if self.state.manifest is None or index.checkpoint.offset != self.state.manifest[1]:
            raise RemoteTrouble(f"the manifest {index.name} is not the one that was committed")
        found = replace(self.found, checkpoint=index.checkpoint)
        (offset, _), reason = recovery.coverage(found, self.state.progress(), self.log_start, self.state.cuts)
        is_only = self.may_be_the_last() and not recovery.holds_rows(self.found)  # nothing else has its rows
        if offset is None and not (is_only and (reason == recovery.OUTDATED or self.state.gone_below)):
            raise RemoteTrouble(f"the manifest {index.name} is out of date")

    def _coverage(self, found: Found) -> tuple[int | None, int | None]:
        return recovery.coverage(found, self.state.progress(), self.log_start, self.state.cuts)[0]


@dataclass(slots=True)
class _Fetch:
    """One download, on a thread of its own: a call that hangs holds up nobody."""

    objects: Objects
    prefix: str
    candidate: Candidate
    clock: Clock
    moved_s: float = 0.0
    """The time from which the limit counts."""
    limit_s: float = GRACE_S
    outcome: str = "shared storage does not answer, or the bridge stops"
    is_over: bool = False
    is_needed: bool = True
    is_unavailable: bool = True
    """Whether the reason concerns other partitions, too."""
    is_hopeless: bool = False
    """Whether the index is there, but useless."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    temporaries: dict[Path, Path] = field(default_factory=dict)

    def run(self) -> None:
        try:
            self._fetch()
            self.is_unavailable = False
        except RemoteUnavailable as error:
            self.outcome = str(error)
        except Missing as error:  # so do an empty mount point, another bucket, and a copy half restored look
            self.outcome, self.is_unavailable = str(error), False
        except RemoteTrouble as error:
            self.outcome, self.is_unavailable, self.is_hopeless = str(error), False, True
        except (TimerStoreError, OSError) as error:
            self.outcome, self.is_unavailable = str(error) or type(error).__name__, False
        except Exception as error:  # noqa: BLE001 - the partition is read from Kafka
            self.outcome, self.is_unavailable = repr(error), False
        finally:
            for path in self.temporaries:
                with suppress(OSError):
                    path.unlink()

    def is_late(self, by_s: float = 0.0) -> bool:
        return self.clock.monotonic_s() - self.moved_s > self.limit_s + by_s

    def give_up(self) -> None:
        """From now on it changes nothing in the directory but its temporary files."""
        with self.lock:
            self.is_over = True

    def _step(self) -> None:
        if self.is_over:
            raise RemoteUnavailable("it is late, or the bridge stops")
        if self.is_late():
            raise RemoteUnavailable(f"it takes more than {self.limit_s:.0f} s")

    def _fetch(self) -> None:
        candidate, directory = self.candidate, self.candidate.found.directory
        manifest = candidate.state.manifest
        if manifest is None:
            return
        index = RemoteIndex.read(self.objects, self.prefix, manifest[0], candidate.found.identity)
        candidate.must_be_better(index)
        size = index.size
        if not candidate.saves_time(index):
            self.outcome, self.is_needed = "", False
            return
        if shutil.disk_usage(directory).free < size + FREE_BYTES_MIN:
            raise OSError(errno.ENOSPC, f"the disk has no room for {size} bytes")
        self.limit_s += size / BYTES_PER_S_MIN
        own = new_name()  # a late attempt removes its own files only
        for file, stored in index.objects.items():
            path = directory / file.name
            temporary = files.temporary_of(path.with_name(f"{file.name}.{own}"))
            self.temporaries[temporary] = path
            self._download(file, stored, temporary)
        path = directory / files.CHECKPOINT
        with files.writing(path.with_name(f"{path.name}.{own}")) as temporary:
            self.temporaries[temporary] = path
            temporary.write_text(checkpoints.as_text(index.checkpoint), encoding="utf-8")
            files.fsync(temporary)
        with self.lock:
            self._step()
            self._put_in_place(directory)
            self.outcome = ""

    def _download(self, file: NamedFile, stored: Stored, path: Path) -> None:
        key, digest = stored
        is_last, found = self.candidate.may_be_the_last(), digest_of()
        # The last copy may be slow, and each request has its time: so one part gets the whole network.
        parts = self.objects.parts(self.prefix + key, file.bytes, 1 if is_last else PARTS_AT_ONCE)
        self._step()
        with path.open("wb") as opened, closing(parts):
            for piece in parts:
                if is_last:
                    self.moved_s = self.clock.monotonic_s()
                self._step()
                found.update(piece)
                opened.write(piece)
            opened.flush()
            os.fsync(opened.fileno())
        if found.hexdigest() != digest:
            raise RemoteTrouble(f"{key} is damaged")

    def _put_in_place(self, directory: Path) -> None:
        *others, checkpoint = self.temporaries.items()
        files.remove(directory / files.CHECKPOINT)
        files.sync_directory(directory)
        for temporary, path in others:
            os.replace(temporary, path)
        files.sync_directory(directory)
        os.replace(*checkpoint)
        files.sync_directory(directory)


class Adoption:
    """Adopts the indexes of partitions, one after the other, on a thread. Any thread may call."""

    def __init__(self, objects: Objects, group_id: str, clock: Clock, metrics: Metrics) -> None:
        self._objects = objects
        self._group_id = group_id
        self._clock = clock
        self._metrics = metrics
        self._tried: dict[SourceName, tuple[Attempt, float]] = {}
        """By partition, the last attempt, and when it ended."""
        self._lock = threading.Lock()
        self._waiting: dict[SourceName, Candidate] = {}
        """The one under way, and those behind it; at most one for each partition."""
        self._gone: frozenset[SourceName] = frozenset()
        """Other instances have them now."""
        self._told_s = float("-inf")
        self._last: threading.Thread | None = None
        """The last download: a call to a mount that hangs never ends, and there is one such thread at most."""
        self._on_end: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def wanted(self, candidates: Mapping[SourceName, Candidate]) -> dict[SourceName, Candidate]:
        """The partitions whose index is worth a try."""
        return {
            name: each
            for name, each in candidates.items()
            if each.state.manifest is not None and not self._is_tried(name, each) and each.is_worthwhile()
        }

    def _is_tried(self, name: SourceName, candidate: Candidate) -> bool:
        tried, at_s = self._tried.get(name, (None, 0.0))
        return tried == candidate.attempt() and self._clock.monotonic_s() - at_s < TRY_AGAIN_S

    def under_way(self) -> frozenset[SourceName]:
        """The partitions whose directories are in use."""
        with self._lock:
            return frozenset(self._waiting)

    def begin(self, wanted: Mapping[SourceName, Candidate], on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called on that thread after each partition, or after several that are given up together."""
        with self._lock:
            self._on_end = on_end
            self._gone -= wanted.keys()
            if self._thread is None and wanted:
                self._stop = threading.Event()
                thread = threading.Thread(target=self._run, args=(self._stop,), name="adoption", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no room for a thread
                    self._give_up(wanted, str(error))
                    return
                self._thread = thread
            self._waiting |= dict(sorted(wanted.items()))

    def keep(self, names: Collection[SourceName]) -> None:
        """Fetch no other indexes than those of these partitions: others are not this instance's any more."""
        with self._lock:
            self._gone = frozenset(self._waiting.keys() - names)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the adoptions. Returns whether they have ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Give the adoptions up: no index is put in place later. Returns whether the thread has ended."""
        self._stop.set()
        return self.wait(timeout_s)

    def _run(self, stop: threading.Event) -> None:
        told: set[SourceName] = set()
        while (following := self._next(stop, told)) is not None:
            name, candidate = following
            if name not in told:
                told.add(name)
                log.info("index-fetched", topic=name[0], partition=name[1])
            if not self._adopt(name, candidate, stop):
                self._pause(stop, told)
                continue
            with self._lock:
                self._waiting.pop(name, None)
                self._gone &= self._waiting.keys()
            if not stop.is_set():
                self._on_end()

    def _next(self, stop: threading.Event, tried: set[SourceName]) -> tuple[SourceName, Candidate] | None:
        """New partitions precede those that have been `tried`, and wait for a copy."""
        with self._lock:
            tried.intersection_update(self._waiting)
            if self._waiting and not stop.is_set():
                return min(self._waiting.items(), key=lambda each: each[0] in tried)
            self._waiting = {}
            self._thread = None
            return None

    def _pause(self, stop: threading.Event, tried: set[SourceName]) -> None:
        for _ in range(int(RETRY_S / WAIT_S)):
            with self._lock:
                has_changed = self._waiting.keys() - tried or self._waiting.keys() & self._gone
            if has_changed or stop.wait(WAIT_S):
                return

    def _adopt(self, name: SourceName, candidate: Candidate, stop: threading.Event) -> bool:
        """Returns whether it is over; False: it is tried again."""
        manifest = candidate.state.manifest
        if manifest is None or name in self._gone:
            return True
        prefix = prefix_of(self._group_id, candidate.found.identity)
        began_s = self._clock.monotonic_s()
        fetch = _Fetch(self._objects, prefix, candidate, self._clock, began_s)
        while self._last is not None and self._last.is_alive():
            if stop.is_set() or name in self._gone:
                return True
            if self._clock.monotonic_s() - began_s > CALL_S:
                return self._has_failed(name, candidate, fetch)
            self._last.join(WAIT_S)
        began_s = fetch.moved_s = self._clock.monotonic_s()
        thread = self._last = threading.Thread(target=fetch.run, name=f"adoption-{name[0]}-{name[1]}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no room for a thread
            fetch.outcome, self._last = str(error), None
        while thread.is_alive() and not (stop.is_set() or name in self._gone or fetch.is_late(by_s=CALL_S)):
            thread.join(WAIT_S)
        fetch.give_up()
        seconds = self._clock.monotonic_s() - began_s
        if fetch.outcome:
            if stop.is_set() or name in self._gone:
                return True  # it does not count: the next pipeline, or the next owner, begins it again
            return self._has_failed(name, candidate, fetch)
        self._tried[name] = candidate.attempt(), self._clock.monotonic_s()
        if not fetch.is_needed:
            log.info("index-not-needed", topic=name[0], partition=name[1], manifest=manifest[0])
            return True
        self._metrics.adoption.observe(seconds)
        log.info("index-adopted", topic=name[0], partition=name[1], manifest=manifest[0], seconds=round(seconds, 1))
        return True

    def _has_failed(self, name: SourceName, candidate: Candidate, fetch: _Fetch) -> bool:
        """Returns whether the partition does without the copy. Without shared storage all do that, or wait."""
        with self._lock:
            others = {other: each for other, each in self._waiting.items() if other not in {name, *self._gone}}
            waiting = {other: each for other, each in others.items() if each.may_be_the_last()}
            given_up = {other: each for other, each in others.items() if fetch.is_unavailable and other not in waiting}
            # The next attempt is another one's.
            self._waiting = {other: each for other, each in others.items() if other not in given_up} | {name: candidate}
        if given_up:
            self._give_up(given_up, "as for another partition")
            self._on_end()
        if fetch.is_hopeless or not candidate.may_be_the_last():
            self._give_up({name: candidate}, fetch.outcome)
            return True
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s >= TRY_AGAIN_S:
            self._told_s = now_s
            log.error(
                "index-awaited", topic=name[0], partition=name[1], partitions=len(waiting) + 1, reason=fetch.outcome,
                hint="Kafka has deleted records, so only the copy may have their messages. Restore it, or the mount and"
                " the address of store.remote. If it is lost, start once without the key: Kafka is read, without them.",
            )  # fmt: skip
        return False

    def _give_up(self, candidates: Mapping[SourceName, Candidate], reason: str) -> None:
        for name, candidate in candidates.items():
            manifest = "" if candidate.state.manifest is None else candidate.state.manifest[0]
            self._tried[name] = candidate.attempt(), self._clock.monotonic_s()
            loss = ", which may lack messages" if candidate.may_be_the_last() else ""
            log.warning(
                "index-not-adopted", topic=name[0], partition=name[1], manifest=manifest, reason=reason,
                hint=f"The partition is read from Kafka{loss}.",
            )  # fmt: skip
