"""Linear layers with a fixed order of summation: as exact as torch's, and bit-identical rows in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.engine.executor import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_threads(0)


def made(rows: int, inner: int, features: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inner, generator=rng), torch.randn(features, inner, generator=rng)
    return x.to(dtype), (weight * inner**-0.5).to(dtype)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, plus: torch.Tensor | None = None
) -> torch.Tensor:
    packed = ops.pack_weight(weight, ordered=True)
    assert packed is not None
    assert packed.ordered
    return ops.packed_linear(x, packed, bias, None if plus is None else plus.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), [(1, 1), (7, 33), (64, 32), (511, 100), (513, 31), (1408, 512)])
@pytest.mark.parametrize("more", [False, True])
def test_against_float64(dtype: torch.dtype, inner: int, features: int, more: bool) -> None:
    """As close as torch's own GEMM of the same dtype, up to a factor of two."""
    x, weight = made(29, inner, features, dtype)
    bias = made(1, features, 1, dtype, seed=1)[0][0] if more else None
    plus = made(29, features, 1, dtype, seed=2)[0] if more else None
    exact = x.double() @ weight.double().T
    if bias is not None and plus is not None:
        exact += bias.double() + plus.double()
    theirs = torch.nn.functional.linear(x, weight, bias)
    theirs = theirs if plus is None else theirs + plus
    noise = (theirs.double() - exact).abs().max()
    ulp = exact.abs().max() * torch.finfo(dtype).eps
    assert (product(x, weight, bias, plus).double() - exact).abs().max() <= 2 * noise + ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), [(64, 64), (512, 1000), (1408, 96), (4096, 256)])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, inner: int, features: int) -> None:
    """Alone, at any position, in any batch, on any number of threads."""
    x, weight = made(200, inner, features, dtype)
    alone = torch.cat([product(row[None], weight) for row in x])
    for threads, counts in ((1, (2, 5, 11, 12, 13, 31, 97, 200)), (2, (1, 64, 200))):
        ops.set_threads(threads)
        for rows in counts:
            assert torch.equal(product(x[:rows], weight), alone[:rows])
            assert torch.equal(product(x[200 - rows :], weight), alone[200 - rows :])


def test_the_library_does_depend_on_the_batch() -> None:
    """The reason for the operator: if this fails one day, `product` can be deleted."""
    x, weight = made(64, 4096, 64, torch.float32)
    alone = torch.cat([torch.nn.functional.linear(row[None], weight) for row in x])
    assert not torch.equal(torch.nn.functional.linear(x, weight), alone)


def test_rows_of_a_larger_tensor() -> None:
    x, weight = made(20, 96, 40, torch.bfloat16)
    wide = torch.cat([x, x], 1)
    assert torch.equal(product(wide[::2, 96:], weight), product(x[::2].contiguous(), weight))


def test_not_a_number_stays_in_its_row() -> None:
    x, weight = made(30, 100, 50, torch.float32)
    x[7, 3] = torch.nan
    y = product(x, weight)
    assert y[7].isnan().all()
    assert y.isfinite().all(1).sum() == 29


def test_no_rows() -> None:
    x, weight = made(0, 64, 32, torch.float32)
    assert product(x, weight).shape == (0, 32)


def test_a_weight_of_another_shape_is_refused() -> None:
    x, weight = made(4, 64, 32, torch.float32)
    packed = ops.pack_weight(weight, ordered=True)
    assert packed is not None
    with pytest.raises(ValueError, match="packed"):
        ops.packed_linear(x[:, :63], packed, None)
    with pytest.raises(ValueError, match="bias"):
        ops.packed_linear(x, packed, torch.zeros(31))
    with pytest.raises(ValueError, match=r"packed: (dtype|steps)"):
        ops.packed_linear(x.bfloat16(), packed, None)
