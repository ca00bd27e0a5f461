"""Token ids that the model does not have: EOS tokens of files, and ids in a request's sampling."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.executor.errors import ModelLoadError
from quire.engine.llm import LLM, Output
from quire.engine.wire.messages import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_blocks": 64, "threads": 1}
PROMPTS = [[5, 6, 7], [9, 10]]


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def end_by(folder: Path, ids: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@pytest.fixture
def vocab(folder: Path) -> int:
    size: int = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    return size


@pytest.mark.parametrize("odd", [[0], [1, 10**6], [-1], [-(2**40), 0]])
def test_end_tokens_outside_the_vocabulary_are_dropped_with_a_log_line(
    folder: Path, vocab: int, odd: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    outside = [vocab + token if token >= 0 else token for token in odd]
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(end_by(folder, [1, *outside])), **OPTIONS)
    assert llm.executor.info.eos_ids == [1]
    named = ", ".join(map(str, sorted(outside)))
    line = f"{folder} names EOS tokens {named}, but the model's token ids are 0 to {vocab - 1}: dropped, no answer ends"
    assert [text for text in caplog.messages if text.startswith(line)]
    # `min_tokens` masks the EOS tokens of each position.
    found = llm.generate(PROMPTS, Sampling(temperature=0.0, min_tokens=8), max_new_tokens=8)
    assert [len(one.outputs[0].token_ids) for one in found] == [8, 8]
    llm.close()


def test_a_model_all_of_whose_end_tokens_are_outside_ends_by_length(folder: Path, vocab: int) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    llm = LLM(str(end_by(folder, vocab)), **OPTIONS)
    [found] = llm.generate(PROMPTS[:1], Sampling(temperature=0.0, min_tokens=3), max_new_tokens=5)
    assert llm.executor.info.eos_ids == []
    assert [found.outputs[0].finish_reason, len(found.outputs[0].token_ids)] == ["length", 5]
    llm.close()


def test_an_end_token_of_the_operator_outside_the_vocabulary_is_refused(folder: Path, vocab: int) -> None:
    with pytest.raises(ModelLoadError) as refused:
        LLM(str(folder), **OPTIONS, hf_overrides=json.dumps({"eos_token_id": vocab}))
    assert str(refused.value) == (
        f"--hf-overrides: eos_token_id holds {vocab}; the model's token ids are 0 to {vocab - 1}"
    )


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    made = LLM(str(checkpoint("llama")), **OPTIONS)
    yield made
    made.close()


@pytest.mark.parametrize("odd", [-1, 0, 2**40])
@pytest.mark.parametrize(
    "field", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "bad_words"]
)
def test_a_request_with_a_token_that_the_model_lacks_fails_alone(llm: LLM, field: str, odd: int) -> None:
    vocab = llm.executor.info.vocab_size
    token = odd if odd < 0 else vocab + odd
    value: Any = {"logit_bias": [(3, 1.0), (token, 1.0)], "bad_words": [[3], [3, token]]}.get(field, [3, token])
    plain = Sampling(temperature=0.0, ignore_eos=True)
    hostile = Sampling(temperature=0.0, min_tokens=2, logprobs=1, **{field: value})
    alone = llm.generate(PROMPTS[:1], plain, max_new_tokens=6)[0].outputs[0].token_ids
    found, refused = (one.outputs[0] for one in llm.generate(PROMPTS, [plain, hostile], max_new_tokens=6))
    assert (found.finish_reason, found.token_ids) == ("length", alone)
    assert_refused(refused, f"{field}: token ids are 0 to {vocab - 1}, got {token}")


def test_an_empty_bad_word_is_refused(llm: LLM) -> None:
    [found] = llm.generate(PROMPTS[:1], Sampling(bad_words=[[]]), max_new_tokens=2)
    last = llm.executor.info.vocab_size - 1
    assert_refused(found.outputs[0], f"bad_words: each entry needs at least 1 token id from 0 to {last}, got 0")


def assert_refused(output: Output, message: str) -> None:
    assert (output.finish_reason, output.token_ids, output.message) == ("error", [], message)
