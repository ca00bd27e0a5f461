"""What `echo` repeats of a prompt, and where in it each token begins.

A prompt that came as text is repeated as it came.  Its tokens may say more: the begin token that the tokenizer adds,
or the space that SentencePiece puts first.  Offsets are of the repeated text, so `text[offset:]` begins with the token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable


def aligned(text: str, pieces: Iterable[bytes]) -> tuple[str, list[int]]:
    """The text to repeat, and for each token the characters of it before that token.

    `pieces`: the bytes of each token; b"" for one that has no text there.  Where they do not end in `text`, the
    tokenizer has changed it: then the text of the tokens comes back instead."""
    decoder, said, starts, length = codecs.getincrementaldecoder("utf-8")("replace"), [], [], 0
    for piece in pieces:
        starts.append(length)
        said.append(decoder.decode(piece))
        length += len(said[-1])
    said.append(decoder.decode(b"", final=True))
    whole = "".join(said)
    if not whole.endswith(text):
        return whole, starts
    more = len(whole) - len(text)
    return text, [max(0, start - more) for start in starts]
