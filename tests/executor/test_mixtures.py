"""Mixtures of experts on a GPU: our operators, and transformers' own experts where ours do not take so many tokens."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.engine.executor import ops
from quire.engine.executor.models import fused, fusible
from quire.engine.executor.models.fused import Mixture, is_fused
from quire.engine.executor.models.hf import LoadedModel, load_model
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor.driver import Driver, logits_of
from tests.executor.test_gpu import GREEDY, llm, texts, words
from tests.kernels.test_cuda_experts import exact

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
    # Sinks between -2 and 4, a window in every other layer, experts with biases whose clamp changes many values.
    "gpt_oss": (
        "gpt_oss",
        LLAMA
        | {"num_local_experts": 16, "num_experts_per_tok": 4, "swiglu_limit": 1.0}
        | {"num_hidden_layers": 4, "sliding_window": 24},
    ),
}


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("mixtures")

    def make(name: str) -> Path:
        family, changes = MIXTURES[name]
        edit = calm_gpt_oss if family == "gpt_oss" else None
        return make_checkpoint(root / name.replace(" ", "-"), family, edit=edit, **changes)

    return make


def calm_gpt_oss(model: PreTrainedModel) -> None:
    """Make queries and experts small.  Sharp attention and large experts would amplify rounding: transformers' bfloat16
    forward then has another most probable token than its float32 one at every fourth position.  Now at every
    fiftieth."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(torch.linspace(-2, 4, len(parameter)))
        elif ".q_proj." in name:
            parameter.data.mul_(0.1)
        elif ".experts." in name:
            parameter.data.mul_(0.5)


def mixtures_of(model: LoadedModel) -> list[Mixture]:
    return [module for module in model.module.modules() if isinstance(module, Mixture)]


def sinks_of(model: LoadedModel) -> list[Tensor]:
    return [parameter for name, parameter in model.module.named_parameters() if name.endswith("sinks")]


def exact_model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_on_a_cpu_the_model_runs_as_it_is(mixture: Callable[[str], Path], name: str) -> None:
    model = load_model(str(mixture(name)), dtype="float32", device=torch.device("cpu"))
    assert not is_fused(model.module)
    assert fusible.has_known_parts(exact_model(mixture(name)))


def plain_route(logits: Tensor, top: int, *, normalise: bool, rounded: bool) -> tuple[Tensor, Tensor]:
    """What `ops.route` promises, in torch."""
    weights, chosen = logits.float().softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True) if normalise else weights
    return chosen.int(), weights.to(logits.dtype).float() if rounded else weights


def plain_experts(*operands: Tensor, plus: Tensor | None = None, **options: Any) -> Tensor:
    """What `ops.experts` promises, in torch."""
    out = exact(*operands, **options).to(operands[0].dtype)
    return out if plus is None else plus.add_(out)


