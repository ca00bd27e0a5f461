"""Quantised multimodal checkpoints, served text-only: equal to transformers' complete model with the exact weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models import hf
from quire.engine.executor.models.quantised.quantised import DTYPE, Quantised, QuantisedLinear
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.served_config import read_config, served_part
from quire.engine.executor.models.sharding import shard_proof
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import ALONE, Ranks
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.model_families import model_class
from tests.executor.driver import GREEDY, Driver, greedy, served
from tests.executor.noted_files import noted_open
from tests.executor.test_quantised import CPU, GPU, check_exact, write_exact
from tests.executor.test_quantised_ranks import texts_of
from tests.executor.test_quantize import at_all_tokens, mean_square
from tests.executor.test_text_tower import load
from tests.executor.test_worker import words
from tests.matrix import each_value, sampled
from tests.quantised import WIDE, quantise_checkpoint
from tests.towers import ORDERS, describe, in_order, in_text, is_of_text, make, make_quantised, reorder

pytestmark = pytest.mark.usefixtures("one_thread")

# What the checkpoints of the hub combine, and how many linear layers of two decoder layers a CPU keeps as stored.
PUBLISHED = [
    ("qwen2_5_vl", "awq-32", 14),
    ("qwen3_vl", "fp8-block", 0),
    ("mistral3", "ct-fp8-channel", 0),
    ("mistral3", "w4-32", 14),
    ("gemma3", "gptq-32", 14),
    ("gemma3", "w4-32", 14),
    ("internvl", "awq-32", 14),
    ("llava", "ct-int8", 14),
]
UP = "model.layers.1.mlp.up_proj"


def read(directory: Path, dtype: str, quantising: Quantising | None = None, ranks: Ranks = ALONE) -> Any:
    """The model before any submodule is swapped."""
    config = served_part(read_config(directory), directory)
    return read_weights(directory, config, dtype, part=True, quantising=quantising, ranks=ranks)


def kept(directory: Path, dtype: str, quantising: Quantising, ranks: Ranks = ALONE) -> dict[str, Quantised]:
    """The weights that have 8 or 4 bits when a checkpoint is served."""
    model = read(directory, dtype, quantising, ranks)
    return {name: part.quantised for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    return str(caught.value)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(("published", "order"), each_value(PUBLISHED, list(ORDERS)))
def test_weights_equal_those_in_float64(published: tuple[str, str, int], order: str, tmp_path: Path) -> None:
    """Dequantised, and as a CPU keeps them, whatever order the names in the files have."""
    family, kind, layers = published
    directory, exact = make_quantised(tmp_path, family, kind)
    wanted = {in_text(name): tensor.double() for name, tensor in exact.items() if is_of_text(name)}
    reorder(directory, order)
    found = read(directory, "float32").state_dict()
    assert found.keys() - {"lm_head.weight"} == wanted.keys() - {"lm_head.weight"}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-7, atol=0)
    stored = kept(directory, "bfloat16", Quantising("none", CPU))
    assert len(stored) == layers
    for name, weight in stored.items():
        made = weight.dequantised(torch.float32).double()
        torch.testing.assert_close(made, wanted[f"{name}.weight"], rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("family", "kind", "layers"), sampled(PUBLISHED, [PUBLISHED[0], PUBLISHED[2], PUBLISHED[4], PUBLISHED[7]])
)
def test_logits_and_text(family: str, kind: str, layers: int, tmp_path: Path) -> None:
    """Equal to transformers' complete model with the exact weights, through the real loader."""
    directory, exact = make_quantised(tmp_path, family, kind)
    model = check_served(directory, family, exact, tmp_path)
    stored = "int8" if kind == "ct-int8" else "int4"
    assert model.changes == ({"weights of linear layers": f"{stored} as stored"} if layers else {})


def check_served(directory: Path, family: str, exact: dict[str, Tensor], folder: Path) -> hf.LoadedModel:
    """Compare what is served with the complete model.

    The bound is that of 14 roundings: of inputs to 16 bits where weights are kept, else of float32."""
    write_exact(folder / "plain" / family, exact, folder / "exact", torch.float32)
    whole = model_class(family).from_pretrained(folder / "exact", dtype=torch.float32).eval()
    model, prompt = load(directory), words(40)
    driver = Driver(model)
    driver.add(prompt, None, targets=True)
    driver.step()
    want = at_all_tokens(whole, prompt)[:-1]
    rounding = 1 / 65_000 if model.changes else torch.finfo(torch.float32).eps
    assert mean_square(driver.worker.logits.float() - want) <= 14 * rounding * float(want.abs().max())
    assert served(model, prompt) == greedy(whole, prompt)
    return model


