"""The executor of an engine whose model is sharded over ranks: one process per GPU, or several on a CPU.

    loop ── plan ──> ParallelExecutor ──┬── LocalExecutor, rank 0, in this process
                                        ├── plan bytes ──> process of rank 1: LocalExecutor
                                        └── ...            all exchange with one another while they compute (ranks.py)

Rank 0's process has the only scheduler and allocator: every rank keeps its part of the KV cache under the same block
ids.  All ranks have all logits and draw by the same hash, so they choose the same tokens, and none is sent.  With each
step a rank returns a checksum of its tokens.

A rank whose process ends, sends no beat for 1.2 times `lease_ms`, fails alone or computes other tokens ends the engine
(ExecutorLost): other engines, or its restart, take its requests from the token log.  Its processes end with it.
While the model loads the same happens after a longer silence (`START_SILENCE_S`, `LOAD_SILENCE_S`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import msgspec
import torch

from quire.engine.common import child_python
from quire.engine.common.deadline import ends_process
from quire.engine.config import EngineConfig
from quire.engine.core.plan import Drafter, StepPlan, StepResult
from quire.engine.executor import preload
from quire.engine.executor.base import ExecutorLost, StepError
from quire.engine.executor.errors import ModelLoadError, one_line
from quire.engine.executor.local import LocalExecutor, device_kind
from quire.engine.executor.models.sharding.sharding import OPTION
from quire.engine.executor.priority import set_priority
from quire.engine.executor.ranks.rank_grammars import GrammarsOfRanks
from quire.engine.executor.ranks.rank_process import (
    BEGIN,
    CLOSE,
    COLLECT,
    FAILING,
    PREPARE,
    SUBMIT,
    Facts,
    Ready,
    Reply,
    Task,
    digest,
    join,
)
from quire.engine.executor.ranks.ranks import Ranks

log = logging.getLogger(__name__)

BEATS = 5  # heartbeats per lease: a rank that misses more is lost
# A rank beats from its first message on, by a thread, so only a call that holds the interpreter silences it.  While the
# model loads some do: the first one that uses a GPU, one that maps a library, the meeting of ranks that share GPU
# memory.  Most release it: reading weights, exchanges, graphs, a compiler.  Before its first message a rank
# imports torch: it reads gigabytes of libraries, perhaps from a slow disk, and sends nothing.
START_SILENCE_S = 300.0  # seconds of silence until the first message
LOAD_SILENCE_S, LEASES_OF_SILENCE = 60.0, 10  # the longer one, after that until the model is loaded
SHARED, SHARED_BYTES = Path("/dev/shm"), 32 << 20  # directory of NCCL's buffers; bytes that a rank may need
END_S = 2.0  # seconds for a call on a lost rank to return, before the process ends without it
CLOSE_S = 20.0  # seconds to release the GPU after a lost rank, for which kernels may wait
GRACE_S = 2.0  # more, if not even the thread that would end the process gets to run


@dataclass
class Rank:
    """Another rank, as rank 0 sees it."""

    number: int
    process: subprocess.Popen[bytes]
    commands: Connection
    life: socket.socket
    silent: int = 0  # beats missed, or sent while a step of its own was failing
    _ready: Ready | None = None  # its report at the end of the start
    _reading: threading.Lock = field(default_factory=threading.Lock)  # while a thread reads a message of the start

    @classmethod
    def start(cls, number: int, log_format: str) -> Self:
        """Start a process, which imports what it needs and waits for its task."""
        ours, theirs = socket.socketpair()
        life, their_life = socket.socketpair()
        descriptors = (theirs.fileno(), their_life.fileno())
        with theirs, their_life:
            process = subprocess.Popen(
                child_python.command("-m", "quire.engine.process.rank", *map(str, descriptors), log_format),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=child_python.environment(),
                start_new_session=True,  # signals of a terminal are for rank 0
            )
        return cls(number, process, Connection(ours.detach()), life)

    def how_it_ended(self) -> str:
        """Describe how the process ended in a few words, with the reason that a failed start reported."""
        if error := self.start_error():
            return error
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"rank {self.number} ended with status {self.process.wait(1)}"
        return f"rank {self.number} closed its end"

    def wait_until_here(self) -> None:
        """Wait until the process has imported what it needs.  Raises EOFError or OSError when it ends before."""
        with self._reading:
            self.commands.recv_bytes()

    def wait_until_ready(self) -> Ready:
        """Wait until the rank is loaded, or cannot be.  Raises EOFError or OSError when its process ends before."""
        with self._reading:
            if self._ready is None:
                self._ready = msgspec.msgpack.decode(self.commands.recv_bytes(), type=Ready)
            return self._ready

    def start_error(self) -> str:
        """Return the error line that a rank reported from a failed start; empty: none was reported.

        Any thread may ask, and again: the message is read once and kept."""
        with self._reading, contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            if self._ready is None and self.commands.poll():
                self._ready = msgspec.msgpack.decode(self.commands.recv_bytes(), type=Ready)
        return f"rank {self.number}: {self._ready.error}" if self._ready is not None and self._ready.error else ""

    def kill(self) -> None:
        """End the process now.  A read from its connection then returns an end of file."""
        self.process.kill()

    def release(self) -> None:
        """Let go of a process that has been killed or has ended."""
        self.commands.close()
        self.life.close()
        self.process.wait()


@dataclass
class Watch:
    """A thread that notices when a rank is lost, and sees to it that rank 0 notices too, wherever it waits."""

    others: Sequence[Rank]
    beat_s: float
    lost: str = ""  # why no further step can run; empty: all ranks live
    silence_s: float = START_SILENCE_S  # a rank that leaves out the beats of a longer time is lost
    loading: bool = True  # not all ranks are loaded
    ranks: Ranks | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _unused: threading.Event = field(default_factory=threading.Event)  # no call uses the ranks
    _counting: threading.Lock = field(default_factory=threading.Lock)  # while `silent` and `silence_s` are compared

    def start(self) -> None:
        """Begin to watch the ranks, whose processes have started."""
        self._unused.set()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def expect_beats(self, silence_s: float, *, loading: bool = False) -> None:
        """From now on let no rank be silent for longer than `silence_s` seconds, whatever it was before."""
        with self._counting:
            self.silence_s, self.loading = silence_s, loading
            for rank in self.others:
                rank.silent = 0

    def stop(self) -> None:
        """End: the ranks are about to leave."""
        self._stopped.set()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """A call that needs all ranks.  Raises ExecutorLost in place of what the loss of one makes it raise."""
        self._unused.clear()  # before `lost` is read: `_lose` sets that first and then waits for this call
        try:
            if self.lost:
                raise ExecutorLost(self.lost)
            yield
        except ExecutorLost as error:
            self.lost = self.lost or str(error)
            self.kill()
            raise
        except (OSError, EOFError, RuntimeError) as error:  # socket error, or error of a collective
            self.wait_for_loss()
            if not self.lost and isinstance(error, RuntimeError):
                raise
            self.lost = self.lost or one_line(error)
            self.kill()
            raise ExecutorLost(self.lost) from error
        finally:
            self._unused.set()

    def kill(self) -> None:
        """End the other ranks now, one that is stopped as well."""
        for rank in self.others:
            rank.kill()

    def at_exit(self) -> None:
        """End a process that has lost a rank and not closed its executor, with status 1.

        A kernel that waits for a lost rank has no end, so what lets go of a GPU's memory would then wait forever."""
        if self.lost:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def wait_for_loss(self) -> None:
        """Wait until a loss is noted, for two beats at most.  A process that died breaks an exchange before that."""
        until = time.monotonic() + 2 * self.beat_s
        while not self.lost and time.monotonic() < until:
            time.sleep(0.02)

    def _run(self) -> None:
        with selectors.DefaultSelector() as lines:
            for rank in self.others:
                lines.register(rank.life, selectors.EVENT_READ, rank)
            tick = time.monotonic() + self.beat_s
            while not self._stopped.is_set():
                for line, _ in lines.select(max(0.0, tick - time.monotonic())):
                    rank = line.data
                    if not (said := self._hear(rank)):
                        return self._lose(rank.how_it_ended())
                    if said != FAILING:
                        rank.silent = 0
                if time.monotonic() < tick:
                    continue
                # Ticks count, not seconds: this process may have been stopped together with the ranks.
                tick = time.monotonic() + self.beat_s
                if reason := self._count_silence():
                    return self._lose(reason)
        return None

    def _count_silence(self) -> str:
        """Count one more beat that each rank may have left out.  Returns why a rank is lost; empty: none is."""
        with self._counting:
            for rank in self.others:
                rank.silent += 1
                if rank.silent <= round(self.silence_s / self.beat_s):
                    continue
                if self.loading:
                    return f"rank {rank.number} has sent nothing for {self.silence_s:g} s while the model loads"
                return f"rank {rank.number} does not answer, or failed alone"
        return ""

    @staticmethod
    def _hear(rank: Rank) -> bytes:
        """Return the last beat that has arrived; empty when the process has ended."""
        with contextlib.suppress(OSError):
            return rank.life.recv(1 << 16)[-1:]
        return b""

    def _lose(self, reason: str) -> None:
        """Note the loss, and free the thread that may wait for the lost rank in a socket or in an exchange."""
        if (
            self._stopped.is_set() or self.lost
        ):  # `close` or a loss of a rank has ended the thread already: wait for none
            return
        self.lost = reason  # first: a call that begins after this line ends at once
        self.kill()
        if not self.loading:
            log.error("%s: exchanges with it are aborted", reason)
        with ends_process(END_S + GRACE_S):
            if self.ranks is not None:
                # NCCL's abort waits for a kernel that may wait for the lost rank, so it has a thread of its own.  It
                # might hold the interpreter meanwhile, and this thread with it.
                threading.Thread(target=self.ranks.abort, name="abort", daemon=True).start()
            if not self._unused.wait(END_S):
                waits = "rank 0 waits for it" if self.loading else "this step never returns"
                log.critical("%s, and %s: the engine ends, its requests move on", reason, waits)
                logging.shutdown()
                os._exit(1)


