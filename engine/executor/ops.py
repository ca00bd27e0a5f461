"""Typed Python interface to the kernels of csrc.  No other module uses torch.ops.  kernels_build.py compiles them.

`load()` must return before any operator is called.  `python -m quire.engine.executor.ops` compiles the kernels now
rather than at first use; with `--ahead DIRECTORY` it compiles for other machines, for example into an image.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.engine.executor import int4_layout
from quire.engine.executor.kernels_build import (
    AHEAD_CPU,
    AHEAD_GPUS,
    CSRC,
    LIBRARY,
    KernelBuildError,
    Target,
    build,
    build_ahead,
    default_directory,
    main,
)
from quire.engine.executor.kv_cache import LayerCache

log = logging.getLogger(__name__)

__all__ = [
    "AHEAD_CPU",
    "AHEAD_GPUS",
    "CSRC",
    "LIBRARY",
    "KernelBuildError",
    "Packed",
    "Target",
    "build",
    "build_ahead",
    "default_directory",
    "load",
]


def load(directory: Path | None = None, *, library: Path | None = None) -> None:
    """Make the operators callable in this process.  Compile them first unless `directory` holds a build that fits.

    library: a library that was compiled ahead; it is loaded without checks.

    Several processes may call this at once: one compiles, the others wait for it.  A second call does nothing, because
    a process takes its operators from one library.  Writes to stderr when it compiles.  Raises KernelBuildError.
    """
    if library is not None and not library.is_file():
        raise KernelBuildError(
            f"{library}: no such file; `python -m quire.engine.executor.ops --ahead DIRECTORY` makes one"
        )
    if hasattr(torch.ops.quire, "linear"):
        return
    path = library or build(directory or default_directory())
    torch.ops.load_library(str(path))


# The operators.  Shapes: T tokens of the step, S sequences, H query heads, Hkv KV heads, D head size.
# Wrong shapes and dtypes raise ValueError naming the sizes that disagree, wrong indices raise IndexError.


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the step's keys and values to one layer's cache.

    key, value  [T, Hkv, D], any strides as long as rows of D are contiguous; dtype of the cache
    caches      [blocks, Hkv, block_size, D]
    kv_indices  [T] int64: block * block_size + offset, distinct; -1: the token is not stored
    scales      [2, Hkv] float32, for keys and for values, with a float8_e4m3fn cache: stored = value / scale
    """
    torch.ops.quire.kv_write.default(key, value, k_cache, v_cache, kv_indices, scales)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
    *,
    decodes: int = 0,
    plan: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of S sequences over the KV cache: decodes and prompt chunks in one ragged call.

    q, out      [T, H, D] float32, bfloat16 or float16, any strides as long as rows of D are contiguous
    caches      [blocks, Hkv, block_size, D], dtype of q; H is a multiple of Hkv; any block_size; D at most 512 on a
                CPU, one of 64, 80, 96, 128, 192 and 256 on a GPU
    tables      [max_rows, max_blocks] int32 block ids in logical order; entries past a sequence's end are ignored
    rows        [S] int32, the row of `tables` of each sequence
    q_start     [S + 1] int32, sequence s owns tokens q_start[s] .. q_start[s + 1] - 1
    lens        [S] int32, keys of each sequence, including this step's, which are in the cache already
    window      > 0: a query sees only the last `window` keys, its own included; 0: all keys before it
    soft_cap    > 0: scores become soft_cap * tanh(score / soft_cap); 0: no cap
    decodes     number of leading sequences with one query each (or none, if lens is 0)
    plan        written by `attention_plan` for this step; not needed on a CPU
    scales      [2, Hkv] float32, for keys and for values, with a float8_e4m3fn cache: value = stored * scale
    sinks       [H] float32: a score without a value, added to every softmax of the head; -inf: no sink

    The last query of a sequence has position lens - 1.  On a CPU a query's result is bit-identical in any batch.  It
    does not depend on the chunks of its prompt, its block ids or the number of threads.
    """
    if plan is None:
        plan = torch.empty(0, dtype=torch.uint8, device=q.device)
    torch.ops.quire.paged_attention.default(
        q, k_cache, v_cache, tables, rows, q_start, lens, scales, sinks, decodes, plan, scale, window, soft_cap, out
    )


def attention_plan(
    q_start: torch.Tensor,
    lens: torch.Tensor,
    decodes: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int,
    plan: torch.Tensor,
) -> None:
    """Partition the work of `paged_attention`, once per step, before the first layer with these sizes and this window.

    q_start, lens, decodes  as the layers will pass them; `tables` and `rows` must be written before this call
    plan    [attention_plan_bytes(...)] uint8 on the device; also holds partial results of long sequences
    """
    torch.ops.quire.attention_plan.default(q_start, lens, decodes, heads, kv_heads, head_size, window, plan)


def attention_plan_bytes(
    device: torch.device, *, max_seqs: int, max_tokens: int, heads: int, kv_heads: int, head_size: int
) -> int:
    """Bytes of a plan for steps of up to max_seqs sequences and max_tokens tokens.  0 on a CPU."""
    like = torch.empty(0, device=device)
    size: int = torch.ops.quire.attention_plan_bytes.default(like, max_seqs, max_tokens, heads, kv_heads, head_size)
    return size


def block_copy(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """In each cache copy block pairs[i, 0] to block pairs[i, 1]; pairs [n, 2] int64.  The caches have one shape.

    No block may be written twice, or both read and written.
    """
    torch.ops.quire.block_copy.default(caches, pairs)


def block_fill(caches: list[torch.Tensor], blocks: torch.Tensor, value: float) -> None:
    """In each cache fill blocks [n] int64 with one value (NaN, to catch reads of freed blocks)."""
    torch.ops.quire.block_fill.default(caches, blocks, value)


def block_gather(caches: list[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i, c] = block blocks[i] of caches[c], as bytes.

    blocks [n] int64, buffer [n, caches, bytes of a block] uint8, on the device of the caches.
    """
    torch.ops.quire.block_gather.default(caches, blocks, buffer)


