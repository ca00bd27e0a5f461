"""What is installed: the wheel, and the gateway's image by its own step, in a clean prefix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.executor import kernels_build
from tests.pace import patience
from tests.ports import free_port
from tests.service.fakes import byte_level
from tests.system.processes import Process, ending, wait_until_ready

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {".md", ".pyc"}


def test_the_wheel_holds_every_file_of_ours_and_its_kernels_build(tmp_path: Path) -> None:
    sources, wheels, site = tmp_path / "sources", tmp_path / "wheels", tmp_path / "site"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources)
    rooms = ("service", "engine", "csrc")
    for name in ("quire", *rooms):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", wheels, sources], check=True, timeout=patience(250))
    (wheel,) = wheels.glob("quire-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    ours = {
        path.relative_to(ROOT)
        for name in rooms
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }
    missing = sorted(str(path) for path in ours if not (site / "quire" / path).is_file())
    assert not missing, "add their endings to [tool.setuptools.package-data]"
    assert all((site / "quire" / path).read_bytes() == (ROOT / path).read_bytes() for path in ours)
    # Loaded from the wheel, the builder finds the wheel's own sources; what it compiles them to is the same as here.
    code = (
        "import sys; from pathlib import Path; from quire.engine.executor import kernels_build, ops; import torch\n"
        "assert kernels_build.CSRC == Path(sys.argv[1]) / 'quire' / 'csrc', kernels_build.CSRC\n"
        "script = kernels_build.build_script(kernels_build.Target())\n"
        "assert f'{kernels_build.CSRC}/cpu/attention.cpp' in script\n"
        "ops.load(library=Path(sys.argv[2])); print(ops.rms_norm(torch.ones(1, 8), torch.ones(8), 0.0).sum().item())"
    )
    library = kernels_build.build(kernels_build.default_directory())
    run = subprocess.run(
        [sys.executable, "-c", code, site, library],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "8.0\n"), run.stderr


@pytest.mark.nightly  # it fetches a hundred packages from the index
@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_gateways_image_serves_without_torch(tmp_path: Path) -> None:
    """The Dockerfile's own step, into an empty prefix.  Packages come from the index.

    Unlike the image's, they are not compiled: nine tenths of transformers are never imported here."""
    prefix = tmp_path / "prefix"
    done = subprocess.run(
        [ROOT / ".ci" / "image.sh", "gateway", prefix],
        env={**os.environ, "PYTHON": sys.executable, "PIP_COMPILE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    installed = {path.name for path in prefix.glob("lib/python3.*/site-packages/*")}
    assert not {"torch", "ninja", "pip", "setuptools"} & installed
    quire = [str(prefix / "bin" / "quire")]
    model, port = byte_level(tmp_path / "tiny"), free_port()
    url = f"http://127.0.0.1:{port}"
    with EmbeddedRedis() as redis, ending([]) as processes:
        shared = [str(model), f"--redis-url={redis.url}"]
        processes.append(
            Process(tmp_path / "gateway.log", "gateway", *shared, f"--port={port}", command=quire, cwd=tmp_path)
        )
        processes[0].wait_for("listens on")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/health", timeout=patience(20))
        assert json.load(refused.value) == {"status": "no engine is running", "engines": 0}
        refused.value.close()
        # An engine without torch says what it lacks; with a script instead of a model it needs none.
        engine = Process(tmp_path / "lacking.log", "engine", *shared, "--kv-blocks=8", command=quire, cwd=tmp_path)
        processes.append(engine)
        assert engine.popen.wait(patience(60)) == 2, engine.said()
        assert engine.said().splitlines()[-1] == "quire engine: package torch is missing: pip install 'quire[engine]'"
        words = [*shared, "--executor=scripted", "--engine-id=scripted"]
        processes.append(Process(tmp_path / "engine.log", "engine", *words, command=quire, cwd=tmp_path))
        wait_until_ready(url)
        with urllib.request.urlopen(f"{url}/health", timeout=patience(20)) as answer:
            assert json.load(answer) == {"status": "ok", "engines": 1}
        body = json.dumps({"model": "tiny", "prompt": "To be", "max_tokens": 4, "ignore_eos": True}).encode()
        ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(ask, timeout=patience(20)) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        load = ("bench", url, "--requests=2", "--rate=20", "--prompt-tokens=4", "--max-tokens=2")
        for command, says in (
            (load, "requests"),
            (("top", url, "--once"), "scripted"),
            (("chat", url, "--max-tokens=2"), ""),
        ):
            done = subprocess.run(
                [*quire, *command],
                input="To be\n",
                capture_output=True,
                text=True,
                timeout=patience(60),
                cwd=tmp_path,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, ""), command
            assert says in done.stdout
