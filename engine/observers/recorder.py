"""The flight recorder: every input of the scheduler, so that `python -m quire.engine.tools simulate --replay FILE` can
make every decision again.

    TurnRecord --Recorder--> FILE: a Header, then a LoggedTurn for each turn that had anything to do, one JSON line each

The core is pure: orders, times and results determine its decisions.  No token and no name is written.  Of each full
block the log has eight bytes of the digest by which the prefix cache knows it: enough for equal hits.

A replay needs the beginning, so a log that is full ends.  A line cut short by a crash is left out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import chain_digest, root_digest
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.base import Executor, ModelInfo
from quire.engine.observers.log_file import LogFile
from quire.engine.observers.request_log import digest
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.orders import Refused, ResetPrefixCache, Resume, request_of
from quire.engine.wire.messages import Abort, Generate, Sampling

VERSION = 4
# Bytes of memory, roughly: of a header; of a turn's record without its lists; of each token id, token with log
# probabilities, and digest in these lists.
HEADER_BYTES, TURN_BYTES = 8_000, 2_000
TOKEN_BYTES, SCORED_BYTES, DIGEST_BYTES = 40, 1_000, 80
DIGEST = 8  # bytes kept of a block's digest
STOP = 0  # stands for every token that ends an output
PRIVATE = ("model", "served_name", "redis_url", "namespace", "engine_id", "kernels", "flight_log", "request_log")


class Header(msgspec.Struct, frozen=True):
    """The engine when it started."""

    flight_log: int  # VERSION
    config: EngineConfig  # without PRIVATE
    info: ModelInfo  # without its name
    blocks: int
    max_seqs: int  # of the executor, like all that follow
    step_tokens: int
    depth: int
    host_blocks: int
    swap_bytes_per_s: float


class Arrival(msgspec.Struct, frozen=True, tag="arrival", omit_defaults=True):
    """A request as the engine got it."""

    request: Generate  # without tokens; tenant and salt are digests; stop_token_ids is [STOP] if a token may end it
    prompt_len: int  # tokens
    blocks: bytes  # of the prompt, like those of LoggedTurn
    begun: list[int | None] = []  # by another engine: output tokens of each continuation; None: that one had ended
    refused: bool = False  # its grammar could not be followed


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A milestone, see engine.core.limits.Event."""

    kind: str
    id: str
    index: int
    step: int
    tokens: int
    reason: str = ""


class LoggedTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inputs and the decisions of one turn."""

    now_ms: int  # unix time the plan was made for
    orders: list[Arrival | Abort | ResetPrefixCache] = []  # taken in before the plan
    stalled: bool = False  # no plan was made: the outbox was full
    queued: int = 0  # requests that waited in the shared queue, this engine's share of them
    failed: bool = False  # the steps in flight were lost
    # Of the step that was collected, without rows, tokens and texts; of forced tokens their number.
    result: StepResult | None = None
    plan: int = 0  # checksum of the plan; 0: none
    events: list[Entry] = []
    blocks: list[bytes] = []  # for each "ended" in `events`: DIGEST bytes of each full block, in order


class Log(NamedTuple):
    """A log in memory."""

    header: Header
    turns: list[LoggedTurn]


class FlightLogError(OperatorError):
    """The log cannot be read; one line."""

    exit_status = 2


class Recorder:
    """Observer that writes a flight log."""

    def __init__(self, path: Path, config: EngineConfig, executor: Executor, max_bytes: int) -> None:
        """Start a new log of at most `max_bytes`.  Raises OSError."""
        self._file = LogFile(path, max_bytes, rotates=False)
        sizes = executor.blocks, executor.max_seqs, executor.step_tokens, executor.depth, executor.host_blocks
        config = msgspec.structs.replace(config, **dict.fromkeys(PRIVATE, ""))
        info = msgspec.structs.replace(executor.info, name="")
        header = Header(VERSION, config, info, *sizes, executor.swap_bytes_per_s)
        self._file.write(lambda: msgspec.json.encode(header) + b"\n", HEADER_BYTES)
        self._block_size, self._fingerprint = config.block_size, info.fingerprint

    def observe(self, record: TurnRecord) -> None:
        if not (record.was_idle and record.idle and not record.orders):
            self._file.write(partial(self._line, record), memory_of(record))

    def dropped_lines(self) -> int:
        """Return the number of lines that are missing because the disk was too slow."""
        return self._file.dropped

    def close(self) -> None:
        """Write what has gathered."""
        self._file.close()

    def _line(self, record: TurnRecord) -> bytes:
        return msgspec.json.encode(logged(record, self._block_size, self._fingerprint)) + b"\n"


def memory_of(record: TurnRecord) -> int:
    """Return the bytes of memory that a turn's record keeps alive, estimated.  O(orders, slices and events)."""
    tokens = scored = 0
    for order in record.orders:
        if (request := request_of(order)) is not None:
            tokens += len(request.token_ids)
        if isinstance(order, Resume | Refused):
            tokens += sum(len(output) for output in order.outputs or () if output is not None)
    if record.plan is not None:
        tokens += sum(len(one.token_ids) for one in record.plan.slices)
    if (result := record.result) is not None:
        tokens += len(result.tokens) + sum(len(ids) for ids, _ in result.candidates.values())
        scored = len(result.logprobs) + sum(len(scores) for scores in result.prompt_logprobs.values())
    digests = sum(len(event.digests) for event in record.outputs.events)
    return TURN_BYTES + TOKEN_BYTES * tokens + SCORED_BYTES * scored + DIGEST_BYTES * digests


