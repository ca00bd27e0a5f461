"""The end of a chat's last turn within its prompt: where the generation prompt begins.

    <|im_start|>user Hi<|im_end|>   <|im_start|>assistant
    '------- turns -------------'   '- generation prompt '
                                 ^ later turns leave this prompt here, if their template strips reasoning

Engines of models with recurrent layers keep a checkpoint there (`Generate.anchors`).  The generation prompt is found
once, from two renderings of a short chat.  A prompt that does not end with it has no anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from quire.service.common.refusal import Refusal

CHAT = [{"role": "user", "content": "Hi"}]
Render = Callable[[list[dict[str, Any]], bool], str]  # messages, with generation prompt


class TurnBoundary:
    """Finds the boundary in encoded prompts of one chat template."""

    def __init__(self, render: Render, encode: Callable[[str], Sequence[int]]) -> None:
        """`render` may raise Refusal."""
        self._render, self._encode = render, encode

    @cached_property
    def generation_prompt(self) -> list[int]:
        """Token ids that the template puts behind the last turn; empty: it has none, or its end cannot be found."""
        try:
            plain, full = self._render(CHAT, False), self._render(CHAT, True)
        except Refusal:
            return []
        return list(self._encode(full[len(plain) :])) if len(full) > len(plain) and full.startswith(plain) else []

    def anchors(self, ids: list[int]) -> list[int]:
        """Return the position of the boundary, if the prompt has turns and then the generation prompt."""
        suffix = self.generation_prompt
        at = len(ids) - len(suffix)
        return [at] if suffix and at > 0 and ids[at:] == suffix else []
