"""Sequence groups: the protocol by which the scheduler treats the sequences of one request together.

    kind          members          leader       a result adds                    preempted
    independent   the sequence     itself       its sampled token, and forced    alone: swapped or recomputed
                                                tokens behind it (forced.py)
    stepped       all sequences    the first    one token in every member, once  together: always recomputed
    (a search)    of the request                all candidates have arrived

    accept ── refusal, open ──> queue: the leader, with its siblings ──start──> batch
                                       ^                                          │ all known tokens planned: join
                                       └── disband, gather <── preemption ────────┤
                                                                                  v
    independent   decodes without being named in plans; the scheduler calls its group again only when it ends
    stepped       plan    in_step ─ blocks_to_step ─> take_moves, then a slice for every member
                  commit  take every member's candidates ─> advance (chooses tokens, re-forks tables) ─> done: finished

The `n` choices of a plain request are independent: each is a group of one sequence.  They share the prompt: until the
prompt is computed, the first choice is the leader and the other choices are its siblings.

A steady decode step calls only `Groups.in_step` and `Groups.take`, which visit only stepped groups.  Forced and drafted
tokens need no group kind of their own: one result may add several tokens to an independent sequence (forced.py), and a
plan computes them in one slice (`PlanBuilder.jump`).

`groups.py` has the table of kinds.  A new kind is a `GroupKind` and one entry there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Finish, Generate, TokenLogprob

Candidates = tuple[list[int], list[float]]  # token ids and log-probabilities, most probable first
Outputs = list[list[int] | None]  # per choice, the tokens that an earlier engine has emitted; None: choice finished
Moves = tuple[bool, list[tuple[int, int]]]  # (the executor has no table, changed entries (index, block)): take_moves


class Choice(NamedTuple):
    """A choice of a stepped group, reported when the group is done."""

    seq: Sequence  # the member with the index of the choice
    finish: Finish
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None  # log probabilities of `tokens`, if the request asked for them
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


class SequenceGroup(Protocol):
    """The methods of a group that the scheduler calls for any unfinished sequence."""

    swappable: bool  # a preempted member may be copied to the host; False: the group is always recomputed

    def members(self, seq: Sequence) -> list[Sequence]:
        """Return all sequences that start, step and are preempted together with `seq`, the leader first."""

    def leads(self, seq: Sequence) -> bool:
        """Return whether `seq` represents its group in the queue and in counts."""

    def candidate_count(self, seq: Sequence) -> int:
        """Return how many top-k candidates the executor reports after the last known token; 0: it samples one token."""

    # ------------------------------------------------------------------------------------------------------- endings

    def awaits(self, seq: Sequence) -> bool:
        """Return whether the client still waits for the choice with the index of `seq`."""

    def take_computed(self) -> int:
        """Return the number of computed tokens that no Finish has charged to the tenant yet; each is returned once."""

    def withdraw(self, index: int, unfinished: list[Sequence]) -> list[Sequence]:
        """Cancel one choice.  Return the sequences, from `unfinished`, that end because of it."""

    def successor(self, seq: Sequence) -> Sequence | None:
        """Return the sequence that leads the siblings of `seq`, which has ended; None: it led no siblings."""

    # --------------------------------------------------------------------------------------------------------- plans

    def join(self, leader: Sequence) -> Iterator[Sequence]:
        """Iterate over the siblings that can run when all known tokens of the leader are planned; fill their tables.

        The caller plans each sibling before it takes the next one, so that the next one can share its blocks."""

    def take_moves(self, seq: Sequence) -> Moves:
        """Return (whether the executor has no table for the slot of `seq`, changed table entries (index, block)).

        Each change is returned once."""

    def disband(self, seq: Sequence) -> list[Sequence]:
        """Take the group out of the batch.  Return its members, whose slots and blocks the caller frees."""

    def gather(self, members: list[Sequence]) -> None:
        """Make the other members siblings of the first member, which waits in the queue for all of them."""


class SteppedGroup(SequenceGroup, Protocol):
    """A group whose tokens a search chooses between steps.  A step computes one token per member."""

    @property
    def leader(self) -> Sequence: ...

    @property
    def in_step(self) -> bool:
        """Whether every member has exactly one token left to compute: the token that was chosen last."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute, so that `finished` returns the choices."""

    def blocks_to_step(self) -> int:
        """Return how many blocks one more token in every member takes: new blocks and copies of shared blocks."""

    def take(self, seq: Sequence, candidates: Candidates) -> bool:
        """Store the candidates of one member.  Return whether the candidates of all members have arrived."""

    def advance(self) -> int:
        """Choose the next token of every member and re-fork their tables.  Return the number of tokens."""

    def finished(self) -> list[Choice]:
        """Return the choices that the client still waits for, cancelled choices last.

        Each choice is returned once, except cancelled choices."""


class GroupKind(Protocol):
    """A factory of groups that schedule the sequences of a request together."""

    def takes(self, request: Generate) -> bool:
        """Return whether the sequences of this request form a group of this kind."""

    def outputs(self, request: Generate, outputs: Outputs) -> Outputs:
        """Return the initial output tokens of each sequence.  `outputs`: tokens already emitted, per choice."""

    def refusal(self, request: Generate, limit: int) -> str:
        """Return why this engine can never run the request, with the limit and the value; '' when it can.

        `limit`: maximum tokens of a sequence, prompt included."""

    def open(self, request: Generate, members: list[Sequence], answered: set[int]) -> SteppedGroup:
        """Return the group of a new request; `answered`: indices of the choices that have been sent already."""


class IndependentSequences:
    """The group of every independent sequence.  One object serves all of them, since it has no state per request."""

    swappable = True

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def members(self, seq: Sequence) -> list[Sequence]:
        return [seq]

    def leads(self, seq: Sequence) -> bool:
        return True

    def candidate_count(self, seq: Sequence) -> int:
        return 0

    def awaits(self, seq: Sequence) -> bool:
        return True

    def take_computed(self) -> int:
        return 0  # every computed token was reported, and so charged

    def withdraw(self, index: int, unfinished: list[Sequence]) -> list[Sequence]:
        withdrawn = [seq for seq in unfinished if seq.index == index]
        for seq in withdrawn:
            for leader in unfinished:
                if seq in leader.siblings:
                    leader.siblings.remove(seq)
        return withdrawn

    def successor(self, seq: Sequence) -> Sequence | None:
        if not seq.siblings:
            return None
        heir, *heir.siblings = seq.siblings
        heir.started_before, heir.cached_tokens = seq.started_before, seq.cached_tokens
        return heir

    def join(self, leader: Sequence) -> Iterator[Sequence]:
        """Give the siblings the leader's block table.  They sample from the logits of the prompt's last token."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            self._pool.acquire(leader.table)
            sibling.table, sibling.computed = list(leader.table), leader.computed
            sibling.digests = list(leader.digests)
            sibling.prompt_logprobs = leader.prompt_logprobs  # one list, which commit() fills
            sibling.started_before = True
            yield sibling

    def take_moves(self, seq: Sequence) -> Moves:
        return False, []

    def disband(self, seq: Sequence) -> list[Sequence]:
        return [seq]

    def gather(self, members: list[Sequence]) -> None:
        """Nothing to do: a preempted leader keeps its siblings."""
