"""Measure what one question needs: `python -m quire.loadtest.studies NAME --help` describes one study."""

from __future__ import annotations

import argparse
import importlib
import sys

from quire.loadtest import command_line

PACKAGE = "quire.loadtest.studies"
# name -> (module, what it measures)
STUDIES: dict[str, tuple[str, str]] = {
    "capacity": (f"{PACKAGE}.capacity", "find how many users fit: static, paged, admission, prefix cache"),
    "baselines": (f"{PACKAGE}.baseline_server", "serve with other admission modes and static allocation, to compare"),
    "burst-modes": (f"{PACKAGE}.burst_modes", "replay the burst with the modes of `baselines`"),
    "virtual-burst": (f"{PACKAGE}.burst_in_virtual_time", "compare admission modes in a burst, in virtual time"),
    "memory-limit": (
        f"{PACKAGE}.memory_limit",
        "compare allocation, admission and prefix cache with 12 GB of KV memory",
    ),
    "memory-use": (
        f"{PACKAGE}.memory_use",
        "sample filled slots, paged blocks / static blocks and hit rate, by workload",
    ),
    "contiguous": (f"{PACKAGE}.contiguous", "compare paged with contiguous allocation where paging cannot help"),
    "block-size": (f"{PACKAGE}.block_size", "compare block sizes: throughput, filled slots, swap and recompute"),
    "beams": (f"{PACKAGE}.beams", "compare beam search with resubmission by a client, and with transformers"),
    "fairness": (f"{PACKAGE}.fairness", "compare a quiet tenant's latency with and without a loud tenant"),
    "virtual-fairness": (
        f"{PACKAGE}.virtual_fairness",
        "compare a quiet tenant's latency on several engines, in virtual time",
    ),
    "virtual-retries": (
        f"{PACKAGE}.virtual_retries",
        "compare the stated Retry-After with the needed one, in virtual time",
    ),
    "prediction": (f"{PACKAGE}.prediction", "compare a measured run with the simulation of its request log"),
    "long-prompt": (f"{PACKAGE}.long_prompt", "time decode steps while a prompt of 32,768 tokens is computed"),
    "overhead": (f"{PACKAGE}.overhead", "compare a served model with the same engine offline"),
    "local-tools": (f"{PACKAGE}.local_tools", "compare with llama.cpp's server: the same chats, the same cores"),
    "gateway": (f"{PACKAGE}.gateway", "stream scripted tokens: tokens/s and CPU time per token of one gateway"),
    "slow-readers": (f"{PACKAGE}.slow_readers", "measure what clients that read one byte per second cost a gateway"),
    "roofline": ("quire.loadtest.roofline", "compute the minimum time of a step of a model shape on given hardware"),
    "shapes": ("quire.loadtest.shapes", "write the config.json of a model shape for engines with random weights"),
    "oracle": (f"{PACKAGE}.oracle", "bound the on-time share of a burst, with perfect knowledge and without"),
    "fleet": (f"{PACKAGE}.fleet", "simulate several engines on one queue, with and without prefix locality"),
    "adapter-fleet": (
        f"{PACKAGE}.adapter_fleet",
        "simulate engines with many LoRA adapters that prefer requests for loaded ones",
    ),
    "scheduler-cost": (f"{PACKAGE}.scheduler_cost", "time a steady decode step of the scheduler, by sequences"),
    "claim-cost": (f"{PACKAGE}.claim_cost", "time the cost in Redis of claiming requests by prefix"),
    "redis-load": (f"{PACKAGE}.redis_load", "time the cost of requests, syncs and tokens in Redis"),
    "redis-full": (f"{PACKAGE}.redis_full", "count the steps per second that one Redis carries, by gateways"),
    "rates": (f"{PACKAGE}.rates", "measure normalised latency by request rate, by allocation and admission"),
    "sharing": (f"{PACKAGE}.sharing", "count the KV blocks that parallel sampling and beam search share"),
    "sharing-gain": (f"{PACKAGE}.sharing_gain", "compare static, paged and shared allocation in virtual time"),
    "structured": (f"{PACKAGE}.structured", "compare tokens/s with grammars and without, in pairs"),
    "schemas": (f"{PACKAGE}.schemas", "count the JSON schemas of a collection that are served, and time refusals"),
    "hybrid-hits": (f"{PACKAGE}.hybrid_hits", "count prompt tokens that the cache of a recurrent model finds"),
    "models": (f"{PACKAGE}.model_families", "compare every model family with transformers; writes docs/models.md"),
    "gpu-idle": (f"{PACKAGE}.gpu_idle", "measure how long a GPU is idle between decode steps"),
    "cache-cost": (f"{PACKAGE}.cache_cost", "compare CPU time with the prefix cache and without, on unshared prompts"),
    "neighbours": (f"{PACKAGE}.neighbours", "time decode steps on a CPU with other busy processes"),
    "drafting": (f"{PACKAGE}.drafting", "compare tokens/s with drafts and without, in pairs"),
    "draft-traces": (f"{PACKAGE}.draft_traces", "record which drafts are found in real answers, and which are right"),
    "scripted-drafts": (f"{PACKAGE}.scripted_drafts", "compare tokens/s with scripted drafts, on random weights"),
    "mixtures": (f"{PACKAGE}.mixtures", "time decode steps of mixtures with quantised experts and in bfloat16"),
    "adapters": (f"{PACKAGE}.adapters", "compare decode steps with LoRA adapters and without, in pairs"),
    "drafting-digests": (f"{PACKAGE}.drafting_digests", "compare all token ids with drafts and without, with kills"),
    "quantized": (f"{PACKAGE}.quantized", "compare perplexity and speed of --quantize and --kv-dtype, in pairs"),
}


def main(words: list[str]) -> int:
    listing = "\n".join(f"  {name:18}{text}" for name, (_, text) in STUDIES.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}",
        usage=f"python -m {PACKAGE} NAME [options]",
        description=__doc__,
        epilog=f"studies:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=STUDIES, help="a study of the list below")
    name = parser.parse_args(words[:1]).name
    module = importlib.import_module(STUDIES[name][0])  # only now: some studies need torch
    if not hasattr(module, "add_arguments"):  # it reads the options of an engine too
        return int(module.main(words[1:]))
    return command_line.run(name, module.__doc__, module.add_arguments, module.main, words[1:], package=PACKAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
