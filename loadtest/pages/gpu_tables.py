"""The values of docs/benchmarks.md that were measured on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.loadtest.pages import Results, pct, v

BATCHES = ("1", "32", "256")
LENGTHS = {"512": "512 tokens: swapped out and in, computed again, ms", "8192": "8,192 tokens, ms"}


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts with measured values, from "Compared with vLLM" to the end of the GPU's sections."""
    yield from compared(results)
    yield from alone(results)
    yield from weights(results)
    yield from experts(results)
    yield from experts_of_families(results)
    yield from limit(results)
    yield from blocks(results)
    yield from structured(results)
    yield from kernels(results)
    yield from recovery(results)


def compared(results: Results) -> Iterator[str]:
    pair = results["side_by_side_h200"]["figures"]
    for kind in ("bfloat16", "fp8"):
        quire, vllm = pair[kind]["quire"], pair[kind]["vllm"]
        ratio = quire["tokens_per_s"] / vllm["tokens_per_s"]
        yield (
            f"| 8B {kind}, trace, tokens/s | **{v(quire['tokens_per_s'], ',')}** | {v(vllm['tokens_per_s'], ',')} | "
            f"{v(ratio, '.2f')} |"
        )
        ours, theirs = (", ".join(v(run["ms_per_token"][n], ".2f") for n in BATCHES) for run in (quire, vllm))
        ratios = ", ".join(v(vllm["ms_per_token"][n] / quire["ms_per_token"][n], ".2f") for n in BATCHES)
        yield f"| 8B {kind}, ms per token at batch 1, 32, 256 | {ours} | {theirs} | {ratios} |"
    long = pair["prompts_of_32000_batch_8"]
    ours, theirs = long["quire"], long["vllm"]
    yield (
        f"| 8 prompts of 32,000: first tokens of all, s; ms per token | {v(ours['first_tokens_s'], '.2f')}; "
        f"{v(ours['ms_per_token'])} | {v(theirs['first_tokens_s'], '.2f')}; {v(theirs['ms_per_token'])} | "
        f"**{v(theirs['first_tokens_s'] / ours['first_tokens_s'], '.2f')}; {v(theirs['ms_per_token'] / ours['ms_per_token'], '.2f')}** |"
    )
    burst = pair["burst"]
    yield f"has {v(burst['requests'], ',')} requests of known lengths and a pool of 40,960 tokens"
    cells = []
    for run in (burst["quire"], burst["vllm"]):
        cells.append(f"{pct(run['on_time'])} %; {v(run['preemptions'], ',')}; {v(run['longest_gap_ms'], ',')} ms")
    yield f"| burst: on time; preemptions; longest gap | {cells[0]} | {cells[1]} | |"
    cells = [
        f"{v(run['ttft_s']['p50'])}, {v(run['ttft_s']['p99'], '.1f')} s" for run in (burst["quire"], burst["vllm"])
    ]
    yield f"| burst: first token p50, p99 | {cells[0]} | {cells[1]} | |"
    mixture = pair["qwen3-30b-a3b"]
    ours, theirs = mixture["quire"]["ms_per_token"], mixture["vllm"]["ms_per_token"]
    yield (
        f"| Qwen3-30B-A3B shape, ms per token at batch 1, 8, 32 | {', '.join(v(ours[n]) for n in ('1', '8', '32'))} | "
        f"{', '.join(v(theirs[n]) for n in ('1', '8', '32'))} | {', '.join(v(theirs[n] / ours[n], '.2f') for n in ('1', '8', '32'))} |"
    )
    yield f"| the same at batch 128 | {v(ours['128'])} | {v(theirs['128'])} | **{v(theirs['128'] / ours['128'], '.2f')}** |"
    yield (
        f"| first token of 32 prompts of 128 tokens, ms | {v(mixture['quire']['first_token_ms']['32'])} | "
        f"{v(mixture['vllm']['first_token_ms']['32'])} | "
        f"**{v(mixture['vllm']['first_token_ms']['32'] / mixture['quire']['first_token_ms']['32'], '.2f')}** |"
    )


