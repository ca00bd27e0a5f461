"""Divides the memory of sequences between the KV cache and recurrent states.

    memory = KV blocks + slots * state (live) + checkpoints * state + rollbacks * state

A live state is as large at the first token as at the last, so `max_seqs` states take a fixed size.  If max_seqs is not
configured, live states get half of the states' memory.  The other half is for up to MAX_CHECKPOINTS checkpoints, and
memory beyond that goes to the KV cache.  If sequences draft, 1/ROLLBACK_SHARE of this half, at most MAX_ROLLBACKS
states, is set aside to roll back refused drafts (models/recurrent/rollback.py).  On a GPU states are allocated first,
and the KV cache gets what they and a step leave.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.config import EngineConfig
from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.host_memory import CPU_DEFAULT_GIB

GIB, MIB = 1 << 30, 1 << 20
MAX_CHECKPOINTS = 1024  # finding the checkpoint to evict takes O(checkpoints)
MAX_ROLLBACKS = 64  # a draft needs one, so it is the maximum drafts of a step, too
ROLLBACK_SHARE = 4  # one of this many states that are not live is for rollbacks, the others are checkpoints


class StateMemory(NamedTuple):
    """Counts of recurrent states, and their memory."""

    slots: int  # slots, each with a live state
    checkpoints: int
    rollbacks: int  # maximum drafts of a step
    bytes: int  # bytes of all states together


def divide_states(
    config: EngineConfig, *, state_bytes: int, max_seqs: int, memory: int, drafts: bool = False
) -> StateMemory:
    """Return the numbers of states of `state_bytes` each.

    max_seqs: slots of the batch if their states fit.  memory: bytes for KV cache and states; if `kv_blocks` is set, the
    blocks are allocated in addition.  drafts: whether sequences use drafts.  Raises NotEnoughMemory."""
    asked = int(config.state_memory_gib * GIB)
    if config.kv_blocks:
        memory = max(memory, int(CPU_DEFAULT_GIB * GIB))
    budget = asked or memory // 2
    source = "state_memory_gib" if asked else "half of the memory for KV cache and states"
    needed = config.max_seqs or 1
    if needed * state_bytes > budget:
        raise NotEnoughMemory(
            f"{needed} recurrent state{'s' if needed > 1 else ''} of {state_bytes / MIB:.2f} MiB each take "
            f"{needed * state_bytes / MIB:.2f} MiB, and {source} is {budget / MIB:.2f} MiB: raise state_memory_gib"
            + (f", or lower max_seqs from {needed}" if config.max_seqs else "")
        )
    slots = config.max_seqs or max(1, min(max_seqs, budget // 2 // state_bytes))
    others = budget // state_bytes - slots
    rollbacks = min(MAX_ROLLBACKS, others // ROLLBACK_SHARE) if drafts else 0
    checkpoints = min(MAX_CHECKPOINTS, others - rollbacks)
    return StateMemory(slots, checkpoints, rollbacks, (slots + checkpoints + rollbacks) * state_bytes)
