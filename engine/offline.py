"""Offline mode: the same core and executor as the server, with no Redis and no HTTP.

from engine.offline import LLM
for completion in LLM("./checkpoint").generate(["To be", "or not"], max_new_tokens=32):
    print(completion.texts)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from tqdm import tqdm
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.executor import local
from engine.executor.base import Executor
from engine.executor.errors import ModelLoadError
from engine.executor.models import builtin, hf
from engine.loop import ConfigError, Engine, LocalBox
from engine.wire import settings
from engine.wire.messages import Delta, FinishReason, Generate, Sampling, TokenLogprob

FOREVER_MS = 2**62


class Output(msgspec.Struct):
    """One continuation."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason = "error"
    message: str = ""  # why, when finish_reason is "error"
    logprobs: list[TokenLogprob] = []  # one a token, where asked for


class Completion(msgspec.Struct):
    """Everything generated for one prompt."""

    prompt_token_ids: list[int]
    outputs: list[Output]  # n of them
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None


class LLM:
    """A loaded model.  Options are the fields of EngineConfig; a wrong one raises msgspec.ValidationError naming it."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """Raises engine.executor.errors.ModelLoadError with a one-line reason."""
        config = msgspec.convert({"model": model, **options}, EngineConfig)
        self._open(config, local.load(config), AutoTokenizer.from_pretrained(hf.find(model or str(builtin.builtin()))))

    @classmethod
    def over(cls, config: EngineConfig, executor: Executor, tokenizer: Any = None) -> Self:
        """Over an executor that exists already.  Without a tokenizer prompts are token ids and texts stay empty."""
        llm = cls.__new__(cls)
        llm._open(config, executor, tokenizer)
        return llm

    def _open(self, config: EngineConfig, executor: Executor, tokenizer: Any) -> None:
        self.config, self.executor, self.tokenizer = config, executor, tokenizer
        self.unfinished: dict[str, Completion] = {}  # by request id, unfinished ones
        self._open_outputs: dict[str, int] = {}  # how many of its outputs
        self._box = LocalBox(self._take)
        self.engine = Engine(config, executor, self._box, self._box)
        self._ids = 0

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 16,
        n: int = 1,
        progress: bool = False,
        each_turn: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """Continue every prompt, all submitted at once; answers come in the order of the prompts.

        `sampling` and `max_new_tokens`: one for all prompts, or one for each.  Greedy unless told otherwise."""
        prompts = list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling(temperature=0.0)] * len(prompts)
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        completions = []
        for prompt, how, limit in zip(prompts, sampling, limits, strict=True):
            ids = list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
            self._ids += 1
            request = Generate(f"offline-{self._ids}", "", ids, limit, how, FOREVER_MS, n=n)
            completion = Completion(ids, [Output() for _ in range(n)])
            self.unfinished[request.id] = completion
            self._open_outputs[request.id] = n
            completions.append(completion)
            self._box.orders.append(request)
        with tqdm(total=len(completions), unit="prompt", disable=not progress) as bar:
            while self.unfinished:
                self.engine.turn()
                each_turn()
                bar.update(len(completions) - len(self.unfinished) - bar.n)
        while not self.engine.core.idle:  # a step issued before the last result was in
            self.engine.turn()
        if self.tokenizer is not None:
            for output in (output for completion in completions for output in completion.outputs):
                output.text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return completions

    def close(self) -> None:
        self.executor.close()

    def _take(self, delta: Delta) -> None:
        completion = self.unfinished[delta.id]
        output = completion.outputs[delta.index]
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs or []
        if delta.first == 0:
            completion.cached_tokens = delta.cached_tokens
            completion.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            output.finish_reason, output.message = delta.finish.reason, delta.finish.message
            self._open_outputs[delta.id] -= 1
            if not self._open_outputs[delta.id]:
                del self._open_outputs[delta.id], self.unfinished[delta.id]


def bench(config: EngineConfig, requests: Path) -> dict[str, float]:
    """Run a file of requests, all submitted at once; then one alone, for the time of a token at batch 1."""
    jobs = [msgspec.json.decode(line) for line in requests.read_bytes().splitlines()]
    begin = time.perf_counter()
    llm = LLM.over(config, local.load(config))
    start_s = time.perf_counter() - begin
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    prompts = [job["token_ids"] for job in jobs]
    llm.generate(prompts[:4], greedy, max_new_tokens=8)  # first steps touch memory for the first time
    slots = [0, 0]  # holding tokens, allocated; summed over steps
    firsts: dict[str, float] = {}  # request id -> seconds to its first token

    def watch() -> None:
        now = time.perf_counter() - begin
        for request_id, completion in llm.unfinished.items():
            if completion.outputs[0].token_ids:
                firsts.setdefault(request_id, now)
        if llm.engine.core.step % 8 == 0:
            filled, allocated = llm.engine.core.used_slots()
            slots[0] += filled
            slots[1] += allocated

    begin = time.perf_counter()
    limits = [job["max_new_tokens"] for job in jobs]
    answers = llm.generate(prompts, greedy, max_new_tokens=limits, each_turn=watch)
    seconds = time.perf_counter() - begin
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    alone = []
    for count in (1, 129):
        begin = time.perf_counter()
        llm.generate([prompts[0][:8]], greedy, max_new_tokens=count)
        alone.append(time.perf_counter() - begin)
    llm.close()
    return {
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "batch1_ms_per_token": (alone[1] - alone[0]) / 128 * 1e3,
        "start_s": start_s,
        "ttft_p50_ms": statistics.median(firsts.values()) * 1e3,
        "slots_filled": slots[0] / max(1, slots[1]),
        "preemptions": llm.engine.core.totals.preemptions,
    }


def main(argv: list[str]) -> int:
    """Print the figures of one file of requests; 2 with one line on stderr when the model can't be loaded."""
    parser = argparse.ArgumentParser(prog="python -m engine.offline", add_help=False)
    parser.add_argument("--requests", type=Path, required=True)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog="python -m engine.offline", positional="model")
    try:
        print(msgspec.json.encode(bench(config, own.requests)).decode())
    except (ModelLoadError, ConfigError) as error:
        print(f"python -m engine.offline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
