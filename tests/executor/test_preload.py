"""What a spare prepares: it saves the takeover work, and decides nothing about what is served."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, Slice, Start, StepPlan
from quire.engine.executor import local, preload
from quire.engine.executor.kv_cache import KVShape, allocate
from quire.engine.executor.memory_plan import MAX_MEASUREMENTS, MemoryPlan
from quire.engine.process.standby import OPTIONAL, without_optional_packages
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies import tiny_checkpoints
from quire.loadtest.studies.model_families import model_class

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")


def config(model: Path, **options: object) -> EngineConfig:
    given = {"model": str(model), "threads": 1, "kv_blocks": 80, "max_seqs": 8, "step_tokens": 64, "device": "cpu"}
    return msgspec.convert({**given, **options}, EngineConfig)


def prepared(model: Path) -> list[str]:
    return list(preload.prepare(config(model, standby=True)))


def tokens(executor: local.LocalExecutor, count: int = 8) -> list[int]:
    """Greedy choice of a fixed prompt."""
    sampler = Sampler(Sampling(temperature=0.0, ignore_eos=True), 5, [])
    plans = [StepPlan(1, starts=[Start(0, [0, 1, 2])], slices=[Slice(0, 0, [9, 8, 7, 6, 5], sampler)])]
    plans += [StepPlan(step) for step in range(2, count + 1)]
    found = []
    for plan in plans:
        executor.submit(plan)
        found += executor.collect().tokens
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_every_family_is_rehearsed(checkpoint: Checkpoint, family: str) -> None:
    assert prepared(checkpoint(family)) == ["kernels", "weight files", "rehearsal"]


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl"])
def test_the_text_of_a_multimodal_model_is_rehearsed_with_its_overrides(family: str, tmp_path: Path) -> None:
    directory = tiny_checkpoints.make_checkpoint(tmp_path / family, family, model_class=model_class(family))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    changes = json.dumps({"text_config": {"rope_scaling": yarn}})
    preload.rehearse(config(directory, hf_overrides=changes, max_model_len=1024), directory)


def test_a_model_whose_layers_differ_is_rehearsed(tmp_path: Path) -> None:
    """The one layer that is left has the fields of the first, and no other layer to share with."""
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    directory = tiny_checkpoints.make_checkpoint(tmp_path / "gemma4", "gemma4_text", num_kv_shared_layers=2, **layers)
    assert prepared(directory) == ["kernels", "weight files", "rehearsal"]


def test_what_was_prepared_changes_no_token(checkpoint: Checkpoint) -> None:
    usual = local.LocalExecutor(config(checkpoint("llama")))
    wanted, fingerprint = tokens(usual), usual.info.fingerprint
    usual.close()
    prepared(checkpoint("llama"))
    spare = local.LocalExecutor(config(checkpoint("llama"), standby=True))
    assert tokens(spare) == wanted
    assert spare.info.fingerprint == fingerprint
    assert not spare.catch_up()
    spare.close()


def test_a_model_that_changes_after_the_preparation_is_served_as_it_is_then(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    prepared(model)
    before = local.LocalExecutor(config(model, standby=True))
    said, fingerprint = tokens(before), before.info.fingerprint
    before.close()
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    after = local.LocalExecutor(config(model, standby=True))
    assert after.info.fingerprint != fingerprint
    assert tokens(after) != said
    after.close()


def test_cpu_pages_on_demand_are_zeros_in_the_same_layout() -> None:
    layers = [KVShape(2, 64), KVShape(1, 32)]
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        usual = allocate(layers, 5, 16, dtype, CPU)
        lazy = allocate(layers, 5, 16, dtype, CPU, on_demand=True)
        for one, other in zip(usual, lazy, strict=True):
            for a, b in ((one.k, other.k), (one.v, other.v)):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
                assert b.data_ptr() % 64 == 0
                assert not b.float().any()
    poisoned = allocate(layers, 5, 16, torch.float32, CPU, float("nan"), on_demand=True)
    assert poisoned[0].k.isnan().all()


def test_optional_packages_are_hidden_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIONAL:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "scipy", sys)  # one that is imported already stays
    with without_optional_packages():
        assert sys.modules["scipy"] is sys
        with pytest.raises(ModuleNotFoundError):
            __import__("torchvision")
    assert "torchvision" not in sys.modules


def test_the_memory_plan_is_recalled_for_the_same_configuration_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")

    def plan(sizes: str = "8 64", **options: object) -> MemoryPlan:
        return MemoryPlan(config(model, **options), model, sizes, tmp_path)

    assert plan().recall() == 0
    plan(engine_id="e").remember(12345)
    assert plan(engine_id="e", standby=True).recall() == 12345
    for other in (plan(engine_id="f"), plan("8 128", engine_id="e"), plan(engine_id="e", kv_dtype="e4m3")):
        assert other.recall() == 0
    for i in range(MAX_MEASUREMENTS):
        plan(str(i)).remember(1 + i)
    assert plan(engine_id="e").recall() == 0  # only the newest are kept
    (tmp_path / "activations.json").write_text("[1]")
    assert plan().recall() == 0
