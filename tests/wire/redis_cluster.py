"""A real Redis Cluster on this machine: masters that share the slots, and a replica where a test wants one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.crc import key_slot

from quire.engine.common.embedded_redis import die_with_parent
from tests.pace import Patience
from tests.ports import free_port

SLOTS = 16_384
MASTERS = 3
LIMIT_S = 60.0  # generous: the machine may be busy
BUS = 10_000  # a node's port of the cluster bus lies so far above its own
NODE_TIMEOUT_MS = 1_000  # a silent master is replaced after this; shorter, and a busy machine loses masters


class Node:
    """One redis-server with cluster-enabled, at a port of 127.0.0.1."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.port = free_port(BUS)
        self._folder = folder / str(self.port)
        self._folder.mkdir()
        self.socket = self._folder / "s"
        settings = {
            "port": self.port,
            "unixsocket": self.socket,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "logfile": self._folder / "log",
            "save": "",
            "cluster-enabled": "yes",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync-delay": 0,
        }
        self._process = subprocess.Popen(
            [binary, *(str(word) for name, value in settings.items() for word in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),  # noqa: PLW1509  (see EmbeddedRedis)
        )
        self.client = redis.Redis(port=self.port, socket_timeout=LIMIT_S)
        self.slots = range(0)  # slots assigned at the start

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return self.cluster("MYID").decode()

    def cluster(self, *words: str | int) -> Any:
        return self.command("CLUSTER", *words)

    def command(self, *words: Any) -> Any:
        return self.client.execute_command(*words)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, str]:
        info: dict[str, str] = self.command("CLUSTER INFO")
        return info

    def answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False

    def freeze(self) -> None:
        """From now on it neither answers nor closes a connection."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


class RedisCluster:
    """Three masters with the slots evenly among them; `replicated`: a key whose master has a replica."""

    def __init__(self, binary: Path, *, replicated: str | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="quire-cluster-")
        self._replicated = replicated
        self.nodes = [Node(binary, Path(self._scratch.name)) for _ in range(MASTERS + (replicated is not None))]
        self.masters = self.nodes[:MASTERS]

    def __enter__(self) -> Self:
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self) -> None:
        wait(lambda: all(node.answers() for node in self.nodes))
        first, share = self.nodes[0], -(-SLOTS // len(self.masters))
        for at, node in enumerate(self.masters):
            node.slots = range(at * share, min(SLOTS, (at + 1) * share))
            node.cluster("ADDSLOTS", *node.slots)
            node.cluster("SET-CONFIG-EPOCH", at + 1)
        for node in self.nodes[1:]:
            node.cluster("MEET", "127.0.0.1", first.port)
        wait(lambda: all(int(node.state()["cluster_known_nodes"]) == len(self.nodes) for node in self.nodes))
        if self._replicated is not None:
            self.replica.cluster("REPLICATE", self.serving(self._replicated).id)
            wait(lambda: self.replica.client.info("replication").get("master_link_status") == "up")
        wait(lambda: all(node.state()["cluster_state"] == "ok" for node in self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        self._scratch.cleanup()

    def serving(self, key: str) -> Node:
        """Return the master that was given the key's slot at the start."""
        return next(node for node in self.masters if slot_of(key) in node.slots)

    def others(self, key: str) -> list[Node]:
        """Return the other masters."""
        return [node for node in self.masters if slot_of(key) not in node.slots]

    @property
    def replica(self) -> Node:
        return self.nodes[MASTERS]


def slot_of(key: str) -> int:
    """Return the slot of a key: CRC16 of its hash tag, or of all of the key, modulo 16,384."""
    return int(key_slot(key.encode()))


def wait(holds: Callable[[], bool]) -> None:
    bound = Patience(LIMIT_S)
    while not holds():
        assert bound.lasts(), f"not true after {bound}"
        time.sleep(0.02)
