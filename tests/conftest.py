"""Fixtures that every test may ask for. Servers start at first use, once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark_session import spark  # noqa: F401
from tests.system.broker import Broker, start_broker
from tests.system.kafka import Topics


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """A real broker, shared by the session: a container where an engine answers, else the native one."""
    with start_broker() as running:
        yield running


@pytest.fixture(scope="session")
def topics(broker: Broker) -> Topics:
    """Makes topics with unique names on the shared broker."""
    return Topics(broker.bootstrap)
