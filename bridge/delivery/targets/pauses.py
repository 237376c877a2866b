"""Targets that an operator has paused: their messages are put off until the pause ends, without counting attempts.

Pauses are in the committed metadata of the delay topics' partitions (wire/committed_state.py), which outlives the
process and the volume, and moves with the partitions. The other instances read there, within seconds, the orders that
one instance gets.

    1 put        it is wanted                                           a crash leaves nothing
    2 the dispatcher commits it, with the next transaction or alone     a crash leaves the commit's outcome
    3 written    it is in force, and `put` returns                      the next start reads it

A message that is due during a pause of its target is copied once, to the end of the roll window or of seven days
(plan/backoff.py), and brought forward when the pause ends (resuming.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from bridge.delivery.targets.target import Target
from bridge.errors import EnvironmentFailure
from bridge.json_file import JsonFile
from bridge.kafka.errors import Refusal
from bridge.wire.committed_state import CommittedState, Pause, Said, are_too_long, merged
from bridge.wire.headers import check_topic
from bridge.wire.reasons import RejectReason
from timerstore.clock import Clock

FILE: Final = "paused-targets.json"
"""The file of earlier versions in store.directory: read once."""
WRITE_S: Final = 10.0
"""The time for the commit: an open transaction ends first."""
ENDED_MS_MAX: Final = 8 * 86_400_000
"""How long the end of a pause is remembered: longer than a message waits for it (`PARKED_MS_MAX` in
plan/backoff.py)."""

log = structlog.get_logger("bridge.delivery.targets.pauses")


class Pauses:
    """The orders about targets. Any thread."""

    def __init__(
        self,
        clock: Clock,
        own: Collection[str] = (),
        defaults: Mapping[str, str | None] | None = None,
        directory: Path | None = None,
    ) -> None:
        """`own` are the bridge's topics, which cannot be paused; `defaults` the default targets of delay topics;
        `directory` may hold the file of an earlier version. Raises EnvironmentFailure if that cannot be read."""
        self._clock, self._own, self._defaults = clock, frozenset(own), defaults or {}
        self._file = None if directory is None else JsonFile(directory, FILE, "then pause the targets again.")
        self._changed = threading.Condition()
        self._said: Said = ()
        self._wanted: Said = ()
        self._to_write: Said = ()
        self._paused: dict[str, Pause] = {}
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to write."""
        self.has_room: Callable[[Said], bool] = lambda _: True
        """Whether the partitions of this instance have room for all of it."""
        if self._file is not None:
            self.learn(_imported(self._file, clock.now_ms()))

    # ---- for operators

    def all(self) -> list[Pause]:
        """The pauses in force, by name."""
        now_ms = self._clock.now_ms()
        return [each for each in self._paused.values() if each.is_in_force(now_ms)]

    def names(self) -> frozenset[str]:
        return frozenset(each.name for each in self.all())

    def ages_s(self) -> dict[str, float]:
        """The age of each target's pause."""
        now_ms = self._clock.now_ms()
        return {each.name: max(0, now_ms - each.changed_ms) / 1000 for each in self.all()}

    def alarms(self) -> tuple[str, ...]:
        """Texts for an operator."""
        return tuple(map(_sentence, self.all()))

    def topics(self) -> frozenset[str]:
        names = self.names()
        return frozenset(topic for topic, target in self._defaults.items() if target in names)

    def owns(self, name: str) -> bool:
        """Whether it is a topic of the bridge itself, which cannot be paused."""
        return name in self._own

    def put(self, name: str, *, paused: bool, until_ms: int | None = None, why: str = "") -> bool:
        """Pause or resume a target, and wait until that is in Kafka; returns whether it changed anything.

        Raises ValueError for a topic of the bridge, and for too many pauses; EnvironmentFailure if the order could not
        be written."""
        now_ms = self._clock.now_ms()
        present = next((each for each in self._said if each.name == name), None)
        is_paused = present is not None and present.is_in_force(now_ms)
        if paused and name in self._own:
            raise ValueError(f"{name} is a topic of the bridge itself, and no target.")
        if paused is is_paused and (
            present is None or (until_ms, why) in ((None, ""), (present.until_ms, present.why))
        ):
            return False
        changed_ms = now_ms if present is None else max(now_ms, present.changed_ms + 1)
        wanted = Pause(name=name, changed_ms=changed_ms, is_paused=paused, until_ms=until_ms, why=why)
        told = merged([*self._said, *self._wanted, wanted])
        if paused and (are_too_long(told) or not self.has_room(told)):
            raise ValueError("as many targets are paused as the committed metadata has room for: resume some.")
        self._write(wanted)
        return True

    def applied(self, name: str, target: Target) -> Target:
        """The target, refused while it is paused."""
        pause = self._paused.get(name)
        if pause is None or name in self._own or not pause.is_in_force(self._clock.now_ms()):
            return target
        return replace(target, refusal=Refusal(RejectReason.TARGET_PAUSED, f"{name}: paused by an operator"))

    # ---- for the parts that keep them in Kafka

    def learn(self, told: Iterable[Pause]) -> None:
        """Learn the pauses in committed states, of any partition."""
        told = tuple(told)  # possibly a read from Kafka: not under the lock, which delivery takes
        with self._changed:
            was, self._said = self._said, self._kept(merged([*self._said, *told]))
            if self._said == was:
                return
            before, self._paused = self._paused, {each.name: each for each in self._said if each.is_paused}
            self._to_write = merged([*self._said, *self._wanted])
            self._changed.notify_all()
        if begun := sorted(self._paused.keys() - before.keys()):
            log.warning("target-paused", topics=begun)
        if over := sorted(before.keys() - self._paused.keys()):
            log.warning("target-resumed", topics=over)

    def read(self, states: Iterable[CommittedState]) -> None:
        """These states are in Kafka."""
        self.learn(each for state in states for each in state.pauses)

    def are_in(self, states: Iterable[CommittedState]) -> bool:
        """Whether these states have the right pauses."""
        said = self._to_write
        return all(state.pauses == said or state.saying(said) == state for state in states)

    def to_write(self) -> Said:
        """The pauses for every partition's state."""
        return self._to_write

    def written(self, states: Iterable[CommittedState]) -> None:
        """These states were committed."""
        said = [each for state in states for each in state.pauses]
        if self._wanted and said:
            with self._changed:
                self._wanted = tuple(each for each in self._wanted if each not in said)
        self.learn(said)
        if self._file is not None and said:
            # After a crash before this, the next start reads the file again: it is no newer than the written pauses.
            file, self._file = self._file, None
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("paused-targets-file-stays", file=str(file.path), reason=str(error))

    def ended(self) -> list[Pause]:
        """Ended pauses, whose messages may still wait."""
        now_ms = self._clock.now_ms()
        return [each for each in self._kept(self._said) if not each.is_in_force(now_ms)]

    def _kept(self, told: Said) -> Said:
        """The pauses without those that ended long ago."""
        now_ms = self._clock.now_ms()
        return tuple(each for each in told if (each.ended_ms(now_ms) or now_ms) >= now_ms - ENDED_MS_MAX)

    def _write(self, wanted: Pause) -> None:
        with self._changed:
            self._wanted = merged([*self._wanted, wanted])
            self._to_write = merged([*self._said, *self._wanted])
            self.wake()
            if self._changed.wait_for(lambda: wanted in self._said, WRITE_S):
                return
            self._wanted = tuple(each for each in self._wanted if each != wanted)
            self._to_write = merged([*self._said, *self._wanted])
        raise EnvironmentFailure(
            f"the pause or resumption of a target could not be written into Kafka within {WRITE_S:.0f} s",
            hint="Check /readyz: an instance can write it while it delivers at least one partition. Then ask again.",
            target=wanted.name,
            code="DB-3070",
        )


def _sentence(pause: Pause) -> str:
    why = f" ({pause.why})" if pause.why else ""
    until = "until it is resumed" if pause.until_ms is None else f"until {_time(pause.until_ms)}"
    return f"the target {pause.name} is paused since {_time(pause.changed_ms)}{why}, {until}"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, UTC).isoformat().replace("+00:00", "Z")


def _imported(file: JsonFile, now_ms: int) -> Said:
    """The pauses of an earlier version, as of the time of its file."""
    names = file.read(lambda found: sorted(set(map(check_topic, found["paused"]))))
    if names is None:
        return ()
    changed_ms = min(now_ms, int(file.path.stat().st_mtime * 1000))
    return tuple(Pause(name=name, changed_ms=changed_ms) for name in names)
