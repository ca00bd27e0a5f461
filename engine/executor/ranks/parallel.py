"""The executor of an engine whose model is sharded over ranks: one process per GPU, or several on a CPU.

    loop ── plan ──> ParallelExecutor ──┬── LocalExecutor, rank 0, in this process
                                        ├── plan bytes ──> process of rank 1: LocalExecutor
                                        └── ...            all take part in collectives while they compute (ranks.py)

Rank 0's process has the only scheduler and allocator: every rank keeps its shard of the KV cache under the same block
ids.  All ranks have all logits and draw by the same hash, so they choose the same tokens, and no token is sent.  With
each step a rank returns a checksum of its tokens.

The engine ends (ExecutorLost) if a rank's process ends, sends no heartbeat for 1.2 times `lease_ms`, fails alone or
computes other tokens.  Other engines, or its restart, take its requests from the token log.  Its rank processes end
with it. While the model loads, a longer silence is allowed (`START_SILENCE_S`, `LOAD_SILENCE_S`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from quire.engine.common.deadline import ends_process
from quire.engine.config import EngineConfig
from quire.engine.core.plan import Drafter, StepPlan, StepResult
from quire.engine.executor import preload
from quire.engine.executor.base import ExecutorLost, StepError
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.local import LocalExecutor, device_kind
from quire.engine.executor.models.sharding.sharding import OPTION
from quire.engine.executor.priority import set_priority
from quire.engine.executor.ranks.rank_grammars import GrammarsOfRanks
from quire.engine.executor.ranks.rank_process import (
    BEGIN,
    CLOSE,
    COLLECT,
    PREPARE,
    SUBMIT,
    Facts,
    Reply,
    Task,
    digest,
    join,
)
from quire.engine.executor.ranks.rank_watch import BEATS, Rank, Watch
from quire.engine.executor.ranks.ranks import Ranks

log = logging.getLogger(__name__)

# From its first message until the model is loaded, a rank may be silent for 60 s or 10 leases, whichever is longer.
LOAD_SILENCE_S, LEASES_OF_SILENCE = 60.0, 10
SHARED, SHARED_BYTES = Path("/dev/shm"), 32 << 20  # directory of NCCL's buffers; bytes that a rank may need
CLOSE_S = 20.0  # seconds to release the GPU after a rank is lost; kernels may wait for that rank


class ParallelExecutor:
    """Implements `quire.engine.executor.base.Executor` with several ranks.  Not thread-safe: one loop owns it."""

    def __init__(self, config: EngineConfig, waiting: Sequence[Rank] = ()) -> None:
        """Start the other ranks' processes, load every shard of the model, agree on the KV cache.

        waiting: rank processes that a spare engine started (`WaitingRanks`); those that still run are used.  Raises
        ModelLoadError with one line, whichever rank failed, and KernelBuildError without a compiler."""
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
                    rank.wait_until_here()  # else the other ranks would wait long for it
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
        self.drafter: Drafter | None = None  # drafts are not supported with several ranks
        self.max_seqs, self.step_tokens, self.depth = local.max_seqs, local.step_tokens, local.depth
        # All ranks copy their shards of a block concurrently.
        self.swap_bytes_per_s = size * min([local.swap_bytes_per_s, *(ready.swap_bytes_per_s for ready in readies)])
        self.start_parts, self.memory_parts = local.start_parts, local.memory_parts
        log.info("%d ranks hold the model and %d KV blocks", size, self.blocks)

    def _start_processes(self, config: EngineConfig) -> None:
        """Start the other ranks' processes, or use the processes of a spare that still run."""
        for number in range(1, config.tensor_parallel):
            rank = self._waiting.pop(number, None)
            if rank is not None and rank.process.poll() is not None:
                log.warning("rank %d of this spare ended with status %d: another starts", number, rank.process.poll())
                rank.release()
                rank = None
            self._others.append(rank or Rank.start(number, config.log_format))

    def _cause_of(self, error: Exception) -> str:
        """Return the first cause of a rank's failure or loss; empty: none is known.

        A rank that fails breaks the others' collectives, so rank 0's `error` may be a consequence: the failed
        collective, or a failed check of its shard.  If all ranks fail alike, rank 0's own error is the one to print."""
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
        """Return if every rank has failed at this step and all can still take part in a collective."""
        assert self._ranks is not None
        for rank in self._others:
            if not self._reply(rank).error:
                raise ExecutorLost(f"rank 0 failed where rank {rank.number} did not: {error}") from error
        self._ranks.barrier()

    def _send(self, message: bytes) -> None:
        for rank in self._others:
            rank.commands.send_bytes(message)

    def _reply(self, rank: Rank) -> Reply:
        """Return a rank's reply about the step that rank 0 has just collected.  Raises ExecutorLost."""
        return msgspec.msgpack.decode(self._answer(rank), type=Reply)

    def _answer(self, rank: Rank) -> bytes:
        if not rank.commands.poll(self._patience_s):
            raise ExecutorLost(f"rank {rank.number} has not ended a step {self._patience_s:g} s after rank 0 did")
        return rank.commands.recv_bytes()

    @property
    def grammar_store(self) -> GrammarsOfRanks | None:
        """The store of the requests' grammars, on all ranks; None: the model supports no grammars."""
        if self._grammars is None and (own := self._mine.grammar_store) is not None:
            self._grammars = GrammarsOfRanks(own, self._tell, self._ask)
        return self._grammars

    @property
    def adapter_store(self) -> None:
        """None: ranks support no LoRA adapters."""
        return None

    def _tell(self, message: bytes) -> None:
        """Send a command to all other ranks.  Raises ExecutorLost."""
        with self._watch.using():
            self._send(message)

    def _ask(self, message: bytes) -> list[bytes]:
        """Return the other ranks' answers to a question.  Raises ExecutorLost."""
        with self._watch.using():
            self._send(message)
            return [self._answer(rank) for rank in self._others]

    def catch_up(self) -> bool:
        """Return False: no work is deferred.  Raises ExecutorLost if a rank was lost while the engine was idle."""
        with self._watch.using():
            return False

    def close(self) -> None:
        """Let every rank free its memory and leave.  Harmless when called twice.

        Ends the process if a rank is lost and this process cannot release its GPU."""
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
    """The other ranks of a spare engine.  They start and prepare before its activation, as rank 0 does.

    They end with this process."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []

    def prepare(self, config: EngineConfig) -> Iterator[str]:
        """Start the ranks, and prepare this process; each `next` does one part.  A part that fails raises."""
        own = config_of_a_rank(config)
        for number in range(1, config.tensor_parallel):
            rank = Rank.start(number, config.log_format)
            self._ranks.append(rank)
            rank.commands.send_bytes(PREPARE + msgspec.msgpack.encode(Task(number, "", 0.0, own)))
        yield "ranks"
        yield from preload.prepare(own)

    def load(self, config: EngineConfig) -> ParallelExecutor:
        """Activate the spare: the waiting processes become the ranks.  Raises as ParallelExecutor does."""
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        for rank in self._ranks:
            set_priority(rank.process.pid, nice)  # a waiting spare has a lower priority
        waiting, self._ranks = self._ranks, []
        try:
            return ParallelExecutor(config, waiting)
        except BaseException:
            for rank in waiting:
                rank.kill()
                rank.release()
            raise


def config_of_a_rank(config: EngineConfig) -> EngineConfig:
    """Return the configuration with which every rank is loaded.

    Every rank captures its graphs at the start, because lazy capture would depend on the rank's own clock."""
    share = config.swap_memory_gib / config.tensor_parallel
    return msgspec.structs.replace(config, standby=False, swap_memory_gib=share)


