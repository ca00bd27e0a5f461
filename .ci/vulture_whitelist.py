# ruff: noqa
"""Names that vulture cannot see used: `make lint` takes these as used. A line here needs its reason."""

# Read by msgspec, with getattr by name, or by a client of the JSON that they become.
(
    _.structured_outputs,
    _.guided_json,
    _.guided_regex,
    _.guided_choice,
    _.guided_grammar,
)  # service/api/bodies.py: refused fields
_.beam_width, _.num_beams, _.bad_words, _.audio, _.logits_processors
_.tool_call_id, _.reasoning_effort, _.verbosity
# service/api/anthropic/messages.py, service/api/openai_responses/responses.py: harmless and refused fields of foreign formats.
_.signature, _.cache_control, _.citations, _.service_tier, _.inference_geo, _.safety_identifier
_.mcp_servers, _.container, _.context_management, _.speed, _.conversation, _.moderation, _.max_tool_calls
_.prompt_cache_key, _.prompt_cache_retention, _.prompt_cache_options
(
    _.max_messages,
    _.max_prompts,
    _.max_n,
    _.max_beam_width,
    _.max_choices,
    _.max_logprobs,
    _.max_logprob_entries,
)  # service/config.py: read by service/common/limits.py
_.max_stop_strings, _.max_stop_chars, _.max_token_list, _.max_timeout_s
_.alarms  # engine/wire/messages.py: a field of EngineLoad
(
    _.ttft_p95_s,
    _.itl_p95_s,
    _.stall_p95_s,
    _.requests_per_s,
    _.running_mean,
    _.kv_mean,
    _.hit_rate,
)  # loadtest/studies/capacity.py
_.copy_gbps, _.sum_gbps, _.matmul_4096_tflops  # loadtest/kernels/timing.py
_.between_steps_ms, _.between_steps  # loadtest/studies/gpu_idle.py
_.offered_per_s, _.served_per_s, _.ttft_by_tenant, _.busiest, _.exchange_us  # loadtest/studies/fleet.py

# Read by a library.
_._timeout, _._devices, _.asyncOp, _.rootRank, _.rootTensor, _.reduceOp  # options of torch's process groups
_.__class__
_.memory  # engine/executor/ranks/one_shot.py: held while it is mapped
_.content_type  # aiohttp
_.post_processor  # tokenizers
_.unused  # an argument that transformers passes to attention
_._arguments, _.use_common_options, _.abstract, _.wait_time, _.network_timeout, _.on_start  # locust
_.Samples, _.Rag, _.Agent, _.Load

# engine/wire/layout.py: read by the Lua scripts.
_.LAYOUT_VERSION
_.EXPIRY_MS
_.TOMBSTONE_MS
_.FRONT
_.MOVES
_.TAIL
_.TAIL_BYTES
_.PATIENCE_PERCENT, _.RECOMPUTE, _.PACE_TOKENS
_.LOADS_PASSED, _.MAX_LOADS, _.LACKING_MS
_.MEMORY_MS
_.GATEWAY_MS
_.OUTPUT_COST
_.PLACES
_.AWAY_MS
_.AMNESTY_MS
_.MAX_ATTEMPTS
_.QUARANTINE
_.QUARANTINED_MS
_.RESPONSE_BYTES
_.TENANTS_SHOWN
_.READING_ENGINES
_.LOAD_BLOCK_SIZE
_.LOAD_TOTAL_BLOCKS
_.LOAD_CROWD, _.LOAD_DRAINING, _.LOAD_HONOURS, _.LOAD_PREEMPTIBLE, _.LOAD_PREEMPTIBLE_OF
_.RINGS
_.WAKE_TRIES
_.QUOTA_CHECK_MS
_.QUOTA_CHECKS
_.COMMAND_WORDS

_.exit_status  # engine/common/errors.py
_.logged_tokens  # engine/wire/records.py: a field of Quarantined
# engine/wire/records.py: fields of QueueBounds, which submit passes on in their order.
_.on_time_excess, _.late_excess, _.target_ms, _.max_requests, _.max_bytes

# Fields that `service/grammar/grammar.py` reads by name, and what llguidance asks of a tokenizer.
_.response_format, _.special_token_ids

# For users of the offline API.
_.finish_reason, _.prompt_token_ids

# Named in documentation and tests: one of the three outcomes that a kernel writes.
_.CHOSEN

# Read by transformers and by Python itself: engine/executor/models/quantised/quantising.py.
_._is_hf_initialized, _.__class__

_.convert_to_native_format  # engine/tokenizers/conversion.py: called by transformers' from_pretrained

_.log_message, _.address_family  # engine/observers/metrics_page.py: read by Python's HTTP server

# Used by tests only today. Remove the code, or say here why it stays.
_.weight_bytes  # loadtest/roofline.py
_.__getattr__  # quire/__init__.py: called by Python
