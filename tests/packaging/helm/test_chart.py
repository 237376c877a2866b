"""The chart: it refuses or renders values, and Kubernetes and the bridge accept its manifests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml

from bridge.settings.load import load
from bridge.settings.model import Settings
from release.chart import CHART, documented, generated_files
from tests.packaging.helm.chart import KUBERNETES, Manifest, Refused, helm, needs_helm, template

HERE: Final = Path(__file__).parent
SNAPSHOTS: Final = HERE / "snapshots"
KUBERNETES_VERSIONS: Final = ("1.29", "1.32", "1.35")
FULL: Final = yaml.safe_load((HERE / "full.yaml").read_text())
LEAST: Final = {"config": {"kafka": {"common": {"bootstrap.servers": "kafka:9092"}}}}

MATRIX: Final[dict[str, dict[str, Any]]] = {
    "least": {},
    "full": FULL,
    "no volume": {"persistence": {"enabled": False}},
    "no account": {"serviceAccount": {"create": False}, "test": {"enabled": False}},
    "three replicas": {"replicas": 3},
    "no replica": {"replicas": 0},
    "digest": {"image": {"digest": "sha256:" + 64 * "0"}},
    "TLS without user": {"kafka": {"tls": {"existingSecret": "tls", "certKey": "tls.crt", "keyKey": "tls.key"}}},
    "no limit": {"resources": {"limits": None}},
    "another port": {"config": {"http": {"port": 9000}}, "podMonitor": {"enabled": True}},
    "TLS inside": {
        "config": {"http": {"certificate_file": "/etc/tls/tls.crt", "key_file": "/etc/tls/tls.key"}},
        "podMonitor": {"enabled": True, "tlsConfig": {"insecureSkipVerify": True}},
    },
    "API outside": {"api": {"service": {"enabled": True, "type": "LoadBalancer"}}},
    "token": {"api": {"existingSecret": "api", "passwordKey": "", "tokenKey": "token"}},
    "no storage class": {"persistence": {"storageClass": "-"}},
    "looks like something else": {
        "nameOverride": "123",
        "priorityClassName": "1",
        "imagePullSecrets": [{"name": "0x1"}],
        "persistence": {"storageClass": "true", "annotations": {"a": "yes"}, "size": 10737418240},
        "podLabels": {"on": "off"},
        "podAnnotations": {"a": "1"},
        "nodeSelector": {"a": "null"},
        "extraEnv": [{"name": "A", "value": "1"}],
        "serviceAccount": {"name": "1"},
        "scratch": {"tmpSize": 1073741824},
        "test": {"topic": "on", "delayTopic": "2"},
        "kafka": {"sasl": {"existingSecret": "5"}},
    },
    "long name": {"nameOverride": "a-name-that-is-much-longer-than-the-sixty-three-characters-of-a-label"},
}


# --- without helm ----------------------------------------------------------------------------------------------------


def test_what_is_generated_is_up_to_date() -> None:
    """Schema, table and copies are what `make chart` writes from the settings, the values and config/ of now."""
    old = [path.name for path, text in generated_files().items() if path.read_text(encoding="utf-8") != text]
    assert not old, f"run `make chart`: {old}"


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here


def test_every_value_is_explained() -> None:
    """Each has a `# --` comment of its own, or stands below a key that has one for all of it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    explained = {value.path.replace('"', "") for value in documented(text)}
    for leaf in leaves(yaml.safe_load(text)):
        above = {leaf[: at.start()] for at in re.finditer(r"\.", leaf)} - {"config"}
        assert leaf in explained or above & explained, leaf


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": -1}, "replicas"),
        ({"config": {"store": {"flush_byte": 1}}}, "flush_byte"),
        ({"config": {"delay": {"max": "10 parsecs"}}}, "delay/max"),
        ({"config": {"http": {"port": 65_536}}}, "http/port"),
        ({"config": {"delivery": {"mode": "at-most-once"}}}, "delivery/mode"),
        ({"config": {"delay_topics": {"a": {"targets": "b"}}}}, "delay_topics/a"),
        ({"image": {"digest": "latest"}}, "image/digest"),
        ({"persistence": {"retention": {"whenScaled": "Keep"}}}, "whenScaled"),
        ({"networkPolicy": {"brokerPorts": ["kafka"]}}, "brokerPorts"),
        ({"podAnnotations": {"a": 1}}, "podAnnotations"),
        ({"podLabels": {"a": True}}, "podLabels"),
        ({"nodeSelector": {"a": None}}, "nodeSelector"),
        ({"service": {"annotations": {"a": 1.5}}}, "service/annotations"),
        ({"podMonitor": {"labels": {"a": 1}}}, "podMonitor/labels"),
        ({"extraEnv": [{"name": "A", "value": 1}]}, "extraEnv"),
        ({"fullnameOverride": "Orders.1"}, "fullnameOverride"),
    ],
    ids=str,
)
def test_the_schema_refuses(values: dict[str, Any], place: str) -> None:
    """Unknown keys and wrong values, of the chart and of the bridge, with their place."""
    validator = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    problems = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(values)
    ]
    assert len(problems) == 1 and place in problems[0], problems


