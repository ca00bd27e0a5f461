"""The position in a chat's prompt at which the last turn ends and the generation prompt begins.

    <|im_start|>user Hi<|im_end|>   <|im_start|>assistant
    '------- turns -------------'   '- generation prompt '
                                 ^ the next request of this chat shares the prompt up to here, if its template strips
                                   the reasoning of earlier turns

Engines of models with recurrent layers keep a checkpoint of their state at this position (`Generate.anchors`).  The
generation prompt is found once, from two renderings of a short chat.  A prompt that does not end with the generation
prompt has no anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from quire.service.common.refusal import Refusal

CHAT = [{"role": "user", "content": "Hi"}]
Render = Callable[[list[dict[str, Any]], bool], str]  # (messages, whether to add the generation prompt) -> text


class TurnBoundary:
    """Finds the end of the last turn in encoded prompts of one chat template."""

    def __init__(self, render: Render, encode: Callable[[str], Sequence[int]]) -> None:
        """`render`: renders messages, with or without generation prompt; may raise Refusal."""
        self._render, self._encode = render, encode

    @cached_property
    def generation_prompt(self) -> list[int]:
        """Token ids that the template adds after the last turn; [] if it adds none, or they cannot be found."""
        try:
            plain, full = self._render(CHAT, False), self._render(CHAT, True)
        except Refusal:
            return []
        return list(self._encode(full[len(plain) :])) if len(full) > len(plain) and full.startswith(plain) else []

    def anchors(self, ids: list[int]) -> list[int]:
        """Return [position of the boundary] if the prompt ends with the generation prompt, else []."""
        suffix = self.generation_prompt
        at = len(ids) - len(suffix)
        return [at] if suffix and at > 0 and ids[at:] == suffix else []
