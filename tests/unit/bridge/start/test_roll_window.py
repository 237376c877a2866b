"""bridge.parameters: the roll window from the configuration and the topic's retention."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from bridge.errors import ConfigurationError, EnvironmentFailure
from bridge.settings.model import Settings
from bridge.start.roll_window import (
    COPY_BYTES,
    TopicLimits,
    Windows,
    decode_parameters,
    decode_parameters_of,
    retention_to_create_ms,
    roll_window_ms,
    times_written,
)

DAY = 86_400_000
HOUR = 3_600_000


def window(given: str, retention_ms: int) -> int:
    return roll_window_ms(settings(given), "delay", TopicLimits(retention_ms=retention_ms))


def settings(given: str) -> Settings:
    return Settings.of({"roll": {"window": given}})


@pytest.mark.parametrize(
    ("retention_ms", "expected_ms"),
    [(4 * HOUR, 2 * HOUR), (2_000, 1_000), (14 * DAY, 7 * DAY), (365 * DAY, 7 * DAY), (3_656 * DAY, 7 * DAY)],
)
def test_auto_is_half_of_a_retention_that_delays_may_exceed_and_seven_days_at_most(
    retention_ms: int, expected_ms: int
) -> None:
    """The other half is for a bridge that is down."""
    assert window("auto", retention_ms) == expected_ms


@pytest.mark.fault("copies of messages in a topic that keeps its records long enough")
@pytest.mark.parametrize(
    ("longest", "headroom", "retention_ms", "expected_ms"),
    [
        ("3650d", "7d", -1, 3_650 * DAY),
        ("3650d", "7d", 3_657 * DAY, 3_650 * DAY),
        ("3650d", "7d", 3_657 * DAY - 1, 7 * DAY),
        ("30d", "1d", 31 * DAY, 30 * DAY),
        ("30d", "1d", 31 * DAY - 1, 7 * DAY),
        ("1h", "7d", -1, 7 * DAY),
        ("1h", "7d", 8 * DAY, 4 * DAY),
    ],
)
def test_no_message_is_copied_where_the_topic_keeps_its_records(
    longest: str, headroom: str, retention_ms: int, expected_ms: int
) -> None:
    """A topic without retention, or with one of at least `delay.max` and `retention.headroom`, rolls no message. W does
    not become shorter for that: copies of messages from before a lower `delay.max` are still there."""
    given = Settings.of({"delay": {"max": longest}, "retention": {"headroom": headroom}})
    found = decode_parameters(given, "delay", TopicLimits(retention_ms=retention_ms))
    assert found.roll_window_ms == expected_ms
    assert (times_written(found.max_delay_ms, found.roll_window_ms) == 1) == (expected_ms >= found.max_delay_ms)


@pytest.mark.parametrize("config", [{}, {"retention.bytes": "-1"}, {"retention.ms": "-1", "retention.bytes": "1024"}])
def test_a_retention_that_is_not_said_or_goes_by_size_is_not_taken_for_none(config: dict[str, str]) -> None:
    """Brokers may leave the setting out, and the size may delete a record at any time: records roll each week."""
    assert roll_window_ms(settings("auto"), "delay", TopicLimits.of(config)) == 7 * DAY


@pytest.mark.parametrize(
    ("delay_ms", "window_ms", "times"),
    [(7 * DAY, 7 * DAY, 1), (7 * DAY + 1, 7 * DAY, 2), (365 * DAY, 7 * DAY, 60), (3_650 * DAY, 7 * DAY, 596)],
)
def test_the_number_of_records_of_a_long_delay_is_known(delay_ms: int, window_ms: int, times: int) -> None:
    """The first record and its copies."""
    assert times_written(delay_ms, window_ms) == times


@pytest.mark.fault("cancels in a topic whose roll window is years")
@pytest.mark.parametrize(("largest_ms", "kept_ms"), [(HOUR, HOUR), (7 * DAY, 7 * DAY), (3_650 * DAY, 7 * DAY)])
def test_cancels_without_a_message_are_kept_for_a_week_at_most(largest_ms: int, kept_ms: int) -> None:
    """A cancel that covers no pending message is kept for a week at most, however long the roll window is."""
    assert Windows(current_ms=HOUR, largest_ms=largest_ms).cancels_ms == kept_ms


def test_the_log_says_how_often_the_longest_delay_is_written() -> None:
    """At each start, by delay topic."""
    with capture_logs() as entries:
        given = Settings.of({"delay_topics": {"delay": {}, "short": {}}})
        decode_parameters_of(given, {"delay": TopicLimits(), "short": TopicLimits(retention_ms=14 * DAY)})
    assert [(entry["event"], entry["topic"], entry["times_written"]) for entry in entries] == [
        ("roll-window", "delay", 1),
        ("roll-window", "short", 596),
    ]


@pytest.mark.parametrize(("given", "retention_ms"), [("3h", 4 * HOUR), ("30d", -1), ("30d", 31 * DAY)])
def test_a_given_window_is_taken_as_it_is(given: str, retention_ms: int) -> None:
    """Whatever the retention, as long as that is longer."""
    assert window(given, retention_ms) == settings(given).roll.window


@pytest.mark.parametrize("retention_ms", [0, HOUR, 3 * HOUR])
def test_a_window_that_outlives_the_retention_is_refused(retention_ms: int) -> None:
    """Records would be deleted before they roll: both numbers are named, and what to set."""
    with pytest.raises(ConfigurationError, match=r"roll_window=3h .*retention\.ms to 21600000"):
        window("3h", retention_ms)


def test_a_topic_that_keeps_nothing_is_refused() -> None:
    """No window fits into it."""
    with pytest.raises(EnvironmentFailure, match=r"retention_ms=1999\)\. Raise its retention\.ms"):
        window("auto", 1_999)


def test_limits_are_read_from_a_topic_s_configuration() -> None:
    """What a topic does not say has Kafka's default for a topic that keeps everything."""
    said = {"retention.ms": "5", "retention.bytes": "6", "max.message.bytes": "7"}
    assert TopicLimits.of(said) == TopicLimits(retention_ms=5, retention_bytes=6, message_bytes=7)
    assert TopicLimits.of({}) == TopicLimits(
        retention_ms=-1, retention_bytes=-1, message_bytes=1_048_588, is_said=False
    )


