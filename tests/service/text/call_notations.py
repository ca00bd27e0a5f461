"""How each family of `response_templates.json` writes calls: chat templates that show it, written for the tests.

`NOTATIONS` has what the template writes for the calls `m.tool_calls` of an answer; `c` is a call's function."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
from llguidance import LLMatcher

from quire.service.chat_templates.template_probe import probe
from quire.service.grammar.grammar import BOUNDS, byte_tokenizer
from quire.service.output.regions import Reading, ResponseTemplate, known
from quire.service.text.call_form import CallForm, form_of

ANY = "{{ v if v is string else v | tojson }}"
ITEMS = "{% for k, v in c.arguments.items() %}"
END = "<|the end|>"


def _each(call: str, between: str = "") -> str:
    parted = f"{{% if not loop.first %}}{between}{{% endif %}}" if between else ""
    return f"{{% for one in m.tool_calls %}}{{% set c = one.function %}}{parted}{call}{{% endfor %}}"


HERMES = '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
FUNCTION = (
    "<tool_call>\n<function={{ c.name }}>\n"
    + ITEMS
    + "<parameter={{ k }}>\n"
    + ANY
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
LIST = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
NS = "]<]minimax[>["  # before each tag of MiniMax M3
GEMMA_VALUE = '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'

NOTATIONS: dict[str, str] = {
    "hermes": _each(HERMES, "\n"),
    "hermes-thinking": "<think>\n\n</think>\n\n" + _each(HERMES, "\n"),
    "function-tags": "<think>\n\n</think>\n\n" + _each(FUNCTION, "\n"),
    "llama3": "{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "mistral-list": "[TOOL_CALLS] [" + _each(LIST[:-1] + ', "id": "{{ one.id }}"}', ", ") + "]",
    "mistral": _each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "harmony": "{% set c = m.tool_calls[0].function %} to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>",
    "gemma4": _each(
        "<|tool_call>call:{{ c.name }}{{ '{' }}"
        + "{% for k, v in c.arguments | dictsort %}{{ k }}:"
        + GEMMA_VALUE
        + "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "glm": _each(
        "\n<tool_call>{{ c.name }}"
        + ITEMS
        + "\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + ANY
        + "</arg_value>{% endfor %}\n</tool_call>"
    ),
    "granite3": "<|tool_call|>[" + _each(LIST, ", ") + "]",
    "granite4": _each(HERMES, "\n"),
    "phi4-mini": "<|tool_call|>[" + _each(LIST, ", ") + "]<|/tool_call|>",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + _each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        "\n",
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>"
    + _each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "deepseek-dsml": "<｜DSML｜function_calls>\n"
    + _each(
        '<｜DSML｜invoke name="{{ c.name }}">\n'
        + ITEMS
        + "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        + ANY
        + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
    )
    + "</｜DSML｜function_calls>",
    "kimi-k2": "<|tool_calls_section_begin|>"
    + _each("<|tool_call_begin|>{{ one.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "minimax-m2": "<minimax:tool_call>\n"
    + _each(
        '<invoke name="{{ c.name }}">\n'
        + ITEMS
        + '<parameter name="{{ k }}">'
        + ANY
        + "</parameter>\n{% endfor %}</invoke>\n"
    )
    + "</minimax:tool_call>",
    "seed-oss": _each(
        "<seed:tool_call>\n<function={{ c.name }}>\n"
        + ITEMS
        + "<parameter={{ k }}>"
        + ANY
        + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
        "\n",
    ),
    "nemotron-v2": "<TOOLCALL>[" + _each(LIST, ", ") + "]</TOOLCALL>",
    "cohere": "<|START_ACTION|>["
    + _each(
        '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
        '"parameters": {{ c.arguments | tojson }}}',
        ",",
    )
    + "\n]<|END_ACTION|>",
    "lfm2": "",  # the published chat templates show no calls
    "apertus": "<|tools_prefix|>[" + _each('{"{{ c.name }}": {{ c.arguments | tojson }}}', ", ") + "]<|tools_suffix|>",
    "hunyuan": "<tool_calls>[" + _each(LIST, ", ") + "]</tool_calls>",
    "hunyuan-v3": "<tool_calls>\n"
    + _each(
        "<tool_call>{{ c.name }}<tool_sep>\n"
        + ITEMS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + ANY
        + "</arg_value>\n{% endfor %}</tool_call>\n"
    )
    + "</tool_calls>",
    "minicpm5": _each(
        '<function name="{{ c.name }}">' + ITEMS + '<param name="{{ k }}">' + ANY + "</param>{% endfor %}</function>",
        "\n",
    ),
    "kimi-k3": "<|open|>tools<|sep|>"
    + _each(
        '<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>'
        + ITEMS
        + '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>'
        + ANY
        + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
    )
    + "<|close|>tools<|sep|>",
    "minimax-m1": "<tool_calls>\n" + _each(LIST + "\n") + "</tool_calls>",
    "minimax-m3": f"{NS}<tool_call>\n"
    + _each(
        f'{NS}<invoke name="{{{{ c.name }}}}">'
        + ITEMS
        + f"{NS}<{{{{ k }}}}>"
        + ANY
        + f"{NS}</{{{{ k }}}}>{{% endfor %}}{NS}</invoke>\n"
    )
    + f"{NS}</tool_call>",
    "gigachat": "{% set c = m.tool_calls[0].function %}<|function_call|>" + LIST,
    "functionary-v3.1": _each("<function={{ c.name }}>{{ c.arguments | tojson }}</function>"),
    "functionary-v3.2": _each(">>>{{ c.name }}\n{{ c.arguments | tojson }}"),
    "firefunction": " functools[" + _each(LIST, ", ") + "]",
    "command-r-plus": "Action:\n```json\n["
    + _each('\n    {"tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', ",")
    + "\n]\n```",
    "apriel": "\n<tool_calls>[" + _each(LIST, ", ") + "]</tool_calls>",
    "solar-open": "<|tool_calls|>"
    + _each(
        "<|tool_call:begin|>{{ one.id }}<|tool_call:name|>{{ c.name }}<|tool_call:args|>{{ c.arguments | tojson }}"
        "<|tool_call:end|>"
    )
    + "<|calls|>",
    # Without `to=NAME` before the call: calls that say their name twice have no form.
    "muse": "<atem:function_calls>\n"
    + _each(
        '<atem:invoke name="{{ c.name }}">\n'
        + ITEMS
        + '<atem:parameter name="{{ k }}">'
        + ANY
        + "</atem:parameter>\n{% endfor %}</atem:invoke>\n"
    )
    + "</atem:function_calls>",
}


def renderer(template: str) -> Callable[..., str]:
    """Return what renders a chat template with messages and tools."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = json.dumps
    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)
    return lambda messages, tools=None: compiled.render(messages=messages, tools=tools)


