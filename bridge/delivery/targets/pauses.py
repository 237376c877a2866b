"""Targets that an operator has paused: their messages are put off until they are resumed, and no attempt is counted.

They are in a file beside the index, so a pause outlives the process, and holds for this instance only. The file is
durable before the pause takes effect, and before it is lifted: a crash between the two leaves what the next start does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from bridge.delivery.targets.target import Target
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Refusal
from bridge.wire.headers import check_topic
from bridge.wire.reasons import RejectReason
from timerstore.disk import files
from timerstore.errors import TimerStoreError

FILE: Final = "paused-targets.json"
PAUSED_MAX: Final = 1_000

log = structlog.get_logger("bridge.delivery.targets.pauses")


class Pauses:
    """The paused targets of a directory. Any thread."""

    def __init__(
        self, directory: Path, own: Collection[str] = (), defaults: Mapping[str, str | None] | None = None
    ) -> None:
        """`own` are the bridge's topics, which cannot be paused; `defaults` the default targets of delay topics. Raises
        EnvironmentFailure where the file cannot be read."""
        self._path, self._own, self._defaults = directory / FILE, frozenset(own), defaults or {}
        self._lock = threading.Lock()
        self._names = self._read()
        if self._names:
            log.warning("targets-paused", topics=sorted(self._names))

    def names(self) -> frozenset[str]:
        return self._names

    def topics(self) -> frozenset[str]:
        return frozenset(topic for topic, target in self._defaults.items() if target in self._names)

    def put(self, name: str, *, paused: bool) -> bool:
        """Pause or resume one; whether that changed anything.

        Raises ValueError for a topic of the bridge, and where too many are paused; EnvironmentFailure where it could
        not be written down.
        """
        with self._lock:
            if (name in self._names) is paused:
                return False
            names = self._names | {name} if paused else self._names - {name}
            if paused and name in self._own:
                raise ValueError(f"{name} is a topic of the bridge itself, and no target.")
            if len(names) > PAUSED_MAX:
                raise ValueError(f"{PAUSED_MAX} targets are paused already: resume some.")
            self._write(names)
            self._names = names
        if paused:
            log.warning("target-paused", topic=name)
        else:
            log.warning("target-resumed", topic=name)
        return True

    def applied(self, name: str, target: Target) -> Target:
        """What can be sent to it now."""
        if name not in self._names or name in self._own:
            return target
        return replace(target, refusal=Refusal(RejectReason.TARGET_PAUSED, f"{name}: paused by an operator"))

    def _read(self) -> frozenset[str]:
        try:
            found = json.loads(self._path.read_bytes())
            return frozenset(map(check_topic, found["paused"]))
        except FileNotFoundError:
            return frozenset()
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise EnvironmentFailure(
                f"cannot read {FILE} in store.directory",
                hint="Remove the file, and no target is paused.",
                reason=str(error),
                code="DB-3038",
            ) from None

    def _write(self, names: frozenset[str]) -> None:
        """1 write, 2 fsync, 3 rename: a crash leaves the old file or the new one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"paused": sorted(names)}) + "\n"
            with files.writing(self._path) as temporary:
                temporary.write_text(text)
            files.publish(self._path)
        except (OSError, TimerStoreError) as error:
            raise EnvironmentFailure(
                f"cannot write {FILE} in store.directory",
                hint="Look at the volume. Nothing has changed.",
                reason=str(error),
                code="DB-3039",
            ) from None
