"""Answers with calls that are almost in the notation of their family, read in one step and in any deltas.

    python -m tests.system.chaos near-calls [--answers 50000] [--seed 1] [--first 0]

Calls of every notation with hostile names and values, between prose, with reasoning, repeated, missing, nested and
swapped markers.  What must hold for every answer: the result does not depend on the cuts, complete calls have JSON
objects as arguments, and each word is in content, reasoning or arguments.  For an answer whose calls can be read: names
and arguments are those that were written, and no marker is content.  Exit status 1 otherwise.
"""

from __future__ import annotations

import json
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2

from quire.service.common.surrogates import without_surrogates
from quire.service.output.argument_types import reduced
from quire.service.output.known_templates import DATA
from quire.service.output.regions import Reading, ResponseTemplate, known
from tests.service.output.merged import Read, merged
from tests.service.text.call_notations import NOTATIONS
from tests.system.chaos.histories import command

Call = tuple[str, dict[str, Any]]
PROPERTIES = {
    "a": {"type": "string"},
    "b": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"type": "object"},
    "l": {"type": "array"},
}
NAMES = ("f", "g_2", "get-all", "n" * 64)
TOOLS = reduced([{"function": {"name": name, "parameters": {"properties": PROPERTIES}}} for name in NAMES])
TEXTS = (
    "x",
    " ",
    "é🙂",
    '"',
    "'",
    "\\",
    "\\n",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "`",
    "<b>",
    "</b>",
    "&amp;",
    "\t",
    "null",
    "\n\n",
)
ODD = ("\x00", "\x7f", "\u2028", "\r\n", "\ufffd", "\ud83d", "{{ x }}", "<|im_end|>", "\u200b")  # in prose and JSON
PROSE = ("word", "I look", "So", "Done", "é🙂", "it's", 'a "b"', "1 < 2", "x > y", "{x", "a[0]", "`b`")
WORD = re.compile(r"word\d+x\d+")
ONE_CALL = {name for name, text in NOTATIONS.items() if "m.tool_calls[0]" in text}
PYTHON = (
    "<|tool_call_start|>[{% for one in m.tool_calls %}{% set c = one.function %}{% if not loop.first %}, {% endif %}"
    "{{ c.name }}({% for k, v in c.arguments.items() %}{% if not loop.first %}, {% endif %}"
    "{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]<|tool_call_end|>"
)
WRITTEN = {**NOTATIONS, "lfm2": PYTHON}
EACH = "{% for one in m.tool_calls %}{% set c = one.function %}"
NEXT = "{% if not loop.last %}{{ mark }}{% endif %}"
# Notations of several families, by their name in `response_templates.json`, after the opening marker of the family.
ALIKE = {
    "json": EACH + '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}' + NEXT + "{% endfor %}",
    "named": EACH + "{{ c.name }}\n{{ c.arguments | tojson }}" + NEXT + "{% endfor %}",
    "python": PYTHON.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>"),
    "bare": "[" + EACH + '{"name": "{{ c.name }}", "arguments": [{{ c.arguments | tojson }}]}, {% endfor %}]',
}
FAMILIES = sorted(name for name, text in WRITTEN.items() if text)
MARK = re.compile(r"<[|｜/]?[A-Za-z_:=｜▁|]+[|｜]?>|\[[A-Z_]{4,}\]|```|\]<\]minimax\[>\[")


@cache
def template_of(name: str) -> ResponseTemplate:
    """Return the response template of a family."""
    return ResponseTemplate(known().response_templates[name], name)


@cache
def writer(name: str) -> Callable[..., str]:
    """Return what writes calls in the notation of a family."""
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(WRITTEN[name]).render


@cache
def shape(name: str) -> Callable[..., str]:
    """Return what writes calls in a notation of several families."""
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(ALIKE[name]).render


@cache
def markers(name: str) -> tuple[str, ...]:
    """Return the markers in a call of a family, and those of its reasoning."""
    reasoning = template_of(name).reasoning_markers or ()
    call = written(name, [("f", {"a": "x"})])
    return tuple(dict.fromkeys([*MARK.findall(call), *(mark.strip() for mark in reasoning)]))


@cache
def others(name: str) -> list[tuple[str, str]]:
    """Return (opening marker, notation in ALIKE) of each further notation that a family reads."""
    field = json.loads(DATA.read_text())["response_templates"][name]["fields"]["tool_calls"]
    likes = [one["like"] for one in field.get("also", []) if one.get("like") in ALIKE]
    mark = next((text for text in markers(name) if re.fullmatch(field.get("mark", ""), text)), "")
    return [("\n" if like == "bare" else mark, like) for like in likes]


def written(name: str, calls: list[Call], other: tuple[str, str] | None = None) -> str:
    """Return calls in the notation of a family, or in one that other families have, too."""
    made = [
        {"id": f"functions.{called}:{at}", "function": {"name": called, "arguments": arguments}}
        for at, (called, arguments) in enumerate(calls)
    ]
    if other is None:
        return writer(name)(m={"tool_calls": made})
    return other[0] + shape(other[1])(m={"tool_calls": made}, mark=other[0])


