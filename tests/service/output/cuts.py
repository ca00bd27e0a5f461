"""An answer's tokens, cut into deltas at any places, as the pieces that a format writes."""

from __future__ import annotations

import itertools

from quire.engine.wire.messages import Delta, Finish
from quire.service.api.valid_request import ValidRequest
from quire.service.delivery.mailbox import Backlog, Mailbox
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.text.text_stream import _read, _singly, stream_of
from quire.service.text.tokenizer import Tokenizer


def pieces_of(
    tokenizer: Tokenizer,
    valid: ValidRequest,
    tokens: list[int],
    finish: Finish,
    cuts: list[int],
    *,
    each_token: bool = False,
) -> list[ChoiceDelta]:
    """The pieces of an answer whose deltas end at `cuts`, as `text_stream.decode` yields them."""
    stream, mailbox = stream_of(valid, tokenizer), Mailbox(0, Backlog(2**20))
    found: list[ChoiceDelta] = []
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    for first, end in itertools.pairwise(edges):
        last = finish if end == len(tokens) else None
        mailbox.merge(Delta("x", first, tokens[first:end], last, cached_tokens=16 if first == 0 else 0))
        taken = mailbox.take()
        for one in _singly(taken, valid) if each_token else [taken]:
            found.append(_read(one, mailbox, stream, valid, None))
            if found[-1].finish is not None:
                return found
    return found
