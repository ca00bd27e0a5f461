"""int4 linear layers on a CPU: bit-identical to their definition, near float64, and equal in any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.executor import ops
from tests.kernels.packed import into

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(32, 1, 32), (96, 33, 32), (576, 65, 64), (512, 100, 128), (640, 31, 640), (1408, 96, 32), (4096, 40, 4096)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_threads(0)


@dataclass(frozen=True)
class Weight:
    """(values - zero) * scale."""

    values: torch.Tensor  # [out, in], 0 to 15
    scale: torch.Tensor  # [out, groups] float32
    zero: torch.Tensor | None  # [out, groups]

    def packed(self) -> ops.Packed:
        return ops.pack_int4(self.values[:, ::2] | self.values[:, 1::2] << 4, self.scale, self.zero)

    def centred(self) -> torch.Tensor:
        """Weights minus zero points: int64 [out, groups, inputs]."""
        numbers = self.values.view(*self.scale.shape, -1).to(torch.int64)
        return numbers - (8 if self.zero is None else self.zero[..., None].to(torch.int64))

    def exact(self) -> torch.Tensor:
        """The weight in float64."""
        return (self.centred() * self.scale.double()[..., None]).flatten(1)


def made(
    rows: int, inner: int, features: int, group: int, dtype: torch.dtype = torch.float32, **how: bool
) -> tuple[torch.Tensor, Weight]:
    """x and a weight.  zeros=False: without zero points.  wide=True: scales that are not exact in float16."""
    rng = torch.Generator().manual_seed(inner + group)
    numbers = torch.randint(0, 16, (features, inner), generator=rng).to(torch.uint8)
    scale = (torch.rand(features, inner // group, generator=rng) * inner**-0.5 + 1e-4).half().float()
    if how.get("wide"):
        scale *= 1 + 2**-20
    zero = torch.randint(0, 16, scale.shape, generator=rng).to(torch.uint8) if how.get("zeros", True) else None
    return torch.randn(rows, inner, generator=rng).to(dtype), Weight(numbers, scale, zero)


def product(x: torch.Tensor, weight: Weight, *more: torch.Tensor | None) -> torch.Tensor:
    """more: bias and plus."""
    packed = weight.packed()
    assert packed.ordered
    return ops.packed_linear(x, packed, *(None if one is None else one.clone() for one in more or (None,)))


def by_definition(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The definition in csrc/cpu/product_int4.h, in numpy's own arithmetic."""
    wide = x.float().numpy()
    largest = np.abs(wide).max(1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(np.float32(32639) / largest, np.float32(2.0**126))
    q = np.rint(wide * inverse).astype(np.int64).reshape(len(x), weight.scale.shape[1], -1)
    centred, scale = weight.centred().numpy(), weight.scale.numpy()
    total = np.zeros((len(x), len(scale)), np.float32)
    for group in range(scale.shape[1]):
        sums = q[:, group] @ centred[:, group].T
        total += sums.astype(np.float32) * scale[:, group]
    return torch.from_numpy(total * (np.float32(1) / inverse)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features", "group"), SIZES)
@pytest.mark.parametrize("how", [{}, {"zeros": False}, {"wide": True}], ids=str)
def test_bits_are_those_of_the_definition(
    dtype: torch.dtype, inner: int, features: int, group: int, how: dict[str, bool]
) -> None:
    x, weight = made(29, inner, features, group, dtype, **how)
    x[3] = 0
    x[4, 0] = 3e4
    x[5] *= 1e-4
    packed = weight.packed()
    assert packed.scale is not None
    assert packed.scale.dtype == (torch.float32 if how.get("wide") else torch.float16)
    assert torch.equal(product(x, weight), by_definition(x, weight))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-36, 3e38])
def test_the_smallest_and_the_largest_numbers(size: float) -> None:
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([size, -size / 2])
    weight = Weight(torch.full((2, 32), 9, dtype=torch.uint8), torch.ones(2, 1), None)
    y = product(x, weight)
    assert torch.equal(y, by_definition(x, weight))
    assert abs(y[0, 0].item() - size / 2) <= size * 1e-4 + 2**-126


