"""Tests whether JSON schemas are disjoint, and negates a schema, for keywords that llguidance lacks (oneOf, not, if).

Both operations are sound and incomplete.  `Schemas.disjoint` returns True only for schemas without a common instance.
`Schemas.negation` returns None if the supported keywords cannot express the negation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
TEXT = 128  # maximum characters of the texts that one pattern excludes, since groups nest that deep
NAMES = 16  # maximum further properties of a closed object, one of which must be present
NUMBERS = 16  # maximum numbers that ranges exclude
DEEPEST = 6  # maximum depth of references and branches that one call follows
# Keyword of a bound -> (keyword of the negated bound, number to add to the value).
OPPOSITES = {
    "minimum": ("exclusiveMaximum", 0),
    "maximum": ("exclusiveMinimum", 0),
    "exclusiveMinimum": ("maximum", 0),
    "exclusiveMaximum": ("minimum", 0),
    "minLength": ("maxLength", -1),
    "maxLength": ("minLength", 1),
    "minItems": ("maxItems", -1),
    "maxItems": ("minItems", 1),
}
BOUNDED = {"minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number"}
BOUNDED |= {"minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array"}
LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def identity(value: Any) -> str:
    """Return a canonical text of a JSON value, equal for equal values: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def type_of(value: Any) -> str:
    """Return the narrowest JSON type of a value."""
    kinds: tuple[tuple[type, str], ...] = ((bool, "boolean"), (int, "integer"), (str, "string"), (dict, "object"))
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if value is None:
        return "null"
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


