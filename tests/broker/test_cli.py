"""bridge.cli: what scripts rely on: output, exit status, one line for each failure."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import yaml
from typer.testing import CliRunner

import bridge
import bridge.runtime
from bridge.commands.cli import app
from bridge.errors import FencedError
from bridge.kafka.admin import Cluster
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.wire.letters import LetterChoice, RedriveReport
from dev.harness.kafka import TopicReader
from dev.harness.pace import scaled
from tests.docs.test_docs import blocks

CANARY = "canary-c0de"


class Broker(Protocol):
    """What these tests need of the fixture."""

    @property
    def bootstrap(self) -> str: ...


def invoke(
    *arguments: str, input: str | bytes | None = None, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    result = CliRunner().invoke(app, list(arguments), input=input, env=env)
    return result.exit_code, result.stdout, result.stderr


def write(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(json.dumps(tree))
    return str(path)


def test_config_prints_what_is_in_force_without_secrets_and_can_be_read_again(tmp_path: Path) -> None:
    """The output is a configuration: the same settings come out of it."""
    file = write(tmp_path / "a.yaml", {"bridge": {"id": "orders"}, "kafka": {"common": {"sasl.password": CANARY}}})
    status, out, _ = invoke("config", "--config", file, env={"DELAY_BRIDGE__HTTP__PORT": "1234"})
    assert status == 0
    assert CANARY not in out
    tree = yaml.safe_load(out)
    assert (tree["bridge"]["id"], tree["http"]["port"]) == ("orders", 1234)
    assert load(Path(write(tmp_path / "b.yaml", tree)), {}).masked() == tree


def test_a_configuration_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    """Nothing on standard output, no traceback."""
    file = write(tmp_path / "a.yaml", {"store": {"flush_byte": 1}})
    for command in ("run", "check", "config", "send", "cancel x", "redrive"):
        status, out, err = invoke(*command.split(), "--config", file)
        assert (status, out) == (2, "")
        assert err.startswith("delay-bridge: DB-2005 unknown key store.flush_byte")
        assert err.count("\n") == 1


def test_version_names_what_the_bridge_stands_on() -> None:
    """For bug reports."""
    status, out, _ = invoke("version")
    assert status == 0
    assert out.startswith(f"delay-bridge {bridge.__version__}\n")
    assert "pyspark 4" in out


def application(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Put `run` in the place of the composition root."""
    module = ModuleType("bridge.runtime.app")
    module.run_bridge = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bridge.runtime.app", module)
    monkeypatch.setattr(bridge.runtime, "app", module, raising=False)


def test_run_ends_with_0_after_a_graceful_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is given the settings; whatever else ends it is an error with a status of its own."""
    seen: list[object] = []
    application(monkeypatch, lambda settings, *_: seen.append(settings))
    assert invoke("run")[0] == 0
    assert isinstance(seen[0], Settings)


def test_an_error_of_the_application_is_one_line_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And free of secrets, whoever put them into the message."""

    def fenced(*_: object) -> int:
        raise FencedError(f"another instance took over\n{CANARY}", hint="nothing to do")

    application(monkeypatch, fenced)
    status, _, err = invoke(
        "run", "--config", write(tmp_path / "a.yaml", {"kafka": {"common": {"sasl.password": CANARY}}})
    )
    assert status == 5
    assert err == "delay-bridge: another instance took over ********. Nothing to do\n"


