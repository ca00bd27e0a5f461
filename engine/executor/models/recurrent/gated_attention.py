"""Attention with an output gate: Qwen3-Next, Qwen3.5.  On a GPU it replaces transformers' module of 25 operators.

    x ──> q, k, v, gate ──> norms of q and k heads, rotary embedding, KV write ──> attention * sigmoid(gate) ──> out
          one GEMM          one operator

Only the first elements of a head are rotated.  Attention depends on the products of queries and keys alone, so a head's
elements may have any order as long as queries and keys share it.  At load the weights are reordered so that the
operator, which rotates element i with element i + size / 2, computes this rotation:

    transformers    | a: rotated with b | b | c: not rotated .......... |
    here            | a | half of c ....... | b | the rest of c ....... |    the angle of c is 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.engine.executor import ops
from quire.engine.executor.attention import attend
from quire.engine.executor.models.linear import Linears
from quire.engine.executor.step_tensors import StepTensors

# transformers' classes that this module replaces.  Their q_proj has each head's query, then its gate; the weights of
# their norms are 1 + the stored values.
ATTENTIONS = {"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"}
NORM_OFFSET = 1.0


def swap_attention(model: PreTrainedModel, max_model_len: int, linears: Linears) -> None:
    """Swap all attention modules of a family of ATTENTIONS and the rotary embedding, unless weights are quantised."""
    inner = model.get_decoder()
    found = [layer for layer in inner.layers if type(getattr(layer, "self_attn", None)).__name__ in ATTENTIONS]
    plain = [getattr(layer.self_attn, f"{name}_proj") for layer in found for name in "qkvo"]
    if not found or any(type(linear) is not nn.Linear for linear in plain):
        return
    size = found[0].self_attn.head_dim
    inner.rotary_emb = Angles(inner.rotary_emb, size, max_model_len, model.dtype, model.device)
    order = head_order(size, inner.rotary_emb.rotated).to(model.device)
    for layer in found:
        layer.self_attn = GatedAttention(layer.self_attn, order, linears)


def head_order(size: int, rotated: int) -> Tensor:
    """Return for each element of a head its index in transformers' order: [size] i64.  rotated: number of rotated
    elements."""
    first, rest = torch.arange(rotated), torch.arange(rotated, size)
    half, own = rotated // 2, (size - rotated) // 2
    return torch.cat([first[:half], rest[:own], first[half:], rest[own:]])


class GatedAttention(nn.Module):
    """Causal attention over KV blocks, times a gate: [1, T, hidden] -> [1, T, hidden]."""

    def __init__(self, plain: Any, order: Tensor, linears: Linears) -> None:
        """order: `head_order`."""
        super().__init__()
        self.layer: int = plain.layer_idx
        self.head_size: int = plain.head_dim
        self.scale: float = plain.scaling
        self.heads = plain.q_proj.out_features // (2 * self.head_size)
        self.kv_heads = plain.k_proj.out_features // self.head_size
        as_is = torch.arange(self.head_size, device=order.device)
        self.in_proj = linears.product(
            reordered(plain.q_proj, 2 * self.head_size, order),
            reordered(plain.k_proj, self.head_size, order),
            plain.v_proj,
            reordered(plain.q_proj, 2 * self.head_size, self.head_size + as_is),
        )
        self.o_proj = linears.product(plain.o_proj)
        self.q_norm, self.k_norm = plain.q_norm.weight.detach()[order], plain.k_norm.weight.detach()[order]
        self.eps: float = plain.q_norm.eps

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        step: StepTensors,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """position_embeddings: from `Angles`."""
        out: Tensor = self.o_proj(self.mix(hidden_states[0], position_embeddings, step))
        return out[None], None

    def mix(self, x: Tensor, angles: tuple[Tensor, Tensor], step: StepTensors) -> Tensor:
        """Return the input of the output projection: [T, hidden] -> [T, heads * head size]."""
        heads = self.heads + 2 * self.kv_heads
        qkv, gate = self.in_proj(x).split([heads * self.head_size, self.heads * self.head_size], dim=1)
        qkv = qkv.unflatten(1, (heads, self.head_size))
        cache = step.caches[self.layer]
        ops.rope_kv_write(
            qkv,
            *angles,
            cache.k,
            cache.v,
            step.places[cache.group].kv_indices,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            scales=cache.scales,
            norm_offset=NORM_OFFSET,
        )
        out = attend(step, qkv[:, : self.heads], cache, self.scale, 0, 0.0)
        return out.flatten(1).mul_(gate.sigmoid())

    def add(self, x: Tensor, angles: tuple[Tensor, Tensor], step: StepTensors, plus: Tensor) -> Tensor:
        """Return `plus` with the layer's output added, in place: [T, hidden]."""
        out: Tensor = self.o_proj(self.mix(x, angles, step), plus)
        return out


def reordered(linear: nn.Linear, each: int, order: Tensor) -> nn.Linear:
    """Return a layer with the outputs `order` of each group of `each` outputs of `linear`."""
    weight = linear.weight.detach().unflatten(0, (-1, each))[:, order].flatten(0, 1)
    made = nn.Linear(linear.in_features, len(weight), bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().unflatten(0, (-1, each))[:, order].flatten(), requires_grad=False)
    return made


class Angles(nn.Module):
    """Replaces a model's rotary embedding: cos and sin of the step's tokens, each [T, head size], in `head_order`."""

    def __init__(self, plain: Any, size: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """The angles of all positions are computed once, by the model's own module."""
        super().__init__()
        positions = torch.arange(max_model_len, device=device)[None]
        cos, sin = (part[0] for part in plain(torch.empty(0, dtype=dtype, device=device), positions))
        self.rotated: int = cos.shape[1]
        order, rest = head_order(size, self.rotated).to(device), (max_model_len, size - self.rotated)
        table = torch.stack([torch.cat([cos, cos.new_ones(rest)], 1), torch.cat([sin, sin.new_zeros(rest)], 1)], 1)
        self.table = table[:, :, order].contiguous()  # [max_model_len, 2, size]

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [..., T]: equal in all dimensions but the last, because text has one position per token."""
        cos, sin = self.table.index_select(0, position_ids.flatten()[: position_ids.shape[-1]]).unbind(1)
        return cos, sin
