"""Conversion of tokenizers for `quire convert-tokenizer`: SentencePiece models, and Llama 3's tiktoken file.

    tokenizer.model ─ pieces, scores ──> tokenizers.Tokenizer ─ tokenizer_config.json ─> special tokens, chat template
          └───────── the format's own library encodes and decodes samples ─────────> equal tokens, or refused

transformers 5 orders the merges of a SentencePiece model by id instead of by score, and for some families it drops the
space before the first word.  So Quire converts such files itself.  The result is verified with the format's own
library, sentencepiece (Kudo and Richardson 2018) or tiktoken, on texts of several scripts and on vocabulary tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.engine.tokenizers.alphabet import MAX_TOKENS, byte_level_alphabet, token_number

BLANK = "\u2581"  # SentencePiece's replacement for a space in its pieces
# Tokenizer classes whose token ids equal the indices of the pieces in the file; other classes move the ids.
PLAIN_CLASSES = ("LlamaTokenizer", "LLaMATokenizer", "GemmaTokenizer")
# Llama 3's pre-tokenizer pattern, from the published tokenizer.json of its checkpoints.  A tiktoken file does not
# contain the pattern.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = (
    "The quick brown fox doesn't jump; we'll see.",
    "double  and   triple blanks,\ttabs\n\n  and lines \n",
    "0 12 345 6789 3.14159 1,000,000 0x1F",
    "naïve café, Übergröße, žluťoučký kůň, Ελληνικά, Русский, עברית, العربية, हिन्दी, ไทย",
    "日本語のテキスト。한국어 문장, 中文。",
    "🙂🙃 👩‍👩‍👧 \ufb01 a\u0301 \u00a0 \uff21 \u200b",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}  # <tag/> && ||",
    "a",
)
LEADING = "  leading blanks"
DRAWN, DRAWN_IN_A_TEXT = 2000, 40  # vocabulary tokens that verify a conversion, and tokens per sample text


class Unconverted(Exception):
    """A vocabulary file cannot be converted; the text is the reason, for the operator."""


class Pieces(NamedTuple):
    """The pieces of a SentencePiece model, indexed by token id."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]  # ModelProto.SentencePiece.Type
    prefix: bool  # whether a space is added before the first word


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)


def convert(vocabulary: Path, described: dict[str, Any], family: str) -> Backend:
    """Return the tokenizer for a vocabulary file, without a post-processor that adds tokens around a text.

    described  content of tokenizer_config.json
    family     model type of the checkpoint

    Raises Unconverted."""
    if "add_bos_token" not in described:
        raise Unconverted("its tokenizer_config.json does not say add_bos_token: whether a text begins with a token")
    content = vocabulary.read_bytes()
    if is_tiktoken(content):
        backend = convert_tiktoken(content, described, family)
    else:
        backend = convert_sentencepiece(content, described)
    add_declared(backend, described)
    return backend


def is_tiktoken(content: bytes) -> bool:
    """Return whether a file is in tiktoken's format: its first line is a base64 token and a merge rank."""
    parts = content.split(b"\n", 1)[0].split()
    try:
        return len(parts) == 2 and parts[1].isdigit() and bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False


# ------------------------------------------------------------------------------------------------------- SentencePiece


def convert_sentencepiece(content: bytes, described: dict[str, Any]) -> Backend:
    """Return the verified tokenizer of a SentencePiece model.  Raises Unconverted."""
    from sentencepiece import SentencePieceProcessor

    check_class(described)
    model = read_model(content)
    if described.get("add_prefix_space") is False:
        model.normalizer_spec.add_dummy_prefix = False
    found = Pieces(
        [piece.piece for piece in model.pieces],
        [piece.score for piece in model.pieces],
        [piece.type for piece in model.pieces],
        model.normalizer_spec.add_dummy_prefix,
    )
    # User-defined symbols end a segment, too, but SentencePiece adds no space after them.
    every_segment = described.get("legacy") is not False and USER_DEFINED not in found.kinds
    backend = from_pieces(found, every_segment=every_segment)
    library = SentencePieceProcessor()
    library.LoadFromSerializedProto(model.SerializeToString())
    samples = [*SAMPLES, *drawn(found)]
    if every_segment or not found.prefix:
        samples.append(LEADING)
    prove(backend, samples, library.encode, library.decode)
    return backend


def end_piece(content: bytes) -> str | None:
    """Return the EOS token of a SentencePiece model; None if it has none, or the file is a tiktoken file."""
    if is_tiktoken(content):
        return None
    model = read_model(content)
    at = int(model.trainer_spec.eos_id)
    return str(model.pieces[at].piece) if 0 <= at < len(model.pieces) else None


