"""Experts that stay quantised: loaded as stored, packed for our operator, widened where no kernel serves them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.engine.executor import ops
from quire.engine.executor.models import fused, fusible, hf
from quire.engine.executor.models.fused import Mixture, is_fused
from quire.engine.executor.models.hf import LoadedModel, load_model
from quire.engine.executor.models.quantised import quantised_experts, quantising
from quire.engine.executor.models.quantised.dequantise import dequantise_mxfp4
from quire.engine.executor.models.quantised.quantised_experts import QuantisedExperts, StoredMxfp4
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor.driver import logits_of
from tests.executor.test_gpu import words
from tests.executor.test_mixtures import calm_gpt_oss
from tests.quantised import store_experts_in_mxfp4

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are stored as mxfp4, of sizes that the kernels can tile."""
    changes: dict[str, Any] = dict(FAMILIES["llama"]) | {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "swiglu_limit": 1.0,
    }
    changes |= {"num_hidden_layers": 2, "sliding_window": 24, "hidden_size": 128, "intermediate_size": 192}
    root = tmp_path_factory.mktemp("mxfp4") / "gpt_oss"
    directory = make_checkpoint(root, "gpt_oss", edit=calm_gpt_oss, **changes)
    store_experts_in_mxfp4(directory)
    return directory


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve experts on a CPU as on a Hopper GPU: our decoder, and the operators' plain loops."""
    monkeypatch.setattr(fused, "has_plain_decoder", fusible.has_known_parts)
    monkeypatch.setattr(ops, "takes_all_pairs", lambda hidden, inner, device: True)
    for module in (quantised_experts, quantising, hf):
        monkeypatch.setattr(module, "packs_experts", lambda device, dtype: True)


def mixtures_of(model: LoadedModel) -> list[Mixture]:
    return [module for module in model.module.modules() if isinstance(module, Mixture)]


@torch.inference_mode()
def test_stored_experts_give_the_bits_of_dequantised_ones(
    stored: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        kept = load_model(str(stored), dtype="float32", device=CPU)
    assert is_fused(kept.module)
    assert "experts of 2 layers stay in mxfp4" in caplog.text
    assert "dequantised" not in caplog.text
    assert all(mixture.packed is not None for mixture in mixtures_of(kept))
    monkeypatch.setattr(quantising, "packs_experts", lambda device, dtype: False)
    plain = load_model(str(stored), dtype="float32", device=CPU)
    assert all(mixture.packed is None for mixture in mixtures_of(plain))
    assert torch.equal(logits_of(kept, words(50), 7), logits_of(plain, words(50), 7))


@torch.inference_mode()
def test_experts_of_a_model_that_keeps_its_layers_are_dequantised(
    stored: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "has_plain_decoder", lambda model: False)
    with caplog.at_level(logging.INFO):
        model = load_model(str(stored), dtype="float32", device=CPU)
    assert "experts of 2 layers are dequantised to torch.float32: the model keeps transformers' layers" in caplog.text
    assert not any(isinstance(module, QuantisedExperts) for module in model.module.modules())
    assert sum(isinstance(module, GptOssExperts) for module in model.module.modules()) == 2


def test_a_scale_out_of_range_dequantises_the_experts(
    stored: Path, tmp_path: Path, on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shutil.copytree(stored, tmp_path / "gpt_oss")
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name][3, 2, 1] = ops.LARGEST_SCALE + 1
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = load_model(str(directory), dtype="float32", device=CPU)
    assert "experts in mxfp4 are dequantised: a scale is over 2^1" in caplog.text
    assert len([mixture for mixture in mixtures_of(model) if mixture.packed is None]) == 1


def test_random_weights_take_the_format_of_the_config(stored: Path, tmp_path: Path, on_cpu: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((stored / "config.json").read_bytes())))
    model = load_model(str(tmp_path), dtype="float32", device=CPU, random=True)
    assert all(mixture.packed is not None for mixture in mixtures_of(model))


def test_rounding_to_mxfp4_keeps_values_that_it_has() -> None:
    blocks = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8)
    blocks[..., 0] |= 7  # each group has a 6, so that its scale is the stored one
    scales = torch.randint(100, 129, (3, 64, 2), dtype=torch.uint8)
    weight = dequantise_mxfp4(blocks, scales, torch.float32)
    again = StoredMxfp4.of(weight)
    assert torch.equal(again.scales, scales)
    assert torch.equal(again.dequantised(torch.float32), weight)


@pytest.mark.parametrize(
    ("capability", "dtype", "kept"),
    [((9, 0), torch.bfloat16, True), ((9, 0), torch.float16, False), ((10, 0), torch.bfloat16, False)],
)
def test_devices_that_keep_mxfp4(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, kept: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert quantised_experts.packs_experts(torch.device("cuda"), dtype) == kept
    assert not quantised_experts.packs_experts(CPU, dtype)
