"""bridge.settings and bridge.configuration: read once, understood or refused, never shown."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from pydantic import SecretStr

from bridge.errors import ConfigurationError
from bridge.settings.load import load
from bridge.settings.model import LEVEL_MS_MAX, Settings
from bridge.settings.secrets import MASK, Redactor, unmasked
from bridge.wire.committed_state import CommittedState
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from bridge.wire.headers import UNTIL_MS_MAX
from tests.paths import ROOT
from timerstore.rows.position import OFFSET_MAX

CANARY = "canary-7f3a"
CLUSTER: Final[Mapping[str, Any]] = {"master": "spark://spark:7077", "executor_host": "bridge-0"}


def leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted path -> value; an empty map is a leaf."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        found |= leaves(value, here) if isinstance(value, dict) and value else {here: value}
    return found


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_annotated_file_has_every_key_with_its_default() -> None:
    """config/bridge.yaml is the reference: no key is missing, none is invented, and each default is the real one."""
    written = yaml.safe_load((ROOT / "config/bridge.yaml").read_text())
    assert set(leaves(written)) == set(leaves(Settings.of({}).masked()))
    assert Settings.of(written) == Settings.of({})
    assert load(ROOT / "config/bridge.yaml", {}) == load(None, {})


def test_every_key_of_the_annotated_file_is_explained() -> None:
    """A key without a comment above it says neither unit nor why."""
    lines = (ROOT / "config/bridge.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if (
            line.startswith(" ")
            and not line.lstrip().startswith("#")
            and "bootstrap.servers" not in line
            and ": " in line
        ):
            assert before.lstrip().startswith("#"), line


def test_defaults_are_in_milliseconds_and_bytes() -> None:
    """What is written with a unit is an int of the base unit in memory."""
    s = Settings.of({})
    assert (s.delivery.commit_interval, s.store.flush_interval, s.delay.max) == (40, 60_000, 3650 * 86_400_000)
    assert (s.store.flush_bytes, s.spark.driver_memory) == (128 << 20, 512 << 20)
    assert s.levels_ms[:2] == (1_000, 5_000) and s.levels_ms[-1] == 7_200_000 and len(s.levels_ms) == 18
    assert s.bridge.instance == socket.gethostname()
    assert s.dead_letter_topic("delay") == "delay.dlt"


def test_names_in_kafka_derive_from_id_and_instance() -> None:
    """The group is shared by all instances; the transactional id is one instance's own and stable."""
    s = Settings.of({"bridge": {"id": "orders", "instance": "pod-0"}})
    assert (s.group_id, s.group_instance_id, s.transactional_id) == ("orders", "orders-pod-0", "orders-pod-0")


