-- luacheck --config engine/wire/redis/.luacheckrc engine/wire/redis
-- The loader (engine/wire/scripts.py) puts constants and shared functions before each script.  tests/wire/test_scripts.py
-- holds both lists against it.
std = "lua51"
max_line_length = 120

local constants = {
  "LAYOUT_VERSION", "EXPIRY_MS", "TOMBSTONE_MS", "TOKEN_CHANNELS", "TAIL", "TAIL_BYTES", "MEMORY_MS", "GATEWAY_MS",
  "OUTPUT_COST", "PLACES", "SIZES", "FRONT", "MOVES", "AWAY_MS", "AMNESTY_MS", "STALE_MS", "MAX_ATTEMPTS", "QUARANTINE",
  "QUARANTINED_MS", "QUOTA_MS", "QUOTA_CHECK_MS", "QUOTA_CHECKS", "DIGEST_BYTES", "PREFIX_BLOCK", "PREFIX_DENSE", "PREFIX_STEPS", "PREFIX_COUNT",
  "WINDOW", "TRIES", "PATIENCE_PERCENT", "LOADS_PASSED", "MAX_LOADS", "LACKING_MS", "RECOMPUTE", "PACE_TOKENS",
  "RESPONSE_BYTES", "READING_ENGINES", "LEASE_HEAD",
  "LOAD_BLOCK_SIZE", "LOAD_TOTAL_BLOCKS", "LOAD_DRAINING", "LOAD_CROWD", "LOAD_PREEMPTIBLE",
  "LOAD_HONOURS", "LOAD_PREEMPTIBLE_OF", "RINGS", "WAKE_TRIES", "TENANTS_SHOWN",
  "COMMAND_WORDS",
}
local shared = {
  "P", "call", "NOW", "now_ms", "alive", "order",
  "expire_with_log", "choice_count", "append_tokens", "append_logprobs", "ID_KINDS", "text_id", "flush_tail", "flush_tail_for", "logged_tokens",
  "generated_tokens", "finish_open", "keep",
  "LANES", "LATE", "late_waits", "charge", "in_queue", "lift", "on_time_behind", "enter_lane", "leave_lane",
  "waiting_entry", "enqueue", "LEFT", "leave_queue", "dequeue", "forget_queue", "move_to_late", "lane_tokens", "lane_state", "queue_state",
  "leave_out", "next_tenant", "note_entry", "note_turn",
  "listeners", "each_of", "other_listeners", "route", "channel_of", "send_log_ends",
  "bury", "withdraw", "unlisten", "end_with", "claimable", "head", "first_suspect",
  "next_request", "count_share",
  "recount_offers", "offer", "free_capacity", "capacity_elsewhere", "renew_lease", "wake_engines", "wake_to_preempt", "hold", "let_go", "condemn", "accuse", "give_back",
  "ALL_ADAPTERS", "lacked_of", "split_adapter", "adapter_of", "leaves", "takes_adapters", "others_may_have", "lacked_ms",
  "take_returned",
  "prefix_tokens", "prefix_digest", "each_part", "add_prefixes", "chooser", "sweep_prefixes",
  "bucket_debt", "precise", "shift_bucket", "refund_bucket", "bucket_debts", "prompts_of", "forget_request", "settle_quota",
  "settle_request", "check_quotas",
  "forget_response", "keep_response",
  "leaves_hole", "append_segments", "append_extras", "publish_messages", "charge_output",
  "work_of", "claim_request", "runs_suspect", "waits_for_capacity", "isolates", "claim_share", "claim_by_preemption",
  "repeated_reply", "publish_digests", "collect_orders", "offer_capacity",
}

read_globals = {"redis", "cmsgpack", "struct", "KEYS", "ARGV"}
ignore = {}
for _, name in ipairs(constants) do read_globals[#read_globals + 1] = name end
for _, name in ipairs(shared) do
  read_globals[#read_globals + 1] = name
  ignore[#ignore + 1] = "211/^" .. name .. "$"  -- unused in the file that defines it
end
