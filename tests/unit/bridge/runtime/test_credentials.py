"""Certificates and passwords that are replaced under a running bridge."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import yaml

from bridge.checks.run import run_checks
from bridge.client import DelayClient
from bridge.commands.tail import Tail
from bridge.delivery.targets.look_up import TargetLookUp
from bridge.errors import EnvironmentFailure
from bridge.kafka.admin import Cluster
from bridge.kafka.releases import api_versions
from bridge.runtime.credentials import LOOK_S, STABLE_S, Credentials
from bridge.settings.clients import librdkafka
from bridge.settings.load import load
from bridge.settings.model import Settings
from bridge.settings.secrets import unmasked
from tests.system.secure import Authority
from timerstore.clock import SystemClock


@dataclass
class Site:
    """A configuration with a certificate and a password in files, and brokers that may refuse it."""

    directory: Path
    read: Callable[[], Settings]
    refuses: bool = False
    replaced: list[bool] = field(default_factory=list)
    verified: list[Settings] = field(default_factory=list)

    def credentials(self) -> Credentials:
        return Credentials(
            self.read(), read=self.read, verify=self._verify, on_replaced=lambda: self.replaced.append(True)
        )

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def _verify(self, settings: Settings) -> None:
        self.verified.append(settings)
        if self.refuses:
            raise EnvironmentFailure("cannot reach the brokers", hint="look at them")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Files as they are at the start."""
    (tmp_path / "ca.pem").write_text("authority")
    (tmp_path / "password").write_text("first")
    common = {"sasl.password_file": str(tmp_path / "password"), "ssl.ca.location": str(tmp_path / "ca.pem")}
    config = tmp_path / "bridge.yaml"
    config.write_text(yaml.safe_dump({"bridge": {"id": "${env:ID}"}, "kafka": {"common": common}}))
    return Site(tmp_path, partial(load, config, {"ID": "orders"}))


def test_nothing_happens_while_nothing_changes(site: Site) -> None:
    """No connection is made to find that out."""
    credentials = site.credentials()
    site.write("ca.pem", "authority")
    assert [credentials.look() for _ in range(3)] == [LOOK_S] * 3
    assert (site.replaced, site.verified, credentials.alarms()) == ([], [], ())


@pytest.mark.parametrize("name", ["ca.pem", "password"])
def test_what_is_replaced_is_tried_and_taken_over_once_it_has_settled(site: Site, name: str) -> None:
    """Key and certificate are replaced one after the other: what has just changed is looked at again first."""
    credentials = site.credentials()
    site.write(name, "half of it")
    assert credentials.look() == STABLE_S
    site.write(name, "second")
    assert credentials.look() == STABLE_S
    assert not site.verified
    assert credentials.look() == LOOK_S
    assert len(site.replaced) == 1
    assert unmasked(site.verified[0].kafka.common["sasl.password"]) == ("second" if name == "password" else "first")
    assert credentials.look() == LOOK_S
    assert len(site.replaced) == 1


def test_what_does_not_work_leaves_the_old_in_force_and_is_told(site: Site) -> None:
    """A mistake must not take down a bridge that runs; corrected, it is taken over."""
    credentials = site.credentials()
    site.refuses = True
    site.write("password", "wrong")
    for _ in range(3):
        credentials.look()
    assert site.replaced == []
    (alarm,) = credentials.alarms()
    assert "the old ones stay in force: cannot reach the brokers" in alarm
    assert "wrong" not in alarm
    site.refuses = False
    credentials.look()
    assert (len(site.replaced), credentials.alarms()) == (1, ())


def test_a_file_that_is_missing_for_a_moment_does_no_harm(site: Site) -> None:
    """It is an alarm until it is back."""
    credentials = site.credentials()
    (site.directory / "password").unlink()
    assert credentials.look() == LOOK_S
    assert "cannot read" in credentials.alarms()[0]
    site.write("password", "first")
    assert credentials.look() == LOOK_S
    assert (site.replaced, credentials.alarms()) == ([], ())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_a_key_and_its_certificate_may_be_replaced_seconds_apart(tmp_path: Path) -> None:
    """In between they do not belong together, and no client can be made: an alarm, and both are taken over later."""
    authority = Authority(tmp_path / "ca")
    key, certificate = authority.issue("bridge")
    new_key, new_certificate = authority.issue("other")
    common = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SSL",
        "ssl.key.location": str(key),
        "ssl.certificate.location": str(certificate),
    }
    settings = Settings.of({"kafka": {"common": common}})
    replaced: list[bool] = []
    credentials = Credentials(
        settings, read=lambda: settings, verify=Cluster, on_replaced=lambda: replaced.append(True)
    )
    new_key.replace(key)
    assert credentials.look() == STABLE_S, "something has changed, and may not be complete"
    for _ in range(3):
        assert credentials.look() == LOOK_S
        (alarm,) = credentials.alarms()
        assert "a Kafka client cannot be created" in alarm and "key" in alarm
    new_certificate.replace(certificate)
    assert credentials.look() == STABLE_S
    assert credentials.look() == LOOK_S
    assert (len(replaced), credentials.alarms()) == (1, ())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
@pytest.mark.parametrize("broken", ["nonsense", "of another key"])
def test_a_certificate_that_cannot_be_used_is_the_environments_failure(tmp_path: Path, broken: str) -> None:
    """At the start, too: status 3 and a remedy, whichever client meets it first."""
    authority = Authority(tmp_path / "ca")
    key, certificate = authority.issue("bridge")
    if broken == "nonsense":
        certificate.write_text("nonsense")
    else:
        certificate.write_text(authority.issue("other")[1].read_text())
    common = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SSL",
        "ssl.key.location": str(key),
        "ssl.certificate.location": str(certificate),
    }
    settings = Settings.of({"kafka": {"common": common}})
    clients: list[Callable[[], object]] = [
        lambda: Cluster(settings),
        lambda: run_checks(settings),
        lambda: api_versions(settings),
        lambda: TargetLookUp(librdkafka(settings, "admin")),
        lambda: Tail({**librdkafka(settings, "consumer")}, ["t"], SystemClock()),
        lambda: DelayClient(common),
    ]
    for make in clients:
        with pytest.raises(EnvironmentFailure, match="certificate and key") as refused:
            make()
        assert refused.value.exit_code == 3


def test_whatever_is_raised_is_told_and_ends_nothing(site: Site) -> None:
    """It is seen while it lasts, without what the exception says, and the files are looked at again."""
    failing = True

    def reads() -> Settings:
        if failing:
            raise RuntimeError("canary")
        return site.read()

    credentials = Credentials(
        site.read(), read=reads, verify=lambda _: None, on_replaced=lambda: site.replaced.append(True)
    )
    credentials.look()
    assert "RuntimeError" in credentials.alarms()[0] and "canary" not in credentials.alarms()[0]
    site.write("password", "second")
    failing = False
    credentials.look()
    credentials.look()
    assert (len(site.replaced), credentials.alarms()) == (1, ())


def test_what_the_next_start_would_refuse_is_told_before(site: Site) -> None:
    """The configuration is read as a start would read it: a restart in place must not end in status 2."""
    credentials = site.credentials()
    (site.directory / "bridge.yaml").write_text("brigde: {id: orders}")
    assert credentials.look() == LOOK_S
    assert "unknown key brigde" in credentials.alarms()[0]
    assert site.replaced == []
