"""Reads the folder of a LoRA adapter in PEFT's format.

    adapter_config.json ───────────> AdapterConfig ─┐
    adapter_model.safetensors ─────> A and B of each module ─> AdapterFile, and the digest of both files

Each file is read once, so the digest covers exactly the parsed bytes.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.engine.adapters.config import MAX_RANK, AdapterConfig, check_values, parse_config
from quire.engine.adapters.errors import AdapterError, AdapterMissing

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = MAX_HEADER_BYTES = 4 << 20
MAX_FILE_BYTES = 16 << 30  # maximum size of a weight file; rank 128 on all layers of a 405B model: 7 GB in bfloat16
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # supported dtype -> bytes per element
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_READ = 1 << 20  # bytes per read


class Matrix(NamedTuple):
    """One stored matrix, in row-major order."""

    dtype: str  # a key of DTYPES
    rows: int
    columns: int
    data: memoryview


class Tensor(msgspec.Struct, frozen=True):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Pair(NamedTuple):
    """The matrices of one linear layer; the adapter adds scale * B A to its weight."""

    a: Matrix  # [rank, in]
    b: Matrix  # [out, rank]


class AdapterFile(msgspec.Struct, frozen=True):
    """A complete adapter in memory."""

    where: str  # the adapter's folder, for errors
    digest: str  # digest of both files
    config: AdapterConfig
    pairs: dict[str, Pair]  # module path in the base model -> matrices


def read_adapter(folder: Path, max_bytes: int, name: str = "", digest: str = "") -> AdapterFile:
    """Read an adapter of at most `max_bytes`.

    `name`, `digest`: name and digest of the expected adapter; "": accept any files.  Raises AdapterError, and
    AdapterMissing if the expected files are not there."""
    config_data = _read(folder / CONFIG, MAX_CONFIG_BYTES)
    if not digest:
        _check_pickle(folder)
    data = _read(folder / WEIGHTS, max_bytes)
    state = blake2b(config_data, digest_size=16)
    state.update(data)
    if digest and state.hexdigest() != digest:
        raise AdapterMissing(f"{folder}: its files have changed since they were loaded as {name}: load it again")
    config = parse_config(bytes(config_data), str(folder / CONFIG))
    return AdapterFile(str(folder), state.hexdigest(), config, pairs_of(data, str(folder / WEIGHTS)))


def digest_of(folder: Path) -> str:
    """Check the config and the header of an adapter's files, and return their digest without keeping them in memory.

    Raises AdapterError."""
    config_data = _read(folder / CONFIG, MAX_CONFIG_BYTES)
    parse_config(bytes(config_data), str(folder / CONFIG))
    _check_pickle(folder)
    digest = blake2b(config_data, digest_size=16)
    path = folder / WEIGHTS
    with _open(path) as file:
        before = os.fstat(file.fileno())
        _check_bytes(before.st_size, MAX_FILE_BYTES, path)
        head = file.read(8 + MAX_HEADER_BYTES)
        for name, tensor in header_of(head, before.st_size, str(path)).items():
            check_tensor(name, tensor, str(path))
        while head:
            digest.update(head)
            head = file.read(_READ)
        _check_unchanged(before, os.fstat(file.fileno()), path)
    return digest.hexdigest()


def pairs_of(data: memoryview, where: str) -> dict[str, Pair]:
    """Return the matrices of a safetensors file, by module path.  Raises AdapterError."""
    tensors = header_of(data, len(data), where)
    found = dict[str, dict[str, Matrix]]()
    for name, tensor in tensors.items():
        match = check_tensor(name, tensor, where)
        rows, columns = tensor.shape
        matrix = Matrix(tensor.dtype, rows, columns, data[slice(*tensor.data_offsets)])
        both = found.setdefault(match["module"], {})
        if both.setdefault(match["which"], matrix) is not matrix:
            raise AdapterError(f"{where}: {match['module']} has lora_{match['which']} twice")
    if not found:
        raise AdapterError(f"{where}: holds no LoRA matrices")
    pairs = {}
    for module, both in found.items():
        if len(both) < 2:
            raise AdapterError(f"{where}: {module} has lora_{next(iter(both))} without its counterpart")
        pair = pairs[module] = Pair(both["A"], both["B"])
        if pair.a.rows != pair.b.columns:
            raise AdapterError(f"{where}: {module}: lora_A has rank {pair.a.rows}, lora_B {pair.b.columns}")
    return pairs


def header_of(head: bytes | memoryview, size: int, where: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of `size` bytes.  `head`: its first bytes.  Offsets are file offsets.

    Raises AdapterError."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > size - 8:
        raise AdapterError(f"{where}: truncated: {size} bytes")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(
            f"{where}: its header has {length} bytes; at most {MAX_HEADER_BYTES} are read", MAX_HEADER_BYTES, length
        )
    check_values(header := bytes(head[8 : 8 + length]).rstrip(), where)
    try:
        fields: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        fields.pop("__metadata__", None)
        tensors = msgspec.convert(fields, dict[str, Tensor])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{where}: damaged header: {error}") from None
    end = 8 + length
    found = {}
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].data_offsets):
        first, last = (8 + length + offset for offset in tensor.data_offsets)
        if not end == first <= last:
            raise AdapterError(f"{where}: damaged header: {name} lies at {first} to {last}, expected at {end}")
        found[name] = msgspec.structs.replace(tensor, data_offsets=(first, last))
        end = last
    if end != size:
        raise AdapterError(f"{where}: truncated or damaged: {size} bytes, its header describes {end}", end, size)
    return found


def check_tensor(name: str, tensor: Tensor, where: str) -> re.Match[str]:
    """Return the match with `module` and `which` (A or B) in a tensor's name.  Raises AdapterError if unsupported."""
    if "lora_embedding" in name:
        raise AdapterError(f"{where}: {name}: adapters of embeddings are not served")
    if "lora_magnitude" in name:
        raise AdapterError(f"{where}: {name}: DoRA is not served")
    if (match := _TENSOR.fullmatch(name)) is None:
        raise AdapterError(f"{where}: {name} is not part of a LoRA adapter of linear layers")
    dtype, shape, (first, last) = tensor.dtype, tensor.shape, tensor.data_offsets
    if dtype not in DTYPES:
        raise AdapterError(f"{where}: {name} has dtype {dtype}; {', '.join(DTYPES)} are served")
    if len(shape) != 2 or min(shape) < 1:
        raise AdapterError(f"{where}: {name} has shape {shape}; LoRA of linear layers has matrices")
    if shape[0] * shape[1] * DTYPES[dtype] != last - first:
        raise AdapterError(f"{where}: damaged header: {name} of shape {shape} in {dtype} has {last - first} bytes")
    if (rank := shape[0 if match["which"] == "A" else 1]) > MAX_RANK:
        raise AdapterError(f"{where}: {name} has rank {rank}; at most {MAX_RANK} is served", MAX_RANK, rank)
    return match


