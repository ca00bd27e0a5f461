"""Sharded quantised weights: each rank reads its shard, with the scales of the unsharded weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.engine.executor.models.cuts import Cut
from quire.engine.executor.models.quantised.dequantise import dequantise
from quire.engine.executor.models.quantised.quantisation import Quantisation, read_quantisation
from quire.engine.executor.models.quantised.quantised import Quantised, QuantisedLinear
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.quantised.stored_areas import read_area
from quire.engine.executor.models.quantised.stored_weights import StoredWeights
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.models.sharding import shard_proof
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import Ranks
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests.checkpoints import make_checkpoint
from tests.executor.driver import GREEDY
from tests.executor.noted_files import Noted, noted_open
from tests.executor.test_parallel import opened, prompts, token_ids
from tests.matrix import each_value, sampled
from tests.quantised import KINDS, TWICE_AS_WIDE, WIDE, quantise_checkpoint

Made = Callable[[str], tuple[Path, dict[str, Any]]]
CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the latter of a reader that never asks for it
DOWN, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "up"))  # [128, 256], [256, 128]


def weight_of(directory: Path, name: str, cut: Cut | None, dtype: torch.dtype = torch.float32) -> Tensor:
    how = read_quantisation(directory, "llama")
    assert how is not None
    weights = StoredWeights(directory, read_config(directory), how)
    with weights.opened({} if cut is None else {name: cut}, dtype, Quantising("none", CPU)) as tensors:
        found: Tensor = tensors[name][...]
        return found


@pytest.mark.parametrize("kind", sampled(list(KINDS), list(KINDS)[::2]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_part_is_the_same_part_of_the_whole(quantised: Made, kind: str, data: st.DataObject) -> None:
    """Also one that begins or ends within a word, a group or a block."""
    directory, _ = quantised(kind)
    name, dim = data.draw(st.sampled_from([DOWN, UP])), data.draw(st.sampled_from([-1, -2]))
    whole = weight_of(directory, name, None)
    halves = data.draw(st.sampled_from([1, 2]))
    first, end = sorted(data.draw(st.sets(st.integers(0, whole.shape[dim] // halves), min_size=2, max_size=2)))
    cut = Cut(dim, first, end, halves=halves, padding=data.draw(st.sampled_from([0, 3])))
    assert torch.equal(weight_of(directory, name, cut), cut.take(whole, tuple(whole.shape)))


@given(st.data())
def test_any_part_of_experts_in_one_tensor(data: st.DataObject) -> None:
    """mxfp4, whose model multiplies with the transpose, and e4m3 with scales of a channel or a block."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    kind = data.draw(st.sampled_from(["mxfp4", "channel", "block"]))
    if kind == "mxfp4":
        how = Quantisation("mxfp4", "mxfp4", "group", 4, group=32)
        parts = {
            "blocks": torch.randint(0, 256, (2, 24, 3, 16), generator=random, dtype=torch.uint8),
            "scales": torch.randint(120, 130, (2, 24, 3), generator=random, dtype=torch.uint8),
        }
    else:
        how = Quantisation("fp8", "scaled", "block" if kind == "block" else "channel", 8, block=(8, 16))
        numbers = torch.randn(2, 24, 50, generator=random).to(torch.float8_e4m3fn)
        scale = torch.rand(2, 3, 4, generator=random) if kind == "block" else torch.rand(2, 24, generator=random)
        parts = {"weight": numbers, "scale": scale}
    whole = dequantise(how, parts, torch.float32)
    dim = data.draw(st.sampled_from([-1, -2]))
    first, end = sorted(data.draw(st.sets(st.integers(0, whole.shape[dim]), min_size=2, max_size=2)))
    [where] = Cut(dim, first, end).pieces(tuple(whole.shape))
    read, inner = read_area(how, {name: Noted(part, lambda _: None) for name, part in parts.items()}, where)
    assert torch.equal(dequantise(how, read, torch.float32)[inner], whole[where])


