"""Gives each rank its shard of a model (tensor parallelism), without changes in the model's own code.

transformers has a table of sharded layers for each architecture (`base_model_tp_plan` of a config, `_tp_plan` of a
class).  Its entries, for N ranks and a layer of weight [out, in]:

    colwise                 out / N rows, complete attention heads    each rank has its own outputs
    rowwise                 in / N columns                            all-reduce of the outputs
    packed_colwise          out / N rows of gate, as many of up       as colwise; also experts [experts, out, in]
    moe_tp_experts          (the experts' weights have own entries)   all-reduce of the experts' weighted sum
    colwise_gather_output   the head: vocabulary / N rows             all-gather: every rank has all logits
    replicate, replicated_* the complete weight                       -

KV heads are sharded; if there are fewer heads than ranks, N / heads ranks hold the same head.  Other entries of the
table, and architectures without a table, are refused by name.  The tables of gpt_oss and gpt2 are here (OWN_TABLES),
with further entries, mostly for transposed weights [.., in, out]:

    columns     out / N columns, or as much of a bias             rows    in / N rows
    pairs       out / N columns of interleaved gate and up        heads   one value per attention head
    thirds      out / N columns of each of three parts: q, k, v   first   a bias that rank 0 alone adds
    split_size  the module splits an output by this attribute     sum     all-reduce of the module's output

Only a rank's shard of each tensor is read.  Embeddings, norms and routers are unsharded on every rank.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models.cuts import Cut
from quire.engine.executor.models.linear import SHARD, RMSNorm
from quire.engine.executor.models.multimodal import loses_towers
from quire.engine.executor.models.quantised.quantised import QuantisedLinear
from quire.engine.executor.ranks.ranks import Ranks

OPTION = "--tensor-parallel"
WHOLE = {"replicate", "replicated_with_grad_allreduce"}
# Some versions of transformers shard embeddings; here every rank has them unsharded.
DIVIDED_EMBEDDING = "embedding_rowwise"
# Experts may be stored one by one: stored weight of one expert -> parameter of all experts, which transformers joins.
STORED_EXPERT = re.compile(r"(?P<layer>.*\blayers\.\d+\.).*\bexperts\.\d+\.(?P<part>\w+)\.weight")
EXPERT_PARTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}
# Sharding of architectures for which transformers has no table.  Paths are those of the base model.
OWN_TABLES = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "heads",
        "layers.*.mlp.experts.gate_up_proj": "pairs",
        "layers.*.mlp.experts.gate_up_proj_bias": "pairs",
        "layers.*.mlp.experts.down_proj": "rows",
        "layers.*.mlp.experts.down_proj_bias": "first",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "gpt2": {
        "h.*.attn": "split_size",
        "h.*.attn.c_attn.weight": "thirds",
        "h.*.attn.c_attn.bias": "thirds",
        "h.*.mlp.c_fc.weight": "columns",
        "h.*.mlp.c_fc.bias": "columns",
        **{
            f"h.*.{part}.c_proj{ending}": style
            for part in ("attn", "mlp")
            for ending, style in {"": "sum", ".weight": "rows", ".bias": "first"}.items()
        },
    },
}
OWN_HEAD = {"lm_head": "colwise_gather_output"}  # if transformers' class has no entry for it
# Entries of our tables -> sharded dimension, unit of its size, number of equal parts that are sharded separately.
EVEN = {"heads": (-1, 1, 1), "columns": (-1, 1, 1), "pairs": (-1, 2, 1), "thirds": (-1, 1, 3), "rows": (-2, 1, 1)}
SUMS = {"moe_tp_experts", "sum"}


@dataclass(frozen=True)
class Summed:
    """A layer whose output is the sum of the ranks' outputs (all-reduce)."""

    ranks: Ranks
    out_features: int

    @property
    def adds(self) -> bool:
        return self.ranks.first

    def combine(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        total = self.ranks.all_reduce(part)
        return total if out is None else out.copy_(total)

    def fuses_norm(self, rows: int, dtype: torch.dtype) -> bool:
        return self.ranks.fuses_norm(rows, self.out_features, dtype)

    def add_and_norm(self, x: Tensor, part: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return self.ranks.add_and_norm(x, part, norm.weight, norm.eps)


@dataclass(frozen=True)
class Gathered:
    """A layer whose output is the concatenation of the ranks' outputs; the last rank's may be padded."""

    ranks: Ranks
    out_features: int
    adds: bool = False

    def combine(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        return self.ranks.gather_columns(part, self.out_features, out)

    def fuses_norm(self, rows: int, dtype: torch.dtype) -> bool:
        return False

    def add_and_norm(self, x: Tensor, part: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the output of a gathered layer cannot be added before the gather")


@dataclass
class Sharding:
    """The shards that a rank holds of one architecture, and the modules that need a collective."""

    cuts: dict[str, Cut] = field(default_factory=dict)  # parameter -> cut
    summed: list[str] = field(default_factory=list)  # modules with an all-reduce
    of_first: list[str] = field(default_factory=list)  # parameters that only rank 0 adds
    split_sizes: dict[str, int] = field(default_factory=dict)  # module -> value of its attribute `split_size`
    gathered: str = ""  # path of the LM head, if it is sharded; empty: every rank has all of it
    vocab_size: int = 0

    @property
    def divided_rows(self) -> set[str]:
        """Modules whose weight [out, in] is sharded by columns."""
        return {
            name.removesuffix(".weight")
            for name, cut in self.cuts.items()
            if cut.dim == -1 and not name.endswith(".bias")
        }

    def shrink(self, model: nn.Module) -> None:
        """Replace sharded parameters of a model without weights by empty parameters of this rank's sizes."""
        for name, cut in self.cuts.items():
            path, _, kind = name.rpartition(".")
            module = model.get_submodule(path)
            whole = getattr(module, kind)
            dim = whole.dim() + cut.dim
            shape = [cut.size if i == dim else size for i, size in enumerate(whole.shape)]
            setattr(module, kind, nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad))
            if isinstance(module, nn.Linear) and kind == "weight":
                module.out_features, module.in_features = shape
            if isinstance(module, Conv1D) and kind == "weight":
                module.nf = shape[1]
        for path, size in self.split_sizes.items():
            attention: Any = model.get_submodule(path)
            attention.split_size = size

    def connect(self, model: PreTrainedModel, ranks: Ranks) -> None:
        """Add the collectives to the layers of a loaded model."""
        if not ranks.first:
            for path in self.of_first:
                model.get_parameter(path).data.zero_()
        for path in self.summed:
            module = model.get_submodule(path)
            if isinstance(module, nn.Linear | QuantisedLinear):
                if not ranks.first:
                    module.bias = None  # rank 0 adds it
                setattr(module, SHARD, Summed(ranks, module.out_features))
            elif isinstance(module, Conv1D):
                setattr(module, SHARD, Summed(ranks, module.nf))
            module.register_forward_hook(lambda _module, _inputs, output: ranks.all_reduce(output))
        if self.gathered:
            head: Any = model.get_submodule(self.gathered)
            if len(head.weight) == self.vocab_size:  # it is tied to the embedding, which is not sharded
                cut = divide(self.vocab_size, ranks, padded=True)
                head.weight = nn.Parameter(cut.take(head.weight.data, tuple(head.weight.shape)), requires_grad=False)
                head.out_features = len(head.weight)
            shard = Gathered(ranks, self.vocab_size)
            setattr(head, SHARD, shard)
            head.register_forward_hook(lambda _module, _inputs, output: shard.combine(output))


def divide(size: int, ranks: Ranks, *, halves: int = 1, padded: bool = False) -> Cut:
    """Return a rank's range of `size` rows, which must be a multiple of the number of ranks unless `padded`."""
    share = -(-size // halves // ranks.size)
    first = min(ranks.rank * share, size)
    end = min(first + share, size // halves)
    return Cut(-2, first, end, halves, share - (end - first) if padded else 0)


def plan_shards(model: PreTrainedModel, ranks: Ranks) -> Sharding:
    """Return this rank's shards of an architecture.

    model: unsharded, on the meta device.  Raises UnsupportedModel for a table with unsupported entries, and
    ModelLoadError if the sizes of the model are not divisible."""
    kind, text = model.config.model_type, model.config.get_text_config()
    own = OWN_TABLES.get(text.model_type)
    if not (table := own or getattr(text, "base_model_tp_plan", None)):
        raise UnsupportedModel(f"{kind}: {OPTION}: transformers has no table of how its layers are divided")
    check_heads(kind, text, ranks.size)
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"  # llama4_text
    if loses_towers(model.config):
        prefix = next(path for path, module in model.named_modules() if module is model.get_decoder())
    head = type(model)._tp_plan or (OWN_HEAD if own else {})
    styles = {f"{prefix}.{name}": style for name, style in table.items()} | dict(head)
    sharding = Sharding(vocab_size=text.vocab_size)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for pattern, style in styles.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for path in filter(matches, modules):
            _place(sharding, model, path, style, ranks)
        for path in filter(matches, parameters):
            if style == "first":
                sharding.of_first.append(path)
            elif style in EVEN:
                sharding.cuts[path] = _cut_evenly(kind, path, parameters[path], style, ranks)
            else:
                sharding.cuts[path] = _cut_experts(kind, path, parameters[path], style, ranks)
    if not sharding.summed:
        raise UnsupportedModel(f"{kind}: {OPTION}: transformers' table names no layer that the model has")
    return sharding


def check_heads(kind: str, text: PretrainedConfig, size: int) -> None:
    """Raise ModelLoadError unless each of `size` ranks gets complete attention heads, equally in every layer."""
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel(f"{kind}: {OPTION} of layers that share keys and values")
    layers = getattr(text, "per_layer_config", None) or [text]
    if len(unequal := {getattr(layer, "num_key_value_heads", None) for layer in layers}) > 1:
        both = " and ".join(map(str, sorted(unequal, key=str)))
        raise UnsupportedModel(f"{kind}: {OPTION} of layers with {both} KV heads")
    heads = text.num_attention_heads
    if heads % size:
        raise ModelLoadError(f"{OPTION} {size}: {kind} has {heads} attention heads, which {size} does not divide")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads % size and size % kv_heads:
        reason = f"{kv_heads} KV heads, which {size} neither divides nor is a multiple of"
        raise ModelLoadError(f"{OPTION} {size}: {kind} has {reason}")


def _place(sharding: Sharding, model: PreTrainedModel, path: str, style: str, ranks: Ranks) -> None:
    """Record a rank's shard of a module, and its collective."""
    module, kind = model.get_submodule(path), model.config.model_type
    if style in WHOLE or (style == DIVIDED_EMBEDDING and isinstance(module, nn.Embedding)):
        return
    if style in SUMS:
        sharding.summed.append(path)
        return
    if style == "split_size":
        sharding.split_sizes[path] = module.split_size // ranks.size  # complete heads, by `check_heads`
        return
    refusal = UnsupportedModel(f"{kind}: {OPTION}: {path} is divided as {style!r}, which is not implemented")
    if type(module) is not nn.Linear:
        raise refusal
    if style == "colwise_gather_output" and module is model.get_output_embeddings():
        sharding.gathered = path
        tied = model.config.get_text_config().tie_word_embeddings
        if tied and module.bias is not None:
            raise refusal
        cut = divide(sharding.vocab_size, ranks, padded=True)
        sharding.cuts |= {} if tied else {f"{path}.weight": cut}
        if module.bias is not None:
            sharding.cuts[f"{path}.bias"] = replace(cut, dim=-1)
        return
    if style == "rowwise":
        check_width(kind, path, module.in_features, ranks.size)
        rows = divide(module.in_features, ranks)
        sharding.cuts[f"{path}.weight"] = Cut(-1, rows.first, rows.end)
        sharding.summed.append(path)
        return
    if style == "colwise":
        cut = _cut_rows(model, path, ranks)
    elif style == "packed_colwise":
        check_width(kind, path, module.out_features, 2 * ranks.size)
        cut = divide(module.out_features, ranks, halves=2)
    else:
        raise refusal
    sharding.cuts[f"{path}.weight"] = cut
    if module.bias is not None:
        sharding.cuts[f"{path}.bias"] = replace(cut, dim=-1)


def _cut_rows(model: PreTrainedModel, path: str, ranks: Ranks) -> Cut:
    """Return a rank's rows of a layer: complete heads if it belongs to attention."""
    size, kind = model.get_submodule(path).out_features, model.config.model_type
    head_size = getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", None)
    if head_size and size % head_size == 0:
        heads = size // head_size
        if heads % ranks.size and ranks.size % heads == 0:  # KV heads that several ranks hold, by `check_heads`
            own = ranks.rank * heads // ranks.size
            return Cut(-2, own * head_size, (own + 1) * head_size)
        check_width(kind, path, heads, ranks.size)
    check_width(kind, path, size, ranks.size)
    return divide(size, ranks)


def _cut_experts(kind: str, path: str, parameter: nn.Parameter, style: str, ranks: Ranks) -> Cut:
    """Return a rank's shard of the weights [experts, out, in] of all experts of a layer."""
    if parameter.dim() != 3 or style not in ("packed_colwise", "rowwise"):
        raise UnsupportedModel(f"{kind}: {OPTION}: {path} is divided as {style!r}, which is not implemented")
    _, outputs, inputs = parameter.shape
    if style == "rowwise":
        check_width(kind, path, inputs, ranks.size)
        rows = divide(inputs, ranks)
        return Cut(-1, rows.first, rows.end)
    check_width(kind, path, outputs, 2 * ranks.size)
    return divide(outputs, ranks, halves=2)


def _cut_evenly(kind: str, path: str, parameter: nn.Parameter, style: str, ranks: Ranks) -> Cut:
    """Return a rank's shard of a parameter, by an entry of OWN_TABLES."""
    dim, unit, parts = EVEN[style]
    size = parameter.shape[dim]
    check_width(kind, path, size, unit * parts * ranks.size)
    return replace(divide(size, ranks, halves=parts), dim=dim)


def check_width(kind: str, path: str, size: int, parts: int) -> None:
    """Raise ModelLoadError unless `parts` divides `size`."""
    if size % parts:
        raise ModelLoadError(f"{OPTION}: {kind}: {path} has size {size}, which {parts} does not divide")


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores random states, on the host and on the current GPU; other GPUs are not touched."""
    return torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else [])


def shard_class(model: type[PreTrainedModel], sharding: Sharding) -> type[PreTrainedModel]:
    """Return a class of the same name whose models have a rank's parameters."""

    def make(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        model.__init__(self, config, *args, **kwargs)
        sharding.shrink(self)

    return type(model.__name__, (model,), {"__init__": make, "__module__": model.__module__})


def stored_cuts(kind: str, sharding: Sharding, stored: Iterable[str], prefix: str) -> dict[str, Cut]:
    """Return this rank's cuts of the stored tensors that hold sharded parameters.

    stored: names of all tensors.  prefix: beginning of the model's names, which names in the files may lack.  Raises
    UnsupportedModel for a divided parameter that none of the tensors holds."""
    found, left = {}, set(sharding.cuts)
    for name in stored:
        for own in (name, f"{prefix}.{name}", _experts_of(name, sharding)):
            if (cut := sharding.cuts.get(own)) is not None:
                left.discard(own)
                found[name] = cut if own != _experts_of(name, sharding) else Cut(cut.dim, cut.first, cut.end)
                break
    if left:
        raise UnsupportedModel(f"{kind}: {OPTION}: the weight files hold {min(left)} in another form than the model")
    return found


def _experts_of(name: str, sharding: Sharding) -> str:
    """Return the parameter that a stored tensor of one expert is joined into; empty: none."""
    if not (found := STORED_EXPERT.fullmatch(name)) or found["part"] not in EXPERT_PARTS:
        return ""
    ending = f".experts.{EXPERT_PARTS[found['part']]}"
    return next((own for own in sharding.cuts if own.startswith(found["layer"]) and own.endswith(ending)), "")
