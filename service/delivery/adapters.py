"""Which LoRA adapters a gateway serves, and to which tenant.

    `model` ─┬─ a name of --lora ──────────────────────────────> read at the start
             ├─ a name in the fleet's list, in Redis ──────────> loaded by POST /v1/load_lora_adapter, at any gateway
             └─ a folder of this name in --lora-dir ───────────> added to the list, so that every gateway lists it

A request for the base model, or for an adapter of --lora, costs no access to Redis or the file system.  Any other name
is looked up in Redis at each request, so a load or unload at one gateway takes effect at all gateways at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import digest_of
from quire.engine.adapters.folder import AdapterFolder, FoundAdapter
from quire.engine.adapters.names import adapter_id, check_name, check_within, path_within
from quire.engine.wire.adapter_list import MAX_NAMES, TooManyAdapters
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Sampling
from quire.service.api.adapters import ServedAdapter, read_adapters
from quire.service.api.api import Served, UnknownModel
from quire.service.api.tenants import Tenant
from quire.service.common.limits import shown
from quire.service.common.refusal import Refusal
from quire.service.common.refusal import bad_request as _bad
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams, ask

log = logging.getLogger("quire.gateway")

T = TypeVar("T")

READERS = 2  # number of threads that read adapter folders


class Adapters:
    """All LoRA adapters that one gateway serves."""

    def __init__(self, config: GatewayConfig, names: list[str], defaults: Sampling, streams: Streams) -> None:
        """`names`: names of the base model.  `defaults`: default sampling parameters.

        Raises AdapterError if --lora or --lora-dir is invalid."""
        self._names, self._streams = names, streams
        self._fixed = read_adapters(config.lora, names)
        self._folder = AdapterFolder(Path(config.lora_dir)) if config.lora_dir else None
        self._served = Served(tuple(names[1:]), defaults, self._fixed)
        self._listed: dict[str, ServedAdapter] = {}  # the fleet's list, as last read
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="adapters")

    # ---------------------------------------------------------------------------------------------------- for requests

    async def chosen(self, tenant: Tenant, parse: Callable[[Served], Awaitable[T]]) -> T:
        """Run `parse` on a request with the adapters that its tenant may use, and return its result.

        `parse` first gets the adapters of --lora.  If it raises UnknownModel, it runs again with the named adapter.
        Raises Refusal: 404 for a name that is unknown or that the tenant may not use."""
        served = self._served
        if tenant.adapters is not None:
            own = {name: one for name, one in self._fixed.items() if tenant.may_use(name)}
            served = msgspec.structs.replace(served, adapters=own)
        try:
            return await parse(served)
        except UnknownModel as unknown:
            adapter = await self.find(unknown.name, tenant)
            if adapter is None:
                raise
        return await parse(msgspec.structs.replace(served, adapters={adapter.name: adapter}))

    async def find(self, name: str, tenant: Tenant) -> ServedAdapter | None:
        """Return the adapter with this name; None if none exists or the tenant may not use it.  Raises Refusal."""
        try:
            check_name(name)
        except AdapterError:
            return None
        if not tenant.may_use(name):
            return None
        if (fixed := self._fixed.get(name)) is not None:
            return fixed
        listed = await self._read(name)
        if listed is not None and not listed.looked_up:
            return listed
        found = await self._look_up(name)
        if found is None:
            return None
        adapter = ServedAdapter(name, found.id, str(found.path), looked_up=True)
        if adapter != listed and not await self._enter(adapter, replaces=listed):
            listed = await self._read(name)  # it was loaded meanwhile
            return adapter if listed is None or listed.looked_up else listed
        return adapter

    async def listed(self, tenant: Tenant) -> list[ServedAdapter]:
        """Return the adapters that a tenant may use: of --lora, loaded by the API, and used before from --lora-dir.

        While Redis is away, the last list that was read from it counts."""
        try:
            entries = await self._streams.adapters.entries() if self._streams.trouble is None else None
        except BusDown:
            entries = None
        if entries is not None:
            self._listed = await self._run(_decoded_all, entries)
        there = await self._run(self._there, [one for one in self._listed.values() if one.looked_up])
        loaded = [one for one in self._listed.values() if not one.looked_up or one.name in there]
        both = [*self._fixed.values(), *(one for one in loaded if one.name not in self._fixed)]
        return [one for one in both if tenant.may_use(one.name) and one.name not in self._names]

    # --------------------------------------------------------------------------------------------------- for operators

    async def read(self, name: str, path: str, *, replace: bool) -> ServedAdapter:
        """Read the files of an adapter, and return the value that `enter` stores.

        Raises Refusal: 400 for a forbidden name or path or an unsupported adapter; 404 if the files do not exist."""
        try:
            check_name(name)
        except AdapterError as error:
            raise _bad("invalid_value", f"lora_name: {error}", "lora_name", error.limit, error.given) from None
        if name in self._names or name in self._fixed:
            kind = "the base model" if name in self._names else "an adapter of --lora"
            raise _bad("adapter_exists", f"lora_name: {kind} has this name", "lora_name", None, name)
        listed = await self._read(name)
        if listed is not None and not listed.looked_up and not replace:
            raise _exists(name)
        folder = self._allowed(path)
        try:
            digest = await self._run(self._digest, folder)
        except AdapterError as error:
            raise _bad("invalid_adapter", f"lora_path: {error}", "lora_path", error.limit, error.given) from None
        if not digest:
            raise Refusal(404, "adapter_not_found", "lora_path: no adapter there", param="lora_path", given=path)
        return ServedAdapter(name, adapter_id(name, digest), str(folder))

    async def enter(self, adapter: ServedAdapter, *, replace: bool) -> None:
        """Add an adapter to the fleet's list, so that all gateways serve it from now on.  Raises Refusal."""
        listed = await self._read(adapter.name)
        looked_up = listed if listed is not None and listed.looked_up else None
        if not await self._enter(adapter, replace=replace, replaces=looked_up):
            raise _exists(adapter.name)

    async def remove(self, name: str) -> ServedAdapter:
        """Remove an adapter from the fleet's list and return it.  Requests that were already accepted continue.

        Raises Refusal: 404 for an unknown name, 400 for an adapter of --lora."""
        if name in self._fixed:
            message = "lora_name: an adapter of --lora is served until the gateways restart without it"
            raise _bad("unsupported", message, "lora_name", None, name)
        listed = await self._read(name)
        if listed is None or not await ask(self._streams.adapters.drop(name)):
            message = "lora_name: no adapter of this name is loaded"
            raise Refusal(404, "adapter_not_found", message, param="lora_name", given=name)
        self._listed.pop(name, None)
        return listed

    # ----------------------------------------------------------------------------------------------- Redis and files

    async def _read(self, name: str) -> ServedAdapter | None:
        value = await ask(self._streams.adapters.get(name))
        return None if value is None else _decoded(value)

    async def _enter(
        self, adapter: ServedAdapter, *, replace: bool = False, replaces: ServedAdapter | None = None
    ) -> bool:
        """Store an adapter in the fleet's list.

        `replace`: whether an adapter of this name may be replaced.  `replaces`: only this adapter may be replaced, not
        one that another gateway has stored meanwhile.  Returns False if the name is taken.  Raises Refusal."""
        value = msgspec.msgpack.encode(adapter)
        expected = None if replaces is None else msgspec.msgpack.encode(replaces)
        try:
            return await ask(self._streams.adapters.put(adapter.name, value, replace=replace, expected=expected))
        except TooManyAdapters:
            if adapter.looked_up:  # an adapter from --lora-dir is served even if the list has no space for it
                return True
            message = f"lora_name: at most {MAX_NAMES} adapters are loaded at a time; unload others"
            raise _bad("too_many", message, "lora_name", MAX_NAMES, MAX_NAMES + 1) from None

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _look_up(self, name: str) -> FoundAdapter | None:
        """Return the adapter with this name in --lora-dir, or None.  Raises Refusal for an unsupported adapter."""
        if self._folder is None:
            return None
        try:
            return await self._run(self._folder.find, name)
        except AdapterError as error:
            log.warning("adapter refused: %s", error)
            raise _bad("invalid_adapter", f"model: {error}", "model", error.limit, error.given) from None

    def _there(self, adapters: list[ServedAdapter]) -> set[str]:
        """Return the names whose folders are still in --lora-dir."""
        folder = self._folder
        return set() if folder is None else {one.name for one in adapters if folder.has(one.name)}

    def _allowed(self, path: str) -> Path:
        """Return the folder that an admin's request names.  Raises Refusal if it is outside --lora-dir."""
        directory = None if self._folder is None else self._folder.directory
        if directory is None:
            message = "lora_path: this gateway has no --lora-dir, the directory that adapters may be loaded from"
            raise _bad("path_not_allowed", message, "lora_path", "a folder in --lora-dir", path)
        if (folder := path_within(path, directory)) is None:
            raise _not_allowed(path)
        return folder

    def _digest(self, folder: Path) -> str:
        """Return the digest of the adapter in a folder of --lora-dir; "" if the folder has no adapter.

        Raises AdapterError, and Refusal if links in the folder lead out of --lora-dir."""
        assert self._folder is not None
        try:
            check_within(folder, self._folder.directory)
        except AdapterError:
            raise _not_allowed(str(folder)) from None
        return digest_of(folder) if self._folder.is_adapter(folder) else ""


def _decoded(value: bytes) -> ServedAdapter | None:
    """Decode an entry of the fleet's list; None if another release wrote it in a different format."""
    try:
        return msgspec.msgpack.decode(value, type=ServedAdapter)
    except msgspec.MsgspecError:
        return None


def _decoded_all(entries: dict[str, bytes]) -> dict[str, ServedAdapter]:
    """Decode the fleet's list, without entries in another format."""
    return {name: one for name, value in entries.items() if (one := _decoded(value)) is not None}


def _exists(name: str) -> Refusal:
    message = f"lora_name: '{shown(name)}' has already been loaded; load_inplace true replaces it"
    return _bad("adapter_exists", message, "lora_name", None, name)


def _not_allowed(path: str) -> Refusal:
    message = "lora_path: it must be a folder in --lora-dir, without links that lead out of it"
    return _bad("path_not_allowed", message, "lora_path", "a folder in --lora-dir", path)
