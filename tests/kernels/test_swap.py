"""KV swap: blocks copied to host memory return byte for byte, to any block."""

from __future__ import annotations

import pytest
import torch

from quire.engine.executor import ops
from quire.engine.executor.kv_cache import Caches, KVShape, allocate
from quire.engine.executor.swap import Swap, runs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def flat(caches: Caches) -> list[torch.Tensor]:
    return [tensor for cache in caches for tensor in (cache.k, cache.v)]


def random_caches(device: str, dtype: torch.dtype, layers: int, blocks: int, size: int = 80) -> Caches:
    return random_content([KVShape(3, size)] * layers, device, dtype, blocks)


def random_content(layers: list[KVShape], device: str, dtype: torch.dtype, blocks: int) -> Caches:
    caches = allocate(layers, blocks, 16, dtype, torch.device(device))
    for tensor in flat(caches):
        tensor.view(torch.uint8).random_()
    return caches


def as_bytes(caches: Caches) -> torch.Tensor:
    """Return the bytes of all caches, [caches, blocks, bytes]."""
    return torch.stack([cache.view(torch.uint8).flatten(1) for cache in flat(caches)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layers", "count"), [(1, 1), (3, 5), (3, 11), (150, 4)])
def test_there_and_back(device: str, dtype: torch.dtype, layers: int, count: int) -> None:
    """More blocks than are staged at once, more caches than one launch takes, host blocks in any order, some of
    them consecutive.  All other blocks keep their contents."""
    caches = random_caches(device, dtype, layers, 40, size=80 if layers < 10 else 8)
    swap = Swap(caches, 2 * count, at_once=4)
    [host] = swap.host
    host.fill_(77)
    before = as_bytes(caches)
    blocks = torch.randperm(40)[: 2 * count].tolist()
    away, others = blocks[:count], blocks[count:]
    there = [*range(count // 2), *reversed(range(count, 2 * count - count // 2))]
    going = swap.out(list(zip(away, there, strict=True)))
    for cache in flat(caches):
        cache[away] = 0  # after the read, so the swap must not see it
    if going:
        going.synchronize()
    assert torch.equal(host[there], before[:, away].transpose(0, 1).cpu())
    untouched = [at for at in range(2 * count) if at not in there]
    assert (host[untouched] == 77).all()
    swap.back(list(zip(there, others, strict=True)))
    before[:, away] = 0
    before[:, others] = host[there].to(device).transpose(0, 1)
    assert torch.equal(as_bytes(caches), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_several_shapes(device: str, dtype: torch.dtype) -> None:
    """Heads and their sizes differ, and one layer reads the cache of another: every byte returns, each once."""
    layers = [KVShape(3, 16), KVShape(1, 64), KVShape(3, 16), KVShape(1, 64, shares=1), KVShape(2, 16)]
    caches = random_content(layers, device, dtype, 20)
    swap = Swap(caches, 12, at_once=4)
    before = [tensor.view(torch.uint8).clone() for tensor in flat(caches)]
    blocks = torch.randperm(20)[:7].tolist()
    there = [0, 1, 2, 7, 9, 10, 11]
    swap.out(list(zip(blocks, there, strict=True)))
    swap.back(list(zip(there, blocks[::-1], strict=True)))
    if device == "cuda":
        torch.cuda.synchronize()
    for tensor, old in zip(flat(caches), before, strict=True):
        wanted = old.clone()
        wanted[blocks[::-1]] = old[blocks]
        assert torch.equal(tensor.view(torch.uint8), wanted)
    numbers = (
        2 * (3 * 16 + 64 + 3 * 16 + 2 * 16) * 16
    )  # elements per block: keys and values of the layers with their own cache
    assert swap.moved()[0] == 2 * 7 * numbers * dtype.itemsize


@pytest.mark.parametrize("device", DEVICES)
def test_back_waits_for_who_still_reads(device: str) -> None:
    """A block is swapped in over one that an earlier launch still has to copy."""
    caches = random_caches(device, torch.bfloat16, 2, 400, size=128)
    swap = Swap(caches, 1)
    tensors = flat(caches)
    swap.host[0].fill_(1)
    before = as_bytes(caches)
    pairs = torch.stack([torch.arange(200), torch.arange(200, 400)], 1).to(device)
    for _ in range(20):
        ops.block_copy(tensors, pairs)
    swap.back([(0, 199)])
    after = as_bytes(caches)
    assert torch.equal(after[:, 399], before[:, 199])
    assert (after[:, 199] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_move(device: str) -> None:
    caches = random_caches(device, torch.float32, 1, 4)
    swap = Swap(caches, 0)
    before = as_bytes(caches)
    swap.out([])
    swap.back([])
    assert swap.measure() == 0.0
    assert torch.equal(as_bytes(caches), before)


@pytest.mark.parametrize("device", DEVICES)
def test_it_measures_itself_and_leaves_the_blocks_alone(device: str) -> None:
    caches = random_caches(device, torch.bfloat16, 2, 20)
    swap = Swap(caches, 9, at_once=4)
    before = as_bytes(caches)
    assert swap.measure() > 0
    assert torch.equal(as_bytes(caches), before)
    assert swap.moved() == (0, 0.0)
    swap.out([(3, 0), (7, 5)])
    swap.back([(5, 8)])
    if device == "cuda":
        torch.cuda.synchronize()
    moved, seconds = swap.moved()
    assert moved == 3 * 2 * 2 * 3 * 16 * 80 * 2  # blocks, keys and values, layers, heads, tokens, head size, bytes
    assert seconds > 0
    assert swap.moved() == (0, 0.0)


def test_neighbours_on_the_host_travel_together() -> None:
    assert list(runs([5, 9, 2, 7], [3, 4, 6, 7])) == [([5, 9], slice(3, 5)), ([2, 7], slice(6, 8))]
    assert list(runs([5, 9], [4, 3])) == [([5], slice(4, 5)), ([9], slice(3, 4))]
    assert list(runs([], [])) == []


def test_shapes_and_indices_are_checked() -> None:
    caches = random_caches("cpu", torch.float32, 1, 4)
    swap = Swap(caches, 2)
    with pytest.raises(IndexError, match=r"blocks\[1\] is 4, not in \[0, 4\)"):
        swap.out([(0, 0), (4, 1)])
    with pytest.raises(ValueError, match="buffer: blocks is 0, blocks has 1"):
        swap.back([(2, 0)])
