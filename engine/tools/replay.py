"""Exact replay of a flight log: the real engine loop makes every recorded decision again.

`replay` drives an Engine turn by turn with the recorded orders and times, over an executor that ends each output where
it ended.  For what other settings would have done, simulate a request log: `engine.tools simulate --trace FILE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.engine.core.plan import Sampler, StepResult
from quire.engine.executor.base import ScriptedExecutor, StepError
from quire.engine.loop import Engine
from quire.engine.observers.recorder import DIGEST, STOP, Arrival, Entry, Header, Log, LoggedTurn, logged, read
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.orders import LocalBox, Refused, Resume
from quire.engine.tools.trace import VOCAB
from quire.engine.wire.messages import Generate

FILLER = 1  # every token but the last of each block; STOP is 0


class Output(msgspec.Struct):
    """What a log knows of one continuation."""

    id: str  # of its request
    prompt_len: int  # tokens
    chain: list[int]  # a token for each full block that the log knows: equal where the digests are
    unknown: int  # the token for its other blocks; no other continuation has it
    tokens: int = 0  # of output
    reason: str = ""  # of its Finish; "": none in the log


Outputs = dict[tuple[int, int], Output]  # by (number of the arrival, counted from 1; index)


def find_outputs(turns: Sequence[LoggedTurn]) -> Outputs:
    """Return every continuation in a log.  An id may arrive again: while its request is open, the engine ignores it."""
    found: Outputs = {}
    open_requests: dict[str, list[int]] = {}  # id -> [number, continuations that have not ended]
    known: dict[bytes, int] = {}  # digest -> the token that stands for it
    number = 0

    def block_tokens(blocks: bytes) -> list[int]:
        digests = (blocks[at : at + DIGEST] for at in range(0, len(blocks), DIGEST))
        return [known.setdefault(digest, FILLER + 1 + len(known)) for digest in digests]

    for turn in turns:
        for order in turn.orders:
            if isinstance(order, Arrival):
                number, request = number + 1, order.request
                chain = block_tokens(order.blocks)
                for index in range(request.n):
                    unknown = VOCAB - 1 - len(found)
                    found[number, index] = Output(request.id, order.prompt_len, chain, unknown)
                if alive := len(order.begun) - order.begun.count(None) if order.begun else request.n:
                    open_requests.setdefault(request.id, [number, alive])
        ended = (entry for entry in turn.events if entry.kind == "ended")
        for entry, blocks in zip(ended, turn.blocks, strict=True):
            of = open_requests[entry.id]
            output = found[of[0], entry.index]
            output.tokens, output.reason = entry.tokens, entry.reason
            output.chain = max(output.chain, block_tokens(blocks), key=len)
            of[1] -= 1
            if not of[1]:
                del open_requests[entry.id]
    return found


def content(output: Output, block_size: int, at: int) -> int:
    """Return the token at a position of a continuation, prompt included.

    Two continuations begin with equal tokens as far as their chains are equal.  Only the last token of a block differs
    from other blocks'.  So a prompt may end within a block: the output decides which block it becomes."""
    block, offset = divmod(at, block_size)
    if offset < block_size - 1:
        return FILLER
    return output.chain[block] if block < len(output.chain) else output.unknown


