"""Tokenizer endpoints, which generate nothing: /tokenize, /detokenize, /tokenizer_info, count_tokens."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from quire.service.api import api, decoding, fitting
from quire.service.api.anthropic import messages
from quire.service.api.bodies import DetokenizeBody, TokenizeBody
from quire.service.api.fields import Endpoint
from quire.service.api.skipped import left_out
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import VALUES
from quire.service.common.refusal import Refusal, renaming
from quire.service.config import GatewayConfig
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.quotas import Quotas
from quire.service.delivery.streams import Streams
from quire.service.http.bodies import Bodies, parse_weight
from quire.service.http.middleware import METER, TENANT, Capacity
from quire.service.http.request_work import RequestWork, cut_after
from quire.service.text.tokenizer import Tokenizer

B = TypeVar("B", TokenizeBody, DetokenizeBody)


class TokenEndpoints:
    """Handlers of the tokenizer endpoints."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        bodies: Bodies,
        capacity: Capacity,
        work: RequestWork,
        quotas: Quotas,
        *,
        model: str,
        adapters: Adapters,
    ) -> None:
        self._config, self._tokenizer, self._streams = config, tokenizer, streams
        self._bodies, self._capacity = bodies, capacity
        self._work, self._model, self._adapters = work, model, adapters
        self._quotas = quotas

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize."""
        config = self._config
        with self._capacity.occupy():
            asked, size, weight = await self._read_tokens(request, TokenizeBody, "tokenize", VALUES)
            if (asked.prompt is None) == (asked.messages is None):
                raise Refusal(400, "invalid_value", "prompt: give either prompt or messages", param="prompt")
            total = self._work.max_tokens()
            if asked.prompt is not None:
                ids = await self._tokenizer.tokenize(
                    asked.prompt, special=asked.add_special_tokens, size=size, total=total
                )
            else:
                messages, options, skipped = await self._work.offload(weight, api.tokenized_chat, asked, config)
                request[METER].record_unknown(skipped)
                ids = await self._tokenizer.tokenize_chat(messages, options, size=size, total=total)
            found: dict[str, Any] = {
                "count": len(ids),
                "max_model_len": self._streams.fleet_watch.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            if asked.return_token_strs:
                found["token_strs"] = await self._tokenizer.threads.run(
                    size, self._tokenizer.vocabulary.token_strs, ids
                )
            encoded = await self._work.offload(size, msgspec.json.encode, found)
            async with cut_after(config.default_timeout_s):
                return await self._work.write(request, [encoded])

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """GET /tokenizer_info."""
        return await self._work.write(request, [msgspec.json.encode(self._tokenizer.info())])

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize."""
        config, most = self._config, self._work.max_tokens()
        with self._capacity.occupy():
            asked, size, _ = await self._read_tokens(request, DetokenizeBody, "detokenize", most)
            text = await self._tokenizer.threads.run(size, self._text, asked.tokens, most)
            encoded = await self._work.offload(size, msgspec.json.encode, {"prompt": text})
            async with cut_after(config.default_timeout_s):
                return await self._work.write(request, [encoded])

    async def _read_tokens(
        self, request: web.Request, kind: type[B], endpoint: Endpoint, max_values: int
    ) -> tuple[B, int, int]:
        """Return the decoded body of /tokenize or /detokenize, its size in bytes and its weight.  Raises Refusal."""
        await self._quotas.count(request, request[TENANT])
        async with self._bodies.read(request, max_values) as body:
            size, weight = len(body.data), parse_weight(body.data)
            asked, unknown = await self._work.offload(
                weight, decoding.decode_all, body.data, kind, endpoint, self._config
            )
        request[METER].record_unknown(unknown)

        async def check_model(served: api.Served) -> None:
            api.check_model(asked.model, self._model, served)

        await self._adapters.chosen(request[TENANT], check_model)
        return asked, size, weight

    def _text(self, tokens: list[int], most: int) -> str:
        """Decode token ids to text.  Raises Refusal for more than `most` ids, and for ids outside the vocabulary."""
        if len(tokens) > most:
            raise fitting.too_many_tokens("tokens", most, len(tokens))
        vocab = len(self._tokenizer.vocabulary.table)
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            raise fitting.no_token("tokens", vocab, next(token for token in tokens if not 0 <= token < vocab))
        return self._tokenizer.text_of(tokens, skip_special=False)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens: count the prompt tokens that POST /v1/messages would use."""
        config = self._config
        with renaming(messages.NAMES), self._capacity.occupy():
            await self._quotas.count(request, request[TENANT])
            async with self._bodies.read(request) as body:
                size, weight = len(body.data), parse_weight(body.data)
                data, timeout_s = body.data, config.default_timeout_s

                async def parsed(served: api.Served) -> ValidRequest:
                    given = data, config, self._model, timeout_s, served
                    return await self._work.offload(weight, messages.parse_count, *given)

                valid = await self._adapters.chosen(request[TENANT], parsed)
                unread = left_out(self._tokenizer.chat.unread(valid), messages.NAMES, config)
                request[METER].record_unknown((*valid.unknown, *unread))
                [ids] = await self._tokenizer.encode(valid, size, total=self._work.max_tokens())
                fitting.check_bounds(valid, [ids])
            async with cut_after(config.default_timeout_s):
                return await self._work.write(request, [msgspec.json.encode({"input_tokens": len(ids)})])
