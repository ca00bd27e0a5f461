"""The scheduler's report: deltas for clients, milestones for metrics and the request log, and counts since start."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from quire.engine.core.batch import Batch
from quire.engine.core.limits import Event, Milestone, Outputs, Totals
from quire.engine.core.sequence import Sequence
from quire.engine.core.sequence_group import Choice
from quire.engine.wire.messages import Delta, Finish, FinishReason, TokenLogprob


class SchedulerReport:
    """Collects deltas and milestones until the engine loop takes them, and counts events."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        self.totals = Totals()
        self.deltas: defaultdict[str, list[Delta]] = defaultdict(list)  # deltas by gateway
        self._finished: list[str] = []
        self._events: list[Event] = []
        self._batch, self._block_size = batch, block_size

    def record(self, kind: Milestone, seq: Sequence, tokens: int = 0, reason: FinishReason | None = None) -> None:
        """Add a milestone; see Event for `tokens` and `reason`."""
        digests: list[bytes] = []
        if kind == "started":
            digests = seq.digests[: tokens // self._block_size]
        elif kind == "ended":
            digests = list(seq.digests)
        step = self._batch.step + (kind not in ("first", "ended"))
        self._events.append(Event(kind, seq.request, seq.index, tokens, reason, step, digests))

    def finish(self, seq: Sequence, finish: Finish) -> None:
        """Add a Finish without a token, for a sequence that ends before a stop token or its limit."""
        finish = with_predictions(finish, seq)
        delta = Delta(seq.request.id, seq.sent, [], finish, seq.index)
        self.deltas[seq.request.gateway].append(delta)

    def finish_choice(self, choice: Choice) -> None:
        """Add a complete choice of a beam search in one delta, with its Finish and both milestones."""
        seq, finish, tokens, logprobs, cached_tokens = choice
        delta = Delta(seq.request.id, 0, tokens, finish, seq.index, logprobs, cached_tokens)
        self.deltas[seq.request.gateway].append(delta)
        self.record("first", seq)
        self.record("ended", seq, len(tokens), finish.reason)

    def finish_request(self, request_id: str) -> None:
        """Add a request whose sequences have all ended."""
        self._finished.append(request_id)

    def take_outputs(self) -> Outputs:
        """Return everything since the last call."""
        out = Outputs(dict(self.deltas), self._finished, self._events)
        self.deltas, self._finished, self._events = defaultdict(list), [], []
        return out


def full_delta(seq: Sequence, first: int, finish: Finish | None, logprobs: list[TokenLogprob] | None) -> Delta:
    """Build a delta of the tokens from output position `first` on, with logprobs, cache counts and predictions."""
    return Delta(
        seq.request.id,
        first,
        seq.tokens[seq.prompt_len + first :],
        finish,
        seq.index,
        logprobs,
        seq.cached_tokens if first == 0 else 0,
        seq.prompt_logprobs or None if first == 0 else None,
        seq.predictions,
    )


def finish_of(seq: Sequence) -> Finish:
    """Return the Finish of a sequence whose last token is a stop token or reaches its limit."""
    last = seq.tokens[-1]
    return with_predictions(Finish("stop", last) if last in seq.stops else Finish("length"), seq)


def with_predictions(finish: Finish, seq: Sequence) -> Finish:
    """Add the counts of drafts from the client's `prediction` field to a Finish."""
    if seq.predictions is None:
        return finish
    return msgspec.structs.replace(finish, predictions=seq.predictions)
