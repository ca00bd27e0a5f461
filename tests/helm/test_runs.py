"""The chart, run: every pod's command, environment, probes and end, as processes here, on a tiny checkpoint.

The CPU profile with all checks and an upgrade; the other files of values as far as they run without a cluster."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.engine.common.embedded_redis import server_binary
from quire.engine.executor import kernels_build
from tests import warm
from tests.helm.chart import CHART, Manifest, config_text, only, pods, rendered, values
from tests.pace import paced, patience
from tests.ports import free_port
from tests.system.processes import ROOT, Process, ending
from tests.system.tls import behind_tls, self_signed, url_of

pytestmark = pytest.mark.system
PATIENCE_S = 200.0
# Notes every path that Python opens for writing: what a read-only root filesystem would refuse.
AUDIT = """
import os, sys
LOG = os.open(os.environ["WRITES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, words):
    if event == "open" and isinstance(words[0], str) and words[2] & (os.O_WRONLY | os.O_RDWR):
        os.write(LOG, (os.path.abspath(words[0]) + "\\n").encode())
    elif event == "os.mkdir":
        os.write(LOG, (os.path.abspath(words[0]) + "\\n").encode())
sys.addaudithook(note)
"""


# Secrets that a file of values expects in the cluster, as (name, key).
GIVEN = {
    ("redis", "secret"): "hush",
    ("keys", "api-keys"): "a-key",
    ("tenants", "tenants.toml"): f'[ours]\nweight = 2.0\nkey_sha256 = ["{hashlib.sha256(b"their-key").hexdigest()}"]\n',
    ("hub", "token"): "no-hub-is-asked",
}


class Node:
    """Runs pods' containers as processes: paths below `folder` instead of /, ports of its own instead of theirs."""

    def __init__(
        self,
        folder: Path,
        manifests: list[Manifest],
        *,
        pod: str = "0",
        secrets: dict[tuple[str, str], str] | None = None,
        forked: bool = False,
    ) -> None:
        """`pod`: the end of the pods' names.  `secrets`: further ones of the cluster, as GIVEN.

        `forked`: processes are forks (tests/warm.py), with Quire's variables and none that an import reads."""
        self.folder, self._pod, self._secrets, self._forked = folder, pod, GIVEN | (secrets or {}), forked
        self.manifests = manifests
        self.pods = pods(manifests)
        self.ports = {name: free_port() for name in ("http", "metrics", "gateway-metrics", "redis")}
        self.writes = folder / "writes"
        for path in ("tmp", "var/cache/quire", "data", "etc/quire", "bin"):
            (folder / path).mkdir(parents=True)
        here = config_text(manifests).replace('"/etc/quire/', f'"{folder}/etc/quire/')
        (folder / "etc/quire/quire.toml").write_text(here)
        for pod_spec in self.pods.values():
            self._mount_secrets(pod_spec)
        (folder / "bin/sitecustomize.py").write_text(AUDIT)

    def container(self, component: str) -> Manifest:
        (found,) = self.pods[component]["containers"]
        return found

    def here(self, text: str) -> str:
        """A mounted path as it is on this machine."""
        return re.sub(r"^/(?=(tmp|var/cache/quire|data|etc/quire)(/|$))", f"{self.folder}/", text)

    def here_in(self, secret: str) -> str:
        """A secret with the mounted path of a certificate as it is on this machine."""
        return secret.replace("=/etc/quire/", f"={self.folder}/etc/quire/")

    def environment(self, component: str, container: Manifest) -> dict[str, str]:
        """As the kubelet makes it: secrets and fields looked up, $(NAMES) replaced; names of Services resolved."""
        found: dict[str, str] = {}
        for one in container["env"]:
            if secret := one.get("valueFrom", {}).get("secretKeyRef"):
                found[one["name"]] = self._secret(**secret)
            elif "valueFrom" in one:
                assert one["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
                found[one["name"]] = f"demo-quire-{component}-{self._pod}"
            else:
                found[one["name"]] = self.here(self._expand(one["value"], found))
        return {name: self._resolve(value) for name, value in found.items()}

    def _mount_secrets(self, pod_spec: Manifest) -> None:
        volumes = {volume["name"]: volume.get("secret") for volume in pod_spec.get("volumes", [])}
        for mount in pod_spec["containers"][0].get("volumeMounts", []):
            if not (source := volumes.get(mount["name"])):
                continue
            every = [{"key": key, "path": key} for name, key in self._secrets if name == source["secretName"]]
            for item in source.get("items", every):
                path = Path(self.here(mount["mountPath"])) / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._secret(source["secretName"], item["key"]))

    def _secret(self, name: str, key: str) -> str:
        if (given := self._secrets.get((name, key))) is not None:
            return self.here_in(given)
        secret = only(self.manifests, "Secret", name)
        return secret.get("stringData", {}).get(key) or base64.b64decode(secret["data"][key]).decode()

    def _expand(self, text: str, known: dict[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], text)

    def _resolve(self, text: str) -> str:
        for service in (m for m in self.manifests if m["kind"] == "Service"):
            (port,) = service["spec"]["ports"]
            address = f"{service['metadata']['name']}:{port['port']}"
            text = re.sub(rf"(?<=[@/]){address}(?=/|$)", f"127.0.0.1:{self.ports[port['targetPort']]}", text)
        return text

    def start(self, component: str, **more: str) -> Process:
        """Of one of our images: `quire`, then the container's arguments."""
        container = self.container(component)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.folder / "bin"),
            "WRITES": str(self.writes),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",  # an image is compiled when it is built
            # in the files of the chart are the ports of the pods; the environment beats them
            **({"QUIRE_PORT": str(self.ports["http"])} if component == "gateway" else {}),
            "QUIRE_METRICS_PORT": str(self.ports["gateway-metrics" if component == "gateway" else "metrics"]),
            **self.environment(component, container),
            **more,
        }
        words = [self.here(word) for word in container["args"]]
        if self._forked:
            own = {name: value for name, value in env.items() if name.startswith(warm.READ_LATE)}
            env = {**os.environ, **own}
        return Process(self.folder / f"{component}.log", *words, env=env)

    def start_redis(self) -> subprocess.Popen[bytes]:
        """With the machine's Redis under the image's names, on a port of its own."""
        binary, port = server_binary(), self.ports["redis"]
        for name, words in {
            # `-`, the configuration on standard input, comes before the port; `--save ""` and the like come after it
            "valkey-server": f'first=$1\nshift\nexec {binary} "$first" --port {port} "$@"',
            "valkey-cli": f'exec {binary.parent}/redis-cli -p {port} "$@"',
        }.items():
            script = self.folder / "bin" / name
            script.write_text(f"#!/bin/sh\n{words}\n")
            script.chmod(0o755)
        container = self.container("redis")
        env = self.environment("redis", container)
        command = [self.here(self._expand(word, env)) for word in container["command"]]
        log = (self.folder / "redis.log").open("wb")
        with log:
            path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
            return subprocess.Popen(command, env={"PATH": path, **env}, stdout=log, stderr=log)

    def probe(self, component: str, name: str) -> bool:
        """One of the container's probes, once."""
        container = self.container(component)
        probe = container[f"{name}Probe"]
        if "exec" in probe:
            path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
            env = {"PATH": path, **self.environment(component, container)}
            return subprocess.run(probe["exec"]["command"], env=env, capture_output=True, check=False).returncode == 0
        (port,) = [p["name"] for p in container["ports"] if p["name"] == probe["httpGet"]["port"]]
        return self.get(port, probe["httpGet"]["path"]) is not None

    def get(self, port: str, path: str) -> str | None:
        """The page there, or None for any other answer than 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=patience(20)) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return None


def wait(holds: Callable[[], bool], *processes: Process) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not holds():
        for process in processes:
            assert process.popen.poll() is None, process.said()
        assert time.monotonic() < deadline, [process.said() for process in processes]
        time.sleep(0.1)


def runnable(name: str, checkpoint: Path) -> dict[str, Any]:
    """Return one of the files of values, for a tiny checkpoint on this machine."""
    changes: dict[str, Any] = copy.deepcopy(values(name))
    changes.setdefault("model", {}).update(name=str(checkpoint), servedName="tiny")
    small = {"device": "cpu", "threads": 1, "dtype": "float32", "kv_blocks": 256, "max_model_len": 1024}
    small |= {"kv_dtype": "auto", "max_seqs": 32}
    engine = changes.setdefault("engine", {})
    engine["config"] = engine.get("config", {}) | small
    gateway = changes.setdefault("gateway", {})
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["gateway"]
    gateway["drainSeconds"] = math.ceil(
        paced((defaults | gateway)["drainSeconds"])
    )  # a stream of the test fits into it
    if "existingSecret" not in changes.get("apiKeys", {}):  # else it is one of GIVEN
        changes["apiKeys"] = {"keys": ["a-key"]}
    # The chart makes up a password and, in a cluster, finds it again in the next release.
    changes.setdefault("redis", {}).setdefault("bundled", {})["passwordSecret"] = {"name": "redis", "key": "secret"}
    return changes


@contextmanager
def released(node: Node, kernels: Path) -> Iterator[tuple[Process, Process]]:
    """Run a complete release: its Redis, then one engine and one gateway, ready.  Ends what still runs of it."""
    with bundled_redis(node) if "redis" in node.pods else nullcontext(), ending([]) as processes:
        gateway = node.start("gateway")
        processes.append(gateway)
        for probe in ("startup", "liveness"):
            wait(partial(node.probe, "gateway", probe), gateway)
        assert not node.probe("gateway", "readiness")  # no model is loaded yet
        assert not node.probe("engine", "startup")
        engine = start_engine(node, kernels, processes)
        wait(lambda: node.probe("gateway", "readiness"), engine, gateway)
        yield engine, gateway


@contextmanager
def bundled_redis(node: Node) -> Iterator[None]:
    redis = node.start_redis()
    try:
        for probe in ("startup", "readiness"):
            wait(partial(node.probe, "redis", probe))
        yield
    finally:
        redis.send_signal(signal.SIGTERM)
        assert redis.wait(patience(30)) == 0


def start_engine(node: Node, kernels: Path, processes: list[Process]) -> Process:
    """Start an engine, add it to `processes`, and wait for its probes: on a busy machine one may be late."""
    engine = node.start("engine", QUIRE_KERNELS=str(kernels))  # the image sets this variable
    processes.append(engine)
    for probe in ("startup", "liveness", "readiness"):
        wait(partial(node.probe, "engine", probe), engine)
    return engine


@pytest.mark.timeout(400)
def test_the_cpu_profile_runs_as_rendered(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    kernels = kernels_build.build(kernels_build.default_directory())
    changes = runnable("cpu", checkpoint("llama"))
    changes["engine"]["keda"] = {"enabled": True}
    changes["monitoring"] = {"enabled": True}
    node = Node(tmp_path, rendered(changes))
    with released(node, kernels) as (engine, gateway):
        assert node.get("http", "/v1/models") is None  # 401: a key is needed
        asked = helm_test(node)
        assert asked.returncode == 0, asked.stderr
        assert "'completion_tokens': 4" in asked.stdout
        check_scrapes(node)
        assert engine.terminate() == 0, engine.said()
        assert gateway.terminate() == 0, gateway.said()
    written = set(node.writes.read_text().split())
    assert any(path.startswith(str(tmp_path / "var/cache/quire")) for path in written)  # so the audit sees them
    mounted = [str(tmp_path / "tmp"), str(tmp_path / "var/cache/quire"), "/dev/"]
    assert not [path for path in written if not path.startswith(tuple(mounted))]
    assert (tmp_path / "data" / "appendonlydir").exists() or (tmp_path / "data" / "appendonly.aof").exists()


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("name", ["default", "minimal", "everything"])
def test_an_upgrade_cuts_no_answer(name: str, tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    """`helm upgrade` with other options: new pods become ready, old ones get SIGTERM while they answer.

    The old engine hands a stream over to the new one, and the old gateway passes it on to its end."""
    check_upgrade(name, tmp_path, checkpoint("llama"), {})


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("warm_processes")
def test_an_upgrade_on_a_managed_redis_cuts_no_answer(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    """Its URL, certificate, the clients' keys and the tenants are secrets of the cluster."""
    certificate = self_signed(tmp_path)
    with behind_tls(certificate) as proxy:
        secrets = {
            ("redis-url", "url"): url_of(proxy, Path("/etc/quire/redis-tls/ca.crt")),
            ("redis-ca", "ca.crt"): certificate[0].read_text(),
        }
        check_upgrade("external-redis", tmp_path, checkpoint("llama"), secrets)
        assert proxy.connections >= 8  # two engines and two gateways


