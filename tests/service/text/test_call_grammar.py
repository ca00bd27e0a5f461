"""Tool calls that are demanded or strict: how chat templates write calls, and what their grammars allow."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.service.api.tools import ChatOptions
from quire.service.chat_templates.template_probe import probe
from quire.service.grammar.grammar import BOUNDS, Constraint, byte_tokenizer, compile_grammar
from quire.service.grammar.grammar_errors import NotServed
from quire.service.output.regions import Reading, ResponseTemplate, known
from quire.service.text.call_form import CallForm, form_of
from quire.service.text.call_grammar import Reasoning, call_rules
from tests.matrix import examples
from tests.service.text.call_notations import accepts, read, renderer

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY = {**CITY, "additionalProperties": False}
DAYS: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
}
DAYS = {**DAYS, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "forecast", "parameters": DAYS, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"weather": CITY, "forecast": DAYS, "time": {"type": "object", "maxProperties": 0}}

# Chat templates as models have them, written for these tests.  Response template, and what the form must be: head,
# middle, between, tail, marker.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{% if not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
MODELS: dict[str, tuple[str, str, tuple[str, str, str | None, str, str]]] = {
    "hermes": (
        "hermes",
        CHATML,
        (
            '<tool_call>\n{"name": "',
            '", "arguments": ',
            '}\n</tool_call>\n<tool_call>\n{"name": "',
            "}\n</tool_call>",
            "<tool_call>",
        ),
    ),
    "thinking": (
        "hermes-thinking",
        CHATML.replace("{{ m.content }}", "{% if m.tool_calls %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"),
        (
            '<tool_call>\n{"name": "',
            '", "arguments": ',
            '}\n</tool_call>\n<tool_call>\n{"name": "',
            "}\n</tool_call>",
            "<tool_call>",
        ),
    ),
    "llama": (
        "llama3",
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}<|eot_id|>{% endfor %}",
        ('{"name": "', '", "parameters": ', None, "}", '{"name":'),
    ),
    "mistral with ids": (
        "mistral-list",
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}[TOOL_CALLS] ["
        '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }},'
        ' "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% endif %}{% endfor %}',
        (
            '[TOOL_CALLS] [{"name": "',
            '", "arguments": ',
            ', "id": "quire0Aa9"}, {"name": "',
            ', "id": "quire0Aa9"}]',
            "[TOOL_CALLS]",
        ),
    ),
    "mistral": (
        "mistral",
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}",
        ("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", "[TOOL_CALLS]"),
    ),
    "harmony": (
        "harmony",
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %} to=functions."
        "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}",
        (" to=functions.", "<|channel|>commentary json<|message|>", None, "<|call|>", "to=functions."),
    ),
    "deepseek": (
        "deepseek-v3.1",
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% endif %}{% endfor %}",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>",
        ),
    ),
}
ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>"})


def form(name: str) -> tuple[CallForm | None, ResponseTemplate]:
    described, template, _ = MODELS[name]
    responses = ResponseTemplate(known().response_templates[described])
    render = renderer(template)
    return form_of(render, probe(render, template), template, responses, ENDS), responses


FORMS = {name: form(name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_chat_template_shows_how_its_model_writes_calls(name: str) -> None:
    found, _ = FORMS[name]
    assert found is not None
    assert (found.head, found.middle, found.between, found.tail, found.begin.marker) == MODELS[name][2]


def test_arguments_between_tags_have_a_form_of_their_own() -> None:
    tags = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    )
    render = renderer(tags)
    responses = ResponseTemplate(known().response_templates["function-tags"])
    found = form_of(render, probe(render, tags), tags, responses, ENDS)
    assert found is not None
    assert (found.head, found.between, found.tail) == ("<tool_call>\n<function=", "<tool_call>\n<function=", "")
    assert found.tags is not None
    assert found.tags.text == (">\n", "\n</parameter>\n")
    assert (found.tags.first, found.tags.between) == (">\n<parameter=", "<parameter=")


def test_a_form_that_the_response_template_would_not_read_is_none() -> None:
    render = renderer(CHATML.replace("<tool_call>", "<call>"))
    responses = ResponseTemplate(known().response_templates["hermes"])
    assert form_of(render, probe(render, CHATML), CHATML, responses, ENDS) is None


def rules(name: str, reasoning: Reasoning = "", answer: Constraint | None = None, **options: Any) -> str:
    """The grammar of a model's answer, with special tokens as text, checked."""
    found, _ = FORMS[name]
    assert found is not None
    made = call_rules(found, ChatOptions(tools=TOOLS, **options), {}, reasoning, answer)
    return compile_grammar(Constraint("tool_choice", "calls", made)).grammar


