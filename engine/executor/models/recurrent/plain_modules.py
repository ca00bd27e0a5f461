"""Modules of hybrid models besides layers with recurrent state, swapped for faster ones on a GPU.

    RMSNorm            -> Norm          one kernel in place of seven
    gate, up, down     -> GatedMLP      two GEMMs, of which the first applies silu and the multiplication
    q, k, v, o         -> GpuLinear     our GEMM for few tokens, which reads weights faster than the library's
    input projections  -> one GEMM      of Gated DeltaNet
    decoder layer      -> PreNormLayer  output projections add to the residual stream

The model around the layers stays transformers' own: `fused.py` replaces decoders with only attention layers.
The proof at load compares the model with its own forward after the swap.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.engine.executor import ops
from quire.engine.executor.models.linear import GpuLinear, Linears
from quire.engine.executor.models.recurrent.gated_attention import GatedAttention
from quire.engine.executor.models.recurrent.gated_delta import GatedDelta, of_one_type
from quire.engine.executor.step_tensors import StepTensors

# RMSNorms by the name of their class in transformers.  The value is added to the weight.
NORMS = {
    "Lfm2RMSNorm": 0.0,
    "Lfm2MoeRMSNorm": 0.0,
    "OlmoHybridRMSNorm": 0.0,
    "BambaRMSNorm": 0.0,
    "GraniteMoeHybridRMSNorm": 0.0,
    "FalconH1RMSNorm": 0.0,
    "Qwen3NextRMSNorm": 1.0,
    "Qwen3_5RMSNorm": 1.0,
    "Qwen3_5MoeRMSNorm": 1.0,
}
# Names of gate, up and down of each MLP that is down(silu(gate(x)) * up(x)).
_GATE_UP = ("gate_proj", "up_proj", "down_proj")
MLPS = {
    "Lfm2MLP": ("w1", "w3", "w2"),
    "OlmoHybridMLP": _GATE_UP,
    "BambaMLP": _GATE_UP,
    "Qwen3NextMLP": _GATE_UP,
    "Qwen3_5MLP": _GATE_UP,
    "Qwen3_5MoeMLP": _GATE_UP,
}
# Decoder layers that are x + mixer(norm(x)), then x + mlp(norm(x)).
LAYERS = {"Qwen3NextDecoderLayer", "Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer"}


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight: [T, size], [1, T, size] or [1, T, heads, size], the same shape out."""

    def __init__(self, plain: Any, offset: float) -> None:
        super().__init__()
        self.weight: Tensor = plain.weight.detach().float() + offset
        self.eps = float(getattr(plain, "variance_epsilon", 0.0) or plain.eps)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[0] if x.dim() == 4 else x.reshape(-1, 1, x.shape[-1])
        return ops.gated_norm(rows, self.weight, self.eps, None, x.dtype).view(x.shape)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [..., hidden] -> [..., hidden]."""

    def __init__(self, parts: list[nn.Linear], linears: Linears) -> None:
        """parts: gate, up and down."""
        super().__init__()
        gate, up, down = parts
        self.gate_up_proj = linears.product(gate, up, silu_mul=True)
        self.down_proj = linears.product(down)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        return y.view(x.shape)

    def add(self, x: Tensor, plus: Tensor) -> Tensor:
        """Return `plus` with the MLP of x added, in place: [T, hidden]."""
        out: Tensor = self.down_proj(self.gate_up_proj(x), plus)
        return out


class PreNormLayer(nn.Module):
    """A decoder layer of LAYERS: [1, T, hidden] -> [1, T, hidden]; its input must not be used afterwards."""

    def __init__(self, plain: Any, mixer: GatedAttention | GatedDelta) -> None:
        super().__init__()
        self.norm, self.mixer = plain.input_layernorm, mixer
        self.mlp_norm, self.mlp = plain.post_attention_layernorm, plain.mlp

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, step: StepTensors, **others: Any
    ) -> Tensor:
        x = hidden_states[0]
        x = self.mixer.add(self.norm(x), position_embeddings, step, x)
        out: Tensor = self.mlp.add(self.mlp_norm(x), x)
        return out[None]


def swap_plain_modules(model: PreTrainedModel, linears: Linears) -> None:
    """Swap these modules in place.  The model must be on its GPU, in its dtype."""
    for parent in list(model.modules()):
        if isinstance(parent, GatedDelta):
            parent.merge(linears)
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if (offset := NORMS.get(kind)) is not None:
                setattr(parent, name, Norm(child, offset))
            elif (
                kind in MLPS and is_silu(child) and of_one_type(parts := [getattr(child, each) for each in MLPS[kind]])
            ):
                setattr(parent, name, GatedMLP(parts, linears))
            elif type(child) is nn.Linear and calls_linears(parent):
                setattr(parent, name, GpuLinear(child.weight.detach(), child.bias, child.weight.dtype, wide=False))
    for parent in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for at, layer in enumerate(parent):
            if type(layer).__name__ in LAYERS and isinstance(layer.mlp, GatedMLP):
                mixer = layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn
                if isinstance(mixer, GatedAttention | GatedDelta):
                    parent[at] = PreNormLayer(layer, mixer)


def is_silu(mlp: nn.Module) -> bool:
    """Whether an MLP's activation is silu; LFM2's MLP has no module for it."""
    activation = getattr(mlp, "act_fn", None)
    return activation is None or isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def calls_linears(parent: nn.Module) -> bool:
    """Whether a module calls its linear layers, and does not read their weights."""
    ours = type(parent).__module__.startswith("quire.")
    return ours or type(parent).__name__.endswith("Attention")
