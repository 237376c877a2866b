"""Renders the chart as `helm install` would see it, and finds the helm to do so."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dev.harness.pace import scaled
from tests.packaging.programs import program
from tests.paths import ROOT

CHART: Final = ROOT / "helm" / "delay-bridge"
KUBERNETES: Final = "1.34"
RELEASE: Final = ("orders", "shop")
"""Name and namespace of the release in all tests."""
TIMEOUT_S: Final = 60

Manifest = dict[str, Any]


needs_helm: Final = pytest.mark.skipif(program("helm") is None, reason="no helm: this machine has no Go to build it")


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """Helm's words."""

    text: str


def helm(*arguments: str) -> str:
    """Run it; returns standard output. Raises Refused."""
    found = program("helm")
    assert found is not None
    run = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=scaled(TIMEOUT_S), check=False)
    if run.returncode != 0:
        raise Refused(run.stdout + run.stderr)
    return run.stdout


def template(
    directory: Path, *values: Mapping[str, Any], show: Sequence[str] = (), release: str = RELEASE[0]
) -> list[Manifest]:
    """The manifests for these values, one laid over the other. `directory` is a scratch directory. Raises Refused."""
    name, namespace = release, RELEASE[1]
    arguments = [
        *("template", name, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES),
        *(word for path in show for word in ("--show-only", path)),
    ]
    for number, layer in enumerate(values):
        path = directory / f"values-{number}.yaml"
        path.write_text(yaml.safe_dump(dict(layer)))
        arguments += ["--values", str(path)]
    return [manifest for manifest in yaml.safe_load_all(helm(*arguments)) if manifest]
