"""Read the metrics that a load test needs from a Prometheus page of Quire, vLLM or SGLang."""

from __future__ import annotations

from collections import defaultdict

from quire.loadtest.stats import Sample

# field of Sample -> for each kind of server, the metrics whose series add up to it
_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "running": (("quire_engine_requests_running",), ("vllm:num_requests_running",), ("sglang:num_running_reqs",)),
    # Quire's requests wait in the shared queue first, then in an engine.
    "waiting": (
        ("quire_engine_requests_waiting", "quire_queue_requests"),
        ("vllm:num_requests_waiting",),
        ("sglang:num_queue_reqs",),
    ),
    "preemptions": (
        ("quire_engine_preemptions",),
        ("vllm:num_preemptions_total",),
        ("sglang:num_retracted_requests_total",),
    ),
    "recomputed": (("quire_engine_recomputed_tokens",),),
}
_UTILISATION = ("vllm:kv_cache_usage_perc", "sglang:token_usage")  # fractions of 1, despite the name
_POOL, _FREE = "quire_engine_kv_blocks", "quire_engine_kv_blocks_free"
_STATIC, _FILLED = "quire_engine_kv_static_blocks", "quire_engine_kv_slots_filled"
_WANTED = {name for kinds in _NAMES.values() for names in kinds for name in names} | {
    *(*_UTILISATION, _POOL, _FREE, _STATIC, _FILLED),
}


def values(page: str) -> dict[str, list[float]]:
    """Return the values of all series of the metrics in _WANTED (text format 0.0.4).  Invalid lines are skipped."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _WANTED:
            try:
                found[name].append(float(line[len(name) :].rpartition("}")[2].split()[0]))
            except (ValueError, IndexError):
                continue
    return found


def sample(page: str, at_s: float) -> Sample:
    """Return one sample of a page: requests and pools of all engines; without pools, the mean of their fractions."""
    found = values(page)

    def total(kinds: tuple[tuple[str, ...], ...]) -> float | None:
        for names in kinds:
            if names[0] in found:
                return sum(sum(found.get(name, ())) for name in names)
        return None

    kv = None
    if pool := sum(found.get(_POOL, ())):
        kv = 1 - sum(found.get(_FREE, ())) / pool
    for name in _UTILISATION:
        if fractions := found.get(name):
            kv = sum(fractions) / len(fractions)
    static, filled = sum(found.get(_STATIC, ())), [value for value in found.get(_FILLED, ()) if value]
    return Sample(
        at_s,
        kv,
        **{name: total(kinds) for name, kinds in _NAMES.items()},
        filled=sum(filled) / len(filled) if filled else None,
        eta=(pool - sum(found.get(_FREE, ()))) / static if static else None,
    )
