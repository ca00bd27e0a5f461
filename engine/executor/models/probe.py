"""Proves, at load, that an architecture computes packed sequences as transformers computes each sequence alone.

A few small forwards with a recording attention function show that every layer calls it once, and only with arguments
that are implemented.  They also show that a sequence's logits do not depend on the sequences packed with it, and that
its positions come from `position_ids`.  After submodules are replaced, one step proves that the served model gives the
same logits.
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from quire.engine.executor.attention import NAME, window_of
from quire.engine.executor.errors import UnsupportedModel, one_line
from quire.engine.executor.kv_cache import KVShape, allocate
from quire.engine.executor.models.fused import Forward
from quire.engine.executor.step_tensors import AttentionPlans, StepTensors

PROBE = "kv_blocks_probe"
SLIDING = "sliding_attention"  # transformers' name of a kind of layer
MAX_HEAD_SIZE = 512  # limit of the CPU attention kernels
# Maximum difference of logits between two runs of equal shapes, relative to the largest logit; 0 for dense models.
LEAK = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Maximum difference between the served model's logits and the probe's, relative to the largest logit: rounding only.
MAX_DRIFT = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
# The same limit if GEMMs quantise their activations to e4m3.  With such GEMMs on a CPU, 12 models of 2 to 30 layers
# differed by 0.02 to 0.21, and a model of 48 layers with large random weights by 0.35.  Unrelated logits differ by 1
# and more.  So this limit finds only gross errors.
MAX_DRIFT_OF_QUANTISED_ACTIVATIONS = 0.6
# Attention keywords that need no support: dropout is for training, others describe the batch or what to return.
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits", "position_embeddings"}


@dataclass
class Probe:
    """Packed sequences for one recording forward, and what each attention layer passed to attention."""

    starts: list[int]  # first token of each sequence, then the total
    layers: dict[int, KVShape] = field(default_factory=dict)  # KV shapes by layer index
    windows: dict[int, int] = field(default_factory=dict)
    cached: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values of layers with own caches

    def record(self, index: int, key: Tensor, value: Tensor, window: int) -> None:
        """Record what a layer caches: its own keys and values [1, Hkv, T, D], or those that it shares with an earlier
        layer.

        window: tokens that a query attends to; 0: all.  Keys and values may differ in D."""
        self.windows[index] = window
        shares = next((at for at, (k, v) in self.cached.items() if k is key and v is value), None)
        if shares is None:
            self.cached[index] = key, value
        self.layers[index] = KVShape(key.shape[1], max(key.shape[3], value.shape[3]), shares)

    def clear(self) -> None:
        """Forget what a forward recorded."""
        self.layers.clear()
        self.windows.clear()
        self.cached.clear()


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probe: Probe | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Plain causal attention within each packed sequence; raises UnsupportedModel for arguments without support.

    Shapes as in `attention.kv_blocks`.  Windows are only recorded: the packed sequences are shorter than any window.
    """
    window = window_of(module, others)
    others.pop("sliding_window", None)
    if probe is None:
        raise UnsupportedModel("the model does not pass keywords on to its attention layers")
    if attention_mask is not None:
        raise UnsupportedModel("a mask or position bias of its own")
    if others.get("logits_to_keep") is not None:
        raise UnsupportedModel("its class computes logits of all tokens even if `logits_to_keep` asks for some")
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
    if value.shape[:3] != key.shape[:3] or query.shape[3] != key.shape[3]:
        raise UnsupportedModel(
            f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)} do not fit each other"
        )
    size = max(key.shape[3], value.shape[3])
    if size > MAX_HEAD_SIZE:
        raise UnsupportedModel(f"head size {size} is over {MAX_HEAD_SIZE}")
    probe.record(index, key, value, window)
    return plain_attention(query, key, value, probe.starts, scaling, softcap, s_aux), None


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: list[int],
    scaling: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return causal attention within each packed sequence; shapes and sinks as in `attention.kv_blocks`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    for first, end in itertools.pairwise(starts):
        score = query[:, :, first:end] @ key[:, :, first:end].transpose(2, 3) * scaling
        if soft_cap:
            score = soft_cap * torch.tanh(score / soft_cap)
        future = torch.ones(end - first, end - first, dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill(future, float("-inf"))
        if sinks is not None:
            score = torch.cat([score, sinks.to(score.dtype).view(1, -1, 1, 1).expand(*score.shape[:3], 1)], 3)
        weight = score.softmax(-1, dtype=torch.float32)[..., : end - first].to(value.dtype)
        out[:, :, first:end] = weight @ value[:, :, first:end]
    return out.transpose(1, 2).contiguous()


AttentionInterface.register(PROBE, probe_attention)


def past(length: int) -> SimpleNamespace:
    """Return a dummy cache that reports `length` earlier tokens; attention here does not read it.

    A model that takes positions from its cache, and not from `position_ids`, then computes with these positions."""
    return SimpleNamespace(
        get_seq_length=lambda layer_idx=0: length,
        get_mask_sizes=lambda query_length, layer_idx=0: (length + query_length, 0),
        update=lambda key, value, *_args, **_kwargs: (key, value),
        is_compileable=False,
        is_initialized=True,
    )


def cache_argument(module: nn.Module) -> str:
    """Return the name of the forward pass's cache argument: transformers renamed it in 5.24, family by family."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class Proof(NamedTuple):
    """Results of a probe."""

    layers: list[KVShape]  # KV shape that each attention layer caches
    vocab_size: int  # width of the logits
    ids: Tensor  # [1, FIRST + SECOND] i64: two packed sequences
    positions: Tensor  # [1, FIRST + SECOND]: the second sequence ends at the last position of max_model_len
    logits: Tensor  # [1, SECOND, V] of the second sequence
    windows: list[int]  # attention window of each layer, tokens; 0: all


FIRST, SECOND = 5, 7  # tokens of the two packed sequences


@torch.inference_mode()
def probe(module: PreTrainedModel, max_model_len: int = 0) -> Proof:
    """Run a few tokens through the model and watch its attention.  On the meta device no values are checked.

    max_model_len: positions to prove; 0: a few.  Raises UnsupportedModel, naming the architecture.
    """
    kind, text = module.config.model_type, module.config.get_text_config()
    device = module.get_input_embeddings().weight.device
    at = max(FIRST, max_model_len - SECOND)  # position of the second sequence's first token
    positions = torch.tensor([*range(FIRST), *range(at, at + SECOND)], device=device)[None]
    in_a_row = torch.arange(at - FIRST, at + SECOND, device=device)[None]
    keep = torch.arange(FIRST, FIRST + SECOND, device=device)
    ids = torch.arange(1, FIRST + SECOND + 1, device=device)[None] * 31 % text.vocab_size
    other = ids.clone()
    other[:, :FIRST] = (ids[:, :FIRST] + 17) % text.vocab_size
    seen, logits = Probe([0, FIRST, FIRST + SECOND]), []
    runs: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = [
        (ids, positions, {"logits_to_keep": keep}),
        (other, positions, {"logits_to_keep": keep}),
        (ids, in_a_row, {"logits_to_keep": keep, cache_argument(module): past(at - FIRST)}),
    ]
    # Rotary embeddings depend on distances only.  A model with other embeddings may count positions from an offset if
    # it gets none, so such a run is compared with positions 0, 1, 2, ...
    if not getattr(text, "rope_parameters", None):
        runs += [(ids, None, {}), (ids, torch.arange(ids.shape[1], device=device)[None], {})]
    module.set_attn_implementation(PROBE)
    try:
        for tokens, where, others in runs:
            seen.clear()
            out = module(input_ids=tokens, position_ids=where, use_cache=False, probe=seen, **others)
            logits.append(out.logits)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except Exception as error:  # any error of the model's own code
        if lacking := lacks(error, module):
            raise UnsupportedModel(f"{kind}: its class computes no text without {lacking}") from error
        raise UnsupportedModel(f"{kind}: a packed forward fails: {one_line(error)}") from error
    finally:
        module.set_attn_implementation(NAME)
    if sorted(seen.layers) != list(range(text.num_hidden_layers)):
        raise UnsupportedModel(
            f"{kind}: {len(seen.layers)} of {text.num_hidden_layers} layers went through the attention interface"
        )
    check_windows(module.config, seen.windows, max_model_len)
    if logits[0].shape[:2] != (1, SECOND):
        raise UnsupportedModel(f"{kind}: computes logits of tokens that were not requested")
    if device.type != "meta":
        # A state carried from token to token (convolution, recurrence) would leak from one sequence into the next.
        # Equal shapes give equal arithmetic, except how a mixture of experts groups its tokens: rounding only.
        most = LEAK[module.dtype]
        if not (drift := drift_of(logits[1], logits[0])) < most:
            raise UnsupportedModel(f"{kind}: a sequence's logits depend on the sequences packed with it ({drift:.0e})")
        if not (drift := drift_of(logits[2], logits[0])) < most:
            raise UnsupportedModel(f"{kind}: takes a token's position from its place in the batch ({drift:.0e})")
        if len(logits) > 3 and not (drift := drift_of(logits[3], logits[4])) < most:
            raise UnsupportedModel(f"{kind}: positions of a prompt do not begin at 0 ({drift:.0e})")
    layers = [seen.layers[i] for i in range(text.num_hidden_layers)]
    windows = [seen.windows[i] for i in range(text.num_hidden_layers)]
    return Proof(layers, logits[0].shape[2], ids, positions, logits[0], windows)


def lacks(error: Exception, module: nn.Module) -> str:
    """Return the arguments that an error of a forward pass names as missing; "": it names none."""
    if missing := re.search(r"missing \d+ required positional arguments?: (.*)", str(error)):
        return missing[1]
    known = inspect.signature(module.forward).parameters
    named = [word for word in dict.fromkeys(re.findall(r"\w+", str(error))) if word in known and word != "input_ids"]
    return " and ".join(map(repr, named)) if isinstance(error, ValueError) else ""


def check_windows(config: PretrainedConfig, windows: dict[int, int], max_model_len: int) -> None:
    """Raise UnsupportedModel for layers that implement their sliding window by a mask, which is not built here."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    if not 0 < window < max_model_len or getattr(text, "use_sliding_window", None) is False:
        return
    kinds = getattr(text, "layer_types", None) or [SLIDING] * len(windows)
    if lacking := [index for index, found in sorted(windows.items()) if kinds[index] == SLIDING and not found]:
        reason = f"the window of {window} tokens of layer {lacking[0]} does not reach the attention interface"
        raise UnsupportedModel(f"{config.model_type}: {reason}; a max_model_len of {window} needs no window")


def drift_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the maximum difference, relative to the largest logit."""
    return (logits.float() - wanted.float()).abs().max() / wanted.float().abs().max()


@torch.inference_mode()
def prove_served(
    module: PreTrainedModel, proof: Proof, block_size: int = 16, *, quantises_activations: bool = False
) -> None:
    """Compute the probe's tokens as a step does, with swapped submodules, our attention and a KV cache.

    quantises_activations: GEMMs quantise their activations to e4m3; the probe does not.  Raises UnsupportedModel if the
    step fails, or if its logits are not finite or differ from the probe's."""
    kind, device = module.config.model_type, module.device
    caches = allocate(proof.layers, 2, block_size, module.dtype, device)

    def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    step = StepTensors(
        input_ids=proof.ids,
        position_ids=proof.positions,
        kv_indices=ints(*range(FIRST), *range(block_size, block_size + SECOND), dtype=torch.int64),
        tables=ints(0, 1)[:, None],
        rows=ints(0, 1),
        q_start=ints(0, FIRST, FIRST + SECOND),
        lens=ints(FIRST, SECOND),
        decodes=0,
        caches=caches,
        plans=AttentionPlans(max_seqs=2, max_tokens=FIRST + SECOND, device=device),
        logits_at=None,
        sample_slots=ints(dtype=torch.int64),
        known=ints(dtype=torch.int64),
    )
    keep = torch.arange(FIRST, FIRST + SECOND, device=device)
    try:
        logits = Forward(module, step).logits(keep)
    except Exception as error:  # the model's own code does not expect our modules, and may raise any error
        raise UnsupportedModel(f"{kind}: fails as it would be served: {one_line(error)}") from error
    if not logits.isfinite().all():
        raise UnsupportedModel(f"{kind}: as it would be served some of its logits are not finite")
    # Rounding grows with depth, and may change the expert of a token in a mixture: so the median token decides.
    each = (logits.float() - proof.logits[0].float()).abs().amax(1) / proof.logits.float().abs().max()
    most = MAX_DRIFT_OF_QUANTISED_ACTIVATIONS if quantises_activations else MAX_DRIFT[module.dtype]
    if not (drift := each.median()) < most:
        raise UnsupportedModel(f"{kind}: as it would be served its logits differ from the model's own ({drift:.0e})")
