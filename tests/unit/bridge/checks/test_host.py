"""bridge.checks.host: how Spark's Java client and shared storage are tried."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from bridge.checks.host import check_java_client, check_remote
from bridge.install.connector import FRAME_WRITER
from bridge.settings.model import Settings


def test_the_java_client_is_tried_with_the_options_that_it_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies, trust stores and logins are Java's properties: without them the check would fail where a start works."""
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text('#!/bin/sh\ncase "$*" in *-Da=b*) ;; *) echo no; exit 1;; esac\n')
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    jars = [tmp_path / "kafka-clients.jar", tmp_path / FRAME_WRITER]
    statuses = [
        [
            each.status
            for each in check_java_client(
                mock.Mock(
                    settings=Settings.of({"spark": {"conf": {"spark.driver.extraJavaOptions": options}}}),
                    connector_jars=lambda: jars,
                    timeout_s=1.0,
                )
            )
        ]
        for options in ("-Xmx1g -Da=b", "-Xmx1g")
    ]
    assert statuses == [["ok"], ["failed"]]


def test_shared_storage_is_tried_as_the_bridge_uses_it(tmp_path: Path) -> None:
    """Nothing stays there. Without it, or with trouble, a start goes on: that is a warning at most."""

    def statuses(remote: str | None) -> list[str]:
        context = mock.Mock(settings=Settings.of({"store": {"remote": remote}}))
        return [each.status for each in check_remote(context)]

    (tmp_path / "there").mkdir()
    assert statuses(f"file://{tmp_path}/there") == ["ok"]
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert statuses(f"file://{tmp_path}/missing") == ["warning"]
    assert statuses(None) == []
