"""The end of the last turn in a chat's prompt, which engines get as an anchor."""

from __future__ import annotations

from typing import Any

import pytest

from quire.service.common.refusal import Refusal
from quire.service.text.turn_boundary import TurnBoundary


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def boundary(suffix: str) -> TurnBoundary:
    def render(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + suffix * generation_prompt

    return TurnBoundary(render, encode)


def test_the_anchor_stands_where_the_generation_prompt_begins() -> None:
    turns = boundary("<assistant>")
    prompt = encode("<user>Hello<assistant>")
    assert turns.anchors(prompt) == [len("<user>Hello")]
    assert turns.anchors(encode("<user>Hello")) == []  # it continues a message
    assert turns.anchors(encode("<assistant>")) == []  # without a turn
    assert turns.anchors([]) == []


@pytest.mark.parametrize("suffix", ["", "\n"])
def test_templates_without_a_generation_prompt_have_no_anchor(suffix: str) -> None:
    def render(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return suffix + "same" if generation_prompt else "same"

    assert TurnBoundary(render, encode).anchors(encode("same")) == []


def test_a_model_without_a_chat_template_has_no_anchor() -> None:
    def render(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        raise Refusal(400, "no_chat_template", "messages: this model has no chat template")

    assert TurnBoundary(render, encode).anchors([1, 2]) == []
