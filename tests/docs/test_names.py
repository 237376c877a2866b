"""Names: a public class or function has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from types import MappingProxyType
from typing import Final

from tests.docs.imports import imports, modules, parse

PACKAGES: Final = ("bridge", "timerstore")

QUALIFIED: Final = "callers write the module's name before it"
SHARED: Final = MappingProxyType(
    {
        "Outcome": "a command's, which is part of the API, and a transaction's; no module has both",
        "main": "a program's entry; each is a process of its own",
        "open_or_make": QUALIFIED,
        "read": QUALIFIED,
        "remove": QUALIFIED,
        "set_aside": QUALIFIED,
        "write": QUALIFIED,
    }
)
"""Public names of more than one module, with the reasons."""


def test_a_public_name_has_one_definition() -> None:
    """A name stands for one thing in the whole tree. The exceptions are listed, and each is still needed."""
    owners = _owners()
    shared = {name: sorted(owners[name]) for name in owners if len(owners[name]) > 1}
    assert shared.keys() == SHARED.keys(), {name: shared.get(name) for name in shared.keys() ^ SHARED.keys()}


def test_functions_of_shared_names_are_called_with_their_module() -> None:
    """`checkpoint.read` is clear; a bare `read` is ambiguous."""
    owners, qualified = _owners(), [name for name, why in SHARED.items() if why == QUALIFIED]
    paths = {f"{owner.removesuffix('.py').replace('/', '.')}.{name}" for name in qualified for owner in owners[name]}
    wrong = {module: found for module in modules(*PACKAGES) if (found := sorted(paths & set(imports(module))))}
    assert not wrong, wrong


def _owners() -> dict[str, set[str]]:
    """The modules of each public class and function."""
    owners = defaultdict[str, set[str]](set)
    for module in modules(*PACKAGES):
        for node in parse(module).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                owners[node.name].add(module)
    return owners
