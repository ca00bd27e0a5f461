"""Text insertion (`suffix` of /v1/completions): fill-in-the-middle prompts of code models.

    prompt, suffix --Infill.prompt--> prefix marker, prompt, suffix marker, suffix, middle marker --> the text between

A model's markers are found by looking them up in its vocabulary.  If it has no known markers, `suffix` gets 400.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Form(NamedTuple):
    """Markers of one model family, each a single token.  `middle`: "" if the answer follows the prompt directly."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Form(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek-Coder, V3
    Form("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, CodeGeeX
    Form("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    Form("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
# Further tokens that end the inserted text.
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "\u2581<EOT>", "<EOT>")


class Infill:
    """Fill-in-the-middle markers of one vocabulary, as token ids."""

    def __init__(self, form: Form, token_id: Any) -> None:
        self._prefix, self._suffix = token_id(form.prefix), token_id(form.suffix)
        self._middle = [token_id(form.middle)] if form.middle else []
        self._suffix_first = form.suffix_first
        others = [token for text in ENDS if (token := token_id(text)) is not None]
        self.ends = [self._prefix, self._suffix, *self._middle, *others]  # tokens that end the inserted text

    def prompt(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """Return the prompt for the text between `prefix` and `suffix`."""
        before, after = [self._prefix, *prefix], [self._suffix, *suffix]
        return [*after, *before, *self._middle] if self._suffix_first else [*before, *after, *self._middle]


def find(backend: Any) -> Infill | None:
    """Return the markers of a `tokenizers.Tokenizer`; None if it has none of FORMS."""
    token_id = backend.token_to_id
    for form in FORMS:
        if all(token_id(marker) is not None for marker in (form.prefix, form.suffix, form.middle) if marker):
            return Infill(form, token_id)
    return None
