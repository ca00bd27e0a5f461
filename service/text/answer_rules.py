"""Grammar of an answer (`Constraint`) and parameters for splitting it into regions (`Reading`), for one model."""

from __future__ import annotations

from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import bad_request
from quire.service.grammar.grammar import Constraint
from quire.service.output.argument_types import reduced
from quire.service.output.regions import Reading
from quire.service.text.answer_grammar import Model, constraint_of
from quire.service.text.chat_template import ChatTemplate
from quire.service.text.vocabulary import Vocabulary

TAIL_TOKENS = 64  # the assistant's message is searched in the last tokens of the prompt first


class AnswerRules:
    """Makes `Constraint` and `Reading` of each answer, which depend on chat template and vocabulary."""

    def __init__(self, vocabulary: Vocabulary, chat: ChatTemplate) -> None:
        self._vocabulary, self._responses = vocabulary, chat.responses
        self._model = Model(chat.responses, lambda: chat.call_form, vocabulary.grammar_tokens)

    def constraint(self, valid: ValidRequest, reading: Reading | None) -> Constraint | None:
        """Return the grammar of the answer, tool calls included; None: unconstrained.  Raises Refusal."""
        return constraint_of(valid, reading, self._model)

    def reading(self, valid: ValidRequest, ids: list[int]) -> Reading | None:
        """Return how to split the answer to the prompt `ids` of a chat into regions; None: all of it is content."""
        responses, options = self._responses, valid.options
        if not valid.chat or responses is None or not (responses.has_reasoning or options.tools):
            return None
        opening = None
        for tokens in (TAIL_TOKENS, len(ids)) if options.generation_prompt or options.continue_final else ():
            tail = b"".join(self._vocabulary.bytes_of(ids[-tokens:], skip_special=False)).decode("utf-8", "replace")
            if (opening := responses.opening(tail)) is not None:
                break
        tools = reduced(options.tools, nested=responses.nests) if responses.casts else []
        unsplit = sorted(valid.custom)
        return Reading(
            opening or "", calls=bool(options.tools), tools=tools, unsplit=unsplit, parallel=options.parallel
        )

    def reading_of_all(self, valid: ValidRequest, prompts: list[list[int]]) -> Reading | None:
        """Return the common `reading` of several prompts.  Raises Refusal if their readings differ."""
        reading = self.reading(valid, prompts[0])
        for at, ids in enumerate(prompts[1:] if valid.chat else (), 1):
            if self.reading(valid, ids) != reading:
                name = f"messages[{at}]"
                message = f"{name}: its answer would begin otherwise than that of messages[0], such as within reasoning"
                raise bad_request("unsupported", message, name)
        return reading
