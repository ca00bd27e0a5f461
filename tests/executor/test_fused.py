"""Swapped submodules against what they replace, in bfloat16: within the rounding of the dtype, measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.executor import ops
from engine.executor.models.fused import PackedLinear, fuse
from engine.executor.models.hf import load_model
from tests.executor.driver import Driver
from tests.executor.test_worker import words

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 64])
@torch.inference_mode()
def test_packed_linear(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 384, bias=bias).bfloat16()
    if not ops.can_pack(linear.weight):
        pytest.skip("no bfloat16 in this CPU's oneDNN")
    x = torch.randn(1, rows, 512).bfloat16()
    exact = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None)
    noise = (linear(x).float() - exact).abs().max()
    ours = PackedLinear(linear)(x)
    assert ours.shape == (1, rows, 384)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().max() <= 2 * noise


def test_only_what_can_be_packed_is(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(str(checkpoint("qwen3")), dtype="float32", device=CPU).module
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding  # tied
    model = model.bfloat16()
    if not ops.can_pack(embedding):
        pytest.skip("no bfloat16 in this CPU's oneDNN")
    fuse(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert model.get_input_embeddings().weight.shape == embedding.shape  # still there to look tokens up


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
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