def block_scatter(buffer: torch.Tensor, blocks: torch.Tensor, caches: list[torch.Tensor]) -> None:
    """caches[c][blocks[i]] = buffer[i, c]: the inverse of `block_gather`, to the same or other blocks.

    Blocks must be distinct.
    """
    torch.ops.quire.block_scatter.default(buffer, blocks, caches)


@dataclass(frozen=True)
class Fp8:
    """An fp8 weight on a Hopper GPU: numbers * scale[:, None], or each 128 x 128 block times its scale."""

    numbers: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # float32: [out], or [out / 128, in / 128]

    @property
    def rows(self) -> int:
        """Return `out`."""
        return len(self.numbers)


# Divisors of `in` and `out`: with a scale per row, and per block.  Releases of torch lay out block scales differently,
# except if each row has a multiple of four of them.
FP8_INNER, FP8_OUT = 128, 16
FP8_BLOCKS_INNER, FP8_BLOCKS_OUT = 512, 128


@dataclass(frozen=True)
class Int4:
    """An int4 weight on a Hopper GPU, packed by `pack_int4_gpu`."""

    packed: torch.Tensor  # [out / 16, in / 128, bytes] uint8: packed blocks of weights, group scales and zero points
    scale: torch.Tensor  # [out] float32, row scales: factors of the group scales

    @property
    def rows(self) -> int:
        """Return `out`."""
        return len(self.scale)


