"""fp8 linear layers on a GPU, with fused operators, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from quire.engine.executor import ops
from tests.kernels.test_cuda_linear import CUDA, error, randn
from tests.kernels.test_cuda_linear import check as check_product
from tests.kernels.test_layers import exact_norm

pytestmark = pytest.mark.gpu
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LARGEST = 448.0  # maximum of e4m3
# Relative to the exact result with the stored weight.  With few tokens only results are rounded, to bfloat16.  With
# more tokens x is quantised to e4m3 as well: 3 mantissa bits, so a relative error of at most 2^-4.  Uniform within the
# rounding step, its rms is 2^-5 / sqrt(3) to 2^-4 / sqrt(3): 0.018 to 0.036.
EXACT, ROUNDED = 2**-7, 0.036
# Rows of a weight when single tokens are compared.  With 64 rows 3 % of the tokens exceed ROUNDED by chance, with 256
# rows 0.1 %; with 1,024 none of 2,000 exceeded 0.033.
SIZE = 1024


def bound_of(tokens: int, inner: int) -> float:
    """Error bound: EXACT if a CTA holds all of x."""
    return EXACT if tokens * -(-inner // 4096) <= 4 else ROUNDED


def weight(rows: int, inner: int) -> tuple[ops.Fp8, torch.Tensor]:
    """A weight with a scale per row, and its value in float64."""
    plain = torch.randn(rows, inner, device=CUDA) / math.sqrt(inner) * torch.rand(rows, 1, device=CUDA)
    scale = plain.abs().amax(1) / LARGEST
    numbers = (plain / scale[:, None]).to(E4M3)
    return ops.Fp8(numbers, scale), numbers.double() * scale.double()[:, None]


def blocks(rows: int, inner: int) -> tuple[ops.Fp8, torch.Tensor]:
    """A weight with a scale per 128 x 128 block; magnitudes differ by up to 2^12."""
    plain = torch.randn(rows // 128, 128, inner // 128, 128, device=CUDA) / math.sqrt(inner)
    plain *= 2.0 ** -torch.randint(12, (rows // 128, 1, inner // 128, 1), device=CUDA)
    scale = plain.abs().amax((1, 3)) / LARGEST
    numbers = (plain / scale[:, None, :, None]).to(E4M3)
    exact = numbers.double() * scale.double()[:, None, :, None]
    return ops.Fp8(numbers.view(rows, inner), scale), exact.view(rows, inner)


def check_blocks(tokens: int, inner: int, size: int, *, bound: float = EXACT, **around: bool) -> None:
    check_product(
        tokens, inner, size, BF16, make_weight=lambda rows, inner, _: blocks(rows, inner), bound=bound, **around
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("inner", "size"),
    [(512, 128), (512, 1024), (1024, 384), (1536, 1280), (2560, 6144), (4096, 4096), (14336, 4096), (4096, 28672)],
)
def test_blocks_of_few_tokens(tokens: int, inner: int, size: int) -> None:
    """Tiles in up to three rows of scale blocks, partial stages, tables of up to 112 slabs."""
    bound = bound_of(tokens, inner)
    check_blocks(tokens, inner, size, bound=bound)
    check_blocks(
        tokens, inner, size, norm=True, silu_mul=True, bias=True, bound=2 * bound if bound == ROUNDED else bound
    )
    check_blocks(tokens, inner, size, plus=True, bound=bound)


@pytest.mark.parametrize("tokens", [5, 6, 16, 33, 257, 2048])
def test_blocks_of_many_tokens(tokens: int) -> None:
    """Including token counts that cuBLAS requires to be padded."""
    check_blocks(tokens, 4096, 1024, norm=True, bias=True, bound=ROUNDED)
    check_blocks(tokens, 2560, 1024, norm=True, silu_mul=True, bound=2 * ROUNDED)
    check_blocks(tokens, 28672, 512, plus=True, bound=ROUNDED)
    check_blocks(tokens, 40960, 256, bound=ROUNDED)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_blocks_keep_what_is_not_finite(tokens: int, bad: float) -> None:
    x, (stored, exact) = randn(tokens, 512, dtype=BF16), blocks(SIZE, 512)
    x[1, 77] = bad
    x[3:] = 0
    out = ops.linear(x, stored)
    assert not out[1].isfinite().any()
    assert error(out[2], x[2].double() @ exact.t()) < ROUNDED
    assert out[3:].eq(0).all()


@pytest.mark.parametrize(
    ("shape", "scale", "said"),
    [
        ((192, 512), (2, 4), r"\[192, 512\] is not of multiples of 128 and 512"),
        ((256, 256), (2, 2), r"\[256, 256\] is not of multiples of 128 and 512"),
        ((256, 512), (1, 4), r"scale: its shape \[1, 4\] should be \[2, 4\]"),
    ],
)
def test_blocks_of_other_shapes_are_refused(shape: tuple[int, int], scale: tuple[int, int], said: str) -> None:
    weight = ops.Fp8(torch.zeros(shape, device=CUDA).to(E4M3), torch.ones(scale, device=CUDA))
    with pytest.raises(ValueError, match=said):
        ops.linear(randn(2, shape[1], dtype=BF16), weight)


def check(tokens: int, inner: int, size: int, *, bound: float = EXACT, **around: bool) -> None:
    check_product(
        tokens, inner, size, BF16, make_weight=lambda rows, inner, _: weight(rows, inner), bound=bound, **around
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_tokens(tokens: int) -> None:
    check(tokens, 512, 1024)
    check(tokens, 512, 1024, norm=True, silu_mul=True)
    check(tokens, 512, 1024, plus=True)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", [16, 48, 160, 1008, 1056, 4096, 6144, 40_000])
def test_sizes(tokens: int, size: int) -> None:
    """Tiles of 8 to 224 rows, a partial last tile, and more tiles than multiprocessors."""
    check(tokens, 256, size)
    check(tokens, 256, size, silu_mul=True, bias=True, norm=True, plus=True)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("inner", [128, 256, 384, 1152, 5120, 14336])
def test_inner_sizes(tokens: int, inner: int) -> None:
    """Fewer slabs than a stage, and partial stages."""
    bound = bound_of(tokens, inner)
    check(tokens, inner, 512, bias=True, bound=bound)
    check(tokens, inner, 512, norm=True, bound=bound)
    check(tokens, inner, 512, plus=True, bound=bound)


@pytest.mark.parametrize("tokens", [5, 16, 33, 100, 257, 2048])
def test_many_tokens(tokens: int) -> None:
    """Both operands in fp8; also rows wider than the registers of a thread block."""
    check(tokens, 4096, 6144, norm=True, bias=True, bound=ROUNDED)
    check(tokens, 4096, 1024, norm=True, silu_mul=True, bound=2 * ROUNDED)  # both factors of the activation are rounded
    check(tokens, 28672, 512, plus=True, bound=ROUNDED)
    check(tokens, 40960, 256, bound=ROUNDED)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_shapes_of_models(tokens: int) -> None:
    for hidden, qkv, heads, inter in [(4096, 6144, 4096, 14336), (1024, 4096, 2048, 3072)]:
        bound = bound_of(tokens, hidden)
        check(tokens, hidden, qkv, norm=True, bias=True, bound=bound)
        check(tokens, heads, hidden, plus=True, bound=bound)
        check(tokens, hidden, inter, norm=True, silu_mul=True, bound=2 * bound)
        check(tokens, inter, hidden, plus=True, bound=bound_of(tokens, inter))


@pytest.mark.parametrize("make", [weight, blocks])
@pytest.mark.parametrize("tokens", [1, 3, 4, 20])
def test_a_result_in_float32(tokens: int, make: Callable[[int, int], tuple[ops.Fp8, torch.Tensor]]) -> None:
    """With few tokens it is not rounded at all."""
    stored, exact = make(1024, 512)
    x, norm = randn(tokens, 512, dtype=BF16), randn(512, dtype=BF16)
    out = ops.linear(x, stored, norm=norm, eps=1e-5, float32_out=True)
    assert out.dtype == torch.float32
    y = exact_norm(x, norm, 1e-5).to(BF16).double() @ exact.t()
    # A norm that differs in its last bit may round an element to its neighbour.
    assert error(out, y) < (2e-4 if tokens <= 4 else ROUNDED)
    with pytest.raises(ValueError, match="float32 takes neither"):
        ops.linear(x, stored, out=torch.empty(tokens, 512, device=CUDA), silu_mul=True)


@pytest.mark.parametrize("tokens", [1, 64])
def test_all_numbers_of_e4m3(tokens: int) -> None:
    """All values except NaN, both signs, including subnormals, are exact."""
    every = torch.arange(256, dtype=torch.uint8, device=CUDA).view(E4M3)
    row = torch.where(every.float().isnan(), torch.zeros((), device=CUDA), every.float())
    numbers = torch.diag(row).to(E4M3)
    x = torch.ones(tokens, 256, dtype=BF16, device=CUDA)
    out = ops.linear(x, ops.Fp8(numbers, torch.ones(256, device=CUDA)))
    assert torch.equal(out, row.to(BF16).expand(tokens, -1))


@pytest.mark.parametrize("tokens", [4, 64])
def test_rows_of_zeros_and_of_huge_numbers(tokens: int) -> None:
    """Tokens of zeros, and of values whose scale would be subnormal, give no NaN; others keep theirs."""
    stored, exact = weight(SIZE, 256)
    x = torch.zeros(tokens, 256, dtype=BF16, device=CUDA)
    x[1:4] = randn(3, 256, dtype=BF16) * torch.tensor([[1e30], [1e-30], [1e-38]], device=CUDA)
    out = ops.linear(x, stored)
    assert out[0].eq(0).all()
    assert out[4:].eq(0).all()
    assert out[3].isfinite().all()
    for row in (1, 2):
        assert error(out[row], x[row].double() @ exact.t()) < (EXACT if tokens <= 4 else ROUNDED)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(tokens: int, bad: float) -> None:
    x, (stored, exact) = randn(tokens, 256, dtype=BF16), weight(SIZE, 256)
    x[1, 77] = bad
    out = ops.linear(x, stored)
    assert not out[1].isfinite().any()
    assert error(out[2], x[2].double() @ exact.t()) < ROUNDED


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_token_with_one_large_number_keeps_the_small_ones(tokens: int) -> None:
    """Down to 2^-28 of it, which would underflow in fp16 without a scale."""
    stored = ops.Fp8(torch.eye(128, device=CUDA).to(E4M3), torch.ones(128, device=CUDA))
    x = torch.zeros(tokens, 128, dtype=BF16, device=CUDA)
    x[:, :120] = (
        (2.0 ** -torch.arange(120, device=CUDA).remainder(29)).to(BF16) * randn(tokens, 1, dtype=BF16) * 2.0**100
    )
    out = ops.linear(x, stored)
    assert torch.equal(out, x)


@pytest.mark.parametrize("tokens", [3, 80])
def test_the_same_every_time_and_in_a_graph(tokens: int) -> None:
    x = randn(tokens, 1024, dtype=BF16)
    weights = [weight(1024, 1024)[0] for _ in range(8)]
    norm = torch.ones(1024, dtype=BF16, device=CUDA)

    def chain(y: torch.Tensor) -> torch.Tensor:
        for stored in weights:
            y = ops.linear(y, stored, norm=norm, eps=1e-5)
            y = ops.linear(y, stored, plus=y.clone())
        return y

    first = chain(x)
    assert first.isfinite().all()
    assert all(torch.equal(chain(x), first) for _ in range(10))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(10):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, first)


def test_wrong_tensors_are_named() -> None:
    x, (stored, _) = randn(2, 128, dtype=BF16), weight(16, 128)
    with pytest.raises(ValueError, match="x: dtype is Half, this operator needs BFloat16"):
        ops.linear(x.half(), stored)
    with pytest.raises(ValueError, match="weight: dtype is BFloat16, this operator needs Float8_e4m3fn"):
        ops.linear(x, ops.Fp8(stored.values.to(BF16), stored.scale))
    with pytest.raises(ValueError, match="scale: rows of the weight is 16, weight has 32"):
        ops.linear(x, ops.Fp8(weight(32, 128)[0].values, stored.scale), out=randn(2, 32, dtype=BF16))
