"""Beam groups: the beams of one request as sequences of the batch, re-forked after every step.

A group is one request with `beams.width` sequences.  The first sequence is the leader: it represents all of them in the
queue and computes the prompt.  A beam does not decode like other sequences, because the search chooses its next token
and its parent beam together with those of the other beams.  So each step computes a beam as a prompt that has grown by
one token.  The beam's slice requests candidates, the top-k next tokens, instead of a sampled token:

    plan      Slice(token, candidates) for every beam · edits of tables · copies of last blocks that are shared
    result    candidates of every slot
    commit    BeamSearch chooses the next beams (parent, token); `_refork` moves tables and tokens:

        slot 0  [7 2 9]        slot 0  [7 2 9]  first child of beam 0: stays
        slot 1  [7 2 4]  --->  slot 1  [7 2 9]  second child of beam 0: takes the slot of beam 1, whose block 4 is freed
        slot 2  [7 5 6]        slot 2  [7 5 6]  child of beam 2: stays

A re-fork copies no KV: the plan sends only the changed table entries.  Beams must not write to a shared last block, so
the next plan copies it for all beams that share it, except one.

With several steps in flight, a group computes nothing until its candidates have arrived; other sequences continue.

A group is preempted as a whole and always recomputed, never swapped.  When it starts again, each beam shares the full
blocks that it has in common with an earlier beam, so the group takes no more blocks than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.beams import BeamSearch, Child, Row
from quire.engine.core.blocks import BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.limits import Limits
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.sequence_group import Candidates, Choice, Moves, Outputs
from quire.engine.wire.messages import LENGTH_PENALTIES, Finish, FinishReason, Generate, Sampling, TokenLogprob

SHARING_EVERY = 8  # output tokens between two counts of a group's blocks; a count takes 1 us per 30 table entries


class BeamGroup:
    """The beams of one request: a stepped group (sequence_group.py)."""

    swappable = False

    def __init__(
        self,
        beams: list[Sequence],
        search: BeamSearch,
        answered: set[int],
        pool: BlockPool,
        batch: Batch,
        layers: LayerGroups,
    ) -> None:
        self.request = beams[0].request
        self.beams = beams
        self.search = search
        self._pool, self._batch, self._layers = pool, batch, layers
        self._unsent = set(range(self.request.n)) - answered  # indices of answers that the client waits for
        self._withdrawn: set[int] = set()  # indices of unsent answers that the client has cancelled
        self._order = list(beams)  # the member of each beam, in the order of `search.running`
        self._computed = 0  # tokens computed for beams that are in no Finish yet, which charges the tenant
        self._entries = self._blocks = 0  # block-table entries of all members, and distinct blocks: see `_count_blocks`
        self._rows: dict[int, Row] = {}  # candidates of this step that have arrived, by the index of the sequence
        # Members whose table has changed, by index, with the table that the executor has; None: the executor has none.
        self._moved: dict[int, list[int] | None] = {}

    @property
    def leader(self) -> Sequence:
        return self.beams[0]

    def members(self, seq: Sequence) -> list[Sequence]:
        return self.beams

    def leads(self, seq: Sequence) -> bool:
        return seq.index == 0

    def candidate_count(self, seq: Sequence) -> int:
        return self.search.row_size

    # ------------------------------------------------------------------------------------------------------- endings

    def awaits(self, seq: Sequence) -> bool:
        return seq.index in self._unsent

    def take_computed(self) -> int:
        """Return the number of tokens computed in all beams since the last call, to charge them to the tenant once."""
        computed, self._computed = self._computed, 0
        return computed

    def withdraw(self, index: int, unfinished: list[Sequence]) -> list[Sequence]:
        """Cancel one answer: it is not sent when the search is done.  All beams end if every answer is cancelled."""
        self._withdrawn.add(index)
        return unfinished if self._unsent <= self._withdrawn else []

    def successor(self, seq: Sequence) -> Sequence | None:
        """Return None: all beams of a group end together."""
        return None

    # --------------------------------------------------------------------------------------------------------- plans

    @property
    def in_step(self) -> bool:
        return self.search.started and all(
            seq.state is State.PREFILLING and seq.known == seq.computed + 1 for seq in self.beams
        )

    def blocks_to_step(self) -> int:
        at, size = self.leader.computed, self._pool.block_size
        if at % size == 0:
            return len(self.beams)
        last = Counter(seq.table[at // size] for seq in self.beams)
        return sum(count - 1 for count in last.values())

    def take_moves(self, seq: Sequence) -> Moves:
        if seq.index not in self._moved:
            return False, []
        before = self._moved.pop(seq.index)
        if before is None:
            return True, []
        return False, [(i, block) for i, block in enumerate(seq.table) if i >= len(before) or before[i] != block]

    def join(self, leader: Sequence) -> Iterator[Sequence]:
        """Iterate over the other beams when a preempted group starts again.

        Each beam shares the full blocks that it has in common with an earlier beam.  Empty for a group without output
        tokens: its beams fork when the search begins."""
        if not self.search.started:
            return
        size = self._pool.block_size
        for seq in self.beams[1:]:
            shared, parent = max(
                ((common_blocks(seq, other, other.computed, size), other) for other in self.beams[: seq.index]),
                key=lambda candidate: candidate[0],
            )
            seq.table, seq.computed = parent.table[:shared], shared * size
            self._pool.acquire(seq.table)
            self._layers.share(parent, shared, seq)
            seq.digests = parent.digests[:shared]
            self._join_batch(seq)
            yield seq

    def disband(self, seq: Sequence) -> list[Sequence]:
        size = self._pool.block_size
        self._rows, self._moved = {}, {}
        for at, member in enumerate(self.beams):
            shared = max((common_blocks(member, other, other.known, size) for other in self.beams[:at]), default=0)
            # New blocks of this beam: its full length, minus the blocks that it shares with an earlier beam.
            member.fork_blocks = -(-(member.known + 1) // size) - shared if self.search.started else 1
        return self.beams

    def gather(self, members: list[Sequence]) -> None:
        members[0].siblings = members[1:]

    # ------------------------------------------------------------------------------------------------------- results

    @property
    def done(self) -> bool:
        return self.search.done

    def take(self, seq: Sequence, candidates: Candidates) -> bool:
        self._rows[seq.index] = candidates
        return len(self._rows) == (len(self.beams) if self.search.started else 1)

    def advance(self) -> int:
        """Let the search choose the next beams, and give every member the table and tokens of its new beam."""
        parents = self._order if self.search.started else [self.leader]
        rows, self._rows = [self._rows[seq.index] for seq in parents], {}
        self._computed += self.search.width
        if children := self.search.advance(rows):
            self._refork(children)
        return self.search.width

    def finished(self) -> list[Choice]:
        """Return the best answers, then the cancelled choices."""
        answers = {index: self.search.answers[index] for index in sorted(self._unsent - self._withdrawn)}
        paths = {index: answer.path.unroll() for index, answer in answers.items()}
        searched = self.take_computed() - sum(len(tokens) for tokens, _ in paths.values())
        choices = []
        for index, answer in answers.items():
            tokens, logprobs = paths[index]
            reason: FinishReason = "stop" if answer.stopped else "length"
            finish = Finish(reason, tokens[-1] if answer.stopped else -1, "", answer.score, searched, self._shared)
            searched = 0
            scored = [TokenLogprob(logprob) for logprob in logprobs] if self.request.sampling.logprobs >= 0 else None
            choices.append(Choice(self.beams[index], finish, tokens, scored, self.leader.cached_tokens))
        self._unsent -= answers.keys()
        return choices + [Choice(self.beams[index], Finish("cancelled"), []) for index in sorted(self._unsent)]

    def _refork(self, children: list[Child]) -> None:
        """Give every member the table and tokens of its new beam.  The first child of a beam keeps the beam's slot."""
        self._count_blocks()
        parents = self._order
        stays: dict[int, Sequence] = {}  # index of the child -> the member that gets this child
        taken: set[int] = set()  # indices of members that have a child
        for at, (parent, _) in enumerate(children):
            if (seq := parents[parent]).index not in taken:
                taken.add(seq.index)
                stays[at] = seq
        free = [seq for seq in self.beams if seq.index not in taken]
        for at, (parent, token) in enumerate(children):
            if at in stays:
                continue
            seq, source = free.pop(0), parents[parent]
            self._pool.acquire(source.table)
            self._pool.release(seq.table)
            self._layers.share(source, len(source.table), seq)
            if seq.state is State.WAITING:  # before its first token a beam has a slot but is not in the batch
                self._join_batch(seq)
            else:
                self._moved.setdefault(seq.index, seq.table)
            seq.table, seq.digests = list(source.table), list(source.digests)
            seq.tokens, seq.computed = [*source.tokens, token], source.computed
            stays[at] = seq
        for seq, (parent, token) in ((stays[at], child) for at, child in enumerate(children)):
            if seq is parents[parent]:
                seq.tokens.append(token)
        self._order = [stays[at] for at in range(len(children))]

    def _join_batch(self, seq: Sequence) -> None:
        """Start a beam in the slot that it has already; the executor has no table for this slot yet."""
        self.leader.siblings.remove(seq)
        seq.started_before = True
        self._batch.join(seq)
        self._moved[seq.index] = None

    def _count_blocks(self) -> None:
        """Count table entries and distinct blocks of the beams, every SHARING_EVERY tokens.  O(entries)."""
        output = self.leader.known - self.leader.prompt_len
        if output % SHARING_EVERY == 2:  # with 1 output token the KV cache holds only the prompt
            self._entries += sum(len(seq.table) for seq in self.beams)
            self._blocks += len({block for seq in self.beams for block in seq.table})

    @property
    def _shared(self) -> float:
        """1 - distinct blocks / entries of the beams' tables, over the search so far; 0.0 before its second token.

        Blocks that other requests share, too, count once.  Source: see `Occupancy.shared_fraction`."""
        return 1 - self._blocks / self._entries if self._entries else 0.0


