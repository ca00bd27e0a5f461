"""Servers whose operator has renamed or disabled commands: a start says which, and needs no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.scripts import COMMANDS


def without(binary: Path, folder: Path, *commands: str) -> Path:
    """Return a program that starts a server without these commands."""
    script = folder / "server"
    script.write_text(
        f"""#!/bin/sh\nexec {binary} "$@" {" ".join(f"--rename-command {one} ''" for one in commands)}\n"""
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("missing", ["PUBLISH", "INFO", "EVALSHA", "ZADD"])
async def test_a_start_names_the_commands_that_are_missing(redis_binary: Path, tmp_path: Path, missing: str) -> None:
    with EmbeddedRedis(binary=without(redis_binary, tmp_path, missing)) as server:
        side = GatewaySide(server.url, "g", namespace="n")
        with pytest.raises(BusDown, match=f"has no {missing}: take rename-command"):
            await side.open()
        await side.close()


async def test_no_other_command_is_needed(redis_binary: Path, tmp_path: Path) -> None:
    others = ("CONFIG", "FLUSHALL", "FLUSHDB", "KEYS", "DEBUG", "MONITOR", "SAVE", "SCRIPT", "COMMAND")
    assert not set(others) & set(COMMANDS)
    with EmbeddedRedis(binary=without(redis_binary, tmp_path, *others)) as server:
        side = GatewaySide(server.url, "g", namespace="n")
        await side.open()
        assert (await side.fleet()).engines == []
        await side.close()