def pack_int4_gpu(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Int4:
    """Pack an int4 weight for a GPU; arguments as of `pack_int4`, in / groups is 32, 64, 96, ..

    Scales keep 11 bits.  Raises ValueError unless `in` and `out` are multiples of INT4_GPU_INNER and INT4_GPU_OUT."""
    return Int4(*int4_layout.pack(numbers, scale, zero))


INT4_GPU_INNER, INT4_GPU_OUT = int4_layout.INPUTS, int4_layout.ROWS


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether torch has fp8 GEMMs with block-wise weight scales: CUDA 12.9 and later."""
    x = torch.zeros(16, FP8_BLOCKS_INNER, dtype=torch.bfloat16, device=device)
    weight = Fp8(x.new_zeros(128, FP8_BLOCKS_INNER).to(torch.float8_e4m3fn), torch.ones(1, 4, device=device))
    try:
        linear(x, weight)
    except RuntimeError as error:
        log.warning(
            "dequantising block-scaled fp8 weights at load: this torch has no GEMM for them (%s)",
            str(error).splitlines()[0],
        )
        return False
    return True


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8 | Int4,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    plus: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    float32_out: bool = False,
) -> torch.Tensor:
    """rms_norm(x, norm, eps) times the transposed weight, plus bias.  x [T, in], weight [size, in] -> [T, size].

    norm      [in]; None: no norm
    silu_mul  weight and bias hold `size` gate rows, then `size` up rows; the result is silu(gate) * up
    plus      [T, size]: the result is added to it, in place, and it is returned
    out       [T, size], without `plus`: destination.  On a GPU it may be float32 if there is no silu_mul

    float32_out: allocate a float32 `out`; on a GPU, without silu_mul and plus.

    With an Fp8 weight all other tensors are bfloat16.  x is not rounded if a CTA can hold all of it: one token of up to
    16,384 elements, 2 of 8,192, 4 of 4,096.  Otherwise it is quantised to e4m3, with a scale per token, or per 128
    elements of a token if the weight has block scales.

    With an Int4 weight all other tensors are bfloat16, too.  Up to 64 tokens only the result is rounded.  With more the
    weight is dequantised to bfloat16 first, in scratch memory.
    """
    assert plus is None or out is None
    if out is None:
        rows = len(weight) if isinstance(weight, torch.Tensor) else weight.rows
        size = rows // 2 if silu_mul else rows
        dtype = torch.float32 if float32_out else x.dtype
        out = torch.empty(x.shape[0], size, dtype=dtype, device=x.device) if plus is None else plus
    rest = (bias, norm, eps, plus is not None, silu_mul, out)
    if isinstance(weight, Fp8):
        torch.ops.quire.linear_fp8.default(x, weight.numbers, weight.scale, *rest)
    elif isinstance(weight, Int4):
        torch.ops.quire.linear_int4.default(x, weight.packed, weight.scale, *rest)
    else:
        torch.ops.quire.linear.default(x, weight, *rest)
    return out


# A mixture of experts: on a GPU in bfloat16 or float16; on a CPU in plain loops, which tests compare with.

MOST_EXPERTS, MOST_CHOSEN = 512, 32  # experts per layer, and chosen per token
MOST_PAIRS = 512  # (token, expert) pairs per call of `experts`, unless `takes_all_pairs`
MOST_TOKENS = 16_384  # tokens per call of the operator, which bounds its memory; more are split
_HOPPER, _WHOLE_SLABS = 9, 64  # compute capability; divisor of hidden and inner size


def takes_all_pairs(hidden: int, inner: int, device: torch.device) -> bool:
    """Return whether `experts` takes any number of tokens for these sizes; if not, at most MOST_PAIRS pairs T * k."""
    if hidden % _WHOLE_SLABS or inner % _WHOLE_SLABS or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER  # later GPUs have no wgmma


def route(logits: torch.Tensor, top: int, *, normalise: bool, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top-k experts of each token by logits [T, E] -> (expert ids int32, weights float32), both [T, top].

    Weights are the softmax over all experts.

    normalise  a token's weights are divided by their sum
    rounded    weights are rounded to the dtype of the logits
    """
    chosen = torch.empty(logits.shape[0], top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(logits.shape[0], top, dtype=torch.float32, device=logits.device)
    torch.ops.quire.route.default(logits, normalise, rounded, chosen, weights)
    return chosen, weights


@dataclass(frozen=True)
class Clamped:
    """The activation of gpt-oss: g * sigmoid(alpha * g) * (u + 1), where g is `gate` and u is `up`, both clamped.

    g = min(gate, limit), u = max(-limit, min(up, limit))."""

    alpha: float
    limit: float  # over 0


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    plus: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamped: Clamped | None = None,
) -> torch.Tensor:
    """Add the weighted sum of each token's expert outputs to plus, in place: x, plus [T, hidden] -> plus.

    chosen, weights  [T, k] as `route` returns them; T * k is at most MOST_PAIRS unless `takes_all_pairs`
    gate_up          [E, 2 * inner, hidden]: per expert gate rows, then up rows; both sizes are multiples of 8.
                     With `clamped` gate and up rows are interleaved
    gate_up_bias     [E, 2 * inner], in the order of the rows
    down             [E, hidden, inner]
    down_bias        [E, hidden]
    clamped          the activation; None: silu(gate) * up

    Reads each chosen expert once.  The number of pairs chooses the kernel; beyond that a token's result does not depend
    on the others."""
    name, alpha, limit = ("silu", 0.0, 0.0) if clamped is None else ("clamped", clamped.alpha, clamped.limit)
    for first in range(0, len(x), MOST_TOKENS):
        part = slice(first, first + MOST_TOKENS)
        routed = x[part], chosen[part], weights[part]
        biased = gate_up, gate_up_bias, down, down_bias
        torch.ops.quire.experts.default(*routed, *biased, name, alpha, limit, plus[part])
    return plus


# All-reduce over the ranks of a model, one GPU each.

SUM_CTAS, MOST_SUM_RANKS, MOST_SUMMED = 256, 8, 16384  # maximum CTAs per call; ranks; elements per row
_MARK_BYTES, _PACK_BYTES, _SUM_THREADS = 16, 16, 1024  # as in csrc/cuda/ranks


@dataclass(frozen=True)
class Inboxes:
    """Memory for the all-reduce: each rank writes its part to the others' inboxes and reads its own."""

    own: torch.Tensor  # [bytes] uint8, this rank's inbox, initially zeros
    addresses: list[int]  # address of each rank's inbox, as mapped by this process
    calls: torch.Tensor  # [SUM_CTAS] int32, initially zeros
    rank: int
    words_share: int  # bytes of part per CTA and call in the words protocol (call number in every 8 bytes)
    blocks_share: int  # bytes of part per CTA and call in the blocks protocol
    multiprocessors: int  # minimum over the ranks' GPUs: all CTAs of a call must be resident at once

    @staticmethod
    def bytes_of(ranks: int, words_share: int, blocks_share: int) -> int:
        """Return the size of an inbox."""
        return 2 * ranks * SUM_CTAS * (_MARK_BYTES + 2 * words_share + blocks_share)

    def ctas(self, row_bytes: int) -> int:
        """Return the maximum CTAs per call: two per multiprocessor, or one if a row takes over half of its threads."""
        each = 2 if row_bytes <= _PACK_BYTES * _SUM_THREADS // 2 else 1
        return min(each * self.multiprocessors, SUM_CTAS)

    def takes(self, rows: int, size: int, dtype: torch.dtype, *, words: bool) -> bool:
        """Return whether `rank_sum` supports a part of this shape.  Equal on all ranks."""
        row_bytes = size * dtype.itemsize
        if dtype not in (torch.float32, torch.bfloat16, torch.float16) or row_bytes % _PACK_BYTES or size > MOST_SUMMED:
            return False
        return 0 < -(-rows // self.ctas(row_bytes)) * row_bytes <= (self.words_share if words else self.blocks_share)


def rank_sum(
    part: torch.Tensor,
    inboxes: Inboxes,
    *,
    words: bool,
    plus: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All-reduce of `part` [rows, size], in place, in one kernel per GPU -> (the sum, the sum after a norm).

    words  send the call number in every 8 bytes: minimum latency, twice the bytes.  Else one number per CTA
    plus   [rows, size], equal on all ranks: the sum is added to it, in place, and it is returned
    norm   [size]: also return rms_norm(the result, norm, eps); without it None

    All ranks must make the same calls in the same order, with equal shapes that fit into `inboxes`.  Parts are summed
    in rank order, in float32, then `plus`; one rounding, equal bits on all ranks.  The kernel waits for the other
    ranks, without a limit."""
    normed = None if norm is None else torch.empty_like(part)
    size = part.shape[-1]
    torch.ops.quire.rank_sum.default(
        part,
        plus,
        norm,
        eps,
        normed,
        inboxes.own,
        inboxes.addresses,
        inboxes.calls,
        inboxes.rank,
        inboxes.ctas(size * part.element_size()),
        inboxes.words_share,
        inboxes.blocks_share,
        words,
    )
    return (part if plus is None else plus), normed


def torch_rank_sum(shared: torch.Tensor, part: torch.Tensor, group: str, *, two_shot: bool) -> torch.Tensor:
    """All-reduce by torch's symmetric-memory kernels, for comparison: one-shot, or reduce-scatter and all-gather.

    shared  in this rank's symmetric memory, shape and dtype of part: it becomes the part, or (two_shot) holds it before
    group   torch's name of the process group"""
    y: torch.Tensor
    if two_shot:
        y = torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
    else:
        y = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, part, "sum", group)
    return y


# Operators between the GEMMs of a decoder layer.  float32, bfloat16 or float16; arithmetic in float32.


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.  x [T, size], weight [size] -> [T, size]."""
    out = torch.empty_like(x)
    torch.ops.quire.rms_norm.default(x, weight, eps, out)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.  gate_up [T, 2 * size] holds gate, then up, in every row -> [T, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    torch.ops.quire.silu_mul.default(gate_up, out)
    return out


_silu_mul = silu_mul  # alias, because a parameter shadows the name


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: torch.Tensor | None = None,
) -> None:
    """Apply rotary embedding to queries, in place, and write rotated keys and the values to the cache.

    qkv         [T, H + 2 * Hkv, D]: query, key and value heads; key heads are not modified
    cos, sin    [T, D], rows contiguous (say, halves of a table's [positions, 2 * D]): head[i] becomes
                head[i] * cos[i] - head[i + D / 2] * sin[i], and the second half likewise with +
    caches, kv_indices, scales  as in `kv_write`
    q_norm, k_norm  [D]: `rms_norm` with `eps` of every query and key head before the rotation
    """
    torch.ops.quire.rope_kv_write.default(qkv, cos, sin, k_cache, v_cache, kv_indices, q_norm, k_norm, eps, scales)


def apply_edits(edits: torch.Tensor, tables: torch.Tensor) -> None:
    """tables[row, column] = block for each (row, column, block) of edits [n, 3] int32; row -1 is padding.

    tables [max_rows, max_blocks] int32.  Entries must be distinct.
    """
    torch.ops.quire.apply_edits.default(edits, tables)


def decode_inputs(
    slots: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    *,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Prepare the inputs of the next token of each decoding slot, in one launch.

    slots                       [n] int32: rows of the tables, in the order of the step; -1 is padding
    token, position             [max_rows] int64: next input token of each slot, and its position
    tables                      [max_rows, max_blocks] int32
    ids, positions, kv_indices  [n] int64, out: inputs of the model and of `kv_write`
    rows, lens                  [n] int32, out: inputs of `paged_attention`

    Padding, and a slot past the end of its table, becomes id 0, position 0, kv_index -1, row 0, lens 0.
    """
    torch.ops.quire.decode_inputs.default(
        slots, token, position, tables, block_size, ids, positions, kv_indices, rows, lens
    )


def decode_outputs(slots: torch.Tensor, tokens: torch.Tensor, token: torch.Tensor, position: torch.Tensor) -> None:
    """Feed sampled tokens [n] int64 back: token[slots[i]] = tokens[i], position[slots[i]] += 1; -1 is padding.

    Slots must be distinct.
    """
    torch.ops.quire.decode_outputs.default(slots, tokens, token, position)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    known: torch.Tensor,
    table: torch.Tensor,
    general: bool,
    tokens: torch.Tensor,
    outcome: torch.Tensor,
) -> None:
    """Sample one token per row of logits [N, V], equal on every device and in any batch.

    csrc/sampling_rules.h has the rules.

    slots, known  [N] int64: the row's slot in `table` (-1: none, the token is 0); number of tokens before this one
    table         [max_seqs, 8] int64, on a CPU [max_seqs, 9]: each slot's settings; `SamplerBank` owns it
    general       False: argmax of each row, with one pass over the logits; `table` is not read
    tokens        [N] int64, out; 0 if none was sampled
    outcome       [N] uint8, out: CHOSEN, NOT_FINITE or NOTHING_ALLOWED of engine/executor/sampling.py
    """
    torch.ops.quire.sample.default(logits, slots, known, table, general, tokens, outcome)


def likeliest(logits: torch.Tensor, first: int, keys: torch.Tensor) -> None:
    """Find the argmax of each row of vocab-parallel logits [N, C]: the columns of tokens first, first + 1, ...

    keys  [N] int64, out: the logit and its token.  The maximum key over the ranks is that of the argmax, the first of
          equals; a row with NaN has the maximum key.  `chosen` reads them"""
    torch.ops.quire.likeliest.default(logits, first, keys)


def chosen(keys: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, outcome: torch.Tensor) -> None:
    """Write the tokens and outcomes of `sample` with `general` false, from the keys [N] of the unsharded logits."""
    torch.ops.quire.chosen.default(keys, slots, tokens, outcome)


# Linear layers on a CPU with a weight that is packed once, at load.  Torch's own linear converts the weight in every
# call.  For the few rows of a decode step that takes as long as the GEMM itself.


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in the layout of `packed_linear`."""

    numbers: torch.Tensor
    size: int  # out
    ordered: bool  # a row's bits do not depend on the batch
    float32_out: bool = False  # the result is not rounded to the weight's dtype
    widen: bool = False  # bfloat16 on matrix tiles; int8 and int4 weights are dequantised to it, if rows are many
    scale: torch.Tensor | None = None  # int8 weights: [padded] float32; int4 weights: [strips, groups, columns]
    zero: torch.Tensor | None = None  # [strips, groups, columns] u8: int4 weights with zero points

    @property
    def ours(self) -> bool:
        """Whether our operators use it, rather than oneDNN's."""
        return self.ordered or self.widen


def pack_weight(weight: torch.Tensor, *, ordered: bool, float32_out: bool = False) -> Packed | None:
    """Pack weight [out, in] for `packed_linear` on a CPU.

    ordered: a row's bits must not depend on the batch.  Otherwise the fastest layout here; None if torch's own linear
    is the fastest.  float32_out: 16-bit weights with a float32 result.
    """
    size, inner = weight.shape
    float32_out = float32_out and weight.dtype != torch.float32
    if weight.dtype == torch.bfloat16 and inner % 2 == 0 and tiles_multiply() and (tiles_keep_order() or not ordered):
        return Packed(_in_strips(weight.detach()), size, tiles_keep_order(), float32_out, widen=True)
    if ordered or float32_out or _ordered_is_fast(weight.dtype):
        return Packed(_in_strips(weight.detach()), size, True, float32_out)
    if weight.dtype == torch.bfloat16 and _onednn_bfloat16():
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), size, False)
    return None