def _check_pickle(folder: Path) -> None:
    if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
        raise AdapterError(f"{folder / PICKLE}: pickles are not read; save the adapter as {WEIGHTS}")


def _open(path: Path) -> FileIO:
    """Open a regular file.  Raises AdapterError for other kinds of files, AdapterMissing if it cannot be opened."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise AdapterError(f"{path}: not a regular file")
        return FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise AdapterMissing(f"{path}: {error.strerror or error}") from None


def _read(path: Path, max_bytes: int) -> memoryview:
    """Return a file's bytes, in pages that the system zeroes while the file is read.

    A bytearray would be zeroed by this thread with the interpreter held: 45 ms for 84 MB, in which no step starts."""
    with _open(path) as file:
        before = os.fstat(file.fileno())
        _check_bytes(before.st_size, max_bytes, path)
        data = memoryview(mmap.mmap(-1, max(1, before.st_size)))[: before.st_size]
        at = 0
        try:
            while at < len(data) and (count := file.readinto(data[at : at + _READ])):
                at += count
        except OSError as error:
            raise AdapterMissing(f"{path}: {error.strerror or error}") from None
        _check_unchanged(before, os.fstat(file.fileno()), path)
    if at != before.st_size:
        raise AdapterMissing(f"{path}: changed while it was read")
    return data


def _check_bytes(size: int, most: int, path: Path) -> None:
    if size > most:
        raise AdapterError(f"{path}: {size} bytes; at most {most} are served", most, size)


def _check_unchanged(before: os.stat_result, after: os.stat_result, path: Path) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise AdapterMissing(f"{path}: changed while it was read")
