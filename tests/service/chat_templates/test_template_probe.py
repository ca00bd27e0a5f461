"""What the gateway learns of a chat template when it loads a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.service.api.history import roles_in
from quire.service.chat_templates.template_probe import Dialect, effort_variables, names_in, probe, thinking_variables

MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ANSWER = MESSAGES + "{% if add_generation_prompt %}<|im_start|>assistant\n"
THINKING = {
    "switch": ANSWER
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
    "switch, off by default": ANSWER + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    "field of messages": ANSWER + "{{ messages[-1].thinking or '' }}{% endif %}",
    "effort": "Reasoning: {{ reasoning_effort or 'medium' }}\n" + ANSWER + "{% endif %}",
    "effort with none": "{% if reasoning_effort != 'none' %}Think {{ reasoning_effort }}.{% endif %}"
    + ANSWER
    + "{% endif %}",
    "both": "Reasoning: {{ reasoning_effort or 'medium' }}\n"
    + ANSWER
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
    "only named": "{# enable_thinking, thinking, reasoning_effort #}" + ANSWER + "{% endif %}",
    "known values": "{% set effort = reasoning_effort or 'xhigh' %}"
    "{% if effort not in ('xhigh', 'low') %}{{ raise_exception('effort') }}{% endif %}{{ effort }}"
    + ANSWER
    + "{% endif %}",
}


def render(template: str, messages: list[dict[str, Any]], tools: Any = None, **more: Any) -> str:
    """Render as transformers' `apply_chat_template` does."""
    [text], _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=template, **more)
    return str(text)


def probed(template: str) -> Dialect:
    return probe(partial(render, template), template)


@pytest.mark.parametrize(
    ("name", "none", "high", "off"),
    [
        ("switch", {"enable_thinking": False}, {}, {"enable_thinking": False}),
        ("switch, off by default", {"thinking": False}, {}, {"thinking": False}),
        ("field of messages", {}, {}, {}),
        ("effort", {}, {"reasoning_effort": "high"}, {}),
        ("effort with none", {"reasoning_effort": "none"}, {"reasoning_effort": "high"}, {}),
        ("both", {"enable_thinking": False}, {"reasoning_effort": "high"}, {"enable_thinking": False}),
        ("only named", {}, {}, {}),
        ("known values", {}, {"reasoning_effort": "high"}, {}),
    ],
)
def test_what_switches_thinking_is_found_by_its_effect(
    name: str, none: dict[str, Any], high: dict[str, Any], off: dict[str, Any]
) -> None:
    dialect = probed(THINKING[name])
    assert effort_variables(dialect, "none") == none
    assert effort_variables(dialect, "high") == high
    assert thinking_variables(dialect, False) == off


@pytest.mark.parametrize(
    ("template", "roles"),
    [("'tool' \"ipython\"'critic''judge'", {"tool", "ipython", "critic", "judge"}), ("'1x' 'a b' x'y", set())],
)
def test_roles_are_what_a_template_has_in_quotes(template: str, roles: set[str]) -> None:
    assert roles_in(template) == roles
    assert roles <= names_in(template)
