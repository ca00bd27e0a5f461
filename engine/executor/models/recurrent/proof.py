"""Proves at load that our modules for layers with recurrent state give the logits of transformers' own forward.

The reference is transformers' forward of a single sequence: its own modules would carry state from one packed sequence
into the next.  The served modules must give these logits in each way that a step may compute them:

    at once             the sequence in one step, packed behind another one
    in chunks of 7      step by step, from the state that the previous step has left
    from a checkpoint   the last chunk, in another slot, from a copy of the state
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.engine.executor.attention import NAME
from quire.engine.executor.errors import UnsupportedModel, one_line
from quire.engine.executor.kv_cache import Caches, KVShape, allocate
from quire.engine.executor.models.fused import Forward
from quire.engine.executor.models.probe import FIRST, MAX_DRIFT, MAX_DRIFT_OF_QUANTISED_ACTIVATIONS, PROBE, Probe
from quire.engine.executor.models.recurrent.states import States, StateShape
from quire.engine.executor.step_tensors import AttentionPlans, StepTensors

CHUNK, CHUNKS = 7, 3  # tokens; the second sequence has CHUNK * CHUNKS
ATTENDING = {"full_attention", "sliding_attention", "hybrid"}  # kinds of layers with attention, with or without a state
NO_KV = KVShape(0, 0)  # a layer without attention


class StateProof(NamedTuple):
    """Results of transformers' own forward of one sequence."""

    layers: list[KVShape]  # KV shapes by layer; NO_KV: it has no attention
    vocab_size: int  # width of the logits
    ids: Tensor  # [FIRST + CHUNK * CHUNKS] i64: another sequence, then the computed one
    positions: Tensor  # i64, shape of `ids`: the computed sequence ends at the last position of max_model_len
    logits: Tensor  # [CHUNK * CHUNKS, V] of the computed sequence


@torch.inference_mode()
def probe_recurrent(model: PreTrainedModel, max_model_len: int) -> StateProof:
    """Run a sequence through transformers' own modules and watch its attention.  Raises UnsupportedModel."""
    kind, text = model.config.model_type, model.config.get_text_config()
    device, count = model.device, CHUNK * CHUNKS
    at = max(FIRST, max_model_len - count)
    positions = torch.tensor([*range(FIRST), *range(at, at + count)], device=device)
    ids = torch.arange(1, FIRST + count + 1, device=device) * 31 % text.vocab_size
    seen = Probe([0, count])
    model.set_attn_implementation(PROBE)
    try:
        out = model(input_ids=ids[None, FIRST:], position_ids=positions[None, FIRST:], use_cache=False, probe=seen)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except Exception as error:  # raised by the model's own code
        if lacking := re.search(r"missing \d+ required positional arguments?: (.*)", str(error)):
            raise UnsupportedModel(f"{kind}: its class computes no text without {lacking[1]}") from error
        raise UnsupportedModel(f"{kind}: a forward of one sequence fails: {one_line(error)}") from error
    finally:
        model.set_attn_implementation(NAME)
    attending = [i for i, name in enumerate(text.layer_types) if name in ATTENDING]
    if missed := sorted(set(attending) ^ seen.layers.keys()):
        raise UnsupportedModel(f"{kind}: attention of layer {missed[0]} does not go through the attention interface")
    layers = [seen.layers.get(i, NO_KV) for i in range(text.num_hidden_layers)]
    return StateProof(layers, out.logits.shape[2], ids, positions, out.logits[0])


@torch.inference_mode()
def prove_recurrent(
    model: PreTrainedModel,
    proof: StateProof,
    shapes: list[StateShape],
    block_size: int = 32,
    *,
    quantises_activations: bool = False,
) -> None:
    """Compute the probe's tokens with our modules: at once, in chunks, and from a checkpoint.

    quantises_activations: as in `prove_served`.  Raises UnsupportedModel if a step fails, or if its logits are not the
    probe's."""
    kind, count, first = model.config.model_type, CHUNK * CHUNKS, FIRST
    most = MAX_DRIFT_OF_QUANTISED_ACTIVATIONS if quantises_activations else MAX_DRIFT[model.dtype]

    def fresh() -> tuple[States, Caches]:
        states = States(shapes, 3, 0, model.dtype, model.device)
        caches = allocate(proof.layers, 3, block_size, model.dtype, model.device, float("nan"))
        return states, states.attached(caches)

    def check(how: str, logits: Tensor, wanted: Tensor) -> None:
        if not logits.isfinite().all():
            raise UnsupportedModel(f"{kind}: {how}, some of its logits are not finite")
        each = (logits.float() - wanted.float()).abs().amax(1) / proof.logits.float().abs().max()
        if not (drift := each.median()) < most:  # rounding may change a token's expert: the median decides
            raise UnsupportedModel(f"{kind}: {how}, its logits differ from the model's own ({drift:.0e})")

    try:
        _, caches = fresh()
        packed = step_logits(model, proof, caches, [(0, 0, first), (1, first, first + count)], keep=first)
        if len(packed) != count:
            raise UnsupportedModel(f"{kind}: computes logits of tokens that were not requested")
        check("packed", packed, proof.logits)
        states, caches = fresh()
        parts = []
        for start in range(first, first + count, CHUNK):
            if start == first + count - CHUNK:
                states.copy([(1, 2)])
            parts.append(step_logits(model, proof, caches, [(1, start, start + CHUNK)]))
        check(f"in chunks of {CHUNK}", torch.cat(parts), proof.logits)
        last = step_logits(model, proof, caches, [(2, first + count - CHUNK, first + count)], table=1)
        check("from a checkpoint", last, proof.logits[-CHUNK:])
    except UnsupportedModel:
        raise
    except Exception as error:  # raised by the model's own code
        raise UnsupportedModel(f"{kind}: fails as it would be served: {one_line(error)}") from error


def step_logits(
    model: PreTrainedModel,
    proof: StateProof,
    caches: Caches,
    slices: list[tuple[int, int, int]],
    table: int | None = None,
    keep: int = 0,
) -> Tensor:
    """Return logits [., V] of one step over parts (slot, first, end) of the probe's tokens, from token `keep` on.

    Slot 0 computes the first sequence, others the second one.  table: block of all slots; None: block number = slot."""
    device = model.device

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    block_size = next(cache.k.shape[2] for cache in caches if cache.k.numel())
    places, starts, lens = [], [0], []
    for slot, begin, end in slices:
        own = 0 if slot == 0 else FIRST  # first token of its sequence
        block = slot if table is None else table
        places += [block * block_size + at - own for at in range(begin, end)]
        starts.append(starts[-1] + end - begin)
        lens.append(end - own)
    tokens = torch.cat([torch.arange(begin, end, device=device) for _, begin, end in slices])
    step = StepTensors(
        input_ids=proof.ids[tokens][None],
        position_ids=proof.positions[tokens][None],
        kv_indices=ints(places, torch.int64),
        tables=ints([slot if table is None else table for slot in range(3)])[:, None],
        rows=ints([slot for slot, _, _ in slices]),
        q_start=ints(starts),
        lens=ints(lens),
        decodes=0,
        caches=caches,
        plans=AttentionPlans(max_seqs=3, max_tokens=len(tokens), device=device),
        logits_at=None,
        sample_slots=ints([], torch.int64),
        known=ints([], torch.int64),
    )
    return Forward(model, step).logits(torch.arange(keep, len(tokens), device=device))
