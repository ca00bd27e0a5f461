"""The manifest of hot prefixes: what requests found in the prefix cache of late, for an engine that starts with an
empty one.

    key                   type  what                                                   goes away
    hot:FINGERPRINT       hash  digest -> msgpack HotPrefix; bytes: all of them        MANIFEST after the last report
    heat:FINGERPRINT      zset  digest -> heat                                         with it
    engine:ENGINE         hash  (see keys.py) warming=1: it prefills the manifest      when that is done

An entry is a prefix at whose very end a request's hit ended: where requests that share it part.  So a system prompt is
one entry, a document behind it another, and no block has one of its own.  Its digest is that of its last block, hence
one of its fingerprint and salt alone.

Heat is a decayed count of hits, as a logarithm: log2(sum over hits of 2^(their time / HALF_LIFE)).  All entries decay
alike, so it only changes when a hit comes (forward decay: Cormode et al., ICDE 2009), and 2^(heat - now / HALF_LIFE) is
the count as of now.  The coldest leave when there are too many, and each FADED half-lives after its count was 1.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.wire.messages import HotPrefix
from engine.wire.scripts import Script
from engine.wire.token_log import TOKEN_BYTES

HALF_LIFE_MS = 3_600_000
FADED = 4  # half-lives: a prompt found again once is forgotten after so many, one found 2^k times k later
MOST = 512  # entries of a fingerprint
MOST_BYTES = 4 << 20  # of all of them: a million tokens
LONGEST = 32_768  # tokens of one; of a longer prefix its beginning is kept
NEWS_BYTES = 256 << 10  # tokens and salts of new entries in one report; what is still hot comes again in a later one
MANIFEST_MS = 86_400_000  # what nobody reports of is forgotten a day later

# fingerprint, unix ms, then (digest, hits, HotPrefix or '') ...; returns the digests that '' was given for and that
# are not known.  Its first write takes memory, so a full Redis refuses it as a whole.
_REUSED = f"""
local hot, heat, now = P .. 'hot:' .. ARGV[1], P .. 'heat:' .. ARGV[1], ARGV[2] / {HALF_LIFE_MS}
local unknown = {{}}
for i = 3, #ARGV, 3 do
  local digest, hits, prefix = unpack(ARGV, i, i + 2)
  local gained, before = now + math.log(hits) / math.log(2), call('ZSCORE', heat, digest)
  if before then
    local more, less = math.max(before, gained), math.min(before, gained)
    call('ZADD', heat, more + math.log(1 + 2 ^ (less - more)) / math.log(2), digest)
  elseif prefix == '' then
    unknown[#unknown + 1] = digest
  else
    call('ZADD', heat, gained, digest)
    call('HSET', hot, digest, prefix)
    call('HINCRBY', hot, 'bytes', #prefix)
  end
end
local function cool(digests)
  for _, digest in ipairs(digests) do
    call('HINCRBY', hot, 'bytes', -call('HSTRLEN', hot, digest))
    call('HDEL', hot, digest)
    call('ZREM', heat, digest)
  end
end
cool(call('ZRANGEBYSCORE', heat, '-inf', string.format('(%.17g', now - {FADED})))
while call('ZCARD', heat) > {MOST} or tonumber(call('HGET', hot, 'bytes') or 0) > {MOST_BYTES} do
  local coldest = call('ZRANGE', heat, 0, 0)
  if #coldest == 0 then call('DEL', hot) end  -- somebody else's hand was in it: begin anew
  cool(coldest)
end
call('PEXPIRE', hot, {MANIFEST_MS})
call('PEXPIRE', heat, {MANIFEST_MS})
return unknown
"""

# engine, fingerprint: [heat, HotPrefix] ..., hottest first; none to an engine that was last seen reading them
_HOTTEST = """
local state = P .. 'engine:' .. ARGV[1]
local found = {}
if call('HDEL', state, 'warming') == 1 then return found end
local heats = call('ZREVRANGE', P .. 'heat:' .. ARGV[2], 0, -1, 'WITHSCORES')
for i = 1, #heats, 2 do
  found[#found + 1] = {heats[i + 1], call('HGET', P .. 'hot:' .. ARGV[2], heats[i]) or ''}
end
if #found > 0 then call('HSET', state, 'warming', 1) end
return found
"""

# engine
_WARMED = "call('HDEL', P .. 'engine:' .. ARGV[1], 'warming')"

# whether anybody waits for whom the engines have no room
_WANTED = """
local waiting = call('HLEN', P .. 'waiting') + call('ZCARD', P .. 'suspects')
return waiting > 0 and room() == 0 and 1 or 0
"""

REUSED, HOTTEST, WARMED, WANTED = map(Script, (_REUSED, _HOTTEST, _WARMED, _WANTED))


class Reuse(NamedTuple):
    """A prefix that requests found in the cache."""

    digest: bytes  # of its last block
    token_ids: Sequence[int]  # of a request that begins with it
    length: int  # tokens of it that are the prefix, LONGEST at most
    cache_salt: str
    hits: int  # requests

    def prefix(self) -> HotPrefix:
        return HotPrefix(struct.pack(f"<{self.length}I", *self.token_ids[: self.length]), self.cache_salt)


class Run(Protocol):
    """Run a script; raises BusDown when it did not succeed in time."""

    def __call__(self, script: Script, *args: bytes | str | int) -> Awaitable[Any]: ...


class Manifest:
    """One engine's view of it."""

    def __init__(self, run: Run, engine: str) -> None:
        self._run = run
        self._engine = engine
        self._encode = msgspec.msgpack.Encoder().encode

    async def reused(self, fingerprint: str, reuses: Sequence[Reuse], now_ms: int) -> None:
        """Count these hits, as of `now_ms` (unix time).  Tokens travel only where the prefix is new, and of the new
        ones at most NEWS_BYTES, most hits first.  Raises BusDown: some may have been counted."""
        known = [word for reuse in reuses for word in (reuse.digest, reuse.hits, b"")]
        unknown = set(await self._run(REUSED, fingerprint, now_ms, *known))
        news: list[bytes | int] = []
        left = NEWS_BYTES
        for reuse in sorted(reuses, key=lambda reuse: reuse.hits, reverse=True):
            size = reuse.length * TOKEN_BYTES + len(reuse.cache_salt.encode())
            if reuse.digest in unknown and size <= left:
                left -= size
                news += (reuse.digest, reuse.hits, self._encode(reuse.prefix()))
        if news:
            await self._run(REUSED, fingerprint, now_ms, *news)

    async def hottest(self, fingerprint: str) -> list[tuple[float, bytes]]:
        """Heat and msgpack HotPrefix of every entry, hottest first, undecoded: they may be anything.

        Who reads them says warmed() when it is done with them, or has died of them: then this is empty the next time,
        so that no engine dies of the same prefix at every start.  Raises BusDown."""
        return [(float(heat), prefix) for heat, prefix in await self._run(HOTTEST, self._engine, fingerprint)]

    async def warmed(self) -> None:
        """What hottest() brought was survived.  Raises BusDown."""
        await self._run(WARMED, self._engine)

    async def wanted(self) -> bool:
        """Whether a request waits for whom the engines of the fleet have no room.  Raises BusDown."""
        return bool(await self._run(WANTED))
