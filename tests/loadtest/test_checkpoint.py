"""The models of the load tests: every token is text, and prompts decide how long answers are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from quire.loadtest.checkpoint import (
    VOCAB,
    countdown_heads,
    make_llama_42m,
    make_shape,
    read_countdown,
    split_by_text,
    write_countdown,
)
from quire.loadtest.replay import Options, body, replay
from quire.loadtest.trace import Job
from quire.loadtest.workloads import Arrival
from quire.service.text.token_decoder import TextStream
from quire.service.text.tokenizer import Tokenizer
from tests.checkpoints import VOCAB as TINY_VOCAB
from tests.checkpoints import make_checkpoint, tokenizer
from tests.system.stack import Stack


@pytest.mark.parametrize("countdown", [False, True])
def test_every_token_it_can_sample_greedily_has_text(tmp_path: Path, countdown: bool) -> None:
    make_llama_42m(tmp_path, countdown=countdown)
    words = Tokenizer(str(tmp_path))
    assert len(words.vocabulary.table) == VOCAB
    rows = load_file(tmp_path / "model.safetensors")["lm_head.weight"].abs().sum(dim=1)
    never = {token for token in range(VOCAB) if rows[token] == 0}  # a logit of 0 is not the largest of 16,000
    silent = {token for token in range(VOCAB) if not TextStream(words).push([token])}
    assert 0 in silent  # the end of text
    assert silent - never == ({0} if countdown else set())
    assert len(never) < VOCAB // 100


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A tiny checkpoint whose greedy answers count down."""
    directory, end = tmp_path / "counting", int(tokenizer().eos_token_id)
    spoken, mute = split_by_text(tokenizer())
    ids = [end, *(token for token in spoken if token != end)]

    def edit(model: PreTrainedModel) -> None:
        embedding, head = countdown_heads(TINY_VOCAB, model.config.hidden_size, ids, mute)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(embedding)
            model.get_output_embeddings().weight.copy_(head)

    make_checkpoint(directory, "llama", edit=edit)
    assert write_countdown(directory, end, ids[1:]) == ids == read_countdown(directory)
    return directory


@pytest.mark.system
async def test_answers_end_where_the_trace_says_and_requests_do_not_tell(
    redis_server: EmbeddedRedis, namespace: str, counting: Path
) -> None:
    """A real engine: lengths of 1, 2 and some, prompts that share nothing but their last token, several in a batch."""
    lengths = [1, 2, 3, 17, 40, 40, 64, 150]
    arrivals = [Arrival(0.02 * i, "x", Job(1 + 9 * i, length, i)) for i, length in enumerate(lengths)]
    with Stack(redis_server.url, namespace, counting, max_model_len=1000) as stack:
        options = Options(
            url=stack.url,
            model="tiny",
            metrics_url=f"{stack.url}/metrics",
            vocab_size=TINY_VOCAB,
            ask_tokens=200,
            countdown=tuple(read_countdown(counting)),
        )
        unknown, _ = await replay(arrivals, options)
        known, _ = await replay(arrivals, replace(options, ask_tokens=0))
    for records in (unknown, known):
        assert [(record.outcome, record.error) for record in records] == [("ok", "")] * len(lengths)
        assert [record.tokens for record in records] == lengths
        assert [bool(record.times) for record in records] == [length > 1 for length in lengths]  # the end has no text
    for arrival in arrivals:
        sent, told = json.loads(body(arrival, options)), json.loads(body(arrival, replace(options, ask_tokens=0)))
        assert sent["prompt"] == told["prompt"]
        assert sent["max_tokens"] == 200
        assert not {"min_tokens", "logit_bias", "ignore_eos", "stop"} & sent.keys()
        assert (told["max_tokens"], told["ignore_eos"]) == (arrival.job.output_len, True)


def test_a_shape_counts_down_with_weights_that_its_engine_made_up(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB + 300,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": VOCAB,
        "eos_token_id": VOCAB + 200,  # outside the tokenizer, as that of the 8B shape
        "dtype": "bfloat16",
    }
    make_shape(tmp_path, config)
    ids = read_countdown(tmp_path)
    llm = LLM(str(tmp_path), load="random", threads=1, kv_blocks=64, max_model_len=512)
    try:
        prompts = [[7, 3000, ids[n]] for n in (1, 2, 30, 200)]
        answers = llm.generate(prompts, Sampling(temperature=0.0), max_new_tokens=400)
        assert [answer.outputs[0].token_ids for answer in answers] == [ids[n - 1 :: -1] for n in (1, 2, 30, 200)]
        assert {answer.outputs[0].finish_reason for answer in answers} == {"stop"}
    finally:
        llm.close()
    with pytest.raises(ValueError, match="tie_word_embeddings must be false"):
        make_shape(tmp_path, config | {"tie_word_embeddings": True})
