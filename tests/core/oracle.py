"""An executor that runs a step plan on a KV cache of plain tokens, and reads every token back through the block table.

What it samples is a hash of the complete context as the tables show it.  So a wrong table, a block freed too early, a
late copy-on-write or a stale prefix hit changes the text.  The text has an obvious reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from quire.engine.core.beams import BeamSearch
from quire.engine.core.plan import Sampler, StepPlan, StepResult, WindowGroup
from quire.engine.executor.models.recurrent.rollback import Rollback
from quire.engine.wire.messages import Beams, TokenLogprob

VOCAB = 50
EOS = 0


def next_token(context: list[int], seed: int, sibling: int) -> int:
    """The reference model: a function of the context, the seed and the sibling, nothing else."""
    digest = blake2b(repr((context, seed, sibling)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


FORCED = "forced"  # the grammar of requests whose next tokens the oracle foresees


def foreseen(context: list[int]) -> int:
    """How many tokens a result reports as forced behind a context: a function of the context, nothing else."""
    return max(0, blake2b(repr(context).encode(), digest_size=1, salt=b"forced").digest()[0] % 12 - 4)


def likeliest(context: list[int], count: int) -> tuple[list[int], list[float]]:
    """The next tokens of a beam and their log-probabilities: a function of the context, nothing else."""
    digest = blake2b(repr(context).encode(), digest_size=2 * VOCAB // 2).digest()
    ranked = sorted(range(VOCAB), key=lambda token: (-digest[token], token))
    return ranked[:count], [-0.25 - (255 - digest[token]) / 32 for token in ranked[:count]]


def reference_beams(
    prompt: list[int], beams: Beams, limit: int, stops: frozenset[int], min_tokens: int = 0
) -> list[tuple[list[int], bool]]:
    """(tokens, whether they end with an EOS token) of each answer of a search on contexts, best first."""
    search = BeamSearch(beams, stops, limit - len(prompt), min_tokens=min_tokens, vocab_size=VOCAB)
    contexts = [prompt]
    while not search.done:
        rows = [likeliest(context, search.row_size) for context in contexts]
        contexts = [[*contexts[parent], token] for parent, token in search.advance(rows)]
    return [(answer.path.unroll()[0], answer.stopped) for answer in search.answers]


def reference(prompt: list[int], seed: int, sibling: int, limit: int, stops: frozenset[int]) -> list[int]:
    """The tokens of one choice, however it was batched, chunked, forked or preempted."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, seed, sibling))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


ROLLBACKS = 9  # drafts of a step, with recurrent state: fewer than two long ones


class StepFails(Exception):
    """A step computed a request that no step can compute."""


