"""The flight recorder: what came in, what was decided and how long steps took, for
`python -m engine.tools simulate --replay LOG`.

    Engine.turn --tuple--> queue --> writer thread: numbers for ids, digests for names --> FILE (and FILE.1 before it)

The loop hands over one small tuple a turn; encoding and disk are the thread's business.  No token and no name is
written: a prompt is its length and, block by block, eight bytes of the digest that the prefix cache knows it by, which
is what it takes to meet the same hits again.

A log is a sequence of records, each a length (4 bytes, big-endian) and a msgpack array.  The first of every file is a
`Header`, all others are `Turn`s.  A file that has grown to half the allowance becomes FILE.1, in the place of the one
before; a record cut short by a crash ends the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.core.limits import Event
from engine.core.plan import StepResult
from engine.executor.base import Executor, ModelInfo
from engine.wire.messages import Abort, Generate

if TYPE_CHECKING:
    from engine.orders import Order

log = logging.getLogger("quire.flight")

VERSION = 1
DIGEST = 8  # bytes kept of a block's digest
QUEUE = 10_000  # turns that may wait for the disk; beyond it they are dropped, and counted
_LENGTH = struct.Struct(">I")


class Header(msgspec.Struct, frozen=True):
    """What the engine was when the file began."""

    version: int
    config: EngineConfig  # less what names places and people
    info: ModelInfo
    blocks: int
    max_seqs: int  # of the executor, as all that follows
    step_tokens: int
    depth: int
    host_blocks: int
    swap_bytes_per_s: float
    first_number: int = 1  # of the requests that arrive in this file


def header(config: EngineConfig, executor: Executor) -> Header:
    """What a log of this engine begins with."""
    config = msgspec.structs.replace(
        config, model="", served_name="", redis_url="", namespace="", engine_id="", kernels="", flight_log=""
    )
    info = msgspec.structs.replace(executor.info, name="")
    return Header(
        VERSION,
        config,
        info,
        executor.blocks,
        executor.max_seqs,
        executor.step_tokens,
        executor.depth,
        executor.host_blocks,
        executor.swap_bytes_per_s,
    )


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
    scores_prompt: bool  # prompt logprobs: no prefix is reused
    said: list[int | None] = []  # begun by another engine: output tokens of each continuation; None: it was over


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """It was aborted, or `lost` to another engine."""

    number: int
    index: int
    lost: bool


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A milestone, see engine.core.limits.Event."""

    kind: str
    number: int
    index: int
    step: int
    tokens: int
    reason: str = ""
    digests: bytes = b""  # of an "ended": of its full blocks in order, DIGEST bytes each


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of the loop that had anything to do."""

    now_ms: int  # unix time the plan was made for
    at_us: int  # when the orders had been taken in, since the recorder started
    over_us: int  # when the turn was over
    orders: list[Arrival | Cancel]  # taken in before the plan
    stalled: bool  # no plan was made: too many tokens waited for Redis
    failed: bool  # a step was lost
    rows: int  # that sampled in the step whose result came in; 0: none did
    prompt_tokens: int  # that step computed beside them
    took_us: int  # from the result before to this one; 0: the engine had been idle
    step_s: float  # that the executor measured for it, as in StepResult; so the next two
    swapped_bytes: int
    swap_s: float
    bad_rows: list[int]  # whose logits were not finite
    held: int  # blocks of the pool after the turn
    waiting: int  # sequences after the turn
    events: list[Entry]
    lost: int = 0  # turns before this one that the disk was too slow for
    impossible_rows: list[int] = []  # whose request's own settings left no token


class Seen(NamedTuple):
    """A turn as the loop has it at hand.  The lists belong to the recorder from turn() on."""

    now_ms: int  # as in Turn
    begun: float  # time.monotonic() when the orders had been taken in
    orders: list[Order]  # as the inbox gave them
    stalled: bool
    failed: bool
    result: StepResult | None
    prompt_tokens: int
    took_s: float
    held: int
    waiting: int
    events: list[Event]


class FlightLogError(Exception):
    """The log can't be read; one line."""


