"""What a machine would need at least: bytes over the memory's speed, operations over the matrix units', per step.

The floor assumes that nothing else takes time: no launch, no gap, no host, activations never leave the chip, and every
product runs at the speed of a large square one.  So nothing is as fast; how far one is away is what it tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadtest.trace import Job


@dataclass(frozen=True)
class Shape:
    """A llama-like decoder in bf16, as its config.json says."""

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
        """(out, in) of a layer's weights."""
        width = self.heads * self.head_size
        return [
            (width + 2 * self.kv_heads * self.head_size, self.hidden),
            (self.hidden, width),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def weight_bytes(self) -> int:
        """Read in every step: all but the rows of the embedding that are not looked up."""
        return 2 * (self.layers * sum(n * k for n, k in self.products) + self.vocab * self.hidden)


@dataclass(frozen=True)
class Machine:
    """Measured ceilings."""

    read_gbps: float
    tflops: float

    def seconds(self, size: float, flops: float) -> float:
        return max(size / self.read_gbps / 1e9, flops / self.tflops / 1e12)

    def step(self, shape: Shape, *, tokens: int, rows: int, cached: int, pairs: int = 0) -> float:
        """Seconds of one step: `tokens` go through the layers and `rows` of them through the head; decoding rows read
        `cached` tokens' keys and values; prompt chunks compare `pairs` of a query and a key."""
        products = sum(self.seconds(2 * n * k, 2 * n * k * tokens) for n, k in shape.products)
        head = self.seconds(2 * shape.vocab * shape.hidden, 2 * shape.vocab * shape.hidden * rows)
        attention = 4 * shape.heads * shape.head_size * pairs
        return shape.layers * (products + self.seconds(0, attention)) + head + self.seconds(shape.kv_bytes * cached, 0)

    def token_ms(self, shape: Shape, batch: int, context: float) -> float:
        """Milliseconds of a decode step of `batch` sequences that hold `context` tokens each."""
        return self.step(shape, tokens=batch, rows=batch, cached=int(batch * context)) * 1e3

    def trace(self, shape: Shape, jobs: list[Job], *, max_seqs: int = 1024, step_tokens: int = 8192) -> float:
        """Seconds of a trace submitted at once: first come first served, prompts before all else, KV memory enough."""
        waiting = [(job.prompt_len, job.output_len) for job in reversed(jobs)]
        decoding: list[tuple[int, int]] = []  # (tokens cached, tokens to come)
        started, seconds = 0, 0.0  # `started`: tokens of waiting[-1] that are computed
        while waiting or decoding:
            budget, joined, pairs = step_tokens - len(decoding), [], 0
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
