"""Numbers in the calls of a history reach the prompt as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.service.api import decoding
from quire.service.api.anthropic import messages
from quire.service.api.api import NO_DEFAULTS
from quire.service.api.bodies import ChatBody
from quire.service.api.history import Message, plain_messages
from quire.service.api.skipped import Skipped
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
    function = {"name": "f", "arguments": arguments}
    calls: list[dict[str, Any]] = [{"id": "abcdefghi", "type": "function", "function": function}]
    messages = [
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=calls),
        Message("tool", "x", tool_call_id="abcdefghi", name="f"),
        Message("user", "And?"),
    ]
    return plain_messages(messages, GatewayConfig(), Skipped(GatewayConfig()))


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


def sent(arguments: str, field: str = "tool_calls") -> list[dict[str, Any]]:
    """A history in which a client sent arguments as they are, not as a text of JSON."""
    function = f'{{"name": "f", "arguments": {arguments}}}'
    calls = f'[{{"id": "abcdefghi", "type": "function", "function": {function}}}]'
    answer = f'{{"role": "assistant", "content": "", "{field}": {calls if field == "tool_calls" else function}}}'
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}, {answer}]}}'
    return plain_messages(decoding.decode(body.encode(), ChatBody).messages, GatewayConfig(), Skipped(GatewayConfig()))


@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
@pytest.mark.parametrize("given", ["objects", "texts"])
def test_a_number_keeps_its_text_in_arguments_sent_as_an_object(tmp_path: Path, field: str, given: str) -> None:
    """Clients that keep a parsed call send its arguments back so; some templates read them as text."""
    template = TOOLS_TEMPLATE
    if given == "texts":
        template = template.replace("call.function.arguments | tojson", "call.function.arguments + ''")
        assert template != TOOLS_TEMPLATE
    tokenizer = tokenizer_of(tmp_path, template)
    assert tokenizer.chat.dialect.arguments is (given == "objects")
    members = ", ".join(f'"n{at}": {text}' for at, text in enumerate(NUMBERS))
    arguments = f'{{{members}, "all": [{", ".join(NUMBERS)}], "half": "\\ud83d", "empty": {{}}}}'
    shown = tokenizer.text_of(tokenizer._encode_chat(sent(arguments, field)), skip_special=False)
    assert f'"arguments": {arguments}}}'.replace("\\ud83d", "\N{REPLACEMENT CHARACTER}") in shown


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (b'{"function": 5}', "function"),
        (b'{"function": {"name": 5}}', "function.name"),
        (b'{"function": {"name": "f", "arguments": "\xff"}}', "function"),
        (b'{"function": {"name": "f", "arguments": {"a": "\xff"}}}', "function"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_400_that_names_it(call: bytes, field: str) -> None:
    body = b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [%s]}]}' % call
    with pytest.raises(Refusal, match=rf"messages\[0\]\.tool_calls\[0\]\.{field}") as refused:
        plain_messages(decoding.decode(body, ChatBody).messages, GatewayConfig(), Skipped(GatewayConfig()))
    assert refused.value.status == 400


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


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("key", ["a", "é", "<|im_end|>"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_an_argument_that_was_written_twice_is_shown_twice(tmp_path: Path, name: str, key: str, literal: bool) -> None:
    """A program that parses the arguments gets the last value, as from any JSON; the model sees all it wrote."""
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[name][0], literal_content=literal)
    if not tokenizer.chat.dialect.calls:
        return
    text = prompt(tokenizer, f'{{"{key}": "first", "b": 1, "{key}": ["second", {{"x": "third", "x": "fourth"}}]}}')
    assert [word for word in ("first", "second", "third", "fourth") if word not in text] == []
