"""The interface between scheduler and executor: plain values, one step at a time, no pickle.

A *slot* is a sequence's place in the executor's batch.  It moves through three states, and a plan lists only slots
that move:

    free --Start--> prompt --Slice(s)--> decoding --freed_slots--> free
                                  \\-- Fork --> decoding --Slice--> decoding   (a jump)

  * `Start` puts a sequence into a slot and gives it a block table (cached prefix included).
  * A `Slice` computes given tokens of a slot.  While prompt chunks remain `sampler` is None; the slice that carries a
    `sampler` reaches the last known token, and the slot samples its next token from that token's logits.
  * From the next step on the slot *decodes*: each step it computes the token it sampled last and samples one more,
    without being named again, until it is freed.  So plan N+1 can be issued before result N is known, and a steady
    step takes core and wire time for what changed, not for what runs.
  * A slice with a `sampler` may name a slot that decodes: a *jump*.  The slot computes these tokens instead of the one
    it sampled last, samples after the last of them, and decodes on.  The first one is what the slot would compute now.
    The others were forced by a grammar (`StepResult.forced`).
  * A slice with `drafts` names a slot that decodes, and has no `sampler`: the slot keeps the one that it has.  It
    samples after its last known token and after each draft, accepts drafts while they equal these samples, and decodes
    on behind the last accepted one.  The next plan is issued when its result has arrived.
  * A slice with `candidates` reports the likeliest tokens after its last one.  The slot neither samples nor decodes: it
    waits for its next slice.  So beams are computed (beam_groups.py): the scheduler chooses their tokens.
  * A `Fork` adds a sibling that samples its own next token from the logits its parent produces in this very step.
  * `edits` set single table entries: growth (one past the end), copy-on-write, and what differs after a re-fork.
    Tables of window groups change by edits only: the id of a block says to which group it belongs.
  * `swap_out` copies blocks to the host's memory before anything else in the plan, `swap_in` brings them back.

Within a step the executor applies, in this order: keep, swap_out, poison, swap_in, freed_slots, copies, starts, edits,
slices, forks; then it computes.  A fork begins with the recurrent state that its parent has after the step.
Plans run one after another.  So a block swapped out in plan N+1 holds what step N wrote, although plan N+1 may be
issued before result N arrives.  The sequence that gets the block in plan N+1 writes it after the copy:

    step N (in flight)    slot 3 computes token 41, its KV into the last block of its table; samples token 42
    plan N+1              freed_slots [3] · swap_out: its table of 42 tokens · its blocks go to older sequences
    result N              token 42 is appended: known 43, computed 42, as for any slot that decodes
    plan M                swap_in: into other blocks · Start(slot 5, that table) · Slice(start 42, [token 42], sampler)

A slot is not reused before every step that may still report it has been committed, so a late token is never mistaken.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from quire.engine.wire.messages import Sampling, TokenLogprob

DRAFT_SOURCES = ("own", "tenant", "prediction")  # sources of drafts: `Draft.source` is an index


class Draft(NamedTuple):
    """Tokens that a slot may sample next, as the executor's drafter guesses them."""

    slot: int
    tokens: list[int]  # never empty
    match: int  # known tokens that end like the text from which the draft is taken
    source: int  # index into DRAFT_SOURCES


