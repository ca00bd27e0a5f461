"""A rank's process as rank 0 sees it, and the watch over the heartbeats of all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

import msgspec

from quire.engine.common import child_python
from quire.engine.common.deadline import ends_process
from quire.engine.executor.base import ExecutorLost
from quire.engine.executor.errors import one_line
from quire.engine.executor.ranks.rank_process import FAILING, Ready
from quire.engine.executor.ranks.ranks import Ranks

log = logging.getLogger(__name__)

BEATS = 5  # heartbeats per lease: a rank that misses more is lost
# A rank sends heartbeats from a thread after its first message, so only a call that holds the interpreter lock stops
# them.  While the model loads, some calls hold it: the first use of a GPU, mapping a library, the rendezvous of ranks
# that share GPU memory.  Before its first message a rank imports torch: it reads gigabytes of libraries, perhaps from a
# slow disk, and sends nothing.
START_SILENCE_S = 300.0  # seconds of silence until the first message
END_S = 2.0  # seconds for a call on a lost rank to return, before the process ends without it
GRACE_S = 2.0  # additional seconds before the process is ended, if even the watching thread is blocked


@dataclass
class Rank:
    """Another rank, as rank 0 sees it."""

    number: int
    process: subprocess.Popen[bytes]
    commands: Connection
    life: socket.socket
    silent: int = 0  # heartbeats missed, or sent while a step was failing on this rank
    _ready: Ready | None = None  # its message at the end of the start
    _reading: threading.Lock = field(default_factory=threading.Lock)  # held while a thread reads a message of the start

    @classmethod
    def start(cls, number: int, log_format: str) -> Self:
        """Start a process, which imports its modules and waits for its task."""
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
        """Wait until the process has imported its modules.  Raises EOFError or OSError when it ends before."""
        with self._reading:
            self.commands.recv_bytes()

    def wait_until_ready(self) -> Ready:
        """Wait until the rank is loaded, or has failed to.  Raises EOFError or OSError when its process ends before."""
        with self._reading:
            if self._ready is None:
                self._ready = msgspec.msgpack.decode(self.commands.recv_bytes(), type=Ready)
            return self._ready

    def start_error(self) -> str:
        """Return the error line that a rank reported from a failed start; empty: none was reported.

        Any thread may call this, repeatedly: the message is read once and kept."""
        with self._reading, contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            if self._ready is None and self.commands.poll():
                self._ready = msgspec.msgpack.decode(self.commands.recv_bytes(), type=Ready)
        return f"rank {self.number}: {self._ready.error}" if self._ready is not None and self._ready.error else ""

    def kill(self) -> None:
        """End the process now.  A read from its connection then returns an end of file."""
        self.process.kill()

    def release(self) -> None:
        """Release the resources of a process that has been killed or has ended."""
        self.commands.close()
        self.life.close()
        self.process.wait()


@dataclass
class Watch:
    """A thread that detects the loss of a rank, and unblocks rank 0's thread if it waits for the lost rank."""

    others: Sequence[Rank]
    beat_s: float
    lost: str = ""  # why no further step can run; empty: all ranks live
    silence_s: float = START_SILENCE_S  # longest silence of a rank before it counts as lost
    loading: bool = True  # some rank is not loaded yet
    ranks: Ranks | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _unused: threading.Event = field(default_factory=threading.Event)  # set while no call uses the ranks
    _counting: threading.Lock = field(default_factory=threading.Lock)  # held while `silent` is compared

    def start(self) -> None:
        """Start watching the ranks, whose processes have started."""
        self._unused.set()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def expect_beats(self, silence_s: float, *, loading: bool = False) -> None:
        """From now on a rank is lost after `silence_s` seconds of silence; earlier silence does not count."""
        with self._counting:
            self.silence_s, self.loading = silence_s, loading
            for rank in self.others:
                rank.silent = 0

    def stop(self) -> None:
        """Stop watching, because the ranks are about to leave."""
        self._stopped.set()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Wrap a call that needs all ranks.  Raises ExecutorLost instead of errors that the loss of a rank causes."""
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
        """Kill the other ranks' processes now, including stopped ones."""
        for rank in self.others:
            rank.kill()

    def at_exit(self) -> None:
        """End a process that has lost a rank and not closed its executor, with status 1.

        A kernel that waits for a lost rank never ends, so code that frees the GPU's memory would wait forever."""
        if self.lost:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def wait_for_loss(self) -> None:
        """Wait until a loss is noted, for two beats at most.  A process that dies breaks a collective before the watch
        notes it."""
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
                # Counts ticks, not seconds, because this process may have been stopped (SIGSTOP) together with the
                # ranks.
                tick = time.monotonic() + self.beat_s
                if reason := self._count_silence():
                    return self._lose(reason)
        return None

    def _count_silence(self) -> str:
        """Count one more missed heartbeat of each rank.  Returns why a rank is lost; empty: none is."""
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
        """Return the last heartbeat that has arrived; empty if the process has ended."""
        with contextlib.suppress(OSError):
            return rank.life.recv(1 << 16)[-1:]
        return b""

    def _lose(self, reason: str) -> None:
        """Record the loss, and unblock the thread that may wait for the lost rank in a socket or in a collective."""
        if self._stopped.is_set() or self.lost:  # the thread has ended, or another rank was lost before
            return
        self.lost = reason  # first: a call that begins after this line ends at once
        self.kill()
        if not self.loading:
            log.error("%s: collectives with it are aborted", reason)
        with ends_process(END_S + GRACE_S):
            if self.ranks is not None:
                # NCCL's abort waits for a kernel that may wait for the lost rank, so it runs on a separate thread.  It
                # might hold the interpreter lock meanwhile, and so block this thread.
                threading.Thread(target=self.ranks.abort, name="abort", daemon=True).start()
            if not self._unused.wait(END_S):
                waits = "rank 0 waits for it" if self.loading else "this step never returns"
                log.critical("%s, and %s: the engine ends, other engines resume its requests", reason, waits)
                logging.shutdown()
                os._exit(1)
