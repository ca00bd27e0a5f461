"""From tokens to the deltas of an answer: incremental decoding, stop strings, regions.

    token ids --table--> bytes --UTF-8 decoder--> characters --stop strings--> text --regions--> for the client
                          |-- holds back an incomplete character --|-- holds back a possible stop string --|

Only chat answers whose model has a response template are cut into regions (`regions.py`).

Tokens are decoded through a table of their bytes.  The bytes of a token do not depend on its neighbours, so the text
does not depend on how the tokens are split into deltas.  Exception: in vocabularies of words the first token of a text
has no space before it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence

from quire.engine.wire.messages import CONSTRAINT, Finish, TokenLogprob
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.delivery.mailbox import REQUEST_LOST, Mailbox
from quire.service.delivery.open_request import OpenRequest
from quire.service.delivery.queue_updates import Waiting
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.content_scores import ContentScores, Score
from quire.service.output.regions import split
from quire.service.text.region_stream import RegionStream
from quire.service.text.stop_strings import StopStrings
from quire.service.text.token_decoder import TextStream
from quire.service.text.tokenizer import Tokenizer

Taken = tuple[list[int], list[TokenLogprob] | None, Finish | None]  # content of a mailbox: tokens, logprobs, end
SLICE_TOKENS = 64  # number of short tokens that are decoded before the clock is checked
TOKEN_WEIGHT = 8  # minimum weight of a token; a longer token weighs its bytes
# Weight of tokens that are decoded before the clock is checked, in bytes, since some tokens are very long.
SLICE_WEIGHT = SLICE_TOKENS * TOKEN_WEIGHT


def _failure(finish: Finish, waiting: Waiting | None, valid: ValidRequest) -> Refusal:
    """Return the error for a choice whose finish reason is neither "stop" nor "length"."""
    if finish.reason == "deadline":
        message = "the request's timeout passed before the answer was complete"
        return Refusal(504, "deadline_exceeded", message + (waiting.describe() if waiting is not None else ""))
    if finish.reason == "cancelled":
        return Refusal(503, "cancelled", "the request was cancelled by the server", retry_after_s=1.0)
    if finish == REQUEST_LOST:
        return Refusal(503, "request_lost", finish.message, retry_after_s=1.0)
    if finish.code == CONSTRAINT:
        return Refusal(400, "unsupported", finish.message, param=valid.grammar_param or None)
    return Refusal(500, "engine_error", finish.message or "the engine failed on this request")


async def decode(
    opened: OpenRequest, valid: ValidRequest, tokenizer: Tokenizer, *, each_token: bool = False
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield lists of new deltas for the client of an open request; an empty list is a heartbeat.

    `each_token`: each delta has one token, and the end is a delta of its own.  So the deltas depend on the tokens
    alone, not on how they arrive.

    Ends when every choice has finished.  A stop string closes its choice, also in the engine.  Raises Refusal when a
    choice fails: one failure ends the complete request."""
    stops = StopStrings(valid.stop)
    await stops.prepare()
    streams = [stream_of(valid, tokenizer, stops) for _ in opened.mailboxes]
    work = LongWork(opened.pacer)
    async for changed in opened:
        deltas: list[ChoiceDelta] = []
        work.begin()
        for mailbox in changed:
            taken, stream = mailbox.take(), streams[mailbox.choice]
            await _catch_up(mailbox, stream, work, tokenizer.vocabulary.table)
            for one in _singly(taken, valid) if each_token else _slices(taken, tokenizer.vocabulary.table):
                if await work.does(weight_of(one[0], tokenizer.vocabulary.table)) and deltas:
                    yield deltas
                    deltas = []
                delta = _read(one, mailbox, stream, valid, opened.waiting)
                deltas.append(delta)
                if delta.finish is not None:
                    opened.end(mailbox.choice)
                    break
        if deltas or not changed:
            yield deltas


