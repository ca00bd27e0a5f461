"""The checked request: api.py makes it; text/ and delivery/ read it."""

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
    """Prompt length from which a field requires a change of the prompt that Quire does not support."""

    param: str  # name of the field
    tokens: int  # prompt length at which the request is refused
    what: str  # the unsupported change, for the error message


class ValidRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request after all checks except those that need the encoded prompt (see `fit`)."""

    prompts: list[Prompt]  # completions: one or more texts or token-id lists; chat: empty
    messages: list[dict[str, Any]]  # chat: messages for the chat template; completions: empty
    sampling: Sampling
    n: int
    max_tokens: int | None  # maximum output tokens per choice; None: the rest of the context; 0: only echo the prompt
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
    truncate_prompt_tokens: int | None  # -1: as many as fit into the context
    timeout_s: float
    priority: int  # lower is served earlier
    chat: bool  # a chat, not a completion
    # Fields below have defaults, since an older gateway's record in Redis lacks them.
    include_ids: bool = False  # send event ids and comments
    prompt_logprobs: bool = False  # the answer contains log probabilities of the prompt
    names_are_ids: bool = False  # tokens of log probabilities are written `token_id:N`
    at_most: bool = False  # if max_tokens does not fit into the context, reduce it instead of refusing
    suffix: str = ""  # text after the answer (fill in the middle); "": none
    keep_first: bool = False  # truncate_prompt_tokens keeps the first tokens, not the last
    special: bool = True  # the tokenizer adds its special tokens to a text
    unknown: tuple[str, ...] = ()  # names of ignored fields of the body
    adapter: ServedAdapter | None = None  # LoRA adapter named by `model`; None: the base model
    options: ChatOptions = msgspec.field(default_factory=ChatOptions)  # options of the chat template
    reading: Reading | None = None  # how to split a chat answer into regions; None: all of it is content
    constraint: Constraint | None = None  # structured output, until it is compiled to `sampling.grammar`
    grammar_param: str = ""  # name of the field from which `sampling.grammar` comes
    bad_words: tuple[str, ...] = ()  # texts, until the tokenizer has encoded them into `sampling`
    shown: dict[str, Any] = {}  # /v1/responses: fields of the request that the answer repeats
    items: list[dict[str, Any]] = []  # /v1/responses: input items
    seals: bool = False  # /v1/responses: reasoning items have `encrypted_content`
    raw_messages: bool = False  # /v1/responses: the response has the text and ids of all tokens
    custom: frozenset[str] = frozenset()  # chat: names of custom tools, whose input is plain text
    called: dict[str, Called] = {}  # /v1/responses: name that the model sees -> client's tool, if they differ
    beams: Beams | None = None  # beam search; None: sampling
    best: int = 0  # `best_of`: number of most probable choices to return out of `n`; 0: all
    hide_logprobs: bool = False  # log probabilities are computed to rank choices, but not sent
    hide_reasoning: bool = False  # leave reasoning out of the answer
    repeated: list[str] = []  # `echo` of chats: text with which the answer to each chat begins
    conversations: list[list[dict[str, Any]]] = []  # further chats, one prompt each; `messages` is the first chat
    scoring: Scoring | None = None  # /generative_scoring: `prompts` are the items to score
    bounds: list[PromptBound] = []  # prompt lengths at which the request is refused
    prediction: str | None = None  # text of the client's `prediction`; None: none
    sources: list[str] = []  # other API formats: for each message, the client's field that it comes from

    @property
    def width(self) -> int:
        """Sequences computed per prompt: the beam width, or else `n`."""
        return self.beams.width if self.beams is not None else self.n

    def min_output_tokens(self, room: int) -> int:
        """Return the minimum output tokens of a choice.  `room`: its maximum output tokens."""
        endless = self.sampling.ignore_eos and not self.stop and not self.sampling.stop_token_ids
        return room if endless else max(1, self.sampling.min_tokens)
