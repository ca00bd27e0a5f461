"""Programs that measure servers and models, each with a small data set of its own: no request may fail.

They read the demo model's tokenizer from its directory, and nothing from a hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = os.environ["QUIRE_MODEL"]  # the model's directory
QUESTIONS = [
    {"prompt": "The capital of France is", "choices": ["Paris", "Rome"], "label": 0, "output_tokens_count": 8},
    {"prompt": "One, two, three,", "choices": ["four", "été 山"], "label": 0, "output_tokens_count": 5},
]
TASK = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: DATA}}\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: prompt\ndoc_to_choice: choices\ndoc_to_target: label\n"
    "metric_list: [{metric: acc}]\n",
    "write": "output_type: generate_until\ndoc_to_text: prompt\ndoc_to_target: '{{choices[0]}}'\n"
    "generation_kwargs: {until: ['.', ','], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
    "read": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: prompt\n"
    "metric_list: [{metric: word_perplexity}]\n",
}
pytestmark = pytest.mark.sense  # the tokenizer of the demo model is a directory, which these programs can read


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    return path


def run(folder: Path, *words: str | Path) -> str:
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def evaluated(folder: Path, data: Path, model: str, arguments: str, tasks: list[str], *words: str) -> dict[str, Any]:
    """Return the results of lm-eval: {task: {metric: value}}."""
    for name in tasks:
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{TASK.replace('DATA', str(data))}{TASKS[name]}")
    program = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    run(folder, *program, "--include_path", ".", "--tasks", ",".join(tasks), "--output_path", "out", *words)
    [results] = (folder / "out").rglob("results*.json")
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))["results"]
    return found


def test_lm_eval_scores_and_writes(tmp_path: Path, data: Path, base_url: str, model: str) -> None:
    arguments = f"model={model},base_url={base_url}/completions,num_concurrent=2"
    found = evaluated(tmp_path, data, "local-completions", arguments, [*TASKS])
    assert found["choose"]["acc,none"] == 1
    assert found["write"]["exact_match,none"] >= 0
    assert 1 < found["read"]["word_perplexity,none"] < 1e6


def test_lm_eval_chats(tmp_path: Path, data: Path, base_url: str, model: str) -> None:
    arguments = f"model={model},base_url={base_url}/chat/completions"
    found = evaluated(tmp_path, data, "local-chat-completions", arguments, ["write"], "--apply_chat_template")
    assert found["write"]["sample_len"] == len(QUESTIONS)


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"), ("openai-responses", "/v1/responses")],
)
def test_vllm_bench_serve(tmp_path: Path, data: Path, url: str, model: str, backend: str, path: str) -> None:
    """Its module, since the command `vllm` imports the server as well."""
    start = "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    start += "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    server = ("--backend", backend, "--base-url", url, "--endpoint", path, "--model", model, "--tokenizer", MODEL)
    dataset = ("--dataset-name", "custom", "--dataset-path", str(data), "--custom-output-len", "6")
    output = ("--save-result", "--save-detailed", "--result-filename", "result.json")
    run(tmp_path, sys.executable, "-c", start, *server, *dataset, "--num-prompts", "4", *output)
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (4, 0, 24)
    assert all(ttft > 0 for ttft in found["ttfts"])
    assert all(gap > 0 for gaps in found["itls"] for gap in gaps)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm(tmp_path: Path, data: Path, url: str, model: str, path: str) -> None:
    program = Path(sys.executable).with_name("guidellm")
    backend = f"kind=openai_http,target={url},model={model},request_format={path}"
    tokenizer = f"kind=huggingface_auto,model={MODEL}"
    load = ("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=2")
    files = ("--data", f"kind=json_file,path={data}", "--output", "kind=json,path=result.json", "--disable-console")
    run(tmp_path, program, "run", "--backend", backend, "--tokenizer", tokenizer, *load, *files)
    [measured] = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = measured["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (2, [])
    assert sorted(one["output_tokens"] for one in requests["successful"]) == [5, 8]
    assert all(one["time_to_first_token_ms"] > 0 for one in requests["successful"])
