"""`quire convert-tokenizer`: SentencePiece models made by its own trainer, and a tiktoken file; EOS tokens of files."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, LlamaTokenizer

from quire.engine.tokenizers import conversion, convert
from quire.engine.tokenizers.alphabet import byte_level_alphabet
from quire.engine.tokenizers.convert import CannotConvert, convert_directory
from quire.engine.tokenizers.ends import end_token
from quire.engine.tokenizers.files import load_tokenizer
from quire.service import cli
from quire.service.text.token_decoder import TextStream
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.vocabulary import ModelError
from tests.service.fakes import CHAT_TEMPLATE, CORPUS, byte_level
from tests.service.text.test_text import request

TEXTS = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\x00"), max_size=40
)
LLAMA: dict[str, Any] = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "split_digits": True}
LLAMA |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA |= {"allow_whitespace_only_pieces": True, "minloglevel": 2}
SYMBOLS = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581"]
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": SYMBOLS}
GEMMA |= {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
GEMMA |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
AS_LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "chat_template": CHAT_TEMPLATE, **ENDS}
AS_GEMMA = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
AS_GEMMA |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def trained(folder: Path, described: dict[str, Any], family: str = "llama", **options: Any) -> Path:
    """A checkpoint's folder with a SentencePiece model trained here."""
    folder.mkdir(parents=True)
    sentences = iter([*CORPUS, "tabs\tand  double   blanks", "12 345, don't we'll"] * 3)
    SentencePieceTrainer.train(sentence_iterator=sentences, model_prefix=str(folder / "tokenizer"), **options)
    return described_as(folder, described, family)


def described_as(folder: Path, described: dict[str, Any], family: str = "llama") -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


class Made(NamedTuple):
    folder: Path
    tokenizer: Tokenizer
    library: SentencePieceProcessor


@pytest.fixture(
    scope="session",
    params=[("llama", AS_LLAMA, LLAMA), ("mistral", AS_LLAMA | {"legacy": False}, LLAMA), ("gemma", AS_GEMMA, GEMMA)],
    ids=["llama", "mistral", "gemma"],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, described, options = request.param
    folder = trained(tmp_path_factory.mktemp("spm") / family, described, family, **options)
    library = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Made(folder, converted(folder), library)


def converted(folder: Path) -> Tokenizer:
    """The tokenizer of a folder as a server has it after the conversion."""
    convert_directory(folder)
    return Tokenizer(str(folder))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer, skip_special=False)
    return "".join(stream.push([token]) for token in ids) + stream.finish()


@given(text=TEXTS)
def test_tokens_and_text_are_those_of_sentencepiece(made: Made, text: str) -> None:
    """A text that begins with spaces excepted, where only the first segment begins with one: see docs/limits.md."""
    if made.tokenizer._backend.pre_tokenizer is not None:
        text = text.lstrip(" \u2581")
    text = text.replace("\u2581", " ")  # a space, as token pieces spell it
    ids = made.tokenizer._encode(text, special=False)
    assert ids == made.library.encode(text)
    assert made.tokenizer.text_of(ids, skip_special=False) == made.library.decode(ids)
    # The space before the first word stays, since an answer continues its prompt.
    assert streamed(made.tokenizer, ids) in (made.library.decode(ids), " " + made.library.decode(ids))


def test_tokens_and_text_are_those_of_transformers(made: Made) -> None:
    """Of its own class for the file.  Its choice for Mistral drops the space before the first word.

    Single spaces only: of longer runs transformers makes other tokens than sentencepiece where they are symbols."""
    own = (GemmaTokenizer if "gemma" in made.folder.name else LlamaTokenizer).from_pretrained(made.folder)
    for text in (" ".join(sample.split()) for sample in conversion.SAMPLES):
        ids = made.tokenizer._encode(text, special=True)
        assert ids == own.encode(text)
        assert made.tokenizer.text_of(ids) == own.decode(ids, skip_special_tokens=True)


def test_the_offline_api_has_the_same_tokens(made: Made) -> None:
    assert load_tokenizer(str(made.folder)).encode("double  blanks") == made.tokenizer._encode(
        "double  blanks", special=True
    )


async def test_chats_have_the_special_tokens_of_the_file(tmp_path: Path) -> None:
    tokenizer = converted(trained(tmp_path / "model", AS_LLAMA, **LLAMA))
    [ids] = await tokenizer.encode(request(messages=[{"role": "user", "content": "fox</s>"}]))
    assert ids.count(2) == 1  # the template's; the client's stays text
    assert "fox</s></s>" in tokenizer.text_of(ids, skip_special=False)
    assert tokenizer.text_of([2, 1], skip_special=True) == ""
    assert tokenizer._encode("fox", special=True)[0] == 1


