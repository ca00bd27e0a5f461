"""Log probabilities as JSON: in the formats of OpenAI's chats and completions, and of vLLM's `prompt_logprobs`.

Long lists are encoded in parts, between which other requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quire.engine.wire.messages import TokenLogprob
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Turns

TURN_ALTERNATIVES = 4096  # alternatives encoded before other requests run; about 3 ms


class Columns(NamedTuple):
    """Tokens of one choice, or of a prompt and one choice, with their log probabilities."""

    tokens: list[int]
    found: list[TokenLogprob | None]  # one per token; None: the first token of a prompt, which has no probability
    offsets: list[int]  # characters before each token; empty for chats
    texts: Sequence[bytes | None] = ()  # chats: which bytes of each token are content; None: all


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -Infinity


class LogprobFormat:
    """Writes the log probabilities of one request.  `vocabulary`: bytes of each token id."""

    def __init__(self, valid: ValidRequest, vocabulary: list[bytes]) -> None:
        self._chat, self._names_are_ids, self._vocabulary = valid.chat, valid.names_are_ids, vocabulary
        self._named = bool(valid.sampling.logprob_token_ids)
        self._step = max(1, TURN_ALTERNATIVES // (2 + max(0, valid.sampling.alternatives)))
        self._prompt_step = max(1, TURN_ALTERNATIVES // (2 + valid.sampling.prompt_logprobs))

    def entries(self, columns: Columns) -> dict[str, list[Any]]:
        """Return the field `logprobs` of a choice."""
        if self._chat:
            entries = zip(columns.tokens, columns.found, columns.texts or [None] * len(columns.tokens), strict=True)
            return {"content": [self._chat_logprob(token, at, text) for token, at, text in entries if at is not None]}
        pairs = list(zip(columns.tokens, columns.found, strict=True))
        return {
            "tokens": [self._name(token) for token in columns.tokens],
            "token_logprobs": [None if at is None else _finite(at.logprob) for at in columns.found],
            "top_logprobs": [None if at is None else self._top(token, at) for token, at in pairs],
            "text_offset": columns.offsets,
        }

    async def encode_long(self, columns: Columns, turns: Turns | None = None) -> msgspec.Raw | None:
        """Return the JSON of `entries`, encoded in parts; None if they are short, so that `entries` is fast enough."""
        if len(columns.tokens) <= self._step:
            return None
        encoded: dict[str, list[bytes]] = {}
        for at in range(0, len(columns.tokens), self._step):
            part = slice(at, at + self._step)
            turn = Columns(columns.tokens[part], columns.found[part], columns.offsets[part], columns.texts[part])
            for name, values in self.entries(turn).items():
                encoded.setdefault(name, []).append(msgspec.json.encode(values)[1:-1])
            await (asyncio.sleep(0) if turns is None else turns.pause())
        fields = (b'"%s":[%s]' % (name.encode(), b",".join(parts)) for name, parts in encoded.items())
        return msgspec.Raw(b"{" + b",".join(fields) + b"}")

    async def prompt(self, tokens: list[int], found: list[TokenLogprob]) -> bytes:
        """Return the JSON of vLLM's `prompt_logprobs`.  `found`: entries of all tokens but the first."""
        parts = [b"null"]  # the first token of a prompt has no probability
        for at in range(0, len(found), self._prompt_step):
            end = at + self._prompt_step
            turn = zip(tokens[1 + at : 1 + end], found[at:end], strict=True)
            parts.append(msgspec.json.encode([self._scores(token, one) for token, one in turn])[1:-1])
            await asyncio.sleep(0)
        return b"[%s]" % b",".join(parts)

    def _scores(self, token: int, at: TokenLogprob) -> dict[str, dict[str, Any]]:
        """Return entries of a prompt token and its alternatives, by token id.  `rank` is null if not reported."""
        ranks = {other: rank for rank, (other, _) in enumerate(at.top, 1)}
        found = {token: at.logprob, **dict(at.top)}
        return {
            str(one): {"logprob": _finite(logprob), "rank": ranks.get(one), "decoded_token": self._text(one)}
            for one, logprob in found.items()
        }

    def _top(self, token: int, at: TokenLogprob) -> dict[str, float]:
        """Return a completion's token and its alternatives.  If texts are equal, the more probable token counts."""
        top = {self._name(token): _finite(at.logprob)}
        for other, logprob in at.top:
            top.setdefault(self._name(other), _finite(logprob))
        return top

    def _chat_logprob(self, token: int, at: TokenLogprob, text: bytes | None) -> dict[str, Any]:
        # With logprob_token_ids, the token itself is one of the alternatives, as in vLLM.
        alternatives = {token: at.logprob, **dict(at.top)}.items() if self._named else at.top
        top = [self._alternative(i, p) for i, p in alternatives]
        entry = self._alternative(token, at.logprob)
        if text is not None:
            entry["bytes"] = list(text)
            if not self._names_are_ids:
                entry["token"] = text.decode("utf-8", "replace")
        return {**entry, "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": list(self._bytes(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._names_are_ids else self._text(token)

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        return self._vocabulary[token] if token < len(self._vocabulary) else b""
