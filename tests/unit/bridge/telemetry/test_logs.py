"""bridge.logs: one line per event, without payloads and secrets."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
import structlog

from bridge.settings.secrets import MASK, Redactor
from bridge.telemetry import logs

CANARY = "canary-51d0"


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_have_time_level_logger_event_and_values() -> None:
    """One object per line, from our loggers and from other libraries' alike."""
    out = io.StringIO()
    logs.configure(format="json", stream=out)
    structlog.get_logger("bridge.x").info("segment_written", rows=3)
    logging.getLogger("other").warning("from %s", "elsewhere")
    first, second = written(out)
    assert {k: first[k] for k in ("event", "level", "logger", "rows")} == {
        "event": "segment_written",
        "level": "info",
        "logger": "bridge.x",
        "rows": 3,
    }
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"]) == ("from elsewhere", "warning")


def test_a_client_without_brokers_is_logged_now_and_then() -> None:
    """Twenty lines a second say no more than one in ten; other lines of it, and of other clients, are not held back."""
    out = io.StringIO()
    logs.configure(format="json", stream=out)
    client = logging.getLogger(logs.CLIENT_LOGGER)
    for second in (0, 1, 2, 11):
        for line in (
            "FAIL [a#consumer-1] [thrd:x]: refused",
            "FAIL [a#producer-2] [thrd:y]: refused",
            "GETPID [a#producer-2] no",
        ):
            record = client.makeRecord(client.name, logging.ERROR, "", 0, line, (), None)
            record.created = 1_800_000_000.0 + second
            client.handle(record)
    events = [line["event"] for line in written(out)]
    assert events.count("GETPID [a#producer-2] no") == 4
    assert [event for event in events if "consumer" in event] == [
        "FAIL [a#consumer-1] [thrd:x]: refused",
        "FAIL [a#consumer-1] [thrd:x]: refused (2 more left out)",
    ]
    assert sum("FAIL [a#producer-2]" in event for event in events) == 2


@pytest.mark.fault("a JVM that prints without end")
def test_output_of_the_jvm_is_rationed() -> None:
    """The first lines of each period are logged, and the others are counted."""
    out, most = io.StringIO(), logs.RATIONS["jvm-output"]
    logs.configure(format="json", stream=out)
    rations, event = logs.Rations(), {"event": "jvm-output"}
    for number in range(total := 2 * most + 1):
        record = logging.makeLogRecord({"msg": {**event, "line": number}, "levelno": logging.ERROR})
        record.created = 1_000.0 + (0 if number < total - 1 else logs.RATION_S)
        if rations.filter(record):
            out.write(json.dumps(record.msg) + "\n")
    lines = written(out)
    assert len(lines) == most + 1 and lines[-1]["left_out"] == most


def test_a_call_that_the_end_of_java_cuts_off_is_told_where_it_is_raised() -> None:
    """And not by a traceback of py4j's, which logs as if it were the program."""
    out = io.StringIO()
    logs.configure(format="json", stream=out)
    for path in ("/lib/py4j/java_gateway.py", "/lib/another/module.py"):
        record = {"name": "root", "levelno": logging.INFO, "levelname": "INFO", "msg": "cut off", "pathname": path}
        logging.getLogger().handle(logging.makeLogRecord(record))
    assert out.getvalue().count("cut off") == 1


def test_auto_is_json_where_there_is_no_terminal() -> None:
    """In a container a machine reads it."""
    out = io.StringIO()
    logs.configure(stream=out)
    structlog.get_logger("bridge.x").info("ready")
    assert written(out)[0]["event"] == "ready"


def test_the_level_is_a_threshold() -> None:
    """Debug costs nothing unless it is asked for."""
    out = io.StringIO()
    logs.configure(format="json", level="warning", stream=out)
    structlog.get_logger("bridge.x").info("no")
    structlog.get_logger("bridge.x").warning("yes")
    assert [line["event"] for line in written(out)] == ["yes"]


@pytest.mark.parametrize("format", ["json", "console"])
def test_secrets_and_payloads_never_appear(format: str) -> None:
    """Not by key, not inside a text, not nested, not in an exception, not as bytes."""
    out = io.StringIO()
    logs.configure(format=format, stream=out, redact=Redactor([CANARY]))
    log = structlog.get_logger("bridge.x")
    log.info("a", password="pw-" + CANARY, text=f"login with {CANARY} failed", nested={"deep": [CANARY], "token": "t0"})
    log.info("b", value=f"body {CANARY}", raw=CANARY.encode(), headers=[("h", b"x")], error=ValueError(CANARY))
    log.info(CANARY)
    try:
        raise RuntimeError(f"refused {CANARY}")
    except RuntimeError:
        log.exception("c")
    logging.getLogger("lib").error("conf %s", {"sasl.password": CANARY})
    text = out.getvalue()
    assert CANARY not in text
    assert "t0" not in text
    assert "RuntimeError" in text
    assert MASK in text


def test_an_exception_stays_in_one_json_line() -> None:
    """A traceback must not tear the stream apart."""
    out = io.StringIO()
    logs.configure(format="json", stream=out)
    try:
        raise ValueError("x")
    except ValueError:
        structlog.get_logger("bridge.x").exception("failed")
    assert "ValueError" in written(out)[0]["exception"]


@pytest.mark.fault("log lines by producers")
@pytest.mark.parametrize("event", sorted(logs.RATIONS))
def test_what_records_cause_is_a_few_lines_and_a_number(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand records with the same log line cause a few lines, and a later one has the number of the others; all
    other events are logged."""
    out, now_s = io.StringIO(), [1_800_000_000.0]
    logs.configure(format="json", stream=out)
    monkeypatch.setattr("logging.time.time", lambda: now_s[0])
    monkeypatch.setattr("logging.time.time_ns", lambda: int(now_s[0] * 1e9), raising=False)
    for number in range(1_000):
        structlog.get_logger("bridge.x").warning(event, number=number)
    structlog.get_logger("bridge.x").warning("another")
    now_s[0] += logs.RATION_S
    structlog.get_logger("bridge.x").warning(event, number=1_000)
    lines = written(out)
    assert [line["event"] for line in lines] == [event] * logs.RATIONS[event] + ["another", event]
    assert lines[-1]["left_out"] == 1_000 - logs.RATIONS[event]