class Answers:
    """Answers by number, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = 0
        self._number = 0

    def answer(self, number: int) -> tuple[str, str, list[Call] | None, random.Random]:
        """Return a family, an answer, its calls (None: it may have any), and the random numbers of its cuts."""
        dice = random.Random(f"{self._seed} {number}")
        self._words, self._number = 0, number
        name = FAMILIES[number % len(FAMILIES)]
        calls = [self._call(dice, name) for _ in range(1 if name in ONE_CALL else dice.choice((1, 1, 2, 3)))]
        other = dice.choice(others(name)) if others(name) and dice.random() < 0.3 else None
        text = self._around(dice, name, written(name, calls, other))
        if dice.random() < 0.5:
            return name, text, calls, dice
        return name, self._broken(dice, name, text), None, dice

    def _word(self) -> str:
        self._words += 1
        return f"word{self._number % 997}x{self._words}"

    def _call(self, dice: random.Random, name: str) -> Call:
        keys = dice.sample(sorted(PROPERTIES), dice.randint(1, len(PROPERTIES)))
        return dice.choice(NAMES), {key: self._value(dice, name, key) for key in sorted(keys)}

    def _value(self, dice: random.Random, name: str, key: str) -> Any:
        if key == "n":
            return dice.choice((0, -7, 12345678901234567890, 1))
        if key == "o":
            return {self._word(): dice.choice((None, True, 1.5, [], {"x": [1]})), "y": self._text(dice, name)}
        if key == "l":
            return [self._text(dice, name), 1, None]
        return self._text(dice, name)

    def _text(self, dice: random.Random, name: str) -> str:
        quotes = "tojson" in WRITTEN[name] and "v if v is string" not in WRITTEN[name]
        texts = TEXTS + ODD + markers(name) if quotes and name != "gemma4" else TEXTS
        inner = "".join(dice.choice(texts) for _ in range(dice.randint(0, 5)))
        return f"{self._word()}{inner}{self._word()}"

    def _around(self, dice: random.Random, name: str, text: str) -> str:
        """Return calls with reasoning before and prose around them."""
        if dice.random() < 0.4:
            text = f"{dice.choice(PROSE)} {self._word()}.{dice.choice((' ', chr(10), chr(10) * 2))}{text}"
        reasoning = template_of(name).reasoning_markers
        if reasoning and dice.random() < 0.4:
            text = f"{reasoning[0]}{self._word()}{reasoning[1]}{text}"
        return text

    def _broken(self, dice: random.Random, name: str, text: str) -> str:
        """Return an answer with random faults."""
        for _ in range(dice.randint(1, 4)):
            places = [found.span() for mark in markers(name) for found in re.finditer(re.escape(mark), text)]
            first, last = dice.choice(places) if places else (0, 0)
            fault = dice.randrange(7)
            if fault == 0:
                text = text[:first] + text[last:]  # a missing marker
            elif fault == 1:
                text = text[:last] + text[first:]  # a repeated one
            elif fault == 2 and markers(name):
                text = text[:first] + dice.choice(markers(name)) + text[last:]  # another one
            elif fault == 3:
                at = dice.randint(0, len(text))
                text = text[:at] + dice.choice((*PROSE, *ODD, *TEXTS, *markers(name))) + text[at:]
            elif fault == 4:
                text += dice.choice(("\n", "", " ")) + dice.choice((self._word(), *markers(name), "```", "}"))
            elif fault == 5:
                text = text[: dice.randint(0, len(text))]
            else:
                text = text.replace("\n", "\r\n")
        return text


def read(name: str, pieces: list[str], *, cut: bool) -> Read:
    """Read an answer in pieces, and merge the deltas as a client does."""
    return merged(template_of(name).reader(Reading("", calls=True, tools=TOOLS)), pieces, cut=cut)


def outcome(name: str, text: str, calls: list[Call] | None, dice: random.Random) -> str:
    """Return "fits", or what is wrong with the reading of an answer."""
    cut = calls is None and dice.random() < 0.3
    whole = read(name, [text], cut=cut)
    places = sorted(dice.randint(0, len(text)) for _ in range(dice.randint(1, 12)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for pieces in (list(text), parts):
        if (streamed := read(name, pieces, cut=cut)) != whole:
            return f"failed: streamed otherwise: {streamed} for {whole}"
    content, reasoning, found = whole
    said = content + reasoning
    for at, (called, arguments) in enumerate(found):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            if cut and at == len(found) - 1:
                parsed = {}
            else:
                return f"failed: no JSON: {arguments!r} in {whole}"
        if not isinstance(parsed, dict):
            return f"failed: no object: {arguments!r}"
        said += f" {called} {arguments}"
    if lost := [word for word in WORD.findall(text) if word not in said]:
        return f"failed: {lost} lost in {whole}"
    if calls is None:
        return "fits"
    wanted = [(called, without_surrogates(arguments)) for called, arguments in calls]
    got = [(called, json.loads(arguments)) for called, arguments in found]
    if got != wanted:
        return f"failed: {got} for {wanted}, {content!r}"
    if leaked := [mark for mark in markers(name) if mark in content and mark != "```"]:
        return f"failed: {leaked} in {content!r}"
    return "fits"


def near_calls(*, answers: int, seed: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Read answers; return how many had each outcome, and what failed."""
    made, found, failures = Answers(seed), Counter[str](), []
    for number in range(first, first + answers):
        name, text, calls, dice = made.answer(number)
        try:
            what = outcome(name, text, calls, dice)
        except Exception:  # what the gateway would answer with a 500
            what = f"failed: {traceback.format_exc()}"
        found[what.partition(":")[0]] += 1
        if what != "fits":
            failures.append(f"answer {number}, {name}, {text!r}: {what}")
    return found, failures


def main(words: list[str]) -> int:
    """Run the command."""
    return command("near-calls", __doc__, "answers", 50_000, lambda _, **given: near_calls(**given), words)
