"""The interface between scheduler and executor: plain values, one step at a time, no pickle.

A *step plan* says what one step computes.  A *slot* is a sequence's index in the executor's batch.  A slot moves
through three states, and a plan lists only slots that change:

    free --Start--> prompt --Slice(s)--> decoding --freed_slots--> free
                                  \\-- Fork --> decoding --Slice--> decoding   (a jump)

  * `Start` puts a sequence into a slot and gives it a block table, cached prefix included.
  * A `Slice` computes the given tokens in a slot.  The slice that ends at the last known token carries a `sampler`, and
    the slot samples its next token after it.  The slices of earlier prompt chunks have no `sampler`.
  * From the next step on the slot *decodes*: each step computes the token that the slot sampled last, and samples one
    more.  Plans do not name the slot again until they free it.  So plan N+1 can be issued before result N is known,
    and a steady plan lists only changes, not every running sequence.
  * A slice with a `sampler` may name a slot that decodes: a *jump*.  Its first token is the one that the slot sampled
    last.  A grammar forced the tokens after it (`StepResult.forced`).  The slot samples after the last token of the
    slice, and decodes from there.
  * A slice with `drafts` names a slot that decodes.  It has no `sampler`, because the slot keeps its sampler.  The slot
    samples after its last known token and after each draft, accepts drafts while they equal these samples, and decodes
    after the last accepted draft.  The next plan is issued only when the result has arrived.
  * A slice with `candidates` reports the top-k next tokens.  The slot neither samples nor decodes: it waits for its
    next slice.  Beam search uses such slices: the scheduler chooses the beams' tokens (beam_groups.py).
  * A `Fork` adds a sibling that samples its own next token from its parent's logits of the same step.
  * `edits` set single block-table entries: a new last entry, a copy-on-write, or an entry changed by a re-fork of
    beams.  Tables of window groups change only by edits: the id of a block tells its group.
  * `swap_out` copies blocks to host memory before anything else in the plan; `swap_in` copies blocks back.

Within a step the executor applies, in this order: keep, swap_out, poison, swap_in, freed_slots, copies, starts, edits,
slices, forks; then it computes.  A fork begins with its parent's recurrent state at the end of the step.
Plans run one after another.  So a block that plan N+1 swaps out holds the KV that step N wrote, although plan N+1 may
be issued before result N arrives.  The sequence that gets the block in plan N+1 writes to it after the copy:

    step N (in flight)    slot 3 computes token 41, its KV into the last block of its table; samples token 42
    plan N+1              freed_slots [3] · swap_out: its table of 42 tokens · its blocks go to older sequences
    result N              token 42 is appended: known 43, computed 42, as for any slot that decodes
    plan M                swap_in: into other blocks · Start(slot 5, that table) · Slice(start 42, [token 42], sampler)

A slot is reused only after the results of all steps that may report a token of the slot have arrived.  So each reported
token belongs to one sequence.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from quire.engine.wire.messages import Sampling, TokenLogprob

DRAFT_SOURCES = ("own", "tenant", "prediction", "head")  # sources of drafts: `Draft.source` is an index
HEAD = DRAFT_SOURCES.index("head")  # the checkpoint's draft head (`StepResult.guesses`)


class Draft(NamedTuple):
    """Draft tokens: the drafter's guess of the tokens that a slot samples next."""

    slot: int
    tokens: list[int]  # never empty
    match: int  # number of the slot's last known tokens that equal the tokens before the draft in its source
    source: int  # index into DRAFT_SOURCES


