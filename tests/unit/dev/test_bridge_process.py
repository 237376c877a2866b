"""How the harness recognises that the bridge is ready."""

from __future__ import annotations

import pytest

from dev.harness.bridge import READY


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        ('{"event": "ready", "logger": "bridge.runtime.app"}', True),
        ("2026-01-01T00:00:00Z [info] ready   pending=0", True),
        ('{"event": "producer-not-ready"}', False),
        ("already there", False),
        ("GET /readyz", False),
    ],
)
def test_ready_is_a_word_of_its_own(line: str, ready: bool) -> None:
    """Other events whose names contain the word do not count."""
    assert bool(READY.search(line)) is ready
