"""The executor in this process: a worker, called by the loop's own thread.

On a GPU `submit` only queues a step's work, and `collect` waits for an event with the interpreter lock released.  A
thread in between would only add a hand-over per step.  On a CPU torch computes inside `submit` and releases the
interpreter lock there, so the bus thread runs meanwhile.

If token masks depend on sampled tokens, a step's sampling is launched only after the tokens of the previous step are
collected.  Threads compute the masks while the loop commits that previous step and plans the next one:

    device   sample N | model of step N+1            | sample N+1 | model of step N+2
    threads             masks of step N+1
    loop     collect N ─ commit N ─ plan N+2 ─ submit N+2: launch sampling N+1, launch model N+2 ─ collect N+1
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from functools import partial
from pathlib import Path

import msgspec
import torch

from quire.engine.common import host_resources
from quire.engine.config import EngineConfig
from quire.engine.core.plan import Drafter, StepPlan, StepResult
from quire.engine.executor import host_memory, ops
from quire.engine.executor.base import ExecutorLost, ModelInfo, StepError
from quire.engine.executor.drafter import SuffixDrafter
from quire.engine.executor.errors import ModelLoadError, one_line
from quire.engine.executor.grammar_store import GrammarStore
from quire.engine.executor.kv_cache import GIB
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.executor.models import fused
from quire.engine.executor.models.hf import LoadedModel, load_model, with_head
from quire.engine.executor.models.linear import tile_tokens
from quire.engine.executor.models.sources import builtin
from quire.engine.executor.models.weights import fingerprint
from quire.engine.executor.ranks.ranks import ALONE, Ranks
from quire.engine.executor.worker import GPU_DEPTH, Launched, Pending, Worker

log = logging.getLogger(__name__)

# Defaults of (max_seqs, step_tokens) by device.  A GPU needs many sequences in a step.  By a roofline model of 1,000
# concurrent prompts with an 8B model, throughput is 6 % lower with 256 slots than with 1024, and 1.5 % lower with 1024
# tokens per step than with 8192.
SIZES = {"cpu": (256, 1024), "cuda": (1024, 8192)}


def device_kind(config: EngineConfig) -> str:
    """Return the device that the configuration selects: "cpu" or "cuda"."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return auto if config.device == "auto" else config.device


def why_no_drafts(config: EngineConfig, kind: str, rollbacks: int | None = None, dependence: str = "") -> str:
    """Return why sequences use no drafts (speculative decoding) on a device, "cpu" or "cuda"; empty: they use drafts.

    `rollbacks`: states to which recurrent layers can roll back; None: the model has no such layers.  `dependence`: why
    a token's logits depend on the rest of its step, so that drafts could change a text at a near-tie; empty: they do
    not.  Raises ModelLoadError if `drafts` is on and not supported."""
    if config.drafts == "off":
        return "--drafts is off"
    why = ""
    if rollbacks is not None and kind != "cpu":
        why = "recurrent layers draft on a CPU only"
    elif rollbacks == 0:
        why = "no recurrent state is left to roll back to: raise state_memory_gib, or lower max_seqs"
    if config.tensor_parallel > 1:
        why = f"tensor_parallel is {config.tensor_parallel}"
    if config.drafts == "auto":
        if kind != "cpu":
            return why or "a GPU needs --drafts on"
        return why or (f"logits depend on the rest of a step, {dependence}" if dependence else "")
    if why:
        raise ModelLoadError(f"drafts is on and {why}; turn drafts off")
    return ""


def open_drafter(slots: int, why: str) -> Drafter | None:
    """Return a drafter for `slots` sequences; None, with a line in the start log, if `why` gives a reason against
    drafts."""
    log.info("speculative decoding: %s", f"off, because {why}" if why else "on, computed when they save time")
    return None if why else SuffixDrafter(slots)


def read_model(config: EngineConfig, kind: str, ranks: Ranks = ALONE) -> LoadedModel:
    """Load the configured model, or a rank's shard of it, onto a device, "cpu" or "cuda".  Raises ModelLoadError."""
    return load_model(
        config.model,
        dtype=config.dtype,
        device=torch.device(kind),
        max_model_len=config.max_model_len,
        random=config.load == "random",
        deterministic=config.deterministic,
        hf_overrides=config.hf_overrides,
        ranks=ranks,
        quantize=config.quantize,
        own_experts=config.own_experts,
        adapters=config.lora_slots > 0,
    )


def with_drafting_head(config: EngineConfig, model: LoadedModel, kind: str, dependence: str) -> LoadedModel:
    """Return a model with its checkpoint's MTP head if drafts use it.  The arguments are those of `why_no_drafts`."""
    if config.load == "random":
        return model
    rollbacks = 1 if model.states else None  # memory for states is divided later; assume that one fits
    return with_head(model, why_no_drafts(config, kind, rollbacks, dependence))


