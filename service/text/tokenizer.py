"""The tokenizer: chat template, token ids, and the bytes of each token.  No torch.

Byte-level BPE (GPT-2, Llama 3, Qwen, OPT, GPT-NeoX) and SentencePiece-style vocabularies (Llama 2, Mistral, Phi-3,
Gemma) have a table of the bytes of each token.  Vocabularies of words (WordPiece, WordLevel) have two: blanks are
between tokens, so the first token of a text has none.  Any other tokenizer is refused at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from quire.engine.common.errors import OperatorError
from quire.engine.tokenizers.alphabet import byte_level_alphabet
from quire.engine.tokenizers.files import TokenizerError, file_of, load_tokenizer
from quire.service.api.api import Prompt, Refusal, ValidRequest, too_long, too_many_tokens
from quire.service.api.echo import aligned
from quire.service.api.format import Prompted
from quire.service.api.history import for_template, refused
from quire.service.api.scoring import Scoring
from quire.service.api.tools import ChatOptions
from quire.service.chat_templates.literal import LiteralContent, Span
from quire.service.chat_templates.template_probe import Dialect, names_in, probe
from quire.service.common.limits import WORD_TOKENS
from quire.service.common.refusal import bad_request, limit_refusal, placing, renamed
from quire.service.config import GatewayConfig
from quire.service.grammar.grammar import Constraint
from quire.service.output.argument_types import reduced
from quire.service.output.regions import Reading, find
from quire.service.text import infill
from quire.service.text.answer_grammar import Model, constraint_of
from quire.service.text.call_form import NO_FORM, CallForm, form_of
from quire.service.text.family_ids import with_family_ids
from quire.service.text.template_variables import variables_of

P = ParamSpec("P")
T = TypeVar("T")

# Encoding and templates take about a microsecond per four characters.  Larger requests run on a thread, or they would
# hold the event loop for milliseconds.
INLINE_BYTES = 4096
LONG_BYTES = 256 * 1024  # larger requests share one thread, so that they never delay shorter ones for seconds
# Composition (NFC) joins at most this many characters into one: U+1F82 is four.
COMPOSED_CHARS = 4
LEAD = "\u263a"  # a character that joins no other into a token
TAIL_TOKENS = 64  # of a prompt: they nearly always hold the beginning of the assistant's message
# Steps of tokenizers that drop no character; `longest_token` knows the exceptions.
KEEP_TEXT = ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "ByteLevel", "Metaspace", "Split", "Digits")


class ModelError(OperatorError):
    """The model's tokenizer cannot be loaded or used; one line an operator can act on."""


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the types in a `tokenizers` decoder, sequences flattened."""
    if decoder is None:
        return set()
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", [described])
    return {part["type"] for part in parts}


def processor_template(source: str) -> str | None:
    """Return the chat template that a multimodal checkpoint keeps in a file of its own; None without one."""
    path = file_of(source, "chat_template.json")
    try:
        found: str | None = None if path is None else json.loads(Path(path).read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model {source}: chat_template.json holds no chat template: {error!r}") from None
    return found


def word_bytes(backend: Any) -> tuple[list[bytes], list[bytes]] | None:
    """Return the bytes of each token id of a vocabulary of words: after other tokens, and as the first of a text.

    None for another kind of vocabulary.  The tokenizer itself decodes each token alone and after another one: what it
    removes before punctuation depends on the token only."""
    kinds = _decoder_kinds(backend.decoder)
    if kinds - {"WordPiece"} or type(backend.model).__name__ not in ("WordPiece", "WordLevel"):
        return None
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    later, first = [b""] * size, [b""] * size
    before = "a"
    for piece, token in vocab.items():
        if backend.decoder is None:
            later[token], first[token] = f" {piece}".encode(), piece.encode()
        else:
            later[token] = backend.decoder.decode([before, piece])[len(before) :].encode()
            first[token] = backend.decoder.decode([piece]).encode()
    return later, first


def vocabulary_bytes(backend: Any) -> list[bytes]:
    """Return the bytes of each token id of a `tokenizers.Tokenizer`; unused ids have none.  Raises ModelError."""
    if (words := word_bytes(backend)) is not None:
        return words[0]
    kinds = _decoder_kinds(backend.decoder)
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    if "ByteLevel" in kinds:
        alphabet = byte_level_alphabet()
        for piece, token in vocab.items():
            try:
                table[token] = bytes([alphabet[char] for char in piece])
            except KeyError:  # an added token, stored as plain text
                table[token] = piece.encode()
        return table
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        fallback = "ByteFallback" in kinds
        for piece, token in vocab.items():
            if fallback and re.fullmatch("<0x[0-9A-F]{2}>", piece):
                table[token] = bytes([int(piece[3:5], 16)])
            else:
                table[token] = piece.replace("\u2581", " ").encode()
        return table
    raise ModelError(
        f"tokenizer: a {type(backend.model).__name__} model with decoder {', '.join(sorted(kinds)) or 'none'} is "
        "neither byte-level, SentencePiece-style nor a vocabulary of words"
    )


def _added(backend: Any) -> tuple[int, int]:
    """Return how many tokens the tokenizer puts before every text, and how many after it."""
    mask = backend.encode("a").special_tokens_mask
    text = mask.index(0) if 0 in mask else len(mask)
    return text, mask[::-1].index(0) if 0 in mask else 0


def longest_token(backend: Any, table: list[bytes]) -> int | None:
    """Return the most characters of a text that one token can stand for; None where there is no such bound.

    Byte-level and SentencePiece-style vocabularies with a token for every byte have a bound, unless the tokenizer drops
    characters or shortens the text first.  The bytes of a token are counted: it never has more characters."""
    model = backend.model
    vocabulary = set(backend.get_vocab(with_added_tokens=False))
    whole = vocabulary >= set(byte_level_alphabet()) or (
        getattr(model, "byte_fallback", False) and vocabulary >= {f"<0x{byte:02X}>" for byte in range(256)}
    )
    added = backend.get_added_tokens_decoder().values()
    if not whole or backend.truncation is not None or any(one.lstrip or one.rstrip for one in added):
        return None
    longest = max(map(len, table))
    for step in _steps(backend.normalizer) + _steps(backend.pre_tokenizer):
        kind = step["type"]
        shortens = kind == "Split" and step.get("behavior") == "Removed"
        if kind == "Replace":
            shortens = len(step["content"]) < len(step["pattern"].get("String", " " * 1000))
        if shortens or kind not in KEEP_TEXT:
            return None
        if kind in ("NFC", "NFKC"):
            longest *= COMPOSED_CHARS
    return longest


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, sequences flattened."""
    if part is None:
        return []
    found: list[dict[str, Any]] = []
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers") or step.get("pretokenizers")
        if inner:
            waiting += inner
        else:
            found.append(step)
    return found


