"""`echo`: the text of the prompt that the answer repeats, and the offset of each token in it.

A prompt that was sent as text is repeated unchanged.  Its tokens may contain more text: a BOS token that the tokenizer
adds, or SentencePiece's leading space.  Offsets refer to the repeated text: `text[offset:]` begins with the token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any


def aligned(text: str, pieces: Iterable[bytes]) -> tuple[str, list[int]]:
    """Return the text to repeat, and for each token the number of characters before it.

    `pieces`: the bytes of each token; b"" for a token without text.  If their text does not end with `text`, the
    tokenizer has changed the text; then the text of the tokens is returned instead."""
    decoder, parts, starts, length = codecs.getincrementaldecoder("utf-8")("replace"), [], [], 0
    for piece in pieces:
        starts.append(length)
        parts.append(decoder.decode(piece))
        length += len(parts[-1])
    parts.append(decoder.decode(b"", final=True))
    whole = "".join(parts)
    if not whole.endswith(text):
        return whole, starts
    more = len(whole) - len(text)
    return text, [max(0, start - more) for start in starts]


def last_answer(messages: list[dict[str, Any]]) -> str:
    """Return the text of a chat's last message if it is the assistant's, which `echo` repeats; else ""."""
    content = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