def fingerprint_of(config: EngineConfig, model: LoadedModel) -> str:
    """Return the fingerprint of a loaded model.  Raises OSError if its files are missing."""
    return fingerprint(model.directory, model.dtype, random=config.load == "random", changes=model.changes)


class LocalExecutor:
    """Implements `quire.engine.executor.base.Executor` with one worker.  Not thread-safe: one loop owns it.

    Create it on the thread that will use it.  Torch's OpenMP keeps a team of threads for each thread that ever
    computed.  With two teams OpenMP considers the machine oversubscribed, and waiting threads sleep at every barrier.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        """Compile the kernels if this machine has not yet, load the model, allocate the KV cache, start.

        ranks: if there are several, this process computes the shard of one of them (`parallel.py`).
        Raises ModelLoadError, and KernelBuildError without a compiler."""
        began = time.monotonic()
        threads = config.threads or max(1, host_resources.usable_cpus() // ranks.size)
        torch.set_num_threads(threads)  # threads of this thread's own OpenMP team
        ops.load(library=Path(config.kernels) if config.kernels else None)
        kind = device_kind(config)
        self.max_seqs, self.step_tokens = config.max_seqs or SIZES[kind][0], config.step_tokens or SIZES[kind][1]
        started = time.monotonic()
        model = read_model(config, kind, ranks)
        # Torch's threads wait for the slowest one, so torch gets one thread if our kernels compute all layers.  The
        # last bits of torch's activation functions also depend on how elements are divided among threads.
        alone = kind == "cpu" and (config.deterministic or fused.is_fused(model.module))
        ops.set_threads(threads)
        torch.set_num_threads(1 if alone else threads)
        dependence = model.batch_dependence
        if not (dependence or alone or threads == 1):
            dependence = "in the last bits of activations, by the division among threads; --deterministic prevents it"
        log.info("batch dependence of the logits' last bits: %s", dependence or "none")
        model, loaded = with_drafting_head(config, model, kind, dependence), time.monotonic()
        sizes = {"max_seqs": self.max_seqs, "step_tokens": self.step_tokens}
        self._worker: Worker | None = Worker(config, model, **sizes, ranks=ranks)
        self.max_seqs = self._worker.max_seqs
        self.info = ModelInfo(
            name=config.served_name.partition(",")[0].strip() or config.model or builtin.NAME,
            fingerprint=ranks.first_then_others(partial(fingerprint_of, config, model)),
            vocab_size=model.vocab_size,
            max_model_len=self._worker.max_model_len,
            eos_ids=model.eos_ids,
            kv_bytes_per_token=ranks.size * self._worker.kv.token_bytes,
            windows=self._worker.kv.windows,
            grammars=self._worker.grammars is not None,
            beams=True,
            adapters=self._worker.adapters is not None,
            draft_tokens=self._worker.draft_tokens,
            near_ties=model.near_ties,
            tile_tokens=tile_tokens(model.module),
            **self._worker.state_facts(),
        )
        rollbacks = self.info.draft_tokens if self.info.state_bytes else None
        self.drafter = open_drafter(self.max_seqs, why_no_drafts(config, kind, rollbacks, dependence))
        self.blocks, self.host_blocks = self._worker.blocks, self._worker.swap.host_blocks
        self.swap_bytes_per_s = self._worker.swap.measure()
        self.start_parts = {
            "kernels": started - began,
            "weights": loaded - started,
            "memory": time.monotonic() - loaded - self._worker.graphs_s,
            "graphs": self._worker.graphs_s,
        }
        self.memory_parts = self._memory_parts(config, model, ranks, kind)
        # A GPU computes step N while Python plans N+1.  On a CPU both need the same cores, so planning ahead gains
        # nothing: TPOT at batch size 1 is 5.5 to 5.8 ms with depth 1 and 5.6 to 6.0 ms with depth 2.  Depth 2 also
        # computes one extra token after each stop token, and a request that arrives during step N waits for N+1.
        self.depth = 1 if kind == "cpu" else GPU_DEPTH
        self._in_flight: deque[Launched | Pending | Exception] = deque()  # Launched: its sampling waits for masks
        self._begun: deque[float] = deque()  # submit time of each step in flight
        self._ended = 0.0  # time at which the last step was collected

    def _memory_parts(self, config: EngineConfig, model: LoadedModel, ranks: Ranks, kind: str) -> dict[str, int]:
        """Return the bytes of weights and KV cache on the device, and on a GPU of everything else that torch
        allocated."""
        weights = host_memory.weight_bytes(model.module, kind)
        kv_cache = self.blocks * config.block_size * self.info.kv_bytes_per_token
        kv_cache += ranks.size * sum(group.blocks * group.block_bytes for group in self.info.windows)
        parts = {"weights": ranks.size * weights, "kv_cache": kv_cache}
        if kind == "cuda":  # CUDA graphs, activations and the batch's tensors
            others = torch.cuda.memory_reserved() - weights - kv_cache // ranks.size
            parts["graphs_and_activations"] = ranks.size * max(0, others)
            log.info("%.1f GiB of the GPU's memory are left", torch.cuda.mem_get_info()[0] / GIB)
        return parts

    def submit(self, plan: StepPlan) -> None:
        """Start one step; on a GPU returns at once.  At most `depth` steps may be in flight."""
        if len(self._in_flight) >= self.depth:
            raise RuntimeError(f"{len(self._in_flight)} steps in flight: collect one first")
        self._begun.append(time.perf_counter())
        self._launch_sampling()
        if self._in_flight and isinstance(self._in_flight[-1], Exception):  # an earlier step failed: cancel this one
            self._in_flight.append(self._in_flight[-1])
            return
        assert self._worker is not None
        try:
            launched = self._worker.launch_model(plan, all_collected=not self._in_flight)
            waits = self._in_flight and self._worker.waits_for_tokens(launched)
            self._in_flight.append(launched if waits else self._worker.launch_sampling(launched))
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._in_flight.append(error)

    @property
    def failing(self) -> bool:
        """Whether the last step that was submitted failed, so that `collect` will raise."""
        return bool(self._in_flight) and isinstance(self._in_flight[-1], Exception)

    def _launch_sampling(self) -> None:
        """Launch the sampling of the oldest step in flight, if it waits for the previous step, which is now
        collected."""
        if not self._in_flight or not isinstance(launched := self._in_flight[0], Launched):
            return
        assert self._worker is not None
        try:
            self._in_flight[0] = self._worker.launch_sampling(launched)
        except Exception as error:
            log.exception("step %d failed", launched.step)
            self._in_flight[0] = error

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.  Raises StepError if it failed; every step in flight is then void.

        Raises ExecutorLost when the device does not answer any more.
        """
        if not self._in_flight:
            raise RuntimeError("no step in flight")
        assert self._worker is not None
        self._launch_sampling()
        step, begun = self._in_flight.popleft(), self._begun.popleft()
        if isinstance(step, Pending):
            try:
                result = self._timed(self._worker.collect(step), begun)
                if self._in_flight and isinstance(self._in_flight[0], Launched):
                    self._worker.begin_masks()
                return result
            except Exception as error:
                log.exception("step %d failed", step.step)
                step = error
        assert isinstance(step, Exception)
        self._in_flight.clear()
        self._begun.clear()
        try:
            self._worker.reset()
        except RuntimeError as error:  # after a fault in a kernel every call fails, for as long as the process lives
            raise ExecutorLost(f"the GPU is lost to this process: {one_line(step)}") from error
        raise StepError(one_line(step)) from step

    def _timed(self, result: StepResult, begun: float) -> StepResult:
        """Return the result with the step's duration: since its launch, or since the previous step ended if that was
        later."""
        assert self._worker is not None
        now, ended = time.perf_counter(), self._ended
        seconds, self._ended = now - max(begun, ended), now
        if self.depth > 1 and result.device_s:
            # The device may finish before this thread calls `collect`; the time between is not part of the step.  With
            # drafts the device waits until this thread has the previous result; that wait is part of the step.
            seconds = now - ended if result.accepted else result.device_s
        size, swap_s = self._worker.swap.moved()
        return msgspec.structs.replace(result, step_s=seconds, swapped_bytes=size, swap_s=swap_s)

    @property
    def grammar_store(self) -> GrammarStore | None:
        """The store of the requests' grammars; None: the model supports no grammars."""
        return None if self._worker is None or self._worker.grammars is None else self._worker.grammars.store

    @property
    def adapter_store(self) -> AdapterStore | None:
        """LoRA adapters that requests hold; None: the model supports no adapters."""
        return None if self._worker is None else self._worker.adapters

    def catch_up(self) -> bool:
        """Do one item of the work that the activation of a spare engine deferred, and return whether more is left.
        Call it only while there are no requests.  It does nothing while steps are in flight."""
        return self._worker is not None and not self._in_flight and self._worker.catch_up()

    def close(self) -> None:
        """Drop the steps in flight and free all memory."""
        self._in_flight.clear()
        if (store := self.grammar_store) is not None:
            store.close()
        if (adapters := self.adapter_store) is not None:
            adapters.close()
        if self.drafter is not None:
            self.drafter.close()
            self.drafter = None
        self._worker = None
        gc.collect()  # a worker and its graphs refer to each other
        torch.cuda.empty_cache()  # no effect if no GPU was used
