"""Certificates and passwords that are replaced under a running bridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from bridge.configuration import reader
from bridge.credentials import Credentials
from bridge.errors import EnvironmentFailure
from bridge.settings import Settings, plain


@dataclass
class Site:
    """A configuration with a certificate and a password in files, and brokers that may refuse it."""

    directory: Path
    read: Callable[[], Settings]
    refuses: bool = False
    renewed: list[Settings] = field(default_factory=list)
    verified: int = 0

    def credentials(self) -> Credentials:
        return Credentials(self.read(), read=self.read, verify=self._verify, on_renewed=self.renewed.append)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def _verify(self, _: Settings) -> None:
        self.verified += 1
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
    env = {"ID": "orders"}
    read = reader(config, env)
    env["ID"] = "others"
    config.write_text("bridge: {id: others}")
    return Site(tmp_path, read)


def test_nothing_happens_while_nothing_changes(site: Site) -> None:
    """No connection is made to find that out."""
    credentials = site.credentials()
    site.write("ca.pem", "authority")
    assert [credentials.look() for _ in range(3)] == [False] * 3
    assert (site.renewed, site.verified, credentials.alarms()) == ([], 0, ())


@pytest.mark.parametrize("name", ["ca.pem", "password"])
def test_what_is_replaced_is_tried_and_taken_over_once_it_has_settled(site: Site, name: str) -> None:
    """Key and certificate are replaced one after the other: what has just changed is looked at again first."""
    credentials = site.credentials()
    site.write(name, "half of it")
    assert credentials.look()
    site.write(name, "second")
    assert credentials.look()
    assert not site.verified
    assert not credentials.look()
    (settings,) = site.renewed
    assert plain(settings.kafka.common["sasl.password"]) == ("second" if name == "password" else "first")
    assert "second" in settings.secrets() or name == "ca.pem"
    assert not credentials.look()
    assert len(site.renewed) == 1


def test_what_does_not_work_leaves_the_old_in_force_and_is_told(site: Site) -> None:
    """A mistake must not take down a bridge that runs; corrected, it is taken over."""
    credentials = site.credentials()
    site.refuses = True
    site.write("password", "wrong")
    for _ in range(3):
        credentials.look()
    assert site.renewed == []
    (alarm,) = credentials.alarms()
    assert "the old ones stay in force: cannot reach the brokers" in alarm
    assert "wrong" not in alarm
    site.refuses = False
    credentials.look()
    assert (len(site.renewed), credentials.alarms()) == (1, ())


def test_a_file_that_is_missing_for_a_moment_does_no_harm(site: Site) -> None:
    """It is an alarm until it is back."""
    credentials = site.credentials()
    (site.directory / "password").unlink()
    assert not credentials.look()
    assert "cannot read" in credentials.alarms()[0]
    site.write("password", "first")
    assert not credentials.look()
    assert (site.renewed, credentials.alarms()) == ([], ())


def test_only_secrets_change(site: Site) -> None:
    """The configuration itself is read at the start: what else was edited meanwhile waits for the next one."""
    credentials = site.credentials()
    site.write("password", "second")
    credentials.look()
    credentials.look()
    assert site.renewed[0].bridge.id == "orders"
