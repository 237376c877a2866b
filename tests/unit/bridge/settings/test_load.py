"""bridge.settings.load: a text stays as it is written, or is refused with its key and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.errors import ConfigurationError
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.settings.secrets import unmasked

TEXTS: Final = {
    "bridge.id": "bridge: {{id: {}}}",
    "bridge.instance": "bridge: {{instance: {}}}",
    "delay_topics.d.target": "delay_topics: {{d: {{target: {}}}}}",
    "delay_topics.d.dead_letter": "delay_topics: {{d: {{dead_letter: {}}}}}",
    "targets.allow": "targets: {{allow: [{}]}}",
    "targets.deny": "targets: {{deny: [{}]}}",
    "store.directory": "store: {{directory: {}}}",
    "spark.master": "spark: {{master: {}, executor_host: h}}",
    "spark.executor_host": "spark: {{executor_host: {}}}",
    "http.host": "http: {{host: {}}}",
    "http.user": "http: {{user: {}, password_file: p}}",
    "http.password_file": "http: {{user: u, password_file: {}}}",
    "http.token_file": "http: {{token_file: {}}}",
    "http.certificate_file": "http: {{certificate_file: {}, key_file: k}}",
    "http.key_file": "http: {{certificate_file: c, key_file: {}}}",
    "kafka.common.client.id": "kafka: {{common: {{client.id: {}}}}}",
    "kafka.common.sasl.password": "kafka: {{common: {{sasl.password: {}}}}}",
    "kafka.consumer.client.rack": "kafka: {{consumer: {{client.rack: {}}}}}",
    "kafka.producer.sasl.username": "kafka: {{producer: {{sasl.username: {}}}}}",
    "spark.conf.spark.app.name": "spark: {{conf: {{spark.app.name: {}}}}}",
}
"""A file for each kind of text setting."""
YAML_1_1: Final = st.one_of(
    *(
        st.from_regex(pattern, fullmatch=True)
        for resolvers in yaml.SafeLoader.yaml_implicit_resolvers.values()
        for _, pattern in resolvers
    )
).filter(lambda text: text.isascii() and text.isprintable() and text == text.strip() and text not in ("!", "&", "*"))
"""Plain scalars that YAML 1.1 takes for something else than their text."""


def value_of(loaded: Settings, path: str) -> str | None:
    """The text that a setting has."""
    section, key, *rest = path.split(".")
    found = getattr(getattr(loaded, section), key) if section != "delay_topics" else loaded.delay_topics[key]
    if rest and isinstance(found, dict):
        return unmasked(found[".".join(rest)])
    found = getattr(found, rest[0]) if rest else found
    found = next(iter(found), None) if isinstance(found, list) else found
    return None if found is None else str(found)


@pytest.mark.fault("a text that YAML takes for a number, a date or a truth value")
@pytest.mark.parametrize("path", TEXTS)
@settings(max_examples=30)
@given(text=YAML_1_1)
@example(text="no")
@example(text="ON")
@example(text="1e3")
@example(text="1_000")
@example(text="010")
@example(text="0x1F")
@example(text="12:30:45")
@example(text="2027-01-31")
@example(text="2027-02-30")
@example(text=".inf")
@example(text="~")
@example(text="null")
@example(text="=")
@example(text="9" * 5_000)
def test_a_text_stays_as_it_is_written_or_is_refused(
    path: str, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A text is taken literally, against YAML 1.1; only an empty value, `~` and `null` mean none, if the setting allows
    that."""
    file = tmp_path_factory.getbasetemp() / "text.yaml"
    file.write_text(TEXTS[path].format(text))
    try:
        loaded = load(file, {})
    except ConfigurationError as error:
        said = str(error)
        assert path.rsplit(".", 1)[0] in said
        return
    found = value_of(loaded, path)
    if text.lower() in ("~", "null", ""):
        assert found is None or path.endswith("dead_letter"), "only what may be none is none"
    else:
        assert found == (str(Path(text)) if path.endswith(("_file", "directory")) else text)


