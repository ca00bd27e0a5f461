"""One rank: weights, KV cache, table mirror, samplers.  A step is `launch_model`, `launch_sampling` and `collect`.

launch   plan ─ stage ─> one pinned copy ─ apply ─> StepTensors ─ model ─> logits ─ sampling ─> tokens ─> pinned copy
                                            tables, positions     └ attention writes KV        └ fed back on the device
collect  wait for that step's event, read the tokens

On a GPU a launch only queues work: plan N+1 may be launched before result N is collected, and nothing waits.  On a CPU
it computes, and `collect` has nothing to wait for.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.engine.common import host_resources
from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor import host_memory, ops
from quire.engine.executor.batch import Batch, Mixed, Shape, StepTensors, Targets
from quire.engine.executor.beam_candidates import BeamCandidates, find_candidates
from quire.engine.executor.constraints import IMPOSSIBLE, Constraints
from quire.engine.executor.followers import Follower, advance, forced_tokens
from quire.engine.executor.grammars import Grammars
from quire.engine.executor.graphs import (
    Graphs,
    SecondUse,
    Where,
    capture_all,
    ladder,
    memory_first,
    mixed_ladder,
    rung,
    urgent,
)
from quire.engine.executor.kv_cache import KV_DTYPES, Caches, allocate, blocks_that_fit, by_shape, bytes_per_token
from quire.engine.executor.masks import Masks
from quire.engine.executor.memory_plan import MemoryPlan
from quire.engine.executor.models.fused import Forward, own_columns
from quire.engine.executor.models.hf import LoadedModel
from quire.engine.executor.ranks.divided_logits import DividedLogits
from quire.engine.executor.ranks.ranks import ALONE, Ranks
from quire.engine.executor.sampling import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    TARGET_ROWS,
    Logprobs,
    Report,
    SamplerBank,
    logprobs_from,
)
from quire.engine.executor.staging import Staging
from quire.engine.executor.swap import Swap

log = logging.getLogger(__name__)

# For clients.
FAILED = "the model's logits for this token are not finite"
MOST_LOGPROBS = 20  # likeliest tokens of each position in the memory plan; more take a few bytes each
GPU_DEPTH = 2  # steps in flight: the device computes one while the host reads the one before and issues the next


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched step.  Its host memory may be read after the step, until GPU_DEPTH further launches."""

    step: int
    slots: tuple[int, ...] = ()  # that sample
    output: StepOutput | None = None  # of these slots, in their order
    clock: Stopwatch | None = None
    logprobs: Logprobs | None = None  # of the sampled tokens, where asked for
    prompt_logprobs: tuple[Logprobs, ...] = ()  # each of one slot
    followers: Sequence[Follower] = ()  # of `slots`, those with a grammar or bad_words
    candidates: BeamCandidates | None = None
    look_ahead: bool = True  # as in its plan


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose model is launched and whose sampling is not."""

    step: int
    logits: Tensor | None = None  # [N, V] of the slots that sample, or a rank's own columns; None: nothing is computed
    sample: Callable[[], None] | None = None  # launches their sampling; None: no slot samples
    prompt_logprobs: tuple[Logprobs, ...] = ()  # each of one slot
    beams: tuple[tuple[int, int], ...] = ()  # slots that want candidates, and how many: the rows behind those


class Worker:
    """Owns everything on one device.  All memory that grows with traffic is taken here, once."""

    def __init__(
        self, config: EngineConfig, model: LoadedModel, *, max_seqs: int, step_tokens: int, ranks: Ranks = ALONE
    ) -> None:
        """Take the KV memory and capture CUDA graphs.  The kernels must be loaded.

        ranks: they agree on the number of blocks and of graphs; everything else follows from the plans.

        Raises NotEnoughMemory when the cache cannot hold one sequence of the max_model_len that the configuration asks
        for.  Without one, `max_model_len` is what the cache holds.
        """
        self.device = device = model.module.device
        self._gpu = device.type == "cuda"
        self._config, self._loaded, self._model, self._ranks = config, model, model.module, ranks
        self._max_seqs, self._step_tokens = max_seqs, step_tokens
        self.grammars: Grammars | None = None
        vocab_size, masks = model.vocab_size, Masks(max_seqs, model.vocab_size, device)
        if Grammars.supported(model.directory, model.eos_ids):
            sizes = {"vocab_size": vocab_size, "kept_bytes": config.grammar_memory_mib << 20}
            self.grammars = Grammars(model.directory, **sizes, eos_ids=model.eos_ids, mask=masks.host)
        columns = own_columns(self._model) if ranks.size > 1 else 0
        self._divided = DividedLogits(ranks, vocab_size, columns) if columns else None
        following = Constraints(masks.host, vocab_size, self.grammars), masks
        self._samplers = SamplerBank(max_seqs=max_seqs, vocab_size=vocab_size, device=device, following=following)
        # Room for a full prompt step (at most 56 bytes a token) and for some thousands of table entries.
        self._staging = Staging(capacity=64 * max(step_tokens, max_seqs) + (1 << 18), steps=GPU_DEPTH, device=device)
        # Written on the device by each step, then copied to one of the host's buffers.
        self._output = StepOutput.allocate(max_seqs, device=device)
        self._host_outputs = [StepOutput.allocate(max_seqs, pinned=self._gpu) for _ in range(GPU_DEPTH + 1)]
        self._clocks = [Stopwatch(self._gpu) for _ in self._host_outputs]
        self._launches = 0
        self._allocate_cache()
        # Steps are padded to the sizes that graphs have, or would have.  The number of rows of a product decides the
        # order of its sums, and a graph must not change a token.
        self._sizes = ladder(max_seqs) if self._gpu else []
        self._batch.shapes = mixed_ladder(max_seqs, step_tokens) if self._gpu else []
        self._captured = False
        self._look_ahead = True  # of the last plan
        self._second_use: SecondUse | None = None  # while graphs are recorded as they are needed
        self._postponed: deque[Callable[[], None]] = deque()  # captures that a takeover leaves for idle moments
        self._graph_seconds = config.graph_seconds  # that are left for them
        started = time.monotonic()
        self._prepare_graphs()
        self.graphs_s = time.monotonic() - started  # that graphs took at the start

    def _allocate_cache(self) -> None:
        """Take the KV cache, the host's memory for swapped blocks, and the batch's tensors.  Raises NotEnoughMemory."""
        config, model = self._config, self._loaded
        kv_dtype = KV_DTYPES.get(config.kv_dtype, model.dtype)
        # Where graphs leave the logits, which are not rounded to the model's dtype.
        graph_rows = self._max_seqs if self._has_graphs else 0
        columns = self._divided.columns if self._divided is not None else model.vocab_size
        self._graph_logits = torch.zeros(graph_rows, columns, dtype=torch.float32, device=self.device)
        token_bytes = bytes_per_token(model.layers, kv_dtype)
        # Without a length in the configuration the cache decides: a model's own may be made for a larger machine.
        memory = host_memory.divide(
            config,
            weights=host_memory.weight_bytes(self._model),
            block_bytes=token_bytes * config.block_size,
            on_gpu=self._gpu,
            ranks=self._ranks.size,
            limit=host_resources.memory_limit(),
        )
        self.blocks = blocks_that_fit(
            token_bytes=token_bytes,
            block_size=config.block_size,
            max_model_len=model.max_model_len if config.max_model_len else 1,
            kv_blocks=config.kv_blocks,
            kv_memory_gib=config.kv_memory_gib,
            device=self.device,
            activations=self._planned_activations(kv_dtype),
            cpu_budget=memory.kv,
            agree=self._ranks.least,
        )
        if (fits := self.blocks * config.block_size) < model.max_model_len:
            log.warning(
                "max_model_len is %d tokens, which is what the KV cache holds; the model was made for %d: raise "
                "kv_memory_gib for more",
                *(fits, model.max_model_len),
            )
            self._loaded = model = replace(model, max_model_len=fits)
        fill = float("nan") if config.poison_free_blocks else 0.0
        caches = allocate(
            *(model.layers, self.blocks, config.block_size, kv_dtype, self.device, fill),
            on_demand=config.standby,
            scales=model.kv_scales,
        )
        if model.kv_scales is not None:
            use = "uses" if caches[0].scales is not None else "could use, with kv_dtype e4m3,"
            log.info("the KV cache %s the scales of keys and values that the checkpoint brings", use)
        self._by_shape = by_shape(caches)  # what operators that move blocks take in one call
        self._batch = self._new_batch(caches)
        # No sequence starts while another one is swapped out.  So at most the contents of the cache are swapped out.
        # It is twice that if most blocks were shared, because each holder takes a copy.
        swap_blocks = self._ranks.least(memory.swap // (token_bytes * config.block_size))
        self.host_blocks = min(swap_blocks, 2 * self.blocks)
        self.swap = Swap(caches, self.host_blocks)

    def _planned_activations(self, kv_dtype: torch.dtype) -> int:
        """Bytes to leave free for activations; 0 where the configuration fixes the size of the cache, or on a CPU."""
        config, model = self._config, self._loaded
        if not self._gpu or config.kv_blocks or config.kv_memory_gib:
            return 0
        self._batch = self._new_batch(allocate(model.layers, 1, config.block_size, kv_dtype, self.device))
        # A takeover reuses what the engine before it measured.
        sizes = f"{self._max_seqs} {self._step_tokens} {model.max_model_len} {model.dtype}"
        plan = MemoryPlan(config, model.directory, sizes)
        activations = plan.recall() if config.standby else 0
        if not activations:
            activations = self._activation_bytes()
            plan.remember(activations)
        return activations

    def _new_batch(self, caches: Caches) -> Batch:
        return Batch(
            max_seqs=self._max_seqs,
            max_model_len=self._loaded.max_model_len,
            step_tokens=self._step_tokens,
            block_size=self._config.block_size,
            caches=caches,
        )

    @property
    def _has_graphs(self) -> bool:
        return self._gpu and self._config.graph_seconds > 0

    def _prepare_graphs(self) -> None:
        """Capture all graphs; after a takeover postpone them to idle moments and to their second use."""
        if not self._has_graphs:
            return
        self._make_graphs()
        if self._config.standby:
            self._second_use = SecondUse()
            self._postponed.extend(itertools.chain(*self._captures()))
        else:
            self._capture(self._config.graph_seconds)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence: the model's, or what the KV cache holds."""
        return self._loaded.max_model_len

    def reset(self) -> None:
        """Free every slot.  KV contents stay, because a new owner of a block writes it before reading it.

        Raises RuntimeError when the device no longer answers.
        """
        if self._gpu:
            torch.cuda.synchronize(self.device)
        self._batch.reset()
        self._samplers.reset()

    # ----------------------------------------------------------------------------------------------------- every step

    @torch.inference_mode()
    def launch_model(self, plan: StepPlan, *, all_collected: bool = True) -> Launched:
        """Apply the plan and start computing the step's logits.  After an exception only `reset` may be called.

        all_collected: every step before has been, so that its masks can be computed now; else `begin_masks` later."""
        staging, samplers, batch = self._staging, self._samplers, self._batch
        self._look_ahead = plan.look_ahead
        self._clocks[self._next()].start()
        for slot in plan.freed_slots:
            samplers.free(slot)
        for piece in plan.slices:
            if piece.sampler:
                samplers.assign(piece.slot, piece.sampler)
        for fork in plan.forks:
            samplers.assign(fork.slot, fork.sampler)
        staging.begin_step()
        staged = batch.stage(plan, staging)
        poison = staging.stage_array(np.array(plan.poison, dtype=np.int64)) if plan.poison else None
        copies = staging.stage_array(np.array(plan.copies, dtype=np.int64)) if plan.copies else None
        staging.send()

        samplers.flush()
        if all_collected:
            samplers.begin_masks()
        self._move_blocks(plan, poison, copies)
        if staged is None:
            return Launched(plan.step)
        batch.apply_staged(staged)
        if staged.mixed is not None:
            return self._mixed(plan.step, staged.mixed)
        beams = staged.beams.asked if staged.beams is not None else ()
        return self._decode(plan.step, beams) if batch.decoding_slots or beams else Launched(plan.step)

    def _move_blocks(self, plan: StepPlan, poison: Tensor | None, copies: Tensor | None) -> None:
        """Launch what the plan does to whole blocks, before the model writes any.

        poison [n], copies [n, 2]: ids on the device; None: none."""
        if plan.swap_out:
            self.swap.out(plan.swap_out)
        if poison is not None:
            for group in self._by_shape:
                ops.block_fill(group, poison, float("nan"))
        if plan.swap_in:
            self.swap.back(plan.swap_in)
        if copies is not None:
            for group in self._by_shape:
                ops.block_copy(group, copies)

    def waits_for_tokens(self, launched: Launched) -> bool:
        """Whether the step before must be collected before `launch_sampling`: a slot's mask needs its tokens."""
        return self._samplers.following and launched.sample is not None

    def begin_masks(self) -> None:
        """Begin to compute the masks of a launched step on other threads, once all steps before it are collected.

        `launch_sampling` comes next."""
        self._samplers.begin_masks()

    @torch.inference_mode()
    def launch_sampling(self, launched: Launched) -> Pending:
        """Sample from the logits of a launched model; `waits_for_tokens` says what comes before."""
        if launched.logits is None:
            return Pending(launched.step)
        if launched.sample is not None:
            self._samplers.fill_masks()
            launched.sample()
        return self._pending(launched, launched.logits)

    def collect(self, pending: Pending) -> StepResult:
        """Wait for a launched step.  Steps are collected in the order of their launch."""
        seconds = pending.clock.wait() if pending.clock is not None else 0.0
        prompt_logprobs = {found.asked[0].slot: found.entries() for found in pending.prompt_logprobs}
        slots, output = pending.slots, pending.output
        if output is None:
            return StepResult(pending.step, [], [], prompt_logprobs=prompt_logprobs, device_s=seconds)
        tokens, outcomes = output.tokens.numpy()[: len(slots)], output.outcomes.numpy()[: len(slots)]
        failed, impossible = {}, {}
        if outcomes.any():
            failed = {slots[i]: FAILED for i in (outcomes == NOT_FINITE).nonzero()[0].tolist()}
            impossible = {slots[i]: IMPOSSIBLE for i in (outcomes == NOTHING_ALLOWED).nonzero()[0].tolist()}
        sampled = tokens.tolist()
        impossible |= advance(pending.followers, sampled)
        candidates = pending.candidates.by_slot() if pending.candidates else {}
        if pending.candidates:
            failed |= {slot: FAILED for slot, _ in pending.candidates.asked if slot not in candidates}
        return StepResult(
            pending.step,
            list(slots),
            sampled,
            logprobs=pending.logprobs.by_slot() if pending.logprobs else {},
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            impossible=impossible,
            device_s=seconds,
            candidates=candidates,
            forced=forced_tokens(pending.followers) if pending.look_ahead else {},
        )

    def _decode(self, number: int, beams: tuple[tuple[int, int], ...]) -> Launched:
        """Compute one more token for every slot, and of `beams`, with two graph launches where there are graphs."""
        count = len(self._batch.decoding_slots)
        size = self._padded(count + len(beams))
        if self._captured or self._recorded(number, size):
            self._decode_graphs.replay(size)
            padded = partial(self._sample_padded, self._padded(count)) if count else None
            return Launched(number, self._graph_logits, padded, beams=beams)
        step = self._batch.decode_step(size)
        self._batch.gather(step)
        logits = self._logits(Forward(self._model, step), step.logits_at)
        sample = partial(self._sample, step, logits, self._samplers.general) if count else None
        return Launched(number, logits, sample, beams=beams)

    def _mixed(self, number: int, mixed: Mixed) -> Launched:
        """Compute prompt slices together with the slots that decode."""
        count = len(self._batch.decoding_slots)
        if mixed.shape in self._batch.shapes and (self._captured or self._recorded_mixed(number, mixed)):
            self._mixed_graphs.replay(mixed.shape)
            padded = partial(self._sample_padded, self._padded(count)) if count else None
            return Launched(number, self._graph_logits, padded, beams=mixed.beams)
        step = self._batch.mixed_step(mixed)
        forward = Forward(self._model, step)
        logits = self._logits(forward, step.logits_at)
        sample = partial(self._sample, step, logits, self._samplers.general) if count else None
        scored = tuple(self._score(forward, each) for each in step.targets)
        return Launched(number, logits, sample, scored, mixed.beams)

    def _sample_padded(self, size: int) -> None:
        """Sample from the logits that a graph of the model left, with a graph where one has this size."""
        general = self._samplers.general
        if size in self._sample_graphs[general]:
            self._sample_graphs[general].replay(size)
        else:
            self._sample(self._batch.decode_step(size), self._graph_logits[:size], general)

    def _recorded(self, number: int, size: int) -> bool:
        """Whether step `number` has graphs of a decode step of this size.

        After a takeover, record them the second time their launches run."""
        if self._second_use is None:
            return False
        kinds = self._decode_graphs, self._sample_graphs[self._samplers.general]
        missing = [graphs for graphs in kinds if size not in graphs]
        if missing and not self._second_use.due(number, *((id(graphs), size) for graphs in kinds)):
            return False
        return self._record([partial(graphs.capture, size, run=False) for graphs in missing])

    def _recorded_mixed(self, number: int, mixed: Mixed) -> bool:
        """Whether step `number` has the model's graph of a step with these slices.  Records as `_recorded` does."""
        if self._second_use is None:
            return False
        if mixed.shape in self._mixed_graphs:
            return True
        if not self._second_use.due(number, mixed.shape):
            return False
        self._idle[mixed.shape] = mixed  # pages of one shape always lie at the same addresses
        return self._record([partial(self._mixed_graphs.capture, mixed.shape, run=False)])

    def _record(self, captures: Sequence[Callable[[], None]]) -> bool:
        """Capture these graphs while requests are served.  False: a capture failed, and no other one is tried."""
        try:
            for capture in captures:
                capture()
        except RuntimeError as error:
            log.warning("CUDA graphs cannot be recorded while requests are served: %s", str(error).splitlines()[0])
            self._second_use = None
            torch.cuda.synchronize(self.device)
            return False
        return True

    def _padded(self, count: int) -> int:
        """Number of rows that a step of `count` rows computes, padding included."""
        return rung(self._sizes, count) or count

    def _logits(self, forward: Forward, at: Tensor | None, out: Tensor | None = None, *, whole: bool = False) -> Tensor:
        """Logits [., V] of tokens `at` of a step (None: of all), in `out` where given.

        Of several ranks only this one's columns, where the model has those, unless `whole`."""
        return forward.logits(at, out, own=self._divided is not None and not whole)

    def _score(self, forward: Forward, asked: Targets) -> Logprobs:
        """Prompt logprobs of one slice, TARGET_ROWS positions at a time, so that long prompts fit."""
        entries = [Report(asked.slot, asked.top)] * len(asked.ids)
        return logprobs_from(lambda part: self._logits(forward, asked.at[part], whole=True), asked.ids, entries)

    def _sample(self, step: StepTensors, logits: Tensor, general: bool) -> None:
        """Choose a token for each slot from the step's logits, and make it the next step's input."""
        count = len(step.sample_slots)
        tokens, outcomes = self._output.tokens[:count], self._output.outcomes[:count]
        if self._divided is not None and not general:
            self._divided.choose_likeliest(logits, step.sample_slots, tokens, outcomes)
        else:
            whole = logits if self._divided is None else self._divided.whole(logits)
            self._samplers.run(whole, step.sample_slots, step.known, tokens, outcomes, general)
        self._batch.finish(tokens)

    def _pending(self, launched: Launched, logits: Tensor) -> Pending:
        """Copy the step's output to the host, in the background."""
        slots = self._batch.decoding_slots
        if self._divided is not None and (self._samplers.reporting or launched.beams):
            logits = self._divided.whole(logits[: len(slots) + len(launched.beams)])
        logprobs = self._samplers.logprobs(logits, slots, self._output.tokens)
        candidates = find_candidates(logits, len(slots), launched.beams)
        at = self._launches = self._next()
        output, clock = self._host_outputs[at], self._clocks[at]
        output.all.copy_(self._output.all, non_blocking=True)
        clock.stop()
        followers = self._samplers.followers(slots)
        scored = launched.prompt_logprobs
        return Pending(launched.step, slots, output, clock, logprobs, scored, followers, candidates, self._look_ahead)

    def _next(self) -> int:
        """Index of the output buffer that the next step uses."""
        return (self._launches + 1) % len(self._host_outputs)

    # ------------------------------------------------------------------------------------------------- once, on a GPU

    @torch.inference_mode()
    def _activation_bytes(self) -> int:
        """Bytes that the largest step takes besides weights and KV cache, measured on an empty step.

        All slots sample, and a prompt is scored."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        seqs = self._max_seqs
        shape = Shape(seqs - 1, self._step_tokens - seqs + 1, 1, seqs, seqs)
        step = self._batch.mixed_step(self._batch.idle_step(shape, self._staging))
        forward = Forward(self._model, step)
        logits = self._logits(forward, step.logits_at)
        self._sample(step, logits, general=True)
        piece = torch.zeros(TARGET_ROWS, dtype=torch.int64, device=self.device)
        scored = self._score(forward, Targets(0, piece, piece, min(MOST_LOGPROBS, self._loaded.vocab_size)))
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del step, forward, logits, scored
        torch.cuda.empty_cache()
        return peak

    def _make_graphs(self) -> None:
        """Create all kinds of graphs; capture none yet."""
        batch = self._batch

        def decode(size: int) -> None:
            step = batch.decode_step(size)
            batch.gather(step)
            self._logits(Forward(self._model, step), None, self._graph_logits[:size])

        def sample(general: bool) -> Callable[[int], None]:
            return lambda size: self._sample(batch.decode_step(size), self._graph_logits[:size], general)

        def mixed(shape: Shape) -> None:
            step = batch.mixed_step(self._idle[shape])
            self._logits(Forward(self._model, step), step.logits_at, self._graph_logits[: shape.samples])

        self._idle: dict[Shape, Mixed] = {}
        where = Where()
        self._decode_graphs = Graphs(decode, where)
        self._sample_graphs = Graphs(sample(False), where), Graphs(sample(True), where)
        self._mixed_graphs = Graphs(mixed, where)

    def _captures(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Captures in order: decode steps of every size with both ways to sample; small steps with slices."""

        def decode(graphs: Graphs[int], size: int) -> None:
            if size not in graphs:  # else it was recorded while requests were served
                graphs.capture(size)

        def mixed(shape: Shape) -> None:
            if shape not in self._mixed_graphs:
                self._idle[shape] = self._batch.idle_step(shape, self._staging)
                self._mixed_graphs.capture(shape)

        kinds = self._decode_graphs, *self._sample_graphs
        decodes: list[Callable[[], None]] = [
            partial(decode, graphs, size) for size in urgent(self._sizes) for graphs in kinds
        ]
        return decodes, [partial(mixed, shape) for shape in memory_first(self._batch.shapes)]

    def _use_captured(self) -> bool:
        """From now on use only the sizes that have all their graphs.  False: no size has."""
        kinds = self._decode_graphs, *self._sample_graphs
        if sizes := [size for size in self._decode_graphs.keys if all(size in graphs for graphs in kinds)]:
            self._sizes, self._captured = sizes, True
        return self._captured

    @torch.inference_mode()
    def _capture(self, seconds: float) -> None:
        """Capture all graphs at the start, for at most `seconds`."""
        decodes, mixed = self._captures()
        started = time.monotonic()
        done = capture_all(decodes, seconds, self._ranks.least)
        if self._use_captured():
            done += capture_all(mixed, seconds - (time.monotonic() - started), self._ranks.least)
            self._batch.shapes = self._mixed_graphs.keys
        log.info("%d CUDA graphs in %.1f s", done, time.monotonic() - started)

    @torch.inference_mode()
    def catch_up(self) -> bool:
        """Capture one of the graphs that a takeover postponed.  Returns whether more are left.

        Call it only while no request runs: it frees the slots of ended sequences, and a capture runs an empty step."""
        if not self._postponed:
            return False
        self._batch.vacate()
        started = time.monotonic()
        try:
            self._postponed.popleft()()
        except RuntimeError as error:
            log.warning("no further CUDA graphs: %s", str(error).splitlines()[0])
            self._postponed.clear()
            torch.cuda.synchronize(self.device)
        self._graph_seconds -= time.monotonic() - started
        if self._graph_seconds <= 0:
            self._postponed.clear()
        if not self._postponed and self._use_captured():
            self._second_use = None
            self._batch.shapes = self._mixed_graphs.keys
            log.info("CUDA graphs of %d batch sizes and %d mixed sizes", len(self._sizes), len(self._batch.shapes))
        return bool(self._postponed)


class Stopwatch:
    """Times a step on its device and waits for its end.  On a CPU the step has ended when `stop` is called."""

    def __init__(self, gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
        self._began = self._ended = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._ended = time.perf_counter()

    def wait(self) -> float:
        """Wait for the work queued before `stop`.  Returns the seconds since the device reached `start`."""
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        seconds: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds


class StepOutput:
    """Tokens and outcomes of a step's slots, in their order, as views of one buffer, so that one copy moves both."""

    def __init__(self, buffer: Tensor, count: int) -> None:
        self.all = buffer  # [9 * count] u8
        self.tokens = buffer[: 8 * count].view(torch.int64)  # [count]
        self.outcomes = buffer[8 * count :]  # [count] u8, values of engine/executor/sampling.py

    @classmethod
    def allocate(cls, count: int, *, device: torch.device | str = "cpu", pinned: bool = False) -> StepOutput:
        """An output of zeros.  pinned: in memory that a GPU can copy to in the background."""
        return cls(torch.zeros(9 * count, dtype=torch.uint8, device=device, pin_memory=pinned), count)