def tiles_multiply() -> bool:
    """Whether `packed_linear` can multiply bfloat16 on matrix tiles (AMX): the CPU and this build have them."""
    together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=torch.bfloat16))[1]
    return together == 2 and _onednn_bfloat16() and torch.cpu._is_amx_tile_supported()


@functools.cache
def tiles_keep_order() -> bool:
    """Whether a row's bits on matrix tiles are the same in any batch: oneDNN promises nothing, so it is tried out."""
    rows, inner = 130, 1100  # more than a call of the GEMM takes of both
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = Packed(_in_strips(x), rows, ordered=False, float32_out=True, widen=True)
    together = packed_linear(x, packed, None)
    return all(
        torch.equal(packed_linear(x[first : first + count], packed, None), together[first : first + count])
        for count in (1, 2, 15, 16, 17, 33, 64, 65, 129)
        for first in (0, rows - count)
    )


def widened_rows() -> tuple[int, int] | None:
    """Minimum rows at which `widen` dequantises int8 and int4 weights to bfloat16.

    None: never, because without bfloat16 instructions oneDNN is slower than the integer kernels."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if not (native and _onednn_bfloat16()):
        return None
    of_int8, of_int4 = torch.ops.quire.widened_rows.default()
    return of_int8, of_int4


def pack_int8(numbers: torch.Tensor, scale: torch.Tensor, *, ordered: bool = True, float32_out: bool = False) -> Packed:
    """Pack the int8 weight numbers [out, in] times scale [out] float32 for `packed_linear` on a CPU.

    ordered: a row's bits must not depend on the batch.  Otherwise many rows of bfloat16 use weights dequantised to
    bfloat16 if that is faster (`widened_rows`).  float32_out: as in `pack_weight`.

    `packed_linear` takes x of any dtype and quantises each row to 16 bits.  The error against float64 is at most
    inner / 65,000 * max |x| * max |weight|, before the last rounding.  Bits of a row do not depend on the batch, on
    threads or on the CPU.  Weights dequantised to bfloat16 are exact, x is not rounded, and sums are float32."""
    widen = not ordered and widened_rows() is not None
    strips = _in_strips(numbers.view(torch.uint8) ^ 0x80)
    columns = strips.shape[0] * strips.shape[2]
    padded = torch.nn.functional.pad(scale, (0, columns - len(scale)))
    return Packed(strips, len(numbers), not widen, float32_out, widen, scale=padded)


INT4_BLOCK, INT4_LARGEST_GROUP = 32, 4096  # group size of int4 weights: divisor and maximum, in inputs


def pack_int4(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, *, ordered: bool = True) -> Packed:
    """Pack an int4 weight, (number - zero) * scale in groups of consecutive inputs, for `packed_linear` on a CPU.

    numbers  [out, in / 2] u8: columns 2 i and 2 i + 1 in the low and the high half of byte i
    scale    [out, groups] float32; in / groups is 32, 64, .. 4,096
    zero     [out, groups] u8, 0 to 15; None: 8
    ordered  as in `pack_int8`

    `packed_linear` takes x of any dtype and quantises each row to 16 bits.  The error against float64 is at most
    inner / 65,000 * max |x| * max |weight| + (2 + groups) / 16 million * sum |x| |weight|, before the last rounding.
    Bits of a row do not depend on the batch, on threads or on the CPU.  Weights dequantised to bfloat16 are rounded to
    it; then x is not rounded, and sums are float32."""
    widen = not ordered and widened_rows() is not None
    columns, _ = torch.ops.quire.product_layout.default(numbers)
    size, inner, together = len(numbers), 2 * numbers.shape[1], 4
    strips = numbers.new_empty(-(-size // columns), inner // together, columns // 2, together)
    step = max(1, PACKED_AT_ONCE // (columns * inner))
    for first in range(0, len(strips), step):
        rows = numbers[first * columns : (first + step) * columns]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % columns))
        single = torch.stack([padded & 0xF, padded >> 4], -1)  # [padded, in / 2, 2]
        low, high = single.view(-1, 2, columns // 2, inner // together, together).unbind(1)
        strips[first : first + step] = (low | high << 4).transpose(1, 2)

    def by_strip(of_groups: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(of_groups, (0, 0, 0, -size % columns))
        return wide.view(len(strips), columns, -1).transpose(1, 2).contiguous()

    half = scale.to(torch.float16)
    exact = torch.equal(half.to(torch.float32), scale)  # true for most checkpoints
    scales, zeros = by_strip(half if exact else scale), None if zero is None else by_strip(zero)
    return Packed(strips, size, not widen, widen=widen, scale=scales, zero=zeros)


PACKED_AT_ONCE = 1 << 20  # elements per step of the packing


def _in_strips(weight: torch.Tensor) -> torch.Tensor:
    """Copy weight [out, in] into the layout of `product`, padded with zeros."""
    size, inner = weight.shape
    columns, together = torch.ops.quire.product_layout.default(weight)
    strips = weight.new_empty(-(-size // columns), -(-inner // together), columns, together)
    step = max(1, PACKED_AT_ONCE // (columns * inner))  # bounds the padded copy of each step
    for first in range(0, len(strips), step):
        rows = weight[first * columns : (first + step) * columns]
        padded = torch.nn.functional.pad(rows, (0, -inner % together, 0, -len(rows) % columns))
        strips[first : first + step] = padded.view(-1, columns, strips.shape[1], together).transpose(1, 2)
    return strips


def packed_linear(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    plus: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
) -> torch.Tensor:
    """x [..., in] times the packed weight transposed, plus bias [out], plus `plus` [..., out], which it may overwrite.

    Sums in float32, rounded once to the dtype of x, or not at all if the weight was packed with `float32_out`.
    `plus` has the dtype of the result.  norm, eps: `rms_norm` of x first.  silu_mul: `silu_mul` of the result,
    without `plus`.
    """
    if not packed.ours:
        x = x if norm is None else rms_norm(x, norm, eps)
        y = _library_linear(x, packed, bias, plus)
        return _silu_mul(y) if silu_mul else y
    if x.dim() != 2:
        flat = x.reshape(-1, x.shape[-1])
        added = None if plus is None else plus.view(-1, plus.shape[-1])
        y = packed_linear(flat, packed, bias, added, norm=norm, eps=eps, silu_mul=silu_mul)
        return y.view(*x.shape[:-1], y.shape[-1]) if plus is None else plus
    y = x if plus is None else plus
    if plus is None:
        size = packed.size // 2 if silu_mul else packed.size
        y = x.new_empty(x.shape[0], size, dtype=torch.float32 if packed.float32_out else None)
    torch.ops.quire.packed_linear.default(
        x, packed.numbers, packed.scale, packed.zero, bias, norm, eps, silu_mul, packed.widen, plus, y
    )
    return y


@dataclass(frozen=True)
class DecoderLayers:
    """Arguments of `decoder_layers` that do not change from step to step."""

    weights: list[torch.Tensor | None]  # 20 per layer, in the order of csrc/ops.cpp
    heads: int
    inner: int  # inputs of the down projection
    eps: float  # of the layer norms; head_eps: of the norms of query and key heads
    head_eps: float
    scale: float
    windows: list[int]
    widen: bool  # as in Packed, for all linear layers


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step that have a LoRA adapter, on a CPU: arguments of `lora` that are equal at all sites."""

    weights: list[torch.Tensor]  # per adapter [elements], dtype of the model: its matrices, packed
    tables: list[torch.Tensor]  # per adapter [sites, 14] int64: where they are (csrc/ops.cpp)
    rows: torch.Tensor  # [n] int32: rows of the step, ascending within an adapter
    starts: torch.Tensor  # [adapters + 1] int32: adapter g has rows[starts[g] : starts[g + 1]]


