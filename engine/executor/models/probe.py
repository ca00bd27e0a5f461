"""Proves, at load, that an architecture computes what its authors meant when Quire packs sequences for it.

A few small forwards with a recording attention function show that every layer called it, once, with nothing that is not
implemented.  They also show that a sequence's logits do not change with what it is packed together with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine.executor.attention import NAME
from engine.executor.errors import UnsupportedModel, one_line
from engine.executor.kv_cache import KVShape

PROBE = "kv_blocks_probe"
MAX_HEAD_SIZE = 256
# Attention keywords that change nothing here: dropout is for training, the others are handled or describe the batch.
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits", "position_embeddings"}


@dataclass
class Probe:
    """Packed sequences for one recording forward, and what each attention layer asked for."""

    starts: list[int]  # first token of each sequence, then the total
    layers: dict[int, KVShape] = field(default_factory=dict)  # by layer index


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probe: Probe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Plain causal attention within each packed sequence; raises UnsupportedModel for what `kv_blocks` cannot do.

    Shapes as `attention.kv_blocks`.  Windows are left out: the packed sequences are shorter than any.
    """
    if probe is None:
        raise UnsupportedModel("the model keeps keywords from its attention layers")
    if attention_mask is not None:
        raise UnsupportedModel("a mask or position bias of its own")
    if odd := sorted(name for name, thing in others.items() if thing is not None and name not in HARMLESS):
        raise UnsupportedModel(f"attention takes `{odd[0]}`, which is not implemented")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or getattr(module, "is_cross_attention", False):
        raise UnsupportedModel("attention that is not causal self-attention")
    if scaling is None:
        raise UnsupportedModel("attention without a scale")
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index in probe.layers:
        raise UnsupportedModel("attention layers without an index of their own")
    heads, size = key.shape[1], key.shape[3]
    if value.shape != key.shape or query.shape[3] != size:
        raise UnsupportedModel(f"head size {query.shape[3]} of queries, {size} of keys, {value.shape[3]} of values")
    if size > MAX_HEAD_SIZE:
        raise UnsupportedModel(f"head size {size} is over {MAX_HEAD_SIZE}")
    probe.layers[index] = KVShape(heads, size)
    group = query.shape[1] // heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = torch.empty_like(query)
    for first, end in zip(probe.starts, probe.starts[1:], strict=False):
        score = query[:, :, first:end] @ key[:, :, first:end].transpose(2, 3) * scaling
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        future = torch.ones(end - first, end - first, dtype=torch.bool, device=score.device).triu(1)
        weight = score.masked_fill(future, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype)
        out[:, :, first:end] = weight @ value[:, :, first:end]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, probe_attention)


@torch.inference_mode()
def probe(module: PreTrainedModel) -> tuple[list[KVShape], int]:
    """Run a few tokens through the model and watch its attention.  Works on the meta device too, short of the values.

    Returns what each layer caches, and the width of the logits.  Raises UnsupportedModel, naming the architecture.
    """
    kind, text = module.config.model_type, module.config.get_text_config()
    first, second = 5, 7
    device = module.get_input_embeddings().weight.device
    positions = torch.tensor([*range(first), *range(second)], device=device)[None]
    keep = torch.arange(first, first + second, device=device)
    ids = torch.arange(1, first + second + 1, device=device)[None] * 31 % text.vocab_size
    other = ids.clone()
    other[:, :first] = (ids[:, :first] + 17) % text.vocab_size
    probes, logits = [], []
    module.set_attn_implementation(PROBE)
    try:
        for tokens in (ids, other):
            probes.append(seen := Probe([0, first, first + second]))
            out = module(input_ids=tokens, position_ids=positions, use_cache=False, probe=seen, logits_to_keep=keep)
            logits.append(out.logits)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise UnsupportedModel(f"{kind}: a packed forward fails: {one_line(error)}") from error
    finally:
        module.set_attn_implementation(NAME)
    layers = probes[0].layers
    if sorted(layers) != list(range(text.num_hidden_layers)):
        raise UnsupportedModel(
            f"{kind}: {len(layers)} of {text.num_hidden_layers} layers went through the attention interface"
        )
    if logits[0].shape[:2] != (1, second):
        raise UnsupportedModel(f"{kind}: computes logits of tokens nobody asked for")
    if device.type != "meta":
        # A state carried from token to token (convolution, recurrence) would leak from one sequence into the next.
        # The same shapes give the same arithmetic up to how a mixture of experts groups its tokens: rounding only.
        drift = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
        if not drift < 0.05:
            raise UnsupportedModel(f"{kind}: a sequence's logits change with what it is packed with ({drift:.0e})")
    return [layers[i] for i in range(text.num_hidden_layers)], logits[0].shape[2]
