"""The engine's metrics and spans over the real loop and the scripted executor: no model, no Redis."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.commands import Command, LocalBox, Resume
from quire.engine.common.tracing import Tracing
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Totals
from quire.engine.core.plan import Sampler, StepPlan, StepResult
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, scripted_token
from quire.engine.loop import Engine
from quire.engine.observers.load_report import LoadReport
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.metrics_vllm import VLLM_TABLE
from quire.engine.observers.turn_record import PHASES, TurnRecord
from quire.engine.wire.messages import EngineLoad, Generate, Sampling
from tests.core.drafters import AllDrafts, GuessingDrafter

INFO = ModelInfo("scripted", "f00d", 100, 256, [0], 64)
CONFIG = EngineConfig(
    max_seqs=8,
    step_tokens=64,
    chunk_tokens=16,
    check_accounting=True,
    engine_id="e0",
    admission="threshold",
    admit_threshold=1.0,
)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Traced:
    """An engine whose spans stay here."""

    blocks: int = 64
    config: EngineConfig = CONFIG
    vllm: bool = False
    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry = Telemetry("e0", tracing=Tracing(self.provider), vllm=self.vllm)
        self.box = LocalBox(lambda delta: None)
        executor = ScriptedExecutor(INFO, self.blocks, host_blocks=self.blocks)
        self.telemetry.describe_model(INFO, self.config)
        self.engine = Engine(self.config, executor, self.box, self.box, observers=[self.telemetry])

    def run(self, *commands: Command) -> None:
        self.box.commands += commands
        while self.box.commands or not self.engine.core.idle:
            self.engine.turn()

    def named(self, name: str) -> list[dict[str, Any]]:
        found = []
        for span in self.spans.get_finished_spans():
            assert span.parent is not None
            assert span.context is not None
            assert f"00-{span.context.trace_id:032x}-{span.parent.span_id:016x}-01" == PARENT
            assert span.start_time is not None
            assert span.end_time is not None
            assert 0 <= span.start_time <= span.end_time
            if span.name == name:
                found.append(dict(span.attributes or {}))
        return found

    def samples(self) -> dict[str, float]:
        """name and labels but the engine's own -> value."""
        return {
            " ".join(
                [one.name, *(v for k, v in sorted(one.labels.items()) if k not in ("engine", "model_name", "le"))]
            ): (one.value)
            for family in text_string_to_metric_families(self.telemetry.expose().decode())
            for one in family.samples
        }


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.provider.shutdown()


def a_request(name: str = "r", prompt: int = 40, tokens: int = 5, *, traceparent: str = PARENT, n: int = 1) -> Generate:
    sampling = Sampling(ignore_eos=True, seed=3)
    return Generate(name, "g", [5] * prompt, tokens, sampling, 2**60, n=n, traceparent=traceparent)


def test_a_request_is_a_queue_a_prefill_and_a_decode(traced: Traced) -> None:
    traced.run(a_request(n=2), a_request("untraced", traceparent=""))
    known = {"gen_ai.request.id": "r", "quire.engine": "e0", "quire.continuation": 0}
    (queue,), (prefill,), decodes = (traced.named(name) for name in ("queue", "prefill", "decode"))
    assert queue == {**known, "gen_ai.usage.cache_read.input_tokens": 0}
    # 40 tokens in chunks of 16, from the first step on; five output tokens, the first of them in the prefill's last.
    assert prefill == {**known, "gen_ai.usage.input_tokens": 40, "quire.first_step": 1, "quire.last_step": 3}
    assert [one.pop("quire.continuation") for one in decodes] == [0, 1]
    ended = {"gen_ai.usage.output_tokens": 5, "gen_ai.response.finish_reasons": ("length",)}
    steps = {"quire.first_step": 4, "quire.last_step": 7}
    assert decodes == [{"gen_ai.request.id": "r", "quire.engine": "e0", **ended, **steps}] * 2
    assert traced.named("resume") == []
    traced.spans.clear()
    traced.run(a_request("again"))
    assert traced.named("queue")[0]["gen_ai.usage.cache_read.input_tokens"] == 32


def test_the_state_of_its_trace_is_on_every_span(traced: Traced) -> None:
    traced.run(msgspec.structs.replace(a_request(), tracestate="rojo=1"))
    spans = traced.spans.get_finished_spans()
    assert {span.name for span in spans} == {"queue", "prefill", "decode"}
    assert {span.context.trace_state.to_header() for span in spans} == {"rojo=1"}


