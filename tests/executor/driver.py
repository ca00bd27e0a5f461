"""The least scheduler there is: hand-made plans over one worker, blocks handed out in random order."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core.plan import Fork, Sampler, Slice, Start, StepPlan, StepResult
from engine.executor.models.fused import Forward
from engine.executor.models.hf import LoadedModel, load_model
from engine.executor.worker import Pending, Worker
from engine.wire.messages import Sampling

GREEDY = Sampling(temperature=0)
CPU = torch.device("cpu")


class RecordingWorker(Worker):
    """Keeps the logits of the step it ran last: of the rows that sampled, then of its targets."""

    pieces: list[torch.Tensor]

    def launch(self, plan: StepPlan) -> Pending:
        self.pieces = []
        return super().launch(plan)

    def _logits(self, forward: Forward, at: torch.Tensor | None) -> torch.Tensor:
        self.pieces.append(super()._logits(forward, at).clone())
        return self.pieces[-1]

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat(self.pieces)


@dataclass
class Row:
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
        self.worker = RecordingWorker(
            self.config, model, max_seqs=self.config.max_seqs, step_tokens=self.config.step_tokens
        )
        self.free_blocks = random.Random(seed).sample(range(blocks), blocks)
        self.rows: dict[int, Row] = {}
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
        """Seat a prompt (and `output` tokens of it already known) with n continuations; returns their rows.

        The continuations are numbered from `sibling`.
        """
        rows = [row for row in range(self.config.max_seqs) if row not in self.rows][:n]
        known = tokens + (output or [])
        table = [self.free_blocks.pop() for _ in range(-(-len(known) // self.config.block_size))]
        samplers: list[Sampler] = []
        if sampling:
            samplers = [
                Sampler(sampling, len(tokens), stop_ids or [], list(known), sibling=sibling + i) for i in range(n)
            ]
        row = Row(list(known), len(tokens), chunk, samplers[0] if samplers else None, table, targets=targets)
        row.siblings = list(zip(rows[1:], samplers[1:], strict=True))
        self.rows[rows[0]] = row
        for other, sampler in row.siblings:
            self.rows[other] = Row(list(known), len(tokens), chunk, sampler, [], computed=-1)
        self._starting.append(rows[0])
        return rows

    def free(self, row: int) -> None:
        gone = self.rows.pop(row)
        self._left.append(row)
        shared = {block for other in self.rows.values() for block in other.table}
        mine = [block for block in gone.table if block not in shared]
        self.free_blocks += mine
        self._poison += mine

    def plan(self) -> StepPlan:
        """The next plan: one chunk of every unfinished prompt, one token of everybody else."""
        size = self.config.block_size
        slices, forks = [], []
        for number, row in self.rows.items():
            if row.computed < 0 or row.computed == len(row.tokens):
                continue  # a sibling before its fork or in its very step, or a prompt nobody continues
            want = len(row.tokens) - row.computed
            decodes = row.sampler and len(row.tokens) > row.prompt_len and want == 1 and number not in self._starting
            if decodes:
                if row.computed // size == len(row.table):
                    row.table.append(self.free_blocks.pop())
                    self._edits.append((number, len(row.table) - 1, row.table[-1]))
                row.computed += 1
                continue
            end = min(row.computed + row.chunk, len(row.tokens))
            last = end == len(row.tokens)
            following = row.tokens[row.computed + 1 : end + 1] if row.targets else []
            slices.append(
                Slice(
                    number,
                    row.computed,
                    row.tokens[row.computed : end],
                    row.sampler if last else None,
                    following,
                    5 if following else 0,
                )
            )
            row.computed = end
            if last:
                for other, sampler in row.siblings:
                    table = list(row.table)
                    forks.append(Fork(other, number, table, sampler))
                    self.rows[other].table, self.rows[other].computed = table, end
        starts = [Start(number, self.rows[number].table) for number in self._starting]
        self.steps += 1
        plan = StepPlan(self.steps, self._left, self._copies, starts, self._edits, slices, forks, poison=self._poison)
        self._left, self._copies, self._edits, self._starting, self._poison = [], [], [], [], []
        for fork in forks:  # whoever writes first into a shared block copies it: at the next step, all but the parent
            if (row := self.rows[fork.row]).computed % size:
                mine = self.free_blocks.pop()
                self._copies.append((row.table[-1], mine))
                self._edits.append((fork.row, len(row.table) - 1, mine))
                row.table[-1] = mine
        self.plans.append(plan)
        return plan

    def commit(self, result: StepResult) -> StepResult:
        for row, token in zip(result.rows, result.tokens, strict=True):
            if row in self.rows:
                self.rows[row].tokens.append(token)
        return result

    def run(self, plan: StepPlan) -> StepResult:
        return self.worker.collect(self.worker.launch(plan))

    def step(self) -> StepResult:
        result = self.run(self.plan())
        assert not result.failed
        return self.commit(result)

    def generate(self, rows: list[int], count: int) -> list[list[int]]:
        """Step until each of the rows has `count` outputs."""
        while any(len(self.rows[row].output) < count for row in rows):
            self.step()
        return [self.rows[row].output[:count] for row in rows]
