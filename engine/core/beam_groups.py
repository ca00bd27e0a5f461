"""Beam groups: the beams of one request as sequences of the batch, re-forked after every step.

A group is one request with `beams.width` sequences.  The first one leads: it waits in the queue for all of them, and
computes the prompt.  A beam never decodes on its own, since its next token and its past are chosen for all beams
together.  So each step computes it as a prompt that has grown by one token.  Its slice asks for candidates, the
likeliest next tokens, in place of a sample:

    plan      Slice(token, candidates) for every beam · edits of tables · copies of last blocks that are shared
    result    candidates of every slot
    commit    BeamSearch chooses the next beams (parent, token); `refork` moves tables and tokens:

        slot 0  [7 2 9]        slot 0  [7 2 9]  first child of 0: stays
        slot 1  [7 2 4]  --->  slot 1  [7 2 9]  second child of 0: takes the place of 1, whose block 4 is free
        slot 2  [7 5 6]        slot 2  [7 5 6]  child of 2: stays

No KV moves.  Only table entries that differ are sent.  The next plan gives each beam a block of its own before it
writes: all beams that share a last block, except one, get a copy.

With several steps in flight, a group leaves out the steps until its candidates are here.  Others run on.

A group is preempted as a whole, and always computed again: its beams are copied to the host in no case.  When it
starts again, each beam shares the full blocks that it has in common with an earlier one, so the pool holds no more
than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.beams import BeamSearch, Child, Row
from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.sequence import Sequence, State
from quire.engine.wire.messages import LENGTH_PENALTIES, Generate, Sampling

SHARING_EVERY = 8  # tokens of output between two counts of a group's blocks, which take a microsecond for 30 entries


class BeamGroup:
    """The beams of one request."""

    def __init__(self, request: Generate, members: list[Sequence], search: BeamSearch, answered: set[int]) -> None:
        self.request = request
        self.members = members
        self.search = search
        self.unsent = set(range(request.n)) - answered  # answers that the client waits for
        self.withdrawn: set[int] = set()  # of these, answers that it has cancelled
        self.order = list(members)  # as in `search.running`
        self._computed = 0  # beams' tokens that no Finish has reported
        self._entries = self._blocks = 0  # of all tables, and blocks among them: see `count_blocks`
        self.rows: dict[int, Row] = {}  # candidates of this step that have arrived, by the index of the sequence
        # Sequences whose tables the executor does not know, with the tables that it does; None: the slot has none.
        self.moved: dict[int, list[int] | None] = {}

    @property
    def leader(self) -> Sequence:
        return self.members[0]

    @property
    def in_step(self) -> bool:
        """Whether every beam is to compute the token that was chosen last, and nothing more."""
        return self.search.started and all(
            seq.state is State.PREFILLING and seq.known == seq.computed + 1 for seq in self.members
        )

    @property
    def complete(self) -> bool:
        """Whether all candidates of this step have arrived."""
        return len(self.rows) == (len(self.members) if self.search.started else 1)

    def withdraw(self, index: int) -> bool:
        """Cancel one answer: it is not sent when the search is done.  Returns whether none is left to be found."""
        self.withdrawn.add(index)
        return self.unsent <= self.withdrawn

    def advance(self) -> list[Child]:
        """Let the search choose the next beams.  Empty: it is done."""
        asked = self.order if self.search.started else [self.leader]
        rows, self.rows = [self.rows[seq.index] for seq in asked], {}
        self._computed += self.search.width
        return self.search.advance(rows)

    def take_computed(self) -> int:
        """Return the tokens computed in all beams since the last call.  Their tenant is charged once."""
        computed, self._computed = self._computed, 0
        return computed

    def count_blocks(self) -> None:
        """Count what the beams share after a step, every SHARING_EVERY tokens.  O(entries of their tables)."""
        output = self.leader.known - self.leader.prompt_len
        if output % SHARING_EVERY == 2:  # with one token only the prompt is stored
            self._entries += sum(len(seq.table) for seq in self.members)
            self._blocks += len({block for seq in self.members for block in seq.table})

    @property
    def shared(self) -> float:
        """1 - blocks / entries of the beams' tables, over the search so far; 0.0 before its second token.

        Source: as `occupancy.shared_fraction`.  A block counts once, whatever other requests share it."""
        return 1 - self._blocks / self._entries if self._entries else 0.0


class BeamGroups:
    """Every open request with beams.  The scheduler and its parts ask it about any sequence."""

    def __init__(self, pool: BlockPool, batch: Batch, limits: Limits) -> None:
        self._pool, self._batch, self._limits = pool, batch, limits
        self._groups: dict[str, BeamGroup] = {}  # by request

    # ------------------------------------------------------------------------------------------- requests come and go

    def refusal(self, request: Generate, limit: int) -> str:
        """Return why this engine can never search the answers of a request, naming limit and value; '' when it can.

        `limit`: most tokens of a sequence."""
        beams, limits, size = request.beams, self._limits, self._pool.block_size
        if beams is None:
            return ""
        if not limits.beams or limits.allocation != "paged":
            return "the answers are to be found by beam search, and this engine has none"
        if not request.n <= beams.width <= limits.max_seqs:
            return f"the beam width is {beams.width}; it must be {request.n} (n) to {limits.max_seqs} (slots) here"
        if reason := unsupported(request.sampling):
            return f"{reason} does not go with beam search"
        least, most = LENGTH_PENALTIES
        if not least <= beams.length_penalty <= most:  # true for NaN
            return f"length_penalty is {beams.length_penalty}; it must be {least:g} to {most:g}"
        blocks = beams.most_blocks(len(request.token_ids), limit, size)
        if blocks > self._pool.total:
            return (
                f"{beams.width} beams of {limit} tokens, prompt included, take {blocks} blocks; "
                f"this engine has {self._pool.total}"
            )
        return ""

    def open(self, request: Generate, members: list[Sequence], answered: set[int]) -> None:
        """Register the sequences of a new request with beams; the answers in `answered` have been sent before."""
        if request.beams is None:
            return
        leader, limits = members[0], self._limits
        search = BeamSearch(
            request.beams,
            leader.stops,
            leader.limit - leader.prompt_len,
            min_tokens=request.sampling.min_tokens,
            vocab_size=limits.vocab_size,
        )
        self._groups[request.id] = BeamGroup(request, members, search, answered)

    def close(self, request_id: str) -> None:
        """Forget a request; harmless where it has no beams."""
        self._groups.pop(request_id, None)

    def find(self, request_id: str) -> BeamGroup | None:
        """Return the group of a request; None where it has no beams."""
        return self._groups.get(request_id)

    # ---------------------------------------------------------------------------------------------- of any sequence

    def members(self, seq: Sequence) -> list[Sequence]:
        """Return all beams of its group, the leader first; of a sequence without beams itself."""
        return group.members if (group := self._groups.get(seq.request.id)) else [seq]

    def leads(self, seq: Sequence) -> bool:
        """Whether the sequence stands for its group; one without beams stands for itself."""
        return seq.request.beams is None or seq.index == 0

    def awaited(self, seq: Sequence) -> bool:
        """Whether the client waits for an answer of this index."""
        group = self._groups.get(seq.request.id)
        return group is None or seq.index in group.unsent

    def take_computed(self, seq: Sequence) -> int:
        """Return the tokens that the beams of its group computed and no Finish has reported; 0: it has no group."""
        return group.take_computed() if (group := self._groups.get(seq.request.id)) else 0

    def candidates(self, seq: Sequence) -> int:
        """Likeliest tokens to ask for with the last known token of a sequence; 0: it has no beams."""
        return group.search.row_size if (group := self._groups.get(seq.request.id)) else 0

    # ------------------------------------------------------------------------------------------------------- a plan

    def in_step(self) -> list[BeamGroup]:
        """Return the groups whose beams all compute one token now, by rank."""
        found = [group for group in self._groups.values() if group.in_step]
        return sorted(found, key=lambda group: group.leader.rank)

    def blocks_to_step(self, group: BeamGroup) -> int:
        """Blocks that the group takes to compute one token in each beam: new ones and private copies."""
        at, size = group.leader.computed, self._pool.block_size
        if at % size == 0:
            return len(group.members)
        last = Counter(seq.table[at // size] for seq in group.members)
        return sum(count - 1 for count in last.values())

    def take_moves(self, seq: Sequence) -> tuple[bool, list[tuple[int, int]]]:
        """Return (the executor knows no table of its slot, entries (index, block) that differ from what it knows).

        Each move is returned once."""
        group = self._groups.get(seq.request.id)
        if group is None or seq.index not in group.moved:
            return False, []
        before = group.moved.pop(seq.index)
        if before is None:
            return True, []
        return False, [(i, block) for i, block in enumerate(seq.table) if i >= len(before) or before[i] != block]

    def join(self, leader: Sequence) -> Iterator[Sequence]:
        """All known tokens of the leader are planned: let the other beams of a group that starts again follow.

        Each shares the full blocks that it has in common with a beam before it.  Yields it before the next one looks
        for what it shares.  Nothing for a group that has no tokens yet: its beams fork when the search begins."""
        group = self._groups[leader.request.id]
        if not group.search.started:
            return
        size = self._pool.block_size
        for seq in group.members[1:]:
            shared, parent = max(
                ((common_blocks(seq, other, other.computed, size), other) for other in group.members[: seq.index]),
                key=lambda found: found[0],
            )
            seq.table, seq.computed = parent.table[:shared], shared * size
            self._pool.acquire(seq.table)
            seq.digests = parent.digests[:shared]
            self._join(leader, seq)
            group.moved[seq.index] = None
            yield seq

    def _join(self, leader: Sequence, seq: Sequence) -> None:
        leader.siblings.remove(seq)
        seq.started_before = True
        self._batch.join(seq)

    def disband(self, seq: Sequence) -> list[Sequence]:
        """The group leaves the batch: its leader will wait for all of it.  Returns the members, whose slots and blocks
        the caller takes; of a sequence without beams itself."""
        group = self._groups.get(seq.request.id)
        if group is None:
            return [seq]
        size = self._pool.block_size
        group.rows, group.moved = {}, {}
        for at, member in enumerate(group.members):
            shared = max((common_blocks(member, other, other.known, size) for other in group.members[:at]), default=0)
            # Blocks that it will take behind those which it shares with a beam before it.
            member.fork_blocks = -(-(member.known + 1) // size) - shared if group.search.started else 1
        return group.members

    def gather(self, members: list[Sequence]) -> None:
        """Let the leader of a group that has left the batch bring the others along when it starts again."""
        if members[0].request.beams is not None:
            members[0].siblings = members[1:]

    # ----------------------------------------------------------------------------------------------------- a result

    def take_rows(self, candidates: Mapping[int, Row]) -> list[BeamGroup]:
        """Take a step's candidates, by slot.  Returns the groups that have all of theirs now.

        Those of a beam that was preempted meanwhile are dropped: it computes its last token again."""
        occupants, complete = self._batch.slots.occupants, []
        for slot, row in candidates.items():
            seq = occupants[slot]
            if seq is None or seq.slot != slot or (group := self._groups.get(seq.request.id)) is None:
                continue
            group.rows[seq.index] = row
            if group.complete:
                complete.append(group)
        return complete

    def refork(self, group: BeamGroup, children: Iterable[Child]) -> None:
        """Give every member the table and the tokens of its new beam.  The first child of a beam stays in its slot."""
        group.count_blocks()
        parents, leader = group.order, group.leader
        children = list(children)
        stays: dict[int, Sequence] = {}  # child -> the member that it stays in
        taken: set[int] = set()  # of members that have a child, their indices
        for at, (parent, _) in enumerate(children):
            if (seq := parents[parent]).index not in taken:
                taken.add(seq.index)
                stays[at] = seq
        free = [seq for seq in group.members if seq.index not in taken]
        for at, (parent, token) in enumerate(children):
            if at in stays:
                continue
            seq, source = free.pop(0), parents[parent]
            self._pool.acquire(source.table)
            self._pool.release(seq.table)
            if seq.state is State.WAITING:  # it has no place in the batch before the first tokens
                self._join(leader, seq)
                group.moved[seq.index] = None
            else:
                group.moved.setdefault(seq.index, seq.table)
            seq.table, seq.digests = list(source.table), list(source.digests)
            seq.tokens, seq.computed = [*source.tokens, token], source.computed
            stays[at] = seq
        for seq, (parent, token) in ((stays[at], child) for at, child in enumerate(children)):
            if seq is parents[parent]:
                seq.tokens.append(token)
        group.order = [stays[at] for at in range(len(children))]


def common_blocks(seq: Sequence, other: Sequence, computed: int, size: int) -> int:
    """Full blocks at the beginning of `seq` that hold the same tokens in the first `computed` tokens of `other`.

    At least one token of `seq` is left out: computing it gives the next candidates."""
    limit = min(computed, seq.known - 1)
    pairs = zip(seq.tokens[:limit], other.tokens[:limit], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // size


def unsupported(sampling: Sampling) -> str:
    """Return a setting that beam search does not honour, with its value; '' when there is none."""
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
