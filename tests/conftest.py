"""Fixtures that every test may ask for. Servers start at first use, once a session."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Final

import hypothesis
import pytest
import structlog

from dev.harness import pace
from dev.harness.kafka import Topics
from tests.profiles import EXAMPLES, IS_NIGHTLY, SEED, seed
from tests.spark_session import spark  # noqa: F401
from tests.system.broker import Broker, start_broker
from timerstore.clock import SystemClock

# Machines are shared: an example that takes long says nothing about the code.
hypothesis.settings.register_profile("tests", deadline=None, max_examples=EXAMPLES, derandomize=not IS_NIGHTLY)
hypothesis.settings.load_profile("tests")

pytest_plugins = ["tests.distribution", "tests.outcomes"]

NEEDS: Final = {"broker": "broker", "spark": "jvm", "chromium": "browser"}
"""Fixtures that start a server, however a test comes to ask for one, and the marker that says so."""

FOLLOWER: Final = pace.Follower(SystemClock(), pace.loop_processor_s)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for all processes: also for what Hypothesis draws, where that is random."""
    if seed() and IS_NIGHTLY and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed())


def pytest_report_header() -> list[str]:
    """The conditions of a run beside the source."""
    header = [f"pace: {pace.factor():g} (a factor of all deadlines)"]
    return [*header, f"seed: {seed()} ({SEED} repeats it)"] if IS_NIGHTLY else header


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests are marked by their needs. Those of the night run in the night."""
    if not IS_NIGHTLY:
        later = [item for item in items if item.get_closest_marker("nightly") is not None]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    for item in items:
        for fixture in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(NEEDS[fixture])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests wait longer on a slow machine, also on one with a late change of its speed."""
    FOLLOWER.follow()
    own = item.get_closest_marker("timeout")
    usual_s = own.args[0] if own else float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(pace.scaled(usual_s)), append=False)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Loaded objects stay to the end: full collections, of which a session has thousands, skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command line sets it up for the process, with a stream that is closed when its test ends."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A real broker, shared by the session: a container where an engine answers, else the native one, which all its
    processes share."""
    own = tmp_path_factory.getbasetemp()
    with start_broker(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as running:
        yield running


@pytest.fixture(scope="session")
def topics(broker: Broker) -> Topics:
    """Makes topics with unique names on the shared broker."""
    return Topics(broker.bootstrap)
