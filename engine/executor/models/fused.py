"""Replaces submodules of a transformers model by faster ones that compute the same.  All other modules stay.

    nn.Linear, Conv1D,  -> PackedLinear        on a CPU: the weight is packed once, at load, in the layout of our GEMMs
    QuantisedLinear     -> GpuLinear           on a GPU: for fp8 and int4 weights, and for float32 logits
    the decoder of      -> Decoder             llama, mistral, qwen2, qwen3, on any device; mixtral, qwen3_moe, gpt_oss
    seven families                             on a GPU

linear.py makes all linear layers; docs/notes/kernels/layers.md has figures.  Below, the left column is a decoder layer
as transformers computes it, the other columns are our layer and its operators.  A step has T tokens, sequence after
sequence.  `x` is the residual stream, to which the o and down projections add in place:

    input norm, 6 operators          part of the next GEMM
    q, k, v projections              one GEMM of the normed input               linear: norm, GEMM
    norms of q and k heads (qwen3)   part of the next operator
    rotary embedding, 10             rotates, and stores keys and values        rope_kv_write
    attention                        attention over KV blocks                   paged_attention
    o projection, addition           one GEMM, added to x                       linear: GEMM, plus
    norm, 6                          part of the next GEMM
    gate, up projections             one GEMM of the normed x                   linear: norm, GEMM, silu_mul
    silu, multiplication             part of the GEMM before it
    down projection, addition        one GEMM, added to x                       linear: GEMM, plus

With several ranks on GPUs, one kernel does the all-reduce after the o and down projections, adds the result to x and
computes the norm that follows (`Residual.normed`).

A mixture of experts routes its tokens with one operator and computes them with another (`Mixture`).  Weights of experts
are not copied; quantised ones are packed, a layer at a time.  The weights of gpt_oss are transposed in place at load
(`store_rows`), because our operator reads them by rows.  transformers' own experts, which compute steps that are too
large for ours, then read them by rows, too.

On a CPU a linear layer with packed weights is one operator, packed_linear, or up to three if oneDNN's GEMM is faster.
If all GEMMs are ours, all layers together are one operator, decoder_layers.
A decoder is replaced only if all its modules have exactly the expected names and types; other decoders stay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.pytorch_utils import Conv1D

from quire.engine.executor import ops
from quire.engine.executor.attention import attend
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.models.fusible import LINEAR, MIXTURES, WINDOW, MixtureFamily, has_plain_decoder
from quire.engine.executor.models.linear import Linears, PackedLinear, Product, RMSNorm, Sharded, shared_out
from quire.engine.executor.models.quantised.quantised import Quantised, QuantisedLinear
from quire.engine.executor.models.quantised.quantised_experts import QuantisedExperts, report_packed
from quire.engine.executor.step_tensors import StepTensors

log = logging.getLogger(__name__)

ON_A_GPU = "on a GPU GEMMs and attention are split into work items that depend on the other sequences of the step"
VECTOR = 64  # elements per vector step of torch's activations on a CPU; scalar code computes the remaining ones


class Residual(NamedTuple):
    """The residual stream between two halves of a layer."""

    x: Tensor  # [T, hidden]
    normed: Tensor | None  # x after the following norm, if the all-reduce computed it; None: the next GEMM computes it


class Attention(nn.Module):
    """x + attention(norm(x)), causal, over KV blocks: [T, hidden] -> [T, hidden].

    `forward` takes normed: norm(x), if already computed; then: the norm that follows this half of the layer."""

    def __init__(self, plain: Any, norm: RMSNorm, window: int | None, linears: Linears) -> None:
        super().__init__()
        self.layer: int = plain.layer_idx
        self.head_size: int = plain.head_dim
        self.scale: float = plain.scaling
        self.window = window or 0
        self.heads = plain.q_proj.out_features // plain.head_dim
        self.qkv_proj = linears.product(plain.q_proj, plain.k_proj, plain.v_proj, norm=norm)
        self.o_proj = linears.product(plain.o_proj)
        self.q_norm = RMSNorm(plain.q_norm) if hasattr(plain, "q_norm") else None  # qwen3
        self.k_norm = RMSNorm(plain.k_norm) if hasattr(plain, "k_norm") else None
        self.sinks: Tensor | None = getattr(plain, "sinks", None)  # gpt_oss

    def forward(
        self, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, step: StepTensors, then: RMSNorm
    ) -> Residual:
        qkv = self.qkv_proj(x, normed=normed).view(len(x), -1, self.head_size)
        cache = step.caches[self.layer]
        ops.rope_kv_write(
            qkv,
            cos,
            sin,
            cache.k,
            cache.v,
            step.places[cache.group].kv_indices,
            q_norm=self.q_norm.weight if self.q_norm else None,
            k_norm=self.k_norm.weight if self.k_norm else None,
            eps=self.q_norm.eps if self.q_norm else 0.0,
            scales=cache.scales,
        )
        out = attend(step, qkv[:, : self.heads], cache, self.scale, self.window, 0.0, self.sinks)
        return Residual(*self.o_proj.add(out.view(len(x), -1), x, then))


class MLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))): [T, hidden] -> [T, hidden].  normed, then: see Attention."""

    def __init__(self, plain: Any, norm: RMSNorm, linears: Linears) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up_proj = linears.product(plain.gate_proj, plain.up_proj, norm=norm, silu_mul=True)
        self.down_proj = linears.product(plain.down_proj)

    def forward(self, x: Tensor, normed: Tensor | None, then: RMSNorm | None) -> Residual:
        return Residual(*self.down_proj.add(self.gate_up_proj(x, normed=normed), x, then))


