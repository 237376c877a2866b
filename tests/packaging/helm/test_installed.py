"""The chart in a real Kubernetes API: strictly validated, admitted as restricted, rolled out, upgraded, removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dev.harness.waiting import wait_until
from tests.packaging.helm import kubernetes
from tests.packaging.helm.chart import CHART, RELEASE, helm, needs_helm, template
from tests.packaging.helm.kubernetes import Kubernetes
from tests.packaging.helm.test_chart import LEAST, MATRIX

pytestmark = [
    needs_helm,
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(kubernetes.missing()), reason=f"no Kubernetes here: {', '.join(kubernetes.missing())}"),
]

NAME, NAMESPACE = RELEASE
REPLICAS: Final = 2
GONE_S_MAX: Final = 60
EVERYTHING: Final = {
    "replicas": REPLICAS,
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "networkPolicy": {"enabled": True},
}
STORAGE: Final[list[dict[str, Any]]] = [
    {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "none", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
    },
    *(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"volume-{number}"},
            "spec": {
                "storageClassName": "none",
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "100Gi"},
                "hostPath": {"path": "/nowhere"},
            },
        }
        for number in range(REPLICAS)
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """A cluster with volumes, the monitoring CRDs, and a namespace that admits restricted pods only."""
    with kubernetes.running(tmp_path_factory.mktemp("kubernetes")) as cluster:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
        cluster.apply(*STORAGE)
        crds = sorted((kubernetes.directory() / "crds").glob("*.yaml"))
        for path in crds:
            cluster.kubectl("apply", "--server-side", "--filename", str(path))
        for path in crds:
            cluster.kubectl("wait", "--for=condition=Established", "--filename", str(path), "--timeout=30s")
        yield cluster


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_every_manifest_is_accepted(cluster: Kubernetes, tmp_path: Path, values: dict[str, Any]) -> None:
    """By the server, with all its admission, and without a field that it does not know."""
    manifests = template(tmp_path, LEAST, values)
    accounts = [manifest for manifest in manifests if manifest["kind"] == "ServiceAccount"]
    if accounts:
        cluster.apply(*accounts)  # without its account no pod is admitted, not even in a dry run
    strictly = ("--dry-run=server", "--validate=strict", "--filename", "-")
    try:
        cluster.kubectl("apply", *strictly, given=yaml.safe_dump_all(manifests))
    finally:
        for account in accounts:
            cluster.kubectl("delete", "serviceaccount", account["metadata"]["name"], "--namespace", NAMESPACE)


def test_it_is_installed_upgraded_and_removed(cluster: Kubernetes, tmp_path: Path) -> None:
    """All pods are admitted and ready; a changed configuration replaces each; nothing is left in the end."""
    values, changed = tmp_path / "values.yaml", tmp_path / "changed.yaml"
    values.write_text(yaml.safe_dump({**LEAST, **EVERYTHING}))
    changed.write_text(yaml.safe_dump({"config": {"delay": {"max": "7d"}}}))
    to = ("--namespace", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig))
    wait = ("--wait", "--timeout", "50s")
    pods = ("pods", "--namespace", NAMESPACE, "--selector", f"app.kubernetes.io/instance={NAME}")

    helm("install", NAME, str(CHART), *to, *wait, "--values", str(values))
    first = {pod["metadata"]["uid"] for pod in cluster.get(*pods)}
    assert len(first) == REPLICAS and all(map(kubernetes.is_ready, cluster.get(*pods)))
    claims = cluster.get("persistentvolumeclaims", "--namespace", NAMESPACE)
    assert [claim["status"]["phase"] for claim in claims] == ["Bound"] * REPLICAS
    [rule] = cluster.get("prometheusrules", "--namespace", NAMESPACE)
    assert rule["spec"]["groups"]

    helm("upgrade", NAME, str(CHART), *to, *wait, "--reuse-values", "--values", str(changed))
    second = {pod["metadata"]["uid"] for pod in cluster.get(*pods)}
    assert len(second) == REPLICAS and not first & second, "the checksum of the configuration has changed"
    [stateful] = cluster.get("statefulsets", "--namespace", NAMESPACE)
    assert stateful["status"]["updatedReplicas"] == stateful["status"]["readyReplicas"] == REPLICAS

    helm("upgrade", NAME, str(CHART), *to, *wait, "--reuse-values")
    assert {pod["metadata"]["uid"] for pod in cluster.get(*pods)} == second, "nothing has changed"

    helm("uninstall", NAME, *to, *wait)
    wait_until(lambda: not cluster.get(*pods), GONE_S_MAX, "no pod is left")
    left = cluster.get("all,configmaps,secrets,networkpolicies,poddisruptionbudgets", "--namespace", NAMESPACE)
    assert [each["metadata"]["name"] for each in left] == ["kube-root-ca.crt"]
    volumes = ("persistentvolumeclaims", "--namespace", NAMESPACE)
    wait_until(lambda: not cluster.get(*volumes), GONE_S_MAX, "no volume is left: they hold an index only")
