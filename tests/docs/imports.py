"""The modules and their imports: read as text, without running them."""

from __future__ import annotations

import ast
from functools import cache

from tests.paths import ROOT


def modules(*packages: str) -> list[str]:
    """Paths of all modules of these packages, relative to the repository."""
    found = (path for package in packages for path in (ROOT / package).glob("**/*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@cache
def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"), module)


@cache
def imports(module: str) -> tuple[str, ...]:
    """Dotted names that a module imports, `from x import y` as x.y, those that only a type checker sees too."""
    found: list[str] = []
    stack: list[ast.AST] = [parse(module)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        stack.extend(ast.iter_child_nodes(node))
    return tuple(found)
