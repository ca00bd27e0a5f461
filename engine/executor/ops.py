"""Builds the kernels of csrc and calls them: the only module that knows how they are compiled or what torch calls them.

`load()` must have returned before any operator is called.  It compiles on first use (seconds for a CPU, minutes at most
with CUDA) and keeps the result in a cache; afterwards it costs milliseconds.  `python -m engine.executor.ops` compiles
now rather than at first use; with `--ahead DIRECTORY` for machines other than this one, say into an image.
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

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIBRARY = "libquire.so"
AHEAD_CPU = "x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else "armv8.2-a"
CUDA_PLACES = ["/usr/local/cuda"]  # looked at after CUDA_HOME and PATH
AHEAD_GPUS = ("8.0", "8.6", "8.9", "9.0", "10.0")  # A100, A10, L4 and L40, H100 and H200, B200


class KernelBuildError(Exception):
    """The kernels could not be compiled.  The message names the compiler, the first error and the full log."""


@dataclass(frozen=True)
class Target:
    """What to compile for, and against which torch."""

    cpu: str = "native"  # the compiler's name of an architecture
    gpus: tuple[str, ...] = ()  # compute capabilities; none: no CUDA
    torch_root: Path = field(default_factory=lambda: Path(torch.__file__).parent)

    @classmethod
    def this_machine(cls) -> Target:
        """The CPU and GPUs here.  Raises KernelBuildError for a GPU without the means to compile for it."""
        if not torch.cuda.is_available():
            return cls()
        cards = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return cls(gpus=tuple(f"{major}.{minor}" for major, minor in sorted(cards)))


def default_directory() -> Path:
    """Where compiled kernels are kept unless the caller says otherwise: the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "kernels"


def load(directory: Path | None = None, *, library: Path | None = None) -> None:
    """Make the operators callable in this process, compiling them first unless `directory` holds a build that fits.

    `library`: one compiled ahead, taken as it is.
    Any number of processes may call this at once: one compiles, the others wait for it.  Calling again is harmless and
    does nothing: a process has its operators from one library.
    Says on stderr when it compiles.  Raises KernelBuildError.
    """
    if library is not None and not library.is_file():
        raise KernelBuildError(f"{library}: no such file; `python -m engine.executor.ops --ahead DIRECTORY` makes one")
    if hasattr(torch.ops.quire, "linear"):
        return
    path = library or build(directory or default_directory())
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]


def build(directory: Path) -> Path:
    """Compile csrc unless `directory` has a build of these sources, flags, torch and CPU; return the library."""
    target = Target.this_machine()
    script = _build_script(target)
    home = directory / _digest(script)
    library = home / LIBRARY
    if library.exists():  # only ever appears complete
        return library
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
        if not library.exists():
            os.replace(_compile(home, script), library)
    return library


