"""The groups of all open requests.  `sequence_group.py` has the protocol that they follow."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.core.batch import Batch
from quire.engine.core.beam_groups import BeamGroups
from quire.engine.core.blocks import BlockPool
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.limits import Limits
from quire.engine.core.plan import StepResult
from quire.engine.core.sequence import Sequence
from quire.engine.core.sequence_group import GroupKind, IndependentSequences, Outputs, SequenceGroup, SteppedGroup
from quire.engine.wire.messages import Generate

KINDS = (BeamGroups,)  # a request belongs to the first kind that takes it; to none: its sequences are independent


class Groups:
    """Knows the group of every sequence.  Holds state only for requests of a kind in KINDS."""

    def __init__(self, pool: BlockPool, batch: Batch, limits: Limits, layers: LayerGroups) -> None:
        self._batch = batch
        self._kinds: list[GroupKind] = [kind(pool, batch, limits, layers) for kind in KINDS]
        self._independent = IndependentSequences(pool)
        self._stepped: dict[str, SteppedGroup] = {}  # stepped groups by request

    def outputs(self, request: Generate, outputs: Outputs | None) -> Outputs:
        """Return what each sequence of a request begins with.  `outputs`: emitted by an earlier engine, per choice."""
        emitted: Outputs = outputs or [[]] * request.n
        kind = self._kind(request)
        return kind.outputs(request, emitted) if kind is not None else emitted

    def refusal(self, request: Generate, limit: int) -> str:
        """Return why this engine can never run a request of its kind, naming limit and value; '' when it can.

        `limit`: maximum tokens of a sequence, prompt included."""
        kind = self._kind(request)
        return kind.refusal(request, limit) if kind is not None else ""

    def open(self, request: Generate, members: list[Sequence], outputs: Outputs | None) -> None:
        """Register the sequences of a new request.  `outputs`: as above; choices that are None have been sent."""
        if (kind := self._kind(request)) is not None:
            answered = {index for index, output in enumerate(outputs or ()) if output is None}
            self._stepped[request.id] = kind.open(request, members, answered)

    def close(self, request_id: str) -> None:
        """Forget a request.  Independent ones are ignored."""
        self._stepped.pop(request_id, None)

    def of(self, request_id: str) -> SequenceGroup:
        """Return the group of the sequences of a request."""
        return self._stepped.get(request_id) or self._independent

    def leaders(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return those of the sequences that stand for their groups."""
        return [seq for seq in sequences if self.of(seq.request.id).leads(seq)]

    def in_step(self) -> list[SteppedGroup]:
        """Return the stepped groups whose members all compute one token now, by rank."""
        if not self._stepped:
            return []
        ready = [group for group in self._stepped.values() if group.in_step]
        return sorted(ready, key=lambda group: group.leader.rank)

    def take(self, result: StepResult) -> list[SteppedGroup]:
        """Take the candidates of a step.  Returns the groups that have all of theirs now.

        Those of a member that was preempted meanwhile are dropped: it computes its last token again."""
        occupants, complete = self._batch.slots.occupants, []
        for slot, candidates in result.candidates.items():
            seq = occupants[slot]
            if seq is None or seq.slot != slot or (group := self._stepped.get(seq.request.id)) is None:
                continue
            if group.take(seq, candidates):
                complete.append(group)
        return complete

    def _kind(self, request: Generate) -> GroupKind | None:
        return next((kind for kind in self._kinds if kind.takes(request)), None)
