"""One life of the image, told as JSON: `python -m tests.packaging.image.scenario IMAGE NETWORK [UID]`.

Runs inside the network that the container has, so that broker, bridge and this program share a loopback and, where that
network is `container:...` of one without a network, nothing else.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any, Final

import docker

from dev.broker import EmbeddedBroker
from dev.broker.embedded import free_ports
from dev.harness.kafka import Topics
from dev.harness.waiting import wait_until

READY_S_MAX: Final = 180
HEALTHY_S_MAX: Final = 60
STOP_S_MAX: Final = 15
MEMORY: Final = "1536m"


def main(image: str, network: str, user: str) -> dict[str, Any]:
    """Start, deliver, stop; returns the observations."""
    client = docker.from_env()
    (port,) = free_ports(1)
    with EmbeddedBroker(tmpfs=True) as broker:
        topics = Topics(broker.bootstrap)
        target = topics.create("orders")
        container = client.containers.run(
            image,
            detach=True,
            network_mode=network,
            user=f"{user}:{user}",
            read_only=True,
            tmpfs={"/tmp": "rw,exec,mode=1777"},
            mem_limit=MEMORY,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            environment={
                "DELAY_BRIDGE__KAFKA__COMMON__BOOTSTRAP_SERVERS": broker.bootstrap,
                "DELAY_BRIDGE__HTTP__PORT": str(port),
                "DELAY_BRIDGE__HTTP__API_PORT": "0",
                "HEALTH_URL": f"http://127.0.0.1:{port}/livez",
            },
        )
        try:
            wait_until(
                lambda: _running(container) and _status(port) == 200, READY_S_MAX, lambda: container.logs().decode()
            )
            sent = container.exec_run(
                ["delay-bridge", "send", "--to", target, "--after", "2s", "--wait", "60s", "hello"]
            )
            wait_until(lambda: _health(container) == "healthy", HEALTHY_S_MAX, lambda: _health(container))
            user_id = container.exec_run(["id", "-u"])
            memory = container.stats(stream=False)["memory_stats"]
            container.stop(timeout=STOP_S_MAX)
            return {
                "send": [sent.exit_code, sent.output.decode()],
                "uid": user_id.output.decode().strip(),
                "memory_mib": memory.get("max_usage", memory.get("usage", 0)) >> 20,
                "end": container.wait()["StatusCode"],
                "log": container.logs().decode(),
            }
        finally:
            container.remove(force=True, v=True)


def _running(container: Any) -> bool:
    container.reload()
    assert container.status == "running", f"{container.status}: {container.logs().decode()}"
    return True


def _health(container: Any) -> str:
    container.reload()
    return str(container.attrs["State"]["Health"]["Status"])


def _status(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
