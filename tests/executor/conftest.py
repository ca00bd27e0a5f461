"""Kernels are compiled once for all tests here, into the user's cache, or taken from QUIRE_KERNELS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.executor import ops
from quire.loadtest.studies.model_families import model_class
from quire.loadtest.studies.tiny_checkpoints import MORE_LAYERS
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests import warm
from tests.checkpoints import make_checkpoint
from tests.quantised import WIDE, quantise_checkpoint, store_experts_in_mxfp4


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    library = os.environ.get("QUIRE_KERNELS")
    ops.load(library=Path(library) if library else None)


@pytest.fixture(scope="package", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Ranks start as forks of a process that has imported torch (tests/warm.py)."""
    with warm.everywhere():
        yield


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama checkpoint whose linear layers have 128 or 256 inputs, so that every group size divides them."""
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "llama", "llama", intermediate_size=256)


@pytest.fixture(scope="session")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The quantised copy of each kind, with the weights that it stands for, in float64."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}
    root = tmp_path_factory.mktemp("quantised")

    def make(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in made:
            made[kind] = root / kind, quantise_checkpoint(plain, root / kind, kind)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, dict[str, Any]]]:
    """An unquantised checkpoint whose sizes every fp8 GEMM accepts, a copy of each kind, and its weights in float64."""
    root = tmp_path_factory.mktemp("wide")
    plain = make_checkpoint(root / "plain", "llama", intermediate_size=512, num_key_value_heads=2, **WIDE)
    made: dict[str, dict[str, Any]] = {}

    def make(kind: str) -> tuple[Path, Path, dict[str, Any]]:
        if kind not in made:
            made[kind] = quantise_checkpoint(plain, root / kind, kind)
        return plain, root / kind, made[kind]

    return make


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss whose experts are stored as mxfp4.  Its heads are of 64, which GPUs take."""
    directory = make_tiny(tmp_path_factory.mktemp("gpt_oss") / "gpt_oss", "gpt_oss", head_dim=64)
    store_experts_in_mxfp4(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, made once."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(root / family, family)
        return made[family]

    return make


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, made once.  Its layers with a sliding window see 24 tokens."""
    root = tmp_path_factory.mktemp("windows")
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            fields = MORE_LAYERS.get(family, {})
            if family in ("qwen2", "qwen3"):  # by default it is 4,096
                fields = fields | {"sliding_window": 24}
            make_tiny(root / family, family, model_class=model_class(family), **fields)
            made[family] = root / family
        return made[family]

    return make


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read as for such a GPU, and stay on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ops, "multiplies_blocks", lambda device: True)
