"""Drafts: guesses of the next tokens, computed together with the last known token and kept as far as they are right.

A drafting sequence computes its last token and k drafts in one slice.  The executor samples after each of these k + 1
tokens, each time by (seed, sibling, position), as a step of its own would.  It accepts drafts while they equal these
samples.  So the text is the one of decoding one by one, at any temperature, whatever the drafts are.

    tokens     0 ......... computed | t                    drafts d1 d2 d3
    plan 8                          [t   d1  d2  d3]       samples s1 s2 s3 s4 after these four
    result 8   accepted 2: s1 = d1, s2 = d2, s3 is not d3
    tokens     0 ............ computed: t d1 d2 | s3       the KV of d3 is overwritten by the next step

Only the first token of such a slice is certain, so:
  * `computed` counts t alone until the result arrives, and then the accepted drafts.
  * Blocks with drafts are sealed when the result has proved their tokens.  Those that hold none are given back.
  * No plan is made while a step with drafts is in flight (`Batch.verifying`): lengths are not known before its result.
  * Drafts follow the last token, which must be known.  An executor that runs ahead has a step in flight when the next
    one is planned.  If drafts pay for its idle time, the plan waits for that step's result (`wait_for_tokens`).
  * A draft takes no block from another sequence.  Without a free one the draft is shorter, or none.

The method: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975) for drafts
without a model.  Acceptance by equality with the seed's own draw is Quire's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import AccountingError, BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.plan import DRAFT_SOURCES, Draft, Drafter, StepResult
from quire.engine.core.policy.allocation import AllocationPolicy
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State
from quire.engine.wire.messages import Generate, TokenLogprob


class Policy(Protocol):
    """Decides how many drafts a step computes."""

    def choose(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> list[int]:
        """Return how many tokens of each draft to compute, in a step of `seqs` sequences and at most `most` drafts."""

    def pays(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> bool:
        """Return whether to wait for the step in flight, so that the next one may compute drafts like these.

        They begin with the token that the step in flight samples."""

    def least_match(self, seqs: int) -> int:
        """Return the fewest tokens of a match for which drafts may pay in a step of `seqs` sequences."""

    def learn(self, seq: Sequence, draft: Draft, computed: int, accepted: int) -> None:
        """`accepted` of the first `computed` tokens of a draft were right."""

    def record(self, seconds: float, seqs: int, tokens: int, accepted: int, idle_s: float) -> None:
        """A step of `seqs` sequences, without prompts, took `seconds` with `tokens` drafts, `accepted` of them right.

        For `idle_s` of these seconds the device waited for the step."""

    def forget(self, request: Generate) -> None:
        """A request has ended."""


PREDICTION = "prediction"  # the entry of DRAFT_SOURCES for drafts from a client's `prediction` field


class _InFlight(NamedTuple):
    seq: Sequence
    draft: Draft
    computed: int  # its first tokens, which the step computes
    blocks: int  # length of the table before it grew for the drafts


def may_draft(request: Generate) -> bool:
    """Return whether a request may draft: what it samples depends on its known tokens, its seed and a grammar alone.

    Penalties, bad_words, allowed_token_ids and min_tokens keep counts or marks for the next position only, and beams
    are chosen by the scheduler."""
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
    """Owner of the drafts: those found, and those of the step in flight."""

    def __init__(
        self,
        pool: BlockPool,
        batch: Batch,
        allocation: AllocationPolicy,
        report: SchedulerReport,
        policy: Policy,
        layers: LayerGroups,
    ) -> None:
        self._pool, self._batch, self._allocation, self._report = pool, batch, allocation, report
        self._layers = layers
        self.policy = policy
        self.drafter: Drafter | None = None  # None: nothing drafts
        self.run_ahead = False  # sequences draft, and the executor has a step in flight while the next one is planned
        self.most_drafts = 0  # maximum drafts of a step; 0: as many as it has tokens for
        self._followed: dict[int, Sequence] = {}  # sequences whose tokens the drafter has, by slot
        self._joining: dict[int, Sequence] = {}  # sequences whose first token is on its way, by slot
        self._found: list[Draft] = []
        self._in_flight: dict[int, _InFlight] = {}  # step in flight, by slot

    # ------------------------------------------------------------------------------------------------------------ plan

    def join(self, seq: Sequence) -> None:
        """A sequence begins to decode in its slot."""
        if self.drafter is None:
            return
        self._leave(seq.slot, keep=False)
        if may_draft(seq.request):
            self._joining[seq.slot] = seq

    @property
    def found(self) -> int:
        """Sequences that have drafts now."""
        return len(self._found)

    def wait_for_tokens(self, most: int) -> bool:
        """Return whether to plan no step before the result of the one in flight, because its tokens' drafts will pay.

        `most`: maximum tokens of the next step in addition to one for each sequence."""
        if not self._found or not self._batch.late or self._batch.prefilling:
            return False
        able = self._able(self._batch.step + 1)
        if able and self.policy.pays(able, self._batch.decoding, self._bounded(most)):
            return True
        self._report.totals.refused_drafts += sum(len(draft.tokens) for _, draft in able)
        return False

    def choose(self, step: int, most: int) -> list[tuple[Sequence, Draft, int]]:
        """Return the drafts that `step` should compute and their lengths, at most `most` tokens together."""
        # The last tokens are on their way, or the step has prompts, for which the executor can run ahead.
        if self._batch.late or (self.run_ahead and self._batch.prefilling):
            self._found = []
            return []
        able, self._found = self._able(step), []
        counts = self.policy.choose(able, self._batch.decoding, self._bounded(most)) if able else []
        self._report.totals.refused_drafts += sum(len(draft.tokens) for _, draft in able) - sum(counts)
        return [(seq, draft, count) for (seq, draft), count in zip(able, counts, strict=True) if count]

    def _bounded(self, most: int) -> int:
        return min(most, self.most_drafts) if self.most_drafts else most

    def _able(self, step: int) -> list[tuple[Sequence, Draft]]:
        """Return the drafts of sequences that decode in `step` and have no further known token to compute.

        Steps in flight add a token each to what these know."""
        able, late = [], self._batch.late
        for draft in self._found:
            seq = self._followed.get(draft.slot)
            if seq is None or seq.slot != draft.slot or seq.state is not State.DECODING or seq.failed_at == seq.known:
                continue
            known = seq.known + late
            if known == seq.computed_before(step) + 1 < seq.limit - 1:
                able.append((seq, draft._replace(tokens=draft.tokens[: seq.limit - known - 1])))
        return able

    def begin(self, seq: Sequence, draft: Draft, count: int, step: int) -> list[int]:
        """Let a sequence compute its last token and `count` tokens of a draft in `step`.  Returns these.

        Call it before the table grows for them.  `settle` lets the sequence decode on."""
        self._in_flight[seq.slot] = _InFlight(seq, draft, count, len(seq.table))
        seq.computed = seq.computed_before(step) + 1
        seq.since = step + 1
        seq.drafts, seq.due = count, 0
        return draft.tokens[:count]

    @property
    def planned(self) -> tuple[int, int]:
        """(sequences that draft in the step being planned or in flight, drafts of that step)."""
        return len(self._in_flight), sum(entry.computed for entry in self._in_flight.values())

    # ---------------------------------------------------------------------------------------------------------- commit

    def accepted(self, slot: int, count: int) -> list[int]:
        """Return the drafts of a slot that a result has accepted.  Raises AccountingError if it computed fewer."""
        entry = self._in_flight.get(slot)
        if entry is None or not 0 <= count <= entry.computed:
            raise AccountingError(f"slot {slot}: {count} drafts accepted, {entry.computed if entry else 0} computed")
        return entry.draft.tokens[:count]

    def settle(self, seq: Sequence, count: int) -> None:
        """`count` drafts were accepted and are among the known tokens: count them as computed, seal blocks, give back
        blocks that hold no token, and let the sequence decode on."""
        entry, size = self._in_flight.pop(seq.slot), self._pool.block_size
        first, seq.computed, seq.drafts = seq.computed, seq.computed + count, 0
        # A stop token among them ends the sequence: what follows it is not known.
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
            seen = min(count, seq.known - first)  # those behind a stop token are not in the answer
            accepted, rejected = seq.predictions or (0, 0)
            seq.predictions = accepted + seen, rejected + entry.computed - seen
        self.policy.learn(seq, entry.draft, entry.computed, count)

    def take(self, result: StepResult, irregular: Iterable[Sequence]) -> None:
        """Show the drafter a step's tokens, which are known by now, and keep what it finds.

        `irregular`: sequences to which the result added other tokens than the one that it names."""
        self._in_flight.clear()  # those left belong to sequences that have ended
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
        self._found = drafter.find(slots, tokens, self.policy.least_match(self._batch.decoding))

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
        """A sequence ends; `complete`: by itself, so that later answers may resemble it."""
        # One that ended at its length may have given back its slot before its last token arrived.
        if (slot := next((slot for slot, other in self._followed.items() if other is seq), -1)) >= 0:
            self._leave(slot, keep=complete)
        self.policy.forget(seq.request)

    def vacate(self, slots: list[int]) -> None:
        """Let go of sequences that gave back these slots and have not ended: they join again when they decode on."""
        for slot in slots:
            seq = self._followed.get(slot)
            if seq is not None and seq.slot != slot and seq.state is not State.ENDING:
                self._leave(slot, keep=False)

    def _leave(self, slot: int, *, keep: bool) -> None:
        self._joining.pop(slot, None)
        if self.drafter is not None and self._followed.pop(slot, None) is not None:
            self.drafter.end(slot, keep=keep)

    def reset(self) -> None:
        """Every step in flight is void, and every slot is free."""
        self._found.clear()
        self._in_flight.clear()
        for slot in list(self._followed):
            self._leave(slot, keep=False)
        self._joining.clear()


def logprobs_of(result: StepResult, slot: int, count: int) -> list[TokenLogprob] | None:
    """Return what a result reports of the first `count` tokens that a slot got from it; None: nothing."""
    if (last := result.logprobs.get(slot)) is None:
        return None
    return [*result.draft_logprobs.get(slot, ()), last][:count]