def test_an_unforeseen_error_is_reported_as_a_bug_in_one_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback is in the log, the line at the end."""

    def broken(*_: object) -> int:
        raise ZeroDivisionError("oops")

    application(monkeypatch, broken)
    status, _, err = invoke("run")
    assert status == 70
    assert err.splitlines()[-1].startswith("delay-bridge: DB-7001 unexpected ZeroDivisionError: oops. This is a bug")


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["x", "--to", "t"], "either at or after"),
        (["x", "--to", "t", "--after", "soon"], "--after"),
        (["x", "--to", "t", "--at", "tomorrow"], "--at"),
        (["x", "--to", "t", "--after", "1s", "--header", "nonsense"], "NAME=VALUE"),
        (["x", "--to", "t", "--after", "1s", "--header", "delay-id=x"], "delay-id"),
        (["x", "--to", "t", "--after", "15"], "write 15s, 15m or 15ms"),
        (["x", "--to", "t", "--every", "15"], "write 15s, 15m or 15ms"),
        (["x", "--topic", "t", "--after", "1s"], "target with --to"),
        (["x", "--file", "/nowhere", "--after", "1s"], "both"),
        (["--file", "/nowhere", "--to", "t", "--after", "1s"], "cannot read /nowhere"),
    ],
)
def test_send_refuses_what_the_bridge_would_reject(arguments: list[str], needle: str) -> None:
    """With status 2, before anything is sent."""
    status, _, err = invoke("send", "--bootstrap", "127.0.0.1:1", *arguments)
    assert status == 2
    assert needle in err


def test_send_asks_which_delay_topic_if_there_are_several(tmp_path: Path) -> None:
    """It does not guess."""
    file = write(tmp_path / "a.yaml", {"delay_topics": {"a": {}, "b": {}}})
    status, _, err = invoke("send", "x", "--to", "t", "--after", "1s", "--config", file)
    assert status == 2
    assert "--delay-topic" in err


@pytest.mark.fault("options that mean two things")
def test_both_redrives_count_before_they_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both commands count and ask first, or require --yes without a terminal; --dry-run only counts."""
    executed: list[bool] = []

    def put_back(_settings: Settings, _clock: object, _choice: LetterChoice, *, execute: bool) -> RedriveReport:
        executed.append(execute)
        return RedriveReport(back=Counter({("unknown-target", "orders"): 2}))

    monkeypatch.setattr("bridge.dead_letters.redrive.redrive_letters", put_back)
    assert invoke("redrive", "--dry-run")[0] == 0 and executed == [False]
    status, out, err = invoke("redrive")
    assert (status, executed) == (2, [False, False]) and "2 dead letters would go back" in out and "--yes" in err
    assert invoke("redrive", "--yes")[0] == 0 and executed[2:] == [True]


def test_redrive_understands_what_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as in `send`; and it names the error."""
    chosen: list[tuple[LetterChoice, bool]] = []

    def put_back(_settings: Settings, _clock: object, choice: LetterChoice, *, execute: bool) -> RedriveReport:
        chosen.append((choice, execute))
        return RedriveReport()

    monkeypatch.setattr("bridge.dead_letters.redrive.redrive_letters", put_back)
    since = ["--since", "2027-01-31T08:00:00+08:00", "--due", "now", "--set-header", "a=b=c", "--execute"]
    assert invoke("redrive", "--reason", "bad-for", "--target", "t", *since)[:2] == (0, "0 dead letters put back\n")
    headers = [("a", b"b=c")]
    expected = LetterChoice(
        reasons=["bad-for"], targets=["t"], since_ms=1_801_353_600_000, due_now=True, set_headers=headers
    )
    assert chosen == [(expected, True)]
    status, _, err = invoke("redrive", "--since", "yesterday")
    assert (status, "--since" in err) == (2, True)


def received(bootstrap: str, topic: str, count: int) -> list[tuple[bytes | None, bytes | None, dict[str, Any]]]:
    """Key, value and headers of the topic's records, when there are `count`."""
    with TopicReader(bootstrap, [topic]) as reader:
        return [(record.key, record.value, dict(record.headers)) for record in reader.wait_for(count, 30)]