class LongWork:
    """Lets other requests run, after a time slice, while a handler decodes many tokens."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._time = asyncio.get_running_loop().time
        self._weight, self._until = 0, 0.0

    def begin(self) -> None:
        """Begin to count anew, for tokens that have just arrived."""
        self._weight, self._until = 0, 0.0

    async def does(self, weight: int) -> bool:
        """Count the weight of the tokens to decode next.  Returns whether other requests ran during this call."""
        self._weight += weight
        if self._weight <= SLICE_WEIGHT or self._time() < self._until:
            return False
        self._until = await self._pacer.slice()
        return True


def weight_of(tokens: Sequence[int], table: list[bytes]) -> int:
    """Return the cost of decoding tokens: their bytes, at least TOKEN_WEIGHT each.  `table`: bytes of each token id."""
    size = len(table)
    return sum(max(TOKEN_WEIGHT, len(table[token])) if token < size else TOKEN_WEIGHT for token in tokens)


def edges_of(tokens: Sequence[int], table: list[bytes]) -> list[int]:
    """Return the boundaries, with 0 and the end, of slices of tokens: at most SLICE_WEIGHT or one token per slice."""
    edges, weight = [0], 0
    for at, token in enumerate(tokens):
        one = weight_of((token,), table)
        if weight and weight + one > SLICE_WEIGHT:
            edges.append(at)
            weight = 0
        weight += one
    return [*edges, len(tokens)]


def _slices(taken: Taken, table: list[bytes]) -> Iterator[Taken]:
    """Yield the content of a mailbox in parts of SLICE_WEIGHT."""
    tokens, logprobs, finish = taken
    if len(tokens) <= 1:
        yield taken
        return
    for first, end in itertools.pairwise(edges_of(tokens, table)):
        scores = None if logprobs is None else logprobs[first:end]
        yield tokens[first:end], scores, finish if end == len(tokens) else None


def _singly(taken: Taken, valid: ValidRequest) -> Iterator[Taken]:
    """Yield the content of a mailbox token by token, and then the end.

    The entry of the end contains the stop token if that is not shown to the client."""
    tokens, logprobs, finish = taken
    shown = len(tokens) - (_hides_last(finish, valid) and bool(tokens))

    def scores(first: int, end: int) -> list[TokenLogprob] | None:
        return None if logprobs is None else logprobs[first:end]

    for at, token in enumerate(tokens[:shown]):
        yield [token], scores(at, at + 1), None
    if finish is not None:
        yield tokens[shown:], scores(shown, len(tokens)), finish


def stream_of(valid: ValidRequest, tokenizer: Tokenizer, stops: StopStrings | None = None) -> TextStream | RegionStream:
    """Return a new decoder for one choice.  `stops`: the stop strings of `valid`, shared by all its choices."""
    stops = StopStrings(valid.stop) if stops is None else stops
    regions = valid.reading is not None and tokenizer.chat.responses is not None
    scores = ContentScores() if valid.chat and valid.sampling.logprobs >= 0 else None
    text = TextStream(
        tokenizer,
        stop=() if regions else stops,
        include_stop=valid.include_stop,
        skip_special=valid.skip_special,
        min_tokens=valid.sampling.min_tokens,
        track_offsets=valid.sampling.logprobs >= 0,
        markers=valid.reading is not None,
    )
    if valid.reading is None or tokenizer.chat.responses is None:
        text.scores = scores
        return text
    return RegionStream(
        text,
        tokenizer.chat.responses,
        valid.reading,
        stops,
        include_stop=valid.include_stop,
        min_tokens=valid.sampling.min_tokens,
        scores=scores,
    )


async def reasoning_tokens(valid: ValidRequest, tokenizer: Tokenizer, tokens: list[int], pacer: Pacer) -> int:
    """Return how many of `tokens`, the first tokens of an answer, are reasoning."""
    if valid.reading is None:
        return 0
    stream, work = stream_of(valid, tokenizer), LongWork(pacer)
    for first, end in itertools.pairwise(edges_of(tokens, tokenizer.vocabulary.table)):
        await work.does(SLICE_WEIGHT)
        stream.push(tokens[first:end])
    return stream.reasoning_tokens if isinstance(stream, RegionStream) else 0


def _hides_last(finish: Finish | None, valid: ValidRequest) -> bool:
    """Return whether the last token is a stop token, which is counted and reported but is not part of the text."""
    return finish is not None and finish.stop_token >= 0 and not valid.include_stop


def _read(
    taken: Taken, mailbox: Mailbox, stream: TextStream | RegionStream, valid: ValidRequest, waiting: Waiting | None
) -> ChoiceDelta:
    """Decode the content of a mailbox to a delta.  Raises Refusal if the choice failed."""
    if isinstance(stream, RegionStream):
        return _read_regions(taken, mailbox, stream, valid, waiting)
    tokens, logprobs, finish = taken
    if mailbox.had:
        _replay(mailbox, stream, over=not tokens and finish is not None, hides_last=_hides_last(finish, valid))
    if stream.matched is not None:
        tokens = []  # drop tokens that the engine computed before the withdrawal reached it
    before = stream.tokens
    text = stream.push(tokens[:-1] if _hides_last(finish, valid) else tokens)
    delta = ChoiceDelta(
        mailbox.choice, text, tokens, cached_tokens=mailbox.cached_tokens, predictions=mailbox.predictions
    )
    if stream.matched is None and finish is not None:
        if finish.reason not in ("stop", "length"):
            raise _failure(finish, waiting, valid)
        delta.text += stream.finish()
        _add_finish(delta, finish, valid, stream)
    if stream.matched is not None:
        delta.token_ids = tokens[: stream.tokens - before]
        delta.finish, delta.stop_reason = "stop", stream.matched
    _add_scores(delta, mailbox, stream, valid, logprobs)
    if valid.max_tokens == 0:
        _drop_output(delta)
    return delta


def _add_finish(delta: ChoiceDelta, finish: Finish, valid: ValidRequest, stream: TextStream | RegionStream) -> None:
    delta.finish = finish.reason
    if finish.stop_token in valid.sampling.stop_token_ids:
        delta.stop_reason = stream.named(finish.stop_token, valid.stop) or finish.stop_token
    _add_search(delta, finish, valid)


def _add_search(delta: ChoiceDelta, finish: Finish | None, valid: ValidRequest) -> None:
    """Add beam search's score and token counts to a delta."""
    if valid.beams is not None and finish is not None:
        delta.score, delta.searched, delta.shared = finish.score, finish.searched, finish.shared


