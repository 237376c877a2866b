"""Translation of librdkafka's property names into the Java client's, for Spark's Kafka source.

One configuration serves both clients. A property that the Java client cannot honour is refused and never silently
dropped: a restriction that only one client honours is useless.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bridge.errors import ConfigurationError
from bridge.settings.java_properties import FALSE, PROPERTIES, Property

# Internals of librdkafka, and properties of group members and producers: meaningless for Spark's source.
_WITHOUT_MEANING: Final = re.compile(
    r"""
    acks | api\.version\..* | broker\.(address|version)\..* | batch\..* | client\.(id|software\..*) | compression\..*
    | coordinator\..* | debug | delivery\..* | enable\.(random\.seed|sparse\.connections)
    | fetch\.(error|queue)\.backoff\.ms
    | group\.protocol.* | heartbeat\.interval\.ms | linger\.ms | log[._].* | max\.in\.flight.* | max\.poll\.interval\.ms
    | message\..* | partition\.assignment\.strategy | partitioner | queue\.buffering\..* | queued\..*
    | metadata\.recovery\.rebootstrap\..* | receive\.message\.max\.bytes
    | reconnect\.backoff\.jitter\.ms | request\.timeout\.ms | retries
    | socket\.(keepalive\.enable|nagle\.disable|max\.fails|blocking\.max\.ms) | statistics\.interval\.ms
    | sticky\.partitioning\..* | topic\.metadata\..* | transaction\.timeout\.ms | allow\.auto\.create\.topics
    """,
    re.VERBOSE,
)
_HANDLED: Final = re.compile(
    r"security\.protocol|sasl\.(username|password|kerberos\.(keytab|principal))"
    r"|sasl\.oauthbearer\.(method|scope|extensions|config|token\.endpoint\.url|client\.(id|secret))"
    r"|ssl\.(ca|key|certificate)\.(location|pem)|ssl\.key\.password|ssl\.keystore\.(location|password)"
    r"|ssl\.endpoint\.identification\.algorithm|enable\.ssl\.certificate\.verification"
)
_PORT: Final = 9092
"""librdkafka's default port of a broker."""
_PBES2: Final = bytes.fromhex("06092a864886f70d01050d")  # the scheme's object identifier, 1.2.840.113549.1.5.13
_OAUTH_HANDLER: Final = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "OAUTHBEARER")
_SETUP_MAX_MS: Final = 30_000
"""socket.connection.setup.timeout.max.ms of Java's client, up to which the time-out rises with each attempt."""
_HINT: Final = "Remove it, or set it under kafka.producer if only the producer needs it"


def translate(properties: Mapping[str, str]) -> dict[str, str]:
    """Java consumer properties for librdkafka's. Raises ConfigurationError for a property without an equivalent.

    The result holds secrets in `sasl.jaas.config`, `ssl.key.password`, `ssl.keystore.*`.
    """
    translated: dict[str, str] = {}
    for name, value in properties.items():
        if name in PROPERTIES:
            translated[PROPERTIES[name].java or name] = _read(name, PROPERTIES[name], value)
        elif not _HANDLED.fullmatch(name) and not _WITHOUT_MEANING.fullmatch(name):
            raise ConfigurationError(
                f"{name} has no equivalent in the Java client, which Spark uses", hint=_HINT, code="DB-2014"
            )
    if int(setup := translated.get("socket.connection.setup.timeout.ms", "0")) > _SETUP_MAX_MS:
        translated["socket.connection.setup.timeout.max.ms"] = setup
    return translated | _security(properties) | _sasl(properties)


def _read(name: str, known: Property, value: str) -> str:
    """A value in the Java client's notation. Raises ConfigurationError for a value that the Java client would refuse or
    read as another one. The error hides the value, which may be a secret under the wrong name."""
    if name in ("bootstrap.servers", "metadata.broker.list"):
        return _servers(name, value)
    if name == "sasl.kerberos.min.time.before.relogin" and value == "0":
        raise _refused(name, "is 0, which ends the renewal of tickets for only one of the clients", "Give a time.")
    try:
        return known.read(value)
    except ValueError as error:
        raise _refused(name, str(error), "Use a notation that both clients read alike.") from None


