"""The MTP head: its weights through the files of a checkpoint, and its hidden states in any chunks of a sequence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from quire.engine.core.policy.drafts import DraftController
from quire.engine.core.policy.guesses import GuessCosts
from quire.engine.executor.kv_cache import KVShape, allocate
from quire.engine.executor.models import hf
from quire.engine.executor.models.experts import PARAMETERS
from quire.engine.executor.models.mtp import FAMILIES, PREFIX, MtpHead, find_mtp
from quire.engine.executor.step_tensors import AttentionPlans, StepTensors
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling
from quire.loadtest.studies.tiny_checkpoints import VOCAB
from tests.core.drafters import GuessingDrafter
from tests.executor.driver import answer
from tests.executor.test_drafts import NEW, PROMPTS, SAMPLINGS, answers, open_llm, run

Tiny = Callable[[str], Path]
CPU = torch.device("cpu")
FAMILY = "qwen3_5_text"
BLOCK = 16
OPTIONS: dict[str, Any] = {"deterministic": False, "state_memory_gib": 64 / 1024, "max_seqs": 8}


def load(directory: Path) -> PreTrainedModel:
    return hf.load_model(str(directory), dtype="float32", device=CPU).module


def with_head(plain: Path, directory: Path, change: Callable[[dict[str, Tensor]], None] = lambda _: None) -> Path:
    """A copy of a checkpoint with an MTP head of random weights; `change` edits the head's tensors."""
    shutil.copytree(plain, directory)
    torch.manual_seed(3)
    head = published(
        {
            PREFIX + name: torch.randn_like(tensor) * (0.02 if tensor.dim() > 1 else 0.1)
            for name, tensor in MtpHead(load(plain)).named_parameters()
        }
    )
    change(head)
    file = directory / "model.safetensors"
    save_file(load_file(file) | head, file, {"format": "pt"})
    return directory


