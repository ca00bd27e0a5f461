"""The checked request: api.py makes it, text/ and delivery/ read it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from quire.engine.wire.messages import Beams, Sampling
from quire.service.api.adapters import ServedAdapter
from quire.service.api.client_tools import Called
from quire.service.api.scoring import Scoring
from quire.service.api.tools import ChatOptions
from quire.service.grammar.grammar import Constraint
from quire.service.output.regions import Reading

Prompt = str | list[int]


class PromptBound(NamedTuple):
    """Tokens of a prompt from which a field would change it, which is not served."""

    param: str  # the field
    tokens: int
    what: str  # what would be done with a longer prompt


class ValidRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request.  Only what depends on the encoded prompt is still unchecked (see `fit`)."""

    prompts: list[Prompt]  # completions: one or more texts or token id lists; chat: empty
    messages: list[dict[str, Any]]  # chat: what the template renders; completions: empty
    sampling: Sampling
    n: int
    max_tokens: int | None  # maximum output tokens per choice; None: the rest of the context; 0: the prompt is echoed
    seeded: bool  # the client chose the seed
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str
    truncate_prompt_tokens: int | None  # -1: what fits into the context
    timeout_s: float
    priority: int  # lower is served earlier
    chat: bool  # it was sent to the chat endpoint
    # Fields below have defaults: an older gateway's record in Redis lacks them.
    include_ids: bool = False  # the client reads event ids and comments
    prompt_logprobs: bool = False  # the answer shows those of the prompt
    names_are_ids: bool = False  # tokens of log probabilities are named `token_id:N`
    at_most: bool = False  # if max_tokens does not fit into the context, the answer has what fits
    suffix: str = ""  # what follows the answer; "": nothing is known
    keep_first: bool = False  # truncate_prompt_tokens keeps the first tokens, not the last ones
    special: bool = True  # the tokenizer adds its special tokens to a text
    unknown: tuple[str, ...] = ()  # fields of the body that nothing reads
    adapter: ServedAdapter | None = None  # LoRA adapter that `model` names; None: the base model
    options: ChatOptions = msgspec.field(default_factory=ChatOptions)  # options of the chat template
    reading: Reading | None = None  # how a chat answer is cut into regions; None: all of it is content
    constraint: Constraint | None = None  # what the answer must match, until `sampling.grammar` says it
    grammar_param: str = ""  # the field that `sampling.grammar` stands for
    bad_words: tuple[str, ...] = ()  # texts, until the tokenizer has encoded them into `sampling`
    shown: dict[str, Any] = {}  # /v1/responses: fields of the request that the answer repeats
    items: list[dict[str, Any]] = []  # /v1/responses: its input
    seals: bool = False  # /v1/responses: reasoning items have `encrypted_content`
    raw_messages: bool = False  # /v1/responses: the response has the text and ids of all tokens
    called: dict[str, Called] = {}  # /v1/responses: tools that the chat names otherwise than the client
    beams: Beams | None = None  # the answers are searched, not sampled
    best: int = 0  # number of most probable choices among `n` that are returned; 0: all
    hide_logprobs: bool = False  # log probabilities only rank the choices
    hide_reasoning: bool = False  # reasoning is left out of the answer
    repeated: list[str] = []  # text that answers begin with, per chat with `echo`
    conversations: list[list[dict[str, Any]]] = []  # further chats, each a prompt of its own; `messages` is the first
    scoring: Scoring | None = None  # each of `prompts` is an item whose score the answer is
    bounds: list[PromptBound] = []  # tokens that the prompt must stay below
    prediction: str | None = None  # text that the client expects in its answer; None: it names none
    sources: list[str] = []  # formats other than a chat's: the client's field from which each of `messages` comes

    @property
    def width(self) -> int:
        """Choices that are computed for each prompt: beams, of which `n` are returned, or `n`."""
        return self.beams.width if self.beams is not None else self.n

    def least_tokens(self, room: int) -> int:
        """Return the output tokens of a choice before it may end by itself; `room` is its max_new_tokens."""
        endless = self.sampling.ignore_eos and not self.stop and not self.sampling.stop_token_ids
        return room if endless else max(1, self.sampling.min_tokens)
