"""Run vLLM offline on a file of requests and print one JSON line.  Needs a Python with vLLM.

python vllm_offline.py CHECKPOINT REQUESTS --kv-tokens N                      on a CPU
python vllm_offline.py CHECKPOINT REQUESTS --device cuda --latency 1,8,32     on a GPU, with random weights

REQUESTS: JSON lines of loadtest/trace.py's write_requests().
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="KV pool on a CPU, in tokens")
    parser.add_argument(
        "--latency", type=lambda text: [int(part) for part in text.split(",")], default=[1], help="batch sizes to time"
    )
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    jobs = [json.loads(line) for line in args.requests.read_text().splitlines()]
    begin = time.perf_counter()
    if args.device == "cpu":
        options = {
            "block_size": 32,
            "num_gpu_blocks_override": args.kv_tokens // 32,
            "max_num_seqs": 256,
            "enable_prefix_caching": False,
        }
    else:  # vLLM's own defaults, except for the prefix cache: it was faster without
        options = {"load_format": "dummy", "max_model_len": 8192, "enable_prefix_caching": False}
    llm = LLM(args.checkpoint, dtype="bfloat16", skip_tokenizer_init=True, **options)
    start = time.perf_counter() - begin
    prompts = [TokensPrompt(prompt_token_ids=job["token_ids"]) for job in jobs]

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    llm.generate(prompts[:4], [params(8)] * 4, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [params(job["max_new_tokens"]) for job in jobs], use_tqdm=False)
    batch = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {"output_tokens": tokens, "seconds": batch, "tokens_per_s": tokens / batch, "start_s": start}
    for size in args.latency:
        first: list[float] = []
        last: list[float] = []
        for turn in range(4):  # the first one is a warm-up
            for count, times in ((1, first), (256, last)):
                seeds = range((turn * 256 + count) * 4096, (turn * 256 + count) * 4096 + size)
                ids = [random.Random(seed).choices(range(10, 15000), k=128) for seed in seeds]
                group = [TokensPrompt(prompt_token_ids=one) for one in ids]
                begin = time.perf_counter()
                llm.generate(group, params(count), use_tqdm=False)
                times.append(time.perf_counter() - begin)
        one, all_ = statistics.median(first[1:]), statistics.median(last[1:])
        figures[f"batch{size}_ms_per_token"] = (all_ - one) / 255 * 1e3
        figures[f"batch{size}_first_token_ms"] = one * 1e3
        figures[f"batch{size}_tokens_per_s"] = size * 256 / all_
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
