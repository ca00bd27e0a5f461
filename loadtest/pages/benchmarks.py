"""docs/benchmarks.md, and the table of all result files at its end."""

from __future__ import annotations

from collections.abc import Iterator

from quire.loadtest.pages import Results, facts, gpu_tables, pct, v

PAGE = "docs/benchmarks.md"
FACTS = facts("benchmarks")
KNOWN = "known"


def lines(results: Results) -> Iterator[str]:
    """Yield the page's texts that contain measured values, from the top of the page to its end."""
    yield from throughput(results)
    yield from gateway(results)
    yield from burst(results)
    yield from virtual_burst(results)
    yield from virtual_retries(results)
    yield from virtual_fairness(results)
    yield from users(results)
    yield from memory(results)
    yield from sharing(results)
    yield from sharing_gain(results)
    yield from beams(results)
    yield from fleet(results)
    yield from faults(results)
    yield from gpu_tables.lines(results)


def throughput(results: Results) -> Iterator[str]:
    cpu = results["throughput_cpu"]["figures"]["llama-42m"]
    ours, theirs = cpu["quire"], cpu["transformers"]
    yield f"| output tokens/s | **{v(ours['tokens_per_s'], ',.0f')}** | {v(theirs['tokens_per_s'], ',.0f')} |"
    yield f"| one request alone, ms per token | {v(ours['batch1_ms_per_token'], '.1f')} | |"
    yield f"| slots that hold tokens, of slots allocated | {v(ours['slots_filled'], '.3f')} | |"
    yield f"Quire generates {v(theirs['quire_is_faster_by'], '.1f')} times as many tokens per second as Transformers."


def gateway(results: Results) -> Iterator[str]:
    runs = results["gateway_tools"]["figures"]
    plain, chat, tools = (runs[name] for name in ("plain", "chat", "tools"))
    for name, run in (("plain text", plain), ("chats", chat), ("chats with a tool", tools)):
        yield (
            f"| {name} | {v(run['tokens_per_s'], ',')} | {v(run['gateway_cpu_us_per_token'], '.1f')} | "
            f"{v(run['gateway_rss_mib'])} |"
        )
    step = results["restructuring_cpu"]["figures"]["steady_step_256_ms"]
    yield f"plans and commits a steady step of 256 sequences in {v(step['after'], '.2f')} ms of CPU"
    many = results["scheduler_cost"]["figures"]
    yield (
        f"a step of {v(1024, ',')} sequences takes {v(many['1024']['step_ms'], '.1f')} ms and one of {v(4096, ',')} takes "
        f"{v(many['4096']['step_ms'], '.1f')} ms:"
    )


