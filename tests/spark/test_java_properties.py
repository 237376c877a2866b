"""bridge.settings.java_properties: the table agrees with the Java client that Spark uses."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pyspark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.install import connector
from bridge.settings.java_properties import FALSE, IN_ITS_PLACE, PROPERTIES, TRUE
from bridge.settings.librdkafka import problems
from dev.harness.pace import scaled

VALUES: Final = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.sampled_from(["-1", "0", "1", "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "010"]),
    st.sampled_from(["0x10", "1e3", "5.0", "+5", " 5", "5 ", "1_000", "", "٣"]),
    st.sampled_from([*TRUE, *FALSE, "TRUE", "False", "yes", "no", "on"]),
    st.sampled_from(["none", "NONE", "Use_All_DNS_ips", "READ_committed", "sasl_ssl", "SSL", "tls", " ssl"]),
)


OWN: Final = [
    "allow.auto.create.topics",
    "isolation.level",
    "max.poll.records",
    "sasl.jaas.config",
    "sasl.login.callback.handler.class",
    "sasl.oauthbearer.token.endpoint.url",
    "security.protocol",
    "socket.connection.setup.timeout.max.ms",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.keystore.type",
    "ssl.truststore.certificates",
    "ssl.truststore.location",
    "ssl.truststore.type",
]
"""The names that bridge.settings.java and clients write, beside those of the table."""


def ask(pairs: list[tuple[str, str]]) -> list[str]:
    """The lines of ConfigTable.java."""
    libraries = Path(pyspark.__file__).parent / "jars"
    jars = [*(jar for jar in connector.jars() if "kafka-clients" in jar.name), *libraries.glob("slf4j-api*.jar")]
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    command = [java, "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, jars))]
    ran = subprocess.run(
        [*command, str(Path(__file__).with_name("ConfigTable.java"))],
        input="\0".join(part for pair in pairs for part in pair),
        capture_output=True, text=True, timeout=scaled(120), check=True,
    )  # fmt: skip
    return ran.stdout.splitlines()


@cache
def names() -> dict[str, str]:
    """All names of properties of Java's clients, and their types."""
    return dict(line.split()[1:3] for line in ask([]) if line.startswith("name "))


@pytest.mark.fault("a value that one of the two Kafka clients refuses, or reads as another")
@settings(max_examples=3)
@given(pairs=st.lists(st.tuples(st.sampled_from(sorted(PROPERTIES)), VALUES), min_size=300, max_size=300))
def test_what_the_table_accepts_the_java_client_reads_alike(pairs: list[tuple[str, str]]) -> None:
    """The Java client gets the value as text, and reads the same value. What the table refuses for its size the client
    refuses as well."""
    given_to: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for name, value in pairs:
        known, java = PROPERTIES[name], PROPERTIES[name].java or name
        try:
            given_to.append((java, known.read(value)))
        except ValueError:
            digits = value.removeprefix("-")
            if known.type in ("INT", "LONG") and digits.isdecimal() and str(int(digits)) == digits:
                refused.append((java, value))
    lines = [line for line in ask(given_to + refused) if not line.startswith("name ")]
    for (name, value), line in zip(given_to, lines, strict=False):
        expected = f"[{value}]" if names()[name] == "LIST" else value
        assert line == f"read {expected}" or (not value and line == "read []"), (name, value)
    for (name, value), line in zip(refused, lines[len(given_to) :], strict=True):
        is_own_bound = name == "connections.max.idle.ms" or name.startswith(("sasl.kerberos", "socket.connection"))
        assert line == "refused" or is_own_bound, (name, value)


def test_the_table_has_the_types_of_the_java_client() -> None:
    """Of the version that the connector is resolved with; and all names that the bridge sets itself are Java's."""
    types = {known.java or name: known.type for name, known in PROPERTIES.items()} | {"bootstrap.servers": "LIST"}
    assert types == {name: names()[name] for name in types}
    assert names().keys() >= set(OWN)


@pytest.mark.fault("a property by its Java name")
def test_a_java_name_is_refused_with_what_to_write_instead() -> None:
    """Every name of Java's clients that librdkafka does not know is refused, with an existing name in its place."""
    for name in names():
        (said,) = problems({name: "1"}, "kafka.common") or ["ok"]
        assert "not a known key" not in said, said
    for name, instead in IN_ITS_PLACE.items():
        known = instead.split()[0].rstrip(",:")
        assert known.endswith(".*") or "not a known key" not in str(problems({known: "1"}, "kafka.common")), name
        assert "here it is" in str(problems({name: "1"}, "kafka.common")), name
