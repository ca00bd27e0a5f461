"""A minimal scheduler: hand-made step plans for one worker, blocks allocated in random order."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Fork, Sampler, Slice, Start, StepPlan, StepResult
from quire.engine.executor.batch import Batch
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.models.fused import Forward
from quire.engine.executor.models.hf import LoadedModel, load_model
from quire.engine.executor.step_launches import StepLaunches
from quire.engine.executor.worker import Launched, Worker
from quire.engine.llm import LLM
from quire.engine.wire.messages import Generate, Sampling
from tests.executor.matchers import hold

GREEDY = Sampling(temperature=0)
CPU = torch.device("cpu")
NEW = 12  # tokens of an answer


class RecordingWorker(Worker):
    """Keeps the logits of the step it ran last: of the slots that sampled, then of its targets."""

    pieces: list[torch.Tensor]

    def launch_model(self, plan: StepPlan, *, all_collected: bool = True) -> Launched:
        self.pieces = []
        return super().launch_model(plan, all_collected=all_collected)

    def _new_launches(self, batch: Batch) -> StepLaunches:
        self.pieces = []  # graphs are captured before the first step
        launches = super()._new_launches(batch)
        compute = launches.logits

        def logits(
            forward: Forward, at: torch.Tensor | None, out: torch.Tensor | None = None, *, whole: bool = False
        ) -> torch.Tensor:
            self.pieces.append(compute(forward, at, out, whole=whole).clone())
            return self.pieces[-1]

        launches.logits = logits  # type: ignore[method-assign]
        return launches

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat(self.pieces)


@dataclass
class Running:
    """A sequence in a slot."""

    tokens: list[int]  # known: prompt and output
    prompt_len: int
    chunk: int
    sampler: Sampler | None  # None: computes its prompt and stops
    table: list[int]
    computed: int = 0
    targets: bool = False
    siblings: list[tuple[int, Sampler]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    def __init__(self, model: LoadedModel | Path, *, blocks: int = 256, seed: int = 0, **config: object) -> None:
        if isinstance(model, Path):
            model = load_model(str(model), dtype="auto", device=CPU)
        kernels = os.environ.get("QUIRE_KERNELS", "")
        settings = {"kernels": kernels, "max_seqs": 64, "step_tokens": 2048, "poison_free_blocks": True} | config
        self.config = EngineConfig(kv_blocks=blocks, **settings)  # type: ignore[arg-type]
        one_table = replace(model, windows=())  # plans here have no tables for window layers
        self.worker = RecordingWorker(
            self.config, one_table, max_seqs=self.config.max_seqs, step_tokens=self.config.step_tokens
        )
        self.free_blocks = random.Random(seed).sample(range(blocks), blocks)
        self.running: dict[int, Running] = {}
        self.steps = 0
        self.plans: list[StepPlan] = []
        self._left: list[int] = []
        self._starting: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._edits: list[tuple[int, int, int]] = []
        self._poison: list[int] = []

    def add(
        self,
        tokens: list[int],
        sampling: Sampling | None = GREEDY,
        *,
        chunk: int = 512,
        n: int = 1,
        sibling: int = 0,
        targets: bool = False,
        stop_ids: list[int] | None = None,
        output: list[int] | None = None,
    ) -> list[int]:
        """Start a prompt (and `output` tokens of it already known) with n choices; returns their slots.

        The choices are numbered from `sibling`.
        """
        if sampling and sampling.grammar and self.worker.grammars is not None:
            hold(self.worker.grammars.store, sampling.grammar)  # as the grammar gate does
        slots = [slot for slot in range(self.config.max_seqs) if slot not in self.running][:n]
        known = tokens + (output or [])
        table = [self.free_blocks.pop() for _ in range(-(-len(known) // self.config.block_size))]
        samplers: list[Sampler] = []
        if sampling:
            samplers = [
                Sampler(sampling, len(tokens), stop_ids or [], list(known), sibling=sibling + i) for i in range(n)
            ]
        seq = Running(list(known), len(tokens), chunk, samplers[0] if samplers else None, table, targets=targets)
        seq.siblings = list(zip(slots[1:], samplers[1:], strict=True))
        self.running[slots[0]] = seq
        for other, sampler in seq.siblings:
            self.running[other] = Running(list(known), len(tokens), chunk, sampler, [], computed=-1)
        self._starting.append(slots[0])
        return slots

    def free(self, slot: int) -> None:
        gone = self.running.pop(slot)
        self._left.append(slot)
        shared = {block for other in self.running.values() for block in other.table}
        mine = [block for block in gone.table if block not in shared]
        self.free_blocks += mine
        self._poison += mine

    def plan(self) -> StepPlan:
        """The next plan: one chunk of every unfinished prompt, one token of every other sequence."""
        size = self.config.block_size
        slices, forks = [], []
        for number, seq in self.running.items():
            if seq.computed < 0 or seq.computed == len(seq.tokens):
                continue  # a sibling before its fork or in its very step, or a prompt without a choice
            want = len(seq.tokens) - seq.computed
            decodes = seq.sampler and len(seq.tokens) > seq.prompt_len and want == 1 and number not in self._starting
            if decodes:
                if seq.computed // size == len(seq.table):
                    seq.table.append(self.free_blocks.pop())
                    self._edits.append((number, len(seq.table) - 1, seq.table[-1]))
                seq.computed += 1
                continue
            end = min(seq.computed + seq.chunk, len(seq.tokens))
            last = end == len(seq.tokens)
            following = seq.tokens[seq.computed + 1 : end + 1] if seq.targets else []
            slices.append(
                Slice(
                    number,
                    seq.computed,
                    seq.tokens[seq.computed : end],
                    seq.sampler if last else None,
                    following,
                    5 if following else 0,
                )
            )
            seq.computed = end
            if last:
                for other, sampler in seq.siblings:
                    table = list(seq.table)
                    forks.append(Fork(other, number, table, sampler))
                    self.running[other].table, self.running[other].computed = table, end
        starts = [Start(number, self.running[number].table) for number in self._starting]
        self.steps += 1
        plan = StepPlan(self.steps, self._left, self._copies, starts, self._edits, slices, forks, poison=self._poison)
        self._left, self._copies, self._edits, self._starting, self._poison = [], [], [], [], []
        for fork in forks:  # the first to write into a shared block copies it: at the next step, all but the parent
            if (seq := self.running[fork.slot]).computed % size:
                mine = self.free_blocks.pop()
                self._copies.append((seq.table[-1], mine))
                self._edits.append((fork.slot, len(seq.table) - 1, mine))
                seq.table[-1] = mine
        self.plans.append(plan)
        return plan

    def commit(self, result: StepResult) -> StepResult:
        for slot, token in zip(result.slots, result.tokens, strict=True):
            if slot in self.running:
                self.running[slot].tokens.append(token)
        return result

    def run(self, plan: StepPlan) -> StepResult:
        return self.worker.collect(self.worker.launch_sampling(self.worker.launch_model(plan)))

    def step(self) -> StepResult:
        result = self.run(self.plan())
        assert not result.failed
        return self.commit(result)

    def generate(self, slots: list[int], count: int) -> list[list[int]]:
        """Step until each of the slots has `count` outputs."""
        while any(len(self.running[slot].output) < count for slot in slots):
            self.step()
        return [self.running[slot].output[:count] for slot in slots]


def fail_next_step(llm: LLM) -> None:
    """Let the launch of the next step fail; the steps after it run."""
    assert isinstance(llm.executor, LocalExecutor)
    worker = llm.executor._worker
    assert worker is not None
    launch = worker.launch_model

    def fails(plan: StepPlan, *, all_collected: bool = True) -> Launched:
        worker.launch_model = launch  # type: ignore[method-assign]
        raise RuntimeError("on purpose")

    worker.launch_model = fails  # type: ignore[method-assign]


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """What transformers itself answers: NEW tokens."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def served(model: LoadedModel | Path, prompt: list[int]) -> list[int]:
    """Output of the worker through loader, fused linear layers and KV cache: NEW tokens."""
    driver = Driver(model)
    driver.add(prompt, chunk=7)
    while len(driver.running[0].output) < NEW:
        driver.step()
    return driver.running[0].output[:NEW]


def answer(llm: LLM, request: Generate, outputs: list[list[int] | None] | None = None) -> list[int]:
    """Run one request on the scheduler and executor of an engine.  Returns the tokens that it reports."""
    core, found = llm.engine.core, list[int]()
    core.accept(request, outputs)
    while (plan := core.plan(0)) is not None:
        llm.executor.submit(plan)
        core.commit(llm.executor.collect())
        found += [token for delta in core.outputs().deltas.get(request.gateway, ()) for token in delta.token_ids]
    return found


@torch.inference_mode()
def logits_of(model: LoadedModel, prompt: list[int], chunk: int) -> torch.Tensor:
    """Return the logits after each token of a prompt but the last, computed in chunks."""
    driver = Driver(model)
    driver.add(prompt, None, targets=True, chunk=chunk)
    found = []
    while driver.running[0].computed < len(prompt):
        driver.step()
        found.append(driver.worker.logits)
    return torch.cat(found)