@pytest.mark.parametrize(("chunk", "takes_all"), [(5, False), (300, False), (300, True)])
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_the_layers_around_the_operators(
    mixture: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    chunk: int,
    takes_all: bool,
) -> None:
    """Our layers on a CPU, with operators in torch in place of a GPU's, give the logits of the model's own.

    Chunks of 300 tokens take transformers' experts, with weights as our layers keep them, unless ours take them."""
    pairs: list[int] = []

    def experts(*operands: Tensor, plus: Tensor, **options: Any) -> Tensor:
        pairs.append(operands[1].numel())
        return plain_experts(*operands, plus=plus, **options)

    monkeypatch.setattr(fused, "has_plain_decoder", fusible.has_known_parts)
    monkeypatch.setattr(ops, "route", plain_route)
    monkeypatch.setattr(ops, "experts", experts)
    monkeypatch.setattr(ops, "takes_all_pairs", lambda hidden, inner, device: takes_all)
    with caplog.at_level(logging.INFO):
        model = load_model(str(mixture(name)), dtype="float32", device=torch.device("cpu"))
    assert is_fused(model.module)
    assert ("take transformers' kernels" in caplog.text) != takes_all
    assert len(mixtures_of(model)) == (4 if name == "gpt_oss" else 2)
    prompt = words(320)
    want = exact_model(mixture(name))(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    torch.testing.assert_close(logits_of(model, prompt, chunk), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    assert len(sinks_of(model)) == (4 if name == "gpt_oss" else 0)
    assert (max(pairs, default=0) > ops.MAX_PAIRS) == takes_all


@pytest.mark.parametrize(
    ("hidden", "inner", "capability", "taken"),
    [
        *((2048, 768, (9, 0), True), (2048, 768, (10, 0), False), (2048, 768, (8, 9), False)),
        *((2880, 2880, (9, 0), True), (2080, 768, (9, 0), False), (2048, 760, (9, 0), False)),
    ],
)
def test_which_layers_compute_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, hidden: int, inner: int, capability: tuple[int, int], taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ops.takes_all_pairs(hidden, inner, CUDA) == taken
    assert not ops.takes_all_pairs(hidden, inner, torch.device("cpu"))


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
@torch.inference_mode()
def test_stored_rows_are_the_weights_turned(mixture: Callable[[str], Path], way: str) -> None:
    """In the same memory, in the same order; transformers' experts compute the same with them."""
    model = exact_model(mixture("gpt_oss"))
    model.set_experts_implementation(way)
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    before = {name: parameter.clone() for name, parameter in experts.named_parameters()}
    places = {name: parameter.data_ptr() for name, parameter in experts.named_parameters()}
    x, scores = torch.randn(50, 128), torch.rand(50, 4)
    chosen = torch.stack([torch.randperm(16)[:4] for _ in range(50)])
    want = experts(x, chosen, scores)
    fused.store_rows(experts)
    for name, parameter in experts.named_parameters():
        assert parameter.data_ptr() == places[name]
        assert parameter.is_contiguous()
        assert torch.equal(parameter, before[name].mT if parameter.dim() == 3 else before[name])
    assert experts.gate_up_proj.shape == (16, 2 * 192, 128)
    torch.testing.assert_close(experts(x, chosen, scores), want)
    ours = plain_experts(
        x,
        chosen.int(),
        scores,
        experts.gate_up_proj,
        experts.down_proj,
        gate_up_bias=experts.gate_up_proj_bias,
        down_bias=experts.down_proj_bias,
        clamped=ops.Clamped(experts.alpha, experts.limit),
    )
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def another_class(experts: Any) -> None:
    experts.__class__ = type("Experts", (GptOssExperts,), {})


def one_more_bias(experts: Any) -> None:
    experts.extra_bias = nn.Parameter(torch.zeros(16))


def turned_already(experts: Any) -> None:
    fused.store_rows(experts)


def no_limit(experts: Any) -> None:
    experts.limit = 0.0


def another_way(experts: Any) -> None:
    experts.config._experts_implementation = "eager"


def of_several_ranks(experts: Any) -> None:
    experts.register_forward_hook(lambda _module, _inputs, output: output)


@pytest.mark.parametrize(
    "change", [another_class, one_more_bias, turned_already, no_limit, another_way, of_several_ranks]
)
def test_experts_unlike_the_expected_are_left_alone(
    mixture: Callable[[str], Path], change: Callable[[Any], None]
) -> None:
    model = exact_model(mixture("gpt_oss"))
    assert fusible.has_known_parts(model)
    change(model.get_submodule("model.layers.2.mlp.experts"))
    assert not fusible.has_known_parts(model)


def test_a_router_without_bias_is_left_alone(mixture: Callable[[str], Path]) -> None:
    model = exact_model(mixture("gpt_oss"))
    model.get_submodule("model.layers.2.mlp.router").bias = None
    assert not fusible.has_known_parts(model)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 300])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_stay_within_the_noise_of_bfloat16(mixture: Callable[[str], Path], name: str, chunk: int) -> None:
    """As far from the float32 model as transformers' own bfloat16 forward, at the median of the tokens.

    Rounding may send a token to another expert, and what it computes is then another.  300 tokens have more pairs than
    the kernels for few pairs take."""
    model = load_model(str(mixture(name)), dtype="bfloat16", device=CUDA)
    assert is_fused(model.module)
    found = mixtures_of(model)
    assert len(found) == (4 if name == "gpt_oss" else 2)
    assert 64 * found[0].top <= ops.MAX_PAIRS < 300 * found[0].top
    check_logits(model, chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [7, 64, 300])
@pytest.mark.parametrize("own_layers", [True, False])
def test_logits_of_a_model_with_sinks(
    mixture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, own_layers: bool, chunk: int
) -> None:
    """Sinks are float32 once the model is loaded.  Without them the logits are far off."""
    if not own_layers:
        monkeypatch.setattr(fused, "has_plain_decoder", lambda model: False)
    model = load_model(str(mixture("gpt_oss")), dtype="bfloat16", device=CUDA)
    assert is_fused(model.module) == own_layers
    sinks = sinks_of(model)
    assert len(sinks) == 4
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
@pytest.mark.parametrize("own_layers", [True, False])
def test_most_tokens_of_a_model_with_sinks(
    mixture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, own_layers: bool, kv_dtype: str
) -> None:
    if not own_layers:
        monkeypatch.setattr(fused, "has_plain_decoder", lambda model: False)
    check_tokens(mixture("gpt_oss"), kv_dtype=kv_dtype)


def check_tokens(directory: Path, **options: object) -> None:
    """Fail unless most decoded tokens are the most probable of the float32 model."""
    prompts = [words(n, n) for n in (1, 5, 16, 33, 48, 70, 130)]
    exact, same, count = exact_model(directory), 0, 0
    for prompt, text in zip(prompts, texts(llm(directory, **options), prompts), strict=True):
        logits = exact(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        same += int((logits.argmax(-1) == torch.tensor(text)).sum())
        count += len(text)
    assert same >= 0.85 * count


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_graphs_change_no_token(mixture: Callable[[str], Path], name: str) -> None:
    prompts, counts = [words(1 + 7 * i % 90, i) for i in range(30)], [3 + 5 * i % 40 for i in range(30)]
    found = []
    for seconds in (0.0, 60.0):
        answers = llm(mixture(name), graph_seconds=seconds).generate(prompts, GREEDY, max_new_tokens=counts)
        found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]