class BeamGroups:
    """The group kind of beam-search requests."""

    def __init__(self, pool: BlockPool, batch: Batch, limits: Limits, layers: LayerGroups) -> None:
        self._pool, self._batch, self._limits, self._layers = pool, batch, limits, layers

    def takes(self, request: Generate) -> bool:
        return request.beams is not None

    def outputs(self, request: Generate, outputs: Outputs) -> Outputs:
        """Return empty outputs: an interrupted search starts again from the prompt, since no partial answer was sent.

        Returns an empty list if all answers have been sent."""
        assert request.beams is not None
        return [[]] * max(request.n, request.beams.width) if outputs.count(None) < request.n else []

    def refusal(self, request: Generate, limit: int) -> str:
        beams, limits, size = request.beams, self._limits, self._pool.block_size
        assert beams is not None
        if limits.recurrent:
            return "beam search is not supported for models with recurrent state"
        if not limits.beams:
            return "this engine does not support beam search"
        if not request.n <= beams.width <= limits.max_seqs:
            return f"the beam width is {beams.width}; it must be {request.n} (n) to {limits.max_seqs} (slots) here"
        if reason := unsupported(request.sampling):
            return f"{reason} cannot be combined with beam search"
        least, most = LENGTH_PENALTIES
        if not least <= beams.length_penalty <= most:  # true for NaN
            return f"length_penalty is {beams.length_penalty}; it must be {least:g} to {most:g}"
        blocks = beams.max_blocks(len(request.token_ids), limit, size)
        if blocks > self._pool.total:
            return (
                f"{beams.width} beams of {limit} tokens, prompt included, take {blocks} blocks; "
                f"this engine has {self._pool.total}"
            )
        return ""

    def open(self, request: Generate, members: list[Sequence], answered: set[int]) -> BeamGroup:
        assert request.beams is not None
        leader = members[0]
        search = BeamSearch(
            request.beams,
            leader.stops,
            leader.limit - leader.prompt_len,
            min_tokens=request.sampling.min_tokens,
            vocab_size=self._limits.vocab_size,
        )
        return BeamGroup(members, search, answered, self._pool, self._batch, self._layers)


def common_blocks(seq: Sequence, other: Sequence, computed: int, size: int) -> int:
    """Return the number of full blocks with equal tokens at the beginning of `seq` and of `other`[:computed].

    Excludes the last token of `seq`, which must be computed to get the next candidates."""
    limit = min(computed, seq.known - 1)
    pairs = zip(seq.tokens[:limit], other.tokens[:limit], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // size


def unsupported(sampling: Sampling) -> str:
    """Return a sampling setting that beam search does not support, with its value; '' when all are supported."""
    asked = {
        "a grammar": sampling.grammar != "",
        f"presence_penalty {sampling.presence_penalty}": sampling.presence_penalty != 0,
        f"frequency_penalty {sampling.frequency_penalty}": sampling.frequency_penalty != 0,
        f"repetition_penalty {sampling.repetition_penalty}": sampling.repetition_penalty != 1,
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
        f"logprobs {sampling.logprobs}": sampling.logprobs > 0,
        "logprob_token_ids": bool(sampling.logprob_token_ids),
        f"prompt_logprobs {sampling.prompt_logprobs}": sampling.prompt_logprobs >= 0,
    }
    return next((name for name, is_set in asked.items() if is_set), "")
