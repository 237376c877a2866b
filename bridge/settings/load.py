"""Reads the settings: defaults, then the YAML file, then the environment.

`DELAY_BRIDGE__A__B=value` sets the key `a.b`. Names of settings are matched without regard to case. Below that:

- a client property (`kafka.*`) may be written with dots, `_` or `__`, as in
  `DELAY_BRIDGE__KAFKA__COMMON__BOOTSTRAP_SERVERS`; a trailing `_FILE` keeps its meaning: `..._SASL_PASSWORD_FILE`;
- a Spark property is taken as written if it has a dot (`..._CONF__spark.sql.shuffle.partitions`), else as above;
- a delay topic is one that the file names, in any case and with `_` for `.` and `-`, else a new one, just as written;
- a section, map or list may be given whole, as YAML or JSON: `DELAY_BRIDGE__DELAY_TOPICS='{my.delay: {target: my}}'`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr

from bridge.errors import ConfigurationError
from bridge.settings.librdkafka import COMMON_NAMES, nearest
from bridge.settings.model import Settings
from bridge.settings.secrets import interpolate, read_secret_file

PREFIX: Final = "DELAY_BRIDGE__"
_FILE_SUFFIX: Final = "_file"
_PROPERTY_MAPS: Final = (("kafka", "common"), ("kafka", "consumer"), ("kafka", "producer"), ("spark", "conf"))
_EXPLAINED: Final = "See config/bridge.yaml, which explains every key."

Tree = dict[str, Any]
Path_ = tuple[str, ...]


def load(path: Path | None, env: Mapping[str, str]) -> Settings:
    """The settings from a YAML file (none: defaults only) and the environment, which wins.

    Raises ConfigurationError in one line for anything that is not understood.
    """
    tree = read_yaml(path) if path is not None else {}
    for keys, value in sorted(from_environment(tree, env), key=lambda item: len(item[0])):
        _put(tree, keys, value)
    _refuse_unknown(tree, Settings, [])
    from_files: dict[Path_, str] = {}
    resolved = _resolve(tree, (), env, from_files)
    return Settings.of(resolved, from_files)


def read_yaml(path: Path) -> Tree:
    """A YAML file as a tree; an empty file is an empty tree. Raises ConfigurationError."""
    try:
        with path.open(encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_Loader)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}", hint="Give the file with --config.", code="DB-2001"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} is not valid YAML: {_yaml_problem(error)}", hint="Correct the file.", code="DB-2003"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} is not a mapping of keys to values", hint=_EXPLAINED, code="DB-2004")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice: one of the two values would silently be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: Exception) -> str:
    """What and where, but not the line itself: it may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} at line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return type(error).__name__


# --- environment -----------------------------------------------------------------------------------------------------


def from_environment(tree: Tree, env: Mapping[str, str]) -> Iterator[tuple[Path_, Any]]:
    """The keys that the environment sets, with their values; `tree` is the file's, whose delay topics are matched."""
    for name in sorted(env):
        if name.startswith(PREFIX):
            yield _from_variable(name, env[name], tree)


def _from_variable(name: str, text: str, tree: Tree) -> tuple[Path_, Any]:
    path: list[str] = []
    shape: object = Settings
    segments = name.removeprefix(PREFIX).split("__")
    while segments and (fields := _fields(shape)) is not None:
        key = segments.pop(0).lower()
        if key not in fields:
            raise _unknown(path, key, list(fields), f"environment variable {name}")
        path.append(key)
        shape = fields[key]
        if segments and _is_map_of_sections(shape):
            path.append(_topic(segments.pop(0), tree))
            shape = get_args(shape)[1]
    if segments and tuple(path) in _PROPERTY_MAPS:
        path.append(_property(segments, path[0] == "spark"))
        return tuple(path), text
    if segments:
        raise ConfigurationError(
            f"environment variable {name}: {'.'.join(path)} has no keys below it", hint=_EXPLAINED, code="DB-2007"
        )
    return tuple(path), _value(name, text, shape)


def _topic(segment: str, tree: Tree) -> str:
    known = tree.get("delay_topics")
    names = [str(name) for name in (known if isinstance(known, dict) else ["delay"])]
    meant = [name for name in names if _folded(name) == _folded(segment)]
    return meant[0] if len(meant) == 1 else segment


def _folded(name: str) -> str:
    return re.sub(r"[.-]", "_", name).lower()


def _property(segments: list[str], as_written_with_dot: bool) -> str:
    joined = "__".join(segments)
    if as_written_with_dot and "." in joined:
        return joined
    lowered = ".".join(segments).lower()
    known = {_folded(name): name for name in COMMON_NAMES}
    name, suffix = lowered, ""
    if _folded(name) not in known and name.endswith(_FILE_SUFFIX):
        name, suffix = name.removesuffix(_FILE_SUFFIX), _FILE_SUFFIX
    return known.get(_folded(name), name.replace("_", ".")) + suffix