class WindowGroup(msgspec.Struct, frozen=True):
    """Layers whose queries see the last `window` tokens, with blocks of their own (layer_groups.py).

    Plans name the blocks of full layers 0, 1, ...; the ids of the window groups follow, one group after another.  Every
    id says which group's table an edit changes, and which layers a copy or a swap moves."""

    window: int  # tokens, the query's own included; >= 1
    blocks: int
    host_blocks: int = 0  # host blocks for preempted sequences; their ids follow those of full layers, too
    block_bytes: int = 0  # keys and values of a block, all layers of the group

    def blocks_per_sequence(self, block_size: int, max_model_len: int) -> int:
        """Return the maximum blocks that a sequence holds between two plans."""
        return min(-(-(self.window - 1) // block_size) + 1, -(-max_model_len // block_size))

    def reserved_blocks(self, block_size: int, max_model_len: int) -> int:
        """Return the blocks to reserve for a sequence.  One more: a plan's tokens may begin and end within a block."""
        return self.blocks_per_sequence(block_size, max_model_len) + 1

    @staticmethod
    def blocks_per_plan(block_size: int, step_tokens: int, full_blocks: int) -> int:
        """Return the maximum blocks that the tokens of a plan add to these, in all sequences together.

        `full_blocks`: of full layers, whose tables grow by as many."""
        return min(-(-step_tokens // block_size), full_blocks)


class Start(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    table: list[int]  # block ids, logical order
    state: int = -1  # checkpoint of recurrent state that the slot begins with; -1: none, its state is the empty one
    adapter: int = -1  # adapter slot whose LoRA weights its tokens use; -1: the base model.  Forks inherit it


class Sampler(msgspec.Struct, frozen=True, array_like=True):
    """What a slot needs to sample; sent once each time its sequence starts."""

    sampling: Sampling
    prompt_len: int  # output position of a sample = its position in the sequence - prompt_len
    stop_ids: list[int]  # end-of-sequence and stop tokens, masked while fewer than min_tokens are out; else empty
    # Every token before the one to sample, prompt first; only when a penalty, a grammar or bad_words read it.
    history: list[int] = []
    sibling: int = 0  # mixed into the seed, so that n sequences differ


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Compute `token_ids` at positions start, start+1, ... of `slot`; write their keys and values."""

    slot: int
    start: int
    token_ids: list[int]  # never empty
    sampler: Sampler | None = None
    targets: list[int] = []  # report the logprob of targets[i] after token_ids[i] (prompt logprobs)
    top: int = 0  # number of top-k tokens to report, too
    candidates: int = 0  # report this many most probable tokens after the last one; then there is no sampler
    # Number of drafts at the end of `token_ids`: guesses that no step has sampled.  The slot samples after each of them
    # and after the token before them.  It accepts drafts while they equal these samples.
    drafts: int = 0
    # (position, checkpoint): copy the slot's recurrent state there once every token before the position is computed.
    keep: list[tuple[int, int]] = []


class Fork(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    parent: int  # a slot that samples for the first time in this step
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
    poison: list[int] = []  # tests: blocks whose content is garbage now; filled with NaN
    swap_out: list[tuple[int, int]] = []  # (block, host block), all layers; no host block twice
    swap_in: list[tuple[int, int]] = []  # (host block, block); the host block is free from the next plan on
    look_ahead: bool = True  # the result names forced tokens; they are not worth the search where jumps do not pay
    adapters: list[tuple[int, str]] = []  # (adapter slot, adapter): load these LoRA weights there before `starts`
    keep: list[tuple[int, int]] = []  # (slot, checkpoint): copy the slot's recurrent state there before anything else


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token for every slot that sampled in `step`, in any order; `slots` and `tokens` run in parallel."""

    step: int
    slots: list[int]
    tokens: list[int]
    logprobs: dict[int, TokenLogprob] = {}  # log probabilities by slot, if requested
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # log probabilities of this step's prompt tokens, by slot
    failed: dict[int, str] = {}  # error by slot: non-finite logits, so nothing it computed is to be trusted
    step_s: float = 0.0  # seconds from when it could begin until it was done; 0: not measured
    device_s: float = 0.0  # seconds from the device's first work for it to its last; 0: not measured
    swapped_bytes: int = 0  # moved between device and host by copies that ended since the last result
    swap_s: float = 0.0  # seconds they took
    impossible: dict[int, str] = {}  # error by slot: the request's settings leave no token; what it computed is sound
    # By slot: the tokens that must follow the sampled one, because its grammar allows no others.  A slot that samples
    # them one by one gets the same ones.
    forced: dict[int, list[int]] = {}
    # By slot, for slices with `candidates`: (token ids, log-probabilities of raw logits), most probable first; float32.
    candidates: dict[int, tuple[list[int], list[float]]] = {}
    # By slot, for slices with drafts: how many of them equal the samples before them.  `tokens` has the sample that
    # follows the last accepted one.
    accepted: dict[int, int] = {}
    draft_logprobs: dict[int, list[TokenLogprob]] = {}  # log probabilities of the accepted drafts by slot, if requested


class Drafter(Protocol):
    """Finds drafts.  It keeps the tokens of each slot, and has no influence on the text."""

    def begin(self, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]) -> None:
        """Follow a sequence in a slot from now on.  `owner`: requests with an equal one share their answers."""

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Append to a slot what its sequence has in `tokens` and the drafter has not."""

    def find(self, slots: list[int], tokens: list[int], least: int) -> list[Draft]:
        """Append a token to each of these slots.  Returns drafts for slots that have changed since the last call.

        `least`: minimum tokens of a match."""

    def end(self, slot: int, *, keep: bool) -> None:
        """Forget a slot.  `keep`: its answer is complete, for later drafts of the same owner."""

    def close(self) -> None:
        """Free everything."""
