"""A quiet tenant beside a loud one: its time to the first token with the pool full, and alone.

    python -m loadtest fairness DIR [--seeds 1,2,3]

For each seed the same arrivals twice, each time on a server of its own: everybody's, and the quiet tenant's alone.  The
engine is scripted: steps take what they are told to and nothing is computed, so what differs is who waits for whom.
DIR holds a model's tokenizer and config; where there is none, the 42M model is made there.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from loadtest import machine, replay
from loadtest.checkpoint import prepare
from loadtest.server import MODEL_NAME, serve
from loadtest.stats import Record, spread

TENANTS = ("loud", "quiet")
AIM = 1.2  # the quiet tenant's p99 beside the loud one, over alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--shares", default="10,1", help="of the requests: the loud tenant's, the quiet one's")
    parser.add_argument("--rate", type=float, default=22.0, help="requests a second, both together")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--scale", type=float, default=0.48, help="of ShareGPT-like lengths: 77 tokens in, 162 out")
    parser.add_argument("--ask-tokens", type=int, default=0, help="as in replay: the server doesn't know lengths")
    parser.add_argument("--drain", type=float, default=12.0, help="seconds to wait for the last answers")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--kv-blocks", type=int, default=512)
    parser.add_argument("--server", default="", help="further options of `quire serve`, in one string")


def of_tenant(records: list[Record], tenant: str) -> dict[str, Any]:
    """What became of its requests; times in seconds, from when each was due."""
    own = [record for record in records if record.client.tenant == tenant]
    first = [record.ttft_s for record in own if record.ttft_s is not None]
    return {
        "requests": len(own),
        "completed": sum(record.outcome == "ok" for record in own),
        "refused_at_first": sum(len(record.attempts) > 1 or record.outcome == "refused" for record in own),
        "ttft_s": spread(first),
        "longest_gap_s": round(max((max(record.gaps_s, default=0.0) for record in own), default=0.0), 3),
    }


def run(args: argparse.Namespace, seed: int, only: str) -> dict[str, Any]:
    """One server, one replay: figures of every tenant that asks, and of the engine."""
    vocab, eos = prepare(args.model)
    flags = ["--executor", "scripted", "--scripted-step-ms", f"{args.step_ms:g}", "--kv-blocks", str(args.kv_blocks)]
    flags += ["--max-seqs", "256", "--max-model-len", "2048", "--no-spare", *args.server.split()]
    words = ["--context", "2048", "--vocab-size", str(vocab), "--eos-id", str(eos), "--retry", "obey"]
    for name in ("scale", "rate", "seconds", "drain", "ask-tokens"):
        words += [f"--{name}", f"{getattr(args, name.replace('-', '_')):g}"]
    shares = ",".join(f"{name}={share}" for name, share in zip(TENANTS, args.shares.split(","), strict=True))
    words += ["--tenants", shares, "--seed", str(seed), *(["--only", only] if only else [])]
    keys = {name: f"key of {name}" for name in TENANTS}
    with tempfile.TemporaryDirectory() as directory:
        tables = (
            f'[{name}]\nweight = 1.0\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
            for name, key in keys.items()
        )
        path = Path(directory) / "tenants.toml"
        path.write_text("".join(tables), encoding="utf-8")
        with serve(str(args.model), *flags, "--tenants", str(path)) as server:
            parser = argparse.ArgumentParser()
            replay.add_arguments(parser)
            asked = parser.parse_args([server.url, *words])
            plan, arrivals = replay.arrivals_of(asked)
            options = replay.options_of(asked, server.url, MODEL_NAME, keys)
            result, records = replay.measure(asked, plan, arrivals, options, "")
    names = [only] if only else list(TENANTS)
    return {name: of_tenant(records, name) for name in names} | {"server": result["figures"]["server"]}


def main(args: argparse.Namespace, command: str) -> int:
    figures: dict[str, Any] = {}
    for seed in map(int, args.seeds.split(",")):
        beside, alone = run(args, seed, ""), run(args, seed, TENANTS[1])
        p99s = [each[TENANTS[1]]["ttft_s"]["p99"] for each in (beside, alone)]
        figures[f"seed {seed}"] = {"beside": beside, "alone": alone, "ttft_p99_ratio": round(p99s[0] / p99s[1], 3)}
        for name, each in (("beside the loud one", beside), ("alone", alone)):
            quiet = each[TENANTS[1]]
            spoken = "  ".join(f"{p} {quiet['ttft_s'][p] * 1000:.0f}" for p in ("p50", "p90", "p99", "max"))
            print(f"seed {seed}, quiet tenant {name}: TTFT ms  {spoken}  refused {quiet['refused_at_first']}"
                  f" of {quiet['requests']}", flush=True)  # fmt: skip
        print(f"seed {seed}: p99 {figures[f'seed {seed}']['ttft_p99_ratio']} times that alone (aim {AIM})", flush=True)
    path = machine.write("fairness", command.replace(str(args.model), "DIR"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
