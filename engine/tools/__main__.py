"""Tools for developers and operators: `python -m quire.engine.tools NAME [options]`.

simulate   the scheduler on a virtual clock: what a pool size and an admission mode do to a load
fleet      several engines on one queue, on a virtual clock: what prefix locality does
claim-cost what choosing by prefix costs Redis
redis-load what requests, exchanges and tokens cost Redis
oracle     the best on-time share of a burst: with perfect knowledge, and as an upper bound
bench      throughput, latency and swap of one loaded model, without Redis and HTTP
gpu-idle   how long a GPU is idle between decode steps
structured what grammars cost: tokens a second with and without them, in pairs
quantized  perplexity, agreement and speed of --quantize and --kv-dtype, in pairs with the plain model
rates      normalised latency by request rate: static allocation, paged, admission, prefix cache
sharing    how many KV blocks parallel sampling and beam search share
models     which model families are served, proved against transformers; writes docs/models.md
"""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "simulate": "simulate",
    "fleet": "fleet",
    "claim-cost": "claim_cost",
    "redis-load": "redis_load",
    "oracle": "oracle",
    "bench": "bench",
    "gpu-idle": "gpu_idle",
    "structured": "structured",
    "quantized": "quantized",
    "rates": "rates",
    "sharing": "sharing",
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
