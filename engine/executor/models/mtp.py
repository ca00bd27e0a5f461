"""The multi-token-prediction (MTP) head of a checkpoint (Qwen3.5, Qwen3-Next): guesses the token after the next one.

    token i + 1             embedding ── norm ─┐
                                               ├─ fc ── decoder layer ── norm ── LM head ──> guess of token i + 2
    token i      the model's hidden state ── norm ─┘      full attention

Embedding and LM head are the model's.  The layer has KV of its own, one more layer of the cache: its entry at position
i depends on tokens up to i + 1.  transformers has the layer's class, but neither builds the head nor reads its weights.

Source: "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models.fused import pack_linears
from quire.engine.executor.models.linear import Linears
from quire.engine.executor.models.weights import Names, StoredTensor, stored_tensors, weight_files
from quire.engine.executor.step_tensors import StepTensors

log = logging.getLogger(__name__)

PREFIX = "mtp."  # prefix of the head's tensors in the files
FAMILIES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}  # model types with heads of this form
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # a tensor of one expert of a mixture
FLOATS = {"F32", "F16", "BF16"}  # dtypes as safetensors names them
OWN = Names(own=lambda name: name.removeprefix(PREFIX) if name.startswith(PREFIX) else "")


class MtpHead(nn.Module):
    """One MTP layer over a model's hidden states.  Its parameters have the names of the files, without PREFIX."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Build the head with random weights, in the dtype of the model and on its device."""
        super().__init__()
        decoder: Any = model.get_decoder()
        config = copy.deepcopy(model.config.get_text_config())
        self.layer = config.num_hidden_layers  # index of the head's layer in the KV cache
        config.layer_types = [*config.layer_types, "full_attention"]
        norm, size, eps = type(decoder.norm), config.hidden_size, config.rms_norm_eps
        with torch.device(model.device):
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(size, eps=eps), norm(size, eps=eps)
            self.fc = nn.Linear(2 * size, size, bias=False)
            self.layers = nn.ModuleList([type(decoder.layers[0])(config, self.layer)])
            self.norm = norm(size, eps=eps)
        self.kv_shape = KVShape(config.num_key_value_heads, config.head_dim)
        self.to(model.dtype).eval().requires_grad_(False)
        self._shared = decoder.embed_tokens, decoder.rotary_emb, model.get_output_embeddings()  # not its own parameters

    def forward(self, following: Tensor, hidden: Tensor, step: StepTensors) -> Tensor:
        """Return the head's hidden states [T, hidden] for the tokens of a step; writes their KV.

        following: [T] i64, the token after each token of the step;  hidden: [T, hidden], after the model's norm."""
        embed, rotary, _ = self._shared
        x = torch.cat([self.pre_fc_norm_embedding(embed(following)), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(x)[None]
        angles = rotary(x, step.position_ids)
        x = self.layers[0](x, position_embeddings=angles, position_ids=step.position_ids, use_cache=False, step=step)
        normed: Tensor = self.norm(x)[0]
        return normed

    def guess(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable token [N] i64 after the head's hidden states [N, hidden], and its probability."""
        logits = self._shared[2](hidden).float()
        probability, token = logits.softmax(-1).max(-1)
        return token, probability


def find_mtp(directory: Path, model: PreTrainedModel, why: str = "") -> MtpHead | None:
    """Return the MTP head of a checkpoint with packed weights, as the module `mtp` of its model.

    None, with the reason in the start log, if the checkpoint has no head that can be computed.

    model: proved, with swapped modules;  why: a reason against all drafts, or empty."""
    if model.config.get_text_config().model_type not in FAMILIES:
        return None
    if not (stored := stored_tensors(weight_files(directory), OWN)):
        return None
    if why:
        log.info("the checkpoint's MTP head is not used: %s", why)
        return None
    try:
        head = read_mtp(directory, model, stored)
    except ModelLoadError as error:
        log.warning("the checkpoint's MTP head is not used: %s", error)
        return None
    pack_linears(head, Linears(ordered=False, dtype=model.dtype))
    model.add_module("mtp", head)
    log.info("the checkpoint's MTP head is used for drafts; the KV cache holds one more layer for it")
    return head


@torch.inference_mode()
def read_mtp(directory: Path, model: PreTrainedModel, stored: dict[str, StoredTensor]) -> MtpHead:
    """Return the MTP head of a checkpoint whose tensors are `stored`, by their names without PREFIX.

    Raises ModelLoadError that names a tensor which the files lack, have in addition, in another shape or quantised."""
    head = MtpHead(model)
    parameters, read = dict(head.named_parameters()), Counter[str]()
    for name, tensor in sorted(stored.items()):
        parameter, place = destination(parameters, name)
        if place is None:
            raise ModelLoadError(f"{directory}: the weight files hold {PREFIX}{name}, which the layer's class lacks")
        if tensor.shape != tuple(place.shape):
            shapes = f"{list(tensor.shape)}, the config says {list(place.shape)}"
            raise ModelLoadError(f"{directory}: {PREFIX}{name} has shape {shapes}")
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(f"{directory}: {PREFIX}{name} is quantised ({tensor.dtype})")
        with safe_open(tensor.file, "pt") as file:
            place.copy_(file.get_tensor(tensor.name))
        read[parameter] += place.numel()
    for name, weights in parameters.items():
        if read[name] < weights.numel():
            raise ModelLoadError(f"{directory}: the weight files lack {PREFIX}{name}, or a part of it")
    return head


def destination(parameters: dict[str, nn.Parameter], name: str) -> tuple[str, Tensor | None]:
    """Return the name of the parameter that a stored tensor fills, and the part that it fills; None: there is none.

    Files may store each expert of a mixture separately; transformers' layers have one parameter for all experts, in
    which an expert's gate precedes its up projection."""
    if (match := EXPERT.fullmatch(name)) is None:
        return name, parameters.get(name)
    experts, expert, which = match[1], int(match[2]), match[3]
    parameter = f"{experts}.{'down' if which == 'down' else 'gate_up'}_proj"
    weights = parameters.get(parameter)
    if weights is None or expert >= len(weights):
        return parameter, None
    own = weights[expert]
    return parameter, own if which == "down" else own.chunk(2)[which == "up"]
