"""Making a client of librdkafka. It reads certificates and keys then, and refuses those that do not belong together,
which is what it may find while files are being replaced: no bug, but something that an operator can correct.
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
"""Where the clients write what they notice by themselves."""


def made(what: str, make: Callable[[], T]) -> T:
    """The client that `make` returns; `what` it is, in words. Raises EnvironmentFailure."""
    try:
        return make()
    except KafkaException as exception:
        raise EnvironmentFailure(
            "a Kafka client cannot be made",
            hint="Look at its properties; certificate and key (ssl.*) must be readable PEM and belong together.",
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
    """A logger outside of the hierarchy, which lives as long as its client.

    Without one, librdkafka writes to standard error; our errors already quote what matters.
    """
    logger = logging.Logger("librdkafka", level=logging.DEBUG)
    logger.addHandler(_Collector(lines))
    return logger
