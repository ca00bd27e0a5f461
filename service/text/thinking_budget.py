"""Reasoning as part of a grammar: where it is before an answer, and how many tokens it may have.

    an answer that must match something, after reasoning    thought @answer
    any answer, after a budget of reasoning tokens          thought rest, or rest <opening> thought rest

`thought` is any text, of at most `budget` tokens if there is a budget, and the closing marker.  `rest` is any tokens
but the opening marker, so the model cannot think again.
Engines need nothing else for it: they follow grammars anyway, and the log of tokens restores their state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from quire.service.common.refusal import Refusal, unsupported
from quire.service.grammar.grammar import ANY_TEXT, SPACES, AfterReasoning, Constraint
from quire.service.text.lark_text import LarkText

FIELD = "thinking_token_budget"


def thought_rules(markers: tuple[str, str], special: Mapping[str, int], budget: int | None) -> list[str]:
    """Return the rules of `thought`: reasoning up to its closing marker, and white space after it.

    `special`: token ids of markers that are one token.  A budget needs the closing one there."""
    closing = markers[1]
    if closing not in special:
        return [f"thought: thinking {SPACES}", f"thinking[suffix={json.dumps(closing)}]: {ANY_TEXT}"]
    close = f"<[{special[closing]}]> {SPACES}"
    if budget is None:
        return [f"thought: {ANY_TEXT} {close}"]
    if not budget:
        return [f"thought: {close}"]
    return [f"thought: thinking {close}", f"thinking[max_tokens={budget}]: {ANY_TEXT}"]


def quoted(marker: str, special: Mapping[str, int]) -> str:
    """Return a marker as Lark writes it; it may hold a special token, as `<|channel>thought` does."""
    return LarkText(special)(marker)


def after_reasoning(
    answer: Constraint, markers: tuple[str, str], special: Mapping[str, int], budget: int | None, *, opened: bool
) -> Constraint:
    """Return what holds an answer to `answer` once its reasoning is closed.

    `opened`: the prompt ends within the reasoning; else the answer may do without."""
    thought = "thought" if opened else f"({quoted(markers[0], special)} thought)?"
    rules = [f"start: {thought} @answer", *thought_rules(markers, special, budget)]
    return Constraint(answer.param, "reasoned", AfterReasoning("\n".join(rules) + "\n", answer))


def thinking_rules(
    budget: int, markers: tuple[str, str] | None, special: Mapping[str, int], *, opened: bool
) -> Constraint:
    """Return what holds an answer to `budget` tokens between the markers of its reasoning.

    markers    the opening and the closing one; None: the model's answers have none that is known
    special    token ids of those that are one token
    opened     the prompt ends within the reasoning

    Raises Refusal where the markers are not known, or are no single tokens."""
    opening, closing = (f"<[{special[marker]}]>" for marker in budgeted(markers, special))
    thought = f"thought {closing} rest" if budget else f"{closing} rest"
    rules = [
        f"start: {thought if opened else f'rest ({opening} {thought})?'}",
        f"rest: (<[^{opening[2:-2]}]>)*",
    ]
    if budget:
        rules.append(f"thought[max_tokens={budget}]: {ANY_TEXT}")
    return Constraint(FIELD, "thinking", "\n".join(rules) + "\n")


def budgeted(markers: tuple[str, str] | None, special: Mapping[str, int]) -> tuple[str, str]:
    """Return the markers of reasoning that a budget can be held for.  Raises Refusal."""
    if markers is None:
        raise unserved("no reasoning of this model is known")
    if not all(marker in special for marker in markers):
        raise unserved("the markers of this model's reasoning are no single tokens")
    return markers


def unserved(reason: str) -> Refusal:
    """Return the refusal of a budget."""
    return unsupported(FIELD, reason)