class Schemas:
    """Operations on the subschemas of one root schema, in which local references are resolved."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def target(self, reference: Any) -> Any:
        """Resolve a local reference, "#" or "#/..."; None if it points to nothing."""
        if not isinstance(reference, str) or reference[:1] != "#":
            return None
        place = self.root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and part in place:
                place = place[part]
            elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
                place = place[int(part)]
            else:
                return None
        return place if reference == "#" or reference.startswith("#/") else None

    def parts(self, schema: Any, depth: int = 0) -> list[Any]:
        """Return schemas that all instances of `schema` must fit: itself, the target of `$ref`, members of `allOf`."""
        found = [schema]
        if isinstance(schema, dict) and depth < DEEPEST:
            inner = schema.get("allOf")
            targets = [self.target(schema["$ref"])] if "$ref" in schema else []
            for one in (*targets, *(inner if isinstance(inner, list) else ())):
                if one is not None:
                    found += self.parts(one, depth + 1)
        return found

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types that an instance of a schema may have, ignoring references."""
        if not isinstance(schema, dict):
            return TYPES if schema is True else frozenset()
        named = schema.get("type")
        found = set(named if isinstance(named, list) else [named] if isinstance(named, str) else TYPES)
        if "number" in found:
            found.add("integer")
        if (values := self.values(schema)) is not None:
            found &= {type_of(value) for value in values}
        return frozenset(found)

    def values(self, schema: Any) -> list[Any] | None:
        """Return the finite list of a schema's values, from `enum`, `const` or its type; None if there is none."""
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(listed := schema.get("enum"), list):
            return listed
        implied: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        return implied.get(str(schema.get("type")))

    def domain(self, schema: Any) -> list[Any] | None:
        """Return the finite list of values of a schema or of one of its `parts`; None if there is none."""
        return next((values for part in self.parts(schema) if (values := self.values(part)) is not None), None)

    # -------------------------------------------------------------------------------------------------- exclusion

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return True if it is certain that no instance fits both schemas."""
        if depth > DEEPEST:
            return False
        for first, second in product(self.parts(one), self.parts(other)):
            if self._disjoint_parts(first, second, depth):
                return True
        return any(
            branches and all(self.disjoint(branch, against, depth + 1) for branch in branches)
            for mine, against in ((one, other), (other, one))
            for part in self.parts(mine)
            for branches in self._branches(part)
        )

    def _branches(self, schema: Any) -> Iterator[list[Any]]:
        if isinstance(schema, dict):
            yield from (schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list))

    def _disjoint_parts(self, one: Any, other: Any, depth: int) -> bool:
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        mine, theirs = self.values(one), self.values(other)
        if mine is not None and theirs is not None:
            return {*map(identity, mine)}.isdisjoint(map(identity, theirs))
        common = self.types(one) & self.types(other)
        return all(self._disjoint_as(kind, one, other, depth) for kind in common)

    def _disjoint_as(self, kind: str, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return True if it is certain that no instance of type `kind` fits both schemas."""
        if kind in ("number", "integer"):
            return _apart(_range(one), _range(other))
        if kind in LENGTHS:
            low, high = LENGTHS[kind]
            return _apart(
                ((_number(one.get(low), 0), False), (_number(one.get(high), None), False)),
                ((_number(other.get(low), 0), False), (_number(other.get(high), None), False)),
            )
        if kind != "object":
            return False
        for mine, theirs in ((one, other), (other, one)):
            for name in names(mine.get("required")):
                if self.disjoint(property_of(mine, name), property_of(theirs, name), depth + 1):
                    return True
        return False

    # --------------------------------------------------------------------------------------------------- negation

    def negation(self, schema: Any, base: Any, keys: frozenset[str]) -> Any:
        """Return a schema that fits, among the instances of `base`, exactly those that do not fit `schema`.

        `keys`: keywords that assert something; others are ignored.  None if the negation cannot be expressed."""
        return self._negation(schema, base, keys, 0)

    def _negation(self, schema: Any, base: Any, keys: frozenset[str], depth: int) -> Any:
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > DEEPEST:
            return None
        present = keys & schema.keys()
        if not present:
            return False
        closed = {"additionalProperties"} if schema.get("additionalProperties") is False else set[str]()
        if len(present) > 1 and "allOf" not in present and present <= {"type", "properties", "required"} | closed:
            return self._negated_object(schema, base, keys, depth)
        if "items" in present and present <= {"type", "items"}:
            return self._negated_list(schema, base)
        single = [{name: schema[name]} for name in sorted(present)]
        if len(single) > 1:
            if present <= {"type", "const"} or present <= {"type", "enum"}:
                single = [{name: value for name, value in schema.items() if name in ("const", "enum")}]
                if not self._consistent(schema):
                    return None
            else:
                return self._any([self._negation(one, base, keys, depth + 1) for one in single])
        return self._negated_keyword(*next(iter(single[0].items())), base, keys, depth)

    def _consistent(self, schema: dict[str, Any]) -> bool:
        """Return whether all values of `enum` or `const` have the schema's `type`."""
        listed = self.values(schema) or []
        return {type_of(value) for value in listed} <= self.types({"type": schema["type"]})

    def _negated_keyword(self, name: str, value: Any, base: Any, keys: frozenset[str], depth: int) -> Any:
        if name == "not":
            return value
        if name == "$ref":
            return None if (target := self.target(value)) is None else self._negation(target, base, keys, depth + 1)
        if name == "type":
            return self._other_types(self.types({"type": value}), base)
        if name in ("const", "enum"):
            return self._other_values([value] if name == "const" else value, base)
        if name in ("anyOf", "allOf") and isinstance(value, list):
            inner = [self._negation(one, base, keys, depth + 1) for one in value]
            return self._any(inner) if name == "allOf" else None if None in inner else {"allOf": inner}
        if name in ("properties", "required"):
            return self._negated_object({name: value}, base, keys, depth)
        if name in OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
            opposite, more = OPPOSITES[name]
            if value + more < 0 and more:
                return False
            return {"type": BOUNDED[name], opposite: value + more}
        return None

    def _any(self, branches: list[Any]) -> Any:
        if any(branch is None for branch in branches):
            return None
        return {"anyOf": [branch for branch in branches if branch is not False]} if any(branches) else False

    def _other_types(self, excluded: frozenset[str], base: Any) -> Any:
        possible = self._possible(base)
        left = possible - excluded
        if "integer" in excluded and "number" in left:  # no keyword expresses numbers that are no integers
            return None
        return {"type": sorted(left - ({"integer"} if "number" in left else set()))} if left else False

    def _possible(self, base: Any) -> frozenset[str]:
        """Return the types that instances of a schema may have."""
        possible = TYPES
        for part in self.parts(base):
            possible &= self.types(part)
        return possible

    def _other_values(self, excluded: Any, base: Any) -> Any:
        domain = self.domain(base)
        if not isinstance(excluded, list):
            return None
        if domain is None:
            return all_but(excluded, self._possible(base))
        known = {*map(identity, excluded)}
        left = [value for value in domain if identity(value) not in known]
        return {"enum": left} if left else False

    def _negated_object(self, schema: dict[str, Any], base: Any, keys: frozenset[str], depth: int) -> Any:
        """Return the negation of `type`, `properties` and `required` together: at least one of them fails."""
        branches: list[Any] = []
        if "type" in schema:
            other = self._other_types(self.types({"type": schema["type"]}), base)
            if schema["type"] != "object" or other is None:
                return None
            branches.append(other)
        inner = schema.get("properties")
        for name in names(schema.get("required")):
            branches.append({"type": "object", "properties": {name: False}})
        for name, one in inner.items() if isinstance(inner, dict) else ():
            own = next((found for part in self.parts(base) if (found := property_of(part, name)) is not True), True)
            other = False if one == own else self._negation(one, own, keys, depth + 1)
            if other is None:
                return None
            branches.append(other and {"type": "object", "properties": {name: other}, "required": [name]})
        if schema.get("additionalProperties") is False:
            known = next((found for part in self.parts(base) if (found := _closed(part)) is not None), None)
            if known is None or schema.get("patternProperties"):
                return None
            more = [name for name in known if name not in (inner if isinstance(inner, dict) else {})]
            if len(more) > NAMES:
                return None
            branches += [{"type": "object", "required": [name]} for name in more]
        return self._any(branches)

    def _negated_list(self, schema: dict[str, Any], base: Any) -> Any:
        """Return the negation of `type` and `items`, if no element of a list of `base` fits `items`."""
        parts = [part for part in self.parts(base) if isinstance(part, dict) and "items" in part]
        if not parts or any("prefixItems" in one for one in (*parts, schema)) or isinstance(schema["items"], list):
            return None
        if not any(
            not isinstance(part["items"], list) and self.disjoint(part["items"], schema["items"]) for part in parts
        ):
            return None
        branches: list[Any] = [{"type": "array", "minItems": 1}]
        if "type" in schema:
            if schema["type"] != "array" or (other := self._other_types(frozenset({"array"}), base)) is None:
                return None
            branches.append(other)
        return self._any(branches)


