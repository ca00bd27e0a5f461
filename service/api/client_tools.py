"""Converts tools of all API formats to functions of a chat, and names of calls in the answer back.

    function             a function of the chat
    namespace            its functions, each named `namespace__function`; a call in the answer has both names again
    custom               a function of one string, `input`; in the answer, the input of a call is plain text again
    any other type       ignored, since only OpenAI or Anthropic can run it; 400 if `tool_choice` demands it

The names are derived from the tools that the answer repeats, so a resumed answer converts its calls in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from quire.service.api.skipped import Skipped
from quire.service.api.tools import ToolRules, check_length
from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request, wrong_type
from quire.service.common.surrogates import without_escaped_halves
from quire.service.config import GatewayConfig
from quire.service.output.json_repair import repaired

Tool = dict[str, Any]
CHAT_KINDS = ("function", "custom")  # types of a chat's tools; the field of the same name describes the tool
INPUT = "input"  # the one argument of a custom tool
JOINED = "__"  # separator of namespace and name, valid in names for chat templates and grammars
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}


class Called(NamedTuple):
    """Name and kind of a tool in the client's API format."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"


def joined(name: str, namespace: str | None) -> str:
    """Return the name by which the model sees a tool: with its namespace in front, if it has one."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(JOINED) else f"{namespace}{JOINED}{name}"


def each_tool(
    tools: list[Tool], path: str = "tools", namespace: str | None = None
) -> Iterator[tuple[str, str | None, Tool]]:
    """Yield (path, namespace, tool) of each tool, those within namespaces included.  Raises Refusal."""
    for at, tool in enumerate(tools):
        here = f"{path}[{at}]"
        if not isinstance(tool, dict):
            raise wrong_type(here, "an object")
        if tool.get("type") != "namespace" or namespace is not None:
            yield here, namespace, tool
            continue
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise wrong_type(f"{here}.tools", "a list")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise wrong_type(f"{here}.name", "a string")
        yield from each_tool(inner, f"{here}.tools", tool["name"])


def names_of(tools: list[Tool]) -> dict[str, Called]:
    """Return {name that the model sees: what the client calls it}, for custom tools and tools of a namespace."""
    found: dict[str, Called] = {}
    for _, namespace, tool in each_tool(tools):
        kind, name = tool.get("type"), tool.get("name")
        if isinstance(name, str) and (kind == "custom" or (kind == "function" and namespace)):
            found[joined(name, namespace)] = Called(name, namespace, "custom" if kind == "custom" else "function")
    return found


def functions_of(tools: list[Tool] | None, skipped: Skipped, config: GatewayConfig) -> tuple[list[Tool], ToolRules]:
    """Return the tools of /v1/responses as functions of a chat, with their rules.  Raises Refusal."""
    found: list[Tool] = []
    paths: list[str] = []
    for path, namespace, tool in each_tool(tools or []):
        kind, name = tool.get("type") or "function", tool.get("name")
        if kind not in ("function", "custom"):
            skipped.add(f"{path}.{shown(str(kind))}")
            continue
        if isinstance(name, str):
            check_length(f"{path}.name", name, "tool name", config)
        chat_name = joined(name, namespace) if isinstance(name, str) else name
        if kind == "function":
            found.append(function_tool({**tool, "name": chat_name}, tool.get("parameters")))
        else:
            found.append(_custom_tool(path, {**tool, "name": chat_name}, skipped))
        paths.append(path)
    return found, ToolRules(name="joined tool name", paths=tuple(paths))


def function_tool(tool: Tool, parameters: Any) -> Tool:
    """Return a tool in the format of a chat.  Other fields of `tool` have no effect."""
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    function["strict"] = tool.get("strict")
    kept = {key: value for key, value in function.items() if value is not None or key == "name"}
    return {"type": "function", "function": kept}


def _custom_tool(path: str, tool: Tool, skipped: Skipped) -> Tool:
    """Return a custom tool as a function of a chat.  `path`: its path in the body."""
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        skipped.add(f"{path}.format")  # the grammar is described to the model, but not enforced
    return function_tool({"name": tool.get("name"), "description": _custom_description(tool)}, CUSTOM_PARAMETERS)


def _custom_description(tool: Tool) -> str:
    """Return the description of a custom tool, with the grammar of its input if it has one."""
    description, form = tool.get("description"), tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):  # as in a chat
        form = form["grammar"]
    parts = [description] if isinstance(description, str) else []
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        parts.append(f"The input must match this {form.get('syntax') or 'lark'} grammar:\n{form['definition']}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------------------- choices


def tool_choice(given: Any) -> Any:
    """Convert `tool_choice` of /v1/responses to that of a chat.  Raises Refusal for an unsupported kind of tool."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if kind in ("function", "custom"):
        name = _chat_name("tool_choice", given) if "name" in given else None
        return {"type": "function", "function": {"name": name}}
    value = str(shown(str(kind)))
    message = f"tool_choice: a call of '{value}' cannot be demanded, only functions are served"
    raise bad_request("unsupported", message, "tool_choice.type", "function, custom", value)


