"""What waits for one reader: a mailbox for each continuation, and the bound on all of them.

A slow reader's tokens wait here, MAILBOX_BYTES of them at most; the rest stays in the token log, and is read from there
in parts of that size when its turn comes.  So a chunk is bounded as well, however far its reader has fallen behind.
"""

from __future__ import annotations

from array import array

import msgspec

from engine.wire.messages import Delta, Finish, TokenLogprob
from engine.wire.token_log import LoggedOutput

MAILBOX_BYTES = 8 * 1024  # of what waits for a slow reader of one choice, beside a first delta however large
TOKEN_BYTES = 4
LOGPROB_BYTES = 128  # of one alternative with its token, as Python keeps it
REFILL_TOKENS = 64  # at least, of what is read from the log at a time, even where their logprobs pass MAILBOX_BYTES
LOST = Finish("error", message="tokens were lost on the way from the engine")


class Backlog:
    """Bytes that wait in all mailboxes of a gateway, and how many may."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.held, self.limit = 0, limit


class Mailbox:
    """What one continuation has received and its handler has not taken yet: one merged delta, not a queue of them.

        0 ............ at ............... at + waiting ............... next
        | taken        | waiting here     | only in the log: `behind`  |

    `next` is how far the engine has come, as far as is known here."""

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
        "lost",
        "next",
        "prompt_logprobs",
        "repeated",
    )

    def __init__(self, choice: int, backlog: Backlog) -> None:
        self.choice = choice
        self.at = 0  # output position of the next token to take
        self.next = 0
        self.lost = self.repeated = 0  # tokens that are nowhere to be had, and that came twice
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.had: list[int] = []  # tokens before `at` that a client who has come back had already
        self.ended = False  # the engine (or this gateway, for it) said Finish: no more tokens will come
        self.closed = False  # the handler wants no more
        self._tokens: list[int] | array[int] = []  # a list while it is one delta's own, which is never changed
        self._logprobs: list[TokenLogprob] | None = None
        self._sample: list[TokenLogprob] | None = None  # what a token's logprobs look like
        self._finish: Finish | None = None
        self._backlog, self._weight = backlog, 0

    @property
    def behind(self) -> bool:
        """Nothing waits here, but there is more in the log."""
        return not self._tokens and self.next > self.at

    def merge(self, delta: Delta) -> bool:
        """Merge a delta; False when it brings nothing new (a replay, or after the end)."""
        if self.ended or self.closed:
            return False
        tokens, end = delta.token_ids, delta.first + len(delta.token_ids)
        fresh = end - self.next
        if fresh <= 0 and delta.finish is None:
            self.repeated += len(tokens)
            return False
        if fresh > 0:
            if fresh <= len(tokens) and self.next == self.at + len(self._tokens):  # no gap: neither missed nor left out
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
        if delta.finish is not None:
            self._finish, self.ended = delta.finish, True
        return True

    def _keep(self, tokens: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Add what follows, unless too much waits already."""
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
        """How many to read from the log at a time, so that they fit here."""
        return max(REFILL_TOKENS, MAILBOX_BYTES // _weight(1, self._sample))

    def refill(self, said: LoggedOutput | None) -> None:
        """Of a mailbox that is `behind`: what the log has from `at` on; None: it has nothing any more."""
        if said is None:
            self.fail(Finish("error", message="the answer is not kept any longer"))
        elif not said.token_ids:
            self.lost += self.next - self.at
            self.fail(LOST)
        else:
            self._fill(said)

    def _fill(self, said: LoggedOutput) -> None:
        """Nothing waits; this follows on `at`."""
        self.next = max(self.next, self.at + len(said.token_ids))
        if self.at == 0:
            self.cached_tokens, self.prompt_logprobs = said.cached_tokens, said.prompt_logprobs
        if said.finish is not None and not self.ended:
            self._finish, self.ended = said.finish, True
        if said.token_ids:
            self._keep(said.token_ids, said.logprobs)

    def resume(self, said: LoggedOutput, had: int) -> None:
        """Begin after the first `had` tokens of what was said so far.  Deltas may have come meanwhile."""
        self.take()
        self.had, self.at, self.next = said.token_ids[:had], had, max(self.next, had)
        self.cached_tokens, self.prompt_logprobs = said.cached_tokens, said.prompt_logprobs
        logprobs = said.logprobs[had:] if said.logprobs is not None else None
        # What does not fit stays in the log, all of it: a mailbox holds what follows on `at` or nothing.
        rest = msgspec.structs.replace(said, token_ids=said.token_ids[had:], logprobs=logprobs)
        self._sample = rest.logprobs[:1] if rest.logprobs else None
        if len(rest.token_ids) <= self.refill_tokens:
            self._fill(rest)
        else:
            self.next = max(self.next, len(said.token_ids))

    def fail(self, finish: Finish) -> None:
        """End this continuation from here; what waits here already stays."""
        self._finish, self.ended = finish, True
        self.next = self.at + len(self._tokens)

    def take(self) -> tuple[list[int], list[TokenLogprob] | None, Finish | None]:
        """What waits, its logprobs if asked for, and the Finish once nothing comes before it; empties the mailbox."""
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], None
        self._backlog.held -= self._weight
        self._weight = 0
        self.at += len(tokens)
        finish = self._finish if self.at == self.next else None
        return tokens if isinstance(tokens, list) else tokens.tolist(), logprobs, finish


def _weight(tokens: int, logprobs: list[TokenLogprob] | None) -> int:
    """Bytes that so many tokens take while they wait; a first entry stands for all."""
    if not logprobs:
        return TOKEN_BYTES * tokens
    return tokens * (TOKEN_BYTES + LOGPROB_BYTES * (1 + len(logprobs[0].top)))
