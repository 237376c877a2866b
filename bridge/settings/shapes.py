"""The shape of each setting, and the check of its text before parsing; errors name the key and its line.

Texts that can only be mistakes are refused: an empty text (`Path("")` is the working directory, and `""` a pattern that
matches nothing), and a text with a line break or another control character, as files from Windows and block scalars
leave behind. PEM keys and certificates may have lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from bridge.errors import ConfigurationError

Keys = tuple[str, ...]
Places = dict[Keys, str]
"""The places of keys: a line of the file, or the name of a variable."""

LINES_ALLOWED: Final = re.compile(r".*\.pem|delay\.levels")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_QUOTE_IT: Final = "Give it a value or remove it; the texts null and ~ need quotes."


def fields(shape: object) -> dict[str, object] | None:
    """Key -> shape of a section; None if `shape` is not a section."""
    if inspect.isclass(shape) and get_origin(shape) is None and issubclass(shape, BaseModel):
        return {name: field.annotation for name, field in shape.model_fields.items()}
    return None


def is_map_of_sections(shape: object) -> bool:
    return get_origin(shape) is dict and fields(get_args(shape)[1]) is not None


def refuse_wrong_shape(part: Any, shape: object, path: Keys, places: Mapping[Keys, str]) -> None:
    """Raises ConfigurationError for a list in place of one value, one value in place of a list, and no value. `shape`
    is neither a section nor a map."""
    if get_origin(shape) is list:
        if not isinstance(part, list):
            raise _wrong(path, places, "must be a list", 'Write it as ["a", "b"].')
        if not all(isinstance(text, str) for text in part):
            raise _wrong(path, places, "must be a list of texts", "Write each as one text, in quotes if necessary.")
    elif isinstance(part, list | dict):
        kind = "a list" if isinstance(part, list) else "a mapping"
        raise _wrong(path, places, f"must be one value, not {kind}", "Write one value.")
    elif part is None and NoneType not in get_args(shape):
        raise _wrong(path, places, "is empty", _QUOTE_IT)


def refuse_spoiled(text: str, path: Keys, places: Mapping[Keys, str]) -> None:
    """Raises ConfigurationError for an empty text, and for control characters."""
    if not text.strip() and path[:2] != ("spark", "conf"):  # Spark's options may be empty
        raise _wrong(path, places, "is empty", _QUOTE_IT)
    if _CONTROL.search(text) and not LINES_ALLOWED.fullmatch(".".join(path)):
        hint = "Remove it. In YAML, write the text in one line, without | or >; check the line ends for CR."
        raise _wrong(path, places, "contains a line break or another control character", hint)


_WORDS: Final = {
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is not a whole number of a supported size",
    "int_from_float": "is not a whole number",
    "bool_parsing": "is neither true nor false",
    "float_parsing": "is not a number",
}


def error_sentence(error: ErrorDetails, places: Mapping[Keys, str]) -> str:
    """A pydantic error as a sentence with the full path and its place; errors of a whole section name their own
    keys."""
    text = _WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
    keys = tuple(str(part) for part in error["loc"] if part != "[key]")
    path = ".".join(keys)
    message = text if not path or text.startswith(f"{path}.") else f"{path}: {text}"
    return message + place_text(keys, places)


def _wrong(path: Keys, places: Mapping[Keys, str], problem: str, hint: str) -> ConfigurationError:
    name = ".".join(path)
    return ConfigurationError(f"setting {name} {problem}{place_text(path, places)}", hint=hint, code="DB-2083")


def place_text(path: Keys, places: Mapping[Keys, str]) -> str:
    """The place of the key, or of the nearest one above it, in brackets; empty if unknown."""
    nearest = (places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in places)
    return next((f" ({place})" for place in nearest), "")
