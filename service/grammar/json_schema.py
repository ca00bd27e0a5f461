"""Rewrites a client's JSON schema in keywords that llguidance enforces, or refuses it with the path of a keyword.

    schema ──rewrite──> equivalent schema in fewer keywords ──> service/grammar/grammar.py ──> grammar
       ├── an assertion that cannot be enforced     ──> NotServed, with its path
       └── an unknown keyword (`x-...` and others)  ──> ignored, and named in the answer's header

By JSON Schema (2020-12, core 6.5) a keyword that no vocabulary defines is an annotation.  Since 2019-09 `format` is an
annotation, too; formats that llguidance supports are enforced nevertheless.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import permutations
from math import perm
from typing import Any, NamedTuple

from quire.service.common.limits import GRAMMAR_DEPTH, LIMITS, REGEX_CHARS
from quire.service.grammar.grammar_errors import NotServed
from quire.service.grammar.large_numbers import check_values, move_bounds
from quire.service.grammar.look_ahead import without_look_ahead
from quire.service.grammar.schema_algebra import DEEPEST, Schemas, identity, names, type_of

TOO_LARGE = LIMITS["grammar"].code
ENFORCED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
# Assertions of some JSON Schema draft that llguidance lacks.  Some uses are rewritten; others are refused.
REWRITTEN = frozenset(
    {
        *("not", "if", "uniqueItems", "contains", "dependencies", "dependentRequired", "dependentSchemas"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "$recursiveRef", "$dynamicRef"),
        *("extends", "disallow", "divisibleBy"),
    }
)
ASSERTIONS = ENFORCED | REWRITTEN
# Keywords of JSON Schema and OpenAPI that assert nothing by themselves.  They are ignored without being reported.
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
DIALECTS = re.compile(
    r"http://json-schema\.org/draft-0[4-7]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
# Keywords that only modify another assertion, and anchors for references that are refused.
PARTNERS = frozenset({"then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor"})
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})  # llguidance enforces these
# Formats that are enforced by a regex: JSON pointers (RFC 6901), relative JSON pointers (draft 2019-09), and dates and
# times (RFC 3339, without leap seconds).  llguidance's own dates allow 29 February in every year and a 60th second.
POINTER = r"(/([^~/]|~[01])*)*"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"({LEAP_YEAR}-02-29|[0-9]{{4}}-({MONTHS}))"
OF_DAY = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{OF_DAY}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{OF_DAY})"
PATTERNS = {
    "json-pointer": f"^{POINTER}$",
    "relative-json-pointer": rf"^(0|[1-9][0-9]*)(#|{POINTER})$",
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}[Tt]{TIME}$",
}
ARRANGEMENTS = 256  # maximum number of arrays into which `uniqueItems` over listed values is expanded
BRANCHES = 16  # maximum branches of a oneOf that are compared with each other
PARTS = 5000  # maximum number of subschemas, after rewriting
NAMED = 16  # maximum number of ignored keywords that one answer names


class Rewritten(NamedTuple):
    """A schema rewritten in llguidance's keywords."""

    schema: Any  # an object, true or false
    passed_over: tuple[str, ...]  # first path of each ignored keyword, at most NAMED


def rewrite(schema: Any, path: str) -> Rewritten:
    """Return an equivalent schema whose assertions are all enforced.

    `path`: path of the schema in the request.  Raises NotServed at the first assertion that cannot be enforced."""
    try:
        walk = _Walk(copy.deepcopy(schema), path)
    except RecursionError:
        reason = f"schemas nest at most {GRAMMAR_DEPTH} deep"
        raise NotServed(path, reason, code=TOO_LARGE, limit=GRAMMAR_DEPTH, given=f"over {GRAMMAR_DEPTH}") from None
    walk.run()
    return Rewritten(walk.root, tuple(walk.passed_over.values())[:NAMED])


def subschemas(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, subschema) for each direct subschema of a schema."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            yield from ((f"{path}.{name}.{key[:64]}", one) for key, one in schema[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        if isinstance(schema.get(name), list):
            yield from ((f"{path}.{name}[{at}]", one) for at, one in enumerate(schema[name]))
    for name in ("items", "additionalItems", "additionalProperties"):
        if name in schema and not isinstance(schema[name], list):
            yield f"{path}.{name}", schema[name]