@pytest.mark.parametrize(
    ("tree", "needles"),
    [
        ({"store": {"flush_byte": 1}}, ["store.flush_byte", "store.flush_bytes"]),
        ({"storage": {}}, ["storage", "store"]),
        ({"flush_bytes": 1}, ["flush_bytes", "store.flush_bytes"]),
        ({"delay_topics": {"d": {"targt": "x"}}}, ["delay_topics.d.targt", "delay_topics.d.target"]),
        (
            {"kafka": {"common": {"bootstrap.server": "x"}}},
            ["kafka.common.bootstrap.server ", "kafka.common.bootstrap.servers"],
        ),
        ({"kafka": {"consumers": {}}}, ["kafka.consumers", "kafka.consumer"]),
        ({"zzzzzz": 1}, ["zzzzzz", "Known keys here"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, tree: dict[str, Any], needles: list[str]
) -> None:
    """A typing error must not become a default."""
    with pytest.raises(ConfigurationError) as caught:
        load(write(tmp_path / "b.yaml", json.dumps(tree)), {})
    assert all(needle in str(caught.value) for needle in needles)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "needle"),
    [
        ({"delay": {"max": 5}}, "delay.max: 5 has no unit"),
        ({"delay": {"max": "5"}}, "is not a duration"),
        ({"delivery": {"commit_interval": "1m"}}, "outside 1ms to 5s"),
        ({"delivery": {"mode": "sometimes"}}, "delivery.mode"),
        ({"delivery": {"retry": {"backoff": "5s", "backoff_max": "1s"}}}, "backoff_max: is less than"),
        ({"delivery": {"retry": {"attempts": 0}}}, "delivery.retry.attempts"),
        ({"overdue": {"rate": "fast"}}, "not a rate"),
        ({"overdue": {"rate": "99999999/s"}}, "outside 0/s to 10000000/s"),
        ({"store": {"flush_bytes": "12 apples"}}, "is not a size"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"delay": {"levels": "1s 2x"}}, "delay.levels"),
        ({"roll": {"window": "500ms"}}, "roll.window: 500ms is outside 1s to 3650d"),
        ({"roll": {"window": 7}}, "roll.window: 7 has no unit"),
        ({"roll": {"window": "automatic"}}, "is not a duration"),
        ({"store": {"flush_interval": "auto"}}, "is not a duration"),
        ({"delay": {"levels": ""}}, "delay.levels"),
        (
            {"delay": {"levels": "10m " * 149}},
            "delay.levels: 149 levels do not fit beside a committed offset; the first 148 do",
        ),
        ({"delay": {"levels": "36501d"}}, "delay.levels: write one or more durations of at most 36500d"),
        ({"targets": {"allow": ["("]}}, "targets.allow.0"),
        ({"delay_topics": {}}, "delay_topics"),
        ({"delay_topics": {"a b": {}}}, "a b"),
        ({"delay_topics": {"__x": {}}}, "internal"),
        ({"delay_topics": {"lock": {}}}, "delay_topics.lock"),
        ({"delay_topics": {"a": {"target": "b"}, "b": {}}}, "a: target b"),
        ({"delay_topics": {"a": {"dead_letter": "a"}}}, "dead_letter"),
        (
            {"delay_topics": {"a": {"dead_letter": "__consumer_offsets"}}},
            "a: dead_letter __consumer_offsets is an internal",
        ),
        ({"delay_topics": {"a" * 246: {}}}, "aaa.dead_letter: aaa"),
        ({"delay_topics": {"a": {"dead_letter": "connect-status"}}}, "a: dead_letter connect-status is an internal"),
        ({"delay_topics": {"a": {"target": "b"}, "c": {"dead_letter": "b"}}}, "c: dead_letter b is the target of a"),
        (
            {"delay_topics": {"a": {"target": "_schemas"}}},
            "delay_topics.a.target: _schemas looks like an internal topic",
        ),
        ({"bridge": {"id": "über"}}, "bridge.id"),
        ({"bridge": []}, "bridge must be a mapping"),
        ({"spark": {"conf": {"spark.master": "x"}}}, "spark.master"),
        ({"spark": {"conf": {"executor.cores": 1}}}, "spark.conf.spark.executor.cores"),
        ({"spark": {"master": "spark://spark:7077"}}, "spark.executor_host: is missing"),
        ({"http": {"api_port": 8080}}, "http.api_port equals http.port"),
        ({"spark": {**CLUSTER, "frames_port": 8080}}, "spark.frames_port equals http.port"),
        (
            {"spark": {**CLUSTER, "frames_port": 7078, "conf": {"spark.driver.port": 7078}}},
            "spark.conf.spark.driver.port equals spark.frames_port",
        ),
        ({"kafka": {"common": {"socket.timeout.ms": 1}}}, "allowed: 10..300000"),
        ({"kafka": {"common": {"linger.ms": None}}}, "is empty"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(tmp_path: Path, tree: dict[str, Any], needle: str) -> None:
    """Wrong values stop the start, one line, with the full path."""
    with pytest.raises(ConfigurationError) as caught:
        load(write(tmp_path / "b.yaml", json.dumps(tree)), {})
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ports_that_are_not_listened_on_may_be_equal() -> None:
    """Those of an API that is off, of a cluster that is not used, and any free ones."""
    Settings.of({"http": {"api": "off", "api_port": 8080}, "spark": {"frames_port": 8080}})
    Settings.of({"http": {"port": 0, "api_port": 0}, "spark": {**CLUSTER, "conf": {"spark.driver.port": 0}}})


@pytest.mark.parametrize("part", ["common", "consumer", "producer"])
@pytest.mark.parametrize(
    "name", ["isolation.level", "enable.auto.commit", "auto.offset.reset", "group.id", "transactional.id",
             "enable.idempotence", "acks", "session.timeout.ms", "group.instance.id", "error_cb",
             "check.crcs",
             "logger", "plugin.library.paths"]
)  # fmt: skip
def test_what_exactly_once_rests_on_cannot_be_overridden(part: str, name: str) -> None:
    """Each of these, set by a user, would break a promise; the refusal says which."""
    with pytest.raises(ConfigurationError, match=f"kafka.{part}.{name} cannot be set: ."):
        Settings.of({"kafka": {part: {name: "x"}}})


def test_several_problems_are_told_at_once() -> None:
    """One start, one list."""
    with pytest.raises(ConfigurationError) as caught:
        Settings.of({"delay": {"max": "x"}, "http": {"port": -1}})
    assert "delay.max" in str(caught.value) and "http.port" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "path", "expected"),
    [
        ("HTTP__PORT", "0", "http.port", 0),
        ("http__port", "0", "http.port", 0),
        ("BRIDGE__CREATE_TOPICS", "false", "bridge.create_topics", False),
        ("STORE__FLUSH_BYTES", "1MiB", "store.flush_bytes", "1MiB"),
        ("TARGETS__ALLOW", "orders.*", "targets.allow", ["orders.*"]),
        ("TARGETS__ALLOW", '["a", "b,c"]', "targets.allow", ["a", "b,c"]),
        ("KAFKA__COMMON__BOOTSTRAP.SERVERS", "h:1", "kafka.common.bootstrap.servers", "h:1"),
        ("KAFKA__COMMON__bootstrap.servers", "h:1", "kafka.common.bootstrap.servers", "h:1"),
        ("KAFKA__COMMON__BOOTSTRAP_SERVERS", "h:1", "kafka.common.bootstrap.servers", "h:1"),
        ("KAFKA__COMMON__BOOTSTRAP__SERVERS", "h:1", "kafka.common.bootstrap.servers", "h:1"),
        ("KAFKA__COMMON__LOG_LEVEL", "3", "kafka.common.log_level", "3"),
        ("KAFKA__COMMON__API_VERSION_REQUEST", "true", "kafka.common.api.version.request", "true"),
        ("KAFKA__PRODUCER", "{linger.ms: 5}", "kafka.producer.linger.ms", "5"),
        ("DELAY_TOPICS__DELAY__TARGET", "real", "delay_topics.delay.target", "real"),
        ("DELAY_TOPICS__My.Topic__TARGET", "real", "delay_topics.My.Topic.target", "real"),
        ("DELAY_TOPICS", '{"a.b__c": {"target": "t"}}', "delay_topics.a.b__c.target", "t"),
        ("SPARK__CONF__spark.executor.memoryOverhead", "1g", "spark.conf.spark.executor.memoryOverhead", "1g"),
        ("SPARK__CONF__SPARK_UI_ENABLED", "false", "spark.conf.spark.ui.enabled", "false"),
    ],
)
def test_the_environment_sets_any_key(variable: str, value: str, path: str, expected: object) -> None:
    """Every key has a variable, also those with dots, in maps, and lists."""
    assert leaves(load(None, {f"DELAY_BRIDGE__{variable}": value}).masked())[path] == expected


def test_every_key_of_the_reference_can_be_set_by_the_environment() -> None:
    """Derived from the file itself, so that a new key is covered without anybody remembering it."""
    for path, value in leaves(yaml.safe_load((ROOT / "config/bridge.yaml").read_text())).items():
        if value is not None:
            name = "DELAY_BRIDGE__" + path.replace("bootstrap.servers", "bootstrap_servers").replace(".", "__").upper()
            name = "DELAY_BRIDGE__DELAY_TOPICS__DELAY__DEAD_LETTER" if path.endswith("dead_letter") else name
            text = value if isinstance(value, str) else json.dumps(value)
            assert load(None, {name: text}) == load(None, {}), name


def test_the_environment_wins_over_the_file_and_merges_into_its_maps(tmp_path: Path) -> None:
    """One variable changes one key and leaves its neighbours."""
    file = write(
        tmp_path / "b.yaml", "delay_topics: {Orders.Delay: {target: a, partitions: 7}}\nhttp: {host: h, port: 1}"
    )
    s = load(file, {"DELAY_BRIDGE__DELAY_TOPICS__ORDERS_DELAY__TARGET": "b", "DELAY_BRIDGE__HTTP__PORT": "2"})
    assert list(s.delay_topics) == ["Orders.Delay"]
    assert (s.delay_topics["Orders.Delay"].target, s.delay_topics["Orders.Delay"].partitions) == ("b", 7)
    assert (s.http.host, s.http.port) == ("h", 2)


def test_variables_of_other_things_are_left_alone() -> None:
    """Kubernetes sets DELAY_BRIDGE_SERVICE_HOST for a service of this name."""
    assert load(None, {"DELAY_BRIDGE_SERVICE_HOST": "x", "DELAY_BRIDGE_PORT": "y"}) == load(None, {})


def test_an_unknown_variable_is_refused_by_its_name() -> None:
    """A misspelt variable must not become a default either."""
    with pytest.raises(ConfigurationError, match=r"DELAY_BRIDGE__HTTP__PROT.*http\.port"):
        load(None, {"DELAY_BRIDGE__HTTP__PROT": "1"})
    with pytest.raises(ConfigurationError, match="no keys below it"):
        load(None, {"DELAY_BRIDGE__HTTP__PORT__X": "1"})


def test_secrets_come_from_files_and_variables(tmp_path: Path) -> None:
    """`*_file`, ${file:} and ${env:} yield the value, without the file's last line break; $${ is literal."""
    secret = write(tmp_path / "secret", f"{CANARY}\n")
    common = {
        "sasl.password_file": str(secret),
        "ssl.key.password": f"${{file:{secret}}}",
        "sasl.username": "${env:ME}-$${x}",
    }
    s = load(write(tmp_path / "b.yaml", json.dumps({"kafka": {"common": common}})), {"ME": "me"})
    assert {k: unmasked(v) for k, v in s.kafka.common.items()} == {
        "bootstrap.servers": "localhost:9092",
        "sasl.password": CANARY,
        "ssl.key.password": CANARY,
        "sasl.username": "me-${x}",
    }
    s = load(None, {"DELAY_BRIDGE__KAFKA__COMMON__SASL_PASSWORD_FILE": str(secret)})
    assert unmasked(s.kafka.common["sasl.password"]) == CANARY


@pytest.mark.parametrize(
    ("common", "needle"),
    [
        ({"sasl.password_file": "/nowhere/x"}, "cannot read /nowhere/x"),
        ({"sasl.password_file": "/dev/null", "sasl.password": "x"}, "both set"),
        ({"sasl.username": "${env:NOT_THERE}"}, "NOT_THERE is not set"),
        ({"sasl.username": "${file:/nowhere/y}"}, "kafka.common.sasl.username: cannot read"),
    ],
)
def test_a_secret_that_cannot_be_had_is_an_error(tmp_path: Path, common: dict[str, str], needle: str) -> None:
    """An empty password would only be noticed as an authentication failure."""
    with pytest.raises(ConfigurationError) as caught:
        load(write(tmp_path / "b.yaml", json.dumps({"kafka": {"common": common}})), {})
    assert needle in str(caught.value)


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    """The canary is in the settings, and in no rendering of them or of any part."""
    secret = write(tmp_path / "secret", CANARY)
    tree = {
        "bridge": {"id": f"${{file:{secret}}}"},
        "kafka": {
            "common": {"sasl.password": CANARY},
            "consumer": {"client.id": f"${{file:{secret}}}"},
            "producer": {"ssl.key.password": CANARY, "ssl.key.location": "/visible"},
        },
        "spark": {"conf": {"spark.ssl.keyPassword": CANARY}},
    }
    s = load(write(tmp_path / "b.yaml", json.dumps(tree)), {})
    assert unmasked(s.kafka.common["sasl.password"]) == CANARY and s.bridge.id == CANARY
    shown = [
        repr(s),
        str(s),
        json.dumps(s.masked()),
        repr(s.kafka),
        repr(s.kafka.common),
        repr(s.spark),
        f"{s.kafka.model_dump()}",
    ]
    shown.append(s.kafka.model_dump_json())
    assert all(CANARY not in text for text in shown)
    assert "/visible" in repr(s)
    assert s.secrets() == {CANARY}
    assert isinstance(s.kafka.consumer["client.id"], SecretStr)


@pytest.mark.fault("a password inside of a URL or an option of the configuration")
@pytest.mark.parametrize(
    ("tree", "seen"),
    [
        ({"tracing": {"endpoint": f"https://me:{CANARY}@collector:4318/v1"}}, "@collector:4318/v1"),
        ({"tracing": {"endpoint": f"https://me:a@b/{CANARY}@collector:4318/v1"}}, "@collector:4318/v1"),
        (
            {"tracing": {"endpoint": f"http://collector/v1?x=1&api_key={CANARY}&y=2"}},
            "http://collector/v1?x=1&api_key=",
        ),
        ({"tracing": {"endpoint": f"http://collector/v1#access-token={CANARY}"}}, "http://collector/v1#access-token="),
        ({"kafka": {"common": {"sasl.oauthbearer.extensions": f"a=1,secret={CANARY}"}}}, "a=1,secret="),
        (
            {
                "spark": {
                    "conf": {"spark.driver.defaultJavaOptions": f"-Djavax.net.ssl.trustStorePassword={CANARY} -Dx=1"}
                }
            },
            "-Djavax.net.ssl.trustStorePassword=",
        ),
    ],
)
def test_a_secret_part_of_a_value_is_masked(tree: dict[str, Any], seen: str) -> None:
    """Printed configuration and log mask the secret, under any key."""
    settings = Settings.of(tree)
    for shown in (json.dumps(settings.masked()), repr(settings), repr(settings.tracing), repr(settings.spark)):
        assert CANARY not in shown
    assert seen in json.dumps(settings.masked()) and MASK in json.dumps(settings.masked())
    assert CANARY not in Redactor(settings.secrets())(f"POST {tree} failed")


def test_no_secret_is_in_an_error(tmp_path: Path) -> None:
    """Not under a misspelt name, not where a value is refused, not in broken YAML."""
    secret = write(tmp_path / "secret", CANARY)
    broken = [
        json.dumps({"kafka": {"common": {"sasl.passwort": CANARY}}}),
        json.dumps({"kafka": {"common": {"security.protocol": f"${{file:{secret}}}"}}}),
        json.dumps({"store": {"flush_bytes": f"${{file:{secret}}}"}}),
        f"kafka: {{common: {{sasl.password: {CANARY}}}",
        f"kafka: {{common: {{sasl.password: {CANARY}, sasl.password: {CANARY}}}}}",
    ]
    for text in broken:
        with pytest.raises(ConfigurationError) as caught:
            load(write(tmp_path / "b.yaml", text), {})
        assert CANARY not in str(caught.value) and CANARY not in repr(caught.value), text


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """YAML would silently keep the second."""
    with pytest.raises(ConfigurationError, match="occurs twice at line 2"):
        load(write(tmp_path / "b.yaml", "http: {port: 1}\nhttp: {port: 2}\n"), {})


def test_an_absent_or_empty_file(tmp_path: Path) -> None:
    """An absent file is an error; an empty one, and an empty section, are the defaults."""
    with pytest.raises(ConfigurationError, match="cannot read"):
        load(tmp_path / "absent.yaml", {})
    assert load(write(tmp_path / "b.yaml", ""), {}) == load(
        write(tmp_path / "c.yaml", "delay:\nkafka:\n  common:\n"), {}
    )


def test_targets_are_matched_as_whole_names_and_internal_topics_never() -> None:
    """`orders` does not allow `orders-secret`; delay topics would loop; `__*` is Kafka's."""
    s = Settings.of({"targets": {"allow": ["orders", "a.*"], "deny": ["a\\.private.*"]}})
    assert [s.target_permitted(t) for t in ("orders", "orders-x", "a.b", "a.private.b", "b")] == [
        True,
        False,
        True,
        False,
        False,
    ]
    s = Settings.of({})
    assert [s.target_permitted(t) for t in ("x", "delay", "__consumer_offsets")] == [True, False, False]


OTHERS = [
    *("_schemas", "_confluent-command", "_anything", "connect-configs", "connect-offsets", "connect-status"),
    *("my-connect-configs", "docker.connect.offsets", "connect_status", "connect-cluster-configs", "CONNECT-CONFIG"),
    *("app-KSTREAM-AGGREGATE-STATE-STORE-0000000003-changelog", "app-by-user-repartition"),
    *("app-KTABLE-FK-JOIN-SUBSCRIPTION-REGISTRATION-0000000006-topic", "mm2-offsets.east.internal"),
    *("east.checkpoints.internal", "mm2-offset-syncs.east.internal"),
]


@pytest.mark.parametrize("topic", OTHERS)
def test_other_systems_topics_are_allowed_by_their_whole_names_only(topic: str) -> None:
    """A header must not be enough to write into what Schema Registry, Connect or Streams keep; a denial still holds."""
    allow = [".*", "_.*", ".*-changelog", ".*connect.*"]
    assert not Settings.of({"targets": {"allow": allow}}).target_permitted(topic)
    assert Settings.of({"targets": {"allow": [*allow, topic]}}).target_permitted(topic)
    assert not Settings.of({"targets": {"allow": [topic], "deny": [".*"]}}).target_permitted(topic)
    named = {"delay_topics": {"delay": {"target": topic}}, "targets": {"allow": [topic]}}
    assert Settings.of(named).delay_topics["delay"].target == topic


@pytest.mark.parametrize(
    "topic", ["orders", "reconnect-status", "order-status", "connect", "changelog", "a.internal", "a_b"]
)
def test_names_that_only_look_a_little_like_it_are_anybody_s(topic: str) -> None:
    """What `.*` allowed before it allows still."""
    assert Settings.of({}).target_permitted(topic)


def test_internal_topics_are_allowed_by_no_name() -> None:
    """`__consumer_offsets` is Kafka's, whatever the configuration says."""
    assert not Settings.of({"targets": {"allow": ["__consumer_offsets"]}}).target_permitted("__consumer_offsets")


@pytest.mark.parametrize("level", ["0ms", "10m", "36500d"])
def test_levels_that_are_accepted_fit_into_what_kafka_keeps(level: str) -> None:
    """Twice, before and after a change, beside the longest of everything else, with room for steps of the clock."""
    with pytest.raises(ConfigurationError) as refused:
        Settings.of({"delay": {"levels": f"{level} " * 2_000}})
    fitting = re.search(r"the first (\d+) do", str(refused.value))
    assert fitting is not None
    settings = Settings.of({"delay": {"levels": f"{level} " * int(fitting[1])}})
    most = 2**31 - 1
    parameters = DecodeParameters(
        levels_ms=settings.levels_ms, max_delay_ms=LEVEL_MS_MAX, roll_window_ms=LEVEL_MS_MAX,
        has_default_target=True, dialect="rocketmq", copy_max_delay_ms=LEVEL_MS_MAX, roll_bytes_max=most,
        headers_max=most, header_bytes_max=most, payload_bytes_max=most,
    )  # fmt: skip
    state = CommittedState(
        offset=OFFSET_MAX, position=(UNTIL_MS_MAX, OFFSET_MAX), topic_id="i" * 22, partitions=10_000,
        epochs=tuple(DecodeEpoch(offset=offset, parameters=parameters) for offset in (0, OFFSET_MAX - 9)),
        first_offset=OFFSET_MAX, frozen=tuple((OFFSET_MAX - 3 + i, UNTIL_MS_MAX, OFFSET_MAX) for i in range(3)),
    )  # fmt: skip
    assert state.has_room_for_a_step()