def check_class(described: dict[str, Any]) -> None:
    """Raise Unconverted unless tokenizer_config.json names one of PLAIN_CLASSES."""
    name = str(described.get("tokenizer_class") or "none")
    if name.removesuffix("Fast") not in PLAIN_CLASSES:
        known = ", ".join(PLAIN_CLASSES)
        raise Unconverted(f"its tokenizer_config.json names tokenizer_class {name}; only {known} are converted")


def read_model(content: bytes) -> Any:
    """Return the ModelProto of a SentencePiece file.  Raises Unconverted for unsupported kinds of models."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        raise Unconverted("it is neither a SentencePiece model nor a tiktoken file") from None
    training, text = model.trainer_spec, model.normalizer_spec
    reasons = {
        "it has no pieces": not model.pieces,
        "it is no BPE model": training.model_type != training.BPE,
        "it has no tokens for bytes (byte_fallback)": not training.byte_fallback,
        f"it changes texts first ({text.name or 'a normalisation of its own'})": bool(text.precompiled_charsmap),
        "it removes spaces": text.remove_extra_whitespaces,
        "it does not replace spaces by U+2581": not text.escape_whitespaces,
        "it puts the space after a word instead of before it": training.treat_whitespace_as_suffix,
        "it has unused pieces": any(piece.type == UNUSED for piece in model.pieces),
    }
    if odd := next((reason for reason, holds in reasons.items() if holds), ""):
        raise Unconverted(odd)
    return model


def from_pieces(found: Pieces, *, every_segment: bool) -> Backend:
    """Return the tokenizer for the pieces of a BPE model.

    `every_segment`: a space is added before every segment between special tokens, not only before the first one."""
    unknown = found.kinds.index(UNKNOWN) if UNKNOWN in found.kinds else None
    backend = Backend(
        models.BPE(
            {text: at for at, text in enumerate(found.texts)},
            merges_of(found),
            unk_token=None if unknown is None else found.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if found.prefix and not every_segment:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", split=False)
    else:
        before = [normalizers.Prepend(BLANK)] if found.prefix else []
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", BLANK)])
    after = [decoders.Strip(" ", 1, 0)] if found.prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    for text, kind in zip(found.texts, found.kinds, strict=True):
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == USER_DEFINED:  # pieces with U+2581 match only after normalisation
            backend.add_tokens([AddedToken(text, special=False, normalized=BLANK in text)])
    return backend


def merges_of(found: Pieces) -> list[tuple[str, str]]:
    """Return the BPE merges, best score first.

    SentencePiece merges by score; `models.BPE` merges by the order of this list."""
    ids = {text: at for at, text in enumerate(found.texts) if found.kinds[at] in (NORMAL, USER_DEFINED)}
    pairs = []
    for text, at in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                pairs.append((-found.scores[at], left, right))
    return [(found.texts[left], found.texts[right]) for _, left, right in sorted(pairs)]


def drawn(found: Pieces) -> Iterator[str]:
    """Iterate over sample texts made of pieces from the complete vocabulary and of user-defined symbols."""
    normal = [text.replace(BLANK, " ") for text, kind in zip(found.texts, found.kinds, strict=True) if kind == NORMAL]
    chosen = normal[:: max(1, len(normal) // DRAWN)]
    for start in range(0, len(chosen), DRAWN_IN_A_TEXT):
        yield "".join(chosen[start : start + DRAWN_IN_A_TEXT]).lstrip(" ")
    for text, kind in zip(found.texts, found.kinds, strict=True):
        if kind == USER_DEFINED:
            yield f"a{text.replace(BLANK, ' ')}b"


# ------------------------------------------------------------------------------------------------------------ tiktoken


def convert_tiktoken(content: bytes, described: dict[str, Any], family: str) -> Backend:
    """Return the verified tokenizer of a tiktoken file.  Raises Unconverted.

    A word that equals a token becomes this token; other words are merged by BPE in the order of the file's merge
    ranks."""
    import tiktoken

    if family != "llama":
        raise Unconverted(f"a tiktoken file lacks the pre-tokenizer's pattern, known for Llama 3, not for {family}")
    if not described.get("added_tokens_decoder"):
        raise Unconverted("its tokenizer_config.json has no added_tokens_decoder: special tokens are not in the file")
    ranks = read_ranks(content)
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                pairs.append((rank, ranks[left], ranks[right], left, right))
    merges = [(names[left], names[right]) for *_, left, right in sorted(pairs)]
    backend = Backend(models.BPE({names[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    library = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    words = [token.decode("utf-8", "ignore") for token in ranks]
    chosen = words[:: max(1, len(words) // DRAWN)]
    texts = ["".join(chosen[at : at + DRAWN_IN_A_TEXT]) for at in range(0, len(chosen), DRAWN_IN_A_TEXT)]
    prove(backend, [*SAMPLES, LEADING, *texts], library.encode_ordinary, library.decode)
    return backend


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Return token -> rank of a tiktoken file.  Raises Unconverted for a broken file."""
    try:
        lines = [line.split() for line in content.splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        raise Unconverted("it has a line that is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise Unconverted("its ranks are not 0, 1, 2 ..., or it has no token for some byte")
    return ranks


# ---------------------------------------------------------------------------------------------------------------- both


def prove(
    backend: Backend, texts: list[str], encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> None:
    """Raise Unconverted unless the tokenizer and the format's library give equal tokens and texts for all samples."""
    for text in texts:
        wanted = encode(text)
        ids = backend.encode(text, add_special_tokens=False).ids
        if ids != wanted:
            raise Unconverted(f"its conversion would give {text[:40]!r} other tokens than the library of the format")
        if backend.decode(ids, skip_special_tokens=False) != decode(wanted):
            raise Unconverted(f"its conversion would write the tokens of {text[:40]!r} in another way")


def declared_tokens(described: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return id -> token of tokenizer_config.json's added_tokens_decoder.  Raises Unconverted for invalid entries."""
    place = "its tokenizer_config.json: added_tokens_decoder"
    declared = described.get("added_tokens_decoder")
    if declared is None:
        return {}
    if not isinstance(declared, dict):
        raise Unconverted(f"{place} is {declared!r}; it must be an object")
    for at, token in declared.items():
        if not (at.isascii() and at.isdecimal()):
            raise Unconverted(f"{place} names a token {at!r}; its name must be a number")
        if token_number(at) is None:
            shown = at if len(at) <= 20 else f"{at[:20]}..."
            raise Unconverted(f"{place} names the token {shown}; token ids must be below {MAX_TOKENS:,}")
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise Unconverted(f"{place} has a token {at} without content")
    return {int(at): token for at, token in declared.items()}


def add_declared(backend: Backend, described: dict[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json declares.  Raises Unconverted if other tokens have their ids."""
    declared = declared_tokens(described)
    added = []
    for at in range(backend.get_vocab_size(), max(declared, default=0) + 1):
        token = declared.get(at, {"content": f"<|unnamed_{at}|>", "special": True})
        flags = {name: bool(token.get(name)) for name in ("special", "single_word", "lstrip", "rstrip")}
        added.append(AddedToken(token["content"], normalized=False, **flags))
    backend.add_tokens(added)  # one call, because each call rebuilds the matcher for all added tokens
    for at, token in declared.items():
        if backend.token_to_id(token["content"]) != at:
            found = backend.id_to_token(at)
            raise Unconverted(f"its tokenizer_config.json calls token {at} {token['content']!r}, the file {found!r}")
        if token.get("special"):  # includes pieces that are not control symbols in the vocabulary file
            backend.add_special_tokens([AddedToken(token["content"], normalized=False, special=True)])


def with_config(source: str, backend: Backend, described: dict[str, Any]) -> Any:
    """Wrap a converted tokenizer in transformers' class, with the chat template and other settings of the checkpoint.

    Raises Unconverted if the settings name special tokens that the vocabulary lacks."""
    from transformers import PreTrainedTokenizerFast

    class ConvertedTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]  # its stubs are not read
        """A tokenizer for which transformers does not read the vocabulary file."""

        @classmethod
        def convert_to_native_format(cls, **given: Any) -> dict[str, Any]:
            """Use the converted tokenizer instead of any vocabulary file."""
            return given | {"tokenizer_object": backend, "tokenizer_file": None, "vocab_file": None}

    made = ConvertedTokenizer.from_pretrained(source, trust_remote_code=False)
    lacking = set(made.get_vocab()) - set(backend.get_vocab())
    if lacking:
        raise Unconverted(f"its configuration names the token {min(lacking)!r}, which is not in the file")
    for end in ("bos", "eos"):
        if described.get(f"add_{end}_token") and getattr(made, f"{end}_token_id") is None:
            raise Unconverted(f"its tokenizer_config.json says add_{end}_token, and no {end}_token is named")
    return made