@pytest.mark.system
def test_send_takes_the_message_from_argument_file_or_lines(broker: Broker, tmp_path: Path) -> None:
    """One message each, or one a line; a file byte for byte."""
    topic = f"delay-{uuid.uuid4().hex[:8]}"
    settings = Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}})
    cluster = Cluster(settings)
    cluster.create_topic(topic, partitions=1, replication=1, config={})
    cluster.await_topics([topic])
    (tmp_path / "f").write_bytes(b"\x00\xff\n")
    common = ["--bootstrap", broker.bootstrap, "--delay-topic", topic, "--to", "real", "--after", "1h30m"]
    one = invoke("send", "grün", "--key", "k", "--header", "a=b=c", "--id", "i", *common)
    assert one[0] == 0
    assert one[1:] == (f"{topic}/0/0\n", f"1 message sent to {topic}\n"), "where it is"
    assert invoke("send", "--file", str(tmp_path / "f"), *common)[0] == 0
    assert invoke("send", *common, input=b"x\ny z\r\n\n")[2] == f"3 messages sent to {topic}\n"
    records = received(broker.bootstrap, topic, 5)
    assert [value for _, value, _ in records] == ["grün".encode(), b"\x00\xff\n", b"x", b"y z", b""]
    assert records[0][0] == b"k"
    assert records[0][2] == {"a": b"b=c", "delay-for": b"5400000", "delay-topic": b"real", "delay-id": b"i"}


