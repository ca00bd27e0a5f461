"""Messages between gateway and engine, in msgspec's MessagePack.

Rules that let two releases run at the same time during a rolling upgrade:
  * fields are only ever appended, each with a default; they are never renamed, reordered or retyped;
  * an unknown map key (or a longer array) from a newer process is ignored;
  * golden bytes in tests/wire pin every message, so a change that breaks these rules fails the tests.
Units are in the names or next to the field.  This module imports msgspec only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Raise it when a process of the earlier version would misread a message.  Appended fields leave it as it is.
WIRE_VERSION = 2

PRIORITIES = (-100, 100)  # first and last class; the lower class goes first
# Minimum and maximum of `length_penalty`.  Within these bounds length ** length_penalty is a finite float32 above 0 for
# every length up to 10**7.
LENGTH_PENALTIES = (-5.0, 5.0)

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request.  `service/api/api.py` has validated them."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens with at least this fraction of the maximum probability
    seed: int = 0  # 0..2**63-1; the gateway always sets it, so that a replay samples the same tokens
    min_tokens: int = 0  # minimum output tokens before EOS and stop tokens may be sampled
    presence_penalty: float = 0.0  # -2..2, subtracted from the logit of each token that is in the output
    frequency_penalty: float = 0.0  # -2..2, subtracted from a token's logit once per occurrence in the output
    repetition_penalty: float = 1.0  # > 0, divides (multiplies) positive (negative) logits of prompt and output tokens
    logit_bias: list[tuple[int, float]] = []  # (token id, value added to its logit); -inf: the token is never sampled
    allowed_token_ids: list[int] = []  # only these tokens may be sampled; empty: all
    stop_token_ids: list[int] = []  # tokens that end the request with reason "stop"
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; k >= 0: the sampled token and the top k
    prompt_logprobs: int = -1  # like `logprobs`, for every prompt token except the first; disables prefix-cache hits
    # Grammar that the output must match, in llguidance's JSON form or as a Lark grammar; "": none.  The gateway has
    # checked it.  Only engines with EngineLoad.grammars may get it: an older engine would ignore the field.
    grammar: str = ""
    # In LATER_FIELDS.  Non-empty token sequences that the output must not contain: if the last generated tokens equal
    # all tokens of a sequence but the last, this last token is masked.
    bad_words: list[list[int]] = []
    # In LATER_FIELDS.  If `logprobs` >= 0, positions report these tokens, in this order, instead of the top k.
    logprob_token_ids: list[int] = []

    @property
    def alternatives(self) -> int:
        """Number of log-probabilities per generated position besides the sampled token's; -1: none at all."""
        return len(self.logprob_token_ids) if self.logprobs >= 0 and self.logprob_token_ids else self.logprobs


# Fields of Sampling that engines of earlier releases ignore.  An engine lists the fields that it supports in
# EngineLoad.honours, and gets requests with these fields only then.
LATER_FIELDS = ("bad_words", "logprob_token_ids")
PREDICTIONS = "predicted"  # name in EngineLoad.honours if the engine takes drafts from Generate.predicted
ADAPTERS = "adapter"  # name in EngineLoad.honours if the engine supports Generate.adapter
LEAVES_ADAPTERS = "no_adapter"  # name in EngineLoad.honours if the engine returns requests that need adapters


