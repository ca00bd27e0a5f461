"""Offline mode: the server's scheduler and executor, without Redis and HTTP.

    from quire.engine.llm import LLM

    for completion in LLM("./checkpoint").generate(["To be", "or not"], max_new_tokens=32):
        print(completion.outputs[0].text)

Options of LLM are the fields of engine.config.EngineConfig.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from tqdm import tqdm

from quire.engine.adapters.files import digest_of
from quire.engine.adapters.names import adapter_id
from quire.engine.commands import LocalBox
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.base import Executor
from quire.engine.executor.models import hf
from quire.engine.loop import Engine
from quire.engine.tokenizers.files import load_tokenizer
from quire.engine.wire.messages import FOREVER_MS, Abort, Beams, Delta, FinishReason, Generate, Sampling, TokenLogprob


class Output(msgspec.Struct):
    """One choice."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason = "error"
    message: str = ""  # error text if finish_reason is "error"
    logprobs: list[TokenLogprob] = []  # one per output token, if requested
    score: float = 0.0  # score of a beam-search answer: engine.wire.messages.Beams


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter in PEFT's format."""

    name: str
    path: str  # folder of the adapter's files

    def id(self) -> str:
        """Return `name@digest`, with the digest of the adapter's files.  Raises AdapterError."""
        return adapter_id(self.name, digest_of(Path(self.path)))


class Completion(msgspec.Struct):
    """Everything generated for one prompt."""

    prompt_token_ids: list[int]
    outputs: list[Output]  # one per choice
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None


class LLM:
    """A loaded model.  Options are the fields of EngineConfig; msgspec.ValidationError names an invalid one.

    `itl_stretch` and `step_target_s` default to 0: answers are not streamed, so steps need not be short."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """Raises engine.executor.errors.ModelLoadError with a one-line reason."""
        config = msgspec.convert({"model": model, "itl_stretch": 0.0, "step_target_s": 0.0, **options}, EngineConfig)
        self._open(config, loading.load(config), load_tokenizer(str(hf.find(model))))

    @classmethod
    def over(cls, config: EngineConfig, executor: Executor, tokenizer: Any = None) -> Self:
        """Create an LLM over an existing executor.  Without a tokenizer, prompts are token ids and texts stay empty."""
        llm = cls.__new__(cls)
        llm._open(config, executor, tokenizer)
        return llm

    def _open(self, config: EngineConfig, executor: Executor, tokenizer: Any) -> None:
        self.config, self.executor, self.tokenizer = config, executor, tokenizer
        self.unfinished: dict[str, Completion] = {}  # unfinished completions by request id
        self._open_outputs: dict[str, int] = {}  # request id -> number of unfinished outputs
        self._box = LocalBox(self._take)
        self.engine = Engine(config, executor, self._box, self._box)
        self._ids = 0

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int = 16,
        n: int = 1,
        beams: Beams | None = None,
        adapter: Adapter | None = None,
    ) -> Completion:
        """Queue one prompt. step() fills the returned completion, and removes it from `unfinished` at its end.

        `beams`: find the n best answers by beam search; they arrive when the search is done.  `adapter` None: the base
        model.  Raises AdapterError for files that cannot be read."""
        ids = list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        self._ids += 1
        request = Generate(f"offline-{self._ids}", "", ids, max_new_tokens, sampling, FOREVER_MS, n=n, beams=beams)
        if adapter is not None:
            request = msgspec.structs.replace(request, adapter=adapter.id(), adapter_path=adapter.path)
        completion = self.unfinished[request.id] = Completion(ids, [Output() for _ in range(n)])
        self._open_outputs[request.id] = n
        self._box.commands.append(request)
        return completion

    def step(self) -> None:
        """Run one step of the engine for all queued prompts."""
        self.engine.turn()

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 16,
        n: int = 1,
        beams: Beams | None = None,
        adapters: Sequence[Adapter | None] | Adapter | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Generate for all prompts as one batch; completions are in the order of the prompts.

        `sampling` and `max_new_tokens`: one value for all prompts, or one per prompt.  The default is greedy.  `beams`:
        find the n best answers by beam search instead; a `sampling` field that beam search does not support ends the
        request with an error.  `adapters`: one for all prompts, or one per prompt; None: the base model."""
        prompts = list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling(temperature=0.0)] * len(prompts)
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        if adapters is None or isinstance(adapters, Adapter):
            adapters = [adapters] * len(prompts)
        work = zip(prompts, sampling, max_new_tokens, adapters, strict=True)
        completions = [
            self.submit(prompt, how, max_new_tokens=limit, n=n, beams=beams, adapter=adapter)
            for prompt, how, limit, adapter in work
        ]
        with tqdm(total=len(completions), unit="prompt", disable=not progress) as bar:
            while self.unfinished or not self.engine.core.idle:
                self.step()
                bar.update(len(completions) - len(self.unfinished) - bar.n)
        if self.tokenizer is not None:
            for output in (output for completion in completions for output in completion.outputs):
                output.text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return completions

    def cancel(self) -> None:
        """Cancel every unfinished request."""
        self._box.commands += [Abort(request) for request in self.unfinished]
        while not self.engine.core.idle or self._box.commands:
            self.step()

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
            output.score = delta.finish.score
            self._open_outputs[delta.id] -= 1
            if not self._open_outputs[delta.id]:
                del self._open_outputs[delta.id], self.unfinished[delta.id]
