"""Wrappers in tests hide no method of the wrapped object."""

from __future__ import annotations

import ast
import inspect
from unittest import mock

import pytest

from bridge.delivery.producer.transactional import TransactionalWriter
from bridge.delivery.producer.writer import Writer
from tests.broker.interfering import Interfering
from tests.paths import ROOT

METHODS = [name for name, _ in inspect.getmembers(Writer, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_a_call_to_the_wrapper_reaches_the_writer(name: str) -> None:
    """With the arguments that it has, also where a base class has a method of its own."""
    inner = mock.create_autospec(TransactionalWriter, instance=True)
    parameters = inspect.signature(getattr(inner, name)).parameters.values()
    positional = [object() for each in parameters if each.kind is not each.KEYWORD_ONLY]
    named = {each.name: object() for each in parameters if each.kind is each.KEYWORD_ONLY}
    result = getattr(Interfering(inner), name)(*positional, **named)
    called = getattr(inner, name)
    called.assert_called_once_with(*positional, **named)
    assert result is called.return_value or (result is None and name in vars(Interfering))


def test_no_wrapper_derives_from_a_writer() -> None:
    """It would inherit methods in place of passing calls on."""
    wrong = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "Writer" in {getattr(base, "id", None) for base in node.bases}
    ]
    assert not wrong
