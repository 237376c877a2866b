"""A client's background errors in the log."""

from __future__ import annotations

import pytest
import structlog
from confluent_kafka import KafkaError

from bridge.kafka.error_log import REPEATED_AFTER_S, ErrorLog
from tests.manual_clock import ManualClock


@pytest.mark.fault("a broker closes idle connections")
def test_idle_connections_that_end_are_no_alarm() -> None:
    """`All brokers down` alone is not logged; errors of a connection are, at most once in ten seconds."""
    clock = ManualClock(now_ms=0)
    trouble = ErrorLog("bridge.x", "trouble", clock)
    with structlog.testing.capture_logs() as lines:
        trouble.warn(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        assert lines == []
        for _ in range(3):
            trouble.warn(KafkaError(KafkaError._TRANSPORT))
        clock.advance(int(1_000 * REPEATED_AFTER_S))
        trouble.warn(KafkaError(KafkaError._TRANSPORT))
    assert [line["left_out"] for line in lines] == [0, 2]
