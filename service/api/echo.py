"""Echo: the text of a prompt that the answer repeats, and where each token begins in it.

A prompt that was sent as text is repeated unchanged.  Its tokens may hold more: the begin token that the tokenizer
adds, or the space that SentencePiece puts first.  Offsets refer to the repeated text: `text[offset:]` begins with the
token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any


def aligned(text: str, pieces: Iterable[bytes]) -> tuple[str, list[int]]:
    """Return the text to repeat, and for each token the number of characters before it.

    `pieces`: the bytes of each token; b"" for a token without text.  If they do not end in `text`, the tokenizer has
    changed it: then the text of the tokens is returned instead."""
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
    """Return the text of a chat's last message if it is the assistant's, as `echo` repeats it; else ""."""
    content = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
