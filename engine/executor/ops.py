"""Builds the kernels of csrc and calls them: the only module that knows how they are compiled or what torch calls them.

`load()` must have returned before any operator is called.  It compiles on first use (seconds) and keeps the result in a
cache; afterwards it costs milliseconds.  `python -m engine.executor.ops` compiles ahead of time, say into an image.
"""

from __future__ import annotations

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
from pathlib import Path

import ninja
import torch

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIBRARY = "libquire.so"


class KernelBuildError(Exception):
    """The kernels could not be compiled.  The message names the compiler, the first error and the full log."""


def default_directory() -> Path:
    """Where compiled kernels are kept unless the caller says otherwise: the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "kernels"


def load(directory: Path | None = None) -> None:
    """Make the operators callable in this process, compiling them first unless `directory` holds a build that fits.

    Any number of processes may call this at once: one compiles, the others wait for it.  Calling twice is harmless.
    Says on stderr when it compiles.  Raises KernelBuildError.
    """
    # A library that is already loaded is not loaded again.
    torch.ops.load_library(str(build(directory or default_directory())))  # type: ignore[no-untyped-call]


def build(directory: Path) -> Path:
    """Compile csrc unless `directory` has a build of these sources, flags, torch and CPU; return the library."""
    script = _build_script()
    home = directory / _digest(script)
    library = home / LIBRARY
    if library.exists():  # only ever appears complete
        return library
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
        if not library.exists():
            _compile(home, script)
            os.replace(home / "build" / LIBRARY, library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _build_script() -> str:
    """The build.ninja of all of csrc."""
    torch_root = Path(torch.__file__).parent
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [
        *("-std=c++20", "-O3", native, "-fPIC", "-fvisibility=hidden", "-DNDEBUG"),
        # Results must not depend on which multiplications the optimiser chose to fuse (see simd.h).
        "-ffp-contract=off",
        # Vectors are passed between inlined functions only, so that no ABI is at stake.
        *("-Wall", "-Wno-psabi", "-Wno-unknown-warning-option"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(torch_root / "include")),
    ]
    # No -fopenmp: pool.h says why.  GOMP_parallel stays open here and is found in what libtorch_cpu depends on.
    libraries = [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    sources = sorted(CSRC.rglob("*.cpp"))
    objects = [str(source.relative_to(CSRC)).replace("/", "_") + ".o" for source in sources]
    return "\n".join(
        [
            f"cxx = {_escape(_compiler())}",
            f"flags = {_escape(shlex.join(flags))}",
            f"libraries = {_escape(shlex.join(libraries))}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $in",
            "rule link",
            "  command = $cxx -shared -o $out $in $libraries",
            "  description = link $out",
            *(
                f"build {target}: compile {_escape(str(source)).replace(' ', '$ ').replace(':', '$:')}"
                for source, target in zip(sources, objects, strict=True)
            ),
            f"build {LIBRARY}: link {' '.join(objects)}",
            "",
        ]
    )


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def _digest(script: str) -> str:
    """Of everything that decides what the compiler makes: sources, flags, torch, and the CPU behind -march=native."""
    digest = hashlib.sha256(f"{script}\n{torch.__version__}\n{_cpu()}".encode())
    for source in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")]):
        digest.update(f"\n{source.relative_to(CSRC)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if re.match(r"model name|flags|Features|CPU part", line))


def _compile(home: Path, script: str) -> None:
    compiler = shlex.split(_compiler())[0]
    if shutil.which(compiler) is None:
        raise KernelBuildError(
            f"no C++ compiler: {compiler!r} is not on PATH; install g++ 12 or clang 14 or later, or set CXX to one"
        )
    work = home / "build"
    work.mkdir(exist_ok=True)
    (work / "build.ninja").write_text(script)
    log = home / "build.log"
    started = time.monotonic()
    _say(f"compiling {CSRC} with {_compiler()} into {home} (once for this machine)")
    first_error = ""
    with (
        open(log, "w") as full,
        subprocess.Popen(
            [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work), LIBRARY],
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
                _say(line.rstrip())
            elif not first_error and re.search(r"\berror\b", line, re.IGNORECASE):
                first_error = line.strip()
    if process.returncode != 0:
        raise KernelBuildError(f"{_compiler()} failed: {first_error or 'no error line'} (full log: {log})")
    _say(f"compiled in {time.monotonic() - started:.1f} s")


def _say(text: str) -> None:
    print(f"kernels: {text}", file=sys.stderr, flush=True)


# The operators.  Shapes: T tokens of the step, S sequences, H query heads, Hkv KV heads, D head size.
# Wrong shapes and dtypes raise ValueError naming the sizes that disagree, wrong indices raise IndexError.


def kv_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the step's keys and values in their slots of one layer's cache.

    key, value  [T, Hkv, D], any strides as long as rows of D are contiguous; dtype of the cache
    caches      [blocks, Hkv, block_size, D]
    slots       [T] int64: block * block_size + offset, all different; -1 stores the token nowhere
    """
    torch.ops.quire.kv_write.default(key, value, k_cache, v_cache, slots)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of S sequences over their cached keys: decodes and prompt chunks mixed in one ragged call.

    q, out      [T, H, D] float32, bfloat16 or float16, any strides as long as rows of D are contiguous; D <= 256
    caches      [blocks, Hkv, block_size, D], dtype of q; H is a multiple of Hkv; any block_size
    tables      [max_rows, max_blocks] int32 block ids in logical order; entries past a sequence's end may be anything
    rows        [S] int32, the row of `tables` of each sequence
    q_start     [S + 1] int32, sequence s owns tokens q_start[s] .. q_start[s + 1] - 1
    lens        [S] int32, keys of each sequence, those of this step (already written) included
    window      > 0: a query sees only so many keys, its own included; 0: all before it
    soft_cap    > 0: scores become soft_cap * tanh(score / soft_cap); 0: left alone

    The last query of a sequence stands at position lens - 1.  A query's result is bit for bit the same whatever else is
    in the call, however its prompt was cut into chunks, wherever its blocks lie and however many threads there are.
    """
    torch.ops.quire.paged_attention.default(
        q, k_cache, v_cache, tables, rows, q_start, lens, scale, window, soft_cap, out
    )


def block_copy(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """In each cache (all layers' K and V) copy block pairs[i, 0] to block pairs[i, 1], in order; pairs [n, 2] int64."""
    torch.ops.quire.block_copy.default(caches, pairs)


def block_fill(caches: list[torch.Tensor], blocks: torch.Tensor, value: float) -> None:
    """In each cache fill the given blocks, [n] int64, with one value (NaN, to catch reads of freed blocks)."""
    torch.ops.quire.block_fill.default(caches, blocks, value)


# What a decoder layer does between its matrix products.  float32, bfloat16 or float16; arithmetic in float32.


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.  x [T, size], weight [size] -> [T, size]."""
    out = torch.empty_like(x)
    torch.ops.quire.rms_norm.default(x, weight, eps, out)
    return out


def rms_norm_(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`rms_norm` of each head, in place.  x [T, heads, D], any strides as long as heads are contiguous; weight [D]."""
    torch.ops.quire.rms_norm.default(x, weight, eps, x)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x += delta, in place, then `rms_norm` of that sum.  x, delta [T, size], weight [size] -> [T, size]."""
    out = torch.empty_like(x)
    torch.ops.quire.add_rms_norm.default(x, delta, weight, eps, out)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.  gate_up [T, 2 * size] holds gate, then up, in every row -> [T, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    torch.ops.quire.silu_mul.default(gate_up, out)
    return out


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rotary embedding and `kv_write` in one: queries are rotated in place, keys on their way into the cache.

    qkv         [T, H + 2 * Hkv, D]: query, key and value heads; key heads are left as they were
    cos, sin    [T, D]: head[i] becomes head[i] * cos[i] - head[i + D / 2] * sin[i], and the second half likewise with +
    caches, slots  as in `kv_write`
    """
    torch.ops.quire.rope_kv_write.default(qkv, cos, sin, k_cache, v_cache, slots)


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of x [N, V], [N] float32, and the first place it stands at, [N] int64.

    NaN and 0 where the row holds a NaN.
    """
    values = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    places = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    torch.ops.quire.row_max.default(x, values, places)
    return values, places


# Not ours: oneDNN's matrix product with a weight kept in the layout its instructions want.  torch's own linear converts
# the weight in every call, which at the few rows of a decode step costs as much as the product itself.


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `packed_linear` can take this [out, in] weight: bfloat16, on a CPU that oneDNN computes bfloat16 on."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of weight [out, in] in oneDNN's blocked layout: opaque, good for `packed_linear` only."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times the packed weight [out, in] transposed, plus bias [out] -> [..., out], all of one dtype."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


if __name__ == "__main__":
    try:
        print(build(default_directory()))
    except KernelBuildError as error:
        sys.exit(f"kernels: {error}")
