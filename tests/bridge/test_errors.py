"""bridge.errors: one clear line and an exit code for every kind of failure."""

from __future__ import annotations

import pytest

from bridge import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigurationError, 2),
        (errors.EnvironmentFailure, 3),
        (errors.StateError, 4),
        (errors.FencedError, 5),
        (errors.InternalError, 70),
    ],
)
def test_every_leaf_has_its_own_exit_code(kind: type[errors.BridgeError], code: int) -> None:
    """Scripts tell by the exit status who must act."""
    assert kind("x", hint="y").exit_code == code


def test_an_error_prints_as_one_line_with_fields_and_hint() -> None:
    """Whatever a library put into the message, the operator sees a single line."""
    error = errors.EnvironmentFailure("no answer\n  from broker.", hint="start it", bootstrap="a:1\nb:2")
    assert str(error) == "no answer from broker (bootstrap=a:1 b:2). Start it"
