"""What loads and what is refused: always with one line that names what is wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, PreTrainedModel
from transformers.integrations import peft as peft_of_transformers
from transformers.models.auto import auto_factory

from quire.engine.executor import attention
from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.kv_cache import KVShape, bytes_per_token
from quire.engine.executor.models import hf
from quire.engine.executor.models.linear import PackedLinear
from quire.engine.executor.models.probe import probe
from quire.engine.executor.models.served_config import check_architecture, check_length, read_config
from quire.engine.executor.models.sources import hub
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import Ranks
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from quire.loadtest.studies.tiny_checkpoints import tiny_config
from tests.checkpoints import FAMILIES, MAX_LEN, VOCAB, config_of, make_checkpoint, tokenizer

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]


def load(directory: Path, **options: object) -> hf.LoadedModel:
    return hf.load_model(str(directory), **({"dtype": "auto", "device": CPU} | options))  # type: ignore[arg-type]


def plain(directory: Path) -> PreTrainedModel:
    """The model as transformers made it: with every module the probe is to see."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention.NAME).eval()


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A llama checkpoint of one's own to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads(checkpoint: Checkpoint, family: str) -> None:
    model = load(checkpoint(family))
    assert len(model.layers) == model.module.config.num_hidden_layers
    assert {shape.head_size for shape in model.layers} == {64}
    assert model.eos_ids == [tokenizer().eos_token_id]
    assert model.vocab_size == model.module.config.vocab_size
    assert model.max_model_len == 1024
    assert model.dtype == torch.float32


def test_grouped_queries_are_read_from_the_tensors(checkpoint: Checkpoint) -> None:
    assert load(checkpoint("llama")).layers == [KVShape(heads=2, head_size=64)] * 2
    assert load(checkpoint("phi3")).layers[0].heads == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(checkpoint: Checkpoint, dtype: str) -> None:
    assert load(checkpoint("llama"), dtype=dtype).dtype == getattr(torch, dtype)


def test_sharded_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = load(checkpoint("qwen3"))
    AutoModelForCausalLM.from_pretrained(checkpoint("qwen3")).save_pretrained(tmp_path / "cut", max_shard_size="200KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    cut = load(tmp_path / "cut")
    assert all(map(torch.equal, whole.module.state_dict().values(), cut.module.state_dict().values()))
    next((tmp_path / "cut").glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match=r"index\.json names model-00002-of-\d+\.safetensors, which is not there"):
        load(tmp_path / "cut")


@pytest.mark.parametrize("family", ["falcon", "bloom", "mpt", "gpt_neo", "stablelm"])
def test_attention_past_the_interface_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{family}: computes attention itself"):
        check_architecture(AutoConfig.for_model(family))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "an encoder-decoder"),
        ("bart", "an encoder-decoder"),
        ("vit", "transformers has no class of this type that generates text"),
        ("mamba", "layers of type linear_attention; only full and sliding-window attention are computed"),
        ("zamba2", "layers of type hybrid; only full and sliding-window attention are computed"),
    ],
)
def test_other_architectures_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{family}: {reason}"):
        check_architecture(AutoConfig.for_model(family))


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 640}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"head_dim": 520, "num_key_value_heads": 1}, "head size 520 is over 512"),
        ("bert", {"intermediate_size": 64}, "attention that is not causal"),
    ],
)
def test_the_probe_sees_what_attention_is_asked_for(family: str, changes: dict[str, object], reason: str) -> None:
    """Architectures that use the interface, but with an argument that is not implemented."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config_of(family, **(SMALL | changes)), attn_implementation=attention.NAME
        )
    with pytest.raises(UnsupportedModel, match=rf"^{family}: {reason}"):
        probe(model.eval())


def test_the_probe_catches_layers_that_never_attend(checkpoint: Checkpoint) -> None:
    model = plain(checkpoint("llama"))
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match=r"^llama: 1 of 2 layers went through the attention interface"):
        probe(model)


def test_the_probe_catches_state_that_leaks_between_packed_sequences(checkpoint: Checkpoint) -> None:
    """As a convolution or a recurrence over the token axis would, next to attention that is called as it should be."""
    model = plain(checkpoint("llama"))
    mlp = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: mlp(x.cumsum(1))
    with pytest.raises(UnsupportedModel, match=r"^llama: a sequence's logits depend on the sequences packed with it"):
        probe(model)


def test_positions_from_the_place_in_the_batch_are_refused() -> None:
    """As llama4 takes them for the temperature of its attention, where all its layers see everything."""
    config = config_of(
        "llama4_text",
        **SMALL,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_local_experts=2,
        no_rope_layers=[1, 0],
        layer_types=["full_attention"] * 2,
        floor_scale=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        for tensor in model.parameters():
            tensor.data.normal_(std=0.2)
    with pytest.raises(UnsupportedModel, match=r"^llama4_text: takes a token's position from its place in the batch"):
        probe(model.eval(), 64)


@pytest.mark.parametrize("offset", [0, 2])
def test_positions_that_do_not_begin_at_zero_are_refused(checkpoint: Checkpoint, offset: int) -> None:
    """As Kosmos 2.5 counts them where it gets none: from the id of its padding token."""
    model = plain(checkpoint("gpt2"))
    counted: list[torch.Tensor] = []
    forward = model.forward

    @functools.wraps(forward)  # its signature says what the cache is called
    def counting(position_ids: torch.Tensor | None = None, **others: Any) -> Any:
        if position_ids is None:
            position_ids = offset + torch.arange(others["input_ids"].shape[1])[None]
            counted.append(position_ids)
        return forward(position_ids=position_ids, **others)

    model.forward = counting
    with (
        contextlib.nullcontext()
        if not offset
        else pytest.raises(UnsupportedModel, match="gpt2: positions of a prompt do")
    ):
        probe(model)
    assert counted


def test_a_window_that_only_a_mask_knows_is_refused() -> None:
    """No mask is built here, so all tokens would be seen."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            tiny_config("phimoe", sliding_window=24), attn_implementation=attention.NAME
        ).eval()
    with pytest.raises(UnsupportedModel, match=r"^phimoe: the window of 24 tokens of layer 0 does not reach"):
        probe(model, 25)
    assert len(probe(model, 24).layers) == 2


