"""Two ranks on a CPU, each a process: the text of one rank, and an end in time when a rank is lost."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, Slice, Start, StepPlan
from quire.engine.executor.base import ExecutorLost, StepError
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.loading import load
from quire.engine.executor.ranks import parallel
from quire.engine.executor.ranks.parallel import ParallelExecutor, WaitingRanks, check_equal
from quire.engine.executor.ranks.rank_process import CLOSE, SUBMIT, Facts, Task
from quire.engine.executor.ranks.ranks import Ranks
from quire.engine.llm import LLM, Completion
from quire.engine.wire.messages import Beams, Sampling
from quire.loadtest.studies.model_families import model_class
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests import warm
from tests.checkpoints import VOCAB, config_of, make_checkpoint
from tests.matrix import sampled
from tests.pace import paced, patience

Checkpoint = Callable[[str], Path]
# A pool that eight sequences of up to 110 tokens overflow, and steps that cut every prompt into chunks.
CROWDED: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 8,
    "kv_blocks": 36,
    "max_model_len": 160,
    "max_seqs": 8,
    "step_tokens": 24,
    "chunk_tokens": 16,
    "admission": "threshold",
    "admit_threshold": 1.0,
    "preempt": "swap",
    "poison_free_blocks": True,
    "check_accounting": True,
}
SETTINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1, seed=5, top_p=0.9),
    Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=0.8, seed=6, min_p=0.01, logit_bias=[(7, 4.0)]),
    Sampling(temperature=0, logprobs=3, prompt_logprobs=2),
    Sampling(temperature=1, seed=7, grammar='start: "to" /[a-z ]{8,30}/'),
    Sampling(
        temperature=2, seed=8, allowed_token_ids=[70, 80, 90], bad_words=[[70, 70], [80, 80], [90, 90], [70, 80, 90]]
    ),
    Sampling(temperature=0, logprobs=0, logprob_token_ids=[9, 5]),
]


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of which every second one begins like another, for the prefix cache."""
    rng = random.Random(1)
    shared = rng.choices(range(3, VOCAB), k=20)
    return [shared * (i % 2) + rng.choices(range(3, VOCAB), k=rng.randrange(20, 40)) for i in range(count)]


def opened(model: Path, ranks: int, **options: Any) -> LLM:
    config = EngineConfig(model=str(model), tensor_parallel=ranks, **{**CROWDED, **options})
    return LLM.over(config, load(config))


def two_of(llm: LLM) -> ParallelExecutor:
    assert isinstance(llm.executor, ParallelExecutor)
    return llm.executor


def token_ids(done: list[Completion]) -> list[list[int]]:
    return [output.token_ids for each in done for output in each.outputs]


@pytest.fixture(scope="module")
def one(checkpoint: Checkpoint) -> Iterator[LLM]:
    made = opened(checkpoint("llama"), 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint) -> Iterator[LLM]:
    made = opened(checkpoint("llama"), 2)
    yield made
    made.close()


def test_what_an_engine_says_of_itself_is_what_one_rank_says(one: LLM, two: LLM) -> None:
    assert two.executor.info == msgspec.structs.replace(one.executor.info, adapters=False)  # ranks take none
    assert (two.executor.blocks, two.executor.max_seqs) == (one.executor.blocks, one.executor.max_seqs)
    assert two.executor.host_blocks == one.executor.host_blocks == 72


