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
from collections.abc import Iterable, Sequence
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

    def submit(
        self, prompt: str | Sequence[int], sampling: Sampling, *, max_new_tokens: int = 16, n: int = 1
    ) -> Completion:
        """Queue one prompt.  The completion fills while `step` is called, and leaves `unfinished` when it is done."""
        ids = list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        self._ids += 1
        request = Generate(f"offline-{self._ids}", "", ids, max_new_tokens, sampling, FOREVER_MS, n=n)
        completion = self.unfinished[request.id] = Completion(ids, [Output() for _ in range(n)])
        self._open_outputs[request.id] = n
        self._box.orders.append(request)
        return completion

    def step(self) -> None:
        """One step of the engine, for everything queued."""
        self.engine.turn()

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 16,
        n: int = 1,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue every prompt, all submitted at once; answers come in the order of the prompts.

        `sampling` and `max_new_tokens`: one for all prompts, or one for each.  Greedy unless told otherwise."""
        prompts = list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling(temperature=0.0)] * len(prompts)
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        work = zip(prompts, sampling, max_new_tokens, strict=True)
        completions = [self.submit(prompt, how, max_new_tokens=limit, n=n) for prompt, how, limit in work]
        with tqdm(total=len(completions), unit="prompt", disable=not progress) as bar:
            while not self.engine.core.idle or self._box.orders:
                self.step()
                bar.update(len(completions) - len(self.unfinished) - bar.n)
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
    """Run a file of requests, each from its `at_s` on; then one alone, for the time of a token at batch 1."""
    jobs = [msgspec.json.decode(line) for line in requests.read_bytes().splitlines()]
    begin = time.perf_counter()
    llm = LLM.over(config, local.load(config))
    start_s = time.perf_counter() - begin
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    llm.generate([job["token_ids"] for job in jobs[:4]], greedy, max_new_tokens=8)  # touches memory a first time

    submitted: list[Completion] = []
    firsts: dict[int, float] = {}  # number of the request -> seconds from its `at_s` to its first token
    filled = allocated = static = 0  # slots, summed over every 8th step; static: one max_model_len for each sequence
    begin = time.perf_counter()
    while llm.unfinished or len(submitted) < len(jobs):
        now = time.perf_counter() - begin
        while len(submitted) < len(jobs) and jobs[len(submitted)].get("at_s", 0.0) <= now:
            job = jobs[len(submitted)]
            submitted.append(llm.submit(job["token_ids"], greedy, max_new_tokens=job["max_new_tokens"]))
        llm.step()
        now = time.perf_counter() - begin
        for number, completion in enumerate(submitted):
            if number not in firsts and completion.outputs[0].token_ids:
                firsts[number] = now - jobs[number].get("at_s", 0.0)
        if llm.engine.core.step % 8 == 0:
            slots = llm.engine.core.used_slots()
            filled, allocated = filled + slots[0], allocated + slots[1]
            static += llm.engine.core.running * llm.executor.info.max_model_len
    seconds = time.perf_counter() - begin
    tokens = sum(len(completion.outputs[0].token_ids) for completion in submitted)

    alone = []
    for count in (1, 129):
        begin = time.perf_counter()
        llm.generate([jobs[0]["token_ids"][:8]], greedy, max_new_tokens=count)
        alone.append(time.perf_counter() - begin)
    llm.close()
    return {
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "batch1_ms_per_token": (alone[1] - alone[0]) / 128 * 1e3,
        "start_s": start_s,
        "ttft_p50_ms": statistics.median(firsts.values()) * 1e3,
        "slots_filled": filled / max(1, allocated),
        "eta": allocated / max(1, static),  # paged over static allocation, the same sequences running
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
