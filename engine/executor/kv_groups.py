"""KV groups: layers with a sliding window get fewer blocks than layers that attend to every token.

    ids of blocks   | 0 ............................. | ......... | ...... |
    group           0: layers with the longest window   1: window    2: another window
    memory          the rest                            max_seqs windows, a step's tokens, 1/8 more for cached blocks

`core/layer_groups.py` defines which blocks a sequence holds.  The window blocks that all slots can hold together follow
from windows and slots, so they are allocated first.  If memory is too small for all slots, there are window blocks for
as many sequences as fit if each is four windows long.  One block table serves all layers in these cases:

  * layers are of one kind, or a window is as long as the longest sequence
  * with several ranks, and with recurrent layers
  * memory is so small that window blocks would leave no more tokens for the other layers than one table does
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.core.plan import WindowGroup
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.grouped_swap import GroupedSwap
from quire.engine.executor.kv_cache import GIB, Caches, KVShape, WindowBlocks, by_shape
from quire.engine.executor.swap import Swap

log = logging.getLogger(__name__)

CACHED = 8  # one window block for cached prefixes is added per CACHED window blocks for running sequences
REFERENCE = 4  # with scarce memory, sequences of this many windows use up window blocks and full blocks equally fast


@dataclass(frozen=True)
class KVGroup:
    """Layers that share block tables."""

    window: int  # tokens; 0: all
    layers: tuple[int, ...]
    token_bytes: int  # bytes per token: keys and values of all its layers
    blocks: int = 0

    def spec(self, host_blocks: int = 0, block_size: int = 0) -> WindowGroup:
        """Return the scheduler's description of a window group."""
        return WindowGroup(self.window, self.blocks, host_blocks, block_size * self.token_bytes)


class KVMemory(NamedTuple):
    """The KV cache of a worker, by group of layers."""

    token_bytes: int  # bytes per token of the first group's layers
    windows: list[WindowGroup]  # the other groups, which are window groups
    shapes: list[list[list[Tensor]]]  # per group, lists of tensors of one shape: one call moves their blocks


def grouping_windows(option: str, windows: Sequence[int], ranks: int, recurrent: bool) -> Sequence[int]:
    """Return the windows by which layers are grouped; empty: one block table serves all layers.

    option: `window_groups`.  Raises ModelLoadError if it is on and the model or the ranks do not support groups."""
    why_not = "the model has recurrent layers" if recurrent else ""
    if ranks > 1:
        why_not = f"tensor_parallel is {ranks}"
    if option == "on" and why_not:
        raise ModelLoadError(
            f"window_groups is on and {why_not}: all layers then share one block table; set it to auto"
        )
    return () if option == "off" or why_not else windows


def group_layers(layers: list[KVShape], windows: Sequence[int], itemsize: int, longest: int) -> list[KVGroup]:
    """Return the KV groups, the longest window first.  `windows`: tokens per layer (0: no window); empty: not known.

    itemsize: bytes per element.  longest: tokens of the longest sequence."""
    reach = [window if 0 < window < longest else 0 for window in windows] or [0] * len(layers)
    owned = dict[int, int]()  # layers with a cache of their own -> longest window of the layers that read it
    for index, layer in enumerate(layers):
        owner = index if layer.shares is None else layer.shares
        seen = owned.get(owner, reach[index])
        owned[owner] = max(seen, reach[index]) if seen and reach[index] else 0
    kinds = sorted(set(owned.values()), key=lambda window: -(window or longest + 1))
    groups = []
    for window in kinds:
        members = [i for i, layer in enumerate(layers) if owned[i if layer.shares is None else layer.shares] == window]
        values = sum(2 * layers[i].heads * layers[i].head_size for i in members if layers[i].shares is None)
        groups.append(KVGroup(window, tuple(members), values * itemsize))
    return groups


def window_layers(windows: Sequence[KVGroup]) -> dict[int, WindowBlocks]:
    """Return layer index -> blocks of its group, for layers in window groups."""
    places = [WindowBlocks(group.blocks, at, group.window) for at, group in enumerate(windows, 1)]
    return {layer: place for group, place in zip(windows, places, strict=True) for layer in group.layers}


def block_ids(full_blocks: int, windows: Sequence[KVGroup]) -> list[range]:
    """Return the ids by which plans name the blocks of each window group."""
    ids, at = [], full_blocks
    for group in windows:
        ids.append(range(at, at + group.blocks))
        at += group.blocks
    return ids


def split_caches(caches: Caches) -> list[Caches]:
    """Return the caches of each group."""
    return [[cache for cache in caches if cache.group == at] for at in range(max(each.group for each in caches) + 1)]


def shapes_by_group(caches: Caches) -> list[list[list[Tensor]]]:
    """Return the tensors of each group, grouped by shape."""
    return [by_shape(own) for own in split_caches(caches)]


