"""`make chart`: writes the generated files of the chart; a test compares them.

values.schema.json    from values.yaml and the bridge's own settings
README.md             the table of values, from the `# --` comments in values.yaml
files/                the alert rules and the dashboard, from config/; rules with marks for the series of a release
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bridge.settings.model import Settings

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "helm" / "delay-bridge"
MARK: Final = "<!-- values -->\n"

METRIC: Final = re.compile(r"\b(delay_bridge_\w+|process_start_time_seconds)(\{)?")
MOST: Final = "max_over_time(count(delay_bridge_build_info)[6h:1m])"
"""Stands for the number of instances, which the chart knows."""

Tree = dict[str, Any]

# A placeholder of a later value: a Helm template, or a reference to a file or variable.
LATER: Final[Tree] = {"type": "string", "pattern": r"\{\{|\$\{"}
QUANTITY: Final[Tree] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+[A-Za-z]*$"}]
}
TEXTS: Final[Tree] = {"type": "object", "additionalProperties": {"type": "string"}}
"""Labels and annotations: Kubernetes accepts only texts."""
# Values whose default's type is too general.
NARROWER: Final[Mapping[str, Tree]] = {
    "replicas": {"type": "integer", "minimum": 0, "maximum": 1000},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "persistence.size": QUANTITY,
    "persistence.retention.whenDeleted": {"enum": ["Retain", "Delete"]},
    "persistence.retention.whenScaled": {"enum": ["Retain", "Delete"]},
    "scratch.tmpSize": QUANTITY,
    "scratch.shmSize": QUANTITY,
    **dict.fromkeys(("podLabels", "podAnnotations", "nodeSelector", "dashboard.labels"), TEXTS),
    "extraEnv": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {name: {"type": "string"} for name in ("name", "value")},
        },
    },
    "fullnameOverride": {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"},
    "nameOverride": {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"},
    "api.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "api.service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "api.ingress.hosts": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
    "networkPolicy.brokerPorts": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "terminationGracePeriodSeconds": {"type": "integer", "minimum": 10},
}
# Kubernetes' own shapes, which Kubernetes checks itself.
FOREIGN: Final = frozenset(
    {"resources", "podSecurityContext", "securityContext", "startupProbe", "readinessProbe", "livenessProbe"}
)


def main() -> int:
    """The command line; returns the exit status."""
    for path, text in generated_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def generated_files() -> dict[Path, str]:
    """The chart's generated files with their contents."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    return {
        CHART / "values.schema.json": json.dumps(schema(yaml.safe_load(text)), indent=2) + "\n",
        CHART / "README.md": readme.split(MARK)[0] + MARK + values_table(text),
        CHART / "files" / "alerts.yaml": of_a_release((ROOT / "config" / "alerts.yaml").read_text("utf-8")),
        CHART / "files" / "dashboard.json": (ROOT / "config" / "dashboard.json").read_text("utf-8"),
    }


def of_a_release(rules: str) -> str:
    """The alert rules with `__release__` in the selector of every series, and `__replicas__` for the number of
    instances; the template replaces both."""
    marked = rules.replace(MOST, "__replicas__")
    return METRIC.sub(lambda match: f"{match[1]}{{__release__" + (", " if match[2] else "}"), marked)


# --- schema ----------------------------------------------------------------------------------------------------------


def schema(values: Tree) -> Tree:
    """The JSON schema of the chart's values: `config` from the settings, all others from their defaults."""
    settings = Settings.model_json_schema()
    definitions = {name: _relaxed(part) for name, part in settings.pop("$defs").items()}
    root = _of_defaults(values, "")
    root["properties"]["config"] = _relaxed(settings)
    # Helm passes these to every chart.
    root["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": definitions, **root}


def _of_defaults(default: object, path: str) -> Tree:
    if path in NARROWER:
        return NARROWER[path]
    if path.rpartition(".")[2] in ("labels", "annotations"):
        return TEXTS
    if isinstance(default, dict):
        if not default or path in FOREIGN:
            return {"type": "object"}
        inner = {key: _of_defaults(value, f"{path}.{key}".lstrip(".")) for key, value in default.items()}
        return {"type": "object", "additionalProperties": False, "properties": inner}
    if isinstance(default, bool):
        return {"type": "boolean"}
    if isinstance(default, list):
        return {"type": "array"}
    return {"type": "integer" if isinstance(default, int) else "string"}


def _relaxed(part: Tree) -> Tree:
    """A part of the settings' schema that accepts a template or a reference for any single value.

    Defaults are left out: the chart does not need them, and one of them is the name of this machine.
    """
    part = {key: value for key, value in part.items() if key not in ("default", "title", "description")}
    if "properties" in part:
        part["properties"] = {name: _relaxed(inner) for name, inner in part["properties"].items()}
        return part | {"type": "object"}
    if part.get("type") == "object":
        # The bridge checks names with a pattern; here they may contain a template, too.
        return {key: value for key, value in part.items() if key not in ("minProperties", "propertyNames")}
    if "$ref" in part or part.get("type") == "array":
        return part
    return {"anyOf": [*part.get("anyOf", [part]), LATER]}


# --- table of values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One documented value."""

    path: str
    text: str
    default: str


def documented(text: str) -> Iterator[Value]:
    """The values of a values.yaml with a `# --` comment, each with comment and default."""
    tree = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#") and comment:
            comment.append(stripped.removeprefix("#").strip())
        elif match := re.match(r"( *)([\w.-]+):", line):
            indent = len(match[1])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
            if comment:
                yield _value([key for _, key in path], comment, tree)
            comment = []
        else:
            comment = []


def _value(path: list[str], comment: list[str], tree: Tree) -> Value:
    default: Any = tree
    for key in path:
        default = default[key]
    said = [line.removeprefix("@default -- ") for line in comment if line.startswith("@default -- ")]
    words = " ".join(line for line in comment if not line.startswith("@default"))
    shown = said[0] if said else f"`{json.dumps(default)}`"
    return Value(path=".".join(f'"{key}"' if "." in key else key for key in path), text=words, default=shown)


def values_table(text: str) -> str:
    """The Markdown table of all values."""
    rows = [f"| `{v.path}` | {_cell(v.text)} | {_cell(v.default)} |\n" for v in documented(text)]
    return "\n| value | purpose | default |\n|---|---|---|\n" + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