def test_what_fails_only_after_modules_are_swapped_is_refused_at_load(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a module does that computes with the weight of a linear layer, which is packed by then."""
    monkeypatch.setattr(PackedLinear, "forward", nn.Linear.forward)
    with pytest.raises(UnsupportedModel, match=r"^gpt_neox: fails as it would be served: "):
        load(checkpoint("gpt_neox"))


def test_swapped_modules_that_compute_something_else_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decoder would whose families rotate heads in another way than ours."""

    def swap(model: PreTrainedModel, max_model_len: int, **_: bool) -> None:
        model.model.layers[0].self_attn.q_proj.weight.data.neg_()

    monkeypatch.setattr(hf, "fuse", swap)
    with pytest.raises(UnsupportedModel, match=r"^llama: as it would be served its logits differ from the model's own"):
        load(checkpoint("llama"))


def test_a_mask_of_its_own_is_refused(checkpoint: Checkpoint) -> None:
    model = plain(checkpoint("llama"))
    inner = model.model.layers[0].forward
    model.model.layers[0].forward = lambda h, **kw: inner(h, **(kw | {"attention_mask": torch.zeros(1, 1, 12, 12)}))
    with pytest.raises(UnsupportedModel, match=r"^llama: a mask or position bias of its own"):
        probe(model)


def test_kv_bytes_of_opt_13b_from_its_config() -> None:
    """The figure of the PagedAttention paper, section 3: 800 KiB per token.  By the probe, on a model without
    memory."""
    config = OPTConfig(
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, ffn_dim=20480, word_embed_proj_dim=5120
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    assert bytes_per_token(probe(model)[0], torch.float16) == 819_200


def test_missing_tensor(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"the weight files lack model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(copy)


def test_tensor_of_another_shape(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lm_head.weight|size mismatch|shape"):
        load(copy)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_weights(copy: Path, kept: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: SafetensorError: ") as caught:
        load(copy)
    assert "\n" not in str(caught.value)


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file"):
        load(copy)


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"llama: no config\.json$"):
        load(copy)


def test_broken_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        load(copy)
    (copy / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match=r"no-such-model"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5; it must be at least 1"),
        ({"text_config": []}, "llama has no text_config, and the file holds [] there"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor of rotary embeddings is 'x'; it must be a "),
    ],
)
@pytest.mark.parametrize("random", [False, True])
def test_a_config_with_values_that_make_no_model(
    copy: Path, changes: dict[str, object], line: str, random: bool
) -> None:
    described = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps(described | changes))
    with pytest.raises(ModelLoadError) as caught:
        load(copy, random=random)
    assert str(caught.value).startswith(f"{copy}/config.json: {line}")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapters_are_refused(copy: Path, alone: bool, name: str) -> None:
    if alone:
        for file in copy.iterdir():
            file.unlink()
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 4)}, copy / name)
    reason = "an adapter, which is not applied; serve its model with the adapter merged, and without this file"
    assert refusal(copy) == f"{copy}/{name}: {reason}"


