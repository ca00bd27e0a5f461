"""Content of chat messages stays text, even if it reads like a special token of the model.

    messages --template--> "<|user|>\\nsay <|end|> twice<|end|>\\n<|assistant|>\\n"
                                     |-- content: a span --|
    encode everything once --> ids; a special token's id within a span --> the ids of its text

The template may write special tokens, and a client's content may not.  Otherwise the user of an application could end a
message and write another one, of any role.  A rendering does not show which part of it is content.  So messages whose
content reads like a special token are rendered a second time, with marks around that content: digits that no client can
guess.  All other messages are encoded exactly as without this module.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

log = logging.getLogger("quire.gateway")

TRUSTED = ("system", "developer")  # roles of the application itself, whose messages may hold special tokens
WINDOW = 65_536  # characters searched at once: no other thread runs meanwhile, 4 ms at worst
DIGITS = 39  # of a mark: 128 random bits.  Templates change letters, not digits

Render = Callable[[list[dict[str, Any]]], str]
Span = tuple[int, int]  # of characters of the rendered text


class LiteralContent:
    """The special tokens of one tokenizer, and the ids of their text.  Thread-safe."""

    def __init__(self, backend: Any) -> None:
        """`backend`: a `tokenizers.Tokenizer`, which no other thread may use meanwhile."""
        specials = {
            token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special
        }
        self._backend = backend
        before, backend.encode_special_tokens = backend.encode_special_tokens, True
        try:
            self._literal = {token: _without_prefix(backend, text) for token, text in specials.items() if text}
        finally:
            backend.encode_special_tokens = before
        # By their first two characters: a search for a few prefixes costs a long text little.
        self._texts: dict[str, re.Pattern[str]] = {}
        for prefix in {text[:2] for text in specials.values() if text}:
            same = sorted((text for text in specials.values() if text[:2] == prefix), key=len, reverse=True)
            self._texts[prefix] = re.compile("|".join(map(re.escape, same)))
        self._longest = max(map(len, specials.values()), default=0)
        self._warned = False

    def render(self, messages: list[dict[str, Any]], render: Render) -> tuple[str, list[Span]]:
        """Render the messages.  Returns the text, and the spans in which special tokens stay text."""
        text = render(messages)
        opened, closed = (str(secrets.randbits(128)).zfill(DIGITS) for _ in range(2))
        marked = [self._marked(message, opened, closed) for message in messages]
        if marked == messages:
            return text, []
        spans = self._spans(render, marked, opened, closed, text)
        if spans is None:
            if not self._warned:
                log.warning(
                    "the chat template changes message content, so special tokens in it cannot be told from the "
                    "template's: content that reads like a special token is encoded as one"
                )
            self._warned = True
            return text, []
        return text, spans

    def _spans(
        self, render: Render, marked: list[dict[str, Any]], opened: str, closed: str, text: str
    ) -> list[Span] | None:
        """Return where the marks are in the rendering of `marked`; None if it differs from `text` without them."""
        try:
            parts = re.split(f"({opened}|{closed})", render(marked))
        except Exception:  # a template that counts or parses content
            return None
        if "".join(parts[::2]) != text:
            return None
        spans, at, begin = [], 0, -1
        for part in parts:
            if part == opened and begin < 0:
                begin = at
            elif part == closed and begin >= 0:
                spans.append((begin, at))
                begin = -1
            elif part in (opened, closed):
                return None
            else:
                at += len(part)
        return spans if begin < 0 else None

    def encode(self, text: str, spans: list[Span]) -> list[int]:
        """Return the token ids of a rendered text; special tokens within `spans` become the ids of their text."""
        # The batch call lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        ends = iter([*spans, (len(text), len(text))])
        begin, end = next(ends)
        for token, (first, after) in zip(encoding.ids, encoding.offsets, strict=True):
            while first >= end and end < len(text):
                begin, end = next(ends)
            if token in self._literal and first < end and after > begin:
                ids += self._literal[token]
            else:
                ids.append(token)
        return ids

    def _marked(self, message: dict[str, Any], opened: str, closed: str) -> dict[str, Any]:
        if message["role"] in TRUSTED:
            return message
        return {key: value if key == "role" else self._mark(value, opened, closed) for key, value in message.items()}

    def _mark(self, value: Any, opened: str, closed: str) -> Any:
        """Return `value` with marks around every text in it that reads like a special token.

        Spaces at its ends stay outside the marks, where templates trim them."""
        if isinstance(value, dict):
            return {key: self._mark(inner, opened, closed) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._mark(inner, opened, closed) for inner in value]
        if not isinstance(value, str) or not self._reads_special(value):
            return value
        bare = value.strip()
        before, _, after = value.partition(bare)
        return f"{before}{opened}{bare}{closed}{after}"

    def _reads_special(self, text: str) -> bool:
        for prefix, pattern in self._texts.items():
            at = text.find(prefix)
            while at >= 0:
                if pattern.search(text, at, at + WINDOW):
                    return True
                at = text.find(prefix, at + WINDOW - self._longest)
        return False


def _without_prefix(backend: Any, text: str) -> list[int]:
    """Return the ids of a text, without the space that some tokenizers put before every text."""
    encoding = backend.encode(text, add_special_tokens=False)
    ids: list[int] = encoding.ids
    space = len(ids) > 1 and encoding.tokens[0] in ("\u2581", "\u0120") and not text[0].isspace()
    return ids[1:] if space else ids
