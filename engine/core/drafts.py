"""Drafts (speculative decoding): guessed next tokens, computed together with the last known token and verified.

A drafting sequence computes its last token and k drafts in one slice.  The executor samples after each of these k + 1
tokens, each draw seeded by (seed, sibling, position), exactly as separate decode steps would.  It accepts drafts while
they equal these samples.  So the text equals that of normal decoding, at any temperature and for any drafts.

    tokens     0 ......... computed | t                    drafts d1 d2 d3
    plan 8                          [t   d1  d2  d3]       samples s1 s2 s3 s4 after these four
    result 8   accepted 2: s1 = d1, s2 = d2, s3 is not d3
    tokens     0 ............ computed: t d1 d2 | s3       the KV of d3 is overwritten by the next step

Only the first token of such a slice is certain, so:
  * `computed` counts only t until the result arrives, and then the accepted drafts, too.
  * Blocks with drafts are sealed when the result has confirmed their tokens; blocks without confirmed tokens are freed.
  * No plan is made while a step with drafts is in flight (`Batch.verifying`), since the sequences' lengths are unknown.
  * Drafts follow the last token, so that token must be known.  An executor that runs ahead has a step in flight when
    the next step is planned.  If the time that drafts save exceeds the idle time, the plan waits for that step's result
    (`wait_for_tokens`).
  * A draft preempts no sequence.  If no block is free, the draft is shortened or dropped.

Source for drafts without a draft model: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications"
(arXiv 2411.04975).  Accepting drafts by equality with the seeded sample is Quire's own method.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import AccountingError, BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.plan import DRAFT_SOURCES, HEAD, Draft, Drafter, StepResult
from quire.engine.core.policy.allocation import AllocationPolicy
from quire.engine.core.policy.guesses import GuessCosts
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State
from quire.engine.wire.messages import Generate, TokenLogprob


class Policy(Protocol):
    """Decides how many drafts a step computes."""

    def choose(self, drafts: list[tuple[Sequence, Draft]], seqs: int, max_tokens: int) -> list[int]:
        """Return how many tokens of each draft a step of `seqs` sequences computes, at most `max_tokens` in total."""

    def pays(self, drafts: list[tuple[Sequence, Draft]], seqs: int, max_tokens: int) -> bool:
        """Return whether to wait for the result of the step in flight, so that the next step can compute drafts.

        The first token of each draft is a guess of the token that the step in flight samples."""

    def expected(self, seq: Sequence, draft: Draft) -> float:
        """Return the expected number of accepted tokens if a step computes the complete draft."""

    def min_match(self, seqs: int) -> int:
        """Return the minimum match length, in tokens, for which drafts may save time in a step of `seqs` sequences."""

    def learn(self, seq: Sequence, draft: Draft, computed: int, accepted: int) -> None:
        """Record that `accepted` of the first `computed` tokens of a draft were accepted."""

    def record(self, seconds: float, seqs: int, tokens: int, accepted: int, idle_s: float) -> None:
        """Record the time of a step without prompts: `seqs` sequences, `tokens` drafts, `accepted` of them accepted.

        `idle_s`: the part of `seconds` for which the device waited for the step."""

    def forget(self, request: Generate) -> None:
        """Drop the acceptance rates of a request that has ended."""


CERTAIN_MATCH = 24  # match length, in tokens, that stands for a guess of the draft head with probability 1
PREDICTION = "prediction"  # the entry of DRAFT_SOURCES for drafts from a client's `prediction` field


class _InFlight(NamedTuple):
    seq: Sequence
    draft: Draft
    computed: int  # number of tokens of the draft that the step computes
    blocks: int  # length of the sequence's table before it grew for the drafts


def may_draft(request: Generate) -> bool:
    """Return whether a request may draft: its samples depend only on its known tokens, its seed and a grammar.

    Penalties, bad_words, allowed_token_ids and min_tokens keep state for the next position only, so the executor cannot
    sample after drafts.  The scheduler chooses the tokens of beams itself."""
    sampling = request.sampling
    return not (
        request.beams is not None
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
        or sampling.bad_words
        or sampling.allowed_token_ids
        or sampling.min_tokens
    )


class Drafts:
    """Owns the drafts that the drafter has found and the drafts of the step in flight."""

    def __init__(
        self,
        pool: BlockPool,
        batch: Batch,
        allocation: AllocationPolicy,
        report: SchedulerReport,
        policy: Policy,
        guesses: GuessCosts,
        layers: LayerGroups,
    ) -> None:
        self._pool, self._batch, self._allocation, self._report = pool, batch, allocation, report
        self._layers = layers
        self.policy, self.guesses = policy, guesses
        self.drafter: Drafter | None = None  # None: speculative decoding is off
        self.run_ahead = False  # drafting is on, and the executor has a step in flight while the next step is planned
        self.max_drafts = 0  # maximum drafts of a step; 0: limited only by the step's token budget
        self._followed: dict[int, Sequence] = {}  # sequences whose tokens the drafter has, by slot
        self._joining: dict[int, Sequence] = {}  # sequences whose first token is still being sampled, by slot
        self._found: list[Draft] = []
        self._in_flight: dict[int, _InFlight] = {}  # drafts of the step in flight, by slot
        # Counts for the step whose result arrives: drafts computed, those that the model's head guessed, and those of
        # the head that were accepted.
        self._head_drafts = 0, 0, 0

    # ------------------------------------------------------------------------------------------------------------ plan

    def guess_in(self, seqs: int) -> bool:
        """Return whether the checkpoint's draft head should run in a step of `seqs` decoding sequences."""
        return self.drafter is not None and self.guesses.pay(seqs)

    def join(self, seq: Sequence) -> None:
        """Start drafting for a sequence that begins to decode, if its request may draft."""
        if self.drafter is None:
            return
        self._leave(seq.slot, keep=False)
        if may_draft(seq.request):
            self._joining[seq.slot] = seq

    @property
    def found(self) -> int:
        """Number of sequences that have drafts now."""
        return len(self._found)

    def wait_for_tokens(self, max_tokens: int) -> bool:
        """Return whether the next plan should wait for the result of the step in flight, because drafts will save time.

        `max_tokens`: maximum tokens of the next step, in addition to one per sequence."""
        if not self._found or not self._batch.steps_in_flight or self._batch.prefilling:
            return False
        able = self._able(self._batch.step + 1)
        if able and self.policy.pays(able, self._batch.decoding, self._bounded(max_tokens)):
            return True
        self._report.totals.refused_drafts += sum(len(draft.tokens) for _, draft in able)
        return False

    def choose(self, step: int, max_tokens: int) -> list[tuple[Sequence, Draft, int]]:
        """Return (sequence, draft, draft tokens to compute) for `step`, at most `max_tokens` draft tokens in total."""
        # No drafts while a step in flight still samples the last tokens, or while prompts let the executor run ahead.
        if self._batch.steps_in_flight or (self.run_ahead and self._batch.prefilling):
            self._found = []
            return []
        able, self._found = self._able(step), []
        counts = self.policy.choose(able, self._batch.decoding, self._bounded(max_tokens)) if able else []
        self._report.totals.refused_drafts += sum(len(draft.tokens) for _, draft in able) - sum(counts)
        return [(seq, draft, count) for (seq, draft), count in zip(able, counts, strict=True) if count]

    def _bounded(self, max_tokens: int) -> int:
        return min(max_tokens, self.max_drafts) if self.max_drafts else max_tokens

    def _able(self, step: int) -> list[tuple[Sequence, Draft]]:
        """Return the drafts of sequences that decode in `step` and have exactly one known token to compute.

        Counts the one token that each step in flight adds to a sequence."""
        able, in_flight = [], self._batch.steps_in_flight
        for draft in self._found:
            seq = self._followed.get(draft.slot)
            if seq is None or seq.slot != draft.slot or seq.state is not State.DECODING or seq.failed_at == seq.known:
                continue
            known = seq.known + in_flight
            if known == seq.computed_before(step) + 1 < seq.limit - 1:
                able.append((seq, draft._replace(tokens=draft.tokens[: seq.limit - known - 1])))
        return able

    def begin(self, seq: Sequence, draft: Draft, count: int, step: int) -> list[int]:
        """Record that `step` computes a sequence's last token and `count` draft tokens.  Returns these draft tokens.

        Call it before the table grows for the drafts.  `settle` lets the sequence decode on."""
        self._in_flight[seq.slot] = _InFlight(seq, draft, count, len(seq.table))
        seq.computed = seq.computed_before(step) + 1
        seq.since = step + 1
        seq.drafts, seq.due = count, 0
        return draft.tokens[:count]

    @property
    def planned(self) -> tuple[int, int]:
        """(sequences that draft, draft tokens) of the step that is being planned or in flight."""
        return len(self._in_flight), sum(entry.computed for entry in self._in_flight.values())

    # ---------------------------------------------------------------------------------------------------------- commit

    def accepted(self, slot: int, count: int) -> list[int]:
        """Return the `count` accepted draft tokens of a slot.  Raises AccountingError if the slot computed fewer."""
        entry = self._in_flight.get(slot)
        if entry is None or not 0 <= count <= entry.computed:
            raise AccountingError(f"slot {slot}: {count} drafts accepted, {entry.computed if entry else 0} computed")
        return entry.draft.tokens[:count]

    def settle(self, seq: Sequence, count: int) -> None:
        """Count `count` accepted drafts, which are known tokens now, as computed, and let the sequence decode on.

        Seals full blocks, and frees blocks that hold only refused drafts."""
        entry, size = self._in_flight.pop(seq.slot), self._pool.block_size
        first, seq.computed, seq.drafts = seq.computed, seq.computed + count, 0
        # If an accepted draft is a stop token, the sequence ends there and the later drafts are not known tokens.
        for full in range(first // size + 1, min(seq.computed, seq.known - 1) // size + 1):
            self._allocation.seal(seq, full * size)
        kept = max(entry.blocks, -(-seq.computed // size))
        spare = seq.table[kept:]
        del seq.table[kept:]
        self._pool.release(spare)
        self._layers.truncate(seq)
        self._batch.schedule(seq, seq.since)
        totals, source = self._report.totals, DRAFT_SOURCES[entry.draft.source]
        totals.drafted_tokens[source] += entry.computed
        totals.accepted_drafts[source] += count
        if source == PREDICTION:
            seen = min(count, seq.known - first)  # drafts after a stop token are not in the answer
            accepted, rejected = seq.predictions or (0, 0)
            seq.predictions = accepted + seen, rejected + entry.computed - seen
        head, (computed, guessed, right) = entry.draft.source == HEAD, self._head_drafts
        self._head_drafts = computed + entry.computed, guessed + head * entry.computed, right + head * count
        self.policy.learn(seq, entry.draft, entry.computed, count)

    def take(self, result: StepResult, irregular: Iterable[Sequence]) -> None:
        """Pass a step's tokens to the drafter, and keep the drafts that it finds.

        `irregular`: sequences that did not append exactly the one sampled token."""
        self._in_flight.clear()  # the remaining entries belong to sequences that have ended
        if (drafter := self.drafter) is None:
            return
        slots, tokens, apart = result.slots, result.tokens, {seq.slot for seq in irregular}
        if self._joining:
            apart |= self._joining.keys() & set(slots)
        if apart:
            kept = [(slot, token) for slot, token in zip(slots, tokens, strict=True) if slot not in apart]
            slots, tokens = [slot for slot, _ in kept], [token for _, token in kept]
            for slot in apart:
                self._catch_up(drafter, slot)
        found = drafter.find(slots, tokens, self.policy.min_match(self._batch.decoding))
        if result.guess_s:
            self.guesses.record(result.guess_s, len(result.slots), *self._head_drafts)
        self._head_drafts = 0, 0, 0
        self._found = self._with_guesses(found, result.guesses) if result.guesses else found

    def _with_guesses(self, found: list[Draft], guesses: dict[int, tuple[int, float]]) -> list[Draft]:
        """Return a draft per slot: from text, or the guess of the model's head if more of it should be accepted."""
        drafts = {draft.slot: draft for draft in found}
        for slot, (token, probability) in guesses.items():
            if (seq := self._followed.get(slot)) is None:
                continue
            guess = Draft(slot, [token], round(CERTAIN_MATCH * probability), HEAD)
            other = drafts.get(slot)
            if other is None or self.policy.expected(seq, guess) > self.policy.expected(seq, other):
                drafts[slot] = guess
        return list(drafts.values())

    def _catch_up(self, drafter: Drafter, slot: int) -> None:
        if (seq := self._joining.pop(slot, None)) is not None:
            if seq.slot == slot:
                request = seq.request
                owner = f"{request.tenant}\0{request.cache_salt}\0{request.adapter}"
                drafter.begin(slot, owner, seq.tokens, seq.prompt_len, request.predicted)
                self._followed[slot] = seq
        elif (seq := self._followed.get(slot)) is not None:
            drafter.extend(slot, seq.tokens)

    # --------------------------------------------------------------------------------------------------------- endings

    def leave(self, seq: Sequence, *, complete: bool) -> None:
        """Stop drafting for a sequence that ends.  `complete`: its answer is complete, so keep it for later drafts."""
        # A sequence that ended at its maximum length may have freed its slot before its last token arrived.
        if (slot := next((slot for slot, other in self._followed.items() if other is seq), -1)) >= 0:
            self._leave(slot, keep=complete)
        self.policy.forget(seq.request)

    def vacate(self, slots: list[int]) -> None:
        """Stop drafting for unfinished sequences that left these slots; they join again when they resume decoding."""
        for slot in slots:
            seq = self._followed.get(slot)
            if seq is not None and seq.slot != slot and seq.state is not State.ENDING:
                self._leave(slot, keep=False)

    def _leave(self, slot: int, *, keep: bool) -> None:
        self._joining.pop(slot, None)
        if self.drafter is not None and self._followed.pop(slot, None) is not None:
            self.drafter.end(slot, keep=keep)

    def reset(self) -> None:
        """Drop all drafts after a failed step: every step in flight is void, and every slot is free."""
        self._found.clear()
        self._in_flight.clear()
        for slot in list(self._followed):
            self._leave(slot, keep=False)
        self._joining.clear()


def logprobs_of(result: StepResult, slot: int, count: int) -> list[TokenLogprob] | None:
    """Return the log probabilities of the first `count` tokens that a result added to a slot; None: not requested."""
    if (last := result.logprobs.get(slot)) is None:
        return None
    return [*result.draft_logprobs.get(slot, ()), last][:count]
