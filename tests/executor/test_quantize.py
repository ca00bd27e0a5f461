"""--quantize: weights rounded to 8 bits at load, and what is served with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.executor.errors import UnsupportedModel
from engine.executor.models.fused import is_fused
from engine.executor.models.hf import load_model
from engine.executor.models.linear import PackedLinear, Product
from engine.executor.models.quantised import LARGEST, Quantised
from engine.executor.models.quantising import check_kind
from engine.executor.models.weights import fingerprint
from engine.tools.tiny_checkpoints import make_checkpoint as make_tiny
from tests.executor.driver import greedy, served
from tests.executor.test_worker import words

CPU = torch.device("cpu")


@given(
    st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(-4, 2),
)
def test_rounding_is_within_its_bound(dtype: torch.dtype, seed: int, given_as: torch.dtype, power: float) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 10**power
    weight[3] = 0
    weight[4, 1] *= 30
    weight = weight.to(given_as)
    quantised = Quantised.of(weight, dtype)
    assert (quantised.numbers.dtype, quantised.scale.dtype) == (dtype, torch.float32)
    scale, exact = quantised.scale.double()[:, None], weight.double()
    error = (quantised.numbers.double() * scale - exact).abs()
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(exact.abs() / 16, scale / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    top = quantised.numbers.double().abs().amax(1)
    assert top[3] == 0
    assert (top[[0, 1, 2, 4, 5, 6]] == LARGEST[dtype]).all()


def test_joined_weights_follow_one_another() -> None:
    parts = [torch.randn(size, 16, generator=torch.Generator().manual_seed(size)) for size in (3, 5)]
    for dtype in LARGEST:
        joined = Quantised.join([Quantised.of(part, dtype) for part in parts])
        whole = Quantised.of(torch.cat(parts), dtype)
        assert torch.equal(joined.dequantised(torch.float32), whole.dequantised(torch.float32))


def as_served(directory: Path) -> PreTrainedModel:
    """transformers' own model with the weights that --quantize int8 serves, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.weight.data = Quantised.of(module.weight, torch.int8).dequantised(torch.float32)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_greedy_text_is_that_of_the_rounded_weights(checkpoint: Callable[[str], Path], family: str) -> None:
    directory = checkpoint(family)
    model = load_model(str(directory), dtype="float32", device=CPU, quantize="int8")
    assert served(model, words(40)) == greedy(as_served(directory), words(40))


def in_int8(model: PreTrainedModel) -> dict[str, bool]:
    """Each linear layer as it is served, by the end of its name: whether its weight has 8 bits."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | Product | nn.Linear):
            packed = getattr(module, "packed", None)
            found[name.rpartition(".")[2]] = packed is not None and packed.scale is not None
    return found


def test_all_but_the_head_and_embeddings(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(str(checkpoint("llama")), dtype="bfloat16", device=CPU, quantize="int8").module
    assert is_fused(model)
    layers = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), True)
    assert in_int8(model) == layers | {"head": False}
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_family_that_is_not_fused(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(str(checkpoint("gpt_neox")), dtype="float32", device=CPU, quantize="int8").module
    layers = dict.fromkeys(("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), True)
    assert in_int8(model) == layers | {"lm_head": False}


def test_routers_stay(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path / "qwen", "qwen2_moe")), dtype="float32", device=CPU, quantize="int8")
    assert {name for name, yes in in_int8(model.module).items() if yes} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_prefixes_are_not_shared_with_the_plain_model(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    digests = set()
    for kind in ("none", "int8"):
        loaded = load_model(str(directory), dtype="bfloat16", device=CPU, quantize=kind)
        digests.add(fingerprint(directory, loaded.dtype, changes=loaded.changes))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        ("int8", "cuda", "--quantize int8: only a CPU multiplies with int8 weights; --device cpu can do it"),
        ("fp8", "cpu", "--quantize fp8: a CPU has no product with fp8 weights; --quantize int8 is made for it"),
        ("fp8", "cuda", "--quantize fp8: no product with fp8 weights is implemented for a GPU yet"),
    ],
)
def test_a_device_without_the_product_is_refused(kind: Literal["int8", "fp8"], device: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model("builtin", dtype="auto", device=torch.device(device), quantize=kind)
    assert str(caught.value) == reason
    check_kind("none", torch.device(device))


def test_a_model_without_plain_linear_layers_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match="gpt2: --quantize int8: it has no plain linear layers"):
        load_model(str(checkpoint("gpt2")), dtype="float32", device=CPU, quantize="int8")
