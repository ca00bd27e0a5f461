"""Proves, at load, that the shards of a model compute the unsharded model: some of transformers' tables are wrong.

A small model is computed twice, in float32: unsharded on every rank, and sharded.  It has the same widths, the fewest
layers that include every kind of shard, a small vocabulary and random weights.  The logits must be equal up to
rounding.
"""

from __future__ import annotations

import copy
import re

import torch
from transformers import PretrainedConfig, PreTrainedModel

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.models.multimodal import attention_of, served_class
from quire.engine.executor.models.probe import drift_of, probe
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.sharding.sharding import Sharding, fork_rng, plan_shards, shard_class
from quire.engine.executor.ranks.ranks import Ranks

SMALL_VOCAB = 509  # prime, so that the last rank's logits are padded
# Maximum difference of logits, relative to the largest.  Another order of summation gives 1e-5, a wrong shard 0.1.
MAX_DRIFT = 1e-3


def kinds(sharding: Sharding) -> set[str]:
    """Return the names of sharded parameters and of modules with a collective, without layer numbers."""
    names = [*sharding.cuts, *sharding.summed, sharding.gathered]
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}


def shortened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a config of the first `layers` layers and a small vocabulary; widths as they are."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    all_layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == all_layers:  # one entry per layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = min(text.vocab_size, SMALL_VOCAB)
    text.pad_token_id = None
    return short


def draw(model: PreTrainedModel) -> None:
    """Set random weights with which every layer changes the logits; equal on every rank."""
    generator = torch.Generator(model.device).manual_seed(0)
    for name, tensor in sorted(model.named_parameters()):
        if tensor.dim() > 1:
            tensor.data.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        elif "bias" in name or "sinks" in name:
            tensor.data.normal_(std=0.1, generator=generator)


@torch.inference_mode()
def prove_parts(whole: PreTrainedModel, parts: PreTrainedModel, sharding: Sharding, ranks: Ranks) -> None:
    """Compare a model with its shards on all ranks, after setting equal weights in both.  Raises UnsupportedModel."""
    kind = whole.config.model_type
    draw(whole)
    weights = whole.state_dict()
    for name, tensor in parts.state_dict().items():
        cut = sharding.cuts.get(name)
        tensor.copy_(cut.take(weights[name], tuple(weights[name].shape)) if cut else weights[name])
    wanted = probe(whole.eval())
    sharding.connect(parts, ranks)
    logits = probe(parts.eval()).logits
    # Rounding may change the expert of a token in a mixture: so the median token decides.
    each = (logits - wanted.logits).abs().amax(-1) / wanted.logits.abs().max()
    # All ranks must decide equally.
    if not ranks.all_min(bool(each.median() < MAX_DRIFT)):
        table = "the shards of transformers' table do not add up to the unsharded model"
        raise UnsupportedModel(
            f"{kind}: --tensor-parallel: {table} (logits differ by {drift_of(logits, wanted.logits):.0e})"
        )


def plan(config: PretrainedConfig, device: torch.device, ranks: Ranks) -> Sharding:
    """Return this rank's shards of an architecture, proved on a few of its layers; with one rank nothing is sharded.

    device: where the proof is computed.  Raises ModelLoadError (UnsupportedModel)."""
    if ranks.size == 1:
        return Sharding()
    whole = served_class(config)
    sharding = _plan_without_proof(whole, config, ranks)
    layers, all_layers = 1, config.get_text_config().num_hidden_layers
    while True:
        short = shortened(config, layers)
        of_short = _plan_without_proof(whole, short, ranks)
        if kinds(of_short) == kinds(sharding) or layers == all_layers:
            break
        layers = min(2 * layers, all_layers)
    options = {"dtype": torch.float32, "attn_implementation": attention_of(short)}
    with fork_rng(device), device:
        complete, parts = (each._from_config(short, **options) for each in (whole, shard_class(whole, of_short)))
    prove_parts(complete, parts, of_short, ranks)
    del complete, parts
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache needs the free memory
    return sharding


def _plan_without_proof(whole: type[PreTrainedModel], config: PretrainedConfig, ranks: Ranks) -> Sharding:
    with torch.device("meta"):
        return plan_shards(whole._from_config(config, attn_implementation=attention_of(config)), ranks)


def random_shard(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks, quantising: Quantising
) -> PreTrainedModel:
    """Return this rank's shard of a model with random initial weights; they differ from the weights of a single
    rank."""
    whole, sharding = served_class(config), plan(config, device, ranks)
    with torch.device("meta"):  # the unsharded model may not fit the device
        model = shard_class(whole, sharding)._from_config(config, dtype=dtype, attn_implementation=attention_of(config))
    model.to_empty(device=device)
    with fork_rng(device):
        torch.manual_seed(ranks.rank)
        model.init_weights()
    for name, tensor in model.state_dict().items():
        if name not in sharding.cuts:
            ranks.copy_from_first(tensor)
    model.__class__ = whole
    quantising.divide(sharding.divided_rows, ranks)
    quantising.quantise(model)
    sharding.connect(model, ranks)
    return model
