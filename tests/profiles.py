"""How many examples properties and machines try, and which; HYPOTHESIS_PROFILE is `check`, `ci` (the default) or
`nightly`. Only those of the night are random, and a run of it prints its seed."""

from __future__ import annotations

import os
import random
from typing import Final

from hypothesis import HealthCheck, settings

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")
IS_NIGHTLY: Final = PROFILE == "nightly"
"""Whether tests marked `nightly` run, and others go on for longer."""
EXAMPLES: Final = 40 if PROFILE == "check" else 100
"""Of a property that does not say how many."""
HUNDREDS: Final = 30 if PROFILE == "check" else 100
"""Of messages, in a test whose promise holds for any number of them."""

SEED: Final = "DELAY_BRIDGE_SEED"
"""A variable with the seed of all that a session draws at random: that of a run in the night, to repeat it."""
SEED_OF_DAY: Final = 20_261_126


def seed() -> int:
    """All examples follow from it. It is the same in all processes of a session."""
    given = os.environ.get(SEED)
    if given is None:
        drawn = random.SystemRandom().randrange(1 << 32) if IS_NIGHTLY else SEED_OF_DAY
        given = os.environ[SEED] = str(drawn)
    return int(given)


def of_a_machine(*, check: int, ci: int, nightly: int, steps: int) -> settings:
    """Settings of a state machine: examples by profile, and rules in each."""
    return settings(
        max_examples={"check": check, "ci": ci, "nightly": nightly}[PROFILE],
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def timeout_s(ci: int) -> int:
    """A machine's time-out."""
    return 8 * 3_600 if IS_NIGHTLY else ci
