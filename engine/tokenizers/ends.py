"""Finds the EOS token id of a checkpoint's tokenizer without loading the tokenizer.  No torch.

    token text  eos_token of tokenizer_config.json, else of special_tokens_map.json
    token id    the first of: added_tokens_decoder of tokenizer_config.json, tokenizer.json, added_tokens.json,
                vocab.json, vocab.txt

Missing and broken files are skipped.  The gateway, which needs these files, refuses broken ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.engine.tokenizers.alphabet import token_number
from quire.engine.tokenizers.files import read_json


def end_token(directory: Path) -> int | None:
    """Return the EOS token id; None if the files do not contain it."""
    described = read_json(str(directory / "tokenizer_config.json"))
    name = text_of(described.get("eos_token"))
    if name is None:
        name = text_of(read_json(str(directory / "special_tokens_map.json")).get("eos_token"))
    if name is None:
        return None
    found = (ids.get(name) for ids in vocabularies(directory, described))
    return next((number for number in found if type(number) is int), None)


def text_of(token: Any) -> str | None:
    """Return the text of a token, which files write as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def vocabularies(directory: Path, described: dict[str, Any]) -> Iterator[dict[Any, Any]]:
    """Iterate over the files' vocabularies, each as token text -> id.  `described`: tokenizer_config.json."""
    declared = described.get("added_tokens_decoder")
    if isinstance(declared, dict):
        yield {text_of(token): token_number(at) for at, token in declared.items() if at.isdecimal()}
    whole = read_json(str(directory / "tokenizer.json"))
    added, model = whole.get("added_tokens"), whole.get("model")
    if isinstance(added, list):
        yield {text_of(token): token.get("id") for token in added if isinstance(token, dict)}
    known = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(known, dict):
        yield known
    elif isinstance(known, list):  # unigram model: list of (token text, score)
        yield {text_of(entry[0]): at for at, entry in enumerate(known) if isinstance(entry, list) and entry}
    yield read_json(str(directory / "added_tokens.json"))
    yield read_json(str(directory / "vocab.json"))
    try:
        lines = (directory / "vocab.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        lines = []
    yield {line: at for at, line in enumerate(lines)}
