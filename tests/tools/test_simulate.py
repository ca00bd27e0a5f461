"""The simulator against the engine: what a request log holds is what the simulator predicts, in virtual time."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from quire.engine import loop
from quire.engine.commands import Command, LocalBox
from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, StepPlan, StepResult
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.observers.request_log import RequestLine, RequestLog
from quire.engine.tools import simulate
from quire.engine.tools.simulate import on_time
from quire.engine.tools.step_fit import fit
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import EOS, VOCAB, Job, burst, logged, read_lines
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling

TRUTH = StepTime(fixed=0.012, row=0.0004, prompt_token=0.0001)
BEGAN_MS = 1_700_000_000_000
BLOCKS = 400
CONFIG = EngineConfig(max_seqs=256, step_tokens=1024, canary_every_s=0.0)


class Clock:
    """Seconds that only steps and waits move, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def unix_ms(self) -> int:
        return BEGAN_MS + round(1000 * (self.now - 1000.0))


class Timed(ScriptedExecutor):
    """Steps that take TRUTH, and answers as long as their jobs say."""

    depth = 1

    def __init__(self, jobs: list[Job], clock: Clock) -> None:
        super().__init__(ModelInfo("sim", "sim", VOCAB, 1 << 20, [EOS], 0), BLOCKS)
        self.jobs, self.clock = jobs, clock
        self.engine: Engine

    def token(self, sampler: Sampler, position: int) -> int:
        return EOS if position + 1 == self.jobs[sampler.sampling.seed].output_len else 1

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        prompt_tokens = sum(len(piece.token_ids) for piece in plan.slices)
        self.seconds = TRUTH(self.engine.core.running, prompt_tokens)

    def collect(self) -> StepResult:
        self.clock.now += self.seconds
        return msgspec.structs.replace(super().collect(), step_s=self.seconds)


class Arrivals(LocalBox):
    """An inbox that gives each request at its time, some after a wait in the queue."""

    def __init__(self, jobs: list[Job], clock: Clock) -> None:
        super().__init__(lambda delta: None)
        self.clock = clock
        self.left = sorted(enumerate(jobs), key=lambda pair: -pair[1].at_s - pair[1].claimed_s)

    def drain(self, wait_s: float) -> list[Command]:
        due = self.clock.now - 1000.0
        if wait_s and self.left and (at := self.left[-1][1].at_s + self.left[-1][1].claimed_s) > due:
            due = at
            self.clock.now = 1000.0 + due
        commands: list[Command] = []
        while self.left and self.left[-1][1].at_s + self.left[-1][1].claimed_s <= due:
            number, job = self.left.pop()
            commands.append(self.request(number, job))
        return commands

    def request(self, number: int, job: Job) -> Generate:
        rng = random.Random(number)
        prompt = [2 + i for i in range(job.prefix_len)]
        prompt += [rng.randrange(1 << 20, VOCAB) for _ in range(job.prompt_len - job.prefix_len)]
        sampling = Sampling(seed=number, ignore_eos=job.ends_known)
        queued_ms = BEGAN_MS + round(1000 * job.at_s)
        return Generate(
            *(str(number), "g", prompt, job.max_tokens, sampling, FOREVER_MS), queued_ms=max(1, queued_ms), n=job.n
        )


def measure(path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> list[RequestLine]:
    """Run the jobs through the real engine loop in virtual time; return its request log."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "steady_ms", clock.unix_ms)
    executor, box, log = Timed(jobs, clock), Arrivals(jobs, clock), RequestLog(path, 1 << 24)
    executor.engine = engine = Engine(CONFIG, executor, box, box, observers=[log], clock=clock.unix_ms)
    while box.left or not engine.core.idle:
        engine.turn(1.0 if engine.core.idle else 0.0)
    log.close()
    return [line for line in read_lines(path) if isinstance(line, RequestLine)]


def share(lines: list[RequestLine]) -> float:
    times = [(line.ttft_s or 0.0, line.e2e_s - (line.ttft_s or 0.0), line.output_len) for line in lines]
    return sum(on_time(*each) for each in times) / len(lines)


def predict(lines: list[RequestLine], times: StepTime) -> simulate.Report:
    config = EngineConfig()
    limits = simulate.engine_limits("forecast", itl_stretch=config.itl_stretch, step_target_s=config.step_target_s)
    return simulate.simulate([job for job in map(logged, lines) if job], limits, BLOCKS, step_time=times)


def load(kind: str) -> list[Job]:
    """Jobs of a burst on a small pool; of the steady load no job waits."""
    if kind == "steady":
        return burst(3, base=4.0, peak=4.0, peak_s=20.0, rest_s=10.0)
    jobs = burst(1, base=4.0, peak=13.0, peak_s=20.0, rest_s=8.0, ends_known=kind == "known")
    if kind == "lanes":  # some wait in the queue and others overtake them; a prefix is cached
        rng = random.Random(5)
        jobs = [
            msgspec.structs.replace(
                job, claimed_s=rng.choice((0.0, 0.0, 6.0)), prompt_len=job.prompt_len + 160, prefix_len=160
            )
            for job in jobs
        ]
    if kind == "choices":
        jobs = [msgspec.structs.replace(job, n=1 + 2 * (at % 4 == 0)) for at, job in enumerate(jobs)]
    return jobs


def test_a_log_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing but the log: on-time shares within 3 points, and preemptions within 1 in 1,000 requests."""
    requests = measured = predicted = 0
    shares = dict[str, tuple[float, float]]()
    for kind in ("steady", "known", "unknown", "lanes", "choices"):
        lines = measure(tmp_path / kind, load(kind), monkeypatch)
        times = fit(lines)
        assert times is not None
        report = predict(lines, times)
        shares[kind] = share(lines), report.goodput
        assert (times.fixed, times.row) == pytest.approx((TRUTH.fixed, TRUTH.row), rel=0.05)
        assert times.prompt_token == pytest.approx(TRUTH.prompt_token, rel=0.25)
        if kind != "choices":  # a log has one length for all choices, so their preemptions differ
            requests += len(lines)
            measured += sum(line.preemptions for line in lines)
            predicted += report.preemptions
    for one, other in shares.values():
        assert other == pytest.approx(one, abs=0.03), shares
    assert shares["steady"][0] > 0.9 > 0.6 > shares["known"][0]
    assert requests > 1000
    assert abs(predicted - measured) <= requests / 1000


def test_the_table_has_what_the_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = measure(tmp_path / "log", load("steady")[:60], monkeypatch)
    assert simulate.main(["--trace", str(tmp_path / "log"), "--mode", "forecast", "--kv-blocks", str(BLOCKS)]) == 0
    times, header, measured, predicted = capsys.readouterr().out.splitlines()
    assert times.startswith("a step takes ")
    assert "goodput" in header
    assert measured.split()[:4] == ["measured", str(len(lines)), "0", "0"]
    assert float(measured.split()[-1]) == float(predicted.split("  ")[-2].split()[-1]) == 1.0
    words = ["--trace", str(tmp_path / "log"), "--mode", "forecast", "--step-ms", "500", "0", "0", "--at", "queued"]
    assert simulate.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "forecast"
