"""The bars, in pieces: each combination on each version of Kafka.

    python -m tests.injections 4.2.2 4.4.0 --minutes 20 --only late     (`make injections KAFKA="4.2.2 4.4.0"`)

The state file has the counts of every piece that has ended, so that a run can be cut at any time and goes on.
`--random` draws combinations, and keeps no counts. The status is 1 when anything was lost, doubled or early, and 2 when
there is more to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from dev.broker.embedded import kafka_version
from dev.proxy import Proxy
from tests.injections.combinations import Combination
from tests.injections.piece import Result, run
from tests.profiles import seed
from tests.system.broker import own_broker
from timerstore.clock import SystemClock

PIECE: Final = 50
"""Injections that share topics."""
FEW: Final = 10
"""Injections of a combination that was drawn."""
PIECE_S: Final = 180.0
State = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.injections", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kafka", nargs="*", default=[kafka_version()], metavar="VERSION", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no piece after so long")
    parser.add_argument("--state", type=Path, default=Path(".cache/injections.json"))
    parser.add_argument("--only", default="", help="combinations with this text in their name")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--without-rule", action="store_true", help="no new epochs: messages are doubled")
    options = parser.parse_args()
    clock, random = SystemClock(), Random(seed())
    until_s = clock.monotonic_s() + options.minutes * 60
    state: State = {}
    if options.state.exists() and not options.random:
        state = json.loads(options.state.read_text())
    for version in options.kafka:
        results = {one: Result(**state.get(version, {}).get(str(one), {})) for one in Combination.all()}

        def left(results: Mapping[Combination, Result] = results) -> list[Combination]:
            """Combinations with injections left, if there is time."""
            is_over = clock.monotonic_s() >= until_s
            asked = [one for one in results if options.only in str(one)]
            return [] if is_over else [one for one in asked if options.random or results[one].injected < one.wanted]

        if not left():
            continue
        with own_broker(version=version) as broker, Proxy(broker.bootstrap) as proxy:
            while found := left():
                one = (
                    random.choice(found)
                    if options.random
                    else min(found, key=lambda each: results[each].injected / each.wanted)
                )
                result, piece_seed = results[one], random.getrandbits(32)
                wanted = FEW if options.random else min(PIECE, one.wanted - result.injected)
                how: Any = {"seed": piece_seed, "seconds": PIECE_S, "renews": not options.without_rule}
                of_piece = run(broker.bootstrap, proxy, one, wanted, **how)
                result.add(of_piece)
                print(version, one, asdict(of_piece), f"seed {piece_seed}", flush=True)
                state.setdefault(version, {})[str(one)] = asdict(result)
                if not options.random:
                    _write(options.state, state)
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
