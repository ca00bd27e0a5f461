"""README.md: two of the three reasons, the table of results, and the cost of the 8-bit KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from quire.loadtest.pages import Results, facts, pct, v

PAGE = "README.md"
FACTS = facts("readme")


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts that contain measured values."""
    pair = results["side_by_side_h200"]["figures"]
    kills = results["chaos_cpu_kills"]["figures"]
    yield (
        f"An engine was killed {v(kills['faults']['kill engine']['rounds'])} times under {v(kills['setting']['streams'])} streams: of "
        f"{v(kills['tally']['tokens'], ',')} tokens {v(kills['tally']['lost'] + kills['tally']['repeated'])} were lost or repeated"
    )
    burst = pair["burst"]
    yield (
        f"In a threefold burst Quire preempted {v(burst['quire']['preemptions'])} sequences; "
        f"vLLM preempted {v(burst['vllm']['preemptions'], ',')}."
    )
    yield (
        f"generates {v(pair['bfloat16']['quire']['tokens_per_s'], ',')} tokens/s; "
        f"vLLM generates {v(pair['bfloat16']['vllm']['tokens_per_s'], ',')} on the same trace."
    )
    cache = results["kv_e4m3_h200"]["figures"]
    rises = [text["kv e4m3"][0] / text["bfloat16"] - 1 for text in cache.values()]
    yield f"holds twice the tokens; perplexity rises by {pct(min(rises))} to {pct(max(rises))} %."
    yield from table(results)


def table(results: Results) -> Iterator[str]:
    """Yield the rows of the table of results."""
    pair = results["side_by_side_h200"]["figures"]
    for kind, name in (("bfloat16", "bf16"), ("fp8", "fp8")):
        quire, vllm = pair[kind]["quire"], pair[kind]["vllm"]
        yield f"{name}, output tokens/s | **{v(quire['tokens_per_s'], ',')}** | vLLM: {v(vllm['tokens_per_s'], ',')} |"
    ours, theirs = (
        ", ".join(v(ms, ".2f") for ms in pair["bfloat16"][s]["ms_per_token"].values()) for s in ("quire", "vllm")
    )
    yield f"8B bf16, ms per token at batch 1, 32, 256 | {ours} | vLLM: {theirs} |"
    long = pair["prompts_of_32000_batch_8"]
    yield (
        f"8 prompts of 32,000 tokens, ms per token | {v(long['quire']['ms_per_token'])} "
        f"| vLLM: **{v(long['vllm']['ms_per_token'])}** |"
    )
    burst = pair["burst"]
    yield (
        f"threefold burst: on time, longest gap between tokens | **{pct(burst['quire']['on_time'])} %**, "
        f"{v(burst['quire']['longest_gap_ms'])} ms | vLLM: {pct(burst['vllm']['on_time'])} %, "
        f"{v(burst['vllm']['longest_gap_ms'], ',')} ms |"
    )
    cpu = results["throughput_cpu"]["figures"]["llama-42m"]
    yield (
        f"2 CPU cores, 42M, 64 requests, output tokens/s | **{v(cpu['quire']['tokens_per_s'], ',.0f')}** | "
        f"Transformers: {v(cpu['transformers']['tokens_per_s'], ',.0f')} |"
    )
    users = results["capacity"]["figures"]
    yield (
        f"concurrent users in the same memory, prefix cache on | **{v(users['paged, admission, prefix cache']['users'])}** | "
        f"static allocation: {v(users['static']['users'])} |"
    )
    first = results["recovery_h200"]["figures"]["first"]
    yield f"64 streams, engine killed: longest pause | **{v(first['worst_pause_s'], '.1f')} s** |"