class Beams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of beam search, which replaces sampling (engine/core/beams.py)."""

    width: int  # number of beams, >= 1
    length_penalty: float = 1.0  # an answer's score is the sum of its log-probabilities / length ** length_penalty
    # True: stop at `width` finished answers.  False: stop when no running beam, if it ended now, would score higher
    # than these answers.  "never": stop when no running beam could score higher at any length.
    early_stopping: bool | Literal["never"] = False

    def max_blocks(self, prompt: int, longest: int, block_size: int) -> int:
        """Return the maximum number of KV blocks that a search holds.

        `prompt`: tokens of the prompt, whose full blocks all beams share.  `longest`: maximum tokens of a beam, prompt
        included.  `block_size`: tokens per block."""
        shared = prompt // block_size
        return shared + self.width * (-(-longest // block_size) - shared)

    def longest(self, prompt: int, blocks: int, block_size: int) -> int:
        """Return the maximum tokens of a beam, prompt included, for which a search stays within `blocks`."""
        shared = prompt // block_size
        return block_size * (shared + max(0, blocks - shared) // self.width)


FOREVER_MS = 2**60  # a deadline that never comes


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """One prompt to generate from.  Its `n` choices share one prefill and fork after it.

    The seed of choice i is (sampling.seed, i).  So choice 0 equals the answer of n = 1, and a larger n changes no
    earlier choice."""

    id: str  # unique; every Delta of this request carries it
    gateway: str  # name of the gateway that gets the answer
    token_ids: list[int]  # never empty
    max_new_tokens: int  # >= 1, for each choice
    sampling: Sampling
    deadline_ms: int  # unix time on Redis' clock; past it the engine finishes the request with "deadline"
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    traceparent: str = ""  # W3C trace context
    n: int = 1  # number of choices
    priority: int = 0  # priority class, see PRIORITIES: a lower class goes first
    tenant: str = ""  # the tenant to which its tokens are charged; fairness is between tenants
    weight: float = 1.0  # > 0: the tenant's share relative to other tenants
    queued_ms: int = 0  # unix time on Redis' clock when it was queued; 0: unknown
    tracestate: str = ""  # W3C trace state, sent together with `traceparent`
    # Beam search: the n best answers, each sent complete, in one delta.  None: answers are sampled.
    beams: Beams | None = None
    prefixes: bytes = b""  # digests of the prompt's prefixes (engine/wire/prefixes.py); empty: no prefix locality
    anchors: list[int] = []  # ends of the prompt's turns, ascending positions: later prompts may diverge there
    retain_s: float = 0.0  # seconds after its end for which its cached blocks are evicted last
    adapter: str = ""  # LoRA adapter, as `name@digest`; "": the base model.  Only for engines that honour ADAPTERS
    predicted: list[int] = []  # tokens that the client expects in the answer (OpenAI `prediction`): used as drafts
    adapter_path: str = ""  # folder of the adapter's files, readable by each engine that honours ADAPTERS

    @property
    def width(self) -> int:
        """Number of sequences that the engine computes: the beams, or the `n` choices."""
        return self.beams.width if self.beams is not None else self.n


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """Stop every choice of a request, or one choice.  Ignored if it is unknown or has finished."""

    id: str
    # Another engine has the request now: drop it without a Delta.
    reassigned: bool = msgspec.field(default=False, name="lost")
    index: int = -1  # index among the n choices; -1: all of them


# Counts of draft tokens from Generate.predicted that one engine computed for a choice: (accepted, rejected).
Predictions = tuple[int, int]


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one choice; no Delta follows it."""

    reason: FinishReason
    stop_token: int = -1  # the token that ended the choice, when reason is "stop"; last of the delta's token_ids
    message: str = ""  # only for "error": one line a client may see
    score: float = 0.0  # score of a beam-search answer, as defined by Beams
    # Number of tokens that a beam search computed and that are in no answer; set on one Finish per request.
    searched: int = 0
    # Beam search: 1 - distinct blocks / block-table entries of all beams, the fraction of memory that sharing saved.
    shared: float = 0.0
    # For "error": CONSTRAINT, or "": the error is the engine's, not the request's.
    code: str = ""
    predictions: Predictions | None = None  # counts of drafts from `predicted`; None: no such draft was computed


