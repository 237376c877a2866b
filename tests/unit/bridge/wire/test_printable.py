"""bridge.printable, and that every command's lines go through it."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path

import pytest
import structlog
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bridge.checks.finding import Finding
from bridge.commands import actions, cli
from bridge.errors import EnvironmentFailure
from bridge.settings.secrets import Redactor
from bridge.telemetry import logs
from bridge.wire.letters import RedriveReport
from bridge.wire.printable import printable
from tests.broker.test_cli import application, invoke

HOSTILE = "orders\x1b[2J\x1b]0;title\x07\r\nok      brokers: fine\x00\x9b31m\u202e\u2028\udcff [bold red]x[/] [1]"


@given(st.text())
def test_what_is_printed_is_one_line_of_plain_characters(text: str) -> None:
    """Whatever it was; and what was plain stays as it is."""
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_escapes_can_be_read() -> None:
    """They are Python's; a traceback keeps its lines."""
    assert printable("grün\x1b[2J\u202e\udcff") == "grün\\x1b[2J\\u202e\\udcff"
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_no_line_of_redrive_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons and targets come from headers."""
    report = RedriveReport()
    report.back[HOSTILE, HOSTILE] = 1
    report.broken["bad-target", HOSTILE] = 1
    monkeypatch.setattr("bridge.dead_letters.redrive.redrive_letters", lambda *_, **__: report)
    status, out, _ = invoke("redrive", "--dry-run")
    assert status == 0
    assert_harmless(out, 3)
    status, out, _ = invoke("redrive", "--yes")
    assert status == 0
    assert_harmless(out, 3)


def test_no_error_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message, fields and hint hold names and brokers' reasons."""

    def failing(*_: object) -> int:
        raise EnvironmentFailure(HOSTILE, hint=HOSTILE, topic=HOSTILE)

    application(monkeypatch, failing)
    status, _, err = invoke("run")
    assert status == 3
    assert_harmless(err, 1)


def test_no_bug_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its traceback."""

    def failing(*_: object) -> int:
        raise ZeroDivisionError("\x1b[2J\x9b31m\u202e")

    application(monkeypatch, failing)
    _, _, err = invoke("run")
    assert_harmless(err, len(err.splitlines()))


def test_no_finding_steers_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for grep, and as a table, where brackets are no markup."""
    findings = [Finding(name=HOSTILE, status="failed", detail=HOSTILE, remedy=HOSTILE)]
    cli._print_findings(findings, Redactor())
    assert_harmless(capsys.readouterr().out, 1)
    out = io.StringIO()
    monkeypatch.setattr(cli, "Console", lambda: Console(file=out, force_terminal=True, no_color=True, width=2_000))
    monkeypatch.setitem(cli.STYLES, "failed", "")
    cli._print_findings(findings, Redactor())
    text = out.getvalue()
    assert text.count("[bold red]x[/]") == 3
    assert "[2J" in text and "\x1b[2J" not in text
    assert not {"\x9b", "\u202e", "\u2028", "\x07", "\r", "\x00"} & set(text)


def test_no_question_steers_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it counts is an answer of the API."""
    monkeypatch.setattr(actions, "_is_terminal", lambda: True)

    def agreed(question: str, *, err: bool) -> bool:
        typer.echo(question, err=err)
        return True

    monkeypatch.setattr("typer.confirm", agreed)
    actions.confirm(HOSTILE)
    assert_harmless(capsys.readouterr().err, 1)


def test_no_log_line_steers_the_terminal() -> None:
    """Not by an event, a value, a list, an exception, nor from another library's logger."""
    out = io.StringIO()
    logs.configure(format="console", stream=out)
    log = structlog.get_logger("bridge.x")
    log.info(HOSTILE, topic=HOSTILE, topics=[HOSTILE], by={HOSTILE: HOSTILE})
    logging.getLogger("bridge.settings.librdkafka").warning("%s", HOSTILE)
    assert_harmless(out.getvalue(), 2)
    try:
        raise ValueError("\x1b[2J\x9b31m\u202e")
    except ValueError:
        log.exception("failed")
    assert_harmless(out.getvalue(), len(out.getvalue().splitlines()))
    assert "Traceback" in out.getvalue()


PRINTING = ("typer.echo", "put", "invocation.put", "typer.confirm", "print", "console.print")


def test_every_line_of_the_command_goes_through_few_places() -> None:
    """`typer.echo` stands in two places: `say` escapes its line, `put` writes what its callers have escaped, JSON in
    ASCII, or the operator's own configuration. Questions and cells of tables are escaped; `print` stands nowhere."""
    printing = {
        (ast.unparse(node), f"{module.stem}.{function.name}")
        for module in Path(cli.__file__).parent.glob("*.py")
        for function in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in PRINTING
    }
    assert printing == {
        ("typer.confirm", "actions.confirm"),
        *(("typer.echo", place) for place in ("invocation.say", "invocation.put")),
        *(
            ("put", place)
            for place in ("invocation.say", "cli.show_config", "pending._print_json", "pending.print_rows")
        ),
        *(("console.print", place) for place in ("cli._print_findings", "pending.print_rows")),
    }


def assert_harmless(text: str, lines: int) -> None:
    """There are this many lines, each of printable characters only."""
    assert text.endswith("\n")
    shown = text[:-1].split("\n")
    assert len(shown) == lines, text
    assert all(line.replace("\t", "").isprintable() for line in shown), [
        line for line in shown if not line.isprintable()
    ]