def test_what_never_starts_has_a_queue_that_failed(traced: Traced) -> None:
    traced.run(msgspec.structs.replace(a_request(), deadline_ms=1), a_request("long", prompt=500))
    assert [one["error.type"] for one in traced.named("queue")] == ["error", "deadline"]
    assert len(traced.spans.get_finished_spans()) == 2


@pytest.mark.parametrize(("preempt", "swaps"), [("recompute", False), ("swap", True)])
def test_whoever_was_preempted_resumes(preempt: Any, swaps: bool) -> None:
    traced = Traced(blocks=8, config=msgspec.structs.replace(CONFIG, preempt=preempt))
    traced.run(*(a_request(f"r{i}", prompt=20 + i, tokens=60) for i in range(3)))
    resumes, samples = traced.named("resume"), traced.samples()
    assert len(resumes) == samples["quire_preemptions_total"] == samples["quire_preempted_seconds_count"] > 0
    assert all(one["quire.tokens_to_compute"] >= 1 for one in resumes)
    assert len(traced.named("decode")) == 3
    assert bool(samples["quire_swap_preemptions_total"]) is swaps
    assert bool(samples["quire_swapped_bytes_total out"]) is swaps
    assert swaps or samples["quire_recomputed_tokens_total"] > 0
    assert samples["quire_sequences swapped"] == samples["quire_sequences waiting"] == 0
    traced.provider.shutdown()


