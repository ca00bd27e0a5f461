"""Rendered by real Helm: valid to Kubernetes, and true of the programs."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from quire.engine.common import settings
from quire.engine.config import EngineConfig
from quire.service.cli import PROCESSES
from quire.service.config import GatewayConfig
from tests.helm.chart import CHART, VALUES, config, config_text, notes, only, pods, rendered, values

ROOT = CHART.parent
PROGRAMS: dict[str, type[EngineConfig] | type[GatewayConfig]] = {"gateway": GatewayConfig, "engine": EngineConfig}
KUBERNETES = ("1.27", "1.31", "1.37")  # the oldest that Chart.yaml allows, one between, the newest known here
# Kinds that Kubernetes itself does not know -> where their models are.
OPERATORS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
every_values_file = pytest.mark.parametrize("name", VALUES)


@every_values_file
def test_lint_finds_nothing(name: str) -> None:
    found = helm_python.lint(CHART, values(name), strict=True)
    assert [m for m in found["messages"] if m["severity"] > 1] == []


def test_the_chart_its_images_and_the_pages_have_the_package_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
    images = {c["image"] for name in VALUES for pod in pods(rendered(values(name))).values() for c in pod["containers"]}
    assert {image for image in images if "quire" in image} >= {f"quire-gateway:{version}", f"quire-engine:{version}"}
    for page in (CHART / "README.md", ROOT / "Dockerfile"):
        assert set(re.findall(r"quire-\w+:([\d.]+)", page.read_text())) == {version}, page


@every_values_file
def test_every_manifest_is_valid(name: str) -> None:
    for manifest in rendered(values(name)):
        if (models := OPERATORS.get(manifest["apiVersion"])) is None:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
        else:
            model = getattr(importlib.import_module(models), manifest["kind"])
            read = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert read == manifest  # what the model does not know it would have dropped


@every_values_file
def test_names_and_selectors_meet(name: str) -> None:
    manifests = rendered(values(name))
    ids = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(ids) == len(set(ids))
    labels = [
        m["spec"]["template"]["metadata"]["labels"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")
    ]
    names = {name for _, name in ids}

    def chosen(selector: dict[str, str]) -> int:
        return sum(selector.items() <= pod.items() for pod in labels)

    for m in manifests:
        spec, kind = m.get("spec", {}), m["kind"]
        if kind == "Service":
            assert chosen(spec["selector"]) == 1
        elif kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert chosen(spec["selector"]["matchLabels"]) == 1
        elif kind == "NetworkPolicy":
            assert chosen(spec["podSelector"]["matchLabels"]) == 1
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in ids
        elif kind == "ServiceMonitor":
            services = [s for s in manifests if s["kind"] == "Service"]
            wanted = spec["selector"]["matchLabels"].items()
            assert sum(wanted <= s["metadata"]["labels"].items() for s in services) == 1
        elif kind == "PodMonitor":
            assert chosen(spec["selector"]["matchLabels"]) == 1
        if kind == "StatefulSet":
            assert spec["serviceName"] in names


@every_values_file
def test_programs_know_every_flag_variable_and_key(name: str) -> None:
    manifests = rendered(values(name))
    for component, cls in PROGRAMS.items():
        (container,) = pods(manifests)[component]["containers"]
        command, flag, file = container["args"]
        assert (command in PROCESSES, flag, file) == (True, "--config", "/etc/quire/quire.toml")
        variables = {one["name"]: one.get("value", "x") for one in container["env"]}
        assert settings.unknown_variable(variables, [cls]) is None
        assert variables["QUIRE_REDIS_URL"]


@every_values_file
def test_the_config_file_is_read_by_both_programs(name: str, tmp_path: Any) -> None:
    manifests = rendered(values(name))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    (file := tmp_path / "quire.toml").write_text(config_text(manifests))
    read = config(manifests)
    for component, cls in PROGRAMS.items():
        got: EngineConfig | GatewayConfig = settings.parse(cls, ["--config", str(file)], {}, table=component)
        for key, value in values(name).get(component, {}).get("config", {}).items():
            assert getattr(got, key) == value
        assert (got.model, got.namespace) == (read["model"], read["namespace"])
        logs, traces = (defaults[key] | values(name).get(key, {}) for key in ("logs", "traces"))
        assert got.log_format == logs["format"]
        assert (got.otlp_endpoint, got.trace_sample) == (traces["endpoint"], traces["sample"])
        assert getattr(got, "trace_prompts", traces["prompts"]) is traces["prompts"]


@every_values_file
def test_every_pod_is_locked_down(name: str) -> None:
    for pod in pods(rendered(values(name))).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # a Service called quire would set QUIRE_PORT
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            claimed = {v["name"] for v in pod.get("volumes", [])} | {"cache", "data"}
            assert {m["name"] for m in container["volumeMounts"]} <= claimed


@every_values_file
def test_what_programs_write_to_is_writable(name: str) -> None:
    for component in PROGRAMS:
        (container,) = pods(rendered(values(name)))[component]["containers"]
        writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        for variable in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
            assert any(f"{variables[variable]}/".startswith(f"{path}/") for path in writable), variable


@every_values_file
def test_a_pod_may_take_longer_to_end_than_its_drain(name: str) -> None:
    manifests = rendered(values(name))
    pod = pods(manifests)["gateway"]
    (container,) = pod["containers"]
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = config(manifests)["gateway"]["drain_s"]
    assert word == "sleep"
    assert int(seconds) > container["readinessProbe"]["periodSeconds"] - 1
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + drain_s + 10


def test_an_engine_has_half_an_hour_to_load_its_model() -> None:
    (container,) = pods(rendered({}))["engine"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_gpus_are_asked_for_and_left_out_on_a_cpu() -> None:
    def limits(changes: dict[str, Any]) -> dict[str, Any]:
        return pods(rendered(changes))["engine"]["containers"][0]["resources"].get("limits", {})

    assert limits({})["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits(values("cpu"))
    changes = {"engine": {"gpuResource": "amd.com/gpu", "resources": {"limits": {"memory": "8Gi"}}}}
    assert limits(changes) == {"amd.com/gpu": 1, "memory": "8Gi"}


def test_several_gpus_of_an_engine_share_its_model() -> None:
    for gpus in (1, 2):
        manifests = rendered({"engine": {"gpus": gpus, "sharedMemory": "2Gi"}})
        pod = pods(manifests)["engine"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert config(manifests)["engine"].get("tensor_parallel", 1) == gpus
        volumes = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "shm"]
        if gpus == 1:
            assert not volumes + mounts
        else:
            assert volumes == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}]
            assert mounts == [{"name": "shm", "mountPath": "/dev/shm"}]


def test_keda_from_zero_keeps_gateways_ready_and_requests_waiting(tmp_path: Path) -> None:
    """Else no request reaches a gateway, and nothing starts an engine."""

    def gateway_config(keda: dict[str, Any], **own: Any) -> GatewayConfig:
        manifests = rendered({"engine": {"keda": {"enabled": True, **keda}}, "gateway": {"config": own}})
        (scaled,) = (one for one in manifests if one["kind"] == "ScaledObject")
        assert scaled["spec"]["minReplicaCount"] == keda.get("minReplicas", 1)
        queries = [one["metadata"]["query"] for one in scaled["spec"]["triggers"]]
        assert any("queue" in query and "oldest_seconds" in query for query in queries)
        (file := tmp_path / "quire.toml").write_text(config_text(manifests))
        return settings.parse(GatewayConfig, ["--config", str(file)], {}, table="gateway")

    def waits(got: GatewayConfig) -> tuple[bool, float]:
        return got.ready_without_engine, got.takeover_wait_s

    assert waits(gateway_config({})) == (False, 5)
    assert waits(gateway_config({"minReplicas": 0})) == (True, 600)
    assert waits(gateway_config({"minReplicas": 0, "fromZeroWaitSeconds": 90})) == (True, 90)
    assert waits(gateway_config({"minReplicas": 0}, takeover_wait_s=70)) == (True, 70)


def test_a_change_of_configuration_rolls_the_pods() -> None:
    def sums(changes: dict[str, Any]) -> list[str]:
        found = rendered(changes)
        kinds = (("Deployment", "gateway"), ("StatefulSet", "engine"))
        templates = [only(found, *kind)["spec"]["template"] for kind in kinds]
        return [template["metadata"]["annotations"]["checksum/config"] for template in templates]

    before = sums({})
    assert sums({}) == before
    cases: list[tuple[dict[str, Any], list[bool]]] = [
        ({"gateway": {"config": {"max_n": 3}}}, [True, False]),
        ({"engine": {"config": {"max_seqs": 3}}}, [False, True]),
        ({"model": {"name": "other/model"}}, [True, True]),
        ({"apiKeys": {"keys": ["new"]}}, [True, False]),
        ({"logs": {"format": "text"}}, [True, True]),
        ({"traces": {"sample": 0.5}}, [True, True]),
        ({"traces": {"prompts": True}}, [True, False]),
    ]
    for changes, changed in cases:
        assert [a != b for a, b in zip(before, sums(changes), strict=True)] == changed, changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"gateway": {"config": {"late_wait": 2}}}, "late_wait"),
        ({"gateway": {"config": {"late_wait_s": "2"}}}, "late_wait_s"),
        ({"engine": {"config": {"kv_dtype": "e5m2"}}}, "kv_dtype"),
        ({"engine": {"config": {"model": "x"}}}, "model"),  # the chart's own: model.name
        ({"engine": {"gpus": 17}}, "gpus"),
        ({"engine": {"sharedMemory": "1 GB"}}, "sharedMemory"),
        ({"engine": {"config": {"tensor_parallel": 2}}}, "tensor_parallel"),  # the chart's own: engine.gpus
        ({"gateway": {"image": {"tagg": "x"}}}, "tagg"),
        ({"redis": {"bundled": {"enabled": False}}}, "external"),
        ({"redis": {"external": {"url": "redis://:secret@host"}}}, "url"),
        ({"model": {"cache": {"size": "100 GB"}}}, "size"),
        ({"logs": {"format": "yaml"}}, "format"),
        ({"traces": {"endpoint": "collector:4318"}}, "endpoint"),
        ({"engine": {"config": {"log_format": "text"}}}, "log_format"),  # the chart's own: logs.format
    ],
)
def test_typos_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(helm_python.HelmError, match=says):
        rendered(changes)


def test_the_schema_knows_every_value_and_lets_no_other_pass() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(given: Any, described: dict[str, Any], path: str) -> None:
        if "$ref" in described:
            described = schema["$defs"][described["$ref"].rpartition("/")[2]]
        if isinstance(given, dict) and "properties" in described:
            assert described["additionalProperties"] is False, path
            assert given.keys() <= described["properties"].keys(), path
            for key, value in given.items():
                walk(value, described["properties"][key], f"{path}.{key}")

    walk(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_secrets_stay_in_secrets() -> None:
    manifests = rendered(values("everything"))
    assert only(manifests, "Secret", "api-keys")["stringData"] == {"api-keys": "one,two"}
    assert "acme" in only(manifests, "Secret", "tenants")["stringData"]["tenants.toml"]
    for m in manifests:
        if m["kind"] != "Secret":
            assert "acme" not in json.dumps(m)
            assert "one,two" not in json.dumps(m)
    first = only(rendered({}), "Secret", "redis")["data"]["password"]
    assert first != only(rendered({}), "Secret", "redis")["data"]["password"]  # made up, not written down


def test_a_redis_of_ones_own_comes_from_a_secret_with_its_certificates() -> None:
    manifests = rendered(values("external-redis"))
    assert "redis" not in pods(manifests)
    for component in PROGRAMS:
        (container,) = pods(manifests)[component]["containers"]
        (url,) = [one for one in container["env"] if one["name"] == "QUIRE_REDIS_URL"]
        assert url["valueFrom"]["secretKeyRef"] == {"name": "redis-url", "key": "url"}
        assert "/etc/quire/redis-tls" in [m["mountPath"] for m in container["volumeMounts"]]


@pytest.mark.parametrize(
    ("memory", "maxmemory"),
    [
        ("1Gi", "751619276"),
        ("1536Mi", "1127428915"),
        ("0.5Gi", "375809638"),
        ("2G", "1400000000"),
        ("600000Ki", "430080000"),
        (1_000_000_000, "700000000"),
        ("1000000000", "700000000"),
    ],
)
def test_redis_refuses_before_the_kernel_kills_it(memory: str | int, maxmemory: str) -> None:
    manifests = rendered({"redis": {"bundled": {"resources": {"limits": {"memory": memory}}}}})
    (container,) = pods(manifests)["redis"]["containers"]
    command = container["command"]
    assert command[command.index("--maxmemory") + 1] == maxmemory
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_no_password_is_an_argument() -> None:
    """The process list of a node shows arguments; `$(NAME)` would be replaced by the password there."""
    for pod in pods(rendered({})).values():
        for container in pod["containers"]:
            words = [*container.get("command", ()), *container.get("args", ())]
            assert not [word for word in words if "$(REDIS_PASSWORD)" in word]


def test_redis_without_a_memory_limit_has_no_maxmemory() -> None:
    (container,) = pods(rendered({"redis": {"bundled": {"resources": {"limits": None}}}}))["redis"]["containers"]
    assert "--maxmemory" not in container["command"]
    with pytest.raises(helm_python.HelmError, match=r"redis\.bundled\.resources\.limits\.memory"):
        rendered({"redis": {"bundled": {"resources": {"limits": {"memory": "lots"}}}}})


@every_values_file
def test_metrics_have_ports_of_their_own(name: str) -> None:
    """They name tenants, so no Service and no client's port leads to them."""
    manifests = rendered(values(name))
    read = config(manifests)
    for component in PROGRAMS:
        (container,) = pods(manifests)[component]["containers"]
        numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        port = "gateway-metrics" if component == "gateway" else "metrics"
        assert numbers[port] == read[component]["metrics_port"] != read["gateway"]["port"]
        for monitor in (
            m for m in manifests if m["kind"] == "PodMonitor" and m["metadata"]["name"].endswith(component)
        ):
            assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == [port]
    assert [m for m in manifests if m["kind"] == "ServiceMonitor"] == []
    (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"].endswith(("quire", "llm"))]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]


def test_scrapers_reach_the_metrics_and_clients_the_gateways() -> None:
    manifests = rendered(values("everything"))
    asked = values("everything")["networkPolicy"]
    gateway, engine = (only(manifests, "NetworkPolicy", name)["spec"]["ingress"] for name in ("gateway", "engine"))
    assert gateway == [
        {"ports": [{"port": "http"}], "from": asked["clients"]},
        {"ports": [{"port": "gateway-metrics"}], "from": asked["scrapers"]},
    ]
    assert engine == [{"ports": [{"port": "metrics"}], "from": asked["scrapers"]}]
    default = only(rendered({}), "NetworkPolicy", "gateway")["spec"]["ingress"]
    assert default == [{"ports": [{"port": "http"}]}, {"ports": [{"port": "gateway-metrics"}]}]


def test_the_gateways_metrics_port_is_an_option() -> None:
    manifests = rendered({"gateway": {"config": {"metrics_port": 9777}}})
    assert config(manifests)["gateway"]["metrics_port"] == 9777
    (container,) = pods(manifests)["gateway"]["containers"]
    assert {"name": "gateway-metrics", "containerPort": 9777} in container["ports"]


def test_dashboards_and_alerts_are_grafanas_own() -> None:
    """Links, so there is nothing to keep equal; Helm follows them when it loads and when it packages."""
    manifests = rendered(values("everything"))
    shown = {
        key: json.loads(text)
        for m in manifests
        if m["kind"] == "ConfigMap" and "grafana_dashboard" in m["metadata"]["labels"]
        for key, text in m["data"].items()
    }
    files = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
    assert files
    assert shown == {path.name: json.loads(path.read_text()) for path in files}
    rules = yaml.safe_load((ROOT / "grafana" / "alerts.yaml").read_text())
    assert rules["groups"]
    assert only(manifests, "PrometheusRule")["spec"] == rules
    assert not any("grafana" in m["metadata"]["name"] for m in rendered({}))


def test_the_notes_tell_what_is_still_open() -> None:
    assert "no API keys" in notes({})
    assert "port-forward service/demo-quire 8000:80" in notes({})
    assert "requests in flight are lost" in notes(values("cpu"))
    told = notes(values("everything"))
    assert "https://llm.example.com/v1/models" in told
    assert "no API keys" not in told


def test_the_readme_names_only_values_that_exist() -> None:
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(re.findall(r"`((?:\w+\.)+\w+)`", (CHART / "README.md").read_text()))
    sections = {name for name in named if name.split(".")[0] in known}
    assert len(sections) > 20
    for name in sections:
        here = known
        for key in name.split("."):
            if here == {} and ".config." in name:
                assert key in PROGRAMS[name.split(".")[0]].__struct_fields__, name
            else:
                assert key in here, name
                here = here[key]
