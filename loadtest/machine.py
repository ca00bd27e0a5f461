"""What every result says about where it came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "loadtest" / "results"


def describe() -> dict[str, Any]:
    """Commit, processor, cores, versions, time."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = {}
    for package in ("torch", "transformers", "aiohttp", "redis"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "commit": commit.stdout.strip() or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def write(name: str, command: str, figures: Any) -> Path:
    """loadtest/results/NAME.json: the figures, the command that gives them, and where they were measured."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"command": command, **describe(), "figures": figures}, indent=1) + "\n", encoding="utf-8"
    )
    return path
