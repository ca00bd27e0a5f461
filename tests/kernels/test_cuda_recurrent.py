"""Layers with a state per slot on a GPU: against float64, and the same bits in any batch and any chunking."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.executor import ops
from tests.kernels.test_recurrent import DTYPES, Inputs, check_padding, cut, exact, made

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def there(x: Inputs) -> Inputs:
    return Inputs(*(each.to(CUDA) if each is not None else None for each in x))  # type: ignore[arg-type]


def run(x: Inputs, states: Tensor, slot: int = 0, keeps: Tensor | None = None, **how: Any) -> Tensor:
    where = ints(slot), ints(0, len(x.v)), keeps
    return ops.linear_recurrence(x.q, x.k, x.v, x.decay, x.beta, states, *where, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(
    ("heads", "groups", "keys", "values"),
    [(4, 2, 16, 64), (2, 2, 7, 5), (3, 1, 128, 96), (4, 2, 128, 128), (2, 1, 96, 192), (2, 2, 64, 32), (3, 3, 256, 64)],
)
def test_a_recurrence_equals_float64(
    heads: int, groups: int, keys: int, values: int, delta: bool, dtype: torch.dtype
) -> None:
    """Sizes below a lane group's keys, of each number of keys per thread, and columns past the last."""
    x = made(41, heads, groups, keys, values, delta=delta, dtype=dtype)
    how = {"q_scale": keys**-0.5, "eps": 1e-6} if delta else {}
    before = torch.randn(3, heads, keys, values)
    states = before.to(CUDA)
    want, state = exact(x, before[1], how.get("q_scale", 1.0), how.get("eps", 0.0))
    out = run(there(x), states, 1, **how).cpu()
    assert (out - want).abs().max() <= 3e-6 * want.abs().max()
    assert (states[1].cpu() - state).abs().max() <= 3e-6 * state.abs().max()
    assert torch.equal(states[[0, 2]].cpu(), before[[0, 2]])


@pytest.mark.parametrize("delta", [True, False])
def test_chunks_and_batches_leave_the_bits_alone(delta: bool) -> None:
    x = there(made(50, 4, 2, 32, 80, delta=delta, dtype=torch.bfloat16))
    whole = torch.zeros(3, 4, 32, 80, device=CUDA)
    want = run(x, whole)
    for chunk in (1, 7, 16, 33):
        states = torch.zeros(3, 4, 32, 80, device=CUDA)
        parts = [run(cut(x, at, at + chunk), states, 2) for at in range(0, 50, chunk)]
        assert torch.equal(torch.cat(parts), want)
        assert torch.equal(states[2], whole[0])
    both = Inputs(*(torch.cat([each[:9], each]) if each is not None else None for each in x))  # type: ignore[arg-type]
    states = torch.zeros(3, 4, 32, 80, device=CUDA)
    out = ops.linear_recurrence(*both, states, ints(1, 0), ints(0, 9, 59), None)
    assert torch.equal(out[9:], want)


def test_kept_states_are_those_of_their_positions() -> None:
    """Two sequences, with copies at a chunk's end, at its first token and at the last token."""
    x = there(made(60, 2, 1, 16, 24, delta=True, dtype=torch.float32))
    states = torch.zeros(8, 2, 16, 24, device=CUDA)
    keeps = ints(5, 3, 16, 4, 20, 5, 21, 6, 60, 7).view(-1, 2)
    ops.linear_recurrence(*x, states, ints(0, 1), ints(0, 20, 60), keeps)
    for first, end, place in ((0, 5, 3), (0, 16, 4), (0, 20, 5), (20, 21, 6), (20, 60, 7)):
        alone = torch.zeros(1, 2, 16, 24, device=CUDA)
        run(cut(x, first, end), alone)
        assert torch.equal(states[place], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "taps", "silu", "bias"), [(130, 3, False, False), (1100, 4, True, True), (5, 2, True, False)]
)
def test_a_convolution_equals_float64(channels: int, taps: int, silu: bool, bias: bool, dtype: torch.dtype) -> None:
    """Sequences shorter and longer than the taps and than a CTA's tokens; x is a view of a wider tensor."""
    lengths = [1, 1, 11, 2, 5000, 3, 700]
    starts = [0, *itertools.accumulate(lengths)]
    x = (torch.randn(starts[-1], channels + 3, device=CUDA) * 4).to(dtype)[:, 3:]
    weight = torch.randn(taps, channels, device=CUDA)
    shift = torch.randn(channels, device=CUDA) if bias else None
    states = torch.randn(9, taps - 1, channels, device=CUDA).to(dtype)
    before, slots = states.clone(), [2, 0, 8, 4, 3, 7, 5]
    out = ops.causal_conv(x, weight, shift, states, ints(*slots), ints(*starts), None, silu)
    for slot, (first, end) in zip(slots, itertools.pairwise(starts), strict=True):
        inputs = torch.cat([before[slot], x[first:end]])
        windows = inputs.double().unfold(0, taps, 1)  # [tokens, channels, taps]
        want = (windows * weight.double().T).sum(2)
        want = want if shift is None else want + shift.double()
        want = torch.nn.functional.silu(want) if silu else want
        assert (out[first:end] - want).abs().max() <= (2e-6 + torch.finfo(dtype).eps) * want.abs().max()
        assert torch.equal(states[slot], inputs[1 - taps :])
    assert torch.equal(states[[1, 6]], before[[1, 6]])