def alone(results: Results) -> Iterator[str]:
    figures = results["throughput_h200"]["figures"]
    for shape, name in (("llama-8b", "8B llama shape"), ("qwen3-0.6b", "0.6B qwen3 shape")):
        quire, floor = figures[shape]["quire"], figures[shape]["floor"]
        yield f"| {name}, output tokens/s | {v(quire['tokens_per_s'], ',.0f')} | {v(floor['tokens_per_s'], ',.0f')} |"
        ours, least = (", ".join(v(run[f"batch{n}_ms_per_token"], ".2f") for n in BATCHES) for run in (quire, floor))
        yield f"| {name.split()[0]}, ms per token at batch 1, 32, 256 | {ours} | {least} |"
    cost = [
        100
        * (figures[shape]["quire"]["tokens_per_s"] / figures[shape]["quire"]["tokens_per_s_without_prefix_cache"] - 1)
        for shape in figures
    ]
    yield f"| prefix cache on, a trace without shared prefixes, tokens/s | {v(cost[0], '.1f')} %, {v(cost[1], '.1f')} % | |"
    yield f"| start to first token, kernels compiled | {v(figures['llama-8b']['quire']['start_to_first_token_s'], '.0f')} s | |"
    swap = results["block_size_h200"]["figures"]["preemption"]["2048"]["16"]
    yield (
        f"A preempted sequence of 2,048 tokens is swapped out and in within {v(swap['swap_ms'], '.0f')} ms, and computed again "
        f"within {v(swap['recompute_ms'], '.0f')} ms"
    )


def weights(results: Results) -> Iterator[str]:
    runs = [run["figures"] for run in results["fp8_and_ranks_h200"]["runs"]]
    plain = runs[0]
    names = ("bfloat16, one GPU", "`--quantize fp8`", "`--tensor-parallel 2`")
    for name, run in zip(names, runs[:3], strict=True):
        yield weight_row(name, run, None if run is plain else plain)
    keys = results["ranks_h100"]["keys"]["runs"]
    one, two = keys[1]["figures"], keys[0]["figures"]
    yield weight_row("bfloat16, one H100", one, None)
    yield weight_row("`--tensor-parallel 2`", two, one)
    plain, fp8, int4 = (run["figures"] for run in results["weights_h100"]["runs"])
    yield weight_row("`--quantize fp8`, another call", fp8, plain)
    yield weight_row("`--quantize int4`, that call", int4, plain)
    few = results["fp8_few_h200"]["steps"][3]["ms_a_token"]
    yield f"fp8 takes **{v(few['1'], '.2f')}** ms per token at batch 1 and **{v(few['256'], '.2f')}** at 256 on an H200"
    large = results["fp8_and_ranks_h200"]["runs"][3]["figures"]
    yield f"{v(large['batch1_ms_per_token'], '.1f')} ms per token at batch 1, {v(large['batch32_ms_per_token'], '.1f')} at 32"


