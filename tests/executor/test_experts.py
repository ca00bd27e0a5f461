"""Experts of mixture families inside transformers' own layers: by our operator, or left alone with a reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from quire.engine.executor import ops
from quire.engine.executor.models import hf
from quire.engine.executor.models.experts import is_experts, refusal, use_own_experts
from tests.executor.test_mixtures import plain_experts

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "pad_token_id": 0,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("olmoe", {}),
    "softmax, normalised": ("olmoe", {"norm_topk_prob": True}),
    "a shared expert with a gate": ("qwen2_moe", {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}),
    "sigmoid, groups, shared experts": ("glm4_moe", GROUPS | {"n_shared_experts": 1}),
    "sigmoid, groups, not normalised": ("dots1", GROUPS | {"n_shared_experts": 2, "norm_topk_prob": False}),
    "latent attention, groups": ("deepseek_v3", GROUPS | LATENT | {"n_shared_experts": 1}),
    "a bias per expert in the choice only": ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_num_shared_experts": 1}),
    "shared, every layer": ("hunyuan_v1_moe", {"num_shared_expert": 1}),
    "softmax of the chosen logits": ("granitemoe", {}),
    "sparse mixer": ("phimoe", {"num_experts_per_tok": 2}),
}


def made(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate" in name:  # as made they are so small that experts would not matter
                parameter.copy_(torch.randn_like(parameter) / 4)
    return model


def logits_of(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(40).view(1, 40) * 7 % 64
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


class Calls:
    """`ops.experts` in torch, counted."""

    def __init__(self) -> None:
        self.layers = 0

    def __call__(self, *operands: Tensor, **options: Any) -> Tensor:
        self.layers += 1
        x, chosen, weights, gate_up, down = operands
        assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert all(operand.is_contiguous() for operand in operands)
        return plain_experts(x, chosen, weights, gate_up, down, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    own = Calls()
    monkeypatch.setattr(ops, "experts", own)
    return own


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_routing_and_its_shared_experts(calls: Calls, name: str) -> None:
    kind, changes = FAMILIES[name]
    model = made(kind, **changes)
    want = logits_of(model)
    layers = use_own_experts(model)
    assert layers > 0
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-4)
    assert calls.layers == layers
    for module in model.modules():
        if is_experts(module):
            module.down_proj.data.zero_()  # so the comparison above covers the experts
    assert not torch.allclose(logits_of(model), want, rtol=1e-2, atol=1e-2)


WIDE = {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "head_dim": 128}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300])  # the kernels for one token, for few pairs, and for all
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu_a_family_is_as_near_to_float32_as_with_its_own_experts(name: str, tokens: int) -> None:
    kind, changes = FAMILIES[name]
    model = made(kind, **WIDE | changes).cuda()
    ids = (torch.arange(tokens) * 7 % 64).view(1, tokens).cuda()

    def logits() -> Tensor:
        with torch.inference_mode():
            return model(input_ids=ids, use_cache=False).logits.float()

    exact = logits()
    model.bfloat16()
    theirs = (logits() - exact).square().mean().sqrt()
    assert use_own_experts(model) > 0
    ours = (logits() - exact).square().mean().sqrt()
    assert ours <= 1.25 * theirs, (float(ours), float(theirs))


def test_many_pairs_go_to_transformers_unless_ours_take_them(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("olmoe")
    want = logits_of(model)
    assert use_own_experts(model) == 2
    monkeypatch.setattr(ops, "MAX_PAIRS", 40 * 3 - 1)
    torch.testing.assert_close(logits_of(model), want)
    assert calls.layers == 0
    monkeypatch.setattr(ops, "takes_all_pairs", lambda hidden, inner, device: (hidden, inner) == (32, 48))
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-4)
    assert calls.layers == 2


def test_hooks_of_the_module_stay(calls: Calls) -> None:
    """A rank's hook adds what the experts of the others make."""
    model = made("olmoe")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    before = logits_of(model)
    experts.register_forward_hook(lambda module, inputs, output: 2 * output)
    want = logits_of(model)
    use_own_experts(model)
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, before, rtol=1e-2, atol=1e-2)


def no_gate(experts: Any) -> None:
    experts.has_gate = False


def another_activation(experts: Any) -> None:
    experts.act_fn = nn.GELU()


def another_gate(experts: Any) -> None:
    experts.__class__ = type("Clamped", (OlmoeExperts,), {"_apply_gate": lambda self, both: both})


def a_norm(experts: Any) -> None:
    experts.has_post_expert_norm = True


def biases(experts: Any) -> None:
    experts.has_bias = True


def one_more_parameter(experts: Any) -> None:
    experts.scale = nn.Parameter(torch.ones(8))


def another_shape(experts: Any) -> None:
    experts.gate_up_proj = nn.Parameter(torch.zeros(8, 48, 32))


def odd_sizes(experts: Any) -> None:
    experts.gate_up_proj, experts.down_proj = nn.Parameter(torch.zeros(8, 40, 32)), nn.Parameter(torch.zeros(8, 32, 20))


def too_many(experts: Any) -> None:
    experts.gate_up_proj = nn.Parameter(torch.zeros(513, 16, 8))
    experts.down_proj = nn.Parameter(torch.zeros(513, 8, 8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_gate, "they have no gate"),
        (another_activation, "their activation is GELU"),
        (another_gate, r"their activation is not silu\(gate\) \* up"),
        (a_norm, "a norm follows each expert"),
        (biases, "their weights have another layout, or biases"),
        (one_more_parameter, "their parameters are not gate_up_proj and down_proj"),
        (another_shape, "are not those of gated experts"),
        (odd_sizes, "inner size 20 is no multiple of 8"),
        (too_many, "513 experts, the maximum is 512"),
    ],
)
def test_other_experts_are_left_alone_with_a_reason(
    calls: Calls, caplog: pytest.LogCaptureFixture, change: Any, reason: str
) -> None:
    model = made("olmoe", num_hidden_layers=1)
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    assert refusal(experts) == ""
    change(experts)
    with caplog.at_level(logging.INFO):
        assert use_own_experts(model) == 0
    assert "forward" not in vars(experts)
    assert "stay with transformers' kernels" in caplog.text
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal(experts))


@pytest.mark.parametrize(
    ("device", "is_ours", "own_experts", "layers"),
    [("cuda", False, True, 1), ("cuda", False, False, 0), ("cuda", True, True, 0), ("cpu", False, True, 0)],
)
def test_when_the_option_has_an_effect(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    is_ours: bool,
    own_experts: bool,
    layers: int,
) -> None:
    """On a GPU, where the decoder stays transformers' own.  The log says whose kernels compute the experts."""
    model = made("olmoe", num_hidden_layers=1)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    monkeypatch.setattr(hf, "fuse", lambda *_, **__: None)
    monkeypatch.setattr(hf, "is_fused", lambda model: is_ours)
    with caplog.at_level(logging.INFO):
        hf.swap_modules(model, 64, False, decoder=True, own_experts=own_experts)
    assert ("1 layers are computed by our kernels" in caplog.text) == (layers == 1)
    assert ("transformers' kernels, as --no-own-experts asks" in caplog.text) == (
        device == "cuda" and not is_ours and not layers
    )
    assert sum("forward" in vars(module) for module in model.modules()) == layers


def test_a_model_without_experts_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama")
    with caplog.at_level(logging.INFO):
        assert use_own_experts(model) == 0
    assert not caplog.text
