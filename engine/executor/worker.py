"""One rank: weights, KV cache, table mirror, samplers.  `run(plan) -> result`, strictly in order.

plan ─ batch.begin ─> StepTensors ─ model(step=...) ─> logits ─ sampling ─> tokens ─ batch.finish, StepResult
         tables, positions            attention writes KV           └ fed back on the device: plan N+1 needs no N
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core.plan import StepPlan, StepResult
from engine.executor import ops
from engine.executor.batch import Batch, StepTensors
from engine.executor.kv_cache import allocate, blocks_that_fit, bytes_per_token
from engine.executor.models.hf import LoadedModel
from engine.executor.sampling import Sampled, SamplerBank, token_logprobs
from engine.wire.messages import TokenLogprob


class Worker:
    """Owns everything on one device.  All memory that grows with traffic is taken here, once."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        """Compiles the kernels where this machine has not yet, and takes the KV memory.

        Raises NotEnoughMemory when the cache cannot hold one sequence of the model's max_model_len, and
        KernelBuildError without a C++ compiler.
        """
        ops.load()
        device = model.module.device
        self._model = model.module
        self.blocks = blocks_that_fit(
            token_bytes=bytes_per_token(model.layers, model.dtype),
            block_size=config.block_size,
            max_model_len=model.max_model_len,
            kv_blocks=config.kv_blocks,
            kv_memory_gib=config.kv_memory_gib,
            device=device,
        )
        fill = float("nan") if config.poison_free_blocks else 0.0
        caches = allocate(model.layers, self.blocks, config.block_size, model.dtype, device, fill)
        self._flat = [tensor for pair in caches for tensor in pair]
        self._batch = Batch(
            max_seqs=config.max_seqs,
            max_model_len=model.max_model_len,
            step_tokens=config.step_tokens,
            block_size=config.block_size,
            caches=caches,
        )
        self._samplers = SamplerBank(max_seqs=config.max_seqs, vocab_size=model.vocab_size, device=device)
        self.device = device

    def reset(self) -> None:
        """Free every row.  KV contents stay: whoever gets a block writes it before reading it."""
        self._batch.reset()
        self._samplers.reset()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan and compute one step.  After an exception only `reset` may be called."""
        if plan.poison:
            ops.block_fill(self._flat, torch.tensor(plan.poison, device=self.device), float("nan"))
        if plan.copies:
            ops.block_copy(self._flat, torch.tensor(plan.copies, device=self.device))
        for row in plan.freed_rows:
            self._samplers.free(row)
        for piece in plan.slices:
            if piece.sampler:
                self._samplers.seat(piece.row, piece.sampler)
        for fork in plan.forks:
            self._samplers.seat(fork.row, fork.sampler)
        step = self._batch.begin(plan)
        if step is None:
            return StepResult(plan.step, [], [])
        logits = self._forward(step)
        prompt_logprobs = {
            t.row: token_logprobs(logits[t.at : t.at + len(t.ids)], torch.tensor(t.ids, device=self.device), t.top)
            for t in step.targets
        }
        if not step.sample_rows:
            return StepResult(plan.step, [], [], prompt_logprobs=prompt_logprobs)
        wanted = logits if step.sample_at is None else logits[step.sample_at]
        sampled = self._samplers.sample(wanted, step.sample_rows, step.known)
        self._batch.finish(step, sampled.tokens)
        return self._result(plan.step, step, sampled, prompt_logprobs)

    def _forward(self, step: StepTensors) -> Tensor:
        """Logits [L, V] of the tokens that `step` wants them of; an empty tensor when it wants none."""
        keep = 0 if step.logits_at is None else step.logits_at
        out = self._model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=keep,
            step=step,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _result(
        self, number: int, step: StepTensors, sampled: Sampled, prompt_logprobs: dict[int, list[TokenLogprob]]
    ) -> StepResult:
        failed = {}
        if not bool(sampled.finite.all()):
            message = "the model's logits for this token are not finite"
            failed = {step.sample_rows[i]: message for i in (~sampled.finite).nonzero()[:, 0].tolist()}
        return StepResult(
            number,
            list(step.sample_rows),
            sampled.tokens.tolist(),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )
