"""Structured output: request fields -> a grammar for llguidance, or a refusal that names the unsupported keyword.

    parse_chat, parse_completion --asked--> Constraint --GrammarChecks.compile, on a thread--> Sampling.grammar

`json_schema.rewrite` rewrites a schema in llguidance's keywords, and refuses assertions that cannot be enforced.  Then
the grammar is compiled as in an engine, but with tighter limits and with bytes as tokens.  So no engine gets a grammar
that it cannot follow.

The limits count work, not time, so that the result does not depend on the machine's load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.service.common.limits import CHOICES, GRAMMAR_BYTES, LARK_CHARS, REGEX_CHARS
from quire.service.grammar.grammar_errors import NotServed
from quire.service.grammar.json_schema import TOO_LARGE, Rewritten, rewrite, subschemas

Kind = Literal["json", "regex", "choice", "grammar", "calls", "thinking", "reasoned"]

# Engines have wider limits (engine/executor/grammars.py), so they can follow every grammar that passes here.
BOUNDS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=25_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# White space between tokens of JSON: one space, or a new line with indentation.  Bounded, so that a model cannot write
# white space without end.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,16}"
ANY_TEXT = "/(?s:.*)/"  # Lark regex of any text
SPACES = "/[ \\n]{0,4}/"  # Lark regex of the white space allowed after reasoning and before a call
PROBES = 4  # number of allowed first bytes that a check tries
BLAMED_BYTES = 8192  # maximum JSON bytes of subschemas that are compiled alone to find the invalid one

NO_ANSWER = "it allows no answer"
LEGACY = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
DESCRIBED = ("name", "description", "schema", "strict")  # fields of `response_format.json_schema`
KINDS: Mapping[str, Kind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class Constraint(msgspec.Struct, frozen=True):
    """A constraint on an answer, as the client gave it."""

    param: str  # path of the request field with `value`
    kind: Kind
    # By kind: json: a schema; regex, grammar: a text; choice: a list of texts; calls: CallRules; thinking: Lark;
    # reasoned: AfterReasoning
    value: Any


class AfterReasoning(msgspec.Struct, frozen=True):
    """Reasoning, followed by an answer that must fit a constraint."""

    grammar: str  # Lark grammar from `thinking_budget.py`, in which @answer stands for `answer`
    answer: Constraint


class Parameters(msgspec.Struct, frozen=True):
    """The schema of all arguments of a tool, or of one argument."""

    param: str  # path of `schema` in the request
    schema: dict[str, Any]
    strict: bool  # refuse an unsupported schema; otherwise `loose` replaces it
    name: str  # name in the grammar, without the @
    loose: dict[str, Any]


class StringRule(msgspec.Struct, frozen=True):
    """The terminal of a string argument that is written without quotes."""

    name: str  # name of the terminal in the grammar
    param: str  # path of the argument's schema in the request
    terminal: str
    loose: str  # terminal for any string
    strict: bool  # refuse an unsupported terminal; otherwise `loose` replaces it


class CallRules(msgspec.Struct, frozen=True):
    """Grammar of an answer that must or may contain tool calls."""

    grammar: str  # Lark grammar; @tool0, @value0 ... stand for `values`, @answer for `answer`
    plain: str  # `grammar` with special tokens written as text, for checks without the model's vocabulary
    values: list[Parameters]
    strings: list[StringRule] = []
    # JSON schema of an answer without calls; None: it must have calls or may be any text.
    answer: Constraint | None = None


class Compiled(msgspec.Struct, frozen=True):
    """A grammar that engines can follow."""

    grammar: str  # llguidance's JSON form, or Lark
    passed_over: tuple[str, ...] = ()  # paths of unknown keywords in schemas, which were ignored


# ------------------------------------------------------------------------------------------------- fields of a request


def asked(fields: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that a request's fields define; None without one.  Raises NotServed.

    Schemas are checked later, on a thread."""
    found = [
        *_response_format(fields.get("response_format")),
        *_structured_outputs(fields.get("structured_outputs")),
        *(_constraint(name, LEGACY[name], value) for name in LEGACY if (value := fields.get(name)) is not None),
    ]
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise NotServed(found[1].param, f"only one of {names} can be honoured", limit=1, given=len(found))
    return found[0] if found else None


def _response_format(given: Any) -> Iterator[Constraint]:
    if given is None:
        return
    kinds = "text, json_object, json_schema"
    if not isinstance(given, dict):
        raise NotServed("response_format", "must be an object", code="invalid_type")
    kind, given = given.get("type"), {name: value for name, value in given.items() if value is not None}
    if kind not in ("text", "json_object", "json_schema"):
        raise NotServed("response_format.type", f"must be one of {kinds}", code="unsupported", limit=kinds)
    if kind != "text" and "schema" in given and "json_schema" not in given:  # llama.cpp and others take this form
        _only("response_format", given, ("type", *DESCRIBED))
        yield Constraint("response_format.schema", "json", given["schema"])
        return
    _only("response_format", given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_object":
        yield Constraint("response_format", "json", ANY_OBJECT)
    if kind != "json_schema":
        return
    inner, param = given.get("json_schema"), "response_format.json_schema"
    if not isinstance(inner, dict):
        raise NotServed(param, "must be an object with a schema", code="invalid_type")
    _only(param, inner, DESCRIBED)
    for name, kinds_of in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(inner.get(name), (kinds_of, type(None))):
            raise NotServed(f"{param}.{name}", f"must be a {kinds_of.__name__}", code="invalid_type")
    if inner.get("schema") is None:
        raise NotServed(f"{param}.schema", "must be a JSON schema", code="invalid_type")
    yield Constraint(f"{param}.schema", "json", inner["schema"])


def _structured_outputs(given: Any) -> Iterator[Constraint]:
    if given is None:
        return
    if not isinstance(given, dict):
        raise NotServed("structured_outputs", "must be an object", code="invalid_type")
    given = {name: value for name, value in given.items() if value not in (None, False)}
    _only("structured_outputs", given, (*KINDS, "json_object"))
    for name, value in given.items():
        if name == "json_object":
            yield Constraint("structured_outputs.json_object", "json", ANY_OBJECT)
        else:
            yield _constraint(f"structured_outputs.{name}", name, value)


def _only(param: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise NotServed(f"{param}.{name[:64]}", "is not served", code="unsupported", limit=", ".join(known))


def _constraint(param: str, name: str, value: Any) -> Constraint:
    kind = KINDS[name]
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise NotServed(param, "must be a list of at least one text, none of them empty", code="invalid_type")
    elif kind != "json" and (not isinstance(value, str) or not value):
        raise NotServed(param, "must be a text that is not empty", code="invalid_type")
    return Constraint(param, kind, value)


# ------------------------------------------------------------------------------------------------------- JSON schemas


def _checked_schema(constraint: Constraint) -> Rewritten:
    """Return the rewritten schema, whose assertions are all enforced.  Raises NotServed."""
    schema = constraint.value
    if isinstance(schema, str):  # vLLM also accepts a schema as a string
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise NotServed(constraint.param, "its text is not JSON", code="invalid_type") from None
    rewritten = rewrite(schema, constraint.param)
    if rewritten.schema is False:
        raise NotServed(constraint.param, "the schema false allows no answer")
    return rewritten._replace(schema={}) if rewritten.schema is True else rewritten


def _of_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_spaced(schema)))


def _spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with llguidance's option for white space in JSON."""
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


# ------------------------------------------------------------------------------------------------- regex, choice, Lark


def _choice_grammar(constraint: Constraint) -> str:
    if (count := len(constraint.value)) > CHOICES:
        reason = f"at most {CHOICES:,} choices, got {count:,}"
        raise NotServed(constraint.param, reason, code=TOO_LARGE, limit=CHOICES, given=count)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in constraint.value))


def _regex_grammar(constraint: Constraint) -> str:
    _check_length(constraint.value, REGEX_CHARS, constraint.param)
    return LLMatcher.grammar_from_regex(constraint.value)


def _check_length(text: str, most: int, param: str) -> None:
    if len(text) > most:
        raise NotServed(param, f"at most {most} characters", code=TOO_LARGE, limit=most, given=len(text))


def _lark_grammar(constraint: Constraint) -> str:
    """Return the grammar of a client's Lark text.  Raises NotServed for parts that this module could not check."""
    text: str = constraint.value
    _check_length(text, LARK_CHARS, constraint.param)
    if text.lstrip()[:1] in ("{", "["):
        raise NotServed(constraint.param, "must be a Lark grammar; give a JSON schema as json", code="unsupported")
    if "::=" in text:
        raise NotServed(constraint.param, "must be a Lark grammar (name: rule), not GBNF", code="unsupported")
    for pattern, what in ((r"%json\b", "%json; give the schema as json"), (r"\btemperature\s*=", "temperature")):
        if re.search(pattern, text):
            raise NotServed(constraint.param, f"a Lark grammar is served without {what}", code="unsupported")
    return LLMatcher.grammar_from_lark(text)


# --------------------------------------------------------------------------------------------------------- tool calls


def _calls_grammar(constraint: Constraint) -> Compiled:
    """Return the checked grammar of an answer with calls.  Raises NotServed."""
    rules: CallRules = constraint.value
    served: dict[str, Rewritten] = {}  # JSON of a schema -> rewritten schema, so that equal ones are checked once
    schemas = {one.name: _arguments(one, served) for one in rules.values}
    strings = "".join(f"{one.name}: {_string(one)}\n" for one in rules.strings)
    if rules.answer is not None:
        schemas["answer"] = _checked_schema(rules.answer)

    def grammar(lark: str) -> str:
        inner = [{"name": name, "json_schema": _spaced(one.schema)} for name, one in schemas.items()]
        return json.dumps({"grammars": [{"lark_grammar": lark + strings}, *inner]})

    if why := problem(grammar(rules.plain)):
        raise NotServed(constraint.param, why, code="unsupported")
    return Compiled(grammar(rules.grammar), tuple(path for one in schemas.values() for path in one.passed_over))


def _arguments(parameters: Parameters, served: dict[str, Rewritten]) -> Rewritten:
    """Return the rewritten schema of arguments, or `loose` if it is not supported.

    Raises NotServed if it is not supported and the tool is strict."""
    known = json.dumps(parameters.schema)
    if known in served:
        return served[known]
    try:
        rewritten = rewrite(parameters.schema, parameters.param)
        if why := problem(_of_schema(rewritten.schema)):
            raise NotServed(*_blame(parameters.param, rewritten.schema, why), code="unsupported")
    except NotServed:
        if parameters.strict:
            raise
        return Rewritten(parameters.loose, ())
    served[known] = rewritten
    return rewritten


def _string(rule: StringRule) -> str:
    """Return the terminal of a string, or `loose` if llguidance cannot follow it.

    Raises NotServed for a strict rule."""
    if rule.terminal != rule.loose and (why := problem(_of_terminal(rule.terminal))):
        if rule.strict:
            raise NotServed(rule.param, why, code="unsupported")
        return rule.loose
    return rule.terminal


def _of_terminal(terminal: str) -> str:
    return LLMatcher.grammar_from_lark(f"start: STRING\nSTRING: {terminal}\n")


def _reasoned_grammar(rules: AfterReasoning) -> Compiled:
    """Return the grammar of reasoning followed by an answer.

    Raises NotServed if the answer's grammar is not supported."""
    compiled = compile_grammar(rules.answer)
    inner = compiled.grammar
    answer = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
    grammar = json.dumps({"grammars": [{"lark_grammar": rules.grammar}, {**answer, "name": "answer"}]})
    return Compiled(grammar, compiled.passed_over)


# ---------------------------------------------------------------------------------------------------------- compiling

MAKERS = {"regex": _regex_grammar, "choice": _choice_grammar, "grammar": _lark_grammar}