class OracleExecutor:
    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_seqs: int,
        depth: int = 2,
        host_blocks: int = 0,
        checkpoints: int | None = None,
        windows: Sequence[WindowGroup] = (),
    ) -> None:
        """`checkpoints`: copies of the recurrent state that each slot has; None: no slot has one.

        `windows`: layers with blocks of their own, behind those of the others."""
        self.depth = depth
        self.full_blocks = blocks
        self.windows: list[tuple[int, range]] = []  # window in tokens, ids of the blocks
        for group in windows:
            self.windows.append((group.window, range(blocks, blocks + group.blocks)))
            blocks += group.blocks
        # Per window group, by slot: block by table index.
        self.window_tables: list[dict[int, dict[int, int]]] = [{} for _ in windows]
        self.recurrent = checkpoints is not None
        # The state of a slot: every token that it has taken in.  After the slots' states come the checkpoints, then the
        # copies that restore the state of a slot whose drafts were refused.
        self.rollback = Rollback(max_seqs, checkpoints or 0, ROLLBACKS if self.recurrent else 0)
        self.states: list[list[int] | None] = [None] * (max_seqs + (checkpoints or 0) + self.rollback.places)
        host_blocks += sum(group.host_blocks for group in windows)
        self.host: list[list[int | None] | None] = [None] * host_blocks  # content; None: free
        self.size = block_size
        self.plans: deque[StepPlan] = deque()
        self.kv: list[int | None] = [None] * (blocks * block_size)  # None: garbage
        self.tables: dict[int, list[int]] = {}
        self.decoding: dict[int, tuple[Sampler, int, int]] = {}  # slot -> (sampler, position to compute, token)
        self.max_seqs = max_seqs
        self.forward_tokens = 0
        self.copied = 0
        self.kept: dict[int, Sampler] = {}  # samplers of slots that compute drafts in this step
        self.jumps = 0
        self.drafted = 0
        self.head = False  # a draft head guesses the token after each sampled one
        self.bad: dict[int, int] = {}  # sampling seed -> output position; each step that samples there or later fails

    def reset(self) -> None:
        """After a failed step: no plan, no slot and no table is left.  Blocks keep their content."""
        self.plans.clear()
        self.tables.clear()
        self.decoding.clear()
        for tables in self.window_tables:
            tables.clear()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan, before = self.plans.popleft(), list(self.kv)
        if self.recurrent:
            plan = self.rollback.prepare(plan)
        self._begin_states(plan)
        self._move_blocks(plan)
        self._change_tables(plan)
        ends = self._write_tokens(plan)
        samplers = self._samplers(plan, ends)
        for slot, sampler in samplers.items():
            if ends[slot] - sampler.prompt_len >= self.bad.get(sampler.sampling.seed, len(self.kv)):
                if plan.step % 2:  # it failed before it computed anything
                    self.kv = before
                for _, checkpoint in [*plan.keep, *(keep for piece in plan.slices for keep in piece.keep)]:
                    self.states[self.max_seqs + checkpoint] = None
                raise StepFails
        slots, sampled, accepted = [], [], self._accept(plan, samplers, ends)
        for source, slot in self.rollback.copies(accepted) if self.recurrent else []:
            self.states[slot] = self.states[source]
        for slot, sampler in samplers.items():
            token = next_token(self.context(slot, ends[slot]), sampler.sampling.seed, sampler.sibling)
            slots.append(slot)
            sampled.append(token)
            self.decoding[slot] = sampler, ends[slot], token
        forced = {slot: run for slot, sampler in samplers.items() if (run := self._forced(slot, ends[slot], sampler))}
        found = {}
        for piece in plan.slices:
            if piece.candidates:
                assert piece.sampler is None
                found[piece.slot] = likeliest(self.context(piece.slot, ends[piece.slot]), piece.candidates)
        scored = {
            piece.slot: [TokenLogprob(-float(token)) for token in piece.targets]
            for piece in plan.slices
            if piece.targets
        }
        guesses = self._guesses(samplers, ends) if self.head and plan.guess else {}
        results: dict[str, Any] = {"forced": forced, "accepted": accepted, "guesses": guesses}
        return StepResult(
            plan.step, slots, sampled, prompt_logprobs=scored, candidates=found, **results, guess_s=1e-3 * len(guesses)
        )

    def _guesses(self, samplers: dict[int, Sampler], ends: dict[int, int]) -> dict[int, tuple[int, float]]:
        """The token after the one just sampled, right in two of three cases, and a probability."""
        found = {}
        for slot, sampler in samplers.items():
            context = [*self.context(slot, ends[slot]), self.decoding[slot][2]]
            token = next_token(context, sampler.sampling.seed, sampler.sibling)
            found[slot] = (token + (sum(context) % 3 == 0)) % VOCAB, sum(context) % 5 / 4
        return found

    def _accept(self, plan: StepPlan, samplers: dict[int, Sampler], ends: dict[int, int]) -> dict[int, int]:
        """How many drafts of each slot equal what follows their contexts; sets `ends` behind the last of these."""
        accepted = {}
        for piece in plan.slices:
            if not piece.drafts:
                continue
            sampler, end = samplers[piece.slot], ends[piece.slot] - piece.drafts
            for draft in piece.token_ids[-piece.drafts :]:
                if next_token(self.context(piece.slot, end), sampler.sampling.seed, sampler.sibling) != draft:
                    break
                end += 1
            accepted[piece.slot], ends[piece.slot] = end - ends[piece.slot] + piece.drafts, end
            self.drafted += piece.drafts
        return accepted

    def _forced(self, slot: int, end: int, sampler: Sampler) -> list[int]:
        """The tokens that follow the one just sampled, as far as they are foreseen; known ones may be among them."""
        if sampler.sampling.grammar != FORCED:
            return []
        context = [*self.context(slot, end), self.decoding[slot][2]]
        first = len(context)
        for _ in range(foreseen(context)):
            context.append(next_token(context, sampler.sampling.seed, sampler.sibling))
        return context[first:]

    def _move_blocks(self, plan: StepPlan) -> None:
        """Apply swaps, poison, freed slots and copies, in the order of a step."""
        size = self.size
        assert len({there for _, there in plan.swap_out}) == len(plan.swap_out)
        assert len({block for _, block in plan.swap_in}) == len(plan.swap_in)
        for block, there in plan.swap_out:
            self.host[there] = self.kv[block * size : (block + 1) * size]
        for block in plan.poison:
            self.kv[block * size : (block + 1) * size] = [None] * size
        for there, block in plan.swap_in:
            content = self.host[there]
            assert content is not None, f"host block {there} was never written"
            self.kv[block * size : (block + 1) * size] = content
            self.host[there] = None
        for slot in plan.freed_slots:
            self.tables.pop(slot, None)  # a beam may end between its fork and the plan that names its slot
            self.decoding.pop(slot, None)
            for tables in self.window_tables:
                tables.pop(slot, None)
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        assert not {target for _, target in plan.copies} & {source for source, _ in plan.copies}
        for source, target in plan.copies:
            self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]
            self.copied += 1

    def _change_tables(self, plan: StepPlan) -> None:
        for start in plan.starts:
            assert 0 <= start.slot < self.max_seqs
            assert start.slot not in self.tables
            self.tables[start.slot] = list(start.table)
        for slot, index, block in plan.edits:
            for (_, ids), tables in zip(self.windows, self.window_tables, strict=True):
                if block in ids:
                    tables.setdefault(slot, {})[index] = block
            if block >= self.full_blocks:
                continue
            table = self.tables[slot]
            assert index <= len(table)
            table[index : index + 1] = [block]

    def _write_tokens(self, plan: StepPlan) -> dict[int, int]:
        """Write the step's tokens to the cache.  Returns where each slot's sequence ends now."""
        self.kept = {}
        for piece in plan.slices:  # a jump or drafts: the slot computes its slice instead of the one token
            if piece.slot in self.decoding:
                sampler, position, token = self.decoding.pop(piece.slot)
                if piece.drafts:
                    assert piece.sampler is None
                    assert len(piece.token_ids) == piece.drafts + 1
                    assert (piece.start, piece.token_ids[0]) == (position, token)
                    self.kept[piece.slot] = sampler
                    continue
                assert piece.sampler is not None
                assert (piece.start, piece.token_ids[0]) == (position, token)
                history = [*self.context(piece.slot, piece.start), *piece.token_ids]
                assert piece.sampler.history in ([], history)
                self.jumps += 1
        work = [(slot, position, [token]) for slot, (_, position, token) in self.decoding.items()]
        work += [(piece.slot, piece.start, list(piece.token_ids)) for piece in plan.slices]
        keeps = {piece.slot: piece.keep for piece in plan.slices}
        for slot, position, tokens in work:
            self._advance_state(slot, position, tokens, keeps.get(slot, []))
            for i, token in enumerate(tokens, position):
                self.kv[self.tables[slot][i // self.size] * self.size + i % self.size] = token
                for tables in self.window_tables:
                    self.kv[tables[slot][i // self.size] * self.size + i % self.size] = token
                self.forward_tokens += 1
        for slot, position, tokens in work:
            self._check_windows(slot, position, position + len(tokens))
        return {slot: position + len(tokens) for slot, position, tokens in work}

    def _samplers(self, plan: StepPlan, ends: dict[int, int]) -> dict[int, Sampler]:
        """Return the sampler of each slot that samples.  Forks join, with the end of their parent in `ends`."""
        samplers = {slot: sampler for slot, (sampler, _, _) in self.decoding.items()}
        samplers |= self.kept
        samplers |= {piece.slot: piece.sampler for piece in plan.slices if piece.sampler is not None}
        for fork in plan.forks:
            assert samplers[fork.parent] is not None
            assert fork.slot not in self.tables
            self.tables[fork.slot] = list(fork.table)
            samplers[fork.slot], ends[fork.slot] = fork.sampler, ends[fork.parent]
            self.states[fork.slot] = self.states[fork.parent]
        return samplers

    def _begin_states(self, plan: StepPlan) -> None:
        """Copy the states that the plan keeps of decoding slots, and set those of the slots that it starts."""
        if not self.recurrent:
            assert not plan.keep
            assert not any(piece.keep for piece in plan.slices)
            assert all(start.state < 0 for start in plan.starts)
            return
        for slot, checkpoint in plan.keep:
            self.states[self.max_seqs + checkpoint] = self.states[slot]
        for start in plan.starts:
            self.states[start.slot] = self.states[self.max_seqs + start.state] if start.state >= 0 else []

    def _advance_state(self, slot: int, position: int, tokens: list[int], keeps: list[tuple[int, int]]) -> None:
        """Take tokens in.  The state must have seen exactly what the tables show before them."""
        if self.recurrent:
            assert self.states[slot] == self.context(slot, position), f"slot {slot} has a state of another position"
            seen = [*self.context(slot, position), *tokens]
            self.states[slot] = seen
            for end, checkpoint in keeps:
                assert position < end <= position + len(tokens)
                self.states[self.max_seqs + checkpoint] = seen[:end]

    def _check_windows(self, slot: int, start: int, end: int) -> None:
        """Each query from `start` to `end` finds in every window group the tokens that the full layers have there."""
        if not self.windows:
            return
        context = self.context(slot, end)
        for (window, _), tables in zip(self.windows, self.window_tables, strict=True):
            table = tables[slot]
            for at in range(max(0, start + 1 - window), end):
                seen = self.kv[table[at // self.size] * self.size + at % self.size]
                assert seen == context[at], f"slot {slot}: window {window} has {seen} at {at}, not {context[at]}"

    def context(self, slot: int, end: int) -> list[int]:
        table = self.tables[slot]
        context = [self.kv[table[i // self.size] * self.size + i % self.size] for i in range(end)]
        assert None not in context, f"slot {slot} reads a place of the cache that nothing wrote"
        return context  # type: ignore[return-value]
