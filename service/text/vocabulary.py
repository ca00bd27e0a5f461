"""The bytes of each token of a vocabulary, and which tokens are text.

Byte-level BPE (GPT-2, Llama 3, Qwen, OPT, GPT-NeoX) and SentencePiece-style vocabularies (Llama 2, Mistral, Phi-3,
Gemma) have a table of the bytes of each token.  Vocabularies of words (WordPiece, WordLevel) have two: spaces are
between tokens, so the first token of a text has none.  Any other tokenizer is refused at start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from quire.engine.common.errors import OperatorError
from quire.engine.tokenizers.alphabet import byte_level_alphabet
from quire.service.output.regions import ResponseTemplate

# Composition (NFC) joins at most this many characters into one: U+1F82 is four.
COMPOSED_CHARS = 4
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


def longest_token(backend: Any, table: list[bytes]) -> int | None:
    """Return the most characters of a text that one token can stand for; None if there is no such bound.

    Byte-level and SentencePiece-style vocabularies with a token for every byte have a bound, unless the tokenizer drops
    characters or shortens the text first.  The bytes of a token are counted: it never has more characters."""
    model = backend.model
    vocabulary = set(backend.get_vocab(with_added_tokens=False))
    complete = vocabulary >= set(byte_level_alphabet()) or (
        getattr(model, "byte_fallback", False) and vocabulary >= {f"<0x{byte:02X}>" for byte in range(256)}
    )
    added = backend.get_added_tokens_decoder().values()
    if not complete or backend.truncation is not None or any(one.lstrip or one.rstrip for one in added):
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


class Vocabulary:
    """The tokens of a checkpoint: bytes, special tokens, markers of its response template."""

    def __init__(self, backend: Any) -> None:
        """`backend`: a `tokenizers.Tokenizer`.  Raises ModelError."""
        self._backend = backend
        # Bytes of each token; and as the first of a text, if that is written in another way.
        self.table, self._first = word_bytes(backend) or (vocabulary_bytes(backend), [])
        self._visible = list(self.table)  # the same, with no bytes for special tokens
        self._special = {token for token, one in backend.get_added_tokens_decoder().items() if one.special}
        for token in self._special:
            self._visible[token] = b""
        self._markers: set[int] = set()  # special tokens that a response template looks for
        self._marked = self._visible

    def keep_markers(self, responses: ResponseTemplate) -> None:
        """Let `markers` of other methods keep the tokens that a response template looks for."""
        added = self._backend.get_added_tokens_decoder()
        kept = {token for token, one in added.items() if responses.has_marker(one.content)}
        self._markers = kept
        self._marked = [self.table[at] if at in kept else shown for at, shown in enumerate(self._visible)]

    @cached_property
    def special(self) -> dict[str, int]:
        """Token ids of the special tokens, which are no text."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items() if one.special}

    @cached_property
    def grammar_tokens(self) -> dict[str, int]:
        """Token ids of the added tokens that a grammar names by their id: llguidance takes none of them for text."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: at for at, one in added.items() if one.special or re.fullmatch("<.*>", one.content)}

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
        """Whether spaces are between tokens, so that the first token of a text is written in another way."""
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

    def token_strs(self, ids: list[int]) -> list[str]:
        """Return tokens as the vocabulary writes them; "" for ids without a token."""
        return [self._backend.id_to_token(token) or "" for token in ids]