class _Bytes:
    """A vocabulary of the 256 bytes and an EOS token, for checks without the model's vocabulary."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids: tuple[int, ...] = (256,)
    tokens: tuple[bytes, ...] = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return the tokenizer of `_Bytes`: token ids are bytes."""
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def _after_a_byte(matcher: LLMatcher, first: bytes) -> LLMatcher:
    """Return a copy of a matcher that has consumed one of the bytes that it allows first.

    Tries PROBES of these bytes, and stops if the matcher reports an error.  A grammar that is too wide, such as one of
    2,100 alternatives, fails only after its first byte."""
    allowed = [byte for byte in range(256) if first[byte // 8] >> byte % 8 & 1]
    moved, step = matcher, max(1, len(allowed) // PROBES)
    for byte in allowed[::step][:PROBES]:
        moved = matcher.deep_copy()
        moved.consume_token(byte)
        if moved.is_error():
            break
    return moved


def problem(grammar: str) -> str:
    """Return why llguidance cannot follow a grammar, in one line; "" if it can.  Releases the GIL."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=BOUNDS)
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    if first and not matcher.is_error():
        matcher = _after_a_byte(matcher, first)
    if not matcher.is_error():
        return "" if any(first) else NO_ANSWER
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    if {matcher.stop_reason(), *lines[:1]} & {"NoExtension", "NoExtensionBias"}:
        return NO_ANSWER
    # For a broken regex, the message with the cause comes after lines that show the regex.
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or ["it cannot be followed"])[0][:256]


def compile_grammar(constraint: Constraint) -> Compiled:
    """Compile and check a constraint.  Raises NotServed.  Takes up to some tenths of a second."""
    if constraint.kind == "reasoned":
        return _reasoned_grammar(constraint.value)
    given = constraint.value
    counted = msgspec.structs.replace(given, plain="") if isinstance(given, CallRules) else given
    size = len(msgspec.json.encode(counted))
    if size > GRAMMAR_BYTES:
        reason = f"at most {GRAMMAR_BYTES} bytes of JSON, got {size}"
        raise NotServed(constraint.param, reason, code=TOO_LARGE, limit=GRAMMAR_BYTES, given=size)
    if constraint.kind == "thinking":  # not checked: it comes from `thinking_budget.py`, and names ids of the model
        return Compiled(str(constraint.value))
    if constraint.kind == "calls":
        return _calls_grammar(constraint)
    if constraint.kind == "json":
        schema, passed_over = _checked_schema(constraint)
        grammar = _of_schema(schema)
        if why := problem(grammar):
            raise NotServed(*_blame(constraint.param, schema, why), code="unsupported")
        return Compiled(grammar, passed_over)
    grammar = MAKERS[constraint.kind](constraint)
    if why := problem(grammar):
        raise NotServed(constraint.param, why, code="unsupported")
    return Compiled(grammar)


def _blame(param: str, schema: Any, why: str) -> tuple[str, str]:
    """Find the subschema at fault: return its path and its error; if none fails alone, `param` and `why`.

    All patterns are compiled alone first, then the parts of the failing part, and so on.  At most BLAMED_BYTES of JSON
    are compiled, so that a refusal takes little longer than the check that failed."""
    if not isinstance(schema, dict):
        return param, why
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    budget, place = BLAMED_BYTES, (param, schema)
    waiting = [place]
    while waiting and budget > 0:  # first compile each `pattern`, at any depth
        at, one = waiting.pop()
        if isinstance(one, dict):
            waiting += reversed([*subschemas(one, at)])
            if isinstance(one.get("pattern"), str):
                budget -= len(one["pattern"])
                if inner_why := problem(_of_schema({"type": "string", "pattern": one["pattern"]})):
                    return f"{at}.pattern", inner_why
    waiting, budget = [*subschemas(schema, param)], BLAMED_BYTES
    while waiting:
        at, one = waiting.pop(0)
        alone = shared | one if isinstance(one, dict) else {}
        budget -= len(json.dumps(alone))
        if budget < 0:
            break
        if alone and (inner_why := problem(_of_schema(alone))):
            (param, why), waiting = (at, inner_why), [*subschemas(one, at)]
    return param, why
