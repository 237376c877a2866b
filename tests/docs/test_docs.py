"""The documents agree with the code: commands, options, keys, headers, metrics, names and links in them exist.

The language of a block decides how it is checked: `sh` is parsed command by command, `yaml` loaded as a configuration,
`python` run with a producer that only remembers, `text` not at all.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest
import typer.main
from pydantic import BaseModel

import bridge.client
from bridge import errors
from bridge.commands import cli
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from tests.packaging.config.exposed import exposed
from tests.paths import ROOT

DOCUMENTS: Final = (
    *("README.md", "CHANGELOG.md", "docs/architecture.md", "docs/brokers.md", "docs/errors.md", "docs/guarantees.md"),
    *("docs/failures.md", "docs/glossary.md", "docs/headers.md", "docs/messages.md", "docs/operations.md"),
    *("docs/decisions.md", "docs/dialects.md", "docs/schedules.md", "CONTRIBUTING.md", "SECURITY.md"),
)
ALL: Final = (*DOCUMENTS, "docs/api.md", "docs/page.md", "helm/delay-bridge/README.md")
"""With the documents whose examples are not the bridge's commands and settings, but the chart's, or requests."""
LANGUAGES: Final = {"sh", "yaml", "python", "java", "text", "mermaid"}
OTHERS: Final = {
    "docker",
    "kafka-acls",
    "kafka-configs",
    "kafka-console-producer",
    "kafka-consumer-groups",
    "kafka-topics",
    "kubectl",
    "source",
}  # commands of other programs
COMMAND: Final[Any] = typer.main.get_command(cli.app)  # Any: typer does not say which click it is made of

SUFFIXES: Final = {"md", "py", "yaml"}
OF_TOPICS: Final = {"retention.ms", "retention.bytes"}
"""Settings of Kafka's topics, not of the bridge's section."""

FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`([^`\n]+)`")
LINK: Final = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(language: str, documents: Sequence[str] = DOCUMENTS) -> list[str]:
    """The fenced blocks of a language in all documents."""
    return [body for d in documents for found, body in FENCE.findall(text_of(d)) if found == language]


def spans() -> Iterator[tuple[str, str]]:
    """Document and text of everything that is set as code within a sentence or a table."""
    for document in DOCUMENTS:
        for span in CODE.findall(FENCE.sub("", text_of(document))):
            yield document, span


def commands() -> list[list[str]]:
    """The words of every command in the `sh` blocks."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments in front of a command, and the command."""
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def parse(words: Sequence[str], group: Any = COMMAND, parent: Any = None) -> None:
    """Let the command line read `delay-bridge ...` without running it. Raises for unknown words."""
    with group.make_context("delay-bridge", [words[0]], parent=parent, resilient_parsing=True) as context:
        command = group.get_command(context, words[0])
        assert command is not None, f"there is no command {words[0]}"
        is_group = hasattr(command, "commands") and not (len(words) > 1 and words[1].startswith("-"))
        if is_group and len(words) > 1:
            parse(words[1:], command, context)
        elif not is_group:
            command.make_context(words[0], list(words[1:]), parent=context).close()


