"""The bytes of each token of a vocabulary, and which tokens are text.

For byte-level BPE (GPT-2, Llama 3, Qwen, OPT, GPT-NeoX) and SentencePiece-style vocabularies (Llama 2, Mistral, Phi-3,
Gemma), one table has the bytes of each token.  Vocabularies of words (WordPiece, WordLevel) need a second table: a
token is decoded with a space before it, but without one if it is the first of a text.  Any other tokenizer is refused
at start.
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

# Unicode composition (NFC) joins at most this many characters into one; U+1F82, for example, decomposes into four.
COMPOSED_CHARS = 4
# Normalizers and pre-tokenizers that drop no character, except in cases that `longest_token` tests.
KEEP_TEXT = ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "ByteLevel", "Metaspace", "Split", "Digits")


class ModelError(OperatorError):
    """The model's tokenizer cannot be loaded or used.  The message is one line with what to do."""


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the types in a `tokenizers` decoder, sequences flattened."""
    if decoder is None:
        return set()
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", [described])
    return {part["type"] for part in parts}


def word_bytes(backend: Any) -> tuple[list[bytes], list[bytes]] | None:
    """Return two tables for a vocabulary of words: bytes of each token id after other tokens, and at a text's start.

    None for another kind of vocabulary.  Each token is decoded by the tokenizer, alone and after another token: whether
    the tokenizer removes the space (before punctuation) depends only on the token itself."""
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
    """Return the bytes of each token id of a `tokenizers.Tokenizer`; b"" for unused ids.  Raises ModelError."""
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
    """Return the maximum number of characters of a text that one token can encode; None if there is no maximum.

    Byte-level and SentencePiece-style vocabularies with a token for every byte have a maximum, unless the tokenizer
    first drops characters or shortens the text.  It is computed in bytes, since a token has at most as many characters
    as bytes."""
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
        # `table`: bytes of each token.  `_first`: bytes of each token at a text's start, for a vocabulary of words.
        self.table, self._first = word_bytes(backend) or (vocabulary_bytes(backend), [])
        self._visible = list(self.table)  # `table` with b"" for special tokens
        self._special = {token for token, one in backend.get_added_tokens_decoder().items() if one.special}
        for token in self._special:
            self._visible[token] = b""
        self._markers: set[int] = set()  # special tokens that are markers of the response template
        self._marked = self._visible

    def keep_markers(self, responses: ResponseTemplate) -> None:
        """Register the special tokens that are markers of the response template, for the parameter `markers`."""
        added = self._backend.get_added_tokens_decoder()
        kept = {token for token, one in added.items() if responses.has_marker(one.content)}
        self._markers = kept
        self._marked = [self.table[at] if at in kept else shown for at, shown in enumerate(self._visible)]

    @cached_property
    def special(self) -> dict[str, int]:
        """Special tokens: text -> token id."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items() if one.special}

    @cached_property
    def grammar_tokens(self) -> dict[str, int]:
        """Added tokens that a grammar must name by id, since llguidance does not match them as text: text -> id."""
        added = self._backend.get_added_tokens_decoder()
        return {one.content: at for at, one in added.items() if one.special or re.fullmatch("<.*>", one.content)}

    def bytes_of(self, tokens: Iterable[int], *, skip_special: bool, markers: bool = False) -> list[bytes]:
        """Return the bytes of each token; b"" for ids of the model that its tokenizer lacks.

        `markers`: do not skip special tokens that are markers of the response template."""
        table = (self._marked if markers else self._visible) if skip_special else self.table
        try:
            return [table[token] for token in tokens]
        except IndexError:
            return [table[token] if token < len(table) else b"" for token in tokens]

    @property
    def spaced(self) -> bool:
        """Whether tokens are decoded with a space between them, as in WordPiece vocabularies."""
        return bool(self._first)

    def write_first(self, pieces: list[bytes], tokens: list[int], *, skip_special: bool, markers: bool = False) -> bool:
        """Remove the space before the first token with text, in place.  Returns False if no token has text.

        Only for a vocabulary that is `spaced`.  `pieces`: result of `bytes_of` for the same other arguments."""
        hidden = self._special - self._markers if markers else self._special
        for at, token in enumerate(tokens):
            if token < len(self._first) and self._first[token] and not (skip_special and token in hidden):
                pieces[at] = self._first[token]
                return True
        return False

    def token_strs(self, ids: list[int]) -> list[str]:
        """Return the tokens' strings in the vocabulary; "" for unknown ids."""
        return [self._backend.id_to_token(token) or "" for token in ids]
