"""The origin that every result records: commit, machine, versions, command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "loadtest" / "results"


def describe() -> dict[str, Any]:
    """Return commit, time, processors, cores and the versions of the packages that matter."""
    versions = {}
    for package in ("torch", "transformers", "triton", "aiohttp", "redis"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # load average of one minute, this program included
        **({"gpu": gpu} if (gpu := gpu_name()) else {}),
        "python": platform.python_version(),
        **versions,
    }


def commit() -> str:
    """Return `git describe` of this checkout, with "-dirty" where tracked files other than results have changed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!loadtest/results")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def gpu_name() -> str:
    """Return name, memory and driver of the first GPU as nvidia-smi prints them; "" without a GPU."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def slug(name: str) -> str:
    """Return a device's name as part of a file name: "NVIDIA H200" -> h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia")).strip("_")


def device() -> str:
    """Return the device's part of result file names: the first GPU, such as h200, or cpu."""
    return slug(gpu_name().partition(",")[0]) or "cpu"


def result_name(text: str) -> str:
    """Return `--name` if loadtest/results/NAME.json can be written; argparse refuses any other before it measures."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no file name of letters, digits, '.', '_' and '-'")
    return text


def write(name: str, command: str, figures: Any) -> Path:
    """Write loadtest/results/NAME.json: the results, the command that produces them, and the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"command": command, **describe(), "figures": figures}, indent=1) + "\n", encoding="utf-8"
    )
    return path
