"""Reasoning as part of a grammar: reasoning before a constrained answer, and a budget of reasoning tokens.

    an answer constrained by a grammar, after reasoning     thought @answer
    any answer, after a budget of reasoning tokens          thought rest, or rest <opening> thought rest

`thought` is any text, of at most `budget` tokens if there is a budget, followed by the closing marker.  `rest` is any
tokens but the opening marker, so the model cannot reason again.  Engines need no other support for the budget: they
follow grammars anyway, and a resumed request restores the state of its grammar from the token log.
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

    `special`: token ids of markers that are one token.  With a budget, the closing marker must be one of these."""
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
    """Return a marker in Lark syntax.  It may contain a special token, as `<|channel>thought` does."""
    return LarkText(special)(marker)


def after_reasoning(
    answer: Constraint, markers: tuple[str, str], special: Mapping[str, int], budget: int | None, *, opened: bool
) -> Constraint:
    """Return a constraint: optional reasoning, then an answer that fits `answer`.

    `opened`: the prompt has opened the reasoning, so the answer must close it."""
    thought = "thought" if opened else f"({quoted(markers[0], special)} thought)?"
    rules = [f"start: {thought} @answer", *thought_rules(markers, special, budget)]
    return Constraint(answer.param, "reasoned", AfterReasoning("\n".join(rules) + "\n", answer))


def thinking_rules(
    budget: int, markers: tuple[str, str] | None, special: Mapping[str, int], *, opened: bool
) -> Constraint:
    """Return a constraint that allows at most `budget` tokens between the markers of the reasoning.

    markers    opening and closing marker; None: not known for this model
    special    token ids of markers that are one token
    opened     the prompt has opened the reasoning

    Raises Refusal if the markers are not known, or are not single tokens."""
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
    """Return the reasoning markers.  Raises Refusal unless each is a single token, which a budget needs."""
    if markers is None:
        raise unserved("no reasoning of this model is known")
    if not all(marker in special for marker in markers):
        raise unserved("the markers of this model's reasoning are no single tokens")
    return markers


def unserved(reason: str) -> Refusal:
    """Return the refusal of a thinking budget."""
    return unsupported(FIELD, reason)
