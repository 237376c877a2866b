"""All settings of the bridge: name, default, unit and limits. `config/bridge.yaml` has the reasons for the defaults.

Durations are written `20ms`, `60s`, `1h30m`, `3650d`, and are ints of milliseconds in memory; sizes are written
`128MiB`, and are ints of bytes. `load` reads YAML and the environment. All are frozen; printed, they hide secrets.
"""

from __future__ import annotations

import re
import socket
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from bridge.errors import ConfigurationError
from bridge.settings.librdkafka import problems
from bridge.settings.reserved import OTHERS_OWN, REMOTE_URI, SPARK_OWNED, refuse_equal_ports
from bridge.settings.secrets import MASK, Redactor, is_secret_key, mask, parts_of, unmasked
from bridge.settings.shapes import error_sentence
from bridge.settings.time_budgets import POLL_INTERVAL_MS, TimeBudgets
from bridge.settings.units import ANY_CASE, AUTO, duration, parse_bytes, parse_duration_ms, per_second, size
from bridge.wire.decode_epochs import DecodeParameters
from bridge.wire.headers import TOPIC_PATTERN

DEAD_LETTER_SUFFIX: Final = ".dlt"
FILES: Final = re.compile(
    r"lock|reserve|(checkpoint|being-(read|looked-up|searched|left-out)|chosen-ends|paused-targets|rows-in-doubt|"
    r"skipped-batches|states-in-doubt)\.(json|json\.tmp|tmp|lock)"
)
"""Names of files in store.directory, where each delay topic has a directory of its name."""

LEVELS_CHARS_MAX: Final = 1_040
"""Length of the levels, in ms and separated by commas. The committed metadata of each partition has them twice, since
old levels stay as long as their records. Its 4,095 characters also hold all other parts and some clock steps."""
LEVEL_MS_MAX: Final = parse_duration_ms("36500d")


def _legal_name(value: str) -> str:
    if not re.fullmatch(TOPIC_PATTERN, value):
        raise ValueError(f"{value!r} is not a legal name; use letters, digits, '.', '_' and '-'")
    return value


def _delay_topic_name(value: str) -> str:
    if value.startswith("__"):
        raise ValueError(f"{value!r} is an internal topic")
    if FILES.fullmatch(value):
        raise ValueError(f"{value!r} is the name of a file in store.directory; use another topic")
    return _legal_name(value)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _property_text(value: object) -> object:
    """A client property as a string; YAML would read `true` and `5` as other types."""
    if value is None:
        raise ValueError("is empty; give it a value or remove it")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _wrapped(properties: dict[str, str | SecretStr]) -> dict[str, str | SecretStr]:
    """The properties with wrapped secrets, so that even the printed map hides them."""
    return {k: SecretStr(v) if isinstance(v, str) and is_secret_key(k) else v for k, v in properties.items()}


