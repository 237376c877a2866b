"""Renders the chart as `helm install` would see it, and finds the helm to do so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.paths import ROOT

CHART: Final = ROOT / "helm" / "delay-bridge"
KUBERNETES: Final = "1.34"
RELEASE: Final = ("orders", "shop")
"""Name and namespace of the release in all tests."""
TIMEOUT_S: Final = 60

Manifest = dict[str, Any]


def program() -> str | None:
    """The path of helm, from `make helm` or the PATH."""
    built = Path(os.environ.get("DELAY_BRIDGE_CACHE") or ROOT / ".cache") / "bin" / "helm"
    return str(built) if built.exists() else shutil.which("helm")


needs_helm: Final = pytest.mark.skipif(program() is None, reason="no helm on this machine: `make helm` builds one")


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """Helm's words."""

    text: str


def helm(*arguments: str) -> str:
    """Run it; returns standard output. Raises Refused."""
    found = program()
    assert found is not None
    run = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if run.returncode != 0:
        raise Refused(run.stdout + run.stderr)
    return run.stdout


def template(directory: Path, *values: Mapping[str, Any], show: Sequence[str] = ()) -> list[Manifest]:
    """The manifests for these values, one laid over the other. `directory` is a scratch directory. Raises Refused."""
    name, namespace = RELEASE
    arguments = [
        *("template", name, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES),
        *(word for path in show for word in ("--show-only", path)),
    ]
    for number, layer in enumerate(values):
        path = directory / f"values-{number}.yaml"
        path.write_text(yaml.safe_dump(dict(layer)))
        arguments += ["--values", str(path)]
    return [manifest for manifest in yaml.safe_load_all(helm(*arguments)) if manifest]
