"""Token ids are those of tokenizer.json, whatever else the checkpoint's files say, or the server does not start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.engine.tokenizers.files import load_tokenizer
from quire.service.text.token_budget import UNLIMITED, TokenBudget
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.vocabulary import ModelError
from tests.matrix import examples
from tests.service.fakes import byte_level, sentencepiece_like

TEXT = "Tokens 2026, 12345 and e\u0301: to be, or not to be. " * 8
CLASSES = {
    "GPT2Tokenizer": "gpt2",
    "GPT2TokenizerFast": "starcoder2",
    "Qwen2Tokenizer": "qwen2",
    "GPTNeoXTokenizerFast": "gpt_neox",
    "LlamaTokenizerFast": "llama",
    "PreTrainedTokenizerFast": "opt",
}
KINDS: dict[str, Callable[[Path], Path]] = {"byte-level": byte_level, "sentencepiece": sentencepiece_like}


def change(folder: Path, described: dict[str, Any] | None = None, **parts: Any) -> Path:
    """Set parts of the pipeline in tokenizer.json, and fields of tokenizer_config.json."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(str(folder / "tokenizer.json"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | (described or {})))
    return folder


def ids_of(folder: Path, text: str, *, special: bool = True) -> list[int]:
    """The token ids of the file itself, without truncation and padding."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    ids: list[int] = backend.encode(text, add_special_tokens=special).ids
    return ids


def served(folder: Path, text: str, *, special: bool = True) -> list[int]:
    tokenizer = Tokenizer(str(folder))
    return tokenizer._encode(text, special=special, budget=TokenBudget(None, UNLIMITED, UNLIMITED))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["longest_first", "only_first"])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_truncation_and_padding_of_the_file_reach_no_prompt(
    tmp_path: Path, kind: str, strategy: str, direction: str
) -> None:
    folder = KINDS[kind](tmp_path / "model")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(16, stride=2, strategy=strategy, direction=direction)
    backend.enable_padding(length=4096, direction=direction)
    backend.save(str(folder / "tokenizer.json"))
    assert len(backend.encode(TEXT).ids) == 4096, "the file itself cuts and pads"
    assert served(folder, TEXT) == ids_of(folder, TEXT)
    offline = load_tokenizer(str(folder))
    assert list(offline.encode(TEXT)) == ids_of(folder, TEXT)
    assert offline.backend_tokenizer.encode(TEXT).ids == ids_of(folder, TEXT)


PIPELINES: dict[str, dict[str, Any]] = {
    "digits one by one": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    },
    "composed": {"normalizer": normalizers.NFC()},
    "prefix space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "no regex": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
    "a token before each text": {
        "post_processor": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    },
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_ids_are_those_of_the_file_whatever_class_the_config_names(tmp_path: Path, name: str, pipeline: str) -> None:
    folder = change(byte_level(tmp_path / "model"), {"tokenizer_class": name}, **PIPELINES[pipeline])
    (folder / "config.json").write_text(json.dumps({"model_type": CLASSES[name]}))
    for special in (True, False):
        assert served(folder, TEXT, special=special) == ids_of(folder, TEXT, special=special)
    assert list(load_tokenizer(str(folder)).encode(TEXT)) == ids_of(folder, TEXT)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "LlamaTokenizerFast"])
def test_a_sentencepiece_style_file_keeps_its_ids(tmp_path: Path, name: str) -> None:
    folder = change(sentencepiece_like(tmp_path / "model"), {"tokenizer_class": name})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert served(folder, TEXT) == ids_of(folder, TEXT)


@settings(max_examples=examples(40), deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=60))
def test_any_text_has_the_ids_of_the_file(rebuilt: tuple[Tokenizer, Path], text: str) -> None:
    tokenizer, folder = rebuilt
    assert tokenizer._encode(text, special=True) == ids_of(folder, text)


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = byte_level(tmp_path_factory.mktemp("rebuilt") / "model")
    change(folder, {"tokenizer_class": "Qwen2Tokenizer"}, **PIPELINES["digits one by one"])
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return Tokenizer(str(folder)), folder


def test_another_class_is_said_once_in_the_log_and_keeps_named_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = change(byte_level(tmp_path / "model"), {"tokenizer_class": "GPT2Tokenizer"}, normalizer=normalizers.NFC())
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with caplog.at_level(logging.WARNING):
        made = load_tokenizer(str(folder))
    assert [line for line in caplog.messages if "tokenizer.json" in line] == [
        f"{folder}: transformers' GPT2Tokenizer builds another tokenizer than tokenizer.json describes: "
        "using the file's"
    ]
    assert (made.bos_token, made.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("field", ["add_bos_token", "add_eos_token"])
def test_the_config_decides_as_in_transformers_what_is_put_around_a_text(
    tmp_path: Path, field: str, added: bool
) -> None:
    described = {"tokenizer_class": "LlamaTokenizer", field: added}
    folder = change(sentencepiece_like(tmp_path / "model"), described)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert served(folder, "abc") == AutoTokenizer.from_pretrained(str(folder)).encode("abc")


def test_a_config_that_changes_the_files_pipeline_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = byte_level(tmp_path / "model")
    made = PreTrainedTokenizerFast.from_pretrained(str(folder))
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda source, **options: made)
    with pytest.raises(ModelError, match=r"has another normalizer than tokenizer\.json, so token ids would differ"):
        Tokenizer(str(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extra_special_tokens", [{"name": "<x>"}]),
        ("extra_special_tokens", 5),
        ("additional_special_tokens", 7),
        ("bos_token", ["<s>"]),
        ("added_tokens_decoder", ["</s>"]),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, field: str, value: Any) -> None:
    folder = change(byte_level(tmp_path / "model"), {field: value})
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {field}: "):
        Tokenizer(str(folder))
