"""Command line of the kernel benchmarks: python -m quire.loadtest.kernels."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from quire.engine.executor import ops
from quire.loadtest import machine
from quire.loadtest.kernels import cpu

WIDTH = 10
SHOWN = {  # key of a row -> heading and format
    "us": ("us", ".1f"),
    "warm_us": ("in L2", ".1f"),
    "floor_us": ("floor", ".1f"),
    "gbps": ("GB/s", ".0f"),
    "tflops": ("TFLOP/s", ".3g"),
    "of_ceiling": ("of ceiling", ".0%"),
    "time_over_random": ("x random", ".2f"),
    "cudnn_flat_us": ("cuDNN flat", ".1f"),
    "torch_us": ("torch", ".1f"),
    "best_paged_us": ("best paged", ".1f"),
    "best_flat_us": ("best flat", ".1f"),
    "rows_us": ("e4m3 rows", ".1f"),
    "groups_of_32_us": ("of 32", ".1f"),
    "fp8_us": ("e4m3", ".1f"),
    "bf16_us": ("bf16", ".1f"),
    "time_over_best": ("ours/best", ".2f"),
    "error": ("error", ".1e"),
    "nccl_us": ("NCCL", ".1f"),
    "torch_one_us": ("1-shot", ".1f"),
    "torch_two_us": ("2-shot", ".1f"),
    "words_us": ("words", ".1f"),
    "blocks_us": ("blocks", ".1f"),
    "before_us": ("then norm", ".1f"),
    "fused_us": ("with norm", ".1f"),
}


def cell(value: float | str | None, form: str) -> str:
    return value if isinstance(value, str) else "" if value is None else format(value, form)


def table(title: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows as they are measured; return them."""
    print(f"\n{title}", flush=True)
    kept: list[dict[str, Any]] = []
    columns: list[str] = []
    for row in rows:
        kept.append(row)
        if not row.keys() & SHOWN.keys() <= set(columns):
            columns = [name for name in SHOWN if name in row or name in columns]
            print(" ".join([" " * 44, *(SHOWN[name][0].rjust(WIDTH) for name in columns)]))
        cells = (cell(row.get(name), SHOWN[name][1]).rjust(WIDTH) for name in columns)
        print(" ".join([row["case"].ljust(44), *cells]), flush=True)
    return kept


def measure_gpu(only: set[str], quick: bool) -> dict[str, Any]:
    """Run and print the tables named in `only`."""
    from quire.loadtest.kernels import attention, layers, recurrent, sums
    from quire.loadtest.kernels.timing import measure_ceilings

    memory = attention.Memory((9 if "decode" in only and not quick else 2) << 20)
    top = measure_ceilings(memory.keys[: 1 << 31])
    figures: dict[str, Any] = {"ceilings": top.as_dict()}
    table("ceilings: GB/s, TFLOP/s", ({"case": f"{name} {value:.0f}"} for name, value in top.as_dict().items()))
    peers = "H200" in torch.cuda.get_device_name()
    if only & {"decode", "prefill", "variants"}:
        figures["correctness"] = table("relative error against float64", attention.correctness(memory))
    tables: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]]]] = {
        "decode": (
            "decode: heads, batch x context; bf16, head size 128, blocks of 16 in random order",
            lambda: attention.decode(memory, top, quick=quick, peers=peers),
        ),
        "variants": ("decode, one parameter changed", lambda: attention.decode_variants(memory, top)),
        "prefill": (
            "prefill: heads, batch x queries + tokens cached before them; causal",
            lambda: attention.prefill(memory, top, quick=quick, peers=peers),
        ),
    }
    for name, (title, rows) in (layers.TABLES | recurrent.TABLES).items():
        tables[name] = (title, functools.partial(rows, top, quick=quick))
    if torch.cuda.device_count() > 1:
        tables["sums"] = (
            "all-reduce over two GPUs, us per call: torch (1-, 2-shot), ours; with residual and norm: separate, fused",
            sums.rows,
        )
    for name, (title, make_rows) in tables.items():
        if name in only:
            try:
                figures[name] = table(title, make_rows())
            except Exception as error:  # continue with the other tables
                traceback.print_exc()
                figures[name] = {"failed": str(error)}
    return figures


TABLES = (
    "ceilings",
    "decode",
    "variants",
    "prefill",
    "layers",
    "cache",
    "linear",
    "fp8",
    "int4",
    "experts",
    "recurrent",
    "sampling",
    "sums",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m quire.loadtest.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half of the cases, without cuDNN")
    parser.add_argument("--only", default=",".join(TABLES), help=f"some of {','.join(TABLES)}")
    parser.add_argument("--name", help="name of the file in loadtest/results; default for a full run: kernels_<device>")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="on a CPU")
    parser.add_argument("--library", type=Path, help="library of compiled kernels; default: compile them now")
    args = parser.parse_args()
    only = set(args.only.split(","))
    if unknown := only - set(TABLES):
        parser.error(f"--only: no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    if only != {"ceilings"}:
        ops.load(library=args.library)
    if args.device == "cpu" or not torch.cuda.is_available():
        figures: dict[str, Any] = {"attention": table("attention", cpu.rows(args.threads))}
        device = "cpu"
    else:
        with torch.inference_mode():
            figures = measure_gpu(only, args.quick)
        print(json.dumps(figures["ceilings"]))
        device = machine.slug(torch.cuda.get_device_name())
    full = only == set(TABLES) and not args.quick
    if name := args.name or (f"kernels_{device}" if full else ""):
        command = " ".join(["python -m quire.loadtest.kernels", *sys.argv[1:]])
        print(f"written to {machine.write(name, command, figures).relative_to(machine.ROOT)}")
    if any("failed" in found for found in figures.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