def test_pieces_are_joined_by_score_and_not_by_id(tmp_path: Path) -> None:
    """Runs of spaces in published Llama and Mistral models have the first ids and the lowest scores."""
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    normal = [piece for piece in model.pieces if piece.type == piece.NORMAL]
    scores = [piece.score for piece in normal]
    for piece, score in zip(normal, reversed(scores), strict=True):
        piece.score = score
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    library = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    others = LlamaTokenizer.from_pretrained(folder)
    text = "The quick brown fox jumps over the lazy dog."
    tokenizer = converted(folder)
    assert tokenizer._encode(text, special=False) == library.encode(text)
    assert others.encode(text, add_special_tokens=False) != library.encode(text)


def test_a_conversion_with_other_tokens_than_the_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    ordered = conversion.merges_of
    monkeypatch.setattr(conversion, "merges_of", lambda found: ordered(found)[::-1])
    with pytest.raises(CannotConvert, match=r"would give .The quick brown fox.* other tokens than the library of the"):
        convert_directory(folder)
    assert not (folder / "tokenizer.json").exists()


def test_tokens_that_the_configuration_adds_have_its_ids(tmp_path: Path) -> None:
    added = {"700": {"content": "<|im_end|>", "special": True}, "702": {"content": "<tool>", "special": False}}
    folder = trained(tmp_path / "model", AS_LLAMA | {"added_tokens_decoder": added}, **LLAMA)
    tokenizer = converted(folder)
    assert tokenizer._encode("fox<|im_end|><tool>", special=False)[-2:] == [700, 702]
    assert tokenizer.text_of([700, 702]) == "<tool>"
    (folder / "tokenizer.json").unlink()
    added["5"] = {"content": "<|im_start|>", "special": True}
    described_as(folder, AS_LLAMA | {"added_tokens_decoder": added})
    with pytest.raises(CannotConvert, match=r"calls token 5 '<\|im_start\|>', the file '<0x02>'"):
        convert_directory(folder)


def test_numbers_that_no_token_has_below_one_that_the_configuration_adds(tmp_path: Path) -> None:
    """They are added at once: one by one, these would take minutes."""
    added = {"20000": {"content": "<|im_end|>", "special": True}, "20001": {"content": "<tool>", "special": False}}
    folder = trained(tmp_path / "model", AS_LLAMA | {"added_tokens_decoder": added}, **LLAMA)
    tokenizer = converted(folder)
    assert tokenizer._encode("fox<|im_end|><tool>", special=False)[-2:] == [20000, 20001]
    assert tokenizer.text_of([700, 19_999, 20_000, 20_001]) == "<tool>"


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ([], r"is \[\]; it must be an object"),
        ({"x": {}}, "names a token 'x'; its name must be a number"),
        ({"-1": {"content": "a"}}, "names a token '-1'; its name must be a number"),
        ({"700": {}}, "has a token 700 without content"),
        ({"700": "<tool>"}, "has a token 700 without content"),
        ({"524288": {"content": "a"}}, r"names the token 524288; token ids must be below 524,288"),
        ({str(10**12): {"content": "a"}}, r"names the token 1000000000000; token ids must be below 524,288"),
        ({"9" * 5000: {"content": "a"}}, r"names the token 9{20}\.\.\.; token ids must be below 524,288"),
    ],
)
def test_declared_tokens_that_are_none(tmp_path: Path, declared: object, reason: str) -> None:
    folder = trained(tmp_path / "model", AS_LLAMA | {"added_tokens_decoder": declared}, **LLAMA)
    with pytest.raises(
        CannotConvert, match=rf"its tokenizer_config\.json: added_tokens_decoder {reason}; serve a copy"
    ):
        convert_directory(folder)


UNIGRAM = LLAMA | {"model_type": "unigram", "vocab_size": 600, "hard_vocab_limit": False}


