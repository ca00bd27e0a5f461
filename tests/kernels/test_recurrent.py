"""Layers with a state per slot on a CPU: against float64, and the same bits in any batch and any chunking."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.engine.executor import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Inputs(NamedTuple):
    """Inputs of a recurrence over one sequence of T tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None


def made(tokens: int, heads: int, groups: int, keys: int, values: int, *, delta: bool, dtype: torch.dtype) -> Inputs:
    draw = torch.Generator().manual_seed(tokens * 131 + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    beta = normal(tokens, heads).sigmoid() if delta else None
    q, k = normal(tokens, groups, keys).to(dtype), normal(tokens, groups, keys).to(dtype)
    return Inputs(q, k, normal(tokens, heads, values).to(dtype), -normal(tokens, heads).exp(), beta)


def exact(x: Inputs, state: Tensor, q_scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """(out, state) in float64, token by token."""
    q, k, v = x.q.double(), x.k.double(), x.v.double()
    if eps:
        q, k = (each / (each.pow(2).sum(-1, keepdim=True) + eps).sqrt() for each in (q, k))
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1) * q_scale, k.repeat_interleave(repeat, 1)
    state, out = state.double().clone(), []
    for t in range(len(v)):
        state = state * x.decay[t].double().exp()[:, None, None]
        write = v[t]
        if x.beta is not None:
            write = x.beta[t].double()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * write[:, None, :]
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out), state


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(x: Inputs, states: Tensor, slot: int = 0, keeps: Tensor | None = None, **how: Any) -> Tensor:
    where = ints(slot), ints(0, len(x.v)), keeps
    return ops.linear_recurrence(x.q, x.k, x.v, x.decay, x.beta, states, *where, **how)


def cut(x: Inputs, first: int, end: int) -> Inputs:
    return Inputs(*(each[first:end] if each is not None else None for each in x))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(("heads", "groups", "keys", "values"), [(4, 2, 16, 64), (2, 2, 7, 5), (3, 1, 128, 96)])
