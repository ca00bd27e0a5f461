"""Sites: the GEMMs of a model to whose outputs LoRA adapters add.

    a model's linear layers          GEMM that serves them      site
    q_proj, k_proj, v_proj    ──┐
                                └──> qkv_proj               ──> 0: parts q, k, v, one after another
    o_proj                    ─────> o_proj                 ──> 1
    gate_proj, up_proj        ─────> gate_up_proj           ──> 2 ...

`Linears` registers a site for each GEMM that it makes; linear layers that it leaves unchanged get a hook.  Each site
reads `Sites.rows`; in a step without adapters it is None, and the site does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.quantised import QuantisedLinear

SERVED = (nn.Linear, QuantisedLinear, Conv1D)


@dataclass(frozen=True)
class Part:
    """One linear layer of the base model."""

    path: str  # path of its module, by transformers' names
    first: int  # its first column in the GEMM's output
    outputs: int


@dataclass(frozen=True)
class Site:
    """A GEMM: the input size and the layers whose outputs follow one another."""

    inputs: int
    parts: tuple[Part, ...]


@dataclass
class Sites:
    """All sites of a model, in the order in which they were made."""

    sites: list[Site] = field(default_factory=list)
    # Rows of the running step; None: none has an adapter.
    rows: ops.AdapterRows | ops.DeviceAdapters | None = None
    aligned: int = 1  # the kernels need inputs and outputs that are multiples of this; other layers get no adapters
    _paths: dict[int, tuple[str, int]] = field(default_factory=dict)  # id of a module -> its path and input size
    _unproved: set[int] = field(default_factory=set)  # sites of layers that the model's own code calls
    _calls: dict[int, list[int]] | None = None  # site -> number of rows per call; None unless `proving` watches

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sites:
        """Return the sites of a model whose layers are still transformers' own; the LM head has none."""
        head = model.get_output_embeddings()
        found = cls(aligned=1 if model.device.type == "cpu" else ops.LORA_ALIGNED)
        for path, module in model.named_modules():
            if type(module) not in SERVED or module is head or "experts" in path.split("."):
                continue
            if not (inputs_of(module) % found.aligned or outputs_of(module) % found.aligned):
                found._paths[id(module)] = path, inputs_of(module)
        return found

    def add(self, linears: Iterable[nn.Module]) -> int:
        """Register the GEMM of these layers.  Returns its number; -1: adapters do not apply to it."""
        linears = list(linears)
        known = [self._paths.get(id(linear)) for linear in linears]
        if None in known or len(linears) > ops.LORA_PARTS:
            return -1
        first, parts, inputs = 0, [], 0
        for linear, entry in zip(linears, known, strict=True):
            assert entry is not None
            path, inputs = entry
            outputs = outputs_of(linear)
            parts.append(Part(path, first, outputs))
            first += outputs
        self.sites.append(Site(inputs, tuple(parts)))
        return len(self.sites) - 1

    def add_called(self, linear: nn.Module) -> int:
        """Register a layer that the model's own code calls; `proving` checks that it is called once with all rows of a
        step."""
        if (site := self.add([linear])) >= 0:
            self._unproved.add(site)
        return site

    @contextlib.contextmanager
    def proving(self, tokens: int) -> Iterator[None]:
        """Watch a step of `tokens` tokens.  A layer that is not called exactly once, with a row per token, gets no
        adapters: its rows would not be the step's rows."""
        self._calls = {}
        yield
        for site in self._unproved:
            if self._calls.get(site) != [tokens]:
                self.sites[site] = Site(0, ())
        self._calls = None

    def hook(self, module: nn.Module, site: int) -> None:
        """Let an unchanged module add the output of its site's adapters to its own output."""

        def add(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.apply(site, inputs[0], output)

        module.register_forward_hook(add)

    def apply(self, site: int, x: Tensor, y: Tensor) -> None:
        """Add to y [..., out] the output of the step's adapters for x [..., in], in place."""
        if isinstance(self.rows, ops.DeviceAdapters):
            if not self.sites[site].parts:
                return
            ops.lora_on_gpu(x.reshape(-1, x.shape[-1]), self.rows, site, y.view(-1, y.shape[-1]))
        elif self.rows is not None:
            ops.lora(x.reshape(-1, x.shape[-1]), self.rows, site, y.view(-1, y.shape[-1]))
        elif self._calls is not None:
            self._calls.setdefault(site, []).append(x.numel() // x.shape[-1])


def inputs_of(linear: Any) -> int:
    """Return the input size of a linear layer."""
    return int(linear.nx if isinstance(linear, Conv1D) else linear.in_features)


def outputs_of(linear: Any) -> int:
    """Return the output size of a linear layer."""
    return int(linear.nf if isinstance(linear, Conv1D) else linear.out_features)
