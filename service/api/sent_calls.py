"""Tool calls in the history of a chat: keeps numbers as written, if arguments are sent as an object.

    {"function": {"arguments": {"x": 1.50}}} --read_call--> {"function": {"arguments": {"x": Written("1.50")}}}

In OpenAI's API, arguments are a string of JSON.  Some clients send an object instead, in which decoding would turn
1.50 into 1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.service.chat_templates import written_numbers
from quire.service.common.refusal import bad_request
from quire.service.common.surrogates import repaired, without_surrogates


def read_call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """Decode the `msgspec.Raw` fields of an entry of `tool_calls`.

    `name`: path of the entry, for the message of a Refusal."""
    found = {key: value for key, value in call.items() if key != "function"}
    read = _read(name, found, _value)
    if "function" in call:
        fields = _read(name, {"function": call["function"]}, _fields)["function"]
        read["function"] = read_function(f"{name}.function", fields) if isinstance(fields, dict) else fields
    return {key: read[key] for key in call}


def read_function(name: str, function: dict[str, Any]) -> dict[str, Any]:
    """Decode the `msgspec.Raw` fields of a called function: name and arguments.  Raises Refusal."""
    return {
        key: _read(name, {key: value}, _with_numbers if key == "arguments" else _value)[key]
        for key, value in function.items()
    }


def _read(name: str, fields: dict[str, Any], read: Callable[[bytes], Any]) -> dict[str, Any]:
    found = dict(fields)
    for key, value in fields.items():
        if isinstance(value, msgspec.Raw):
            try:
                found[key] = read(repaired(bytes(value)))
            except UnicodeDecodeError:
                raise bad_request("invalid_utf8", f"{name}.{key}: is not UTF-8", f"{name}.{key}") from None
            except (ValueError, RecursionError) as error:
                raise bad_request("invalid_json", f"{name}.{key}: {error}", f"{name}.{key}") from None
    return found


def _value(raw: bytes) -> Any:
    return msgspec.json.decode(raw)


def _fields(raw: bytes) -> Any:
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw]) if raw.startswith(b"{") else _value(raw)


def _with_numbers(raw: bytes) -> Any:
    text = raw.decode()
    return _value(raw) if text.startswith('"') else without_surrogates(written_numbers.read(text))
