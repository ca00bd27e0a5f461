"""A threefold burst on a busy server, once per system: two lanes, one queue, another admission mode, vLLM.

The on-time lane has requests whose estimated wait meets the TTFT target, the late lane the others.

    python -m quire.loadtest burst DIR                                                    42M model on a CPU
    python -m quire.loadtest burst DIR --shape llama-8b --kv-tokens 40960 --scale 1       8B shape on a GPU

    base: 80 % of the pool ── burst: three times the rate for 30 s ── base ── no arrivals until all are answered

DIR has the model, which is created if DIR is empty.  Three loads have the same arrivals, prompts and lengths:

known   the server knows the output lengths (ignore_eos)
cold    max_tokens is 2,048 and answers end by themselves; the server has just started
warm    as cold, after --warm-requests other requests, from which the server has learned the lengths

The base rate is calibrated unless --rate gives it.  Each run writes a result that `report` reads, and rewrites the
summary burst.json: medians over seeds, and the best on-time share that perfect knowledge allows (the
study `oracle`).  A second start continues with the missing runs: a result of the same work, server and commit is
kept.  The exit status is 1 if a run failed or is still missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.loadtest import burst_summary, machine, replay, shapes, workloads
from quire.loadtest.calibrate import MEASURE_S, RAMP_S, Calibration, calibrate
from quire.loadtest.checkpoint import COUNTDOWN, make_shape, prepare, read_countdown
from quire.loadtest.server import MODEL_NAME, Server, ServerError, serve, serve_vllm

Serve = Callable[..., AbstractContextManager[Server]]  # called with a model and flags, as `serve`
MODES: dict[str, Serve] = {
    "threshold": serve
}  # admission mode other than the default -> function that starts a server with it
LOADS = ("known", "cold", "warm")
BLOCK = 16
START_S, VLLM_START_S, DRAIN_S, STOP_S = 8, 60, 70, 2  # seconds of a run's phases, for the estimate of its duration
WARM_SEED = 1000  # added to the seed of a warm-up, whose prompts must differ from the run's
CALIBRATION_SEED = 9999
CALIBRATION_JOBS = 4000


@dataclass(frozen=True)
class Run:
    system: str
    load: str
    seed: int
    server: str  # command that starts the server, shown and compared with that of earlier results
    start: Callable[[], AbstractContextManager[Server]]
    words: tuple[str, ...]  # options of `replay`, without the URL
    warm_words: tuple[str, ...] = ()  # options of the warm-up replay before it; (): none

    @property
    def file(self) -> str:
        return f"burst_{self.load}_{self.system}_{self.seed}.json"


def add_arguments(parser: argparse.ArgumentParser, modes: dict[str, Serve] = MODES) -> None:
    parser.set_defaults(modes=modes)
    parser.add_argument("model", type=Path, metavar="DIR", help="directory of the model; made there if empty")
    parser.add_argument(
        "--shape", choices=shapes.CONFIGS, help="make this shape in DIR; the engine makes random weights; default: 42M"
    )
    parser.add_argument(
        "--systems",
        default="lanes,fifo",
        help=f"of {', '.join(systems_of(modes))}; default lanes,fifo. lanes: the defaults",
    )
    parser.add_argument("--loads", default=",".join(LOADS), help="loads, from known, cold and warm; default: all")
    parser.add_argument(
        "--seeds", default="1,2,3", help="seeds; all systems and loads run once per seed; default 1,2,3"
    )
    parser.add_argument("--vllm-python", help="interpreter with vLLM's CPU build; vLLM runs with the first seed only")
    parser.add_argument("--server", default="", help="options of every `quire serve`, in one string")
    parser.add_argument("--lanes-server", default="", help="further options of `lanes`")
    parser.add_argument(
        "--fifo-server",
        default="--ttft-target-s 0.001 --late-wait-s 3600",
        help="further options of `fifo`: one queue in order of arrival, nothing refused; default: a target of 1 ms",
    )
    _add_work_arguments(parser)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run that would end later than this")
    parser.add_argument("--no-oracle", action="store_true", help="leave out the comparison with perfect knowledge")
    parser.add_argument("--into", type=Path, default=machine.RESULTS / "burst", help="directory of the results")


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-tokens", type=int, default=8192, help="KV pool of each server, tokens; default 8192")
    parser.add_argument("--max-seqs", type=int, default=256, help="slots of each server; default 256")
    parser.add_argument(
        "--context", type=int, default=2048, help="maximum tokens of a request; longer ones are shortened; default 2048"
    )
    parser.add_argument("--ask-tokens", type=int, default=2048, help="max_tokens of cold and warm; default 2048")
    parser.add_argument(
        "--scale", type=float, default=0.48, help="factor on ShareGPT-like lengths; default 0.48: 77 tokens in, 162 out"
    )
    parser.add_argument(
        "--use", type=float, default=0.8, help="KV-cache utilisation at the base rate, 0 to 1; default 0.8"
    )
    parser.add_argument(
        "--rate", type=float, help="base requests per second; default: the rate with the utilisation of --use"
    )
    parser.add_argument("--peak-factor", type=float, default=3.0, help="rate of the burst / base rate; default 3")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds before the burst; default 20")
    parser.add_argument("--peak-seconds", type=float, default=30.0, help="seconds of the burst; default 30")
    parser.add_argument("--after-seconds", type=float, default=15.0, help="seconds after the burst; default 15")
    parser.add_argument("--warm-requests", type=int, default=200, help="requests before a warm run; default 200")
    parser.add_argument("--retry", default="obey", help="as in replay: reaction to a refusal; default obey")
    parser.add_argument("--drain", type=float, default=240.0, help="seconds to wait for the last answers; default 240")
    parser.add_argument(
        "--slo-ttft", type=float, default=2.0, help="maximum time to first token of an on-time request, s; default 2"
    )
    parser.add_argument("--slo-itl", type=float, default=0.2, help="maximum mean time per token, s; default 0.2")


def systems_of(modes: Iterable[str]) -> tuple[str, ...]:
    return ("lanes", "fifo", *modes)


def chosen(args: argparse.Namespace) -> tuple[list[str], list[str], list[int]]:
    """Return systems, loads and seeds.  Raises SystemExit with one line for an unknown or invalid value."""
    systems, loads, seeds = args.systems.split(","), args.loads.split(","), args.seeds.split(",")
    for name, given, known in (("systems", systems, systems_of(args.modes)), ("loads", loads, LOADS)):
        if unknown := set(given) - set(known):
            raise SystemExit(f"--{name}: {min(unknown)!r} is unknown; valid: {', '.join(known)}")
    if not all(seed.isdecimal() for seed in seeds):
        raise SystemExit(f"--seeds: {args.seeds!r} must be whole numbers >= 0 with commas between them")
    if args.shape and args.vllm_python:
        raise SystemExit("--vllm-python: vLLM cannot make random weights for --shape")
    return systems, loads, list(map(int, seeds))


def flags_of(args: argparse.Namespace, system: str) -> tuple[str, ...]:
    """Return the options of `quire serve` for a system."""
    own = {"lanes": args.lanes_server.split(), "fifo": args.fifo_server.split()}
    # A request may have the longest prompt and max_tokens of ask_tokens.
    length = args.context + args.ask_tokens
    sizes = ["--kv-blocks", args.kv_tokens // BLOCK, "--max-seqs", args.max_seqs, "--max-model-len", length]
    random = ["--load", "random"] if args.shape else []
    return (*random, *map(str, sizes), *args.server.split(), *own.get(system, ["--admission", system]))


def words_of(args: argparse.Namespace, vocab: int, eos: int, rate: float, load: str) -> dict[str, Any]:
    """Return the options of `replay`, without a seed."""
    words = {
        "scale": args.scale, "rate": rate, "seconds": args.seconds, "peak": round(args.peak_factor * rate, 3),
        "peak-seconds": args.peak_seconds, "after-seconds": args.after_seconds, "context": args.context,
        "vocab-size": vocab, "eos-id": eos, "retry": args.retry,
        "ask-tokens": 0 if load == "known" else args.ask_tokens,
        "drain": args.drain, "slo-ttft": args.slo_ttft, "slo-itl": args.slo_itl,
    }  # fmt: skip
    return words | ({"countdown": str(args.model)} if read_countdown(args.model) else {})


def flat(words: dict[str, Any]) -> tuple[str, ...]:
    return tuple(word for name, value in words.items() for word in (f"--{name}", str(value)))


def runs_of(args: argparse.Namespace, vocab: int, eos: int, rate: float) -> list[Run]:
    """Return the runs in the order they are measured.

    Every system and load of a seed runs before the next seed, so that a machine that slows down slows all of them.
    vLLM, which starts slowly, is last; it learns no lengths, so it has no warm run."""
    systems, loads, seeds = chosen(args)
    model = str(args.model)
    runs = []
    for seed in seeds:
        for load in loads:
            words = words_of(args, vocab, eos, rate, load)
            warm: tuple[str, ...] = ()
            if load == "warm":
                steady = {key: value for key, value in words.items() if not key.startswith(("peak", "after"))}
                warm = flat(steady | {"seconds": round(args.warm_requests / rate, 1), "seed": seed + WARM_SEED})
            for system in systems:
                flags = flags_of(args, system)
                start = partial(args.modes.get(system, serve), model, *flags)
                shown = " ".join(["quire serve DIR", *flags])
                runs.append(Run(system, load, seed, shown, start, flat(words | {"seed": seed}), warm))
    if args.vllm_python:
        most = ("--max-model-len", str(args.context + args.ask_tokens), "--max-num-seqs", str(args.max_seqs))
        shown = " ".join([f"vllm serve DIR, a pool of {args.kv_tokens} tokens,", *most])
        vllm = lambda: serve_vllm(args.vllm_python, model, args.kv_tokens, *most)  # noqa: E731
        for load in dict.fromkeys("cold" if load == "warm" else load for load in loads):
            words = words_of(args, vocab, eos, rate, load)
            runs.append(Run("vllm", load, seeds[0], shown, vllm, flat(words | {"seed": seeds[0]})))
    return runs


def estimate_s(run: Run, args: argparse.Namespace) -> float:
    start = VLLM_START_S if run.system == "vllm" else START_S
    warm = float(run.warm_words[run.warm_words.index("--seconds") + 1]) if run.warm_words else 0.0
    return float(start + warm + args.seconds + args.peak_seconds + args.after_seconds + DRAIN_S + STOP_S)


def earlier_result(run: Run, path: Path) -> dict[str, Any] | None:
    """Return the result in `path` if it is of the same work, server and commit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        args = replay.parse(["http://127.0.0.1", *run.words])
        same = (
            result["server"] == run.server
            and result["load"] == run.load
            and result["commit"].removesuffix("-dirty") == machine.commit().removesuffix("-dirty")
            and result["config"]["work"] == json.loads(json.dumps(replay.work(args, *replay.arrivals_of(args))))
        )
        return result if same else None
    return None


