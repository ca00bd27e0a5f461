"""Swaps submodules of a transformers model for ones that compute the same, faster.  Everything else stays as it is.

    nn.Linear           -> PackedLinear   bfloat16 on a CPU: the weight is put into oneDNN's layout once, at load
    the decoder of      -> Decoder        llama, mistral, qwen2, qwen3 on a CPU: a quarter of the operators
    four families

Both are measured in engine/executor/README.md.  A decoder layer as transformers writes it, and as it runs here (T
tokens, sequence after sequence; `x` is the residual stream, added to in place):

    input norm, 6 operators          add_rms_norm: the addition that ends the layer before, and the norm
    q, k, v projections              one product
    rotary embedding, 10             rope_kv_write: rotates, and stores keys and values in their blocks
    attention                        paged_attention
    o projection                     o projection
    addition, norm, 7                add_rms_norm
    gate, up projections             one product
    silu, product                    silu_mul
    down projection                  down projection; the sum with x is left to whoever comes next
    addition

Only a model whose modules have exactly the names and types expected is taken apart; any other runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.executor import ops
from engine.executor.batch import StepTensors

# What limits the keys that a layer of each family sees, as its own attention module says it.
WINDOW: dict[type[PreTrainedModel], Callable[[Any], int | None]] = {
    LlamaForCausalLM: lambda attention: None,
    MistralForCausalLM: lambda attention: attention.config.sliding_window,
    Qwen2ForCausalLM: lambda attention: attention.sliding_window,
    Qwen3ForCausalLM: lambda attention: attention.sliding_window,
}


class PackedLinear(nn.Module):
    """nn.Linear whose weight [out, in] exists in packed form only, so that it costs no memory twice."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = ops.pack_weight(linear.weight)  # no parameter or buffer: nothing but this class can read it

    def forward(self, x: Tensor) -> Tensor:
        return ops.packed_linear(x, self._packed, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight: Tensor = plain.weight
        self.eps: float = plain.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]"""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """x += delta, then the norm of x; all [T, size]."""
        return ops.add_rms_norm(x, delta, self.weight, self.eps)

    def each_head_(self, x: Tensor) -> None:
        """In place over [T, heads, size]."""
        ops.rms_norm_(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention over KV blocks: normed hidden [T, hidden] -> [T, hidden]."""

    def __init__(self, plain: Any, window: int | None) -> None:
        super().__init__()
        self.layer: int = plain.layer_idx
        self.head_size: int = plain.head_dim
        self.scale: float = plain.scaling
        self.window = window or 0
        self.heads = plain.q_proj.out_features // plain.head_dim
        self.kv_heads = plain.k_proj.out_features // plain.head_dim
        self.qkv_proj = side_by_side(plain.q_proj, plain.k_proj, plain.v_proj)
        self.o_proj = plain.o_proj
        self.q_norm = RMSNorm(plain.q_norm) if hasattr(plain, "q_norm") else None  # qwen3
        self.k_norm = RMSNorm(plain.k_norm) if hasattr(plain, "k_norm") else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, step: StepTensors) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_size)
        q = qkv[:, : self.heads]
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.each_head_(q)
            self.k_norm.each_head_(qkv[:, self.heads : self.heads + self.kv_heads])
        k_cache, v_cache = step.caches[self.layer]
        ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, step.slots)
        out = torch.empty(len(x), self.heads, self.head_size, dtype=x.dtype, device=x.device)
        ops.paged_attention(
            q, k_cache, v_cache, step.tables, step.rows, step.q_start, step.lens, self.scale, self.window, 0.0, out
        )
        y: Tensor = self.o_proj(out.view(len(x), -1))
        return y


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, hidden] -> [T, hidden]."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate_up_proj = side_by_side(plain.gate_proj, plain.up_proj)
        self.down_proj = plain.down_proj

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(ops.silu_mul(self.gate_up_proj(x)))
        return y


class Layer(nn.Module):
    """One decoder layer, from the norm behind its attention's input to the norm of whatever follows it."""

    def __init__(self, plain: Any, window: int | None, following: Any) -> None:
        super().__init__()
        self.attention = Attention(plain.self_attn, window)
        self.middle_norm = RMSNorm(plain.post_attention_layernorm)
        self.mlp = MLP(plain.mlp)
        self.following_norm = RMSNorm(following)

    def forward(self, x: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, step: StepTensors) -> Tensor:
        """x [T, hidden], the residual stream, is added to in place; the norm of x comes in and goes out."""
        normed = self.middle_norm.add(x, self.attention(normed, cos, sin, step))
        return self.following_norm.add(x, self.mlp(normed))


class Decoder(nn.Module):
    """Everything but the head: token ids and positions [1, T] -> normed hidden states [1, T, hidden]."""

    def __init__(self, plain: Any, window: Callable[[Any], int | None]) -> None:
        super().__init__()
        self.embed_tokens = plain.embed_tokens
        self.rotary_emb = plain.rotary_emb
        norms = [layer.input_layernorm for layer in plain.layers] + [plain.norm]
        self.norm = RMSNorm(norms[0])
        self.layers = nn.ModuleList()
        for i, layer in enumerate(plain.layers):
            self.layers.append(Layer(layer, window(layer.self_attn), norms[i + 1]))
            plain.layers[i] = nn.Identity()  # lets go of its weights: both copies exist of one layer at a time

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, step: StepTensors, **unused: object
    ) -> BaseModelOutputWithPast:
        x = self.embed_tokens(input_ids[0])
        cos, sin = self.rotary_emb(x, position_ids)  # [1, T, D]
        cos, sin = cos[0], sin[0]
        normed = self.norm(x)
        for layer in self.layers:
            normed = layer(x, normed, cos, sin, step)
        return BaseModelOutputWithPast(last_hidden_state=normed[None])


def side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One product for several of the same input: their outputs, one after another."""
    first = linears[0]
    with torch.device("meta"):
        joint = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), first.bias is not None)
    joint.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joint.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joint


def fuse(model: PreTrainedModel) -> None:
    """Swap what can be swapped, in place.  The model must be on its device, in its dtype, and never move again.

    A model whose decoder was swapped takes the `step` keyword and nothing but this: it is `kv_blocks` inside.
    """
    if has_plain_decoder(model):
        model.model = Decoder(model.model, WINDOW[type(model)])
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and ops.can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))


def has_plain_decoder(model: PreTrainedModel) -> bool:
    """Whether `Decoder` computes what this model's decoder does: a known class, whose parts are what we know."""
    if type(model) not in WINDOW or model.device.type != "cpu":
        return False
    if len({parameter.dtype for parameter in model.parameters()}) != 1:
        return False
    decoder = model.model
    if children(decoder) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    return is_norm(decoder.norm) and all(is_plain_layer(layer, decoder.rotary_emb) for layer in decoder.layers)


def is_plain_layer(layer: Any, rotary: Any) -> bool:
    if children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if children(attention) not in (projections, projections | {"q_norm", "k_norm"}):
        return False
    if children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)) if norm]
    linears = [getattr(attention, name) for name in projections]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(map(is_norm, norms))
        and all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in (attention.q_proj, attention.k_proj, attention.v_proj)}) == 1
        and isinstance(mlp.act_fn, SiLUActivation | nn.SiLU)
        and 2 * rotary.inv_freq.numel() == attention.head_dim  # all of a head turns
    )


def is_norm(norm: Any) -> bool:
    """x / sqrt(mean(x^2) + eps) * weight; gemma's, which multiplies with 1 + weight, calls its eps otherwise."""
    return hasattr(norm, "variance_epsilon") and set(dict(norm.named_parameters())) == {"weight"}


def children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
