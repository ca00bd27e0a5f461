"""Version, times to live and limits of the data in Redis, shared by Python and the Lua scripts.

The loader (scripts.py) replaces these names by their values in each script.  The keys are in `redis/KEYS.md`.
"""

from __future__ import annotations

# Raise it when a process of the earlier version would misread or break a key or its fields.
LAYOUT_VERSION = 4

EXPIRY_MS = 60_000  # a request's keys expire this long after its deadline, in case no process is left to end it
TOMBSTONE_MS = 10_000  # how long a request's end is remembered: longer than any retry of a submit
# Number of channels that gateways share for tokens.  Each channel takes Redis 3 us per step; with fewer channels, a
# gateway reads more messages of other gateways.
TOKEN_CHANNELS = 4
TAIL = 16  # syncs after which an engine flushes its tokens to the logs
# Bytes of the unflushed tail after which the engine flushes it early, since a long flush keeps Redis busy for ms.
TAIL_BYTES = 2**20
MEMORY_MS = 3_600_000  # how long Redis keeps the state of an engine that does not sync
GATEWAY_MS = 5_000  # a gateway that has not read the fleet for this long is dead
OUTPUT_COST = 2  # prompt tokens that one output token counts for in a tenant's counter (VTC's w_q / w_p)
PLACES = 2**40  # queue positions per priority class; 2**13 classes times PLACES is exact in a double
SIZES = 2**33  # queue positions per size class in the on-time lane: after 2**33 arrivals the classes would overlap
FRONT = 2**50  # subtracted from the queue position of a request that has produced tokens: it precedes every class
MOVES = 256  # maximum requests that one script moves from the on-time lane to the late lane
AWAY_MS = 1_000  # if no gateway has read the fleet for this long, Redis counts as having been away
# A lease that lapses this soon after Redis was away does not count as a death: engines take up to 5 s to reconnect.
AMNESTY_MS = 10_000
STALE_MS = 3_000  # an engine silent for this long counts as full, even while its lease is valid
MAX_ATTEMPTS = 2  # a request becomes a suspect after this many engine deaths at the same token of the request
QUARANTINE = 100  # maximum requests in the quarantine; the oldest is dropped
QUARANTINED_MS = 7 * 86_400_000  # how long a request stays in the quarantine
QUOTA_MS = 60_000  # time in which a quota's bucket fills: quotas are per minute
# Interval between checks whether a request that holds quota has ended without a gateway settling it.  Longer than a
# submit may take, which is TOMBSTONE_MS at most.
QUOTA_CHECK_MS = 15_000
QUOTA_CHECKS = 128  # maximum requests checked whenever a gateway reads the fleet's state, 3 us each
DIGEST_BYTES = 8  # bytes of a prefix digest
PREFIX_BLOCK = 64  # tokens between digests of short prefixes; a multiple of every engine's block size
PREFIX_DENSE = 16  # number of digests at multiples of PREFIX_BLOCK
PREFIX_STEPS = 8  # number of digests per doubling of the length beyond PREFIX_DENSE * PREFIX_BLOCK tokens
PREFIX_COUNT = 64  # maximum digests per prompt; the last one covers 65,536 tokens
WINDOW = 32  # requests at the head of a tenant's queue among which an engine chooses by prefix
# Maximum requests that one sync examines without claiming them; then it claims in queue order.  Each takes Redis about
# 20 us.  Without this limit a sync would examine every request if each tenant has only one.
TRIES = 128
PATIENCE_PERCENT = 75  # % of the remaining time to its TTFT target after which a passed-over on-time request goes first
# A request may be passed over for at most this many load times of its LoRA adapter.
LOADS_PASSED = 1
MAX_LOADS = 2  # while this many adapter loads wait in an engine, it claims no request that needs another load
# How long an engine leaves a LoRA adapter's requests to others after it did not find the adapter's files.  If no engine
# finds them for this long, the request ends with an error.
LACKING_MS = 5_000
RECOMPUTE = 2  # cost factor of a prompt token to compute: it takes time, and its KV blocks evict cached ones
PACE_TOKENS = 32  # decode steps that count in an engine's cost of a request
RESPONSE_BYTES = 1024  # bytes counted per stored response in addition to its input and output
# Maximum engines whose loads a gateway reads at once; a larger fleet takes several readings.
READING_ENGINES = 256
LEASE_HEAD = 16  # bytes of a lease before its EngineLoad
# Positions of fields in an EngineLoad, counted from 1 as in Lua.
LOAD_BLOCK_SIZE = 6
LOAD_TOTAL_BLOCKS = 7
LOAD_DRAINING = 21
LOAD_CROWD = 38
LOAD_PREEMPTIBLE = 39
LOAD_HONOURS = 45
LOAD_PREEMPTIBLE_OF = 50
RINGS = 2  # engines that one script wakes for waiting requests; an engine that leaves requests waiting wakes RINGS more
WAKE_TRIES = 8  # maximum wake-up channels that a script tries until RINGS engines listen
TENANTS_SHOWN = 32  # maximum tenants per lane that fleet.lua returns; totals count all tenants
COMMAND_WORDS = 1_000  # maximum list items that a script passes to one command: Lua unpacks at most 8,000 arguments
