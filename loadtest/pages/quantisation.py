"""docs/quantisation.md: quality and speed of quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.loadtest.pages import Results, facts, v

PAGE = "docs/quantisation.md"
FACTS = facts("quantisation")


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts that contain measured values."""
    yield from cpu(results["quantized_cpu"])
    yield from zen4(results)
    yield from gpu(results)
    yield from mxfp4(results["mxfp4_experts_h200"])
    yield from experts_of_a_layer(results["experts_packed_h100"])


def spread(run: dict[str, Any], name: str) -> str:
    """Return the median of the pairs with its range."""
    return f"{v(run[name], '.2f')} ({v(run[f'{name}_low'], '.2f')} to {v(run[f'{name}_high'], '.2f')})"


def cpu(result: dict[str, Any]) -> Iterator[str]:
    int8, int4 = result["figures"]["int8"], result["figures"]["int4"]
    plain, eight, four = (v(x, ".2f") for x in (int8["perplexity_plain"], int8["perplexity"], int4["perplexity"]))
    yield f"| perplexity, 1,024 tokens of `docs/architecture.md` | {plain} | {eight} | {four} |"
    for name, key in (
        ("positions with the same most probable next token", "agreement"),
        ("greedy answers of 32 tokens: share before the first difference", "greedy_agreement"),
    ):
        form = ".3f" if key == "agreement" else ".2f"
        yield f"| {name} | | {v(int8[key], form)} | {v(int4[key], form)} |"
    for name, key in (("a token at batch 1", "decode_ratio"), ("a prompt of 512 tokens", "prompt_ratio")):
        yield f"| {name}, times as fast | 1 | {spread(int8, key)} | {spread(int4, key)} |"
    ms = {kind: sorted(runs)[1] for kind, runs in result["ms_per_token"]["d5c0e88"].items()}
    yield (
        f"| a token at batch 1, ms, median of 3 (int4: the head in 16 bits) | {v(ms['bfloat16'], '.1f')} | "
        f"{v(ms['int8'], '.1f')} | {v(ms['int4'], '.1f')} |"
    )
    yield (
        f"becomes {v(int4['perplexity'], '.1f')} from {v(int4['perplexity_plain'], '.1f')}, and the most probable next token "
        f"is the same at {v(int4['agreement'], '.2f')} of all positions"
    )
    peer = result["llama_cpp"]["int4_with_its_head_in_8_bits"]
    theirs, ours = peer["llama_cpp_ms_per_token"], peer["quire_ms_per_token"]
    prompts, own = peer["llama_cpp_prompt_ms"], peer["quire_prompt_ms"]
    yield f"takes {v(min(theirs), '.1f')} to {v(max(theirs), '.1f')} ms per token on these cores; Quire, run in turn with it, takes {v(min(ours), '.1f')} and {v(max(ours), '.1f')}."
    yield f"prompt of 128 tokens takes {v(min(prompts), '.0f')} to {v(max(prompts), '.0f')} ms with llama.cpp, {v(min(own), '.0f')} and {v(max(own), '.0f')} with Quire."


def zen4(results: Results) -> Iterator[str]:
    vnni, wide = results["quantized_cpu_vnni"], results["quantized_cpu_widened"]
    idle = wide["figures_idle"]
    for name, key in (("a token at batch 1", "decode_ratio"), ("a prompt of 512 tokens", "prompt_ratio")):
        yield f"| {name}, idle machine | {spread(idle['int8'], key)} | {spread(idle['int4'], key)} |"
    v3 = wide["figures_x86_64_v3"]
    yield (
        "| a prompt, kernels built for x86-64-v3 as in the images | "
        f"{spread(v3['int8'], 'prompt_ratio')} | {spread(v3['int4'], 'prompt_ratio')} |"
    )
    theirs = [ms for run in vnni["llama_cpp"]["ms_per_token"] for ms in run]
    ours = vnni["ms_per_token"]["int4"]
    yield (
        f"in turn with three runs of Quire, llama.cpp takes {v(min(theirs), '.1f')} to {v(max(theirs), '.1f')} ms per token, int4 "
        f"{v(min(ours), '.1f')} to {v(max(ours), '.1f')}."
    )
    prompts, own = vnni["llama_cpp"]["prompt_of_128_ms"], vnni["first_token_ms_of_a_prompt_of_128"]["int4"]
    yield f"128 tokens takes {v(min(prompts))} to {v(max(prompts))} ms with llama.cpp, {v(min(own), '.0f')} to {v(max(own), '.0f')} with Quire."
    slow = vnni["figures"]
    yield (
        f"({v(slow['int8']['prompt_ratio'], '.2f')} times the speed of bfloat16 with int8, "
        f"{v(slow['int4']['prompt_ratio'], '.2f')} with int4)"
    )


