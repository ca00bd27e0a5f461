"""The minimum time of a step (roofline): bytes / memory bandwidth, or operations / peak FLOP/s.

    python -m quire.loadtest.studies roofline llama-8b --read-gbps 4601 --tflops 790

The floor assumes that nothing else takes time: no launch, no gap, no host.  Activations never leave the chip, and every
GEMM has the speed of a large square one.  No system reaches the floor; the distance to it is of interest.
`python -m quire.loadtest kernels --only ceilings` measures a GPU's two ceilings.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from quire.loadtest import shapes, trace
from quire.loadtest.trace import Job


@dataclass(frozen=True)
class Shape:
    """A llama-like decoder in bf16, with the sizes of its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def products(self) -> list[tuple[int, int]]:
        """(out, in) of each weight matrix of a layer."""
        width = self.heads * self.head_size
        return [
            (width + 2 * self.kv_heads * self.head_size, self.hidden),
            (self.hidden, width),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads: all but the input embedding, of which a step reads a few rows."""
        return 2 * (self.layers * sum(n * k for n, k in self.products) + self.vocab * self.hidden)


@dataclass(frozen=True)
class Machine:
    """Measured ceilings of a device."""

    read_gbps: float  # GB/s of the best plain reader
    tflops: float  # TFLOP/s of a large square bf16 GEMM

    def seconds(self, size: float, flops: float) -> float:
        return max(size / self.read_gbps / 1e9, flops / self.tflops / 1e12)

    def step(self, shape: Shape, *, tokens: int, rows: int, cached: int, pairs: int = 0) -> float:
        """Return the seconds of one step.

        `tokens` pass through the layers, `rows` of them through the head.  Decoding sequences read the keys and values
        of `cached` tokens.  `pairs`: pairs of a query and a key in prompt chunks."""
        products = sum(self.seconds(2 * n * k, 2 * n * k * tokens) for n, k in shape.products)
        head = self.seconds(2 * shape.vocab * shape.hidden, 2 * shape.vocab * shape.hidden * rows)
        attention = 4 * shape.heads * shape.head_size * pairs
        return shape.layers * (products + self.seconds(0, attention)) + head + self.seconds(shape.kv_bytes * cached, 0)

    def token_ms(self, shape: Shape, batch: int, context: float) -> float:
        """Return the milliseconds of a decode step of `batch` sequences that hold `context` tokens each."""
        return self.step(shape, tokens=batch, rows=batch, cached=int(batch * context)) * 1e3

    def trace(self, shape: Shape, jobs: list[Job], *, max_seqs: int = 1024, step_tokens: int = 8192) -> float:
        """Return the seconds of a trace submitted at once: first come first served, prompts first, enough KV memory."""
        waiting = [(job.prompt_len, job.output_len) for job in reversed(jobs)]
        decoding: list[tuple[int, int]] = []  # (tokens cached, tokens to come)
        started, seconds = 0, 0.0  # `started`: tokens of waiting[-1] that are computed
        while waiting or decoding:
            budget, pairs = step_tokens - len(decoding), 0
            joined: list[tuple[int, int]] = []
            cached, tokens, rows = sum(c for c, _ in decoding), len(decoding), len(decoding)
            while waiting and budget > 0 and len(decoding) + len(joined) < max_seqs:
                prompt, output = waiting[-1]
                n = min(budget, prompt - started)
                pairs += n * started + n * (n + 1) // 2
                started, budget, tokens = started + n, budget - n, tokens + n
                if started == prompt:
                    joined.append((prompt, output))
                    waiting.pop()
                    started = 0
            seconds += self.step(shape, tokens=tokens, rows=rows + len(joined), cached=cached, pairs=pairs)
            decoding = [(c + 1, left - 1) for c, left in decoding + joined if left > 1]
        return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", choices=shapes.CONFIGS)
    parser.add_argument("--read-gbps", type=float, required=True, help="GB/s that the device reads from its memory")
    parser.add_argument("--tflops", type=float, required=True, help="TFLOP/s of a large bf16 GEMM")
    parser.add_argument("--batches", default="1,8,32,128,256", help="batch sizes; default 1,8,32,128,256")
    parser.add_argument("--context", type=float, default=256, help="tokens that each sequence holds; default 256")


def main(args: argparse.Namespace, command: str) -> int:
    device, shape = Machine(args.read_gbps, args.tflops), Shape.of(shapes.CONFIGS[args.shape])
    figures = {
        f"batch{n}_ms_per_token": round(device.token_ms(shape, n, args.context), 3)
        for n in map(int, args.batches.split(","))
    }
    jobs = trace.read("sharegpt_like")
    figures["tokens_per_s"] = round(sum(job.output_len for job in jobs) / device.trace(shape, jobs), 1)
    print(json.dumps(figures, indent=1))
    return 0
