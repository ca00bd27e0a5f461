"""The fleet's list of LoRA adapters loaded at run time, in Redis: the client of the scripts adapter_*.lua.

    put()    ---> stores a name and its adapter
    get()    <--- the adapter of one name; entries(): all names
    drop()   ---> removes a name

Every gateway looks the adapter up per request, so a load or unload takes effect at all gateways at once.  Engines do
not read the list: a request carries the adapter's id and folder.  For the key see "Adapters" in `redis/KEYS.md`.
"""

from __future__ import annotations

from quire.engine.common.errors import OperatorError
from quire.engine.wire.quotas import RunScript
from quire.engine.wire.scripts import ADAPTER_DROP, ADAPTER_GET, ADAPTER_PUT

MAX_NAMES = 10_000


class TooManyAdapters(OperatorError):
    """MAX_NAMES names are in use."""


class AdapterList:
    """Maps adapter names to encoded adapters.  Every method runs one script and raises BusDown after PATIENCE_S."""

    def __init__(self, run_script: RunScript) -> None:
        self._run = run_script

    async def put(self, name: str, value: bytes, *, replace: bool, expected: bytes | None = None) -> bool:
        """Store a name with its adapter.  Returns False if the name has another adapter already.

        `replace`: replace any other adapter.  `expected`: replace this one.  Raises TooManyAdapters for a new name
        beyond MAX_NAMES."""
        stored = int(await self._run(ADAPTER_PUT, name, value, int(replace), MAX_NAMES, expected or b""))
        if stored < 0:
            raise TooManyAdapters
        return bool(stored)

    async def get(self, name: str) -> bytes | None:
        """Return the encoded adapter of a name; None: the name is unknown."""
        found: list[bytes] = await self._run(ADAPTER_GET, name)
        return found[1] if found else None

    async def entries(self) -> dict[str, bytes]:
        """Return all names with their encoded adapters, sorted by name."""
        found: list[bytes] = await self._run(ADAPTER_GET, "")
        return dict(sorted((name.decode(), value) for name, value in zip(found[::2], found[1::2], strict=True)))

    async def drop(self, name: str) -> bool:
        """Remove a name.  Returns whether the name was in the list."""
        return bool(await self._run(ADAPTER_DROP, name))