@pytest.mark.parametrize(
    ("described", "options", "reason"),
    [
        (AS_LLAMA, UNIGRAM, "it is no BPE model"),
        (AS_LLAMA, LLAMA | {"byte_fallback": False, "vocab_size": 400}, "it has no tokens for bytes"),
        (AS_LLAMA, LLAMA | {"normalization_rule_name": "nmt_nfkc"}, r"it changes texts first \(nmt_nfkc\)"),
        (AS_LLAMA, LLAMA | {"remove_extra_whitespaces": True}, "it removes spaces"),
        (AS_LLAMA | {"tokenizer_class": "T5Tokenizer"}, LLAMA, "names tokenizer_class T5Tokenizer; only Llama"),
        ({}, LLAMA, "does not say add_bos_token"),
        (AS_LLAMA | {"bos_token": "<bos>"}, LLAMA, "names the token '<bos>', which is not in the file"),
        (AS_LLAMA | {"bos_token": None}, LLAMA, "says add_bos_token, and no bos_token is named"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(
    tmp_path: Path, described: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    folder = trained(tmp_path / "model", described, **options)
    before = sorted(folder.iterdir())
    with pytest.raises(CannotConvert, match=rf"its tokenizer is tokenizer\.model: .*{reason}.*; serve a copy that has"):
        convert_directory(folder)
    assert sorted(folder.iterdir()) == before


# ------------------------------------------------------------------------------------------------------------ tiktoken

HEADER = "<|start_header_id|>"


@pytest.fixture(scope="session")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders with a tiktoken file: the tokens of a byte-level vocabulary in the order of its merges."""
    folder = byte_level(tmp_path_factory.mktemp("tiktoken") / "model")
    alphabet = byte_level_alphabet()
    vocabulary = Backend.from_file(str(folder / "tokenizer.json")).get_vocab()
    names = sorted(vocabulary.keys() - {"<s>", "</s>"}, key=vocabulary.__getitem__)
    tokens = [bytes(alphabet[letter] for letter in name) for name in names]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    special = {str(len(tokens) + at): {"content": text, "special": True} for at, text in enumerate(("<s>", HEADER))}

    def make(directory: Path, family: str = "llama", content: bytes = b"".join(lines), **changes: Any) -> Path:
        directory.mkdir()
        (directory / "tokenizer.model").write_bytes(content)
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
        return described_as(directory, described | {"added_tokens_decoder": special} | changes, family)

    return make


@pytest.fixture(scope="session")
def tiktoken_model(ranked: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranked(tmp_path_factory.mktemp("ranked") / "model")


@pytest.fixture(scope="session")
def tiktoken_tokenizer(tiktoken_model: Path) -> Tokenizer:
    return converted(tiktoken_model)


@given(text=TEXTS)
def test_tokens_and_text_are_those_of_tiktoken(tiktoken_tokenizer: Tokenizer, tiktoken_model: Path, text: str) -> None:
    content = (tiktoken_model / "tokenizer.model").read_bytes()
    ranks = conversion.read_ranks(content)
    library = tiktoken.Encoding("test", pat_str=conversion.LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    ids = tiktoken_tokenizer._encode(text, special=False)
    assert ids == library.encode_ordinary(text)
    assert streamed(tiktoken_tokenizer, ids) == tiktoken_tokenizer.text_of(ids) == text


def test_special_tokens_of_a_tiktoken_file_are_those_of_the_configuration(tiktoken_tokenizer: Tokenizer) -> None:
    size = len(tiktoken_tokenizer.vocabulary.table)
    first, *_, last = tiktoken_tokenizer._encode(f"a{HEADER}", special=True)
    assert (first, last) == (size - 2, size - 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "qwen2"}, "known for Llama 3, not for qwen2"),
        ({"added_tokens_decoder": {}}, "has no added_tokens_decoder: special tokens are not in the file"),
        ({"content": b"IQ== 0\nIg== 2\n"}, "its ranks are not 0, 1, 2"),
        ({"content": b"IQ== 0\nbroken\n"}, "a line that is not a token in base64 and its rank"),
        ({"content": b"neither"}, "it is neither a SentencePiece model nor a tiktoken file"),
    ],
)
def test_tiktoken_files_of_other_kinds_are_refused_by_name(
    tmp_path: Path, ranked: Callable[..., Path], changes: dict[str, Any], reason: str
) -> None:
    if changes.get("content") == b"neither":
        changes = changes | {"tokenizer_class": "LlamaTokenizer"}
    with pytest.raises(CannotConvert, match=reason):
        convert_directory(ranked(tmp_path / "model", **changes))


# ------------------------------------------------------------------------------------------------- command and refusal


def test_a_server_refuses_an_unconverted_directory_with_the_command(tmp_path: Path) -> None:
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    command = f"`quire convert-tokenizer {folder}`"
    with pytest.raises(
        ModelError, match=re.escape(f"its tokenizer is tokenizer.model, which servers do not read: run {command}")
    ):
        Tokenizer(str(folder))


def test_a_server_refuses_a_repository_of_the_hub_with_the_command(tmp_path: Path) -> None:
    """From the hub client's cache, in a process of its own: the client reads its environment once."""
    repository = tmp_path / "hub" / "models--org--name"
    trained(repository / "snapshots" / ("c" * 40), AS_LLAMA, "mistral", **LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    code = "from quire.service.text.tokenizer import Tokenizer; Tokenizer('org/name')"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    says = "download it into a directory DIR, then run `quire convert-tokenizer DIR`"
    assert says in done.stderr.splitlines()[-1]


def test_the_command_writes_what_a_server_and_structured_output_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    assert cli.main(["convert-tokenizer", str(folder)]) == 0
    assert f"written to {folder / 'tokenizer.json'}" in capsys.readouterr().out
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert backend.get_vocab_size() == 700
    assert backend.encode("fox").ids == Tokenizer(str(folder))._encode("fox", special=True)
    assert cli.main(["convert-tokenizer", str(folder)]) == 2
    assert "has a tokenizer.json already, which servers read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage: quire convert-tokenizer DIR"),
        (["one", "two"], "usage: quire convert-tokenizer DIR"),
        (["--force"], "usage: quire convert-tokenizer DIR"),
        (["no/such"], "quire convert-tokenizer: no/such is no directory: download the checkpoint first"),
        (["."], "has none of tokenizer.model, tiktoken.model"),
    ],
)
def test_a_command_line_that_names_nothing_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert-tokenizer", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert cli.main(["convert-tokenizer", str(folder)]) == 2
    says = "quire convert-tokenizer: needs the package sentencepiece: pip install 'quire[convert]'\n"
    assert capsys.readouterr().err == says


def test_what_a_server_would_read_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers might, whose classes rebuild some tokenizers."""
    folder = trained(tmp_path / "model", AS_LLAMA, **LLAMA)
    other = trained(tmp_path / "other", AS_LLAMA, **LLAMA | {"vocab_size": 600})
    convert_directory(other)
    monkeypatch.setattr(convert, "load_tokenizer", lambda _: load_tokenizer(str(other)))
    with pytest.raises(CannotConvert, match=r"its tokenizer\.json would give .* other tokens, or another text"):
        convert_directory(folder)
    assert not (folder / "tokenizer.json").exists()


# --------------------------------------------------------------------------------------------------------- EOS tokens


def test_the_end_token_of_a_converted_sentencepiece_model(made: Made, tmp_path: Path) -> None:
    """By the name in the configuration, or as the model itself says it."""
    assert end_token(made.folder) == made.library.eos_id()
    unnamed = trained(tmp_path / "model", AS_LLAMA | {"eos_token": None}, **LLAMA)
    (unnamed / "special_tokens_map.json").write_text(json.dumps({"pad_token": "</s>"}))
    assert end_token(unnamed) is None
    convert_directory(unnamed)
    assert end_token(unnamed) == 2
    assert json.loads((unnamed / "special_tokens_map.json").read_text()) == {"pad_token": "</s>", "eos_token": "</s>"}


def test_the_end_token_of_a_converted_tiktoken_file(
    tiktoken_model: Path, ranked: Callable[..., Path], tmp_path: Path
) -> None:
    assert end_token(tiktoken_model) is None
    named = ranked(tmp_path / "model", eos_token=HEADER)
    assert end_token(named) == converted(named)._encode(HEADER, special=True)[-1]


END = {"eos_token": "</s>"}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": END | {"added_tokens_decoder": {"7": {"content": "</s>"}}}},
        {"tokenizer_config": {"eos_token": {"content": "</s>"}}, "vocab": {"a": 0, "</s>": 7}},
        {"special_tokens_map": END, "vocab": {"</s>": 7}},
        {"special_tokens_map": END, "vocab": {"a": 0}, "added_tokens": {"</s>": 7}},
        {"special_tokens_map": END, "tokenizer": {"added_tokens": [{"id": 7, "content": "</s>"}]}},
        {"special_tokens_map": END, "tokenizer": {"model": {"vocab": {"a": 0, "</s>": 7}}}},
        {"special_tokens_map": END, "tokenizer": {"model": {"vocab": [["a", -1.0]] * 7 + [["</s>", 0.0]]}}},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}, "vocab": {"</s>": 7}},
    ],
)
def test_the_end_token_of_other_files(files: dict[str, object], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_token(tmp_path) == 7


def test_the_end_token_of_a_vocabulary_of_words(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\na\u2028\n[SEP]\n", encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "[SEP]"}))
    assert end_token(tmp_path) == 2


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": [], "tokenizer": {"added_tokens": [5, {"content": "</s>"}], "model": []}},
        {"tokenizer_config": END | {"added_tokens_decoder": {"x": {"content": "</s>"}, "8": "</s>>"}}},
        {"tokenizer_config": END, "vocab": {"</s>": "7"}, "tokenizer": {"model": {"vocab": [[["</s>"], 0.0], []]}}},
        {"tokenizer_config": END | {"added_tokens_decoder": {str(10**12): {"content": "</s>"}}}},
        {"tokenizer_config": END | {"added_tokens_decoder": {"9" * 5000: {"content": "</s>"}}}},
        {"vocab": {"</s>": 7}},
    ],
)
def test_files_that_name_no_end_token(files: dict[str, object], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for name in ("tokenizer.model", "vocab.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    assert end_token(tmp_path) is None