def drawn(grammar: str, seed: int, most: int = 600) -> str | None:
    """A random text that the grammar allows; None if it is longer than `most` bytes."""
    rng, matcher = random.Random(seed), LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=BOUNDS)
    said = bytearray()
    while len(said) < most:
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_accepting() and (not allowed or rng.random() < 0.3):
            return said.decode("utf-8", "replace")
        # Mostly ASCII, so that a free text finds its end.
        byte = rng.choice([one for one in allowed if one < 128] or allowed)
        assert matcher.consume_token(byte)
        said.append(byte)
    return None


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), one=st.booleans())
def test_whatever_a_demanded_answer_says_it_is_calls_that_fit_their_schemas(name: str, seed: int, one: bool) -> None:
    wanted = ["forecast"] if one else ["weather", "forecast", "time"]
    text = drawn(rules(name, demanded=wanted), seed)
    if text is None:
        return
    content, _, calls = read(FORMS[name][1], text, Reading("", calls=True))
    assert calls
    assert content.strip() == ""
    for called, arguments in calls:
        assert called in wanted
        jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("name", MODELS)
def test_demanded_calls_and_what_is_refused(name: str) -> None:
    found, _ = FORMS[name]
    assert found is not None
    grammar = rules(name, demanded=["weather", "forecast"])
    first, last = f'{found.head}weather{found.middle}{{"city": "Rome"}}', found.tail
    assert accepts(grammar, first + last)
    if found.between is not None:
        two = f'{first}{found.between}forecast{found.middle}{{"days": 3}}{last}'
        assert accepts(grammar, two)
        assert not accepts(rules(name, demanded=["weather", "forecast"], parallel=False), two)
    assert not accepts(grammar, "It rains.")
    assert not accepts(grammar, f"{found.head}time{found.middle}{{}}{last}")  # not demanded
    assert not accepts(grammar, f'{found.head}weather{found.middle}{{"town": "Rome"}}{last}')
    assert not accepts(grammar, f'{found.head}weather{found.middle}{{"city": "Rome", "x": 1}}{last}')
    assert accepts(grammar, (first + last).replace("quire0Aa9", "b1C2d3E4f"))


def test_reasoning_may_come_first() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    may, opened, none = (rules("thinking", kind, demanded=["weather"]) for kind in ("may", "open", ""))
    for text, allowed in (
        (f"<think>\nRome?\n</think>\n\n{call}", (True, True, False)),
        (f"Rome? <tool_call> </think>\n\n{call}", (False, True, False)),
        (call, (True, False, True)),
        (f"<think>\nRome?\n</think>\n\nSo: {call}", (False, False, False)),
    ):
        assert tuple(accepts(grammar, text) for grammar in (may, opened, none)) == allowed, text


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][2][4]])
def test_with_auto_text_stays_free_and_arguments_are_strict(name: str) -> None:
    found, _ = FORMS[name]
    assert found is not None
    grammar = rules(name)
    call = f'{found.head}weather{found.middle}{{"city": "Rome"}}{found.tail}'
    for text in ("", "It rains.\n", f"I look.\n{call}", call, f"{call}\n{call}", f"a <{call} b"):
        assert accepts(grammar, text), text
    for text in (call.replace("city", "town"), f"I look. {call.replace('weather', 'rain')}"):
        assert not accepts(grammar, text), text
    assert not accepts(rules(name, parallel=False), f"{call}\n{call}")


def test_with_a_response_format_the_answer_is_its_json_or_calls() -> None:
    grammar = rules("hermes", answer=Constraint("response_format.json_schema.schema", "json", DAYS))
    assert accepts(grammar, '{"days": 3}')
    assert accepts(grammar, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, '{"days": 30}')


def test_a_strict_schema_that_is_not_served_is_refused_by_its_path_and_another_stands_for_any_object() -> None:
    found, _ = FORMS["hermes"]
    assert found is not None
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"pattern": "b"}}}}
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": strict}}
        made = call_rules(found, ChatOptions(tools=[tool], demanded=["f"]), {}, "", None)
        constraint = Constraint("tool_choice", "calls", made)
        if strict:
            with pytest.raises(NotServed, match=r"^tools\[0\]\.function\.parameters\.properties\.a\.not"):
                compile_grammar(constraint)
        else:
            text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
            assert accepts(compile_grammar(constraint).grammar, text)


def test_special_tokens_are_named_by_their_ids() -> None:
    found, _ = FORMS["mistral with ids"]
    assert found is not None
    made = call_rules(found, ChatOptions(tools=TOOLS), {"[TOOL_CALLS]": 259}, "", None)
    assert "TEXT <[259]>" in made.grammar
    assert "<[" not in made.plain
