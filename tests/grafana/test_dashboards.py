"""Dashboards and alerts can't rot: a real Prometheus is asked each of their queries, over a real service under load."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grafana.__main__ import FOLDER, main
from tests.grafana.prometheus import ALERTS, ROOT, Prometheus, scraped, tool

WINDOW = "10s"  # for Grafana's $__rate_interval: ten scrapes
PATIENCE_S = 75.0  # with queries that are still empty


def panel_queries() -> dict[tuple[str, str, str], str]:
    """(board, panel, legend) -> PromQL, out of the files that Grafana reads."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[board["title"], panel["title"], target["legendFormat"]] = target["expr"]
        for annotation in board["annotations"].get("list", ()):
            found[board["title"], annotation["name"], "annotation"] = annotation["expr"]
    return found


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alert_queries() -> dict[tuple[str, str, str], str]:
    """The recorded series under each alert: its threshold is what may well be out of reach."""
    found = {}
    for rule in rules():
        if "alert" in rule:
            series = re.fullmatch(r"(quire:\S+) [<>] [\d.]+", rule["expr"])
            assert series, f"{rule['alert']} must compare a recorded series with a number"
            found["alerts", rule["alert"], rule["expr"]] = series[1]
    return found


def test_the_files_are_what_the_boards_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(check=True) == 0, capsys.readouterr().out + "python -m grafana writes them"


def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(Path(__file__).parent / "alerts_test.yaml")]):
        done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, check=False, timeout=60)
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
    """What each query answers, asked until none is empty or patience ends."""
    answers: dict[tuple[str, str, str], list[float]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for name, query in queries.items():
            if not answers.get(name):
                answers[name] = prometheus.values(query.replace("$__rate_interval", WINDOW))
        if all(answers.values()) or time.monotonic() > deadline:
            return answers
        time.sleep(0.5)


@pytest.mark.system
@pytest.mark.timeout(240)
def test_no_query_is_empty_under_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    queries = panel_queries() | alert_queries()
    with scraped(checkpoint("llama"), tmp_path) as (deployment, prometheus), deployment.loaded():
        answers = ask(prometheus, queries)
    for (board, panel, legend), values in answers.items():
        shown = " ".join(f"{value:.4g}" for value in values[:4]) + (" ..." if len(values) > 4 else "")
        print(f"| {board} | {panel} | {legend or panel} | {shown} |")
    assert [name for name, values in answers.items() if not values] == []
