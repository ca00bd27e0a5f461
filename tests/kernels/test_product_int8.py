"""int8 linear layers on a CPU: bit-identical to integer arithmetic, near float64, and equal in any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.executor import ops
from tests.kernels.packed import into

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (7, 33), (64, 32), (255, 100), (257, 31), (513, 96), (1408, 512)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_threads(0)


def made(rows: int, inner: int, features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, and values and scales of a weight; all int8 values occur if the size allows."""
    rng = torch.Generator().manual_seed(inner)
    numbers = torch.randint(-128, 128, (features, inner), generator=rng).to(torch.int8)
    scale = torch.rand(features, generator=rng) * inner**-0.5 / 64 + 1e-4
    return torch.randn(rows, inner, generator=rng).to(dtype), numbers, scale


def product(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    packed = ops.pack_int8(numbers, scale)
    assert packed.ordered
    return ops.packed_linear(x, packed, bias, None if plus is None else plus.clone())


def in_integers(x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition in csrc/cpu/product_int8.h, element by element in numpy's arithmetic."""
    wide = x.float().numpy()
    largest = np.abs(wide).max(1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(np.float32(32639) / largest, np.float32(2.0**126))
    q = np.rint(wide * inverse).astype(np.int64)
    sums = (q @ numbers.numpy().astype(np.int64).T).astype(np.float32)
    return torch.from_numpy(sums * (np.float32(1) / inverse) * scale.numpy()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), SIZES)
def test_bits_are_those_of_integers(dtype: torch.dtype, inner: int, features: int) -> None:
    x, numbers, scale = made(29, inner, features, dtype)
    x[3] = 0
    x[4, 0] = 3e4
    x[5] *= 1e-4
    assert torch.equal(product(x, numbers, scale), in_integers(x, numbers, scale))


@pytest.mark.parametrize("inner", [4095, 4096, 4097, 4102, 8200])
def test_bits_where_a_run_of_vnni_ends(inner: int) -> None:
    x, numbers, scale = made(7, inner, 40, torch.float32)
    x[3] = x[4].abs().sign()
    numbers[5], numbers[6] = 127, -128
    assert torch.equal(product(x, numbers, scale), in_integers(x, numbers, scale))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-36, 3e38])
def test_the_smallest_and_the_largest_numbers(size: float) -> None:
    x = torch.tensor([[size, -size / 2, 0.0]])
    y = product(x, torch.tensor([[1, 0, 0], [0, 2, 0]], dtype=torch.int8), torch.ones(2))
    assert torch.equal(y, in_integers(x, torch.tensor([[1, 0, 0], [0, 2, 0]], dtype=torch.int8), torch.ones(2)))
    assert abs(y[0, 0].item() - size) <= size * 1e-4 + 2**-126


def test_the_largest_sums() -> None:
    """All operands at their limits and of one sign: no overflow."""
    for number in (-128, 127):
        for sign in (1, -1):
            x = torch.full((2, 70_000), 32639.0 * sign)  # rounded with a scale of 1
            y = product(x, torch.full((33, 70_000), number, dtype=torch.int8), torch.ones(33))
            assert torch.equal(y, torch.full((2, 33), 70_000.0 * 32639 * sign * number))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), SIZES)
@pytest.mark.parametrize("wild", [False, True])
def test_against_float64(dtype: torch.dtype, inner: int, features: int, wild: bool) -> None:
    """Within the error of rounding x to 16 bits and the result to its dtype, also if a few elements are large."""
    x, numbers, scale = made(29, inner, features, dtype)
    if wild:
        x[:, ::97] *= 30
    bias, plus = torch.randn(features).to(dtype), torch.randn(29, features).to(dtype)
    weight = numbers.double() * scale.double()[:, None]
    exact = x.double() @ weight.T + bias.double() + plus.double()
    step = x.double().abs().amax(1, keepdim=True) / 32639
    bound = (
        step / 2 * weight.abs().sum(1) + exact.abs() * torch.finfo(dtype).eps + x.double().abs() @ weight.abs().T * 1e-6
    )
    error = (product(x, numbers, scale, bias, plus).double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() <= 1e-2 * exact.abs().max()


def test_results_in_float32() -> None:
    x, numbers, scale = made(5, 100, 40, torch.bfloat16)
    out = torch.empty(5, 40)
    packed = ops.pack_int8(numbers, scale)
    assert packed.scale is not None
    into(out, x, packed)
    assert torch.equal(out, in_integers(x.float(), numbers, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features"), [(64, 64), (512, 1000), (1408, 96)])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, inner: int, features: int) -> None:
    x, numbers, scale = made(200, inner, features, dtype)
    alone = torch.cat([product(row[None], numbers, scale) for row in x])
    for threads, counts in ((1, (2, 5, 6, 7, 12, 13, 31, 97, 200)), (2, (1, 64, 200))):
        ops.set_threads(threads)
        for rows in counts:
            assert torch.equal(product(x[:rows], numbers, scale), alone[:rows])
            assert torch.equal(product(x[200 - rows :], numbers, scale), alone[200 - rows :])


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 300), st.integers(1, 70), st.booleans())
def test_any_size(rows: int, inner: int, features: int, plus: bool) -> None:
    x, numbers, scale = made(rows, inner, features, torch.float32)
    assert torch.equal(
        product(x, numbers, scale, None, torch.zeros(rows, features) if plus else None),
        in_integers(x, numbers, scale) if rows else torch.empty(0, features),
    )


def test_rows_of_a_larger_tensor() -> None:
    x, numbers, scale = made(20, 96, 40, torch.bfloat16)
    wide = torch.cat([x, x], 1)
    packed = ops.pack_int8(numbers, scale)
    out = torch.zeros(20, 80, dtype=torch.bfloat16)
    assert packed.scale is not None
    into(out[::2, 40:], wide[::2, 96:], packed)
    assert torch.equal(out[::2, 40:], product(x[::2].contiguous(), numbers, scale))
    assert not out[:, :40].any()
    assert not out[1::2].any()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(number: float) -> None:
    x, numbers, scale = made(30, 100, 50, torch.float32)
    x[7, 3] = number
    y = product(x, numbers, scale)
    assert y[7].isnan().all()
    assert y.isfinite().all(1).sum() == 29


def test_a_weight_of_another_shape_is_refused() -> None:
    x, numbers, scale = made(4, 64, 32, torch.float32)
    packed = ops.pack_int8(numbers, scale)
    with pytest.raises(ValueError, match="packed"):
        ops.packed_linear(x[:, :60], packed, None)
    with pytest.raises(ValueError, match="bias"):
        ops.packed_linear(x, packed, torch.zeros(31))
    with pytest.raises(ValueError, match="x: dtype"):
        ops.packed_linear(x.double(), packed, None)
    assert packed.scale is not None
    with pytest.raises(ValueError, match="scale: padded features"):
        into(torch.empty(4, 32), x, dataclasses.replace(packed, scale=packed.scale[1:].clone()))
