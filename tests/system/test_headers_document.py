"""docs/headers.md: its four producers, run as they stand there, send the same message to a real broker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from bridge.install import connector
from bridge.wire.headers import FOR, TOPIC, parse_duration
from dev.broker.embedded import broker_jars
from dev.harness.kafka import TopicReader, Topics
from dev.harness.pace import scaled
from tests.paths import ROOT
from tests.system.broker import Broker

pytestmark = [pytest.mark.system]

PROGRAM_S_MAX: Final = 120
READ_S_MAX: Final = 30


def blocks() -> dict[str, list[str]]:
    """The fenced blocks by language."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "docs" / "headers.md").read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(body)
    return found


@pytest.fixture
def names(broker: Broker, topics: Topics) -> Mapping[str, str]:
    """The document's names, and their values here."""
    return {"localhost:9092": broker.bootstrap, '"delay"': f'"{topics.create("headers")}"'}


def put(text: str, names: Mapping[str, str]) -> str:
    for written, meant in names.items():
        text = text.replace(written, meant)
    return text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="a JDK is needed to run Java's source")
def test_four_producers_send_the_same_message(names: Mapping[str, str], tmp_path: Path) -> None:
    """Python, Java, the bridge's command and Kafka's: equal key, value and headers, the time in whatever unit."""
    found = blocks()
    delay = names['"delay"'].strip('"')
    (python,), (java,), (line,) = found["python"], found["java"], found["text"]
    (tmp_path / "reminder.py").write_text(put(python, names))
    (tmp_path / "Reminder.java").write_text(put(java, names))
    ours, theirs = (shlex.split(body.replace("\\\n", " ")) for body in found["sh"][-2:])
    class_path = os.pathsep.join(str(jar) for jar in [*connector.jars(), *broker_jars()])
    theirs = [delay if word == "delay" else put(word, names) for word in theirs[1 : theirs.index("<")]]
    where = ["--delay-topic", delay, "--bootstrap", names["localhost:9092"]]
    config = ours.index("--config")
    run([sys.executable, str(tmp_path / "reminder.py")])
    run(["java", "-cp", class_path, str(tmp_path / "Reminder.java")])
    run([sys.executable, "-m", "bridge", "send", *where, *ours[2:config], *ours[config + 2 :]])
    run(["java", "-cp", class_path, "org.apache.kafka.tools.ConsoleProducer", *theirs], line)
    with TopicReader(names["localhost:9092"], [delay]) as reader:
        records = reader.wait_for(4, READ_S_MAX)
    assert {parse_duration((record.header(FOR) or b"").decode()) for record in records} == {15 * 60_000}
    for record in records:
        assert (record.key, record.value, record.header(TOPIC)) == (b"42", b"call back", b"reminders")
        assert len(record.headers) == 2


def run(command: list[str], text: str = "") -> None:
    """Raises AssertionError, with its output, if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=scaled(PROGRAM_S_MAX), check=False
    )
    assert done.returncode == 0, f"{command[:4]}: {done.stderr}"
