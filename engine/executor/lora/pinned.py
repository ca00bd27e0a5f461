"""Page-locked host memory, which a GPU's copy engine reads while the host computes.

Torch rounds its own pinned memory up to a power of two, which would cost an adapter up to twice its size.
"""

from __future__ import annotations

import logging
import mmap
import weakref

import numpy as np
import torch

log = logging.getLogger(__name__)

ALIGN = 16  # bytes


def pinned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of the tensors in one block of page-locked memory, which lives as long as one of them.

    If the system refuses to lock more pages, the memory is pageable, and a copy blocks the thread that starts it."""
    ends = np.cumsum([-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors])
    memory = np.frombuffer(mmap.mmap(-1, max(1, int(ends[-1]))), dtype=np.uint8)
    for tensor, end in zip(tensors, ends.tolist(), strict=True):
        first = end - (-(-tensor.nbytes // ALIGN) * ALIGN)
        memory[first : first + tensor.nbytes] = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    address = memory.ctypes.data
    runtime = torch.cuda.cudart() if torch.cuda.is_available() else None
    if runtime is not None and (error := int(runtime.cudaHostRegister(address, len(memory), 0))):
        log.warning(
            "an adapter of %d bytes is not page-locked (CUDA error %d): its copies are slow", len(memory), error
        )
    elif runtime is not None:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    whole, found = torch.from_numpy(memory), []
    for tensor, end in zip(tensors, ends.tolist(), strict=True):
        first = end - (-(-tensor.nbytes // ALIGN) * ALIGN)
        found.append(whole[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return found
