"""A Kubernetes API with controllers and a scheduler, but without machines: of every pod is said that it is ready.

Validation, defaults, admission and roll-outs are Kubernetes' own; images, probes and volumes are not used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import yaml

from dev.broker.embedded import free_ports
from dev.harness.waiting import wait_until
from tests.paths import ROOT

PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
TOKEN: Final = "of-this-test-only"
START_S_MAX: Final = 60
CALL_S_MAX: Final = 60
STOP_S_MAX: Final = 10
PRETENCE_S: Final = 0.2
NODE: Final = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "nowhere", "labels": {"kubernetes.io/hostname": "nowhere"}},
}
ROOM: Final = {
    "conditions": [{"type": "Ready", "status": "True"}],
    "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "100", "ephemeral-storage": "1Ti"},
}
READY: Final = {
    "phase": "Running",
    "conditions": [{"type": each, "status": "True"} for each in ("Ready", "PodScheduled")],
}


def directory() -> Path:
    """Where `make kubernetes` puts the programs."""
    return Path(os.environ.get("DELAY_BRIDGE_CACHE") or ROOT / ".cache") / "bin"


def missing() -> list[str]:
    """What this machine lacks for a cluster."""
    absent = [name for name in PROGRAMS if not (directory() / name).exists()]
    return absent + [name for name in ("etcd", "openssl") if shutil.which(name) is None]


class Kubernetes:
    """A running API; `kubectl` and `helm` talk to it by the file `kubeconfig`."""

    def __init__(self, scratch: Path, port: int) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self.kubeconfig = scratch / "kubeconfig"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run it; returns standard output. Raises AssertionError with its output."""
        command = [str(directory() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=CALL_S_MAX, check=False)
        assert ran.returncode == 0, f"kubectl {' '.join(arguments)}: {ran.stderr}"
        return ran.stdout

    def get(self, *what: str) -> Any:
        """An object, or a list of them."""
        found = json.loads(self.kubectl("get", *what, "--output", "json"))
        return found["items"] if found["kind"] == "List" else found

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Make these."""
        self.kubectl("apply", "--server-side", "--filename", "-", given=yaml.safe_dump_all(manifests))

    def set_status(self, what: str, status: Mapping[str, Any], *options: str) -> None:
        """Say of a node or a pod how it is."""
        patch = json.dumps({"status": status})
        self.kubectl("patch", what, *options, "--subresource=status", "--type=merge", "--patch", patch)


@contextmanager
def running(scratch: Path) -> Iterator[Kubernetes]:
    """A cluster of one node that is none. Its processes end with the context."""
    etcd, peer, api, controller, scheduler = free_ports(5)
    cluster, key = Kubernetes(scratch, api), scratch / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (scratch / "tokens.csv").write_text(f"{TOKEN},admin,1,system:masters\n")
    client = ["--kubeconfig", str(cluster.kubeconfig)]
    with ExitStack() as stack:

        def start(name: str, program: str, *options: str) -> None:
            stack.enter_context(process(scratch / f"{name}.log", [program, *options]))

        start(
            *("etcd", "etcd", "--data-dir", str(scratch / "etcd"), "--log-level", "error", "--unsafe-no-fsync"),
            *(
                "--listen-client-urls",
                f"http://127.0.0.1:{etcd}",
                "--advertise-client-urls",
                f"http://127.0.0.1:{etcd}",
            ),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
        )
        start(
            *("kube-apiserver", str(directory() / "kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{etcd}"),
            *("--secure-port", str(api), "--bind-address", "127.0.0.1", "--cert-dir", str(scratch / "certificates")),
            *("--token-auth-file", str(scratch / "tokens.csv"), "--authorization-mode", "RBAC"),
            *("--service-account-issuer", cluster.url, "--service-account-key-file", str(key)),
            *("--service-account-signing-key-file", str(key), "--service-cluster-ip-range", "10.0.0.0/24"),
        )
        wait_until(lambda: is_up(cluster), START_S_MAX, lambda: tail(scratch / "kube-apiserver.log"))
        leader = ["--leader-elect=false", "--bind-address", "127.0.0.1"]
        start(
            *("kube-controller-manager", str(directory() / "kube-controller-manager"), *client, *leader),
            *("--secure-port", str(controller), "--service-account-private-key-file", str(key)),
            *("--root-ca-file", str(scratch / "certificates" / "apiserver.crt"), "--use-service-account-credentials"),
            "--node-monitor-grace-period=1h",
        )
        start(
            *("kube-scheduler", str(directory() / "kube-scheduler"), *client, *leader),
            *("--secure-port", str(scheduler)),
        )
        cluster.apply(NODE)
        cluster.set_status("node/nowhere", ROOM)
        cluster.kubectl("taint", "nodes", "--all", "node.kubernetes.io/not-ready-")
        stack.enter_context(pretending(cluster))
        yield cluster


@contextmanager
def pretending(cluster: Kubernetes) -> Iterator[None]:
    """In place of a kubelet: a pod with a node is ready, a deleted pod is gone."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(PRETENCE_S):
            with suppress(AssertionError):  # it is another's by now, or gone
                for pod in cluster.get("pods", "--all-namespaces"):
                    name, within = pod["metadata"]["name"], ("--namespace", pod["metadata"]["namespace"])
                    if "deletionTimestamp" in pod["metadata"]:
                        cluster.kubectl("delete", "pod", name, *within, "--force", "--grace-period=0", "--wait=false")
                    elif pod["spec"].get("nodeName") and not is_ready(pod):
                        cluster.set_status(f"pod/{name}", READY, *within)

    thread = threading.Thread(target=run, name="kubelet")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_up(cluster: Kubernetes) -> bool:
    """Whether the API answers."""
    with suppress(AssertionError, subprocess.TimeoutExpired):
        return cluster.kubectl("get", "--raw", "/readyz") == "ok"
    return False


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether a node, or a pod, says so."""
    conditions = node["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-2_000:]


@contextmanager
def process(log: Path, command: Sequence[str]) -> Iterator[None]:
    """A program that runs for as long as the context lasts."""
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
        try:
            yield
        finally:
            started.terminate()
            try:
                started.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
