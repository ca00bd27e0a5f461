"""Decodes the JSON of a body into its struct, and finds fields that have no effect.  A refusal names the field."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, TypeVar, cast

import msgspec

from quire.service.api.bodies import INNER, StreamOptions
from quire.service.api.fields import Endpoint, undeclared
from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import Refusal
from quire.service.common.refusal import bad_request as _bad
from quire.service.common.surrogates import repaired
from quire.service.config import GatewayConfig

B = TypeVar("B", bound=msgspec.Struct)

NON_FINITE_BYTES = 256 * 1024  # an invalid body up to this size is parsed again, to name the field at fault


def decode(body: bytes, kind: type[Any], config: GatewayConfig | None = None) -> Any:
    """Decode a body as `kind`.  Raises Refusal: not UTF-8, not JSON, a field of the wrong type or missing.

    Numbers and booleans may be strings, and 5.0 counts as 5, unless `config` has `strict_fields`. If a number is out of
    range, the refusal names its limit in `config`."""
    try:
        return msgspec.json.decode(body, type=kind, strict=config is not None and config.strict_fields)
    except msgspec.ValidationError as error:
        message = str(error)
        at = re.search(r"- at `\$\.?([^`]*)`$", message) or re.search(r"required field `([^`]*)`", message)
        param = at.group(1) if at else None
        if "out of range" in message and param is not None:
            raise _out_of_range(param, config) from None
        raise _bad("invalid_type", f"{param or 'body'}: {message.split(' - at ')[0]}", param) from None
    except UnicodeDecodeError as error:
        raise _bad("invalid_utf8", f"body is not UTF-8: bad byte at position {error.start}", None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if (whole := repaired(body)) != body:
            return decode(whole, kind, config)
        if (name := _non_finite(body)) is not None:
            raise _bad("invalid_value", f"{name}: must be a finite number", name, "finite", "NaN or Infinity") from None
        code = "invalid_utf8" if "utf-8" in str(error).lower() else "invalid_json"
        raise _bad(code, f"body is not valid JSON: {error}", None) from None


def decode_all(body: bytes, kind: type[B], endpoint: Endpoint, config: GatewayConfig) -> tuple[B, tuple[str, ...]]:
    """Decode a body as `kind`.  Returns it, and the names of its unknown fields.  Raises Refusal as `decode` does.

    Also raises Refusal for fields that would change the answer and are not supported, and with `strict_fields` for any
    unknown field."""
    try:  # a body without undeclared fields takes one pass
        return msgspec.json.decode(body, type=_closed(kind), strict=config.strict_fields), ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = repaired(body)
        return decode(body, kind, config), _unknown_fields(body, kind, endpoint, config)


@functools.cache
def _closed(kind: type[B]) -> type[B]:
    """Return a subclass of a body's struct that rejects undeclared fields."""
    fields: list[tuple[str, Any, Any]] = []
    if "stream_options" in kind.__struct_fields__:
        fields.append(("stream_options", _closed(StreamOptions) | None, None))
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), forbid_unknown_fields=True, kw_only=True)
    return cast(type[B], made)


def _unknown_fields(
    body: bytes, kind: type[msgspec.Struct], endpoint: Endpoint, config: GatewayConfig
) -> tuple[str, ...]:
    """Return the names of unknown fields of a body that `decode` has accepted as `kind`.

    Raises Refusal for fields that would change the answer and are not supported, and with `strict_fields` for any
    unknown field."""
    try:
        refused, unknown = undeclared(body, frozenset(kind.__struct_fields__), endpoint, INNER)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # invalid JSON in an undeclared field
        raise _bad("invalid_json", f"body is not valid JSON: {error}", None) from None
    if refused is not None:
        raise _bad("unsupported", f"{refused[0]}: {refused[1]} is not served", refused[0])
    if unknown and config.strict_fields:
        name = str(shown(unknown[0]))
        raise _bad("unknown_field", f"{name}: no such field (--strict-fields)", name)
    return unknown


def _out_of_range(param: str, config: GatewayConfig | None) -> Refusal:
    """Return the refusal of a number beyond the range of the JSON decoder."""
    name, *within = re.split(r"[.\[]", param)
    known = LIMITS.get(name) if len(within) < 2 else None  # the limit of a list is its length, not its values
    limit = (known.text(config or GatewayConfig()) if known is not None else "") or "a number of 64 bits"
    given = "a number out of range"
    return _bad("invalid_value", f"{param}: must be {limit}, got {given}", param, limit, given)


def _non_finite(body: bytes) -> str | None:
    """Return the name of a top-level field with NaN or Infinity, which many clients send although it is no JSON."""
    if len(body) > NON_FINITE_BYTES or not (b"NaN" in body or b"Infinity" in body):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((k for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)), None)
