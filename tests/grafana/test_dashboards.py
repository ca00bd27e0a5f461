"""Every query of the dashboards and alerts has an answer from a real Prometheus that scrapes a service under load."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.__main__ import FOLDER, main
from tests.grafana.prometheus import ALERTS, Prometheus, scraped, tool
from tests.pace import patience
from tests.system.processes import ROOT

WINDOW = "10s"  # for Grafana's $__rate_interval: ten scrapes
LIMIT_S = 150.0  # for queries without an answer
# (panel or alert, legend or expression) of what a healthy service under this load does not count.  All other queries
# must have a value that is not 0: a counter that nothing increments has a value too.
MAY_STAY_ZERO = {
    # The scripted executor has no drafter.
    ("Share of drafts accepted", "{{source}}"),
    ("Drafts of speculative decoding", "computed: {{source}}"),
    ("Drafts of speculative decoding", "accepted: {{source}}"),
    ("Drafts of speculative decoding", "refused: they would not have paid"),
    # Faults: an engine's death, a lost token, a failed step, an accounting error, a frozen reader.
    ("Tokens lost", "Tokens lost"),
    ("Tokens lost, tokens repeated", "lost"),
    ("Tokens lost, tokens repeated", "repeated"),
    ("Resumed answers", "{{gateway}}"),
    ("Failed steps", "{{engine}}"),
    ("Log lines dropped by gateways", "{{gateway}}"),
    ("Log lines dropped by engines", "{{engine}} {{log}}"),
    ("Audits, and accounting errors found", "error: {{kind}}"),
    ("Engines lost, and their requests", "engines lost without a drain"),
    ("Engines lost, and their requests", "requests resumed on another engine"),
    ("Engines lost, and their requests", "requests in quarantine"),
    ("Backlog of slow readers", "{{gateway}}"),
    ("QuireEngineLeaseLost", "quire:engine_leases_lost:increase5m > 0"),
    ("QuireTokensLost", "quire:tokens_lost:increase5m > 0"),
    ("QuireStepFailures", "quire:step_failures:increase5m > 0"),
    ("QuireAccountingWrong", "quire:audit_alarms:increase5m > 0"),
    ("QuireCanary", "quire:canary_alarms:increase15m > 0"),
    # One grammar is compiled, at the start, and requests hold it all the time.
    ("Grammars", "waiting"),
    ("Memory of kept grammars", "{{engine}}"),
    ("Grammars compiled and evicted", "{{result}}"),
    ("Grammars compiled and evicted", "evicted"),
    # No request names a LoRA adapter.
    ("LoRA adapters", "in slots"),
    ("LoRA adapters", "in host memory, {{state}}"),
    ("LoRA adapters", "sequences that wait for a load"),
    ("Memory of LoRA adapters", "{{state}}"),
    ("Loads of LoRA adapters", "{{result}}"),
    ("Loads of LoRA adapters", "evicted"),
    ("Time of a load of a LoRA adapter", "mean"),
    ("Requests by LoRA adapter", "{{adapter}}"),
    ("Output tokens by LoRA adapter", "{{adapter}}"),
    # The accounting is checked when an engine is idle, and under this load none is.
    ("Audits, and accounting errors found", "audits"),
    # The canary runs on an idle engine, and the scripted executor has no logits to compare.
    ("Canary runs, by outcome", "{{outcome}}"),
    ("Difference of the canary's last run", "{{engine}}"),
    ("Time of the canary", "{{engine}}"),
    # The scripted executor keeps no keys and values.
    ("Bytes of keys and values, by group of layers", "{{group}}, held"),
    ("Bytes of keys and values, by group of layers", "{{group}}, cached"),
    # No prefix was hot before the start, and the scripted executor has no memory to swap.
    ("Tokens computed by the prefix warm-up", "{{engine}}"),
    ("Duration of the prefix warm-up", "{{engine}}"),
    ("Hot prefixes computed by the prefix warm-up", "{{engine}}"),
    # The model has no recurrent layers.
    ("Prompt tokens", "in cached blocks, computed again"),
    ("Checkpoints of recurrent state", "that a prompt can begin with"),
    ("Checkpoints of recurrent state", "written per second"),
    ("Checkpoints of recurrent state", "overwritten per second"),
    ("Engines that drain", "{{engine}}"),
    ("Preemptions and what they cost", "of them, to the host's memory"),
    ("KV blocks to the host's memory and back", "{{direction}}"),
    # One engine alone claims the queue in its order.
    ("Requests claimed, by what the engine held of their prefix", "its beginning"),
    ("Requests claimed, by what the engine held of their prefix", "nothing, after others had the chance"),
    # Without admission control (the load of this test) no forecast decides, and the pool has no free blocks.
    ("Outputs no longer than predicted", "{{quantile}}"),
    ("Paused sequences", "{{engine}}"),
    ("Prompt tokens: queued, and room for them", "room"),
    ("Preemptions and what they cost", "of them, for a tenant below its share"),
}


def panel_queries() -> dict[tuple[str, str, str], str]:
    """Return (board, panel, legend) -> PromQL of the files that Grafana reads."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[board["title"], panel["title"], target["legendFormat"]] = target["expr"]
        for annotation in board["annotations"].get("list", ()):
            found[board["title"], annotation["name"], "annotation"] = annotation["expr"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alert_queries() -> dict[tuple[str, str, str], str]:
    """Return the recorded series of each alert.  Its threshold is left out: a healthy service does not reach it."""
    found = {}
    for rule in rules():
        if "alert" in rule:
            series = re.fullmatch(r"(quire:\S+) [<>] [\d.]+", rule["expr"])
            assert series, f"{rule['alert']} must compare a recorded series with a number"
            found["alerts", rule["alert"], rule["expr"]] = series[1]
    return found


def test_every_exception_names_a_query() -> None:
    assert {name[1:] for name in panel_queries() | alert_queries()} >= MAY_STAY_ZERO


@pytest.mark.parametrize(("values", "enough"), [([], False), ([0.0, 0.0], False), ([0.0, 0.1], True)])
def test_zeros_prove_nothing_where_something_must_be_counted(values: list[float], enough: bool) -> None:
    assert proved(("board", "Preemptions and what they cost", "preemptions"), values) is enough
    assert proved(("board", "Failed steps", "{{engine}}"), values) is bool(values)


def test_the_chart_reads_these_files() -> None:
    """Alerts and dashboards have one source: the chart's are links to it."""
    for name in ("alerts.yaml", "dashboards"):
        link = ROOT / "helm" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / "grafana" / name


def test_the_files_are_what_the_boards_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(check=True) == 0, capsys.readouterr().out + "python -m grafana writes them"


def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(Path(__file__).parent / "alerts_test.yaml")]):
        done = subprocess.run(
            [tool("promtool"), *words], capture_output=True, text=True, check=False, timeout=patience(60)
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_the_unit_tests_and_has_a_runbook() -> None:
    tested = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case.get("exp_alerts")}
    quiet = {case["alertname"] for test in tested for case in test["alert_rule_test"] if not case.get("exp_alerts")}
    readme = (ROOT / "grafana" / "README.md").read_text()
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert fired == quiet == alerts.keys()
    for name, rule in alerts.items():
        assert f"### {name}\n" in readme
        assert rule["annotations"]["runbook"] == f"grafana/README.md#{name.lower()}"