def written(responses: ResponseTemplate, text: str, reading: Reading) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning and calls of an answer, with the text of their arguments."""
    reader = responses.reader(reading)
    reader.push(text)
    reader.finish(cut=False)
    content, reasoning, deltas = reader.take()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append([delta.name, ""])
        calls[-1][1] += delta.arguments
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def read(responses: ResponseTemplate, text: str, reading: Reading) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls of an answer."""
    content, reasoning, calls = written(responses, text, reading)
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def accepts(grammar: str, text: str) -> bool:
    """Return whether a text is complete in a grammar."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=BOUNDS)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@cache
def notation(name: str) -> tuple[CallForm | None, ResponseTemplate]:
    """Return how a family writes calls, as its chat template shows it, and what reads them."""
    described = known().response_templates[name]
    anchor = described.get("start_anchor", "<｜hy_Assistant｜>")
    anchor = anchor if isinstance(anchor, str) else anchor[0]
    calls = f"{{% if m.tool_calls %}}{NOTATIONS[name]}{{% endif %}}"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{anchor}{{{{ m.content }}}}{calls}{END}{{% else %}}<|user|>{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    )
    responses = ResponseTemplate(described, name)
    render = renderer(template)
    return form_of(render, probe(render, template), template, responses, frozenset({END})), responses
