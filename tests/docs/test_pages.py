"""What the pages name exists: options, metrics, commands, files, error codes of the runbook."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from quire.engine.common import settings
from quire.engine.common.removed_options import REMOVED
from quire.engine.config import EngineConfig
from quire.engine.observers.metrics_vllm import VLLM_TABLE
from quire.service.cli import ServeConfig
from quire.service.common.metrics import TABLE as GATEWAY_TABLE
from quire.service.config import GatewayConfig
from quire.service.terminal.options import BenchConfig, ChatConfig, TopConfig

ROOT = Path(__file__).resolve().parents[2]
# Pages of this folder's scope; folder READMEs have checks of their own.
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"])
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
ROOMS = ("quire", "service", "engine", "csrc", "loadtest", "tests", "docs", "grafana", "helm", "examples", ".ci")


def code(name: str) -> str:
    """Return the text of all code spans and code blocks of one page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*blocks, *spans])


def flags_of_commands() -> set[str]:
    """Options that tools take through argparse or a program of tests, by their text."""
    found: set[str] = set()
    for room in ("engine", "loadtest", "tests/system", "service", ".ci"):
        for path in (ROOT / room).rglob("*.py"):
            found |= set(re.findall(r"--[a-z][a-z0-9-]+", path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_option_exists(name: str) -> None:
    programs = (ServeConfig, GatewayConfig, EngineConfig, TopConfig, ChatConfig, BenchConfig)
    options = {option.name for cls in programs for option in settings.options(cls)}
    known = {f"--{option.replace('_', '-')}" for option in options} | {"--config", "--help"} | flags_of_commands()
    known |= {f"--no-{flag[2:]}" for flag in known}
    if name == "CHANGELOG.md":
        known |= set(map(settings.flag_of, REMOVED))
    named = set()
    for line in code(name).splitlines():
        if not re.match(r"\$? ?(curl|docker|helm|kubectl|pip|git)\b", line):
            named |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line))
    # bool options are spelled with underscores in programs that build them from a struct
    assert named <= known, sorted(named - known)


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_exists(name: str) -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*ROOT.glob("service/common/metrics*.py"), *ROOT.glob("engine/observers/metrics*.py")]
    )
    for metric in set(re.findall(r"\bquire_[a-z_]+", code(name))):
        base = re.sub(r"_(total|bucket|sum|count)$", "", metric)
        assert f'"{metric}' in sources or f'"{base}' in sources, metric


@pytest.mark.parametrize("name", NAMES)
def test_every_module_and_make_target_exists(name: str) -> None:
    text = code(name)
    history = name == "CHANGELOG.md"
    for module in set(re.findall(r"python -m ([a-z_][\w.]*)", text)):
        if module.split(".")[0] in ROOMS and not (history and "sim" in module):
            assert importlib.util.find_spec(module) is not None, module
    tools = importlib.import_module("quire.engine.tools.__main__").NAMES
    for tool in set(re.findall(r"python -m quire\.engine\.tools ([a-z][a-z-]*)", text)):
        assert tool in tools, tool
    studies = importlib.import_module("quire.loadtest.studies.__main__").STUDIES
    for study in set(re.findall(r"python -m quire\.loadtest\.studies ([a-z][a-z-]*)", text)):
        assert study in studies, study
    commands = importlib.import_module("quire.loadtest.__main__").COMMANDS
    for command in set(re.findall(r"python -m quire\.loadtest ([a-z][a-z-]*)", text)):
        assert command in commands, command
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z]+)\b", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_result_is_named_by_a_page() -> None:
    """A result that no page names answers no question; of the runs of a burst only the summaries stay."""
    folder = ROOT / "loadtest" / "results"
    pages = [*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/notes/**/*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages if path.name != "CHANGELOG.md")
    results = sorted(folder.rglob("*.json"))
    assert len(results) > 20
    for path in results:
        known = path.parent.relative_to(ROOT) if path.parent != folder else path.name
        assert str(known) in text, path


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_every_path_exists(name: str) -> None:
    for path in set(re.findall(r"(?<![\w./-])((?:\.ci|[a-z]+)/[\w./*-]*\w)", code(name))):
        if path.split("/")[0] in ROOMS and "*" not in path:
            assert (ROOT / path).exists(), path


def test_every_alert_that_operations_names_is_in_the_rules() -> None:
    rules = (ROOT / "grafana" / "alerts.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\[(Quire\w+)\]", page))
    assert named
    for alert in named:
        assert f"alert: {alert}" in rules, alert


def test_every_alias_of_a_metric_is_listed_and_no_other() -> None:
    page = (ROOT / "grafana" / "README.md").read_text(encoding="utf-8")
    table = page.split("| page | names after `vllm:` |")[1].split("\n\n")[0]
    listed = {name.removesuffix("_total") for name in re.findall(r"`(\w+)`", table)}
    rows = [name for row in GATEWAY_TABLE if row.vllm is not None for name in row.vllm.names]
    served = {name.removeprefix("vllm:").removesuffix("_total") for name in [*rows, *(row.name for row in VLLM_TABLE)]}
    assert listed == served
