"""Starts that cannot succeed: one line with the reason, a non-zero exit, no traceback, through the real commands."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience
from tests.system.processes import ENVIRONMENT, QUIRE, ROOT

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
TURNS = ThreadPoolExecutor(max_workers=3)


async def ended(*words: str) -> tuple[int, str]:
    """(exit status, everything it wrote) of `quire ...`; waits its turn, for each keeps a core busy with imports."""

    def run() -> tuple[int, str]:
        done = subprocess.run(
            [*QUIRE, *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(250),
            check=False,
        )
        return done.returncode, done.stdout

    return await asyncio.get_running_loop().run_in_executor(TURNS, run)


def corrupt(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lacking_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def unsupported(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "model_type": "bloom", "architectures": ["BloomForCausalLM"]})
    )


def as_it_is(model: Path) -> None:
    """Nothing is wrong with the model."""


BROKEN: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "corrupt": (corrupt, [], "model.safetensors"),
    "missing tensor": (lacking_a_tensor, [], "the weight files lack model.layers.1.self_attn.q_proj.weight"),
    "unsupported": (unsupported, [], "bloom: computes attention itself"),
    "no memory": (as_it_is, ["--kv-blocks=3", "--max-model-len=1024"], "one sequence of max_model_len 1024 needs 64"),
}


async def test_what_an_engine_cannot_serve(
    checkpoint: Callable[[str], Path], redis_server: EmbeddedRedis, namespace: str, tmp_path: Path
) -> None:
    """The engine says so in its only line; `quire serve` adds that it gives up."""
    cases: list[tuple[list[str], str]] = [(["/no/such/model"], "/no/such/model: no such directory")]
    for what, (spoil, options, reason) in BROKEN.items():
        model = tmp_path / what
        shutil.copytree(checkpoint("llama"), model)
        spoil(model)
        cases.append(([str(model), *options], reason))
    common = ["--threads=1", "--namespace", namespace, "--redis-url", redis_server.url]
    served, *alone = await asyncio.gather(
        ended("serve", *cases[1][0], *common, "--port=0"), *(ended("engine", *words, *common) for words, _ in cases)
    )
    for (status, said), (_, reason) in zip(alone, cases, strict=True):
        [line] = [line for line in said.splitlines() if line.startswith("quire ")]
        assert status == 2
        assert line.startswith("quire engine: ")
        assert reason in line
        assert "Traceback" not in said
    status, said = served
    lines = [line for line in said.splitlines() if line.startswith("quire ")]
    assert status == 1
    assert lines[0].startswith("quire engine: ")
    assert cases[1][1] in lines[0]
    assert lines[1:] == ["quire serve: the engine cannot start (its reason is above)"]
    assert "Traceback" not in said


async def test_settings_and_surroundings_that_cannot_work(namespace: str, checkpoint: Callable[[str], Path]) -> None:
    """Beyond those of `quire serve` in test_serve.py and of the gateway in tests/service/test_process.py."""
    nowhere = "redis://:hush@127.0.0.1:1/0"
    cases: list[tuple[list[str], int, str]] = [
        (["engine", "--executor=scripted", "--redis-url", nowhere], 2, "quire engine: Redis at redis://127.0.0.1:1/0 "),
        (["engine", "--max-sqes=3"], 2, "quire engine: --max-sqes is not an option; did you mean --max-seqs?"),
        (["engine", "--block-size=7"], 2, "quire engine: --block-size is '7'; must be one of 8 16 32 64"),
        (["gateway", "--prot=1"], 2, "quire gateway: --prot is not an option; did you mean --port?"),
        (["gateway", "--port=70000"], 2, "quire gateway: --port is '70000'; must be a whole number, >= 0, <= 65535"),
        (
            ["serve", str(checkpoint("llama")), "--port=0", "--max-sqes=3"],
            2,
            "quire serve: --max-sqes is not an option; did you mean --max-seqs?",
        ),
        (["nonsense"], 2, "usage: quire serve [MODEL]"),
    ]
    seen = await asyncio.gather(*(ended(*words) for words, _, _ in cases))
    for (words, status, reason), (got, said) in zip(cases, seen, strict=True):
        assert got == status, (words, said)
        assert reason in said, (words, said)
        assert "Traceback" not in said, words
        assert "hush" not in said, words