@pytest.mark.parametrize(
    "config",
    [
        yaml.safe_load((CHART.parents[1] / "config" / "bridge.yaml").read_text()),
        {"http": {"port": "{{ .Values.port }}"}, "delay": {"max": "${env:LONGEST}"}},
        {"ready_rows": {"bytes": 1_000_000}, "delay_topics": {"{{ .Release.Name }}": {"target": None}}},
    ],
    ids=["every key", "templates and references", "numbers and names"],
)
def test_the_schema_takes_what_the_bridge_takes(config: dict[str, Any]) -> None:
    """Every key of config/bridge.yaml with its default, and values that are known only later."""
    jsonschema.validate({"config": config}, json.loads((CHART / "values.schema.json").read_text()))


def snapshots() -> list[Manifest]:
    return [yaml.safe_load(path.read_text()) for path in sorted(SNAPSHOTS.glob("*.yaml"))]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_snapshots_are_valid_for_kubernetes(version: str) -> None:
    """Each kind, with everything on, in the strict schema of three versions."""
    kinds = [validated(manifest, version) for manifest in snapshots()]
    assert kinds.count(True) >= 10 and kinds.count(False) == 3, "three kinds are Prometheus Operator's"


def validated(manifest: Manifest, version: str) -> bool:
    """Whether Kubernetes knows the kind. Raises ValidationError if it knows it otherwise."""
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        return False
    kubernetes_validate.validate(manifest, version, strict=True)
    return True


def test_the_configuration_in_the_snapshot_is_the_bridges(tmp_path: Path) -> None:
    """Every key that the chart itself sets exists, and large numbers are still whole ones."""
    settings = configuration(next(m for m in snapshots() if "bridge.yaml" in m.get("data", {})), tmp_path)
    assert settings.bridge.id == "bridge-of-orders"
    assert (settings.ready_rows.bytes, settings.spark.driver_memory) == (268_435_456, 1 << 30)
    assert list(settings.delay_topics) == ["orders.delay"]


def configuration(config_map: Manifest, directory: Path) -> Settings:
    """The settings that a pod would read, its secrets at hand."""
    text: str = config_map["data"]["bridge.yaml"]
    for name in set(re.findall(r"/etc/delay-bridge/(?:sasl|api)/\w+", text)):
        (directory / Path(name).name).write_text("secret")
        text = text.replace(name, str(directory / Path(name).name))
    text = re.sub(r" +ssl\..*: .*\n", "", text)  # certificates would have to be real
    (directory / "bridge.yaml").write_text(text)
    return load(directory / "bridge.yaml", {})


# --- with helm -------------------------------------------------------------------------------------------------------


def key_of(manifest: Manifest) -> str:
    """The name of its snapshot: kind, and what tells two of a kind apart."""
    suffix = str(manifest["metadata"]["name"]).removeprefix("orders-delay-bridge")
    return f"{manifest['kind'].lower()}{suffix}"


