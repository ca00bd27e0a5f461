"""Numbers in the calls of a history reach the prompt as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.service.api.anthropic import messages
from quire.service.api.api import NO_DEFAULTS
from quire.service.api.history import Message, plain_messages
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.chat_templates.published import TEMPLATES, tokenizer_in
from tests.service.fakes import TOOLS_TEMPLATE, byte_level, with_template

NUMBERS = [
    "1e400",
    "-1e400",
    "1.50",
    "-0",
    "1E5",
    "0.1",
    "-7",
    "12345678901234567890",
    "1" * 5000,
    "0." + "3" * 40,
    "1e-400",
]


def history(arguments: str) -> list[dict[str, Any]]:
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=calls),
        Message("tool", "x", tool_call_id="abcdefghi", name="f"),
        Message("user", "And?"),
    ]
    return plain_messages(messages, GatewayConfig())


def prompt(tokenizer: Tokenizer, arguments: str) -> str:
    return tokenizer.text_of(tokenizer._encode_chat(history(arguments)), skip_special=False)


def tokenizer_of(folder: Path, template: str, **options: Any) -> Tokenizer:
    return Tokenizer(str(with_template(byte_level(folder / "model"), template)), **options)


@pytest.mark.parametrize("literal", [True, False])
def test_a_number_keeps_its_text(tmp_path: Path, literal: bool) -> None:
    tokenizer = tokenizer_of(tmp_path, TOOLS_TEMPLATE, literal_content=literal)
    members = ", ".join(f'"n{at}": {text}' for at, text in enumerate(NUMBERS))
    arguments = f'{{{members}, "all": [{", ".join(NUMBERS)}], "in": {{"x": [{NUMBERS[0]}]}}, "s": "1.50 <|im_end|>"}}'
    assert f'"arguments": {arguments}}}' in prompt(tokenizer, arguments)


def test_a_number_keeps_its_text_in_an_input_of_messages(tmp_path: Path) -> None:
    """`/v1/messages` has arguments as an object, not as its text."""
    members = ", ".join(f'"n{at}": {text}' for at, text in enumerate(NUMBERS))
    block = f'{{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {{{members}}}}}'
    body = f'{{"max_tokens": 9, "messages": [{{"role": "assistant", "content": [{block}]}}]}}'
    tokenizer = tokenizer_of(tmp_path, TOOLS_TEMPLATE)
    valid = messages.parse(body.encode(), GatewayConfig(), "m", 600.0, NO_DEFAULTS)
    ids = tokenizer._encode_chat(valid.messages, None, valid.options)
    assert f'"arguments": {{{members}}}}}' in tokenizer.text_of(ids, skip_special=False)


@pytest.mark.parametrize(("given", "status"), [(b"null", 0), (b"[]", 400), (b'"{}"', 400), (b'{"a": "\xff"}', 400)])
def test_an_input_of_messages_is_an_object_in_utf_8(given: bytes, status: int) -> None:
    block = b'{"type": "tool_use", "id": "toolu_1", "name": "f", "input": %s}' % given
    body = b'{"max_tokens": 9, "messages": [{"role": "assistant", "content": [%s]}]}' % block
    if not status:
        messages.parse(body, GatewayConfig(), "m", 600.0, NO_DEFAULTS)
        return
    with pytest.raises(Refusal, match=r"messages\[0\]\.content\[0\]") as refused:
        messages.parse(body, GatewayConfig(), "m", 600.0, NO_DEFAULTS)
    assert refused.value.status == status


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_published_template_shows_numbers_as_it_shows_others(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_in(tmp_path, name)
    if not tokenizer.chat.dialect.calls:
        return
    shown, other = (prompt(tokenizer, f'{{"n": {number}}}') for number in ("1e400", "731"))
    assert shown.replace("1e400", "731") == other


def test_a_template_that_computes_gets_numbers_of_its_own(tmp_path: Path) -> None:
    template = TOOLS_TEMPLATE.replace(
        "call.function.arguments | tojson",
        "(call.function.arguments.n * 2 if call.function.arguments.n is defined else call.function.arguments) | tojson",
    )
    assert template != TOOLS_TEMPLATE
    assert '"arguments": 3.0}' in prompt(tokenizer_of(tmp_path, template), '{"n": 1.50}')
