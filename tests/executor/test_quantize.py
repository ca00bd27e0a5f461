"""--quantize: weights rounded to 8 or 4 bits at load, and what is served with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.config import EngineConfig
from quire.engine.executor import ops
from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.loading import load
from quire.engine.executor.models import hf
from quire.engine.executor.models.fused import is_fused
from quire.engine.executor.models.hf import LoadedModel, load_model
from quire.engine.executor.models.linear import PackedLinear, Product
from quire.engine.executor.models.quantised.quantised import DTYPE, LARGEST, Quantised, QuantisedLinear
from quire.engine.executor.models.quantised.quantising import Quantising, check_kind
from quire.engine.executor.models.weights import fingerprint
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.model_families import model_class
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests.executor.driver import Driver, greedy, served
from tests.executor.test_worker import words

CPU = torch.device("cpu")


@given(
    st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(-4, 2),
)
def test_rounding_is_within_its_bound(dtype: torch.dtype, seed: int, given_as: torch.dtype, power: float) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 10**power
    weight[3] = 0
    weight[4, 1] *= 30
    weight = weight.to(given_as)
    quantised = Quantised.of(weight, dtype)
    assert (quantised.values.dtype, quantised.scale.dtype) == (dtype, torch.float32)
    scale, exact = quantised.scale.double()[:, None], weight.double()
    error = (quantised.values.double() * scale - exact).abs()
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(exact.abs() / 16, scale / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    top = quantised.values.double().abs().amax(1)
    assert top[3] == 0
    assert (top[[0, 1, 2, 4, 5, 6]] == LARGEST[dtype]).all()


@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.floats(-6, 7))
def test_rounding_to_4_bits_is_within_its_bound(seed: int, given_as: torch.dtype, power: float) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(seed)) * 10**power
    weight[3] = 0
    weight[4, 1] *= 30
    weight[5] = weight[5].abs()
    weight[6, :32] = -weight[6, :32].abs()
    weight = weight.clamp(-torch.finfo(given_as).max, torch.finfo(given_as).max).to(given_as)
    quantised = Quantised.of(weight, torch.uint8)
    assert quantised.zero is not None
    assert (quantised.values.shape, quantised.scale.shape, quantised.zero.shape) == ((7, 48), (7, 3), (7, 3))
    assert quantised.zero.max() <= 15
    error = (quantised.dequantised(torch.float64) - weight.double()).abs().view(7, 3, 32)
    assert (error <= 0.51 * quantised.scale.double()[..., None]).all()
    largest = weight.double().view(7, 3, 32).abs().amax(2)
    assert (quantised.scale[largest > 0] <= largest[largest > 0] * 2 / 15 * 1.001).all()
    in_half = quantised.scale.half().float() == quantised.scale
    assert in_half[(quantised.scale >= 2**-14) & (quantised.scale < 65504)].all()


def test_rounding_to_4_bits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    whole = Quantised.of(weight, torch.uint8)
    monkeypatch.setattr("quire.engine.executor.models.quantised.quantised.PIECE", 128)
    pieces = Quantised.of(weight, torch.uint8)
    assert torch.equal(whole.dequantised(torch.float32), pieces.dequantised(torch.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("given_as", [torch.float32, torch.bfloat16])
def test_rounding_to_8_bits_in_pieces(
    dtype: torch.dtype, given_as: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(given_as)
    weight[4] = 0
    whole = Quantised.of(weight, dtype)
    monkeypatch.setattr("quire.engine.executor.models.quantised.quantised.PIECE", 128)
    pieces = Quantised.of(weight, dtype, lambda largest: largest)
    assert torch.equal(pieces.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(pieces.scale, whole.scale)
    assert torch.equal(pieces.dequantised(torch.bfloat16), (whole.values.float() * whole.scale[:, None]).bfloat16())


def test_blocks_are_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(2))
    wanted = numbers.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    monkeypatch.setattr("quire.engine.executor.models.quantised.quantised.PIECE", 100 * 384)
    assert torch.equal(Quantised(numbers, scale).dequantised(torch.float32), wanted)


def test_joined_weights_of_4_bits_have_groups_that_fit_all() -> None:
    rng = torch.Generator().manual_seed(1)
    parts = []
    for size, groups, zeros in ((3, 2, False), (5, 3, True), (2, 1, False)):
        numbers = torch.randint(0, 256, (size, 96), generator=rng).to(torch.uint8)
        zero = torch.randint(0, 16, (size, groups), generator=rng).to(torch.uint8) if zeros else None
        parts.append(Quantised(numbers, torch.rand(size, groups, generator=rng), zero))
    joined = Quantised.join(parts)
    assert joined.scale.shape == (10, 6)
    wanted = torch.cat([part.dequantised(torch.float32) for part in parts])
    assert torch.equal(joined.dequantised(torch.float32), wanted)
    alike = Quantised.join([parts[0], parts[2]])
    assert alike.zero is None
    assert torch.equal(alike.dequantised(torch.float32), torch.cat([wanted[:3], wanted[8:]]))


def test_joined_weights_follow_one_another() -> None:
    parts = [torch.randn(size, 32, generator=torch.Generator().manual_seed(size)) for size in (3, 5)]
    for dtype in DTYPE.values():
        joined = Quantised.join([Quantised.of(part, dtype) for part in parts])
        whole = Quantised.of(torch.cat(parts), dtype)
        assert torch.equal(joined.dequantised(torch.float32), whole.dequantised(torch.float32))


def as_served(
    directory: Path,
    dtype: torch.dtype = torch.int8,
    read_as: torch.dtype = torch.float32,
    head: torch.dtype = torch.int8,
) -> PreTrainedModel:
    """transformers' own model with the weights that --quantize serves, in float32.

    head: of 8 bits, what the head becomes where layers have 4."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=read_as).eval().float()
    stored = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is not model.get_output_embeddings():
            weight = stored.get_submodule(name).weight  # rounded once
            module.weight.data = Quantised.of(weight, dtype).dequantised(torch.float32)
        elif dtype == torch.uint8:  # with int4 weights the LM head has 8 bits; embeddings keep their dtype
            module.weight = nn.Parameter(Quantised.of(module.weight, head).dequantised(torch.float32))
    return model