def build_ahead(directory: Path, target: Target) -> Path:
    """Compile csrc for `target`, whatever this machine is, into directory/libquire.so; what has not changed is kept."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY
    shutil.copy2(_compile(directory, _build_script(target)), library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _cuda_home() -> Path:
    """Where nvcc lives.  Raises KernelBuildError."""
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
    """Hopper's and Blackwell's own instructions exist only in the target with an `a`."""
    number = capability.replace(".", "")
    if int(number) >= 90:
        number += "a"
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _build_script(target: Target) -> str:
    """The build.ninja of csrc: all of it, or all but csrc/cuda."""
    torch_root = target.torch_root
    option = "-march" if platform.machine() in ("x86_64", "AMD64") else "-mcpu"
    common = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
    include = f"-I{CSRC}"
    flags = [
        *common,
        include,
        f"{option}={target.cpu}",
        # Results must not depend on which multiplications the optimiser chose to fuse (see simd.h).
        "-ffp-contract=off",
        # Vectors are passed between inlined functions only, so that no ABI is at stake.
        *("-Wall", "-Wno-psabi", "-Wno-unknown-warning-option"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(torch_root / "include")),
    ]
    # No -fopenmp: pool.h says why.  GOMP_parallel stays open here and is found in what libtorch_cpu depends on.
    libraries = [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    # A compiler that has libstdc++ only as an archive links a second one; were it seen from outside, half of its calls
    # would go to the process's own, and messages with numbers in them crash.
    libraries.append("-Wl,--exclude-libs,ALL")
    sources = sorted(CSRC.rglob("*.cpp"))
    rules = [("compile", "$cxx -MMD -MF $out.d $flags -c $in -o $out")]
    if target.gpus:
        cuda = _cuda_home()
        rules.append(
            (
                "compile_cuda",
                f"{_escape(shlex.quote(str(cuda / 'bin' / 'nvcc')))} -MMD -MF $out.d $cuda_flags -c $in -o $out",
            )
        )
        flags += ["-isystem", str(cuda / "include")]
        libraries += [f"-L{cuda / 'lib64'}", "-lc10_cuda", "-lcudart"]
        sources += sorted(CSRC.rglob("*.cu"))
    else:
        sources = [source for source in sources if "cuda" not in source.parts[len(CSRC.parts) :]]
    cuda_flags = [
        *("-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        include,
        *map(_gencode, target.gpus),
    ]
    objects = [str(source.relative_to(CSRC)).replace("/", "_") + ".o" for source in sources]
    lines = [
        f"cxx = {_escape(_compiler())}",
        f"flags = {_escape(shlex.join(flags))}",
        f"cuda_flags = {_escape(shlex.join(cuda_flags))}",
        f"libraries = {_escape(shlex.join(libraries))}",
    ]
    for name, command in rules:
        lines += [
            f"rule {name}",
            f"  command = {command}",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $in",
        ]
    lines += ["rule link", "  command = $cxx -shared -o $out $in $libraries", "  description = link $out"]
    for source, name in zip(sources, objects, strict=True):
        rule = "compile_cuda" if source.suffix == ".cu" else "compile"
        lines.append(f"build {name}: {rule} {_escape(str(source)).replace(' ', '$ ').replace(':', '$:')}")
    return "\n".join([*lines, f"build {LIBRARY}: link {' '.join(objects)}", ""])


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def _digest(script: str) -> str:
    """Of everything that decides what the compiler makes: sources, flags, torch, and the CPU behind -march=native."""
    digest = hashlib.sha256(f"{script}\n{torch.__version__}\n{_cpu()}".encode())
    for source in sorted(path for path in CSRC.rglob("*") if path.suffix in SOURCES):
        digest.update(f"\n{source.relative_to(CSRC)}\n".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


SOURCES = {".cpp", ".h", ".cu", ".cuh"}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if re.match(r"model name|flags|Features|CPU part", line))


def _compile(home: Path, script: str) -> Path:
    """Run ninja in home/build; the library it made."""
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
    return work / LIBRARY


def _say(text: str) -> None:
    print(f"kernels: {text}", file=sys.stderr, flush=True)


# The operators.  Shapes: T tokens of the step, S sequences, H query heads, Hkv KV heads, D head size.
# Wrong shapes and dtypes raise ValueError naming the sizes that disagree, wrong indices raise IndexError.


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Store the step's keys and values in their slots of one layer's cache.

    key, value  [T, Hkv, D], any strides as long as rows of D are contiguous; dtype of the cache
    caches      [blocks, Hkv, block_size, D]
    slots       [T] int64: block * block_size + offset, all different; -1 stores the token nowhere
    scales      [2, Hkv] float32, of keys and of values, for a cache of float8_e4m3fn: stored = number / scale
    """
    torch.ops.quire.kv_write.default(key, value, k_cache, v_cache, slots, scales)


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
    *,
    decodes: int = 0,
    plan: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
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
    decodes     the first so many sequences have one query each (or, lens 0, none)
    plan        what `attention_plan` wrote for this step; on a CPU not needed
    scales      [2, Hkv] float32, of keys and of values, for a cache of float8_e4m3fn: number = stored * scale

    The last query of a sequence stands at position lens - 1.  On a CPU a query's result is bit for bit the same
    whatever else is in the call, however its prompt was cut into chunks, wherever its blocks lie and however many
    threads there are.
    """
    if plan is None:
        plan = torch.empty(0, dtype=torch.uint8, device=q.device)
    torch.ops.quire.paged_attention.default(
        q, k_cache, v_cache, tables, rows, q_start, lens, scales, decodes, plan, scale, window, soft_cap, out
    )


def attention_plan(
    q_start: torch.Tensor,
    lens: torch.Tensor,
    decodes: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int,
    plan: torch.Tensor,
) -> None:
    """Share out the work of `paged_attention`: once a step, before the first layer with these sizes and this window.

    q_start, lens, decodes  as the layers will pass them; `tables` and `rows` must have been written by now
    plan    [attention_plan_bytes(...)] uint8 on the device; also holds partial results of long sequences
    """
    torch.ops.quire.attention_plan.default(q_start, lens, decodes, heads, kv_heads, head_size, window, plan)


def attention_plan_bytes(
    device: torch.device, *, max_seqs: int, max_tokens: int, heads: int, kv_heads: int, head_size: int
) -> int:
    """How large a plan must be for steps of up to max_seqs sequences and max_tokens tokens.  0 on a CPU."""
    like = torch.empty(0, device=device)
    size: int = torch.ops.quire.attention_plan_bytes.default(like, max_seqs, max_tokens, heads, kv_heads, head_size)
    return size


def block_copy(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    """In each cache (all layers' K and V) copy block pairs[i, 0] to block pairs[i, 1]; pairs [n, 2] int64.

    No block may be written twice, or both read and written.
    """
    torch.ops.quire.block_copy.default(caches, pairs)


def block_fill(caches: list[torch.Tensor], blocks: torch.Tensor, value: float) -> None:
    """In each cache fill the given blocks, [n] int64, with one value (NaN, to catch reads of freed blocks)."""
    torch.ops.quire.block_fill.default(caches, blocks, value)


def block_gather(caches: list[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i, c] = block blocks[i] of caches[c], as bytes.

    blocks [n] int64, buffer [n, caches, bytes of a block] uint8, on the device of the caches.
    """
    torch.ops.quire.block_gather.default(caches, blocks, buffer)


def block_scatter(buffer: torch.Tensor, blocks: torch.Tensor, caches: list[torch.Tensor]) -> None:
    """The way back of `block_gather`, to these or other blocks; none may be named twice."""
    torch.ops.quire.block_scatter.default(buffer, blocks, caches)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    plus: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rms_norm(x, norm, eps) times the transposed weight, plus bias.  x [T, in], weight [size, in] -> [T, size].

    norm      [in]; None: x as it is
    silu_mul  weight and bias hold `size` gate rows, then as many up rows; the result is silu(gate) * up
    plus      [T, size], to which the result is added, in place: what is returned
    out       [T, size], without `plus`: where the result goes
    """
    assert plus is None or out is None
    if out is None:
        size = weight.shape[0] // 2 if silu_mul else weight.shape[0]
        out = torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device) if plus is None else plus
    torch.ops.quire.linear.default(x, weight, bias, norm, eps, plus is not None, silu_mul, out)
    return out


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
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: torch.Tensor | None = None,
) -> None:
    """Rotary embedding and `kv_write` in one: queries are rotated in place, keys on their way into the cache.

    qkv         [T, H + 2 * Hkv, D]: query, key and value heads; key heads are left as they were
    cos, sin    [T, D], rows contiguous (say, halves of a table's [positions, 2 * D]): head[i] becomes
                head[i] * cos[i] - head[i + D / 2] * sin[i], and the second half likewise with +
    caches, slots, scales  as in `kv_write`
    q_norm, k_norm  [D]: `rms_norm` with `eps` of every query and key head before it turns
    """
    torch.ops.quire.rope_kv_write.default(qkv, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, eps, scales)


def apply_edits(edits: torch.Tensor, tables: torch.Tensor) -> None:
    """tables[row, column] = block for each (row, column, block) of edits [n, 3] int32; row -1 is padding.

    tables [max_rows, max_blocks] int32.  No place may be named twice.
    """
    torch.ops.quire.apply_edits.default(edits, tables)


def decode_inputs(
    seats: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    *,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Lay out the next token of each decoding seat, in one launch.

    seats                   [n] int32: rows of the mirror, in the order of the step; -1 is padding
    token, position         [max_rows] int64: what each seat computes next, and where
    tables                  [max_rows, max_blocks] int32
    ids, positions, slots   [n] int64, written: as the model and `kv_write` want them
    rows, lens              [n] int32, written: as `paged_attention` wants them

    Padding, and a seat past the end of its table, becomes id 0, position 0, slot -1, row 0, lens 0.
    """
    torch.ops.quire.decode_inputs.default(seats, token, position, tables, block_size, ids, positions, slots, rows, lens)


def decode_outputs(seats: torch.Tensor, tokens: torch.Tensor, token: torch.Tensor, position: torch.Tensor) -> None:
    """Feed sampled tokens [n] int64 back: token[seats[i]] = tokens[i], position[seats[i]] += 1; seat -1 is padding.

    No seat may be named twice.
    """
    torch.ops.quire.decode_outputs.default(seats, tokens, token, position)


def sample(
    logits: torch.Tensor,
    seats: torch.Tensor,
    known: torch.Tensor,
    table: torch.Tensor,
    general: bool,
    tokens: torch.Tensor,
    outcome: torch.Tensor,
) -> None:
    """Choose one token for each row of logits [N, V]: the same token on every device, in any batch (csrc/sampling_rules.h).

    seats, known  [N] int64: the row of `table` each samples for (-1: none, its token is 0); tokens before this one
    table         [max_seqs, 8] int64: what each seat asks for and where its tokens are counted; `SamplerBank`'s
    general       False: the likeliest token of each row, whatever the table says, at one reading of the logits
    tokens        [N] int64, out; 0 where none is chosen
    outcome       [N] uint8, out: CHOSEN, NOT_FINITE or NOTHING_ALLOWED of engine/executor/sampling.py
    """
    torch.ops.quire.sample.default(logits, seats, known, table, general, tokens, outcome)


# Products on a CPU with a weight that was packed for them, once, at load.  torch's own linear converts the weight in
# every call, which at the few rows of a decode step costs as much as the product itself.


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] as `packed_linear` wants it: opaque."""

    numbers: torch.Tensor
    size: int  # out
    ordered: bool  # ours: a row's bits don't depend on the batch; else oneDNN's


def pack_weight(weight: torch.Tensor, *, ordered: bool) -> Packed | None:
    """A packed copy of weight [out, in] on a CPU.

    ordered: for products whose bits don't depend on the batch.  Else for those that are fastest here; None where
    nothing is faster than torch's own linear.
    """
    size, inner = weight.shape
    if ordered or _ordered_is_fast(weight.dtype):
        columns, together = torch.ops.quire.product_layout.default(weight)
        padded = torch.nn.functional.pad(weight.detach(), (0, -inner % together, 0, -size % columns))
        strips = padded.view(len(padded) // columns, columns, -1, together)
        return Packed(strips.transpose(1, 2).contiguous(), size, True)
    if weight.dtype == torch.bfloat16 and _onednn_bfloat16():
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), size, False)
    return None


def packed_linear(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, plus: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] times the packed weight transposed, plus bias [out], plus `plus` [..., out], perhaps overwriting it.

    One dtype.  Sums in float32, rounded once.
    """
    y: torch.Tensor
    if packed.ordered:
        y = x.new_empty(*x.shape[:-1], packed.size) if plus is None else plus
        rows = y.view(-1, packed.size)
        torch.ops.quire.product.default(
            x.reshape(-1, x.shape[-1]), packed.numbers, bias, None if plus is None else rows, rows
        )
    elif plus is None:
        y = torch.ops.mkldnn._linear_pointwise(x, packed.numbers, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, plus, packed.numbers, bias, "add")
    return y


def _onednn_bfloat16() -> bool:
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _ordered_is_fast(dtype: torch.dtype) -> bool:
    """Whether our products take no more time than the libraries', as far as measured (docs/notes/kernels/product.md).

    They do where the library knows an instruction that this build has not, or matrix tiles (AMX), which ours don't use.
    """
    columns, together = torch.ops.quire.product_layout.default(torch.empty(0, dtype=dtype))
    if dtype == torch.bfloat16:
        tiles = torch.cpu._is_amx_tile_supported()
        return not _onednn_bfloat16() or (together == 2 and not tiles)
    return columns == 32 or "AVX512" not in torch.backends.cpu.get_cpu_capability()


def set_threads(count: int) -> None:
    """How many threads our kernels share their work among on a CPU, in this process; 0: as many as torch's own do."""
    torch.ops.quire.set_threads.default(count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.executor.ops", description="Compile the kernels now.")
    parser.add_argument("--ahead", type=Path, metavar="DIRECTORY", help="for other machines, into this directory")
    parser.add_argument("--cpu", default=AHEAD_CPU, help=f"with --ahead: oldest CPU to run on ({AHEAD_CPU})")
    parser.add_argument(
        "--gpus",
        default=" ".join(AHEAD_GPUS) if torch.version.cuda else "",
        help="with --ahead: compute capabilities, say '8.0 9.0'; '' for none",
    )
    args = parser.parse_args(arguments)
    try:
        if args.ahead:
            print(build_ahead(args.ahead, Target(args.cpu, tuple(args.gpus.split()))))
        else:
            print(build(default_directory()))
    except KernelBuildError as error:
        sys.exit(f"kernels: {error}")


if __name__ == "__main__":
    main()
