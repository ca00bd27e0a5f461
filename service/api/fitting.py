"""Checks of a request against the engines' limits, once its prompt is encoded."""

from __future__ import annotations

import math

import msgspec

from quire.engine.wire.messages import Sampling
from quire.service.api.beams import fit_beams
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import Refusal, check, limit_refusal, unsupported
from quire.service.common.refusal import bad_request as _bad
from quire.service.config import GatewayConfig


class EngineLimits(msgspec.Struct, frozen=True):
    """Each limit's minimum over the live engines, since any of them may claim the request."""

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int
    eos_ids: frozenset[int] = frozenset()  # tokens that end an answer; empty: unknown


def too_long(param: str, longest: int, prompt: int, asked: int, *, least: bool = False) -> Refusal:
    """Return the refusal of a prompt that exceeds the model's context.  `least`: `prompt` is only a lower bound.

    LiteLLM recognises this error by the first words of its message, which are OpenAI's.  LangChain searches for the
    code in the exception text of OpenAI's client, which in newer versions contains only the message."""
    more = "at least " if least else ""
    message = (
        f"this model's maximum context length is {longest} tokens, but {more}{prompt + asked} were asked for: "
        f"{more}{prompt} in the prompt and {asked} to generate (context_length_exceeded)"
    )
    return limit_refusal("context", f"{param}: {message}", longest, param=param, given=prompt + asked)


def too_many_tokens(param: str, limit: int, given: int, *, least: bool = False) -> Refusal:
    """Return the refusal of a request with more than `limit` tokens.  `least`: `given` is only a lower bound."""
    message = f"at most {limit} tokens in one request, got {'at least ' if least else ''}{given}"
    return limit_refusal("tokens", f"{param}: {message}", limit, param=param, given=given)


def no_token(param: str, vocab: int, given: int) -> Refusal:
    """Return the refusal of a token id outside a vocabulary of `vocab` tokens."""
    message = f"{param}: {shown(given)} is out of vocabulary: token ids are 0 to {vocab - 1}, there are {vocab} tokens"
    return limit_refusal("token_id", message, vocab - 1, param=param, given=given)


def fit(valid: ValidRequest, encoded: list[list[int]], limits: EngineLimits) -> list[int]:
    """Return the maximum output tokens of each prompt.  Raises Refusal if the engines could never serve the request."""
    vocab, longest = limits.vocab_size, limits.max_model_len
    sampling = valid.sampling
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("logprob_token_ids", sampling.logprob_token_ids),
        *(("bad_words", ids) for ids in sampling.bad_words),
        *(("prompt", ids) for ids in encoded),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            token = next(token for token in ids if not 0 <= token < vocab)
            raise no_token(name, vocab, token)
    _leave_a_token(sampling, limits)
    check_bounds(valid, encoded)
    param = "messages" if valid.chat else "prompt"
    pool = limits.total_blocks * limits.block_size
    rooms = []
    for ids in encoded:
        if not ids:
            raise _bad("empty_prompt", f"{param}: must not be empty, at least 1 token", param, ">= 1", 0)
        asked = max(1, valid.max_tokens or 0)  # engines compute a token even if only the prompt is scored
        if valid.at_most:
            asked = max(1, min(asked, longest - len(ids), pool - len(ids)))
        if len(ids) + asked > longest:
            raise too_long(param, longest, len(ids), asked)
        if len(ids) + asked > pool:
            message = f"{param}: the KV cache holds {pool} tokens in all, but {len(ids) + asked} were asked for"
            raise limit_refusal("pool", message, pool, param=param, given=len(ids) + asked)
        room = min(longest, pool) - len(ids) if valid.max_tokens is None else asked
        if sampling.min_tokens > room:
            message = f"min_tokens: at most max_tokens, {room}, got {sampling.min_tokens}"
            raise _bad("invalid_value", message, "min_tokens", room, sampling.min_tokens)
        rooms.append(room)
    if valid.beams is not None:
        blocks, size = limits.total_blocks, limits.block_size
        bounded = valid.max_tokens is not None
        return fit_beams(valid.beams, [*map(len, encoded)], rooms, blocks=blocks, size=size, bounded=bounded)
    return rooms


def check_bounds(valid: ValidRequest, encoded: list[list[int]]) -> None:
    """Raise Refusal if the prompt is so long that a field such as `context_management` would shorten it."""
    longest = max(map(len, encoded))
    for bound in valid.bounds:
        if longest >= bound.tokens:
            reason = f"{bound.what} is not served, and the prompt has {longest} tokens, {bound.tokens} or more"
            raise unsupported(bound.param, reason, f"a prompt below {bound.tokens} tokens", longest)


def _leave_a_token(sampling: Sampling, limits: EngineLimits) -> None:
    """Raise Refusal if `bad_words`, `allowed_token_ids` and `min_tokens` together leave no token to sample.

    Until `min_tokens` are generated, tokens that end the answer are excluded.  Every other filter leaves a token: a
    client's bias is finite, and top_k, top_p and min_p keep the most probable token."""
    never = {token for token, bias in sampling.logit_bias if bias == -math.inf}
    if never and all(token in never for token in sampling.allowed_token_ids or range(limits.vocab_size)):
        message = "bad_words: a token must be left that they do not forbid"
        raise _bad("invalid_value", message, "bad_words", ">= 1 token that is not forbidden", 0)
    if not sampling.min_tokens:
        return
    ends = never | set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_ids)
    name = "allowed_token_ids" if sampling.allowed_token_ids else "stop_token_ids"
    if all(token in ends for token in sampling.allowed_token_ids or range(limits.vocab_size)):
        message = f"{name}: with min_tokens {sampling.min_tokens} a token must be left that does not end the answer"
        raise _bad("invalid_value", message, name, ">= 1 token that does not end the answer", 0)


def bound_logprobs(valid: ValidRequest, encoded: list[list[int]], rooms: list[int], config: GatewayConfig) -> list[int]:
    """Reduce `rooms`, the maximum output tokens per prompt, to the limit on log probabilities per answer.

    Without max_tokens the answer ends when the limit is reached.  With max_tokens, raises Refusal if the answer could
    exceed the limit.  An entry is one token or one alternative.  It takes about 12 bytes in Redis, and 200 to 600 bytes
    of the gateway's memory in a non-streaming answer."""
    sampling, key = valid.sampling, "logprob entries"
    width = sampling.alternatives + 1
    if not width and sampling.prompt_logprobs < 0:
        return rooms
    fixed = sum(map(len, encoded)) * (sampling.prompt_logprobs + 1) * valid.n
    if width and valid.max_tokens is None:
        most = int(LIMITS[key].bounds(config)[1]) - fixed
        least = max(1, sampling.min_tokens)
        rooms = [max(least, min(room, most // (width * valid.n * len(rooms)))) for room in rooms]
    check(key, fixed + sum(rooms) * valid.n * width, config)
    return rooms
