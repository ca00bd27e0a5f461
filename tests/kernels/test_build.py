"""Build of the kernels: once for many processes, fast from the cache, one clear error if it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.engine.executor import kernels_build, ops
from quire.engine.executor.errors import ModelLoadError
from tests.pace import patience

ROOT = Path(__file__).resolve().parents[2]

# Builds small sources of its own: csrc, which `make` has built before the tests, takes over a minute.
BUILD = """
import sys
from pathlib import Path
from quire.engine.executor import kernels_build
kernels_build.CSRC = Path(sys.argv[2])
print(kernels_build.build(Path(sys.argv[1])))
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    (sources / "cpu").mkdir(parents=True)
    for name in ("one", "two"):
        (sources / "cpu" / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 0; }}\n')
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(tmp_path / "kernels"), str(sources)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [run.communicate(timeout=patience(250)) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    assert Path(ends[0][0].strip()).stat().st_size > 0
    assert sorted("compiled in" in err for _, err in ends) == [False, True]
    assert any("[1/" in err for _, err in ends), "progress of ninja"


def test_a_cached_start_compiles_nothing() -> None:
    code = "from quire.engine.executor import ops; ops.load()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr == ""


@pytest.mark.perf
def test_cached_start_is_fast() -> None:
    """Beyond importing torch, in a fresh process; CPU time, since other work may share the machine."""
    code = (
        "import time; from quire.engine.executor import ops; started = time.process_time(); ops.load();"
        "print(time.process_time() - started)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.1


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels_build.KernelBuildError, match="'no-such-compiler' is not on PATH"):
        kernels_build.build(tmp_path)


def test_no_compiler_on_path_is_one_line_that_the_engine_catches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"^cannot build the kernels: no C\+\+ compiler.*set CXX$") as raised:
        kernels_build.build(tmp_path)
    assert "\n" not in str(raised.value)
    command = [sys.executable, "-m", "quire.engine.executor.ops"]
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("kernels: cannot build the kernels: no C++ compiler")


def test_failed_build_names_compiler_error_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "broken.cpp").write_text("int broken( { }\n")
    monkeypatch.setattr(kernels_build, "CSRC", csrc)
    with pytest.raises(
        kernels_build.KernelBuildError, match=r"c\+\+ failed: .*broken.cpp:1:.*error.*full log: .*build.log"
    ) as raised:
        kernels_build.build(tmp_path)
    assert "compiling" in capfd.readouterr().err
    log = Path(str(raised.value).split("full log: ")[1].rstrip(")"))
    assert "broken.cpp:1" in log.read_text()
    # No partial library is left behind, and the corrected source builds.
    (csrc / "broken.cpp").write_text("int mended() { return 1; }\n")
    assert kernels_build.build(tmp_path).exists()


def test_changed_source_is_a_different_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    monkeypatch.setattr(kernels_build, "CSRC", csrc)
    (csrc / "a.cpp").write_text("int a() { return 1; }\n")
    first = kernels_build.build(tmp_path)
    (csrc / "a.h").write_text("// a new header\n")
    second = kernels_build.build(tmp_path)
    assert first.parent != second.parent
    assert kernels_build.build(tmp_path) == second


def test_only_torchs_thread_pool_is_used() -> None:
    """A second OpenMP runtime in the process would make two pools compete for the same cores."""
    code = (
        "import torch; from quire.engine.executor import ops; before = open('/proc/self/maps').read(); ops.load();"
        "after = open('/proc/self/maps').read();"
        "found = lambda maps: {line.split()[-1] for line in maps.splitlines() if 'omp' in line.split()[-1]};"
        "assert found(before) == found(after), found(after) - found(before)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_gpu_without_a_cuda_compiler_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels_build, "CUDA_PLACES", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(
        kernels_build.KernelBuildError, match=r"a GPU but no CUDA compiler: .* CUDA_HOME; .* --device cpu"
    ):
        kernels_build.build(tmp_path)


def test_built_ahead_for_other_machines_is_loaded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    monkeypatch.setattr(kernels_build, "CSRC", csrc)
    (csrc / "a.cpp").write_text("int a() { return 1; }\n")
    library = kernels_build.build_ahead(tmp_path / "ahead", kernels_build.Target(cpu=kernels_build.AHEAD_CPU))
    assert f"={kernels_build.AHEAD_CPU} " in (tmp_path / "ahead" / "build" / "build.ninja").read_text()
    ops.load(library=library)
    with pytest.raises(kernels_build.KernelBuildError, match=r"nowhere.so: no such file; .*--ahead"):
        ops.load(library=tmp_path / "nowhere.so")


def test_every_source_is_compiled_once_and_the_bindings_of_a_device_together() -> None:
    script = kernels_build.build_script(kernels_build.Target())
    lines = [line for line in script.splitlines() if line.startswith("build ")]
    (united,) = [line for line in lines if " unite " in line]
    for source in kernels_build.CSRC.rglob("*.cpp"):
        names = sum(line.split().count(str(source)) for line in lines)
        assert names == ("cuda" not in source.parts)
        if "cuda" not in source.parts:
            assert (str(source) in united) == ("torch/" in source.read_text() or "torch_api" in source.parts)
    assert "build bindings_cpu.cpp.o: compile bindings_cpu.cpp" in lines


def test_each_gpu_gets_machine_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninja's script only: there may be no nvcc here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    script = kernels_build.build_script(kernels_build.Target(gpus=("8.0", "9.0")))
    assert "arch=compute_80,code=sm_80" in script
    assert "arch=compute_90a,code=sm_90a" in script  # wgmma exists in the `a` target alone
    assert kernels_build.Target().gpus == ()
    assert "nvcc" not in kernels_build.build_script(kernels_build.Target())