def packed_layout(dtype: torch.dtype) -> tuple[int, int]:
    """Return (columns of a strip, inputs that lie together) of a weight packed for `packed_linear` on this CPU."""
    columns, together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=dtype))
    return columns, together


LORA_FIELDS, LORA_PARTS = 14, 3  # of a site in a table; linear layers that share a GEMM


def lora(x: torch.Tensor, adapters: AdapterRows, site: int, y: torch.Tensor) -> None:
    """Add to rows of y what their LoRA adapters make of x: y[row] += B A x[row], on a CPU.

    x [T, in], y [T, out] have the model's dtype; rows of y are contiguous.  site: index of the GEMM in the tables.
    Sums are float32; A x is rounded to the dtype.  A row's bits do not depend on the batch; other rows are untouched.
    """
    torch.ops.quire.lora.default(x, adapters.weights, adapters.tables, adapters.rows, adapters.starts, site, y)


# On a GPU, as in csrc/cuda/lora/lora.h: rows per tile; ranks, inputs and features per packed block.
LORA_TILE, LORA_RANKS, LORA_INPUTS, LORA_FEATURES = 32, 16, 32, 32
LORA_ALIGNED = 8  # divisor of a site's inputs, and of the outputs of its layers
_LORA_CTA_INPUTS, _LORA_SPLITS = 32, 8  # blocks of inputs per CTA and round; partial sums that many rows still pay for
_LORA_CTAS = 264  # CTAs that keep a GPU busy: 2 on each of 132 multiprocessors


