"""The filters of messages and of dead letters: the parameters and bodies of the API, and the options of the commands.

Light: the commands import it, without FastAPI and Arrow.
"""

from __future__ import annotations

import base64
import re
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bridge.wire.headers import parse_origin, parse_until
from timerstore.rows.pending_state import PENDING, PendingState

TEXT_LENGTH_MAX: Final = 8_192
"""Maximum number of characters of a filter; a request has no room for more."""

Text = Annotated[str, StringConstraints(max_length=TEXT_LENGTH_MAX)]


class Filters(BaseModel):
    """The wanted messages: those that match all filters."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, StringConstraints(min_length=1, max_length=TEXT_LENGTH_MAX)] | None = Field(
        default=None, description="The value of delay-id."
    )
    origin: Text | None = Field(
        default=None, description="TOPIC/PARTITION/OFFSET of the message's first record; finds its copies too."
    )
    key: Text | None = Field(default=None, description="The key as text.")
    key_base64: Text | None = Field(default=None, description="The key in base64, if it is not text.")
    target: Text | None = Field(default=None, description="The target topic; empty: the delay topic's default.")
    due_from: Text | None = Field(default=None, description="The earliest due time: RFC 3339 with a zone, or epoch ms.")
    due_until: Text | None = Field(default=None, description="The end of the due times, exclusive.")
    at_from: Text | None = Field(
        default=None, description="The earliest `at`, the time at which the bridge acts on the message next."
    )
    at_until: Text | None = Field(default=None, description="The end of the times `at`, exclusive.")
    state: list[PendingState] = Field(
        default=[],
        description="One of these states; by default all except cancelled.",
        max_length=len(PendingState),
    )

    def values(self) -> dict[str, Any]:
        """The arguments of the store's query. Raises ValueError with the name of the invalid parameter, and advice."""
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("key and key_base64 are both given: give one of them.")
        key = parsed_parameter("key_base64", _base64, self.key_base64) if self.key is None else self.key.encode()
        times = ("due_from", "due_until", "at_from", "at_until")
        return {
            "id": self.id,
            "origin": parsed_parameter("origin", parse_origin, self.origin),
            "key": key,
            "target": self.target,
            "states": frozenset(self.state) or PENDING,
            **{f"{name}_ms": parse_time(name, getattr(self, name)) for name in times},
        }


class LetterFilters(BaseModel):
    """The wanted dead letters: those that match all filters."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    topic: Text | None = Field(default=None, description="The delay topic that they come from.")
    reason: list[Text] = Field(default=[], max_length=50, description="The reason: one of these.")
    target: Text | None = Field(default=None, description="Their target.")
    since: Text | None = Field(
        default=None, description="The earliest time of their records: RFC 3339 with a zone, or epoch ms."
    )
    until: Text | None = Field(default=None, description="The end of the times of their records, exclusive.")

    def values(self) -> dict[str, Any]:
        """The arguments of a `LetterChoice`. Raises ValueError with the name of the invalid parameter."""
        return {
            "topics": [] if self.topic is None else [self.topic],
            "reasons": self.reason,
            "targets": [] if self.target is None else [self.target],
            "since_ms": parse_time("since", self.since),
            "until_ms": parse_time("until", self.until),
        }


def parsed_parameter(name: str, parse: Callable[[str], Any], text: str | None) -> Any:
    """The parsed value of a parameter; None for None. Raises ValueError with its name."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from None


def _base64(text: str) -> bytes:
    """The bytes of base64 in either alphabet. A blank counts as a plus sign: forms decode it to one."""
    normal = text.replace(" ", "+").replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(normal + "=" * (-len(normal) % 4), validate=True)
    except (Base64Error, ValueError):
        raise ValueError("not base64; give text as key") from None


def parse_time(name: str, text: str | None) -> int | None:
    """Epoch milliseconds of a parameter. A blank before the zone counts as a plus sign: forms decode it to one."""
    plain = None if text is None else re.sub(r" ([0-9]{2}:[0-9]{2})$", r"+\1", text)
    return cast("int | None", parsed_parameter(name, parse_until, plain))
