"""Processes that share host name and process id, as containers with host networking do, have different names."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine import __main__ as engine_main
from quire.engine.common import logs, settings
from quire.engine.config import EngineConfig
from quire.engine.executor.errors import ModelLoadError
from quire.engine.wire.link import BusDown
from quire.service import app, cli
from quire.service.config import GatewayConfig
from quire.service.supervisor import Child, Interrupt


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-host")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    # An engine's main() changes these for all of its process, which here is the tests'.
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(logs, "start", lambda _: None)


def test_a_name_says_where_the_process_runs_and_is_no_others() -> None:
    names = {settings.process_name() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("gpu-host-1-") for name in names)


def test_engines_without_a_name_get_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    def fails(config: EngineConfig) -> None:
        raise ModelLoadError("far enough")

    async def reached(config: EngineConfig) -> None: ...

    monkeypatch.setattr(engine_main, "check_redis", reached)
    monkeypatch.setattr(engine_main, "BusThread", lambda config, telemetry: configs.append(config))
    monkeypatch.setattr(engine_main, "code", fails)
    for words in ([], [], ["--engine-id", "mine"]):
        assert engine_main.main(["--executor", "scripted", *words]) == 2
    first, second, named = (config.engine_id for config in configs)
    assert first != second
    assert named == "mine"


def test_gateways_without_a_name_get_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def side(url: str, gateway: str, **_: Any) -> None:
        names.append(gateway)
        raise BusDown("far enough")

    monkeypatch.setattr(app, "Tokenizer", lambda *_, **__: SimpleNamespace(start=lambda: None, close=lambda: None))
    monkeypatch.setattr(app, "GatewaySide", side)
    for config in (GatewayConfig(), GatewayConfig(), GatewayConfig(gateway_id="mine")):
        with pytest.raises(app.StartError, match="far enough"):
            asyncio.run(app.serve(config, asyncio.Event()))
    assert names[0] != names[1]
    assert names[2] == "mine"


def test_a_supervisors_children_keep_their_names_over_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are words of the command that starts them, made once."""
    started: list[list[Child]] = []

    class Supervisor:
        def __init__(self, engine: Child, gateways: list[Child], *_: object) -> None:
            started.append([engine, *gateways])

        async def run(self, interrupt: Interrupt) -> None: ...

    async def checked(*_: object) -> None: ...

    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setattr(cli, "check_redis", checked)
    monkeypatch.setattr(cli, "Supervisor", Supervisor)
    for _ in range(2):
        assert cli.serve(["a-model", "--gateways", "2", "--port", "0"]) == 0

    def name(child: Child) -> str:
        words = " ".join(child._words).replace("=", " ").split()
        (flag,) = {"--engine-id", "--gateway-id"}.intersection(words)
        return words[words.index(flag) + 1]

    names = [[name(child) for child in children] for children in started]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine, *gateways = names[0]
    assert gateways == [f"{engine}-0", f"{engine}-1"]
    assert not set(names[0]) & set(names[1])
