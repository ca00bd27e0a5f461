"""An executor that runs a step plan on a KV cache of plain tokens, and reads every token back through the block table.

What it samples is a hash of the whole context as the tables show it.  So a wrong table, a block freed too early, a
copy-on-write that came too late or a stale prefix hit changes the text, and the text has an obvious reference.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

from engine.core.plan import Sampler, StepPlan, StepResult
from engine.wire.messages import TokenLogprob

VOCAB = 50
EOS = 0


def next_token(context: list[int], seed: int, sibling: int) -> int:
    """The reference model: a function of the context and who asks, nothing else."""
    digest = blake2b(repr((context, seed, sibling)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(prompt: list[int], seed: int, sibling: int, limit: int, stops: frozenset[int]) -> list[int]:
    """What one continuation must come to, however it was batched, chunked, forked or preempted."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, seed, sibling))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class StepFails(Exception):
    """A step computed a request that no step can compute."""


class OracleExecutor:
    def __init__(self, blocks: int, block_size: int, max_seqs: int, depth: int = 2, host_blocks: int = 0) -> None:
        self.depth = depth
        self.host: list[list[int | None] | None] = [None] * host_blocks  # content; None: nobody's
        self.size = block_size
        self.plans: deque[StepPlan] = deque()
        self.slots: list[int | None] = [None] * (blocks * block_size)  # None: garbage
        self.tables: dict[int, list[int]] = {}
        self.decoding: dict[int, tuple[Sampler, int, int]] = {}  # row -> (sampler, position to compute, token)
        self.max_seqs = max_seqs
        self.forward_tokens = 0
        self.copied = 0
        self.bad: dict[int, int] = {}  # sampling seed -> output position; each step that samples there or later fails

    def reset(self) -> None:
        """After a failed step: no plan, no row and no table is left.  Blocks keep their content."""
        self.plans.clear()
        self.tables.clear()
        self.decoding.clear()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan = self.plans.popleft()
        size, before = self.size, list(self.slots)
        assert len({there for _, there in plan.swap_out}) == len(plan.swap_out)
        assert len({block for _, block in plan.swap_in}) == len(plan.swap_in)
        for block, there in plan.swap_out:
            self.host[there] = self.slots[block * size : (block + 1) * size]
        for block in plan.poison:
            self.slots[block * size : (block + 1) * size] = [None] * size
        for there, block in plan.swap_in:
            content = self.host[there]
            assert content is not None, f"host block {there} was never written"
            self.slots[block * size : (block + 1) * size] = content
            self.host[there] = None
        for row in plan.freed_rows:
            del self.tables[row]
            self.decoding.pop(row, None)
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        assert not {target for _, target in plan.copies} & {source for source, _ in plan.copies}
        for source, target in plan.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
            self.copied += 1
        for start in plan.starts:
            assert 0 <= start.row < self.max_seqs
            assert start.row not in self.tables
            self.tables[start.row] = list(start.table)
        for row, index, block in plan.edits:
            table = self.tables[row]
            assert index <= len(table)
            table[index : index + 1] = [block]
        work = [(row, position, [token]) for row, (_, position, token) in self.decoding.items()]
        work += [(piece.row, piece.start, list(piece.token_ids)) for piece in plan.slices]
        for row, position, tokens in work:
            for i, token in enumerate(tokens, position):
                self.slots[self.tables[row][i // size] * size + i % size] = token
                self.forward_tokens += 1
        ends = {row: position + len(tokens) for row, position, tokens in work}
        samplers = {row: sampler for row, (sampler, _, _) in self.decoding.items()}
        samplers |= {piece.row: piece.sampler for piece in plan.slices if piece.sampler is not None}
        for fork in plan.forks:
            assert samplers[fork.parent] is not None
            assert fork.row not in self.tables
            self.tables[fork.row] = list(fork.table)
            samplers[fork.row], ends[fork.row] = fork.sampler, ends[fork.parent]
        for row, sampler in samplers.items():
            if ends[row] - sampler.prompt_len >= self.bad.get(sampler.sampling.seed, len(self.slots)):
                if plan.step % 2:  # it failed before it computed anything
                    self.slots = before
                raise StepFails
        rows, sampled = [], []
        for row, sampler in samplers.items():
            token = next_token(self.context(row, ends[row]), sampler.sampling.seed, sampler.sibling)
            rows.append(row)
            sampled.append(token)
            self.decoding[row] = sampler, ends[row], token
        scored = {
            piece.row: [TokenLogprob(-float(token)) for token in piece.targets]
            for piece in plan.slices
            if piece.targets
        }
        return StepResult(plan.step, rows, sampled, prompt_logprobs=scored)

    def context(self, row: int, end: int) -> list[int]:
        table = self.tables[row]
        context = [self.slots[table[i // self.size] * self.size + i % self.size] for i in range(end)]
        assert None not in context, f"row {row} reads a slot nobody wrote"
        return context  # type: ignore[return-value]
