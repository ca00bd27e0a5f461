"""LoRA adapters against PEFT itself: PEFT makes and saves them, and its text, merged or not, is the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.llm import LLM, Adapter
from tests.executor.test_lora import GREEDY, NEW, base_of, prompts_of, reference, serve

peft = pytest.importorskip("peft", reason="needs peft, which `.ci/run nightly` installs")
# PEFT reads what transformers 5.23 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "rank 8": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rslora": {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 64,
        "lora_alpha": 64,
        "target_modules": ["self_attn.o_proj", "down_proj", "k_proj"],  # the first is the end of a path
        "rank_pattern": {"down_proj": 4, r"layers\.1\.self_attn\.k_proj": 2},
        "alpha_pattern": {r"model\.layers\.0\..*": 32, "k_proj": 3},
    },
    "regex": {"r": 16, "lora_alpha": 16, "target_modules": r".*layers\.[01]\.(self_attn\.[qk]|mlp\.up)_proj"},
    "layers": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1]},
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["gate_proj"]},
}


def made_by_peft(directory: Path, folder: Path, options: dict[str, Any], seed: int) -> Any:
    """A model of PEFT with random weights, as it reads what it has saved: it sorts patterns while it saves them."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base_of(directory), peft.LoraConfig(init_lora_weights=False, **options))
    model.save_pretrained(str(folder))
    return peft.PeftModel.from_pretrained(base_of(directory), str(folder)).eval()


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    llm = serve(checkpoint("llama"))
    yield llm
    llm.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_is_that_of_peft_merged_and_not(
    checkpoint: Callable[[str], Path], llm: LLM, tmp_path: Path, name: str
) -> None:
    directory, seed = checkpoint("llama"), list(CONFIGS).index(name)
    model = made_by_peft(directory, tmp_path / "a", CONFIGS[name], seed)
    prompts = prompts_of(3, seed)
    adapter = Adapter(name.replace(" ", "-"), str(tmp_path / "a"))
    found = llm.generate([*prompts, *prompts], GREEDY, max_new_tokens=NEW, adapters=[adapter] * 3 + [None] * 3)
    texts = [one.outputs[0].token_ids for one in found]
    base = [reference(base_of(directory), prompt) for prompt in prompts]
    assert texts == [reference(model, prompt) for prompt in prompts] + base
    merged = model.merge_and_unload()
    assert texts[:3] == [reference(merged, prompt) for prompt in prompts] != base


def test_a_mixed_batch_of_32_is_what_peft_answers(checkpoint: Callable[[str], Path], llm: LLM, tmp_path: Path) -> None:
    """Five adapters of ranks 8, 16 and 64 and the base, in one batch."""
    directory, prompts = checkpoint("llama"), prompts_of(32, 9)
    ranks = (8, 16, 64, 8, 16)
    models: list[Any] = [base_of(directory)]
    adapters: list[Adapter | None] = [None]
    for at, rank in enumerate(ranks):
        options = {"r": rank, "lora_alpha": 8 + rank, "target_modules": ALL if at < 3 else ["q_proj", "up_proj"]}
        models.append(made_by_peft(directory, tmp_path / str(at), options, at))
        adapters.append(Adapter(str(at), str(tmp_path / str(at))))
    found = llm.generate(prompts, GREEDY, max_new_tokens=NEW, adapters=[adapters[at % 6] for at in range(32)])
    assert [one.outputs[0].token_ids for one in found] == [
        reference(models[at % 6], prompt) for at, prompt in enumerate(prompts)
    ]
