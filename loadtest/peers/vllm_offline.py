"""vLLM on a trace, offline.  Runs under the Python that has vLLM; prints one JSON line.

python vllm_offline.py CHECKPOINT TRACE --kv-tokens N
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--kv-tokens", type=int, default=32768)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    jobs = [json.loads(line) for line in args.requests.read_text().splitlines()]
    begin = time.perf_counter()
    llm = LLM(
        args.checkpoint,
        dtype="bfloat16",
        block_size=32,
        num_gpu_blocks_override=args.kv_tokens // 32,
        enable_prefix_caching=False,
        max_num_seqs=256,
        skip_tokenizer_init=True,
    )
    start = time.perf_counter() - begin
    prompts = [TokensPrompt(prompt_token_ids=job["token_ids"]) for job in jobs]

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    llm.generate(prompts[:4], [params(8)] * 4, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [params(job["max_new_tokens"]) for job in jobs], use_tqdm=False)
    batch = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    times = []
    for count in (1, 129):
        begin = time.perf_counter()
        llm.generate(prompts[:1], params(count), use_tqdm=False)
        times.append(time.perf_counter() - begin)
    print(
        json.dumps(
            {
                "output_tokens": tokens,
                "seconds": batch,
                "tokens_per_s": tokens / batch,
                "batch1_ms_per_token": (times[1] - times[0]) / 128 * 1e3,
                "start_s": start,
            }
        )
    )


if __name__ == "__main__":
    main()
