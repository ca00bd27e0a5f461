"""The fleet's list of LoRA adapters that were loaded while it ran, in Redis: the client of the scripts adapter_*.lua.

    put()    ---> a name, and the adapter that it stands for from now on
    get()    <--- the adapter of one name; entries(): all of them
    drop()   ---> the name is unknown again

Every gateway reads it for each request with such a name, so a load or unload counts for all gateways at once.  Engines
do not read it: a request carries the adapter's id and folder.  The key: "Adapters" in `redis/KEYS.md`.
"""

from __future__ import annotations

from quire.engine.common.errors import OperatorError
from quire.engine.wire.quotas import RunScript
from quire.engine.wire.scripts import ADAPTER_DROP, ADAPTER_GET, ADAPTER_PUT

MOST_NAMES = 10_000


class TooManyAdapters(OperatorError):
    """MOST_NAMES names are in use."""


class AdapterList:
    """Names and what they stand for, as bytes.  Every method is one script and raises BusDown after PATIENCE_S."""

    def __init__(self, run_script: RunScript) -> None:
        self._run = run_script

    async def put(self, name: str, value: bytes, *, replace: bool) -> bool:
        """Store a name.  Returns False if it stands for something else already and `replace` is False.

        Raises TooManyAdapters for a new name beyond MOST_NAMES."""
        stored = int(await self._run(ADAPTER_PUT, name, value, int(replace), MOST_NAMES))
        if stored < 0:
            raise TooManyAdapters
        return bool(stored)

    async def get(self, name: str) -> bytes | None:
        """Return what a name stands for; None: nothing."""
        found: list[bytes] = await self._run(ADAPTER_GET, name)
        return found[1] if found else None

    async def entries(self) -> dict[str, bytes]:
        """Return all names with what they stand for, in the order of the names."""
        found: list[bytes] = await self._run(ADAPTER_GET, "")
        return dict(sorted((name.decode(), value) for name, value in zip(found[::2], found[1::2], strict=True)))

    async def drop(self, name: str) -> bool:
        """Remove a name.  Returns whether it was there."""
        return bool(await self._run(ADAPTER_DROP, name))
