"""Linear layers of many rows with weights dequantised to bfloat16: near float64, and only if `widen` is set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.quantised import DTYPE, Quantised
from tests.matrix import examples

KINDS = ["int8", "int4"]
SIZES = [(32, 1), (96, 33), (576, 65), (1408, 96), (2304, 40), (4128, 17)]
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_threads(0)


@pytest.fixture
def rows(kind: str) -> int:
    """Minimum rows at which weights are dequantised to bfloat16."""
    found = ops.widened_rows()
    if found is None:
        pytest.skip("this CPU has no bfloat16 instructions")
    return found[KINDS.index(kind)]


def pack(weight: Quantised, *, ordered: bool = False) -> ops.Packed:
    if weight.values.dtype == torch.int8:
        return ops.pack_int8(weight.values, weight.scale, ordered=ordered)
    return ops.pack_int4(weight.values, weight.scale, weight.zero, ordered=ordered)


def made(kind: str, rows: int, inner: int, features: int) -> tuple[torch.Tensor, Quantised]:
    """x in bfloat16 and a weight; int8 has all values if the size allows."""
    rng = torch.Generator().manual_seed(inner)
    weight = Quantised.of(torch.randn(features, inner, generator=rng), DTYPE["int8" if kind == "int8" else "int4"])
    if kind == "int8":
        weight.values.random_(-128, 128, generator=rng)
    return torch.randn(rows, inner, generator=rng).bfloat16(), weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inner", "features"), SIZES)
@pytest.mark.parametrize("more", [0, 1, 50, 700])
@pytest.mark.parametrize("wild", [False, True])
def test_against_float64(kind: str, rows: int, inner: int, features: int, more: int, wild: bool) -> None:
    """Errors: int4 weights are rounded to bfloat16, sums are float32, and the result is rounded to bfloat16."""
    x, weight = made(kind, rows + more, inner, features)
    if wild:
        x[:, ::97] *= 30
    bias, plus = torch.randn(features).bfloat16(), torch.randn(len(x), features).bfloat16()
    exact_weight = weight.dequantised(torch.float64)
    exact = x.double() @ exact_weight.T + bias.double() + plus.double()
    sizes = x.double().abs() @ exact_weight.abs().T
    bound = sizes * ((BFLOAT16_EPS / 2 if kind == "int4" else 0) + 1e-5) + exact.abs() * BFLOAT16_EPS + 1e-6
    error = (ops.packed_linear(x, pack(weight), bias, plus.clone()).double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() <= 1e-2 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_products_after_a_norm_before_an_activation_and_in_float32(kind: str, rows: int) -> None:
    x, weight = made(kind, rows + 9, 96, 128)
    packed, norm = pack(weight), torch.rand(96).bfloat16()
    normed = ops.rms_norm(x, norm, 1e-5)
    alone = ops.packed_linear(normed, packed, None)
    assert torch.equal(ops.packed_linear(x, packed, None, norm=norm, eps=1e-5), alone)
    assert torch.equal(ops.packed_linear(x, packed, None, norm=norm, eps=1e-5, silu_mul=True), ops.silu_mul(alone))
    if kind == "int8":
        wide = ops.packed_linear(
            normed, ops.pack_int8(weight.values, weight.scale, ordered=False, float32_out=True), None
        )
        assert wide.dtype == torch.float32
        assert torch.equal(wide.bfloat16(), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_larger_tensor(kind: str, rows: int) -> None:
    x, weight = made(kind, 2 * rows, 96, 40)
    wide, packed = torch.cat([x, x], 1), pack(weight)
    y = ops.packed_linear(wide[::2, 96:], packed, None)
    assert torch.equal(y, ops.packed_linear(x[::2].contiguous(), packed, None))


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    kind, rows = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 200))
    inner = data.draw(st.integers(1, 300)) if kind == "int8" else 32 * data.draw(st.integers(1, 20))
    ops.set_threads(data.draw(st.integers(1, 2)))
    x, weight = made(kind, rows, inner, data.draw(st.integers(1, 140)))
    exact = x.double() @ weight.dequantised(torch.float64).T
    error = (ops.packed_linear(x, pack(weight), None).double() - exact).abs()
    assert error.shape == exact.shape
    assert rows == 0 or error.max() <= 1e-2 * exact.abs().max()


def lost_in_integers(kind: str, rows: int) -> tuple[torch.Tensor, Quantised]:
    """x with an element so large that 16-bit quantisation makes the others 0; the weight of the large one is 0."""
    x, weight = made(kind, rows, 64, 32)
    x[:, 0] = 2.0**40
    weight.values[:, 0] = 0
    if weight.zero is not None:
        weight.values.fill_(0x98)
        weight.zero.fill_(8)
    return x, weight


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_meet_bfloat16_and_few_meet_integers(kind: str, rows: int) -> None:
    x, weight = lost_in_integers(kind, rows)
    packed, exact = pack(weight), x.double() @ weight.dequantised(torch.float64).T
    assert not packed.ordered
    assert not ops.packed_linear(x[1:], packed, None).any()
    error = (ops.packed_linear(x, packed, None).double() - exact).abs().max()
    assert error <= 1e-2 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_ordered_products_meet_integers_with_any_number_of_rows(kind: str) -> None:
    x, weight = lost_in_integers(kind, 300)
    packed = pack(weight, ordered=True)
    assert packed.ordered
    assert not ops.packed_linear(x, packed, None).any()
    x, weight = made(kind, 300, 576, 96)
    packed = pack(weight, ordered=True)
    alone = torch.cat([ops.packed_linear(row[None], packed, None) for row in x])
    for count in (2, 11, 12, 19, 20, 47, 48, 64, 300):
        assert torch.equal(ops.packed_linear(x[:count], packed, None), alone[:count])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_meet_integers(kind: str, dtype: torch.dtype) -> None:
    x, weight = made(kind, 300, 96, 40)
    wanted = ops.packed_linear(x.to(dtype), pack(weight, ordered=True), None)
    assert torch.equal(ops.packed_linear(x.to(dtype), pack(weight), None), wanted)


@pytest.mark.parametrize("rows", [1, 70, 700])
def test_a_plain_weight_on_matrix_tiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The path of a CPU with AMX, run with this CPU's instructions."""
    if ops.widened_rows() is None or torch.ops.quire.product_layout.default(torch.empty(0).bfloat16())[1] != 2:
        pytest.skip("this build or this CPU has no bfloat16 instructions")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    x, weight, bias = torch.randn(rows, 1100).bfloat16(), torch.randn(70, 1100).bfloat16(), torch.randn(70).bfloat16()
    packed, plus = ops.pack_weight(weight, ordered=False, float32_out=True), torch.randn(rows, 70)
    assert packed is not None
    assert packed.widen
    assert packed.ordered == ops.tiles_keep_order()
    exact = x.double() @ weight.double().T + bias.double()
    assert (ops.packed_linear(x, packed, bias) - exact).abs().max() < 1e-3
    assert (ops.packed_linear(x, packed, bias, plus.clone()) - exact - plus).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(kind: str, rows: int, number: float) -> None:
    x, weight = made(kind, rows + 30, 128, 50)
    x[7, 3] = number
    y = ops.packed_linear(x, pack(weight), None)
    assert not y[7].isfinite().any()
    assert y.isfinite().all(1).sum() == len(x) - 1
