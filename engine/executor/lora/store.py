"""LoRA adapters in host memory, and their loading.  An adapter is held (referenced) by requests, or kept (cached) for
later requests.

    hold ─> waits ──the loader's thread reads and packs──> loaded ──last release──> kept ── over `max_bytes` ─> evicted
              └─ last release: dropped                       ^──────── hold ─────────'

A held adapter is never evicted, so a step finds it at once.  While held adapters fill the memory, loads wait.  Only the
loader's thread reads files, so a slow disk delays no step.  An id contains the digest of its files, so files that
cannot be served are read only once.  If files are missing, the next request tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.adapters.errors import AdapterError, AdapterMissing, one_line
from quire.engine.adapters.files import WEIGHTS, AdapterFile, read_adapter
from quire.engine.adapters.kept import KeptAdapters
from quire.engine.adapters.names import digest_part
from quire.engine.executor.lora.packing import PackedAdapter

log = logging.getLogger(__name__)

MAX_REFUSED = 1024  # maximum adapters remembered because their files cannot be served
DIED = "the adapter could not be loaded; the engine's log has the reason"  # message for clients


@dataclass(slots=True)
class Adapter:
    """One adapter that is held or kept."""

    key: str  # `name@digest=path`
    holders: set[str] = field(default_factory=set)
    packed: PackedAdapter | None = None
    fault: str = ""
    missing: bool = False  # `fault` is set because the files are not on this machine

    @property
    def id(self) -> str:
        """`name@digest`, as plans name it."""
        return self.key.partition("=")[0]

    @property
    def done(self) -> bool:
        return self.packed is not None or bool(self.fault)

    @property
    def bytes(self) -> int:
        return 0 if self.packed is None else self.packed.bytes


def source(adapter: str, path: str) -> str:
    """Return the key of an adapter for `hold`: its id and its folder."""
    return f"{adapter}={path}"


class AdapterStore:
    """Owner of all adapters in host memory.  Thread-safe; `engine/adapter_gate.py` holds and releases."""

    def __init__(self, pack: Callable[[AdapterFile], PackedAdapter], max_bytes: int, base: str = "") -> None:
        """`pack` raises AdapterError.  `max_bytes`: limit of held and kept adapters together.  `base`: hub name or
        path of the base model; "": the base models of adapters are not checked."""
        self._pack, self._max_bytes, self._base = pack, max_bytes, base
        self._lock = threading.Condition()
        self._adapters: dict[str, Adapter] = {}  # adapters by key
        self._by_request: dict[str, Adapter] = {}
        self._loaded: dict[str, PackedAdapter] = {}  # packed adapters by adapter id
        self._kept = KeptAdapters()  # keys of loaded adapters without holders
        self._refused: OrderedDict[str, str] = OrderedDict()  # key -> why its files cannot be served
        self._queue: deque[Adapter] = deque()
        self._finished: deque[str] = deque()
        self._bytes = 0  # bytes of all loaded adapters
        self._loads = self._faults = self._evicted = 0
        self.load_s = 0.0  # predicted seconds until one more is loaded: mean time of a load * (1 + waiting loads)
        self.unloaded = 0  # adapters that wait for their load, including the one being loaded
        self._gained: dict[str, None] = {}  # ids of adapters loaded since the last call of `changes`
        self._lost: dict[str, None] = {}  # ids of adapters evicted since then
        self._load_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------ for the adapter gate

    def hold(self, request_id: str, text: str, tenant: str = "", weight: float = 1.0) -> bool:
        """Add a request's reference to an adapter (`source`), until `release`.  Returns whether it is loaded, or
        faulty."""
        with self._lock:
            adapter = self._adapters.get(text)
            if adapter is None:
                adapter = self._adapters[text] = Adapter(text, fault=self._refused.get(text, ""))
                if not adapter.fault:
                    self._queue.append(adapter)
                    self._count_waiting()
                    self._start()
            adapter.holders.add(request_id)
            self._by_request[request_id] = adapter
            self._kept.note_use(text)
            self._kept.remove(text)
            self._lock.notify_all()
            return adapter.done

    def release(self, request_id: str) -> None:
        """Drop a request's reference; harmless without one."""
        with self._lock:
            if (adapter := self._by_request.pop(request_id, None)) is None:
                return
            adapter.holders.discard(request_id)
            if not adapter.holders:
                if adapter.packed is not None:
                    self._kept.add(adapter.key)
                elif adapter.fault or adapter in self._queue:
                    self._forget(adapter)
                self._lock.notify_all()

    def finished(self) -> list[str]:
        """Return the keys of adapters that were loaded, or found to be faulty, since the last call."""
        with self._lock:
            found = list(self._finished)
            self._finished.clear()
            return found

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the ids of adapters that were loaded since the last call, and of adapters that were evicted."""
        if not self._gained and not self._lost:
            return [], []
        with self._lock:
            gained, lost = list(self._gained), list(self._lost)
            self._gained, self._lost = {}, {}
        return gained, lost

    def _count_waiting(self) -> None:
        self.unloaded = sum(not adapter.done for adapter in self._adapters.values())
        self.load_s = self._load_s / self._loads * (1 + self.unloaded) if self._loads else 0.0

    def _note(self, adapter: str) -> None:
        """Note for `changes` whether an adapter is in memory now."""
        into, out_of = (self._gained, self._lost) if adapter in self._loaded else (self._lost, self._gained)
        out_of.pop(adapter, None)
        into[adapter] = None

    def fault(self, text: str) -> str:
        """Return why an adapter cannot be served; "" if it can, or is not loaded yet."""
        with self._lock:
            adapter = self._adapters.get(text)
            return "" if adapter is None else adapter.fault

    def is_missing(self, text: str) -> bool:
        """Return whether an adapter is faulty because its files are not on this machine."""
        with self._lock:
            adapter = self._adapters.get(text)
            return adapter is not None and adapter.missing

    def is_held(self, text: str) -> bool:
        """Return whether a request holds an adapter."""
        with self._lock:
            return bool((adapter := self._adapters.get(text)) and adapter.holders)

    # ------------------------------------------------------------------------------------------------------ for steps

    def packed(self, adapter: str) -> PackedAdapter:
        """Return an adapter that a request holds, by its id.  Raises KeyError for one that is not loaded."""
        return self._loaded[adapter]

    @property
    def counts(self) -> AdapterCounts:
        """Current numbers of held and kept adapters, and counts since start."""
        with self._lock:
            kept = sum(self._adapters[key].bytes for key in self._kept)
            return AdapterCounts(
                held=len(self._adapters) - len(self._kept),
                held_bytes=self._bytes - kept,
                kept=len(self._kept),
                kept_bytes=kept,
                waiting=sum(not adapter.done for adapter in self._adapters.values()),
                loads=self._loads,
                load_s=self._load_s,
                faults=self._faults,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """End the loader."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    # ------------------------------------------------------------------------------------------------------ the loader

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                adapter = self._queue.popleft()
            began = time.monotonic()
            packed, fault = None, ""
            try:
                packed = self._load(adapter.key)
            except AdapterError as error:
                fault, adapter.missing = str(error), isinstance(error, AdapterMissing)
            except Exception:
                log.exception("loading %s failed", adapter.key)
                fault = DIED
            with self._lock:
                if fault and fault != DIED and not adapter.missing:
                    self._refused[adapter.key] = fault
                    while len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
                self._settle(adapter, packed, fault, time.monotonic() - began)

    def _load(self, key: str) -> PackedAdapter | None:
        """Return a packed adapter; None: no request waits for it any more.  Raises AdapterError."""
        name, _, path = key.partition("=")
        folder = Path(path)
        try:
            size = (folder / WEIGHTS).stat().st_size
        except OSError:
            size = 0  # `read_adapter` reports the reason
        if size > self._max_bytes:
            raise AdapterError(f"{folder}: {size} bytes; --lora-memory-gib allows {self._max_bytes}")
        with self._lock:
            self._evict(size)
            while self._bytes + size > self._max_bytes and self._bytes > 0 and not self._closed:
                if not self._adapters[key].holders:
                    return None
                self._lock.wait()
                self._evict(size)
        file = read_adapter(folder, self._max_bytes, name, digest_part(name))
        if not file.config.is_for(self._base):
            log.warning(
                "adapter %s was trained on %s; this engine serves %s",
                *(name, one_line(str(file.config.base_model_name_or_path)), self._base),
            )
        packed = self._pack(file)
        if packed.bytes > self._max_bytes:
            raise AdapterError(
                f"{folder}: {packed.bytes} bytes in memory; --lora-memory-gib allows {self._max_bytes} bytes"
            )
        return packed

    def _settle(self, adapter: Adapter, packed: PackedAdapter | None, fault: str, seconds: float) -> None:
        """Store the result of a load."""
        self._faults += bool(fault)
        if fault:
            log.warning(
                "adapter %s: %s",
                "not here, its requests are left to other engines" if adapter.missing else "refused",
                fault,
            )
        if packed is None and not adapter.holders:
            self._forget(adapter)
            return
        if packed is None and not fault:  # its last reference was dropped just before a new one was added
            self._queue.append(adapter)
            return
        adapter.packed, adapter.fault = packed, fault
        if packed is not None:
            self._loads += 1
            self._load_s += seconds
            self._bytes += packed.bytes
            self._loaded[adapter.id] = packed
            if not adapter.holders:
                self._kept.add(adapter.key)
            self._evict(0)
            log.info(
                "loaded adapter %s: rank %d, %.1f MB in %.2f s", adapter.key, packed.rank, packed.bytes / 1e6, seconds
            )
        self._count_waiting()
        self._note(adapter.id)
        self._finished.append(adapter.key)

    def _evict(self, size: int) -> None:
        """Evict kept adapters until `size` more bytes fit."""
        while self._kept and self._bytes + size > self._max_bytes:
            self._forget(self._adapters[self._kept.pop()])
            self._evicted += 1

    def _forget(self, adapter: Adapter) -> None:
        """Remove an adapter without holders."""
        self._adapters.pop(adapter.key, None)
        self._kept.remove(adapter.key)
        if adapter in self._queue:
            self._queue.remove(adapter)
        if adapter.packed is not None:
            self._bytes -= adapter.packed.bytes
            self._loaded.pop(adapter.id, None)
            for other in self._adapters.values():  # the same files under another path
                if other.packed is not None and other.id == adapter.id:
                    self._loaded[adapter.id] = other.packed
        self._note(adapter.id)
        self._count_waiting()