class TokenBudget:
    """How many tokens a request may still have.  Each of its prompts passes `check` and `spend`."""

    def __init__(self, valid: ValidRequest | None, longest: int, total: int) -> None:
        """`longest`: tokens of the model's context.  `total`: tokens of all prompts together."""
        self._longest, self._total, self._left = longest, total, total
        self._cut = valid is None or valid.truncate_prompt_tokens is not None  # one prompt may be longer than a context
        bounded = valid is not None and not valid.at_most
        self._asked = max(1, valid.max_tokens or 0) if valid and bounded else 1  # tokens that the answer needs
        self._param = "messages" if valid is not None and valid.chat else "prompt"

    def check(self, tokens: int, *, least: bool = False) -> None:
        """Raise Refusal when a prompt of `tokens` tokens (`least`: or more) does not fit."""
        if not self._cut and tokens + self._asked > self._longest:
            raise too_long(self._param, self._longest, tokens, self._asked, least=least)
        if tokens > self._left:
            given = self._total - self._left + tokens
            raise too_many_tokens(self._param, self._total, given, least=least)

    def spend(self, tokens: int) -> None:
        """Subtract one prompt from the budget.  Raises Refusal."""
        self.check(tokens)
        self._left -= tokens


UNLIMITED = 2**62


class Template(NamedTuple):
    """A chat template, and how it is rendered."""

    text: str
    dialect: Dialect
    render: Callable[..., str]  # takes the arguments of transformers' `apply_chat_template`

    def reads(self, name: str) -> bool:
        """Return whether the template names a variable."""
        return name in names_in(self.text)


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, source: str, *, literal_content: bool = True) -> None:
        """Load from a directory or hub name: takes seconds, may use the network.  Raises ModelError.

        `literal_content`: encode the content of chat messages without special tokens (`literal.py`)."""
        # Imported here: it takes over a second, which `import service` must not.
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
        # Bytes of each token; and as the first of a text, where that is written in another way.
        self.table, self._first = word_bytes(backend) or (vocabulary_bytes(backend), [])
        self._visible = list(self.table)  # the same, with no bytes for special tokens
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, one in added.items() if one.special}
        self._markers: set[int] = set()  # special tokens that a response template looks for
        for token in self._special:
            self._visible[token] = b""
        self._literal: LiteralContent | None = None
        self._load_template(backend)
        if literal_content and self._hf.chat_template:
            self._literal = LiteralContent(backend, self._controls(backend))
        self._added = _added(backend)
        self._infill = infill.find(backend)
        self._longest_token = longest_token(backend, self.table)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode long")

    def _load_template(self, backend: Any) -> None:
        """Find out what the chat template reads, and how answers are cut into regions."""
        template = self._hf.chat_template or ""
        # A checkpoint may have several templates by name; one of them is for chats with tools.
        self._template = "\n".join(template.values()) if isinstance(template, dict) else str(template)
        self._dialect, self.responses = Dialect(), None
        self._marked = self._visible
        if not self._template:
            return
        self._dialect = probe(partial(self._hf.apply_chat_template, tokenize=False), self._template)
        self.responses = find(self._template, getattr(self._hf, "response_template", None))
        if self.responses is not None:
            added = backend.get_added_tokens_decoder()
            kept = {token for token, one in added.items() if self.responses.has_marker(one.content)}
            self._markers = kept
            self._marked = [self.table[at] if at in kept else shown for at, shown in enumerate(self._visible)]

    def _controls(self, backend: Any) -> set[str]:
        """Return the added tokens, none of them special, with which the chat template begins or ends messages."""
        plain = {one.content for one in backend.get_added_tokens_decoder().values() if not one.special}
        roles, text = ("user", "assistant", "user"), ""
        if plain and self._template:
            with contextlib.suppress(Exception):  # whatever a template raises
                words = [[{"type": "text", "text": "a"}] if not self._dialect.text else "a" for _ in roles]
                turns = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
                text = self._hf.apply_chat_template(turns, tokenize=False)
        markers = set(self.responses.reasoning_markers or ()) if self.responses is not None else set()
        return {one for one in plain - markers if one.strip() and one in text}

    def bytes_of(self, tokens: Iterable[int], *, skip_special: bool, markers: bool = False) -> list[bytes]:
        """Return the bytes of each token.  A model may have more ids than its tokenizer: those have no bytes.

        `markers`: special tokens that a response template looks for are not skipped."""
        table = (self._marked if markers else self._visible) if skip_special else self.table
        try:
            return [table[token] for token in tokens]
        except IndexError:
            return [table[token] if token < len(table) else b"" for token in tokens]

    @property
    def spaced(self) -> bool:
        """Whether blanks are between tokens, so that the first token of a text is written in another way."""
        return bool(self._first)

    def write_first(self, pieces: list[bytes], tokens: list[int], *, skip_special: bool, markers: bool = False) -> bool:
        """Write the first token that is text as the first of a text.  Returns False if there is none.

        Only for a tokenizer that is `spaced`.  `pieces`: what `bytes_of` returned for the other arguments; changed in
        place."""
        hidden = self._special - self._markers if markers else self._special
        for at, token in enumerate(tokens):
            if token < len(self._first) and self._first[token] and not (skip_special and token in hidden):
                pieces[at] = self._first[token]
                return True
        return False

    def text_of(self, tokens: list[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence, as the tokenizer itself would decode it."""
        # Only the batch call lets other threads run meanwhile.
        [text] = self._backend.decode_batch([tokens], skip_special_tokens=skip_special)
        return str(text)

    def _encode(self, text: str, *, special: bool, budget: TokenBudget | None = None) -> list[int]:
        """Return the token ids of a text.  Raises Refusal, if possible before encoding, when they exceed `budget`."""
        self._check_length(text, budget)
        # `encode` would give the same, but only the batch calls let other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)
        if budget is not None:
            budget.spend(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, budget: TokenBudget | None) -> None:
        """Raise Refusal if a text has too many characters to fit into `budget`, whatever its tokens are."""
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
        """Return the prompt for the text between `prompt` and `suffix`.  Raises Refusal if the model has no such."""
        if self._infill is None:
            raise _unsupported("suffix", "the model's tokenizer has no tokens for text insertion that are known here")
        for text in (prompt, suffix):
            if isinstance(text, str):
                self._check_length(text, budget)
        first = self._encode("", special=True)[: self._added[0]] if special else []
        before = self._encode(prompt, special=False) if isinstance(prompt, str) else prompt
        # Some tokenizers put a blank before each text; the suffix continues one.
        lead, after = self._encode(LEAD, special=False), self._encode(LEAD + suffix, special=False)
        after = after[len(lead) :] if after[: len(lead)] == lead else self._encode(suffix, special=False)
        ids = [*first, *self._infill.prompt(before, after)]
        budget.spend(len(ids))
        return ids

    def end_infill(self, valid: ValidRequest) -> ValidRequest:
        """Return a request whose answer ends where the model marks the end of an inserted text."""
        if not valid.suffix or self._infill is None or valid.sampling.ignore_eos:
            return valid
        ends = list(dict.fromkeys([*valid.sampling.stop_token_ids, *self._infill.ends]))
        return msgspec.structs.replace(valid, sampling=msgspec.structs.replace(valid.sampling, stop_token_ids=ends))

    def _chat_template(self) -> Template:
        """Return the model's chat template.  Raises Refusal if it has none."""
        if not self._hf.chat_template:
            message = "messages: this model has no chat template; use /v1/completions"
            raise Refusal(400, "no_chat_template", message, param="messages")
        return Template(self._template, self._dialect, partial(self._hf.apply_chat_template, tokenize=False))

    def _encode_chat(
        self, messages: list[dict[str, Any]], budget: TokenBudget | None = None, options: ChatOptions | None = None
    ) -> list[int]:
        """Render the chat template in jinja2's sandbox, then encode: the template places special tokens."""
        options = options or ChatOptions()
        for message in messages:  # before anything searches it: no template shortens a content
            if isinstance(text := message.get("content"), str):
                self._check_length(text, budget)
        text, spans = self._render_chat(self._chat_template(), messages, options)
        if self._literal is None or not spans:
            return self._encode(text, special=False, budget=budget)
        self._check_length(text, budget)
        ids = self._literal.encode(text, spans)
        if budget is not None:
            budget.spend(len(ids))
        return ids

    def _render_chat(
        self, template: Template, messages: list[dict[str, Any]], options: ChatOptions
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the spans in which special tokens stay text.  Raises Refusal."""
        self._check_options(options, template)
        variables, _ = variables_of(options, template.dialect, template.reads, thinks=self._has_reasoning)
        messages = with_family_ids(messages, self.responses)
        fitted = _fitted(messages, template)
        given = {"tools": options.tools or None, "documents": options.documents or None, **variables}
        hidden = self._literal.hidden(template.dialect.constants, fitted, given) if self._literal else None

        try:
            text = template.render(
                hidden.messages(fitted) if hidden else fitted,
                add_generation_prompt=options.generation_prompt,
                continue_final_message=options.continue_final,
                **(hidden.value(given) if hidden else given),
            )
        except Exception as error:  # whatever a template raises is caused by these messages
            raise refused(
                error, len(messages), lambda first: template.render(_fitted(messages[:first], template), **given)
            ) from None
        return hidden.reveal(text) if hidden else (text, [])

    def _check_options(self, options: ChatOptions, template: Template) -> None:
        """Raise Refusal for what the chat template does not know, or the model's answers cannot keep."""
        if options.tools and not template.dialect.tools:
            raise _unsupported("tools", "the model's chat template knows no tools")
        if options.tools and (self.responses is None or not self.responses.has_calls):
            raise _unsupported("tools", "no response template is known for this model, so its calls cannot be read")
        if options.demanded and self.call_form is None:
            raise _unsupported("tool_choice", f"{NO_FORM}, so only 'none' and 'auto' are served")
        if options.strict and not options.demanded and (self.call_form is None or not self.call_form.marker):
            raise _unsupported(options.strict, f"{NO_FORM}, so arguments are not held to their schema")
        if options.documents and not template.reads("documents"):
            raise _unsupported("documents", "the model's chat template does not read them")

    @property
    def _has_reasoning(self) -> bool:
        return self.responses is not None and self.responses.has_reasoning

    def unread(self, valid: ValidRequest) -> tuple[str, ...]:
        """Return fields of a chat that its template does not read, so that they change nothing."""
        if not valid.chat:
            return ()
        names = names_in(self._template)
        return variables_of(valid.options, self._dialect, names.__contains__, thinks=self._has_reasoning)[1]

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model, and calls in its answers can be read."""
        return self._dialect.tools and self.responses is not None and self.responses.has_calls

    @cached_property
    def call_form(self) -> CallForm | None:
        """How this model writes tool calls; None if its chat template does not show it.  Found out at the first use."""
        if self.responses is None or not self.knows_tools:
            return None
        added = self._backend.get_added_tokens_decoder().values()
        ends = frozenset(one.content for one in added if one.special and not self.responses.has_marker(one.content))
        render = partial(self._hf.apply_chat_template, tokenize=False)
        return form_of(render, self._dialect, self._template, self.responses, ends)

    def constraint(self, valid: ValidRequest, reading: Reading | None) -> Constraint | None:
        """Return what the answer must match, tool calls included; None: anything.  Raises Refusal."""
        return constraint_of(valid, reading, Model(self.responses, lambda: self.call_form, self._grammar_tokens))

    @cached_property
    def special(self) -> dict[str, int]:
        """Token ids of the special tokens, which are no text."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items() if one.special}

    @cached_property
    def _grammar_tokens(self) -> dict[str, int]:
        """Token ids of the added tokens that a grammar names by their id: llguidance takes none of them for text."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: at for at, one in added.items() if one.special or re.fullmatch("<.*>", one.content)}

    def reading(self, valid: ValidRequest, ids: list[int]) -> Reading | None:
        """Return how the answer to a chat is read, whose prompt has the tokens `ids`; None: all of it is content."""
        responses, options = self.responses, valid.options
        if not valid.chat or responses is None or not (responses.has_reasoning or options.tools):
            return None
        opening = None
        for tokens in (TAIL_TOKENS, len(ids)) if options.generation_prompt or options.continue_final else ():
            tail = b"".join(self.bytes_of(ids[-tokens:], skip_special=False)).decode("utf-8", "replace")
            if (opening := responses.opening(tail)) is not None:
                break
        tools = reduced(options.tools) if responses.casts else []
        return Reading(opening or "", calls=bool(options.tools), tools=tools, parallel=options.parallel)

    def reading_of_all(self, valid: ValidRequest, prompts: list[list[int]]) -> Reading | None:
        """Return `reading` of several prompts.  Raises Refusal if they differ in how their answers are read."""
        reading = self.reading(valid, prompts[0])
        for at, ids in enumerate(prompts[1:] if valid.chat else (), 1):
            if self.reading(valid, ids) != reading:
                name = f"messages[{at}]"
                message = f"{name}: its answer would begin otherwise than that of messages[0], such as within reasoning"
                raise bad_request("unsupported", message, name)
        return reading

    async def offload(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a part of the work on a request whose body has `size` bytes: here when it is short, else on a thread.

        The tokenizer lets the event loop run meanwhile.  Python code on the thread lets it run every few
        milliseconds."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        pool = self._pool if size <= LONG_BYTES else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))

    def _encode_one(self, valid: ValidRequest, at: int, budget: TokenBudget) -> list[int]:
        """Return the token ids of one of the chats of a request.  Raises Refusal."""
        if not valid.conversations:
            return self._encode_chat(valid.messages, budget, valid.options)
        messages = valid.conversations[at - 1] if at else valid.messages
        try:
            return self._encode_chat(messages, budget, valid.options)
        except Refusal as refusal:
            raise renamed(refusal, (("messages", f"messages[{at}]"),)) from None

    def _encode_scored(self, valid: ValidRequest, scoring: Scoring, budget: TokenBudget) -> list[list[int]]:
        """Return the token ids of a query with each item.  Raises Refusal."""

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
            encoded = await self.offload(INLINE_BYTES + 1 if size is None else size, work)
        if (keep := valid.truncate_prompt_tokens) is not None:
            if keep == -1:
                keep = max(1, longest - max(1, valid.max_tokens or 0))
            encoded = [ids[:keep] if valid.keep_first else ids[-keep:] for ids in encoded]
        return encoded

    async def tokenize(self, prompt: str, *, special: bool, size: int, total: int) -> list[int]:
        """Return the token ids of a text for POST /tokenize.  Raises Refusal like `encode`."""
        budget = TokenBudget(None, UNLIMITED, total)
        return await self.offload(size, self._encode, prompt, special=special, budget=budget)

    async def tokenize_chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, *, size: int, total: int
    ) -> list[int]:
        """Return the token ids of a chat for POST /tokenize, as a request has them.  Raises Refusal like `encode`."""
        budget = TokenBudget(None, UNLIMITED, total)
        return await self.offload(size, self._encode_chat, messages, budget, options)

    def forbid(self, valid: ValidRequest) -> ValidRequest:
        """Return a request whose sampling never completes its `bad_words`, with and without a blank before each.

        A token that is a word gets a bias, which engines of every release honour.  Raises Refusal for too many tokens
        of longer words."""
        if not valid.bad_words:
            return valid
        spellings: dict[tuple[int, ...], None] = {}  # each once, in order
        for word in valid.bad_words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                spellings[tuple(self._encode(text, special=False))] = None
        never = {ids[0] for ids in spellings if len(ids) == 1}
        longer = [list(ids) for ids in spellings if len(ids) > 1 and never.isdisjoint(ids)]
        if (count := sum(map(len, longer))) > WORD_TOKENS:
            message = f"bad_words: at most {WORD_TOKENS} tokens of all words, with and without a blank, got {count}"
            raise limit_refusal("bad_words tokens", message, WORD_TOKENS, param="bad_words", given=count)
        bias = [(token, added) for token, added in valid.sampling.logit_bias if token not in never]
        bias += [(token, -math.inf) for token in sorted(never)]
        sampling = msgspec.structs.replace(valid.sampling, logit_bias=bias, bad_words=longer)
        return msgspec.structs.replace(valid, sampling=sampling, bad_words=())

    def token_strs(self, ids: list[int]) -> list[str]:
        """Return tokens as the vocabulary writes them; "" for ids without a token."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def info(self) -> dict[str, object]:
        """Return what clients may want to know of the tokenizer, named as in `tokenizer_config.json`."""
        hf = self._hf
        special = {name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)}
        return {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": len(self.table),
            "chat_template": hf.chat_template,
            **special,
        }

    def prompted(self, valid: ValidRequest, encoded: list[list[int]]) -> list[Prompted]:
        """Return the prompts as the answer shows them; text and offsets only if `echo` needs them."""
        if not valid.echo:
            return [Prompted(ids) for ids in encoded]
        prompted = []
        for prompt, ids in zip(valid.prompts, encoded, strict=True):
            untouched = isinstance(prompt, str) and valid.truncate_prompt_tokens is None
            text = str(prompt) if untouched else self.text_of(ids, skip_special=valid.skip_special)
            offsets: list[int] = []
            if valid.sampling.logprobs >= 0:
                # A client's own text shows the special tokens that it holds, but not those that the tokenizer added.
                hide = valid.skip_special and not untouched
                pieces = self.bytes_of(ids, skip_special=hide)
                if self.spaced:
                    self.write_first(pieces, ids, skip_special=hide)
                for at in self._added_to(ids) if untouched and valid.special else ():
                    pieces[at] = b""
                echoed, offsets = aligned(text, pieces)
                if untouched and echoed != text:  # the tokenizer has changed the text, and knows where its tokens begin
                    (encoding,) = self._backend.encode_batch([text])
                    offsets = list(accumulate((start for start, _ in encoding.offsets), max))
                else:
                    text = echoed
            prompted.append(Prompted(ids, text, offsets))
        return prompted

    def _added_to(self, ids: list[int]) -> Iterator[int]:
        """Yield the positions of the tokens that the tokenizer added to a text."""
        first, last = self._added
        yield from range(min(first, len(ids)))
        yield from range(max(first, len(ids) - last), len(ids))


def _fitted(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Return messages as the template renders them.  Raises Refusal."""
    return [message for message, _ in for_template(messages, template.dialect, template.text)]


def _unsupported(field: str, reason: str) -> Refusal:
    return Refusal(400, "unsupported", f"{field}: {reason}", param=field)


def served_name(model: str) -> str:
    """Return the default name of a model for clients: a directory's own name, or the hub name."""
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def served_names(config: GatewayConfig) -> list[str]:
    """Return the names of the model for clients, at least one; answers carry the first."""
    given = [name.strip() for name in config.served_name.split(",")]
    return [name for name in given if name] or [served_name(config.model)]