def allowed_tools(given: Any, functions: Any, rules: ToolRules) -> tuple[Any, Any, ToolRules]:
    """Resolve a `tool_choice` of type `allowed_tools`: return its mode, and only the functions that it allows.

    Any other choice is returned unchanged, with all functions.  Functions that are no list or have no name are passed
    on to the chat's checks, which refuse them.  In a chat, mode and tools are in a nested object `allowed_tools`."""
    if not isinstance(given, dict) or given.get("type") != "allowed_tools":
        return given, functions, rules
    if isinstance(given.get("allowed_tools"), dict):
        given = given["allowed_tools"]
    tools, mode = given.get("tools"), given.get("mode", "auto")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise wrong_type("tool_choice.tools", "a list of tools")
    if mode not in ("auto", "required"):
        value = str(shown(str(mode)))
        message = f"tool_choice.mode: must be one of auto, required, got '{value}'"
        raise bad_request("invalid_value", message, "tool_choice.mode", "auto, required", value)
    named = [next((tool[key] for key in CHAT_KINDS if isinstance(tool.get(key), dict)), tool) for tool in tools]
    # Tools that OpenAI runs may have no name.
    names = [_chat_name(f"tool_choice.tools[{at}]", tool) for at, tool in enumerate(named) if "name" in tool]
    if not isinstance(functions, list):
        return mode, functions, rules
    kept = [at for at, tool in enumerate(functions) if not (name := _function_name(tool)) or name in names]
    return mode, [functions[at] for at in kept], rules._replace(paths=tuple(rules.paths[at] for at in kept))


def _chat_name(field: str, tool: Tool) -> str:
    """Return the name by which the model sees a tool that `tool_choice` names.  Raises Refusal."""
    name, namespace = tool.get("name"), tool.get("namespace")
    if not isinstance(name, str):
        raise wrong_type(f"{field}.name", "a string")
    if not isinstance(namespace, str | None):
        raise wrong_type(f"{field}.namespace", "a string")
    return joined(name, namespace)


def _function_name(tool: Any) -> str:
    """Return the name of a chat's function; "" if it has none, which `chat_options` refuses."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def custom_input(arguments: str) -> str:
    """Return the input in the arguments of a custom tool's call; arguments of another form are the input itself."""
    whole = repaired(arguments) if arguments.lstrip().startswith("{") else None  # max_tokens may have cut the arguments
    try:
        found = json.loads(without_escaped_halves(whole or arguments), strict=False)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(found, dict) and isinstance(found.get(INPUT), str):
        return str(found[INPUT])
    values = list(found.values()) if isinstance(found, dict) else [found]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


def custom_arguments(text: str) -> str:
    """Return the JSON arguments for a custom tool's call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------- tools of other formats


def chat_tools(tools: Any, skipped: Skipped) -> tuple[Any, ToolRules]:
    """Return the tools of a chat as functions, with their rules.  Raises Refusal.

    Custom tools become functions; tools of other types are ignored."""
    if not isinstance(tools, list):
        return tools, ToolRules()
    found: list[Any] = []
    paths: list[str] = []
    for at, tool in enumerate(tools):
        kind = (tool.get("type") if isinstance(tool, dict) else None) or "function"
        if kind == "function":
            found.append(tool)
            paths.append(f"tools[{at}]")
        elif kind == "custom":
            path = f"tools[{at}].custom"
            if not isinstance(tool.get("custom"), dict):
                raise wrong_type(path, "an object")
            found.append(_custom_tool(path, tool["custom"], skipped))
            paths.append(f"tools[{at}]")
        else:
            skipped.add(f"tools[{at}].{shown(str(kind))}")
    return found, ToolRules(paths=tuple(paths))


def custom_names(tools: Any) -> frozenset[str]:
    """Return the names of the custom tools among the tools of a chat."""
    found = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    described = [tool.get("custom") for tool in found if tool.get("type") == "custom"]
    return frozenset(one["name"] for one in described if isinstance(one, dict) and isinstance(one.get("name"), str))


def chat_choice(given: Any) -> Any:
    """Convert a `tool_choice` that names a custom tool: it then names the function that the tool becomes."""
    if not isinstance(given, dict) or given.get("type") != "custom":
        return given
    return {"type": "function", "function": given.get("custom")}


def message_tools(
    tools: list[Tool] | None, skipped: Skipped, choice: dict[str, Any] | None
) -> tuple[list[Tool], ToolRules]:
    """Convert the tools of /v1/messages to functions of a chat; return them with their rules.

    Tools that Anthropic runs or defines (`web_search_...`, `bash_...`) are ignored.  Raises Refusal if `choice` demands
    such a tool."""
    found: list[Tool] = []
    paths: list[str] = []
    for at, tool in enumerate(tools or ()):
        kind = tool.get("type") or "custom"
        if kind == "custom":
            found.append(function_tool(tool, tool.get("input_schema")))
            paths.append(f"tools[{at}]")
            continue
        value = str(shown(str(kind)))
        if kind == "function":  # OpenAI's format: refused, since ignoring it would drop all of the client's tools
            message = f"tools[{at}].type: a tool of this format has name and input_schema, and no type '{value}'"
            raise bad_request("invalid_value", message, f"tools[{at}].type", "custom", value)
        if choice and choice.get("type") == "tool" and choice.get("name") == tool.get("name"):
            message = f"tool_choice.name: a call of '{value}' cannot be demanded, only tools of the client are served"
            raise bad_request("unsupported", message, "tool_choice.name", "a tool of the client", value)
        skipped.add(f"tools[{at}].{value}")
    return found, ToolRules(name="message tool name", bounded=False, paths=tuple(paths))
