"""bridge.errors: one clear line and an exit code for every kind of failure."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from bridge import errors
from bridge.errors import EnvironmentFailure
from bridge.spark.errors import named_failure, ranges


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigurationError, 2),
        (errors.EnvironmentFailure, 3),
        (errors.StateError, 4),
        (errors.FencedError, 5),
        (errors.InternalError, 70),
    ],
)
def test_every_leaf_has_its_own_exit_code(kind: type[errors.BridgeError], code: int) -> None:
    """Scripts tell by the exit status who must act."""
    assert kind("x", hint="y").exit_code == code


def test_an_error_prints_as_one_line_with_fields_and_hint() -> None:
    """Whatever a library put into the message, the operator sees a single line."""
    error = errors.EnvironmentFailure("no answer\n  from broker.", hint="start it", bootstrap="a:1\nb:2")
    assert str(error) == "no answer from broker (bootstrap=a:1 b:2). Start it"


def test_a_failure_of_sparks_names_its_cause() -> None:
    """Py4J's first line says nothing; the exception and what is at the bottom of it do."""
    trace = (
        "An error occurred while calling o1986.getResult.\n: org.apache.spark.SparkException: Job aborted\n"
        "\tat a.b.C(C.java:1)\nCaused by: KafkaException: Failed to construct\n\tat d\nCaused by: Bad: key\n\t... 3"
    )
    failure = named_failure("read", Py4JError(trace))
    assert isinstance(failure, EnvironmentFailure)
    assert failure.fields["reason"] == "org.apache.spark.SparkException: Job aborted; Bad: key"


def test_a_java_process_that_has_ended_is_no_bug_and_says_what_it_was_reading() -> None:
    """Out of memory by one record, most likely: the operator must learn where it is."""
    begins = {("delay", 0): 17, ("delay", 1): 5, ("other", 0): 3}
    records = ranges(begins, {("delay", 0): 31, ("delay", 1): 5, ("other", 0): 4})
    for error in (ConnectionRefusedError(111, "Connection refused"), Py4JError("Answer from Java side is empty")):
        failure = named_failure("take in frames", error, records)
        assert isinstance(failure, EnvironmentFailure)
        assert "delay/0 from 17 to 30, other/0 from 3 to 3" in str(failure)
        assert "spark.driver_memory" in str(failure)
