"""Answers in OpenAI's JSON format: complete, or as events of a stream, whose constant parts are encoded once.

An event for a client that can resume has an id, which encodes how much of the answer the client has after it
(`Position`).  Any gateway can continue from there (`resume.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from quire.engine.wire.messages import Predictions, TokenLogprob
from quire.service.api import beams, best_of, vllm_keys, whole_answers
from quire.service.api.client_tools import custom_input
from quire.service.api.logprobs import Columns, LogprobFormat
from quire.service.api.position import Position
from quire.service.api.usage import UsageCount
from quire.service.api.valid_request import ValidRequest
from quire.service.api.whole_answers import WholeChoice
from quire.service.common.pacing import Pacer, Turns
from quire.service.common.refusal import Refusal
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.regions import CallDelta

ONE_PART_BYTES = 64 * 1024  # a complete answer up to this size is one part


class AnswerFormat(Protocol):
    """Writes one request's answer, complete or as the events of a stream."""

    request_id: str
    ids: bool  # events have ids, and keep-alives are comments
    each_token: bool  # each delta must have exactly one token: see text_stream.decode

    @property
    def tokens(self) -> list[int]:
        """Number of output tokens written so far, per choice."""

    def skip(self, had: Position, cached: list[int], reasoning: list[int], predictions: list[Predictions]) -> None:
        """Continue after the position that a resuming client already has."""

    async def prepare(self, delta: ChoiceDelta, *, with_prompt: bool | None = None) -> None:
        """Do the slow part of a delta's `chunk` in slices, between which other requests run."""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta; b"" if the client can see none of it yet."""

    def idle(self) -> bytes:
        """Return the events to send as a keep-alive; b"" if a comment or blank lines are enough."""

    def usage_chunk(self) -> bytes:
        """Return the event with the usage, which precedes `done`; b"" if there is none."""

    def done(self) -> bytes:
        """Return the event that ends the stream."""

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last events of a stream that failed after its first event."""

    async def prepare_end(self, pacer: Pacer) -> None:
        """Do the slow part of `done` and of storing the answer.  Other requests run meanwhile."""

    async def whole(self, deltas: list[ChoiceDelta], pacer: Pacer) -> list[bytes]:
        """Return the body of a non-streaming answer, in parts, from all its deltas.  Other requests run meanwhile."""


