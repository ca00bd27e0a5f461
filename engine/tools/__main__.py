"""Tools for developers and operators: `python -m quire.engine.tools NAME [options]`.

simulate   the scheduler on a virtual clock: TTFT, ITL and preemptions of a load by pool size and admission mode
bench      throughput, latency and swap of one loaded model, without Redis and HTTP
gpu-idle   how long a GPU is idle between decode steps
models     which model families are served, proved against transformers; writes docs/models.md
"""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "simulate": "simulate",
    "bench": "bench",
    "gpu-idle": "gpu_idle",
    "models": "models",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print(__doc__, file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"quire.engine.tools.{NAMES[argv[0]]}")
    return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
