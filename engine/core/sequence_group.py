"""Sequence groups: the protocol by which the scheduler treats the sequences of one request together.

    kind          members       leader       a result adds                    preempted
    independent   itself        itself       its sampled token, and forced    alone: swapped or recomputed
                                             tokens behind it (forced.py)
    stepped       all of them   the first    one token in every member, once  together: always recomputed
                                             all candidates have arrived

    accept ── refusal, open ──> queue: the leader, with its siblings ──start──> batch
                                       ^                                          │ all known tokens planned: join
                                       └── disband, gather <── preemption ────────┤
                                                                                  v
    independent   decodes on its own: the plan names it no more, and its group is not asked again until it ends
    stepped       plan    in_step ─ blocks_to_step ─> a slice for every member, behind its take_moves
                  commit  take every member's candidates ─> advance (chooses tokens, re-forks tables) ─> done: finished

The `n` choices of a plain request are independent: each is a group of itself.  They have one thing in common, the
prompt.  Until it is computed, the first one leads and has the others as siblings.

A steady decode step asks only `Groups.in_step` and `Groups.take`, which look at stepped groups alone.  Tokens that are
known before a step samples them, forced by a grammar or drafted, need no kind of group: they let `known` of an
independent sequence grow by more than one token per result (forced.py), and a plan computes them in one slice
(`PlanBuilder.jump`).

`groups.py` has the table of kinds.  A new kind is a `GroupKind` and one entry there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from quire.engine.core.blocks import BlockPool
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Finish, Generate, TokenLogprob

Candidates = tuple[list[int], list[float]]  # token ids and log-probabilities, most probable first
Outputs = list[list[int] | None]  # per choice, the tokens that an earlier engine has emitted; None: it has finished
Moves = tuple[bool, list[tuple[int, int]]]  # (no table is known, entries (index, block) that differ); see take_moves


class Choice(NamedTuple):
    """A choice of a stepped group, reported when the group is done."""

    seq: Sequence  # the member with the index of the choice
    finish: Finish
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None  # log probabilities of `tokens`, if the request asked for them
    cached_tokens: int = 0  # prompt tokens that the prefix cache had


class SequenceGroup(Protocol):
    """What the scheduler asks about any sequence that has not finished."""

    swappable: bool  # a preempted member may be copied to the host; False: the group is always recomputed

    def members(self, seq: Sequence) -> list[Sequence]:
        """Return all sequences that move together with `seq`, the leader first."""

    def leads(self, seq: Sequence) -> bool:
        """Return whether `seq` stands for its group in the queue and in counts."""

    def candidate_count(self, seq: Sequence) -> int:
        """Return how many next tokens to ask for after the last known token of `seq`; 0: the executor samples one."""

    # ------------------------------------------------------------------------------------------------------- endings

    def awaits(self, seq: Sequence) -> bool:
        """Return whether the client waits for a choice of this index."""

    def take_computed(self) -> int:
        """Return the tokens that the members computed and no Finish has charged; each is returned once."""

    def withdraw(self, index: int, unfinished: list[Sequence]) -> list[Sequence]:
        """The client cancels one choice.  Return the sequences, of those unfinished, that end for it."""

    def successor(self, seq: Sequence) -> Sequence | None:
        """`seq` has ended.  Return the sequence that leads its siblings from now on; None: it led none."""

    # --------------------------------------------------------------------------------------------------------- plans

    def join(self, leader: Sequence) -> Iterator[Sequence]:
        """All known tokens of the leader are planned: yield the siblings that can continue now, with their tables.

        Each is yielded before the next one looks for blocks to share."""

    def take_moves(self, seq: Sequence) -> Moves:
        """Return (the executor knows no table of its slot, entries (index, block) that differ from what it knows).

        Each move is returned once."""

    def disband(self, seq: Sequence) -> list[Sequence]:
        """The group leaves the batch.  Return its members, whose slots and blocks the caller takes."""

    def gather(self, members: list[Sequence]) -> None:
        """The members have left the batch: let the first one bring the others along when it starts again."""


class SteppedGroup(SequenceGroup, Protocol):
    """A group whose members compute one token each per step, chosen for all of them between two steps."""

    @property
    def leader(self) -> Sequence: ...

    @property
    def in_step(self) -> bool:
        """Whether every member is to compute the token that was chosen last, and nothing more."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute: `finished` has the choices."""

    def blocks_to_step(self) -> int:
        """Return the blocks that one more token in every member takes: new ones and private copies."""

    def take(self, seq: Sequence, candidates: Candidates) -> bool:
        """Take the candidates of one member.  Return whether those of all members of this step have arrived."""

    def advance(self) -> int:
        """Choose the next token of every member and re-fork their tables.  Return the number of tokens."""

    def finished(self) -> list[Choice]:
        """Return the choices that the client still waits for, cancelled ones last.  Each is returned once, except
        cancelled ones."""


class GroupKind(Protocol):
    """One way to schedule the sequences of a request together, and the requests that it is for."""

    def takes(self, request: Generate) -> bool:
        """Return whether the sequences of this request are such a group."""

    def outputs(self, request: Generate, outputs: Outputs) -> Outputs:
        """Return what each sequence of the group begins with, `outputs` being what has been emitted per choice."""

    def refusal(self, request: Generate, limit: int) -> str:
        """Return why this engine can never run the request, naming limit and value; '' when it can.

        `limit`: maximum tokens of a sequence, prompt included."""

    def open(self, request: Generate, members: list[Sequence], answered: set[int]) -> SteppedGroup:
        """Return the group of a new request; the choices in `answered` have been sent before."""


class IndependentSequences:
    """Sequences that are groups of themselves.  One object serves all of them: it has no state per request."""

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
        return 0  # every token was reported

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
        """Let the siblings share the table of the prompt.  They sample from the logits of the leader's last slice."""
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
        """Its siblings have stayed with it."""