def burst(results: Results) -> Iterator[str]:
    gpu, cpu = (results[f"burst_{where}/burst"]["figures"][KNOWN] for where in ("h200", "cpu"))
    runs = [gpu["lanes"], gpu["fifo"], cpu["lanes"], cpu["fifo"]]
    shares = [f"{pct(run['on time, due in the burst'])} %, {pct(run['on time, of all'])} %" for run in runs]
    shares[0::2] = [f"**{share.replace(' %,', ' %**,', 1)}" for share in shares[0::2]]
    yield "| on time: due in the burst, of all | " + " | ".join(shares) + " |"
    over = [
        f"{v(run['burst, of the oracle' + chr(39) + 's'], '.2f')}, {v(run['all, of the oracle' + chr(39) + 's'], '.2f')}"
        for run in runs
    ]
    yield "(`loadtest.studies oracle`) | " + " | ".join(over) + " |"
    yield "| last first token | " + " | ".join(f"{v(run['last first token at'], '.1f')} s" for run in runs) + " |"
    for name, key in (
        ("before the burst", "pool in use before the burst"),
        ("while any request waits", "pool in use while any wait"),
    ):
        yield f"| pool in use {name} | " + " | ".join(f"{pct(run[key], 0)} %" for run in runs) + " |"
    gaps = [f"{v(run['preemptions'], '.0f')}, {v(1000 * run['longest gap'], '.0f')} ms" for run in runs]
    yield "| preemptions, longest gap between tokens | " + " | ".join(gaps) + " |"
    yield (
        "| answers 429, requests without an answer | "
        + " | ".join(f"{v(run['answers 429'])}, {v(run['unanswered'])}" for run in runs)
        + " |"
    )
    for where in ("h200", "cpu"):
        known = results[f"burst_{where}/burst"]["calibration"]["rate"]
        yield f"{v(known, 'g')} requests/s before and after"
    warm = results["burst_h200/burst_warm"]["figures"]["warm"]["lanes"]
    yield (
        f"{pct(warm['on time, due in the burst'])} % of the requests due in the burst are on time. {v(warm['answers 429'])} of "
        f"{v(warm['requests'], ',')} requests first got a 429"
    )
    yield f"{v(warm['preemptions'], '.0f')} preemption; the longest gap is {v(warm['longest gap'], '.2f')} s"
    cold, learnt = (results["burst_cpu/burst_unknown"]["figures"][load]["lanes"] for load in ("cold", "warm"))
    yield (
        f"On the EPYC {pct(learnt['on time, due in the burst'])} % are on time with learned lengths and "
        f"{pct(cold['on time, due in the burst'])} % without any lengths, against {pct(cpu['lanes']['on time, due in the burst'])} % "
        f"with known ones; the longest gaps are {v(learnt['longest gap'], '.1f')} and {v(cold['longest gap'], '.1f')} s."
    )
    both = results["burst/burst"]["figures"]
    for name, key in (("Quire", "forecast"), ("vLLM", "vllm")):
        run = both[key]
        yield (
            f"| {name} | {v(run['preemptions []'], '.0f')} | {pct(run['goodput in the burst [%]'], 0)} %, "
            f"{pct(run['goodput [%]'], 0)} % | {v(1000 * run['ITL p99, burst [ms]'], '.0f')} ms, "
            f"{v(run['longest gap [ms]'], '.2f')} s | {v(run['TTFT p50, burst [ms]'], '.1f')} s |"
        )


def virtual_burst(results: Results) -> Iterator[str]:
    figures = results["virtual_burst"]["figures"]
    yield f"{v(figures['base_rate'], '.1f')} requests/s keep 80 % of the pool in use"
    for mode in ("forecast", "threshold", "watermark", "reserve", "none"):
        known, learned = (figures[f"{load}, {mode}"] for load in ("known", "learned"))
        cells = [
            ", ".join(v(run["preemptions_per_1000"], ".1f") for run in (known, learned)),
            ", ".join(f"{v(run['longest_gap_s'], '.2f')} s" for run in (known, learned)),
            ", ".join(f"{pct(run['pool_while_waiting'], 0)} %" for run in (known, learned)),
            ", ".join(f"{v(run['seconds'], '.0f')} s" for run in (known, learned)),
        ]
        yield f"| {mode} | {' | '.join(cells)} |"


def virtual_retries(results: Results) -> Iterator[str]:
    figures = results["virtual_retries"]["figures"]
    for lengths in ("known", "learned"):
        for wait_s in ("0", "10", "20"):
            found = figures[f"{lengths}, late wait {wait_s} s"]
            seeds = [found[f"seed {seed}"] for seed in (1, 2, 3)]
            refused = ", ".join(v(one["refused"]) for one in seeds)
            admitted, errors = (", ".join(pct(one[key]) for one in seeds) for key in ("first_retry", "error_p50"))
            yield f"| {lengths}, {wait_s} | {refused} | {admitted} % | {errors} % |"
    waits = [figures["learned, late wait 10 s"][f"seed {seed}"]["wait_after_retry_s"]["max"] for seed in (1, 2, 3)]
    yield f"still waited for up to {v(max(waits), '.1f')} s"


def virtual_fairness(results: Results) -> Iterator[str]:
    for engines, found in results["virtual_fairness"]["figures"].items():
        seeds = [found[f"seed {seed}"] for seed in (1, 2, 3)]
        times = [[one[run]["ttft_s"]["quiet"]["p99"] for one in seeds] for run in ("alone", "with loud")]
        cells = [", ".join(v(1000 * seconds, ".0f") for seconds in each) for each in times]
        yield f"| {engines} | {cells[0]} | {cells[1]} | {v(found['median_ratio'], '.2f')} |"


def users(results: Results) -> Iterator[str]:
    figures = results["capacity"]["figures"]
    for name, key in (
        ("static allocation", "static"),
        ("paged", "paged"),
        ("paged with admission", "paged, admission"),
        ("paged with admission and the prefix cache", "paged, admission, prefix cache"),
    ):
        run = figures[key]
        yield f"| {name} | {v(run['users'])} | {pct(run['there']['kv_mean'], 0)} % |"


