"""Run transformers' continuous batching offline on a file of requests and print one JSON line.

python transformers_batching.py CHECKPOINT REQUESTS [--device cuda]

The weights are random if CHECKPOINT holds none.  REQUESTS: JSON lines of loadtest/trace.py's write_requests().
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    jobs = [json.loads(line) for line in args.requests.read_text().splitlines()]
    begin = time.perf_counter()
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    with torch.device(args.device):
        if any(Path(args.checkpoint).glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(args.checkpoint, **how)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.checkpoint), **how)
    model.eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    start = time.perf_counter() - begin
    begin = time.perf_counter()
    for job in jobs:
        manager.add_request(job["token_ids"], max_new_tokens=job["max_new_tokens"])
    tokens = done = 0
    while done < len(jobs):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done += 1
            tokens += len(result.generated_tokens)
    seconds = time.perf_counter() - begin
    manager.stop(block=True)
    print(json.dumps({"output_tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "start_s": start}))


if __name__ == "__main__":
    main()
