"""The promises of the measuring programs; no test checks the numbers themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from quire.engine.config import EngineConfig
from quire.engine.tools.bench import Options, bench, main
from quire.loadtest import shapes, trace
from quire.loadtest.roofline import Machine, Shape
from quire.loadtest.studies.block_size import swap
from quire.loadtest.studies.long_prompt import stalls

LLAMA = Shape.of(shapes.CONFIGS["llama-8b"])
H200 = Machine(read_gbps=4539, tflops=753)


def test_the_kept_trace_is_the_one_the_peers_ran() -> None:
    jobs = trace.read("sharegpt_like")
    assert len(jobs) == 1000
    assert sum(job.prompt_len for job in jobs) == 160_961
    assert sum(job.output_len for job in jobs) == 338_008


def test_floor_of_a_token_alone_is_the_time_to_read_the_weights() -> None:
    assert LLAMA.weight_bytes == pytest.approx(15.0e9, rel=1e-3)
    assert H200.token_ms(LLAMA, 1, 0) == pytest.approx(15.0e9 / 4539e6, rel=1e-3)


def test_floor_of_a_trace_counts_every_token() -> None:
    one = [trace.Job(prompt_len=64, output_len=4, prompt_seed=0)]
    # The prompt, and three steps that read the weights and what is cached.
    prompt = H200.step(LLAMA, tokens=64, rows=1, cached=0, pairs=64 * 65 // 2)
    decodes = sum(H200.token_ms(LLAMA, 1, cached) for cached in (65, 66, 67)) / 1e3
    assert H200.trace(LLAMA, one) == pytest.approx(prompt + decodes)
    # In chunks it reads the weights once for each.
    assert H200.trace(LLAMA, one, step_tokens=16) == pytest.approx(prompt * 4 + decodes, rel=0.01)


def test_bench_measures_a_trace_and_the_latency_of_batches(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    trace.write_requests(trace.lognormal(3, 8, 6, seed=1), 100, requests)
    options = Options(requests, rounds=2, latency=[2], compare_prefix_cache=True, slots=True)
    figures = bench(EngineConfig(threads=1, kv_blocks=128), options)
    assert figures["kv_tokens"] == 128 * 16
    lines = [msgspec.json.decode(line) for line in requests.read_bytes().splitlines()]
    assert figures["output_tokens"] == sum(line["max_new_tokens"] for line in lines)
    assert figures["output_tokens_without_prefix_cache"] == figures["output_tokens"]
    assert figures["batch2_ms_per_token"] > 0
    assert 0 < figures["slots_filled"] <= 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            '{"token_ids": [1], "max_new_tokens": 2}\n{"prompt_len": 7}\n',
            "line 2: Object missing required field",
        ),
        ("not json", "line 1: JSON is malformed"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_of_other_requests_is_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, wanted: str
) -> None:
    if text is not None:
        (tmp_path / "requests.jsonl").write_text(text)
    assert main(["--requests", str(tmp_path / "requests.jsonl"), "--model", "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert said.count("\n") == 1


def test_studies_measure_swaps_and_stalls() -> None:
    config = EngineConfig(threads=1, kv_blocks=128, max_model_len=1000)
    figures = swap(config, tokens=40)
    for size in (8, 16, 32, 64):
        assert figures[f"swap{size}_ms"] > 0 < figures[f"recompute{size}_ms"]
    figures = stalls(config, length=400, window=3, rows=2)
    assert figures["beside_p99_ms"] >= figures["at_0_beside_p99_ms"] > 0 < figures["at_0_alone_p99_ms"]


def test_its_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m quire.engine.tools bench ")
