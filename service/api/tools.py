"""Tools and variables for the chat template: fields of a chat request -> `ChatOptions`, or a Refusal.

    tools, tool_choice, chat_template_kwargs ... --chat_options--> ChatOptions --with the messages--> the chat template

`chat_template.py` checks later whether the model's chat template supports them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.service.common.limits import LIMITS, broken, shown
from quire.service.common.refusal import Refusal, bad_request, check
from quire.service.config import GatewayConfig

NAME = re.compile(r"[A-Za-z0-9_-]+")
# Names of variables that Quire or transformers sets, or that change how the template is rendered.
RESERVED = re.compile(
    "messages|conversations?|tools|documents|chat_template|add_generation_prompt|continue_final_message|tokenize|padding|"
    "truncation|max_length|return_tensors|return_dict|return_assistant_tokens_mask|tokenizer_kwargs|"
    "sanitize_control_tokens|raise_exception|strftime_now|self|_.*"
)
CHOICES = ("none", "auto", "required")
HINTS = ("reasoning_effort", "verbosity")  # request fields that become variables of the chat template
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")  # types in JSON schemas


class ToolRules(NamedTuple):
    """Limits on tools in one API format.  The defaults are those of OpenAI's chat."""

    name: str = "tool name"  # key in LIMITS for the length of a name
    bounded: bool = True  # whether the limit `tools` applies to the number of tools
    paths: tuple[str, ...] = ()  # path of each tool in the body; (): `tools[0]`, `tools[1]` ...


OPENAI = ToolRules()


class ChatOptions(msgspec.Struct, frozen=True):
    """Input of the chat template besides the messages, and options for tool calls and reasoning."""

    tools: list[dict[str, Any]] = []  # tools that the answer may call
    demanded: list[str] = []  # names of tools, of which the answer must call one
    strict: str = ""  # path of the first `strict: true`, which enforces the schema of arguments; "": none
    paths: tuple[str, ...] = ()  # path of each tool in the body; (): `tools[0]`, `tools[1]` ...
    parallel: bool = True  # allow more than one call in an answer
    documents: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}  # `chat_template_kwargs`
    hints: dict[str, str] = {}  # `reasoning_effort` and `verbosity`
    generation_prompt: bool = True
    continue_final: bool = False
    thinking_budget: int | None = None  # maximum tokens of reasoning; None: unbounded
    thinking_target: bool = False  # ignore a budget that this model cannot have, instead of refusing the request
    thinking: bool | None = None  # switch reasoning on or off; None: the template's default

    def path(self, at: int) -> str:
        """Return the path of a tool in the body."""
        return self.paths[at] if self.paths else f"tools[{at}]"


class Asked(Protocol):
    """The fields of a chat's body that `chat_options` reads."""

    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool | None
    documents: Any
    chat_template_kwargs: Any
    reasoning_effort: str | None
    verbosity: str | None
    add_generation_prompt: bool | None
    thinking_token_budget: int | None
    continue_final_message: bool | None


def chat_options(
    asked: Asked, messages: list[dict[str, Any]], config: GatewayConfig, rules: ToolRules = OPENAI
) -> ChatOptions:
    """Return the checked options of a chat request.  Raises Refusal."""
    tools, paths = _tools(asked.tools, config, rules)
    demanded = _choice(asked.tool_choice, tools)
    shown_tools = [] if asked.tool_choice == "none" else tools
    strict = [
        f"{path}.function.strict"
        for path, tool in zip(paths, shown_tools, strict=False)
        if tool["function"].get("strict")
    ]
    continued = bool(asked.continue_final_message)
    if continued and asked.add_generation_prompt:
        message = "continue_final_message: only without add_generation_prompt"
        raise bad_request("invalid_value", message, "continue_final_message", False, True)
    final = messages[-1]
    if continued and not (final["role"] == "assistant" and final["content"] and not final.get("tool_calls")):
        message = (
            "continue_final_message: the last message must be the assistant's, with content and without tool calls"
        )
        raise bad_request("invalid_value", message, "continue_final_message")
    if (budget := asked.thinking_token_budget) is not None:
        check("thinking_token_budget", budget, config)
    return ChatOptions(
        tools=shown_tools,
        demanded=demanded,
        strict=strict[0] if strict else "",
        paths=rules.paths,
        # With a named function, only one call is allowed, as at OpenAI: a weak model would repeat it without end.
        parallel=asked.parallel_tool_calls is not False and not isinstance(asked.tool_choice, dict),
        documents=_documents(asked.documents, config),
        arguments=_arguments(asked, config),
        hints={name: value for name in HINTS if (value := getattr(asked, name)) is not None},
        generation_prompt=not continued and asked.add_generation_prompt is not False,
        continue_final=continued,
        thinking_budget=budget,
    )


def _wrong_type(field: str, wanted: str, given: Any) -> Refusal:
    kind = type(given).__name__
    return bad_request("invalid_type", f"{field}: must be {wanted}, got {kind}", field, wanted, kind)