def _drop_output(delta: ChoiceDelta) -> None:
    """Remove the output token that an engine computes even with `max_tokens: 0`, which only scores the prompt."""
    delta.text, delta.token_ids = "", []
    if delta.logprobs is not None:
        delta.logprobs, delta.offsets, delta.content = [], [], []
    if delta.finish is not None:
        delta.finish, delta.stop_reason = "length", None


def _read_regions(
    taken: Taken, mailbox: Mailbox, stream: RegionStream, valid: ValidRequest, waiting: Waiting | None
) -> ChoiceDelta:
    """Decode the content of a mailbox to a delta of an answer with regions.  Raises Refusal if the choice failed."""
    tokens, logprobs, finish = taken
    hides_last = _hides_last(finish, valid)
    if mailbox.had:
        _replay(mailbox, stream, over=not tokens and finish is not None, hides_last=hides_last)
    before = stream.tokens
    if not stream.complete:
        stream.push(tokens[:-1] if hides_last else tokens)
    delta = ChoiceDelta(
        mailbox.choice, "", tokens, cached_tokens=mailbox.cached_tokens, predictions=mailbox.predictions
    )
    if stream.complete:  # drop tokens that the engine computed before the withdrawal reached it
        delta.token_ids = tokens[: stream.tokens - before]
        delta.finish, delta.stop_reason = "stop", stream.matched
        _add_search(delta, finish, valid)
    elif finish is not None:
        if finish.reason not in ("stop", "length"):
            raise _failure(finish, waiting, valid)
        if hides_last and tokens:
            stream.count_hidden()
        stream.finish(cut=finish.reason == "length")
        _add_finish(delta, finish, valid, stream)
        if stream.matched is not None:  # a stop string was found in text that had been held back
            delta.finish, delta.stop_reason = "stop", stream.matched
    if delta.finish == "stop" and stream.called:
        delta.finish = "tool_calls"
    delta.parts = stream.take()
    delta.text, delta.reasoning, delta.calls = split(delta.parts)
    delta.reasoning_tokens = stream.reasoning_tokens
    _add_scores(delta, mailbox, stream, valid, logprobs)
    return delta


