"""Commands by which an operator decides about a place in a delay topic."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bridge.commands import cli
from bridge.ingest.batches.choices import ABORTED, COMMITTED, SKIPPED, Choices

PLACE = ("delay", 3), 1234
COMMANDS = [
    (SKIPPED, ["skip-batch", "delay/3/1234"], "the batch at offset 1234 is to be skipped"),
    (ABORTED, ["resolve", "delay/3/1234", "--as", "aborted"], "what is in doubt at offset 1234 is to be aborted"),
    (COMMITTED, ["resolve", "delay/3/1234", "--as", "committed"], "is to be committed"),
]


@pytest.mark.parametrize(("file", "command", "said"), COMMANDS)
def test_a_choice_is_in_the_file_that_the_bridge_looks_at(
    tmp_path: Path, file: str, command: list[str], said: str
) -> None:
    """The bridge follows it once; the same place may be in question again."""
    settings = {
        "bridge": {"id": "orders"},
        "kafka": {"common": {"bootstrap.servers": "127.0.0.1:1"}},
        "delay_topics": {"delay": {}},
        "store": {"directory": str(tmp_path)},
    }
    config = tmp_path / "bridge.yaml"
    config.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(cli.app, [*command, "--config", str(config)])
    assert said in result.output and result.exit_code == 0, result.output
    choices = Choices(tmp_path, file)
    assert choices.has(*PLACE) and choices.follow(*PLACE)
    assert not choices.has(*PLACE) and not choices.follow(*PLACE)
    assert not Choices(tmp_path, SKIPPED if file != SKIPPED else ABORTED).has(*PLACE)


def test_only_places_of_delay_topics_are_chosen(tmp_path: Path) -> None:
    """A misspelt name is told, and nothing is written."""
    config = tmp_path / "bridge.yaml"
    config.write_text(
        f"bridge: {{id: orders}}\nkafka: {{common: {{bootstrap.servers: 'x:1'}}}}\n"
        f"delay_topics: {{delay: {{}}}}\nstore: {{directory: {tmp_path}}}\n"
    )
    result = CliRunner().invoke(cli.app, ["resolve", "other/3/1234", "--as", "aborted", "--config", str(config)])
    assert result.exit_code == 2 and "DB-1001" in result.output and not (tmp_path / ABORTED).exists()
