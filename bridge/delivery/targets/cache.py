"""A cache of real topics: they are looked up before a record for them enters a transaction, and kept for a while.

One missing, forbidden or leaderless topic aborts everything in its transaction (and delays it for seconds first). So
nothing is produced to a topic before a look-up has shown that it exists and takes records. The cached facts may be
outdated: an abort, or a transaction without acknowledgements (stall.py), renews them. A circuit breaker for each
partition (`trip`, breakers.py) covers a leader that looks healthy and does not answer (liveness.py).

The thread of `start` keeps used facts up to date beside delivery. Delivery waits neither for a failing target nor for
its own requests (`request_refresh`): while a node hangs, any question may be among those that the node has accepted and
does not answer.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Final

import structlog

from bridge.delivery.targets.breakers import OPEN_S, Breakers
from bridge.delivery.targets.liveness import Ping, is_answered
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.delivery.targets.pauses import Pauses
from bridge.delivery.targets.target import UNAVAILABLE, Leader, Place, Target, TargetReport
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Refusal
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.wire.reasons import RejectReason
from timerstore.clock import Clock
from timerstore.memory.pending import OTHER_TARGETS

KNOWN_FOR_S: Final = 60.0
FAILING_FOR_S: Final = 2.0
"""Interval at which the thread looks up a failing target in use."""
FAILING_FOR_S_MAX: Final = 10.0
"""After this time a caller looks up a failing target itself: the thread no longer does so once its use has ended."""
USED_FOR_S: Final = 30.0
RENEWED_FOR_S: Final = 1.0
"""The shortest interval between look-ups of a topic for lasting verdicts."""
UNANSWERED_FOR_S: Final = 5.0
LOOK_INTERVAL_S: Final = 0.5
LOOK_UPS_MAX: Final = 100
WARM_S: Final = 5.0
"""Interval between pings of all leaders, which keep the connections ready."""
PROBE_S: Final = 2.0
"""A breaker's wait for its leader before it may be closed."""
SILENT_OPEN_S: Final = 1.0
"""Duration of a breaker's opening after the first silence of a leader, which may be a mere pause."""
TARGETS_MAX: Final = 10_000
"""Names come from headers: their number is unlimited. (10,000 of 200 characters take 9 MB.)"""
MISSING_MAX: Final = 100
"""The limit of unknown topics in the thread's look-ups. Further ones are probably invented names: they are looked up at
the next attempt of their messages."""
FAILING_MAX: Final = 100
"""The limit of names in the metric of failing targets."""
UNKNOWN: Final = "(unknown)"
"""The label, in that metric, for all names that no broker knows."""

log = structlog.get_logger("bridge.delivery.targets.cache")


@dataclass(slots=True)
class _Known:
    target: Target
    asked_s: float
    used_s: float
    renewed_s: float = -math.inf
    awaited_ms: int = 0
    """The time of the last retry among its waiting messages."""

    def matters(self, now_s: float, now_ms: int) -> bool:
        """Whether it was used lately, or messages wait for it."""
        return self.used_s > now_s - FAILING_FOR_S_MAX - KNOWN_FOR_S or self.awaited_ms > now_ms


