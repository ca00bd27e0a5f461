"""End-of-sequence (EOS) tokens of a loaded model: which files name them, and which of them the model can sample."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models.overrides import OPTION
from quire.engine.tokenizers.ends import end_token

log = logging.getLogger(__name__)


def eos_ids(
    module: PreTrainedModel, directory: Path, vocab_size: int, changes: dict[str, Any] | None = None
) -> list[int]:
    """Return the EOS tokens, each once: those of generation_config.json, else of config.json, and the tokenizer's own.

    vocab_size: logits per position.  A larger token id in a file can never be sampled, so it is dropped with a log
    line.  Fine-tunes that add a token without resizing the model have such ids. changes: the operator's overrides;
    their eos_token_id replaces that of both files.  Raises ModelLoadError for a value that is no token id, and for an
    operator's token outside the vocabulary."""
    changes, end = changes or {}, end_token(directory)
    own = within([] if end is None else [end], vocab_size, directory)
    for place in (changes.get("text_config") or {}, changes):
        if "eos_token_id" in place:
            ids = within(listed(place["eos_token_id"], OPTION), vocab_size, directory, refuse=True)
            return list(dict.fromkeys([*ids, *own]))
    generation = getattr(module.generation_config, "eos_token_id", None)
    named = generation if generation is not None else getattr(module.config.get_text_config(), "eos_token_id", None)
    file = directory / "generation_config.json"  # the config class has checked config.json
    return list(dict.fromkeys([*within(listed(named, str(file)), vocab_size, directory), *own]))


def listed(named: Any, origin: str) -> list[int]:
    """Return a field `eos_token_id` as a list.  Raises ModelLoadError if it is neither a token id nor a list."""
    ids = list(named) if isinstance(named, list | tuple) else [] if named is None else [named]
    if odd := [each for each in ids if type(each) is not int]:
        raise ModelLoadError(f"{origin}: eos_token_id holds {odd[0]!r}; it must be a token's number, or a list of them")
    return ids


def within(ids: list[int], vocab_size: int, directory: Path, *, refuse: bool = False) -> list[int]:
    """Return the ids that the model can sample, each once.  Logs the others, or raises ModelLoadError (`refuse`)."""
    if outside := sorted({token for token in ids if not 0 <= token < vocab_size}):
        if refuse:
            bound = f"the model's token ids are 0 to {vocab_size - 1}"
            raise ModelLoadError(f"{OPTION}: eos_token_id holds {outside[0]}; {bound}")
        message = "%s names EOS tokens %s, but the model's token ids are 0 to %d: dropped, no answer ends by them"
        log.warning(message, directory, ", ".join(map(str, outside)), vocab_size - 1)
    return list(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))
