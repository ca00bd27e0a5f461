"""int4 linear layers on a GPU, with fused operators, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.executor import ops
from tests.kernels.test_cuda_linear import CUDA, error, randn
from tests.kernels.test_cuda_linear import check as check_product

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Relative to the exact result with the stored weight.  Only results are rounded, to bfloat16; with over 64 tokens the
# weight is rounded to bfloat16 as well, which is half as much.
EXACT = 2**-7
GROUPS = [32, 64, 128]


def weight(rows: int, inner: int, group: int = 32, *, zeros: bool = True) -> tuple[ops.Int4, torch.Tensor]:
    """A weight, and its value in float64.  Magnitudes of rows differ by up to 2^8, of groups in a row by 2^4."""
    numbers = torch.randint(0, 16, (rows, inner), dtype=torch.uint8, device=CUDA)
    scale = torch.rand(rows, inner // group, device=CUDA) + 2**-4
    scale = (scale * torch.exp2(-8 * torch.rand(rows, 1, device=CUDA)) / math.sqrt(inner)).half().float()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=CUDA) if zeros else None
    centred = numbers.double().view(*scale.shape, group) - (8 if zero is None else zero.double()[..., None])
    packed = ops.pack_int4_gpu(numbers[:, ::2] | numbers[:, 1::2] << 4, scale, zero)
    return packed, (centred * scale.double()[..., None]).view(rows, inner)


def check(tokens: int, inner: int, size: int, group: int = 32, *, zeros: bool = True, **around: bool) -> None:
    check_product(
        tokens,
        inner,
        size,
        BF16,
        make_weight=lambda rows, inner, _: weight(rows, inner, group, zeros=zeros),
        bound=EXACT,
        **around,
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [*range(1, 18), 24, 31, 32, 33, 48, 64, 65, 300])
def test_tokens(tokens: int, group: int) -> None:
    """One call of the kernel, several calls, and cuBLAS."""
    check(tokens, 512, 1024, group)
    check(tokens, 512, 1024, group, norm=True, silu_mul=True)
    check(tokens, 512, 1024, group, plus=True)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 12, 20])
@pytest.mark.parametrize("size", [16, 48, 160, 1008, 1056, 4096, 6144, 10_000, 16_400, 40_000])
def test_sizes(tokens: int, size: int, group: int) -> None:
    """Tiles of 1 to 14 row blocks, a partial last tile, and more tiles than multiprocessors."""
    check(tokens, 256, size, group)
    check(tokens, 256, size, group, silu_mul=True, bias=True, norm=True, plus=True)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 27])
@pytest.mark.parametrize("inner", [128, 256, 384, 1152, 5120, 14336])
def test_inner_sizes(tokens: int, inner: int, group: int) -> None:
    """Fewer packed blocks than a stage, partial stages, and warps without any."""
    check(tokens, inner, 512, group, bias=True)
    check(tokens, inner, 512, group, plus=True)
    if inner <= 1152:
        check(tokens, inner, 14336, group, silu_mul=True)  # tiles of 14 row blocks


@pytest.mark.parametrize("group", [96, 256, 384, 768])
@pytest.mark.parametrize("tokens", [2, 70])
def test_other_groups(tokens: int, group: int) -> None:
    """Their scales are repeated."""
    check(tokens, 768, 512, group)
    check(tokens, 768, 512, group, zeros=False)


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 32, 64, 100])
def test_shapes_of_models(tokens: int) -> None:
    for hidden, qkv, heads, inter in [(4096, 6144, 4096, 14336), (1024, 4096, 2048, 3072)]:
        for group in (32, 128):
            check(tokens, hidden, qkv, group, norm=True, bias=True)
            check(tokens, heads, hidden, group, plus=True)
            check(tokens, hidden, inter, group, norm=True, silu_mul=True)
            check(tokens, inter, hidden, group, plus=True)


@pytest.mark.parametrize("tokens", [1, 4, 12, 40, 100])
def test_a_result_in_float32(tokens: int) -> None:
    """Inputs become 16-bit integers, and over 64 tokens the weight is rounded; float32 keeps the rest."""
    stored, exact = weight(1024, 512)
    x = randn(tokens, 512, dtype=BF16)
    out = ops.linear(x, stored, float32_out=True)
    assert out.dtype == torch.float32
    assert error(out, x.double() @ exact.t()) < (2e-4 if tokens <= 64 else EXACT)


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("inner", [128, 1152, 4096, 8192, 14336])
def test_a_norm_in_front(tokens: int, inner: int) -> None:
    """Computed by each CTA if it holds all of x, else by a separate kernel."""
    for group in GROUPS:
        check(tokens, inner, 512, group, norm=True)
        check(tokens, inner, 512, group, norm=True, silu_mul=True)


@pytest.mark.parametrize("group", GROUPS)
def test_each_number_of_a_weight_comes_out_as_it_is(group: int) -> None:
    """Rounded once, in the kernel and in the dequantised weight for many tokens."""
    stored, exact = weight(288, 384, group)
    one_hot = torch.eye(384, dtype=BF16, device=CUDA)
    few = torch.cat([ops.linear(rows, stored) for rows in (*one_hot.split(16)[:12], *one_hot[192:].split(7))])
    assert torch.equal(few, exact.t().to(BF16))
    assert torch.equal(ops.linear(one_hot, stored), few)


@pytest.mark.parametrize("group", [*GROUPS, 256])
def test_a_gpu_packs_as_a_cpu_does(group: int) -> None:
    numbers = torch.randint(0, 256, (64, 256), dtype=torch.uint8)
    scale, zero = torch.rand(64, 512 // group) * 2.0 ** torch.randint(-40, 40, (64, 1)), numbers[:, : 512 // group] & 15
    on_cpu = ops.pack_int4_gpu(numbers, scale, zero)
    on_gpu = ops.pack_int4_gpu(numbers.cuda(), scale.cuda(), zero.cuda())
    assert torch.equal(on_gpu.packed.cpu(), on_cpu.packed)
    assert torch.equal(on_gpu.scale.cpu(), on_cpu.scale)


def test_all_numbers_and_zero_points() -> None:
    """Every pair of value and zero point, without rounding."""
    number = torch.arange(256, device=CUDA) // 16
    zero = (torch.arange(256, device=CUDA) % 16).to(torch.uint8)[:, None].expand(-1, 4).contiguous()
    numbers = (number << 4 | number).to(torch.uint8)[:, None].expand(-1, 64).contiguous()
    stored = ops.pack_int4_gpu(numbers, torch.ones(256, 4, device=CUDA), zero)
    x = torch.zeros(2, 128, dtype=BF16, device=CUDA)
    x[0, 77], x[1, 3] = 1, -0.5
    found = ops.linear(x, stored).double()
    wanted = (number - torch.arange(256, device=CUDA) % 16).double()
    assert torch.equal(found, torch.stack([wanted, -0.5 * wanted]))


@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("mean", [-20.0, 1000.0])
def test_tokens_with_a_large_mean(tokens: int, mean: float) -> None:
    """The zero-point term is subtracted after the sum, so a large mean tests cancellation."""
    x, (stored, exact) = (torch.randn(tokens, 4096, device=CUDA) + mean).to(BF16), weight(1024, 4096, 128, zeros=False)
    assert error(ops.linear(x, stored), x.double() @ exact.t()) < EXACT


@pytest.mark.parametrize("tokens", [4, 100])
def test_tokens_of_zeros_and_of_huge_numbers(tokens: int) -> None:
    stored, exact = weight(1024, 256)
    x = torch.zeros(tokens, 256, dtype=BF16, device=CUDA)
    x[1:4] = randn(3, 256, dtype=BF16) * torch.tensor([[1e30], [1e-30], [1e-36]], device=CUDA)
    out = ops.linear(x, stored)
    assert out[0].eq(0).all()
    assert out[4:].eq(0).all()
    assert out[3].isfinite().all()
    for row in (1, 2):
        assert error(out[row], x[row].double() @ exact.t()) < EXACT


@pytest.mark.parametrize("tokens", [3, 20, 100])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(tokens: int, bad: float) -> None:
    """In its own token only."""
    x, (stored, exact) = randn(tokens, 256, dtype=BF16), weight(1024, 256)
    x[1, 77] = bad
    out = ops.linear(x, stored)
    assert not out[1].isfinite().any()
    assert error(out[2], x[2].double() @ exact.t()) < EXACT


@pytest.mark.parametrize("tokens", [2, 40, 100])
def test_rows_that_do_not_start_at_16_bytes(tokens: int) -> None:
    stored, exact = weight(96, 256)
    x, out = randn(tokens, 261, dtype=BF16)[:, 3:259], randn(tokens, 99, dtype=BF16)[:, 1:97]
    assert error(ops.linear(x, stored), x.double() @ exact.t()) < EXACT
    out.fill_(math.nan)
    assert error(ops.linear(x, stored, out=out), x.double() @ exact.t()) < EXACT


@pytest.mark.parametrize("tokens", [3, 16, 40, 80])
def test_the_same_every_time_and_in_a_graph(tokens: int) -> None:
    x = randn(tokens, 1024, dtype=BF16)
    weights = [weight(1024, 1024, group)[0] for group in (32, 64, 128, 32, 64, 128)]
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
    with pytest.raises(ValueError, match="weight: dtype is Char, this operator needs Byte"):
        ops.linear(x, ops.Int4(stored.packed.view(torch.int8), stored.scale))
    with pytest.raises(ValueError, match="weight: rows of the weight is 32, out has 16"):
        ops.linear(x, ops.Int4(weight(32, 128)[0].packed, stored.scale))
    with pytest.raises(ValueError, match="weight: inner size is 256, x has 128"):
        ops.linear(x, weight(16, 256)[0])
    with pytest.raises(ValueError, match="weight: packed blocks have 1200 bytes, not 1072, 1120 or 1216"):
        ops.linear(x, ops.Int4(stored.packed[..., :1200].contiguous(), stored.scale))
    with pytest.raises(ValueError, match="out: features is 24, not a multiple of 16"):
        ops.linear(x, weight(48, 128)[0], silu_mul=True)
    with pytest.raises(ValueError, match=r"a weight of shape \[24, 128\] is not of multiples of 16 and 128"):
        weight(24, 128)
