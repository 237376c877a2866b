"""How the demo recognises that the bridge is ready."""

from __future__ import annotations

import pytest

from demo.process import READY


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        (b'{"event": "ready", "logger": "bridge.runtime.app"}', True),
        (b"2026-01-01T00:00:00Z [info] ready   pending=0", True),
        (b'{"event": "producer-not-ready"}', False),
        (b"already there", False),
        (b"GET /readyz", False),
    ],
)
def test_ready_is_a_word_of_its_own(line: bytes, ready: bool) -> None:
    """Other events whose names contain the word do not count."""
    assert bool(READY.search(line)) is ready
