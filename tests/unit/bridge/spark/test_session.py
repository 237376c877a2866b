"""How the Spark session is set up. (What it does is seen wherever a bridge runs.)"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bridge.errors import BridgeError, EnvironmentFailure
from bridge.settings.model import Settings
from bridge.spark import session
from bridge.spark.session import SPARE_SLOTS, SessionStart, properties, with_slots

P = 4 + SPARE_SLOTS
JARS = [Path("/jars/connector.jar")]
SCRATCH = Path("/scratch")
OIDC = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.client.id": "bridge",
    "sasl.oauthbearer.client.secret": "secret",
    "sasl.oauthbearer.token.endpoint.url": "https://id.example/token",
}


@pytest.mark.parametrize(
    ("master", "meant"),
    [
        ("local", f"local[{P},1]"),
        ("local[2]", f"local[{P},1]"),
        ("local[200]", "local[200,1]"),
        ("local[*]", f"local[{P},1]"),
        ("local[2,4]", f"local[{P},1]"),
        ("local[*, 8]", f"local[{P},1]"),
        ("local-cluster[1,1,1024]", "local-cluster[1,1,1024]"),
        ("spark://spark:7077", "spark://spark:7077"),
    ],
)
def test_each_partition_has_a_slot_and_each_task_one_attempt(master: str, meant: str) -> None:
    """A task without a slot would never be run, and no error would say so."""
    assert with_slots(master, 4) == meant


@pytest.mark.parametrize("attempts", [1, 4])
@pytest.mark.parametrize("master", ["local[2,9]", "spark://spark:7077"])
def test_a_batch_job_may_try_its_tasks_again(master: str, attempts: int) -> None:
    """Both settings have the same number, even if the user sets others."""
    spark = {"master": master, "executor_host": "bridge-0", "conf": {"spark.task.maxFailures": "7"}}
    given = properties(Settings.of({"spark": spark}), JARS, 4, SCRATCH, attempts)
    assert given["spark.task.maxFailures"] == str(attempts)
    assert given["spark.master"] == (f"local[{P},{attempts}]" if master.startswith("local") else master)


def of(spark: dict[str, Any], **kafka: str) -> dict[str, str]:
    """Spark's properties with these settings."""
    return properties(Settings.of({"spark": spark, "kafka": {"common": kafka}}), JARS, 4, SCRATCH)


def test_executors_elsewhere_find_the_bridge() -> None:
    """By the name that it has for them, and with the jars; in the sidecar nothing listens beyond the machine."""
    beside = of({})
    assert beside["spark.driver.host"] == beside["spark.driver.bindAddress"] == "127.0.0.1"
    assert "spark.jars" not in beside
    elsewhere = {"master": "spark://spark:7077", "executor_host": "bridge-0"}
    given = of(elsewhere)
    assert given["spark.driver.host"] == given["spark.driver.bindAddress"] == "bridge-0"
    assert given["spark.jars"] == "/jars/connector.jar"
    assert session.with_slots("spark://spark:7077", 4) == given["spark.master"]
    assert of(elsewhere | {"conf": {"spark.driver.bindAddress": "0.0.0.0"}})["spark.driver.bindAddress"] == "0.0.0.0"


def test_executors_may_ask_the_token_endpoint_too() -> None:
    """Kafka's client runs in them; a user's own options stay."""
    elsewhere = {"master": "spark://spark:7077", "executor_host": "bridge-0"}
    conf = {"spark.executor.extraJavaOptions": "-Dmine=1"}
    options = of(elsewhere | {"conf": conf}, **OIDC)["spark.executor.extraJavaOptions"]
    assert options == '"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls=https://id.example/token" -Dmine=1'
    assert "spark.executor.extraJavaOptions" not in of(elsewhere)


def test_a_start_may_wait_for_java_until_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark.start_after` keeps it back; what only Java can do, such as a record that the plain reader leaves, does not
    wait for that."""
    wanted = threading.Event()
    monkeypatch.setattr(session, "_WANTED", wanted)
    made = mock.Mock(return_value="session")
    start = SessionStart(made, mock.Mock(), after_s=3_600)
    assert not start.session.done() and not made.called
    session.want()
    assert str(start.session.result(10)) == "session"
    assert str(SessionStart(made, mock.Mock()).session.result(10)) == "session"


def test_a_session_that_does_not_start_is_told() -> None:
    """To who waits for it, and to the application."""
    failure = EnvironmentFailure("Spark does not start", hint="Look.", code="DB-3015")
    told: list[BridgeError] = []
    start = SessionStart(mock.Mock(side_effect=failure), told.append)
    assert start.session.exception(timeout=10) is failure
    start.thread.join(10)
    assert told == [failure]
