"""Creation of librdkafka clients. A client reads certificates and keys when it is created, and refuses a pair that does
not match, which may happen while files are replaced. An operator can correct that, so it is not reported as a bug.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from confluent_kafka import KafkaException

from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import kafka_error

T = TypeVar("T")
CLIENT_LOG: Final = logging.getLogger("bridge.settings.librdkafka")
"""The logger of the clients' own messages."""


def made(what: str, make: Callable[[], T]) -> T:
    """The client from `make`; `what` describes it in errors. Raises EnvironmentFailure."""
    try:
        return make()
    except KafkaException as exception:
        raise EnvironmentFailure(
            "a Kafka client cannot be created",
            hint="Check its properties; certificate and key (ssl.*) must be readable PEM files that match.",
            client=what,
            reason=kafka_error(exception).str(),
            code="DB-3011",
        ) from None


class _Collector(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def collecting_logger(lines: list[str]) -> logging.Logger:
    """A logger outside the hierarchy, with the lifetime of its client.

    Without a logger, librdkafka writes to standard error. The bridge's errors quote the important lines.
    """
    logger = logging.Logger("librdkafka", level=logging.DEBUG)
    logger.addHandler(_Collector(lines))
    return logger
