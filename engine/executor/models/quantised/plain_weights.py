"""Reads the tensors of an unquantised checkpoint; each rank reads its shard."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from quire.engine.executor.models.cuts import Cut, part_of
from quire.engine.executor.models.quantised.dequantise import Kept
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.weights import UNCHANGED, Names, stored_tensors, weight_files

SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights(Protocol):
    """A checkpoint's tensors under the model's names: plain (here) or quantised (stored_weights.py)."""

    sizes: dict[str, int]  # bytes to read for each tensor

    @property
    def names(self) -> set[str]:
        """Names of the tensors, as the model has them."""

    def exact_modules(self, cuts: Mapping[str, Cut]) -> dict[str, Kept]:
        """Return the modules whose quantised weights a GEMM can use as stored, each with its format."""

    def rows_of_experts(self, cuts: Mapping[str, Cut], exact: Mapping[str, Kept]) -> set[str]:
        """Return the modules whose stored values kernels of experts can use unchanged (`fp8_experts.py`).

        exact: what `exact_modules` returned."""

    def opened(
        self, cuts: Mapping[str, Cut], dtype: torch.dtype, quantising: Quantising
    ) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Return the tensors, read when they are indexed, while the files are open.  cuts: shards of this rank."""

    def without_meaning(self, unexpected: Collection[str], tensors: Mapping[str, Any]) -> set[str]:
        """Return the tensors that the model does not have and that change nothing."""

    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedModel for a model that cannot have these weights."""


class PlainWeights:
    """Weights that are not quantised."""

    def __init__(self, directory: Path, names: Names = UNCHANGED) -> None:
        """Read the headers."""
        self._stored = stored_tensors(weight_files(directory), names)
        self.sizes = {name: each.bytes for name, each in self._stored.items()}

    @property
    def names(self) -> set[str]:
        """Names of the tensors, as the model has them."""
        return set(self._stored)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point tensor."""
        found = [each.dtype for each in self._stored.values() if each.dtype in SAFETENSORS_DTYPES]
        return SAFETENSORS_DTYPES[[*found, "F32"][0]]

    def exact_modules(self, cuts: Mapping[str, Cut]) -> dict[str, Kept]:
        """Return an empty dict, because no weight is quantised."""
        return {}

    def rows_of_experts(self, cuts: Mapping[str, Cut], exact: Mapping[str, Kept]) -> set[str]:
        """Return an empty set, because no weight is quantised."""
        return set()

    @contextlib.contextmanager
    def opened(self, cuts: Mapping[str, Cut], dtype: torch.dtype, quantising: Quantising) -> Iterator[dict[str, Any]]:
        """Yield the tensors, read when they are indexed, while the files are open."""
        with contextlib.ExitStack() as stack:
            found = {each.file for each in self._stored.values()}
            files = {file: stack.enter_context(safe_open(file, "pt")) for file in sorted(found)}
            yield {
                name: part_of(files[each.file].get_slice(each.name), each.shape, cuts.get(name))
                for name, each in self._stored.items()
            }

    def without_meaning(self, unexpected: Collection[str], tensors: Mapping[str, Any]) -> set[str]:
        """Return an empty set, because every tensor has a meaning."""
        return set()

    def check(self, model: PreTrainedModel) -> None:
        """Accept any model."""