def published(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors as Qwen3-Next's files have them: each expert by itself."""
    separate: dict[str, Tensor] = {}
    for name, tensor in head.items():
        parent, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            separate[name] = tensor
            continue
        for expert, weights in enumerate(tensor):
            parts = weights.chunk(2) if last == "gate_up_proj" else [weights]
            for part, which in zip(parts, ("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",), strict=True):
                separate[f"{parent}.{expert}.{which}.weight"] = part.contiguous()
    return separate


PUBLISHED = """
fc layers.0.input_layernorm layers.0.mlp.down_proj layers.0.mlp.gate_proj layers.0.mlp.up_proj
layers.0.post_attention_layernorm layers.0.self_attn.k_norm layers.0.self_attn.k_proj layers.0.self_attn.o_proj
layers.0.self_attn.q_norm layers.0.self_attn.q_proj layers.0.self_attn.v_proj norm pre_fc_norm_embedding
pre_fc_norm_hidden
"""  # names in Qwen3.5's files, without `mtp.` and `.weight`
PUBLISHED_EXPERT = [f"mtp.layers.0.mlp.experts.0.{which}_proj.weight" for which in ("down", "gate", "up")]
PUBLISHED_MIXTURE = [
    "mtp.layers.0.mlp.gate.weight",
    "mtp.layers.0.mlp.shared_expert.gate_proj.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight",
    *PUBLISHED_EXPERT,
]  # further names in Qwen3-Next's files


def stored_names(directory: Path) -> set[str]:
    return {name for name in load_file(directory / "model.safetensors") if name.startswith(PREFIX)}


def test_heads_have_the_names_of_published_files(tiny: Tiny, tmp_path: Path) -> None:
    assert stored_names(with_head(tiny(FAMILY), tmp_path / FAMILY)) == {
        f"mtp.{name}.weight" for name in PUBLISHED.split()
    }
    assert stored_names(with_head(tiny("qwen3_next"), tmp_path / "next")) > set(PUBLISHED_MIXTURE)


def step_of(head: MtpHead, caches: Any, first: int, end: int) -> StepTensors:
    """Tokens first .. end - 1 of one sequence, whose blocks are 0, 1, ..."""
    at = torch.arange(first, end)
    return StepTensors(
        input_ids=at[None],
        position_ids=at[None],
        kv_indices=at,
        tables=torch.arange(8, dtype=torch.int32)[None],
        rows=torch.tensor([0], dtype=torch.int32),
        q_start=torch.tensor([0, end - first], dtype=torch.int32),
        lens=torch.tensor([end], dtype=torch.int32),
        decodes=0,
        caches=caches,
        plans=AttentionPlans(max_seqs=1, max_tokens=end - first, device=CPU),
        logits_at=None,
        sample_slots=torch.tensor([], dtype=torch.int64),
        known=torch.tensor([], dtype=torch.int64),
    )


def eager(head: MtpHead, following: Tensor, hidden: Tensor) -> Tensor:
    """The head by transformers' own attention over the complete sequence."""
    embed, rotary, _ = head._shared
    x = torch.cat([head.pre_fc_norm_embedding(embed(following)), head.pre_fc_norm_hidden(hidden)], -1)
    x, positions = head.fc(x)[None], torch.arange(len(following))[None]
    layer: Any = head.layers[0]
    config = layer.self_attn.config
    before, config._attn_implementation = config._attn_implementation, "eager"
    mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
    try:
        x = layer(x, position_embeddings=rotary(x, positions), attention_mask=mask)
    finally:
        config._attn_implementation = before
    return head.norm(x)[0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_chunks_have_the_hidden_states_of_the_complete_sequence(tiny: Tiny, tmp_path: Path, family: str) -> None:
    directory = with_head(tiny(family), tmp_path / "mtp")
    assert find_mtp(tiny(family), load(tiny(family))) is None
    head, count = find_mtp(directory, load(directory)), 45
    assert head is not None
    following = torch.arange(count) * 31 % VOCAB
    hidden = torch.randn(count, head.fc.out_features, generator=torch.Generator().manual_seed(1))
    want = eager(head, following, hidden)
    caches = allocate([KVShape(0, 0)] * head.layer + [head.kv_shape], 8, BLOCK, torch.float32, CPU, float("nan"))
    parts = []
    for first, end in ((0, 7), (7, 8), (8, 30), (30, 31), (31, count)):
        parts.append(head(following[first:end], hidden[first:end], step_of(head, caches, first, end)))
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-4)
    tokens, probabilities = head.guess(want)
    assert tokens.shape == probabilities.shape == (count,)
    assert ((probabilities > 0) & (probabilities <= 1)).all()


def test_a_head_that_cannot_be_read_is_named_and_not_used(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks(head: dict[str, Tensor]) -> None:
        del head["mtp.fc.weight"]

    def narrow(head: dict[str, Tensor]) -> None:
        head["mtp.norm.weight"] = torch.ones(3)

    def more(head: dict[str, Tensor]) -> None:
        head["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(3)

    def rounded(head: dict[str, Tensor]) -> None:
        head["mtp.norm.weight"] = head["mtp.norm.weight"].to(torch.int8)

    for name, change, why in (
        ("lacks", lacks, "lack mtp.fc.weight"),
        ("narrow", narrow, "mtp.norm.weight has shape [3]"),
        ("more", more, "hold mtp.layers.0.mlp.experts.0"),
        ("rounded", rounded, "mtp.norm.weight is quantised (I8)"),
    ):
        directory, model = with_head(tiny(FAMILY), tmp_path / name, change), load(tiny(FAMILY))
        with caplog.at_level("WARNING"):
            assert find_mtp(directory, model) is None
        assert "MTP head is not used" in caplog.messages[-1]
        assert why in caplog.messages[-1]


@torch.inference_mode()
def test_experts_are_read_separately_and_together(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, model = with_head(tiny("qwen3_next"), tmp_path / "separate"), load(tiny("qwen3_next"))
    separate: Any = find_mtp(directory, model)

    def together(head: dict[str, Tensor]) -> None:
        for name in [name for name in head if ".experts." in name]:
            del head[name]
        own = "layers.0.mlp.experts."
        head.update({PREFIX + own + last: getattr(separate.layers[0].mlp.experts, last) for last in PARAMETERS})

    other: Any = find_mtp(with_head(tiny("qwen3_next"), tmp_path / "together", together), model)
    experts, same = separate.layers[0].mlp.experts, other.layers[0].mlp.experts
    assert all(torch.equal(getattr(experts, last), getattr(same, last)) for last in PARAMETERS)

    def lacks(head: dict[str, Tensor]) -> None:
        del head[PUBLISHED_EXPERT[2]]

    lacking = with_head(tiny("qwen3_next"), tmp_path / "lacking", lacks)
    with caplog.at_level("WARNING"):
        assert find_mtp(lacking, model) is None
    assert "lack mtp.layers.0.mlp.experts.gate_up_proj, or a part of it" in caplog.messages[-1]


def test_a_head_that_drafts_do_not_use_is_named(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = with_head(tiny(FAMILY), tmp_path / "mtp")
    with caplog.at_level("INFO"):
        open_llm(directory, **OPTIONS).close()
    assert "the checkpoint's MTP head is not used: --drafts is off" in caplog.messages


def repeating(head: dict[str, Tensor]) -> None:
    """The head of a model whose layers add nothing: it takes the next token's embedding through the model's LM head."""
    size = head["mtp.norm.weight"].shape[0]
    for name, tensor in head.items():
        if tensor.dim() == 1 and "self_attn" not in name:
            tensor.zero_()  # the weight of these norms is 1 + w
    head["mtp.layers.0.self_attn.o_proj.weight"].zero_()
    head["mtp.layers.0.mlp.down_proj.weight"].zero_()
    head["mtp.fc.weight"].copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))


def without_layers(plain: Path, directory: Path) -> Path:
    """A copy of a checkpoint whose layers add nothing to the residual stream: the next token depends on the last."""
    shutil.copytree(plain, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name == "model.norm.weight":
            tensor.zero_()
    save_file(tensors, file, {"format": "pt"})
    return directory


@pytest.mark.parametrize(("family", "right"), [(FAMILY, True), (FAMILY, False), ("qwen3_next", False)])
def test_text_with_the_head_is_the_text_without(tiny: Tiny, tmp_path: Path, family: str, right: bool) -> None:
    base = without_layers(tiny(family), tmp_path / "plain") if right else tiny(family)
    directory = with_head(base, tmp_path / "mtp", repeating if right else lambda _: None)
    plain, drafting = open_llm(directory, **OPTIONS), open_llm(directory, drafts="on", **OPTIONS)
    want = answers(run(plain, PROMPTS, SAMPLINGS, n=2))
    with mock.patch.object(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts]):
        assert answers(run(drafting, PROMPTS, SAMPLINGS, n=2)) == want
        (alone,) = run(plain, PROMPTS[:1], SAMPLINGS[:1])
        before = drafting.engine.core.step
        assert answers(run(drafting, PROMPTS[:1], SAMPLINGS[:1])) == answers([alone])
    totals = drafting.engine.core.report.totals
    assert totals.drafted_tokens["head"] > 0
    if right:
        assert totals.accepted_drafts["head"] > 0
        assert drafting.engine.core.step - before <= NEW // 2 + 3
    for llm in (plain, drafting):
        llm.close()


def test_preempted_and_resumed_answers_draft_on(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool too small for all, with prefix hits; then an engine that takes over each answer at some token."""
    base = without_layers(tiny(FAMILY), tmp_path / "plain")
    directory = with_head(base, tmp_path / "mtp", repeating)
    small: dict[str, Any] = {"kv_blocks": 20, "max_model_len": 120, "admission": "threshold", "admit_threshold": 1.0}
    plain = open_llm(directory, **OPTIONS)
    drafting = open_llm(directory, drafts="on", **OPTIONS | small | {"max_seqs": 6})
    want = answers(run(plain, PROMPTS, SAMPLINGS))
    monkeypatch.setattr(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts])
    for _ in range(2):
        assert answers(run(drafting, PROMPTS, SAMPLINGS)) == want
    totals = drafting.engine.core.report.totals
    assert totals.preemptions > 0
    assert totals.accepted_drafts["head"] > 0
    drafting.engine.core.auditor.whole()
    sampling = Sampling(temperature=0, ignore_eos=True)
    said = answer(plain, Generate("first", "g", PROMPTS[0], NEW, sampling, FOREVER_MS))
    for kept in (1, 9, 22):
        request = Generate(f"again {kept}", "g", PROMPTS[0], NEW, sampling, FOREVER_MS)
        assert said[:kept] + answer(drafting, request, [said[:kept]]) == said
    for llm in (plain, drafting):
        llm.close()


def test_a_head_that_does_not_pay_rests_and_its_sequences_are_not_guessed_for(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without the head write zeros, and a sequence that started before has no guess when the head runs again."""
    base = without_layers(tiny(FAMILY), tmp_path / "plain")
    directory = with_head(base, tmp_path / "mtp", repeating)
    plain, drafting = open_llm(directory, **OPTIONS), open_llm(directory, drafts="on", **OPTIONS)
    monkeypatch.setattr(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts])
    sampling = Sampling(temperature=0, ignore_eos=True)
    want = answers(run(plain, PROMPTS[:1], [sampling]))
    totals, asked = drafting.engine.core.report.totals, list[int]()

    def rests(_: GuessCosts, seqs: int) -> bool:
        asked.append(seqs)
        return len(asked) > NEW // 4

    monkeypatch.setattr(GuessCosts, "pay", rests)
    drafting.engine.core.drafts.drafter, suffixes = GuessingDrafter(lambda *_: []), drafting.engine.core.drafts.drafter
    assert answers(run(drafting, PROMPTS[:1], [sampling])) == want
    assert len(asked) >= NEW
    assert totals.drafted_tokens["head"] == 0
    drafting.engine.core.reset_prefix_cache()
    assert answers(run(drafting, PROMPTS[:1], [sampling])) == want
    assert totals.accepted_drafts["head"] > NEW // 3
    drafting.engine.core.drafts.drafter = suffixes
    for llm in (plain, drafting):
        llm.close()
