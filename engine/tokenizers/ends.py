"""Finds the token that a checkpoint's tokenizer calls its end, without making the tokenizer.  No torch.

    its name    eos_token of tokenizer_config.json, else of special_tokens_map.json
    its number  where that name is: added_tokens_decoder of tokenizer_config.json, tokenizer.json, added_tokens.json,
                vocab.json, vocab.txt, a SentencePiece model
    no name     eos_id of the SentencePiece model, if it is the tokenizer's only file

Files that are absent or broken say nothing here.  The gateway, which needs them, refuses broken ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.engine.tokenizers.alphabet import token_number
from quire.engine.tokenizers.conversion import is_tiktoken
from quire.engine.tokenizers.files import CONVERTED_FILES, READ_FILES, read_json


def end_token(directory: Path) -> int | None:
    """Return the number of the token; None where the files don't say it."""
    described = read_json(str(directory / "tokenizer_config.json"))
    name = text_of(described.get("eos_token"))
    if name is None:
        name = text_of(read_json(str(directory / "special_tokens_map.json")).get("eos_token"))
    if name is not None:
        found = (ids.get(name) for ids in vocabularies(directory, described))
        return next((number for number in found if type(number) is int), None)
    if any((directory / file).is_file() for file in READ_FILES):
        return None
    pieces, end = read_pieces(directory)
    return end if 0 <= end < len(pieces) else None


def text_of(token: Any) -> str | None:
    """Return the text of a token, which files write as itself or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def vocabularies(directory: Path, described: dict[str, Any]) -> Iterator[dict[Any, Any]]:
    """Yield token to number, of one file after another.  described: tokenizer_config.json."""
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
    elif isinstance(known, list):  # of a unigram model: pieces and their scores
        yield {text_of(entry[0]): at for at, entry in enumerate(known) if isinstance(entry, list) and entry}
    yield read_json(str(directory / "added_tokens.json"))
    yield read_json(str(directory / "vocab.json"))
    try:
        lines = (directory / "vocab.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        lines = []
    yield {line: at for at, line in enumerate(lines)}
    yield {text: at for at, text in enumerate(read_pieces(directory)[0])}


def read_pieces(directory: Path) -> tuple[list[str], int]:
    """Return the pieces of a directory's SentencePiece model, by number, and its eos_id.  Without one: none, and -1."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    file = next((directory / name for name in CONVERTED_FILES if (directory / name).is_file()), None)
    model = sentencepiece_model_pb2.ModelProto()
    try:
        content = file.read_bytes() if file else b""
        if not content or is_tiktoken(content):
            return [], -1
        model.ParseFromString(content)
    except (OSError, DecodeError):
        return [], -1
    return [piece.piece for piece in model.pieces], int(model.trainer_spec.eos_id)