WIDE_TEXT = WIDE | {"num_key_value_heads": 2, "intermediate_size": 512}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("stored", "order"), each_value([("qwen3_vl", "fp8-block"), ("mistral3", "ct-fp8-channel")], ["old", "new"])
)
def test_fp8_stays_as_it_is_stored(stored: tuple[str, str], order: str, tmp_path: Path) -> None:
    """As a GPU would keep it; read on the host."""
    family, kind = stored
    directory, exact = make_quantised(tmp_path, family, kind, text_config=WIDE_TEXT)
    quantising = Quantising("none", GPU)
    found = kept(reorder(directory, order), "bfloat16", quantising)
    assert quantising.changes == {"weights of linear layers": "fp8 as stored"}
    check_exact(found, {in_text(name): tensor for name, tensor in exact.items()})


def test_an_activation_scale_of_mistral(tmp_path: Path) -> None:
    """As its fp8 files have it: one scale of each weight, and one of its inputs that is not used."""
    directory, exact = make_quantised(tmp_path, "mistral3", "fp8-tensor")
    rewrite(directory, lambda tensors: renamed(tensors, {"weight_scale": "weight_scale_inv"}))
    rewrite(directory, lambda tensors: renamed(tensors, {"input_scale": "activation_scale"}))
    describe(directory, "fp8-tensor", modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector"])
    check_served(directory, "mistral3", exact, tmp_path)


def renamed(tensors: dict[str, Tensor], endings: dict[str, str]) -> None:
    """Change the last part of names."""
    for name in list(tensors):
        before, _, end = name.rpartition(".")
        if end in endings:
            tensors[f"{before}.{endings[end]}"] = tensors.pop(name)


def test_a_head_that_is_quantised(tmp_path: Path) -> None:
    """Its weight has another name in the files, by which the model is known to have a head of its own."""
    directory, exact = make_quantised(tmp_path, "qwen2_5_vl", "awq-32", keep=())
    assert "lm_head.qweight" in load_file(directory / "model.safetensors")
    model = check_served(directory, "qwen2_5_vl", exact, tmp_path)
    assert not model.module.config.tie_word_embeddings


@pytest.mark.parametrize(("stored", "order"), each_value([("qwen2_5_vl", "awq-32"), ("gemma3", "w4-32")], list(ORDERS)))
def test_a_module_of_the_text_that_is_not_quantised(stored: tuple[str, str], order: str, tmp_path: Path) -> None:
    """The config names it as one version of transformers did, the files as another."""
    family, kind = stored
    directory, exact = make_quantised(tmp_path, family, kind, keep=("lm_head", "layers.1.mlp.up_proj"))
    named = ["lm_head", in_order(UP, order), "visual", "re:.*vision_tower.*"]
    describe(directory, kind, ignore=named, modules_to_not_convert=named)
    check_served(directory, family, exact, tmp_path)
    assert len(kept(directory, "bfloat16", Quantising("none", CPU))) == 13


@pytest.mark.parametrize(
    ("entry", "order"),
    each_value(
        [*(in_order(UP, order) for order in ORDERS), r"re:.*layers\.1\.mlp\.up_proj", r"re:.*\.1\..*up_proj$"],
        list(ORDERS),
    ),
)
def test_a_module_that_is_quantised_and_ignored_is_refused(entry: str, order: str, tmp_path: Path) -> None:
    """By a name of any version, and by an expression that means it under the names of the files and of today."""
    directory, _ = make_quantised(tmp_path, "mistral3", "w4-32")
    describe(reorder(directory, order), "w4-32", ignore=["lm_head", entry])
    reason = "is quantised by compressed-tensors, but the config says that it is not"
    assert refusal(directory) == f"mistral: {UP}.weight {reason}"


@pytest.mark.parametrize(
    ("ignore", "order"),
    each_value(
        [
            ["visual", "re:.*lm_head", "re:visual.*", "re:model.visual.*"],
            ["re:.*lm_head", "re:^(?!.*language_model).*"],
            ["re:model\\.(?!language_model).*", "lm_head"],
            ["model.visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.up_proj", "up_proj", "model.layers.1.mlp.up"],
        ],
        list(ORDERS),
    ),
)
def test_lists_that_ignore_other_towers(ignore: list[str], order: str, tmp_path: Path) -> None:
    """The second and third would be all of the model where the files say `model.layers`."""
    directory, _ = make_quantised(tmp_path, "qwen2_5_vl", "w4-32")
    describe(reorder(directory, order), "w4-32", ignore=ignore)
    assert len(kept(directory, "bfloat16", Quantising("none", CPU))) == 14


@pytest.mark.parametrize(
    ("case", "order"),
    each_value(
        [
            ("qwen2_5_vl", "awq-32", ".scales", "is quantised by awq, but its scales is not in the files"),
            ("gemma3", "gptq-32", ".qzeros", "is quantised by gptq, but its qzeros is not in the files"),
            (
                "mistral3",
                "w4-32",
                ".weight_scale",
                "is quantised by compressed-tensors, but its scale is not in the files",
            ),
            ("mistral3", "ct-fp8-channel", ".weight_scale", "is F8_E4M3, and its scales are not in the weight files"),
            ("qwen3_vl", "fp8-block", ".weight_scale_inv", "is F8_E4M3, and its scales are not in the weight files"),
        ],
        list(ORDERS),
    ),
)
def test_a_missing_part_is_refused(case: tuple[str, str, str, str], order: str, tmp_path: Path) -> None:
    family, kind, part, reason = case
    directory, _ = make_quantised(tmp_path, family, kind)
    rewrite(reorder(directory, order), lambda tensors: tensors.pop(in_order(f"{UP}{part}", order)))
    assert refusal(directory).endswith(f": {UP}.weight {reason}")


@pytest.mark.parametrize(("family", "kind"), [("qwen2_5_vl", "awq-32"), ("mistral3", "ct-fp8-channel")])
def test_other_towers_are_never_read_nor_needed(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are quantised, and by what no reader here knows."""
    directory, _ = make_quantised(tmp_path, family, kind)
    wanted = read(directory, "bfloat16").state_dict()
    of_text = {name: each for name, each in load_file(directory / "model.safetensors").items() if is_of_text(name)}
    [other] = [
        each
        for each in ("visual", "vision_tower")
        if f"{each}." in str(load_file(directory / "model.safetensors").keys())
    ]
    odd = {f"{other}.odd.weight": torch.ones(8, 8).to(torch.float8_e5m2), f"{other}.odd.qweight": torch.ones(3).int()}
    sizes: list[int] = []
    monkeypatch.setattr(
        "quire.engine.executor.models.quantised.stored_weights.safe_open", noted_open(lambda x: sizes.append(x.nbytes))
    )
    for change in (lambda tensors: tensors.update(odd), lambda tensors: keep_only(tensors, of_text)):
        rewrite(directory, change)
        sizes.clear()
        found = read(directory, "bfloat16").state_dict()
        assert sum(sizes) == sum(each.nbytes for each in of_text.values())
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def keep_only(tensors: dict[str, Tensor], names: Collection[str]) -> None:
    for name in tensors.keys() - names:
        del tensors[name]


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    directory, _ = make_quantised(tmp_path, "mistral3", "w4-32")
    rewrite(directory, lambda tensors: tensors.update({"another_tower.norm.weight": torch.ones(128)}))
    assert refusal(directory).startswith("mistral: the weight files hold another_tower.norm.weight, which the model")


@pytest.mark.parametrize("kind", ["w4-32", "plain"])
def test_two_tensors_of_one_name_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them is meant is not known; ranks read plain files in the same way."""
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)
    directory, _ = make_quantised(tmp_path, "llava", "w4-32")
    directory = directory if kind == "w4-32" else tmp_path / "plain" / "llava"
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": torch.ones(640, 128)}))
    config = served_part(read_config(directory), directory)
    both = r"language_model\.lm_head\.weight and lm_head\.weight are both lm_head\.weight of the model$"
    with pytest.raises(ModelLoadError, match=both):
        read_weights(directory, config, "auto", part=True, ranks=Ranks(0, 2))


@pytest.mark.parametrize("place", ["text_config", "hf_quant_config"])
def test_where_the_config_is(place: str, tmp_path: Path) -> None:
    kind = "modelopt" if place == "hf_quant_config" else "awq-32"
    directory, exact = make_quantised(tmp_path, "qwen2_5_vl", kind)
    described = json.loads((directory / "config.json").read_bytes())
    config = described.pop("quantization_config")
    if place == "text_config":
        described["text_config"]["quantization_config"] = config
    else:
        excluded = ["lm_head*", "model.visual*", "*.merger.mlp*"]
        content = {"quantization": config | {"exclude_modules": excluded}, "producer": {"name": "modelopt"}}
        (directory / "hf_quant_config.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps(described))
    check_served(directory, "qwen2_5_vl", exact, tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "quantize", "changes"),
    [
        ("qwen2_5_vl", "awq-32", "int4", "int4, int4 as stored"),
        ("qwen2_5_vl", "awq-32", "int8", "int8"),
        ("mistral3", "ct-fp8-channel", "int8", "int8"),
        ("qwen3_vl", "fp8-block", "int4", "int4"),
    ],
)
def test_weights_are_rounded_on_request(
    family: str, kind: str, quantize: Literal["int8", "int4"], changes: str, tmp_path: Path
) -> None:
    directory, exact = make_quantised(tmp_path, family, kind)
    exact = {in_text(name): tensor for name, tensor in exact.items()}
    found = kept(directory, "bfloat16", Quantising(quantize, CPU))
    found.pop("lm_head", None)
    assert len(found) == 14
    for name, weight in found.items():
        wanted = exact[f"{name}.weight"].float()
        if "as stored" not in changes:
            wanted = Quantised.of(wanted, DTYPE[quantize]).dequantised(torch.float32)
        torch.testing.assert_close(weight.dequantised(torch.float32), wanted, atol=0.01, rtol=0)
    assert load(directory, quantize=quantize).changes == {"weights of linear layers": changes}


@pytest.mark.parametrize("order", ORDERS)
def test_scales_of_keys_and_values(order: str, tmp_path: Path) -> None:
    """Those of the text.  Layers of a vision tower have the same layer indices."""
    directory, _ = make_quantised(tmp_path, "mistral3", "ct-fp8-channel")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    describe(directory, "ct-fp8-channel", kv_cache_scheme=scheme)
    other = {f"vision_tower.transformer.layers.0.self_attn.{side}_scale": torch.tensor(9.0) for side in "kv"}
    own = {
        f"language_model.model.layers.{layer}.self_attn.{side}_scale": torch.tensor(scale + layer)
        for layer in range(2)
        for side, scale in (("k", 0.5), ("v", 0.25))
    }
    rewrite(directory, lambda tensors: tensors.update(own | other))
    found = load(reorder(directory, order)).kv_scales
    assert found is not None
    assert [layer.tolist() for layer in found if layer is not None] == [
        [[0.5, 0.5], [0.25, 0.25]],
        [[1.5, 1.5], [1.25, 1.25]],
    ]


SAMPLED = Sampling(temperature=2, seed=3, ignore_eos=True)  # sees more than greedy text where that hardly varies


@pytest.mark.parametrize(
    ("family", "kind", "quantize", "sampling"),
    sampled(
        [
            ("gemma3", "gptq-8", "none", SAMPLED),
            ("mistral3", "ct-fp8-channel", "none", SAMPLED),
            ("qwen3_vl", "fp8-block", "none", SAMPLED),
            ("qwen2_5_vl", "awq-32", "none", GREEDY),  # inputs are rounded with a scale of each rank
            ("qwen2_5_vl", "awq-32", "int8", GREEDY),
            ("qwen3_vl", "fp8-block", "int8", GREEDY),
        ],
        [
            ("mistral3", "ct-fp8-channel", "none", SAMPLED),
            ("qwen2_5_vl", "awq-32", "none", GREEDY),
            ("qwen3_vl", "fp8-block", "int8", GREEDY),
        ],
    ),
)
def test_the_text_of_one_rank(family: str, kind: str, quantize: str, sampling: Sampling, tmp_path: Path) -> None:
    directory, _ = make_quantised(tmp_path, family, kind)
    one = texts_of(directory, 1, sampling, quantize=quantize)
    assert one == texts_of(directory, 2, sampling, quantize=quantize)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_keep_the_parts_of_one(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)
    directory, _ = make_quantised(tmp_path, "qwen2_5_vl", "awq-32", text_config={"intermediate_size": 256})
    whole = kept(reorder(directory, order), "bfloat16", Quantising("none", CPU))
    parts = [kept(directory, "bfloat16", Quantising("none", CPU), Ranks(rank, 2)) for rank in range(2)]
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    assert len(whole) == 14
    for name, weight in whole.items():
        dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
        numbers = torch.cat([part[name].values for part in parts], dim)
        assert torch.equal(numbers, weight.values), name


EXPERTS = "language_model.model.layers.0.feed_forward.experts."  # layer 1 has none


def split_experts(tensors: dict[str, Tensor]) -> None:
    """Store the experts of Llama 4 one by one, as tools that quantise it do."""
    for name in [name for name in tensors if ".experts." in name]:
        before, _, part = name.rpartition(".")
        for number, expert in enumerate(tensors.pop(name)):
            parts = expert.T.chunk(2) if part == "gate_up_proj" else [expert.T]
            names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            for own, weight in zip(names, parts, strict=True):
                tensors[f"{before}.{number}.{own}.weight"] = weight.contiguous()


def with_experts_in_one(exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as the model has them."""
    found = {name: tensor for name, tensor in exact.items() if ".experts." not in name}
    gate, up, down = (
        torch.stack([exact[f"{EXPERTS}{number}.{part}_proj.weight"].T.double() for number in range(4)])
        for part in ("gate", "up", "down")
    )
    found |= {f"{EXPERTS}gate_up_proj": torch.cat([gate, up], 2), f"{EXPERTS}down_proj": down}
    return found


def make_llama4(directory: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """As its checkpoints are published: experts one by one, attention and routers in floating point."""
    plain = make(directory / "plain", "llama4")
    rewrite(plain, split_experts)
    keep = ("lm_head", "router", "self_attn", "vision_model", "multi_modal_projector")
    exact = quantise_checkpoint(plain, directory / kind, kind, keep=keep)
    ignored = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:vision_model.*", "re:multi_modal_projector.*"]
    return describe(directory / kind, kind, ignore=ignored), exact


@pytest.mark.parametrize(("kind", "order"), each_value(["ct-fp8-channel", "w4-32"], ["old", "new"]))
def test_experts_of_llama4(kind: str, order: str, tmp_path: Path) -> None:
    """The model holds all experts of a layer in two tensors, transposed."""
    directory, exact = make_llama4(tmp_path, kind)
    assert sum(".experts." in name for name in exact) == 4 * 3
    model = check_served(reorder(directory, order), "llama4", with_experts_in_one(exact), tmp_path)
    assert bool(model.changes) == (kind == "w4-32")  # changes are those of the shared expert


def test_experts_of_llama4_in_one_tensor(tmp_path: Path) -> None:
    """They are in floating point there, and the shared expert is not."""
    directory, exact = make_quantised(tmp_path, "llama4", "ct-fp8-channel", keep=("lm_head", "router"))
    assert EXPERTS + "gate_up_proj" in exact
    check_served(directory, "llama4", exact, tmp_path)


def test_an_expert_that_is_not_in_the_files(tmp_path: Path) -> None:
    directory, _ = make_llama4(tmp_path, "w4-32")
    name = EXPERTS + "2.up_proj"
    rewrite(directory, lambda tensors: keep_only(tensors, [each for each in tensors if not each.startswith(name)]))
    lacking = "the weight files lack model.layers.0.feed_forward.experts.2.up_proj.weight"
    assert refusal(directory) == f"llama4_text: {lacking}"


def test_other_experts_than_the_config_says(tmp_path: Path) -> None:
    directory, _ = make_llama4(tmp_path, "w4-32")
    rewrite(directory, lambda tensors: keep_only(tensors, [each for each in tensors if ".experts.3." not in each]))
    assert "experts.down_proj has shape [3, 192, 128], the config says [4, 192, 128]" in refusal(directory)
