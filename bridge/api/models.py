"""Requests and answers, as the OpenAPI document shows them. Times are epoch milliseconds, or null."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from bridge.api import cursor as cursors
from bridge.api.filters import Filters, Text, parsed_parameter
from bridge.stores.names import NamedPosition
from bridge.wire.headers import origin_text, parse_until
from timerstore.operations.find import KEY_BYTES_MAX, ROWS_MAX, PendingState

PREVIEW_BYTES_MAX: Final = KEY_BYTES_MAX
"""Maximum number of shown bytes of a key, value or header."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Maximum number of bytes of a list in an answer: a page ends before."""
HEADERS_MAX: Final = 100
"""Maximum number of shown headers of a message."""
NAME_LENGTH_MAX: Final = 250
"""Maximum number of shown characters of a header name."""
LIMIT_DEFAULT: Final = 100
EDGES_MAX: Final = 101

OWN_PREFIX: Final = "delay-"
"""The prefix of the headers that the bridge reads and writes."""

INCOMPLETE: Final = (
    "Instances that did not answer, and partitions (topic/partition) whose earlier records are still being read: "
    "messages of them are missing here."
)


class PageFilters(Filters):
    """The filters, and a page of the list."""

    cursor: Text | None = Field(default=None, description="The previous page's `next`.")
    limit: int = Field(default=LIMIT_DEFAULT, ge=1, le=ROWS_MAX, description="Maximum number of messages.")

    def after(self) -> NamedPosition | None:
        """The position before the page. Raises ValueError for an invalid cursor."""
        return None if self.cursor is None else cursors.decode_position(self.cursor)


M = TypeVar("M", bound=BaseModel)


