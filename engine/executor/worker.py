"""One rank: weights, KV cache, batch, samplers.  A step is `launch_model`, `launch_sampling` and `collect`.

launch   plan ─ stage: one pinned copy ─ apply ─> StepTensors ─ model ─> logits ─ sampling ─> tokens ─> pinned copy
         batch.py                        tables, positions   └ attention writes KV        └ fed back on the device
                                         step_launches.py, or replayed by step_graphs.py          step_output.py
collect  wait for that step's event, read the tokens

On a GPU a launch only queues work: plan N+1 may be launched before result N is collected, and nothing waits.  On a CPU
a launch computes the step, and `collect` has nothing to wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from quire.engine.common import host_resources
from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor import host_memory, ops
from quire.engine.executor.batch import Batch
from quire.engine.executor.candidates import Candidates, find_candidates
from quire.engine.executor.constraints import IMPOSSIBLE, Constraints
from quire.engine.executor.drafts import Verified
from quire.engine.executor.followers import Follower, advance, forced_tokens
from quire.engine.executor.grammars import Grammars
from quire.engine.executor.graphs import graph_sizes, mixed_shapes
from quire.engine.executor.head_drafts import Guesses, HeadDrafts
from quire.engine.executor.host_memory import HostMemory
from quire.engine.executor.kv_cache import KV_DTYPES, Caches, allocate, blocks_that_fit, bytes_per_token, cache_bytes
from quire.engine.executor.kv_groups import (
    KVMemory,
    block_ids,
    divide_layers,
    group_layers,
    grouping_windows,
    report,
    shapes_by_group,
    swap_for,
    window_layers,
)
from quire.engine.executor.lora.bank import AdapterBank
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.executor.masks import Masks
from quire.engine.executor.memory_plan import MemoryPlan
from quire.engine.executor.models.fused import Forward, own_columns
from quire.engine.executor.models.hf import LoadedModel
from quire.engine.executor.models.recurrent.states import States, state_bytes
from quire.engine.executor.ranks.ranks import ALONE, Ranks
from quire.engine.executor.ranks.vocab_parallel import VocabParallelLogits
from quire.engine.executor.sampling import NOT_FINITE, NOTHING_ALLOWED, Logprobs, SamplerBank
from quire.engine.executor.staged_plan import Mixed, Staged, staged_bytes
from quire.engine.executor.staging import Staging
from quire.engine.executor.state_memory import divide_states
from quire.engine.executor.step_graphs import StepGraphs
from quire.engine.executor.step_launches import StepLaunches
from quire.engine.executor.step_output import StepOutput, StepOutputs, Stopwatch
from quire.engine.executor.step_tensors import StepTensors

log = logging.getLogger(__name__)

# Error text for clients.
FAILED = "the model's logits for this token are not finite"
MAX_LOGPROBS = 20  # top-k logprobs per position that the memory plan assumes; each further one takes a few bytes
MAX_DRAFTS = 448  # maximum drafts of a step on a GPU: 64 sequences with 7 each
GPU_DEPTH = 2  # steps in flight: the device computes one while the host reads the previous result and launches the next


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched step.  Its host buffers are valid from the step's end until GPU_DEPTH further launches."""

    step: int
    slots: tuple[int, ...] = ()  # slots that sample
    output: StepOutput | None = None  # output of these slots, in their order
    clock: Stopwatch | None = None
    logprobs: Logprobs | None = None  # log probabilities of the sampled tokens, if requested
    prompt_logprobs: tuple[Logprobs, ...] = ()  # one per scored slice
    followers: Sequence[Follower] = ()  # sequences of `slots` with a grammar or bad_words
    candidates: Candidates | None = None
    look_ahead: bool = True  # StepPlan.look_ahead
    verified: Verified | None = None  # accepted drafts of the step
    guesses: Guesses | None = None  # next tokens as the MTP head guesses them


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose model is launched and whose sampling is not."""

    step: int
    logits: Tensor | None = None  # [N, V] of the slots that sample, or this rank's columns; None: nothing to compute
    sample: Callable[[], Verified | None] | None = None  # launches the sampling; None: no slot samples
    prompt_logprobs: tuple[Logprobs, ...] = ()  # one per scored slice
    candidates: tuple[tuple[int, int], ...] = ()  # (slot, number of candidates) per row after the sampling slots
    forward: tuple[StepTensors, Forward] | None = None  # for the MTP head; None: a CUDA graph computed the step


class Worker:
    """Owns all memory of one rank's device.  Memory that depends on traffic is allocated once, at the start."""

    def __init__(
        self, config: EngineConfig, model: LoadedModel, *, max_seqs: int, step_tokens: int, ranks: Ranks = ALONE
    ) -> None:
        """Allocate the KV cache and capture CUDA graphs.  The kernels must be loaded.

        ranks: all ranks agree on the number of blocks and of graphs.  Plans determine everything else.

        Raises NotEnoughMemory when the cache cannot hold one sequence of the configured max_model_len.  If none is
        configured, `max_model_len` becomes the length that the cache holds.
        """
        self.device = device = model.module.device
        if model.states:  # sequences with recurrent state are not swapped
            config = msgspec.structs.replace(config, preempt="recompute")
        self._config, self._loaded, self._ranks = config, model, ranks
        self._step_tokens = step_tokens
        memory = self._divide_memory()
        self._states, max_seqs = self._new_states(memory, max_seqs)
        self._head = HeadDrafts(model.head) if model.head is not None else None
        self.max_seqs = max_seqs
        self.grammars: Grammars | None = None
        self._adapters: AdapterBank | None = None
        if model.sites is not None:
            sizes = {"max_seqs": max_seqs, "rows": step_tokens}
            self._adapters = AdapterBank.of(config, model.sites, model.dtype, device, **sizes)
        vocab_size, masks = model.vocab_size, Masks(max_seqs, model.vocab_size, device)
        if Grammars.supported(model.directory, model.eos_ids):
            sizes = {"vocab_size": vocab_size, "kept_bytes": config.grammar_memory_mib << 20}
            self.grammars = Grammars(model.directory, **sizes, eos_ids=model.eos_ids, mask=masks.host)
        columns = own_columns(self._loaded.module) if ranks.size > 1 else 0
        self._vocab_parallel = VocabParallelLogits(ranks, vocab_size, columns) if columns else None
        following = Constraints(masks.host, vocab_size, self.grammars), masks
        self._samplers = SamplerBank(max_seqs=max_seqs, vocab_size=vocab_size, device=device, following=following)
        capacity = staged_bytes(max(step_tokens, max_seqs), len(set(model.windows) - {0}))
        self._staging = Staging(capacity=capacity, steps=GPU_DEPTH, device=device)
        self._outputs = StepOutputs(max_seqs, device, GPU_DEPTH)
        has_graphs = self._gpu and config.graph_seconds > 0
        # Output buffer of the graphs: float32 logits.
        columns = self._vocab_parallel.columns if self._vocab_parallel is not None else vocab_size
        shapes = mixed_shapes(max_seqs, step_tokens, drafts=self.draft_tokens > 0) if self._gpu else []
        rows = max([max_seqs, *(shape.logits for shape in shapes)]) if has_graphs else 0
        graph_logits = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        self._allocate_cache(memory)
        self._launches = self._new_launches(self._batch)
        self._graphs = StepGraphs(
            *(self._launches, self._batch, graph_logits),
            sizes=graph_sizes(max_seqs) if self._gpu else [],
            shapes=shapes,
            seconds=config.graph_seconds,
            agree=ranks.all_min,
        )
        self._look_ahead = True  # StepPlan.look_ahead of the last plan
        started = time.monotonic()
        if has_graphs and config.standby:
            self._graphs.postpone()
        elif has_graphs:
            self._graphs.capture()
        if self._gpu and self.draft_tokens:
            self._launches.warm_drafts(vocab_size)
        self.graphs_s = time.monotonic() - started  # seconds of graph capture at the start

    def _new_states(self, memory: HostMemory, max_seqs: int) -> tuple[States | None, int]:
        """Allocate recurrent states, if layers need them.  Return the states, and the number of slots that have one."""
        config, model = self._config, self._loaded
        if not model.states:
            return None, max_seqs
        available = cache_bytes(self.device, kv_memory_gib=config.kv_memory_gib, cpu_budget=memory.kv)
        sizes = {"state_bytes": state_bytes(model.states, model.dtype), "max_seqs": max_seqs, "memory": available}
        division = divide_states(config, **sizes, drafts=config.drafts != "off" and not self._gpu)
        where = model.dtype, self.device, division.rollbacks
        return States(model.states, division.slots, division.checkpoints, *where), division.slots

    def _divide_memory(self) -> HostMemory:
        """Divide the host's memory between KV cache (with recurrent states) and swap space."""
        config, model = self._config, self._loaded
        return host_memory.divide(
            config,
            weights=host_memory.weight_bytes(self._loaded.module),
            block_bytes=bytes_per_token(model.layers, KV_DTYPES.get(config.kv_dtype, model.dtype)) * config.block_size,
            on_gpu=self._gpu,
            ranks=self._ranks.size,
            limit=host_resources.memory_limit(),
        )

    def _allocate_cache(self, memory: HostMemory) -> None:
        """Allocate the KV cache, host memory for swapped blocks, and the batch's tensors.  Raises NotEnoughMemory."""
        config, model = self._config, self._loaded
        kv_dtype = KV_DTYPES.get(config.kv_dtype, model.dtype)
        known = grouping_windows(config.window_groups, model.windows, self._ranks.size, self._states is not None)
        available = cache_bytes(
            self.device,
            kv_memory_gib=config.kv_memory_gib,
            activations=self._planned_activations(kv_dtype),
            cpu_budget=memory.kv,
        )
        full, *windows = divide_layers(
            group_layers(model.layers, known, kv_dtype.itemsize, model.max_model_len),
            config,
            longest=model.max_model_len,
            slots=self.max_seqs,
            step_tokens=self._step_tokens,
            memory=available,
        )
        token_bytes = full.token_bytes
        taken = sum(group.blocks * group.token_bytes * config.block_size for group in windows)
        if self._states and (config.kv_memory_gib or not self._gpu):  # else `available` already excludes them
            taken += self._states.bytes
        # If no length is configured, the cache size limits it: the model's own maximum may need a larger machine.
        self.blocks = blocks_that_fit(
            token_bytes=token_bytes,
            block_size=config.block_size,
            max_model_len=model.max_model_len if config.max_model_len else 1,
            kv_blocks=config.kv_blocks,
            memory=available - taken,
            agree=self._ranks.all_min,
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
            windows=window_layers(windows),
        )
        report(replace(full, blocks=self.blocks), windows, config.block_size, model.max_model_len)
        if model.kv_scales is not None:
            use = "uses" if caches[0].scales is not None else "could use, with kv_dtype e4m3,"
            log.info("the KV cache %s the scales of keys and values in the checkpoint", use)
        if self._states:
            self._states.report(self.blocks * token_bytes * config.block_size)
            caches = self._states.attached(caches)
        self._batch = self._new_batch(caches, block_ids(self.blocks, windows))
        self.swap = swap_for(caches, self._ranks.all_min(memory.swap))
        hosts = self.swap.window_host_blocks
        specs = [group.spec(host, config.block_size) for group, host in zip(windows, hosts, strict=True)]
        self.kv = KVMemory(token_bytes, specs, shapes_by_group(caches))

    def _planned_activations(self, kv_dtype: torch.dtype) -> int:
        """Return the bytes to leave free for activations; 0 on a CPU, or if the configuration fixes the cache size."""
        config, model = self._config, self._loaded
        if not self._gpu or config.kv_blocks or config.kv_memory_gib:
            return 0
        caches = allocate(model.layers, 1, config.block_size, kv_dtype, self.device)
        batch = self._new_batch(self._states.attached(caches) if self._states else caches)
        # An activated spare engine reuses the measurement of the engine before it.
        sizes = f"{self.max_seqs} {self._step_tokens} {model.max_model_len} {model.dtype} {self.draft_tokens}"
        plan = MemoryPlan(config, model.directory, sizes)
        activations = plan.recall() if config.standby else 0
        if not activations:
            top = min(MAX_LOGPROBS, model.vocab_size)
            sizes_ = self.max_seqs, self._step_tokens, top, self.draft_tokens
            activations = self._new_launches(batch).peak_bytes(*sizes_)
            plan.remember(activations)
        return activations

    def _new_batch(self, caches: Caches, windows: Sequence[range] = ()) -> Batch:
        return Batch(
            max_seqs=self.max_seqs,
            max_model_len=self._loaded.max_model_len,
            step_tokens=self._step_tokens,
            block_size=self._config.block_size,
            caches=caches,
            staging=self._staging,
            adapters=self._adapters,
            windows=windows,
        )

    def _new_launches(self, batch: Batch) -> StepLaunches:
        sampling = self._samplers, self._outputs.device, self._vocab_parallel
        return StepLaunches(self._loaded.module, batch, *sampling, self._loaded.sites)

    @property
    def _gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def draft_tokens(self) -> int:
        """Maximum drafts of a step; 0: no limit, or no drafts.

        On a GPU the memory plan counts their logits.  With recurrent layers each needs a state to roll back to."""
        if self._states is not None:
            return self._states.rollback.places
        return MAX_DRAFTS if self._gpu and self._config.drafts == "on" else 0

    @property
    def adapters(self) -> AdapterStore | None:
        """LoRA adapters in host memory; None: the model supports no adapters."""
        return None if self._adapters is None else self._adapters.store

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence: the model's limit, or what the KV cache holds."""
        return self._loaded.max_model_len

    def state_facts(self) -> dict[str, int]:
        """Return the fields of `ModelInfo` about recurrent state."""
        return {} if self._states is None else self._states.facts()

    def catch_up(self) -> bool:
        """Capture a graph that the activation of a spare engine deferred, while no request runs.  Returns whether more
        are left."""
        return self._graphs.catch_up()

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

        all_collected: all earlier steps are collected, so the step's masks are computed now.  If false, call
        `begin_masks` later."""
        samplers, batch = self._samplers, self._batch
        if self._states is not None:
            plan = self._states.rollback.prepare(plan)
        if self._head is not None:
            self._head.begin(plan)
        self._look_ahead = plan.look_ahead
        self._outputs.start()
        for slot in plan.freed_slots:
            samplers.free(slot)
        for piece in plan.slices:
            if piece.sampler:
                samplers.assign(piece.slot, piece.sampler)
        for fork in plan.forks:
            samplers.assign(fork.slot, fork.sampler)
        staged = batch.stage(plan)
        samplers.flush()
        if all_collected:
            samplers.begin_masks()
        self._move_blocks(plan, staged)
        batch.apply(staged)
        if self._states is not None:
            self._states.begin_step(plan)
        launched = self._launch(plan, staged)
        if self._states is not None:
            self._states.end_step(plan)
        return launched

    def _launch(self, plan: StepPlan, staged: Staged) -> Launched:
        """Launch the model on a staged plan."""
        batch = self._batch
        if staged.mixed is not None:
            return self._mixed(plan.step, staged.mixed)
        candidates = staged.single.candidates if staged.single is not None else ()
        return self._decode(plan.step, candidates) if batch.decoding_slots or candidates else Launched(plan.step)

    def _move_blocks(self, plan: StepPlan, staged: Staged) -> None:
        """Launch the plan's copies and swaps of blocks, before the model writes any."""
        if plan.swap_out:
            self.swap.out(plan.swap_out)
        for shapes, blocks in zip(self.kv.shapes, staged.poison, strict=True):
            if blocks is not None:
                for tensors in shapes:
                    ops.block_fill(tensors, blocks, float("nan"))
        if plan.swap_in:
            self.swap.back(plan.swap_in)
        for shapes, pairs in zip(self.kv.shapes, staged.copies, strict=True):
            if pairs is not None:
                for tensors in shapes:
                    ops.block_copy(tensors, pairs)

    def waits_for_tokens(self, launched: Launched) -> bool:
        """Whether the previous step must be collected before `launch_sampling`, because a mask depends on its
        tokens."""
        return self._samplers.following and launched.sample is not None

    def begin_masks(self) -> None:
        """Start computing the masks of a launched step on worker threads, once all earlier steps are collected.

        Call `launch_sampling` next."""
        self._samplers.begin_masks()

    @torch.inference_mode()
    def launch_sampling(self, launched: Launched) -> Pending:
        """Sample from the logits of a launched model.  If `waits_for_tokens`, collect the previous step before."""
        if launched.logits is None:
            return Pending(launched.step)
        verified = None
        if launched.sample is not None:
            self._samplers.fill_masks()
            verified = launched.sample()
            if verified is not None and self._states is not None:  # only on a CPU, where reading counts never waits
                self._states.settle(verified.counts())
        pending = self._pending(launched, launched.logits, verified)
        if self._head is None or launched.forward is None:
            return pending
        (step, forward), slots = launched.forward, self._batch.decoding_slots
        accepted = verified.counts() if verified is not None else {}
        guesses = self._head.run(step, forward.hidden, slots, self._outputs.device.tokens[: len(slots)], accepted)
        return replace(pending, guesses=guesses)

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
        sampled, verified = tokens.tolist(), pending.verified
        if verified is not None:
            verified.take(pending.followers)
        impossible |= advance(pending.followers, sampled)
        candidates = pending.candidates.by_slot() if pending.candidates else {}
        if pending.candidates:
            failed |= {slot: FAILED for slot, _ in pending.candidates.asked if slot not in candidates}
        logprobs = pending.logprobs.by_slot() if pending.logprobs else {}
        entries = verified.entries() if verified is not None else {}
        return StepResult(
            pending.step,
            list(slots),
            sampled,
            logprobs=logprobs | {slot: last for slot, (_, last) in entries.items()},
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            impossible=impossible,
            device_s=seconds,
            candidates=candidates,
            forced=forced_tokens(pending.followers) if pending.look_ahead else {},
            accepted=verified.counts() if verified is not None else {},
            guesses=pending.guesses.tokens if pending.guesses else {},
            guess_s=pending.guesses.seconds if pending.guesses else 0.0,
            draft_logprobs={slot: before for slot, (before, _) in entries.items()},
        )

    def _decode(self, number: int, candidates: tuple[tuple[int, int], ...]) -> Launched:
        """Compute the next token of every decoding slot, and the rows of `candidates`, with two graph launches if
        graphs exist."""
        graphs, launches, general = self._graphs, self._launches, self._samplers.general
        count = len(self._batch.decoding_slots)
        size = graphs.padded(count + len(candidates))
        if graphs.decode(number, size, general):
            return Launched(number, graphs.logits, self._padded_sampling(count), candidates=candidates)
        step = self._batch.decode_step(size)
        self._batch.gather(step)
        logits = launches.logits(forward := launches.forward(step), step.logits_at)
        sample = partial(launches.sample, step, logits, general) if count else None
        return Launched(number, logits, sample, candidates=candidates, forward=(step, forward))

    def _mixed(self, number: int, mixed: Mixed) -> Launched:
        """Compute prompt slices together with the slots that decode."""
        launches, count = self._launches, len(self._batch.decoding_slots)
        if not mixed.targets and self._graphs.mixed(number, mixed):
            sampling = self._padded_sampling(count)
            if mixed.drafts is not None:
                sampling = partial(self._graphs.sample_drafts, mixed.drafts, self._samplers.general)
            return Launched(number, self._graphs.logits, sampling, candidates=mixed.candidates)
        step = self._batch.mixed_step(mixed)
        forward = launches.forward(step)
        logits = launches.logits(forward, step.logits_at)
        sample = partial(launches.sample, step, logits, self._samplers.general, mixed.drafts) if count else None
        scored = tuple(launches.score(forward, targets) for targets in step.targets)
        return Launched(number, logits, sample, scored, mixed.candidates, (step, forward))

    def _padded_sampling(self, count: int) -> Callable[[], Verified | None] | None:
        """Return the launch that samples for `count` slots from the logits of a graph; None: no slot samples."""
        graphs = self._graphs
        return partial(graphs.sample, graphs.padded(count), self._samplers.general) if count else None

    def _pending(self, launched: Launched, logits: Tensor, verified: Verified | None) -> Pending:
        """Start the copy of the step's output to the host."""
        slots = self._batch.decoding_slots
        if self._vocab_parallel is not None and (self._samplers.reporting or launched.candidates):
            logits = self._vocab_parallel.whole(logits[: len(slots) + len(launched.candidates)])
        logprobs = self._samplers.logprobs(logits, slots, self._outputs.device.tokens)
        candidates = find_candidates(logits, len(slots), launched.candidates)
        output, clock = self._outputs.copy()
        followers = self._samplers.followers(slots)
        scored = launched.prompt_logprobs
        found = logprobs, scored, followers, candidates
        return Pending(launched.step, slots, output, clock, *found, self._look_ahead, verified)
