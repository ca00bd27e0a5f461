"""Compiled grammars, and their compilation.  A grammar is held (referenced) by requests, or kept (cached) for later
requests.

    hold ─> waits ──a thread compiles──> compiled ──last release──> kept ── beyond `max_bytes` ─> evicted, oldest first
              └─ last release: dropped      ^───────── hold ────────'

A held grammar is never evicted, so a step finds it at once: `copy` never waits.  Tenants' grammars are compiled
round-robin (fair_list.py).  A grammar that several requests hold is compiled once.  The error of a faulty grammar is
kept like a compiled grammar.

Sizes of kept grammars are estimates, because llguidance reports none.  All copies of a matcher share its lexer, which
grows with each mask.  So the estimate is FIXED bytes, plus bytes per byte of text and per token that copies consumed.
When evicted grammars are freed, the bytes that malloc gets back are compared with the estimates.  The estimates of
other grammars are multiplied by this ratio.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.common import host_resources
from quire.engine.common.fair_list import FairList

log = logging.getLogger(__name__)

# Bytes of a matcher of llguidance 1.9.  tests/executor/test_grammar_store.py measures 45,000 to 85,000 for a small
# grammar, 42 to 84 per byte of text for large schemas and lists of choices, and 120 to 8,000 per consumed token.
FIXED, PER_BYTE, PER_TOKEN = 60_000, 80, 2_000
LEXER_BYTES = 24 << 20  # maximum bytes of a lexer: 20,000 states (grammars.LIMITS) of about 1.1 KiB
MEASURED = 16  # evictions per measurement; each takes up to 1 ms, because malloc counts its free chunks
PRIOR_BYTES = 4 << 20  # initial numerator and denominator of the ratio of measured to estimated bytes
SCALES = (0.25, 16.0)  # bounds of this ratio
CORES_PER_THREAD, MAX_THREADS = 4, 4  # compile threads: few, since steps need the cores


class Compiled(Protocol):
    """A compiled grammar, such as a matcher."""

    def deep_copy(self) -> Compiled:
        """Return a copy with a position of its own."""


@dataclass(frozen=True, slots=True)
class GrammarCounts:
    """Counts of a store, for metrics."""

    held: int = 0
    held_bytes: int = 0  # estimate; includes predicted sizes of grammars that are not compiled yet
    kept: int = 0
    kept_bytes: int = 0  # estimate
    waiting: int = 0  # held grammars whose compilation has not begun
    compiled: int = 0  # grammars compiled since start, including the faulty
    faults: int = 0  # grammars found to be faulty since start
    evicted: int = 0  # grammars evicted since start


class HeldResources(Protocol):
    """What a gate calls: it delays requests until their resource, a grammar or a LoRA adapter, is ready.

    The docstrings below speak of grammars, which their text identifies.  Adapters, which an id identifies, are held
    in the same way."""

    def hold(self, request_id: str, text: str, tenant: str = "", weight: float = 1.0) -> bool:
        """Add a request's reference to a grammar, until `release`.  Returns whether the grammar is already compiled, or
        faulty."""

    def release(self, request_id: str) -> None:
        """Drop a request's reference; harmless without one.  A grammar without references that is not compiled yet is
        dropped."""

    def finished(self) -> list[str]:
        """Return the texts of grammars that were compiled, or found to be faulty, since the last call."""

    def fault(self, text: str) -> str:
        """Return why a grammar is faulty; "" if it is sound, or not compiled yet."""

    def is_held(self, text: str) -> bool:
        """Return whether a request holds a grammar."""


class HeldGrammars(HeldResources, Protocol):
    """The store of grammars: of this process, or of all ranks."""

    @property
    def counts(self) -> GrammarCounts:
        """Current numbers of held and kept grammars, and counts since start."""


class HeldAdapters(HeldResources, Protocol):
    """A store of LoRA adapters."""

    load_s: float  # predicted seconds to load one more adapter, from earlier loads; 0: not known
    unloaded: int  # adapters that wait for their load, including the one being loaded

    def is_missing(self, text: str) -> bool:
        """Return whether an adapter is faulty because its files are not on this machine."""

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the ids of adapters that were loaded since the last call, and of adapters that were evicted."""

    @property
    def counts(self) -> AdapterCounts:
        """Current numbers of held and kept adapters, and counts since start."""


class GrammarError(Exception):
    """A grammar cannot be followed; one line for the client."""


class State(Enum):
    """How far the compilation of a grammar is."""

    WAITING = 0
    COMPILING = 1
    DONE = 2  # compiled, or faulty


@dataclass(slots=True)
class Grammar:
    """One grammar that is held or kept."""

    text: str
    state: State = State.WAITING
    compiled: Compiled | None = None
    fault: str = ""
    tenants: Counter[str] = field(default_factory=Counter)  # number of requests that hold it, by tenant
    tokens: int = 0  # tokens that its copies have consumed
    copies: int = 0  # copies in use
    held_bytes: int = 0  # its part of the store's `_held_bytes`

    def bytes(self) -> int:
        """Return the estimated size, unscaled; for a grammar that is not compiled yet, its predicted size."""
        size = sys.getsizeof(self.text) + len(self.fault)
        if self.state is State.DONE and self.compiled is None:
            return size + 1_000
        return size + FIXED + PER_BYTE * len(self.text) + min(LEXER_BYTES, PER_TOKEN * self.tokens)


