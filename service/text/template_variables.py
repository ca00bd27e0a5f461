"""Variables of a chat template (`enable_thinking`, `reasoning_effort`, ...), from the fields of a request.

    ChatOptions --variables_of--> variables for the template, and names of fields that the template does not read

A field that the template does not read has no effect; the header `x-unknown-fields` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.service.api.tools import ChatOptions
from quire.service.chat_templates.template_probe import (
    EFFORT,
    Dialect,
    effort_variables,
    thinking_variables,
)

NEUTRAL = {"verbosity": "medium"}  # values without effect, never reported as unknown fields
KWARGS = "chat_template_kwargs"


def variables_of(
    options: ChatOptions, dialect: Dialect, reads: Callable[[str], bool], *, thinks: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return variables for the template, and names of fields that it does not read.

    `reads`: returns whether the template uses a variable.  `thinks`: the model's answers may have reasoning.
    `chat_template_kwargs` of the client takes precedence over its other fields."""
    found: dict[str, Any] = {}
    unread: list[str] = []
    if options.thinking is not None:
        found |= thinking_variables(dialect, options.thinking)
        if options.thinking and not found and not thinks:
            unread.append("thinking")
    given = {f"{KWARGS}.{name}": (name, value) for name, value in options.arguments.items()}
    hints = {name: (name, value) for name, value in options.hints.items() if name not in options.arguments}
    for field, (name, value) in [*hints.items(), *given.items()]:
        if name == EFFORT and isinstance(value, str):
            variables = effort_variables(dialect, value)
        else:
            variables = {name: value} if reads(name) else {}
        if not variables and NEUTRAL.get(field) != value:
            unread.append(field)
        found |= variables if field != name else {name: value for name, value in variables.items() if name not in found}
    return found, tuple(unread)
