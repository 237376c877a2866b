"""A broker that admits only clients with a certificate of its authority and a password, with granted rights only."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from dev.broker import EmbeddedBroker
from dev.broker.embedded import HOST, free_ports
from dev.harness.pace import scaled
from tests.java import SHORT_LIVED

ADMIN: Final = "admin"
ADMIN_PASSWORD: Final = "admin-secret"
REQUEST_TIMEOUT_S: Final = 30
SCRAM_ITERATIONS: Final = 4096
LOGIN: Final = "org.apache.kafka.common.security"


class Authority:
    """A private certificate authority, in a directory, for as long as a test lasts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.pem"
        directory.mkdir(parents=True, exist_ok=True)
        _openssl("req", "-x509", *_KEY, "-keyout", self._at("ca.key"), "-out", self._at("ca.pem"), "-subj", "/CN=ca")

    def issue(self, name: str, password: str | None = None) -> tuple[Path, Path]:
        """Key (PKCS#8, encrypted where there is a password) and certificate for `name`; they replace older ones."""
        key, request, certificate = self._at(f"{name}.key"), self._at(f"{name}.csr"), self._at(f"{name}.pem")
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        if password is not None:
            plain = Path(key).rename(self._at(f"{name}.plain"))
            scheme = ["-v1", "PBE-SHA1-3DES", "-passout", f"pass:{password}"]  # the best that Java's client can decrypt
            _openssl("pkcs8", "-topk8", "-in", str(plain), "-out", key, *scheme)
            plain.unlink()
        extensions = Path(self._at("san.ext"))
        extensions.write_text(f"subjectAltName=IP:{HOST}\n")
        authority = ["-CA", self._at("ca.pem"), "-CAkey", self._at("ca.key"), "-CAcreateserial"]
        _openssl(
            *("x509", "-req", "-in", request, *authority, "-extfile", str(extensions), "-days", "2"),
            "-out",
            certificate,
        )
        return Path(key), Path(certificate)

    def _at(self, name: str) -> str:
        return str(self.directory / name)


_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], capture_output=True, check=True, timeout=scaled(60))


class SecureBroker(EmbeddedBroker):
    """SASL_SSL with client certificates, PLAIN and SCRAM, and Kafka's own authorizer; `admin` may do everything.

    `oauth` is the address of a second listener, for clients with a token of the issuer at `issuer_url`.
    """

    def __init__(self, authority: Authority, issuer_url: str) -> None:
        self.authority = authority
        key, certificate = authority.issue("broker")
        store = authority.directory / "broker.store.pem"
        store.write_text(key.read_text() + certificate.read_text())
        self.admin_properties: dict[str, str] = {
            **client_properties(authority, ADMIN),
            "sasl.mechanism": "PLAIN",
            "sasl.username": ADMIN,
            "sasl.password": ADMIN_PASSWORD,
        }
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={issuer_url}/jwks"
        super().__init__(tmpfs=True, client=self.admin_properties, jvm_options=[SHORT_LIVED, allowed])
        internal, oauth = free_ports(2)
        self.oauth = f"{HOST}:{oauth}"
        ports = {"CLIENTS": self.port, "OAUTH": oauth, "INTERNAL": internal, "CONTROLLER": self.controller_port}
        addresses = ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items())
        self.properties |= {
            "listeners": addresses,
            "advertised.listeners": addresses,
            "listener.security.protocol.map": (
                "CLIENTS:SASL_SSL,OAUTH:SASL_PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
            "inter.broker.listener.name": "INTERNAL",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.clients.plain.sasl.jaas.config": (
                f'{LOGIN}.plain.PlainLoginModule required user_{ADMIN}="{ADMIN_PASSWORD}";'
            ),
            "listener.name.clients.scram-sha-512.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
            "listener.name.clients.ssl.client.auth": "required",
            "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.oauth.sasl.oauthbearer.jwks.endpoint.url": f"{issuer_url}/jwks",
            "listener.name.oauth.oauthbearer.sasl.jaas.config": f"{LOGIN}.oauthbearer.OAuthBearerLoginModule required;",
            "listener.name.oauth.oauthbearer.sasl.server.callback.handler.class": (
                f"{LOGIN}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": store,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": authority.certificate,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:ANONYMOUS",  # anonymous are clients of the inner listeners
        }

    def admin(self) -> AdminClient:
        """A client that may do everything."""
        return AdminClient({**self.admin_properties, "bootstrap.servers": self.bootstrap})

    def add_user(self, name: str, password: str) -> None:
        """Let `name` in with SCRAM-SHA-512; also changes the password."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, SCRAM_ITERATIONS)
        change = UserScramCredentialUpsertion(name, info, password.encode())
        admin = self.admin()  # kept: its promises end with it
        for done in admin.alter_user_scram_credentials([change]).values():
            done.result(REQUEST_TIMEOUT_S)

    def create(self, name: str, config: dict[str, str] | None = None) -> None:
        """A topic of exactly this name."""
        admin = self.admin()
        new = NewTopic(name, num_partitions=1, replication_factor=1, config=config or {})
        admin.create_topics([new])[name].result(REQUEST_TIMEOUT_S)

    def grant(self, user: str, kind: str, name: str, operations: list[str], *, prefixed: bool = False) -> None:
        """Allow `user` these operations, by Kafka's names in any spelling (`DescribeConfigs`, `DESCRIBE_CONFIGS`)."""
        pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
        known: dict[str, Any] = {operation.name.replace("_", "").lower(): operation for operation in AclOperation}
        bindings = [
            AclBinding(
                ResourceType[kind],
                name,
                pattern,
                f"User:{user}",
                "*",
                known[operation.replace("_", "").lower()],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
        admin = self.admin()
        for done in admin.create_acls(bindings).values():
            done.result(REQUEST_TIMEOUT_S)


def client_properties(authority: Authority, name: str, password: str | None = None) -> dict[str, str]:
    """A client's files for TLS, with a new certificate of its own."""
    key, certificate = authority.issue(name, password)
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(authority.certificate),
        "ssl.key.location": str(key),
        "ssl.certificate.location": str(certificate),
    }
