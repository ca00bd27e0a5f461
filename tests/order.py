"""Hooks of pytest-xdist: the longest files start first, and long files without dear fixtures are split by function.

A file is a unit for one worker, because its fixtures are shared.  A long unit that starts last runs while the other
workers are idle.  The summary of a run names its dearest files (verdicts.py): enter those from 10 s on here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Seconds of a run with three workers on two cores, roughly.
SECONDS = {
    "tests/executor/test_parallel.py": 112,
    "tests/system/test_survival.py": 104,
    "tests/system/test_supervisor.py": 70,
    "tests/service/http/test_page.py": 68,
    "tests/service/delivery/test_resume.py": 62,
    "tests/service/http/test_stalls.py": 60,
    "tests/loadtest/test_replay.py": 58,
    "tests/executor/test_multimodal.py": 51,
    "tests/helm/test_runs.py": 49,
    "tests/system/test_text.py": 46,
    "tests/system/test_admission.py": 45,
    "tests/system/test_ranks.py": 45,
    "tests/system/test_failures.py": 44,
    "tests/system/test_serve.py": 41,
    "tests/test_image.py": 41,
    "tests/executor/test_load_memory.py": 40,
    "tests/system/chaos/test_chaos.py": 40,
    "tests/system/test_hot_prefixes.py": 40,
    "tests/executor/test_recurrent.py": 39,
    "tests/system/test_clocks.py": 38,
    "tests/system/test_takeover.py": 36,
    "tests/loadtest/test_burst.py": 35,
    "tests/executor/test_window_groups.py": 34,
    "tests/system/test_demo.py": 32,
    "tests/executor/test_determinism.py": 30,
    "tests/service/test_process.py": 30,
    "tests/system/test_client.py": 28,
    "tests/system/test_unread_log.py": 28,
    "tests/executor/test_quantised_towers.py": 27,
    "tests/system/test_users_directory.py": 27,
    "tests/executor/test_unequal_layers.py": 26,
    "tests/examples/test_examples.py": 25,
    "tests/grafana/test_dashboards.py": 25,
    "tests/system/test_fleet.py": 25,
    "tests/executor/test_grammars.py": 24,
    "tests/system/chaos/test_rolling.py": 24,
    "tests/core/policy/test_forecast.py": 23,
    "tests/executor/test_quantised_ranks.py": 23,
    "tests/docs/test_project.py": 22,
    "tests/core/policy/test_fairness.py": 21,
    "tests/executor/test_demo.py": 21,
    "tests/loadtest/test_capacity.py": 21,
    "tests/executor/test_reference_formats.py": 20,
    "tests/helm/test_chart.py": 20,
    "tests/core/policy/test_jumps.py": 19,
    "tests/core/test_scheduler.py": 19,
    "tests/executor/test_fp8_experts.py": 19,
    "tests/executor/test_quantised.py": 19,
    "tests/loadtest/test_beams.py": 19,
    "tests/loadtest/test_report.py": 19,
    "tests/service/chat_templates/test_history.py": 19,
    "tests/tools/test_models.py": 19,
    "tests/kernels/test_attention.py": 17,
    "tests/executor/test_fused.py": 16,
    "tests/executor/test_worker.py": 16,
    "tests/executor/test_beams.py": 15,
    "tests/executor/test_jumps.py": 15,
    "tests/executor/test_mixtures.py": 15,
    "tests/executor/test_text_tower.py": 15,
    "tests/service/chat_templates/test_forging.py": 15,
    "tests/service/grammar/test_json_schema.py": 15,
    "tests/service/http/test_connections.py": 15,
    "tests/service/output/test_hostile_answers.py": 15,
    "tests/service/output/test_linear_answers.py": 15,
    "tests/wire/test_bus.py": 15,
    "tests/wire/test_redis_errors.py": 15,
    "tests/service/api/test_tools.py": 13,
    "tests/service/text/test_vocabulary_files.py": 13,
    "tests/loadtest/test_calibrate.py": 12,
    "tests/service/api/test_client_types.py": 12,
    "tests/service/test_deploys.py": 11,
    "tests/system/test_starts.py": 10,
}
CLIENTS = Path(__file__).parent / "clients"  # `make clients` runs them
PROCESSES_S = 25  # any other file of tests/system: it starts servers
SPLIT = {  # a function each for a worker: no fixture that more than one of them uses takes long
    "tests/core/policy/test_jumps.py",
    "tests/executor/test_determinism.py",
    "tests/service/grammar/test_json_schema.py",
    "tests/service/delivery/test_resume.py",
    "tests/system/test_serve.py",
    "tests/system/test_supervisor.py",
    "tests/system/test_survival.py",
    "tests/tools/test_models.py",
}


def seconds(nodeid: str) -> float:
    """Return how long the file of a test takes; less than a second: it is not known."""
    file = nodeid.split("::")[0]
    return SECONDS.get(file, PROCESSES_S if file.startswith("tests/system/") else 0)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Give a worker one file after another, or one function after another of a file of SPLIT."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid.split("[")[0] if file in SPLIT else file


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker begin the imports at another file.

    The first import of a file rewrites its assertions, and keeps the result for the other workers.  If all began at the
    same file, each would rewrite all of them."""
    config = session.config
    if (worker := getattr(config, "workerinput", None)) is None or config.args != config.getini("testpaths"):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    files = sorted(path for folder in config.args for path in (config.rootpath / folder).rglob("test_*.py"))
    for path in in_turn(files, number, count):
        if CLIENTS in path.parents:
            continue
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says why
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def in_turn(files: Sequence[Path], number: int, count: int) -> Sequence[Path]:
    """Return the files from the beginning of this worker's part on, and then those before it."""
    begin = len(files) * number // count
    return [*files[begin:], *files[:begin]]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """Take the place of `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # the order is that of the workers' collection
    return LongestFirst(config, log)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items of long files first, the longest at the front; all else stays as it is."""
    return sorted(items, key=lambda item: -seconds(item.nodeid))