class Targets:
    """A cache of `Target` by name with an expiry, and the circuit breakers. Any thread."""

    def __init__(
        self, look_up: TargetLookUp, clock: Clock, beat: Beat = unwatched, pauses: Pauses | None = None
    ) -> None:
        """`beat` is the thread's."""
        self._pauses = pauses
        self._look_up = look_up
        self._beat = beat
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._breakers = Breakers()
        self._own: frozenset[str] = frozenset()
        self._requested: dict[str, None] = {}
        self._ping = Ping(clock.monotonic_s(), {})
        self._stopped = False
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the thread

    def start(self, own: Iterable[str] = ()) -> None:
        """Keep known targets up to date from now on. `own`, the bridge's topics, are known from the start: so there is
        a leader to compare others with, and nothing waits for an answer when a target fails."""
        self._own = frozenset(own)
        self._thread = threading.Thread(target=self._run, name="targets", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()

    def _run(self) -> None:
        self._beat()
        while not self._stopped:
            try:
                self.refresh()
                self._beat()  # a refresh that fails again and again counts as a thread that hangs
            except Exception:
                # Delivery works without this thread for a while: it makes its own look-ups, only later.
                log.exception("targets-not-refreshed")
            self._woken.wait(LOOK_INTERVAL_S)
            self._woken.clear()

    def refresh(self) -> None:
        """Look up requested and expired targets, and probe open breakers. Without an answer from the brokers the known
        facts stay."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            requested, self._requested = self._requested, {}
            now_ms = self._clock.now_ms()
            expired = [name for name, entry in self._known.items() if _is_expired(entry, now_s, now_ms)]
            existing = [name for name in expired if self._known[name].target.partitions]
            if len(expired) - len(existing) > MISSING_MAX:
                expired = existing
            due = [name for name in (*self._own - self._known.keys(), *expired) if name not in requested]
            asked = [*requested, *due[:LOOK_UPS_MAX]]
            places = self._breakers.due(now_s)
            tripped = list(dict.fromkeys(name for name, _ in places if name in self._known and name not in asked))
        if asked:
            self._learn(asked)
        if places:
            self._find_leaders(tripped[:LOOK_UPS_MAX])
            self._close_breakers(places[:LOOK_UPS_MAX])
        if now_s - self._ping.asked_s >= WARM_S:
            self._ping = self.ping_leaders(doubtful=not self._ping.is_answered())

    # -- for the dispatcher

    def resolve(self, names: Iterable[str], age_s_max: float = math.inf) -> dict[str, Target]:
        """Each target by its name. Brokers are asked only about names that are new, failing, or older than `age_s_max`:
        one look-up for all. A name without an answer is unavailable."""
        wanted, now_s = list(names), self._clock.monotonic_s()
        with self._lock:
            ask = [name for name in wanted if self._must_ask(name, now_s, age_s_max)]
        if ask:
            self._learn(ask)
        with self._lock:
            result = {}
            for name in wanted:
                entry = self._known.get(name) or _Known(_unanswered(name), now_s, now_s)
                entry.used_s = now_s
                result[name] = self._breakers.applied(name, entry.target)
                if self._pauses is not None:
                    result[name] = self._pauses.applied(name, result[name])
            return result

    def renew(self, needed: Mapping[str, int]) -> dict[str, Target]:
        """As `resolve`, for lasting verdicts: brokers are asked about facts from before the moments `needed` (epoch
        ms), by name, each topic at most once in RENEWED_FOR_S. `Target.told_ms` is the time of an answer; without
        one the known facts stay."""
        now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        with self._lock:
            entries = {name: self._known[name] for name in needed if name in self._known}
            stale = [
                name
                for name, each in entries.items()
                if not needed[name] <= (each.target.told_ms or 0) <= now_ms and now_s - each.renewed_s >= RENEWED_FOR_S
            ]
            for name in stale:
                entries[name].renewed_s = now_s
        asked = [name for name in needed if name not in entries] + stale
        if asked:
            self._learn(asked)
        return self.resolve(needed)

    def count_partitions(self, name: str) -> int:
        """The present number of that topic's partitions, never a cached one. Raises EnvironmentFailure without an
        answer."""
        return self._look_up.count_partitions(name)

    def look_again(self, names: Collection[str]) -> frozenset[str] | None:
        """Targets that take less than known before; None if the brokers do not answer."""
        before = self.resolve(names)
        if not self._learn(list(names)):
            return None
        after = self.resolve(names)
        return frozenset(name for name in names if after[name].takes_less_than(before[name]))

    def request_refresh(self, names: Iterable[str]) -> None:
        """Have the thread look these up; returns at once."""
        with self._lock:
            self._requested.update(dict.fromkeys(names))
        self._woken.set()

    def are_worse_than(self, believed: Mapping[str, Target]) -> bool:
        """Whether one is now known to take less than was believed when the records were sent."""
        with self._lock:
            return any(
                self._breakers.applied(name, self._known[name].target).takes_less_than(target)
                for name, target in believed.items()
                if name in self._known
            )

    def ping_leaders(self, *, doubtful: bool) -> Ping:
        """Ask each leader for a partition that is not down; `doubtful`: some leaders may be dead. A single leader is
        not asked, since a comparison is impossible."""
        place_of: dict[Leader, Place] = {}
        with self._lock:
            for leader, place in self._led():
                place_of.setdefault(leader, place)
        now_s = self._clock.monotonic_s()
        if len(place_of) < 2:
            return Ping(now_s, {})
        answers = self._look_up.ask({place: leader for leader, place in place_of.items()}, doubtful=doubtful)
        return Ping(now_s, {leader: answers[place] for leader, place in place_of.items()})

    def trip_leaders(self, leaders: Collection[Leader]) -> bool:
        """Open the breakers of these leaders' partitions; returns whether any was closed before."""
        if not leaders:
            return False
        with self._lock:
            places = [place for leader, place in self._led() if leader in leaders]
        for place in places:
            self._trip_silent(place)
        return bool(places)

    def _led(self) -> Iterator[tuple[Leader, Place]]:
        """Known partitions that are not down, with their leaders. Under the lock."""
        for name, entry in self._known.items():
            for partition, leader in entry.target.leaders.items():
                if partition not in entry.target.down and not self._breakers.are_open(name, partition):
                    yield leader, (name, partition)

    def _trip_silent(self, place: Place) -> None:
        name, partition = place
        why = f"{name}: the leader of partition {partition} does not answer"
        self.trip(name, partition, Refusal(UNAVAILABLE, why), SILENT_OPEN_S)

    def trip(self, name: str, partition: int, refusal: Refusal, open_s: float = OPEN_S) -> None:
        """Open the breaker of a partition (or of EVERY one) for `open_s`, longer if it has failed lately."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            wait_s = self._breakers.trip((name, partition), refusal, now_s, open_s)
        log.warning("target-breaker-open", topic=name, partition=partition, detail=refusal.detail, wait_s=wait_s)

    def expire(self, name: str) -> None:
        """Look it up at the next use: the brokers disagree with the known facts, which stay without an answer."""
        with self._lock:
            if name in self._known:
                self._known[name].asked_s = -math.inf

    def await_until(self, name: str, until_ms: int) -> bool:
        """Messages wait for a target, the last of them until this time. Returns whether none did before."""
        now_ms = self._clock.now_ms()
        with self._lock:
            entry = self._known.get(name)
            if entry is None:
                return False
            is_new = entry.awaited_ms <= now_ms
            entry.awaited_ms = max(entry.awaited_ms, until_ms)
        return is_new

    def failing(self) -> dict[tuple[str, str], int]:
        """The number of partitions that take nothing now, by target and reason, of targets that were used lately or
        that messages wait for. Targets that no broker knows are counted together, as are those beyond FAILING_MAX."""
        now_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()
        counts: Counter[tuple[str, str]] = Counter()
        named: set[str] = set()
        with self._lock:
            for name, entry in self._known.items():
                target = self._breakers.applied(name, entry.target)
                if target.is_well or not entry.matters(now_s, now_ms):
                    continue
                label = name if target.partitions or name in self._own else UNKNOWN
                if label != UNKNOWN and label not in named:
                    label = name if len(named) < FAILING_MAX else OTHER_TARGETS
                    named.add(label)
                reason, count = _trouble(target)
                counts[label, str(reason)] += count
        return counts

    def reports(self, limit: int) -> list[TargetReport]:
        """Up to `limit` targets that are known, or paused: first those in trouble, then by name."""
        with self._lock:
            now_s, until_s = self._clock.monotonic_s(), self._breakers.open_until()
            now_ms = self._clock.now_ms()
            shown = [
                (name, cached.target)
                for name, cached in self._known.items()
                if cached.target.is_well or cached.matters(now_s, now_ms)
            ]
            applied = {name: self._breakers.applied(name, target) for name, target in shown if name in until_s}
        reports = [_report(name, applied.get(name, target), until_s.get(name, ()), now_s) for name, target in shown]
        if self._pauses is not None and (paused := {pause.name: pause for pause in self._pauses.all()}):
            reports += [
                TargetReport(name=name, partitions=0) for name in paused.keys() - {report.name for report in reports}
            ]
            reports = [replace(report, pause=paused.get(report.name)) for report in reports]
        reports.sort(key=lambda report: (report.pause is None, not report.failing_partitions, report.name))
        return sorted(reports[:limit], key=lambda report: (not report.failing_partitions, report.name))

    def _must_ask(self, name: str, now_s: float, age_s_max: float) -> bool:
        """A healthy target is used until `refresh` finds time, unless there was trouble with it (`expire`)."""
        entry = self._known.get(name)
        if entry is None:
            return True
        return now_s - entry.asked_s >= (age_s_max if entry.target.is_well else min(age_s_max, FAILING_FOR_S_MAX))

    def _learn(self, names: list[str]) -> bool:
        """Ask, without the lock. Returns whether there was an answer."""
        answers: Mapping[str, Target] = {}
        sent_ms = self._clock.now_ms()
        try:
            answers = self._look_up(names)
        except EnvironmentFailure as failure:
            log.warning("targets-not-looked-up", topics=len(names), reason=str(failure))
        now_s = self._clock.monotonic_s()
        with self._lock:
            for name in names:
                old, target, asked_s = self._known.pop(name, None), answers.get(name), now_s
                if target is not None or old is None:
                    target = replace(target or _unanswered(name), told_ms=sent_ms)
                else:
                    target = old.target
                    # A healthy one is asked about again soon: its last look-up is dated back.
                    asked_s -= KNOWN_FOR_S - UNANSWERED_FOR_S if target.is_well else 0
                entry = self._known[name] = old or _Known(target, asked_s, now_s)
                entry.target, entry.asked_s = target, asked_s
            while len(self._known) > TARGETS_MAX + len(names):
                del self._known[next(iter(self._known))]
        return bool(answers)

    def _find_leaders(self, names: Iterable[str]) -> None:
        """Look up leaders anew: another node may now lead a partition that takes nothing."""
        for name in names:
            self._beat()
            try:
                leaders = self._look_up.leaders(name)
            except EnvironmentFailure as failure:
                log.warning("targets-not-looked-up", topics=1, reason=str(failure))
                return
            with self._lock:
                entry = self._known.get(name)
                if entry is not None:
                    entry.target = replace(entry.target, leaders=leaders)

    def _close_breakers(self, places: list[Place]) -> None:
        """Close the breakers whose leaders answer; one question to each, and one wait for all. A whole target's breaker
        closes if one of its leaders answers, and the breakers of its other partitions open."""
        with self._lock:
            targets = {name: self._known[name].target for name, _ in places if name in self._known}
        parts: dict[Place, list[Place]] = {}
        leaders: dict[Place, Leader | None] = {}
        for name, partition in places:
            target = targets.get(name, _unanswered(name))
            numbers = [partition] if partition >= 0 else range(target.partitions)
            parts[name, partition] = [(name, number) for number in numbers]
            leaders.update({(name, number): target.leaders.get(number) for number in numbers})
        answers = self._look_up.ask(leaders, doubtful=True)
        wait(answers.values(), PROBE_S)
        for place, probed in parts.items():
            silent = [each for each in probed if not is_answered(answers[each])]
            is_well = len(silent) < len(probed) or (not probed and place[0] not in targets)
            for each in silent if is_well else ():
                self._trip_silent(each)
            with self._lock:
                until_s = self._clock.monotonic_s() + FAILING_FOR_S
                is_closed = self._breakers.decide(place, is_well=is_well, until_s=until_s)
            if is_closed:
                log.info("target-breaker-closed", topic=place[0], partition=place[1])


def _is_expired(entry: _Known, now_s: float, now_ms: int) -> bool:
    """Failing targets are looked up only in use, and more rarely while messages wait for them: there may be thousands,
    invented in headers."""
    age_s = now_s - entry.asked_s
    if entry.target.is_well:
        return age_s >= KNOWN_FOR_S
    is_used, is_awaited = now_s - entry.used_s < USED_FOR_S, entry.awaited_ms > now_ms
    return (age_s >= FAILING_FOR_S and is_used) or (age_s >= FAILING_FOR_S_MAX and is_awaited)


def _trouble(target: Target) -> tuple[RejectReason, int]:
    """The trouble of a target that is not well: the reason, and the number of partitions."""
    if target.refusal is not None:
        return target.refusal.reason, max(1, target.partitions)
    return (UNAVAILABLE, len(target.down)) if target.down else (RejectReason.TOO_LARGE, target.partitions)


def _report(name: str, target: Target, until_s: Collection[float], now_s: float) -> TargetReport:
    if target.is_well:
        return TargetReport(name=name, partitions=target.partitions)
    reason, failing = _trouble(target)
    return TargetReport(
        name=name,
        partitions=target.partitions,
        failing_partitions=failing,
        reason=reason,
        detail=next(iter(target.down.values()), None) if target.refusal is None else target.refusal.detail,
        open_breakers=len(until_s),
        retry_s=max(0.0, min(until_s) - now_s) if until_s else None,
    )


def _unanswered(name: str) -> Target:
    refusal = Refusal(UNAVAILABLE, f"{name}: the brokers do not say whether it exists")
    return Target(partitions=0, bytes_max=None, refusal=refusal)
