"""Operators of Gated DeltaNet layers, with the sizes of Qwen3.5 9B, compared with the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.loadtest.kernels.layers import Row, random, row
from quire.loadtest.kernels.timing import Call, Ceilings

HEADS, KEY_HEADS, SIZE, TAPS = 32, 16, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
STATE = HEADS * SIZE * SIZE * 4  # bytes of a sequence


def rows(top: Ceilings, *, quick: bool) -> Iterator[Row]:
    """Decode steps of many sequences, then one prompt.  The bytes are those of inputs, outputs and states."""
    steps = [(n, n) for n in ((1, 256) if quick else (1, 8, 32, 128, 256))]
    steps += [(1, tokens) for tokens in ((2048,) if quick else (64, 512, 2048, 8192))]
    for sequences, tokens in steps:
        name = f"{sequences} decoding" if sequences == tokens else f"prompt of {tokens}"
        states = 2 * sequences * STATE
        made = partial(recurrence, sequences, tokens)
        yield row(f"recurrence, {name}", states + tokens * (CHANNELS * 2 + HEADS * SIZE * 4), made, None, top)
        inputs = sequences * (TAPS - 1) * CHANNELS * 2
        made = partial(convolution, sequences, tokens)
        yield row(f"convolution, {name}", 2 * inputs + tokens * CHANNELS * 4, made, None, top)
        yield row(f"gates, {name}", tokens * HEADS * 12, partial(gates, tokens), None, top)
        yield row(f"gated norm, {name}", tokens * HEADS * SIZE * 8, partial(gated_norm, tokens), None, top)


def places(sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the slots and the first tokens of sequences of equal length."""
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * (tokens // sequences)
    return torch.arange(sequences, dtype=torch.int32, device="cuda"), starts


def recurrence(sequences: int, tokens: int) -> Call:
    mixed = random(tokens, CHANNELS).unflatten(1, (-1, SIZE))
    q, k, v = mixed.split([KEY_HEADS, KEY_HEADS, HEADS], dim=1)
    decay, beta = -torch.rand(tokens, HEADS, device="cuda"), torch.rand(tokens, HEADS, device="cuda")
    states = torch.zeros(sequences, HEADS, SIZE, SIZE, device="cuda")
    where = *places(sequences, tokens), None
    return lambda: ops.linear_recurrence(q, k, v, decay, beta, states, *where, q_scale=SIZE**-0.5, eps=1e-6)


def convolution(sequences: int, tokens: int) -> Call:
    x, taps = random(tokens, CHANNELS), torch.randn(TAPS, CHANNELS, device="cuda")
    states = random(sequences, TAPS - 1, CHANNELS)
    where = *places(sequences, tokens), None
    return lambda: ops.causal_conv(x, taps, None, states, *where, True)


def gates(tokens: int) -> Call:
    a, b, rate, bias = random(tokens, HEADS), random(tokens, HEADS), *torch.randn(2, HEADS, device="cuda")
    return lambda: ops.delta_gates(a, b, rate, bias, 1.0)


def gated_norm(tokens: int) -> Call:
    x, gate = torch.randn(tokens, HEADS, SIZE, device="cuda"), random(tokens, HEADS, SIZE)
    weight = torch.randn(SIZE, device="cuda")
    return lambda: ops.gated_norm(x, weight, 1e-6, gate, torch.bfloat16)


TABLES: dict[str, tuple[str, Callable[..., Iterator[Row]]]] = {
    "recurrent": (f"recurrent layers: {HEADS} value heads over {KEY_HEADS} key heads of {SIZE}, bf16", rows)
}
