"""The grammar of a chat answer: structured output, tool calls and a reasoning budget in one `Constraint`.

    response_format ...  --\\
    tools, tool_choice   ----> constraint_of --> Constraint: reasoning first, if the prompt opens it
    thinking budget      --/

Structured output applies to the content of an answer.  So its grammar begins after the marker that closes the
reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal, unsupported
from quire.service.grammar.grammar import Constraint
from quire.service.output.regions import Reading, ResponseTemplate
from quire.service.text.call_form import NO_FORM, CallForm
from quire.service.text.call_grammar import Reasoning, call_rules
from quire.service.text.thinking_budget import after_reasoning, budgeted, thinking_rules, unserved


class Model(msgspec.Struct, frozen=True):
    """Markers and notation of calls in a model's answers."""

    responses: ResponseTemplate | None
    call_form: Callable[[], CallForm | None]  # takes tens of milliseconds at the first call
    special: Mapping[str, int]  # text -> id of tokens that a grammar must name by their ids

    @property
    def markers(self) -> tuple[str, str] | None:
        """Opening and closing marker of reasoning; None if there is no single pair of them."""
        return None if self.responses is None else self.responses.reasoning_markers

    def thinks(self, reading: Reading | None) -> Reasoning:
        """Return "open" if the prompt has opened the reasoning, "may" if the answer may open it, else ""."""
        if self.responses is None or self.markers is None or reading is None:
            return ""
        opened, closed = (reading.opening.rfind(marker) for marker in self.markers)
        if closed > opened:
            return ""
        return "open" if self.responses.reader(reading).reasoning else "may"


def constraint_of(valid: ValidRequest, reading: Reading | None, model: Model) -> Constraint | None:
    """Return the grammar of the answer; None: unconstrained.  Raises Refusal."""
    options, asked, thinks = valid.options, valid.constraint, model.thinks(reading)
    budget = options.thinking_budget
    if budget is not None:
        try:
            budgeted(model.markers, model.special)
            if valid.sampling.ignore_eos:
                raise unserved("not together with ignore_eos")
        except Refusal:
            if not options.thinking_target:
                raise
            budget = None
    if options.tools and (options.demanded or options.strict or asked):
        return _with_calls(valid, reading, model, thinks, budget)
    if asked is None:
        if budget is None:
            return None
        return thinking_rules(budget, model.markers, model.special, opened=thinks == "open")
    if model.markers is None or not (thinks == "open" or (thinks and budget is not None)):
        return asked
    return after_reasoning(asked, model.markers, model.special, budget, opened=thinks == "open")


def _with_calls(
    valid: ValidRequest, reading: Reading | None, model: Model, thinks: Reasoning, budget: int | None
) -> Constraint:
    """Return the grammar of an answer with tool calls.  Raises Refusal."""
    options, asked = valid.options, valid.constraint
    field = "tool_choice" if options.demanded else asked.param if asked is not None else options.strict
    form = model.call_form()
    if form is None or reading is None:
        raise unsupported(field, f"{NO_FORM}, so it is not served together with tools")
    if reading.opening and form.head.startswith(reading.opening):  # the prompt has already written a part of `head`
        form = msgspec.structs.replace(form, head=form.head[len(reading.opening) :])
        if not options.demanded and asked is None:
            raise unsupported(field, "the prompt begins the call, so arguments are not held to their schema")
    if asked is not None and asked.kind != "json":
        raise unsupported(asked.param, "with tools, only JSON schemas are served")
    if valid.sampling.ignore_eos:
        raise unsupported("ignore_eos", f"with {field} an answer ends where its grammar does")
    answer = None if options.demanded else asked
    return Constraint(field, "calls", call_rules(form, options, model.special, thinks, answer, budget))
