"""Mailboxes: the tokens that wait for one reader, one mailbox for each choice, and the bound on all of them.

At most MAILBOX_BYTES of a slow reader's tokens wait here.  The rest stays in the token log, and is read from there in
parts of that size when the reader gets to it.  So a chunk is bounded too, however far its reader has fallen behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from quire.engine.wire.messages import Delta, Finish, Predictions, TokenLogprob
from quire.engine.wire.token_log import LoggedOutput

MAILBOX_BYTES = 8 * 1024  # waiting for a slow reader of one choice; a first delta may be larger
TOKEN_BYTES = 4
LOGPROB_BYTES = 128  # bytes of one alternative with its token, as Python keeps it
REFILL_TOKENS = 64  # read from the log at a time, at least, even if their logprobs pass MAILBOX_BYTES
LOST = Finish("error", message="tokens were lost on the way from the engine")


class Backlog:
    """How many bytes wait in all mailboxes of a gateway, and the limit."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.held, self.limit = 0, limit


class Mailbox:
    """What one choice received and its handler has not taken yet: one merged delta, not a queue of them.

        0 ............ at ............... at + waiting ............... next
        | taken        | waiting here     | only in the log: `behind`  |

    `next` is the position after the last token that the engine is known to have produced."""

    __slots__ = (
        "_backlog",
        "_finish",
        "_logprobs",
        "_sample",
        "_tokens",
        "_weight",
        "at",
        "cached_tokens",
        "choice",
        "closed",
        "ended",
        "had",
        "had_logprobs",
        "lost",
        "next",
        "predictions",
        "prompt_logprobs",
        "repeated",
    )

    def __init__(self, choice: int, backlog: Backlog) -> None:
        self.choice = choice
        self.at = 0  # output position of the next token to take
        self.next = 0
        self.lost = self.repeated = 0  # tokens that even the log lacks, and tokens that arrived twice
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.predictions: Predictions | None = None  # as the last delta that has some counts them
        self.had: list[int] = []  # tokens before `at`, which a resuming client already has
        self.had_logprobs: Sequence[TokenLogprob] | None = None
        self.ended = False  # a Finish arrived, or this gateway set one: no more tokens will arrive
        self.closed = False  # the handler takes no more
        self._tokens: list[int] | array[int] = []  # a list while it is one delta's own, which is never changed
        self._logprobs: list[TokenLogprob] | None = None
        self._sample: list[TokenLogprob] | None = None  # logprobs of one token, to estimate the size of others
        self._finish: Finish | None = None
        self._backlog, self._weight = backlog, 0

    @property
    def behind(self) -> bool:
        """Whether nothing waits here while the log has more."""
        return not self._tokens and self.next > self.at

    def merge(self, delta: Delta) -> bool:
        """Merge a delta.  Returns False when it adds nothing: a replay, or after the end."""
        if self.ended or self.closed:
            return False
        tokens, end = delta.token_ids, delta.first + len(delta.token_ids)
        fresh = end - self.next
        if fresh <= 0 and delta.finish is None:
            self.repeated += len(tokens)
            return False
        if fresh > 0:
            if fresh <= len(tokens) and self.next == self.at + len(self._tokens):  # no gap before it
                logprobs = delta.logprobs
                if fresh < len(tokens):  # the rest was replayed after a crash or a reconnect
                    self.repeated += len(tokens) - fresh
                    tokens = tokens[-fresh:]
                    logprobs = logprobs[-fresh:] if logprobs is not None else None
                self._keep(tokens, logprobs)
            self.next = end
        else:
            self.repeated += len(tokens)
        if delta.first == 0:
            self.cached_tokens, self.prompt_logprobs = delta.cached_tokens, delta.prompt_logprobs
        if delta.predictions is not None:
            self.predictions = delta.predictions
        if delta.finish is not None:
            self._end(delta.finish)
        return True

    def _keep(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Append tokens, unless too much waits already."""
        weight = _weight(len(tokens), logprobs)
        if not self._tokens:
            self._tokens, self._logprobs = tokens, logprobs
            self._sample = logprobs
        elif self._weight + weight > MAILBOX_BYTES or self._backlog.held + weight > self._backlog.limit:
            return
        else:
            if isinstance(self._tokens, list):
                self._tokens = array("I", self._tokens)
            self._tokens.extend(tokens)
            if logprobs is not None:
                self._logprobs = [*(self._logprobs or ()), *logprobs]
        self._weight += weight
        self._backlog.held += weight

    @property
    def refill_tokens(self) -> int:
        """How many tokens to read from the log at a time, so that they fit here."""
        return max(REFILL_TOKENS, MAILBOX_BYTES // _weight(1, self._sample))

    def refill(self, logged: LoggedOutput | None) -> None:
        """Fill a mailbox that is `behind` with what the log has from `at` on; None: the log is gone."""
        if logged is None:
            self.fail(Finish("error", message="the answer is not kept any longer"))
        elif not logged.token_ids:
            self.lost += self.next - self.at
            self.fail(LOST)
        else:
            self._fill(logged)

    def _fill(self, logged: LoggedOutput) -> None:
        """Fill an empty mailbox with output that begins at `at`."""
        self.next = max(self.next, self.at + len(logged.token_ids))
        if self.at == 0:
            self.cached_tokens, self.prompt_logprobs = logged.cached_tokens, logged.prompt_logprobs
        if logged.finish is not None and not self.ended:
            self._end(logged.finish)
        if logged.token_ids:
            self._keep(logged.token_ids, None if logged.logprobs is None else list(logged.logprobs))

    def resume(self, logged: LoggedOutput, had: int) -> None:
        """Begin after the first `had` tokens of the logged output.  Deltas may have arrived meanwhile."""
        self.take()
        self.had, self.at, self.next = logged.token_ids[:had], had, max(self.next, had)
        self.cached_tokens, self.prompt_logprobs = logged.cached_tokens, logged.prompt_logprobs
        if logged.finish is not None:
            self.predictions = logged.finish.predictions
        self.had_logprobs = logged.logprobs[:had] if logged.logprobs is not None else None
        logprobs = logged.logprobs[had:] if logged.logprobs is not None else None
        # If it does not fit, all of it stays in the log: a mailbox holds what begins at `at`, or nothing.
        rest = msgspec.structs.replace(logged, token_ids=logged.token_ids[had:], logprobs=logprobs)
        self._sample = list(rest.logprobs[:1]) if rest.logprobs else None
        if len(rest.token_ids) <= self.refill_tokens:
            self._fill(rest)
        else:
            self.next = max(self.next, len(logged.token_ids))

    def _end(self, finish: Finish) -> None:
        self._finish, self.ended = finish, True
        self.predictions = finish.predictions or self.predictions

    def fail(self, finish: Finish) -> None:
        """End this choice with `finish`.  Tokens that wait here stay."""
        self._finish, self.ended = finish, True
        self.next = self.at + len(self._tokens)

    def take(self) -> tuple[list[int], list[TokenLogprob] | None, Finish | None]:
        """Empty the mailbox.  Returns tokens, their logprobs if asked for, and the Finish once nothing precedes it."""
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], None
        self._backlog.held -= self._weight
        self._weight = 0
        self.at += len(tokens)
        finish = self._finish if self.at == self.next else None
        return tokens if isinstance(tokens, list) else tokens.tolist(), logprobs, finish


def _weight(tokens: int, logprobs: list[TokenLogprob] | None) -> int:
    """Return the bytes that waiting tokens take.  The first entry of logprobs stands for all."""
    if not logprobs:
        return TOKEN_BYTES * tokens
    return tokens * (TOKEN_BYTES + LOGPROB_BYTES * (1 + len(logprobs[0].top)))
