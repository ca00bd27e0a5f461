"""Hooks of pytest-xdist: the longest files start first, and long files without dear fixtures are split by function.

A file is a unit for one worker, because its fixtures are shared.  A long unit that starts last runs while the other
workers are idle.  The summary of a run names its dearest files (verdicts.py): enter those from 10 s on here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Seconds on an idle machine of two cores with three workers, roughly.
SECONDS = {
    "tests/system/test_survival.py": 120,
    "tests/executor/test_parallel.py": 100,
    "tests/system/test_serve.py": 90,
    "tests/system/test_supervisor.py": 80,
    "tests/helm/test_runs.py": 80,
    "tests/loadtest/test_replay.py": 80,
    "tests/executor/test_quantised_ranks.py": 70,
    "tests/executor/test_determinism.py": 70,
    "tests/executor/test_demo.py": 60,
    "tests/executor/test_unequal_layers.py": 60,
    "tests/service/output/test_linear_answers.py": 60,
    "tests/system/test_text.py": 60,
    "tests/core/policy/test_forecast.py": 50,
    "tests/core/policy/test_jumps.py": 50,
    "tests/tools/test_models.py": 50,
    "tests/service/delivery/test_admission.py": 50,
    "tests/executor/test_quantised_towers.py": 50,
    "tests/service/grammar/test_json_schema.py": 40,
    "tests/service/http/test_connections.py": 40,
    "tests/executor/test_text_tower.py": 40,
    "tests/executor/test_mixtures.py": 40,
    "tests/executor/test_grammars.py": 40,
    "tests/helm/test_chart.py": 33,
    "tests/executor/test_jumps.py": 33,
    "tests/executor/test_reference_formats.py": 32,
    "tests/executor/test_quantised.py": 30,
    "tests/service/chat_templates/test_forging.py": 25,
    "tests/service/delivery/test_resume.py": 25,
    "tests/wire/test_bus.py": 22,
    "tests/wire/test_redis_errors.py": 21,
    "tests/service/chat_templates/test_history.py": 19,
    "tests/kernels/test_attention.py": 17,
    "tests/executor/test_fused.py": 16,
    "tests/executor/test_worker.py": 16,
    "tests/executor/test_beams.py": 15,
    "tests/service/api/test_tools.py": 13,
    "tests/service/text/test_vocabulary_files.py": 13,
}
PROCESSES_S = 25  # of another file of tests/system, which starts servers
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


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """Take the place of `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # the order is that of the workers' collection
    return LongestFirst(config, log)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items of long files first, the longest at the front; all else stays as it is."""
    return sorted(items, key=lambda item: -seconds(item.nodeid))