def test_a_convolution_in_chunks_has_the_same_bits_and_keeps_its_past() -> None:
    x, weight = torch.randn(2000, 70, device=CUDA), torch.randn(4, 70, device=CUDA)
    whole = torch.zeros(1, 3, 70, device=CUDA)
    want = ops.causal_conv(x, weight, None, whole, ints(0), ints(0, 2000), None, True)
    states = torch.zeros(5, 3, 70, device=CUDA)
    keeps = ints(1, 2, 700, 4, 2000, 3).view(-1, 2)
    assert torch.equal(ops.causal_conv(x, weight, None, states, ints(1), ints(0, 2000), keeps, True), want)
    assert torch.equal(states[3], whole[0])
    assert torch.equal(states[2], torch.cat([torch.zeros(2, 70, device=CUDA), x[:1]]))
    assert torch.equal(states[4], x[697:700])
    for chunk in (1, 2, 7, 333):
        states = torch.zeros(1, 3, 70, device=CUDA)
        length = 100 if chunk < 7 else 2000
        pieces = [x[at : min(at + chunk, length)] for at in range(0, length, chunk)]
        parts = [ops.causal_conv(p, weight, None, states, ints(0), ints(0, len(p)), None, True) for p in pieces]
        assert torch.equal(torch.cat(parts), want[:length])


def test_padding_has_no_state_and_outputs_of_zero() -> None:
    check_padding(CUDA)


def test_sizes_that_no_kernel_has_are_refused() -> None:
    x = there(made(4, 1, 1, 257, 8, delta=False, dtype=torch.float32))
    with pytest.raises(ValueError, match="keys is 257, at most 256"):
        run(x, torch.zeros(1, 1, 257, 8, device=CUDA))
    inputs, weight, states = (torch.zeros(*shape, device=CUDA) for shape in ((1, 8), (5, 8), (1, 4, 8)))
    with pytest.raises(ValueError, match="taps is 5, not 2 to 4"):
        ops.causal_conv(inputs, weight, None, states, ints(0), ints(0, 1), None, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(7, 5, 128), (1, 1, 4096), (33, 3, 50), (9, 2, 16), (2, 1, 5001)]
)
def test_a_gated_norm_is_rounded_once(tokens: int, heads: int, size: int, gated: bool, dtype: torch.dtype) -> None:
    """x in float32 and in the dtype of the result; the gate is a view of a wider tensor."""
    gate = (torch.randn(tokens, heads * size + 12, device=CUDA) * 4).to(dtype)[:, 8:-4].unflatten(1, (heads, size))
    weight = torch.randn(size, device=CUDA)
    for x in (torch.randn(tokens, heads, size, device=CUDA), torch.randn(tokens, heads, size, device=CUDA).to(dtype)):
        want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
        want = want * torch.nn.functional.silu(gate.double()) if gated else want
        out = ops.gated_norm(x, weight, 1e-6, gate if gated else None, dtype)
        assert ((out - want).abs() <= (2e-6 + torch.finfo(dtype).eps) * want.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_gates_are_those_of_torch(dtype: torch.dtype) -> None:
    wide = (torch.randn(21, 70, device=CUDA) * 8).to(dtype)
    a, b, rate, bias = wide[:, :32], wide[:, 35:67], -torch.rand(32, device=CUDA), torch.randn(32, device=CUDA)
    decay, beta = ops.delta_gates(a, b, rate, bias, 2.0)
    want = ops.delta_gates(a.cpu(), b.cpu(), rate.cpu(), bias.cpu(), 2.0)
    torch.testing.assert_close(decay.cpu(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta.cpu(), want[1], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_short_sequences_across_the_tokens_of_a_cta() -> None:
    """Steps of every number of tokens per CTA, with sequences shorter than the taps at their borders."""
    weight = torch.randn(4, 70, device=CUDA)
    for seed, count in ((1, 90), (2, 200), (3, 900)):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 6, (count,), generator=draw).tolist()
        starts = [0, *itertools.accumulate(lengths)]
        x, states = torch.randn(starts[-1], 70, device=CUDA), torch.randn(count, 3, 70, device=CUDA)
        before = states.clone()
        out = ops.causal_conv(x, weight, None, states, ints(*range(count)), ints(*starts), None, False)
        inputs = torch.cat([part for i in range(count) for part in (before[i], x[starts[i] : starts[i + 1]])])
        windows = inputs.double().unfold(0, 4, 1)
        first = [starts[i] + 3 * i for i in range(count)]
        at = torch.tensor([first[i] + j for i in range(count) for j in range(lengths[i])], device=CUDA)
        torch.testing.assert_close(out.double(), (windows[at] * weight.double().T).sum(2), rtol=1e-5, atol=1e-5)
        ends = torch.tensor([first[i] + lengths[i] for i in range(count)], device=CUDA)
        assert torch.equal(states, torch.stack([inputs[end : end + 3] for end in ends.tolist()]))
