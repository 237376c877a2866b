"""bridge.start.index: what a directory that cannot be used is to a start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import EnvironmentFailure
from bridge.settings.model import Settings
from bridge.start.index import find_index


def test_a_directory_that_cannot_be_made_is_the_environments(tmp_path: Path) -> None:
    """The volume may have become unusable since the checks; the error says what to look at, and is no bug of ours."""
    (tmp_path / "file").touch()
    settings = Settings.of(
        {
            "bridge": {"id": "bridge", "instance": "one"},
            "kafka": {"common": {"bootstrap.servers": "localhost:1"}},
            "delay_topics": {"delay": {}},
            "store": {"directory": str(tmp_path / "file" / "store")},
        }
    )
    cluster: Any = SimpleNamespace(
        topic_ids=lambda names: dict.fromkeys(names, "id"), describe=lambda: SimpleNamespace(cluster_id="cluster")
    )
    with pytest.raises(EnvironmentFailure, match="cannot use"):
        find_index(settings, cluster)
