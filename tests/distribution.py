"""Which tests run side by side, and in which order: a plugin of pytest, for runs with several processes.

A *unit* of work is what one process runs from beginning to end: a file, whose tests share servers; a folder, whose
files share one; or a test that shares none with its neighbours. `durations.json` has the seconds of those that take
long; the longest come first, so that no long one is left when all others are done. A file that is not named there takes
little.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

DURATIONS: Final[dict[str, float]] = json.loads(Path(__file__).with_name("durations.json").read_text(encoding="utf-8"))

AHEAD_MAX: Final = 1


def unit_of(nodeid: str) -> str:
    """The unit that a test belongs to: itself or its folder, if the durations name it, else its file."""
    test, file = nodeid.partition("[")[0], nodeid.partition("::")[0]
    folder = file.rpartition("/")[0] + "/"
    return next((unit for unit in (test, folder) if unit in DURATIONS), file)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items by the seconds of their units; within a unit the order stays."""
    return sorted(items, key=lambda item: -DURATIONS.get(unit_of(item.nodeid), 0.0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units in place of files, where files are asked for."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Units(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            """A process knows its test and the next one: with more units, it would keep others from them."""
            if self._pending_of(self.assigned_work[node]) <= AHEAD_MAX:
                super()._reschedule(node)

    return Units(config, log)
