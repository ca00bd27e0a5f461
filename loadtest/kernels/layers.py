"""Operators around attention, and linear layers: compared with the bytes they must move and with torch's operators."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.engine.executor import ops
from quire.loadtest.kernels.timing import Call, Ceilings, elapsed_us, graph_us, sets_for

Row = dict[str, Any]
HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def row(name: str, size: int, make: Callable[[], Call], torchs: Callable[[], Call] | None, top: Ceilings) -> Row:
    """One row: `make` returns a call that moves `size` bytes in its own buffers, `torchs` torch's equivalent."""
    sets = sets_for(size, 64)
    us = graph_us([make() for _ in range(sets)])
    gbps = size / us / 1e3
    found: Row = {"case": name, "us": us, "floor_us": top.floor_us(size), "gbps": gbps}
    found["of_ceiling"] = gbps / top.read_gbps
    if torchs:
        found["torch_us"] = graph_us([torchs() for _ in range(sets)])
    return found


def layers(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Llama 8B's sizes: hidden 4096, intermediate 14336, heads 32/8."""
    hidden, inter = 4096, 14336
    weight = random(hidden)

    def norm(tokens: int) -> Call:
        x = random(tokens, hidden)
        return lambda: ops.rms_norm(x, weight, 1e-5)

    def torch_norm(tokens: int) -> Call:
        x = random(tokens, hidden)
        return lambda: functional.rms_norm(x, (hidden,), weight, 1e-5)

    def silu(tokens: int) -> Call:
        x = random(tokens, 2 * inter)
        return lambda: ops.silu_mul(x)

    def torch_silu(tokens: int) -> Call:
        x = random(tokens, 2 * inter)
        return lambda: functional.silu(x[:, :inter]) * x[:, inter:]

    def rope(tokens: int, normed: bool) -> Call:
        qkv = random(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        cos, sin = random(tokens, HEAD_SIZE), random(tokens, HEAD_SIZE)
        k_cache, v_cache = (random(-(-tokens // BLOCK) + 1, KV_HEADS, BLOCK, HEAD_SIZE) for _ in range(2))
        kv_indices = torch.randperm(k_cache.shape[0] * BLOCK, device="cuda")[:tokens]
        norms: dict[str, Any] = (
            {"q_norm": random(HEAD_SIZE), "k_norm": random(HEAD_SIZE), "eps": 1e-6} if normed else {}
        )
        return lambda: ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, kv_indices, **norms)

    def write(tokens: int) -> Call:
        key, value = (random(tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
        k_cache, v_cache = (random(-(-tokens // BLOCK) + 1, KV_HEADS, BLOCK, HEAD_SIZE) for _ in range(2))
        kv_indices = torch.randperm(k_cache.shape[0] * BLOCK, device="cuda")[:tokens]
        return lambda: ops.kv_write(key, value, k_cache, v_cache, kv_indices)

    for n in (1, 256, 8192) if quick else (1, 8, 32, 256, 1024, 8192):
        yield row(f"rms_norm {n} x {hidden}", 4 * n * hidden, partial(norm, n), partial(torch_norm, n), top)
        yield row(f"silu_mul {n} x {inter}", 6 * n * inter, partial(silu, n), partial(torch_silu, n), top)
        turned = n * HEAD_SIZE * 2 * (2 * (HEADS + 2 * KV_HEADS) + 2)
        yield row(f"rope_kv_write {n}, {HEADS}/{KV_HEADS}", turned, partial(rope, n, False), None, top)
        yield row(f"rope_kv_write {n}, heads normed", turned, partial(rope, n, True), None, top)
        yield row(f"kv_write {n}, {KV_HEADS} KV heads", 8 * n * KV_HEADS * HEAD_SIZE, partial(write, n), None, top)


def cache(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Copy-on-write of blocks in all layers (32 layers, 8 KV heads, blocks of 16: 2 MiB per block) and swapping."""
    caches = [random(512, KV_HEADS, BLOCK, HEAD_SIZE) for _ in range(64)]
    block_bytes = sum(one[0].nbytes for one in caches)

    def one_by_one(pairs: list[list[int]]) -> None:
        for source, target in pairs:
            for one in caches:
                one[target].copy_(one[source])

    for count in (1, 4, 16, 64):
        pairs = torch.randperm(512)[: 2 * count].view(count, 2)
        size = 2 * count * block_bytes
        us = graph_us([partial(ops.block_copy, caches, pairs.cuda())])
        found = {"us": us, "floor_us": top.floor_us(size), "gbps": size / us / 1e3}
        if count <= 4:
            found["torch_us"] = graph_us([partial(one_by_one, pairs.tolist())])
        yield {"case": f"block_copy {count} x 64 caches"} | found
    blocks = torch.randperm(512, device="cuda")[:64]
    size = 64 * block_bytes
    us = graph_us([partial(ops.block_fill, caches, blocks, 0.0)])
    yield {"case": "block_fill 64 x 64 caches", "us": us, "floor_us": top.floor_us(size), "gbps": size / us / 1e3}
    # Swapping, as engine/executor/swap.py does it: gathered in device memory, then over the bus in one copy.
    shape = (64, len(caches), caches[0][0].nbytes)
    staging = torch.empty(shape, dtype=torch.uint8, device="cuda")
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def swap_out() -> None:
        ops.block_gather(caches, blocks, staging)
        host.copy_(staging, non_blocking=True)

    def swap_in() -> None:
        staging.copy_(host, non_blocking=True)
        ops.block_scatter(staging, blocks, caches)

    moves: dict[str, Call] = {
        "bus, to the host": lambda: host.copy_(staging, non_blocking=True),
        "bus, from the host": lambda: staging.copy_(host, non_blocking=True),
        "swap out 64 blocks": swap_out,
        "swap in 64 blocks": swap_in,
    }
    for name, call in moves.items():
        us = min(elapsed_us([call]) for _ in range(5))
        yield {"case": name, "us": us, "gbps": staging.nbytes / us / 1e3}


LINEARS = {  # (out, in) of the weights, silu_mul
    "8B qkv": (6144, 4096, False),
    "8B o": (4096, 4096, False),
    "8B gate_up": (28672, 4096, True),
    "8B down": (4096, 14336, False),
    "8B head": (128256, 4096, False),
    "0.6B qkv": (4096, 1024, False),
    "0.6B o": (1024, 2048, False),
    "0.6B gate_up": (6144, 1024, True),
    "0.6B down": (1024, 3072, False),
    "0.6B head": (151936, 1024, False),
}


def linear(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Linear layers of llama 8B and Qwen3 0.6B; the floor is the maximum of reading the weights and multiplying."""

    def product(tokens: int, size: tuple[int, int, bool]) -> Call:
        (features, inner, silu), x = size, random(tokens, size[1])
        weight = random(features, inner)
        return lambda: ops.linear(x, weight, silu_mul=silu)

    def torch_product(tokens: int, size: tuple[int, int, bool]) -> Call:
        x, weight = random(tokens, size[1]), random(*size[:2])
        return lambda: functional.linear(x, weight)

    for name, size in LINEARS.items():
        for tokens in (1, 32, 256) if quick else (1, 8, 16, 32, 64, 128, 256, 512, 1024):
            read, flops = 2 * size[0] * size[1], 2 * size[0] * size[1] * tokens
            sets = sets_for(read, 32)
            us = graph_us([product(tokens, size) for _ in range(sets)])
            floor = top.floor_us(read, flops)
            found = {"us": us, "floor_us": floor, "gbps": read / us / 1e3, "tflops": flops / us / 1e6}
            found |= {"of_ceiling": floor / us}
            found["torch_us"] = graph_us([torch_product(tokens, size) for _ in range(sets)])
            yield {"case": f"{name} {tokens} x {size[1]} -> {size[0]}"} | found


def fp8(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Linear layers of llama 8B with fp8 weights, scaled per 128 x 128 block or per row, and with bf16 weights."""

    def product(tokens: int, size: tuple[int, int, bool], scale: tuple[int, ...]) -> Call:
        (features, inner, silu), x = size, random(tokens, size[1])
        plain = random(features, inner)
        if not scale:
            return lambda: ops.linear(x, plain, silu_mul=silu)
        weight = ops.Fp8(plain.to(torch.float8_e4m3fn), torch.ones(scale, device="cuda"))
        return lambda: ops.linear(x, weight, silu_mul=silu)

    for tokens in (1, 32, 256) if quick else (1, 4, 8, 32, 64, 128, 256, 1024, 2048):
        for name in ("8B qkv", "8B o", "8B gate_up", "8B down"):
            size = LINEARS[name]
            features, inner, _ = size
            read, flops = features * inner, 2 * features * inner * tokens
            scales: dict[str, tuple[int, ...]] = {
                "us": (features // 128, inner // 128),
                "rows_us": (features,),
                "bf16_us": (),
            }
            found: Row = {"case": f"{name} {tokens} x {inner} -> {features}"}
            for column, scale in scales.items():
                found[column] = graph_us([product(tokens, size, scale) for _ in range(sets_for(read, 32))])
            # fp8 has twice the FLOP rate.
            yield found | {"floor_us": top.floor_us(read, flops / 2)}


def int4(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Linear layers of llama 8B with int4 weights, in groups of 128 or 32 inputs, with fp8 and with bf16 weights."""

    def weight_of(features: int, inner: int, stored: str) -> Tensor | ops.Fp8 | ops.Int4:
        if not stored:
            return random(features, inner)
        if stored == "fp8":
            return ops.Fp8(random(features, inner).to(torch.float8_e4m3fn), torch.ones(features, device="cuda"))
        numbers = torch.randint(0, 256, (features, inner // 2), device="cuda", dtype=torch.uint8)
        scale = torch.rand(features, inner // int(stored), device="cuda")
        return ops.pack_int4_gpu(numbers, scale, torch.full_like(scale, 7, dtype=torch.uint8))

    def product(x: Tensor, weight: Tensor | ops.Fp8 | ops.Int4, silu: bool) -> Call:
        return lambda: ops.linear(x, weight, silu_mul=silu)

    columns = {"us": "128", "groups_of_32_us": "32", "fp8_us": "fp8", "bf16_us": ""}
    for name in ("8B qkv", "8B o", "8B gate_up", "8B down"):
        features, inner, silu = LINEARS[name]
        sets = sets_for(features * inner // 2, 32)
        weights = {
            column: [weight_of(features, inner, stored) for _ in range(sets)] for column, stored in columns.items()
        }
        for tokens in (1, 16, 256) if quick else (1, 2, 4, 8, 16, 32, 64, 256):
            found: Row = {"case": f"{name} {tokens} x {inner} -> {features}"}
            for column, those in weights.items():
                found[column] = graph_us([product(random(tokens, inner), weight, silu) for weight in those])
            read = features * inner * (4 + 24 / 128) / 8  # scale and zero point: 24 bits per group
            yield found | {"floor_us": top.floor_us(read, 2 * features * inner * tokens)}


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture-of-experts layer."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    clamped: ops.Clamped | None = None  # with biases, if set

    def weights(self) -> dict[str, Any]:
        """Make the weight arguments of `ops.experts`."""
        made: dict[str, Any] = {
            "gate_up": random(self.experts, 2 * self.inner, self.hidden),
            "down": random(self.experts, self.hidden, self.inner),
        }
        if self.clamped:
            made |= {"gate_up_bias": random(self.experts, 2 * self.inner), "clamped": self.clamped}
            made |= {"down_bias": random(self.experts, self.hidden)}
        return made

    @property
    def format(self) -> ops.Format:
        """Format of quantised weights: mxfp4 as gpt-oss has them, else fp8."""
        return "mxfp4" if self.clamped else "fp8"

    def packed_weights(self) -> dict[str, Any]:
        """Make the arguments with quantised weights."""
        made = self.weights()
        for weight in ("gate_up", "down"):
            shape = made[weight].shape
            if self.format == "fp8":
                scales = torch.rand(*shape[:2], 1, device="cuda")
                made[weight] = ops.pack_fp8(made[weight].to(torch.float8_e4m3fn), scales)
                continue
            groups = (*shape[:2], shape[2] // 32)
            blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, device="cuda")
            scales = torch.randint(118, 124, groups, dtype=torch.uint8, device="cuda")
            made[weight] = ops.pack_mxfp4(blocks, scales, interleaved=weight == "gate_up")
        return made


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, ops.Clamped(1.702, 7.0)),
}


def routing(kind: str, mixture: Mixture, tokens: int) -> Tensor:
    """Draw the experts of each token: [tokens, chosen] int32, distinct per token.

    balanced: uniform.  zipf: expert i is 1 / (i + 1) times as probable as expert 0.  same: the first ones."""
    if kind == "same":
        return torch.arange(mixture.chosen, device="cuda", dtype=torch.int32).repeat(tokens, 1)
    share = torch.ones(mixture.experts, device="cuda")
    if kind == "zipf":
        share /= torch.arange(1, mixture.experts + 1, device="cuda")
    return torch.multinomial(share.expand(tokens, -1), mixture.chosen).int()


EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 72, 96, 128, 256, 512, 2048, 8192)
MANY_TOKENS = 512  # number of tokens above which the routing hardly affects the time


def experts_of(name: str, mixture: Mixture, top: Ceilings, *, quick: bool) -> Iterator[Row]:
    yield from experts_with(name, mixture, top, mixture.weights, 2, quick=quick)
    if ops.takes_all_pairs(mixture.hidden, mixture.inner, torch.device("cuda")):
        size = {"mxfp4": 17 / 32, "fp8": 1}[mixture.format]
        yield from experts_with(f"{name} in {mixture.format}", mixture, top, mixture.packed_weights, size, quick=quick)


def experts_with(
    name: str, mixture: Mixture, top: Ceilings, make: Callable[[], dict[str, Any]], bytes_each: float, *, quick: bool
) -> Iterator[Row]:
    """Time a mixture whose weights `make` creates, with `bytes_each` bytes per value."""
    sets, numbers_of_one = 4, 3 * mixture.hidden * mixture.inner
    weights = [make() for _ in range(sets)]
    for tokens in EXPERT_TOKENS[::4] if quick else EXPERT_TOKENS:
        taken = ops.takes_all_pairs(mixture.hidden, mixture.inner, torch.device("cuda"))
        if not taken and tokens * mixture.chosen > ops.MAX_PAIRS:
            continue
        for kind in ("balanced", "zipf", "same"):
            routings = [routing(kind, mixture, tokens) for _ in range(5 * sets if tokens <= MANY_TOKENS else sets)]

            def call(at: int, routings: list[Tensor] = routings, tokens: int = tokens) -> Call:
                x, plus = random(tokens, mixture.hidden), random(tokens, mixture.hidden)
                shares = torch.rand(tokens, mixture.chosen, device="cuda")
                return lambda: ops.experts(x, routings[at], shares, plus=plus, **weights[at % sets])

            us = graph_us([call(at) for at in range(len(routings))])
            read = sum(len(chosen.unique()) for chosen in routings) / len(routings)
            floor = top.floor_us(int(bytes_each * read * numbers_of_one), 2 * tokens * mixture.chosen * numbers_of_one)
            case = f"{name}, {tokens} tokens, {kind}"
            yield {"case": case, "us": us, "floor_us": floor, "experts_read": round(read, 1)}


def experts(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Experts of a layer; the floor is the maximum of reading the chosen experts and computing."""
    for name, mixture in MIXTURES.items():
        yield from experts_of(name, mixture, top, quick=quick)


def slot_settings(count: int, *, marks: Tensor | None = None, **asked: float) -> Tensor:
    """A table of `count` slots with equal settings: [count, 9] i64, each a Settings of csrc/sampling_rules.h."""
    wish = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0} | asked
    scale = math.log2(math.e) / wish["temperature"] if wish["temperature"] else 0.0
    records = b"".join(
        struct.pack(
            "<qQQQiiiiffffff",
            *(i, 0 if marks is None else marks[i].data_ptr(), 0, 0),
            *(0, 64, int(wish["top_k"]), 0),
            *(scale, wish["top_p"], wish["min_p"], wish["repetition"], wish["presence"], 0.0),
        )
        for i in range(count)
    )
    return torch.frombuffer(bytearray(records), dtype=torch.int64).view(count, 9).cuda()


def sampling(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Sampling of one token per row of bf16 logits; the floor is one read of the logits."""
    wishes: dict[str, dict[str, float]] = {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
        "top_k 50, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
        "penalties, top_p 0.9": {"temperature": 0.8, "top_p": 0.9, "repetition": 1.1, "presence": 0.5},
    }

    def sample(count: int, vocab: int, wish: dict[str, float]) -> Call:
        logits = random(count, vocab) * 3
        marks = None
        if "repetition" in wish:
            marks = torch.randint(0, 50, (count, vocab), device="cuda", dtype=torch.int32)
            marks = marks.eq(1).int()  # 2 % of the vocabulary occurs in the output
        table = slot_settings(count, marks=marks, **wish)
        who = torch.arange(count, device="cuda")
        known = torch.full_like(who, 100)
        tokens, outcome = torch.empty_like(who), torch.empty(count, device="cuda", dtype=torch.uint8)

        def call(marks: Tensor | None = marks) -> None:  # keeps the tensor alive that the table points to
            ops.sample(logits, who, known, table, bool(wish), tokens, outcome)

        return call

    def draw(count: int, vocab: int) -> Call:
        logits = random(count, vocab) * 3
        return lambda: torch.multinomial(torch.softmax(logits.float() / 0.8, -1), 1)

    for vocab in (128256,) if quick else (32000, 128256, 151936):
        for count in (1, 32, 256) if quick else (1, 32, 256, 1024):
            for name, wish in wishes.items():
                size = 2 * count * vocab * (3 if "repetition" in wish else 1)
                torchs = partial(draw, count, vocab) if name == "temperature" else None
                yield row(f"{count} x {vocab}, {name}", size, partial(sample, count, vocab, wish), torchs, top)


TABLES: dict[str, tuple[str, Callable[..., Iterator[Row]]]] = {
    "layers": ("between the GEMMs; ceiling: bytes moved (torch: its own operators)", layers),
    "cache": ("blocks of all layers (torch: one copy after another)", cache),
    "linear": ("GEMMs; ceiling: reading the weights or FLOPs (torch: only the GEMM, by cuBLAS)", linear),
    "fp8": ("GEMMs with e4m3 weights, scales per block", fp8),
    "int4": ("GEMMs with int4 weights, groups of 128", int4),
    "experts": ("experts of a mixture; ceiling: reading the chosen experts or FLOPs", experts),
    "sampling": ("sampling; ceiling: one read of the logits (torch: softmax and multinomial)", sampling),
}
