"""Reads the settings: defaults, then the YAML file, then the environment.

`DELAY_BRIDGE__A__B=value` sets the key `a.b`. The case of setting names does not matter. Names below the settings:

- a client property (`kafka.*`) may be written with dots, `_` or `__`, as in
  `DELAY_BRIDGE__KAFKA__COMMON__BOOTSTRAP_SERVERS`; a trailing `_FILE` keeps its meaning: `..._SASL_PASSWORD_FILE`;
- a Spark property with a dot stays as written (`..._CONF__spark.sql.shuffle.partitions`), else the same rule applies;
- a delay topic is one of the file, in any case and with `_` for `.` and `-`, or else a new one, exactly as written;
- a variable is refused if it may mean two keys, if it is empty, or if its value is in quotes;
- a section, map or list may be given whole, as YAML or JSON: `DELAY_BRIDGE__DELAY_TOPICS='{my.delay: {target: my}}'`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic import SecretStr

from bridge.errors import ConfigurationError
from bridge.settings.librdkafka import COMMON_NAMES, nearest
from bridge.settings.model import Settings
from bridge.settings.secrets import interpolate, read_secret_file
from bridge.settings.shapes import Keys, Places, fields, is_map_of_sections, refuse_spoiled, refuse_wrong_shape
from bridge.settings.yaml_text import NotYamlError, parse_yaml

PREFIX: Final = "DELAY_BRIDGE__"
_FILE_SUFFIX: Final = "_file"
_PROPERTY_MAPS: Final = (("kafka", "common"), ("kafka", "consumer"), ("kafka", "producer"), ("spark", "conf"))
_EXPLAINED: Final = "config/bridge.yaml explains every key."

Tree = dict[str, Any]


def load(path: Path | None, env: Mapping[str, str]) -> Settings:
    """The settings from a YAML file (None: defaults only), overridden by the environment.

    Raises ConfigurationError, in one line.
    """
    places: Places = {}
    tree = read_yaml(path, places) if path is not None else {}
    for keys, value, variable in _variables(tree, env):
        _put(tree, keys, value)
        places[keys] = variable
    _check_shape(tree, Settings, (), places)
    from_files: dict[Keys, str] = {}
    resolved = _resolve(tree, (), env, from_files, places)
    return Settings.of(resolved, from_files, places)


def read_yaml(path: Path, places: Places) -> Tree:
    """A YAML file as a tree of unchanged texts; an empty file is an empty tree. Notes the place of each key in
    `places`. Raises ConfigurationError."""
    try:
        tree, lines = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}", hint="Give the file with --config.", code="DB-2001"
        ) from None
    except (NotYamlError, UnicodeDecodeError) as error:
        problem = error if isinstance(error, NotYamlError) else "it is not UTF-8"
        raise ConfigurationError(
            f"{path} is not valid YAML: {problem}", hint="Correct the file.", code="DB-2003"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} is not a mapping of keys to values", hint=_EXPLAINED, code="DB-2004")
    places.update({keys: f"line {line} of {path}" for keys, line in lines.items()})
    return tree


# --- environment -----------------------------------------------------------------------------------------------------


def _variables(tree: Tree, env: Mapping[str, str]) -> list[tuple[Keys, Any, str]]:
    """The keys from the environment, whole sections first, with their values and variables. `tree` is the file's; its
    delay topics and properties resolve names. Raises ConfigurationError."""
    variables: dict[Keys, tuple[Any, str]] = {}
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        keys, value = _from_variable(name, _meant(name, env[name]), tree)
        if keys in variables:
            raise ConfigurationError(
                f"{name} and {variables[keys][1]} both set {'.'.join(keys)}", hint="Keep one of them.", code="DB-2082"
            )
        variables[keys] = value, name
    settings = ((keys, value, name) for keys, (value, name) in variables.items())
    return sorted(settings, key=lambda setting: len(setting[0]))


def _meant(name: str, text: str) -> str:
    """A variable's text. Raises ConfigurationError if it is empty, or in quotes that were meant for a shell."""
    if not text.strip():
        hint = "Give it a value, or unset it; then the file's value or the default applies."
        raise ConfigurationError(f"environment variable {name} is set but empty", hint=hint, code="DB-2080")
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "\"'":
        hint = "Remove them: a shell does, an env file does not. If they belong to the value, put it into a file."
        raise ConfigurationError(f"environment variable {name} is in quotes", hint=hint, code="DB-2081")
    return text


