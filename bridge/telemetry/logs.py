"""Logging: structured events with stable names, as JSON lines or for a terminal, without payloads and secrets.

Call `configure` once, first of all. A module gets its logger by `structlog.get_logger("bridge.<module>")` and logs an
event with values as keywords: `log.info("segment-written", rows=n, bytes=m)`. The log goes to standard output, so that
text of other libraries on standard error never breaks a line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from bridge.settings.secrets import MASK, Redactor, is_secret_key
from bridge.wire.printable import printable

# Names that would put the content of a record into a line.
_PAYLOAD_KEYS: Final = frozenset({"value", "payload", "headers", "record_key"})
# Values of several lines: tracebacks of Python and Java keep them.
_TRACEBACKS: Final = frozenset({"exception", "stack"})
_OMITTED: Final = "<omitted>"
CLIENT_LOGGER: Final = "bridge.settings.librdkafka"
CLIENT_PERIOD_S: Final = 10.0
"""The interval of lines of each librdkafka client for a broker that is down: the client writes twenty a second, all
alike."""
RATION_S: Final = 60.0
RATIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("answer-dropped", "dead-letter-cut", "dead-letter-plain", "dead-letter-written"), 20),
    **dict.fromkeys(("record-not-held", "target-breaker-open", "target-failing", "transaction-aborted"), 20),
    **dict.fromkeys(("accept-failed", "api-failed", "api-search-failed", "peer-unavailable"), 20),
    "jvm-output": 100,  # some stack traces: a task that keeps failing prints thousands
    "login-failed": 1,
}
"""Lines within RATION_S of the events that every record of a producer, every request or connection of an HTTP client,
or every task of Spark can cause."""


def configure(
    *, format: str = "auto", level: str = "info", redact: Redactor | None = None, stream: TextIO | None = None
) -> None:
    """Set up structlog and the standard library's logging for this process.

    `format`: `json`, `console`, or `auto` (console on a terminal). `redact` masks secrets in all values.
    """
    out = stream or sys.stdout
    console = format == "console" or (format == "auto" and out.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(default=str)
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    tail: list[Processor] = [structlog.processors.format_exc_info, Masking(redact or Redactor())]
    tail += [escape, renderer] if console else [renderer]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a second `configure`, in a test, must take effect
    )
    handler = Lines(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    handler.addFilter(Rations())
    handler.addFilter(_is_worth_a_line)
    _replace_handlers(handler, level.upper())


def _replace_handlers(handler: logging.Handler, level: str) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for chatty in ("httpcore", "httpx", "py4j", "pyspark", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # A failed call to Spark raises its error. This logger would add a traceback for every call that a stop cuts off.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drop py4j's lines of the root logger: tracebacks of calls that a stop or the JVM's end cut off. The calls raise
    their errors, too."""
    return record.name != "root" or "py4j" not in Path(record.pathname).parts


class Lines(logging.StreamHandler[TextIO]):
    """Writes lines, and drops them after the reader has left: the bridge goes on without its log."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class Rations(logging.Filter):
    """Logs some lines of a kind in a period. The first line of the next period has the number of lines left out."""

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if (ration := _ration_of(record)) is None:
            return True
        kind, lines, period_s = ration
        begun_s, count = self._periods.get(kind, (0.0, 0))
        if not 0 <= record.created - begun_s < period_s:
            left_out, begun_s, count = max(0, count - lines), record.created, 0
            if left_out and isinstance(record.msg, dict):
                record.msg = {**record.msg, "left_out": left_out}
            elif left_out:
                record.msg, record.args = f"{record.getMessage()} ({left_out} more left out)", ()
        self._periods[kind] = begun_s, count + 1
        return count < lines


def _ration_of(record: logging.LogRecord) -> tuple[str, int, float] | None:
    """The kind of a line, and its maximum number of lines in a period of seconds; None: no limit."""
    if isinstance(record.msg, dict):
        event = str(record.msg.get("event"))
        return (event, RATIONS[event], RATION_S) if event in RATIONS else None
    if record.name == CLIENT_LOGGER and (text := record.getMessage()).startswith("FAIL "):
        return text.partition("]")[0], 1, CLIENT_PERIOD_S
    return None


def escape(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The last processor before text for people: names in records and reasons of brokers must not steer a terminal.

    (JSON has its own escapes, and so have lists and maps in a text.)
    """
    return {
        name: printable(value, keep="\n\t" if name in _TRACEBACKS else "") if isinstance(value, str) else value
        for name, value in event.items()
    }


class Masking:
    """The last processor before rendering: masks secrets by key and by value, and omits the content of records."""

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {name: self._masked(name, value) for name, value in event.items()}

    def _masked(self, name: str, value: Any) -> Any:
        if is_secret_key(name):
            return MASK
        if name in _PAYLOAD_KEYS or isinstance(value, bytes | bytearray | memoryview):
            return _OMITTED
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, dict):
            return {str(k): self._masked(str(k), v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._masked("", v) for v in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self._redact(str(value))
