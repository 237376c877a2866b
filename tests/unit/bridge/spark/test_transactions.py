"""bridge.spark.transactions: what the process says that asks coordinators. It is a script of the test's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from bridge.kafka.errors import kafka_error
from bridge.settings.model import Settings
from bridge.spark.transactions import coordinators

Asked = Callable[[str], Mapping[str, str | None]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Asks about two ids; the process is a script."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()

    def ask(script: str) -> Mapping[str, str | None]:
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        return coordinators(Settings.of({}), list)(["a", "b"])

    return ask


@pytest.mark.fault("a word of the JVM's own in the answer of the process that asks coordinators")
@pytest.mark.parametrize("first", ["", "echo '[0.001s][warning][gc] it is deprecated'", r"printf 'caf\351\n'"])
def test_what_the_jvm_says_first_is_no_answer(asked: Asked, first: str) -> None:
    """Output of the JVM itself, in any encoding, does not keep a start after a kill from delivering."""
    assert asked(f"{first}\necho Ongoing\necho -") == {"a": "Ongoing", "b": None}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'no class' >&2; exit 1", "status 1, and printed: no class"),
        ("echo TimeoutException; exit 1", "TimeoutException"),
        ("echo Ongoing", "status 0, and printed: Ongoing"),
        ("kill -9 $$", "status -9, and printed: nothing"),
    ],
)
def test_a_process_that_has_no_answer_says_why(asked: Asked, script: str, said: str) -> None:
    """It is asked again."""
    with pytest.raises(KafkaException) as unanswered:
        asked(script)
    error = kafka_error(unanswered.value)
    assert error.retriable() and said in error.str()
