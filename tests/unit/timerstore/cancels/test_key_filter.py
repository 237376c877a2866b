"""Filters of keys: no key is missed, and few others are taken for keys."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from timerstore.cancels import key_filter
from timerstore.cancels.digests import Digests, digest
from timerstore.cancels.key_filter import KeyProbe, filter_of


def keys(prefix: str, count: int) -> Digests:
    found = digest(pa.array([f"{prefix}-{i}" for i in range(count)], pa.string()))
    return found[found.order()]


def passed(wanted: Digests, *runs: Digests) -> list[tuple[int, list[int]]]:
    """The numbers of the runs that may have any wanted key, with the indices of these keys."""
    ends = np.cumsum([0, *map(len, runs)]).tolist()
    parts = [slice(begin, end) for begin, end in pairwise(ends)]
    filters = np.concatenate([filter_of(run) for run in runs])
    return [(parts.index(run), asked.tolist()) for run, asked in KeyProbe(wanted).among(filters, parts)]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 17, 1_000])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 18])
def test_a_key_of_a_run_is_never_missed(monkeypatch: pytest.MonkeyPatch, count: int, at_once: int) -> None:
    """Of any number of keys and runs; a run of fewer than a block has no filter, and may have any key."""
    monkeypatch.setattr(key_filter, "PROBED_AT_ONCE", at_once)
    runs = [keys(f"{i}", count) for i in range(3)]
    for i, run in enumerate(runs):
        assert (i, list(range(count))) in passed(run, *runs)
    assert count < 17 or len(dict(passed(runs[0], *runs)).get(1, [])) < count / 10
    assert passed(keys("none", 0), *runs) == []


def test_few_absent_keys_pass() -> None:
    """One in 200, also of a run that has one key many times."""
    count = 20_000
    absent, one = keys("absent", count), keys("one", 1)
    repeated = Digests(np.repeat(one.hi, 100), np.repeat(one.lo, 100))
    assert passed(one, repeated) == [(0, [0])]
    for run in (keys("there", count), repeated):
        assert len(dict(passed(absent, run)).get(0, [])) < count / 100
