"""Version, times to live and limits of what stands in Redis: the one table that Python and the Lua scripts share.

The loader puts every number here before each script, as `local NAME = value`.  The keys are in `redis/KEYS.md`.
"""

from __future__ import annotations

# Raise it when a process of the earlier version would misread a key or its fields, or break them.
LAYOUT_VERSION = 4

EXPIRY_MS = 60_000  # a request outlives its deadline by this, in case no process is left to end it
TOMBSTONE_MS = 10_000  # how long a request's end is remembered: longer than any retry of a submit
# Channels that gateways share for tokens.  One more costs Redis 3 us per step; with fewer, a gateway reads more that is
# not its own.
TOKEN_CHANNELS = 4
TAIL = 16  # syncs after which an engine enters its tokens in the logs
# Bytes of unflushed messages after which the engine enters them in the logs at once: that keeps Redis busy for ms.
TAIL_BYTES = 2**20
MEMORY_MS = 3_600_000  # how long a silent engine is remembered
GATEWAY_MS = 5_000  # a gateway that has not read the fleet for this long is dead
OUTPUT_COST = 2  # an output token costs a tenant as much as this many prompt tokens (VTC's w_q / w_p)
PLACES = 2**40  # places of a priority class; times 2**13 classes a double is exact
SIZES = 2**33  # places of a size class in the on-time lane: arrivals before it would reach the next
FRONT = 2**50  # what a request that has produced tokens is ahead of every priority class by
MOVES = 256  # most requests that one script moves from the on-time lane to the late lane
AWAY_MS = 1_000  # after this long without a gateway that reads the fleet, Redis counts as having been away
# After Redis was away, a lease that lapses within this time is no death: engines take up to 5 s to connect again.
AMNESTY_MS = 10_000
STALE_MS = 3_000  # an engine silent for this long counts as full, even while its lease still runs
MAX_ATTEMPTS = 2  # deaths of an engine at the same token of a request, after which the request is suspected
QUARANTINE = 100  # most requests in the quarantine: the oldest leaves
QUARANTINED_MS = 7 * 86_400_000  # how long one stays there
QUOTA_MS = 60_000  # a quota's bucket fills in this time: quotas are per minute
# How often a request that takes quotas is checked: whether it is over and no gateway has settled it.  Longer than a
# submit may take, which is TOMBSTONE_MS at most.
QUOTA_CHECK_MS = 15_000
QUOTA_CHECKS = 128  # most requests that one reading of the fleet checks so, 3 us each
DIGEST_BYTES = 8  # size of a prefix digest in bytes
PREFIX_BLOCK = 64  # tokens: every engine's block size divides it
PREFIX_DENSE = 16  # leading lengths that are one PREFIX_BLOCK apart, beginning with one
PREFIX_STEPS = 8  # lengths in each doubling after them
PREFIX_COUNT = 64  # most lengths, up to 65,536 tokens
WINDOW = 32  # requests at the head of a tenant's queue among which an engine chooses by prefix
# Requests that one sync tries and does not claim, after which it claims in the queue's order.  Each takes Redis
# about 20 us, and if each of many tenants has one, all of them would be tried.
TRIES = 128
PATIENCE_PERCENT = 75  # % of the TTFT target after which an on-time request that was passed over goes first
# Loads of a LoRA adapter for which engines without it may pass over a request that needs it.
LOADS_PASSED = 1
MOST_LOADS = 2  # loads that wait in an engine, beyond which it claims no request that needs another one
# How long an engine leaves requests to others after it did not find their LoRA adapter.  A request that no engine finds
# it for ends after as long.
LACKING_MS = 5_000
RECOMPUTE = 2  # what a token costs that another engine holds: its time, and the cached token that it evicts
PACE_TOKENS = 32  # output tokens for which the step time of an engine counts in its cost
RESPONSE_BYTES = 1024  # overhead per stored response, besides its input and output
# Engines whose leases one reading of the fleet looks at; a larger fleet takes several readings.
READING_ENGINES = 256
LEASE_HEAD = 16  # bytes of a lease before its EngineLoad
# Positions of fields of an EngineLoad, as scripts read it: from 1.
LOAD_BLOCK_SIZE = 6
LOAD_TOTAL_BLOCKS = 7
LOAD_DRAINING = 21
LOAD_CROWD = 38
LOAD_HONOURS = 45
RINGS = 2  # engines that one script wakes for requests that wait; each wakes as many if it leaves requests waiting
RING_TRIES = 8  # engines to which it publishes at most, until RINGS of them listen
TENANTS_SHOWN = 32  # most tenants of a lane in a reading of the fleet; totals count all
COMMAND_WORDS = 1_000  # items of a list that a script gives to one command: Lua passes no more than 8,000 arguments