def ask(prometheus: Prometheus, queries: dict[tuple[str, str, str], str]) -> dict[tuple[str, str, str], list[float]]:
    """Return each query's values: the first that are proof enough, or the last before LIMIT_S ends."""
    answers: dict[tuple[str, str, str], list[float]] = {}
    deadline = time.monotonic() + patience(LIMIT_S)
    while True:
        for name, query in queries.items():
            if not proved(name, answers.get(name, [])):
                answers[name] = prometheus.values(query.replace("$__rate_interval", WINDOW))
        if all(proved(*answer) for answer in answers.items()) or time.monotonic() > deadline:
            return answers
        time.sleep(0.2)


def proved(name: tuple[str, str, str], values: list[float]) -> bool:
    """Return whether the query has values, and not only zeros: a counter that nothing increments has a value too."""
    _, panel, legend = name
    return bool(values) and (any(values) or (panel, legend) in MAY_STAY_ZERO)


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(500)
def test_no_query_is_empty_under_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    queries = panel_queries() | alert_queries()
    with scraped(checkpoint("llama"), tmp_path) as (deployment, prometheus), deployment.loaded():
        answers = ask(prometheus, queries)
    for (board, panel, legend), values in answers.items():
        shown = " ".join(f"{value:.4g}" for value in values[:4]) + (" ..." if len(values) > 4 else "")
        print(f"| {board} | {panel} | {legend or panel} | {shown} |")
    assert [name for name, values in answers.items() if not proved(name, values)] == []
