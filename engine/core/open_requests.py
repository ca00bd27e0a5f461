"""Open requests: the sequences that have not finished, and the deadlines."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from quire.engine.core.limits import Limits
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.sequence_group import Outputs
from quire.engine.wire.messages import Generate, Sampling


class OpenRequests:
    """Every request between accept() and its last Finish."""

    def __init__(self) -> None:
        self.tenants: Counter[str] = Counter()  # open requests of each tenant
        self._groups: dict[str, list[Sequence]] = {}  # id -> its unfinished sequences
        self._deadlines: list[tuple[int, str]] = []  # heap of (deadline_ms, id); ended requests drop out lazily
        self._reassigned: list[Sequence] = []  # superset of the sequences that `behind` counts
        self._arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def sequences(self, request: Generate, outputs: Outputs, limits: Limits, room: int) -> list[Sequence]:
        """Build the unfinished sequences of a new request.  `room`: maximum tokens of a sequence."""
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= limits.eos_ids
        prompt = request.token_ids
        limit = min(len(prompt) + request.max_new_tokens, room)
        self._arrivals += 1
        return [
            Sequence(
                request,
                i,
                (self._arrivals, i),
                stops,
                limit,
                prompt + output,
                started_before=bool(output),
                recompute_tokens=len(prompt + output) - 1 if output else 0,
                reassigned=bool(output),
            )
            for i, output in enumerate(outputs)
            if output is not None
        ]

    def open(self, request: Generate, group: list[Sequence]) -> None:
        """Register a request with its unfinished sequences, at least one."""
        self._groups[request.id] = list(group)
        self.tenants[request.tenant] += 1
        heapq.heappush(self._deadlines, (request.deadline_ms, request.id))
        self._reassigned += [seq for seq in group if seq.reassigned]

    def close(self, seq: Sequence) -> bool:
        """Remove one sequence.  Returns whether it was the last unfinished sequence of its request."""
        group, request = self._groups[seq.request.id], seq.request
        group.remove(seq)
        if group:
            return False
        del self._groups[request.id]
        self.tenants[request.tenant] -= 1
        if not self.tenants[request.tenant]:
            del self.tenants[request.tenant]
        return True

    def unfinished(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request; empty for an unknown id."""
        return list(self._groups.get(request_id, ()))

    def live(self) -> Iterator[Sequence]:
        """Iterate over every sequence between accept() and its Finish."""
        for group in self._groups.values():
            yield from group

    def expired(self, now_ms: int) -> Iterator[str]:
        """Iterate over the ids of requests whose deadline has passed, each once; some may have ended already."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            yield heapq.heappop(self._deadlines)[1]

    @property
    def behind(self) -> int:
        """Number of sequences that an earlier engine began and this engine has not recomputed yet."""
        if self._reassigned:
            behind = (State.WAITING, State.PREFILLING)
            self._reassigned = [seq for seq in self._reassigned if seq.state in behind]
        return len(self._reassigned)


def refusal(request: Generate, outputs: Outputs | None, limits: Limits, room: int) -> str:
    """Return why this engine can never run the request, with the limit and the value; '' when it can."""
    prompt = request.token_ids
    tokens = [prompt, *(output for output in outputs or () if output)]
    if len(prompt) >= room:
        return f"the prompt has {len(prompt)} tokens; this engine holds {room}, output included"
    if not prompt or max(map(max, tokens)) >= limits.vocab_size or min(map(min, tokens)) < 0:
        return f"the prompt must hold token ids from 0 to {limits.vocab_size - 1}, at least one"
    if request.sampling.grammar and not limits.grammars:
        return "the answer must match a grammar, and this engine cannot enforce one"
    if request.adapter and not limits.adapter_slots:
        return "this engine takes no LoRA adapters"
    if outside := tokens_outside(request.sampling, limits.vocab_size):
        return outside
    if request.n > limits.max_seqs:
        return f"n is {request.n}; this engine runs at most {limits.max_seqs} sequences"
    return ""


def tokens_outside(sampling: Sampling, vocab_size: int) -> str:
    """Return an error for a sampling field with a token id outside the vocabulary; '' if all ids are valid.

    Such an id would index past the logits and masks, and fail the step of all sequences."""
    fields = (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("logprob_token_ids", sampling.logprob_token_ids),
        *(("bad_words", word) for word in sampling.bad_words),
    )
    for name, ids in fields:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            odd = next(token for token in ids if not 0 <= token < vocab_size)
            return f"{name}: token ids are 0 to {vocab_size - 1}, got {odd}"
        if name == "bad_words" and not ids:
            return f"bad_words: each entry needs at least 1 token id from 0 to {vocab_size - 1}, got 0"
    return ""