def _servers(name: str, value: str) -> str:
    """Brokers with their ports, where librdkafka would add the default. Raises ConfigurationError."""
    servers = [server.strip() for server in value.split(",") if server.strip()]
    for server in servers:
        host, colon, port = server.rpartition(":") if not server.endswith("]") else (server, "", "")
        host = host if colon else server
        is_address = host.startswith("[") and host.endswith("]")
        if "://" in server or (":" in host and not is_address) or not host or (colon and not _is_port(port)):
            hint = "Write host:port, separated by commas; the protocol belongs in security.protocol."
            raise _refused(name, "is not a list of brokers", hint)
    if not servers:
        raise _refused(name, "is not a list of brokers", "Write host:port.")
    return ",".join(server if _is_port(server.rpartition(":")[2]) else f"{server}:{_PORT}" for server in servers)


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and 0 < int(text) < 65_536


def _refused(name: str, problem: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"{name} {problem} (Spark uses the Java client)", hint=hint, code="DB-2084")


# --- TLS -------------------------------------------------------------------------------------------------------------


def _security(properties: Mapping[str, str]) -> dict[str, str]:
    if properties.get("enable.ssl.certificate.verification", "true").lower() in FALSE:
        raise ConfigurationError(
            "enable.ssl.certificate.verification: the Java client always verifies the broker's certificate",
            hint="Trust the broker's certificate with ssl.ca.location instead",
            code="DB-2015",
        )
    translated = {}
    if protocol := properties.get("security.protocol"):
        translated["security.protocol"] = protocol.upper()
    if algorithm := properties.get("ssl.endpoint.identification.algorithm", "").lower():
        translated["ssl.endpoint.identification.algorithm"] = "" if algorithm == "none" else algorithm
    return translated | _truststore(properties) | _keystore(properties)


def _truststore(properties: Mapping[str, str]) -> dict[str, str]:
    if authorities := properties.get("ssl.ca.pem"):
        return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authorities}
    if location := properties.get("ssl.ca.location"):
        if Path(location).is_dir():
            hint = "Put the certificates into one PEM file."
            raise ConfigurationError(
                f"ssl.ca.location: the Java client cannot read a directory ({location})", hint=hint, code="DB-2016"
            )
        return {"ssl.truststore.type": "PEM", "ssl.truststore.location": location}
    return {}


