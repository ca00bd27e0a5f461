"""Typed Python interface to the kernels of csrc.  Only this package uses torch.ops. kernels_build.py compiles the
kernels.

`load()` must return before any operator is called.  `python -m quire.engine.executor.ops` compiles the kernels now
rather than at first use; with `--ahead DIRECTORY` it compiles for other machines, for example into an image.

One module per kind of operator; callers say `ops.NAME`.  Shapes: T tokens of the step, S sequences, H query heads, Hkv
KV heads, D head size.  Wrong shapes and dtypes raise ValueError naming the sizes that disagree, wrong indices raise
IndexError.
"""

from pathlib import Path

import torch

from quire.engine.executor.kernels_build import KernelBuildError, build, default_directory
from quire.engine.executor.ops.adapters import *
from quire.engine.executor.ops.attention import *
from quire.engine.executor.ops.drafter import *
from quire.engine.executor.ops.layers import *
from quire.engine.executor.ops.linear_layers import *
from quire.engine.executor.ops.mixtures import *
from quire.engine.executor.ops.packed_experts import *
from quire.engine.executor.ops.packed_layers import *
from quire.engine.executor.ops.rank_sums import *
from quire.engine.executor.ops.recurrent import *
from quire.engine.executor.ops.sampling import *


def load(directory: Path | None = None, *, library: Path | None = None) -> None:
    """Make the operators callable in this process.  Compile them first unless `directory` has a matching build.

    library: a library compiled ahead; it is loaded without checks.

    Several processes may call this at once: one compiles, the others wait for it.  A second call does nothing, because
    a process has its operators from one library.  Writes to stderr when it compiles.  Raises KernelBuildError.
    """
    if library is not None and not library.is_file():
        raise KernelBuildError(
            f"{library}: no such file; `python -m quire.engine.executor.ops --ahead DIRECTORY` makes one"
        )
    if hasattr(torch.ops.quire, "linear"):
        return
    path = library or build(directory or default_directory())
    torch.ops.load_library(str(path))


def set_threads(count: int) -> None:
    """Set the number of threads of our CPU kernels in this process; 0: as many as torch's own operators use."""
    torch.ops.quire.set_threads.default(count)
