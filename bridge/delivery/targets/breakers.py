"""Circuit breakers of partitions: a partition that looks healthy and takes nothing is left alone for a while, each time
twice as long, until its leader answers again (cache.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bridge.delivery.targets.target import Place, Target
from bridge.kafka.errors import Refusal

OPEN_S: Final = 5.0
OPEN_S_MAX: Final = 300.0
RELAPSE_S: Final = 600.0
"""A breaker that trips again within this time stays open twice as long."""
BREAKERS_MAX: Final = 10_000
"""Names come from headers: their number is unlimited."""
EVERY: Final = -1
"""In place of a partition: all partitions."""
LARGE: Final = -2
"""In place of a partition: records that may be too large, for any partition."""


@dataclass(slots=True)
class _Breaker:
    """Open until a probe at `until_s` or later succeeds; `wait_s` is the duration of the present opening."""

    refusal: Refusal
    until_s: float
    wait_s: float
    is_open: bool = True


class Breakers:
    """Breakers by topic and partition (or EVERY). Times are seconds of a monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._breakers: dict[Place, _Breaker] = {}

    def trip(self, key: Place, refusal: Refusal, now_s: float, open_s: float = OPEN_S) -> float:
        """Open one for `open_s`, longer if it has failed lately. Returns the number of seconds."""
        old = self._breakers.pop(key, None)
        relapses = old is not None and now_s - old.until_s <= RELAPSE_S
        wait_s = min(OPEN_S_MAX, max(OPEN_S, 2 * old.wait_s)) if old is not None and relapses else open_s
        self._breakers[key] = _Breaker(refusal, now_s + wait_s, wait_s)
        if len(self._breakers) > BREAKERS_MAX:
            del self._breakers[next(iter(self._breakers))]
        return wait_s

    def are_open(self, name: str, partition: int) -> bool:
        """Whether the breaker prevents records for this partition."""
        breakers = map(self._breakers.get, ((name, partition), (name, EVERY)))
        return any(breaker is not None and breaker.is_open for breaker in breakers)

    def due(self, now_s: float) -> list[Place]:
        """The breakers that may be closed, if the leader answers."""
        return [key for key, breaker in self._breakers.items() if breaker.is_open and breaker.until_s <= now_s]

    def open_until(self) -> dict[str, list[float]]:
        """The times at which open breakers may be closed, by topic: seconds of the clock."""
        result: dict[str, list[float]] = {}
        for (name, _), breaker in self._breakers.items():
            if breaker.is_open:
                result.setdefault(name, []).append(breaker.until_s)
        return result

    def decide(self, key: Place, *, is_well: bool, until_s: float) -> bool:
        """Close one, or leave it open until then. Returns whether it was closed."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return False
        if is_well:
            breaker.is_open = False
        else:
            breaker.until_s = until_s
        return is_well

    def applied(self, name: str, target: Target) -> Target:
        """The target within the limits of its open breakers."""
        if not self._breakers or target.refusal is not None:
            return target
        all_of_it = self._breakers.get((name, EVERY))
        if all_of_it is not None and all_of_it.is_open:
            return replace(target, refusal=all_of_it.refusal)
        tripped: dict[int, str] = {
            partition: breaker.refusal.detail
            for (topic, partition), breaker in self._breakers.items()
            if topic == name and breaker.is_open
        }
        is_wary = tripped.pop(LARGE, None) is not None
        return replace(target, down={**tripped, **target.down}, is_wary=is_wary) if tripped or is_wary else target