ON_CPU: list[Literal["int8", "int4"]] = ["int8", "int4"]


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_greedy_text_is_that_of_the_rounded_weights(
    checkpoint: Callable[[str], Path], family: str, kind: Literal["int8", "int4"]
) -> None:
    directory = checkpoint(family)
    model = load_model(str(directory), dtype="float32", device=CPU, quantize=kind)
    assert served(model, words(40)) == greedy(as_served(directory, DTYPE[kind]), words(40))


def round_to_e4m3(x: Tensor) -> Tensor:
    """Quantise rows of x as a GPU's GEMM of many rows does."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST[torch.float8_e4m3fn]
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Tensor], Tensor]]:
    """Serve as on a GPU whose GEMMs quantise activations, by these functions one after another."""
    through: list[Callable[[Tensor], Tensor]] = [round_to_e4m3]

    def swap(model: PreTrainedModel, *_: object, **__: object) -> None:
        for function in through:
            for module in model.modules():
                if isinstance(module, QuantisedLinear):
                    module.register_forward_pre_hook(lambda module, inputs, own=function: (own(inputs[0]),))

    monkeypatch.setattr(hf, "fuse", swap)
    monkeypatch.setattr(Quantising, "quantises_activations", True)
    return through


def test_products_that_round_their_inputs_are_proved_with_a_wider_bound(
    checkpoint: Callable[[str], Path],
    rounded: list[Callable[[Tensor], Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve() -> None:
        load_model(str(checkpoint("llama")), dtype="float32", device=CPU, quantize="int8")

    serve()
    monkeypatch.setattr(Quantising, "quantises_activations", False)
    with pytest.raises(UnsupportedModel, match=r"^llama: as it would be served its logits differ"):
        serve()


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (lambda x: x[..., :-1], "fails as it would be served: RuntimeError"),
        (lambda x: x * float("inf"), "as it would be served some of its logits are not finite"),
        (lambda x: x.roll(1, -1), "as it would be served its logits differ from the model's own"),
    ],
)
def test_mistakes_are_found_where_products_round_their_inputs(
    checkpoint: Callable[[str], Path],
    rounded: list[Callable[[Tensor], Tensor]],
    mistake: Callable[[Tensor], Tensor],
    reason: str,
) -> None:
    rounded.append(mistake)
    with pytest.raises(UnsupportedModel, match=f"^llama: {reason}"):
        load_model(str(checkpoint("llama")), dtype="float32", device=CPU, quantize="int8")


def test_a_layer_of_odd_width_keeps_its_dtype_with_int4(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "llama", "llama", hidden_size=64, intermediate_size=80)
    model = load_model(str(directory), dtype="float32", device=CPU, quantize="int4").module
    layers = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj"), True)
    assert quantised_layers(model) == layers | {"down_proj": False, "head": True}


def test_int4_takes_less_than_a_third_of_bfloat16(tmp_path: Path) -> None:
    """Half a byte for a weight, and for each 32 a scale of two bytes and a zero point of one."""
    directory = make_tiny(tmp_path / "llama", "llama", hidden_size=128, intermediate_size=256)
    model = load_model(str(directory), dtype="bfloat16", device=CPU, quantize="int4").module
    packs = [module.packed for module in model.modules() if isinstance(module, Product) and module.packed is not None]
    four = [(pack.values, pack.scale, pack.zero) for pack in packs if pack.zero is not None]
    assert len(four) == 8
    held = sum(part.numel() * part.element_size() for parts in four for part in parts if part is not None)
    weights = sum(2 * numbers.numel() for numbers, _, _ in four)
    assert held == weights // 2 + weights // 32 * 3


def quantised_layers(model: PreTrainedModel) -> dict[str, bool]:
    """Each linear layer as it is served, by the end of its name: whether its weight has 8 or 4 bits."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | Product | nn.Linear):
            packed = getattr(module, "packed", None)
            found[name.rpartition(".")[2]] = packed is not None and packed.scale is not None
    return found


