"""The flight recorder: every input of the scheduler, so that `python -m engine.tools simulate --replay LOG` can make
every decision again.

    TurnRecord --Recorder--> numbers for ids, digests for names --> FILE (and FILE.1 before it)

The core is pure: orders, times and results determine its decisions.  No token and no name is written.  A prompt is its
length and, for each block, eight bytes of the digest that the prefix cache knows the block by: enough for equal hits.

A log is a sequence of records, each a length (4 bytes, big-endian) and a msgpack array.  The first record of every file
is a `Header`, all others are `LoggedTurn`s.  A record cut short by a crash ends the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.common.errors import OperatorError
from engine.config import EngineConfig
from engine.core.limits import Event
from engine.core.plan import StepResult
from engine.executor.base import Executor, ModelInfo
from engine.log_file import LogFile
from engine.orders import Order, Resume, request_of
from engine.request_log import digest
from engine.turn_record import TurnRecord
from engine.wire.messages import Abort

VERSION = 2
DIGEST = 8  # bytes kept of a block's digest
_LENGTH = struct.Struct(">I")
_NO_RESULT = StepResult(0, [], [])


class Header(msgspec.Struct, frozen=True):
    """The engine when the file began."""

    version: int
    config: EngineConfig  # without names of places and people
    info: ModelInfo
    blocks: int
    max_seqs: int  # of the executor, like all that follow
    step_tokens: int
    depth: int
    host_blocks: int
    swap_bytes_per_s: float
    first_number: int = 1  # of the requests that arrive in this file


def header(config: EngineConfig, executor: Executor) -> Header:
    """Return the first record of a log of this engine."""
    private = ("model", "served_name", "redis_url", "namespace", "engine_id", "kernels", "flight_log", "request_log")
    config = msgspec.structs.replace(config, **dict.fromkeys(private, ""))
    info, sizes = msgspec.structs.replace(executor.info, name=""), (executor.max_seqs, executor.step_tokens)
    swap = executor.host_blocks, executor.swap_bytes_per_s
    return Header(VERSION, config, info, executor.blocks, *sizes, executor.depth, *swap)


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A request as the engine got it.  Its number is its place among all arrivals, from 1."""

    prompt_len: int  # tokens
    max_new: int  # tokens
    n: int
    deadline_ms: int
    priority: int
    weight: float
    tenant: str  # digest; "": none
    salt: str  # digest; "": none
    stops: bool  # a token may end it before max_new
    scores_prompt: bool  # it wants prompt logprobs, so no prefix is reused
    begun: list[int | None] = []  # by another engine: output tokens of each continuation; None: that one had ended


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request was aborted, or `reassigned` to another engine."""

    number: int
    index: int
    reassigned: bool


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A milestone, see engine.core.limits.Event."""

    kind: str
    number: int
    index: int
    step: int
    tokens: int
    reason: str = ""
    digests: bytes = b""  # of an "ended": of its full blocks in order, DIGEST bytes each


class LoggedTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of the loop that had anything to do."""

    now_ms: int  # unix time the plan was made for
    orders: list[Arrival | Cancel]  # taken in before the plan
    stalled: bool  # no plan was made: the outbox was full
    failed: bool  # the steps in flight were lost
    step_s: float  # measured by the executor, see StepResult; so are the next two
    swapped_bytes: int
    swap_s: float
    bad_rows: list[int]  # rows whose logits were not finite
    impossible_rows: list[int]  # rows whose request's own settings left no token
    events: list[Entry]
    lost: int = 0  # turns before this one that the disk was too slow for


class FlightLogError(OperatorError):
    """The log cannot be read; one line."""

    exit_status = 2


class Recorder:
    """Observer that writes a flight log."""

    def __init__(self, path: Path, header: Header, max_bytes: int) -> None:
        """Start a new log; a log of an earlier engine is deleted.  Raises OSError."""
        self._header = header
        self._arrived = 0
        self._dropped = 0  # turns, as of the last one written
        self._open_requests: dict[str, list[int]] = {}  # id -> [number, continuations that have not ended]
        for old in parts(path):
            old.unlink(missing_ok=True)
        self._file = LogFile(path, max_bytes, self._first_record)

    def observe(self, record: TurnRecord) -> None:
        if record.was_idle and record.idle and not record.orders:
            return
        lost, self._dropped = self._file.dropped - self._dropped, self._file.dropped
        # The record is the loop's: the writer thread gets what does not change any more.
        result, facts = record.result or _NO_RESULT, (record.now_ms, record.stalled, record.failed)
        self._file.write(partial(self._encode, facts, record.orders, result, record.outputs.events, lost))

    def close(self) -> None:
        """Write what has gathered."""
        self._file.close()

    # All that follows runs on the writer thread.

    def _first_record(self) -> bytes:
        return _framed(msgspec.structs.replace(self._header, first_number=self._arrived + 1))

    def _encode(
        self, facts: tuple[int, bool, bool], orders: list[Order], result: StepResult, events: list[Event], lost: int
    ) -> bytes:
        now_ms, stalled, failed = facts
        arrived = [logged for order in orders if (logged := self._order(order)) is not None]
        swap, bad = (result.swapped_bytes, result.swap_s), (list(result.failed), list(result.impossible))
        entries = [entry for event in events if (entry := self._entry(event)) is not None]
        return _framed(LoggedTurn(now_ms, arrived, stalled, failed, result.step_s, *swap, *bad, entries, lost))

    def _order(self, order: Order) -> Arrival | Cancel | None:
        """None: the order is about a request that is over, or one that is running already."""
        request = request_of(order)
        if request is None or isinstance(order, Abort):
            found = self._open_requests.get(order.id) if isinstance(order, Abort) else None
            return Cancel(found[0], order.index, order.reassigned) if found and isinstance(order, Abort) else None
        if request.id in self._open_requests:
            return None
        begun = [None if o is None else len(o) for o in order.outputs] if isinstance(order, Resume) else []
        self._arrived += 1
        if alive := len(begun) - begun.count(None) if begun else request.n:
            self._open_requests[request.id] = [self._arrived, alive]
        sampling = request.sampling
        return Arrival(
            len(request.token_ids),
            request.max_new_tokens,
            request.n,
            request.deadline_ms,
            request.priority,
            request.weight,
            digest(request.tenant),
            digest(request.cache_salt),
            bool(sampling.stop_token_ids) or not sampling.ignore_eos,
            sampling.prompt_logprobs >= 0,
            begun,
        )

    def _entry(self, event: Event) -> Entry | None:
        found = self._open_requests.get(event.request.id)
        if found is None:  # the request arrived before turns were lost
            return None
        digests = b""
        if event.kind == "ended":
            digests = b"".join(block[:DIGEST] for block in event.digests)
            found[1] -= 1
            if not found[1]:
                del self._open_requests[event.request.id]
        return Entry(event.kind, found[0], event.index, event.step, event.tokens, event.reason or "", digests)


class Log(NamedTuple):
    """A log in memory."""

    header: Header
    turns: list[LoggedTurn]
    first: int  # number of the first request in it

    @property
    def whole(self) -> bool:
        """Whether it begins with the engine and has no gaps: only then every decision can be made again."""
        return self.first == 1 and not any(turn.lost for turn in self.turns)


def parts(path: Path) -> tuple[Path, Path]:
    """Return the two files of a log, the older one first."""
    return path.with_name(path.name + ".1"), path


def read(path: Path) -> Log:
    """Read FILE.1, if there is one, and FILE as one log.  Raises FlightLogError."""
    headers: list[Header] = []
    turns: list[LoggedTurn] = []
    for part in parts(path):
        if part != path and not part.exists():
            continue
        try:
            records = list(_records(part.read_bytes()))
            headers.append(msgspec.msgpack.decode(records[0], type=Header))
            if headers[-1].version != VERSION:
                raise FlightLogError(f"{part}: version {headers[-1].version}; this program reads {VERSION}")
            turns += [msgspec.msgpack.decode(record, type=LoggedTurn) for record in records[1:]]
        except (OSError, IndexError, msgspec.DecodeError) as error:
            raise FlightLogError(f"{part} is no flight log: {error}") from None
    return Log(headers[0], turns, headers[0].first_number)


def _framed(record: Header | LoggedTurn) -> bytes:
    data = msgspec.msgpack.encode(record)
    return _LENGTH.pack(len(data)) + data


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length
