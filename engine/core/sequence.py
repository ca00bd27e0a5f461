"""One request's tokens, and how much of its KV cache is computed.

    tokens  0 ........ cached ........ computed ........ known
    KV      |-- shared, ref+1 --|-- ours, written --|-- to compute --|     table: [7 7 2 | 9 4 | new]

One rule drives everything: *computed catches up with known*.  `known - computed` is the rest of the prompt while
prefilling, and 1 while decoding, or more while a grammar has forced tokens that no step has sampled yet (forced.py).
After a preemption it is the tokens that neither the prefix cache nor host memory has kept.

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
    PAUSED = "paused"  # no slot, but all its blocks: it resumes when others have ended
    ENDING = "ending"  # nothing left to compute; its last token is sampled but not yet reported
    FINISHED = "finished"


class WindowTable(msgspec.Struct):
    """The blocks of a sequence in one window group (layer_groups.py), numbered as in its pool."""

    first: int = 0  # table index of the first one; the window has passed those before it
    blocks: list[int] = []
    host: list[int] = []  # while swapped: host blocks with what it had from `first` on

    @property
    def end(self) -> int:
        """The table index behind the last one: the length of the full layers' table."""
        return self.first + len(self.blocks)


class Sequence(msgspec.Struct, eq=False):
    """One choice of one request.  Only the scheduler changes it."""

    request: Generate
    index: int  # index among the request's n choices
    arrival: tuple[int, int]  # (order of the request, index): older compares less
    stops: frozenset[int]  # tokens that end it
    limit: int  # most tokens, prompt included
    tokens: list[int]  # prompt and output known so far
    state: State = State.WAITING
    queued_tokens: int = 0  # what it counts for in the queue; 0: not in the queue
    queued_forks: int = 0  # blocks of its siblings that the queue counts
    slot: int = -1  # its place in the executor's batch; -1: none
    table: list[int] = []
    windows: list[WindowTable] = []  # one per window group, if the model has any and the sequence has blocks
    window_units: int = 0  # sequences whose window blocks it has reserved; a leader's include those of siblings
    computed: int = 0  # tokens whose KV is written once every plan issued so far has run; while decoding: as of `since`
    since: int = (
        0  # the step before which `computed` was true; a decoding sequence computes a token a step from there on
    )
    due: int = 0  # the next step in which a decoding sequence needs the scheduler
    sampled_in: int = 0  # the last step planned that samples for it: its token may still be on the way
    unconfirmed: int = 0  # forced tokens at the end that results in flight may still report as sampled
    predictions: Predictions | None = None  # its drafts from the client's prediction; None: none was computed
    drafts: int = 0  # unverified draft tokens that the step in flight computes
    jumped_in: int = 0  # the step of its last jump: results of earlier steps report tokens that it computes
    digests: list[bytes] = []  # digests of the full blocks of `tokens`, as far as they were needed
    host: list[int] = []  # while swapped: host blocks with the computed tokens, in the order of its table
    started_before: bool = False  # it has run; if it waits now, it was preempted
    reassigned: bool = False  # an earlier engine began it: its client waits for the next token, not for a first one
    preempted_for_fairness: bool = False  # preempted for another tenant, at most once
    failed_at: int = -1  # tokens known when a step with it last failed; -1: none has
    recompute_tokens: int = 0  # tokens it had computed when a preemption kept nothing
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first start
    predicted: list[int] = []  # output tokens it stays within, one for each of forecast_accuracy.LEVELS
    parked: int = -1  # the copy of its recurrent state while it has blocks and no slot; -1: none
    to_keep: list[int] = []  # positions at which its prompt keeps a checkpoint, the last one first
    kept_at: int = 0  # the last position with a checkpoint of its own
    junction: int = 0  # tokens in cached blocks when its prefix was looked up last, with or without a checkpoint
    checkpoint: bytes = b""  # digest of the checkpoint that moves along its answer; empty: none
    siblings: list[Sequence] = []  # only in a leader: sequences that fork from it when its prompt is done
    fork_blocks: int = 1  # only in a sibling: blocks of its own that it takes at the fork
    prompt_logprobs: list[TokenLogprob] = []

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def rank(self) -> tuple[int, tuple[int, int]]:
        """Sort key, ascending for starts, descending for preemptions: the more urgent class, then the older."""
        return self.request.priority, self.arrival

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def sent(self) -> int:
        """Output tokens that have been reported; those of a beam are reported when the search is done."""
        return 0 if self.request.beams is not None else self.known - self.prompt_len

    @property
    def sibling_blocks(self) -> int:
        """Blocks that its siblings take when its prompt is done."""
        return sum(sibling.fork_blocks for sibling in self.siblings)

    def greatest_blocks(self, block_size: int) -> int:
        """Blocks that it holds at its maximum length."""
        return -(-self.limit // block_size)

    def computed_before(self, step: int) -> int:
        """`computed` as it stands when `step` begins."""
        return self.computed + (step - self.since if self.state is State.DECODING else 0)

    def digest(self, block: int, fingerprint: str, block_size: int) -> bytes:
        """Digest of its `block`-th full block; each is computed once, on demand."""
        digests = self.digests
        while len(digests) <= block:
            parent = digests[-1] if digests else self._root(fingerprint)
            at = len(digests) * block_size
            digests.append(chain_digest(parent, self.tokens[at : at + block_size]))
        return digests[block]

    def _root(self, fingerprint: str) -> bytes:
        request = self.request
        return root_digest(fingerprint, request.cache_salt, request.adapter.rpartition("@")[2])
