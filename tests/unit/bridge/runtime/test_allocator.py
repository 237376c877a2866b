"""bridge.allocator: memory that was freed goes back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bridge.runtime import allocator

PIECES = 40
SCRIPT = f"""
import numpy, psutil
from bridge.runtime import allocator
{{call}}
numpy.ones(3 << 20, numpy.uint8)  # with the defaults, pieces of this size come from the heap from now on
pieces = [numpy.ones(3 << 20, numpy.uint8) for _ in range({PIECES})]
before = psutil.Process().memory_info().rss
del pieces[:-1]  # what lies before the last one
print((before - psutil.Process().memory_info().rss) >> 20)
"""


def given_back_mib(call: str) -> int:
    """How much memory goes back of nearly 120 MiB that are freed."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT.format(call=call)], capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_what_is_freed_goes_back() -> None:
    """Where the allocator is glibc's, which else keeps it."""
    if not allocator.restrain({}):
        pytest.skip("the allocator is another one")
    assert given_back_mib("allocator.restrain()") > 100
    assert given_back_mib("") < 20


@pytest.mark.fault("memory that Arrow keeps after a merge")
def test_arrow_shares_the_allocator_that_gives_memory_back() -> None:
    """Arrow's memory comes from glibc, which returns it after a merge of segments. (Arrow's own allocator keeps 160 MiB
    and more.) A variable of the operator takes precedence."""
    if not allocator.restrain({}):
        pytest.skip("the allocator is another one")
    script = "{}; import pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    for call, expected in (("allocator.restrain()", "system"), ("allocator.restrain({})", "mimalloc")):
        program = script.format(f"from bridge.runtime import allocator; {call}")
        environment = {name: value for name, value in os.environ.items() if name != allocator.ARROW_POOL}
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        assert ran.stdout.strip() == expected
    assert allocator.ARROW_POOL not in allocator.restrain({allocator.ARROW_POOL: "mimalloc"})


def test_what_the_operator_says_stays() -> None:
    """By a variable of glibc's, or by its tunables."""
    assert allocator.restrain({"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}) == []
    assert "MALLOC_ARENA_MAX" not in allocator.restrain({"MALLOC_ARENA_MAX": "8"})
