"""`make clients`: clients as their users install them, each against one `quire serve`.

    python -m tests.clients [arguments of pytest]

The server runs in this environment, with the demo model: Redis, engine and gateway are real.  Each folder of tests runs
in the environment of .venv-clients that has its name: one for each version of OpenAI's client that clients take, and
one for benchmarks.
Agents and programs of npm run against a gateway whose model is scripted (`scripted.py`), the latter unless npm is not
installed.  The last line printed is a summary like pytest's.  Exit status 1 when a test failed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from quire.engine.executor.models.sources import demo
from quire.engine.executor.models.sources.demo import DemoModelUnavailable
from tests.system.processes import Process, ending

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
FOLDERS = {"openai_2": "openai-2", "openai_3": "openai-3", "benchmarks": "benchmarks"}  # tests -> environment
NODE = ENVIRONMENTS / "node"  # packages of npm
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
MAX_LEN = 4096


def main(words: list[str]) -> int:
    began = time.monotonic()
    try:
        model = str(demo.demo())
    except DemoModelUnavailable as error:
        print(f"{error}: calls that need tools or sense are skipped", flush=True)
        model = "builtin"
    options = ["--port=0", f"--max-model-len={MAX_LEN}", "--kv-blocks=1024", "--no-spare", "--no-web"]
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder) / "log", "serve", model, *options, env=os.environ)
        with ending([process]):
            url = process.wait_for("serving ", 300).split()[-1].removesuffix("/v1")
            pythons = {name: ENVIRONMENTS / path / "bin" / "python" for name, path in FOLDERS.items()}
            counts = {name: run(name, python, url, model, Path(folder), words) for name, python in pythons.items()}
            if any(found["failed"] for found in counts.values()):
                print(process.said()[-4000:], file=sys.stderr)
        with scripted() as url:
            counts["agents"] = run("agents", pythons["openai_3"], url, model, Path(folder), words)
            if (NODE / "node_modules").exists():
                counts["node"] = run("node", sys.executable, url, model, Path(folder), words)
            else:
                print("npm is not installed: its programs are left out", flush=True)
    whole = sum(counts.values(), Counter())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(whole.items())), end="")
    print(f" in {time.monotonic() - began:.2f}s")
    return 1 if whole["failed"] or not whole["passed"] else 0


@contextlib.contextmanager
def scripted() -> Iterator[str]:
    """A context with a gateway whose model is scripted; yields its URL."""
    command = [sys.executable, "-m", "tests.clients.scripted"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def run(name: str, python: str | Path, url: str, model: str, scratch: Path, words: list[str]) -> Counter[str]:
    """Run one folder's tests in its environment, and print a line for each of its files.  Returns the outcomes."""
    report = scratch / f"{name}.xml"
    command: list[str | Path] = [python, "-m", "pytest", "-c", HERE / "pytest.ini"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    environment |= {"QUIRE_URL": url, "QUIRE_SCRIPTED_URL": url, "QUIRE_NODE": str(NODE)}
    environment["QUIRE_MODEL"] = model
    environment["QUIRE_SENSE"] = str(int(model != "builtin"))
    subprocess.run([*command, f"--junit-xml={report}", HERE / name, *words], env=environment, check=False)
    if not report.exists():
        return Counter(failed=1)
    found: dict[str, Counter[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
        found.setdefault(str(case.get("classname")).split(".")[-1], Counter())[outcome] += 1
    for file, counts in found.items():
        print(f"{name} {file}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return sum(found.values(), Counter())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
