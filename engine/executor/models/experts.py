"""Computes the experts of any mixture-of-experts family by our operator, inside transformers' own layers, on a GPU.

In transformers all families' experts have one interface; what differs between families stays in the family's code:

    router: softmax or sigmoid, groups, normalisation, scaling ──> top_k_index, top_k_weights ──> experts of the layer
    shared experts, and the sum with them                          [T, k]                          here: `ops.experts`

Weights are not copied.  Layers of a fused `Decoder` (fused.py) do not use this module: they also route by an operator.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from quire.engine.executor import ops

log = logging.getLogger(__name__)

PARAMETERS = {"gate_up_proj", "down_proj"}
_OF_TOKENS = 2  # number of dimensions of a tensor [T, hidden]
SIZE_STEP = 8  # hidden and inner size are multiples of it: the operator moves 16 bytes at a time


def use_own_experts(model: PreTrainedModel) -> int:
    """Make our operator compute the experts of the model's layers.  Return the number of layers.

    Logs which experts keep transformers' own kernels, and why."""
    taken, reasons = 0, dict[str, str]()
    for module in model.modules():
        if not is_experts(module):
            continue
        if reason := refusal(module):
            reasons.setdefault(reason, type(module).__name__)
            continue
        module.forward = types.MethodType(compute, module)  # hooks of the module stay, such as the all-reduce
        taken += 1
    if taken:
        log.info("experts of %d layers are computed by our kernels", taken)
    for reason, name in reasons.items():
        log.info("%s stay with transformers' kernels, which take longer: %s", name, reason)
    return taken


def report_plain_experts(model: PreTrainedModel) -> None:
    """Log that transformers' kernels compute the experts of a model on a GPU, if it has any, and why."""
    if layers := sum(map(is_experts, model.modules())):
        log.info("experts of %d layers are computed by transformers' kernels, as --no-own-experts asks", layers)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes this module through its interface of experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def refusal(experts: Any) -> str:
    """Return why our operator cannot compute these experts; empty: it can."""
    if not experts.has_gate:
        return "they have no gate"
    if type(experts)._apply_gate is not moe._default_apply_gate:
        return "their activation is not silu(gate) * up"
    if not isinstance(experts.act_fn, SiLUActivation | nn.SiLU):
        return f"their activation is {type(experts.act_fn).__name__}"
    if experts.has_post_expert_norm:
        return "a norm follows each expert"
    if experts.is_transposed or not experts.is_concatenated or experts.has_bias:
        return "their weights have another layout, or biases"
    if {name for name, _ in experts.named_parameters(recurse=False)} != PARAMETERS:
        return "their parameters are not gate_up_proj and down_proj"
    return refused_sizes(experts.gate_up_proj, experts.down_proj)


def refused_sizes(gate_up: Tensor, down: Tensor) -> str:
    count, hidden, inner = down.shape
    if gate_up.shape != (count, 2 * inner, hidden) or not (gate_up.is_contiguous() and down.is_contiguous()):
        return f"weights of shape {list(gate_up.shape)} and {list(down.shape)} are not those of gated experts"
    if count > ops.MAX_EXPERTS:
        return f"{count} experts, the maximum is {ops.MAX_EXPERTS}"
    if hidden % SIZE_STEP or inner % SIZE_STEP:
        return f"hidden size {hidden} or inner size {inner} is no multiple of {SIZE_STEP}"
    return ""


def compute(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts: hidden_states [T, hidden], top_k_index, top_k_weights [T, k].

    Replaces the forward of transformers' module, which still computes steps that are too large for our kernels."""
    x, (_, hidden, inner) = hidden_states, experts.down_proj.shape
    taken = top_k_index.numel() <= ops.MAX_PAIRS or ops.takes_all_pairs(hidden, inner, x.device)
    if not taken or x.dtype != experts.down_proj.dtype or x.dim() != _OF_TOKENS:
        own: Tensor = type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)
        return own
    return ops.experts(
        x.contiguous(),
        top_k_index.to(torch.int32).contiguous(),
        top_k_weights.to(torch.float32).contiguous(),
        experts.gate_up_proj,
        experts.down_proj,
    )
