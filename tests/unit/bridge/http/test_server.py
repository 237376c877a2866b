"""How long a connection may last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.api.listener import LIMITS
from bridge.http.server import _Connection


@pytest.mark.parametrize(
    ("path", "is_complete", "is_cut"),
    [
        ("/api/v1/export", False, False),
        ("/api/v1/messages/cancel", False, False),
        ("/api/v1/messages/move", False, False),
        ("/api/v1/messages/cancel", True, True),
        ("/api/v1/messages/delay/0/1/cancel", False, True),
        ("/api/v1/messages", False, True),
    ],
)
def test_only_what_may_take_long_outlives_the_time_of_a_connection(path: str, is_complete: bool, is_cut: bool) -> None:
    """An export and a bulk action, while they are under way."""
    told: list[Any] = []
    connection = cast("Any", _Connection.__new__(_Connection))
    connection._limits = LIMITS
    connection.cycle = SimpleNamespace(scope={"path": path}, response_complete=is_complete)
    connection.transport = SimpleNamespace(is_closing=lambda: False, abort=lambda: told.append("cut"))
    connection.loop = SimpleNamespace(call_later=lambda seconds, _: told.append(seconds))
    connection._expire()
    assert told == (["cut"] if is_cut else [LIMITS.connection_s])
