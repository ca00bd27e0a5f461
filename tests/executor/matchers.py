"""Grammars as requests bring them, and their matchers without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.core.plan import Sampler
from quire.engine.executor.grammar_store import GrammarStore
from quire.engine.executor.grammars import Grammars
from quire.engine.wire.messages import Sampling
from quire.service.grammar.grammar import Constraint, compile_grammar
from tests.checkpoints import VOCAB, tokenizer
from tests.pace import wait_until

EOS = tokenizer().eos_token_id
PROMPT = tokenizer().encode("class Engine:\n    def run(self):")
SHORT = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": SHORT, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema(value: Any) -> str:
    return compile_grammar(Constraint("schema", "json", value)).grammar


def choice(*texts: str) -> str:
    return compile_grammar(Constraint("choice", "choice", list(texts))).grammar


def regex(pattern: str) -> str:
    return compile_grammar(Constraint("regex", "regex", pattern)).grammar


def four_slots(directory: Path, *, vocab: int = VOCAB, eos: list[int] | None = None) -> Grammars:
    """Return an executor's grammars with four slots, none of which follows one."""
    return Grammars(directory, vocab_size=vocab, eos_ids=eos or [EOS], mask=np.zeros((4, -(-vocab // 32)), np.int32))


def hold(store: GrammarStore, grammar: str) -> None:
    """Let a request hold a grammar from now on, and wait until it is compiled."""
    if not store.hold(f"for {grammar}", grammar):
        wait_until(lambda: store.done(grammar), 60)


def begin(found: Grammars, slot: int, grammar: str, emitted: list[int], **sampling: Any) -> None:
    """Start a sequence in a slot, or let it jump: it has emitted these tokens."""
    hold(found.store, grammar)
    stops = [EOS] if sampling.get("min_tokens") else []
    found.assign(slot, Sampler(Sampling(grammar=grammar, **sampling), 1, stops, [7, *emitted]))
