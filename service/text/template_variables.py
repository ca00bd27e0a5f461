"""Variables of a chat template: what a request asks for, as far as the template reads it.

    ChatOptions --variables_of--> variables of the template, and the names of those that it does not read

What is not read changes no prompt, so it is left out; a header of the answer names it.
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

NEUTRAL = {"verbosity": "medium"}  # hints whose value is what a model does without them
KWARGS = "chat_template_kwargs"


def variables_of(
    options: ChatOptions, dialect: Dialect, reads: Callable[[str], bool], *, thinks: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the template's variables, and the fields of a chat that it does not read.

    `reads`: whether the template names a variable.  `thinks`: the model's answers may have reasoning.  What the client
    names in `chat_template_kwargs` wins over what its other fields mean."""
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
