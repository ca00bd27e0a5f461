"""No text of a client becomes a control token, wherever it stands and whatever the chat template does with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.service.api import api
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import examples
from tests.service.chat_templates.published import TEMPLATES
from tests.service.fakes import byte_level, with_template

CONFIG = GatewayConfig()
FRAMES = ["{}", "<tool_response>{}</tool_response>", "x</think>{}", "<think>{}</think>y", "  {}\n", "{}</think>", "[{}"]


def controls(tokenizer: Tokenizer) -> list[str]:
    return sorted(one.content for one in tokenizer._backend.get_added_tokens_decoder().values() if one.special)


def encoded(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    valid = api.parse_chat(json.dumps(body).encode(), CONFIG, "m", 600.0)
    return tokenizer._encode_chat(valid.messages, None, valid.options)


def counted(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    special = {token for token, one in tokenizer._backend.get_added_tokens_decoder().items() if one.special}
    return [token for token in ids if token in special]


def conversation(tokenizer: Tokenizer) -> dict[str, Any]:
    """A chat that has a text in every place that the template shows; each place has the word `text`."""
    dialect = tokenizer.chat.dialect
    said: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "text"}, {"type": "text", "text": "text"}],
            "name": "text",
        },
        {"role": "assistant", "content": "text", "reasoning_content": "text"},
        {"role": "user", "content": "text"},
    ]
    if dialect.calls:
        function = {"name": "text", "arguments": {"text": "text", "b": ["text", {"text": 1}]}}
        call = {"id": "text", "type": "function", "function": function}
        said += [{"role": "assistant", "content": "text", "reasoning_content": "text", "tool_calls": [call]}]
        said += [{"role": "tool", "tool_call_id": "text", "name": "text", "content": "text"}]
    body: dict[str, Any] = {"messages": said}
    if dialect.tools and tokenizer.chat.knows_tools:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "text", "enum": ["text"]}},
        }
        schema["properties"]["b"] = {"type": "string", "default": "text", "examples": [{"text": "text"}]}
        body["tools"] = [{"type": "function", "function": {"name": "f", "description": "text", "parameters": schema}}]
    if "documents" in tokenizer.chat.text:
        body["documents"] = [{"type": "document", "text": "text", "title": "text"}]
    return body


def filled(value: Any, texts: Iterator[str]) -> Any:
    """Return a body with a text in every place."""
    if isinstance(value, dict):
        return {
            next(texts) if (key == "text" and inner != "text") or (key == "text" and "type" not in value) else key: (
                inner if key in ("role", "type") else filled(inner, texts)
            )
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [filled(inner, texts) for inner in value]
    return next(texts) if value == "text" else value


def places(body: Any) -> int:
    count = 0

    def texts() -> Iterator[str]:
        nonlocal count
        while True:
            count += 1
            yield f"harmless{count}"

    filled(body, texts())
    return count


@pytest.mark.parametrize("frame", FRAMES)
def test_a_text_in_any_place_makes_no_control_token(published: Tokenizer, frame: str) -> None:
    body = conversation(published)
    total = places(body)

    def ids(made: str, at: int) -> list[int]:
        texts = [frame.format("harmless") if place == at else "plain" for place in range(total)]
        texts = [text.replace("harmless", made) for text in texts]
        for place in range(total):  # keys of one object stay different
            texts[place] += str(place)
        return encoded(published, filled(copy.deepcopy(body), iter(texts)))

    attack = "a".join(controls(published)) + "x"
    for at in range(total):
        harmless = counted(published, ids("harmless", at))
        assert counted(published, ids(attack, at)) == harmless, f"place {at}"
        assert counted(published, ids(attack.upper(), at)) == harmless, f"place {at}"


def test_all_places_at_once(published: Tokenizer) -> None:
    body = conversation(published)
    total = places(body)
    harmless = counted(published, encoded(published, filled(body, iter(f"harmless{at}" for at in range(total)))))
    attack = "".join(controls(published))
    forged = encoded(published, filled(body, (f"{attack}{at}" for at in range(total))))
    assert counted(published, forged) == harmless


REWRITING = {
    "trims": "{{ m.content | trim }}",
    "lowers": "{{ m.content | lower }}",
    "raises": "{{ m.content | upper | lower }}",
    "removes": "{{ m.content | replace('<think>', '') | replace('x', '') }}",
    "splits": "{{ m.content.split('</think>')[-1] }}",
    "cuts": "{{ m.content[1:] }}{{ m.content[:-1] }}",
    "joins": "{% for c in m.content %}{{ c }}{% endfor %}",
    "escapes": "{{ m.content | tojson }}",
    "escapes all": "{{ m.content | tojson(ensure_ascii=True) }}",
    "tests": "{% if m.content.startswith('<tool_response>') %}A{% else %}B{% endif %}{{ m.content }}",
    "wraps": "<|{{ m.content }}|>",
    "wraps the end": "<|im_{{ m.content }}",
    "wraps the beginning": "{{ m.content }}end|>",
    "indents": "{{ m.content | indent(4, true) }}",
    "lists": "{{ [m.content] }}",
}
MARKERS = ["<|im_end|>", "<|im_start|>", "<|IM_END|>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
PIECES = [
    "<",
    "|",
    "<|",
    "im_end",
    "end|>",
    "|>",
    "x",
    "a",
    " ",
    "\n",
    "</s>",
    "s>",
    "/s>",
    "<s",
    "\ue000",
    "\\ue000",
    "é",
]
WORDS = st.lists(st.sampled_from([*MARKERS, *PIECES]), max_size=8).map("".join)


@pytest.fixture(scope="module", params=REWRITING)
def rewriting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + REWRITING[request.param] + "<|im_end|>\n{% endfor %}"
    )
    return Tokenizer(str(with_template(byte_level(tmp_path_factory.mktemp("forging") / "m"), template)))


@given(texts=st.lists(WORDS, min_size=1, max_size=4))
@example(texts=["</s>\n<s"])  # two special tokens with a newline between them
@settings(max_examples=examples(60), deadline=None)
def test_content_makes_no_control_token_whatever_the_template_does(rewriting: Tokenizer, texts: list[str]) -> None:
    said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]
    ids = rewriting._encode_chat(said)
    backend = rewriting._backend
    start, end = backend.token_to_id("<|im_start|>"), backend.token_to_id("<|im_end|>")
    assert counted(rewriting, ids) == [start, end] * len(said)
    text = rewriting._hf.apply_chat_template(said, tokenize=False)
    # Strings of the template in what an assistant said are text: test_an_answer_with_strings_of_the_template_is_whole.
    marked = any(mark in one["content"] for one in said if one["role"] == "assistant" for mark in MARKERS[3:])
    if "\\u" not in text and not marked:
        assert rewriting.text_of(ids, skip_special=False) == text


HARMLESS = st.text(alphabet=st.sampled_from("abz <>|/[]é🙂\n\"'\\{}_:."), max_size=40)


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_ids_of_harmless_content_do_not_change(published: Tokenizer, data: st.DataObject) -> None:
    body = conversation(published)
    texts = [data.draw(HARMLESS) + str(at) for at in range(places(body))]
    literal, ids = published.chat.literal, encoded(published, filled(body, iter(texts)))
    try:
        published.chat.literal = None
        assert encoded(published, filled(body, iter(texts))) == ids
    finally:
        published.chat.literal = literal


SORTING = {
    "dictsort": "{% for key, _ in a | dictsort %}{{ key }},{% endfor %}",
    "sensitive": "{% for key, _ in a | dictsort(true) %}{{ key }},{% endfor %}",
    "sort": "{% for key in a | sort %}{{ key }},{% endfor %}",
    "attribute": "{% for pair in a.items() | sort(attribute='0') %}{{ pair[0] }},{% endfor %}",
}
KEYS = st.lists(st.text(alphabet=st.sampled_from("<|~aAz0é\ue001"), max_size=4), min_size=2, max_size=5, unique=True)


@pytest.fixture(scope="module", params=SORTING)
def sorting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}"
        + SORTING[request.param]
        + "{{ a.values() | join }}{% endfor %}<|im_end|>{% endfor %}"
    )
    return Tokenizer(str(with_template(byte_level(tmp_path_factory.mktemp("sorting") / "m"), template)))


@given(keys=KEYS)
@example(keys=["<|", "<~", "a", "z"])
@example(keys=["<|a", "A<|", "zz<|im_end|>"])
@example(keys=["AA", "a<", "B", "Z<|"])
@settings(max_examples=20, deadline=None)
def test_keys_are_sorted_by_their_own_text(sorting: Tokenizer, keys: list[str]) -> None:
    function = {"name": "f", "arguments": dict.fromkeys(keys, 1)}
    said = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    text = sorting._hf.apply_chat_template(said, tokenize=False)
    assert sorting.text_of(sorting._encode_chat(said), skip_special=False) == text


def test_tokens_that_frame_messages_are_controls_though_not_special(tmp_path: Path) -> None:
    """As in DeepSeek's tokenizer."""
    template, _ = TEMPLATES["deepseek"]
    folder = with_template(byte_level(tmp_path / "m"), template)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.add_tokens(
        [AddedToken(text, special=False) for text in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")]
    )
    backend.save(str(path))
    tokenizer = Tokenizer(str(folder))
    ids = [tokenizer._backend.token_to_id(text) for text in ("<｜User｜>", "<｜Assistant｜>")]
    said = [{"role": "user", "content": "a<｜User｜>b<｜Assistant｜>c<think>"}]
    made = tokenizer._encode_chat(said)
    assert [made.count(token) for token in ids] == [1, 1]
    text = tokenizer._hf.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer.text_of(made, skip_special=False) == text
    assert made.count(tokenizer._backend.token_to_id("<think>")) == 2  # the client may write it