WORKLOADS = {
    "sharegpt": "ShareGPT-like",
    "alpaca": "Alpaca-like",
    "uniform-50": "uniform",
    "chat": "chat with a system prompt of 300",
    "rag": "RAG, one of 8 documents of 2,000",
    "agents": "agents, 8 conversations",
    "translation": "translation with five examples",
}


def memory(results: Results) -> Iterator[str]:
    figures = results["memory_use_cpu"]["figures"]
    for key, name in WORKLOADS.items():
        run = figures[key]
        hits = f"{pct(run['hit_rate'])} %" if run["hit_rate"] else v(0)
        yield (
            f"| {name} | {v(run['mean_prompt'], ',.0f')}, {v(run['mean_output'], '.0f')} | {pct(run['slots_filled'])} % | "
            f"{v(run['eta'], '.2f')} | {hits} |"
        )
    long, short = figures["sharegpt"], figures["uniform-50"]
    yield (
        f"{pct(1 - long['slots_filled'])} % at ShareGPT's lengths, {pct(1 - short['slots_filled'], 0)} % if a sequence "
        "has 100 tokens"
    )
    yield f"8 documents are 8 of {v(figures['rag']['requests'])} requests"


def sharing(results: Results) -> Iterator[str]:
    runs = results["sharing"]["runs"]
    parts = {"Alpaca": [runs[0]], "ShareGPT": [runs[1], runs[2]]}
    paper = {"Alpaca": ("6.1 to 9.8 %", "37.6 to 55.2 %"), "ShareGPT": ("16.2 to 30.5 %", "44.3 to 66.3 %")}
    for name, of in parts.items():
        merged = {key: share for run in of for key, share in run["figures"].items()}
        cells = [", ".join(pct(merged[f"{kind}_{n}"]) for n in (2, 4, 6)) for kind in ("sampling", "beams")]
        yield f"| {name} | {cells[0]} % | {paper[name][0]} | {cells[1]} % | {paper[name][1]} |"


def sharing_gain(results: Results) -> Iterator[str]:
    figures = results["sharing_gain"]["figures"]
    for name in ("below 200", "Alpaca", "ShareGPT", "4k", "beyond 8k"):
        runs = [figures[f"{name}, n {n}, blocks of 16"] for n in (2, 4, 6)]
        cells = [", ".join(v(run[key], ".2f") for run in runs) for key in GAINS]
        yield f"| {name} | {v(figures[f'{name}, n 1, blocks of 16']['paged over static'], '.2f')} | {' | '.join(cells)} |"
    sizes = [figures[f"ShareGPT, n 4, blocks of {size}"]["shared over paged"] for size in (8, 16, 32, 64)]
    yield f"sharing gives {', '.join(v(gain, '.2f') for gain in sizes)} times"
    searches = results["sharing_gain_beams"]["figures"]
    for name in ("ShareGPT", "4k"):
        runs = [searches[f"{name}, beams {n}, blocks of 16"] for n in (2, 4, 6)]
        yield f"| {name} | {' | '.join(', '.join(v(run[key], '.2f') for run in runs) for key in GAINS)} |"


GAINS = ("paged over static", "shared over static", "shared over paged")


def beams(results: Results) -> Iterator[str]:
    for machine in ("cpu", "h200"):
        for row in results[f"beams_{machine}"]["figures"]["rows"]:
            seconds, over = row["seconds"], row["times_as_fast_as"]
            form = ".1f" if machine == "cpu" else ".2f"
            peers = " | ".join(
                f"{v(seconds[peer], form)} s ({v(over[peer], '.1f')})" for peer in ("resubmission", "transformers")
            )
            yield f"| {row['width']}, {row['tokens']} | {v(seconds['quire'], form)} s | {peers} |"


FLEET = {2: "16 × 4, a prefix in one cell", 3: "8 × 8, a prefix in one cell", 0: "1 × 64"}