async def _catch_up(mailbox: Mailbox, stream: TextStream | RegionStream, work: LongWork, table: list[bytes]) -> None:
    """Decode the tokens that a resuming client already has, except the last slice, which `_replay` decodes."""
    had, at = mailbox.had, 0
    for first, at in itertools.pairwise(edges_of(had, table)[:-1]):
        await work.does(SLICE_WEIGHT)
        _decode_had(stream, had[first:at], mailbox.had_logprobs and mailbox.had_logprobs[first:at], over=False)
    if at:
        mailbox.had = had[at:]
        mailbox.had_logprobs = mailbox.had_logprobs and mailbox.had_logprobs[at:]


def _replay(mailbox: Mailbox, stream: TextStream | RegionStream, *, over: bool, hides_last: bool) -> None:
    """Decode the tokens that a resuming client already has, without sending their text again.

    `over`: the client has all tokens of the choice, and only its end is missing."""
    tokens = mailbox.had[:-1] if over and hides_last else mailbox.had
    _decode_had(stream, tokens, mailbox.had_logprobs, over=over)
    mailbox.had, mailbox.had_logprobs = [], None


def _decode_had(
    stream: TextStream | RegionStream, tokens: list[int], logprobs: Sequence[TokenLogprob] | None, *, over: bool
) -> None:
    text = ""
    if isinstance(stream, RegionStream):
        stream.push(tokens)
        if over:
            stream.finish()
        stream.take()
    else:
        text = stream.push(tokens) + (stream.finish() if over else "")
    offsets = stream.take_offsets()
    if stream.scores is not None:  # an entry that waits for further text is sent with that text
        _content_scores(stream, tokens, logprobs or [], offsets, text, final=over)


def _add_scores(
    delta: ChoiceDelta,
    mailbox: Mailbox,
    stream: TextStream | RegionStream,
    valid: ValidRequest,
    logprobs: list[TokenLogprob] | None,
) -> None:
    """Add the requested log probabilities to a delta: of the prompt, and of the new tokens."""
    if valid.sampling.prompt_logprobs >= 0:
        delta.prompt_logprobs, mailbox.prompt_logprobs = mailbox.prompt_logprobs, None
    if valid.sampling.logprobs >= 0:
        _add_logprobs(delta, stream, logprobs or [])


def _add_logprobs(delta: ChoiceDelta, stream: TextStream | RegionStream, logprobs: list[TokenLogprob]) -> None:
    delta.logprobs = logprobs[: len(delta.token_ids)]
    delta.offsets = stream.take_offsets()
    if len(delta.offsets) < len(delta.token_ids):  # a stop token that is not part of the text
        delta.offsets.append(stream.chars)
    if stream.scores is not None:
        final, tokens = delta.finish is not None, delta.token_ids
        delta.content = _content_scores(stream, tokens, logprobs, delta.offsets, delta.text, final=final)


def _content_scores(
    stream: TextStream | RegionStream,
    tokens: list[int],
    logprobs: Sequence[TokenLogprob],
    offsets: list[int],
    text: str,
    *,
    final: bool,
) -> list[Score]:
    """Return the new entries of `logprobs.content`.

    `offsets`: characters before each token.  `text`: new content of an answer without regions."""
    scores = stream.scores
    assert scores is not None
    for token, at, start, end in zip(tokens, logprobs, offsets, [*offsets[1:], stream.chars], strict=False):
        scores.add(token, at, start, end, stream.bytes_of(token))
    if isinstance(stream, RegionStream):
        for start, part in stream.take_released():
            scores.release(start, part)
    else:
        scores.release_next(text)
    return scores.take(final=final)