def check_upgrade(name: str, folder: Path, model: Path, secrets: dict[tuple[str, str], str]) -> None:
    """Upgrade a release with one of the files of values while it answers."""
    kernels = kernels_build.build(kernels_build.default_directory())
    changes = runnable(name, model)
    old = Node(folder / "old", rendered(changes), secrets=secrets, forked=True)
    changes["engine"]["config"] |= {"max_seqs": 16, "kv_blocks": 200}
    new = Node(folder / "new", rendered(changes), pod="1", secrets=secrets, forked=True)
    new.ports["redis"] = old.ports["redis"]
    with released(old, kernels) as (engine, gateway), ending([]) as processes, ThreadPoolExecutor(1) as client:
        assert helm_test(old).returncode == 0
        start_engine(new, kernels, processes)
        processes.append(new.start("gateway"))
        wait(lambda: new.probe("gateway", "readiness"), *processes)
        begun: list[str] = []
        answer = client.submit(stream, old, 900, begun)
        wait(lambda: bool(begun), engine, gateway)
        for process in (engine, gateway):
            process.popen.send_signal(signal.SIGTERM)
        assert answer.result(patience(PATIENCE_S)) == 900
        assert engine.popen.wait(patience(PATIENCE_S)) == 0, engine.said()
        assert gateway.popen.wait(patience(PATIENCE_S)) == 0, gateway.said()
        page = new.get("metrics", "/metrics")
        assert page is not None
        (taken,) = re.findall(r"^quire_generated_tokens_total\S* (\S+)$", page, re.MULTILINE)
        assert 0 < float(taken) <= 900  # the rest of the stream
        asked = helm_test(new)
        assert asked.returncode == 0, asked.stderr
        assert [process.terminate() for process in processes] == [0, 0]


