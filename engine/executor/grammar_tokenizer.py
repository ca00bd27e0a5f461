"""The tokenizer that llguidance reads: no text of a grammar becomes a special token.

llguidance encodes text that a grammar forces.  The encoder finds added tokens such as `<think>` in it first, and
llguidance reads most of them as special tokens, which match no text: a request for the literal text "<think>" would
fail.  Here these tokens have other names, which no text contains.  Their ids stay, and grammars of Quire name special
tokens by id only.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

import llguidance
import msgspec

log = logging.getLogger(__name__)


def grammar_tokenizer(file: Path, vocab_size: int, eos_ids: list[int], slices: list[str]) -> llguidance.LLTokenizer:
    """Return the tokenizer of a tokenizer.json.  Raises whatever llguidance does for an unknown kind of file."""

    def read(text: str) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids, slices=slices)

    try:
        renamed, ids = _renamed(msgspec.json.decode(file.read_bytes()))
        found = read(msgspec.json.encode(renamed).decode())
        if all(found.tokenize_str(name) == [token] for name, token in ids.items()):
            return found
    except Exception:  # a model that needs one of the names
        log.debug("special tokens keep their names in grammars", exc_info=True)
    return read(str(file))  # only literal texts that name a special token fail


def _renamed(tokenizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a tokenizer.json whose special tokens have names that cannot be guessed, and new name -> token id."""
    secret = secrets.token_hex(8)
    stored = tokenizer.get("added_tokens") or ()
    names = {one["content"]: f"<{secret}-{one['id']}>" for one in stored if _special(one)}
    added = [{**one, "content": names.get(one["content"], one["content"])} for one in stored]
    model = dict(tokenizer["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): at for text, at in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # Unigram: pairs of text and score
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    ids = {one["content"]: one["id"] for one in added if one["content"] in names.values()}
    return {**tokenizer, "added_tokens": added, "model": model}, ids


def _special(added: dict[str, Any]) -> bool:
    """Return whether llguidance reads an added token as special."""
    content: str = added["content"]
    return bool(added.get("special")) or (content.startswith("<") and content.endswith(">"))
