"""Sequence: the tokens of one choice of a request, and how many of them are in the KV cache.

    tokens  0 ........ cached ........ computed ........ known
    KV      |-- shared, ref+1 --|-- own, written ---|-- to compute --|     table: [7 7 2 | 9 4 | new]

One rule drives everything: *computed catches up with known*.  `known - computed` is the rest of the prompt during
prefill, and 1 while decoding, or more while a grammar has forced tokens that no step has sampled yet (forced.py).
After a preemption it counts the tokens that neither the prefix cache nor host memory has kept.

    waiting --start-> prefilling --last known token--> decoding --length--> ending --last token is in--> finished
       ^                  |   ^                           | | |                                            ^
       |                  |   +--resume-- paused <-pause--+ | |                                            |
       +---- preempt -----+--------------------+------------+ +------------------ stop --------------------+
                                                           cancel, deadline, error: from any state to finished
"""

from __future__ import annotations

import enum

import msgspec

from quire.engine.core.blocks import chain_digest, root_digest
from quire.engine.wire.messages import Generate, Predictions, TokenLogprob


class State(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"  # holds its blocks but no slot; resumes when other sequences have ended
    ENDING = "ending"  # nothing left to compute; a step in flight samples its last token
    FINISHED = "finished"


class WindowTable(msgspec.Struct):
    """The blocks of a sequence in one group of sliding-window layers (layer_groups.py), numbered as in its pool."""

    first: int = 0  # table index of the first held block; the window has passed earlier blocks, which are released
    blocks: list[int] = []
    host: list[int] = []  # while swapped: host blocks with the KV cache from table index `first` on

    @property
    def end(self) -> int:
        """The table index after the last block; equals the length of the full-attention layers' table."""
        return self.first + len(self.blocks)


class Sequence(msgspec.Struct, eq=False):
    """One choice of one request.  Only the scheduler changes it."""

    request: Generate
    index: int  # index among the request's n choices
    arrival: tuple[int, int]  # sort key (arrival number of the request, index): an older sequence compares less
    stops: frozenset[int]  # EOS and stop tokens, which end the sequence
    limit: int  # maximum tokens, prompt included
    tokens: list[int]  # prompt and output known so far
    state: State = State.WAITING
    queued_tokens: int = 0  # its known tokens when it entered the waiting queue; 0: not in the queue
    queued_forks: int = 0  # blocks that the waiting queue's total of KV-block demand includes for its siblings (n > 1)
    slot: int = -1  # its index in the executor's batch; -1: none
    table: list[int] = []
    windows: list[WindowTable] = []  # one table per window group; empty: no such layers, or the sequence has no blocks
    window_reserved: tuple[int, ...] = ()  # reserved blocks per window group; a leader also has its siblings'
    computed: int = 0  # tokens with KV once all issued plans have run; while decoding: when step `since` begins
    since: int = 0  # decoding: `computed` is the count when this step begins; from then on each step computes one token
    due: int = 0  # the next step in which a decoding sequence needs the scheduler
    sampled_in: int = 0  # the last planned step that samples for it; that step may still be in flight
    unconfirmed: int = 0  # forced tokens at the end that results in flight may still report as sampled
    predictions: Predictions | None = None  # counts of drafts from the client's `prediction`; None: none was computed
    drafts: int = 0  # unverified draft tokens that the step in flight computes
    jumped_in: int = 0  # the step of its last jump; results of earlier steps report tokens that the jump computes, too
    digests: list[bytes] = []  # digests of the first full blocks of `tokens`, computed on demand
    host: list[int] = []  # while swapped: host blocks with the computed tokens, in the order of its table
    started_before: bool = False  # the sequence has run; if it waits now, it was preempted
    reassigned: bool = False  # an earlier engine began it, so its client waits for the next token, not the first
    preempted_for_fairness: bool = False  # preempted for another tenant; happens at most once per sequence
    failed_at: int = -1  # number of known tokens when a step with this sequence last failed; -1: none has failed
    recompute_tokens: int = 0  # computed tokens that the last preemption dropped
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first start
    predicted: list[int] = []  # predicted output lengths, tokens: one quantile per forecast_accuracy.LEVELS
    parked: int = -1  # state-pool index of the copy of its recurrent state while it is paused; -1: none
    to_keep: list[int] = []  # prompt positions at which to save a checkpoint, in descending order
    kept_at: int = 0  # the last position at which this sequence saved a checkpoint
    junction: int = 0  # tokens in cached blocks at the last prefix lookup, with or without a checkpoint
    checkpoint: bytes = b""  # digest of the checkpoint at the last full block of its answer; empty: none
    siblings: list[Sequence] = []  # only in a leader: sequences that fork from it when its prompt is done
    fork_blocks: int = 1  # only in a sibling: new blocks that it takes when it forks from its leader
    prompt_logprobs: list[TokenLogprob] = []

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def order(self) -> tuple[int, tuple[int, int]]:
        """Sort key of scheduling: priority class, then age.  The smallest starts first and is preempted last."""
        return self.request.priority, self.arrival

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def sent(self) -> int:
        """Output tokens that have been reported; 0 for a beam, whose tokens are reported when the search is done."""
        return 0 if self.request.beams is not None else self.known - self.prompt_len

    @property
    def sibling_blocks(self) -> int:
        """Number of new blocks that its siblings take when its prompt is done."""
        return sum(sibling.fork_blocks for sibling in self.siblings)

    def max_blocks(self, block_size: int) -> int:
        """Return the number of blocks that the sequence holds at its maximum length."""
        return -(-self.limit // block_size)

    def computed_before(self, step: int) -> int:
        """Return the number of tokens that are computed when `step` begins."""
        return self.computed + (step - self.since if self.state is State.DECODING else 0)

    def digest(self, block: int, fingerprint: str, block_size: int) -> bytes:
        """Return the digest of full block number `block`; each digest is computed once, on demand."""
        digests = self.digests
        while len(digests) <= block:
            parent = digests[-1] if digests else self._root(fingerprint)
            at = len(digests) * block_size
            digests.append(chain_digest(parent, self.tokens[at : at + block_size]))
        return digests[block]

    def _root(self, fingerprint: str) -> bytes:
        request = self.request
        return root_digest(fingerprint, request.cache_salt, request.adapter.rpartition("@")[2])