def logged(record: TurnRecord, block_size: int, fingerprint: str) -> LoggedTurn:
    """Return what the log keeps of a turn."""
    result, events = record.result, record.outputs.events
    if result is not None:
        blank: dict[str, object] = {"slots": [], "tokens": [], "logprobs": {}, "prompt_logprobs": {}, "candidates": {}}
        blank["forced"] = {slot: [0] * len(tokens) for slot, tokens in result.forced.items()}
        texts = {"failed": dict.fromkeys(result.failed, ""), "impossible": dict.fromkeys(result.impossible, "")}
        result = msgspec.structs.replace(result, **blank, **texts)
    return LoggedTurn(
        record.now_ms,
        [
            order if isinstance(order, Abort | ResetPrefixCache) else _arrival(order, block_size, fingerprint)
            for order in record.orders
        ],
        record.stalled,
        record.queued,
        record.failed,
        result,
        _checksum(record.plan),
        [Entry(e.kind, e.request.id, e.index, e.step, e.tokens, e.reason or "") for e in events],
        [_joined(event.digests) for event in events if event.kind == "ended"],
    )


def _arrival(order: Generate | Resume | Refused, block_size: int, fingerprint: str) -> Arrival:
    request = order if isinstance(order, Generate) else order.request
    outputs = None if isinstance(order, Generate) else order.outputs
    begun = [None if o is None else len(o) for o in outputs or ()]
    tokens, sampling = request.token_ids, request.sampling
    digests = [root_digest(fingerprint, request.cache_salt)]
    for at in range(0, len(tokens) - block_size + 1, block_size):
        digests.append(chain_digest(digests[-1], tokens[at : at + block_size]))
    stops = [STOP] if sampling.stop_token_ids or not sampling.ignore_eos else []
    sampling = Sampling(ignore_eos=True, stop_token_ids=stops, prompt_logprobs=min(0, sampling.prompt_logprobs))
    names = {"tenant": digest(request.tenant), "cache_salt": digest(request.cache_salt)}
    bare = msgspec.structs.replace(
        request, gateway="", token_ids=[], sampling=sampling, traceparent="", tracestate="", **names
    )
    return Arrival(bare, len(tokens), _joined(digests[1:]), begun, isinstance(order, Refused))


def _joined(digests: list[bytes]) -> bytes:
    return b"".join(digest[:DIGEST] for digest in digests)


def _checksum(plan: StepPlan | None) -> int:
    """Return a checksum of a plan without its token ids and sampling parameters."""
    if plan is None:
        return 0
    slices = [(piece.slot, piece.start, len(piece.token_ids)) for piece in plan.slices]
    forks = [(fork.slot, fork.parent, fork.table) for fork in plan.forks]
    moves = plan.copies, plan.edits, plan.swap_out, plan.swap_in
    return crc32(msgspec.msgpack.encode((plan.step, plan.freed_slots, plan.starts, slices, forks, moves)))


def read(path: Path) -> Log:
    """Return the log in a file.  Raises FlightLogError."""
    try:
        first, *rest = path.read_bytes().split(b"\n")[:-1] or [b""]
        version = msgspec.json.decode(first, type=dict[str, object]).get("flight_log")
        if version != VERSION:
            raise FlightLogError(f"{path} is no flight log of version {VERSION}: its version is {version}")
        header = msgspec.json.decode(first, type=Header)
        return Log(header, [msgspec.json.decode(line, type=LoggedTurn) for line in rest])
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise FlightLogError(f"{path} is no flight log: {error}") from None