def swap_for(caches: Caches, host_bytes: int) -> Swap | GroupedSwap:
    """Return the swap of all layers' blocks.  `host_bytes` are divided among the groups in proportion to their size.

    No sequence starts while another one is swapped out, so at most the contents of the cache are swapped out.  If most
    blocks are shared, that takes up to twice the cache's blocks, because each sequence's blocks are copied."""
    tensors = [[tensor for shape in shapes for tensor in shape] for shapes in shapes_by_group(caches)]
    counts = [len(own[0]) for own in tensors]
    total = sum(tensor.nbytes for own in tensors for tensor in own)
    sizes = [min(host_bytes * count // total, 2 * count) for count in counts]
    device = tensors[0][0].device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # copies of all groups take turns on the bus
    swaps = [Swap(own, size, stream=stream) for own, size in zip(split_caches(caches), sizes, strict=True)]
    return swaps[0] if len(swaps) == 1 else GroupedSwap(swaps, counts)


def blocks_held(group: KVGroup, tokens: int, block_size: int) -> int:
    """Return the blocks of a group that a decoding sequence of this length holds."""
    full = -(-tokens // block_size)
    return min(full, group.spec().blocks_per_sequence(block_size, tokens)) if group.window else full


def held_share(groups: Sequence[KVGroup], tokens: int, block_size: int) -> float:
    """Return a sequence's memory relative to its memory with one block table for all layers."""
    held = sum(blocks_held(group, tokens, block_size) * group.token_bytes for group in groups)
    return held / (-(-tokens // block_size) * sum(group.token_bytes for group in groups))


def divide(
    groups: Sequence[KVGroup],
    *,
    block_size: int,
    longest: int,
    slots: int,
    step_tokens: int,
    memory: int,
    kv_blocks: int,
) -> list[KVGroup]:
    """Return the window groups with their number of blocks; an empty list if one table serves all layers.

    memory: bytes for all groups.  kv_blocks: blocks of the first group, in addition to those of window groups; 0: the
    first group gets the rest of the memory."""
    full, *windows = groups
    if not windows or not full.token_bytes:
        return []
    sizes = [group.token_bytes * block_size for group in windows]
    each = [group.spec().reserved_blocks(block_size, longest) for group in windows]
    full_bytes = full.token_bytes * block_size
    plan = WindowGroup.blocks_per_plan(block_size, step_tokens, kv_blocks or memory // full_bytes)
    if kv_blocks:
        sequences = min(slots, kv_blocks)
    else:
        tokens = min(longest, REFERENCE * max(group.window for group in windows))
        of_windows = sum(count * size for count, size in zip(each, sizes, strict=True)) * (1 + 1 / CACHED)
        of_one = of_windows + -(-tokens // block_size) * full_bytes
        sequences = min(slots, int((memory - plan * sum(sizes)) / of_one))
    if sequences < 1:
        return []
    found = [
        replace(group, blocks=plan + sequences * count + sequences * count // CACHED)
        for group, count in zip(windows, each, strict=True)
    ]
    taken = sum(group.blocks * size for group, size in zip(found, sizes, strict=True))
    together = memory // (full_bytes + sum(sizes))
    return found if kv_blocks or (memory - taken) // full_bytes > together else []


def divide_layers(
    groups: Sequence[KVGroup], config: EngineConfig, *, longest: int, slots: int, step_tokens: int, memory: int
) -> list[KVGroup]:
    """Return the groups that have block tables, and the window groups' numbers of blocks.  Arguments as in `divide`."""
    sizes = {"block_size": config.block_size, "longest": longest, "slots": slots, "step_tokens": step_tokens}
    if windows := divide(groups, memory=memory, kv_blocks=config.kv_blocks, **sizes):
        return [groups[0], *windows]
    layers = tuple(sorted(layer for group in groups for layer in group.layers))
    return [KVGroup(0, layers, sum(group.token_bytes for group in groups))]


def report(full: KVGroup, windows: Sequence[KVGroup], block_size: int, longest: int) -> None:
    """Log how memory is divided, in one line.  longest: tokens of the longest sequence."""
    if not windows:
        return
    parts = []
    for group in (full, *windows):
        kind = f"with a window of {group.window} tokens" if group.window else "that see all tokens"
        gib = group.blocks * block_size * group.token_bytes / GIB
        parts.append(f"{len(group.layers)} layers {kind} have {group.blocks} blocks ({gib:.2f} GiB)")
    log.info(
        "KV cache: %s: the windows of all sequences that may run at once, the tokens of one step and an eighth for "
        "cached prefixes, the rest for the other layers; a sequence of %d tokens takes %.2f of what it would take with "
        "one block table",
        *("; ".join(parts), longest, held_share([full, *windows], longest, block_size)),
    )