class _Walk:
    """Rewrites the objects of one schema in place, outer ones first, so that references stay valid."""

    def __init__(self, root: Any, path: str) -> None:
        self.root, self.path = root, path
        self.schemas = Schemas(copy.deepcopy(root))  # the schema before rewriting
        self.passed_over: dict[str, str] = {}  # ignored keyword -> path of its first occurrence
        self._done: set[int] = set()
        self._references: list[Any] = []

    def run(self) -> None:
        waiting: list[tuple[str, Any, int]] = [(self.path, self.root, 0)]
        while waiting:
            at, one, depth = waiting.pop()
            self._visit(at, one, depth)
            if isinstance(one, dict):
                waiting += reversed([(path, inner, depth + 1) for path, inner in subschemas(one, at)])
            if not waiting:  # targets of references may be under an ignored keyword, so visit them, too
                live = Schemas(self.root)
                targets = [(reference, live.target(reference)) for reference in self._references]
                waiting = [
                    (f"{self.path}{reference[1:].replace('/', '.')}"[:256], target, 1)
                    for reference, target in targets
                    if isinstance(target, dict) and id(target) not in self._done
                ]
                self._references.clear()

    def _visit(self, at: str, one: Any, depth: int) -> None:
        if depth > GRAMMAR_DEPTH:
            reason = f"schemas nest at most {GRAMMAR_DEPTH} deep"
            raise NotServed(at[:256], reason, code=TOO_LARGE, limit=GRAMMAR_DEPTH, given=depth)
        if isinstance(one, bool):
            return
        if not isinstance(one, dict):
            raise NotServed(at, "must be a JSON schema: an object, true or false", code="invalid_type")
        if id(one) in self._done:
            return
        self._done.add(id(one))
        if len(self._done) > PARTS:
            reason = f"its assertions take more than {PARTS} parts to write"
            raise NotServed(at[:256], reason, code=TOO_LARGE, limit=PARTS, given=f"over {PARTS}")
        one.pop("x-guidance", None)  # options of llguidance, which clients may not set
        if not DIALECTS.fullmatch(str(one.get("$schema"))):  # llguidance supports no others
            one.pop("$schema", None)
        for name in one:
            if name not in ASSERTIONS and name not in ANNOTATIONS and name not in PARTNERS:
                self.passed_over.setdefault(name[:64], f"{at}.{name[:64]}"[:256])
        self._references += [one[name] for name in ("$ref",) if isinstance(one.get(name), str)]
        for name, rewriting in REWRITINGS:
            if name in one:
                rewriting(self, one, at)
        for name in PARTNERS.intersection(one):
            del one[name]
        _check_bounds(one, at)
        move_bounds(one, at)
        check_values(one, at)

    # ------------------------------------------------------------------------------------------------ one keyword each

    def _reference(self, one: dict[str, Any], at: str) -> None:
        """Turn a reference that contains the document's own `$id` into a local reference."""
        reference = one["$ref"]
        own = [self.root.get(name) for name in ("$id", "id")] if isinstance(self.root, dict) else []
        for name in own:
            if isinstance(name, str) and name.rstrip("#") and isinstance(reference, str):
                base = name.rstrip("#")
                if reference == base or reference.startswith(f"{base}#"):
                    one["$ref"] = reference[len(base) :] or "#"
                    self._references.append(one["$ref"])

    def _format(self, one: dict[str, Any], at: str) -> None:
        name = one["format"]
        if isinstance(name, str) and name in FORMATS:
            return
        del one["format"]
        if isinstance(name, str) and name in PATTERNS:
            only_text = one.get("type") in ("string", ["string"])
            self._require(one, {"type": "string", "pattern": PATTERNS[name]} if only_text else _if_text(name))
        else:
            self.passed_over.setdefault(f"format {str(name)[:64]}", f"{at}.format")

    def _pattern(self, one: dict[str, Any], at: str) -> None:
        """Replace a pattern with look-ahead (zod's email, pydantic's Decimal) by several patterns without it."""
        if isinstance(one["pattern"], str) and len(one["pattern"]) <= REGEX_CHARS:
            *more, one["pattern"] = without_look_ahead(one["pattern"])
            for pattern in more:
                self._require(one, {"pattern": pattern})

    def _not(self, one: dict[str, Any], at: str) -> None:
        excluded = one.pop("not")
        negated = self.schemas.negation(excluded, self._base(one, "not", excluded), ASSERTIONS)
        if negated is None:
            raise _unserved(f"{at}.not", "only schemas whose opposite can be written are served here")
        self._require(one, negated)

    def _if(self, one: dict[str, Any], at: str) -> None:
        condition, then, other = one.pop("if"), one.pop("then", True), one.pop("else", True)
        if then in (True, {}) and other in (True, {}):
            return
        negated = self.schemas.negation(condition, self._base(one, "if", condition), ASSERTIONS)
        if negated is None:
            raise _unserved(f"{at}.if", "only conditions whose opposite can be written are served")
        branches = [{"allOf": [condition, then]}, {"allOf": [negated, other]}]
        self._require(one, {"anyOf": [branch for branch in branches if False not in branch["allOf"]]})

    def _unique_items(self, one: dict[str, Any], at: str) -> None:
        if one.pop("uniqueItems") is not True or (_count(one, "maxItems", 2) <= 1):
            return
        values = self._listed(one.get("items", True)) if "prefixItems" not in one else None
        distinct = {identity(value): value for value in values or ()}
        least, most = _count(one, "minItems", 0), min(_count(one, "maxItems", len(distinct)), len(distinct))
        count = sum(perm(len(distinct), length) for length in range(least, most + 1))
        if values is None or one.get("type") != "array" or count > ARRANGEMENTS:
            reason = (
                f"served for arrays of at most 1 item, or of listed values with at most {ARRANGEMENTS} arrangements"
            )
            raise _unserved(f"{at}.uniqueItems", reason)
        arrays = [list(them) for length in range(least, most + 1) for them in permutations(distinct.values(), length)]
        for name in ("items", "minItems", "maxItems", "additionalItems"):
            one.pop(name, None)
        self._require(one, {"enum": arrays} if arrays else False)

    def _listed(self, items: Any) -> list[Any] | None:
        """Return the values of a schema that only lists values; None for any other schema."""
        items = self._resolved(items)
        if not isinstance(items, dict) or not set(items) & ASSERTIONS <= {"type", "enum", "const"}:
            return None
        values, types = self.schemas.values(items), self.schemas.types(items)
        return None if values is None else [value for value in values if type_of(value) in types]

    def _resolved(self, schema: Any) -> Any:
        """Follow references of a schema that asserts nothing else."""
        for _ in range(DEEPEST):
            if not isinstance(schema, dict) or set(schema) & ASSERTIONS != {"$ref"}:
                break
            schema = self.schemas.target(schema["$ref"])
        return schema

    def _contains(self, one: dict[str, Any], at: str) -> None:
        wanted, least, most = one.pop("contains"), one.pop("minContains", 1), one.pop("maxContains", None)
        if wanted in (True, {}) and isinstance(least, int):
            bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
            self._require(one, bounds)
        elif least != 0 or most is not None:
            raise _unserved(f"{at}.contains", "only minContains 0, or any item, is served")

    def _dependencies(self, one: dict[str, Any], at: str) -> None:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            inner = one.pop(keyword, None)
            for name, needed in inner.items() if isinstance(inner, dict) else ():
                then = {"required": needed} if isinstance(needed, list) else needed
                if then in (True, {}, {"required": []}):
                    continue
                without: dict[str, Any] = {"properties": {name: False}}
                together = {"allOf": [{"required": [name]}, then]}
                self._require(one, {"anyOf": [without] if then is False else [without, together]})

    def _property_names(self, one: dict[str, Any], at: str) -> None:
        asserted = self._of_names(one.pop("propertyNames"), at)
        if asserted in (True, {}) or asserted == {"type": "string"}:
            return
        if isinstance(asserted, dict):
            asserted.pop("type", None)
        if one.get("patternProperties") or not isinstance(asserted, dict) or "type" in (asserted or {}):
            raise _unserved(f"{at}.propertyNames", "not served beside patternProperties, or as true or false")
        others = one.get("additionalProperties", True)
        declared = one.setdefault("properties", {}) if isinstance(one.get("properties", {}), dict) else {}
        if set(asserted) <= {"enum", "const"}:
            listed = names(self.schemas.values(asserted))
            one["properties"] = {n: s for n, s in declared.items() if n in listed} | {
                name: others for name in listed if name not in declared
            }
            one["additionalProperties"] = False
        elif (pattern := _name_pattern(asserted)) is not None and not declared:
            one["patternProperties"], one["additionalProperties"] = {pattern: others}, False
        else:
            reason = "served as enum or const, or without properties as pattern, minLength or maxLength"
            raise _unserved(f"{at}.propertyNames", reason)

    def _of_names(self, wanted: Any, at: str) -> Any:
        """Return the assertions of `propertyNames`: references are resolved, and a format becomes a pattern.

        If there is a pattern, too, as zod writes it, a format that no regex here expresses is an annotation."""
        wanted = self._resolved(wanted)
        if not isinstance(wanted, dict):
            return wanted
        asserted = {name: wanted[name] for name in wanted if name in ASSERTIONS}
        name = asserted.get("format")
        if isinstance(name, str) and name in PATTERNS and "pattern" not in asserted:
            asserted["pattern"] = PATTERNS[asserted.pop("format")]
        elif name is not None and ("pattern" in asserted or name not in FORMATS):
            self.passed_over.setdefault(f"format {str(name)[:64]}", f"{at}.propertyNames.format")
            del asserted["format"]
        return asserted

    def _unevaluated(self, one: dict[str, Any], at: str) -> None:
        rest = "additionalItems" if isinstance(one.get("items"), list) else "items"
        for keyword, inner in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", rest)):
            if keyword not in one or one[keyword] in (True, {}):
                one.pop(keyword, None)
            elif {"anyOf", "oneOf", "allOf", "$ref", "if", "not", "contains"}.isdisjoint(one):
                value = one.pop(keyword)
                one.setdefault(inner, value)
            else:
                raise _unserved(f"{at}.{keyword}", "not served beside anyOf, oneOf, allOf, $ref and if")

    def _one_of(self, one: dict[str, Any], at: str) -> None:
        """Replace oneOf by anyOf.  A branch that overlaps others gets their negations added."""
        branches = one["oneOf"]
        if not isinstance(branches, list):
            return
        base = {name: value for name, value in one.items() if name != "oneOf"}
        exact: list[Any] = []
        for number, branch in enumerate(branches):
            rest = [other for place, other in enumerate(branches) if place != number]
            others = [other for other in rest if not self.schemas.disjoint(self._beside(base, branch), other)]
            opposites = [self._opposite(other, base, branch) for other in others]
            if None in opposites or (len(branches) > BRANCHES and others):
                met = branches.index(others[opposites.index(None)]) if None in opposites else branches.index(others[0])
                raise _unserved(f"{at}.oneOf", f"branches {number} and {met} do not exclude each other; use anyOf")
            if False not in opposites and branch is not False:
                exact.append({"allOf": [branch, *opposites]} if opposites else branch)
        del one["oneOf"]
        self._require(one, {"anyOf": exact})

    def _opposite(self, other: Any, base: dict[str, Any], branch: Any) -> Any:
        """Return the negation of another branch; if no keyword expresses it, among the instances of `branch` only."""
        found = self.schemas.negation(other, base, ASSERTIONS)
        return found if found is not None else self.schemas.negation(other, self._beside(base, branch), ASSERTIONS)

    def _beside(self, base: dict[str, Any], branch: Any) -> Any:
        return {"allOf": [base, branch]}

    def _refused(self, one: dict[str, Any], at: str) -> None:
        for name in ("$recursiveRef", "$dynamicRef", "extends", "disallow", "divisibleBy"):
            if name in one:
                raise _unserved(f"{at}.{name}", "this keyword is not served")

    def _exclusive(self, one: dict[str, Any], at: str) -> None:
        """Convert draft 4's boolean `exclusiveMinimum` and `exclusiveMaximum` to numbers."""
        for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(one.get(name), bool) and one.pop(name) and bound in one:
                one[name] = one.pop(bound)

    # ------------------------------------------------------------------------------------------------------------------

    def _base(self, one: dict[str, Any], keyword: str, value: Any) -> dict[str, Any]:
        """Return the schema without this keyword."""
        return {name: inner for name, inner in one.items() if name != keyword}

    def _require(self, one: dict[str, Any], more: Any) -> None:
        """Add an assertion to a schema, in place.

        If the schema already has one of its keywords, it is appended to `allOf`, so that references into `allOf` stay
        valid."""
        if more in (True, {}):
            return
        if isinstance(more, dict) and more.keys().isdisjoint(one):
            one.update(copy.deepcopy(more))
        else:
            inner = one.get("allOf")
            one["allOf"] = [*(inner if isinstance(inner, list) else []), copy.deepcopy(more)]


