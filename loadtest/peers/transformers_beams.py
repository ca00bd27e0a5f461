"""Run transformers' beam search offline on a file of prompts and print one JSON line: seconds, and the best answers.

python transformers_beams.py CHECKPOINT PROMPTS --width 4 --length 64 [--device cuda] [--random]

PROMPTS: a JSON list of lists of token ids, all of one length.  --random: CHECKPOINT's config.json, with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--random", action="store_true")
    args = parser.parse_args()

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": "sdpa"}
    with torch.device(args.device):
        if args.random:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.checkpoint), **how)
        else:
            model = AutoModelForCausalLM.from_pretrained(args.checkpoint, **how)
    model.eval()
    prompts = torch.tensor(json.loads(args.prompts.read_text()), device=args.device)

    def search(length: int) -> dict[str, object]:
        begin = time.perf_counter()
        found = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_beams=args.width,
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
        )
        if args.device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - begin, "tokens": found[:, prompts.shape[1] :].tolist()}

    search(2)  # warm-up: allocators and kernels
    print(json.dumps(search(args.length)))


if __name__ == "__main__":
    main()
