"""Logging: structured events with stable names, as JSON lines or for a terminal, without payloads and secrets.

Call `configure` once, first of all. A module gets its logger by `structlog.get_logger("bridge.<module>")` and logs an
event with values as keywords: `log.info("segment-written", rows=n, bytes=m)`. The log goes to standard output, so that
text of other libraries on standard error never breaks a line.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
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
REPEATED_AFTER_S: Final = 10.0
JVM_LOGGER: Final = "bridge.spark.jvm"
JVM_LINES_MAX: Final = 100
"""Lines of the JVM's output within JVM_PERIOD_S: some stack traces. A task that keeps failing prints thousands."""
JVM_PERIOD_S: Final = 60.0
RATIONED: Final = frozenset(
    {
        *("answer-dropped", "dead-letter-cut", "dead-letter-plain", "dead-letter-written"),
        *("record-not-held", "target-breaker-open", "target-failing", "transaction-aborted"),
        *("accept-failed", "api-failed", "api-search-failed", "peer-unavailable"),
    }
)
"""Events that every record of a producer, or every request or connection of an HTTP client, can cause."""
RATIONED_LINES_MAX: Final = 20
RATIONED_PERIOD_S: Final = 60.0
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


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
    handler.addFilter(RationByEvent())
    handler.addFilter(_is_worth_a_line)
    _replace_handlers(handler, _LEVELS[level])


def _replace_handlers(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for chatty in ("httpcore", "httpx", "py4j", "pyspark", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # A failed call to Spark raises its error. This logger would add a traceback for every call that a stop cuts off.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    clients = logging.getLogger(CLIENT_LOGGER)
    clients.filters = [RepeatedLines()]
    logging.getLogger(JVM_LOGGER).filters = [Ration(JVM_LINES_MAX, JVM_PERIOD_S)]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drop py4j's lines of the root logger: tracebacks of calls that a stop or the JVM's end cut off. The calls raise
    their errors, too."""
    return record.name != "root" or "py4j" not in Path(record.pathname).parts


class Lines(logging.StreamHandler[TextIO]):
    """Writes lines, and drops them after the reader has left: the bridge goes on without its log."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class RepeatedLines(logging.Filter):
    """Logs one line in ten seconds of each librdkafka client for a broker that is down, with the number of lines left
    out before it. The client writes twenty a second, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        client = text.partition("]")[0]
        if not text.startswith("FAIL "):
            return True
        if 0 <= record.created - self._logged_s.get(client, -REPEATED_AFTER_S) < REPEATED_AFTER_S:
            self._left_out[client] += 1
            return False
        self._logged_s[client] = record.created
        left_out = self._left_out.pop(client, 0)
        record.msg, record.args = (f"{text} ({left_out} more left out)" if left_out else text), ()
        return True


class Ration(logging.Filter):
    """Logs at most `lines` lines in a period. The first line of the next period has the number of lines left out."""

    def __init__(self, lines: int, period_s: float) -> None:
        super().__init__()
        self._lines, self._period_s = lines, period_s
        self._begun_s, self._count = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not 0 <= record.created - self._begun_s < self._period_s:
            left_out = max(0, self._count - self._lines)
            self._begun_s, self._count = record.created, 0
            if left_out and isinstance(record.msg, dict):
                record.msg = {**record.msg, "left_out": left_out}
        self._count += 1
        return self._count <= self._lines


class RationByEvent(logging.Filter):
    """Gives each event of `RATIONED` its own ration: a million records cause a line every few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._rations = {event: Ration(RATIONED_LINES_MAX, RATIONED_PERIOD_S) for event in RATIONED}

    def filter(self, record: logging.LogRecord) -> bool:
        event = record.msg.get("event") if isinstance(record.msg, dict) else None
        ration = self._rations.get(event) if isinstance(event, str) else None
        return ration is None or ration.filter(record)


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