class WindowGroup(msgspec.Struct, frozen=True):
    """The layers with a sliding window of one size, and the KV-cache blocks of these layers (layer_groups.py).

    In plans, the full-attention layers' blocks have the ids 0, 1, ...; the ids of each window group's blocks follow.
    So a block id determines which group's table an edit changes, and which layers a copy or a swap moves."""

    window: int  # tokens that a query attends to, its own included; >= 1
    blocks: int
    host_blocks: int = 0  # host blocks for preempted sequences; their ids follow those of full-attention layers, too
    block_bytes: int = 0  # bytes of keys and values per block, all layers of the group

    def blocks_per_sequence(self, block_size: int, max_model_len: int) -> int:
        """Return the maximum number of blocks that a sequence holds between two plans."""
        return min(-(-(self.window - 1) // block_size) + 1, -(-max_model_len // block_size))

    def reserved_blocks(self, block_size: int, max_model_len: int) -> int:
        """Return the number of blocks to reserve per sequence: one more, since a plan's tokens may straddle a block."""
        return self.blocks_per_sequence(block_size, max_model_len) + 1

    @staticmethod
    def blocks_per_plan(block_size: int, step_tokens: int, full_blocks: int) -> int:
        """Return the maximum number of blocks that one plan allocates in addition to the reserved blocks.

        `full_blocks`: blocks of the full-attention layers, whose tables grow by the same number."""
        return min(-(-step_tokens // block_size), full_blocks)


class Start(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    table: list[int]  # block ids, logical order
    state: int = -1  # checkpoint of recurrent state that the slot begins with; -1: the empty initial state
    adapter: int = -1  # adapter slot whose LoRA weights the sequence uses; -1: the base model.  Forks inherit it


class Sampler(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of a slot; sent once each time its sequence starts."""

    sampling: Sampling
    prompt_len: int  # output position of a sample = its position in the sequence - prompt_len
    stop_ids: list[int]  # EOS and stop tokens, masked until min_tokens are generated; empty: no mask
    # All tokens before the token to sample, prompt included; empty unless a penalty, a grammar or bad_words need them.
    history: list[int] = []
    sibling: int = 0  # mixed into the seed, so that n sequences differ


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Compute `token_ids` at positions start, start+1, ... of `slot`; write their keys and values."""

    slot: int
    start: int
    token_ids: list[int]  # never empty
    sampler: Sampler | None = None
    targets: list[int] = []  # report the logprob of targets[i] after token_ids[i] (prompt logprobs)
    top: int = 0  # number of top-k tokens to report with each target
    candidates: int = 0  # report this many top-k tokens after the last token; such a slice has no sampler
    # Number of draft tokens at the end of `token_ids`.  The slot samples after the token before the drafts and after
    # each draft.  It accepts drafts while they equal these samples.
    drafts: int = 0
    # (position, checkpoint): copy the slot's recurrent state to the checkpoint when all tokens before the position are
    # computed.
    keep: list[tuple[int, int]] = []


class Fork(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    parent: int  # slot of the leader, which samples for the first time in this step
    table: list[int]
    sampler: Sampler


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step: int  # 1, 2, 3, ...
    freed_slots: list[int] = []
    copies: list[tuple[int, int]] = []  # (from block, to block), all layers
    starts: list[Start] = []
    edits: list[tuple[int, int, int]] = []  # (slot, table index, block id)
    slices: list[Slice] = []
    forks: list[Fork] = []
    poison: list[int] = []  # only in tests: freed blocks, which the executor fills with NaN
    swap_out: list[tuple[int, int]] = []  # (block, host block), all layers; no host block twice
    swap_in: list[tuple[int, int]] = []  # (host block, block); the host block is free from the next plan on
    look_ahead: bool = True  # search for forced tokens; False: jumps have not saved time recently, so skip the search
    adapters: list[tuple[int, str]] = []  # (adapter slot, adapter): load its LoRA weights into the slot before `starts`
    keep: list[tuple[int, int]] = []  # (slot, checkpoint): copy the slot's recurrent state before anything else
    guess: bool = True  # let the checkpoint's draft head guess; False: its guesses have not saved time recently


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The tokens sampled in `step`: slots[i] sampled tokens[i]; the order of slots is arbitrary."""

    step: int
    slots: list[int]
    tokens: list[int]
    logprobs: dict[int, TokenLogprob] = {}  # log probabilities by slot, if requested
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # log probabilities of this step's prompt tokens, by slot
    failed: dict[int, str] = {}  # error by slot: its logits were not finite, so its KV cache may be wrong
    step_s: float = 0.0  # seconds since the launch, or since the previous step ended if that was later; 0: not measured
    device_s: float = 0.0  # seconds from the step's first kernel on the device to its last; 0: not measured
    swapped_bytes: int = 0  # bytes moved between device and host by copies that ended since the last result
    swap_s: float = 0.0  # seconds that these copies took
    impossible: dict[int, str] = {}  # error by slot: the sampling settings mask every token; its KV cache is correct
    # By slot: the only tokens that the grammar allows after the sampled token, in order.
    forced: dict[int, list[int]] = {}
    # By slot, for slices with `candidates`: (token ids, log-probabilities of raw logits), most probable first; float32.
    candidates: dict[int, tuple[list[int], list[float]]] = {}
    # By slot, for slices with drafts: the number of accepted drafts.  `tokens` has the token sampled after the last
    # accepted draft.
    accepted: dict[int, int] = {}
    draft_logprobs: dict[int, list[TokenLogprob]] = {}  # log probabilities of the accepted drafts by slot, if requested
    # By slot: the token after the sampled one as the model's own head guesses it, and its estimated probability.
    guesses: dict[int, tuple[int, float]] = {}
    guess_s: float = 0.0  # seconds of `step_s` that the head took


class Drafter(Protocol):
    """Finds drafts by matching text.  It keeps the tokens of each slot, and cannot change the generated text."""

    def begin(self, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]) -> None:
        """Start drafting for a sequence in a slot.  `owner`: requests of the same owner get drafts from each other's
        answers.  `predicted`: tokens of the client's prediction."""

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Append the tokens of a slot's sequence that the drafter lacks.  `tokens`: all tokens of the sequence."""

    def find(self, slots: list[int], tokens: list[int], min_match: int) -> list[Draft]:
        """Append tokens[i] to slots[i].  Returns drafts for slots that have changed since the last call.

        `min_match`: minimum length of a match, in tokens."""

    def end(self, slot: int, *, keep: bool) -> None:
        """Forget a slot.  `keep`: its answer is complete; draft from it for later requests of the same owner."""

    def close(self) -> None:
        """Free all memory."""