class RecordedExecutor(ScriptedExecutor):
    """Ends each continuation where the log does, loses the steps that were lost, reports the recorded times."""

    def __init__(self, header: Header, found: Outputs) -> None:
        info = msgspec.structs.replace(header.info, vocab_size=VOCAB)
        super().__init__(info, header.blocks, host_blocks=header.host_blocks)
        self.max_seqs, self.step_tokens, self.depth = header.max_seqs, header.step_tokens, header.depth
        self.swap_bytes_per_s = header.swap_bytes_per_s
        self.turn = LoggedTurn(0)  # the turn that is replayed now
        self._found, self._block_size = found, header.config.block_size

    def collect(self) -> StepResult:
        turn = self.turn
        if turn.failed or turn.result is None:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("lost, as recorded")
        # A result names its slots in any order; the log knows the order of first and last tokens.
        places = {(e.id, e.index): at for at, e in reversed([*enumerate(turn.events)]) if e.kind in ("first", "ended")}
        made = super().collect()

        def place(sample: tuple[int, int]) -> int:
            sampler, _ = self._decoding[sample[0]]
            return places.get((self._output(sampler).id, sampler.sibling), len(turn.events))

        samples = sorted(zip(made.slots, made.tokens, strict=True), key=place)
        slots, tokens = [slot for slot, _ in samples], [token for _, token in samples]
        forced = {slot: self._forced(slot, len(run)) for slot, run in turn.result.forced.items()}
        return msgspec.structs.replace(turn.result, step=made.step, slots=slots, tokens=tokens, forced=forced)

    def _forced(self, slot: int, count: int) -> list[int]:
        """The tokens that follow the one just sampled."""
        sampler, position = self._decoding[slot]
        return [self.token(sampler, position + at) for at in range(count)]

    def _output(self, sampler: Sampler) -> Output:
        return self._found[sampler.sampling.seed, sampler.sibling]

    def token(self, sampler: Sampler, position: int) -> int:
        output = self._output(sampler)
        if position + 1 == output.tokens and output.reason == "stop":
            return STOP
        return content(output, self._block_size, output.prompt_len + position)


class Difference(NamedTuple):
    """The first turn that differs from its recording."""

    turn: int  # its place in the log, from 0
    recorded: list[Entry]
    replayed: list[Entry]


class Latest:
    """Observer that keeps the last turn."""

    record: TurnRecord

    def observe(self, record: TurnRecord) -> None:
        self.record = record


def replay(log: Log) -> tuple[int, Difference | None]:
    """Replay a log under its own configuration, up to the first difference.

    Returns how many milestones are equal, and the first turn whose milestones or plan differ (None: all are equal)."""
    found, box, latest = find_outputs(log.turns), LocalBox(lambda delta: None), Latest()
    executor, config = RecordedExecutor(log.header, found), log.header.config
    engine = Engine(config, executor, box, box, observers=[latest], clock=lambda: executor.turn.now_ms)
    same = number = 0
    for at, turn in enumerate(log.turns):
        for order in turn.orders:
            if isinstance(order, Arrival):
                number += 1
                box.orders.append(_order(number, order, found, config.block_size))
            else:
                box.orders.append(order)
        executor.turn, box.full, box.queued = turn, turn.stalled, turn.queued
        engine.turn()
        made = logged(latest.record, config.block_size, log.header.info.fingerprint)
        if (made.plan, made.events) != (turn.plan, turn.events):
            return same, Difference(at, turn.events, made.events)
        same += len(turn.events)
    return same, None


def _order(number: int, arrival: Arrival, found: Outputs, block_size: int) -> Generate | Resume | Refused:
    """Return the request, with made-up tokens that are equal where the recorded ones were."""
    length = arrival.prompt_len
    prompt = [content(found[number, 0], block_size, at) for at in range(length)]
    sampling = msgspec.structs.replace(arrival.request.sampling, seed=number)
    request = msgspec.structs.replace(arrival.request, token_ids=prompt, sampling=sampling)
    if not arrival.begun:
        return Refused(request, None, "refused") if arrival.refused else request
    outputs = [
        None if begun is None else [content(found[number, index], block_size, length + at) for at in range(begun)]
        for index, begun in enumerate(arrival.begun)
    ]
    return Refused(request, outputs, "refused") if arrival.refused else Resume(request, outputs)


def report(path: Path) -> str:
    """Return the line that `python -m quire.engine.tools simulate --replay` prints.  Raises FlightLogError."""
    log = read(path)
    same, difference = replay(log)
    rest = ", all there are"
    if difference:
        rest = f"; turn {difference.turn} differs: {difference.recorded} became {difference.replayed}"
    return f"replayed {len(log.turns)} turns: {same} decisions are as recorded{rest}"