@pytest.mark.system
def test_commands_of_the_documents_work_as_pasted(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever README, docs/headers.md and docs/schedules.md have a shell send, beside the configuration that they name
    and without waiting for a bridge."""
    topic = f"delay-{uuid.uuid4().hex[:8]}"
    cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
    cluster.create_topic(topic, partitions=4, replication=1, config={})
    cluster.await_topics([topic])
    (text, *_) = blocks("yaml", ["README.md"])
    text = text.replace("localhost:9092", broker.bootstrap).replace("{delay: {}}", f"{{{topic}: {{}}}}")
    (tmp_path / "bridge.yaml").write_text(f"{text}http: {{api_port: 1}}\n")
    monkeypatch.chdir(tmp_path)
    lines = "".join(blocks("sh", ["README.md", "docs/headers.md", "docs/schedules.md"])).replace("\\\n", " ")
    sending = re.compile(r"delay-bridge (send|cancel|move|schedules (pause|resume|run-now|cancel)) (?!.*--wait)")
    pasted = [line.replace(" delay/", f" {topic}/") for line in lines.splitlines() if sending.match(line)]
    assert len(pasted) > 10
    for line in pasted:
        status, _, err = invoke(*shlex.split(line)[1:])
        assert status == 0, f"{line}: {err}"


@pytest.mark.system
def test_move_writes_the_new_time_beside_what_it_names(broker: Broker) -> None:
    """By id or by origin, with the topic of its answer; neither time nor name, or both of them, is refused."""
    topic = f"delay-{uuid.uuid4().hex[:8]}"
    cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
    cluster.create_topic(topic, partitions=3, replication=1, config={})
    cluster.await_topics([topic])
    common = ("--bootstrap", broker.bootstrap, "--topic", topic)
    moved = invoke("move", "order-42", "--key", "k", "--after", "0s", "--reply-to", "answers", *common)
    assert moved[0] == 0 and moved[2].startswith(f"move of order-42 sent to {topic}")
    assert invoke("move", "--origin", f"{topic}/2/5", "--at", "2027-01-31T08:00:00Z", *common)[0] == 0
    by_id = {"delay-move": b"order-42", "delay-for": b"0", "delay-reply-to": b"answers"}
    assert sorted(map(str, (headers for _, _, headers in received(broker.bootstrap, topic, 4)))) == [
        *[str(by_id | {"delay-copy-forwarded": b"client"})] * 3,
        str({"delay-move-origin": f"{topic}/2/5".encode(), "delay-until": b"1801382400000"}),
    ]
    for wrong in ([], ["a"], ["a", "--after", "1s", "--at", "2027-01-31T08:00:00Z"], ["--after", "1s"]):
        assert invoke("move", *wrong, *common)[0] == 2


@pytest.mark.fault("a cancel by a client with another partitioner")
def test_a_cancel_by_id_goes_to_every_partition(broker: Broker) -> None:
    """A cancel by id goes to every partition, since the partition of a key depends on the message's producer; none is
    forwarded. An origin names its partition."""
    topic = f"delay-{uuid.uuid4().hex[:8]}"
    cluster = Cluster(Settings.of({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}}))
    cluster.create_topic(topic, partitions=3, replication=1, config={})
    cluster.await_topics([topic])
    common = ["--bootstrap", broker.bootstrap, "--topic", topic]
    unknown = "not known whether such a message is pending; --wait 30s shows the outcome"
    sent = f"cancel of order-42 sent to {topic}; {unknown}\n"
    assert invoke("cancel", "order-42", "--key", "k", *common)[::2] == (0, sent)
    everywhere = {"delay-cancel": b"order-42", "delay-copy-forwarded": b"client"}
    with TopicReader(broker.bootstrap, [topic]) as reader:
        records = reader.wait_for(3, 30)
    assert sorted(record.partition for record in records) == [0, 1, 2]
    assert [(record.key, dict(record.headers)) for record in records] == [(b"k", everywhere)] * 3
    assert invoke("cancel", "order-42", *common)[0] == 0
    keyless = [headers for key, _, headers in received(broker.bootstrap, topic, 6) if key is None]
    assert keyless == [everywhere] * 3
    assert invoke("cancel", "--origin", f"{topic}/2/5", *common)[0] == 0
    named = [headers for _, _, headers in received(broker.bootstrap, topic, 7) if "delay-cancel-origin" in headers]
    assert named == [{"delay-cancel-origin": f"{topic}/2/5".encode()}]
    status, _, err = invoke("cancel", "--origin", f"{topic}/9/5", *common)
    assert status == 3 and "Correct the topic or the partition" in err
    for wrong in (["a", "--origin", f"{topic}/2/5"], [], ["--origin", "delay/5"], ["a", "--wait", "soon"]):
        assert invoke("cancel", *wrong, *common)[0] == 2
    status, _, err = invoke("cancel", "", *common)
    assert (status, "1 to 256 characters" in err) == (2, True)


@pytest.mark.system
def test_check_prints_a_line_for_each_finding_and_fails_if_one_does(broker: Broker, tmp_path: Path) -> None:
    """For eyes and for grep; warnings do not fail."""
    name = f"delay-{uuid.uuid4().hex[:8]}"
    tree: dict[str, Any] = {
        "kafka": {"common": {"bootstrap.servers": broker.bootstrap}},
        "delay_topics": {name: {}},
        "store": {"directory": str(tmp_path), "flush_bytes": "64KiB"},
    }
    status, out, _ = invoke("check", "--config", write(tmp_path / "a.yaml", tree))
    assert "ok      brokers: 1 broker at" in out
    assert f"warning delay topic {name}: does not exist" in out
    assert status == ("failed " in out)
    Cluster(Settings.of(tree)).create_topic(name, partitions=1, replication=1, config={})
    status, out, _ = invoke("check", "--config", write(tmp_path / "a.yaml", tree))
    assert status == 1
    assert f"failed  delay topic {name}: message.timestamp.type=CreateTime -> kafka-configs" in out


def test_the_module_can_be_run() -> None:
    """`python -m bridge` is `delay-bridge`, and starts without Spark, Arrow and NumPy in a moment."""
    script = "import sys, runpy; sys.argv = ['x', 'version']\ntry: runpy.run_module('bridge', run_name='__main__')\n"
    script += "finally: sys.stderr.write(str({'numpy', 'pyarrow', 'pyspark'} & {*sys.modules}))"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert ran.returncode == 0
    assert ran.stdout.startswith("delay-bridge ")
    assert ran.stderr.endswith("set()")