def _keystore(properties: Mapping[str, str]) -> dict[str, str]:
    if location := properties.get("ssl.keystore.location"):
        password = _text(properties, "ssl.keystore.password", _required(properties, "ssl.keystore.password"))
        return {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": location, "ssl.keystore.password": password}
    key = _pem(properties, "ssl.key")
    chain = _pem(properties, "ssl.certificate")
    if key is None and chain is None:
        return {}
    if key is None or chain is None:
        missing, present = ("ssl.key", "ssl.certificate") if key is None else ("ssl.certificate", "ssl.key")
        raise ConfigurationError(
            f"{present}.* is set, {missing}.* is not",
            hint="Set both: a client certificate needs its key.",
            code="DB-2017",
        )
    if "BEGIN PRIVATE KEY" not in key and "BEGIN ENCRYPTED PRIVATE KEY" not in key:
        raise ConfigurationError(
            "ssl.key.*: the Java client reads private keys in PKCS#8 only",
            hint="Convert it: openssl pkcs8 -topk8 -nocrypt -in key.pem -out key.pkcs8.pem",
            code="DB-2019",
        )
    translated = {"ssl.keystore.type": "PEM", "ssl.keystore.key": key, "ssl.keystore.certificate.chain": chain}
    if "BEGIN ENCRYPTED PRIVATE KEY" in key:
        _refuse_unreadable(key)
        translated["ssl.key.password"] = _text(properties, "ssl.key.password", "")
    return translated


def _refuse_unreadable(key: str) -> None:
    """Raises ConfigurationError for a key in PBES2, openssl's default, for which Java has no key factory."""
    body = "".join(line for line in key.splitlines() if "-----" not in line)
    try:
        is_pbes2 = _PBES2 in base64.b64decode(body, validate=True)
    except ValueError:
        raise ConfigurationError(
            "ssl.key.*: not a PEM file", hint="Check its lines for damage.", code="DB-2018"
        ) from None
    if is_pbes2:
        raise ConfigurationError(
            "ssl.key.*: the Java client cannot decrypt a key in PBES2",
            hint="Convert it: openssl pkcs8 -topk8 -v1 PBE-SHA1-3DES -in key.pem -out key.pkcs8.pem",
            code="DB-2020",
        )


def _pem(properties: Mapping[str, str], name: str) -> str | None:
    """The text of `<name>.pem` or of the file `<name>.location`. The Java client needs key and chain as two texts."""
    if (text := properties.get(f"{name}.pem")) is not None:
        return text
    if (location := properties.get(f"{name}.location")) is None:
        return None
    try:
        return Path(location).read_text()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not a PEM file"
        raise ConfigurationError(
            f"{name}.location: cannot read {location}: {problem}", hint="Mount the file.", code="DB-2021"
        ) from None


# --- SASL ------------------------------------------------------------------------------------------------------------


def _sasl(properties: Mapping[str, str]) -> dict[str, str]:
    if not properties.get("security.protocol", "").lower().startswith("sasl_"):
        return {}
    mechanism = properties.get("sasl.mechanism", properties.get("sasl.mechanisms", "GSSAPI"))
    if mechanism == "PLAIN":
        return {"sasl.jaas.config": _login(properties, "plain.PlainLoginModule")}
    if mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        return {"sasl.jaas.config": _login(properties, "scram.ScramLoginModule")}
    if mechanism == "GSSAPI":
        service = properties.get("sasl.kerberos.service.name", "kafka")  # librdkafka's default; Java's client has none
        return {"sasl.jaas.config": _kerberos(properties), "sasl.kerberos.service.name": service}
    if mechanism == "OAUTHBEARER":
        return _oauth(properties)
    raise ConfigurationError(
        f"sasl.mechanism {mechanism} is not supported",
        hint=f"Use one of {', '.join(_MECHANISMS)}",
        code="DB-2022",
    )


def _login(properties: Mapping[str, str], module: str) -> str:
    user = _required(properties, "sasl.username")
    password = _required(properties, "sasl.password")
    return f"org.apache.kafka.common.security.{module} required username={_quoted(user)} password={_quoted(password)};"


def _kerberos(properties: Mapping[str, str]) -> str:
    module = "com.sun.security.auth.module.Krb5LoginModule required"
    keytab, principal = properties.get("sasl.kerberos.keytab"), properties.get("sasl.kerberos.principal")
    if keytab is None or principal is None:
        return f"{module} useTicketCache=true;"
    return f"{module} useKeyTab=true storeKey=true keyTab={_quoted(keytab)} principal={_quoted(principal)};"


def _oauth(properties: Mapping[str, str]) -> dict[str, str]:
    if properties.get("sasl.oauthbearer.method", "default").lower() != "oidc":
        hint = "Set sasl.oauthbearer.method: oidc with client id, client secret and token endpoint"
        raise ConfigurationError("OAUTHBEARER works with the method oidc only", hint=hint, code="DB-2023")
    options = {
        "clientId": _required(properties, "sasl.oauthbearer.client.id"),
        "clientSecret": _required(properties, "sasl.oauthbearer.client.secret"),
    }
    if scope := properties.get("sasl.oauthbearer.scope"):
        options["scope"] = scope
    if extensions := properties.get("sasl.oauthbearer.extensions"):
        for pair in extensions.split(","):
            name, _, value = pair.partition("=")
            if not re.fullmatch("[A-Za-z]+", name.strip()) or not value:
                raise _refused("sasl.oauthbearer.extensions", "is not a list of name=value", "Use letters for names.")
            options[f"extension_{name.strip()}"] = value
    rendered = " ".join(f"{name}={_quoted(value)}" for name, value in options.items())
    return {
        "sasl.jaas.config": f"org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required {rendered};",
        "sasl.login.callback.handler.class": _OAUTH_HANDLER,
        "sasl.oauthbearer.token.endpoint.url": _endpoint(properties),
    }


def _endpoint(properties: Mapping[str, str]) -> str:
    name = "sasl.oauthbearer.token.endpoint.url"
    url = _required(properties, name)
    if not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise _refused(name, "is not an address", "Write it as https://host/path.")
    return url


def _text(properties: Mapping[str, str], name: str, default: str) -> str:
    return _read(name, Property(), properties.get(name, default))


def _required(properties: Mapping[str, str], name: str) -> str:
    if name not in properties:
        raise ConfigurationError(
            f"{name} is missing", hint="Set it under kafka.common: the SASL mechanism needs it.", code="DB-2024"
        )
    return properties[name]


def _quoted(value: str) -> str:
    """A JAAS string, with every character of a password inside its quotes."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