@dataclass(frozen=True)
class DeviceAdapters:
    """LoRA adapters in the slots of a GPU, and the rows of the running step that have them: arguments of `lora_shrink`
    and `lora_expand` that are equal at all sites.  Every tensor keeps its address."""

    weights: torch.Tensor  # [slots, elements], dtype of the model: packed matrices
    table: torch.Tensor  # [slots, sites, 14] int64: where they are (csrc/ops.cpp)
    order: torch.Tensor  # [rows] int32: rows with an adapter, sorted by slot
    tiles: torch.Tensor  # [tiles, 4] int32: slot (-1: none), first index into order, rows, 0
    slot_of_row: torch.Tensor  # [rows] int32; -1: no adapter
    features: list[list[int]]  # outputs of each layer, per site
    ranks: list[int]  # maximum ranks of a site's layers together
    steps: list[int]  # blocks of inputs, per site


def lora_tiles(rows: int, slots: int) -> int:
    """Return the maximum number of tiles of so many rows."""
    return min(rows, rows // LORA_TILE + slots)


def lora_shrink(x: torch.Tensor, adapters: DeviceAdapters, site: int) -> torch.Tensor:
    """Return A x of the rows with an adapter, in partial sums, for `lora_expand`.  x [T, in], dtype of the model."""
    if x.stride(0) % LORA_ALIGNED or x.data_ptr() % 16:
        x = x.contiguous()
    rows, ranks, steps = len(x), adapters.ranks[site], adapters.steps[site]
    tiles = adapters.tiles[: lora_tiles(rows, len(adapters.weights))]
    at_once = -(-steps // _LORA_CTA_INPUTS)  # splits that leave one round to each CTA
    if rows > LORA_TILE:
        wanted = -(-_LORA_CTAS // (max(1, len(tiles)) * ranks // LORA_RANKS))
        at_once = min(at_once, max(1, min(wanted, _LORA_SPLITS)))
    h = torch.empty(at_once, rows, ranks, dtype=torch.float32, device=x.device)
    where = adapters.weights, adapters.table, adapters.order, tiles
    torch.ops.quire.lora_shrink.default(x, *where, site, h)
    return h


def lora_expand(
    h: torch.Tensor, adapters: DeviceAdapters, site: int, y: torch.Tensor, *, silu_mul: bool = False
) -> torch.Tensor:
    """Add to rows of y [T, out] what their adapters make of x: y[row] += B h, where h is A x.  Returns y.

    Sums are float32, A x is rounded to the dtype of y; rows without an adapter are untouched.

    silu_mul: return silu(gate) * up of the halves of y, for all rows, instead."""
    out = y.new_empty(len(y), y.shape[1] // 2) if silu_mul else None
    tiles = adapters.tiles[: lora_tiles(len(y), len(adapters.weights))]
    where = adapters.weights, adapters.table, adapters.order, tiles, adapters.slot_of_row
    torch.ops.quire.lora_expand.default(h, *where, site, adapters.features[site], y, out)
    return y if out is None else out


def decoder_layers(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layers: DecoderLayers,
    caches: Sequence[LayerCache],
    places: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: torch.Tensor,
    q_start: torch.Tensor,
    lens: torch.Tensor,
    adapters: AdapterRows | None = None,
) -> None:
    """Compute all layers of a decoder on a CPU, in place of x [T, hidden].  Bit-identical to separate operators.

    caches: per layer the key cache, the value cache and their scales.  places: (kv_indices, tables) per group of
    layers.  adapters: sites are 4 * layer + the linear layer (qkv; o; gate and up; down).  Everything else as in
    `rope_kv_write` and `paged_attention`.  Raises ValueError for a layer that reads more tokens than its group keeps.
    """
    keys, values, scales = zip(*((cache.k, cache.v, cache.scales) for cache in caches), strict=True)
    groups = [cache.group for cache in caches]
    for cache, window in zip(caches, layers.windows, strict=False):  # the operator refuses unequal lengths
        if cache.window and not 0 < window <= cache.window:
            raise ValueError(f"a layer reads {window or 'all'} tokens of a cache that keeps {cache.window}")
    step = *zip(*places, strict=True), groups, rows, q_start, lens
    sizes = layers.heads, layers.inner, layers.eps, layers.head_eps, layers.scale, layers.windows, layers.widen
    lora: tuple[object, ...] = ([], [], None, None)
    if adapters is not None:
        lora = adapters.weights, adapters.tables, adapters.rows, adapters.starts
    torch.ops.quire.decoder_layers.default(x, cos, sin, layers.weights, keys, values, scales, *step, *sizes, *lora)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    keeps: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Convolve the channels of each sequence with its newest inputs, on a CPU: [T, channels] -> [T, channels].

    weight      [taps, channels] float32, the newest token's last;  bias [channels] float32
    states      [slots, taps - 1, channels], dtype of x: the inputs before the step, updated in place
    rows        [S] int32, the slot of each sequence; distinct
    q_start     [S + 1] int32, sequence s owns tokens q_start[s] .. q_start[s + 1] - 1
    keeps       [n, 2] int32 (end, place), by ascending end: a copy of the state before token `end` goes there
    silu        applied to the result

    A token's result has the same bits in any batch and any chunking of its prompt.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops.quire.causal_conv.default(x, weight, bias, silu, states, rows, q_start, keeps, out)
    return out


def linear_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    keeps: torch.Tensor | None,
    *,
    q_scale: float = 1.0,
    eps: float = 0.0,
) -> torch.Tensor:
    """Run a linear recurrence over each sequence, on a CPU: [T, heads, values] float32.

    q, k        [T, key_heads, keys], any strides as long as rows of keys are contiguous; heads % key_heads == 0
    v           [T, heads, values], the same dtype
    decay       [T, heads] float32, logarithm of the factor of the old state
    beta        [T, heads] float32: the delta rule; None: plain
    states      [slots, heads, keys, values] float32, updated in place
    rows, q_start, keeps  as in `causal_conv`
    q_scale     factor of q;  eps > 0: q and k become x / sqrt(sum(x^2) + eps) first

    Per token: S = exp(decay) S;  w = beta (v - k^T S), or v;  S = S + k w^T;  out = q^T S.  A token's result has the
    same bits in any batch and any chunking of its prompt.
    """
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    torch.ops.quire.linear_recurrence.default(q, k, v, decay, beta, q_scale, eps, states, rows, q_start, keeps, out)
    return out


def _library_linear(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, plus: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor
    if plus is None:
        y = torch.ops.mkldnn._linear_pointwise(x, packed.numbers, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, plus, packed.numbers, bias, "add")
    return y


def _onednn_bfloat16() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _ordered_is_fast(dtype: torch.dtype) -> bool:
    """Whether our GEMMs are at least as fast as oneDNN's, as measured in docs/notes/kernels/product.md.

    They are slower if oneDNN uses an instruction or matrix tiles (AMX) that this build lacks.
    """
    columns, together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=dtype))
    if dtype == torch.bfloat16:
        return not _onednn_bfloat16() or together == 2
    return columns == 32 or "AVX512" not in torch.backends.cpu.get_cpu_capability()


def set_threads(count: int) -> None:
    """Set the number of threads of our CPU kernels in this process; 0: as many as torch uses for its own."""
    torch.ops.quire.set_threads.default(count)


def drafter_open(slots: int, own: int, recent: int, owners: int) -> int:
    """Return a new drafter (csrc/cpu/drafter.h); `drafter_close` ends it.

    own, recent  tokens that it keeps of a slot and of an owner's answers; owners: most of these"""
    drafter: int = torch.ops.quire.drafter_open.default(slots, own, recent, owners)
    return drafter


def drafter_close(drafter: int) -> None:
    torch.ops.quire.drafter_close.default(drafter)


def drafter_begin(
    drafter: int, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]
) -> None:
    """Follow a sequence in a slot from now on."""
    torch.ops.quire.drafter_begin.default(drafter, slot, owner, tokens, prompt_len, predicted)


def drafter_extend(drafter: int, slot: int, tokens: list[int]) -> None:
    """Append those of a slot's tokens that the drafter has not."""
    length = torch.ops.quire.drafter_length.default(drafter, slot)
    torch.ops.quire.drafter_extend.default(drafter, slot, tokens[length:])


def drafter_find(drafter: int, slots: torch.Tensor, tokens: torch.Tensor, count: int, least: int) -> list[int]:
    """Append a token to each slot.  Returns slot, match, source, count and drafts, for each slot that has some.

    slots, tokens  i64 on the host, of which the first `count` are read"""
    flat: list[int] = torch.ops.quire.drafter_find.default(drafter, slots, tokens, count, least)
    return flat


def drafter_end(drafter: int, slot: int, keep: bool) -> None:
    """Forget a slot; `keep`: its answer is one of its owner's recent ones from now on."""
    torch.ops.quire.drafter_end.default(drafter, slot, keep)


if __name__ == "__main__":
    main()