class Prompted(msgspec.Struct, frozen=True):
    """Parts of a prompt that its answer contains: token ids, and the text that `echo` repeats."""

    token_ids: list[int]
    text: str = ""  # only with echo
    offsets: list[int] = []  # characters before each token; only with echo and logprobs


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call.  A resumed answer has equal ids, since they depend on nothing else.

    It has nine letters and digits, since some chat templates accept no other form."""
    digest = hashlib.sha256(f"{request_id} {choice} {index}".encode()).digest()
    return "".join(_CALL_ID_DIGITS[byte % 32] for byte in digest[:9])


_CALL_ID_DIGITS = "abcdefghijklmnopqrstuvwxyz234567"


class Format:
    """Writes one request's answer in OpenAI's format.

    Constant parts are encoded once, so an event with only text costs one string encoding and two concatenations.
    `vocabulary`: bytes of each token id.
    """

    def __init__(
        self,
        valid: ValidRequest,
        *,
        request_id: str,
        model: str,
        created: int,
        fingerprint: str | None,
        prompts: list[Prompted],
        vocabulary: list[bytes],
        ids: bool = True,
    ) -> None:
        """`ids`: write event ids.  Without them each event is exactly one line, which begins with `data: `."""
        self._model, self._created = model, created
        self._valid, self._prompts, self._scores = valid, prompts, LogprobFormat(valid, vocabulary)
        self._id, self.request_id, self.ids = request_id.encode(), request_id, ids
        choices = len(prompts) * valid.n
        self._usage = UsageCount(valid, [len(prompt.token_ids) for prompt in prompts])
        self._started = [False] * choices
        self._ended: list[int] = []  # indices of ended choices, in the order in which they ended
        self._stage = b""  # last part of an event id: which choices have ended (Position)
        self._wants_usage = valid.include_usage
        kind = "chat.completion" if valid.chat else "text_completion"
        if valid.chat and valid.stream:
            kind += ".chunk"
        frame = {
            "id": request_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._open = msgspec.json.encode(frame)[:-1]  # without its closing brace
        # With stream_options.include_usage, every event but the last has `"usage": null`.
        self._no_usage = b',"usage":null}\n\n' if valid.include_usage and not valid.continuous_usage else b"}\n\n"
        field = b'"delta":{"content":' if valid.chat else b'"text":'
        self._text_heads = [
            b'data: %s,"choices":[{"index":%d,%s' % (self._open, choice, field) for choice in range(choices)
        ]
        nulls = vllm_keys.nulls(vllm_keys.CHAT_CHUNK if valid.chat else vllm_keys.COMPLETION_CHUNK)
        self._text_tail = b'%s,"logprobs":null,"finish_reason":null%s}]%s' % (
            b"}" if valid.chat else b"",
            nulls,
            self._no_usage,
        )

    each_token = False

    def idle(self) -> bytes:
        """Return nothing: keep-alives are comments or blank lines."""
        return b""

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last events of a stream that failed after its first event."""
        return b"data: %s\n\ndata: [DONE]\n\n" % refusal.body()

    def skip(self, had: Position, cached: list[int], reasoning: list[int], predictions: list[Predictions]) -> None:
        """Continue after the position `had` that a resuming client already has.

        The lists have one entry per choice.  `cached`: prompt tokens found in the prefix cache.  `reasoning`: how many
        of the client's tokens are reasoning.  `predictions`: counts of drafts from the client's prediction."""
        self._usage.skip([count or 0 for count in had.tokens], cached, reasoning, predictions)
        self._started = [count is not None for count in had.tokens]
        for choice in sorted(had.ended):
            self._end(choice)
        self._wants_usage = self._wants_usage and not had.usage

    @property
    def tokens(self) -> list[int]:
        """Number of output tokens written so far, per choice."""
        return self._usage.tokens

    def _end(self, choice: int) -> None:
        self._ended.append(choice)
        self._stage = b":" + ",".join(map(str, self._ended)).encode()

    # -- one chunk

    def _event_id(self) -> bytes:
        """Return the `id:` line of the next event; b"" without ids.  The id includes the tokens of that event."""
        if not self.ids:
            return b""
        tokens = self._usage.tokens
        if len(tokens) == 1:
            return b"id: %s:%d%s\n" % (self._id, tokens[0], self._stage)
        counts = [str(count) if begun else "" for count, begun in zip(tokens, self._started, strict=True)]
        return b"id: %s:%s%s\n" % (self._id, ",".join(counts).encode(), self._stage)

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta; b"" if the client can see none of it yet."""
        choice, valid = delta.choice, self._valid
        begins, self._started[choice] = not self._started[choice], True
        role = (
            self._event(choice, {"delta": {"role": "assistant", "content": self._repeated(choice)}}, None, first=True)
            if begins and valid.chat
            else b""
        )
        self._usage.add(delta)
        plain = delta.finish is None and delta.logprobs is None and not valid.return_token_ids
        if not begins and plain and not valid.continuous_usage and not (delta.reasoning or delta.calls):
            if not delta.text:
                return b""
            return self._event_id() + self._text_heads[choice] + msgspec.json.encode(delta.text) + self._text_tail
        if valid.chat:
            return role + self._chat_event(delta)
        text = self._prompts[choice // valid.n].text + delta.text if begins else delta.text
        if delta.finish is not None:
            self._end(choice)
        elif not (text or delta.logprobs or (valid.return_token_ids and delta.token_ids)):
            self._started[choice] = not begins
            return b""
        return self._event(choice, {"text": text}, delta, first=begins)

    def _repeated(self, choice: int) -> str:
        """Return the text with which a chat's answer begins (`echo`)."""
        return self._valid.repeated[choice // self._valid.n] if self._valid.repeated else ""

    def _chat_event(self, delta: ChoiceDelta) -> bytes:
        """Return the event of a delta; the last one has both text and `finish_reason`, as in vLLM."""
        message: dict[str, Any] | None = self._delta(delta)
        if not message and (delta.content or (self._valid.return_token_ids and delta.token_ids)):
            message = {"content": ""}
        if delta.finish is not None:
            self._end(delta.choice)
            message = message or ({"content": ""} if self._valid.reading is None else {})
        elif not message:
            return b""
        return self._event(delta.choice, {"delta": message}, delta)

    def _delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the field `delta` of an event, with content, reasoning and calls: its id counts the tokens of all."""
        message: dict[str, Any] = {}
        if delta.reasoning and not self._valid.hide_reasoning:
            message["reasoning"] = message["reasoning_content"] = delta.reasoning
        if delta.text:
            message["content"] = delta.text
        if delta.calls:
            message["tool_calls"] = self._calls(delta)
        return message

    def _calls(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Return the field `tool_calls` for a delta, with one entry per call."""
        found: dict[int, dict[str, Any]] = {}
        for new in delta.calls:
            call = found.setdefault(new.index, {"index": new.index})
            if new.name is not None:
                call |= self._call(delta.choice, new)
            else:
                function = call.setdefault("function", {"arguments": ""})
                function["arguments"] += new.arguments
        return list(found.values())

    def _call(self, choice: int, call: CallDelta) -> dict[str, Any]:
        """Return id, kind and name of a call, with the arguments in its first delta.

        The call of a custom tool has only one delta."""
        found = {"id": call_id(self.request_id, choice, call.index)}
        if call.name in self._valid.custom:
            return {**found, "type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}
        return {**found, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _event(
        self,
        choice: int,
        body: dict[str, Any],
        delta: ChoiceDelta | None,
        *,
        first: bool = False,
    ) -> bytes:
        """Return one event.

        `delta`: None for the event with the role.  `first`: whether this is the choice's first event."""
        valid = self._valid
        entry: dict[str, Any] = {"index": choice, **body, "logprobs": None, "finish_reason": None}
        if not valid.return_token_ids:
            entry |= dict.fromkeys(vllm_keys.CHAT_CHUNK if valid.chat else vllm_keys.COMPLETION_CHUNK)
        if delta is not None:
            entry["finish_reason"] = delta.finish
            if delta.finish is not None or not valid.chat:
                entry["stop_reason"] = delta.stop_reason
            if delta.logprobs is not None:
                entry["logprobs"] = self._logprobs(delta, with_prompt=first)
            if valid.return_token_ids:
                entry["token_ids"] = delta.token_ids
        opened = self._open
        if first:
            prompt = self._prompts[choice // valid.n].token_ids if valid.return_token_ids else None
            if valid.chat:
                opened += b',"prompt_token_ids":' + msgspec.json.encode(prompt)
            else:
                entry["prompt_token_ids"] = prompt
        tail = self._no_usage
        if valid.continuous_usage:
            tail = b',"usage":%s}\n\n' % msgspec.json.encode(self._usage.fields())
        return b'%sdata: %s,"choices":[%s]%s' % (self._event_id(), opened, msgspec.json.encode(entry), tail)

    def usage_chunk(self) -> bytes:
        """Return the last event before [DONE] if the client requested usage; else b""."""
        if not self._wants_usage:
            return b""
        self._stage = b":usage"
        usage = msgspec.json.encode(self._usage.fields())
        return b'%sdata: %s,"choices":[],"usage":%s}\n\n' % (self._event_id(), self._open, usage)

    def done(self) -> bytes:
        """Return the event that ends the stream."""
        self._stage = b":done"
        return self._event_id() + b"data: [DONE]\n\n"

    # -- the complete answer

    async def prepare_end(self, pacer: Pacer) -> None:
        """Do nothing, since the end of a stream does not repeat the answer."""

    async def whole(self, deltas: list[ChoiceDelta], pacer: Pacer) -> list[bytes]:
        """Return the body of a non-streaming answer, in parts.

        `deltas`: all deltas of all choices, in order of arrival."""
        turns = Turns(pacer)
        for delta in deltas:
            self._usage.add(delta)
            await turns.pause()
        scored = self._valid.sampling.logprobs >= 0
        by_choice = await whole_answers.gathered(deltas, len(self._usage.tokens), turns, scored=scored)
        parts, separator, scores = [self._open], b',"choices":[', b"null"
        for index, (at, joined) in enumerate(self._returned(by_choice)):
            await self.prepare(joined, with_prompt=True, turns=turns)
            entry = self._choice(joined, by_choice[at].last, await self._whole_calls(joined, turns))
            entry["index"] = index
            if self._valid.prompt_logprobs:
                prompt = self._prompts[at // self._valid.n].token_ids
                scores = await self._scores.prompt(prompt, joined.prompt_logprobs or [])
                if not self._valid.chat:
                    entry["prompt_logprobs"] = msgspec.Raw(scores)
            parts += [separator, msgspec.json.encode(entry)]
            separator = b","
            await turns.pause()
        parts += [b'],"usage":', msgspec.json.encode(self._usage.fields())]
        if self._valid.chat and self._valid.return_token_ids:
            parts += [b',"prompt_token_ids":', msgspec.json.encode(self._prompts[0].token_ids)]
        if self._valid.chat and self._valid.prompt_logprobs:
            parts += [b',"prompt_logprobs":', scores]  # the same for all choices, since a chat has one prompt
        parts.append(self._answer_nulls() + b"}")
        return parts if sum(map(len, parts)) > ONE_PART_BYTES else [b"".join(parts)]

    def _answer_nulls(self) -> bytes:
        if not self._valid.chat:
            return vllm_keys.nulls(vllm_keys.ANSWER)
        present = ("prompt_token_ids",) * self._valid.return_token_ids + (
            "prompt_logprobs",
        ) * self._valid.prompt_logprobs
        return vllm_keys.nulls(vllm_keys.CHAT_ANSWER, present)

    def _returned(self, by_choice: list[WholeChoice]) -> Iterator[tuple[int, ChoiceDelta]]:
        """Yield (choice, its joined delta) for each choice to return: all, or the most probable ones of each prompt."""
        valid = self._valid
        for first in range(0, len(by_choice), valid.n):
            places = list(range(valid.n))
            if valid.best:
                group = by_choice[first : first + valid.n]
                places = best_of.likeliest([one.logprobs for one in group], valid.best)
            for at in places:
                joined = by_choice[first + at].delta()
                if valid.hide_logprobs:
                    joined.logprobs = joined.offsets = None
                yield first + at, joined

    async def _whole_calls(self, whole: ChoiceDelta, turns: Turns) -> list[msgspec.Raw]:
        """Return the JSON of each tool call of a choice."""
        found = []
        for new in whole.calls:
            found.append(msgspec.Raw(msgspec.json.encode(self._call(whole.choice, new))))
            await turns.pause()
        return found

    def _choice(self, whole: ChoiceDelta, last: ChoiceDelta, calls: list[msgspec.Raw]) -> dict[str, Any]:
        valid, prompt = self._valid, self._prompts[whole.choice // self._valid.n]
        entry: dict[str, Any] = {"index": whole.choice}
        if valid.chat:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._repeated(whole.choice) + whole.text,
                "refusal": None,
            }
            message |= dict.fromkeys(vllm_keys.MESSAGE)
            if whole.reasoning and not valid.hide_reasoning:
                message["reasoning"] = message["reasoning_content"] = whole.reasoning
            if calls:
                message |= {"content": message["content"] or None, "tool_calls": calls}
            entry["message"] = message
        else:
            entry["text"] = prompt.text + whole.text
        entry["logprobs"] = None
        if whole.logprobs is not None:
            entry["logprobs"] = self._logprobs(whole, with_prompt=True)
        entry["finish_reason"], entry["stop_reason"] = last.finish, last.stop_reason
        if last.score is not None:
            entry["score"] = beams.score(last.score)
        entry |= dict.fromkeys(vllm_keys.CHAT_CHOICE if valid.chat else vllm_keys.COMPLETION_CHOICE)
        if valid.return_token_ids:
            entry["token_ids"] = whole.token_ids
            if not valid.chat:
                entry["prompt_token_ids"] = prompt.token_ids
        return entry

    # -- logprobs

    async def prepare(self, delta: ChoiceDelta, *, with_prompt: bool | None = None, turns: Turns | None = None) -> None:
        """Encode the logprobs of a delta if they are long.  Other requests run meanwhile.

        `with_prompt`: include the prompt's logprobs; None: include them if this is the choice's first delta."""
        if delta.logprobs is not None:
            begins = not self._started[delta.choice] if with_prompt is None else with_prompt
            delta.encoded = await self._scores.encode_long(self._columns(delta, with_prompt=begins), turns)

    def _logprobs(self, delta: ChoiceDelta, *, with_prompt: bool) -> msgspec.Raw | dict[str, Any]:
        return delta.encoded or self._scores.entries(self._columns(delta, with_prompt=with_prompt))

    def _columns(self, delta: ChoiceDelta, *, with_prompt: bool) -> Columns:
        tokens, found = delta.token_ids, list[TokenLogprob | None](delta.logprobs or [])
        if self._valid.chat:
            entries = delta.content or []
            found = [one.at for one in entries]
            return Columns([one.token for one in entries], found, [], [one.text for one in entries])
        prompt = self._prompts[delta.choice // self._valid.n]
        shift = len(prompt.text)
        offsets = [shift + offset for offset in delta.offsets or ()]
        if with_prompt and self._valid.echo:
            tokens, offsets = prompt.token_ids + tokens, prompt.offsets + offsets
            found = [None, *(delta.prompt_logprobs or []), *found]
        return Columns(tokens, found, offsets)
