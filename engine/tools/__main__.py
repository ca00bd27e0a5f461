"""Tools for developers and operators: `python -m quire.engine.tools NAME [options]`.

simulate   the scheduler on a virtual clock: TTFT, ITL and preemptions of a load by pool size and admission mode
bench      throughput, latency and swap of one loaded model, without Redis and HTTP
"""

from __future__ import annotations

import importlib
import sys

NAMES = ("simulate", "bench")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print(__doc__, file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"quire.engine.tools.{argv[0]}")
    return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