@needs_helm
def test_what_is_rendered_is_the_snapshot(tmp_path: Path) -> None:
    """One file for each object; `make chart SNAPSHOTS=1` writes them."""
    rendered = {key_of(manifest): manifest for manifest in template(tmp_path, FULL)}
    if os.environ.get("SNAPSHOTS") == "write":
        SNAPSHOTS.mkdir(exist_ok=True)
        for path in SNAPSHOTS.glob("*.yaml"):
            path.unlink()
        for key, manifest in rendered.items():
            (SNAPSHOTS / f"{key}.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False, width=120))
    assert {path.stem: yaml.safe_load(path.read_text()) for path in SNAPSHOTS.glob("*.yaml")} == rendered


@needs_helm
def test_helm_has_nothing_to_say(tmp_path: Path) -> None:
    """`helm lint --strict` with the least and with all values."""
    for name, values in {"least": LEAST, "full": FULL}.items():
        (tmp_path / name).write_text(yaml.safe_dump(values))
        said = helm("lint", str(CHART), "--strict", "--kube-version", "1.34", "--values", str(tmp_path / name))
        assert "[ERROR]" not in said and "[WARNING]" not in said


@needs_helm
@pytest.mark.parametrize("name", MATRIX)
def test_every_variant_is_valid(name: str, tmp_path: Path) -> None:
    """Valid for Kubernetes, restricted, and with a configuration that the bridge takes."""
    manifests = template(tmp_path, LEAST, MATRIX[name])
    for manifest in manifests:
        for version in KUBERNETES_VERSIONS:
            validated(manifest, version)
        assert len(manifest["metadata"]["name"]) <= 63
    configuration(next(m for m in manifests if "bridge.yaml" in m.get("data", {})), tmp_path)
    (pod,) = (m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "StatefulSet")
    (bridge,) = (c for c in pod["containers"] if c["name"] == "delay-bridge")
    assert pod["securityContext"]["runAsNonRoot"] and bridge["securityContext"]["readOnlyRootFilesystem"]
    assert bridge["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (claims,) = (m["spec"].get("volumeClaimTemplates", []) for m in manifests if m["kind"] == "StatefulSet")
    volumes = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in bridge["volumeMounts"]} <= volumes


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"kafka": {"common": {"bootstrap.servers": ""}}}}, "name your brokers"),
        ({"config": {"http": {"port": 0}}}, "config.http.port"),
        ({"config": {"store": {"directory": "data"}}}, "not absolute"),
        ({"config": {"spark": {"driver_memory": "1700MiB"}}}, "less than 512Mi"),
        ({"resources": {"limits": {"memory": "1000M"}}}, "less than 512Mi"),
        ({"config": {"bridge": {"id": '{{ fail "from the values" }}'}}}, "from the values"),
        ({"config": {"store": {"flush_byte": 1}}}, "flush_byte"),
    ],
    ids=str,
)
def test_what_cannot_work_is_not_installed(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    """With a sentence that says why."""
    with pytest.raises(Refused) as refused:
        template(tmp_path, LEAST, values)
    assert words in refused.value.text


@needs_helm
def test_a_changed_configuration_restarts_the_pods(tmp_path: Path) -> None:
    """And nothing else does: the pod template's checksum is that of the configuration."""

    def pod(values: dict[str, Any]) -> dict[str, Any]:
        (found,) = template(tmp_path, LEAST, values, show=["templates/statefulset.yaml"])
        annotations: dict[str, Any] = found["spec"]["template"]["metadata"]["annotations"]
        return annotations

    same = {"prometheusRule": {"enabled": True}, "service": {"annotations": {"a": "b"}}}
    assert pod({}) == pod(same)
    assert pod({}) != pod({"config": {"delay": {"max": "1d"}}})


@needs_helm
@pytest.mark.parametrize(
    ("values", "peers"),
    [
        ({"replicas": 2}, [f"http://orders-delay-bridge-{n}.orders-delay-bridge.shop.svc:8081" for n in (0, 1)]),
        ({"replicas": 1}, []),
        ({"replicas": 65}, []),
        ({"replicas": 2, "config": {"http": {"api": "off"}}}, []),
        ({"replicas": 2, "config": {"http": {"peers": []}}}, []),
        ({"replicas": 2, "config": {"http": {"peers": ["http://a:1"]}}}, ["http://a:1"]),
        ({"replicas": 2, **MATRIX["TLS inside"]}, []),
    ],
    ids=str,
)
def test_several_pods_know_each_other(values: dict[str, Any], peers: list[str], tmp_path: Path) -> None:
    """By the names that the headless service gives them; and the policy lets them ask each other."""
    manifests = template(tmp_path, LEAST, values, {"networkPolicy": {"enabled": True}})
    settings = configuration(next(m for m in manifests if "bridge.yaml" in m.get("data", {})), tmp_path)
    assert settings.http.peers == peers
    (policy,) = (m["spec"] for m in manifests if m["kind"] == "NetworkPolicy")
    rules = [(name, rule) for name in ("ingress", "egress") for rule in policy[name]]
    pods = [{"podSelector": policy["podSelector"]}]
    api = [(name, rule.get("from") or rule.get("to")) for name, rule in rules if rule["ports"][0]["port"] == "api"]
    assert api == ([("ingress", pods), ("egress", pods)] if peers else [])


@needs_helm
def test_probes_and_scrapes_use_tls_where_the_port_does(tmp_path: Path) -> None:
    """One without the other would be a pod that never becomes ready."""
    rendered = {manifest["kind"]: manifest for manifest in template(tmp_path, LEAST, MATRIX["TLS inside"])}
    (container,) = rendered["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "readiness", "liveness")]
    assert probes == ["HTTPS"] * 3
    assert rendered["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


@needs_helm
def test_selectors_select_the_bridges_and_nothing_else(tmp_path: Path) -> None:
    """Service, budget, policy and monitors mean the bridges' pods, and not the pod of `helm test`."""
    manifests = template(tmp_path, FULL)
    (bridges,) = (m["spec"]["template"]["metadata"]["labels"] for m in manifests if m["kind"] == "StatefulSet")
    (test,) = (m["metadata"]["labels"] for m in manifests if m["kind"] == "Pod")
    found = 0
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector") or manifest.get("spec", {}).get("podSelector")
        if selector is not None:
            found += 1
            wanted = selector.get("matchLabels", selector).items()
            if manifest["kind"] == "ServiceMonitor":  # by its labels it selects the service
                services = [
                    m for m in manifests if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()
                ]
                ports = [port["name"] for service in services for port in service["spec"]["ports"]]
                assert ports.count(manifest["spec"]["endpoints"][0]["port"]) == 1
            else:
                assert wanted <= bridges.items() and not wanted <= test.items(), manifest["kind"]
    assert found == 7


@needs_helm
def test_what_is_optional_is_absent_until_asked_for(tmp_path: Path) -> None:
    """No monitors, rules or policies by default, and no disruption budget for one replica."""
    least = {manifest["kind"] for manifest in template(tmp_path, LEAST)}
    assert least == {"ConfigMap", "Pod", "Service", "ServiceAccount", "StatefulSet"}
    assert "PodDisruptionBudget" in {manifest["kind"] for manifest in template(tmp_path, LEAST, {"replicas": 2})}


@needs_helm
@pytest.mark.parametrize("release", ["orders", "123", "my.release", "a1.b2", "9"])
def test_every_release_name_gives_names_that_kubernetes_takes(release: str, tmp_path: Path) -> None:
    """A service's name is a DNS label that begins with a letter; a release's may be more."""
    for manifest in template(tmp_path, LEAST, {"api": {"service": {"enabled": True}}}, release=release):
        name = manifest["metadata"]["name"]
        assert isinstance(name, str) and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63


@needs_helm
def test_a_parent_chart_switches_it(tmp_path: Path) -> None:
    """As the condition of its dependency."""
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / "delay-bridge").symlink_to(CHART)
    dependency = {"name": "delay-bridge", "version": ">=0", "condition": "delay-bridge.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    for enabled in (True, False):
        (parent / "values.yaml").write_text(yaml.safe_dump({"delay-bridge": {**LEAST, "enabled": enabled}}))
        rendered = helm("template", "orders", str(parent), "--kube-version", KUBERNETES)
        assert ("StatefulSet" in rendered) is enabled


@needs_helm
@pytest.mark.fault("one release of several is absent, or one pod of several")
def test_alerts_are_about_the_pods_of_their_release(tmp_path: Path) -> None:
    """Every series has the selector of namespace and pods, and absence is counted against the replicas."""
    values = {"prometheusRule": {"enabled": True}, "replicas": 3}
    (rules,) = (m for m in template(tmp_path, LEAST, values) if m["kind"] == "PrometheusRule")
    selector = 'namespace="shop", pod=~"orders-delay-bridge-[0-9]+"'
    for rule in (rule for group in rules["spec"]["groups"] for rule in group["rules"]):
        assert "__" not in rule["expr"]
        series = re.findall(r"(?:delay_bridge_\w+|process_start_time_seconds)(.?[^}]*)", rule["expr"])
        assert series and all(each.startswith("{" + selector) for each in series), rule["expr"]
    (missing,) = (r for g in rules["spec"]["groups"] for r in g["rules"] if r["alert"] == "DelayBridgeInstanceMissing")
    assert missing["expr"].endswith("} ) < 3".replace(" )", ")"))


@needs_helm
@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://otel:4318/v1/traces", 4318), ("https://otel", 443), ("http://[::1]:4318", 4318), ("http://otel/x", 80)],
)
def test_traces_leave_through_the_policy(endpoint: str, port: int, tmp_path: Path) -> None:
    """Where tracing is on, its port is open."""
    values = {"networkPolicy": {"enabled": True}, "config": {"tracing": {"endpoint": endpoint}}}
    (policy,) = (m for m in template(tmp_path, LEAST, values) if m["kind"] == "NetworkPolicy")
    assert port in [each["port"] for rule in policy["spec"]["egress"] for each in rule["ports"]]


@needs_helm
@pytest.mark.parametrize("endpoint", ["${env:OTLP}", "http://${env:NODE}:4318/v1/traces", "${file:/etc/otlp}"])
def test_where_traces_go_may_be_known_in_the_pod_only(endpoint: str, tmp_path: Path) -> None:
    """Then no port can be opened here; the chart is rendered all the same."""
    values = {"networkPolicy": {"enabled": True}, "config": {"tracing": {"endpoint": endpoint}}}
    (policy,) = (m for m in template(tmp_path, LEAST, values) if m["kind"] == "NetworkPolicy")
    assert [each["port"] for rule in policy["spec"]["egress"] for each in rule["ports"]] == [53, 53, 9092]


@needs_helm
def test_the_api_has_a_way_in(tmp_path: Path) -> None:
    """Service and ingress lead to the port of the API, with the credentials of a Secret; without the API they are
    refused."""
    outside = {"api": {"existingSecret": "api", "ingress": {"enabled": True, "hosts": ["delays.local"]}}}
    manifests = {(m["kind"], m["metadata"]["name"]): m for m in template(tmp_path, LEAST, outside)}
    service = manifests["Service", "orders-delay-bridge-api"]
    assert service["spec"]["ports"] == [{"name": "api", "port": 80, "targetPort": "api"}]
    (rule,) = manifests["Ingress", "orders-delay-bridge-api"]["spec"]["rules"]
    assert rule["host"] == "delays.local"
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "orders-delay-bridge-api",
        "port": {"name": "api"},
    }
    settings = configuration(manifests["ConfigMap", "orders-delay-bridge"], tmp_path)
    assert settings.http.user == "secret" and settings.http.password_file is not None
    for refused, words in (
        ({**outside, "config": {"http": {"api": "off"}}}, "config.http.api is off"),
        ({"api": {"ingress": {"enabled": True}}}, "hosts is empty"),
        ({"api": {"ingress": {"enabled": True, "hosts": ["delays.local", "a.example.com"]}}}, "names a.example.com"),
    ):
        with pytest.raises(Refused) as raised:
            template(tmp_path, LEAST, refused)
        assert words in raised.value.text


@needs_helm
@pytest.mark.fault("an ingress to an API that answers to no public name")
def test_an_ingress_leads_to_what_is_answered(tmp_path: Path) -> None:
    """A public name is rendered only with credentials, or if the controller passes the service's name to the bridge."""
    public = {"enabled": True, "hosts": ["delays.example.com"]}
    named = {"nginx.ingress.kubernetes.io/upstream-vhost": "delays.default.svc"}
    for api in ({"existingSecret": "api", "ingress": public}, {"ingress": public | {"annotations": named}}):
        assert any(m["kind"] == "Ingress" for m in template(tmp_path, LEAST, {"api": api}))
    with pytest.raises(Refused):
        template(tmp_path, LEAST, {"api": {"ingress": public}})