def all_but(excluded: list[Any], types: frozenset[str]) -> Any:
    """Return a schema of all values of `types` except these; None if no keyword expresses it."""
    kinds = {type_of(value) for value in excluded}
    texts = sorted({value for value in excluded if isinstance(value, str)})
    numbers = sorted({int(value) for value in excluded if type_of(value) == "integer"})
    if kinds & types & {"object", "array", "number"} or sum(map(len, texts)) > TEXT or len(numbers) > NUMBERS:
        return None
    if any(abs(number) >= 2**53 for number in numbers):
        return None
    branches: list[Any] = []
    if "boolean" in kinds & types and (left := [value for value in (False, True) if value not in _booleans(excluded)]):
        branches.append({"enum": left})
    if "string" in kinds & types:
        branches.append({"type": "string", "pattern": f"^({_no_text_of(texts)})$"})
    if "integer" in kinds & types:
        kind = "number" if "number" in types else "integer"
        for low, high in pairwise([None, *numbers, None]):
            if kind == "number" or low is None or high is None or high - low > 1:
                bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
                branches.append({"type": kind} | {name: bound for name, bound in bounds.items() if bound is not None})
    rest = types - kinds - ({"number", "integer"} if "integer" in kinds else set())
    if rest:
        branches.append({"type": sorted(rest - ({"integer"} if "number" in rest else set()))})
    return {"anyOf": branches} if branches else False


def _booleans(values: list[Any]) -> list[bool]:
    return [value for value in values if isinstance(value, bool)]


def _no_text_of(texts: list[str]) -> str:
    """Return a regex of all texts except these."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    if not following:
        return r"[\s\S]+" if texts else r"[\s\S]*"
    chars = {char: re.escape(char) for char in following}
    others = [rf"[^{''.join(chars.values())}][\s\S]*", *([] if "" in texts else [""])]
    return "|".join([*(f"{chars[char]}({_no_text_of(rest)})" for char, rest in following.items()), *others])


def _closed(schema: Any) -> list[str] | None:
    """Return the names that the properties of an object may have; None if it may have any others."""
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return None
    inner = schema.get("properties", {})
    return [*inner] if isinstance(inner, dict) and not schema.get("patternProperties") else None


def names(given: Any) -> list[str]:
    """Return the strings in a list; [] for anything else."""
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def property_of(schema: Any, name: str) -> Any:
    """Return the schema for a property of this name: from `properties`, else False if forbidden, True if allowed."""
    if not isinstance(schema, dict):
        return True
    own = schema.get("properties")
    if isinstance(own, dict) and name in own:
        return own[name]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not closed


Bound = tuple[float | None, bool]  # (limit or None, whether the limit itself is excluded)


def _number(value: Any, default: float | None) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _range(schema: dict[str, Any]) -> tuple[Bound, Bound]:
    """Return the lower and the upper bound of a schema for numbers."""
    least, over = _number(schema.get("minimum"), None), _number(schema.get("exclusiveMinimum"), None)
    most, under = _number(schema.get("maximum"), None), _number(schema.get("exclusiveMaximum"), None)
    low: Bound = (over, True) if over is not None and (least is None or over >= least) else (least, False)
    high: Bound = (under, True) if under is not None and (most is None or under <= most) else (most, False)
    return low, high


def _apart(one: tuple[Bound, Bound], other: tuple[Bound, Bound]) -> bool:
    """Return whether two ranges have no common value."""
    for (_, (high, high_open)), ((low, low_open), _) in ((one, other), (other, one)):
        if high is not None and low is not None and (high < low or (high == low and (high_open or low_open))):
            return True
    return False
