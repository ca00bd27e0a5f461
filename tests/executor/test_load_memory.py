"""Loading holds no more on the host than the model and one shard of its files, measured in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.executor.models.progress_bars import no_bars
from tests import warm
from tests.pace import patience
from tests.quantised import KINDS

MB = 1e6
# What else a load takes: code that is imported meanwhile, threads, pieces of weights, memory of the probe's steps.
OTHERWISE = 24 * MB

# Prints the bytes of anonymous memory above those before the load: the most, and in the end.
MEASURE = """
import ctypes, gc, json, re, sys, threading, time, traceback
import torch
from quire.engine.executor import ops
from quire.engine.executor.models.hf import load_model

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def watch():
    global most, place
    while not done:
        if (now := anonymous()) > most:
            most = now
            frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            place = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames[:-6:-1]]
        time.sleep(0.001)

torch.set_num_threads(1)
ops.load(library=None)
before = most = anonymous()
done, place = False, []
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[1], device=torch.device("cpu"), **json.loads(sys.argv[2]))
done = True
thread.join()
after = anonymous()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(json.dumps({"most": most - before, "after": after - before, "model": anonymous() - before, "at": place}))
"""


def in_blocks(weight: Tensor) -> dict[str, Tensor]:
    """A weight in e4m3 with a scale for each block of 128 x 128."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale}


def measured(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One load, in a process that has imported torch and transformers already."""
    words = [sys.executable, "-c", MEASURE, str(directory), json.dumps(options)]
    done = warm.run(words, timeout=patience(100))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_rows(weight: Tensor) -> dict[str, Tensor]:
    """A weight in int8 with a scale for each row."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 100 million weights in bfloat16, in shards of 24 MB."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8000,
        max_position_embeddings=512,
    )
    directory = tmp_path_factory.mktemp("memory") / "plain"
    with torch.random.fork_rng(devices=[]), no_bars():
        torch.manual_seed(0)
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(directory, max_shard_size="24MB")
    return directory


def quantised(plain: Path, kind: str, quantise: Callable[[Tensor], dict[str, Tensor]]) -> Path:
    """Write a copy of a checkpoint, shard by shard, whose linear layers but the head are quantised."""
    directory = plain.with_name(kind)
    directory.mkdir()
    weights: dict[str, str] = {}
    for file in sorted(plain.glob("*.safetensors")):
        stored: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            module, _, _ = name.rpartition(".")
            plain_one = tensor.dim() == 1 or "embed" in name or "lm_head" in name
            parts = {"weight": tensor} if plain_one else quantise(tensor)
            stored |= {f"{module}.{part}": one for part, one in parts.items()}
        weights |= dict.fromkeys(stored, file.name)
        save_file(stored, directory / file.name, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    described = json.loads((plain / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(described | {"quantization_config": KINDS[kind].config}))
    return directory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        ("plain", {"dtype": "float32"}),
        pytest.param("plain", {"quantize": "int8"}, marks=pytest.mark.nightly),
        ("plain", {"quantize": "int4"}),
        ("ct-int8", {}),  # its quantised weights are kept
        pytest.param("fp8-block", {}, marks=pytest.mark.nightly),  # dequantised
        ("fp8-block", {"quantize": "int8"}),
    ],
)
def test_a_load_holds_the_model_and_one_shard(checkpoint: Path, kind: str, options: dict[str, Any]) -> None:
    if not (directory := checkpoint.with_name(kind)).exists():
        directory = quantised(checkpoint, kind, in_blocks if kind == "fp8-block" else by_rows)
    options = {"dtype": "bfloat16"} | options
    widened = 2 if options["dtype"] == "float32" else 1  # what a shard of bfloat16 becomes
    shard = widened * max(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    found = measured(directory, options)
    if found["most"] - found["model"] >= shard + OTHERWISE:  # on a busy machine, one load among some hundred
        found = measured(directory, options)
    assert found["most"] - found["model"] < shard + OTHERWISE, found
    assert found["after"] - found["model"] < OTHERWISE, found
    smaller = {"int8": 0.75, "int4": 0.6}.get(options.get("quantize", "int8" if kind == "ct-int8" else ""), 1.05)
    size = widened * sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert 0.2 * size < found["model"] < smaller * size, found