# Error code: the request's fault.  Its grammar or other constraints cannot be followed, or mask every token, or it
# exceeds the engine's settings, such as more choices than `max_seqs`.
CONSTRAINT = "constraint"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position, from the raw logits (before temperature, penalties and bias)."""

    logprob: float  # log-probability of the sampled or prompt token
    top: list[tuple[int, float]] = []  # (token id, logprob), most probable first


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice.  `first`: output position of token_ids[0], by which readers detect replays and gaps."""

    id: str
    first: int
    token_ids: list[int]
    finish: Finish | None = None
    index: int = 0  # index among the n choices
    logprobs: list[TokenLogprob] | None = None  # one entry per token id
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None  # log probabilities of the prompt; set if first == 0
    predictions: Predictions | None = None  # set on deltas of steps that computed drafts from Generate.predicted


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """An engine's report about itself, sent in each sync; gateways read the reports of all engines."""

    engine: str
    model: str
    fingerprint: str  # digest of weights, dtype and config: the prefix-cache namespace
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int
    free_blocks: int  # blocks available to new requests: free blocks, and cached blocks that no sequence uses
    cached_blocks: int  # the part of free_blocks that holds cached prefixes
    running: int  # running sequences
    waiting: int  # sequences inside the engine that are preempted or not yet started
    waiting_tokens: int  # tokens of the waiting sequences: prompts and output so far
    time_ms: int  # unix time of this report on the engine's own clock; other processes may only compare it for changes
    tokens_per_s: float = 0.0  # output tokens/s, moving average over the time in which requests wait
    blocks_per_s: float = 0.0  # blocks per second freed by finished sequences, average over the same time
    preemptions: int = 0  # preemptions since start; all counts below are since start, too
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    draining: bool = False  # claims no new requests
    predicted_peak_blocks: int = 0  # predicted peak KV usage of the running sequences, blocks
    step_s: float = 0.0  # seconds from one step's result to the next step's, moving average; 0: unknown
    swapped: int = 0  # waiting sequences whose KV blocks are in host memory
    swap_preemptions: int = 0  # preemptions since start that copied KV blocks to host memory
    swapped_out_bytes: int = 0  # bytes copied to host memory since start
    swapped_in_bytes: int = 0  # bytes copied back to the device since start
    paused: int = 0  # sequences that keep their blocks and wait because the pool is full; not in `running`
    pauses: int = 0  # times that a sequence was paused since start
    # Forecast accuracy: (q, finished outputs, outputs no longer than the q-quantile predicted at their start).  With a
    # correct forecast the ratio of the two counts is q.
    length_calibration: list[tuple[float, int, int]] = []
    peaks_judged: int = 0  # predictions of the peak number of blocks that were compared with the actual peak
    peaks_passed: int = 0  # number of these predictions that the actual peak exceeded
    peaks_bound_blocks: int = 0  # sum of the predicted peaks, blocks
    peaks_blocks: int = 0  # sum of the actual peaks, blocks
    audits: int = 0  # checks of the block accounting since start
    alarms: int = 0  # checks that found an accounting error
    yields: int = 0  # preemptions for fairness since start: they freed blocks for a tenant below its share
    over_share: list[str] = []  # tenants that hold at least their share of the engine's KV cache
    # Prompt tokens that a tenant without sequences here could start at once, if the newest sequences of tenants over
    # their share were preempted.
    preemptible_tokens: int = 0
    eos_ids: list[int] = []  # EOS tokens, which end an answer unless the request ignores them
    grammars: bool = False  # whether the engine supports Sampling.grammar
    beams: int = 0  # maximum Beams.width that the engine supports; 0: no beam search
    # Blocks that static allocation would reserve for the sequences in the batch, each at its maximum length.
    static_blocks: int = 0
    slots_filled: float = 0.0  # fraction of the KV positions in allocated blocks that have a token; updated each second
    honours: list[
        str
    ] = []  # newer request fields that the engine supports: LATER_FIELDS, PREDICTIONS, (LEAVES_)ADAPTERS
    adapters: list[str] = []  # LoRA adapters in its device slots, as in Generate.adapter
    drafts: dict[str, tuple[int, int]] = {}  # draft tokens (verified, accepted) since start, by source; empty: off
    refused_drafts: int = 0  # drafts since start that no step verified: their predicted speed-up was too small
    jumped_tokens: int = 0  # output tokens since start that a grammar forced and that took no decode step
    # As preemptible_tokens, for each tenant below its share that has sequences here: they count against its share.
    preemptible_tokens_of: dict[str, int] = {}


class TokenBatch(msgspec.Struct, frozen=True):
    """All deltas that one step of one engine sends to one gateway: this gateway's part of a token message."""

    engine: str
    deltas: list[Delta]

    def split(self, count: int) -> list[TokenBatch]:
        """Return at least one batch, each of at most `count` deltas, in the same order."""
        if len(self.deltas) <= count:
            return [self]
        return [TokenBatch(self.engine, self.deltas[at : at + count]) for at in range(0, len(self.deltas), count)]


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that many requests share, stored so that a starting engine can compute its KV cache in advance."""

    tokens: bytes  # token ids, 4 bytes each, little endian
    cache_salt: str = ""


class SequenceBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The block table of one sequence, as runs of consecutive blocks."""

    id: str  # request id
    index: int  # index among the request's n choices
    runs: bytes  # (first block, number of blocks) per run, 4 bytes per value, little endian


class PoolState(msgspec.Struct, frozen=True):
    """The state of every block of an engine's pool, for clients that watch it.  Its size is bounded."""

    engine: str
    blocks: int
    per_cell: int  # blocks per cell; a cell's value is the maximum of its blocks' values
    # One byte per cell: 0: free; 1: cached, held by no sequence; else 1 + number of tables with the block, at most 255.
    cells: bytes
    sequences: list[SequenceBlocks] = []
    left_out: int = 0  # number of sequences that hold blocks and are not listed in `sequences`
    host_blocks: int = 0  # blocks in host memory for swapped-out sequences
    host_used: int = 0