def check_devices(config: EngineConfig) -> None:
    """Raise ModelLoadError unless there is a GPU for each rank, and shared memory for NCCL's buffers."""
    if device_kind(config) != "cuda":
        return
    size = config.tensor_parallel
    if SHARED.is_dir() and (free := shutil.disk_usage(SHARED).free) < size * SHARED_BYTES:
        need = f"{size} ranks need {size * SHARED_BYTES >> 20} MiB: docker run --shm-size 1g"
        raise ModelLoadError(f"{OPTION} {size}: {free >> 20} MiB are free in {SHARED}, {need}")
    if (there := torch.cuda.device_count()) < size:
        raise ModelLoadError(
            f"{OPTION} {config.tensor_parallel}: this process sees {there} GPU(s); one per rank is needed"
        )


def check_equal(number: int, theirs: Facts, mine: Facts) -> None:
    """Raise ModelLoadError unless another rank has loaded the same as rank 0."""
    if theirs.info.fingerprint != mine.info.fingerprint:
        both = f"fingerprint {theirs.info.fingerprint:.12}, that of rank 0 is {mine.info.fingerprint:.12}"
        raise ModelLoadError(f"{OPTION}: rank {number} has loaded other weights: {both}; start again")
    if theirs != mine:
        raise ModelLoadError(f"{OPTION}: rank {number} says {theirs}, rank 0 {mine}")