def gpu(results: Results) -> Iterator[str]:
    steps, other = results["int4_integers"]["steps"]["ms_a_token"], results["int4_h200"]["steps"]
    plain, last = other["bfloat16"], other["--quantize int4"]["batch256_ms_per_token"]
    cells = [v(steps[n], ".1f" if steps[n] >= 10 else ".2f") for n in ("1", "8", "16", "32", "64")]
    yield f"| int4 | {' | '.join(cells)} | {v(last, '.1f')} |"
    one, eight, many, all_rows = (
        v(plain[f"batch{n}_ms_per_token"], ".2f" if n < 256 else ".1f") for n in (1, 8, 32, 256)
    )
    yield f"| bfloat16 | {one} | {eight} | | {many} | | {all_rows} |"
    fast = plain["batch1_ms_per_token"] / steps["1"]
    yield f"So int4 is {v(fast, '.1f')} times as fast as bfloat16 with one stream"
    run = results["fp8_and_ranks_h200"]["runs"][1]["figures"]
    yield f"takes {v(run['batch1_ms_per_token'], '.2f')} at batch 1 and {v(run['batch32_ms_per_token'], '.2f')} at 32"
    (short, long) = results["kv_e4m3_h200"]["figures"].values()
    key = "fp8 (down only)"
    yield (
        f"becomes {v(short[key][0], '.2f')} from {v(short['bfloat16'], '.2f')} on 1,024 tokens of `docs/architecture.md`, and "
        f"{v(long[key][0], '.2f')} from {v(long['bfloat16'], '.2f')} on 8,192 tokens of `docs/api.md`; the most probable next "
        f"token is the same at {v(short[key][1], '.2f')} and {v(long[key][1], '.2f')} of all positions"
    )
    steps = results["fp8_few_h200"]["steps"]
    ratios = [steps[2]["ms_a_token"]["1"] / steps[3]["ms_a_token"]["1"]]
    ratios += [
        steps[0]["ms_a_token"]["32"] / steps[1]["ms_a_token"]["32"],
        steps[2]["ms_a_token"]["256"] / steps[3]["ms_a_token"]["256"],
    ]
    between = results["fp8_and_ranks_h200"]["runs"]
    mixed = between[0]["figures"]["batch256_ms_per_token"] / between[1]["figures"]["batch256_ms_per_token"]
    trace = between[1]["figures"]["tokens_per_s"] / between[0]["figures"]["tokens_per_s"]
    first, middle, large = (v(ratio, ".2f") for ratio in ratios)
    yield (
        f"is {first} times as fast as in bfloat16 at batch 1, {middle} at 32, and {large} at 256 ({v(mixed, '.2f')} with prompts "
        f"between); on a trace of requests it generates {v(trace, '.2f')} times the tokens/s"
    )


def mxfp4(result: dict[str, Any]) -> Iterator[str]:
    """Yield the measurements of gpt-oss with experts in mxfp4 and in bfloat16."""
    plain, packed = (result["steps"][name] for name in ("gpt-oss-20b", "gpt-oss-20b-mxfp4"))
    batches = ("1", "4", "8", "32", "64")
    yield f"| batch | {' | '.join(batches)} |"
    for name, run in (("bfloat16", plain), ("mxfp4", packed)):
        ms = [run["ms_per_token"][batch] for batch in batches]
        yield f"| {name} | {' | '.join(v(one, '.1f' if one >= 10 else '.2f') for one in ms)} |"
    gain = 100 * (plain["ms_per_token"]["1"] / packed["ms_per_token"]["1"] - 1)
    yield f"One stream gains {v(gain, '.0f')} % only"
    first = packed["first_tokens_ms"]["64"], plain["first_tokens_ms"]["64"]
    yield f"the first tokens of 64 prompts of 128 tokens take {v(first[0], '.0f')} ms instead of {v(first[1], '.0f')}."
    memory = result["weights_gb"]
    yield f"Memory of the weights: {v(memory['gpt-oss-20b-mxfp4'], '.1f')} GB, of which experts take {v(memory['of_experts'], '.1f')}."


def experts_of_a_layer(result: dict[str, Any]) -> Iterator[str]:
    """Yield the time of one layer's experts in bfloat16 and quantised, balanced routing."""
    us = {row["case"]: row["us"] for row in result["figures"]["experts"]}
    tokens = (1, 8, 32, 128, 256, 2048, 8192)
    yield f"| tokens | {' | '.join(f'{count:,}' for count in tokens)} |"
    for name, kind in (("Qwen3-30B-A3B", "fp8"), ("gpt-oss-20b", "mxfp4")):
        for label, case in ((f"{name}, bfloat16", name), (kind, f"{name} in {kind}")):
            cells = (v(us[f"{case}, {count} tokens, balanced"], ",.0f") for count in tokens)
            yield f"| {label} | {' | '.join(cells)} |"
