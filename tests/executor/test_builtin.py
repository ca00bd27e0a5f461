from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.models.sources import builtin


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.builtin(tmp_path_factory.mktemp("builtin") / "model")


def test_it_is_a_checkpoint_like_any_other(made: Path) -> None:
    model = load_model(str(made), dtype="auto", device=torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    assert model.vocab_size == builtin.VOCAB
    assert model.max_model_len == 2048
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert model.eos_ids == [tokenizer.eos_token_id]
    assert len(tokenizer) == builtin.VOCAB


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "Grüße, 世界 🙂", "\x00\t  tail "])
def test_the_tokenizer_loses_nothing(made: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_chat_template(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|turn|>user\nHello<|end|>\n<|turn|>assistant\n"
    assert tokenizer(text, add_special_tokens=False).input_ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.usefixtures("warm_processes")
def test_it_is_made_once_and_the_same_every_time(made: Path, tmp_path: Path) -> None:
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert builtin.builtin(made) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    command = [sys.executable, "-m", "quire.engine.executor.models.sources.builtin", str(tmp_path / "again")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.strip() == str(tmp_path / "again")
    assert list(tmp_path.iterdir()) == [tmp_path / "again"]  # no draft left behind
    for file in sorted(made.iterdir()):
        assert file.stat().st_mode & 0o044 == 0o044  # for users other than the one who made it
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "VOCAB", 300)

    def fail(*args: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(ModelLoadError, match=r"cannot write the built-in model to .*: disk full; set XDG_CACHE_HOME"):
        builtin.builtin(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