def _value(name: str, text: str, shape: object) -> Any:
    """A variable's text as the value for `shape`: lists, maps and sections are YAML, everything else is text."""
    if get_origin(shape) is list and not text.lstrip().startswith("["):
        return [text]
    if get_origin(shape) not in (list, dict) and _fields(shape) is None:
        return text
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        hint = "Write a list or mapping as JSON."
        raise ConfigurationError(
            f"environment variable {name}: {_yaml_problem(error)}", hint=hint, code="DB-2006"
        ) from None


def _put(tree: Tree, path: Path_, value: Any) -> None:
    """Set one key; a mapping is merged into what is there."""
    for depth, part in enumerate(path[:-1]):
        tree = _as_tree(tree, part, path[: depth + 1])
    if isinstance(value, dict):
        for key, inner in value.items():
            _put(_as_tree(tree, path[-1], path), (key,), inner)
    else:
        tree[path[-1]] = value


def _as_tree(tree: Tree, part: str, path: Path_) -> Tree:
    if tree.get(part) is None:
        tree[part] = {}
    if not isinstance(tree[part], dict):
        raise ConfigurationError(f"{'.'.join(path)} is not a mapping", hint=_EXPLAINED, code="DB-2004")
    inner: Tree = tree[part]
    return inner


# --- unknown keys ----------------------------------------------------------------------------------------------------


def _refuse_unknown(tree: Tree, shape: object, path: list[str]) -> None:
    fields = _fields(shape)
    for key, value in list(tree.items()):
        here = [*path, str(key)]
        if fields is not None and key not in fields:
            raise _unknown(path, str(key), list(fields), "the configuration")
        inner = fields[key] if fields is not None else get_args(shape)[1]
        if _fields(inner) is None and get_origin(inner) is not dict:
            continue
        if value is None:  # `delay:` with nothing below it
            tree[key] = value = {}
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{'.'.join(here)} must be a mapping of keys to values", hint=_EXPLAINED, code="DB-2004"
            )
        if _fields(inner) is not None or _is_map_of_sections(inner):
            _refuse_unknown(value, inner, here)


def _unknown(path: list[str], key: str, siblings: list[str], origin: str) -> ConfigurationError:
    full = ".".join([*path, key])
    suggestion = nearest(key, siblings)
    everywhere = {leaf.rsplit(".", 1)[-1]: leaf for leaf in _leaves(Settings, "")}
    if suggestion is not None:
        hint = f"Did you mean {'.'.join([*path, suggestion])}?"
    elif (other := nearest(key, list(everywhere))) is not None:
        hint = f"Did you mean {everywhere[other]}?"
    else:
        hint = f"Known here: {', '.join(siblings)}"
    return ConfigurationError(f"unknown key {full} in {origin}", hint=hint, code="DB-2005")


def _leaves(shape: object, path: str) -> Iterator[str]:
    for key, inner in (_fields(shape) or {}).items():
        here = f"{path}.{key}" if path else key
        yield here
        yield from _leaves(
            get_args(inner)[1] if _is_map_of_sections(inner) else inner, here + ".<name>" * _is_map_of_sections(inner)
        )


def _fields(shape: object) -> dict[str, object] | None:
    """Key -> shape of a section; None if `shape` is not a section."""
    if inspect.isclass(shape) and get_origin(shape) is None and issubclass(shape, BaseModel):
        return {name: field.annotation for name, field in shape.model_fields.items()}
    return None


def _is_map_of_sections(shape: object) -> bool:
    return get_origin(shape) is dict and _fields(get_args(shape)[1]) is not None


# --- secrets and references ------------------------------------------------------------------------------------------


def _resolve(value: Any, path: Path_, env: Mapping[str, str], from_files: dict[Path_, str]) -> Any:
    """`value` with all references replaced; what is secret is noted in `from_files`, or wrapped inside client maps."""
    if isinstance(value, dict) and path in _PROPERTY_MAPS:
        return dict(_resolve_property(path, str(key), raw, value, env) for key, raw in value.items())
    if isinstance(value, dict):
        return {key: _resolve(inner, (*path, str(key)), env, from_files) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, path, env, from_files) for inner in value]
    if not isinstance(value, str):
        return value
    text, secret = interpolate(value, ".".join(path), env)
    if secret:
        from_files[path] = text
    return text


def _resolve_property(path: Path_, key: str, raw: Any, siblings: Tree, env: Mapping[str, str]) -> tuple[str, Any]:
    where = ".".join((*path, key))
    if not isinstance(raw, str):
        return key, raw
    text, secret = interpolate(raw, where, env)
    if not key.endswith(_FILE_SUFFIX):
        return key, SecretStr(text) if secret else text
    name = key.removesuffix(_FILE_SUFFIX)
    if name in siblings:
        raise ConfigurationError(f"{where} and {name} are both set", hint="Keep one of them.", code="DB-2008")
    return name, SecretStr(read_secret_file(text, where))