def weight_row(name: str, run: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """Return a row: ms per token at batch 1, 32 and 256, tokens/s of the trace, and in brackets the speed-up over `plain`."""
    cells = []
    for key in [f"batch{n}_ms_per_token" for n in BATCHES]:
        form = ".1f" if run[key] >= 15 else ".2f"
        cells.append(v(run[key], form) + (f" ({v(plain[key] / run[key], '.2f')})" if plain else ""))
    trace = "tokens_per_s"
    cells.append(v(run[trace], ",.0f") + (f" ({v(run[trace] / plain[trace], '.2f')})" if plain else ""))
    return f"| {name} | {' | '.join(cells)} |"


def experts(results: Results) -> Iterator[str]:
    steps = results["experts_h200"]["steps"]
    grouped = results["experts_grouped_h200"]["steps"]["grouped"]
    qwen, oss = steps[1]["ms_a_token"], steps[2]["ms_a_token"]
    rows = [f"{v(qwen['1'], '.2f')}, {v(qwen['8'], '.2f')} | {v(qwen['32'], '.1f')}"]
    rows += [f"{v(grouped[f'batch{n}_ms'], '.1f')}" for n in (64, 128, 256)]
    yield f"| Qwen3-30B-A3B shape, H200 | {' | '.join(rows)} |"
    yield f"| gpt-oss-20b shape, H200 | {v(oss['1'], '.2f')}, {v(oss['8'], '.2f')} | {v(oss['32'], '.1f')} | {v(oss['64'], '.1f')} | | |"
    for index, name in ((1, "Qwen3-30B-A3B shape, H100"), (0, "gpt-oss-20b shape, H100")):
        run = results["experts_h100"]["steps_with_the_kernel_in_shared_memory"]["runs"][index]["figures"]
        cells = [
            v(run[f"batch{n}_ms_per_token"], ".2f" if run[f"batch{n}_ms_per_token"] < 10 else ".1f")
            for n in (1, 8, 32, 64)
        ]
        yield f"| {name} | {', '.join(cells[:2])} | {' | '.join(cells[2:])} | | |"
    first = [v(grouped[f"batch{n}_first_token_ms"], ".0f") for n in (64, 128, 256)]
    yield f"First tokens of 64, 128 and 256 prompts of 128 tokens take {first[0]}, {first[1]} and {first[2]} ms."


def experts_of_families(results: Results) -> Iterator[str]:
    shapes = results["experts_families_h200"]["shapes"]
    for shape, name in (
        ("olmoe-8-layers", "OLMoE"),
        ("qwen2-moe-8-layers", "Qwen2-MoE"),
        ("glm4-moe-6-layers", "GLM-4-MoE"),
    ):
        theirs, ours = (shapes[shape][whose]["ms_per_token"] for whose in ("transformers", "ours"))
        cells = (
            f"{v(theirs[n], '.2f')}, **{v(ours[n], '.2f')}**" if n in ours else "" for n in ("1", "32", "128", "256")
        )
        yield f"| {name} | {' | '.join(cells)} |"


def limit(results: Results) -> Iterator[str]:
    chat = results["memory_limit_chat_h200"].get("longer_run", results["memory_limit_chat_h200"])["figures"]
    for name, key in (("static allocation", "static"), ("paged", "paged")):
        *rates, burst = chat[key]
        ms = ", ".join(v(run["normalised_ms"], ".1f" if run["normalised_ms"] < 20 else ".0f") for run in rates)
        yield f"| {name} | {ms} | {v(burst['batch'], '.1f')}, {v(burst['most'])} | {v(burst['requests_per_s'], '.2f')} |"
    ways = {
        "static": "static allocation",
        "paged": "paged",
        "admission": "paged, admission",
        "prefix-cache": "paged, admission, prefix cache",
    }
    for key, name in ways.items():
        (run,) = results["memory_limit_prefix_h200"]["figures"][key]
        yield (
            f"| {name} | {v(run['normalised_ms'], '.0f')} | {v(run['batch'], '.1f')}, {v(run['most'])} | "
            f"{v(run['requests_per_s'], '.2f')} | {v(run['preemptions'])} |"
        )


def blocks(results: Results) -> Iterator[str]:
    gpu, cpu = (results[f"block_size_{where}"]["figures"] for where in ("h200", "cpu"))
    sizes = ("8", "16", "32", "64")
    yield "| tokens/s | " + " | ".join(v(gpu["requests"][n]["tokens_per_s"], ",.0f") for n in sizes) + " |"
    filled = " | ".join(f"{pct(gpu['requests'][n]['slots_filled'])} %" for n in sizes)
    yield f"| positions of blocks that hold a token | {filled} |"
    for length, swap, again in (("512", ".1f", ".1f"), ("8192", ".1f", ".0f")):
        cells = [
            f"{v(gpu['preemption'][length][n]['swap_ms'], swap)}, {v(gpu['preemption'][length][n]['recompute_ms'], again)}"
            for n in sizes
        ]
        yield f"| {LENGTHS[length]} | " + " | ".join(cells) + " |"
    yield (
        "42M model, 100 requests: tokens/s | "
        + " | ".join(v(cpu["requests"][n]["tokens_per_s"], ".0f") for n in sizes)
        + " |"
    )
    cells = [
        f"{v(cpu['preemption']['512'][n]['swap_ms'], '.2f')}, {v(cpu['preemption']['512'][n]['recompute_ms'], '.0f')}"
        for n in sizes
    ]
    yield "| EPYC, 512 tokens: swapped out and in, computed again, ms | " + " | ".join(cells) + " |"


def structured(results: Results) -> Iterator[str]:
    runs = results["structured_h200"]["runs"][-4:]
    small, bounded, large, large_bounded = (run["figures"] for run in runs)
    ratio = {n: [run.get(f"batch{n}_ratio") for run in (small, bounded, large, large_bounded)] for n in (1, 64, 256)}
    masks = {n: [run.get(f"batch{n}_mask_ms") for run in (small, bounded, large, large_bounded)] for n in (1, 64, 256)}
    names = ("0.6B, unbounded", "0.6B, `maxLength` 40", "8B, unbounded", "8B, `maxLength` 40")
    for index, name in enumerate(names):
        shares = ", ".join("-" if ratio[n][index] is None else v(ratio[n][index], ".3f") for n in (1, 64, 256))
        times = ", ".join(
            "-" if masks[n][index] is None else v(masks[n][index], ".2f" if masks[n][index] < 0.1 else ".1f")
            for n in (1, 64, 256)
        )
        yield f"| {name} | {shares} | {times} ms |"
    cpu = results["structured_cpu"]["figures"]
    rows, one = cpu["demo, 64 rows"], cpu["demo, 1 and 5 rows"]
    yield f"{v(cpu['42M, 64 rows']['batch64_ratio'], '.3f')} of the tokens/s for the 42M model and {v(rows['batch64_ratio'], '.3f')} for SmolLM2-135M"
    yield (
        f"takes {v(one['batch1_structured_steps'])} steps for {v(one['batch1_plain_steps'])} tokens and is "
        f"{v(one['batch1_ratio'], '.2f')} times as fast as without a schema"
    )


def kernels(results: Results) -> Iterator[str]:
    figures = results["kernels_h200"]["figures"]
    prefill = {row["case"]: row for row in figures["prefill"]}
    short, long = prefill["32/8 8 x 2048 + 0"], prefill["32/8 1 x 8192 + 0"]
    yield f"({v(short['tflops'], '.0f')} TFLOP/s at 8 x 2048, {v(long['tflops'], '.0f')} at 8192)"
    over = [row["time_over_best"] for row in figures["decode"] if "time_over_best" in row]
    yield f"decode takes {v(min(over), '.2f')} to {v(max(over), '.2f')} times the best peer's time"
    over = [row["time_over_best"] for row in figures["prefill"] if "time_over_best" in row]
    yield f"prefill takes {v(min(over), '.2f')} to {v(max(over), '.2f')} times"
    cache = results["kv_e4m3_h200"]["figures"]
    (short_text, long_text) = cache.values()
    yield (
        f"perplexity {v(short_text['bfloat16'], '.2f')} becomes {v(short_text['kv e4m3'][0], '.2f')} on 1,024 tokens of "
        f"`docs/architecture.md`, and {v(long_text['bfloat16'], '.2f')} becomes {v(long_text['kv e4m3'][0], '.2f')} on"
    )
    yield f"At {v(short_text['kv e4m3'][1], '.2f')} of all positions the most probable next token is the same"


def recovery(results: Results) -> Iterator[str]:
    figures = results["recovery_h200"]["figures"]
    first, second = figures["first_kills"], figures["second_kills"]
    tokens = [run["tokens_before"] for run in first]
    pauses = [run["longest_pause_s"] for run in first]
    yield (
        f"killed: {v(min(tokens), ',')} to {v(max(tokens), ',')} tokens to recompute | {v(min(pauses), '.1f')} to "
        f"**{v(max(pauses), '.1f')} s** |"
    )
    tokens = [run["tokens_before"] for run in second]
    pauses = [run["longest_pause_s"] for run in second]
    yield (
        f"killed again 4 s later: {v(min(tokens), ',')} to {v(max(tokens), ',')} tokens to recompute | "
        f"{v(min(pauses), '.1f')} to {v(max(pauses), '.1f')} s |"
    )
    yield f"{v(figures['tokens_lost'])} of {v(figures['tokens'], ',')} tokens were lost, {v(figures['tokens_repeated'])} repeated"
