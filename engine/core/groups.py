"""The sequence groups of all open requests; `sequence_group.py` defines their protocol."""

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

KINDS = (BeamGroups,)  # the first kind whose takes() is true builds the group; otherwise sequences are independent


class Groups:
    """Maps every request to its sequence group.  Holds state only for requests of a kind in KINDS."""

    def __init__(self, pool: BlockPool, batch: Batch, limits: Limits, layers: LayerGroups) -> None:
        self._batch = batch
        self._kinds: list[GroupKind] = [kind(pool, batch, limits, layers) for kind in KINDS]
        self._independent = IndependentSequences(pool)
        self._stepped: dict[str, SteppedGroup] = {}  # stepped groups by request

    def outputs(self, request: Generate, outputs: Outputs | None) -> Outputs:
        """Return the initial output tokens of each sequence.  `outputs`: tokens that an earlier engine has emitted."""
        emitted: Outputs = outputs or [[]] * request.n
        kind = self._kind(request)
        return kind.outputs(request, emitted) if kind is not None else emitted

    def refusal(self, request: Generate, limit: int) -> str:
        """Return why this engine can never run the request's group, with the limit and the value; '' when it can.

        `limit`: maximum tokens of a sequence, prompt included."""
        kind = self._kind(request)
        return kind.refusal(request, limit) if kind is not None else ""

    def open(self, request: Generate, members: list[Sequence], outputs: Outputs | None) -> None:
        """Register the sequences of a new request.  `outputs`: emitted tokens per choice; None: choice already sent."""
        if (kind := self._kind(request)) is not None:
            answered = {index for index, output in enumerate(outputs or ()) if output is None}
            self._stepped[request.id] = kind.open(request, members, answered)

    def close(self, request_id: str) -> None:
        """Forget the group of a request, if it has one in KINDS."""
        self._stepped.pop(request_id, None)

    def of(self, request_id: str) -> SequenceGroup:
        """Return the group of a request's sequences."""
        return self._stepped.get(request_id) or self._independent

    def leaders(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that represent their groups; a leader represents all beams of its request."""
        return [seq for seq in sequences if self.of(seq.request.id).leads(seq)]

    def in_step(self) -> list[SteppedGroup]:
        """Return the stepped groups whose members all have exactly one token to compute, by the leader's `order`."""
        if not self._stepped:
            return []
        ready = [group for group in self._stepped.values() if group.in_step]
        return sorted(ready, key=lambda group: group.leader.order)

    def take(self, result: StepResult) -> list[SteppedGroup]:
        """Pass a step's candidates to their groups.  Returns the groups whose members all have candidates now.

        Candidates of a member that was preempted meanwhile are dropped: the member computes its last token again."""
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
