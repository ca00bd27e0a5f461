"""Metrics of LoRA adapters: counted by a bounded number of names, and read from store and slots."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.adapters.counts import AdapterCounts
from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.names import check_name
from quire.engine.core.limits import Event, Outputs
from quire.engine.observers.adapter_use import MAX_COUNTED, MAX_NAMES, OTHER, AdapterUse
from quire.engine.observers.metrics import Telemetry
from quire.engine.wire.messages import EngineLoad, Generate, Sampling


def ended(name: str, *, tokens: int = 3, index: int = 0, adapter: str | None = None) -> Event:
    named = f"{name}@digest" if adapter is None else adapter
    request = Generate("r", "g", [1], 4, Sampling(), 0, adapter=named)
    return Event("ended", request, index, tokens=tokens, reason="length")


def test_names_have_a_bound_and_the_popular_ones_are_among_them() -> None:
    """10,000 names in Zipf's proportions, the rare ones first."""
    use, dice = AdapterUse(), random.Random(1)
    names = [f"a{rank}" for rank in range(10_000)]
    drawn = dice.choices(names, [1 / (rank + 1) for rank in range(len(names))], k=20_000)
    for name in [*reversed(names), *drawn]:
        use.follow(Outputs({}, [], [ended(name)]))
    assert len(use.requests) == MAX_NAMES + 1
    assert use.requests.keys() == use.tokens.keys()
    assert {name for name, _ in Counter(drawn).most_common(10)} <= use.requests.keys()
    assert len(use._unnamed) <= MAX_COUNTED + 1
    assert use.requests[OTHER] > 0


def test_an_adapter_called_other_has_a_series_of_its_own() -> None:
    use = AdapterUse()
    use.follow(Outputs({}, [], [ended("other")]))
    assert use.requests == {OTHER: 0, "other": 1}
    with pytest.raises(AdapterError, match="is no name for an adapter"):
        check_name(OTHER)


def test_a_request_counts_once_and_the_tokens_of_all_its_choices() -> None:
    use = AdapterUse()
    use.follow(Outputs({}, [], [ended("a", index=1), ended("a"), ended("b:1", tokens=5), ended("", adapter="")]))
    assert use.requests == {OTHER: 0, "a": 1, "b:1": 1}
    assert use.tokens == {OTHER: 0, "a": 6, "b:1": 5}


def test_the_page_shows_slots_memory_and_loads() -> None:
    telemetry = Telemetry("e0")
    telemetry.load = EngineLoad("e0", "m", "f", 1, 1, 16, 1, 1, 0, 0, 0, 0, 0, adapters=["a@1", "b@1"])
    telemetry.lora.slots, telemetry.lora.waiting = 8, 2
    telemetry.lora.counts = lambda: AdapterCounts(3, 300, 2, 200, 1, loads=5, load_s=1.5, faults=1, evicted=4)
    telemetry.lora.use.follow(Outputs({}, [], [ended("a")]))
    samples = {
        (one.name, *sorted(set(one.labels.values()) - {"e0", ""})): one.value
        for family in text_string_to_metric_families(telemetry.expose().decode())
        for one in family.samples
        if one.name.startswith("quire_lora")
    }
    assert samples == {
        ("quire_lora_slots", "loaded"): 2,
        ("quire_lora_slots", "free"): 6,
        ("quire_lora_adapters", "held"): 3,
        ("quire_lora_adapters", "kept"): 2,
        ("quire_lora_host_bytes", "held"): 300,
        ("quire_lora_host_bytes", "kept"): 200,
        ("quire_lora_waiting",): 2,
        ("quire_lora_loads_total", "loaded"): 5,
        ("quire_lora_loads_total", "fault"): 1,
        ("quire_lora_load_seconds_total",): 1.5,
        ("quire_lora_evictions_total",): 4,
        ("quire_lora_requests_total", "a"): 1,
        ("quire_lora_requests_total", OTHER): 0,
        ("quire_lora_tokens_total", "a"): 3,
        ("quire_lora_tokens_total", OTHER): 0,
    }
