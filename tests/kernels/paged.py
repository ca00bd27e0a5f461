"""Batches for paged_attention on any device: known keys and values in a cache that is NaN everywhere else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch

from quire.engine.executor import ops

NAN = math.nan
E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass
class Batch:
    """Sequences with known keys and values in a cache that is NaN everywhere else."""

    q: torch.Tensor  # [T, H, D]
    keys: list[torch.Tensor]  # [len, Hkv, D] per sequence
    values: list[torch.Tensor]
    k_cache: torch.Tensor  # [blocks, Hkv, block_size, D]
    v_cache: torch.Tensor
    tables: torch.Tensor  # [max_rows, max_blocks] int32
    rows: torch.Tensor  # [S] int32
    q_start: torch.Tensor  # [S + 1] int32
    lens: torch.Tensor  # [S] int32
    scales: torch.Tensor | None  # [2, Hkv] with an e4m3 cache

    def attend(
        self,
        window: int = 0,
        soft_cap: float = 0.0,
        scale: float | None = None,
        decodes: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Plan, then attention into an output of NaN.  decodes: by default the number of leading decodes."""
        out = torch.full_like(self.q, NAN)
        heads, dim = self.q.shape[-2:]
        kv_heads = self.k_cache.shape[1]
        if decodes is None:
            several = (self.q_start.diff() > 1).tolist()
            decodes = several.index(True) if True in several else len(several)
        size = ops.attention_plan_bytes(
            self.q.device,
            max_seqs=len(self.rows),
            max_tokens=len(self.q),
            heads=heads,
            kv_heads=kv_heads,
            head_size=dim,
        )
        plan = torch.full((size,), 255, dtype=torch.uint8, device=self.q.device)
        ops.attention_plan(self.q_start, self.lens, decodes, heads, kv_heads, dim, window, plan)
        ops.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.tables,
            self.rows,
            self.q_start,
            self.lens,
            dim**-0.5 if scale is None else scale,
            window,
            soft_cap,
            out,
            decodes=decodes,
            plan=plan,
            scales=self.scales,
            sinks=None if sinks is None else sinks.to(self.q.device),
        )
        return out

    def only(self, s: int, chunk: slice = slice(None)) -> Batch:
        """Sequence `s` alone; with `chunk`, only these of its queries, as before the later ones are computed."""
        begin, end = self.q_start[s : s + 2].tolist()
        first, last, _ = chunk.indices(end - begin)
        return dataclasses.replace(
            self,
            q=self.q[begin + first : begin + last],
            rows=self.rows[s : s + 1],
            q_start=torch.tensor([0, last - first], dtype=torch.int32, device=self.q.device),
            lens=self.lens[s : s + 1] - (end - begin - last),
        )

    def to(self, device: str) -> Batch:
        """Copy to another device; keys and values, which only the reference reads, are not copied."""
        moved = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **cast(dict[str, Any], moved))


def make_batch(
    lens: list[int],
    queries: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    e4m3: bool = False,
    seed: int = 0,
    spread: float = 1.0,
) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    scales = torch.rand(2, kv_heads, generator=rng) + 0.01 if e4m3 else None

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    # Drawn first, so that they don't depend on the block size.
    q = normal(sum(queries), heads, dim) * spread
    keys = [normal(n, kv_heads, dim).to(E4M3 if e4m3 else dtype) for n in lens]
    values = [normal(n, kv_heads, dim).to(E4M3 if e4m3 else dtype) for n in lens]
    needed = [-(-n // block_size) for n in lens]
    blocks = sum(needed) + 3
    free = torch.randperm(blocks, generator=rng).tolist()
    max_rows, max_blocks = len(lens) + 2, max([1, *needed]) + 1
    cache = torch.full((blocks, kv_heads, block_size, dim), NAN, dtype=dtype).to(E4M3 if e4m3 else dtype)
    batch = Batch(
        q=q,
        keys=keys,
        values=values,
        k_cache=cache,
        v_cache=cache.clone(),
        tables=torch.full((max_rows, max_blocks), -7, dtype=torch.int32),
        rows=torch.randperm(max_rows, generator=rng)[: len(lens)].int(),
        q_start=torch.tensor([0, *torch.tensor(queries, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32),
        lens=torch.tensor(lens, dtype=torch.int32),
        scales=scales,
    )
    for s, (row, length) in enumerate(zip(batch.rows.tolist(), lens, strict=True)):
        for i in range(needed[s]):
            block = free.pop()
            batch.tables[row, i] = block
            part = slice(i * block_size, min((i + 1) * block_size, length))
            batch.k_cache[block, :, : part.stop - part.start] = keys[s][part].transpose(0, 1)
            batch.v_cache[block, :, : part.stop - part.start] = values[s][part].transpose(0, 1)
    if scales is not None:
        batch.keys = [stored.double() * scales[0, :, None].double() for stored in keys]
        batch.values = [stored.double() * scales[1, :, None].double() for stored in values]
    return batch


def reference(
    batch: Batch,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    compute: torch.dtype = torch.float64,
    store: torch.dtype | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference attention, one sequence at a time, computed in `compute`, rounded to `store`; returned as float64."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    heads, dim = batch.q.shape[1:]
    for s, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        begin, end = batch.q_start[s : s + 2].tolist()
        length = int(batch.lens[s])
        if length == 0:
            continue
        q = batch.q[begin:end].cpu().to(compute)
        group = heads // keys.shape[1]
        k = keys[:length].to(compute).repeat_interleave(group, dim=1)
        v = values[:length].to(compute).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if scale is None else scale)
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)[None]
        seen = (distance >= 0) & ((distance < window) if window else True)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks.to(compute)[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], 2)
        weights = scores.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(store or compute).double()
    return out


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error of a tensor: rms of the difference over rms of the exact values."""
    assert actual.isfinite().all()
    return float((actual.cpu().double() - exact).norm() / exact.norm())


def check_sinks(batch: Batch, tolerance: float, window: int = 0, soft_cap: float = 0.0) -> None:
    """Check attention on a GPU against the reference, with sinks from negligible to dominant.

    Heads are compared one by one, because a dominant sink leaves small results."""
    heads = batch.q.shape[1]
    sinks = torch.linspace(-3, 8, heads)
    sinks[1] = -math.inf
    exact = reference(batch, window, soft_cap, sinks=sinks)
    out = batch.to("cuda").attend(window, soft_cap, sinks=sinks)
    for head in range(heads):
        assert error(out[:, head], exact[:, head]) <= 2 * tolerance, f"head {head}"
    assert error(out, exact) <= tolerance
