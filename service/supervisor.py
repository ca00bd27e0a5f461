"""Keeps the processes of `quire serve` running: an engine with its spare, gateways and an embedded Redis.

    Supervisor --keep()--> Child: start, watch, restart after a pause ...  --stop()--> gateways first, then the engine

If a child that was never ready cannot start, the supervisor ends.  A child that was ready is restarted without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from quire.engine.common import child_python, orphans, readiness
from quire.engine.common.addresses import local_url
from quire.engine.common.embedded_redis import EmbeddedRedis, die_with_parent
from quire.engine.common.errors import OperatorError
from quire.engine.common.silence import Silence
from quire.service.common.spares import ForkedProcess, Spares

CONFIG_ERROR = 2  # exit status of a child that would fail again after a restart: a bad option, no model, no compiler
FAILURES = 5  # failed starts of a child that was never ready, after which the supervisor ends
BACKOFF_S = (0.5, 30.0)  # first and maximum pause before a restart; a child that was ready restarts at once
POLL_S = 0.2
KEEPERS_S = 5.0  # seconds that the tasks `Child.keep` may take to kill their spares, after all children have ended

Children = list["Child"]
Process = asyncio.subprocess.Process | ForkedProcess


class Interrupt:
    """Handles SIGINT until the supervisor does: remembers it, and raises KeyboardInterrupt when that is safe.

    Python drops a KeyboardInterrupt that is raised in a finalizer, for example: the start would continue.  And one that
    is raised while an event loop opens or closes would print a traceback."""

    def __init__(self) -> None:
        self._seen = self._raises = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        if self._raises:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if the signal has arrived."""
        if self._seen:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised_at_once(self) -> Iterator[None]:
        """A context for work that may take minutes: in it SIGINT raises KeyboardInterrupt at once."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
        self.check()


class GivenUp(OperatorError):
    """Serving cannot continue; the message is one line that an operator can act on."""


class Child:
    """One supervised process, which is restarted when it ends by itself."""

    def __init__(
        self,
        name: str,
        words: list[str],
        stop_s: float,
        *,
        spare: Sequence[str] = (),
        silence_s: float = 0.0,
        start_s: float = 0.0,
    ) -> None:
        """`words`: command-line arguments with which Python starts the process.  `stop_s`: seconds that it may take to
        end after SIGTERM.  `spare`: command-line arguments with which Python starts a fork server of spares; a spare
        replaces the process when it ends.  `silence_s`: seconds without a heartbeat after which a ready process is
        killed; 0: it sends none.  `start_s`: seconds after which a process that is not ready is killed; 0: never."""
        self._silence_s, self._start_s = silence_s, start_s
        self._name = name
        self._words = words
        self._stop_s = stop_s
        self._spare_words = spare
        self._process: Process | None = None
        self._spares: Spares | None = None
        self._stopping = asyncio.Event()

    async def keep(self) -> None:
        """Run the process until stop().

        Raises GivenUp if it was never ready: at once if it ends with CONFIG_ERROR, else after FAILURES starts.  A
        process that was ready once is restarted without limit, because a missing dependency, such as Redis, may
        return.  The restart has no pause if the process was ready in its last run."""
        with readiness.ReadinessListener() as listener:
            if self._spare_words:
                self._spares = Spares(self._spare_words, self._environment(listener))
            try:
                await self._keep(listener)
            finally:
                if self._spares is not None:
                    await self._spares.close()

    async def _keep(self, listener: readiness.ReadinessListener) -> None:
        failures, known = 0, False
        while not self._stopping.is_set():
            spare = await self._spares.promote() if self._spares else None
            self._process = spare or await self._start(listener)
            if self._stopping.is_set():  # stop() was called before this process existed; it has done nothing yet
                self.kill()
                await self._process.wait()
                return
            if spare and self._spares:  # the process may end again soon
                await self._spares.prepare()
            status, up = await self._watch(self._process, listener)
            if self._stopping.is_set():
                return
            known = known or up
            if status == CONFIG_ERROR and not known:
                raise GivenUp(f"the {self._name} cannot start (its reason is above)")
            failures = 0 if up else failures + 1
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            if failures == FAILURES and not known:
                raise GivenUp(f"the {self._name} {how} {failures} times in a row")
            pause = min(BACKOFF_S[0] * 2 ** min(failures - 1, 10), BACKOFF_S[1]) if failures else 0.0
            print(f"quire serve: the {self._name} {how}; starting it again in {pause:g} s", file=sys.stderr)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _start(self, listener: readiness.ReadinessListener) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *child_python.command(*self._words),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=self._environment(listener),
            process_group=0,  # Ctrl-C reaches only the supervisor, which stops its children in order
            preexec_fn=die_with_parent(),
        )

    @staticmethod
    def _environment(listener: readiness.ReadinessListener) -> dict[str, str]:
        return {**child_python.environment(), readiness.VARIABLE: listener.address}

    async def _watch(self, process: Process, listener: readiness.ReadinessListener) -> tuple[int, bool]:
        """Wait until the process ends.  Returns its exit status, and whether it was ready.

        A missing spare is prepared once the process is ready, so that its imports do not slow down the first start."""
        ending = asyncio.create_task(process.wait())
        try:
            up = await self._wait_until_up(ending, listener)
            if self._spares and not ending.done():
                await self._spares.prepare()
            if up and self._silence_s:
                await self._wait_for_silence(ending, listener)
            return await ending, up
        finally:
            ending.cancel()

    async def _wait_until_up(self, ending: asyncio.Task[int], listener: readiness.ReadinessListener) -> bool:
        """Wait until the process is ready (returns True) or has ended.  Kills it if it is not ready after `start_s`."""
        loop, starting = asyncio.get_running_loop(), Silence(POLL_S)
        up = killed = False
        while not (up or ending.done()):
            await asyncio.wait([ending], timeout=POLL_S)
            up = listener.is_ready() and not killed
            spent_s = starting.look(1, loop.time())
            if self._start_s and spent_s >= self._start_s and not (up or killed or self._stopping.is_set()):
                print(
                    f"quire serve: the {self._name} is not ready {self._start_s:g} s after its start "
                    "(--gateway-start-s); killing it",
                    file=sys.stderr,
                )
                self._signal(signal.SIGKILL)
                killed = True
        return up

    async def _wait_for_silence(self, ending: asyncio.Task[int], listener: readiness.ReadinessListener) -> None:
        """Wait until the process ends.  Kills it if its event loop hangs for `silence_s`."""
        loop, silence = asyncio.get_running_loop(), Silence(POLL_S)
        while not ending.done():
            await asyncio.wait([ending], timeout=POLL_S)
            listener.is_ready()
            if silence.look(listener.beats, loop.time()) >= self._silence_s and not self._stopping.is_set():
                print(
                    f"quire serve: the event loop of {self._name} has not moved for {self._silence_s:g} s "
                    "(--gateway-timeout-s); killing it",
                    file=sys.stderr,
                )
                self._signal(signal.SIGKILL)
                return

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process does not end in time."""
        self._stopping.set()
        if self._spares:
            self._spares.stop()
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self._stop_s)
        except TimeoutError:
            print(
                f"quire serve: the {self._name} did not end in {self._stop_s:g} s after SIGTERM; killing it",
                file=sys.stderr,
            )
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Supervisor:
    """Keeps an engine, its gateways and an embedded Redis running until a signal, then stops them in order."""

    def __init__(
        self,
        engine: Child,
        gateways: Children,
        embedded: EmbeddedRedis | None,
        host: str,
        port: int,
        name: str,
        example: tuple[str, dict[str, Any]],
    ) -> None:
        """`host`, `port`: the gateways' address.  `name`: the model's name for clients.

        `example`: endpoint and body of the example request that is printed."""
        self._engine, self._gateways, self._embedded = engine, gateways, embedded
        self._name, self._example = name, example
        self._base = local_url(host, port)
        self._signals = 0
        self._stop = asyncio.Event()

    async def run(self, interrupt: Interrupt) -> None:
        """Run until a signal, and drain.  Raises KeyboardInterrupt if `interrupt` has seen SIGINT.

        Raises GivenUp, after stopping all children, when a child cannot be kept running."""
        loop = asyncio.get_running_loop()
        for number in orphans.drain_signals():
            loop.add_signal_handler(number, self._on_signal)
        interrupt.check()
        children = [self._engine, *self._gateways]
        keepers = [asyncio.create_task(child.keep()) for child in children]
        helpers = [asyncio.create_task(self._announce()), asyncio.create_task(self._keep_redis())]
        stop = asyncio.create_task(self._stop.wait())
        # Errors of helper tasks end the supervisor.  _announce() ends normally, which must not end the other tasks.
        watched: set[asyncio.Task[Any]] = {*keepers, *helpers, stop}
        try:
            while not stop.done():
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in [*helpers, stop]:
                task.cancel()
            # Gateways stop first: they finish their streams, for which they need the engine.  The engine needs Redis.
            await asyncio.gather(*(gateway.stop() for gateway in self._gateways))
            await self._engine.stop()
            # A task `Child.keep` ends after its processes.  If it were cancelled earlier, its spare would outlive the
            # event loop.
            await asyncio.wait(keepers, timeout=KEEPERS_S)
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, *helpers, stop, return_exceptions=True)

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals == 1:
            print("quire serve: finishing running requests; send the signal again to stop at once", file=sys.stderr)
        else:
            for child in [self._engine, *self._gateways]:
                child.kill()

    async def _keep_redis(self) -> None:
        """Restart the embedded Redis if it dies.  It loads its data from its file; gateways and engine reconnect."""
        while self._embedded is not None:
            await asyncio.sleep(POLL_S)
            if self._embedded.pid is None:
                print("quire serve: Redis died, starting it again", file=sys.stderr)
                self._embedded.start()

    async def _announce(self) -> None:
        """Wait until a gateway is ready.  Then print the address and an example request."""
        while await asyncio.to_thread(self._get, "/ready") is None:  # noqa: ASYNC110  (no event of this process)
            await asyncio.sleep(POLL_S)
        path, asked = self._example
        print(
            f"serving {self._name} at {self._base}/v1\n"
            f"  curl {self._base}/v1/{path} -H 'Content-Type: application/json' "
            f"-d '{json.dumps({'model': self._name, **asked})}'",
            flush=True,
        )

    def _get(self, path: str) -> Any:
        """Return the JSON that a gateway answers at a path, or None for any status but 200."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignore proxies of the environment
        try:
            with direct.open(self._base + path, timeout=2) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None
