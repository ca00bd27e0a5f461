"""Decides which decoders of transformers fused.py replaces: known families with the expected submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from transformers import (
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.activations import SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.fp8_experts import WEIGHTS
from quire.engine.executor.models.quantised.quantised import QuantisedLinear
from quire.engine.executor.models.quantised.quantised_experts import QuantisedExperts

# The attention window of a layer of each family, read from its own attention module.
WINDOW: dict[type[PreTrainedModel], Callable[[Any], int | None]] = {
    LlamaForCausalLM: lambda attention: None,
    MistralForCausalLM: lambda attention: attention.config.sliding_window,
    Qwen2ForCausalLM: lambda attention: attention.sliding_window,
    Qwen3ForCausalLM: lambda attention: attention.sliding_window,
    MixtralForCausalLM: lambda attention: attention.config.sliding_window,
    Qwen3MoeForCausalLM: lambda attention: attention.sliding_window,
    GptOssForCausalLM: lambda attention: attention.sliding_window,
}


class Routing(NamedTuple):
    """Arguments of `ops.route` for a family: they decide how router logits become expert weights."""

    normalise: bool
    rounded: bool


class MixtureFamily(NamedTuple):
    """A family whose layers may be mixtures of experts."""

    router: str  # attribute name of a layer's router
    routing: Callable[[Any], Routing]  # routing of a router module
    clamped: bool = False  # gpt_oss: `ops.Clamped`, biases in router and experts, weights [experts, in, out]


MIXTURES: dict[type[PreTrainedModel], MixtureFamily] = {
    MixtralForCausalLM: MixtureFamily("gate", lambda router: Routing(normalise=True, rounded=False)),
    Qwen3MoeForCausalLM: MixtureFamily("gate", lambda router: Routing(router.norm_topk_prob, rounded=True)),
    # gpt_oss computes a softmax over the logits of the chosen experts.  A softmax over all logits whose chosen weights
    # are then divided by their sum gives the same.
    GptOssForCausalLM: MixtureFamily("router", lambda router: Routing(normalise=True, rounded=True), clamped=True),
}
# Expert implementations of transformers that read the layout of the weights from the module.
READS_LAYOUT = {"grouped_mm", "batched_mm"}
LINEAR = (nn.Linear, QuantisedLinear)  # layer types that `Linears.product` accepts


def has_plain_decoder(model: PreTrainedModel) -> bool:
    """Whether `Decoder` can replace this model's decoder: a known class with the expected submodules."""
    return has_known_parts(model) and not (type(model) in MIXTURES and model.device.type == "cpu")


def has_known_parts(model: PreTrainedModel) -> bool:
    """Whether the model is of a known class and has the expected submodules, on any device."""
    if type(model) not in WINDOW:
        return False
    if len({parameter.dtype for parameter in model.parameters()}) != 1:
        return False
    decoder = model.model
    if type(model.lm_head) not in LINEAR:
        return False
    if children(decoder) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    mixture = MIXTURES.get(type(model))
    return is_norm(decoder.norm) and all(is_plain_layer(layer, decoder.rotary_emb, mixture) for layer in decoder.layers)


def is_plain_layer(layer: Any, rotary: Any, mixture: MixtureFamily | None) -> bool:
    """Whether a layer has the expected submodules.  mixture: the MLP may also be a mixture of this family."""
    if children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if children(attention) not in (projections, projections | {"q_norm", "k_norm"}):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)) if norm]
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return (
        all(map(is_norm, norms))
        and are_alike(qkv)
        and type(attention.o_proj) in LINEAR
        and len({linear.bias is None for linear in qkv}) == 1
        and own_parameters(attention) <= {"sinks"}
        and (is_plain_mlp(mlp) or (mixture is not None and is_mixture(mlp, mixture)))
        and 2 * rotary.inv_freq.numel() == attention.head_dim  # all elements of a head are rotated
    )


def are_alike(linears: list[Any]) -> bool:
    """Whether linear layers of the same input can become one GEMM."""
    return len({type(linear) for linear in linears}) == 1 and type(linears[0]) in LINEAR


def is_plain_mlp(mlp: Any) -> bool:
    return (
        children(mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and are_alike([mlp.gate_proj, mlp.up_proj])
        and type(mlp.down_proj) in LINEAR
        and isinstance(mlp.act_fn, SiLUActivation | nn.SiLU)
    )


def is_mixture(mlp: Any, family: MixtureFamily) -> bool:
    """Whether `mlp` is an unsharded router with its experts, of sizes that `ops.experts` supports."""
    if children(mlp) != {family.router, "experts"}:
        return False
    router, experts = getattr(mlp, family.router), mlp.experts
    plain: Any = experts.plain if isinstance(experts, QuantisedExperts) else experts
    if not (has_clamped_parts(router, plain) if family.clamped else has_silu_parts(router, plain)):
        return False
    gate_up, down = weight_shapes(experts)
    if family.clamped:
        gate_up, down = (shape[:1] + shape[:0:-1] for shape in (gate_up, down))
    count, hidden, inner = down
    return (
        router.weight.shape == (count, hidden)
        and gate_up == (count, 2 * inner, hidden)
        and all(weight.is_contiguous() for weight in experts.parameters())
        and count <= ops.MAX_EXPERTS
        and router.top_k <= ops.MAX_CHOSEN
        and not (hidden % 8 or inner % 8)
        and not experts._forward_hooks  # sharded experts have a hook: their all-reduce
    )


def weight_shapes(experts: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the gate and up, and of the down weights of experts, as transformers' module has them."""
    if isinstance(experts, QuantisedExperts):
        return tuple(experts.gate_up.shape), tuple(experts.down.shape)
    return tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape)


def has_silu_parts(router: Any, experts: Any) -> bool:
    return (
        own_parameters(router) == {"weight"}
        and own_parameters(experts) in (set(WEIGHTS), set())  # quantised weights are no parameters
        and isinstance(experts.act_fn, SiLUActivation | nn.SiLU)
    )


def has_clamped_parts(router: Any, experts: Any) -> bool:
    return (
        own_parameters(router) == {"weight", "bias"}
        and type(experts) is GptOssExperts
        and own_parameters(experts) - set(WEIGHTS) == {"gate_up_proj_bias", "down_proj_bias"}
        and getattr(experts, "is_transposed", False)
        and experts.config._experts_implementation in READS_LAYOUT
        and experts.limit > 0
    )


def is_norm(norm: Any) -> bool:
    """Whether a norm is x / sqrt(mean(x^2) + eps) * weight.  Gemma's is not, and names its eps otherwise."""
    return hasattr(norm, "variance_epsilon") and set(dict(norm.named_parameters())) == {"weight"}


def children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def own_parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}
