"""Builds the kernels of csrc with ninja: once per machine, into a cache, or ahead of time for other machines.

sources, flags, torch, CPU ─ digest ─> directory/DIGEST/libquire.so, if present: milliseconds
                                                └ absent: lock, write build.ninja, run ninja (seconds for a CPU, minutes
                                                  at most with CUDA), move the library into place
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ninja
import torch

from quire.engine.common import host_resources
from quire.engine.executor.disk_cache import cache_directory
from quire.engine.executor.errors import ModelLoadError

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIBRARY = "libquire.so"
X86 = platform.machine() in ("x86_64", "AMD64")
AHEAD_CPU = "x86-64-v3" if X86 else "armv8.2-a"
CUDA_PLACES = ["/usr/local/cuda"]  # tried after $CUDA_HOME and $PATH
AHEAD_GPUS = ("8.0", "8.6", "8.9", "9.0", "10.0")  # A100, A10, L4 and L40, H100 and H200, B200
SOURCES = {".cpp", ".h", ".cu", ".cuh"}


class KernelBuildError(ModelLoadError):
    """The kernels could not be compiled.  The message is one line: the compiler, the first error and the full log."""


@dataclass(frozen=True)
class Target:
    """Target of a build: CPU, GPUs and torch."""

    cpu: str = "native"  # architecture, as -march or -mcpu names it
    gpus: tuple[str, ...] = ()  # compute capabilities; none: no CUDA
    torch_root: Path = field(default_factory=lambda: Path(torch.__file__).parent)

    @classmethod
    def this_machine(cls) -> Target:
        """Return the target for the CPU and the GPUs of this machine."""
        if not torch.cuda.is_available():
            return cls()
        cards = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return cls(gpus=tuple(f"{major}.{minor}" for major, minor in sorted(cards)))


def default_directory() -> Path:
    """Return the default directory of compiled kernels, in the user's cache directory."""
    return cache_directory() / "kernels"


def build(directory: Path) -> Path:
    """Compile csrc unless `directory` has a build of these sources, flags, torch and CPU.  Return the library.

    Raises KernelBuildError.
    """
    target = Target.this_machine()
    script = build_script(target)
    home = directory / _digest(script)
    library = home / LIBRARY
    if library.exists():  # a library appears only when it is complete
        return library
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
        if not library.exists():
            os.replace(_compile(home, script), library)
    return library


def build_ahead(directory: Path, target: Target) -> Path:
    """Compile csrc for `target`, independent of this machine, into directory/libquire.so.

    Objects whose sources did not change are kept.  Raises KernelBuildError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY
    shutil.copy2(_compile(directory, build_script(target)), library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _cuda_home() -> Path:
    """Return the directory of the CUDA toolkit.  Raises KernelBuildError."""
    found = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), str(Path(found).resolve().parents[1]) if found else None, *CUDA_PLACES]
    for place in places:
        if place and (Path(place) / "bin" / "nvcc").exists():
            return Path(place)
    raise KernelBuildError(
        "there is a GPU but no CUDA compiler: install the CUDA toolkit (12.8 or later) so that nvcc is on PATH, or set "
        "CUDA_HOME; or use an image with compiled kernels; or serve from the CPU with --device cpu"
    )


def _gencode(capability: str) -> str:
    """Return nvcc's flag for one GPU.  Instructions specific to Hopper and Blackwell need a target that ends with
    `a`."""
    number = capability.replace(".", "")
    if int(number) >= 90:
        number += "a"
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _flags(target: Target) -> list[str]:
    """Return the C++ compiler's flags."""
    return [
        *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"),
        f"-I{CSRC}",
        f"{'-march' if X86 else '-mcpu'}={target.cpu}",
        # Results must not depend on which multiplications the optimiser fuses (see simd.h).
        "-ffp-contract=off",
        # Only inlined functions pass vectors to each other, so the warning about their ABI does not apply.
        *("-Wall", "-Wno-psabi", "-Wno-unknown-warning-option"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(target.torch_root / "include")),
    ]


