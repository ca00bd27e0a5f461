"""Linear layers on a GPU, with fused operators, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from quire.engine.executor import ops
from tests.kernels.test_layers import exact_norm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
Weight = torch.Tensor | ops.Fp8 | ops.Int4


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error over all elements.  NaN, if an element was not written, is never small."""
    return float((ours.double() - exact).norm() / exact.norm())


def plain_weight(rows: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A stored weight, and its value in float64."""
    weight = randn(rows, inner, dtype=dtype) / math.sqrt(inner)
    return weight, weight.double()


def check(
    tokens: int,
    inner: int,
    size: int,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    norm: bool = False,
    plus: bool = False,
    silu_mul: bool = False,
    make_weight: Callable[
        [int, int, torch.dtype], tuple[torch.Tensor | ops.Fp8 | ops.Int4, torch.Tensor]
    ] = plain_weight,
    bound: float = 0.0,
) -> None:
    """bound: maximum error; 0: epsilon of the dtype."""
    rows = 2 * size if silu_mul else size
    wide_x, wide_out = randn(tokens, inner + 8, dtype=dtype), randn(tokens + 1, size + 16, dtype=dtype)
    x, (weight, exact) = wide_x[:, :inner], make_weight(rows, inner, dtype)
    biases = randn(rows, dtype=dtype) if bias else None
    norms = randn(inner, dtype=dtype) if norm else None
    before = wide_out.clone()
    out = wide_out[:tokens, 8 : 8 + size]
    y = exact_norm(x, norms, 1e-5).to(dtype).double() if norms is not None else x.double()
    y = y @ exact.t()
    if biases is not None:
        y += biases.double()
    if silu_mul:
        gate, up = y.to(dtype).double().split(size, -1)
        y = torch.nn.functional.silu(gate) * up
    if plus:
        y = y + out.double()
        ops.linear(x, weight, biases, norm=norms, eps=1e-5, silu_mul=silu_mul, plus=out)
    else:
        out.fill_(math.nan)
        ops.linear(x, weight, biases, norm=norms, eps=1e-5, silu_mul=silu_mul, out=out)
    # One rounding has an rms error of 0.29 epsilon.  Measured: up to 0.6 epsilon, with the roundings of earlier steps.
    assert error(out, y) < (bound or torch.finfo(dtype).eps)
    before[:tokens, 8 : 8 + size] = out
    assert torch.equal(wide_out, before), "written outside its rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 100])
def test_tokens(dtype: torch.dtype, tokens: int) -> None:
    check(tokens, 512, 1024, dtype)
    check(tokens, 512, 1024, dtype, norm=True, silu_mul=True)
    check(tokens, 512, 1024, dtype, plus=True)


@pytest.mark.parametrize("tokens", [1, 12, 32])
@pytest.mark.parametrize("size", [8, 24, 152, 1000, 1056, 4096, 6144, 40_000])
def test_sizes(tokens: int, size: int) -> None:
    """Tiles of 8 to 224 rows, a partial last tile, and more tiles than multiprocessors."""
    check(tokens, 256, size, torch.bfloat16)
    check(tokens, 256, size, torch.bfloat16, silu_mul=True, bias=True, norm=True, plus=True)


@pytest.mark.parametrize("tokens", [1, 12, 32])
@pytest.mark.parametrize("inner", [8, 24, 64, 128, 192, 520, 1024, 5120, 14336])
def test_inner_sizes(tokens: int, inner: int) -> None:
    """Fewer slabs than a stage, partial stages, and sizes that only torch's GEMM supports."""
    check(tokens, inner, 512, torch.bfloat16, bias=True)
    check(tokens, inner, 512, torch.bfloat16, plus=True)


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_shapes_of_models(tokens: int) -> None:
    for hidden, qkv, heads, inter in [(4096, 6144, 4096, 14336), (1024, 4096, 2048, 3072)]:
        check(tokens, hidden, qkv, torch.bfloat16, norm=True, bias=True)
        check(tokens, heads, hidden, torch.bfloat16, plus=True)
        check(tokens, hidden, inter, torch.bfloat16, norm=True, silu_mul=True)
        check(tokens, inter, hidden, torch.bfloat16, plus=True)
    check(tokens, 1024, 151_936, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 12, 32, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_a_result_in_float32_is_not_rounded(tokens: int, dtype: torch.dtype, bias: bool) -> None:
    for size in (1000, 1056, 40_000):
        wide = torch.full((tokens + 1, size + 8), math.nan, device=CUDA)
        x, (weight, exact) = randn(tokens, 512, dtype=dtype), plain_weight(size, 512, dtype)
        biases = randn(size, dtype=dtype) if bias else None
        out = ops.linear(x, weight, biases, out=wide[:tokens, :size])
        y = x.double() @ exact.t() + (biases.double() if biases is not None else 0)
        assert error(out, y) < 1e-5
        assert wide[tokens:].isnan().all()
        assert wide[:, size:].isnan().all()
    with pytest.raises(ValueError, match="float32 takes neither add nor silu_mul"):
        ops.linear(x, weight, plus=torch.zeros(tokens, size, device=CUDA))


def test_unaligned_rows_and_float32() -> None:
    """Falls back to torch's GEMM for tensors that the kernel for few tokens does not support."""
    x, weight = randn(3, 129, dtype=torch.bfloat16)[:, 1:], randn(64, 128, dtype=torch.bfloat16)
    assert error(ops.linear(x, weight), x.double() @ weight.double().t()) < 0.01
    x, weight = randn(3, 128, dtype=torch.float32), randn(64, 128, dtype=torch.float32)
    assert error(ops.linear(x, weight), x.double() @ weight.double().t()) < 1e-2  # possibly in tf32


def test_the_same_every_time_and_in_a_graph() -> None:
    """A chain of dependent linear layers: bit-identical in ten runs and in replays."""
    dtype = torch.bfloat16
    x = randn(5, 1024, dtype=dtype)
    weights = [randn(1024, 1024, dtype=dtype) / 32 for _ in range(8)]
    norm = torch.ones(1024, dtype=dtype, device=CUDA)

    def chain(y: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            y = ops.linear(y, weight, norm=norm, eps=1e-5)
            y = ops.linear(y, weight, plus=y.clone())
        return y

    first = chain(x)
    assert first.isfinite().all()
    for _ in range(10):
        assert torch.equal(chain(x), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(10):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, first)


def test_wrong_tensors_are_named() -> None:
    x, weight = randn(2, 64, dtype=torch.bfloat16), randn(16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weight: is on cpu"):
        ops.linear(x, weight.cpu())
    with pytest.raises(ValueError, match="weight: dtype is Half, x has BFloat16"):
        ops.linear(x, weight.half())
