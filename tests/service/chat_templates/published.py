"""Stand-ins of published chat templates: shorter, with the same rules for roles, history, ids, arguments and content.

`TEMPLATES` has for each a chat template (a file of `templates/`) and the special tokens that it writes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import byte_level, with_template

FOLDER = Path(__file__).parent / "templates"
SPECIAL: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "qwen3.5": ("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|image_pad|>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "thinking": ("<|im_start|>", "<|im_end|>"),
    "parts": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "llama2": (),
    "mistral-v3": (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
    ),
    "mistral-v7": (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[CALL_ID]",
        "[ARGS]",
        "[TOOL_CONTENT]",
    ),
    "gemma2": ("<start_of_turn>", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "harmony": ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    "deepseek-v3.1": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁sep｜>",
    ),
    "deepseek-thinking": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁sep｜>",
    ),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "granite3": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    "granite4": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    "phi4-mini": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>"),
    "phi4-reasoning": ("<|im_start|>", "<|im_end|>", "<|im_sep|>"),
    "command": (
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
    ),
}
TEMPLATES = {name: ((FOLDER / f"{name}.jinja").read_text().rstrip("\n"), special) for name, special in SPECIAL.items()}


def tokenizer_in(folder: Path, name: str) -> Tokenizer:
    """Return a byte-level tokenizer with one of the templates, which is made in `folder`."""
    base = folder / "base"
    if not base.exists():
        byte_level(base)
    template, special = TEMPLATES[name]
    return Tokenizer(str(with_template(Path(shutil.copytree(base, folder / name)), template, special)))