@pytest.mark.parametrize("group", [32, 4096])
def test_the_largest_sums(group: int) -> None:
    """All operands at their limits and of one sign: no overflow."""
    for number, zero in ((0, 15), (15, 0)):
        for sign in (1, -1):
            x = torch.full((2, 8192), 32639.0 * sign)  # rounded with a scale of 1
            groups = 8192 // group
            zeros = torch.full((3, groups), zero, dtype=torch.uint8)
            weight = Weight(torch.full((3, 8192), number, dtype=torch.uint8), torch.ones(3, groups), zeros)
            y = product(x, weight)
            assert torch.equal(y, by_definition(x, weight))
            wanted = 8192.0 * 32639 * sign * (number - zero)
            assert (y - wanted).abs().max() <= groups * 2**-24 * abs(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features", "group"), SIZES)
@pytest.mark.parametrize("wild", [False, True])
def test_against_float64(dtype: torch.dtype, inner: int, features: int, group: int, wild: bool) -> None:
    """Within the error of the roundings, also if a few elements of x are large.

    An element of x has an error of half a step of its row.  In float32 a group's sum is rounded, multiplied, added to
    `groups` others, and scaled; bias and plus are added.  That is at most groups + 5 roundings of a part of
    sum |x| |weight|.  Finally the result is rounded to its dtype."""
    x, weight = made(29, inner, features, group, dtype)
    if wild:
        x[:, ::97] *= 30
    bias, plus = torch.randn(features).to(dtype), torch.randn(29, features).to(dtype)
    wanted = weight.exact()
    exact = x.double() @ wanted.T + bias.double() + plus.double()
    step = x.double().abs().amax(1, keepdim=True) / 32639
    sizes = x.double().abs() @ wanted.abs().T + step * wanted.abs().sum(1) + bias.double().abs() + plus.double().abs()
    roundings = (inner // group + 5) * 2**-24 * sizes * 1.01
    bound = step / 2 * 1.0001 * wanted.abs().sum(1) + roundings + (exact.abs() + roundings) * torch.finfo(dtype).eps / 2
    bound += step / 2 * wanted.abs().sum(1) * torch.finfo(dtype).eps
    error = (product(x, weight, bias, plus).double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() <= 1e-2 * exact.abs().max()


def test_results_in_float32() -> None:
    x, weight = made(5, 128, 40, 32, torch.bfloat16)
    out, packed = torch.empty(5, 40), weight.packed()
    into(out, x, packed)
    assert torch.equal(out, by_definition(x.float(), weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "features", "group"), [(64, 64, 32), (512, 1000, 64), (1408, 96, 32)])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, inner: int, features: int, group: int) -> None:
    x, weight = made(200, inner, features, group, dtype)
    packed = weight.packed()
    alone = torch.cat([ops.packed_linear(row[None], packed, None) for row in x])
    for threads, counts in ((1, (2, 4, 5, 6, 7, 12, 13, 31, 97, 200)), (2, (1, 64, 200))):
        ops.set_threads(threads)
        for rows in counts:
            assert torch.equal(ops.packed_linear(x[:rows], packed, None), alone[:rows])
            assert torch.equal(ops.packed_linear(x[200 - rows :], packed, None), alone[200 - rows :])


@settings(deadline=None)
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    rows, features = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 70))
    group = 32 * data.draw(st.integers(1, 12))
    inner = group * data.draw(st.integers(1, 5))
    how: dict[str, Any] = {"zeros": data.draw(st.booleans()), "wide": data.draw(st.booleans())}
    x, weight = made(rows, inner, features, group, **how)
    plus = torch.zeros(rows, features) if data.draw(st.booleans()) else None
    wanted = by_definition(x, weight) if rows else torch.empty(0, features)
    assert torch.equal(product(x, weight, None, plus), wanted)


def test_rows_of_a_larger_tensor() -> None:
    x, weight = made(20, 96, 40, 32, torch.bfloat16)
    wide, out = torch.cat([x, x], 1), torch.zeros(20, 80, dtype=torch.bfloat16)
    packed = weight.packed()
    into(out[::2, 40:], wide[::2, 96:], packed)
    assert torch.equal(out[::2, 40:], product(x[::2].contiguous(), weight))
    assert not out[:, :40].any()
    assert not out[1::2].any()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(number: float) -> None:
    x, weight = made(30, 128, 50, 64)
    x[7, 3] = number
    y = product(x, weight)
    assert y[7].isnan().all()
    assert y.isfinite().all(1).sum() == 29


def test_a_weight_of_another_shape_is_refused() -> None:
    x, weight = made(4, 64, 32, 32)
    packed = weight.packed()
    with pytest.raises(ValueError, match="steps"):
        ops.packed_linear(x[:, :60], packed, None)
    with pytest.raises(ValueError, match="bias"):
        ops.packed_linear(x, packed, torch.zeros(31))
    with pytest.raises(ValueError, match="x: dtype"):
        ops.packed_linear(x.double(), packed, None)
    assert packed.scale is not None
    assert packed.zero is not None
    for scale, zero, reason in (
        (packed.scale[:, :, 1:].clone(), packed.zero, "scale: features of a strip"),
        (packed.scale.double(), packed.zero, "scale: dtype"),
        (packed.scale, packed.zero[:, 1:].clone(), "zero: groups"),
        (packed.scale.repeat(1, 2, 1), None, "scale: groups is 4, x has an inner size of 64, and a group has 32, 64"),
        (packed.scale[:, :0].clone(), None, "scale: groups is 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            into(torch.empty(4, 32), x, dataclasses.replace(packed, scale=scale, zero=zero))