def measure(run: Run, path: Path) -> dict[str, Any]:
    """Run once and write the result to `path`.  Raises ServerError if the server does not start."""
    with run.start() as server:
        served = [server.url, "--model", MODEL_NAME]
        if run.warm_words:
            warm, _ = replay.run([*served, *run.warm_words], {}, "")
            print(f"warm-up: {warm['figures']['completed']} of {warm['figures']['requests']} answered", flush=True)
        command = " ".join(["python -m quire.loadtest replay URL", *run.words])
        result, _ = replay.run([*served, "--note", run.server, *run.words], {}, command)
    result |= {"system": run.system, "load": run.load, "seed": run.seed, "server": run.server}
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


# -------------------------------------------------------------------------------------------------- rate and oracle


def base_rate(args: argparse.Namespace, vocab: int, eos: int) -> tuple[float, dict[str, Any]]:
    """Return the base rate and how it was found.  A calibration of the same server and commit is kept.

    Raises ServerError."""
    if args.rate is not None:
        return args.rate, {"rate": args.rate, "given": True}
    path, flags = args.into / "calibration.json", flags_of(args, "lanes")
    origin = {
        "server": " ".join(["quire serve DIR", *flags]),
        "work": [args.scale, args.context, args.use],
        "commit": machine.commit().removesuffix("-dirty"),
    }
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["origin"] == origin:
            return float(kept["rate"]), kept
    print(f"calibrating the base rate, about {START_S + RAMP_S + MEASURE_S:.0f} s", flush=True)
    words = words_of(args, vocab, eos, 1.0, "known") | {"seed": CALIBRATION_SEED}
    given = replay.parse(["http://127.0.0.1", *flat(words)])
    plan = [workloads.Phase("steady", 1000.0, CALIBRATION_JOBS / 1000)]
    arrivals = workloads.clip(
        workloads.synthetic(given.workload, plan, 1.0, CALIBRATION_SEED, args.scale), args.context
    )
    with serve(str(args.model), *flags) as server:
        options = replay.options_of(given, server.url, MODEL_NAME, {})
        found: Calibration = calibrate(
            options, [arrival.job for arrival in arrivals], args.kv_tokens // BLOCK, BLOCK, args.use
        )
    page = found.describe() | {"origin": origin}
    path.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    return found.rate, page