REWRITINGS: tuple[tuple[str, Any], ...] = (
    ("$recursiveRef", _Walk._refused),
    ("$dynamicRef", _Walk._refused),
    ("extends", _Walk._refused),
    ("disallow", _Walk._refused),
    ("divisibleBy", _Walk._refused),
    ("$ref", _Walk._reference),
    ("exclusiveMinimum", _Walk._exclusive),
    ("exclusiveMaximum", _Walk._exclusive),
    ("format", _Walk._format),
    ("pattern", _Walk._pattern),
    ("unevaluatedProperties", _Walk._unevaluated),
    ("unevaluatedItems", _Walk._unevaluated),
    ("propertyNames", _Walk._property_names),
    ("uniqueItems", _Walk._unique_items),
    ("contains", _Walk._contains),
    ("dependencies", _Walk._dependencies),
    ("dependentRequired", _Walk._dependencies),
    ("dependentSchemas", _Walk._dependencies),
    ("oneOf", _Walk._one_of),
    ("not", _Walk._not),
    ("if", _Walk._if),
)


def _unserved(param: str, reason: str) -> NotServed:
    return NotServed(param[:256], reason, code="unsupported")


def _if_text(name: str) -> dict[str, Any]:
    others = ["null", "boolean", "object", "array", "number"]
    return {"anyOf": [{"type": "string", "pattern": PATTERNS[name]}, {"type": others}]}