class GrammarStore:
    """Owner of all compiled grammars of one rank.  Thread-safe.

    The executor calls `copy` and `used`, the grammar gate calls the other methods."""

    def __init__(
        self,
        compile_one: Callable[[str], Compiled],
        *,
        max_bytes: int,
        threads: int | None = None,
        heap_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`compile_one` raises GrammarError.  `max_bytes`: limit of kept grammars.  `threads`: number of compile
        threads; None: from the number of cores; 0: only calls of `work` compile.  `heap_bytes`: returns the bytes that
        malloc has handed out; None: the C library is asked."""
        self._compile, self._max_bytes = compile_one, max_bytes
        self._threads = compile_threads() if threads is None else threads
        self._heap_bytes = heap_bytes or malloc_bytes()
        self._lock = threading.Lock()
        self._grammars: dict[str, Grammar] = {}  # held and kept grammars by text
        self._holders: dict[str, tuple[Grammar, str]] = {}  # request id -> the grammar that it holds, and its tenant
        self._work: FairList[str] = FairList()
        self._kept: OrderedDict[str, int] = OrderedDict()  # text -> estimated bytes; the longest unused is first
        self._kept_bytes = self._held_bytes = 0  # sums of estimates, before they are scaled
        self._finished: deque[str] = deque()
        self._evicted: deque[Grammar] = deque()  # grammars that a thread will free, which takes up to a millisecond
        self._running = 0  # threads that compile now
        self._measured, self._estimated = PRIOR_BYTES, PRIOR_BYTES
        self._compiled = self._faults = self._evictions = self._freed = 0
        self._closed = False

    # -------------------------------------------------------------------------------------------------------- requests

    def hold(self, request_id: str, text: str, tenant: str = "", weight: float = 1.0) -> bool:
        """Add a request's reference to a grammar, until `release`.  Returns whether the grammar is already compiled, or
        faulty."""
        with self._lock:
            if request_id in self._holders:
                return self._holders[request_id][0].state is State.DONE
            grammar = self._grammars.get(text)
            if grammar is None:
                grammar = self._grammars[text] = Grammar(text)
            self._kept_bytes -= self._kept.pop(text, 0)
            self._holders[request_id] = grammar, tenant
            grammar.tenants[tenant] += 1
            self._count_held(grammar)
            if grammar.state is State.WAITING and not self._closed:
                self._work.add(tenant, text, weight)
                self._start_thread()
            return grammar.state is State.DONE

    def release(self, request_id: str) -> None:
        """Drop a request's reference; harmless without one.  A grammar without references that is not compiled yet is
        dropped."""
        with self._lock:
            if (holder := self._holders.pop(request_id, None)) is None:
                return
            grammar, tenant = holder
            grammar.tenants[tenant] -= 1
            if not grammar.tenants[tenant]:
                del grammar.tenants[tenant]
                self._work.discard(tenant, grammar.text)
            if not grammar.tenants:
                self._count_held(grammar)
                self._keep(grammar)

    def finished(self) -> list[str]:
        """Return the texts of held grammars that were compiled, or found to be faulty, since the last call."""
        if not self._finished:
            return []
        with self._lock:
            texts = [text for text in self._finished if self._is_done(text)]  # others are evicted, or wait again
            self._finished.clear()
        return texts

    def fault(self, text: str) -> str:
        """Return why a grammar is faulty; "" if it is sound, or not compiled yet."""
        with self._lock:
            return self._grammars[text].fault if text in self._grammars else ""

    def is_held(self, text: str) -> bool:
        """Return whether a request holds a grammar."""
        with self._lock:
            return text in self._grammars and bool(self._grammars[text].tenants)

    def done(self, text: str) -> bool:
        """Return whether a grammar is compiled, or faulty."""
        with self._lock:
            return self._is_done(text)

    def _is_done(self, text: str) -> bool:
        return text in self._grammars and self._grammars[text].state is State.DONE

    # ----------------------------------------------------------------------------------------------------------- steps

    def copy(self, text: str) -> Compiled:
        """Return a matcher at the start of a grammar.  Never waits.  Raises GrammarError."""
        with self._lock:
            grammar = self._grammars.get(text)
            if grammar is None or grammar.state is not State.DONE:
                raise GrammarError("the grammar is not compiled: no request holds it")
            if grammar.compiled is None:
                raise GrammarError(grammar.fault)
            grammar.copies += 1
            return grammar.compiled.deep_copy()

    def used(self, text: str, tokens: int) -> None:
        """Record that a matcher's copy is freed, and how many tokens it has consumed."""
        with self._lock:
            if (grammar := self._grammars.get(text)) is None:
                return
            grammar.copies = max(0, grammar.copies - 1)
            grammar.tokens += tokens
            self._count_held(grammar)
            if text in self._kept:
                self._keep(grammar)

    @property
    def counts(self) -> GrammarCounts:
        """Current numbers of held and kept grammars, and counts since start."""
        with self._lock:
            return GrammarCounts(
                held=len(self._grammars) - len(self._kept),
                held_bytes=int(self._held_bytes * self._scale),
                kept=len(self._kept),
                kept_bytes=int(self._kept_bytes * self._scale),
                waiting=len(self._work),
                compiled=self._compiled,
                faults=self._faults,
                evicted=self._evictions,
            )

    # --------------------------------------------------------------------------------------------------------- threads

    def work(self) -> bool:
        """Free evicted grammars, and compile the next grammar, round-robin over tenants.  Returns False if none
        waits."""
        while self._evicted:
            self._free()
        with self._lock:
            text = self._work.pop()
            if text is None:
                return False
            grammar = self._grammars[text]
            if grammar.state is not State.WAITING:  # already compiled for another tenant
                return True
            grammar.state = State.COMPILING
            for tenant in grammar.tenants:
                self._work.discard(tenant, text)
        compiled, fault = None, ""
        try:
            compiled = self._compile(text)
        except GrammarError as error:
            fault = str(error)
        except Exception as error:  # a thread that ends would leave requests waiting
            log.exception("a grammar could not be compiled")
            fault = f"it cannot be compiled: {type(error).__name__}"
        with self._lock:
            grammar.compiled, grammar.fault, grammar.state = compiled, fault, State.DONE
            self._compiled += 1
            self._faults += bool(fault)
            self._finished.append(text)
            self._count_held(grammar)
            if not grammar.tenants:
                self._keep(grammar)
        return True

    def close(self) -> None:
        """Drop grammars that wait to be compiled.  Threads end after their current compilation."""
        with self._lock:
            self._closed = True
            self._work = FairList()

    def _start_thread(self) -> None:
        """Start a thread if there is work for one more.  It ends when no work is left.  The caller holds the lock."""
        if self._running < self._threads and self._running < len(self._work) + bool(self._evicted):
            self._running += 1
            threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def _run(self) -> None:
        while True:
            while self.work():
                pass
            with self._lock:
                if not (self._work or self._evicted):
                    self._running -= 1
                    return

    # ------------------------------------------------------------------------------------------------------------ kept

    @property
    def _scale(self) -> float:
        least, most = SCALES
        return min(most, max(least, self._measured / self._estimated))

    def _count_held(self, grammar: Grammar) -> None:
        """Update a grammar's part of `_held_bytes`.  The caller holds the lock."""
        size = grammar.bytes() if grammar.tenants else 0
        self._held_bytes += size - grammar.held_bytes
        grammar.held_bytes = size

    def _keep(self, grammar: Grammar) -> None:
        """Keep a grammar that no request holds, or drop it if it is not compiled.  The caller holds the lock."""
        if grammar.state is State.COMPILING:
            return
        if grammar.state is State.WAITING:
            del self._grammars[grammar.text]
            return
        self._kept_bytes -= self._kept.pop(grammar.text, 0)
        self._kept[grammar.text] = size = grammar.bytes()
        self._kept_bytes += size
        while self._kept and self._kept_bytes * self._scale > self._max_bytes:
            text, size = self._kept.popitem(last=False)
            self._kept_bytes -= size
            self._evicted.append(self._grammars.pop(text))
            self._evictions += 1
        if self._evicted:
            self._start_thread()

    def _free(self) -> None:
        """Free one evicted grammar.  For every MEASURED-th one, measure the bytes that this frees."""
        try:
            grammar = self._evicted.popleft()
        except IndexError:  # another thread was faster
            return
        self._freed += 1
        estimate, sample = grammar.bytes(), self._freed % MEASURED == 1
        if self._heap_bytes is None or not sample or grammar.copies or grammar.compiled is None:
            return
        before = self._heap_bytes()
        grammar.compiled = None
        freed = before - self._heap_bytes()
        with self._lock:
            self._estimated += estimate
            self._measured += min(max(0, freed), LEXER_BYTES + estimate)  # other threads use the heap meanwhile


def compile_threads() -> int:
    """Return how many threads may compile while steps run: one per CORES_PER_THREAD usable cores."""
    return max(1, min(MAX_THREADS, host_resources.usable_cpus() // CORES_PER_THREAD))


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_bytes() -> Callable[[], int] | None:
    """Return the function that reads how many bytes malloc has handed out; None without glibc 2.33 or later."""
    library = ctypes.PyDLL(None)  # PyDLL keeps the interpreter lock: no other Python thread runs between two calls
    try:
        read = library.mallinfo2
    except AttributeError:
        return None
    read.restype = _MallInfo

    def total() -> int:
        info = read()
        return int(info.uordblks + info.hblkhd)

    return total