def test_a_recurrence_equals_float64(
    heads: int, groups: int, keys: int, values: int, delta: bool, dtype: torch.dtype
) -> None:
    """Sizes below a vector, and states whose columns are no multiple of one."""
    x = made(41, heads, groups, keys, values, delta=delta, dtype=dtype)
    how = {"q_scale": keys**-0.5, "eps": 1e-6} if delta else {}
    states = torch.randn(3, heads, keys, values)
    before = states.clone()
    want, state = exact(x, states[1], how.get("q_scale", 1.0), how.get("eps", 0.0))
    out = run(x, states, 1, **how)
    assert (out - want).abs().max() <= 3e-6 * want.abs().max()
    assert (states[1] - state).abs().max() <= 3e-6 * state.abs().max()
    assert torch.equal(states[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("delta", [True, False])
def test_chunks_batches_and_threads_leave_the_bits_alone(delta: bool) -> None:
    x = made(50, 4, 2, 32, 80, delta=delta, dtype=torch.float32)
    whole = torch.zeros(3, 4, 32, 80)
    want = run(x, whole)
    for chunk in (1, 7, 16, 33):
        states = torch.zeros(3, 4, 32, 80)
        parts = [run(cut(x, at, at + chunk), states, 2) for at in range(0, 50, chunk)]
        assert torch.equal(torch.cat(parts), want)
        assert torch.equal(states[2], whole[0])
    both = Inputs(*(torch.cat([each[:9], each]) if each is not None else None for each in x))  # type: ignore[arg-type]
    for threads in (1, 2):
        ops.set_threads(threads)
        states = torch.zeros(3, 4, 32, 80)
        out = ops.linear_recurrence(*both, states, ints(1, 0), ints(0, 9, 59), None)
        assert torch.equal(out[9:], want)
    ops.set_threads(0)


def test_a_kept_state_is_that_of_its_position() -> None:
    x = made(40, 2, 1, 16, 24, delta=True, dtype=torch.float32)
    states = torch.zeros(5, 2, 16, 24)
    run(x, states, 0, torch.tensor([[5, 3], [16, 4], [40, 2]], dtype=torch.int32))
    for end, place in ((5, 3), (16, 4), (40, 2)):
        alone = torch.zeros(1, 2, 16, 24)
        run(cut(x, 0, end), alone)
        assert torch.equal(states[place], alone[0])


def convolved(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """In float64; past [taps - 1, channels]."""
    inputs, taps = torch.cat([past, x]).double(), len(weight)
    out = torch.stack([(inputs[t : t + taps] * weight.double()).sum(0) for t in range(len(x))])
    out = out if bias is None else out + bias.double()
    return torch.nn.functional.silu(out) if silu else out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "taps", "silu", "bias"), [(130, 3, False, False), (1100, 4, True, True), (5, 2, True, False)]
)
def test_a_convolution_equals_float64(channels: int, taps: int, silu: bool, bias: bool, dtype: torch.dtype) -> None:
    """Two sequences, one longer and one shorter than the taps; x is a view of a wider tensor."""
    x = (torch.randn(12, channels + 3) * 4).to(dtype)[:, 3:]
    weight, shift = torch.randn(taps, channels), torch.randn(channels) if bias else None
    states = torch.randn(3, taps - 1, channels).to(dtype)
    before = states.clone()
    out = ops.causal_conv(x, weight, shift, states, ints(2, 0), ints(0, 1, 12), None, silu)
    for slot, first, end in ((2, 0, 1), (0, 1, 12)):
        want = convolved(x[first:end], before[slot], weight, shift, silu)
        assert (out[first:end] - want).abs().max() <= (2e-6 + torch.finfo(dtype).eps) * want.abs().max()
        assert torch.equal(states[slot], torch.cat([before[slot], x[first:end]])[1 - taps :])
    assert torch.equal(states[1], before[1])


def test_a_convolution_in_chunks_has_the_same_bits_and_keeps_its_past() -> None:
    x, weight = torch.randn(20, 70), torch.randn(4, 70)
    whole = torch.zeros(1, 3, 70)
    want = ops.causal_conv(x, weight, None, whole, ints(0), ints(0, 20), None, True)
    states = torch.zeros(4, 3, 70)
    keeps = torch.tensor([[1, 2], [20, 3]], dtype=torch.int32)
    assert torch.equal(ops.causal_conv(x, weight, None, states, ints(1), ints(0, 20), keeps, True), want)
    assert torch.equal(states[3], whole[0])
    assert torch.equal(states[2], torch.cat([torch.zeros(2, 70), x[:1]]))
    for chunk in (1, 2, 7):
        states = torch.zeros(1, 3, 70)
        pieces = [x[at : at + chunk] for at in range(0, 20, chunk)]
        parts = [ops.causal_conv(p, weight, None, states, ints(0), ints(0, len(p)), None, True) for p in pieces]
        assert torch.equal(torch.cat(parts), want)


def check_padding(device: torch.device) -> None:
    """Rows of a CUDA graph: the padding names slot 0, which a sequence of the step has."""
    x = Inputs(
        *(each.to(device) for each in made(6, 4, 2, 32, 80, delta=True, dtype=torch.bfloat16) if each is not None)
    )
    rows, starts, lens = (
        ints(*values).to(device) for values in ([1, 0, 0, 0, 2], [0, 1, 2, 3, 4, 6], [9, 7, 0, 0, 20])
    )
    sequences = [(1, 0, 1), (0, 1, 2), (2, 4, 6)]
    states = torch.randn(3, 4, 32, 80, device=device)
    alone = states.clone()
    out = ops.linear_recurrence(*x, states, rows, starts, None, lens=lens)
    for slot, first, end in sequences:
        where = ints(slot).to(device), ints(0, end - first).to(device), None
        assert torch.equal(ops.linear_recurrence(*cut(x, first, end), alone, *where), out[first:end])
    assert torch.equal(states, alone)
    assert not out[2:4].any()
    inputs, weight = torch.randn(6, 70, device=device), torch.randn(4, 70, device=device)
    states = torch.randn(3, 3, 70, device=device)
    alone = states.clone()
    out = ops.causal_conv(inputs, weight, None, states, rows, starts, None, True, lens=lens)
    for slot, first, end in sequences:
        where = ints(slot).to(device), ints(0, end - first).to(device), None
        assert torch.equal(ops.causal_conv(inputs[first:end], weight, None, alone, *where, True), out[first:end])
    assert torch.equal(states, alone)
    assert not out[2:4].any()


def test_padding_has_no_state_and_outputs_of_zero() -> None:
    check_padding(torch.device("cpu"))


def test_silu_of_any_input_is_finite() -> None:
    x = torch.tensor([[-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 3e38]])
    out = ops.causal_conv(x, torch.ones(1, 8), None, torch.zeros(1, 0, 8), ints(0), ints(0, 1), None, True)
    assert out.isfinite().all()
    torch.testing.assert_close(out, torch.nn.functional.silu(x), rtol=1e-5, atol=1e-7)


def test_wrong_indices_are_refused() -> None:
    x = made(4, 2, 1, 8, 8, delta=False, dtype=torch.float32)
    states = torch.zeros(3, 2, 8, 8)
    call = ops.linear_recurrence
    with pytest.raises(IndexError, match=r"rows\[0\] is 3"):
        call(*x, states, ints(3), ints(0, 4), None)
    with pytest.raises(IndexError, match="two sequences share the state of slot 1"):
        call(*x, states, ints(1, 1), ints(0, 2, 4), None)
    with pytest.raises(IndexError, match=r"keeps\[0\]: place is 0"):
        call(*x, states, ints(0), ints(0, 4), torch.tensor([[2, 0]], dtype=torch.int32))
    with pytest.raises(IndexError, match=r"keeps\[1\]: end is 2"):
        call(*x, states, ints(0), ints(0, 4), torch.tensor([[2, 1], [2, 2]], dtype=torch.int32))
    with pytest.raises(ValueError, match="heads"):
        call(*x, torch.zeros(3, 4, 8, 8), ints(0), ints(0, 4), None)
    assert list(itertools.chain(*states.flatten(1).any(1)[:, None].tolist())) == [False] * 3