def _cuda_flags(target: Target) -> list[str]:
    """Return nvcc's flags."""
    return [
        *("-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        f"-I{CSRC}",
        *map(_gencode, target.gpus),
    ]


def _libraries(target: Target) -> list[str]:
    """Return the linker's flags.

    Without -fopenmp: pool.h gives the reason.  A library that libtorch_cpu needs defines the symbol GOMP_parallel.
    """
    lib = target.torch_root / "lib"
    # A compiler that has libstdc++ only as an archive links a second copy.  If that copy were visible from outside,
    # half of its calls would reach the process's own copy, and messages that contain numbers would crash.
    return [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10", "-Wl,--exclude-libs,ALL"]


def build_script(target: Target) -> str:
    """Return the build.ninja of csrc: all sources, or without GPUs all but those in folders named cuda.

    Raises KernelBuildError for a GPU without nvcc.
    """
    flags, libraries = _flags(target), _libraries(target)
    sources = sorted(CSRC.rglob("*.cpp"))
    rules = [("compile", "$cxx -MMD -MF $out.d $flags -c $in -o $out")]
    if target.gpus:
        cuda = _cuda_home()
        nvcc = _escape(shlex.quote(str(cuda / "bin" / "nvcc")))
        rules.append(("compile_cuda", f"{nvcc} -MMD -MF $out.d $cuda_flags -c $in -o $out"))
        flags += ["-isystem", str(cuda / "include")]
        libraries += [f"-L{cuda / 'lib64'}", "-lc10_cuda", "-lcudart"]
        sources += sorted(CSRC.rglob("*.cu"))
    else:
        sources = [source for source in sources if "cuda" not in source.parts[len(CSRC.parts) :]]
    lines = [
        f"cxx = {_escape(_compiler())}",
        f"flags = {_escape(shlex.join(flags))}",
        f"cuda_flags = {_escape(shlex.join(_cuda_flags(target)))}",
        f"libraries = {_escape(shlex.join(libraries))}",
    ]
    for name, command in rules:
        lines += [f"rule {name}", f"  command = {command}", "  depfile = $out.d", "  deps = gcc"]
        lines.append("  description = compile $in")
    lines += ["rule link", "  command = $cxx -shared -o $out $in $libraries", "  description = link $out"]
    lines += ["rule unite", "  command = printf '#include \"%s\"\\n' $in > $out", "  description = unite $out"]
    objects = []
    for name, members in _units(sources).items():
        paths = " ".join(_escape(str(source)).replace(" ", "$ ").replace(":", "$:") for source in members)
        if len(members) > 1:
            lines.append(f"build {name}: unite {paths}")
            paths = name
        rule = "compile_cuda" if members[0].suffix == ".cu" else "compile"
        lines.append(f"build {name}.o: {rule} {paths}")
        objects.append(f"{name}.o")
    return "\n".join([*lines, f"build {LIBRARY}: link {' '.join(objects)}", ""])


def _units(sources: Sequence[Path]) -> dict[str, list[Path]]:
    """Return compilation units by name: one for the bindings, which include torch's headers, and one per other source.

    A binding's compile time is dominated by these headers: 8 to 13 s each, and 13 s for all CPU bindings together.
    The bindings come first in build.ninja, because ninja starts in that order and the longest unit must not start
    last."""
    units: dict[str, list[Path]] = {}
    for source in sorted(sources, key=lambda source: "torch_api" not in source.parts):
        below = source.relative_to(CSRC)
        bindings = below.parts[0] == "torch_api" or below == Path("ops.cpp")
        name = f"bindings_{'cuda' if 'cuda' in below.parts else 'cpu'}.cpp" if bindings else "_".join(below.parts)
        units.setdefault(name, []).append(source)
    return units


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def _digest(script: str) -> str:
    """Return a hash of all inputs of the build: sources, flags, torch, and the CPU behind -march=native."""
    digest = hashlib.sha256(f"{script}\n{torch.__version__}\n{_cpu()}".encode())
    for source in sorted(path for path in CSRC.rglob("*") if path.suffix in SOURCES):
        digest.update(f"\n{source.relative_to(CSRC)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if re.match(r"model name|flags|Features|CPU part", line))


def _compile(home: Path, script: str) -> Path:
    """Run ninja in home/build.  Return the library that it made.  Raises KernelBuildError."""
    _require_compiler()
    work = home / "build"
    work.mkdir(exist_ok=True)
    (work / "build.ninja").write_text(script)
    log = home / "build.log"
    started = time.monotonic()
    _report(f"compiling {CSRC} with {_compiler()} into {home} (once for this machine)")
    status, first_error = _run_ninja(work, log)
    if status != 0:
        raise KernelBuildError(f"{_compiler()} failed: {first_error or 'no error line'} (full log: {log})")
    _report(f"compiled in {time.monotonic() - started:.1f} s")
    return work / LIBRARY


def _require_compiler() -> None:
    """Raise KernelBuildError unless the C++ compiler and ninja can be started."""
    compiler = shlex.split(_compiler())[0]
    if shutil.which(compiler) is None:
        raise KernelBuildError(
            f"cannot build the kernels: no C++ compiler, {compiler!r} is not on PATH; install g++ 12 or clang 14 or "
            "later, or set CXX"
        )
    if not _ninja().is_file():
        raise KernelBuildError(f"cannot build the kernels: {_ninja()} does not exist; reinstall the package ninja")


def _ninja() -> Path:
    return Path(ninja.BIN_DIR) / "ninja"


def _run_ninja(work: Path, log: Path) -> tuple[int, str]:
    """Build in `work`, with all output in `log` and progress on stderr.  Return ninja's status and the first error."""
    first_error = ""
    with (
        open(log, "w") as full,
        subprocess.Popen(
            [str(_ninja()), "-j", str(host_resources.usable_cpus()), "-C", str(work), LIBRARY],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            full.write(line)
            if line.startswith("["):  # [2/6] compile ...
                _report(line.rstrip())
            elif not first_error and re.search(r"\berror\b", line, re.IGNORECASE):
                first_error = line.strip()
    return process.returncode, first_error


def _report(text: str) -> None:
    print(f"kernels: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m quire.engine.executor.ops`: compile now, and print the path of the library."""
    parser = argparse.ArgumentParser(prog="python -m quire.engine.executor.ops", description="Compile the kernels now.")
    parser.add_argument(
        "--ahead", type=Path, metavar="DIRECTORY", help="compile for other machines, into this directory"
    )
    parser.add_argument("--cpu", default=AHEAD_CPU, help=f"with --ahead: oldest CPU to run on (default {AHEAD_CPU})")
    parser.add_argument(
        "--gpus",
        default=" ".join(AHEAD_GPUS) if torch.version.cuda else "",
        help="with --ahead: compute capabilities, for example '8.0 9.0'; '' compiles for no GPU",
    )
    args = parser.parse_args(arguments)
    try:
        if args.ahead:
            print(build_ahead(args.ahead, Target(args.cpu, tuple(args.gpus.split()))))
        else:
            print(build(default_directory()))
    except KernelBuildError as error:
        sys.exit(f"kernels: {error}")
