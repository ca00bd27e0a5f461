"""`quire convert-tokenizer DIR`: creates the tokenizer.json of a checkpoint with only a SentencePiece or tiktoken file.

    tokenizer.model ── conversion.py, verified ──> tokenizer.json of a copy ── loaded by a server: equal ids? ──> DIR

The server reads only tokenizer.json, so that it needs neither sentencepiece nor tiktoken.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine.common.errors import OperatorError
from quire.engine.tokenizers import conversion
from quire.engine.tokenizers.conversion import LEADING, SAMPLES, Unconverted
from quire.engine.tokenizers.files import (
    ADVICE,
    CONFIG,
    CONVERTED_FILES,
    READ_FILES,
    TokenizerError,
    load_tokenizer,
    read_json,
)

NAME = "quire convert-tokenizer"
USAGE = f"""usage: {NAME} DIR

Makes DIR/tokenizer.json of a checkpoint that has only a SentencePiece model or Llama 3's tiktoken file: BPE models with
tokens for bytes, as those of Llama, Mistral and Gemma.  The libraries of the formats prove the result on samples
(pip install 'quire[convert]').  Weights and other files stay as they are."""
SPECIAL_TOKENS = "special_tokens_map.json"


class CannotConvert(OperatorError):
    """The tokenizer of a checkpoint cannot be converted; the text is one line for the operator."""


def convert_directory(directory: Path) -> Path:
    """Write the tokenizer.json of a checkpoint and return its path.  Writes nothing if it raises OperatorError."""
    if not directory.is_dir():
        raise CannotConvert(f"{directory} is no directory: download the checkpoint first")
    if there := next((name for name in READ_FILES if (directory / name).is_file()), ""):
        raise CannotConvert(f"{directory} has a {there} already, which servers read")
    name = next((name for name in CONVERTED_FILES if (directory / name).is_file()), "")
    if not name:
        raise CannotConvert(f"{directory} has none of {', '.join(CONVERTED_FILES)}")
    described = read_json(str(directory / CONFIG))
    family = str(read_json(str(directory / "config.json")).get("model_type"))
    try:
        backend = conversion.convert(directory / name, described, family)
        made = conversion.with_config(str(directory), backend, described)
        files = {"tokenizer.json": made.backend_tokenizer.to_str(pretty=True), **end_named(directory, name, described)}
        check(directory, files, made)
    except Unconverted as error:
        raise CannotConvert(f"{directory}: its tokenizer is {name}: {error}; {ADVICE}") from None
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise CannotConvert(f"needs the package {missing}: pip install 'quire[convert]'") from None
    for file, text in sorted(files.items()):  # tokenizer.json last, so that it exists only if all files do
        whole = directory / f".{file}.part"
        whole.write_text(text, encoding="utf-8")
        whole.replace(directory / file)
    return directory / "tokenizer.json"


def end_named(directory: Path, vocabulary: str, described: dict[str, Any]) -> dict[str, str]:
    """Return special_tokens_map.json with the EOS token of a SentencePiece model; empty if a file names it already."""
    special = read_json(str(directory / SPECIAL_TOKENS))
    if described.get("eos_token") or special.get("eos_token"):
        return {}
    end = conversion.end_piece((directory / vocabulary).read_bytes())
    return {SPECIAL_TOKENS: json.dumps(special | {"eos_token": end}, indent=1) + "\n"} if end else {}


def check(directory: Path, files: dict[str, str], made: Any) -> None:
    """Raise Unconverted unless a server's tokenizer for these files gives the same ids and texts as `made`."""
    with tempfile.TemporaryDirectory() as scratch:
        for path in directory.glob("*.json"):
            (Path(scratch) / path.name).symlink_to(path.absolute())
        for name, text in files.items():
            (Path(scratch) / name).unlink(missing_ok=True)
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        try:
            read = load_tokenizer(scratch)
        except TokenizerError as error:
            raise Unconverted(f"its tokenizer.json would not be read: {str(error).replace(scratch, 'it')}") from None
        for text in (*SAMPLES, LEADING):
            ids = made.encode(text)
            if read.encode(text) != ids or read.decode(ids) != made.decode(ids):
                raise Unconverted(f"its tokenizer.json would give {text[:40]!r} other tokens, or another text")


def main(words: Sequence[str]) -> int:
    """Run the command.  Returns the exit status: 2, with one line on stderr, if it cannot convert the tokenizer."""
    if "-h" in words or "--help" in words:
        print(USAGE)
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    logging.getLogger("quire").addHandler(logging.NullHandler())  # `check` reads a copy, whose path says nothing
    try:
        path = convert_directory(Path(words[0]))
    except OperatorError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    print(f"written to {path}; now serve the directory: quire serve {words[0]}")
    return 0
