"""The tokenizer of a checkpoint: texts and chats become token ids, token ids become text.  No torch.

Tokenizer --vocabulary--> Vocabulary      bytes of each token
          --chat--------> ChatTemplate    text of a chat, tools, reasoning markers
          --rules-------> AnswerRules     grammar and parsing rules of an answer
          --threads-----> WorkThreads     threads for work that would block the event loop
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.tokenizers.files import TokenizerError, file_of, load_tokenizer
from quire.service.api.echo import aligned
from quire.service.api.format import Prompted
from quire.service.api.scoring import Scoring
from quire.service.api.tools import ChatOptions
from quire.service.api.valid_request import Prompt, ValidRequest
from quire.service.common.limits import PREDICTED_TOKENS, WORD_TOKENS
from quire.service.common.refusal import Refusal, limit_refusal, placing, renamed, unsupported
from quire.service.common.work_threads import WorkThreads
from quire.service.config import GatewayConfig
from quire.service.text import infill
from quire.service.text.answer_rules import AnswerRules
from quire.service.text.chat_template import ChatTemplate
from quire.service.text.token_budget import UNLIMITED, TokenBudget
from quire.service.text.turn_boundary import TurnBoundary
from quire.service.text.vocabulary import ModelError, Vocabulary, longest_token

# Encoding and rendering take about a microsecond per four characters.  Larger requests run on a thread; otherwise they
# would block the event loop for milliseconds.
INLINE_BYTES = 4096
LEAD = "\u263a"  # a character that never merges with others into one token


def processor_template(source: str) -> str | None:
    """Return the chat template in `chat_template.json`, where multimodal checkpoints keep it; None without the file."""
    path = file_of(source, "chat_template.json")
    try:
        found: str | None = None if path is None else json.loads(Path(path).read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model {source}: chat_template.json holds no chat template: {error!r}") from None
    return found


def _added(backend: Any) -> tuple[int, int]:
    """Return how many tokens the tokenizer puts before every text, and how many after it."""
    mask = backend.encode("a").special_tokens_mask
    text = mask.index(0) if 0 in mask else len(mask)
    return text, mask[::-1].index(0) if 0 in mask else 0


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, source: str, *, literal_content: bool = True) -> None:
        """Load from a directory or hub name: takes seconds, may use the network.  Raises ModelError.

        `literal_content`: encode the content of chat messages without special tokens (`literal.py`)."""
        # Imported here, since it takes over a second and not every process that imports this module needs it.
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self._hf: Any = load_tokenizer(source)
        except TokenizerError as error:
            raise ModelError(str(error)) from None
        self._hf.chat_template = self._hf.chat_template or processor_template(source)
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"model {source}: its tokenizer has no fast form (tokenizer.json)")
        self._backend = backend
        self.vocabulary = Vocabulary(backend)
        self.chat = ChatTemplate(self._hf, literal_content=literal_content)
        if self.chat.responses is not None:
            self.vocabulary.keep_markers(self.chat.responses)
        self.rules = AnswerRules(self.vocabulary, self.chat)
        self.threads = WorkThreads(INLINE_BYTES, "encode")
        self._added = _added(backend)
        self._infill = infill.find(backend)
        self._longest_token = longest_token(backend, self.vocabulary.table)
        self.turns = TurnBoundary(self._rendered, partial(self._encode, special=False))

    def _rendered(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return self.chat.render(messages, ChatOptions(generation_prompt=generation_prompt))[0]

    def text_of(self, tokens: list[int], *, skip_special: bool = True) -> str:
        """Return the text of a complete sequence, as the tokenizer itself would decode it."""
        # The batch call, unlike `decode`, releases the GIL.
        [text] = self._backend.decode_batch([tokens], skip_special_tokens=skip_special)
        return str(text)

    def _encode(self, text: str, *, special: bool, budget: TokenBudget | None = None) -> list[int]:
        """Return the token ids of a text.

        Raises Refusal if they exceed `budget`, if possible before encoding."""
        self._check_length(text, budget)
        # The batch call, unlike `encode`, releases the GIL.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)
        if budget is not None:
            budget.spend(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, budget: TokenBudget | None) -> None:
        """Raise Refusal if a text has more characters than `budget` tokens can encode, each of the maximum length."""
        if budget is not None and self._longest_token is not None:
            budget.check(-(-len(text) // self._longest_token), least=True)

    def _encode_prompt(self, prompt: Prompt, budget: TokenBudget, *, special: bool, suffix: str = "") -> list[int]:
        if suffix:
            return self._encode_infill(prompt, suffix, budget, special=special)
        if isinstance(prompt, str):
            return self._encode(prompt, special=special, budget=budget)
        budget.spend(len(prompt))
        return prompt

    def _encode_infill(self, prompt: Prompt, suffix: str, budget: TokenBudget, *, special: bool) -> list[int]:
        """Return the fill-in-the-middle prompt for `prompt` and `suffix`.

        Raises Refusal if the model has no known tokens for it."""
        if self._infill is None:
            raise unsupported("suffix", "the model's tokenizer has no tokens for text insertion that are known here")
        for text in (prompt, suffix):
            if isinstance(text, str):
                self._check_length(text, budget)
        first = self._encode("", special=True)[: self._added[0]] if special else []
        before = self._encode(prompt, special=False) if isinstance(prompt, str) else prompt
        # Some tokenizers add a space before each text.  The suffix must not get one, so LEAD is encoded before it.
        lead, after = self._encode(LEAD, special=False), self._encode(LEAD + suffix, special=False)
        after = after[len(lead) :] if after[: len(lead)] == lead else self._encode(suffix, special=False)
        ids = [*first, *self._infill.prompt(before, after)]
        budget.spend(len(ids))
        return ids

    def end_infill(self, valid: ValidRequest) -> ValidRequest:
        """Return the request with stop tokens that end an inserted text (fill in the middle)."""
        if not valid.suffix or self._infill is None or valid.sampling.ignore_eos:
            return valid
        ends = list(dict.fromkeys([*valid.sampling.stop_token_ids, *self._infill.ends]))
        return msgspec.structs.replace(valid, sampling=msgspec.structs.replace(valid.sampling, stop_token_ids=ends))

    def _encode_chat(
        self, messages: list[dict[str, Any]], budget: TokenBudget | None = None, options: ChatOptions | None = None
    ) -> list[int]:
        """Render the chat template in jinja2's sandbox, then encode the text.  The template adds special tokens."""
        options = options or ChatOptions()
        for message in messages:  # checked before rendering, since no template shortens the content
            if isinstance(text := message.get("content"), str):
                self._check_length(text, budget)
        text, spans = self.chat.render(messages, options)
        if self.chat.literal is None or not spans:
            return self._encode(text, special=False, budget=budget)
        self._check_length(text, budget)
        ids = self.chat.literal.encode(text, spans)
        if budget is not None:
            budget.spend(len(ids))
        return ids

    def _encode_one(self, valid: ValidRequest, at: int, budget: TokenBudget) -> list[int]:
        """Return the token ids of chat number `at` of a request with several chats.  Raises Refusal."""
        if not valid.conversations:
            return self._encode_chat(valid.messages, budget, valid.options)
        messages = valid.conversations[at - 1] if at else valid.messages
        try:
            return self._encode_chat(messages, budget, valid.options)
        except Refusal as refusal:
            raise renamed(refusal, (("messages", f"messages[{at}]"),)) from None

    def _encode_scored(self, valid: ValidRequest, scoring: Scoring, budget: TokenBudget) -> list[list[int]]:
        """Return one prompt per item for /generative_scoring: the query and the item, as token ids.  Raises Refusal."""

        def encode(text: str, special: bool) -> list[int]:
            self._check_length(text, budget)
            return self._encode(text, special=special)

        found = []
        for ids in scoring.prompts(valid.prompts, encode, special=valid.special):
            budget.spend(len(ids))
            found.append(ids)
        return found

    async def encode(
        self, valid: ValidRequest, size: int | None = None, *, longest: int = UNLIMITED, total: int = UNLIMITED
    ) -> list[list[int]]:
        """Return the token ids of each prompt.  `size`: bytes of the request's body, if known.

        `longest`: tokens of the model's context; `total`: tokens of all prompts together, before truncation.  Raises
        Refusal when they do not fit, or when the chat template rejects the messages."""
        budget = TokenBudget(valid, longest, total)

        def work() -> list[list[int]]:
            if valid.chat:
                return [self._encode_one(valid, at, budget) for at in range(1 + len(valid.conversations))]
            if valid.scoring is not None:
                return self._encode_scored(valid, valid.scoring, budget)
            return [
                self._encode_prompt(prompt, budget, special=valid.special, suffix=valid.suffix)
                for prompt in valid.prompts
            ]

        with placing(valid.sources):
            encoded = await self.threads.run(INLINE_BYTES + 1 if size is None else size, work)
        if (keep := valid.truncate_prompt_tokens) is not None:
            if keep == -1:
                keep = max(1, longest - max(1, valid.max_tokens or 0))
            encoded = [ids[:keep] if valid.keep_first else ids[-keep:] for ids in encoded]
        return encoded

    async def tokenize(self, prompt: str, *, special: bool, size: int, total: int) -> list[int]:
        """Return the token ids of a text for POST /tokenize.  Raises Refusal like `encode`."""
        budget = TokenBudget(None, UNLIMITED, total)
        return await self.threads.run(size, self._encode, prompt, special=special, budget=budget)

    async def tokenize_chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, *, size: int, total: int
    ) -> list[int]:
        """Return a chat's prompt as token ids for POST /tokenize.  Raises Refusal like `encode`."""
        budget = TokenBudget(None, UNLIMITED, total)
        return await self.threads.run(size, self._encode_chat, messages, budget, options)

    def predicted(self, text: str) -> list[int]:
        """Return the token ids of a client's `prediction`.  Raises Refusal if it is too long."""
        if self._longest_token is not None:
            least = -(-len(text) // self._longest_token)
            if least > PREDICTED_TOKENS:  # too long even if every token has the maximum length
                message = f"prediction: at most {PREDICTED_TOKENS} tokens, got at least {least}"
                raise limit_refusal("prediction", message, PREDICTED_TOKENS, param="prediction", given=least)
        return self._encode(text, special=False)

    def forbid(self, valid: ValidRequest) -> ValidRequest:
        """Return the request with its `bad_words` as sampling parameters, each with and without a space before it.

        A word of one token gets a logit bias of -infinity, which engines of every release support.  Longer words go
        into `Sampling.bad_words`.  Raises Refusal if these have too many tokens."""
        if not valid.bad_words:
            return valid
        spellings: dict[tuple[int, ...], None] = {}  # token ids of each spelling, without duplicates
        for word in valid.bad_words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                spellings[tuple(self._encode(text, special=False))] = None
        never = {ids[0] for ids in spellings if len(ids) == 1}
        longer = [list(ids) for ids in spellings if len(ids) > 1 and never.isdisjoint(ids)]
        if (count := sum(map(len, longer))) > WORD_TOKENS:
            message = (
                f"bad_words: at most {WORD_TOKENS} tokens of all words, with and without a leading space, got {count}"
            )
            raise limit_refusal("bad_words tokens", message, WORD_TOKENS, param="bad_words", given=count)
        bias = [(token, added) for token, added in valid.sampling.logit_bias if token not in never]
        bias += [(token, -math.inf) for token in sorted(never)]
        sampling = msgspec.structs.replace(valid.sampling, logit_bias=bias, bad_words=longer)
        return msgspec.structs.replace(valid, sampling=sampling, bad_words=())

    def info(self) -> dict[str, object]:
        """Return the answer of /tokenizer_info: fields named as in `tokenizer_config.json`."""
        hf = self._hf
        special = {name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)}
        return {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": len(self.vocabulary.table),
            "chat_template": hf.chat_template,
            **special,
        }

    def prompted(self, valid: ValidRequest, encoded: list[list[int]]) -> list[Prompted]:
        """Return the parts of each prompt that the answer contains; text and offsets only if `echo` needs them."""
        if not valid.echo:
            return [Prompted(ids) for ids in encoded]
        prompted = []
        for prompt, ids in zip(valid.prompts, encoded, strict=True):
            untouched = isinstance(prompt, str) and valid.truncate_prompt_tokens is None
            text = str(prompt) if untouched else self.text_of(ids, skip_special=valid.skip_special)
            offsets: list[int] = []
            if valid.sampling.logprobs >= 0:
                # Text from the client keeps its special tokens; special tokens that the tokenizer added are hidden.
                hide = valid.skip_special and not untouched
                pieces = self.vocabulary.bytes_of(ids, skip_special=hide)
                if self.vocabulary.spaced:
                    self.vocabulary.write_first(pieces, ids, skip_special=hide)
                for at in self._added_to(ids) if untouched and valid.special else ():
                    pieces[at] = b""
                echoed, offsets = aligned(text, pieces)
                if untouched and echoed != text:  # the tokenizer has normalised the text, so it must report the offsets
                    (encoding,) = self._backend.encode_batch([text])
                    offsets = list(accumulate((start for start, _ in encoding.offsets), max))
                else:
                    text = echoed
            prompted.append(Prompted(ids, text, offsets))
        return prompted

    def _added_to(self, ids: list[int]) -> Iterator[int]:
        """Yield the positions of special tokens that the tokenizer adds at both ends of a text."""
        first, last = self._added
        yield from range(min(first, len(ids)))
        yield from range(max(first, len(ids) - last), len(ids))


def served_name(model: str) -> str:
    """Return the default name of a model in the API: the name of its directory, or its hub name."""
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def served_names(config: GatewayConfig) -> list[str]:
    """Return the names of the model in the API, at least one; answers contain the first."""
    given = [name.strip() for name in config.served_name.split(",")]
    return [name for name in given if name] or [served_name(config.model)]