class ParallelExecutor:
    """An `quire.engine.executor.base.Executor` over several ranks.  Not thread-safe: one loop owns it."""

    def __init__(self, config: EngineConfig, waiting: Sequence[Rank] = ()) -> None:
        """Start the other ranks' processes, load every part of the model, agree on the KV cache.

        waiting: processes of a spare (`WaitingRanks`), used in place of new ones where they still run.
        Raises ModelLoadError with one line, whichever rank failed, and KernelBuildError without a compiler."""
        check_devices(config)
        self._patience_s = config.lease_ms / 1000
        config = config_of_a_rank(config)
        self._waiting = {rank.number: rank for rank in waiting}
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._local: LocalExecutor | None = None
        self._ranks: Ranks | None = None
        self._grammars: GrammarsOfRanks | None = None
        self._others: list[Rank] = []
        self._watch = Watch(self._others, self._patience_s / BEATS)
        atexit.register(self._watch.at_exit)
        try:
            self._start(config, Path(self._folder.name) / "meeting")
        except BaseException:
            self._end(kill=True)
            raise

    def _start(self, config: EngineConfig, meeting: Path) -> None:
        size = config.tensor_parallel
        self._start_processes(config)
        self._watch.start()
        try:
            with self._watch.using():
                for rank in self._others:
                    task = Task(rank.number, str(meeting), self._watch.beat_s, config)
                    rank.commands.send_bytes(BEGIN + msgspec.msgpack.encode(task))
                for rank in self._others:
                    rank.wait_until_here()  # else the others would wait for it for long
                silence_s = max(LOAD_SILENCE_S, LEASES_OF_SILENCE * self._patience_s)
                self._watch.expect_beats(silence_s, loading=True)
                self._ranks = self._watch.ranks = join(config, 0, meeting)
                local = self._local = LocalExecutor(config, self._ranks)
                readies = [rank.wait_until_ready() for rank in self._others]
        except (ExecutorLost, RuntimeError, ModelLoadError) as error:
            cause = self._cause_of(error)
            if not cause and not isinstance(error, ExecutorLost):
                raise
            raise ModelLoadError(f"{OPTION} {size}: {cause or error}") from error
        for rank, ready in zip(self._others, readies, strict=True):
            if ready.facts is None:
                raise ModelLoadError(f"{OPTION} {size}: rank {rank.number}: {ready.error}")
            check_equal(rank.number, ready.facts, Facts.of(local))
        self._watch.expect_beats(self._patience_s)
        self.info, self.blocks, self.host_blocks = local.info, local.blocks, local.host_blocks
        self.drafter: Drafter | None = None  # the ranks' plans have no drafts
        self.max_seqs, self.step_tokens, self.depth = local.max_seqs, local.step_tokens, local.depth
        # All move their parts of a block at once.
        self.swap_bytes_per_s = size * min([local.swap_bytes_per_s, *(ready.swap_bytes_per_s for ready in readies)])
        self.start_parts, self.memory_parts = local.start_parts, local.memory_parts
        log.info("%d ranks hold the model and %d KV blocks", size, self.blocks)

    def _start_processes(self, config: EngineConfig) -> None:
        """Start the other ranks' processes.  Those of a spare that still run are used."""
        for number in range(1, config.tensor_parallel):
            rank = self._waiting.pop(number, None)
            if rank is not None and rank.process.poll() is not None:
                log.warning("rank %d of this spare ended with status %d: another starts", number, rank.process.poll())
                rank.release()
                rank = None
            self._others.append(rank or Rank.start(number, config.log_format))

    def _cause_of(self, error: Exception) -> str:
        """Return why a rank failed or was lost for a reason of its own; empty: none was.

        Such a rank breaks the others' exchanges, so rank 0's `error` is then a consequence: of an exchange, or that its
        part of the model does not work.  If all fail alike, rank 0's own error is the one to print."""
        if isinstance(error, ModelLoadError):
            self._watch.wait_for_loss()
        lines = [*(rank.start_error() for rank in self._others), self._watch.lost]
        return next((line for line in lines if line and not line.endswith(str(error))), "")

    @property
    def _mine(self) -> LocalExecutor:
        if self._local is None:
            raise RuntimeError("this executor is closed")
        return self._local

    def submit(self, plan: StepPlan) -> None:
        """Start one step on all ranks; on a GPU returns at once.  At most `depth` may be in flight."""
        with self._watch.using():
            self._send(SUBMIT + msgspec.msgpack.encode(plan))
            self._mine.submit(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.  Raises StepError if it failed on all ranks, and ExecutorLost when a
        rank is lost, failed alone, or computed other tokens."""
        with self._watch.using():
            self._send(COLLECT)
            error: StepError | None = None
            try:
                result = self._mine.collect()
            except StepError as failure:
                error = failure
            if error is not None:
                self._agree_on(error)
                raise error
            found = digest(result)
            for rank in self._others:
                reply = self._reply(rank)
                if reply.error:
                    raise ExecutorLost(f"rank {rank.number} failed where rank 0 did not: {reply.error}")
                if reply.digest != found:
                    raise ExecutorLost(f"rank {rank.number} chose other tokens than rank 0 in step {result.step}")
            size = 1 + len(self._others)
            return msgspec.structs.replace(result, swapped_bytes=size * result.swapped_bytes)

    def _agree_on(self, error: StepError) -> None:
        """Return when every rank failed at this step, and all can still exchange."""
        assert self._ranks is not None
        for rank in self._others:
            if not self._reply(rank).error:
                raise ExecutorLost(f"rank 0 failed where rank {rank.number} did not: {error}") from error
        self._ranks.barrier()

    def _send(self, message: bytes) -> None:
        for rank in self._others:
            rank.commands.send_bytes(message)

    def _reply(self, rank: Rank) -> Reply:
        """Return what a rank says of the step that rank 0 has just collected.  Raises ExecutorLost."""
        return msgspec.msgpack.decode(self._answer(rank), type=Reply)

    def _answer(self, rank: Rank) -> bytes:
        if not rank.commands.poll(self._patience_s):
            raise ExecutorLost(f"rank {rank.number} has not ended a step {self._patience_s:g} s after rank 0 did")
        return rank.commands.recv_bytes()

    @property
    def grammar_store(self) -> GrammarsOfRanks | None:
        """The store of the requests' grammars, on all ranks; None: the model's answers can follow none."""
        if self._grammars is None and (own := self._mine.grammar_store) is not None:
            self._grammars = GrammarsOfRanks(own, self._tell, self._ask)
        return self._grammars

    @property
    def adapter_store(self) -> None:
        """Ranks take no LoRA adapters."""
        return None

    def _tell(self, message: bytes) -> None:
        """Send a command to all other ranks.  Raises ExecutorLost."""
        with self._watch.using():
            self._send(message)

    def _ask(self, message: bytes) -> list[bytes]:
        """Return what the other ranks answer to a question.  Raises ExecutorLost."""
        with self._watch.using():
            self._send(message)
            return [self._answer(rank) for rank in self._others]

    def catch_up(self) -> bool:
        """Nothing was put off.  Raises ExecutorLost when a rank was lost while the engine was idle."""
        with self._watch.using():
            return False

    def close(self) -> None:
        """Let every rank free its memory and leave.  Harmless when called twice.

        Ends the process where a rank is lost and this one cannot let go of its GPU."""
        if not self._watch.lost:
            return self._end(kill=False)
        with ends_process(CLOSE_S):
            return self._end(kill=True)

    def _end(self, *, kill: bool) -> None:
        self._watch.stop()
        for rank in self._others:
            if kill:
                rank.kill()
            else:
                with contextlib.suppress(OSError):
                    rank.commands.send_bytes(CLOSE)
        if self._local is not None:
            self._local.close()
        if self._ranks is not None:
            if kill:
                self._ranks.abort()
            self._ranks.leave()
        for rank in self._others:
            try:
                rank.process.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
            rank.release()
        self._local, self._ranks = None, None
        self._others.clear()
        self._folder.cleanup()
        atexit.unregister(self._watch.at_exit)


class WaitingRanks:
    """The other ranks of a spare.  They start and prepare before the takeover, as rank 0 does.

    They end with this process, so nothing has to be done for a spare that is not needed."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    def prepare(self, config: EngineConfig) -> Iterator[str]:
        """Start them, and prepare this process, one part each time it is advanced.  A part that fails raises."""
        own = config_of_a_rank(config)
        for number in range(1, config.tensor_parallel):
            rank = Rank.start(number, config.log_format)
            self._ranks.append(rank)
            rank.commands.send_bytes(PREPARE + msgspec.msgpack.encode(Task(number, "", 0.0, own)))
        yield "ranks"
        yield from preload.prepare(own)

    def load(self, config: EngineConfig) -> ParallelExecutor:
        """Take over: the processes that wait become the ranks.  Raises as ParallelExecutor does."""
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        for rank in self._ranks:
            set_priority(rank.process.pid, nice)  # a waiting spare has a lower one
        waiting, self._ranks = self._ranks, []
        try:
            return ParallelExecutor(config, waiting)
        except BaseException:
            for rank in waiting:
                rank.kill()
                rank.release()
            raise


def config_of_a_rank(config: EngineConfig) -> EngineConfig:
    """Return what every rank is loaded with.

    Each captures its graphs at the start: which step captures one later would depend on a rank's own clock."""
    share = config.swap_memory_gib / config.tensor_parallel
    return msgspec.structs.replace(config, standby=False, swap_memory_gib=share)


def check_devices(config: EngineConfig) -> None:
    """Raise ModelLoadError unless there is a GPU for each rank, and shared memory for what NCCL exchanges."""
    if device_kind(config) != "cuda":
        return
    size = config.tensor_parallel
    if SHARED.is_dir() and (free := shutil.disk_usage(SHARED).free) < size * SHARED_BYTES:
        need = f"{size} ranks need {size * SHARED_BYTES >> 20} MiB: docker run --shm-size 1g"
        raise ModelLoadError(f"{OPTION} {size}: {free >> 20} MiB are free in {SHARED}, {need}")
    if (there := torch.cuda.device_count()) < size:
        raise ModelLoadError(
            f"{OPTION} {config.tensor_parallel}: this process sees {there} GPU(s); one a rank is needed"
        )


def check_equal(number: int, theirs: Facts, mine: Facts) -> None:
    """Raise ModelLoadError unless another rank has loaded what rank 0 has."""
    if theirs.info.fingerprint != mine.info.fingerprint:
        both = f"fingerprint {theirs.info.fingerprint:.12}, that of rank 0 is {mine.info.fingerprint:.12}"
        raise ModelLoadError(f"{OPTION}: rank {number} has loaded other weights: {both}; start again")
    if theirs != mine:
        raise ModelLoadError(f"{OPTION}: rank {number} says {theirs}, rank 0 {mine}")