@pytest.mark.parametrize("peft", [False, True])
def test_a_description_of_a_merged_adapter_is_a_warning(
    copy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, peft: bool
) -> None:
    """Whether PEFT is installed or not: with it transformers' reader would look for the adapter's weights."""
    for module in (auto_factory, peft_of_transformers):
        monkeypatch.setattr(module, "is_peft_available", lambda: peft)
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    assert load(copy).max_model_len == 1024
    [line] = [each.getMessage() for each in caplog.records if "adapter" in each.getMessage()]
    assert line == f"{copy}/adapter_config.json is not read: no adapter is applied; the weights must have it merged"


@pytest.mark.parametrize("name", ["/no/such/directory", "./nowhere", "a/b/c", "sp ace", "~/nowhere-at-all"])
def test_unknown_directory(name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^{name}: no such directory$"):
        hf.find(name)


def test_a_hub_name_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        if name == "org/gone":
            raise OSError("404 Client Error\nand more")
        return tmp_path

    monkeypatch.setattr(hub, "fetch", fetch)
    assert hf.find("org/name-1.5B") == tmp_path
    with pytest.raises(ModelLoadError, match=r"^org/gone: no such directory, and not found on the hub: OSError: 404"):
        hf.find("org/gone")
    assert asked == ["org/name-1.5B", "org/gone"]


def test_max_model_len(checkpoint: Checkpoint) -> None:
    assert load(checkpoint("gpt2"), max_model_len=100).max_model_len == 100
    with pytest.raises(ModelLoadError, match=r"max_model_len 1025 is over the 1024 positions gpt2 can serve"):
        load(checkpoint("gpt2"), max_model_len=1025)


def test_lengths_at_which_angles_change_are_only_served_where_asked_for() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
    }
    config = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=256)
    assert check_length(config, 0) == 256
    assert check_length(config, 257) == 257
    with pytest.raises(ModelLoadError, match=r"max_model_len 1025 is over the 1024 positions phi3 can serve"):
        check_length(config, MAX_LEN + 1)


def test_make_checkpoint_is_repeatable(tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "a", "opt"), make_checkpoint(tmp_path / "b", "opt")
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_random_weights_leave_room_for_those_of_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A file with some tensors: they are used, the rest is made up, the same every time."""
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    made_up = load(tmp_path, random=True).module.state_dict()
    name = "model.embed_tokens.weight"
    own = torch.full_like(made_up[name], 0.5)
    save_file({name: own}, tmp_path / "some.safetensors")
    found = load(tmp_path, random=True).module.state_dict()
    assert torch.equal(found[name], own)
    assert all(torch.equal(found[key], tensor) for key, tensor in made_up.items() if key != name)

    save_file({"model.other": own}, tmp_path / "some.safetensors")
    with pytest.raises(ModelLoadError, match=r"some\.safetensors: llama has no model\.other"):
        load(tmp_path, random=True)
    save_file({name: own[:1].clone()}, tmp_path / "some.safetensors")
    with pytest.raises(ModelLoadError, match=r"weight has shape \[1, 128\], the config says \[640, 128\]"):
        load(tmp_path, random=True)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: object) -> None:
    """Change the tensors and the config of a checkpoint."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(described | config))