@pytest.mark.parametrize("n", [1, 2])
def test_the_text_of_one_rank_with_chunks_swaps_and_shared_blocks(one: LLM, two: LLM, n: int) -> None:
    """Greedy and sampled, with siblings that share blocks.  Freed blocks are NaN on both ranks."""
    texts, swaps = [], []
    for llm in (one, two):
        before = llm.engine.core.report.totals.swap_preemptions
        settings = [(SETTINGS[0], SETTINGS[1])[i // 2 % 2] for i in range(8)]
        texts.append(token_ids(llm.generate(prompts(), settings, max_new_tokens=50, n=n)))
        swaps.append(llm.engine.core.report.totals.swap_preemptions - before)
    assert texts[0] == texts[1]
    assert min(swaps) > 0  # how many depends on measured times


@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_what_the_plan_asks_of_sampling(one: LLM, two: LLM, sampling: Sampling) -> None:
    mine, theirs = (llm.generate(prompts(3), sampling, max_new_tokens=20) for llm in (one, two))
    assert [output.finish_reason for each in mine for output in each.outputs] != ["error"] * 3
    assert token_ids(mine) == token_ids(theirs)
    for a, b in zip(mine, theirs, strict=True):
        scored = a.outputs[0].logprobs + (a.prompt_logprobs or [])
        others = b.outputs[0].logprobs + (b.prompt_logprobs or [])
        assert [entry.logprob for entry in scored] == pytest.approx([entry.logprob for entry in others], abs=1e-4)
        assert bool(scored) == (sampling.logprobs >= 0)


def test_beams(one: LLM, two: LLM) -> None:
    mine, theirs = (
        llm.generate(prompts(2), Sampling(temperature=0), max_new_tokens=12, n=3, beams=Beams(4)) for llm in (one, two)
    )
    assert token_ids(mine) == token_ids(theirs)
    assert len(token_ids(mine)) == 6


def test_the_canary_runs_on_all_ranks(two: LLM) -> None:
    canary = two.engine.canary
    texts = []
    for _ in range(3):
        texts.append(token_ids(two.generate(prompts(4), max_new_tokens=8)))
        canary.run()
    assert (canary.counts.equal, canary.counts.different, canary.counts.difference) == (3, 0, 0.0)
    assert texts[0] == texts[1] == texts[2]
    assert two.engine.core.pool.available == two.engine.core.pool.total


def test_a_step_that_fails_on_all_ranks_is_void_and_the_next_one_runs(checkpoint: Checkpoint, two: LLM) -> None:
    """The checksum of a step is compared, so that a rank which computes other tokens ends the engine."""
    executor = two_of(two)
    bad = Slice(1, 0, [5], Sampler(Sampling(temperature=0), 1, []))
    executor.submit(StepPlan(10_000, starts=[Start(1, [10_000])], slices=[bad]))  # no such block
    with pytest.raises(StepError, match=r"IndexError: .* is 80000"):
        executor.collect()
    assert token_ids(two.generate(prompts(2), max_new_tokens=5))


@pytest.mark.parametrize("family", sampled(["qwen3", "gemma2", "qwen3_moe", "gpt2"], ["qwen3_moe", "gpt2"]))
def test_the_text_of_one_rank_of_other_families(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """An embedding that is also the head, soft caps after the head, experts that are stored one by one, weights that
    are stored transposed.  The pool holds 192 tokens, and eight sequences end with more than 400."""
    directory = make_tiny(tmp_path / family, family) if family == "qwen3_moe" else checkpoint(family)
    settings = Sampling(temperature=0, ignore_eos=True)
    by_tokens = {"itl_stretch": 0.0, "step_target_s": 0.0}  # no measured time decides how much a step computes
    texts = []
    for ranks in (1, 2):
        llm = opened(directory, ranks, kv_blocks=24, **by_tokens)
        texts.append(token_ids(llm.generate(prompts(), settings, max_new_tokens=20)))
        assert llm.engine.core.report.totals.swap_preemptions > 0
        llm.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", sampled(["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"], ["gemma3", "qwen3_vl"]))
def test_the_text_of_one_rank_of_multimodal_models(tmp_path: Path, family: str) -> None:
    """Greedy, and sampled where likely tokens alone would not differ."""
    directory = make_tiny(tmp_path / family, family, model_class=model_class(family))
    settings = [Sampling(temperature=0), Sampling(temperature=2, seed=3, ignore_eos=True)]
    texts = []
    for ranks in (1, 2):
        llm = opened(directory, ranks)
        texts.append(token_ids(llm.generate(prompts(2), settings, max_new_tokens=20)))
        llm.close()
    assert texts[0] == texts[1]
    assert len(set(texts[0][1])) > 5


@pytest.mark.parametrize("size", sampled([4, 8], [4]))
def test_more_ranks_than_kv_heads_and_a_vocabulary_that_is_not_divisible(tmp_path: Path, size: int) -> None:
    """Ranks share two KV heads, and 641 tokens: the last rank's logits are padded."""
    directory = make_checkpoint(tmp_path / "odd", "llama", vocab_size=VOCAB + 1, num_attention_heads=size)
    texts = []
    for ranks in (1, size):
        llm = opened(directory, ranks)
        settings = [Sampling(temperature=0), Sampling(temperature=2, seed=3)]
        texts.append(token_ids(llm.generate(prompts(2), settings, max_new_tokens=20)))
        assert llm.executor.info.kv_bytes_per_token == 2 * 2 * max(2, ranks) * 64 * 4  # each rank holds one of two
        processes = [rank.process for rank in two_of(llm)._others] if ranks > 1 else []
        llm.close()
        assert [process.returncode for process in processes] == [0] * (ranks - 1)
    assert texts[0] == texts[1]


def test_greedy_steps_exchange_no_logits(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a key for each row, of all ranks."""
    wanted = token_ids(two.generate(prompts(3), Sampling(temperature=0), max_new_tokens=10))
    monkeypatch.delattr(Ranks, "gather_columns")
    assert token_ids(two.generate(prompts(3), Sampling(temperature=0), max_new_tokens=10)) == wanted


def until_it_raises(use: Callable[[], object]) -> None:
    while True:
        use()
        time.sleep(0.001)


def test_made_up_weights(tmp_path: Path) -> None:
    """Each rank makes its own part, and both have the same embeddings and norms: the checksums of tokens are equal."""
    config_of("llama").save_pretrained(tmp_path)
    llm = opened(tmp_path, 2, load="random", dtype="bfloat16")
    sampled = Sampling(temperature=1, seed=3, ignore_eos=True, logprobs=1)
    [done] = llm.generate(prompts(1), sampled, max_new_tokens=30)
    assert len(set(done.outputs[0].token_ids)) > 15
    assert all(-30 < entry.logprob < 0 for entry in done.outputs[0].logprobs)
    llm.close()


@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", "killed while idle"), ("llama", "stopped"), ("qwen3_moe", "killed while idle"), ("qwen3_moe", "killed")],
)
def test_a_rank_that_dies_or_hangs_ends_the_engine(
    checkpoint: Checkpoint, tmp_path: Path, family: str, how: str
) -> None:
    """Of a stopped one 1.2 leases pass: that many beats are missed.  The rest is for a slow machine."""
    lease_s = math.ceil(paced(2.0))
    directory = make_tiny(tmp_path / family, family) if family == "qwen3_moe" else checkpoint(family)
    llm = opened(directory, 2, lease_ms=lease_s * 1000)
    executor = two_of(llm)
    rank = executor._others[0].process
    for prompt in prompts(4):
        llm.submit(prompt, Sampling(temperature=0, ignore_eos=True), max_new_tokens=100)
    for _ in range(6):
        llm.step()
    os.kill(rank.pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    began = time.monotonic()
    wanted = "rank 1 ended with status -9" if how != "stopped" else "rank 1 does not answer"
    use = executor.catch_up if how == "killed while idle" else llm.step
    with pytest.raises(ExecutorLost, match=wanted):
        until_it_raises(use)
    assert time.monotonic() - began < patience(lease_s)
    with pytest.raises(ExecutorLost, match=wanted):
        executor.submit(StepPlan(1000))
    llm.close()
    assert rank.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("cold")
def test_a_process_that_does_not_close_a_lost_executor_ends(checkpoint: Checkpoint) -> None:
    """What lets go of a GPU at the end of a process would wait for a kernel, which waits for the lost rank."""
    code = (
        "import os, signal, sys, time\n"
        "from quire.engine.llm import LLM\n"
        "from quire.engine.wire.messages import Sampling\n"
        "class Kernel:\n"
        "    def __init__(self): self.sleep = time.sleep\n"
        "    def __del__(self): self.sleep(1000)\n"
        "llm = LLM(sys.argv[1], tensor_parallel=2, threads=1, kv_blocks=80, lease_ms=2000)\n"
        "llm.executor.kernel = Kernel()\n"
        "llm.submit([5], Sampling(temperature=0, ignore_eos=True), max_new_tokens=100)\n"
        "rank = llm.executor._others[0].process\n"
        "os.kill(rank.pid, signal.SIGSTOP)\n"
        "print(rank.pid, flush=True)\n"
        "while True: llm.step()\n"
    )
    words = [sys.executable, "-c", code, str(checkpoint("llama"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        try:
            said = process.communicate(timeout=patience(60))[1]
            assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        finally:
            process.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    assert process.returncode == 1
    assert "ExecutorLost: rank 1 " in said


def test_a_process_ends_that_cannot_close_a_lost_executor(checkpoint: Checkpoint) -> None:
    code = (
        "import sys, time\n"
        "from quire.engine.executor.ranks import parallel\n"
        "from quire.engine.llm import LLM\n"
        "parallel.CLOSE_S = 1.0\n"
        "llm = LLM(sys.argv[1], tensor_parallel=2, threads=1, kv_blocks=80)\n"
        "llm.executor._others[0].process.kill()\n"
        "try:\n"
        "    while True: llm.executor.catch_up()\n"
        "except parallel.ExecutorLost:\n"
        "    print('lost', flush=True)\n"
        "llm.executor._local.close = lambda: time.sleep(1000)\n"
        "llm.close()\n"
    )
    found = warm.run([sys.executable, "-c", code, str(checkpoint("llama"))], timeout=patience(100))
    assert found.stdout == "lost\n", found.stderr
    assert found.returncode == 1


def maps_the_kernels(process: psutil.Process) -> bool:
    return any("quire" in Path(each.path).name and each.path.endswith(".so") for each in process.memory_maps())


def test_ranks_of_a_spare_wait_prepared_and_take_over(
    checkpoint: Checkpoint, two: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process that waited is the rank.  One that died meanwhile is replaced."""
    config = EngineConfig(model=str(checkpoint("llama")), tensor_parallel=2, standby=True, **CROWDED)
    wanted = token_ids(two.generate(prompts(2), max_new_tokens=10))
    for dies in (False, True):
        waiting = WaitingRanks()
        assert list(waiting.prepare(config)) == ["ranks", "kernels", "weight files", "rehearsal"]
        process = waiting._ranks[0].process
        said = ""
        while "rank 1 of a spare is prepared" not in said:
            assert process.poll() is None
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert maps_the_kernels(psutil.Process(process.pid))
        if dies:
            process.kill()
            process.wait()
        llm = LLM.over(config, waiting.load(config))
        assert token_ids(llm.generate(prompts(2), max_new_tokens=10)) == wanted
        rank = two_of(llm)._others[0].process
        assert (rank is process) != dies
        llm.close()
        assert rank.returncode == 0


def test_a_takeover_ends_the_preparation(checkpoint: Checkpoint) -> None:
    """The rank gets both messages before it has begun."""
    config = EngineConfig(model=str(checkpoint("llama")), tensor_parallel=2, standby=True, **CROWDED)
    waiting = WaitingRanks()
    assert next(waiting.prepare(config)) == "ranks"
    process = waiting._ranks[0].process
    llm = LLM.over(config, waiting.load(config))
    assert two_of(llm)._others[0].process is process
    assert token_ids(llm.generate(prompts(1), max_new_tokens=3))
    llm.close()


def test_a_spare_whose_model_cannot_be_divided_says_so_at_its_takeover(checkpoint: Checkpoint) -> None:
    config = EngineConfig(model=str(checkpoint("opt")), tensor_parallel=2, standby=True, **CROWDED)
    waiting = WaitingRanks()
    list(waiting.prepare(config))
    process = waiting._ranks[0].process
    with pytest.raises(ModelLoadError, match="opt: --tensor-parallel: transformers has no table"):
        waiting.load(config)
    assert process.returncode in (2, -signal.SIGKILL)  # by itself, for the same reason, or killed before


def test_the_ranks_of_a_spare_without_devices_end(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is gone, say."""
    config = EngineConfig(model=str(checkpoint("llama")), tensor_parallel=2, standby=True, **CROWDED)
    waiting = WaitingRanks()
    next(waiting.prepare(config))
    process = waiting._ranks[0].process

    def refuse(config: EngineConfig) -> None:
        raise ModelLoadError("no GPU")

    monkeypatch.setattr(parallel, "check_devices", refuse)
    with pytest.raises(ModelLoadError, match="no GPU"):
        waiting.load(config)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "where"), [("SIGSTOP", "join"), ("SIGSTOP", "LocalExecutor"), ("SIGKILL", "LocalExecutor")]
)
def test_a_rank_that_hangs_or_dies_while_the_model_loads_ends_the_start(
    checkpoint: Checkpoint, how: str, where: str
) -> None:
    """As the ranks meet nothing can interrupt rank 0, so its process ends.  As they read their parts, it raises."""
    silence_s = math.ceil(paced(3.0))
    code = (
        "import logging, os, signal, sys\n"
        "from quire.engine.config import EngineConfig\n"
        "from quire.engine.executor.ranks import parallel\n"
        "from quire.engine.executor.errors import ModelLoadError\n"
        "logging.basicConfig()\n"
        f"parallel.LOAD_SILENCE_S = parallel.LEASES_OF_SILENCE = {silence_s}\n"
        "begun, (_, model, how, where) = [], sys.argv\n"
        "start, real = parallel.Rank.start, getattr(parallel, where)\n"
        "parallel.Rank.start = lambda *args: begun.append(start(*args)) or begun[-1]\n"
        "def lose_and_go_on(*args):\n"
        "    os.kill(begun[0].process.pid, signal.Signals[how])\n"
        "    print(begun[0].process.pid, flush=True)\n"
        "    return real(*args)\n"
        "setattr(parallel, where, lose_and_go_on)\n"
        "config = EngineConfig(model=model, tensor_parallel=2, threads=1, kv_blocks=80, lease_ms=1000)\n"
        "try:\n"
        "    parallel.ParallelExecutor(config)\n"
        "except ModelLoadError as error:\n"
        "    sys.exit(str(error))\n"
    )
    words = [sys.executable, "-c", code, str(checkpoint("llama")), how, where]
    with warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        stopped = [psutil.Process(pid)] if how == "SIGSTOP" else []
        try:
            said = engine.communicate(timeout=patience(30))[1]  # it ends after that silence and END_S
        finally:
            engine.kill()
            for rank in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
    assert engine.returncode == 1
    silent = f"rank 1 has sent nothing for {silence_s} s while the model loads"
    assert said.count(silent if how == "SIGSTOP" else "rank 1 ended with status -9") == 1


@pytest.mark.parametrize("abort", ["time.sleep(1000)", "ctypes.PyDLL(None).sleep(1000)"])
def test_the_process_ends_though_an_abort_never_returns(abort: str) -> None:
    """NCCL's may wait for a kernel that waits for the lost rank, and hold the interpreter meanwhile, so that no other
    thread of Python runs.  The rank here is stopped: it lives, and is silent."""
    code = (
        "import ctypes, signal, socket, subprocess, sys, time\n"
        "from types import SimpleNamespace\n"
        "from quire.engine.executor.ranks.parallel import Rank, Watch\n"
        "process = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "process.send_signal(signal.SIGSTOP)\n"
        "life, _theirs = socket.socketpair()\n"
        f"ranks = SimpleNamespace(abort=lambda: {abort})\n"
        "watch = Watch([Rank(1, process, None, life)], 0.05, ranks=ranks)\n"
        "watch.start()\n"
        "watch.expect_beats(0.25)\n"
        "with watch.using():\n"
        "    time.sleep(1000)\n"
    )
    found = warm.run([sys.executable, "-c", code], timeout=patience(120))
    assert found.returncode == 1, found.stderr
    assert "rank 1 does not answer" in found.stderr


def test_a_rank_that_chooses_other_tokens_ends_the_engine(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(checkpoint("llama"), 2)
    monkeypatch.setattr(parallel, "digest", lambda _: 0)
    with pytest.raises(ExecutorLost, match="rank 1 chose other tokens than rank 0 in step 1"):
        llm.generate(prompts(1))
    rank = two_of(llm)._others[0].process
    llm.close()
    llm.close()
    assert rank.returncode == -signal.SIGKILL


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_fails_alone_ends_the_engine(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    """The others wait in an exchange that it never reaches.  One rank gets a plan with a block that does not exist."""
    lease_s = math.ceil(paced(1.0))
    llm = opened(checkpoint("llama"), 2, lease_ms=1000 * lease_s)
    executor = two_of(llm)
    good = StepPlan(1, starts=[Start(0, [0])], slices=[Slice(0, 0, [5], Sampler(Sampling(temperature=0), 1, []))])
    bad = msgspec.structs.replace(good, starts=[Start(0, [10_000])])
    send = ParallelExecutor._send

    def send_to_others(self: ParallelExecutor, message: bytes) -> None:
        send(self, SUBMIT + msgspec.msgpack.encode(bad if alone else good) if message[:1] == SUBMIT else message)

    monkeypatch.setattr(ParallelExecutor, "_send", send_to_others)
    began = time.monotonic()
    executor.submit(good if alone else bad)
    late = f"rank 1 has not ended a step {lease_s} s after rank 0 did"
    said = "rank 1 does not answer, or failed alone" if alone else late
    with pytest.raises(ExecutorLost, match=said):
        executor.collect()
    assert time.monotonic() - began < patience(10 * lease_s)
    rank = executor._others[0].process
    llm.close()
    assert rank.returncode == -signal.SIGKILL


def test_no_rank_outlives_its_engine(checkpoint: Checkpoint) -> None:
    """The engine's process is killed, so that it cannot end the others: they notice."""
    code = (
        "import sys, time; from quire.engine.config import EngineConfig\n"
        "from quire.engine.executor.loading import load\n"
        "executor = load(EngineConfig(model=sys.argv[1], tensor_parallel=2, threads=1, kv_blocks=80, max_seqs=4))\n"
        "print(executor._others[0].process.pid, flush=True); time.sleep(1000)"
    )
    words = [sys.executable, "-c", code, str(checkpoint("llama"))]
    with warm.Popen(words, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        rank = psutil.Process(int(engine.stdout.readline()))
        assert "quire.engine.process.rank" in rank.cmdline()
        engine.kill()
    psutil.wait_procs([rank], timeout=patience(60))
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE  # zombie: if no init process reaps it


@pytest.mark.parametrize("other", ["absent", "of other weights"])
def test_one_line_where_rank_1_has_other_files(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    directory = tmp_path / "other"
    if other == "of other weights":
        make_checkpoint(directory, "llama", edit=lambda model: model.lm_head.weight.data.mul_(2))

    def task(number: int, meeting: str, beat_s: float, config: EngineConfig) -> Task:
        return Task(number, meeting, beat_s, msgspec.structs.replace(config, model=str(directory)))

    monkeypatch.setattr(parallel, "Task", task)
    said = r"rank 1: .*/other: no such directory" if other == "absent" else r"rank 1 has loaded other weights: finger"
    with pytest.raises(ModelLoadError, match=said):
        opened(checkpoint("llama"), 2)


def test_one_line_where_no_rank_can_start(checkpoint: Checkpoint) -> None:
    """The error is every rank's, and rank 0's own line counts."""
    with pytest.raises(ModelLoadError, match=r"^opt: --tensor-parallel: transformers has no table"):
        opened(checkpoint("opt"), 2)


def test_ranks_that_loaded_something_else_are_refused(one: LLM) -> None:
    mine = Facts(one.executor.info, one.executor.blocks, 0, 8, 24)
    check_equal(1, mine, mine)
    other = msgspec.structs.replace(mine, info=msgspec.structs.replace(mine.info, fingerprint="f" * 64))
    with pytest.raises(ModelLoadError, match=r"rank 1 has loaded other weights: fingerprint ffffffffffff, that of"):
        check_equal(1, other, mine)
    with pytest.raises(ModelLoadError, match=r"rank 2 says Facts\(.*blocks=35"):
        check_equal(2, msgspec.structs.replace(mine, blocks=35), mine)


def test_a_gpu_and_shared_memory_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "device_kind", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match=r"--tensor-parallel 2: this process sees 1 GPU\(s\)"):
        load(EngineConfig(tensor_parallel=2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=63 << 20))
    with pytest.raises(
        ModelLoadError, match=r"63 MiB are free in /dev/shm, 2 ranks need 64 MiB: docker run --shm-size"
    ):
        load(EngineConfig(tensor_parallel=2))


@pytest.mark.perf
@pytest.mark.parametrize("edits", [0, 16, 256])
def test_a_plan_reaches_a_rank_in_microseconds(edits: int) -> None:
    """A step of 256 slots that decode, of which none, a usual number or all take a block.  `-s` prints the times."""
    code = (
        "import sys, msgspec\n"
        "from multiprocessing.connection import Connection\n"
        "from quire.engine.core.plan import StepPlan\n"
        "commands, decoder = Connection(int(sys.argv[1])), msgspec.msgpack.Decoder(StepPlan)\n"
        "while (message := commands.recv_bytes())[:1] == b'S':\n"
        "    decoder.decode(memoryview(message)[1:])\n"
        "    commands.send_bytes(b'decoded')\n"
    )
    plan = StepPlan(1000, edits=[(slot, 40, 5000 + slot) for slot in range(edits)])
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-c", code, str(theirs.fileno())]
    with theirs, Connection(ours.detach()) as commands, subprocess.Popen(words, pass_fds=[theirs.fileno()]) as rank:
        times = []
        for _ in range(3000):
            times.append([time.perf_counter()])
            commands.send_bytes(message := SUBMIT + msgspec.msgpack.encode(plan))
            times[-1].append(time.perf_counter())
            commands.recv_bytes()
            times[-1].append(time.perf_counter())
        commands.send_bytes(CLOSE)
        assert rank.wait(patience(30)) == 0
    sent, decoded = (statistics.median(each[i] - each[0] for each in times) * 1e6 for i in (1, 2))
    print(f"{edits} edits, {len(message)} bytes: sent in {sent:.1f} us, decoded and answered after {decoded:.1f} us")
    assert decoded < 500
