"""Loads the tokenizer of a checkpoint, for the gateway and the offline API.  No torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.engine.common.errors import OperatorError
from quire.engine.tokenizers.config_fields import odd_field
from quire.engine.tokenizers.pipeline import difference

log = logging.getLogger(__name__)

READ_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")  # files that transformers reads
# File names of SentencePiece models and tiktoken files in transformers; convert.py converts such files.
CONVERTED_FILES = ("tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
TEKKEN = "tekken.json"
CONFIG = "tokenizer_config.json"
ADVICE = "serve a copy that has a tokenizer.json"


class TokenizerError(OperatorError):
    """The tokenizer of a checkpoint cannot be loaded; the text is one line for the operator."""


def load_tokenizer(source: str) -> Any:
    """Return transformers' tokenizer for a directory or hub name.  Takes seconds, may use the network.

    Its token ids equal those of tokenizer.json, if the checkpoint has one.  Truncation and padding settings of the file
    are ignored, since they are leftovers of calibration or training.  Raises TokenizerError, also if transformers'
    tokenizer would give other ids than the file."""
    here = Path(source).is_dir()
    name = vocabulary_file(source) if here else ""  # not for hub names: a wrong name would cause one request per file
    if name in CONVERTED_FILES:
        raise unconverted(source, name)
    try:
        made = made_by_transformers(source)
    except Exception as error:  # transformers raises a dozen types for a directory that holds no model
        if "trust_remote_code" in str(error):
            message = "its tokenizer needs code from the model's repository, which Quire does not run"
            raise TokenizerError(f"model {source}: {message}") from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unread = unread_file(name) if here else ""
        odd = odd_field(read_json(file_of(source, CONFIG)))
        raise TokenizerError(f"model {source}: {unread or (f'{CONFIG}: {odd}' if odd else reason)}") from None
    name = name or vocabulary_file(source)
    if name in CONVERTED_FILES:
        raise unconverted(source, name)
    if unread := unread_file(name):
        raise TokenizerError(f"model {source}: {unread}")
    if name == "tokenizer.json":
        made = as_in_file(source, made)
    if (backend := getattr(made, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()
    return made


def made_by_transformers(source: str) -> Any:
    """Return the tokenizer that transformers loads.  Raises any exception of transformers."""
    # Imported here because the import takes over a second, and `import service` must be fast.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def as_in_file(source: str, made: Any) -> Any:
    """Return `made` if its token ids equal those of tokenizer.json, else transformers' generic tokenizer for the file.

    The class named in tokenizer_config.json may build another pipeline than tokenizer.json describes.  transformers'
    generic class loads the file unchanged.  Raises TokenizerError if the generic tokenizer differs, too."""
    from transformers import PreTrainedTokenizerFast

    path = file_of(source, "tokenizer.json")
    assert path is not None  # `vocabulary_file` has found it
    own = Backend.from_file(path)
    described = read_json(file_of(source, CONFIG))
    explicit = "add_bos_token" in described or "add_eos_token" in described
    backend = getattr(made, "backend_tokenizer", None)
    if backend is not None and not difference(own, backend, ends=not explicit):
        return made
    generic: Any = PreTrainedTokenizerFast.from_pretrained(source)
    if differs := difference(own, generic.backend_tokenizer, ends=not explicit):
        message = f"transformers' tokenizer has another {differs} than tokenizer.json, so token ids would differ"
        raise TokenizerError(f"model {source}: {message}; correct {CONFIG}")
    if explicit and backend is not None:  # the generic class ignores add_bos_token and add_eos_token
        generic.backend_tokenizer.post_processor = backend.post_processor
    for field, token in made.special_tokens_map.items():  # default tokens of the class, used by chat templates
        if isinstance(token, str) and getattr(generic, field, None) is None and own.token_to_id(token) is not None:
            setattr(generic, field, token)
    message = "%s: transformers' %s builds another tokenizer than tokenizer.json describes: using the file's"
    log.warning(message, source, type(made).__name__)
    return generic


def vocabulary_file(source: str) -> str:
    """Return the name of the tokenizer file of a directory or hub name; "": there is none.  May use the network."""
    known = (*READ_FILES, TEKKEN, *CONVERTED_FILES)
    if found := next((name for name in known if file_of(source, name) is not None), ""):
        return found
    folder = Path(source)
    return min((file.name for file in folder.glob("*.tiktoken")), default="") if folder.is_dir() else ""


def file_of(source: str, name: str) -> str | None:
    """Return the path of a file in a directory or hub repository; None: it does not exist.  May use the network."""
    from transformers.utils import cached_file

    try:
        path: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no network, and the file is not in the cache
        path = None
    return path


def unread_file(name: str) -> str:
    """Return why a tokenizer file is not supported; "": transformers can read it.

    For some unsupported files, transformers would silently create a tokenizer with an empty vocabulary."""
    if name in READ_FILES:
        return ""
    if not name:
        return f"it has no tokenizer file; {ADVICE}"
    if name == TEKKEN:
        return f"its tokenizer is Mistral's tekken.json, which Quire does not read; {ADVICE}"
    return f"its tokenizer is the tiktoken file {name}, which lacks the pre-tokenizer's pattern; {ADVICE}"


def unconverted(source: str, name: str) -> TokenizerError:
    """Return the error for a vocabulary file that `quire convert-tokenizer` can convert to a tokenizer.json."""
    where, first = (source, "") if Path(source).is_dir() else ("DIR", "download it into a directory DIR, then ")
    return TokenizerError(
        f"model {source}: its tokenizer is {name}, which servers do not read: {first}run "
        f"`quire convert-tokenizer {where}`, which makes a tokenizer.json of it"
    )


def read_json(path: str | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty dict if the file is missing or contains no object."""
    try:
        found = json.loads(Path(path).read_bytes()) if path else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