def write_arrivals(path: Path, args: argparse.Namespace, result: dict[str, Any], words: tuple[str, ...]) -> None:
    """Write the input of `python -m quire.loadtest.studies oracle`: one run's arrivals, and its engine's capacity."""
    _, arrivals = replay.arrivals_of(replay.parse(["http://127.0.0.1", *words]))
    page = {
        "blocks": args.kv_tokens // BLOCK,
        "block_size": BLOCK,
        "max_seqs": args.max_seqs,
        "ttft_s": args.slo_ttft,
        "pace_s": result["figures"]["itl_s"]["p99"],
        "step": result["figures"]["overload"]["step_time"],
        "requests": [
            {
                "at_s": round(arrival.at_s, 4),
                "prompt_len": arrival.job.prompt_len,
                "output_len": arrival.job.output_len,
                "phase": arrival.phase,
            }
            for arrival in arrivals
        ],
    }
    path.write_text(json.dumps(page) + "\n", encoding="utf-8")


def oracle_of(seed: int, results: list[dict[str, Any]], runs: list[Run], args: argparse.Namespace) -> Any:
    """Return the result of `loadtest.studies oracle` for a seed's arrivals; None if no run measured the step times.

    The step times come from the first system and load that have them: all runs of a seed have equal arrivals."""
    order = [(load, system) for load in LOADS for system in systems_of(args.modes)]
    usable = [
        result
        for result in results
        if (result["load"], result["system"]) in order and result["figures"]["overload"]["step_time"]
    ]
    if args.no_oracle or not usable:
        return None
    first = min(usable, key=lambda result: order.index((result["load"], result["system"])))
    path = args.into / f"arrivals_{seed}.json"
    words = next(run.words for run in runs if run.seed == seed)
    write_arrivals(path, args, first, words)
    command = [sys.executable, "-m", "quire.loadtest.studies", "oracle", str(path), "--json"]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------------------- main