class Mixture(nn.Module):
    """x + the weighted sum of the experts of norm(x), on a GPU: [T, hidden] -> [T, hidden].  normed: see Attention."""

    def __init__(self, plain: Any, norm: RMSNorm, family: MixtureFamily) -> None:
        super().__init__()
        router: Any = getattr(plain, family.router)
        self.norm, self.routing = norm, family.routing(router)
        self.router: Tensor = router.weight
        self.router_bias: Tensor | None = getattr(router, "bias", None)
        self.top: int = router.top_k
        experts = plain.experts
        self.packed: tuple[ops.PackedRows, ops.PackedRows] | None = None
        if isinstance(experts, QuantisedExperts):
            self.packed, experts = experts.packed(), experts.plain
        elif family.clamped:
            store_rows(experts)
        self.clamped = ops.Clamped(experts.alpha, experts.limit) if family.clamped else None
        self.experts = experts
        self.takes_all = True  # packed weights exist only on GPUs whose kernels take any number of pairs
        if self.packed is None:
            _, hidden, inner = experts.down_proj.shape
            self.takes_all = ops.takes_all_pairs(hidden, inner, experts.down_proj.device)

    def forward(self, x: Tensor, normed: Tensor | None, then: RMSNorm | None) -> Residual:
        y = ops.rms_norm(x, self.norm.weight, self.norm.eps) if normed is None else normed
        return Residual(self._add_experts(x, y), None)

    def _add_experts(self, x: Tensor, y: Tensor) -> Tensor:
        logits = ops.linear(y, self.router, self.router_bias)
        chosen, weights = ops.route(logits, self.top, **self.routing._asdict())
        experts = self.experts
        if self.takes_all or chosen.numel() <= ops.MAX_PAIRS:
            gate_up, down = self.packed or (experts.gate_up_proj, experts.down_proj)
            return ops.experts(
                y,
                chosen,
                weights,
                gate_up,
                down,
                plus=x,
                gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
                down_bias=getattr(experts, "down_proj_bias", None),
                clamped=self.clamped,
            )
        scores = weights.to(y.dtype) if self.routing.rounded else weights
        return x.add_(experts(y, chosen.to(torch.int64), scores))


