"""Packing of int4 weights for a GPU: values read from the packed blocks equal those packed."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.executor import ops
from quire.engine.executor.int4_layout import CHUNK, INPUTS, ROWS, pack

SHAPES = [(16, 128, 32), (48, 256, 64), (32, 384, 128), (16, 512, 256), (32, 384, 96), (16, 640, 640)]


def made(rows: int, inner: int, group: int, *, zeros: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15 [rows, inner], and scales and zero points of groups."""
    rng = torch.Generator().manual_seed(rows + inner + group)
    numbers = torch.randint(0, 16, (rows, inner), generator=rng).to(torch.uint8)
    scale = (torch.rand(rows, inner // group, generator=rng) + 0.1).half().float()
    zero = torch.randint(0, 16, scale.shape, generator=rng).to(torch.uint8) if zeros else torch.full_like(scale, 8)
    return numbers, scale, zero.to(torch.uint8)


def in_bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def read(records: torch.Tensor, row: int, column: int) -> tuple[int, float, int]:
    """A number, its scale without that of the row, and its zero point, from where csrc/cuda/linear/int4.h has them."""
    record = records[row // ROWS, column // INPUTS].numpy().tobytes()
    groups = (len(record) - 1024) // 48
    r, g = row % ROWS // 8, row % 8
    half, h, t, j, byte = (column % INPUTS // unit % count for unit, count in
                           ((64, 2), (32, 2), (8, 4), (4, 2), (1, 4)))  # fmt: skip
    [word] = struct.unpack_from("<I", record, 512 * half + 16 * (4 * g + t) + 4 * (2 * j + r))
    group = {1: 0, 2: half, 4: 2 * half + h}[groups]
    of_half = 2 if groups == 4 else 1
    at = (group // of_half * 8 + g) * of_half * 2 + group % of_half * 2 + r
    [scale] = struct.unpack_from("<e", record, 1024 + 2 * at)
    return word >> 8 * byte + 4 * h & 15, scale, record[1024 + 32 * groups + at]


@pytest.mark.parametrize(("rows", "inner", "group"), SHAPES)
@pytest.mark.parametrize("zeros", [True, False])
def test_records_hold_numbers_scales_and_zero_points(rows: int, inner: int, group: int, zeros: bool) -> None:
    numbers, scale, zero = made(rows, inner, group, zeros=zeros)
    records, row_scale = pack(in_bytes(numbers), scale, zero if zeros else None)
    together = next(size for size in (128, 64, 32) if group % size == 0)
    assert records.shape == (rows // 16, inner // 128, 1024 + 128 // together * 48)
    for row in range(rows):
        for column in range(0, inner, 1 if row == 5 else 7):
            number, of_group, point = read(records, row, column)
            assert number == numbers[row, column]
            assert of_group * row_scale[row] == scale[row, column // group]
            assert point == zero[row, column // group]


def test_a_weight_is_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, scale, zero = made(80, 256, 32)
    whole = pack(in_bytes(numbers), scale, zero)
    monkeypatch.setattr("quire.engine.executor.int4_layout.CHUNK", 256 * 32)
    pieces = pack(in_bytes(numbers), scale, zero)
    assert CHUNK > 80 * 256
    assert all(map(torch.equal, whole, pieces))


@given(st.floats(-30, 30), st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 100))
def test_scales_of_two_bytes_are_kept(power: float, stored: torch.dtype, seed: int) -> None:
    """Whatever the range of a row, up to 2^28 between its scales, and whatever the range of the weight."""
    rng = torch.Generator().manual_seed(seed)
    scale = torch.exp2(-28 * torch.rand(16, 4, generator=rng)) * 2.0**power
    scale = scale.clamp(max=torch.finfo(stored).max).to(stored).float()
    records, row_scale = pack(torch.zeros(16, 64, dtype=torch.uint8), scale, None)
    for row in range(16):
        for group in range(4):
            found = read(records, row, 32 * group)[1] * float(row_scale[row])
            assert found == scale[row, group]


@given(st.integers(0, 100))
def test_other_scales_are_off_by_less_than_a_thousandth(seed: int) -> None:
    scale = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))  # scales of either sign
    scale[3] = 0
    records, row_scale = pack(torch.zeros(16, 64, dtype=torch.uint8), scale, None)
    for row in range(16):
        for group in range(4):
            found = read(records, row, 32 * group)[1] * float(row_scale[row])
            assert found == pytest.approx(float(scale[row, group]), rel=2**-11, abs=1e-7)


@pytest.mark.parametrize(
    ("shape", "groups", "said"),
    [
        ((24, 64), 4, r"a weight of shape \[24, 128\] is not of multiples of 16 and 128"),
        ((16, 32), 2, r"a weight of shape \[16, 64\] is not of multiples of 16 and 128"),
        ((16, 64), 8, "8 groups in 128 inputs are not of multiples of 32"),
        ((16, 64), 3, "3 groups in 128 inputs are not of multiples of 32"),
    ],
)
def test_other_shapes_are_refused(shape: tuple[int, int], groups: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ops.pack_int4_gpu(torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[0], groups), None)