Property = Annotated[str | SecretStr, BeforeValidator(_property_text)]
Properties = Annotated[dict[str, Property], AfterValidator(_wrapped)]
Part = Literal["common", "consumer", "producer"]
PARTS: Final[tuple[Part, ...]] = ("common", "consumer", "producer")
Name = Annotated[str, AfterValidator(_legal_name)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Section(BaseModel):
    """A part of the settings: frozen, without unknown keys, masked when printed."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mask(self.model_dump(mode='json'))})"

    __str__ = __repr__


class BridgeSettings(Section):
    """The identity of this bridge."""

    id: Name = "delay-bridge"
    instance: Name = Field(default="auto", validate_default=True, max_length=200)
    create_topics: bool = True

    @field_validator("instance")
    @classmethod
    def _host_name(cls, value: str) -> str:
        return socket.gethostname() if value == "auto" else value


class KafkaSettings(Section):
    """Client properties by librdkafka's names: for all clients, and additional ones for consumers and producers."""

    common: Properties = Field(default_factory=dict, validate_default=True)
    consumer: Properties = Field(default_factory=dict)
    producer: Properties = Field(default_factory=dict)

    @field_validator("common")
    @classmethod
    def _with_bootstrap(cls, value: Properties) -> Properties:
        return {"bootstrap.servers": "localhost:9092", **value}

    @model_validator(mode="after")
    def _known_to_librdkafka(self) -> Self:
        wrong = [problem for part in PARTS for problem in problems(self.properties(part), f"kafka.{part}")]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of the cluster, for its clients and for error messages."""
        return unmasked(self.common["bootstrap.servers"])

    def properties(self, *parts: Part) -> dict[str, str]:
        """The properties of these parts; a later part overrides an earlier one. Holds secrets: never print it."""
        return {name: unmasked(value) for part in parts for name, value in getattr(self, part).items()}


class DelayTopicSettings(Section):
    """One delay topic: the destination of its records, and its configuration if the bridge creates it."""

    target: Name | None = None
    dead_letter: Name | None = None
    dialect: Annotated[Literal["native", "etf1", "karafka", "rocketmq", "wushilin", "cesium", "rabbitmq"], ANY_CASE] = (
        "native"
    )
    partitions: int = Field(default=2, ge=1, le=10_000)
    replication: int = Field(default=-1, ge=-1, le=32)


class TargetSettings(Section):
    """The targets that headers may name; regular expressions for whole names."""

    allow: list[Pattern] = [".*"]
    deny: list[Pattern] = []


class DelaySettings(Section):
    """The accepted delays."""

    max: Annotated[int, duration("1s", "36500d")] = parse_duration_ms("3650d")
    levels: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    @field_validator("levels")
    @classmethod
    def _durations(cls, value: str) -> str:
        levels_ms = [parse_duration_ms(level) for level in value.split()]
        if not levels_ms or max(levels_ms) > LEVEL_MS_MAX:
            raise ValueError("write one or more durations of at most 36500d, separated by blanks")
        ends = [*accumulate(len(f"{level_ms},") for level_ms in levels_ms)]
        fitting = bisect_right(ends, LEVELS_CHARS_MAX)
        if fitting < len(levels_ms):
            raise ValueError(f"{len(levels_ms)} levels do not fit beside a committed offset; the first {fitting} do")
        return value


class LimitSettings(Section):
    """The largest record of a producer."""

    headers: int = Field(default=100, ge=1, le=100_000)
    header_bytes: Annotated[int, size("1KiB", "64MiB")] = parse_bytes("64KiB")
    payload_bytes: Annotated[int, size("1KiB", "1GiB")] = parse_bytes("64MiB")
    every_min: Annotated[int, duration("100ms", "1d")] = parse_duration_ms("1s")


class RollSettings(Section):
    """The longest wait of a record in the delay topic before it is written again."""

    window: Annotated[int, duration("1s", "3650d", auto=True)] = AUTO


class RetentionSettings(Section):
    """The retention of a delay topic that rolls nothing."""

    headroom: Annotated[int, duration("1s", "3650d")] = parse_duration_ms("7d")


class RetrySettings(Section):
    """The handling of a target that fails temporarily."""

    attempts: int = Field(default=16, ge=1, le=10_000)
    backoff: Annotated[int, duration("1ms", "1h")] = parse_duration_ms("1s")
    backoff_max: Annotated[int, duration("1ms", "1d")] = parse_duration_ms("10m")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.backoff_max < self.backoff:
            raise ValueError("delivery.retry.backoff_max: is less than delivery.retry.backoff")
        return self


class DeliverySettings(Section):
    """The dispatcher's transactions."""

    mode: Annotated[Literal["exactly-once", "at-least-once"], ANY_CASE] = "exactly-once"
    commit_interval: Annotated[int, duration("1ms", "5s")] = 40
    transaction_rows: int = Field(default=20_000, ge=1, le=1_000_000)
    session_timeout: Annotated[int, duration("1s", "30m")] = parse_duration_ms("30s")
    resume_rate: Annotated[int, per_second("1/s", "1000000/s")] = 1_000
    retry: RetrySettings = Field(default_factory=RetrySettings)


class StartSettings(Section):
    """The conditions for delivery after a start."""

    read_commands: Annotated[int, duration("0s", "1h")] = parse_duration_ms("30s")


class OverdueSettings(Section):
    """The handling of messages that became due while the bridge was down."""

    policy: Annotated[Literal["deliver", "dead-letter"], ANY_CASE] = "deliver"
    older_than: Annotated[int, duration("1s", "36500d")] = parse_duration_ms("1d")
    rate: Annotated[int, per_second("0/s", "10000000/s")] = 0


class StoreSettings(Section):
    """The local index."""

    directory: Path = Path("data")
    remote: Annotated[str, Field(pattern=REMOTE_URI)] | None = None
    flush_bytes: Annotated[int, size("4KiB", "16GiB")] = parse_bytes("128MiB")
    flush_interval: Annotated[int, duration("10ms", "1d")] = parse_duration_ms("60s")


class ReadyRowsSettings(Section):
    """The rows in memory that are ready for delivery."""

    horizon: Annotated[int, duration("100ms", "1d")] = parse_duration_ms("60s")
    bytes: Annotated[int, size("64KiB", "64GiB")] = parse_bytes("256MiB")


class SparkSettings(Section):
    """The Spark session."""

    master: str = Field(default="local", min_length=1)
    executor_host: str | None = Field(default=None, min_length=1)
    frames_port: int = Field(default=0, ge=0, le=65_535)
    start_after: Annotated[int, duration("0s", "1h")] = 0
    driver_memory: Annotated[int, size("480MiB", "1TiB")] = parse_bytes("512MiB")
    conf: Properties = Field(default_factory=dict)

    @field_validator("conf")
    @classmethod
    def _not_owned(cls, value: Properties) -> Properties:
        for name in value:
            if name in SPARK_OWNED:
                raise ValueError(f"spark.conf.{name} cannot be set: {SPARK_OWNED[name]}")
            if not name.startswith("spark."):
                raise ValueError(f"spark.conf.{name} is not a key of Spark; did you mean spark.conf.spark.{name}?")
        return value

    @model_validator(mode="after")
    def _reached_by_executors(self) -> Self:
        if self.executor_host is None and not self.master.startswith("local"):
            raise ValueError("spark.executor_host: is missing; the executors of a cluster send their rows there")
        return self


class HttpSettings(Section):
    """The management port (/livez, /readyz, /metrics), and the API on a separate port."""

    host: str = Field(default="0.0.0.0", min_length=1)  # probes and Prometheus come from outside
    port: int = Field(default=8080, ge=0, le=65_535)
    certificate_file: Path | None = None
    key_file: Path | None = None
    user: str | None = Field(default=None, pattern="^[^:]+$")
    password_file: Path | None = None
    token_file: Path | None = None
    api: Annotated[Literal["off", "read", "write"], ANY_CASE] = "read"
    api_port: int = Field(default=8081, ge=0, le=65_535)
    base_path: str = Field(default="/", pattern="^(/|(/[A-Za-z0-9._~-]+)+)$", max_length=200)
    show_payloads: bool = False
    peers: list[Annotated[str, Field(pattern="^https?://[^/?#@ ]+/?$")]] = Field(default=[], max_length=64)

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        for one, other in (("certificate_file", "key_file"), ("user", "password_file")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"http.{one} and http.{other} belong together; set both or neither")
        if self.api == "write" and self.user is None and self.token_file is None:
            raise ValueError("http.api is write without a password; set http.user and password_file, or token_file")
        return self


class TracingSettings(Section):
    """Delivery spans for messages with a trace."""

    endpoint: str | None = Field(default=None, pattern="^https?://.+")
    ratio: float = Field(default=1.0, gt=0, le=1)
    rate: Annotated[int, per_second("1/s", "10000/s")] = 100


class LogSettings(Section):
    """The format and level of the log."""

    format: Annotated[Literal["auto", "json", "console"], ANY_CASE] = "auto"
    level: Annotated[Literal["debug", "info", "warning", "error"], ANY_CASE] = "info"


class Settings(Section):
    """All settings, validated."""

    bridge: BridgeSettings = Field(default_factory=BridgeSettings)
    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    delay_topics: dict[Annotated[str, AfterValidator(_delay_topic_name)], DelayTopicSettings] = Field(
        default={"delay": DelayTopicSettings()}, min_length=1, max_length=1000, validate_default=True
    )
    targets: TargetSettings = Field(default_factory=TargetSettings)
    delay: DelaySettings = Field(default_factory=DelaySettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    roll: RollSettings = Field(default_factory=RollSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    start: StartSettings = Field(default_factory=StartSettings)
    overdue: OverdueSettings = Field(default_factory=OverdueSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    ready_rows: ReadyRowsSettings = Field(default_factory=ReadyRowsSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    logs: LogSettings = Field(default_factory=LogSettings)

    _from_files: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(
        cls,
        tree: Mapping[str, Any],
        from_files: Mapping[tuple[str, ...], str] | None = None,
        places: Mapping[tuple[str, ...], str] | None = None,
    ) -> Settings:
        """Settings from plain values. Values of `from_files` are masked everywhere; `places` are the places of keys.
        Raises ConfigurationError with all problems in one line."""
        redact = Redactor((from_files or {}).values())
        try:
            settings = cls.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_input=False)
            sentences = "; ".join(redact(error_sentence(detail, places or {})) for detail in details)
            raise ConfigurationError(
                f"invalid configuration: {sentences}",
                hint="Correct the configuration; config/bridge.yaml explains every key.",
                code="DB-2026",
            ) from None
        settings._from_files.update(from_files or {})
        _ = settings.budgets  # raises
        return settings

    @field_validator("delay_topics")
    @classmethod
    def _dead_letter_names(cls, value: dict[str, DelayTopicSettings]) -> dict[str, DelayTopicSettings]:
        suffixed = {name: topic.dead_letter or name + DEAD_LETTER_SUFFIX for name, topic in value.items()}
        named = {name: topic.model_copy(update={"dead_letter": suffixed[name]}) for name, topic in value.items()}
        for name, topic in named.items():
            if not re.fullmatch(TOPIC_PATTERN, topic.dead_letter or ""):  # with the suffix
                raise ValueError(f"{name}.dead_letter: {topic.dead_letter} is too long; give it a name of its own")
            if topic.dead_letter in named:
                raise ValueError(
                    f"{name}: dead_letter {topic.dead_letter} is a delay topic; the bridge would read its records again"
                )
            if OTHERS_OWN.fullmatch(topic.dead_letter or ""):
                raise ValueError(f"{name}: dead_letter {topic.dead_letter} is an internal topic of another system")
            if topic.target in named or (topic.target or "").startswith("__"):
                raise ValueError(f"{name}: target {topic.target} is a delay topic or an internal topic")
        targets = {topic.target: name for name, topic in named.items()}
        for name, topic in named.items():
            if (other := targets.get(topic.dead_letter)) is not None:
                raise ValueError(f"{name}: dead_letter {topic.dead_letter} is the target of {other}")
        return named

    @model_validator(mode="after")
    def _targets_allowed_by_name(self) -> Self:
        for name, topic in self.delay_topics.items():
            if topic.target is not None and self._is_reserved(topic.target):
                raise ValueError(
                    f"delay_topics.{name}.target: {topic.target} looks like an internal topic of another system; if it "
                    "is not, add its full name to targets.allow"
                )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        refuse_equal_ports(self.http, self.spark)
        return self

    @property
    def group_id(self) -> str:
        """The consumer group, in which Kafka keeps the committed states."""
        return self.bridge.id

    @property
    def group_instance_id(self) -> str:
        """The name of the static membership: a second process with this name replaces the first."""
        return f"{self.bridge.id}-{self.bridge.instance}"

    @property
    def transactional_id(self) -> str:
        """The same for every process of an instance, so that a successor fences its predecessor's transactions."""
        return f"{self.bridge.id}-{self.bridge.instance}"

    @property
    def budgets(self) -> TimeBudgets:
        """The time-outs of delivery. Raises ConfigurationError if the settings contradict each other."""
        consumer = self.kafka.properties("common", "consumer")
        return TimeBudgets.of(
            self.kafka.properties("common", "producer") if self.delivery.mode == "exactly-once" else {},
            commit_interval_ms=self.delivery.commit_interval,
            poll_interval_ms=int(consumer.get("max.poll.interval.ms", POLL_INTERVAL_MS)),
        )

    @property
    def levels_ms(self) -> tuple[int, ...]:
        """Delay of each level in milliseconds, level 1 first."""
        return tuple(parse_duration_ms(level) for level in self.delay.levels.split())

    def decode_parameters(self, topic: str, *, roll_window_ms: int, **more: int) -> DecodeParameters:
        """The decode parameters of a delay topic."""
        return DecodeParameters(
            levels_ms=self.levels_ms,
            max_delay_ms=self.delay.max,
            roll_window_ms=roll_window_ms,
            has_default_target=self.delay_topics[topic].target is not None,
            dialect=self.delay_topics[topic].dialect,
            headers_max=self.limits.headers,
            header_bytes_max=self.limits.header_bytes,
            payload_bytes_max=self.limits.payload_bytes,
            **more,
        )

    def dead_letter_topic(self, delay_topic: str) -> str:
        """The topic for the dead letters of a delay topic. Raises KeyError for another topic."""
        return self.delay_topics[delay_topic].dead_letter or delay_topic + DEAD_LETTER_SUFFIX

    def target_permitted(self, topic: str) -> bool:
        """Whether records may be delivered to `topic`: allowed, not denied, neither internal nor a delay topic. A topic
        that looks like another system's internal one must be allowed by its full name."""
        if topic.startswith("__") or topic in self.delay_topics or self._is_reserved(topic):
            return False
        is_allowed = any(re.fullmatch(pattern, topic) for pattern in self.targets.allow)
        return is_allowed and not any(re.fullmatch(pattern, topic) for pattern in self.targets.deny)

    def _is_reserved(self, topic: str) -> bool:
        return topic not in self.targets.allow and (topic.startswith("_") or OTHERS_OWN.fullmatch(topic) is not None)

    def secrets(self) -> frozenset[str]:
        """All secret values, for a `Redactor`."""
        maps = (self.kafka.common, self.kafka.consumer, self.kafka.producer, self.spark.conf)
        named = {v.get_secret_value() for m in maps for v in m.values() if isinstance(v, SecretStr)}
        return frozenset(named | set(self._from_files.values()) | parts_of(self.model_dump(mode="json")))

    def masked(self) -> dict[str, Any]:
        """The effective configuration as plain values in YAML's notation, without secrets."""
        tree: dict[str, Any] = mask(self.model_dump(mode="json"))
        for path in self._from_files:
            _set(tree, path, MASK)
        return tree

    def __repr__(self) -> str:
        return f"Settings({self.masked()})"

    __str__ = __repr__


def _set(tree: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    for part in path[:-1]:
        tree = tree.get(part) or {}
    if path[-1] in tree:
        tree[path[-1]] = value
