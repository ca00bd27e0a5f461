"""Grammars of an engine with several ranks: each rank compiles every grammar, and a request starts once all have.

    rank 0: GrammarsOfRanks ── HOLD, RELEASE: as for rank 0's own store ───────────> rank i: RankGrammars ──> its store
                            ── ASK + keys of grammars that rank 0 has compiled ──>
                            <── the keys that rank i has compiled, too ───────────

So every rank has a grammar when the first plan that needs it arrives, and no rank waits inside a step.  A rank answers
between two steps.  Rank 0 reports why a grammar is faulty: compiling gives the same result everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from quire.engine.executor.grammar_store import GrammarCounts, GrammarStore

HOLD, RELEASE, ASK = b"G", b"R", b"Q"


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """Message: a request holds a grammar."""

    request_id: str
    key: int  # identifies the grammar until its last release
    text: str | None  # None: the text of the first Hold with this key
    tenant: str
    weight: float


class Release(msgspec.Struct, frozen=True, array_like=True):
    """Message: a request drops its reference."""

    request_id: str
    forgotten: int  # key of a grammar without holders from now on; -1: none


class GrammarsOfRanks:
    """`HeldGrammars` of all ranks, on rank 0.  The loop's thread owns it."""

    def __init__(self, own: GrammarStore, tell: Callable[[bytes], None], ask: Callable[[bytes], list[bytes]]) -> None:
        """`tell`: sends a command to the other ranks.  `ask`: sends a question, returns the answer of each rank."""
        self._own, self._tell, self._ask = own, tell, ask
        self._keys: dict[str, int] = {}  # held grammars by text -> keys
        self._holders: dict[str, str] = {}  # request id -> text
        self._counts: dict[str, int] = {}  # text -> number of requests that hold it
        self._missing: dict[int, str] = {}  # key -> text of held grammars that some rank may not have compiled
        self._asked: dict[int, None] = {}  # keys of these grammars that rank 0 has compiled
        self._next_key = 0

    def hold(self, request_id: str, text: str, tenant: str = "", weight: float = 1.0) -> bool:
        """Add a request's reference to a grammar on every rank.  Returns whether all ranks have compiled it already."""
        if request_id in self._holders:
            return self._keys[text] not in self._missing
        done = self._own.hold(request_id, text, tenant, weight)
        self._holders[request_id] = text
        new = text not in self._keys
        if new:
            self._keys[text] = self._next_key
            self._missing[self._next_key] = text
            if done:
                self._asked[self._next_key] = None
            self._next_key += 1
        self._counts[text] = self._counts.get(text, 0) + 1
        key = self._keys[text]
        self._tell(HOLD + msgspec.msgpack.encode(Hold(request_id, key, text if new else None, tenant, weight)))
        return key not in self._missing

    def release(self, request_id: str) -> None:
        """Drop a request's reference on every rank; harmless without one."""
        if (text := self._holders.pop(request_id, None)) is None:
            return
        self._own.release(request_id)
        self._counts[text] -= 1
        forgotten = -1
        if not self._counts[text]:
            del self._counts[text]
            forgotten = self._keys.pop(text)
            self._missing.pop(forgotten, None)
            self._asked.pop(forgotten, None)
        self._tell(RELEASE + msgspec.msgpack.encode(Release(request_id, forgotten)))

    def finished(self) -> list[str]:
        """Return the texts of held grammars that every rank has compiled since the last call.

        Asks the other ranks only for grammars that rank 0 has compiled."""
        for text in self._own.finished():
            if (key := self._keys.get(text, -1)) in self._missing:
                self._asked[key] = None
        if not self._asked:
            return []
        common = set(self._asked)
        for answer in self._ask(ASK + msgspec.msgpack.encode(list(self._asked))):
            common &= msgspec.msgpack.decode(answer, type=set[int])
        for key in common:
            del self._asked[key]
        return [self._missing.pop(key) for key in sorted(common)]

    def fault(self, text: str) -> str:
        """Return why a grammar is faulty; "": it is not, or that is not known yet."""
        return self._own.fault(text)

    def is_held(self, text: str) -> bool:
        """Return whether a request holds a grammar."""
        return text in self._counts

    @property
    def counts(self) -> GrammarCounts:
        """Counts of rank 0; the other ranks' are equal, except for evicted grammars."""
        return self._own.counts


class RankGrammars:
    """The grammars of a rank other than 0, which follows the messages of rank 0 (GrammarsOfRanks)."""

    def __init__(self, store: GrammarStore | None) -> None:
        """`store`: of this rank; None: the model supports no grammars, on any rank."""
        self._store = store
        self._texts: dict[int, str] = {}  # held grammars, by key

    def obey(self, message: bytes, commands: Connection) -> bool:
        """Execute a command of rank 0 about grammars, or answer a question.  Returns False for any other command."""
        if (store := self._store) is None:
            return False
        kind, body = message[:1], memoryview(message)[1:]
        if kind == HOLD:
            hold = msgspec.msgpack.decode(body, type=Hold)
            text = self._texts[hold.key] if hold.text is None else self._texts.setdefault(hold.key, hold.text)
            store.hold(hold.request_id, text, hold.tenant, hold.weight)
        elif kind == RELEASE:
            release = msgspec.msgpack.decode(body, type=Release)
            store.release(release.request_id)
            self._texts.pop(release.forgotten, None)
        elif kind == ASK:
            store.finished()
            keys = msgspec.msgpack.decode(body, type=list[int])
            done = [key for key in keys if store.done(self._texts[key])]
            commands.send_bytes(msgspec.msgpack.encode(done))
        return kind in (HOLD, RELEASE, ASK)
