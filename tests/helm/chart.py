"""The chart as Helm itself renders it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
RELEASE, NAMESPACE = "demo", "llm"
VALUES = {
    "default": None,
    "cpu": CHART / "values-cpu.yaml",
    **{path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))},
}
Manifest = dict[str, Any]


def values(name: str) -> dict[str, Any]:
    """What one of the values files changes."""
    path = VALUES[name]
    return {} if path is None else yaml.safe_load(path.read_text())


def rendered(changes: dict[str, Any]) -> list[Manifest]:
    """Every manifest of a release with these changes to values.yaml.  Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(changes))
        files = chart.render(changes, name=RELEASE, namespace=NAMESPACE)
    return [
        manifest
        for name, text in files.items()
        if not name.endswith("NOTES.txt")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def notes(changes: dict[str, Any]) -> str:
    """What `helm install` prints."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(changes, name=RELEASE, namespace=NAMESPACE)["quire/templates/NOTES.txt"]


def only(manifests: list[Manifest], kind: str, ending: str = "") -> Manifest:
    """The one manifest of a kind whose name ends so."""
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(ending)]
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """component -> specification of its pods."""
    return {
        m["metadata"]["labels"]["app.kubernetes.io/component"]: m["spec"]["template"]["spec"]
        for m in manifests
        if m["kind"] in ("Deployment", "StatefulSet")
    }


def config_text(manifests: list[Manifest]) -> str:
    """The file that both programs read."""
    (found,) = [m for m in manifests if m["kind"] == "ConfigMap" and "quire.toml" in m["data"]]
    text: str = found["data"]["quire.toml"]
    return text


def config(manifests: list[Manifest]) -> dict[str, Any]:
    """What it says."""
    return tomllib.loads(config_text(manifests))