def refused(tmp_path: Path, text: str | bytes, env: dict[str, str] | None = None) -> str:
    """The line of a configuration that is refused."""
    file = tmp_path / "b.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        load(file, {f"DELAY_BRIDGE__{name}": value for name, value in (env or {}).items()})
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


@pytest.mark.fault("YAML that PyYAML fails on in ways of its own")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{[a]: b}", "a key is not a text at line 1, column 2"),
        ("? {a: b}\n: c", "a key is not a text at line 1"),
        ("~: x", "a key is not a text at line 1"),
        ("&a [*a]", "nesting or repetition"),
        ("a: &b {c: *b}", "nesting or repetition"),
        ("http: {host: !!python/object:os.system x}", "the tag !!python/object:os.system is not supported at line 1"),
        ("http: {host: !!binary YQ==}", "the tag !!binary is not supported at line 1"),
        ('http: {host: "\\UFFFFFFFF"}', "cannot be read"),
        ("[" * 5_000, "cannot be read"),
        ("http: {port: 1}\n---\nhttp: {port: 2}", "another document at line 2"),
        ("<<: [1]", "<< merges mappings only"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [" + "*b, " * 40_000 + "]", "nesting or repetition"),
        (b"bridge: {id: \xff}", "is not UTF-8"),
        ("http: {port: 2027-99-99}", "http.port: is not a whole number (line 1 of "),
        (f"http: {{port: {'9' * 5_000}}}", "http.port: is not a whole number"),
        ("delay: {max: 5}", "delay.max: 5 has no unit"),
        ("http:\n  port:\n  - 1", "http.port must be one value, not a list (line 2 of "),
        (
            "kafka:\n  common:\n    client.id: [a, b]",
            "kafka.common.client.id must be one value, not a list (line 3 of ",
        ),
        ("kafka: {common: {client.id: {a: b}}}", "kafka.common.client.id must be one value, not a mapping (line 1 of "),
        ("targets:\n  allow: a,b", "targets.allow must be a list (line 2 of "),
        ("targets: {allow: [[a]]}", "targets.allow must be a list of texts (line 1 of "),
        ("bridge:\n  id:", "bridge.id is empty (line 2 of "),
        ("kafka: {common: {enable.metrics.push: yes}}", "kafka.common.enable.metrics.push must be true or false"),
        ("store: {directory: ''}", "store.directory is empty (line 1 of "),
        ("targets: {allow: ['']}", "targets.allow is empty (line 1 of "),
        ("kafka: {common: {sasl.password: ' '}}", "kafka.common.sasl.password is empty (line 1 of "),
        ("http:\n  host: |\n    h\n", "http.host contains a line break"),
        ('http: {host: "h\\r"}', "http.host contains a line break"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_a_sentence(tmp_path: Path, text: str | bytes, said: str) -> None:
    """The file is refused with status 2, the key or the problem, and the line."""
    assert said in refused(tmp_path, text)


def test_what_is_merged_may_be_overridden(tmp_path: Path) -> None:
    """An own key wins over one of `<<`, of several the first; a key that is written twice is an error still."""
    file = tmp_path / "b.yaml"
    file.write_text(
        "delay_topics:\n  a: &a {target: x, partitions: 3}\n  b: &b {<<: *a, target: y}\n"
        "  c: {<<: [*b, *a], partitions: 5}\n"
    )
    topics = load(file, {}).delay_topics
    assert [(topic.target, topic.partitions) for topic in topics.values()] == [("x", 3), ("y", 3), ("y", 5)]
    assert "key 'target' occurs twice" in refused(tmp_path, "delay_topics: {a: {target: x, target: y}}")


@pytest.mark.fault("a variable that is empty, in quotes, or may mean two keys")
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"BRIDGE__ID": ""}, "DELAY_BRIDGE__BRIDGE__ID is set but empty"),
        ({"STORE__DIRECTORY": " "}, "DELAY_BRIDGE__STORE__DIRECTORY is set but empty"),
        ({"TARGETS__ALLOW": ""}, "DELAY_BRIDGE__TARGETS__ALLOW is set but empty"),
        ({"KAFKA__COMMON__SASL_PASSWORD": ""}, "SASL_PASSWORD is set but empty"),
        ({"BRIDGE__ID": '"orders"'}, "DELAY_BRIDGE__BRIDGE__ID is in quotes"),
        ({"KAFKA__COMMON__SASL_PASSWORD": "'x'"}, "SASL_PASSWORD is in quotes"),
        (
            {"BRIDGE__INSTANCE": "a\r"},
            "bridge.instance contains a line break or another control character (DELAY_BRIDGE__",
        ),
        ({"KAFKA__COMMON__SASL_PASSWORD": "x\n"}, "kafka.common.sasl.password contains a line break"),
        ({"TARGETS__ALLOW": "orders,payments"}, "DELAY_BRIDGE__TARGETS__ALLOW is not a list"),
        ({"HTTP__PEERS": "http://a:1,http://b:1"}, "DELAY_BRIDGE__HTTP__PEERS is not a list"),
        ({"DELAY_TOPICS__MY_DELAY__TARGET": "x"}, "may mean my-delay or my.delay"),
        ({"BRIDGE__ID": "a", "bridge__id": "b"}, "both set bridge.id"),
        ({"KAFKA__COMMON__CLIENT_ID": "a", "KAFKA__COMMON__client.id": "b"}, "both set kafka.common.client.id"),
        ({"HTTP": "{port: [1}"}, "environment variable DELAY_BRIDGE__HTTP: "),
        ({"HTTP__PORT": "x"}, "http.port: is not a whole number (DELAY_BRIDGE__HTTP__PORT)"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_refused(tmp_path: Path, env: dict[str, str], said: str) -> None:
    """The variable is refused with its name: its effect, such as a default or a pattern without a match, would be
    silent."""
    assert said in refused(tmp_path, "delay_topics: {my.delay: {}, my-delay: {}}", env)


def test_a_variable_means_what_the_file_names(tmp_path: Path) -> None:
    """Exactly so if that is there, else in another case or with `_` for dots; also the properties of maps."""
    file = tmp_path / "b.yaml"
    tree: dict[str, Any] = {
        "delay_topics": {"my.delay": {}, "my_delay": {}, "Other.Topic": {}},
        "spark": {"conf": {"spark.executor.memoryOverhead": "1g"}},
    }
    file.write_text(json.dumps(tree))
    found = load(
        file,
        {
            "DELAY_BRIDGE__DELAY_TOPICS__my_delay__TARGET": "x",
            "DELAY_BRIDGE__DELAY_TOPICS__OTHER_TOPIC__TARGET": "y",
            "DELAY_BRIDGE__SPARK__CONF__SPARK_EXECUTOR_MEMORYOVERHEAD": "2g",
        },
    )
    assert {name: topic.target for name, topic in found.delay_topics.items()} == {
        "my.delay": None,
        "my_delay": "x",
        "Other.Topic": "y",
    }
    assert found.spark.conf == {"spark.executor.memoryOverhead": "2g"}


def test_an_option_of_spark_may_be_none(tmp_path: Path) -> None:
    """Spark reads an empty text as no options."""
    file = tmp_path / "b.yaml"
    file.write_text("spark: {conf: {spark.driver.extraJavaOptions: ''}}")
    assert load(file, {}).spark.conf == {"spark.driver.extraJavaOptions": ""}


def test_words_may_be_written_in_any_case(tmp_path: Path) -> None:
    """As in other programs' configurations; `off` is a word here, and no truth value."""
    file = tmp_path / "b.yaml"
    file.write_text("logs: {level: INFO, format: Json}\nhttp: {api: off}\ndelivery: {mode: At-Least-Once}")
    found = load(file, {})
    assert (found.logs.level, found.logs.format, found.http.api) == ("info", "json", "off")
    assert found.delivery.mode == "at-least-once"
    assert "'debug', 'info', 'warning' or 'error'" in refused(tmp_path, "logs: {level: loud}")
