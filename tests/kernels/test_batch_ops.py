"""apply_edits, decode_inputs and decode_outputs against plain loops."""

from __future__ import annotations

import pytest
import torch

from quire.engine.executor import ops

BLOCK_SIZE = 16


def mirror(rows: int = 20, columns: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and tables of `rows` slots."""
    token = torch.randint(1, 100_000, (rows,))
    position = torch.randint(0, columns * BLOCK_SIZE, (rows,))
    tables = torch.randint(0, 1_000_000, (rows, columns), dtype=torch.int32)
    return token, position, tables


def step(n: int) -> dict[str, torch.Tensor]:
    """Poisoned output tensors for decode_inputs."""
    return {name: torch.full((n,), -77) for name in ("ids", "positions", "kv_indices")} | {
        name: torch.full((n,), -77, dtype=torch.int32) for name in ("rows", "lens")
    }


@pytest.mark.parametrize("n", [0, 1, 20])
def test_decode_inputs(n: int) -> None:
    """Every third slot is padding; the first is at the end of a block, the second past its table."""
    token, position, tables = mirror()
    slots = torch.randperm(20, dtype=torch.int32)[:n]
    slots[2::3] = -1
    position[slots[:1]] = BLOCK_SIZE - 1
    position[slots[1:2]] = tables.shape[1] * BLOCK_SIZE
    out = step(n)
    ops.decode_inputs(slots, token, position, tables, BLOCK_SIZE, **out)
    for i, slot in enumerate(slots.tolist()):
        got = [out[name][i].item() for name in ("ids", "positions", "kv_indices", "rows", "lens")]
        if slot < 0 or i == 1:
            assert got == [0, 0, -1, 0, 0]
        else:
            at = int(position[slot])
            kv_index = int(tables[slot, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
            assert got == [token[slot], at, kv_index, slot, at + 1]


def test_a_slot_may_need_more_than_32_bits() -> None:
    token, position, tables = torch.tensor([5]), torch.tensor([3]), torch.tensor([[1 << 30]], dtype=torch.int32)
    out = step(1)
    ops.decode_inputs(torch.zeros(1, dtype=torch.int32), token, position, tables, 64, **out)
    assert out["kv_indices"].tolist() == [(1 << 30) * 64 + 3]


def test_decode_outputs() -> None:
    token, position, _ = mirror()
    slots = torch.tensor([7, -1, 0, 19, -1], dtype=torch.int32)
    expected_token, expected_position = token.clone(), position.clone()
    expected_token[[7, 0, 19]] = torch.tensor([10, 30, 40])
    expected_position[[7, 0, 19]] += 1
    ops.decode_outputs(slots, torch.tensor([10, 20, 30, 40, 50]), token, position)
    assert torch.equal(token, expected_token)
    assert torch.equal(position, expected_position)


def test_apply_edits() -> None:
    """Into a view of wider tables."""
    wide = torch.zeros(6, 10, dtype=torch.int32)
    ops.apply_edits(torch.tensor([[0, 0, 5], [5, 3, 7], [-1, 99, 9], [2, 1, 8]], dtype=torch.int32), wide[:, 2:6])
    expected = torch.zeros(6, 10, dtype=torch.int32)
    expected[0, 2], expected[5, 5], expected[2, 3] = 5, 7, 8
    assert torch.equal(wide, expected)


def test_shapes_and_indices_are_checked() -> None:
    token, position, tables = mirror()
    with pytest.raises(IndexError, match=r"slots\[1\] is 20, not in \[-1, 20\)"):
        ops.decode_outputs(torch.tensor([0, 20], dtype=torch.int32), torch.zeros(2).long(), token, position)
    with pytest.raises(ValueError, match="tokens: slots is 3, slots has 2"):
        ops.decode_outputs(torch.tensor([0, 1], dtype=torch.int32), torch.zeros(3).long(), token, position)
    with pytest.raises(ValueError, match="slots: dtype is Long, this operator needs Int"):
        ops.decode_inputs(torch.zeros(2).long(), token, position, tables, BLOCK_SIZE, **step(2))
    with pytest.raises(ValueError, match="ids: slots is 3, slots has 2"):
        ops.decode_inputs(torch.zeros(2).int(), token, position, tables, BLOCK_SIZE, **step(3))
    with pytest.raises(IndexError, match=r"edits\[1\]: column is 8, tables have 8"):
        ops.apply_edits(torch.tensor([[0, 0, 1], [0, 8, 1]], dtype=torch.int32), tables)
    with pytest.raises(IndexError, match=r"edits\[0\]: row is 20, tables have 20"):
        ops.apply_edits(torch.tensor([[20, 0, 1]], dtype=torch.int32), tables)