def _from_variable(name: str, text: str, tree: Tree) -> tuple[Keys, Any]:
    path: list[str] = []
    shape: object = Settings
    segments = name.removeprefix(PREFIX).split("__")
    while segments and (keys := fields(shape)) is not None:
        key = segments.pop(0).lower()
        if key not in keys:
            raise _unknown(path, key, list(keys), f"environment variable {name}")
        path.append(key)
        shape = keys[key]
        if segments and is_map_of_sections(shape):
            path.append(_topic(name, segments.pop(0), tree))
            shape = get_args(shape)[1]
    if segments and tuple(path) in _PROPERTY_MAPS:
        path.append(_property(name, segments, path, tree))
        return tuple(path), text
    if segments:
        raise ConfigurationError(
            f"environment variable {name}: {'.'.join(path)} has no keys below it", hint=_EXPLAINED, code="DB-2007"
        )
    return tuple(path), _value(name, text, shape)


def _topic(variable: str, segment: str, tree: Tree) -> str:
    topics = tree.get("delay_topics")
    return _named(variable, segment, list(topics) if isinstance(topics, dict) else ["delay"]) or segment


def _named(variable: str, text: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `text` means, or None. Raises ConfigurationError if it may mean several."""
    names = list(names)
    if text in names:
        return text
    meant = [name for name in names if _folded(name) == _folded(text)]
    if len(meant) > 1:
        raise ConfigurationError(
            f"environment variable {variable} may mean {' or '.join(sorted(meant))}",
            hint="Write the name exactly as in the file, or set the key in the file.",
            code="DB-2082",
        )
    return meant[0] if meant else None


def _folded(name: str) -> str:
    return re.sub(r"[.-]", "_", name).lower()


def _property(variable: str, segments: list[str], path: list[str], tree: Tree) -> str:
    """The name of a client or Spark property: the file's spelling, the client's name, or the segments with dots."""
    is_spark = path[0] == "spark"
    joined = "__".join(segments)
    section = tree.get(path[0])
    written = section.get(path[1]) if isinstance(section, dict) else None
    if (meant := _named(variable, joined, written if isinstance(written, dict) else [])) is not None:
        return meant
    if is_spark and "." in joined:
        return joined
    lowered = ".".join(segments).lower()
    common = {_folded(name): name for name in COMMON_NAMES}
    name, suffix = lowered, ""
    if _folded(name) not in common and name.endswith(_FILE_SUFFIX):
        name, suffix = name.removesuffix(_FILE_SUFFIX), _FILE_SUFFIX
    return common.get(_folded(name), name.replace("_", ".")) + suffix


def _value(name: str, text: str, shape: object) -> Any:
    """A variable's text as a value of `shape`: lists, maps and sections are YAML, all others are text."""
    is_list = get_origin(shape) is list
    if is_list and not text.lstrip().startswith("["):
        if "," in text:
            hint = """Write it as ["a", "b"], even a single value that contains a comma."""
            raise ConfigurationError(f"environment variable {name} is not a list", hint=hint, code="DB-2006")
        return [text]
    if not is_list and get_origin(shape) is not dict and fields(shape) is None:
        return text
    try:
        return parse_yaml(text)[0]
    except NotYamlError as error:
        hint = "Write a list or mapping as JSON."
        raise ConfigurationError(f"environment variable {name}: {error}", hint=hint, code="DB-2006") from None


def _put(tree: Tree, path: Keys, value: Any) -> None:
    """Set one key; a mapping is merged into an existing one."""
    for depth, part in enumerate(path[:-1]):
        tree = _as_tree(tree, part, path[: depth + 1])
    if isinstance(value, dict):
        for key, inner in value.items():
            _put(_as_tree(tree, path[-1], path), (key,), inner)
    else:
        tree[path[-1]] = value


def _as_tree(tree: Tree, part: str, path: Keys) -> Tree:
    if tree.get(part) is None:
        tree[part] = {}
    if not isinstance(tree[part], dict):
        raise ConfigurationError(f"{'.'.join(path)} is not a mapping", hint=_EXPLAINED, code="DB-2004")
    inner: Tree = tree[part]
    return inner


# --- unknown keys ----------------------------------------------------------------------------------------------------


def _check_shape(tree: Tree, shape: object, path: Keys, places: Places) -> None:
    """Raises ConfigurationError for unknown keys and for values of another shape. A section or map without keys below
    it is empty; a list without a value is its default."""
    keys = fields(shape)
    for key, value in list(tree.items()):
        here = (*path, key)
        if keys is not None and key not in keys:
            raise _unknown(path, key, list(keys), "the configuration")
        inner = keys[key] if keys is not None else get_args(shape)[1]
        if value is None and get_origin(inner) is list:
            del tree[key]
        elif fields(inner) is None and get_origin(inner) is not dict:
            refuse_wrong_shape(value, inner, here, places)
        elif isinstance(value, dict | None):
            tree[key] = value or {}
            _check_shape(tree[key], inner, here, places)
        else:
            raise ConfigurationError(
                f"{'.'.join(here)} must be a mapping of keys to values", hint=_EXPLAINED, code="DB-2004"
            )


def _unknown(path: Sequence[str], key: str, siblings: list[str], origin: str) -> ConfigurationError:
    full = ".".join([*path, key])
    suggestion = nearest(key, siblings)
    everywhere = {leaf.rsplit(".", 1)[-1]: leaf for leaf in _leaves(Settings, "")}
    if suggestion is not None:
        hint = f"Did you mean {'.'.join([*path, suggestion])}?"
    elif (other := nearest(key, list(everywhere))) is not None:
        hint = f"Did you mean {everywhere[other]}?"
    else:
        hint = f"Known keys here: {', '.join(siblings)}"
    return ConfigurationError(f"unknown key {full} in {origin}", hint=hint, code="DB-2005")


def _leaves(shape: object, path: str) -> Iterator[str]:
    for key, inner in (fields(shape) or {}).items():
        here = f"{path}.{key}" if path else key
        yield here
        yield from _leaves(
            get_args(inner)[1] if is_map_of_sections(inner) else inner, here + ".<name>" * is_map_of_sections(inner)
        )


# --- secrets and references ------------------------------------------------------------------------------------------


def _resolve(value: Any, path: Keys, env: Mapping[str, str], from_files: dict[Keys, str], places: Places) -> Any:
    """`value` with all references resolved; secrets are noted in `from_files`, or wrapped inside client maps. Raises
    ConfigurationError, also for spoiled texts."""
    if isinstance(value, dict) and path in _PROPERTY_MAPS:
        return dict(_resolve_property(path, str(key), raw, value, env, places) for key, raw in value.items())
    if isinstance(value, dict):
        return {key: _resolve(inner, (*path, str(key)), env, from_files, places) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, path, env, from_files, places) for inner in value]
    if not isinstance(value, str):
        return value
    text, secret = interpolate(value, ".".join(path), env)
    if secret:
        from_files[path] = text
    refuse_spoiled(text, path, places)
    return text


def _resolve_property(
    path: Keys, key: str, raw: Any, siblings: Tree, env: Mapping[str, str], places: Places
) -> tuple[str, str | SecretStr]:
    where, name = ".".join((*path, key)), key.removesuffix(_FILE_SUFFIX)
    text, secret = interpolate(raw, where, env)
    if name != key:
        if name in siblings:
            raise ConfigurationError(f"{where} and {name} are both set", hint="Keep one of them.", code="DB-2008")
        text, secret = read_secret_file(text, where), True
    refuse_spoiled(text, (*path, name), places)
    return name, SecretStr(text) if secret else text
