"""A budget of reasoning tokens, as a grammar: at its end the closing marker is the only token that may follow.

    the prompt ends within the reasoning    thought <closing> rest
    else                                    rest, or rest <opening> thought <closing> rest

`thought` is text of so many tokens at most.  `rest` is any tokens but the opening marker, so the model cannot think
again.
Engines need nothing else for it: they follow grammars anyway, and the log of tokens restores their state.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.call_grammar import ANY_TEXT
from service.grammar import Constraint
from service.refusal import Refusal

FIELD = "thinking_token_budget"


def thinking_rules(
    budget: int, markers: tuple[str, str] | None, special: Mapping[str, int], *, opened: bool
) -> Constraint:
    """Return what holds an answer to `budget` tokens between the markers of its reasoning.

    markers    the opening and the closing one; None: the model's answers have none that is known
    special    token ids of those that are one token
    opened     the prompt ends within the reasoning

    Raises Refusal where the markers are not known, or are no single tokens."""
    if markers is None:
        raise unserved("no reasoning of this model is known")
    if not all(marker in special for marker in markers):
        raise unserved("the markers of this model's reasoning are no single tokens")
    opening, closing = (f"<[{special[marker]}]>" for marker in markers)
    thought = f"thought {closing} rest" if budget else f"{closing} rest"
    rules = [
        f"start: {thought if opened else f'rest ({opening} {thought})?'}",
        f"rest: (<[^{special[markers[0]]}]>)*",
    ]
    if budget:
        rules.append(f"thought[max_tokens={budget}]: {ANY_TEXT}")
    return Constraint(FIELD, "thinking", "\n".join(rules) + "\n")


def unserved(reason: str) -> Refusal:
    """Return the refusal of a budget."""
    return Refusal(400, "unsupported", f"{FIELD}: {reason}", param=FIELD)