def fleet(results: Results) -> Iterator[str]:
    """Yield the rows of the simulated fleet, which docs/scaling.md shows as well."""
    for index, name in FLEET.items():
        run = results["scale"]["runs"][index]
        cores = v(run["redis"]["cores"], ".1f" if run["redis"]["cores"] < 10 else ".0f")
        cores = f"**{cores}**" if index == 2 else cores
        p50, p90 = (v(1000 * s, ".0f") for s in run["ttft"][:2])
        yield (
            f"| {name} | {v(run['hit_rate'], '.2f')} | {p50}, {p90} | {v(run['redis']['exchanges_per_request'], '.1f')} | "
            f"{v(run['redis']['cpu_us_per_request'] / 1000, '.1f')} | {cores} |"
        )


def faults(results: Results) -> Iterator[str]:
    kills = results["chaos_cpu_kills"]["figures"]
    tally, pauses = kills["tally"], kills["faults"]["kill engine"]
    yield (
        f"killed {v(kills['faults']['kill engine']['rounds'])} times under {v(kills['setting']['streams'])} streams, an engine that computes nothing | "
        f"of {v(tally['tokens'], ',')} tokens {v(tally['lost'])} lost, {v(tally['repeated'])} repeated, {v(tally['wrong'])} wrong, "
        f"{v(tally['failed'])} requests failed; pause p50 {v(pauses['pause_p50_s'], '.2f')} s, p99 {v(pauses['pause_p99_s'], '.2f')} s"
    )
    long = results["long_prompt_cpu"]["figures"]
    ratios = [long[f"at_{n}_beside_p99_ms"] / long[f"at_{n}_alone_p99_ms"] for n in (0, 8192, 16384, 24576, 32288)]
    yield f"p99 between tokens {v(min(ratios), '.1f')} to {v(max(ratios), '.1f')} times that alone, sampled at every quarter"
    first, second = (run["beside_p99_over_alone_p99"] for run in results["long_prompt_h100"]["figures"]["runs"])
    yield f"two runs on an H100, 8B shape: p99 {v(first, '.2f')} and {v(second, '.2f')} times that alone"
    chaos = results["chaos_cpu_failover"]["figures"]["tally"]
    yield f"| streams, tokens checked | {v(chaos['streams'], ',')}, {v(chaos['tokens'], ',')} |"
    yield f"| tokens lost, repeated, wrong | {v(chaos['lost'])}, {v(chaos['repeated'])}, {v(chaos['wrong'])} |"
    yield f"| streams resumed by their clients | {v(chaos['resumed'], ',')} |"
    yield f"| requests that Redis lost in a failover, which their clients saw | {v(chaos['with_redis'])} |"
    yield f"| plain streams that ended with a killed gateway, or broke | {v(chaos['with_gateway'])}, {v(chaos['failed'])} |"
    mixed = results["chaos_cpu_mixed"]["figures"]
    hostile, tally = mixed["hostile"], mixed["tally"]
    left = hostile["by_way"]["leave"]
    yield f"| hostile answers compared, characters | {v(hostile['answers'] - left, ',')}, {v(hostile['characters'], ',')} |"
    yield f"| hostile answers whose clients left | {v(left)} |"
    yield f"| hostile answers that failed or had another text | {v(hostile['failed'])} |"
    yield (
        f"| tokens of other streams, lost, repeated, wrong | {v(tally['tokens'], ',')}, {v(tally['lost'])}, "
        f"{v(tally['repeated'])}, {v(tally['wrong'])} |"
    )
    yield f"| other streams, that Redis lost in a failover, that failed | {v(tally['streams'], ',')}, {v(tally['with_redis'])}, {v(tally['failed'])} |"
    yield f"| a turn of a gateway's event loop computed for at most | {v(mixed['longest_turn_s'])} s |"
    same = results["same_tokens_cpu"]["figures"]["runs"]
    for run in same:
        open_streams = ", ".join(v(count) for count in run["streams_open_at_kills"])
        kills = f"{v(run['kills'])}: {open_streams}" if run["kills"] else "none"
        yield f"| {run['batch']} | {kills} | {run['sha256'][:12]}... |"
    yield f"{v(same[0]['requests'])} sampled requests ({v(same[0]['tokens'], ',')} tokens)"
    soak = results["soak_cpu"]["figures"]
    operations = sum(soak["operations"].values())
    yield f"{v(operations, ',')} scheduler operations with failed steps"
    yield (
        f"{v(soak['requests'], ',')} requests ended once each, {v(soak['tokens'], ',')} tokens equal to the reference, "
        f"accounting balanced in {v(soak['audits'], ',')} checks"
    )
