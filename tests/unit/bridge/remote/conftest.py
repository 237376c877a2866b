"""An instance with a copy of its index, and another one without an index."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bridge.stores.names import SourceName
from bridge.wire.committed_state import Manifest
from tests.unit.bridge.remote.rig import FaultyObjects, Instance
from tests.unit.bridge.stores.rig import NOW_MS, ORDERS

LATER: Final = (NOW_MS + 5_000, NOW_MS + 1_000, NOW_MS + 3_000)


@pytest.fixture
def objects(tmp_path: Path) -> FaultyObjects:
    (tmp_path / "remote").mkdir()
    return FaultyObjects(f"file://{tmp_path}/remote")


@pytest.fixture
def kafka() -> dict[SourceName, Manifest]:
    return {}


@pytest.fixture
def one(tmp_path: Path, objects: FaultyObjects, kafka: dict[SourceName, Manifest]) -> Instance:
    """An instance with pending messages, and a copy of its index."""
    made = Instance(tmp_path / "one", objects, kafka)
    made.work(*LATER, NOW_MS - 1)
    made.upload()
    assert ORDERS in kafka
    return made


@pytest.fixture
def other(tmp_path: Path, objects: FaultyObjects, kafka: dict[SourceName, Manifest]) -> Instance:
    """An instance without an index."""
    return Instance(tmp_path / "other", objects, kafka)
