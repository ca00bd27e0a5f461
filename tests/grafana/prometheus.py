"""A real Prometheus that scrapes a real deployment during a test."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import Patience, patience
from tests.ports import free_port
from tests.system.processes import ROOT, Process, ending, wait_until_ready

ALERTS = ROOT / "grafana" / "alerts.yaml"
SCHEMA = {
    "type": "object",
    "properties": {"a_long_name_that_is_in_every_answer": {"type": "integer"}},
    "required": ["a_long_name_that_is_in_every_answer"],
    "additionalProperties": False,
}
# Nothing on this machine is reached through a proxy.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def tool(name: str) -> str:
    """Return the path of a program of Debian's package `prometheus`, which CI installs.  Skips the test without it."""
    if (path := shutil.which(name)) is None:
        pytest.skip(f"needs {name} (Debian: apt-get install prometheus)")
    return path


class Deployment:
    """One scripted engine, one gateway, two tenants, and client threads that request more than the pool holds."""

    KEYS = ("key-of-acme", "key-of-zeta")

    def __init__(self, redis_url: str, checkpoint: Path, folder: Path, processes: list[Process]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_ports = free_port(), free_port()  # engine, gateway
        tenants = folder / "tenants.toml"
        digests = {key.removeprefix("key-of-"): hashlib.sha256(key.encode()).hexdigest() for key in self.KEYS}
        tenants.write_text(
            "".join(f'[{name}]\nweight = 1.0\nkey_sha256 = ["{digest}"]\n' for name, digest in digests.items())
        )
        shared = [str(checkpoint), f"--redis-url={redis_url}", "--namespace=grafana", "--served-name=tiny"]
        engine = ["--executor=scripted", "--scripted-step-ms=5", "--kv-blocks=48", "--max-seqs=12", "--engine-id=e0"]
        lanes = ["--ttft-target-s=0.1", "--late-wait-s=0.3"]  # so short that both lanes fill
        gateway = [f"--port={port}", "--gateway-id=g0", *lanes, f"--tenants={tenants}"]
        for name, options, metrics in (
            ("engine", [*engine, "--admission=threshold", "--admit-threshold=1"], self.metrics_ports[0]),
            ("gateway", gateway, self.metrics_ports[1]),
        ):
            words = [*shared, *options, f"--metrics-port={metrics}", "--vllm-metrics"]
            processes.append(Process(folder / f"{name}.log", name, *words))
        self._stopping = threading.Event()
        self._count = itertools.count()

    @contextmanager
    def loaded(self, clients: int = 24) -> Iterator[None]:
        """Run `clients` threads, each of which sends one request after the other."""
        threads = [threading.Thread(target=self._send_requests) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()

    def _send_requests(self) -> None:
        while not self._stopping.is_set():
            number = next(self._count)
            self._send(number)
            self._stopping.wait(0.05)

    def _send(self, turn: int) -> None:
        """Send a request.  Every fifth one is invalid, and every third one would rather be refused than be late.

        Every fourth one wants an object whose names the grammar forces."""
        body = {
            "model": "tiny",
            "prompt": "Twenty requests share this prefix of some tokens. " + f"And not this: {turn}. " * (1 + turn % 5),
            "max_tokens": 5 + turn % 60 if turn % 5 else -2,
            "stream": turn % 2 == 0,
            "ignore_eos": True,
            "n": 1 + (turn % 7 == 0),
        }
        if turn % 4 == 1:
            body |= {"guided_json": SCHEMA, "ignore_eos": False}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.KEYS[turn % 2]}"}
        if turn % 3 == 0:
            headers["X-Max-Queue-Wait"] = "0"
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with _open(request, timeout=patience(60)) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()


class Prometheus:
    """A server that scrapes and evaluates the rules every second."""

    def __init__(self, folder: Path, ports: tuple[int, ...]) -> None:
        config = folder / "prometheus.json"  # JSON is YAML
        targets = [f"127.0.0.1:{port}" for port in ports]
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(ALERTS)],
                    "scrape_configs": [{"job_name": "quire", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        words = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
        with self._log.open("w") as file:
            self._process = subprocess.Popen([tool("prometheus"), *words], stdout=file, stderr=file)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **words: str) -> Any:
        """Return the API's answer.  Raises OSError while the server starts."""
        try:
            with _open(f"{self._url}{path}?{urllib.parse.urlencode(words)}", timeout=patience(30)) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{words}: {error.read().decode()}")

    def wait_ready(self, seconds: float = 200.0) -> None:
        bound = Patience(seconds)
        while True:
            try:
                self.get("/api/v1/status/runtimeinfo")
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert bound.lasts(), self._log.read_text()
                time.sleep(0.1)
            else:
                return

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query, without NaN and infinities."""
        result = self.get("/api/v1/query", query=query)["result"]
        return [value for series in result if math.isfinite(value := float(series["value"][1]))]


@contextmanager
def scraped(checkpoint: Path, folder: Path) -> Iterator[tuple[Deployment, Prometheus]]:
    """Start a deployment and a Prometheus that scrapes it; enter the context when both are ready."""
    tool("prometheus")
    with EmbeddedRedis() as redis, ending([]) as processes:
        deployment = Deployment(redis.url, checkpoint, folder, processes)
        prometheus = Prometheus(folder, deployment.metrics_ports)
        try:
            wait_until_ready(deployment.url)
            prometheus.wait_ready()
            yield deployment, prometheus
        finally:
            prometheus.close()
