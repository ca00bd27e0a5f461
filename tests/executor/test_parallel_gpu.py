"""Two ranks on two GPUs, over NCCL and in CUDA graphs.  bfloat16: tokens are those of float32 where it has a clear
winner.

Run these tests one after another, with nothing else on the GPUs: ranks that take turns with other processes wait for
each other at every sum.  Only the first engine of a process has our kernel of sums, so `pytest FILE::TEST` runs a test
with it, and the complete file mostly without."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.llm import LLM
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests.checkpoints import make_checkpoint
from tests.executor.test_gpu import GREEDY, check_greedy, llm, texts, words
from tests.executor.test_quantised import write_exact
from tests.executor.test_quantize import as_served, at_all_tokens
from tests.pace import patience
from tests.quantised import TWICE_AS_WIDE, quantise_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
Checkpoint = Callable[[str], Path]
Reference = Callable[[str], PreTrainedModel]
PROMPTS = [words(n, n) for n in (1, 5, 16, 33, 48, 70, 130)]


@pytest.fixture
def closing() -> Iterator[list[LLM]]:
    made: list[LLM] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("graph_seconds", [0.0, 60.0])
def test_greedy_text(
    checkpoint: Checkpoint, reference: Reference, closing: list[LLM], family: str, graph_seconds: float
) -> None:
    """Prompts cut into chunks of a step, decoded together; with graphs and without."""
    engine = llm(checkpoint(family), tensor_parallel=2, graph_seconds=graph_seconds)
    closing.append(engine)
    check_greedy(reference(family), PROMPTS, texts(engine, PROMPTS))


def test_greedy_text_of_a_mixture_of_experts(tmp_path: Path, closing: list[LLM]) -> None:
    directory = make_tiny(tmp_path / "moe", "qwen3_moe", head_dim=64)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    closing.append(engine := llm(directory, tensor_parallel=2, max_model_len=256))
    check_greedy(model, PROMPTS, texts(engine, PROMPTS))


@pytest.mark.parametrize("kind", ["fp8-block", "ct-fp8-channel", "gptq-32", "fp8", "int4"])
def test_text_of_quantised_weights(tmp_path: Path, closing: list[LLM], kind: str) -> None:
    """Most tokens are the choice of the float32 model of the same weights.

    kind: of the checkpoint, or the value of --quantize.  The other tokens are near ties, which the error of rounded
    inputs decides; with wrong weights one token in 640 would agree."""
    plain = make_checkpoint(tmp_path / "plain", "llama", **TWICE_AS_WIDE)
    if kind in ("fp8", "int4"):  # values of --quantize
        exact = as_served(plain, torch.uint8 if kind == "int4" else torch.float8_e4m3fn, head=torch.float8_e4m3fn)
        engine = llm(plain, tensor_parallel=2, quantize=kind)
    else:
        write_exact(plain, quantise_checkpoint(plain, tmp_path / kind, kind), tmp_path / "exact", torch.float32)
        exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32).eval()
        engine = llm(tmp_path / kind, tensor_parallel=2)
    closing.append(engine)
    chosen = total = 0
    for prompt, text in zip(PROMPTS, texts(engine, PROMPTS), strict=True):
        found = at_all_tokens(exact, prompt + text)[len(prompt) - 1 : -1]
        chosen += int((found.argmax(-1) == torch.tensor(text)).sum())
        total += len(text)
    assert chosen >= 0.5 * total


def test_graphs_change_no_token_of_two_ranks(checkpoint: Checkpoint) -> None:
    """Each engine in a process of its own: the second one of a process sums in another order."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from quire.engine.wire.messages import Sampling\n"
        "from tests.executor.test_gpu import GREEDY, llm, words\n"
        "engine = llm(Path(sys.argv[1]), tensor_parallel=2, graph_seconds=float(sys.argv[2]))\n"
        "assert engine.executor._ranks.one_shot is not None\n"
        "sampled = Sampling(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)\n"
        "samplings = [GREEDY if i % 3 else sampled for i in range(30)]\n"
        "prompts = [words(1 + 7 * i % 90, i) for i in range(30)]\n"
        "print([answer.outputs[0].token_ids for answer in engine.generate(prompts, samplings, max_new_tokens=30)])\n"
        "engine.close()\n"
    )
    found = []
    for seconds in ("0", "60"):
        process = subprocess.run(
            [sys.executable, "-c", code, str(checkpoint("llama")), seconds],
            capture_output=True, text=True, timeout=patience(120), check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        found.append(process.stdout)
    assert len(found[0]) > 30 * 30
    assert found[0] == found[1]


def test_swapped_blocks_come_back_on_both_gpus(checkpoint: Checkpoint, closing: list[LLM]) -> None:
    """Freed blocks are NaN, so a block that is not restored would end its request with an error."""
    engine = llm(
        checkpoint("llama"),
        tensor_parallel=2,
        kv_blocks=40,
        max_model_len=256,
        admission="threshold",
        admit_threshold=1.0,
        preempt="swap",
        poison_free_blocks=True,
        check_accounting=True,
    )
    closing.append(engine)
    answers = engine.generate([words(40, i) for i in range(12)], GREEDY, max_new_tokens=60, n=2)
    assert {output.finish_reason for answer in answers for output in answer.outputs} == {"length"}
    assert engine.engine.core.report.totals.swap_preemptions > 0


def test_small_sums_are_right_and_large_ones_go_through_nccl(checkpoint: Checkpoint) -> None:
    """Our kernel of sums is compared with NCCL at each start, and is not used where that fails.  In a process of
    its own: only the first executor of a process has that kernel."""
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from tests.executor.test_gpu import llm\n"
        "engine = llm(Path(sys.argv[1]), tensor_parallel=2)\n"
        "sums = engine.executor._ranks.one_shot\n"
        "assert sums is not None\n"
        "shapes = [(256, 1024), (4096, 1024), (16384, 1024), (1, 3)]\n"
        "print([sums.takes(*shape, torch.bfloat16) for shape in shapes])\n"
        "engine.close()\n"
    )
    words = [sys.executable, "-c", code, str(checkpoint("llama"))]
    found = subprocess.run(words, capture_output=True, text=True, timeout=patience(120), check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[True, True, False, False]\n"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_ends_the_engine_within_the_lease(checkpoint: Checkpoint, how: str) -> None:
    """In a process of its own: a kernel that waits for a lost rank never ends, so the engine's process does."""
    code = (
        "import os, signal, sys, time\n"
        "from tests.executor.test_gpu import GREEDY, llm, words\n"
        "from pathlib import Path\n"
        "engine = llm(Path(sys.argv[1]), tensor_parallel=2, lease_ms=2000)\n"
        "for i in range(7): engine.submit(words(20 + i), GREEDY, max_new_tokens=900)\n"
        "for _ in range(20): engine.step()\n"
        "os.kill(engine.executor._others[0].process.pid, getattr(signal, sys.argv[2]))\n"
        "print('lost', flush=True)\n"
        "while True: engine.step()\n"
    )
    words = [sys.executable, "-c", code, str(checkpoint("llama")), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "lost\n"
        began = time.monotonic()
        _, said = engine.communicate(timeout=patience(60))
    assert time.monotonic() - began < 20
    assert engine.returncode == 1
    assert "rank 1" in said