def table(document: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, as lists of cells."""
    below = re.split(rf"^#+ {re.escape(heading)}$", text_of(document), flags=re.MULTILINE)[1]
    found = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", below, re.MULTILINE)
    assert found is not None, f"no table below {heading} in {document}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_what_it_is(document: str) -> None:
    """Every block has a language, by which it is checked."""
    assert text_of(document).count("```") == 2 * len(FENCE.findall(text_of(document))), "a fence is not closed"
    assert {language for language, _ in FENCE.findall(text_of(document))} <= LANGUAGES


def test_the_two_commands_for_a_fresh_machine_come_first() -> None:
    """`make demo` and `make test`, and nothing before them."""
    assert blocks("sh", ["README.md"])[0].splitlines() == ["make demo", "make test"]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_exists_with_its_options(words: list[str]) -> None:
    """The bridge's commands are parsed by its command line, make's targets by make; of others the name is checked."""
    variables, (program, *arguments) = environment(words)
    load(None, variables)
    if program == "delay-bridge":
        parse(arguments)
    elif program == "make":
        dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
    elif program == "curl":
        (address,) = (word for word in arguments if not word.startswith("-"))
        assert address.partition("/")[2] in {"livez", "readyz", "metrics"}
    else:
        assert program in OTHERS, f"unknown program {program}"


@pytest.mark.parametrize("body", blocks("yaml"))
def test_a_configuration_can_be_loaded(body: str, tmp_path: Path) -> None:
    """Every key in it exists, and every value is accepted."""
    path = tmp_path / "bridge.yaml"
    path.write_text(body, encoding="utf-8")
    load(path, {"KAFKA_PASSWORD": "secret"})


class RememberingProducer:
    """Takes a Producer's calls, and keeps the records."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        assert config["bootstrap.servers"]
        self.records: list[tuple[str, bytes, bytes, dict[str, bytes]]] = []
        self.is_flushed = False
        made.append(self)

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        *_partition_and_callback: object,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        self.records.append((topic, value, key, dict(headers)))

    def poll(self, _timeout_s: float) -> int:
        return 0

    def flush(self, _timeout_s: float = -1) -> int:
        self.is_flushed = True
        return 0


made: list[RememberingProducer] = []


def test_the_producers_examples_run_and_send_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example with the client and the one without it send the same record, as the bridge reads it."""
    made.clear()
    monkeypatch.setattr(confluent_kafka, "Producer", RememberingProducer)
    monkeypatch.setattr(bridge.client, "Producer", RememberingProducer)
    for body in blocks("python", ["README.md"]):
        exec(compile(body, "README.md", "exec"), {})
    sent = [record for producer in made for record in producer.records]
    assert len(made) == 2 and all(producer.is_flushed for producer in made)
    meanings = {
        (topic, value, key, headers[h.TOPIC], h.parse_duration(headers[h.FOR].decode()), len(headers))
        for topic, value, key, headers in sent
    }
    assert len(sent) == 2 and len(meanings) == 1, sent


def test_the_shells_example_sends_the_same_as_pythons() -> None:
    """The first `delay-bridge send` in the README is the message of the Python examples."""
    first = next(words for words in commands() if words[:2] == ["delay-bridge", "send"])
    assert {"--to", "reminders", "--key", "42", "call back"} <= set(first)
    assert h.parse_duration(first[first.index("--after") + 1]) == 15 * 60_000


# --- names -----------------------------------------------------------------------------------------------------------


def test_commands_within_sentences_exist() -> None:
    """`delay-bridge x --y` and `make x`, wherever they are mentioned."""
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    for document, span in spans():
        words = span.split()
        if words[0] == "delay-bridge" and len(words) > 1:
            parse(words[1:])
        elif words[0] == "make" and len(words) > 1:
            assert words[1] in targets, f"{document}: {span}"


def test_commands_within_remedies_exist() -> None:
    """What an error tells the operator to type can be typed."""
    sources = sorted((ROOT / "bridge").glob("**/*.py"))
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in sources]
    named = {(name, command) for name, text in texts for command in re.findall(r"`delay-bridge ([a-z-]+)", text)}
    assert named
    unknown = {(source, name) for source, name in named if name not in COMMAND.commands}
    assert not unknown, unknown


def test_keys_of_the_configuration_exist() -> None:
    """Each `section.key` is one of the settings, and the README's overview has every section."""
    for document, span in spans():
        section, _, rest = span.partition(".")
        if (
            span not in OF_TOPICS
            and section in Settings.model_fields
            and re.fullmatch(r"[a-z_]+", rest)
            and rest not in SUFFIXES
        ):
            keys = Settings.model_fields[section].annotation
            assert isinstance(keys, type) and issubclass(keys, BaseModel), f"{document}: {span}"
            assert rest in keys.model_fields, f"{document}: {span}"
    listed = {name for row in table("README.md", "Configuration") for name in CODE.findall(row[0])}
    assert listed == set(Settings.model_fields)


def test_headers_exist_and_all_are_listed() -> None:
    """Each `delay-...` header is one that is read or written, and the README's tables have all that users meet."""
    known = {value for name, value in vars(h).items() if name.isupper() and isinstance(value, str)}
    others = {"delay-bridge", *map(str, RejectReason)}
    for document, span in spans():
        name = span.split(":")[0]
        if re.fullmatch(r"delay-[a-z-]+", name) and name not in others:
            assert name in known, f"{document}: {span}"
    listed = {name for row in table("README.md", "Headers") for name in CODE.findall(row[0])}
    assert listed == set(h.REQUEST)
    assert {span for _, span in spans()} >= set(h.DELIVERED) | {h.REASON, h.REASON_DETAIL}


def test_metrics_exist() -> None:
    """Each `delay_bridge_...` is exposed under this name."""
    mentioned = {span for _, span in spans() if span.startswith("delay_bridge_")}
    assert mentioned and mentioned <= exposed(), mentioned - exposed()


def test_reasons_of_dead_letters_are_all_listed_in_their_order() -> None:
    """The table has each reason that a dead letter can have, in the order of the enumeration."""
    listed = [CODE.findall(row[0])[0] for row in table("docs/errors.md", "Reasons of dead letters")]
    assert listed == [str(reason) for reason in RejectReason]


def test_exit_statuses_are_those_of_the_errors() -> None:
    """The table has each class of error with its status."""
    classes = {leaf.__name__: leaf.exit_code for leaf in errors.BridgeError.__subclasses__()}
    rows = table("docs/errors.md", "Exit status")
    assert {CODE.findall(row[1])[0]: int(row[0]) for row in rows} == classes


def test_files_modules_and_tests_exist() -> None:
    """Each `a/b.py`, `a/b.py::test` and dotted name of ours is there."""
    for document, span in spans():
        path, _, test = span.partition("::")
        if re.fullmatch(r"[\w./-]+\.(py|yaml|md)", path) and "/" in path:
            assert (ROOT / path).is_file(), f"{document}: {span}"
            if test:
                assert re.search(rf"^(def|class) {test}\b", text_of(path), re.MULTILINE), f"{document}: {span}"
        elif span.startswith("bridge.client."):
            assert hasattr(bridge.client, span.rpartition(".")[2]), f"{document}: {span}"


# --- links and manners -----------------------------------------------------------------------------------------------


def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as Git hosts make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ALL)
def test_links_resolve(document: str) -> None:
    """Relative links lead to a file of the repository, and to a heading that it has."""
    for link in LINK.findall(FENCE.sub("", text_of(document))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{document}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_are_of_no_machine(document: str) -> None:
    """No absolute paths, and no addresses but localhost."""
    text = text_of(document)
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|usr|opt)/", text)
    assert not re.findall(r"https?://(?!localhost)\S+", text)


@pytest.mark.parametrize("document", ALL)
def test_a_table_is_one_block(document: str) -> None:
    """A blank line ends a table: rows behind it would be shown as plain text."""
    lines = re.sub(FENCE, "", text_of(document)).splitlines()
    starts = (i for i, line in enumerate(lines) if line[:1] == "|" and lines[i - 1][:1] != "|")
    assert not [lines[i] for i in starts if not re.fullmatch(r"\|[-| ]+\|", lines[i + 1])]


@pytest.mark.parametrize("document", ALL)
def test_lines_fit_a_screen(document: str) -> None:
    """Except for tables, names of tests and the chart's templates."""
    lines = (line for line in text_of(document).splitlines() if len(line) > 120)
    assert not [line for line in lines if line[:1] != "|" and line[:8] != "- `tests" and "{{" not in line]
