"""The chat template of a checkpoint: renders chats to text.

    messages --family ids, fit_history--> messages that the template accepts --render--> text, spans of content

While the template is rendered, placeholders stand for characters with which a special token could begin, so that no
text of a client becomes a special token (`literal.py`).
"""

from __future__ import annotations

import contextlib
from functools import cached_property, partial
from typing import Any

from quire.service.api.history import for_template, refused
from quire.service.api.tools import ChatOptions
from quire.service.api.valid_request import ValidRequest
from quire.service.chat_templates import written_numbers
from quire.service.chat_templates.literal import LiteralContent, Span
from quire.service.chat_templates.template_probe import Dialect, names_in, probe
from quire.service.common.refusal import Refusal, unsupported
from quire.service.output.regions import ResponseTemplate, find
from quire.service.text.call_form import NO_FORM, CallForm, form_of
from quire.service.text.family_ids import with_family_ids
from quire.service.text.template_variables import variables_of


class ChatTemplate:
    """Renders chats, and reports which features (tools, reasoning, variables) template and answers support."""

    def __init__(self, hf: Any, *, literal_content: bool) -> None:
        """`hf`: transformers' tokenizer.  `literal_content`: see `Tokenizer`."""
        self._hf, self._backend = hf, hf.backend_tokenizer
        template = hf.chat_template or ""
        # A checkpoint may have several named templates, such as one for chats with tools.
        self.text = "\n".join(template.values()) if isinstance(template, dict) else str(template)
        self._render = partial(hf.apply_chat_template, tokenize=False)
        self.dialect = probe(self._render, self.text) if self.text else Dialect()
        self.responses: ResponseTemplate | None = None  # markers by which answers are cut into regions
        if self.text:
            self.responses = find(self.text, getattr(hf, "response_template", None))
        self.literal: LiteralContent | None = None
        if literal_content and hf.chat_template:
            self.literal = LiteralContent(self._backend, self._controls())

    def _controls(self) -> set[str]:
        """Return added tokens that are not marked special but by which the chat template begins or ends messages."""
        plain = {one.content for one in self._backend.get_added_tokens_decoder().values() if not one.special}
        roles, text = ("user", "assistant", "user"), ""
        if plain and self.text:
            with contextlib.suppress(Exception):  # a template may raise any error
                words = [[{"type": "text", "text": "a"}] if not self.dialect.text else "a" for _ in roles]
                turns = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
                text = self._render(turns)
        markers = set(self.responses.reasoning_markers or ()) if self.responses is not None else set()
        return {one for one in plain - markers if one.strip() and one in text}

    def unread(self, valid: ValidRequest) -> tuple[str, ...]:
        """Return the names of a chat's fields that have no effect, since the template does not read them."""
        if not valid.chat:
            return ()
        return self._variables(valid.options)[1]

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model, and calls in its answers can be read."""
        return self.dialect.tools and self.responses is not None and self.responses.has_calls

    @cached_property
    def call_form(self) -> CallForm | None:
        """The notation in which this model writes tool calls; None if its chat template does not show it.

        Found by rendering calls, at the first use."""
        if self.responses is None or not self.knows_tools:
            return None
        added = self._backend.get_added_tokens_decoder().values()
        ends = frozenset(one.content for one in added if one.special and not self.responses.has_marker(one.content))
        return form_of(self._render, self.dialect, self.text, self.responses, ends)

    def render(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the spans of client content, in which special tokens stay text.

        Raises Refusal."""
        if not self._hf.chat_template:
            message = "messages: this model has no chat template; use /v1/completions"
            raise Refusal(400, "no_chat_template", message, param="messages")
        self._check_options(options)
        variables, _ = self._variables(options)
        messages = with_family_ids(messages, self.responses)
        fitted = self._fitted(messages)
        given = {"tools": options.tools or None, "documents": options.documents or None, **variables}
        hidden = (
            self.literal.hidden(self.dialect.constants, fitted, given, sorts=self.dialect.sorts)
            if self.literal
            else None
        )

        def render(shown: list[dict[str, Any]]) -> str:
            text: str = self._render(
                hidden.messages(shown) if hidden else shown,
                add_generation_prompt=options.generation_prompt,
                continue_final_message=options.continue_final,
                **(hidden.value(given) if hidden else given),
            )
            return text

        try:
            text = written_numbers.rendered(fitted, render)
        except Exception as error:  # a template may raise any error; the cause is in these messages
            raise refused(
                error, len(messages), lambda first: self._render(self._fitted(messages[:first]), **given)
            ) from None
        return hidden.reveal(text) if hidden else (text, [])

    def _variables(self, options: ChatOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the template's variables, and the names of fields of `options` that the template does not read."""
        names, thinks = names_in(self.text), self.responses is not None and self.responses.has_reasoning
        return variables_of(options, self.dialect, names.__contains__, thinks=thinks)

    def _fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages changed so that the template accepts them.  Raises Refusal."""
        return [message for message, _ in for_template(messages, self.dialect, self.text)]

    def _check_options(self, options: ChatOptions) -> None:
        """Raise Refusal for options that the chat template or the known form of the model's answers do not support."""
        if options.tools and not self.dialect.tools:
            raise unsupported("tools", "the model's chat template knows no tools")
        if options.tools and (self.responses is None or not self.responses.has_calls):
            raise unsupported("tools", "no response template is known for this model, so its calls cannot be read")
        if options.demanded and self.call_form is None:
            raise unsupported("tool_choice", f"{NO_FORM}, so only 'none' and 'auto' are served")
        if options.strict and not options.demanded and (self.call_form is None or not self.call_form.begin.marker):
            reason = f"{NO_FORM}, so arguments are not held to their schema"
            raise unsupported(options.strict, reason)
        if options.documents and "documents" not in names_in(self.text):
            raise unsupported("documents", "the model's chat template does not read them")
