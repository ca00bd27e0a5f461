"""What crosses the border between gateway and engine, in msgspec's MessagePack.

Rules that let two versions run side by side during a rolling upgrade:
  * fields are only ever appended, each with a default, never renamed, reordered or retyped;
  * an unknown map key (or a longer array) from a newer peer is ignored;
  * golden bytes in tests/wire pin every message, so a change that breaks these rules turns CI red.
Units are in the names or beside the field.  Nothing here imports more than msgspec.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Raise it when a process of the earlier version would misread a message.  Appended fields leave it as it is.
WIRE_VERSION = 1

PRIORITIES = (-100, 100)  # first and last class; the lower class goes first

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's next token is chosen.  Already validated by whoever built it (`service/api.py`)."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    seed: int = 0  # 0..2**63-1; always set by the gateway, so that a replay samples the same tokens
    min_tokens: int = 0  # outputs before end-of-sequence and stop tokens may be sampled
    presence_penalty: float = 0.0  # -2..2, once per token already in the output
    frequency_penalty: float = 0.0  # -2..2, times its count in the output
    repetition_penalty: float = 1.0  # > 0, divides (multiplies) positive (negative) logits of prompt and output tokens
    logit_bias: list[tuple[int, float]] = []  # (token id, added to its logit)
    allowed_token_ids: list[int] = []  # empty: all
    stop_token_ids: list[int] = []  # end the request, reason "stop"
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; k >= 0: of the chosen token and the k likeliest
    prompt_logprobs: int = -1  # same, for every prompt token but the first; switches prefix reuse off


FOREVER_MS = 2**60  # a deadline that never comes


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """One prompt to continue.  `n` continuations share one prefill and fork after it.

    Continuation i draws by (sampling.seed, i): the first says what n = 1 would, and a larger n changes none before."""

    id: str  # unique; every Delta of this request carries it
    gateway: str  # whose token stream gets the answer
    token_ids: list[int]  # never empty
    max_new_tokens: int  # >= 1, for each continuation
    sampling: Sampling
    deadline_ms: int  # unix time on Redis' clock; past it the engine finishes the request with "deadline"
    cache_salt: str = ""  # a prefix is shared only under an equal salt
    traceparent: str = ""
    n: int = 1
    priority: int = 0  # lower goes first, see PRIORITIES
    tenant: str = ""  # who pays for it: fairness is between tenants
    weight: float = 1.0  # > 0: the tenant's share against the others'
    queued_ms: int = 0  # unix time on Redis' clock when it was queued; 0: not known


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """Stop every continuation of a request, or one.  Unknown or finished ones are ignored."""

    id: str
    lost: bool = False  # it is somebody else's now: drop it without a word
    index: int = -1  # which of the n continuations; -1: every one


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one continuation; nothing follows it."""

    reason: FinishReason
    stop_token: int = -1  # the token that ended it, when reason is "stop"; it is the last of the delta's token_ids
    message: str = ""  # for "error": one line a client may see


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position, from the raw logits (before temperature, penalties and bias)."""

    logprob: float  # of the token that was chosen (or, in a prompt, that stands there)
    top: list[tuple[int, float]] = []  # (token id, logprob), likeliest first


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one continuation.  `first` is the output position of token_ids[0]: replays harmless, gaps visible."""

    id: str
    first: int
    token_ids: list[int]
    finish: Finish | None = None
    index: int = 0  # which of the n continuations
    logprobs: list[TokenLogprob] | None = None  # one for each token id
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None  # for prompt tokens 1.., on the delta with first == 0


class EngineLoad(msgspec.Struct, frozen=True):
    """What an engine tells every gateway about itself, each step.  Exchanges repeat it while a step lasts."""

    engine: str
    model: str
    fingerprint: str  # digest of weights, dtype and config: the prefix-cache namespace
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int
    free_blocks: int  # never used, or cached and idle: what a new request can have
    cached_blocks: int  # the idle part of free_blocks that still holds a reusable prefix
    running: int  # sequences
    waiting: int  # sequences inside the engine, not yet started or preempted
    waiting_tokens: int  # their prompt (and regenerated) tokens
    time_ms: int  # unix time of this reading on the engine's own clock: others may only see that it changes
    tokens_per_s: float = 0.0  # output tokens, moving average
    blocks_per_s: float = 0.0  # drain rate: blocks given back by finished sequences, moving average
    preemptions: int = 0  # since start, as are all counts below
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    draining: bool = False  # takes no new work
    predicted_peak_blocks: int = 0  # most blocks that what runs now is expected to hold at once, if nothing joins
    step_s: float = 0.0  # seconds from one step's results to the next one's, moving average over steps; 0: not known
    swapped: int = 0  # the waiting sequences whose KV blocks are in the host's memory
    swap_preemptions: int = 0  # the preemptions since start that kept what was computed there
    swapped_out_bytes: int = 0  # since start, to the host's memory
    swapped_in_bytes: int = 0  # and back
    paused: int = 0  # sequences that wait in place, with their blocks, because the pool is full; not in `running`
    pauses: int = 0  # times that one began to
    length_calibration: list[tuple[float, int, int]] = []  # (q, outputs judged, those of them no longer than what was
    # foretold at their start as quantile q); where the forecast is right, their share is q
    peaks_judged: int = 0  # bounds on what all running sequences would hold, compared with what they came to
    peaks_passed: int = 0  # those of them that were passed
    peaks_bound_blocks: int = 0  # sum of the bounds
    peaks_blocks: int = 0  # sum of what was held
    audits: int = 0  # of the books of its blocks since start, whole or sampled
    alarms: int = 0  # of these, those that found something wrong
    yields: int = 0  # preemptions since start that made room for a tenant that held less than its share
    crowd: list[str] = []  # tenants that hold their share of its KV cache or more
    yield_tokens: int = 0  # prompt tokens of others that could start at once: the crowd's newest would yield
    eos_ids: list[int] = []  # tokens that end an answer unless the request ignores them


class TokenBatch(msgspec.Struct, frozen=True):
    """Everything one step of one engine has for one gateway: one stream entry."""

    engine: str
    deltas: list[Delta]
    load: EngineLoad | None = None

    def split(self, count: int) -> list[TokenBatch]:
        """Return batches of at most `count` deltas in the same order, at least one; the last one has the load."""
        if len(self.deltas) <= count:
            return [self]
        parts = [self.deltas[at : at + count] for at in range(0, len(self.deltas), count)]
        return [TokenBatch(self.engine, part, self.load if part is parts[-1] else None) for part in parts]


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that requests begin with, kept so that an engine may compute their keys and values before it serves."""

    tokens: bytes  # token ids, 4 bytes each, little endian
    cache_salt: str = ""
