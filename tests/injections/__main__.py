"""The bars, in pieces: each combination on each version of Kafka.

    python -m tests.injections 4.2.2 4.4.0 --minutes 20 --only late     (`make injections KAFKA="4.2.2 4.4.0"`)

The state file has the counts of every piece that has ended, so that a run can be cut at any time and goes on.
`--random` draws combinations, and keeps no counts. The status is 1 when anything was lost, doubled or early, and 2 when
there is more to do. `python -m release.injections STATE` puts the counts into docs/brokers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from dev.broker.embedded import kafka_version
from dev.proxy import Proxy
from release.faults import commit_and_date
from tests.injections.combinations import Combination
from tests.injections.piece import Result, run
from tests.profiles import seed
from tests.system.broker import own_broker
from timerstore.clock import SystemClock

PIECE: Final = 100
"""Injections that share topics."""
FEW: Final = 10
"""Injections of a combination that was drawn."""
PIECE_S: Final = 180.0
State = dict[str, dict[str, Any]]


class Bars:
    """The injections on one version: those that are left, and the counts. Its methods are for any thread."""

    def __init__(self, version: str, options: argparse.Namespace, state: State, until_s: float) -> None:
        self._version, self._options, self._state, self._until_s = version, options, state, until_s
        known = state.get(version, {})
        self._results = {one: Result(**known.get(str(one), {})) for one in Combination.all()}
        self._asked = [one for one in self._results if any(text in str(one) for text in options.only or [""])]
        self._begun: Counter[Combination] = Counter()
        """Injections of pieces that have not ended."""
        self._clock, self._random, self._lock = SystemClock(), Random(seed()), threading.Lock()
        commit, date = commit_and_date()
        self._run = f"`{commit}`, {date}"

    def _left(self, one: Combination) -> int:
        return one.wanted - self._results[one].injected - self._begun[one]

    def _take(self) -> tuple[Combination, int] | None:
        """The next piece, if one is left and there is time."""
        found = [one for one in self._asked if self._options.random or self._left(one) > 0]
        if not found or self._clock.monotonic_s() >= self._until_s:
            return None
        if self._options.random:
            return self._random.choice(found), FEW
        one = max(found, key=lambda each: self._left(each) / each.wanted)
        return one, min(PIECE, self._left(one))

    def is_over(self) -> bool:
        """Whether there is nothing to do, or no time."""
        return self._take() is None

    def work(self, bootstrap: str, proxy: Proxy) -> None:
        """Piece after piece."""
        while True:
            with self._lock:
                piece, piece_seed = self._take(), self._random.getrandbits(32)
                if piece is None:
                    return
                one, wanted = piece
                self._begun[one] += wanted
            how: Any = {"seed": piece_seed, "seconds": PIECE_S, "renews": not self._options.without_rule}
            of_piece = run(bootstrap, proxy, one, wanted, **how)
            of_piece.runs = {self._run: of_piece.injected}
            with self._lock:
                self._begun[one] -= wanted
                self._results[one].add(of_piece)
                print(self._version, one, asdict(of_piece), f"seed {piece_seed}", flush=True)
                self._state.setdefault(self._version, {})[str(one)] = asdict(self._results[one])
                if not self._options.random:
                    _write(self._options.state, self._state)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.injections", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kafka", nargs="*", default=[kafka_version()], metavar="VERSION", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes after which no piece begins")
    parser.add_argument("--state", type=Path, default=Path(".cache/injections.json"))
    parser.add_argument("--only", action="append", help="combinations with this text in their name")
    parser.add_argument("--at-once", type=int, default=2, help="pieces at the same time (default: %(default)s)")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--without-rule", action="store_true", help="no new epochs: messages are doubled")
    options = parser.parse_args()
    until_s = SystemClock().monotonic_s() + options.minutes * 60
    state: State = {}
    if options.state.exists() and not options.random:
        state = json.loads(options.state.read_text())
    for version in options.kafka:
        bars = Bars(version, options, state, until_s)
        if bars.is_over():
            continue
        pool = ThreadPoolExecutor(options.at_once)
        with own_broker(version=version) as broker, Proxy(broker.bootstrap) as proxy, pool:
            for worker in [pool.submit(bars.work, broker.bootstrap, proxy) for _ in range(options.at_once)]:
                worker.result()
    return _report(state, options.kafka, is_partial=options.random)


def _write(path: Path, state: State) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1) + "\n")
    new.replace(path)


def _report(state: State, versions: list[str], *, is_partial: bool) -> int:
    """A line for each combination; the status."""
    is_bad = is_left = False
    for version in versions:
        for one in Combination.all():
            result = Result(**state.get(version, {}).get(str(one), {}))
            is_bad |= not result.is_good
            is_left |= result.injected < one.wanted and not is_partial
            wrong = f"lost {result.lost}, doubled {result.doubled}, early {result.early}"
            answers = ", ".join(f"{answer} {count}" for answer, count in sorted(result.answers.items()))
            print(
                f"{version} {one}: {result.injected} of {one.wanted}, {wrong}; kills {result.kills}; answers: {answers}"
            )
    return 1 if is_bad else 2 if is_left else 0


if __name__ == "__main__":
    sys.exit(main())
