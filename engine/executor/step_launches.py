"""The launches of one step: hidden states, logits, samples, scores of prompts.

    StepTensors ── Forward ──> logits [N, V] ── sample ──> tokens, outcomes of StepOutput, and the next step's input
                      └─ score: prompt logprobs, TARGET_ROWS positions at a time

The worker runs them eagerly, or `step_graphs.py` replays a CUDA graph of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.engine.executor.batch import Batch
from quire.engine.executor.drafts import DraftRows, Verified, verify
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.models.fused import Forward
from quire.engine.executor.ranks.vocab_parallel import VocabParallelLogits
from quire.engine.executor.sampling import TARGET_ROWS, Logprobs, Report, SamplerBank, logprobs_from
from quire.engine.executor.shapes import Shape
from quire.engine.executor.step_output import StepOutput
from quire.engine.executor.step_tensors import StepTensors, Targets


class StepLaunches:
    """The launches of a step on the device between its inputs and its output."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        samplers: SamplerBank,
        output: StepOutput,
        vocab_parallel: VocabParallelLogits | None,
        sites: Sites | None = None,
    ) -> None:
        """`vocab_parallel`: None if this rank computes the logits of all tokens.  `sites`: GEMMs to which LoRA adapters
        add; None if adapters are off."""
        self._model, self._batch, self._samplers = model, batch, samplers
        self._output, self._vocab_parallel, self._sites = output, vocab_parallel, sites

    def forward(self, step: StepTensors) -> Forward:
        """Return the forward pass of a step.  Its layers run at the first call of `logits`, before the next step."""
        if self._sites is not None:
            self._sites.rows = step.adapters
        return Forward(self._model, step)

    def logits(self, forward: Forward, at: Tensor | None, out: Tensor | None = None, *, whole: bool = False) -> Tensor:
        """Return logits [., V] of tokens `at` of a step (None: of all tokens), written to `out` if given.

        If logits are vocab-parallel, only this rank's columns are returned, unless `whole`."""
        return forward.logits(at, out, own=self._vocab_parallel is not None and not whole)

    def score(self, forward: Forward, asked: Targets) -> Logprobs:
        """Return prompt logprobs of one slice, computed for TARGET_ROWS positions at a time to bound the memory."""
        entries = [Report(asked.slot, asked.top)] * len(asked.ids)
        return logprobs_from(lambda part: self.logits(forward, asked.at[part], whole=True), asked.ids, entries)

    def sample(
        self, step: StepTensors, logits: Tensor, general: bool, drafts: DraftRows | None = None
    ) -> Verified | None:
        """Choose a token for each slot from the step's logits, and make it the next step's input.

        `drafts`: the draft rows, after the rows of the slots, if the step has any.  Returns which drafts are
        accepted."""
        count = len(step.sample_slots) if drafts is None else len(drafts.behind)  # draft rows follow without padding
        tokens, outcomes = self._output.tokens[:count], self._output.outcomes[:count]
        if drafts is not None:  # never with vocab-parallel logits
            known = step.known[:count] - drafts.behind
            self._samplers.run(logits[:count], step.sample_slots[:count], known, tokens, outcomes, general)
            verified = verify(drafts, self._samplers, logits, tokens, outcomes, self._batch.position)
            self._batch.finish(tokens)
            return verified
        logits = logits[:count]  # a step that is padded to a shape with drafts has more rows
        if self._vocab_parallel is not None and not general:
            self._vocab_parallel.choose_argmax(logits, step.sample_slots, tokens, outcomes)
        else:
            whole = logits if self._vocab_parallel is None else self._vocab_parallel.whole(logits)
            self._samplers.run(whole, step.sample_slots, step.known, tokens, outcomes, general)
        self._batch.finish(tokens)
        return None

    @torch.inference_mode()
    def warm_drafts(self, vocab_size: int) -> None:
        """Run the sampling of drafts once, so that loading its kernels does not count as the time of a step.

        No slot may be in use."""
        drafts = self._batch.idle_drafts()
        logits = torch.zeros(2, vocab_size, dtype=torch.float32, device=self._model.device)
        self.sample(self._batch.decode_step(1), logits, general=True, drafts=drafts)

    @torch.inference_mode()
    def peak_bytes(self, max_seqs: int, step_tokens: int, top: int, drafts: int = 0) -> int:
        """Return the bytes that the largest step takes on a GPU besides weights and KV cache, measured on an empty
        step.

        All slots sample, `drafts` further tokens have logits, and a prompt is scored with `top` logprobs per token."""
        device = self._model.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        shape = Shape(max_seqs - 1, step_tokens - max_seqs + 1, 1, max_seqs, max_seqs + drafts)
        step = self._batch.with_adapters(self._batch.mixed_step(self._batch.idle_step(shape)))
        forward = self.forward(step)
        logits = self.logits(forward, step.logits_at)
        self.sample(step, logits[:max_seqs], general=True)
        piece = torch.zeros(TARGET_ROWS, dtype=torch.int64, device=device)
        scored = self.score(forward, Targets(0, piece, piece, top))
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del step, forward, logits, scored
        torch.cuda.empty_cache()
        return peak