def test_forced_tokens_and_the_steps_that_they_save_are_counted(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that knows three tokens behind each one."""
    executor = traced.engine.executor
    assert isinstance(executor, ScriptedExecutor)
    collect = executor.collect

    def foresee() -> StepResult:
        result, runs = collect(), executor._decoding.items()
        forced = {slot: [executor.token(sampler, at + i) for i in range(3)] for slot, (sampler, at) in runs}
        return msgspec.structs.replace(result, forced=forced)

    monkeypatch.setattr(executor, "collect", foresee)
    traced.run(a_request(prompt=10, tokens=40))
    samples = traced.samples()
    assert samples["quire_generated_tokens_total"] == 40
    assert 0 < samples["quire_jumped_tokens_total"] < samples["quire_forced_tokens_total"] < 40
    assert traced.engine.core.step + samples["quire_jumped_tokens_total"] <= 42  # two steps in flight


def test_drafts_are_counted_by_source(traced: Traced) -> None:
    executor, drafts = traced.engine.executor, traced.engine.core.drafts
    assert isinstance(executor, ScriptedExecutor)
    request = a_request(prompt=10, tokens=40)
    said = [executor.token(Sampler(request.sampling, 10, []), at) for at in range(40)]
    drafts.drafter = GuessingDrafter(lambda _, known: [*said[len(known) - 10 :][:2], 0])
    drafts.policy = AllDrafts()
    executor.depth = 1
    traced.run(request)
    samples = traced.samples()
    assert samples["quire_generated_tokens_total"] == 40
    assert 0 < samples["quire_accepted_drafts_total own"] < samples["quire_drafted_tokens_total own"]
    assert samples["quire_accepted_drafts_total own"] == 40 - traced.engine.core.step
    assert samples["quire_refused_drafts_total"] >= 0
    load = LoadReport("e0", executor.info).describe(traced.engine.core, 0.0, draining=False, queued=False)
    counts = samples["quire_drafted_tokens_total own"], samples["quire_accepted_drafts_total own"]
    assert load.drafts == {"own": counts, "tenant": (0, 0), "prediction": (0, 0), "head": (0, 0)}
    assert (load.generated_tokens, load.jumped_tokens) == (40, 0)
    drafts.drafter = None
    load = LoadReport("e0", executor.info).describe(traced.engine.core, 0.0, draining=False, queued=False)
    assert load.drafts == {}


def test_what_an_earlier_engine_began_goes_on_in_the_same_trace(traced: Traced) -> None:
    traced.run(Resume(a_request(prompt=10, tokens=6), [[1, 2, 3]]))
    (resume,), (decode,) = traced.named("resume"), traced.named("decode")
    assert resume["quire.tokens_to_compute"] == 13
    assert decode["gen_ai.usage.output_tokens"] == 6
    assert len(traced.spans.get_finished_spans()) == 2
    assert traced.samples()["quire_preempted_seconds_count"] == 0  # it was never preempted


@pytest.mark.perf
def test_recording_takes_a_hundredth_of_a_step() -> None:
    """Of a short one: 1 ms.  On this thread's own clock, so that a busy machine does not matter; with traces off."""
    telemetry, load = Telemetry("e0"), EngineLoad("e0", "m", "f", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    steps, best, rest = 2000, float("inf"), {"was_idle": False, "commands": [], "totals": Totals()}
    marks = [float(i) for i in range(len(PHASES) + 1)]
    records = [
        TurnRecord(
            marks=marks,
            unix_ms=0,
            plan=StepPlan(step),
            running=256,
            result=StepResult(step, [], []),
            load=load,
            count_wasted_slots=lambda: 0,
            **rest,  # type: ignore[arg-type]
        )
        for step in range(steps)
    ]
    for _ in range(5):
        began = time.thread_time()
        for record in records:
            telemetry.observe(record)
        best = min(best, (time.thread_time() - began) / steps)
    print(f"recording a step: {best * 1e6:.2f} us")
    assert best < 10e-6


def test_the_page_says_how_right_the_forecast_was() -> None:
    traced = Traced(config=msgspec.structs.replace(CONFIG, admission="forecast"))
    for i in range(40):
        fourth = Sampling(seed=i, stop_token_ids=[scripted_token(i, 0, 3, INFO.vocab_size)])
        traced.run(Generate(f"r{i}", "g", [5, 6, i + 7], 50, fourth, 1 << 50))
    samples, calibration = traced.samples(), traced.engine.core.admission.forecast.calibration
    for level, judged, within in calibration.table():
        assert samples[f"quire_forecast_outputs_total {level:g}"] == judged
        assert samples[f"quire_forecast_outputs_within_total {level:g}"] == within
    assert calibration.judged[0] >= calibration.within[0] > 0  # the median, once lengths are known
    assert samples["quire_forecast_peaks_total"] == calibration.peaks > 0
    assert samples["quire_forecast_peaks_passed_total"] == calibration.peaks_passed
    assert samples["quire_forecast_bound_blocks_total"] == calibration.bound_blocks
    assert samples["quire_forecast_peak_blocks_total"] == calibration.peak_blocks > 0
    assert samples["quire_pauses_total"] == 0


def test_an_unused_pool_counts_while_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the pool is free, for 4 s with nothing queued, 8 s with a queue and 4 s after it."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    telemetry = Telemetry("e")
    telemetry.load = msgspec.structs.replace(telemetry.load, total_blocks=100, free_blocks=25)
    for seconds, queue_share in ((4, 0.5), (8, 0.0), (4, 0.0)):
        now += seconds
        telemetry.synced(0.001, queue_share, 0)
    assert telemetry.idle_pool_s == pytest.approx(2.0)
    telemetry.load = msgspec.structs.replace(telemetry.load, waiting=1)  # inside the engine
    now += 4
    telemetry.synced(0.001, 0.0, 0)
    assert telemetry.idle_pool_s == pytest.approx(3.0)


def test_the_page_says_what_a_takeover_took() -> None:
    traced = Traced()
    traced.run(a_request())
    assert traced.samples()["quire_start_takeover"] == 0
    traced.telemetry.started({"weights": 0.5, "queue": 0.1}, takeover=True, memory={"weights": 100})
    traced.run(Resume(a_request("again", prompt=10, tokens=6), [[1, 2, 3]]))
    samples = traced.samples()
    assert samples["quire_start_takeover"] == 1
    assert samples["quire_start_seconds weights"] == 0.5
    assert samples["quire_memory_bytes weights"] == 100
    assert samples["quire_start_seconds recompute"] > 0


def aliases(traced: Traced) -> dict[str, Metric]:
    """The families of vLLM's names; each sample has the labels of vLLM's own."""
    families = {
        family.name: family
        for family in text_string_to_metric_families(traced.telemetry.expose().decode())
        if family.name.startswith("vllm:")
    }
    for sample in (sample for family in families.values() for sample in family.samples):
        assert (sample.labels["engine"], sample.labels["model_name"]) == ("e0", "scripted")
    return families


def test_iterations_are_counted_as_vllm_does() -> None:
    """One observation for each step that gave output: a request alone has as many as output tokens."""
    traced = Traced(vllm=True)
    for at in range(3):
        traced.run(a_request(f"r{at}", prompt=37, tokens=6))  # its prompt takes three steps, two without output
    page = traced.samples()
    assert page["vllm:iteration_tokens_total_sum"] == 3 * (37 + 6)
    assert page["vllm:iteration_tokens_total_count"] == 3 * 6


def test_preemptions_are_counted_by_request() -> None:
    traced = Traced(blocks=7, vllm=True)
    traced.run(*(a_request(name, prompt=20, tokens=40) for name in "abc"))
    page, preemptions = traced.samples(), traced.engine.core.report.totals.preemptions
    assert preemptions
    assert page["vllm:request_num_preemptions_sum"] == preemptions == page["vllm:num_preemptions_total"]
    assert page["vllm:request_num_preemptions_count"] == 3


# What `test_every_name_of_vllm_has_the_value_of_what_was_sent` sent.
VALUES = {
    "vllm:spec_decode_num_draft_tokens_total": 0,  # the text of its executor needs no drafter
    "vllm:spec_decode_num_accepted_tokens_total": 0,
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 4 + 2.5,
    "vllm:num_requests_waiting_by_reason capacity": 4 + 2.5 - 1,
    "vllm:num_requests_waiting_by_reason deferred": 1,
    "vllm:num_requests_swapped": 1,
    "vllm:kv_cache_usage_perc": (64 - 48) / 64,
    "vllm:gpu_cache_usage_perc": (64 - 48) / 64,
    "vllm:prompt_tokens_total": 40 + 7 + 40 + 5,  # one prefill for all choices of a prompt
    "vllm:prompt_tokens_cached_total": 32,
    "vllm:prompt_tokens_by_source_total local_compute": 40 + 7 + 8 + 5,
    "vllm:prompt_tokens_by_source_total local_cache_hit": 32,
    "vllm:prompt_tokens_by_source_total external_kv_transfer": 0,
    "vllm:generation_tokens_total": 2 * 5 + 3 + 9 + 2,
    "vllm:prefix_cache_queries_total": 40 + 7 + 40 + 5,
    "vllm:prefix_cache_hits_total": 32,
    "vllm:num_preemptions_total": 0,
    "vllm:request_success_total length": 4,
    "vllm:request_success_total stop": 1,
    "vllm:request_success_total abort": 1,
    "vllm:request_success_total error": 0,
}
SIZES = {  # count and sum
    "vllm:request_prompt_tokens": (4, 40 + 7 + 40 + 5),
    "vllm:request_generation_tokens": (5, 5 + 5 + 3 + 9 + 2),
    "vllm:request_max_num_generation_tokens": (4, 5 + 3 + 9 + 2),
    "vllm:request_prefill_kv_computed_tokens": (4, 40 + 7 + 8 + 5),
    "vllm:request_num_preemptions": (4, 0),
}


def test_every_name_of_vllm_has_the_value_of_what_was_sent() -> None:
    traced = Traced(vllm=True)
    seconds = time.monotonic()
    traced.run(a_request("a", prompt=40, tokens=5, n=2), a_request("b", prompt=7, tokens=3))
    traced.run(a_request("again", prompt=40, tokens=9))  # 32 of its prompt tokens are cached
    stop = Sampling(seed=4, stop_token_ids=[scripted_token(4, 0, 1, INFO.vocab_size)])
    traced.run(Generate("stops", "g", [6] * 5, 50, stop, 2**60), Generate("late", "g", [7], 5, Sampling(), 1))
    seconds = time.monotonic() - seconds
    traced.telemetry.queue_share, traced.telemetry.gated = (
        2.5,
        1,
    )  # share of the queue; waiting for a grammar
    traced.telemetry.load = msgspec.structs.replace(
        traced.telemetry.load, running=3, waiting=4, swapped=1, free_blocks=48
    )
    families = aliases(traced)
    page = {name: value for name, value in traced.samples().items() if name.startswith("vllm:")}
    totals = traced.engine.core.report.totals
    assert totals.cached_prompt_tokens == 32
    expected: dict[str, float] = dict(VALUES)
    for name, (count, total) in SIZES.items():
        expected |= {f"{name}_count": count, f"{name}_sum": total}
    times = {f"vllm:request_{part}_time_seconds": 5 for part in ("prefill", "decode", "inference")}
    times["vllm:request_queue_time_seconds"] = 4
    for name, count in times.items():
        expected[f"{name}_count"] = count
        assert 0 < page.pop(f"{name}_sum") <= count * seconds
    # As vLLM counts: each output token once, each prompt with its first token, also what the cache had of it.
    assert page.pop("vllm:iteration_tokens_total_sum") == (40 + 7 + 40 + 5) + totals.generated_tokens
    assert 0 < page.pop("vllm:iteration_tokens_total_count") <= traced.engine.core.step
    (config,) = families["vllm:cache_config_info"].samples
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"], config.value) == ("16", "64", 1.0)
    page = {name: value for name, value in page.items() if "_bucket" not in name and "_config_info" not in name}
    assert page == pytest.approx(expected)
    described = {row.name for row in VLLM_TABLE}
    assert described == families.keys()
    tested = {re.sub(r"(_total|_count)?( .*)?$", "", name) for name in expected}
    assert {name.removesuffix("_total") for name in described} - tested == {
        "vllm:cache_config_info",
        "vllm:iteration_tokens",
    }