def test_what_is_rolled_must_leave_room_for_a_copy_s_headers() -> None:
    """In the topic and in the client, whichever takes less."""
    limits, small = TopicLimits(message_bytes=50_000), {"message.max.bytes": 20_000}
    assert decode_parameters(settings("auto"), "delay", limits).roll_bytes_max == 50_000 - COPY_BYTES
    client = Settings.of({"kafka": {"producer": small}})
    assert decode_parameters(client, "delay", limits).roll_bytes_max == 20_000 - COPY_BYTES
    assert decode_parameters(client, "delay", TopicLimits(message_bytes=10)).roll_bytes_max == 1


def test_limits_of_what_producers_write_are_parameters_of_decoding() -> None:
    """So a rebuild refuses what was refused, and nothing else."""
    given = Settings.of({"limits": {"headers": 7, "header_bytes": "2KiB", "payload_bytes": "3MiB"}})
    found = decode_parameters(given, "delay", TopicLimits())
    assert (found.headers_max, found.header_bytes_max, found.payload_bytes_max) == (7, 2_048, 3 << 20)


def test_topics_made_by_the_bridge_keep_twice_the_window() -> None:
    """So that `auto` finds its own window again."""
    assert retention_to_create_ms(settings("2h")) == 4 * HOUR
    made = TopicLimits(retention_ms=retention_to_create_ms(settings("auto")))
    assert roll_window_ms(settings("auto"), "delay", made) == 7 * DAY


def test_the_window_is_part_of_the_decode_parameters() -> None:
    """Beside what the configuration says alone."""
    tree = {"delay": {"max": "30d", "levels": "1s 2s"}, "delay_topics": {"delay": {"target": "orders"}}}
    found = decode_parameters(Settings.of(tree), "delay", TopicLimits(retention_ms=2 * DAY))
    assert (found.roll_window_ms, found.max_delay_ms, found.levels_ms) == (DAY, 30 * DAY, (1_000, 2_000))
    assert found.has_default_target
