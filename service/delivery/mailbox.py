"""Mailboxes: the undelivered tokens of one reader, one mailbox per choice, and the limit on all mailboxes together.

At most MAILBOX_BYTES of a slow reader's tokens wait in its mailbox.  Later tokens stay in the token log in Redis.  They
are read from there, MAILBOX_BYTES at a time, when the reader has taken the earlier ones.  So every event is bounded in
size, however slow its reader is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from quire.engine.wire.messages import Delta, Finish, Predictions, TokenLogprob
from quire.engine.wire.token_log import LoggedOutput

MAILBOX_BYTES = 8 * 1024  # maximum size of a mailbox; an empty mailbox takes any one delta, even a larger one
TOKEN_BYTES = 4
LOGPROB_BYTES = 128  # bytes of Python objects for one alternative token with its logprob
REFILL_TOKENS = 64  # minimum number of tokens per read of the log, even if their logprobs exceed MAILBOX_BYTES
LOST = Finish("error", message="tokens were lost on the way from the engine")
REQUEST_LOST = Finish("error", message="Redis has lost this request: send it again")


class Backlog:
    """Bytes that wait in all mailboxes of a gateway together (`held`), and the maximum (`limit`)."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.held, self.limit = 0, limit


class Mailbox:
    """Tokens of one choice that its handler has not taken yet, merged into one delta.

        0 ............ at ............... at + waiting ............... next
        | taken        | waiting here     | only in the log            |

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
        self.at = 0  # output position of the next token that the handler takes
        self.next = 0
        self.lost = self.repeated = 0  # tokens that even the log lacks; tokens that arrived twice
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.predictions: Predictions | None = None  # from the last delta that had predictions
        self.had: list[int] = []  # tokens before `at`, which a resuming client already has
        self.had_logprobs: Sequence[TokenLogprob] | None = None
        self.ended = False  # a Finish arrived, or this gateway set one: no more tokens will arrive
        self.closed = False  # the handler takes no more tokens
        self._tokens: list[int] | array[int] = []  # the list of one delta (never changed), or merged deltas as an array
        self._logprobs: list[TokenLogprob] | None = None
        self._sample: list[TokenLogprob] | None = None  # logprobs of one token, to estimate the bytes per token
        self._finish: Finish | None = None
        self._backlog, self._weight = backlog, 0

    @property
    def behind(self) -> bool:
        """Whether the mailbox is empty while the log has tokens that the handler has not taken."""
        return not self._tokens and self.next > self.at

    def merge(self, delta: Delta) -> bool:
        """Merge a delta. Returns False if the delta adds nothing: its tokens were replayed, or the choice has ended."""
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
                if fresh < len(tokens):  # the first tokens of the delta were replayed after a crash or a reconnect
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
        """Append tokens, unless the mailbox or the backlog of all mailboxes would exceed its limit."""
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
        """How many tokens to read from the log at a time, so that they fit into the mailbox."""
        return max(REFILL_TOKENS, MAILBOX_BYTES // _weight(1, self._sample))

    def refill(self, logged: LoggedOutput | None) -> None:
        """Fill a mailbox that is `behind` with the logged output from position `at`.

        `logged` is None if Redis has no log: a log does not expire while a client reads, so Redis has lost it."""
        if logged is None:
            self.fail(REQUEST_LOST)
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
        """Begin after the first `had` tokens of the logged output.

        Tokens that arrived before this call are read again."""
        self.take()
        self.had, self.at, self.next = logged.token_ids[:had], had, max(self.next, had)
        self.cached_tokens, self.prompt_logprobs = logged.cached_tokens, logged.prompt_logprobs
        if logged.finish is not None:
            self.predictions = logged.finish.predictions
        self.had_logprobs = logged.logprobs[:had] if logged.logprobs is not None else None
        logprobs = logged.logprobs[had:] if logged.logprobs is not None else None
        # A mailbox holds tokens from position `at` on, or none. If these do not fit, they all stay in the log.
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
        """End this choice with `finish`.

        Tokens in the mailbox are still delivered; tokens that are only in the log are not."""
        self._finish, self.ended = finish, True
        self.next = self.at + len(self._tokens)

    def take(self) -> tuple[list[int], list[TokenLogprob] | None, Finish | None]:
        """Empty the mailbox.  Returns its tokens, their logprobs if requested, and the Finish after the last token."""
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], None
        self._backlog.held -= self._weight
        self._weight = 0
        self.at += len(tokens)
        finish = self._finish if self.at == self.next else None
        return tokens if isinstance(tokens, list) else tokens.tolist(), logprobs, finish


def _weight(tokens: int, logprobs: list[TokenLogprob] | None) -> int:
    """Return the estimated bytes of waiting tokens.

    Every token is assumed to have as many alternatives as the first one."""
    if not logprobs:
        return TOKEN_BYTES * tokens
    return tokens * (TOKEN_BYTES + LOGPROB_BYTES * (1 + len(logprobs[0].top)))
