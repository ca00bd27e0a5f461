"""Scales of keys and values that a checkpoint brings for an e4m3 cache: read for each layer and head, and used."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models.quantised.kv_scales import read_kv_scales
from quire.engine.executor.ranks.ranks import Ranks
from tests.executor.driver import Driver
from tests.executor.test_worker import own_logits, rounded_attention, words

LAYERS, HEADS = 2, 2  # the tiny llama of these tests
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
PLAIN = [KVShape(HEADS, 32)] * LAYERS
Quantised = Callable[[str], tuple[Path, dict[str, Any]]]


def with_scales(
    source: Path,
    directory: Path,
    scales: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor] | None = None,
    **said: Any,
) -> Path:
    """Copy a checkpoint, add these tensors to each layer's attention, and these words to its quantisation config."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors") | (weights or {})
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": (layer + 1) * scale for name, scale in scales.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_bytes())
    described["quantization_config"] |= said
    (directory / "config.json").write_text(json.dumps(described))
    return directory


@pytest.fixture
def ct(quantised: Quantised) -> Path:
    return quantised("ct-fp8-channel")[0]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("k_scale", "v_scale"), {"kv_cache_scheme": PER_TENSOR}),
        (("k_proj.output_scale", "v_proj.output_scale"), {"kv_cache_scheme": PER_TENSOR}),
        (("k_proj.k_scale", "v_proj.v_scale"), {"kv_cache_quant_algo": "FP8"}),
        (("k_scale", "v_scale"), {"quant_method": "fp8"}),
    ],
)
def test_one_number_for_all_heads(ct: Path, tmp_path: Path, names: tuple[str, str], said: dict[str, Any]) -> None:
    scales = dict(zip(names, (torch.tensor(0.5), torch.tensor([0.25])), strict=True))
    found = read_kv_scales(with_scales(ct, tmp_path / "model", scales, **said), "llama", PLAIN)
    assert found is not None
    first, second = (layer.tolist() for layer in found if layer is not None)
    assert first == [[0.5, 0.5], [0.25, 0.25]]
    assert second == [[1, 1], [0.5, 0.5]]


def test_one_number_for_keys_and_values(ct: Path, tmp_path: Path) -> None:
    directory = with_scales(ct, tmp_path / "model", {"kv_scale": torch.tensor(0.5)}, quant_method="fp8")
    found = read_kv_scales(directory, "llama", PLAIN)
    assert [layer.tolist() for layer in found or [] if layer is not None] == [[[0.5] * 2] * 2, [[1.0] * 2] * 2]


@pytest.mark.parametrize(
    ("rank", "size", "heads", "wanted"), [(0, 1, 2, [1, 3]), (1, 2, 1, [3]), (1, 4, 1, [1]), (2, 4, 1, [3])]
)
def test_a_number_for_each_head_of_a_rank(
    ct: Path, tmp_path: Path, rank: int, size: int, heads: int, wanted: list[float]
) -> None:
    of_heads = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    scales = {"k_scale": of_heads, "v_scale": 2 * of_heads}
    directory = with_scales(ct, tmp_path / "model", scales, kv_cache_scheme=PER_TENSOR | {"strategy": "attn_head"})
    found = read_kv_scales(directory, "llama", [KVShape(heads, 32)] * LAYERS, Ranks(rank, size))
    assert found is not None
    assert found[0] is not None
    assert found[0].tolist() == [wanted, [2 * one for one in wanted]]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"kv_cache_scheme": PER_TENSOR | {"type": "int"}},
        {"kv_cache_scheme": PER_TENSOR | {"dynamic": True}},
        {"kv_cache_scheme": PER_TENSOR | {"symmetric": False}},
        {"kv_cache_quant_algo": "NVFP4"},
    ],
)
def test_scales_for_another_cache_are_not_used(
    ct: Path, tmp_path: Path, said: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.5)}
    assert read_kv_scales(with_scales(ct, tmp_path / "model", scales, **said), "llama", PLAIN) is None
    assert "not used" in caplog.text


def test_checkpoints_without_scales(plain: Path, ct: Path) -> None:
    assert read_kv_scales(plain, "llama", PLAIN) is None
    assert read_kv_scales(ct, "llama", PLAIN) is None


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(2)}, "self_attn.k_scale has shape [3], for 2 KV heads"),
        ({"k_scale": torch.ones(1)}, "layer 0 has 0 scales of cached values, not one"),
        (
            {"k_scale": torch.ones(1), "k_proj.k_scale": torch.ones(1), "v_scale": torch.ones(1)},
            "2 scales of cached keys",
        ),
        ({"k_scale": torch.zeros(1), "v_scale": torch.ones(1)}, "k_scale holds 0, which is no scale"),
        ({"k_scale": torch.tensor([math.inf]), "v_scale": torch.ones(1)}, "k_scale holds inf, which is no scale"),
    ],
)
def test_scales_that_no_cache_can_have_are_refused(
    ct: Path, tmp_path: Path, scales: dict[str, torch.Tensor], reason: str
) -> None:
    directory = with_scales(ct, tmp_path / "model", scales, kv_cache_scheme=PER_TENSOR)
    with pytest.raises(UnsupportedModel) as caught:
        read_kv_scales(directory, "llama", PLAIN)
    assert reason in str(caught.value)


KEY_SCALES, VALUE_SCALES = torch.tensor([40.0, 70.0]), torch.tensor([3.0, 0.01])


def scaled_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options: Any
) -> tuple[torch.Tensor, None]:
    """`rounded_attention` over a cache whose heads have scales; those of layer 1 are twice those of layer 0."""
    factor = 1 + int(module.layer_idx)  # type: ignore[arg-type]
    of_keys, of_values = ((factor * each.to(query.dtype)).view(HEADS, 1, 1) for each in (KEY_SCALES, VALUE_SCALES))
    group = query.shape[1] // HEADS
    output, _ = rounded_attention(
        module, query * of_keys.repeat_interleave(group, 0), key / of_keys, value / of_values, mask, **options
    )
    return output * of_values.view(HEADS, 1).repeat_interleave(group, 0), None


AttentionInterface.register("scaled", scaled_attention)


@pytest.mark.parametrize("kv_dtype", ["e4m3", "auto"])
def test_a_cache_with_scales(quantised: Quantised, plain: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Keys 2,000 times as large as trained ones: without scales they would all be cut off at 448."""
    source, exact = quantised("ct-fp8-channel")
    larger = {
        name: tensor * (2000.0 if "k_proj" in name else 1 / 2000)
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.endswith(("k_proj.weight_scale", "q_proj.weight_scale"))
    }
    scales = {"k_scale": KEY_SCALES, "v_scale": VALUE_SCALES}
    directory = with_scales(source, tmp_path / "model", scales, larger, kv_cache_scheme=PER_TENSOR)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64).eval()
    model.load_state_dict({name: tensor.double() for name, tensor in exact.items()}, strict=False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 2000
        layer.self_attn.q_proj.weight.data /= 2000
    prompt = words(61)
    wanted = own_logits(model, prompt)[:-1]
    if kv_dtype == "e4m3":
        model.set_attn_implementation("scaled")
        wanted = own_logits(model, prompt)[:-1]
    driver = Driver(directory, kv_dtype=kv_dtype, dtype="float32")
    driver.add(prompt, None, chunk=7, targets=True)
    got = []
    while driver.running[0].computed < len(prompt):
        driver.step()
        got.append(driver.worker.logits)
    error = ((torch.cat(got) - wanted).norm() / wanted.norm()).item()
    assert error < 1e-3