class Recorder:
    """Writes a log from a thread of its own.  turn() never waits and never raises: a full disk ends the recording, with
    a line in the program's log, and not the engine."""

    def __init__(self, path: Path, header: Header, max_bytes: int) -> None:
        """Starts a new log at `path`; raises OSError.  Both files together stay below `max_bytes`."""
        self._path, self._header, self._half = path, header, max_bytes // 2
        self._queue: queue.Queue[tuple[Seen, float, int] | None] = queue.Queue(QUEUE)
        self._open_requests: dict[str, list[int]] = {}  # id -> [number, continuations that have not ended]
        self._arrived = 0
        self._lost = 0
        self._began = time.monotonic()
        self._previous.unlink(missing_ok=True)
        self._open()
        self._thread = threading.Thread(target=self._run, name="flight", daemon=True)
        self._thread.start()

    def turn(self, seen: Seen) -> None:
        """Record the turn that is just over."""
        try:
            self._queue.put_nowait((seen, time.monotonic(), self._lost))
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what has gathered."""
        self._queue.put(None)
        self._thread.join()

    @property
    def _previous(self) -> Path:
        return self._path.with_name(self._path.name + ".1")

    def _open(self) -> None:
        self._file = self._path.open("wb")
        self._size = 0
        self._write(msgspec.structs.replace(self._header, first_number=self._arrived + 1))

    def _run(self) -> None:
        broken = False
        while (item := self._queue.get()) is not None:
            if broken:
                continue
            try:
                self._write(self._encoded(*item))
                if self._size > self._half:
                    self._file.close()
                    os.replace(self._path, self._previous)
                    self._open()
                elif self._queue.empty():
                    self._file.flush()
            except OSError as error:
                broken = True
                log.error("the flight log ends here: %s", error)
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, record: Header | Turn) -> None:
        data = msgspec.msgpack.encode(record)
        self._file.write(_LENGTH.pack(len(data)) + data)
        self._size += _LENGTH.size + len(data)

    def _encoded(self, seen: Seen, over: float, lost: int) -> Turn:
        arrived = [record for order in seen.orders if (record := self._order(order)) is not None]
        events = [event for noted in seen.events if (event := self._entry(noted)) is not None]
        at_us, over_us = (int((moment - self._began) * 1e6) for moment in (seen.begun, over))
        result = seen.result or StepResult(0, [], [])
        return Turn(
            seen.now_ms,
            at_us,
            over_us,
            arrived,
            seen.stalled,
            seen.failed,
            len(result.rows),
            seen.prompt_tokens,
            int(seen.took_s * 1e6),
            result.step_s,
            result.swapped_bytes,
            result.swap_s,
            list(result.failed),
            seen.held,
            seen.waiting,
            events,
            lost,
            list(result.impossible),
        )

    def _order(self, order: Order) -> Arrival | Cancel | None:
        """None: about a request that is over, or one that is running already."""
        if isinstance(order, Abort):
            found = self._open_requests.get(order.id)
            return None if found is None else Cancel(found[0], order.index, order.lost)
        said: list[int | None] = []
        request, alive = (order, order.n) if isinstance(order, Generate) else (order.request, 0)
        if not isinstance(order, Generate):
            said = [None if output is None else len(output) for output in order.outputs]
            alive = len(said) - said.count(None)
        if request.id in self._open_requests:
            return None
        self._arrived += 1
        if alive:
            self._open_requests[request.id] = [self._arrived, alive]
        sampling = request.sampling
        return Arrival(
            len(request.token_ids),
            request.max_new_tokens,
            request.n,
            request.deadline_ms,
            request.priority,
            request.weight,
            _digest(request.tenant),
            _digest(request.cache_salt),
            bool(sampling.stop_token_ids) or not sampling.ignore_eos,
            sampling.prompt_logprobs >= 0,
            said,
        )

    def _entry(self, event: Event) -> Entry | None:
        found = self._open_requests.get(event.request.id)
        if found is None:  # it came before turns were lost
            return None
        digests = b""
        if event.kind == "ended":
            digests = b"".join(digest[:DIGEST] for digest in event.digests)
            found[1] -= 1
            if not found[1]:
                del self._open_requests[event.request.id]
        return Entry(event.kind, found[0], event.index, event.step, event.tokens, event.reason or "", digests)


def _digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=DIGEST).hexdigest() if name else ""


class Log(NamedTuple):
    """What was read."""

    header: Header
    turns: list[Turn]
    first: int  # number of the first request in it

    @property
    def whole(self) -> bool:
        """From the engine's start on, without gaps: only then every decision can be made again."""
        return self.first == 1 and not any(turn.lost for turn in self.turns)


def read(path: Path) -> Log:
    """FILE.1, if there is one, and FILE as one log; a record cut short ends it.  Raises FlightLogError."""
    headers: list[Header] = []
    turns: list[Turn] = []
    for part in (path.with_name(path.name + ".1"), path):
        if part != path and not part.exists():
            continue
        try:
            records = list(_records(part.read_bytes()))
            headers.append(msgspec.msgpack.decode(records[0], type=Header))
            if headers[-1].version != VERSION:
                raise FlightLogError(f"{part}: version {headers[-1].version}; this program reads {VERSION}")
            turns += [msgspec.msgpack.decode(record, type=Turn) for record in records[1:]]
        except (OSError, IndexError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise FlightLogError(f"{part} is no flight log: {error}") from None
    return Log(headers[0], turns, headers[0].first_number)


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length