def test_all_but_the_head_and_embeddings(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(str(checkpoint("llama")), dtype="bfloat16", device=CPU, quantize="int8").module
    assert is_fused(model)
    layers = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), True)
    assert quantised_layers(model) == layers | {"head": False}
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_family_that_is_not_fused(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(str(checkpoint("gpt_neox")), dtype="float32", device=CPU, quantize="int8").module
    layers = dict.fromkeys(("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), True)
    assert quantised_layers(model) == layers | {"lm_head": False}


def test_routers_stay(tmp_path: Path) -> None:
    model = load_model(str(make_tiny(tmp_path / "qwen", "qwen2_moe")), dtype="float32", device=CPU, quantize="int8")
    assert {name for name, yes in quantised_layers(model.module).items() if yes} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_weights_that_are_made_up(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As a spare rehearses: there is a config and no weight file."""
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    model = load_model(str(tmp_path), dtype="bfloat16", device=CPU, quantize="int8", random=True)
    assert quantised_layers(model.module)["qkv_proj"]
    assert model.changes == {"weights of linear layers": "int8"}


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """Its tensors have other names in the files than in the model."""
    directory = make_tiny(tmp_path / "mistral3", "mistral3", model_class=model_class("mistral3"))
    model = load_model(str(directory), dtype="float32", device=CPU, quantize="int8").module
    assert quantised_layers(model)["down_proj"]


def test_prefixes_are_not_shared_with_the_plain_model(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    digests = set()
    for kind in ("none", "int8", "int4"):
        loaded = load_model(str(directory), dtype="bfloat16", device=CPU, quantize=kind)
        digests.add(fingerprint(directory, loaded.dtype, changes=loaded.changes))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        ("int8", "cuda", "--quantize int8: only a CPU has GEMMs with int8 weights; --device cpu can do it"),
        ("int4", "cuda", "--quantize int4: the GPU has compute capability 8.9, its GEMMs need 9.0"),
        ("fp8", "cpu", "--quantize fp8: a CPU has no GEMM with fp8 weights; --quantize int8 is made for it"),
        ("fp8", "cuda", "--quantize fp8: the GPU has compute capability 8.9, its GEMMs need 9.0"),
    ],
)
def test_a_device_without_the_product_is_refused(
    kind: Literal["int8", "fp8", "int4"], device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(UnsupportedModel) as caught:
        load_model("builtin", dtype="auto", device=torch.device(device), quantize=kind)
    assert str(caught.value) == reason
    check_kind("none", torch.device(device))


def test_a_model_without_plain_linear_layers_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match="gpt2: --quantize int8: it has no linear layers to quantise"):
        load_model(str(checkpoint("gpt2")), dtype="float32", device=CPU, quantize="int8")


# On a GPU.  Sizes that its GEMMs accept.
LARGE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPU_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LARGE | {"head_dim": 64},
    "qwen2": LARGE,
    "gpt_neox": LARGE | {"num_key_value_heads": 4},
}


def mean_square(error: torch.Tensor) -> float:
    return float(error.pow(2).mean().sqrt())


def at_all_tokens(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    known = torch.tensor([tokens], device=model.device)
    found: torch.Tensor = model(input_ids=known, use_cache=False).logits[0].detach().float().cpu()
    return found


ON_GPU: list[Literal["fp8", "int4"]] = ["fp8", "int4"]


def on_gpu(directory: Path, kind: Literal["fp8", "int4"]) -> LoadedModel:
    return load_model(str(directory), dtype="bfloat16", device=torch.device("cuda"), quantize=kind)


def as_served_on_gpu(directory: Path, kind: Literal["fp8", "int4"]) -> PreTrainedModel:
    return as_served(directory, DTYPE[kind], torch.bfloat16, head=torch.float8_e4m3fn)


def stored_on_gpu(model: nn.Module, kind: type[ops.Fp8] | type[ops.Int4]) -> int:
    """Return the number of linear layers whose weight is stored in this form."""
    attributes = [(module, "weight" if isinstance(module, Product) else "stored") for module in model.modules()]
    return sum(isinstance(getattr(module, name, None), kind) for module, name in attributes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_logits_on_a_gpu_are_those_of_the_rounded_weights(
    tmp_path: Path, family: str, kind: Literal["fp8", "int4"]
) -> None:
    """While one sequence decodes: as far from the float32 model of these weights as its own bfloat16 forward is.

    The prompt of one token is padded, so activations of fp8 GEMMs are quantised to e4m3; later its share is small."""
    directory = make_tiny(tmp_path / family, family, **GPU_FAMILIES[family])
    model = on_gpu(directory, kind)
    assert stored_on_gpu(model.module, ops.Fp8) == (8 if kind == "fp8" else 1)  # int4: the head
    assert stored_on_gpu(model.module, ops.Int4) == (8 if kind == "int4" else 0)
    driver = Driver(model, graph_seconds=0)
    driver.add(words(1))
    driver.step()
    got = []
    for _ in range(100):
        driver.step()
        got.append(driver.worker.logits[0].float().cpu())
    exact = as_served_on_gpu(directory, kind)
    tokens = driver.running[0].tokens[:-1]
    want = at_all_tokens(exact, tokens)
    own = at_all_tokens(exact.bfloat16().cuda(), tokens)
    assert mean_square(torch.stack(got)[40:] - want[41:]) <= 2 * mean_square(own[41:] - want[41:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_logits_of_a_prompt_on_a_gpu(tmp_path: Path, family: str, kind: Literal["fp8", "int4"]) -> None:
    """With many tokens, fp8 GEMMs also quantise activations to e4m3, which has 4 bits fewer than bfloat16.

    With int4 that is the head's.  So the error is at most 16 times that of the float32 model's own bfloat16 forward."""
    directory, prompt = make_tiny(tmp_path / family, family, **GPU_FAMILIES[family]), words(150)
    driver = Driver(on_gpu(directory, kind), graph_seconds=0)
    driver.add(prompt, None, targets=True)
    driver.step()
    exact = as_served_on_gpu(directory, kind)
    want = at_all_tokens(exact, prompt)[:-1]
    own = at_all_tokens(exact.bfloat16().cuda(), prompt)[:-1]
    assert mean_square(driver.worker.logits.float().cpu() - want) <= 16 * mean_square(own - want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
def test_products_on_a_gpu_are_of_bfloat16(tmp_path: Path, kind: Literal["fp8", "int4"]) -> None:
    directory = make_tiny(tmp_path / "llama", "llama", **GPU_FAMILIES["llama"])
    with pytest.raises(UnsupportedModel, match=r"need bfloat16, the model has torch.float16; --dtype bfloat16"):
        load_model(str(directory), dtype="float16", device=torch.device("cuda"), quantize=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
def test_a_model_of_other_sizes_is_refused(tmp_path: Path, kind: Literal["fp8", "int4"]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "head_dim": 64}
    odd = make_tiny(tmp_path / "odd", "llama", num_key_value_heads=1, **sizes)
    with pytest.raises(UnsupportedModel, match=f"llama: --quantize {kind}: it has no linear layers to quantise"):
        on_gpu(odd, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
def test_text_with_graphs_and_preemption(tmp_path: Path, kind: Literal["fp8", "int4"]) -> None:
    """Most of the tokens of 30 sequences that preempt each other are the choice of the rounded weights' float32 model.

    The others are near ties, which the error of rounded inputs decides; with wrong weights one in 640 would agree."""
    directory = make_tiny(tmp_path / "llama", "llama", **GPU_FAMILIES["llama"])
    options: dict[str, Any] = {
        "kv_blocks": 60,
        "max_seqs": 40,
        "step_tokens": 256,
        "admission": "threshold",
        "admit_threshold": 1.0,
    }
    config = EngineConfig(model=str(directory), dtype="bfloat16", quantize=kind, max_model_len=200, **options)
    llm = LLM.over(config, load(config))
    prompts = [words(1 + 7 * i % 90) for i in range(30)]
    answers = llm.generate(prompts, Sampling(temperature=0, ignore_eos=True), max_new_tokens=40)
    assert llm.engine.core.report.totals.preemptions > 0
    exact = as_served_on_gpu(directory, kind)
    chosen = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = answer.outputs[0].token_ids
        found = at_all_tokens(exact, prompt + text)[len(prompt) - 1 : -1]
        chosen += int((found.argmax(-1) == torch.tensor(text)).sum())
    assert chosen >= 0.5 * 30 * 40
    llm.close()
