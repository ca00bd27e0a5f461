"""Mixtures of experts on a GPU: our operators for few tokens, transformers' own experts for many."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.executor import ops
from engine.executor.models.fused import Mixture, is_fused
from engine.executor.models.hf import LoadedModel, load_model
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor.driver import Driver
from tests.executor.test_gpu import GREEDY, llm, texts, words

CUDA = torch.device("cuda")
LLAMA: dict[str, Any] = dict(FAMILIES["llama"])
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        LLAMA | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "norm_topk_prob": True},
    ),
    # Shares of the softmax that do not add up to one, and a plain layer between mixtures.
    "qwen3_moe plain": (
        "qwen3_moe",
        LLAMA
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "norm_topk_prob": False}
        | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
}


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("mixtures")

    def make(name: str) -> Path:
        family, changes = MIXTURES[name]
        return make_checkpoint(root / name.replace(" ", "-"), family, **changes)

    return make


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sinks between -2 and 4, a window in every other layer, and experts that only transformers computes."""
    changes = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "sliding_window": 24}
    directory = make_checkpoint(tmp_path_factory.mktemp("sinks") / "gpt_oss", "gpt_oss", **changes)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith("sinks")]:
        weights[name] = torch.linspace(-2, 4, len(weights[name]))
    assert sum(name.endswith("sinks") for name in weights) == 4
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def exact_model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_on_a_cpu_the_model_runs_as_it_is(mixture: Callable[[str], Path], name: str) -> None:
    model = load_model(str(mixture(name)), dtype="float32", device=torch.device("cpu"))
    assert not is_fused(model.module)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 300])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_stay_within_the_noise_of_bfloat16(mixture: Callable[[str], Path], name: str, chunk: int) -> None:
    """As far from the float32 model as transformers' own bfloat16 forward, at the median of the tokens.

    Rounding may send a token to another expert, and what it computes is then another.  300 tokens have more pairs than
    our operator takes."""
    model = load_model(str(mixture(name)), dtype="bfloat16", device=CUDA)
    assert is_fused(model.module)
    found = [module for module in model.module.modules() if isinstance(module, Mixture)]
    assert len(found) == 2
    assert 64 * found[0].top <= ops.MOST_PAIRS < 300 * found[0].top
    check_logits(model, chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [7, 64, 300])
def test_logits_of_a_model_with_sinks(gpt_oss: Path, chunk: int) -> None:
    """Sinks are float32 once the model is loaded.  Without them the logits are far off."""
    model = load_model(str(gpt_oss), dtype="bfloat16", device=CUDA)
    sinks = [parameter for name, parameter in model.module.named_parameters() if name.endswith("sinks")]
    assert {parameter.dtype for parameter in sinks} == {torch.float32}
    check_logits(model, chunk)
    for parameter in sinks:
        parameter.fill_(-torch.inf)
    with pytest.raises(AssertionError):
        check_logits(model, chunk)


def check_logits(model: LoadedModel, chunk: int) -> None:
    """Fail unless a prompt's logits are as near to the float32 model's as those of transformers' bfloat16 forward."""
    directory, prompt = model.directory, words(320)
    exact = exact_model(directory)
    want = exact(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].detach()
    half = copy.deepcopy(exact).bfloat16().cuda()
    own = half(input_ids=torch.tensor([prompt]).cuda(), use_cache=False).logits[0, :-1].detach().float().cpu()
    driver = Driver(model, graph_seconds=0)
    driver.add(prompt, None, targets=True, chunk=chunk)
    got = []
    while driver.running[0].computed < len(prompt):
        driver.step()
        got.append(driver.worker.logits)

    def off(logits: torch.Tensor) -> float:
        return float((logits.float().cpu() - want).pow(2).mean(-1).sqrt().median())

    assert off(torch.cat(got)) <= 2 * off(own)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXTURES)
def test_most_tokens_are_those_of_the_float32_model(mixture: Callable[[str], Path], name: str) -> None:
    """Decoded, with graphs.  The others are where rounding sent a token to another expert."""
    check_tokens(mixture(name))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "e4m3"])
def test_most_tokens_of_a_model_with_sinks(gpt_oss: Path, kv_dtype: str) -> None:
    check_tokens(gpt_oss, kv_dtype=kv_dtype)


def check_tokens(directory: Path, **options: object) -> None:
    """Fail unless most decoded tokens are the likeliest of the float32 model."""
    prompts = [words(n, n) for n in (1, 5, 16, 33, 48, 70, 130)]
    exact, same, count = exact_model(directory), 0, 0
    for prompt, text in zip(prompts, texts(llm(directory, **options), prompts), strict=True):
        logits = exact(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        same += int((logits.argmax(-1) == torch.tensor(text)).sum())
        count += len(text)
    assert same >= 0.85 * count


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_graphs_change_no_token(mixture: Callable[[str], Path], name: str) -> None:
    prompts, counts = [words(1 + 7 * i % 90, i) for i in range(30)], [3 + 5 * i % 40 for i in range(30)]
    found = []
    for seconds in (0.0, 60.0):
        answers = llm(mixture(name), graph_seconds=seconds).generate(prompts, GREEDY, max_new_tokens=counts)
        found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]
