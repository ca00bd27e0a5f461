"""The shard of each rank: all shards together are the complete model, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import hf
from quire.engine.executor.models.cuts import Cut
from quire.engine.executor.models.quantised import plain_weights
from quire.engine.executor.models.sharding import shard_proof, sharding
from quire.engine.executor.models.sharding.sharding import plan_shards
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import Ranks
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from quire.loadtest.studies.tiny_checkpoints import tiny_config
from tests.checkpoints import VOCAB, config_of
from tests.executor.noted_files import noted_open

Checkpoint = Callable[[str], Path]


def planned(config: PretrainedConfig, rank: int, size: int) -> sharding.Sharding:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return plan_shards(model, Ranks(rank, size))


def test_what_is_divided_of_llama() -> None:
    found = planned(config_of("llama"), 1, 2)
    layer = {name.removeprefix("model.layers.1."): cut for name, cut in found.cuts.items() if ".1." in name}
    assert layer == {
        "self_attn.q_proj.weight": Cut(-2, 128, 256),
        "self_attn.k_proj.weight": Cut(-2, 64, 128),
        "self_attn.v_proj.weight": Cut(-2, 64, 128),
        "self_attn.o_proj.weight": Cut(-1, 128, 256),
        "mlp.gate_proj.weight": Cut(-2, 96, 192),
        "mlp.up_proj.weight": Cut(-2, 96, 192),
        "mlp.down_proj.weight": Cut(-1, 96, 192),
    }
    assert found.cuts["lm_head.weight"] == Cut(-2, VOCAB // 2, VOCAB)
    assert found.gathered == "lm_head"
    assert [name for name in found.summed if ".1." in name] == [
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_kv_heads_are_divided_or_shared_with_the_queries_that_read_them() -> None:
    config = config_of("llama", num_attention_heads=8)  # 8 heads read 2 KV heads
    for size in (2, 4, 8):
        for rank in range(size):
            cuts = planned(config, rank, size).cuts
            q, k = (cuts[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
            read = {head // 4 for head in range(q.first // 64, q.end // 64)}
            assert read == set(range(k.first // 64, k.end // 64))


def test_what_is_divided_of_gpt2() -> None:
    """Its weights are [in, out].  Queries, keys and values are one weight, of each of which a rank has its heads."""
    found = planned(config_of("gpt2", n_head=4), 1, 2)
    layer = {name.removeprefix("transformer.h.1."): cut for name, cut in found.cuts.items() if ".1." in name}
    assert layer == {
        "attn.c_attn.weight": Cut(-1, 64, 128, halves=3),
        "attn.c_attn.bias": Cut(-1, 64, 128, halves=3),
        "attn.c_proj.weight": Cut(-2, 64, 128),
        "mlp.c_fc.weight": Cut(-1, 256, 512),
        "mlp.c_fc.bias": Cut(-1, 256, 512),
        "mlp.c_proj.weight": Cut(-2, 256, 512),
    }
    assert found.gathered == "lm_head"
    last = [[name for name in names if ".1." in name] for names in (found.summed, found.of_first)]
    assert last[0] == ["transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_proj"]
    assert last[1] == [f"{name}.bias" for name in last[0]]


def test_biases_and_the_halves_of_packed_layers() -> None:
    """Of two halves along the rows, gate and up, a rank has its part of each."""
    cuts = planned(config_of("qwen2"), 1, 2).cuts
    assert cuts["model.layers.0.self_attn.q_proj.bias"] == Cut(-1, 64, 128)
    weight = torch.arange(2 * 8 * 3).view(2, 8, 3)
    part = Cut(-2, 2, 4, halves=2).take(weight, (2, 8, 3))
    assert torch.equal(part, weight[:, [2, 3, 6, 7]])
    assert torch.equal(Cut(-1, 1, 3).take(weight, (2, 8, 3)), weight[..., 1:])
    assert torch.equal(Cut(-2, 6, 8, padding=1).take(weight[0], (8, 3))[2], torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt2"])
def test_the_parts_of_all_ranks_are_the_whole_and_nothing_else_is_read(
    checkpoint: Checkpoint, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny(tmp_path / family, family) if family == "qwen3_moe" else checkpoint(family)
    config = AutoConfig.from_pretrained(directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)  # needs the other ranks
    read: list[int] = []
    monkeypatch.setattr(plain_weights, "safe_open", noted_open(lambda found: read.append(found.numel())))
    parts, size = [], 2
    for rank in range(size):
        read.clear()
        model = read_weights(directory, config, "float32", ranks=Ranks(rank, size))
        own = {
            name: tensor for name, tensor in model.named_parameters() if name != "lm_head.weight" or not tied(config)
        }
        assert sum(read) == sum(tensor.numel() for tensor in own.values())
        parts.append(own)
        assert type(model).__module__.startswith("transformers.models")
    for name, tensor in whole.items():
        if name not in parts[0]:
            continue
        pieces = [part[name] for part in parts]
        if name.endswith("c_proj.bias"):  # rank 0 alone adds it
            assert tensor.any()
            assert not pieces[1].any()
            pieces = pieces[:1]
        if pieces[0].shape == tensor.shape:
            assert all(torch.equal(piece, tensor) for piece in pieces), name
            continue
        dim = next(i for i, (a, b) in enumerate(zip(pieces[0].shape, tensor.shape, strict=True)) if a != b)
        halves = 2 if name.endswith("gate_up_proj") else 3 if ".c_attn." in name else 1
        split = [piece.chunk(halves, dim) for piece in pieces]
        joined = torch.cat([half[i] for i in range(halves) for half in split], dim)
        assert torch.equal(joined, tensor), name


def tied(config: PretrainedConfig) -> bool:
    return bool(config.get_text_config().tie_word_embeddings)


@pytest.mark.parametrize(
    ("family", "size", "fields", "message"),
    [
        ("opt", 2, {}, r"opt: --tensor-parallel: transformers has no table of how its layers are divided"),
        ("llama", 3, {}, r"--tensor-parallel 3: llama has 4 attention heads, which 3 does not divide"),
        (
            "llama",
            4,
            {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6},
            r"--tensor-parallel 4: llama has 6 KV heads, which 4 neither divides nor is a multiple of",
        ),
        ("llama", 4, {"intermediate_size": 190}, r"llama: model.layers.0.mlp.gate_proj has size 190, which 4 does not"),
        (
            "llama4_text",
            2,
            {},
            r"llama4_text: --tensor-parallel: .*experts.gate_up_proj is divided as 'packed_rowwise', which is not",
        ),
        ("phi3", 2, {}, r"phi3: --tensor-parallel: .*qkv_proj is divided as 'colwise_gather_output', which is not"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    family: str, size: int, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        planned((tiny_config if family == "llama4_text" else config_of)(family, **fields), 0, size)


def test_a_table_that_names_other_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank would compute all of them."""
    config = config_of("llama")
    monkeypatch.setattr(type(config), "base_model_tp_plan", {"blocks.*.mlp": "colwise"})
    with pytest.raises(UnsupportedModel, match="llama: --tensor-parallel: transformers' table names no layer that"):
        planned(config, 0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random": True}, r"--load random with --tensor-parallel: .*model.safetensors holds weights"),
    ],
)
def test_options_that_ranks_do_not_honour_are_refused(
    checkpoint: Checkpoint, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        hf.load_model(str(checkpoint("llama")), dtype="auto", device=torch.device("cpu"), ranks=Ranks(0, 2), **options)


def test_a_table_whose_parts_do_not_make_the_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that has all parts stands for several: its sums are right, and then twice what they should be."""
    config = config_of("llama")
    alone = Ranks(0, 1)
    whole_class = type(AutoModelForCausalLM.from_config(config))
    found = shard_proof._plan_without_proof(whole_class, config, alone)
    complete, parts = (AutoModelForCausalLM.from_config(config, attn_implementation="kv_blocks") for _ in range(2))
    shard_proof.prove_parts(complete, parts, found, alone)
    complete, parts = (AutoModelForCausalLM.from_config(config, attn_implementation="kv_blocks") for _ in range(2))
    monkeypatch.setattr(Ranks, "all_reduce", lambda _, part: 2 * part)  # as if both ranks had all of it
    with pytest.raises(UnsupportedModel, match=r"llama: --tensor-parallel: the shards of transformers' table do not"):
        shard_proof.prove_parts(complete, parts, found, alone)


def test_the_proof_has_every_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of this mixture of experts is dense, so one layer would prove half of it."""
    proved: list[PretrainedConfig] = []
    monkeypatch.setattr(shard_proof, "prove_parts", lambda whole, *_: proved.append(whole.config))
    for config in (config_of("llama"), tiny_config("qwen3_moe", mlp_only_layers=[0])):
        shard_proof.plan(config, torch.device("cpu"), Ranks(0, 2))
        assert config.num_hidden_layers == 2
        assert proved[-1].hidden_size == config.hidden_size
    assert [short.num_hidden_layers for short in proved] == [1, 2]
    assert {short.vocab_size for short in proved} == {509}