class View(BaseModel):
    """A model with the attributes of other objects, which the aliases of its fields name."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, *sources: object, **more: Any) -> Self:
        """The model of `more`, and of the first of the sources that has an attribute."""
        is_one = len(sources) == 1 and not more  # for speed: pages have a thousand
        return cls.model_validate(sources[0] if is_one else _Attributes(sources, more))


class _Attributes:
    def __init__(self, sources: Sequence[object], more: Mapping[str, Any]) -> None:
        self.__dict__.update(more, _sources=sources)

    def __getattr__(self, name: str) -> Any:
        for source in self._sources:
            with suppress(AttributeError):
                return getattr(source, name)
        raise AttributeError(name)


Tenths = Annotated[float, AfterValidator(lambda number: round(number, 1))]
"""A number of a few digits, for people."""


def fitting_answer(items: Iterable[M]) -> list[M]:
    """The first items: at least one, and no more than ANSWER_BYTES_MAX."""
    taken: list[M] = []
    size = 0
    for item in items:
        size += len(item.model_dump_json(exclude_unset=True).encode())
        if taken and size > ANSWER_BYTES_MAX:
            break
        taken.append(item)
    return taken


class Edges(BaseModel):
    """The edges of a timeline."""

    model_config = ConfigDict(extra="forbid")

    edge: list[Text] = Field(
        min_length=1,
        max_length=EDGES_MAX,
        description="Times in ascending order, in the format of due_from. Exact at multiples of ten seconds.",
    )

    def times(self) -> list[int]:
        """Epoch milliseconds. Raises ValueError with the fault."""
        times = [int(parsed_parameter("edge", parse_until, text)) for text in self.edge]
        if times != sorted(times):
            raise ValueError("edge: give the times in order.")
        return times


class Timeline(BaseModel):
    """The number of messages by the time at which the bridge acts on them next (`at`)."""

    before: int = Field(description="The number before the first edge.")
    counts: list[int] = Field(description="The number from each edge to the next.")
    after: int = Field(description="The number from the last edge on.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Blob(BaseModel):
    """Bytes: `text` if they are UTF-8, else `base64`. With `truncated` they are only a prefix."""

    text: str | None = None
    base64: str | None = None
    truncated: bool = False

    @classmethod
    def of(cls, value: bytes, bytes_max: int | None = None) -> Self:
        """The first `bytes_max` bytes, without a character that they would cut in two."""
        head = value[:bytes_max]
        blob = cls._of_head(head, cut=len(head) < len(value))
        if len(head) < len(value):
            blob.truncated = True
        return blob

    @classmethod
    def _of_head(cls, head: bytes, *, cut: bool) -> Self:
        try:
            return cls(text=head.decode())
        except UnicodeDecodeError as error:
            if cut and error.end == len(head) and error.reason == "unexpected end of data":
                return cls(text=head[: error.start].decode())
        return cls(base64=base64.b64encode(head).decode())


class HeaderValue(Blob):
    """A header. Without `text` and `base64` its value is null."""

    name: str


class Bulk(BaseModel):
    """The headers and value of a message. Without http.show_payloads the value and the message's own headers are
    hidden."""

    headers: list[HeaderValue] = Field(description="Without http.show_payloads only the bridge's headers (delay-*).")
    headers_left_out: int = Field(description="The number of hidden headers.")
    value: Blob | None = Field(description="Without http.show_payloads always null.")
    value_bytes: int | None = Field(description="The size of the value; null: the value is null.")


def bulk(headers: Sequence[tuple[str, bytes | None]], value: bytes | None, *, show_payloads: bool) -> dict[str, Any]:
    """The fields of `Bulk`, long ones truncated."""
    shown = [(name, value) for name, value in headers if show_payloads or name.startswith(OWN_PREFIX)][:HEADERS_MAX]
    listed = fitting_answer(map(_header, shown))
    return {
        "headers": listed,
        "headers_left_out": len(headers) - len(listed),
        "value": None if value is None or not show_payloads else Blob.of(value, PREVIEW_BYTES_MAX),
        "value_bytes": None if value is None else len(value),
    }


def _header(header: tuple[str, bytes | None]) -> HeaderValue:
    name, value = header
    blob = {} if value is None else Blob.of(value, PREVIEW_BYTES_MAX).model_dump(exclude_unset=True)
    return HeaderValue(name=name[:NAME_LENGTH_MAX], **blob)


def _preview(value: bytes | None) -> Blob | None:
    return None if value is None else Blob.of(value, PREVIEW_BYTES_MAX)


Preview = Annotated[Blob | None, BeforeValidator(_preview)]
"""The beginning of bytes."""


class Message(View):
    """A pending message. `origin` is its first record; topic, partition and offset are those of its present record."""

    topic: str
    partition: int
    offset: int
    origin: str = Field(description="topic/partition/offset")
    due: int = Field(validation_alias="due_ms", description="Its due time.")
    at: int = Field(
        validation_alias="at_ms",
        description="The time at which the bridge acts on it next; before `due` if it writes a copy.",
    )
    ts: int = Field(validation_alias="ts_ms", description="The timestamp of its present record.")
    state: PendingState
    target: str = Field(description="Empty: the delay topic's default.")
    target_partition: int | None
    key: Preview
    id: str | None
    rolls: int
    attempts: int = Field(validation_alias="attempt")
    reason: str | None = Field(description="The reason why the last attempt failed.")

    @field_validator("origin", mode="before")
    @classmethod
    def _place(cls, offset: int, info: ValidationInfo) -> str:
        return origin_text(info.data["topic"], info.data["partition"], offset)


class MessageDetail(Message, Bulk):
    """One message with its headers and value."""


class Messages(BaseModel):
    """A page of messages, ordered by `at`. Even a page below its limit, or an empty one, may have a successor."""

    messages: list[Message]
    next: str | None = Field(description="The cursor of the next page; null: this is the last page.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class Counted(View):
    """The number of matching messages; a lower bound unless `exact`."""

    count: int = Field(validation_alias="rows")
    exact: bool = Field(validation_alias="is_exact")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PauseState(View):
    """A pause of a target."""

    since: int = Field(validation_alias="changed_ms")
    until: int | None = Field(
        validation_alias="until_ms", description="Its end; null: it lasts until the target is resumed."
    )
    reason: str = Field(validation_alias="why", description="The operator's reason.")


class TargetState(View):
    """A target that the bridge has used, and its failures."""

    name: str
    partitions: int = Field(description="0: unknown.")
    failing_partitions: int = Field(description="The number of partitions that take no records now.")
    reason: str | None
    detail: str | None = Field(description="The last error.")
    open_breakers: int = Field(description="Open breakers, of single partitions or of the whole topic.")
    retry_in_s: Tenths | None = Field(
        validation_alias="retry_s", description="The time until the next attempt at one of them."
    )
    paused: bool = Field(description="true: an operator has paused it, and its messages wait.")
    pause: PauseState | None = Field(
        default=None, validation_alias="pause_in_force", description="Absent without a pause."
    )
    pausable: bool = Field(description="false: it is a topic of the bridge itself, such as a delay topic.")


class TargetStates(BaseModel):
    """Targets, failing ones first."""

    targets: list[TargetState]
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class PartitionState(BaseModel):
    """A partition of a delay topic that this instance owns."""

    topic: str
    partition: int
    lag: int = Field(description="The number of unread records.")
    behind_s: float = Field(description="The waiting time of the oldest of them.")


class FailingTarget(BaseModel):
    """A target, and the reason why some of its partitions take no records now."""

    name: str
    reason: str
    partitions: int


class PausedTarget(BaseModel):
    """A target that an operator has paused."""

    name: str
    paused_s: Tenths = Field(description="The time since the pause began.")


class TimeToGo(BaseModel):
    """The number of messages that come up within `until` (`more`: later), but not within the previous one."""

    until: str
    pending: int


class Lateness(View):
    """The lateness of the messages that were delivered in the last `over_s` seconds."""

    delivered: int
    p99_ms: Tenths | None = Field(description="null: no message was delivered.")
    over_s: Tenths = Field(description="Little more than five minutes at most.")


class Disk(View):
    """The volume of the index."""

    bytes: int | None = Field(validation_alias="disk_bytes")
    free_bytes: int | None = Field(validation_alias="disk_free_bytes")
    segments: int
    segment_bytes: int
    full: bool = Field(validation_alias="disk_full")


class Summary(View):
    """The state of this instance."""

    writable: bool = Field(description="Whether actions are allowed (http.api: write).")
    now: int = Field(validation_alias="now_ms")
    phase: str = Field(validation_alias="name")
    ready: bool
    reasons: list[str]
    reader: str | None = Field(description="The present reader of the delay topics: spark or plain.")
    pending: int = Field(validation_alias="pending_total")
    schedules: int = Field(description="The number of recurring messages among them.")
    overdue: int = Field(description="The number with a time `at` before the start of the clock's current ten seconds.")
    oldest_overdue_s: float
    next_at: int | None = Field(
        validation_alias="next_at_ms", description="The time at which the next message comes up, to ten seconds."
    )
    lateness: Lateness | None
    by_target: dict[str, int] = Field(description='The largest targets; "" is the delay topic\'s default.')
    by_time_to_go: list[TimeToGo]
    partitions: list[PartitionState]
    retention_headroom_s: dict[str, float]
    disk: Disk = Field(validation_alias="gauges")
    failing: list[FailingTarget]
    paused: list[PausedTarget] = Field(default=[], description="The longest first.")
    incomplete: list[str] = Field(default=[], description=INCOMPLETE)


class ProblemDocument(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