def prepare_model(args: argparse.Namespace) -> tuple[int, int]:
    """Create the model if DIR has none; return its vocabulary size and end-of-sequence id."""
    if args.shape and not (args.model / "config.json").exists():
        print(f"making tokenizer and heads of {args.shape} in {args.model}", flush=True)
        make_shape(args.model, shapes.CONFIGS[args.shape])
    vocab, eos = prepare(args.model, countdown=True)
    if not read_countdown(args.model) and args.loads != "known":
        print(f"{args.model} has no {COUNTDOWN}: min_tokens and logit_bias end the answers of cold and warm")
    return vocab, eos


def measure_all(
    args: argparse.Namespace, runs: list[Run], found: dict[Run, dict[str, Any] | None], began: float
) -> tuple[list[dict[str, Any]], int]:
    """Measure missing runs within --minutes.  Return all results and the number of failed or still missing runs."""
    results, failed = [], 0
    for number, run in enumerate(runs, 1):
        result = found[run]
        if result is None:
            if time.monotonic() - began + estimate_s(run, args) > 60 * args.minutes:
                print(f"left to do: {run.load} {run.system}, seed {run.seed}", flush=True)
                failed += 1
                continue
            print(f"\n[{number}/{len(runs)}] {run.load}, seed {run.seed}: {run.server}", flush=True)
            try:
                result = measure(run, args.into / run.file)
            except ServerError as error:
                failed += 1
                print(f"{run.load} {run.system}, seed {run.seed}: {error}", file=sys.stderr, flush=True)
                continue
            replay.show(result["figures"])
        results.append(result)
    return results, failed


def main(args: argparse.Namespace, command: str) -> int:
    began = time.monotonic()
    chosen(args)  # before anything is made
    args.into.mkdir(parents=True, exist_ok=True)
    vocab, eos = prepare_model(args)
    try:
        rate, calibration = base_rate(args, vocab, eos)
    except ServerError as error:
        print(f"calibration: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"base {rate:g} requests/s, burst {args.peak_factor * rate:g}", flush=True)
    runs = runs_of(args, vocab, eos, rate)
    found = {run: earlier_result(run, args.into / run.file) for run in runs}
    missing = [run for run in runs if found[run] is None]
    minutes = sum(estimate_s(run, args) for run in missing) / 60
    print(f"{len(missing)} of {len(runs)} runs to do, about {minutes:.0f} minutes, until "
          f"{time.strftime('%H:%M', time.localtime(time.time() + minutes * 60))}", flush=True)  # fmt: skip
    results, failed = measure_all(args, runs, found, began)
    if results:
        seeds = sorted({result["seed"] for result in results})
        oracles = {
            seed: oracle_of(seed, [result for result in results if result["seed"] == seed], runs, args)
            for seed in seeds
        }
        page = {
            "command": command.replace(str(args.model), "DIR"),
            **machine.describe(),
            "calibration": calibration,
            **burst_summary.page(results, oracles),
        }
        (args.into / "burst.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
        print(f"\n{burst_summary.table(page)}\nwritten to {args.into}", flush=True)
    return int(failed > 0)