def refusal(directory: Path, **options: object) -> str:
    """The one line with which a checkpoint is refused."""
    with pytest.raises(UnsupportedModel) as caught:
        load(directory, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt (NVFP4_AWQ)"),
        ({"quant_method": "tomorrow"}, "tomorrow"),
        ({"producer": {"name": "modelopt"}}, "modelopt"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
def test_quantised_weights_are_refused_by_the_name_of_their_method(
    copy: Path, described: dict[str, object], named: str
) -> None:
    rewrite(copy, lambda weights: None, quantization_config=described)
    assert refusal(copy) == f"llama: weights quantised by {named}, which is not implemented; serve an unquantised copy"


def test_modelopt_may_say_so_in_a_file_of_its_own_only(copy: Path) -> None:
    quantization = {"quant_algo": "NVFP4_AWQ", "kv_cache_quant_algo": None}
    described = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (copy / "hf_quant_config.json").write_text(json.dumps(described))
    assert refusal(copy).startswith("llama: weights quantised by modelopt (NVFP4_AWQ), which is not implemented")
    (copy / "hf_quant_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json: "):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_weights_of_few_bits_without_a_config_are_refused(copy: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(copy, lambda weights: weights.update({name: weights[name].to(dtype)}))
    assert refusal(copy).startswith(f"llama: {name} is ")
    assert refusal(copy).endswith("and the config names no quantisation")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.q_proj.bias"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),  # its class drops what matches `attn.bias`
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_integers_of_any_name_are_refused_where_the_model_has_a_parameter(
    family: str, name: str, ranks: int, tmp_path: Path
) -> None:
    directory = make_tiny(tmp_path / family, family)
    rewrite(directory, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(UnsupportedModel) as caught:
        read_weights(directory, read_config(directory), "auto", ranks=Ranks(0, ranks))
    reason = "is I8 in the weight files, and the config names no quantisation"
    assert str(caught.value) == f"{family}: {name} {reason}"


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_integers_are_read_where_the_model_has_a_buffer(prefix: str, tmp_path: Path) -> None:
    """Old files of GPT-2 hold its masks."""
    directory = make_tiny(tmp_path / "gpt2", "gpt2")
    wanted = load(directory).module.state_dict()
    masks = {f"{prefix}h.{layer}.attn.bias": torch.ones(1, 1, 512, 512, dtype=torch.uint8) for layer in (0, 1)}
    rewrite(directory, lambda weights: weights.update(masks))
    assert all(map(torch.equal, load(directory).module.state_dict().values(), wanted.values()))


def test_tensors_that_the_config_denies_are_refused(copy: Path) -> None:
    """A model with attention biases whose config says that it has none would be served without them."""
    name = "model.layers.{}.self_attn.q_proj.bias"
    rewrite(copy, lambda weights: weights.update({name.format(layer): torch.ones(128) for layer in (0, 1)}))
    assert refusal(copy) == (
        f"llama: the weight files hold {name.format(0)} and 1 more, which the model of this config does not use"
    )


def test_tensors_of_further_layers_are_not_needed(copy: Path) -> None:
    """Heads that draft further tokens are stored as layers after the last one, or under a name of their own."""
    names = ["model.layers.2.self_attn.q_proj.weight", "mtp.layers.0.input_layernorm.weight"]
    rewrite(copy, lambda weights: weights.update({name: torch.ones(4) for name in names}), num_nextn_predict_layers=1)
    assert len(load(copy).layers) == 2
    rewrite(copy, lambda weights: None, num_nextn_predict_layers=0)
    assert refusal(copy) == f"llama: the weight files hold {names[0]}, which the model of this config does not use"


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_weights_in_float64(copy: Path, asked: str) -> None:
    rewrite(copy, lambda weights: weights.update({k: w.double() for k, w in weights.items()}), dtype="float64")
    if asked == "float32":
        assert load(copy, dtype=asked).dtype == torch.float32
    else:
        assert refusal(copy) == "llama: weights in float64; choose --dtype float32, bfloat16 or float16"


@pytest.mark.parametrize("named", ["float8_e4m3fn", "int8", "no_such_type"])
def test_a_dtype_that_does_not_fit(copy: Path, named: str) -> None:
    rewrite(copy, lambda weights: None, dtype=named)
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


def test_a_padding_token_past_the_vocabulary(copy: Path) -> None:
    """Padding is never computed, so it does not matter which token it would be."""
    rewrite(copy, lambda weights: None, pad_token_id=VOCAB)
    assert load(copy).vocab_size == VOCAB


def test_a_token_embedding_of_another_size_than_the_config_says(copy: Path) -> None:
    rewrite(copy, lambda weights: None, vocab_size=VOCAB + 1)
    with pytest.raises(ModelLoadError, match=r"has shape|shapes"):
        load(copy)


def test_the_end_token_of_the_tokenizer_ends_an_answer_too(copy: Path) -> None:
    """A model may name one EOS token in its config and write another: the one of its chat template."""
    own = tokenizer().eos_token_id
    described = json.loads((copy / "generation_config.json").read_bytes())
    (copy / "generation_config.json").write_text(json.dumps(described | {"eos_token_id": [7, 5]}))
    assert load(copy).eos_ids == [7, 5, own]
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|turn|>"}}))
    assert load(copy).eos_ids == [7, 5, 2]
    (copy / "tokenizer_config.json").write_text("{")
    assert load(copy).eos_ids == [7, 5]


@pytest.mark.parametrize("found", ["x", ["x"], 2.0, True])
def test_an_end_token_that_is_none(copy: Path, found: object) -> None:
    described = json.loads((copy / "generation_config.json").read_bytes())
    (copy / "generation_config.json").write_text(json.dumps(described | {"eos_token_id": found}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: .*eos_token_id") as caught:
        load(copy)
    assert "\n" not in str(caught.value)
