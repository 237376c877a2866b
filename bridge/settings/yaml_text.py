"""YAML as a tree of texts, without the types of YAML 1.1.

YAML 1.1 reads `no` as false, `1e3`, `010` and `12:30` as numbers, `2027-01-31` as a date: an id, a password or the name
of a topic would arrive as another text. Here every scalar stays its text, and the settings define the numbers. Only an
absent value, `~` and `null` are None, unless they are quoted.

Anchors and aliases are supported, and `<<` merges a mapping; the receiving mapping's own keys take precedence. A
duplicate key is an error: one of the values would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

NODES_MAX: Final = 100_000
"""Limit of nodes with expanded aliases: a few lines of aliases could fill the memory."""
DEPTH_MAX: Final = 20
"""Deeper than the settings."""
_TAG: Final = "tag:yaml.org,2002:"
_NULL: Final = f"{_TAG}null"
_MERGE: Final = f"{_TAG}merge"
_TEXTS: Final = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "timestamp"))

Tree = dict[str, Any]
Path = tuple[str, ...]


class NotYamlError(Exception):
    """The text is invalid YAML, or uses unsupported features. The message has the problem and its place, but hides the
    text, which may contain secrets."""


class _Loader(yaml.SafeLoader):
    """Loads plain scalars as texts."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])


def parse_yaml(text: str) -> tuple[Any, dict[Path, int]]:
    """The mappings, lists, texts and None of `text`; and the line of each key, by its path.

    Raises NotYamlError.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error) from None
    except Exception as error:  # noqa: BLE001 - PyYAML does not wrap all errors: bad escapes, depth
        raise NotYamlError(f"it cannot be read ({type(error).__name__})") from None
    reader = _Reader()
    return (None if node is None else reader.value(node, ())), reader.lines


def _not_yaml(error: yaml.YAMLError) -> NotYamlError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return NotYamlError(f"{error.problem} {_place(error.problem_mark)}")
    return NotYamlError(type(error).__name__)


def _place(mark: yaml.Mark) -> str:
    return f"at line {mark.line + 1}, column {mark.column + 1}"


class _Reader:
    """Converts nodes to values, and counts them."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._nodes = 0

    def value(self, node: yaml.Node, path: Path, depth: int = 0) -> Any:
        self._nodes += 1
        if depth > DEPTH_MAX or self._nodes > NODES_MAX:
            raise _wrong(node, "the nesting or repetition exceeds that of a configuration")
        match node:
            case yaml.ScalarNode() if node.tag == _NULL:
                return None
            case yaml.ScalarNode() if node.tag in _TEXTS or node.tag == _MERGE:
                return node.value
            case yaml.SequenceNode() if node.tag == f"{_TAG}seq":
                return [self.value(item, path, depth + 1) for item in node.value]
            case yaml.MappingNode() if node.tag == f"{_TAG}map":
                return self._mapping(node, path, depth)
        raise _wrong(node, f"the tag {node.tag.replace(_TAG, '!!')} is not supported")

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> Tree:
        own: Tree = {}
        merged: Tree = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                for base in _merged(value):
                    merged = {**self.value(base, path, depth + 1), **merged}
                continue
            name = _key(key)
            if name in own:
                raise _wrong(key, f"key {name!r} occurs twice")
            own[name] = self.value(value, (*path, name), depth + 1)
            self.lines[*path, name] = key.start_mark.line + 1
        return {**merged, **own}


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _TEXTS or not node.value:
        raise _wrong(node, "a key is not a text")
    return str(node.value)


def _merged(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """The mappings that `<<` names; the keys of earlier ones take precedence."""
    for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(base, yaml.MappingNode):
            raise _wrong(base, "<< merges mappings only")
        yield base


def _wrong(node: yaml.Node, problem: str) -> NotYamlError:
    return NotYamlError(f"{problem} {_place(node.start_mark)}")