def _count(schema: dict[str, Any], name: str, default: int) -> int:
    value = schema.get(name, default)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _name_pattern(asserted: dict[str, Any]) -> str | None:
    """Return a regex for property names that fit `asserted`; None if no regex expresses it."""
    if set(asserted) == {"pattern"} and isinstance(asserted["pattern"], str):
        return str(asserted["pattern"])
    if asserted.keys() <= {"minLength", "maxLength"}:
        least, most = _count(asserted, "minLength", 0), asserted.get("maxLength")
        return rf"^[\s\S]{{{least},{'' if most is None else most}}}$"
    return None


def _keys(given: Any) -> list[str]:
    return list(given) if isinstance(given, dict) else []


def _check_bounds(schema: dict[str, Any], at: str) -> None:
    """Raise NotServed for a regex that is too long, and for a `minProperties` that repeated names could satisfy.

    A grammar allows each required name once.  It cannot prevent that any other name is repeated."""
    for regex in (schema.get("pattern"), *_keys(schema.get("patternProperties"))):
        if isinstance(regex, str) and len(regex) > REGEX_CHARS:
            param, reason = (
                f"{at}.pattern" if regex == schema.get("pattern") else at,
                f"at most {REGEX_CHARS} characters",
            )
            raise NotServed(param, reason, code=TOO_LARGE, limit=REGEX_CHARS, given=len(regex))
    least = schema.get("minProperties", 0)
    most = len(set(names(schema.get("required")))) + 1
    if isinstance(least, int | float) and least > most:
        reason = f"must be at most {most}, the required properties and one more: names could repeat"
        raise NotServed(f"{at}.minProperties", reason, code="unsupported", limit=most, given=least)
