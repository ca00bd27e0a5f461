"""Decode and prefill attention over blocks in random order, compared with contiguous cuDNN and with peer figures."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.engine.executor import ops
from quire.loadtest.kernels import peer_figures
from quire.loadtest.kernels.timing import Call, Ceilings, graph_us, sets_for

Row = dict[str, Any]
CONTEXTS, BATCHES = (512, 2048, 8192, 32768), (1, 8, 32, 128, 256)
DECODES = [(32, 8, batch, context) for context in CONTEXTS for batch in BATCHES] + [
    *((64, 8, *point) for point in ((1, 2048), (1, 32768), (32, 2048), (32, 8192), (128, 8192))),
    *((40, 40, *point) for point in ((1, 2048), (32, 2048), (32, 8192), (128, 2048))),
]
# (sequences, minimum length, maximum length): lengths are drawn uniformly.
UNEQUAL = ((4, 64, 700), (16, 64, 700), (32, 64, 700), (256, 64, 700), (16, 200, 1000), (64, 200, 1000), (24, 64, 3000))
PREFILLS = list(peer_figures.PREFILL)


class Memory:
    """Random keys and values shared by all cases, which differ only in their block tables."""

    def __init__(self, tokens: int) -> None:
        """tokens: capacity in tokens of 8 KV heads x 128 bf16 elements, 4 KiB each."""
        self.keys, self.values = (
            torch.empty(tokens * 1024, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)
        )
        self._e4m3: tuple[Tensor, Tensor] | None = None

    def caches(self, kv_heads: int, block: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """View as [blocks, Hkv, block, D], as many blocks as fit; for e4m3 a copy of at most 2 GiB per tensor."""
        sides = (self.keys, self.values)
        if dtype == torch.float8_e4m3fn:
            if self._e4m3 is None:
                self._e4m3 = (sides[0][: 1 << 31].to(dtype), sides[1][: 1 << 31].to(dtype))
            sides = self._e4m3
        blocks = sides[0].numel() // (kv_heads * block * head_size)
        shape = (blocks, kv_heads, block, head_size)
        return sides[0][: math.prod(shape)].view(shape), sides[1][: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class Case:
    """One attention call; the queries are the last `queries` positions of each sequence."""

    heads: int
    kv_heads: int
    lens: tuple[int, ...]
    queries: int = 1
    block: int = 16
    head_size: int = 128
    window: int = 0
    kv_dtype: torch.dtype = torch.bfloat16
    in_order: bool = False  # consecutive blocks, to measure only the address arithmetic of paging

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        seen = sum(min(n, self.window + self.queries - 1) if self.window else n for n in self.lens)
        return 2 * seen * self.kv_heads * self.head_size * self.kv_dtype.itemsize

    @property
    def flops(self) -> int:
        """FLOPs of both GEMMs, without causally masked pairs."""
        n = self.queries
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for length in self.lens)
        return 4 * self.heads * self.head_size * pairs


class PagedCall:
    """A case with its own blocks."""

    def __init__(self, case: Case, k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> None:
        """`blocks`: block ids for all sequences together."""
        self.case, self.k_cache, self.v_cache = case, k_cache, v_cache
        seqs, tokens = len(case.lens), len(case.lens) * case.queries
        needed = [-(-n // case.block) for n in case.lens]
        if len(set(needed)) == 1:
            self.tables = blocks.view(seqs, needed[0])
        else:
            self.tables = torch.nn.utils.rnn.pad_sequence(list(blocks.split(needed)), batch_first=True)
        self.rows = torch.arange(seqs, device="cuda", dtype=torch.int32)
        self.q_start = torch.arange(seqs + 1, device="cuda", dtype=torch.int32) * case.queries
        self.lens = torch.tensor(case.lens, device="cuda", dtype=torch.int32)
        self.q = torch.randn(tokens, case.heads, case.head_size, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, math.nan)
        self.scales = torch.ones(2, case.kv_heads, device="cuda") if case.kv_dtype.itemsize == 1 else None
        self.decodes = seqs if case.queries == 1 else 0
        sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_size": case.head_size}
        size = ops.attention_plan_bytes(torch.device("cuda"), max_seqs=seqs, max_tokens=tokens, **sizes)
        self.plan = torch.zeros(size, device="cuda", dtype=torch.uint8)
        self.make_plan()

    def make_plan(self) -> None:
        """Run the planner, once per step and not per layer, so it is timed separately."""
        case = self.case
        ops.attention_plan(
            self.q_start, self.lens, self.decodes, case.heads, case.kv_heads, case.head_size, case.window, self.plan
        )

    def __call__(self) -> None:
        ops.paged_attention(
            *(self.q, self.k_cache, self.v_cache, self.tables, self.rows, self.q_start, self.lens),
            *(self.case.head_size**-0.5, self.case.window, 0.0, self.out),
            decodes=self.decodes,
            plan=self.plan,
            scales=self.scales,
        )

    def error(self) -> float:
        """Relative error of a call against float64; NaN if an output was not written."""
        case = self.case
        self()
        worst = 0.0
        for i, length in enumerate(case.lens):
            blocks = self.tables[i, : -(-length // case.block)].long()
            k, v = (
                cache[blocks]
                .double()
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(case.heads // case.kv_heads, 0)
                for cache in (self.k_cache, self.v_cache)
            )
            at = slice(i * case.queries, (i + 1) * case.queries)
            scores = self.q[at].double().transpose(0, 1) @ k.transpose(1, 2) * case.head_size**-0.5
            later = torch.ones(case.queries, length, device="cuda").triu(length - case.queries + 1).bool()
            want = (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(0, 1)
            error = float((self.out[at].double() - want).norm() / want.norm())
            worst = error if not error <= worst else worst
        return worst


def paged(case: Case, memory: Memory, sets: int) -> list[PagedCall]:
    """Return calls of the case in `sets` disjoint regions of the memory, or in as many as fit."""
    k_cache, v_cache = memory.caches(case.kv_heads, case.block, case.head_size, case.kv_dtype)
    needed = sum(-(-n // case.block) for n in case.lens)
    sets = max(1, min(sets, k_cache.shape[0] // needed))
    pick = torch.arange if case.in_order else torch.randperm
    ids = pick(k_cache.shape[0], device="cuda", dtype=torch.int32)
    return [PagedCall(case, k_cache, v_cache, ids[i * needed : (i + 1) * needed]) for i in range(sets)]


def contiguous(case: Case, memory: Memory, sets: int) -> list[Call]:
    """Return calls of torch's SDPA on contiguous tensors of equal length; complete prompts or one query."""
    shape = (len(case.lens), case.kv_heads, case.lens[0], case.head_size)
    each = math.prod(shape)
    sets = max(1, min(sets, memory.keys.numel() // each))

    def call(i: int) -> Call:
        k, v = (side[i * each : (i + 1) * each].view(shape) for side in (memory.keys, memory.values))
        q = torch.randn(shape[0], case.queries, case.heads, case.head_size, device="cuda", dtype=torch.bfloat16)
        q, causal, grouped = q.transpose(1, 2), case.queries > 1, case.heads > case.kv_heads
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return [call(i) for i in range(sets)]


def cudnn_us(case: Case, memory: Memory, sets: int) -> float | None:
    """Microseconds of cuDNN's attention; None if this cuDNN does not support the shape."""
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return graph_us(contiguous(case, memory, sets))
    except RuntimeError:
        return None


def correctness(memory: Memory) -> Iterator[Row]:
    """Check a few ragged calls against float64 before timing."""
    for case in (
        Case(32, 8, (1, 16, 17, 300, 1025)),
        Case(40, 40, (129, 64)),
        Case(32, 8, (300, 177), queries=100),
        Case(64, 8, (2049,), queries=2049),
    ):
        (call,) = paged(case, memory, 1)
        error = call.error()
        name = f"{case.heads}/{case.kv_heads}, {case.queries} queries, lengths {case.lens}"
        yield {"case": name, "error": error}
        if not error < 0.01:
            raise SystemExit(f"wrong: attention {name} has relative error {error}")


def decode(memory: Memory, top: Ceilings, *, quick: bool, peers: bool) -> Iterator[Row]:
    """Decode attention: bandwidth, as bytes of keys and values per time."""
    for heads, kv_heads, batch, context in DECODES:
        case = Case(heads, kv_heads, (context,) * batch)
        if case.kv_bytes > memory.keys.nbytes * 2 or (quick and case.kv_bytes > 2 << 30):
            continue
        sets = sets_for(case.kv_bytes)
        us = graph_us(paged(case, memory, sets))
        row = _decode_row(f"{heads}/{kv_heads} {batch} x {context}", case, us, top)
        if not quick:
            row["cudnn_flat_us"] = cudnn_us(case, memory, sets)
        figures = peer_figures.DECODE.get((heads, kv_heads, batch, context)) if peers else None
        if figures and case.kv_bytes * 8 < 128 << 20:
            # As in the peers' measurement: 8 alternating regions, which stay in L2.
            row["warm_us"] = graph_us(paged(case, memory, 8))
        yield row | _beside(us, row.get("warm_us"), figures)


def decode_variants(memory: Memory, top: Ceilings) -> Iterator[Row]:
    """Time decode attention by paging, block size, cache dtype, ragged lengths and window, and planning by itself."""
    for batch, context in ((8, 2048), (32, 8192)):
        base = Case(32, 8, (context,) * batch)
        variants = {"random": base, "consecutive": _with(base, in_order=True)}
        variants |= {f"block {size}": _with(base, block=size) for size in (8, 32, 64)}
        variants |= {"e4m3": _with(base, kv_dtype=torch.float8_e4m3fn), "window 1024": _with(base, window=1024)}
        variants |= {f"head size {size}": _with(base, head_size=size) for size in (64, 80, 96, 256)}
        first = 0.0
        for name, case in variants.items():
            try:
                us = graph_us(paged(case, memory, sets_for(case.kv_bytes)))
            except (ValueError, RuntimeError) as error:
                yield {"case": f"32/8 {batch} x {context}, {name}", "error": str(error).splitlines()[0]}
                continue
            first = first or us
            yield _decode_row(f"32/8 {batch} x {context}, {name}", case, us, top) | {"time_over_random": us / first}
    ragged = Case(32, 8, (32768,) + (512,) * 255)
    calls = paged(ragged, memory, 2)
    yield _decode_row("32/8 one of 32768 among 255 of 512", ragged, graph_us(calls), top)
    for batch, least, most in UNEQUAL:
        rng = random.Random(batch)
        unequal = Case(32, 8, tuple(rng.randint(least, most) for _ in range(batch)))
        us = graph_us(paged(unequal, memory, sets_for(unequal.kv_bytes)))
        yield _decode_row(f"32/8 {batch} of {least} to {most}", unequal, us, top)
    for batch in (1, 32, 256, 1024):
        (call,) = paged(Case(32, 8, (512,) * batch), memory, 1)
        yield {"case": f"plan of {batch} decodes, once a step", "us": graph_us([call.make_plan])}


def prefill(memory: Memory, top: Ceilings, *, quick: bool, peers: bool) -> Iterator[Row]:
    """TFLOP/s of causal attention: complete prompts, and chunks after cached tokens."""
    for heads, kv_heads, batch, queries, before in PREFILLS:
        if quick and heads != 32:
            continue
        case = Case(heads, kv_heads, (queries + before,) * batch, queries)
        sets = sets_for(case.kv_bytes, 8)
        us = graph_us(paged(case, memory, sets))
        row: Row = {
            "case": f"{heads}/{kv_heads} {batch} x {queries} + {before}",
            "us": us,
            "tflops": case.flops / us / 1e6,
            "of_ceiling": case.flops / us / 1e6 / top.matmul_8192_tflops,
            "floor_us": top.floor_us(case.kv_bytes, case.flops),
        }
        if not quick and not before:
            row["cudnn_flat_us"] = cudnn_us(case, memory, sets)
        yield row | _beside(us, None, peer_figures.PREFILL[heads, kv_heads, batch, queries, before] if peers else None)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**(case.__dict__ | changes))


def _decode_row(name: str, case: Case, us: float, top: Ceilings) -> Row:
    gbps = case.kv_bytes / us / 1e3
    return {
        "case": name,
        "us": us,
        "gbps": gbps,
        "of_ceiling": gbps / top.read_gbps,
        "floor_us": top.floor_us(case.kv_bytes),
    }


def _beside(us: float, warm_us: float | None, figures: tuple[float | None, ...] | None) -> Row:
    """The fastest peer, and our time relative to it (below 1: we are faster)."""
    best = peer_figures.best_paged(figures)
    if best is None:
        return {}
    return {
        "best_paged_us": best,
        "best_flat_us": peer_figures.best_flat(figures),
        "time_over_best": (warm_us or us) / best,
    }
