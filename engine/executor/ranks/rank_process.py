"""The messages between rank 0 and the process of another rank, and the loop of that process.

    rank 0 ── commands: b"P" + Task of a spare, then b"T" + Task,
              b"S" + plan, b"C", b"G" + Hold, b"Q" + keys, b"R" + Release, b"X" ──> rank i   a rank does what rank 0
           <── replies: HERE and Ready once, a Reply for each b"C", keys for each b"Q" ──         does, in its order
           <── life: one byte per heartbeat; either end closes when its process dies ──>

The plan is the same msgpack bytes for every rank, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import zlib
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor import ops, preload
from quire.engine.executor.base import ModelInfo, StepError
from quire.engine.executor.errors import ModelLoadError, one_line
from quire.engine.executor.local import LocalExecutor, device_kind
from quire.engine.executor.ranks.rank_grammars import RankGrammars
from quire.engine.executor.ranks.ranks import Ranks

log = logging.getLogger(__name__)

PREPARE, BEGIN, SUBMIT, COLLECT, CLOSE = b"P", b"T", b"S", b"C", b"X"
HERE = b"here"  # a rank's first message, before the rendezvous
WELL, FAILING = b".", b"!"  # heartbeats; `FAILING` until a step that failed here is collected
START_TIMEOUT_S = 1800.0  # maximum seconds that a rank waits for another rank to load its shard


class Task(msgspec.Struct, frozen=True, array_like=True):
    """First message to a rank: its task.  A rank of a spare engine gets it twice: to prepare, and at the activation."""

    rank: int
    meeting: str  # path of the rendezvous file
    beat_s: float  # seconds between two heartbeats
    config: EngineConfig


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Facts that must be equal on all ranks before the first step."""

    info: ModelInfo
    blocks: int
    host_blocks: int
    max_seqs: int
    step_tokens: int

    @classmethod
    def of(cls, executor: LocalExecutor) -> Facts:
        """Return the facts of a loaded rank."""
        return cls(executor.info, executor.blocks, executor.host_blocks, executor.max_seqs, executor.step_tokens)


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """A rank's second message: it is loaded, or why it failed to load."""

    facts: Facts | None
    swap_bytes_per_s: float = 0.0
    error: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to `COLLECT`."""

    digest: int  # digest of the step's result
    error: str = ""  # why the step failed


def digest(result: StepResult) -> int:
    """Return a checksum of a step's sampled tokens, which is equal on every rank."""
    forced = sorted(result.forced.items())
    said = (result.step, result.slots, result.tokens, forced, sorted(result.failed), sorted(result.impossible))
    return zlib.crc32(msgspec.msgpack.encode(said))


def join(config: EngineConfig, rank: int, meeting: Path) -> Ranks:
    """Join the rendezvous of an engine's `config.tensor_parallel` ranks.

    Loads the kernels first, because ranks with GPUs test a kernel during the rendezvous.  Raises KernelBuildError
    without a compiler."""
    ops.load(library=Path(config.kernels) if config.kernels else None)
    wait_s = max(START_TIMEOUT_S, 2 * config.step_timeout_s)
    return Ranks.join(rank, config.tensor_parallel, meeting, device_kind(config), wait_s)


class Life:
    """A rank's thread that sends heartbeats to rank 0, and ends the process when rank 0's process ends."""

    def __init__(self, line: socket.socket) -> None:
        self.failing = False  # sent with every heartbeat
        self._line = line
        self._beat_s = 0.0  # 0: rank 0 has not sent the interval yet
        threading.Thread(target=self._run, name="life", daemon=True).start()

    def beat(self, every_s: float) -> None:
        """From now on send a heartbeat every `every_s` seconds."""
        self._beat_s = every_s

    def _run(self) -> None:
        while True:
            self._line.settimeout(self._beat_s or 0.2)
            try:
                if not self._line.recv(1):
                    break
            except TimeoutError:
                with contextlib.suppress(OSError):  # rank 0 does not read; the next `recv` shows whether it has ended
                    if self._beat_s:
                        self._line.send(FAILING if self.failing else WELL)
            except OSError:
                break
        os._exit(1)  # rank 0 has ended: the main thread may wait in a kernel that never ends


def serve(commands: Connection, life: Life) -> int:
    """Run one rank of an engine until rank 0 closes it.  Returns the exit status."""
    try:
        message = commands.recv_bytes()
        while message[:1] == PREPARE:
            _prepare(msgspec.msgpack.decode(message[1:], type=Task), commands)
            message = commands.recv_bytes()
        task = msgspec.msgpack.decode(message[1:], type=Task)
        life.beat(task.beat_s)
        commands.send_bytes(HERE)
    except (EOFError, OSError):  # rank 0 has ended: the spare was not needed
        return 1
    executor: LocalExecutor | None = None
    ranks: Ranks | None = None
    try:
        ranks = join(task.config, task.rank, Path(task.meeting))
        executor = LocalExecutor(task.config, ranks)
        ready = Ready(Facts.of(executor), executor.swap_bytes_per_s)
    except Exception as error:  # rank 0 prints one line, for all ranks
        ready = Ready(None, error=str(error) if isinstance(error, ModelLoadError) else one_line(error))
    try:
        commands.send_bytes(msgspec.msgpack.encode(ready))
        if executor is None or ranks is None:
            return 2
        _obey(commands, life, executor, ranks)
    except (EOFError, OSError):  # rank 0 has ended
        return 1
    finally:
        if executor is not None:
            executor.close()
        if ranks is not None:
            ranks.leave()
    return 0


def _prepare(task: Task, commands: Connection) -> None:
    """Prepare for the activation of a spare engine, part by part until the activation starts.  It repeats a part that
    fails here."""
    try:
        if device_kind(task.config) == "cuda" and task.config.spare_on_gpu:
            torch.cuda.set_device(task.rank)
        for _ in preload.prepare(task.config):
            if commands.poll():
                return
        log.info("rank %d of a spare is prepared", task.rank)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        log.warning("rank %d of a spare: preparation failed, its activation will take longer: %s", task.rank, reason)


def _obey(commands: Connection, life: Life, executor: LocalExecutor, ranks: Ranks) -> None:
    """Execute rank 0's commands until it closes."""
    decoder, grammars = msgspec.msgpack.Decoder(StepPlan), RankGrammars(executor.grammar_store)
    while True:
        message = commands.recv_bytes()
        match message[:1]:
            case b"S":
                executor.submit(decoder.decode(memoryview(message)[1:]))
                life.failing = executor.failing
            case b"C":
                commands.send_bytes(msgspec.msgpack.encode(reply := _collect(executor)))
                life.failing = False
                if reply.error:
                    ranks.barrier()  # returns only if the ranks can still communicate
            case _ if grammars.obey(message, commands):
                pass
            case _:
                return


def _collect(executor: LocalExecutor) -> Reply:
    try:
        return Reply(digest(executor.collect()))
    except StepError as error:
        return Reply(0, str(error))
