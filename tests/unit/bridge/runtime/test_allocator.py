"""bridge.allocator: memory that was freed goes back."""

from __future__ import annotations

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


def test_what_the_operator_says_stays() -> None:
    """By a variable of glibc's, or by its tunables."""
    assert allocator.restrain({"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}) == []
    assert "MALLOC_ARENA_MAX" not in allocator.restrain({"MALLOC_ARENA_MAX": "8"})