def stream(node: Node, tokens: int, begun: list[str]) -> int:
    """Read one stream to its end, and append its first event to `begun`.  Returns the tokens that usage counts."""
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{node.ports['http']}/v1/completions",
        json.dumps(asked | {"stream_options": {"include_usage": True}}).encode(),
        {"Authorization": "Bearer a-key", "Content-Type": "application/json"},
    )
    usage = {"completion_tokens": 0}
    with urllib.request.urlopen(request, timeout=patience(PATIENCE_S)) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                begun.append(event["id"])
                usage = event.get("usage") or usage
    return usage["completion_tokens"]


def helm_test(node: Node) -> subprocess.CompletedProcess[str]:
    """What `helm test` runs in the cluster."""
    (container,) = only(node.manifests, "Pod", "test")["spec"]["containers"]
    python, *words = container["command"]
    assert python == "python"
    env = {"PATH": os.environ["PATH"], **node.environment("test", container)}
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def check_scrapes(node: Node) -> None:
    """Every page a monitor scrapes is there, and has what KEDA asks for."""
    pages = ""
    for m in node.manifests:
        for endpoint in m.get("spec", {}).get("endpoints", []) + m.get("spec", {}).get("podMetricsEndpoints", []):
            page = node.get(endpoint["port"], endpoint["path"])
            assert page, m["metadata"]["name"]
            pages += page
    queries = [trigger["metadata"]["query"] for trigger in only(node.manifests, "ScaledObject")["spec"]["triggers"]]
    names = {
        name for query in queries for name in re.findall(r"quire_\w+", re.sub(r"\(queue\|waiting\)", "queue", query))
    }
    assert len(names) == 3
    for name in names | {"quire_waiting_oldest_seconds"}:
        assert re.search(rf"^{name}\{{", pages, re.MULTILINE), name


def test_the_charts_image_is_run_by_what_the_dockerfile_makes_it() -> None:
    """Pods give arguments only, so the image must bring `quire`; and the models that values.yaml names."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert dockerfile.count('ENTRYPOINT ["quire"]') == 2
    chart = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    assert dockerfile.count(chart["model"]["name"]) >= 1
    assert chart["podSecurityContext"]["runAsUser"] == int(re.findall(r"--uid (\d+)", dockerfile)[0])