def _tools(given: Any, config: GatewayConfig, rules: ToolRules) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the checked tools, and the path of each in the body.  Raises Refusal."""
    if given is None:
        return [], []
    if not isinstance(given, list):
        raise _wrong_type("tools", "a list", given)
    if rules.bounded:
        check("tools", len(given), config)
    check("tools bytes", len(msgspec.json.encode(given)), config)
    paths = list(rules.paths) or [f"tools[{at}]" for at in range(len(given))]
    names: dict[str, str] = {}
    for path, tool in zip(paths, given, strict=True):
        name = _tool_name(path, tool, config, rules)
        if name in names:
            message = f"{path}.function.name: '{name}' is the name of {names[name]}, too"
            raise bad_request("invalid_value", message, f"{path}.function.name", "a name of its own", name)
        names[name] = path
    return [_with_object(tool) for tool in given], paths


def _tool_name(field: str, tool: Any, config: GatewayConfig, rules: ToolRules) -> str:
    """Check all of a tool's fields, and return its name.  Raises Refusal."""
    if not isinstance(tool, dict):
        raise _wrong_type(field, "an object", tool)
    if (tool.get("type") or "function") != "function":
        given = shown(str(tool["type"]))
        raise bad_request(
            "unsupported", f"{field}.type: only 'function' is served, got '{given}'", f"{field}.type", "function", given
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong_type(f"{field}.function", "an object", function)
    name = function.get("name")
    if not isinstance(name, str):
        raise _wrong_type(f"{field}.function.name", "a string", name)
    check_length(f"{field}.function.name", name, rules.name, config)
    if not NAME.fullmatch(name):
        limit, given = "letters, digits, _ and -", shown(name)
        message = f"{field}.function.name: must be {limit}, got '{given}'"
        raise bad_request("invalid_value", message, f"{field}.function.name", limit, given)
    of = f"of tool '{name}'"  # in errors, since an index alone is hard to find among many tools
    if not isinstance(function.get("description", ""), str | None):
        raise _wrong_type(f"{field}.function.description", f"a string ({of})", function["description"])
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong_type(f"{field}.function.parameters", f"an object ({of})", parameters)
    kind = (parameters or {}).get("type")
    if not _takes_objects(kind):
        given = shown(str(kind))
        message = f"{field}.function.parameters.type: must be 'object', got '{given}' ({of})"
        raise bad_request("invalid_value", message, f"{field}.function.parameters.type", "object", given)
    return name


def check_length(field: str, name: str, row: str, config: GatewayConfig) -> None:
    """Raise Refusal if a tool's name is longer than the limit `row`.  The message contains the name."""
    if broken(row, len(name), config) is not None:
        limit = LIMITS[row].text(config)
        message = f"{field}: '{shown(name)}' has {len(name)} characters, must be {limit}"
        raise bad_request("invalid_value", message, field, limit, len(name))


def _takes_objects(kind: Any) -> bool:
    """Return whether the `type` of a schema allows objects.  Some clients write types in capitals."""
    if isinstance(kind, list):
        return any(isinstance(one, str) and one.lower() == "object" for one in kind)
    return kind is None or (isinstance(kind, str) and kind.lower() == "object")


def _with_object(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with `"type": "object"` in its parameters, instead of a list of types, null or capitals."""
    if tool.get("type", "function") is None:
        tool = {**tool, "type": "function"}
    parameters = tool["function"].get("parameters")
    kind = (parameters or {}).get("type", "object")
    if kind == "object":
        return tool
    if isinstance(kind, str):
        parameters = _small(parameters)
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "type": "object"}}}


def _small(schema: Any) -> Any:
    """Return a schema with its types in lower case, as JSON Schema requires."""
    if isinstance(schema, list):
        return [_small(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    small = {name: _small(value) for name, value in schema.items()}
    if isinstance(kind := small.get("type"), str) and kind.lower() in TYPES:
        small["type"] = kind.lower()
    return small


def _choice(given: Any, tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of tools of which one must be called; []: the model decides, or no tool may be called."""
    names = [tool["function"]["name"] for tool in tools]
    if given is None or given in ("none", "auto"):
        return []
    field = "tool_choice"
    if isinstance(given, str):
        if given not in CHOICES:
            limit, value = ", ".join([*CHOICES, "or a function"]), shown(given)
            raise bad_request("invalid_value", f"{field}: must be one of {limit}, got '{value}'", field, limit, value)
        if not names:
            raise bad_request("invalid_value", f"{field}: 'required' needs tools", field, "tools", given)
        return names
    if not isinstance(given, dict):
        raise _wrong_type(field, "a string or an object", given)
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not isinstance(name, str):
        message = f"{field}: must be {{'type': 'function', 'function': {{'name': ...}}}}"
        raise bad_request("invalid_value", message, field, "the name of a function")
    if name not in names:
        value = shown(name)
        raise bad_request("invalid_value", f"{field}: '{value}' is not in tools", field, "a name of tools", value)
    return [name]


def _documents(given: Any, config: GatewayConfig) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise _wrong_type("documents", "a list", given)
    check("documents", len(given), config)
    for at, document in enumerate(given):
        if not isinstance(document, dict):
            raise _wrong_type(f"documents[{at}]", "an object", document)
    return given


def _arguments(asked: Asked, config: GatewayConfig) -> dict[str, Any]:
    """Return the variables of `chat_template_kwargs`.  Raises Refusal."""
    given = asked.chat_template_kwargs
    if given is not None and not isinstance(given, dict):
        raise _wrong_type("chat_template_kwargs", "an object", given)
    found = dict(given or {})
    check("template arguments", len(msgspec.json.encode(found)), config)
    for name in found:
        field = f"chat_template_kwargs.{shown(name)}"
        if RESERVED.fullmatch(name) or not name.isidentifier():
            limit = "a variable of the chat template that no field of the request sets"
            raise bad_request("invalid_value", f"{field}: must be {limit}", field, limit, shown(name))
    return found
