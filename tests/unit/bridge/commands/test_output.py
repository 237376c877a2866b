"""bridge.commands: what the command line prints, and how it ends where it cannot print, or reaches nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bridge.checks.finding import Finding
from bridge.commands import cli
from bridge.commands.pending import print_rows
from bridge.kafka.reach import refuse_unreachable
from bridge.settings.secrets import Redactor


@pytest.mark.fault("output that nobody reads, or that a full disk does not take")
@pytest.mark.parametrize("command", ["config", "--help"])
def test_output_that_cannot_be_written_ends_in_a_line(command: str, tmp_path: Path) -> None:
    """A closed pipe ends the command quietly with status 1, a full disk with one line and status 3: no traceback."""
    file = tmp_path / "b.yaml"
    file.write_text(
        json.dumps(
            {"kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}}, "store": {"directory": str(tmp_path / "data")}}
        )
    )
    words = [
        sys.executable,
        "-m",
        "bridge",
        command,
        *(["--config", str(file)] if command == "config" else []),
    ]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1), ran.stderr
    assert ran.stderr.startswith("delay-bridge: DB-1081 the output cannot be written")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (1, "")


RUNS = """
import sys, types, structlog
tells = lambda *_: [structlog.get_logger("a").info("event") for _ in range(3)]
sys.modules["bridge.runtime.app"] = types.SimpleNamespace(run_bridge=tells)
from bridge.commands.cli import main
sys.argv = ["delay-bridge", "run"]
main()
"""


@pytest.mark.fault("a log that nobody reads any more")
@pytest.mark.parametrize("is_pipe", [False, True])
def test_the_bridge_does_not_end_by_its_log(*, is_pipe: bool) -> None:
    """With a closed output the bridge ends with its own status, without a traceback for each line."""
    words = [sys.executable, "-c", RUNS] if is_pipe else ["sh", "-c", f"{sys.executable} -c '{RUNS}' >&-"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (0, "")


@pytest.mark.fault("a wrong address of the brokers")
@pytest.mark.parametrize(
    "words", [["send", "x", "--to", "t", "--after", "1h"], ["send", "x", "--to", "t", "--after", "1h", "--wait", "1h"],
              ["cancel", "x"], ["move", "x", "--after", "1s", "--wait", "1h"]]
)  # fmt: skip
def test_a_wrong_broker_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 3, without a minute of attempts or the client's own lines."""
    result = CliRunner().invoke(cli.app, [*words, "--bootstrap", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert result.stderr.startswith("delay-bridge: DB-3080 cannot reach the brokers: none accepts a connection")
    assert result.stderr.count("\n") == 1 and "rdkafka" not in capfd.readouterr().err


def test_why_no_broker_can_be_reached_is_said() -> None:
    """Each reason once; names that mean nothing, and ports that are none."""
    with pytest.raises(Exception, match=r"reason=.*(refused|invalid)") as caught:
        refuse_unreachable("127.0.0.1:1, [::1]:1,127.0.0.1:x,no-such-host.invalid:1")
    assert "Name" in str(caught.value) or "known" in str(caught.value)


def narrow(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(f"{module}.Console", lambda: Console(width=80, force_terminal=True, color_system=None))


def test_a_remedy_stands_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, however narrow the terminal, so that it can be copied."""
    narrow(monkeypatch, "bridge.commands.cli")
    remedy = (
        "kafka-configs --bootstrap-server localhost:9092 --alter --entity-type topics --entity-name a.rather.long.one"
    )
    finding = Finding(name="delay topic a", status="failed", detail="x" * 100, remedy=remedy)
    cli._print_findings([finding], Redactor())
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == [f"failed  delay topic a: {'x' * 100}", remedy]


def test_names_are_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that is wider than the terminal becomes a block for each row."""
    narrow(monkeypatch, "bridge.commands.pending")
    row = ["orders.of.a.department", "a detail with a few words, which is longer than the terminal is wide, by some"]
    print_rows(["name", "detail"], [row, ["payments", ""]])
    out = capsys.readouterr().out
    assert f"name             {row[0]}\n" in out and row[1] in out and "name             payments\n" in out
    print_rows(["name", "detail"], [["orders", "short"]])
    assert "│ orders │ short  │" in capsys.readouterr().out


CRASHES = """
import atexit, os, sys
class Crash:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 11)
sys.kept = Crash()
atexit.register(print, "hooks run", flush=True)
from bridge.commands.cli import main
sys.argv = ["delay-bridge", "config", "--config", "/none"]
main()
"""


@pytest.mark.fault("a client's thread that crashes at the end of a failed process")
def test_a_failure_keeps_its_status_when_the_teardown_would_crash() -> None:
    """The line, the hooks of the end, and the failure's own exit status."""
    ran = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "hooks run\n", 1), ran.stderr
    assert ran.stderr.startswith("delay-bridge: DB-2001")
