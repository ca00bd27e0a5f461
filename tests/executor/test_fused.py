"""Swapped submodules against what they replace, in bfloat16: within the rounding of the dtype, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.executor import ops
from quire.engine.executor.models import fused, fusible
from quire.engine.executor.models.fused import Decoder
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.models.linear import PackedLinear, Product, RMSNorm, Sharded
from tests.checkpoints import FAMILIES
from tests.executor.driver import Driver
from tests.executor.test_worker import words
from tests.matrix import each_pair, each_value

CPU = torch.device("cpu")
PRODUCTS = {PackedLinear, Product, nn.Linear, Conv1D}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 64])
@torch.inference_mode()
def test_packed_linear(rows: int, bias: bool, ordered: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 384, bias=bias).bfloat16()
    packed = ops.pack_weight(linear.weight, ordered=ordered)
    if packed is None:
        pytest.skip("no bfloat16 in this CPU's oneDNN")
    x = torch.randn(1, rows, 512).bfloat16()
    exact = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None)
    noise = (linear(x).float() - exact).abs().max()
    ours = PackedLinear(packed, linear.bias, torch.bfloat16)(x)
    assert ours.shape == (1, rows, 384)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().max() <= 2 * noise


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("qwen3", "none"), ("gpt_neox", "none"), ("gpt2", "none"), ("qwen3", "int8"), ("qwen3", "int4")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_product_of_a_deterministic_model_is_ordered(
    checkpoint: Callable[[str], Path], family: str, dtype: str, quantize: Literal["none", "int8", "int4"]
) -> None:
    path = str(checkpoint(family))
    model = load_model(path, dtype=dtype, device=CPU, deterministic=True, quantize=quantize).module
    products = [module for module in model.modules() if type(module) in PRODUCTS]
    assert len(products) > 8
    assert all(type(product) is not nn.Linear and product.packed.ordered for product in products)


FUSED = {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_that_are_swapped(checkpoint: Callable[[str], Path], family: str) -> None:
    model = load_model(str(checkpoint(family)), dtype="auto", device=CPU).module
    assert any(isinstance(module, Decoder) for module in model.modules()) == (family in FUSED)


@pytest.mark.parametrize(("family", "chunk"), each_value(sorted(FUSED), [1, 7, 512]))
def test_swapped_decoders_compute_what_the_plain_ones_do(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, chunk: int
) -> None:
    """In float32, over the same paged cache.  Measured: both are up to 2e-5 from a float64 forward."""

    def logits() -> torch.Tensor:
        driver = Driver(checkpoint(family))
        driver.add(words(61), None, chunk=chunk, targets=True)
        got = []
        while driver.running[0].computed < 61:
            driver.step()
            got.append(driver.worker.logits)
        return torch.cat(got)

    swapped = logits()
    monkeypatch.setattr(fused, "has_plain_decoder", lambda model: False)
    plain = logits()
    assert not torch.equal(swapped, plain)  # else one of them was tested twice
    torch.testing.assert_close(swapped, plain, rtol=1e-5, atol=4e-5)


def decoder_of(driver: Driver) -> Decoder:
    decoder = driver.worker._loaded.module.model
    assert isinstance(decoder, Decoder)
    return decoder


class AddsAndNorms:
    """The Shard of a rank whose part is the complete layer.

    It computes the norm along with the sum, as ranks on GPUs do for parts of some sizes."""

    adds = True

    def __init__(self, out_features: int) -> None:
        self.out_features = out_features
        self.norms: list[torch.Tensor] = []  # weights, in the order of calls

    def combine(self, part: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return part if out is None else out.copy_(part)

    def fuses_norm(self, rows: int, dtype: torch.dtype) -> bool:
        return rows % 2 == 0

    def add_and_norm(self, x: torch.Tensor, part: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        self.norms.append(norm.weight)
        return x.add_(part), ops.rms_norm(x, norm.weight, norm.eps)


@pytest.mark.parametrize("family", sorted(FUSED))
def test_norms_that_the_sum_of_ranks_computes(checkpoint: Callable[[str], Path], family: str) -> None:
    """Steps of an even number of tokens get their norms from the all-reduce, others from the linear layers."""

    def logits(shard: AddsAndNorms | None) -> torch.Tensor:
        driver = Driver(checkpoint(family))
        decoder = decoder_of(driver)
        decoder.whole = None
        layers = [layer for layer in decoder.layers if isinstance(layer, fused.Layer)]
        for layer in layers:
            for half, name in ((layer.attention, "o_proj"), (layer.mlp, "down_proj")):
                if shard is not None:
                    setattr(half, name, Sharded(getattr(half, name), shard))
        driver.add(words(61), None, chunk=8, targets=True)
        got = []
        while driver.running[0].computed < 61:
            driver.step()
            got.append(driver.worker.logits)
        if shard is not None:  # of each step of 8 tokens all norms but the first and the head's
            weights = [norm.weight for layer in layers for norm in (layer.norm, layer.mlp.norm)][1:]
            assert len(shard.norms) == 7 * len(weights)
            assert all(found is wanted for found, wanted in zip(shard.norms, 7 * weights, strict=True))
        return torch.cat(got)

    hidden = decoder_of(Driver(checkpoint(family))).embed_tokens.embedding_dim
    torch.testing.assert_close(logits(AddsAndNorms(hidden)), logits(None), rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize(
    ("family", "quantize", "kv_dtype"), each_pair(sorted(FUSED), ["none", "int8", "int4"], ["auto", "e4m3"])
)
def test_all_layers_as_one_operator_give_the_bits_of_the_operators_one_by_one(
    checkpoint: Callable[[str], Path], family: str, quantize: Literal["none", "int8", "int4"], kv_dtype: str
) -> None:
    def logits(*, whole: bool) -> torch.Tensor:
        path = str(checkpoint(family))
        model = load_model(path, dtype="bfloat16", device=CPU, deterministic=True, quantize=quantize)
        driver = Driver(model, kv_dtype=kv_dtype)
        decoder = decoder_of(driver)
        assert decoder.whole is not None
        decoder.whole = decoder.whole if whole else None
        driver.add(words(23), None, chunk=7, targets=True)
        driver.add(words(5))
        got: list[torch.Tensor] = []
        while len(got) < 9:
            driver.step()
            got.append(driver.worker.logits)
        return torch.cat(got)

    assert torch.equal(logits(whole=True), logits(whole=False))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_many_rows_of_one_operator_have_the_bits_of_the_operators_one_by_one(
    checkpoint: Callable[[str], Path], quantize: Literal["int8", "int4"]
) -> None:
    """A prompt long enough to meet the weights as bfloat16, where this CPU does that."""
    model = load_model(str(checkpoint("llama")), dtype="bfloat16", device=CPU, quantize=quantize)

    def logits(*, whole: bool) -> torch.Tensor:
        driver = Driver(model)
        decoder = decoder_of(driver)
        assert decoder.whole is not None
        assert decoder.whole.widen == (ops.widened_rows() is not None)
        kept = decoder.whole
        decoder.whole = kept if whole else None
        driver.add(words(90), None, targets=True)
        driver.step()
        decoder.whole = kept
        return driver.worker.logits.clone()

    assert torch.equal(logits(whole=True), logits(whole=False))


def test_layers_that_are_no_single_operator(checkpoint: Callable[[str], Path]) -> None:
    decoder = decoder_of(Driver(load_model(str(checkpoint("llama")), dtype="float32", device=CPU, deterministic=True)))
    layers = [layer for layer in decoder.layers if isinstance(layer, fused.Layer)]
    assert fused.one_operator(layers) is not None
    layers[1].attention.scale *= 2
    assert fused.one_operator(layers) is None
    assert fused.one_operator(layers[1:]) is not None
    o_proj = layers[1].attention.o_proj
    assert isinstance(o_proj, Product)
    layers[1].attention.o_proj = Sharded(o_proj, AddsAndNorms(128))
    assert fused.one_operator(layers[1:]) is None


def test_wrong_layers_are_refused(checkpoint: Callable[[str], Path]) -> None:
    driver = Driver(load_model(str(checkpoint("llama")), dtype="float32", device=CPU, deterministic=True))
    decoder = decoder_of(driver)
    right = decoder.whole
    assert right is not None
    for wrong, message in (
        (replace(right, weights=right.weights[:-1]), "weights: has .* tensors, not 20 for each of"),
        (replace(right, weights=[None] * len(right.weights)), "weights: layer 0 has no linear layer 0"),
        (replace(right, windows=right.windows[:1]), "layers is .*, windows has 1"),
        (replace(right, inner=right.inner * 2), "packed: strips is .*, out has"),
    ):
        decoder.whole = wrong
        driver.add(words(3))
        with pytest.raises(ValueError, match=message):
            driver.step()
        driver.worker.reset()
        driver.running.clear()


def odd_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def odd_norm(model: PreTrainedModel) -> None:
    model.model.norm = nn.LayerNorm(128)


def odd_projection(model: PreTrainedModel) -> None:
    class Scaled(nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj.__class__ = Scaled


def extra_part(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.gate = nn.Linear(128, 128)


def two_dtypes(model: PreTrainedModel) -> None:
    model.model.norm.double()


@pytest.mark.parametrize("change", [odd_activation, odd_norm, odd_projection, extra_part, two_dtypes])
def test_what_looks_unlike_the_expected_is_left_alone(
    checkpoint: Callable[[str], Path], change: Callable[[PreTrainedModel], None]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    assert fusible.has_plain_decoder(model)
    change(model)
    assert not fusible.has_plain_decoder(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@torch.inference_mode()
def test_bfloat16_logits_stay_within_the_noise_of_bfloat16(checkpoint: Callable[[str], Path], family: str) -> None:
    """As far from the float32 model as transformers' own bfloat16 forward is, up to a factor of two."""
    prompt = torch.tensor([words(40)])

    def own(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype, attn_implementation="eager")
        return model.eval()(input_ids=prompt, use_cache=False).logits[0, :-1].float()

    exact = own(torch.float32)
    noise = (own(torch.bfloat16) - exact).pow(2).mean().sqrt()
    driver = Driver(load_model(str(checkpoint(family)), dtype="bfloat16", device=CPU))
    driver.add(prompt[0].tolist(), None, targets=True)
    driver.step()
    assert (driver.worker.logits.float() - exact).pow(2).mean().sqrt() <= 2 * noise


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])  # all swapped; plain; steps after the LM head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_to_sixteen_bits(
    checkpoint: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    driver = Driver(load_model(str(checkpoint(family)), dtype=str(dtype).removeprefix("torch."), device=CPU))
    driver.add(words(9))
    driver.step()
    logits = driver.worker.logits
    assert logits.dtype == torch.float32
    assert (logits != logits.to(dtype)).float().mean() > 0.9


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_product_in_sixteen_bits_with_a_result_in_thirty_two(rows: int, dtype: torch.dtype, ordered: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 300).to(dtype), torch.randn(70, 300).to(dtype), torch.randn(70).to(dtype)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    packed = ops.pack_weight(weight, ordered=ordered, float32_out=True)
    assert packed is not None
    wide = ops.packed_linear(x, packed, bias)
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() < 1e-4
    plus = torch.randn(rows, 70)
    assert (ops.packed_linear(x, packed, bias, plus.clone()) - exact - plus).abs().max() < 1e-4