@pytest.mark.parametrize(
    ("kind", "dim"),
    each_value(["fp8-block", "ct-int8", "awq-32", "gptq-32", "w4-64-asym", "w4-128-order", "w8-64"], [-1, -2]),
)
def test_two_ranks_read_each_number_once(quantised: Made, kind: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For areas that end at units.  Only scales may be read by both ranks."""
    read: list[int] = []
    noting = noted_open(lambda found: read.append(found.nbytes))
    monkeypatch.setattr("quire.engine.executor.models.quantised.stored_weights.safe_open", noting)
    directory, name = quantised(kind)[0], {-1: DOWN, -2: UP}[dim]
    weight_of(directory, name, None)
    whole = sorted(read)
    read.clear()
    for first in (0, 128):
        weight_of(directory, name, Cut(dim, first, first + 128))
    assert sum(whole) <= sum(read) <= sum(whole) + sum(whole[:-1])
    assert sorted(read)[-2:] == [whole[-1] // 2] * 2  # the weights


class RowsOf(Ranks):
    """One rank of two that computes alone: it notes what it would exchange, or gets the answers of both."""

    def __init__(self, rank: int, answers: list[Tensor] | None = None) -> None:
        super().__init__(rank, 2)
        self.seen: list[Tensor] = []
        self.answers = answers

    def all_max(self, values: Tensor) -> Tensor:
        self.seen.append(values)
        return values if self.answers is None else self.answers[len(self.seen) - 1]


def parts_of(directory: Path, make: Callable[[], Quantising], dtype: str) -> tuple[list[Any], list[Any]]:
    """Both ranks' models and how they were quantised, each as if the other rank were there."""
    seen = []
    for rank in range(2):
        read_weights(directory, read_config(directory), dtype, ranks=(ranks := RowsOf(rank)), quantising=make())
        seen.append(ranks.seen)
    answers = [torch.maximum(a, b) for a, b in zip(*seen, strict=True)]
    hows = [make() for _ in range(2)]
    models = [
        read_weights(directory, read_config(directory), dtype, ranks=RowsOf(rank, answers), quantising=hows[rank])
        for rank in range(2)
    ]
    return models, hows


def check_parts(directory: Path, make: Callable[[], Quantising], dtype: str = "bfloat16") -> None:
    """All linear layers are quantised; values, scales and zero points of both ranks equal those of one rank."""
    how = make()
    whole = read_weights(directory, read_config(directory), dtype, quantising=how)
    models, hows = parts_of(directory, make, dtype)
    assert how.changes == hows[0].changes == hows[1].changes != {}
    layers = {name: part.quantised for name, part in whole.named_modules() if isinstance(part, QuantisedLinear)}
    assert len(layers.keys() - {"lm_head"}) == 14
    for name, weight in layers.items():
        a, b = (model.get_submodule(name).quantised for model in models)
        zero: Tensor | None = None
        if name.endswith(("o_proj", "down_proj")):
            numbers = torch.cat([a.values.view(torch.uint8), b.values.view(torch.uint8)], 1)
            scales = [torch.cat([a.scale, b.scale], 1)] if weight.scale.dim() == 2 else [a.scale, b.scale]
            if a.zero is not None and b.zero is not None:
                zero = torch.cat([a.zero, b.zero], 1)
        else:
            joined = Quantised.join([a, b])
            numbers, scales, zero = joined.values.view(torch.uint8), [joined.scale], joined.zero
        assert torch.equal(numbers, weight.values.view(torch.uint8)), name
        assert all(torch.equal(scale, weight.scale) for scale in scales), name
        assert (zero is None) == (weight.zero is None), name
        assert zero is None or weight.zero is None or torch.equal(zero, weight.zero), name


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank proves its parts: that takes all of them."""
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("kind", ["ct-int8", "ct-int8-tensor", "w8-all"])
def test_int8_of_both_ranks_is_that_of_one(quantised: Made, kind: str) -> None:
    check_parts(quantised(kind)[0], lambda: Quantising("none", CPU))


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("kind", ["awq-32", "gptq-32", "gptq-64-asym", "w4-32", "w4-64-asym"])
def test_int4_of_both_ranks_is_that_of_one(quantised: Made, kind: str) -> None:
    check_parts(quantised(kind)[0], lambda: Quantising("none", CPU))


@pytest.mark.usefixtures("unproved")
def test_parts_that_end_within_a_group_are_dequantised(quantised: Made) -> None:
    """`o_proj` and `down_proj` have 256 inputs in two groups of 128, which four ranks would cut."""
    directory, _ = quantised("awq-128")
    config = read_config(directory)
    model = read_weights(directory, config, "float32", ranks=Ranks(1, 4), quantising=Quantising("none", CPU))
    kept = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
    assert kept == {"k_proj", "v_proj", "q_proj", "gate_proj", "up_proj"}


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(("kind", "quantize"), each_value(["plain", "w4-64-asym"], ["int8", "fp8", "int4"]))
def test_what_both_ranks_round_is_what_one_rounds(
    wide: Callable[[str], tuple[Path, Path, dict[str, Any]]], kind: str, quantize: Literal["int8", "fp8", "int4"]
) -> None:
    """Rounded from a checkpoint in floating point, and from one that is dequantised first."""
    floating, packed, _ = wide("w4-64-asym")
    check_parts(floating if kind == "plain" else packed, lambda: Quantising(quantize, CPU))


@pytest.mark.usefixtures("unproved", "hopper")
@pytest.mark.parametrize(
    "kind", sampled(["fp8-block", "ct-fp8-channel", "ct-fp8-block", "modelopt"], ["fp8-block", "ct-fp8-channel"])
)
def test_fp8_of_both_ranks_is_that_of_one(tmp_path: Path, kind: str) -> None:
    """As a GPU would keep it; read on the host."""
    plain = make_checkpoint(tmp_path / "plain", "llama", **TWICE_AS_WIDE)
    quantise_checkpoint(plain, tmp_path / kind, kind)
    check_parts(tmp_path / kind, lambda: Quantising("none", GPU))


@pytest.mark.usefixtures("unproved", "hopper")
@pytest.mark.parametrize("kind", sampled(["awq-128", "gptq-32", "w4-64-asym"], ["w4-64-asym"]))
def test_int4_of_both_ranks_on_a_gpu_is_that_of_one(tmp_path: Path, kind: str) -> None:
    """As a GPU would keep it; read on the host."""
    plain = make_checkpoint(tmp_path / "plain", "llama", **TWICE_AS_WIDE)
    quantise_checkpoint(plain, tmp_path / kind, kind)
    check_parts(tmp_path / kind, lambda: Quantising("none", GPU))


@pytest.mark.usefixtures("unproved", "hopper")
def test_parts_that_no_int4_product_of_a_gpu_takes_are_dequantised(tmp_path: Path) -> None:
    """With one rank `down_proj` has 384 inputs; a half of them is no multiple of 128."""
    plain = make_checkpoint(tmp_path / "plain", "llama", **(TWICE_AS_WIDE | {"intermediate_size": 384}))
    quantise_checkpoint(plain, tmp_path / "packed", "w4-32")
    [model, _], _ = parts_of(tmp_path / "packed", lambda: Quantising("none", GPU), "bfloat16")
    kept = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
    assert kept == {"k_proj", "v_proj", "q_proj", "o_proj", "gate_proj", "up_proj"}


@pytest.mark.usefixtures("unproved", "hopper")
def test_parts_that_no_fp8_product_takes_are_dequantised(tmp_path: Path) -> None:
    """With one rank `o_proj` and `down_proj` have 512 inputs; a half of them is too small for blocks."""
    plain = make_checkpoint(tmp_path / "plain", "llama", **(TWICE_AS_WIDE | WIDE | {"intermediate_size": 512}))
    quantise_checkpoint(plain, tmp_path / "blocks", "fp8-block")
    [model, _], _ = parts_of(tmp_path / "blocks", lambda: Quantising("none", GPU), "bfloat16")
    kept = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
    assert kept == {"k_proj", "v_proj", "q_proj", "gate_proj", "up_proj"}


def texts_of(directory: Path, ranks: int, sampling: Sampling = GREEDY, **options: Any) -> list[list[int]]:
    llm = opened(directory, ranks, **options)
    found = token_ids(llm.generate(prompts(4), sampling, max_new_tokens=20))
    llm.close()
    assert all(len(set(text)) > 3 for text in found)
    return found


@pytest.mark.parametrize(
    "kind",
    sampled(
        ["fp8-block", "awq-32", "gptq-128-order", "gptq-all", "w4-64-asym", "ct-int8"],
        ["fp8-block", "gptq-128-order", "ct-int8"],
    ),
)
def test_the_text_of_one_rank(quantised: Made, kind: str) -> None:
    directory, _ = quantised(kind)
    assert texts_of(directory, 1) == texts_of(directory, 2)


@pytest.mark.parametrize(("kind", "quantize"), each_value(["plain", "w4-32"], ["int8", "int4"]))
def test_the_text_of_one_rank_that_rounds(plain: Path, quantised: Made, kind: str, quantize: str) -> None:
    directory = plain if kind == "plain" else quantised(kind)[0]
    assert texts_of(directory, 1, quantize=quantize) == texts_of(directory, 2, quantize=quantize)


def test_a_head_that_is_tied_to_the_embeddings_in_int8_beside_int4(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tied", "qwen3")
    assert read_config(directory).tie_word_embeddings
    assert texts_of(directory, 1, quantize="int4") == texts_of(directory, 2, quantize="int4")


def test_four_ranks_share_two_kv_heads_in_int8(plain: Path) -> None:
    assert texts_of(plain, 1, quantize="int8") == texts_of(plain, 4, quantize="int8")


def test_experts_that_are_quantised_one_by_one(tmp_path: Path) -> None:
    plain = make_tiny(tmp_path / "plain", "qwen3_moe")
    quantise_checkpoint(plain, tmp_path / "w4", "w4-32", keep=("lm_head", "mlp.gate"))
    assert texts_of(tmp_path / "w4", 1) == texts_of(tmp_path / "w4", 2)


@pytest.mark.usefixtures("unproved")
def test_the_parts_of_experts_in_mxfp4(gpt_oss: Path) -> None:
    """Gate and up of a unit are neighbours, so they stay together.  The bias of the sum is rank 0's."""
    config = read_config(gpt_oss)
    whole = read_weights(gpt_oss, config, "float32").state_dict()
    first, second = (read_weights(gpt_oss, config, "float32", ranks=Ranks(rank, 2)).state_dict() for rank in (0, 1))
    dims = {"gate_up_proj": -1, "gate_up_proj_bias": -1, "down_proj": -2, "sinks": -1, "q_proj.bias": -1}
    for name, dim in dims.items():
        [path] = [path for path in whole if ".1." in path and path.endswith(name)]
        assert first[path].shape[dim] == whole[path].shape[dim] // 2
        assert torch.equal(torch.cat([first[path], second[path]], dim), whole[path]), name
    [path] = [path for path in whole if ".1." in path and path.endswith("down_proj_bias")]
    assert torch.equal(first[path], whole[path])
    assert whole[path].any()
    assert not second[path].any()


def test_the_text_of_one_rank_with_experts_in_mxfp4(gpt_oss: Path) -> None:
    assert texts_of(gpt_oss, 1) == texts_of(gpt_oss, 2)


def test_made_up_weights_in_int8(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    texts_of(tmp_path, 2, Sampling(temperature=1, seed=3, ignore_eos=True), load="random", quantize="int8")


def test_a_quantised_head_whose_vocabulary_is_not_divisible(tmp_path: Path) -> None:
    """641 tokens for two ranks: the last rank's part is padded."""
    plain = make_checkpoint(tmp_path / "plain", "llama", vocab_size=641, intermediate_size=256)
    quantise_checkpoint(plain, tmp_path / "fp8", "fp8-tensor", keep=())
    with safe_open(tmp_path / "fp8" / "model.safetensors", "pt") as file:
        assert file.get_slice("lm_head.weight").get_dtype() == "F8_E4M3"
    assert texts_of(tmp_path / "fp8", 1) == texts_of(tmp_path / "fp8", 2)


def test_a_packed_weight_whose_shape_is_another_is_refused(quantised: Made, tmp_path: Path) -> None:
    """Also by a rank, which reads only some of its words."""
    directory, _ = quantised("w4-32")
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors[f"{DOWN}_shape"] = torch.tensor([128, 200])
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"its packed has shape \[128, 32\], for a weight of \[128, 200\]"):
        weight_of(tmp_path, DOWN, Cut(-1, 0, 128))
