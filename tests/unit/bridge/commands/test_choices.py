"""Commands by which an operator decides about a place in a delay topic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bridge.commands import cli
from bridge.delivery.doubt.doubt_file import DoubtFile
from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.choices import ABORTED, BATCHES, COMMITTED, ENDS, SKIPPED, Choices
from bridge.json_file import JsonFile
from tests.unit.bridge.delivery.doubt.entries import doubt

NAME, OFFSET = ("delay", 3), 1234
TOPIC_IDS = {"delay": "wV3kX-kSRQ_5tPyRWzJ0Kw"}
COMMANDS = [
    (BATCHES, SKIPPED, ["skip-batch", "delay/3/1234"], "the batch at offset 1234 will count as skipped"),
    (ENDS, ABORTED, ["resolve", "delay/3/1234", "--as", "aborted"], "at offset 1234 will count as aborted"),
    (ENDS, COMMITTED, ["resolve", "delay/3/1234", "--as", "committed"], "will count as committed"),
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a bridge that has messages in doubt."""
    monkeypatch.setattr(cli, "_topic_id", lambda _, name: TOPIC_IDS[name])
    path = tmp_path / "bridge.yaml"
    path.write_text(
        f"bridge: {{id: orders}}\nkafka: {{common: {{bootstrap.servers: '127.0.0.1:1'}}}}\n"
        f"delay_topics: {{delay: {{}}}}\nstore: {{directory: {tmp_path}}}\n"
    )
    DoubtFile(tmp_path).write({NAME: doubt({OFFSET: (OFFSET, 0, False)})})
    return path


@pytest.mark.parametrize(("file", "word", "command", "said"), COMMANDS)
def test_a_choice_is_in_the_file_that_the_bridge_looks_at(
    config: Path, file: str, word: str, command: list[str], said: str
) -> None:
    """The bridge follows it once; the same place may be in question again. The last choice counts."""
    Choices(config.parent, ENDS).add(NAME, OFFSET, ABORTED if word == COMMITTED else COMMITTED)
    result = CliRunner().invoke(cli.app, [*command, "--config", str(config)])
    assert said in result.output and result.exit_code == 0, result.output
    choices = Choices(config.parent, file)
    name = (TOPIC_IDS["delay"], 3) if file == BATCHES else NAME
    assert choices.all() == {(name, OFFSET): word}
    assert choices.take([("delay", 2)]) == {} and choices.take([name]) == {(name, OFFSET): word}
    assert not choices.all()


@pytest.mark.fault("an operator's choice while the bridge takes an earlier one")
def test_no_choice_is_lost_between_two_writers(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two writers is refused at once, and repeats the command; it waits for nobody."""
    choices, write, other = Choices(config.parent, ENDS), JsonFile.write, ("delay", 4)
    choices.add(NAME, OFFSET, ABORTED)

    def interrupted(file: JsonFile, value: dict[str, Any]) -> None:
        monkeypatch.setattr(JsonFile, "write", write)
        with pytest.raises(EnvironmentFailure) as raised:
            Choices(config.parent, ENDS).add(other, 7, COMMITTED)
        assert raised.value.code == "DB-3062"
        write(file, value)

    monkeypatch.setattr(JsonFile, "write", interrupted)
    assert choices.take([NAME]) == {(NAME, OFFSET): ABORTED} and not choices.all()
    assert choices.add(other, 7, COMMITTED) and choices.all() == {(other, 7): COMMITTED}


@pytest.mark.parametrize(
    ("place", "code", "status"),
    [("other/3/1234", "DB-1001", 2), ("delay/3/1235", "DB-1024", 3), ("delay/2/1234", "DB-1024", 3)],
)
def test_only_places_in_doubt_are_chosen(config: Path, place: str, code: str, status: int) -> None:
    """A misspelt place, and one that another instance holds, are told, and nothing is written."""
    result = CliRunner().invoke(cli.app, ["resolve", place, "--as", "aborted", "--config", str(config)])
    assert (result.exit_code, code in result.output) == (status, True), result.output
    assert not (config.parent / ENDS).exists()