def store_rows(experts: GptOssExperts) -> None:
    """Transpose weights [experts, in, out] to [experts, out, in] within their own memory, an expert at a time.

    The order of output rows stays: gate and up interleaved.  transformers' module gives the same results with them."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach()
        rows = weight.view(len(weight), *weight.mT.shape[1:])
        for expert, place in enumerate(rows):
            place.copy_(weight[expert].T.clone(memory_format=torch.contiguous_format))
        setattr(experts, name, nn.Parameter(rows, requires_grad=False))
    experts.is_transposed = False


class Layer(nn.Module):
    """A decoder layer: x [T, hidden] -> [T, hidden].  x may be overwritten."""

    def __init__(self, plain: Any, window: int | None, linears: Linears, family: type[PreTrainedModel]) -> None:
        super().__init__()
        self.norm = RMSNorm(plain.input_layernorm)
        self.attention = Attention(plain.self_attn, self.norm, window, linears)
        norm = RMSNorm(plain.post_attention_layernorm)
        mixed = hasattr(plain.mlp, "experts")
        self.mlp = Mixture(plain.mlp, norm, MIXTURES[family]) if mixed else MLP(plain.mlp, norm, linears)

    def forward(
        self, x: Tensor, normed: Tensor | None, cos: Tensor, sin: Tensor, step: StepTensors, then: RMSNorm | None
    ) -> Residual:
        between = self.attention(x, normed, cos, sin, step, self.mlp.norm)
        residual: Residual = self.mlp(*between, then)
        return residual


def one_operator(layers: Sequence[Layer]) -> ops.DecoderLayers | None:
    """Return the arguments with which one operator computes all layers on a CPU; None if it cannot.

    It cannot on a GPU, with several ranks, if oneDNN's GEMMs are faster than ours, if layers have sinks or experts, and
    if layers differ in more than weights and windows, for instance in the format of their weights."""
    weights: list[Tensor | None] = []
    kinds: set[tuple[int, int, float, float, float, float]] = set()
    widens: set[bool] = set()
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, MLP) or attention.sinks is not None:
            return None
        found = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        products = [product for product in found if isinstance(product, Product)]
        packs = [product.packed for product in products if product.packed is not None and product.packed.ours]
        if len(packs) < len(found):
            return None
        first, second = products[0].norm, products[2].norm
        assert first is not None
        assert second is not None
        norms = first, attention.q_norm, attention.k_norm, second
        weights += [None if norm is None else norm.weight for norm in norms]
        for product, packed in zip(products, packs, strict=True):
            weights += [packed.values, packed.scale, packed.zero, product.bias]
            widens.add(packed.widen)
        head_eps = 0.0 if attention.q_norm is None else attention.q_norm.eps
        kinds.add((attention.heads, packs[2].size // 2, first.eps, second.eps, head_eps, attention.scale))
    if len(kinds) != 1 or len(widens) != 1:
        return None
    heads, inner, eps, second_eps, head_eps, scale = kinds.pop()
    windows = [layer.attention.window for layer in layers]
    if eps != second_eps:
        return None
    return ops.DecoderLayers(weights, heads, inner, eps, head_eps, scale, windows, widens.pop())


class Decoder(nn.Module):
    """The complete model: computes hidden states from a step, and logits of the tokens that need them."""

    def __init__(self, model: PreTrainedModel, max_model_len: int, linears: Linears) -> None:
        super().__init__()
        plain, window = model.model, WINDOW[type(model)]
        self.embed_tokens = plain.embed_tokens
        # Angles depend on the position alone, up to the length that served_config.py checks.  So each is computed once,
        # by the model's own module: [max_model_len, 2, D], cos and sin, in its dtype.
        positions = torch.arange(max_model_len, device=model.device)
        angles = torch.stack(plain.rotary_emb(self.embed_tokens.weight[:1], positions[None]), 2)[0]
        halves = plain.layers[0].self_attn.head_dim // angles.shape[2]  # gpt_oss has the angles of half a head
        self.angles = angles.repeat(1, 1, halves)
        layers: list[Layer] = []
        for i, layer in enumerate(plain.layers):
            layers.append(Layer(layer, window(layer.self_attn), linears, type(model)))
            plain.layers[i] = nn.Identity()  # frees its weights: only one layer exists twice at a time
        self.layers, self.whole = nn.ModuleList(layers), one_operator(layers)
        self.norms = [*(layer.norm for layer in layers[1:]), None]  # norm after each layer; the LM head has its own
        # In bfloat16 different logits would become equal: near 20, neighbouring bfloat16 values differ by an eighth.
        self.head = linears.product(model.lm_head, norm=RMSNorm(plain.norm), float32_out=True)

    def forward(self, step: StepTensors) -> Tensor:
        """Return the hidden states of a step, after all layers: [T, hidden]."""
        x: Tensor = self.embed_tokens(step.input_ids[0])
        cos, sin = self.angles.index_select(0, step.position_ids[0]).unbind(1)  # [T, D]
        if self.whole is not None:
            where = step.places, step.rows, step.q_start, step.lens
            assert not isinstance(step.adapters, ops.DeviceAdapters)
            ops.decoder_layers(x, cos, sin, self.whole, step.caches, *where, step.adapters)
            return x
        normed: Tensor | None = None
        for layer, then in zip(self.layers, self.norms, strict=True):
            x, normed = layer(x, normed, cos, sin, step, then)
        return x

    def logits(self, x: Tensor, at: Tensor | None, out: Tensor | None = None, *, own: bool = False) -> Tensor:
        """Return logits [., V] of tokens `at` (None: of all) from the hidden states x, written to `out` if given.

        own: only the columns of this rank; `own_columns` is their number."""
        head: Any = self.head.part if own else self.head
        if at is not None:
            x = x.index_select(0, at)
        if not len(x):
            dtype = torch.float32 if self.head.packed or self.head.wide else x.dtype
            logits: Tensor = x.new_empty(0, head.out_features, dtype=dtype)
        else:
            logits = head(x, out=out)
        return logits

    @property
    def own_columns(self) -> int:
        """Columns of the logits that each rank computes; 0: every rank computes all."""
        return self.head.part.out_features if isinstance(self.head, Sharded) else 0


def fuse(
    model: PreTrainedModel,
    max_model_len: int,
    *,
    ordered: bool = False,
    decoder: bool = True,
    sites: Sites | None = None,
) -> None:
    """Swap submodules in place.  The model must be on its device, in its dtype, and must not move afterwards.

    ordered: on a CPU, use batch-invariant GEMMs (bit for bit) even if others are faster. decoder: also replace the
    decoder, if `has_plain_decoder`; its heads must be cached without padding. sites: receives a site per linear layer
    that LoRA adapters may change; None: no adapters are served.  A model whose decoder was replaced works only through
    `Forward`.
    """
    linears = Linears(ordered=ordered, dtype=model.dtype, sites=sites)
    if decoder and has_plain_decoder(model):
        model.model, model.lm_head = Decoder(model, max_model_len, linears), nn.Identity()
        report_limited_mixtures(model)
        report_packed_experts(model)
    pack_linears(model, linears, None if is_fused(model) else model.get_output_embeddings())
    widen_sinks(model)


def pack_linears(module: nn.Module, linears: Linears, head: nn.Module | None = None) -> None:
    """Swap the linear layers of a module that are packed on this device.  head: the LM head, which returns float32."""
    for parent in list(module.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if type(child) in (*LINEAR, Conv1D):
                packed = linears.alone(weight_of(child), child.bias, child.weight.dtype, float32_out=child is head)
                linears.adapt(child, packed)
                if packed is not None:
                    setattr(parent, name, shared_out(packed, child))


def report_limited_mixtures(model: PreTrainedModel) -> None:
    """Log that large steps use transformers' experts, if our kernels limit the number of (token, expert) pairs."""
    limited = [module for module in model.modules() if isinstance(module, Mixture) and not module.takes_all]
    if limited:
        _, hidden, inner = limited[0].experts.down_proj.shape
        log.info(
            "experts of %d layers: steps of more than %d tokens take transformers' kernels; ours take any number on a "
            "Hopper GPU if hidden size (%d) and inner size (%d) are multiples of 64",
            *(len(limited), ops.MAX_PAIRS // limited[0].top, hidden, inner),
        )


def report_packed_experts(model: PreTrainedModel) -> None:
    """Log which experts stay quantised, and the memory that they take."""
    report_packed(
        [weight for module in model.modules() if isinstance(module, Mixture) for weight in module.packed or ()]
    )


def widen_sinks(model: PreTrainedModel) -> None:
    """Convert attention sinks to float32, which the kernels need, once instead of in every step."""
    for module in model.modules():
        if isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
            module.sinks = nn.Parameter(sinks.float(), requires_grad=False)


def weight_of(linear: nn.Linear | QuantisedLinear | Conv1D) -> Tensor | Quantised:
    """Return the weight [out, in] of a layer."""
    if isinstance(linear, QuantisedLinear):
        return linear.quantised
    weight: Tensor = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    return weight


def batch_dependence(model: PreTrainedModel) -> str:
    """Return why a fused model's logits may depend, in the last bit, on other sequences of a step; empty: they do not.

    On a CPU, attention, norms and our GEMMs give the same bits in any batch.  A model's own modules may not: GEMMs with
    weights outside linear layers (mixtures of experts), and torch's activations, whose vectorised and scalar versions
    differ.
    """
    if model.device.type != "cpu":
        return ON_A_GPU
    packs = [module.packed for module in model.modules() if isinstance(module, PackedLinear | Product)]
    packs += [None for module in model.modules() if isinstance(module, QuantisedLinear)]
    if not all(packed and packed.ordered for packed in packs):
        return "on this CPU GEMMs of many rows use a faster kernel with other rounding"
    if is_fused(model):
        return ""
    head = getattr(model, "lm_head", None)
    heads = (head, getattr(head, "part", None))  # LM head; this rank's shard of it
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                return f"{path}.{name} is the weight of a GEMM that our kernels do not compute"
        if isinstance(module, PackedLinear) and module.out_features % VECTOR and module not in heads:
            return f"{path} has {module.out_features} outputs, which is no multiple of {VECTOR}"
    return ""


def is_fused(model: PreTrainedModel) -> bool:
    """Whether `fuse` replaced the complete decoder, so that only our operators run."""
    return isinstance(getattr(model, "model", None), Decoder)


class Forward:
    """One step through a model.  The layers run once; logits are computed in chunks of rows, to bound the memory."""

    def __init__(self, model: PreTrainedModel, step: StepTensors) -> None:
        self._model = model
        self._step = step
        self._hidden: Any = None  # hidden states; None: the layers have not run

    def logits(self, at: Tensor | None, out: Tensor | None = None, *, own: bool = False) -> Tensor:
        """Return logits [., V] of the step's tokens `at`, i64 (None: of all), written to `out` if given.

        own: only this rank's columns, if `own_columns` of the model is not 0."""
        logits: Tensor
        if is_fused(self._model):
            if self._hidden is None:
                self._hidden = self._model.model(self._step)
            logits = self._model.model.logits(self._hidden, at, out, own=own)
            return logits
        logits = self._plain(0 if at is None else at)
        return logits if out is None else out.copy_(logits)

    @property
    def hidden(self) -> Tensor:
        """Hidden states [T, hidden] after the last norm, once logits were computed by transformers' own forward."""
        states: Tensor = self._hidden.last_hidden_state[0]
        return states

    def _plain(self, keep: int | Tensor) -> Tensor:
        """Return logits by transformers' own forward, which also applies scales and soft caps after the LM head.

        The decoder runs once; further calls get its first result.  A model without a separate decoder runs completely
        for each chunk: slower, with the same logits.
        """
        decoder = self._model.get_decoder()
        run = decoder.forward

        def once(*args: Any, **kwargs: Any) -> Any:
            if self._hidden is None:
                self._hidden = run(*args, **kwargs)
            return self._hidden

        if decoder is not self._model:
            decoder.forward = once  # hides the method of the class
        try:
            logits: Tensor = self._model(
                input_ids=self._step.input_ids,
                position_ids=self._step.position_ids,
                use_cache=False,
                logits_to_keep=keep,
                step=self._step,
            ).logits[0]
        finally:
            vars(decoder).pop("forward", None)
        return logits


def own_columns(model: PreTrainedModel) -> int:
    """Return the columns of the logits that each of several ranks computes; 0: every rank computes all logits.

    Only a `Decoder` shards logits: transformers' own forward may do anything with the logits after its LM head."""
    return model.model.own_columns if is_fused(model) else 0
